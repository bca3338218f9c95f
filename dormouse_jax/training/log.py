"""The record of a run: one JSON object a line, and a plot of the losses in it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any


class Log:
    """Lines of JSON in a file, each with a "kind" and a "step": "start", "train", "eval" and "speed".

    A "train" line of step n has the loss of update n, so of the parameters before it; an "eval" line of step n that of
    the parameters after n updates. Losses are in nats a byte.

    Args:
      path: the file.
      keep: the step up to which lines that are there already stay: what a killed run wrote after its last checkpoint
        is computed again. None keeps none.
    """

    def __init__(self, path: pathlib.Path, keep: int | None):
        lines = [] if keep is None else [line for line in read(path) if line["step"] <= keep]
        beside = path.with_name(path.name + ".new")
        beside.write_text("".join(map(_text, lines)))
        os.replace(beside, path)
        self.path, self._file = path, path.open("a")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(_text({"kind": kind, "step": step, **values}))

    def flush(self) -> None:
        """Returns when all lines are on the disk, so that no checkpoint is ahead of the log."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line) + "\n"


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that was cut off is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def plot(lines: Iterable[Mapping[str, Any]], entropies: Mapping[str, float], path: pathlib.Path) -> None:
    """Draws the losses of a log's lines, and the entropies beside them, into a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    lines = list(lines)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind, key, label, marker in (("train", "loss", "training", ""), ("eval", "validation_loss", "validation", ".")):
        chosen = [line for line in lines if line["kind"] == kind]
        axes.plot(
            [line["step"] for line in chosen], [line[key] for line in chosen], label=label, marker=marker, linewidth=0.8
        )
    for (name, value), color in zip(entropies.items(), ("tab:red", "tab:green"), strict=True):
        axes.axhline(value, linestyle="--", linewidth=1, color=color, label=f"{name} entropy {value:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("nats a byte")
    axes.legend()
    axes.grid(alpha=0.3)
    beside = path.with_name(path.name + ".new")
    figure.savefig(beside, dpi=120, format="png")
    os.replace(beside, path)
