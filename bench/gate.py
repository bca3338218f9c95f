"""Fails when results are worse than a stored baseline of the same device: slower, less accurate, or larger.

    python -m bench.gate out --baseline bench/results/kda.json

A row fails when its time grew by more than the noise (the half-widths of both 95 % intervals, at least 3 %), when an
error grew by more than 10 % or its memory by more than 1 %, or when it is no longer OK. A row of ours that is missing
fails too; a missing row of anyone else is only mentioned. Exit status: 0 pass, 1 fail, 2 nothing to compare.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from bench import cli, report, results, stats
from bench.spec import UsageError

ERROR_GROWTH = 1.10
MEMORY_GROWTH = 1.01
_MEMORY_SLACK = 64 << 10  # bytes: allocators round


def _median(summary: Mapping[str, Any]) -> float:
    """The larger of the stored median and that of the samples: neither may have been edited alone."""
    return max(summary["median"], float(np.median(summary["samples"])))


def _half_width(summary: Mapping[str, Any]) -> float:
    middle = float(np.median(summary["samples"]))
    return max(summary["high"] - middle, middle - summary["low"], 0.0) / middle if middle else 0.0


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """What is worse in `new`, in words; [] when nothing is."""
    if old["status"] != "OK":
        return []
    if new["status"] != "OK":
        return [f"{new['status']}: {new.get('reason', '')}"]
    problems = []
    clock = stats.primary(old)
    if clock and new["times"].get(clock):
        before, after = old["times"][clock], new["times"][clock]
        ratio = _median(after) / _median(before)
        noise = max(stats.TIE_BAND, _half_width(after) + _half_width(before))
        if ratio > 1 + noise:
            problems.append(
                f"{stats.CLOCK_TITLES[clock]} {report.number(_median(before))} -> {report.number(_median(after))} ms, "
                f"{100 * (ratio - 1):.1f} % slower (noise {100 * noise:.1f} %)"
            )
    elif clock:
        problems.append(f"no {stats.CLOCK_TITLES[clock]} time any more")
    for name, error in old["errors"].items():
        now = new["errors"].get(name)
        if now is None:
            problems.append(f"no error of {name} any more")
        elif now["rms"] > error["rms"] * ERROR_GROWTH:
            problems.append(f"error of {name} {error['rms']:.2e} -> {now['rms']:.2e}")
    before, after = old.get("memory_bytes"), new.get("memory_bytes")
    if before is not None and after is not None and after > before * MEMORY_GROWTH + _MEMORY_SLACK:
        problems.append(f"memory {before / 2**20:.1f} -> {after / 2**20:.1f} MiB")
    return problems


def _index(documents: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    return {results.key(row): row for document in documents for row in document["rows"]}


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise UsageError("usage: python -m bench.gate DIR_OR_FILE --baseline FILE")
    if not flags.FLAGS.baseline:
        raise UsageError("--baseline: names no file")
    new = [document for _, document in results.load_folder(pathlib.Path(argv[1]))]
    old = [document for _, document in results.load_folder(pathlib.Path(flags.FLAGS.baseline))]
    kinds = [sorted({document["device"]["kind"] for document in side}) for side in (new, old)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"results of {', '.join(kinds[0])} cannot be held against a baseline of {', '.join(kinds[1])}")
    console = Console(width=cli.WIDTH, highlight=False)
    rows, failed, compared, absent = _index(new), 0, 0, []
    for key, before in _index(old).items():
        name = f"{before['op']} {before['case']} {before['mode']} {before['arm']}"
        after = rows.get(key)
        if after is None:
            if before.get("ours") and before["status"] == "OK":
                console.print(f"FAIL {name}: missing", style="red", markup=False)
                failed += 1
            elif before["status"] == "OK":
                absent.append(name)
            continue
        compared += 1
        problems = compare(after, before)
        failed += bool(problems)
        for problem in problems:
            console.print(f"FAIL {name}: {problem}", style="red", markup=False)
    if absent:
        console.print(f"not in these results: {', '.join(absent)}", style="dim", markup=False)
    if not compared and not failed:
        raise UsageError("no row of the baseline is among the results")
    console.print(f"{compared} rows compared, {failed} failed", style="bold")
    return 1 if failed else 0


if __name__ == "__main__":
    flags.DEFINE_string("baseline", None, "Result file (or folder) to hold the new results against.")
    cli.run(main)
