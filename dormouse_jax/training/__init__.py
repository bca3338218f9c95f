"""What `python -m dormouse_jax.train` and `python -m dormouse_jax.generate` are made of."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class UsageError(Exception):
    """What a user can put right: its message is all that the command prints."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line each, and not a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def command(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator that turns an error that a user can put right into one line on stderr and exit status 2."""

    def decorate(main):
        @functools.wraps(main)
        def run(*args: Any) -> None:
            try:
                main(*args)
            except (UsageError, NotImplementedError) as error:  # the latter of an implementation that was asked for
                print(f"{name}: {error}", file=sys.stderr)
                sys.exit(2)

        return run

    return decorate
