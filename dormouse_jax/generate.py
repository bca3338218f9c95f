"""Continues a text with a decoder that `python -m dormouse_jax.train` has trained.

    python -m dormouse_jax.generate DIR [--prompt TEXT] [--tokens N] [--temperature X] [--seed N]

DIR is the --out of the training. The prompt is read at once; what follows is decoded byte by byte from a state of one
size, however long the text.
"""

from __future__ import annotations

import argparse
import codecs
import pathlib
import sys

from dormouse_jax.kda_arguments import IMPLEMENTATIONS
from dormouse_jax.training import OneLineParser, UsageError, command


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "dormouse_jax.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=pathlib.Path, metavar="DIR", help="folder of the run")
    add("--prompt", default="def ", metavar="TEXT", help="what is continued (default 'def ')")
    add("--tokens", type=int, default=400, metavar="N", help="bytes to add (default 400)")
    add("--temperature", type=float, default=0.8, metavar="X", help="0 for the likeliest byte always (default 0.8)")
    add("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    add("--implementation", choices=IMPLEMENTATIONS, help="of the operators (default: the best for the device)")
    return parser


@command("dormouse_jax.generate")
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    prompt = args.prompt.encode()
    if not prompt:
        raise UsageError("--prompt must have at least one byte")
    if args.tokens < 1:
        raise UsageError(f"--tokens must be at least 1, got {args.tokens}")
    if not 0 <= args.temperature < float("inf"):
        raise UsageError(f"--temperature must be a number >= 0, got {args.temperature}")
    try:
        from dormouse_jax.training.decoding import Generator
    except ImportError as error:
        raise UsageError(f"{error.name} is not there; the extra 'train' of dormouse_jax installs it") from error

    # Bytes need not be text, and a character may have several.
    text = codecs.getincrementaldecoder("utf-8")("replace")
    generator = Generator.of_run(args.folder, implementation=args.implementation)
    print(args.prompt, end="", flush=True)
    for part in generator(prompt, args.tokens, temperature=args.temperature, seed=args.seed):
        print(text.decode(part), end="", flush=True)
    print(text.decode(b"", final=True))
    print(f"{args.tokens} bytes, {generator.tokens_per_second:,.0f} a second", file=sys.stderr)


if __name__ == "__main__":
    main()
