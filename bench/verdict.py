"""The verdict on our kernels over a folder of results: losses first, then the geometric mean, the worst case, wins.

    python -m bench.verdict bench/results

Ratios are recomputed from the raw samples, always within one run, on the clock the row is judged by: our arm over the
fastest correct arm that is not ours.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import cli, report, results, stats
from bench.spec import MODE_TITLES, UsageError


def base(arm: str) -> str:
    """`pallas#2`, `pallas:tf32` -> `pallas`."""
    return arm.partition("#")[0].partition(":")[0]


def verdicts(documents: Sequence[tuple[pathlib.Path, Mapping[str, Any]]], ours: str) -> list[dict[str, Any]]:
    """One entry for each of our rows: what it took, what the fastest other took, ratio, verdict, device."""
    out = []
    for path, document in documents:
        for members in results.group(document["rows"]).values():
            mine = [row for row in members if base(row["arm"]) == ours and "#" not in row["arm"]]
            others = [row for row in members if not row.get("ours")]
            out += [_entry(row, others, document, path) for row in mine]
    return sorted(out, key=_rank)


def repeats(documents: Sequence[tuple[pathlib.Path, Mapping[str, Any]]]) -> list[tuple[Mapping[str, Any], dict, str]]:
    """Arms that were measured twice in one run (`pallas`, `pallas#2`): the second row, its ratio to the first, and the
    verdict, which says what the method makes of no difference at all."""
    out = []
    for _, document in documents:
        for members in results.group(document["rows"]).values():
            first = {row["arm"]: row for row in members if row["status"] == "OK"}
            for row in first.values():
                name, again, _ = row["arm"].partition("#")
                clock = stats.primary(row)
                if again and name in first and clock and first[name]["times"].get(clock):
                    ratio = stats.against(row, first[name], clock)
                    out.append((row, ratio, stats.compare(ratio)))
    return out


def _entry(row: dict[str, Any], others: list[dict[str, Any]], document: Mapping[str, Any], path: pathlib.Path):
    entry: dict[str, Any] = {
        "row": row,
        "device": document["device"]["kind"],
        "path": path,
        "ratio": None,
        "best": None,
    }
    entry["verdict"] = row["status"]
    clock = stats.primary(row)
    if row["status"] == "OK" and clock:
        best = stats.fastest(others, clock)
        entry["clock"] = clock
        if best is None:
            entry["verdict"] = "ALONE"
        else:
            entry["best"] = best
            entry["ratio"] = stats.against(row, best, clock)
            entry["verdict"] = stats.compare(entry["ratio"])
    return entry


def _rank(entry: Mapping[str, Any]) -> tuple[int, float]:
    """Losses first, the worst of them first."""
    order = (*stats.VERDICTS, "ALONE")
    return order.index(entry["verdict"]), -(entry["ratio"]["median"] if entry["ratio"] else 0.0)


def families(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(operator, mode) -> geometric mean of the ratios, worst ratio and its case, wins, ties, losses, unmeasured, n."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        row = entry["row"]
        family = out.setdefault((row["op"], row["mode"]), {"ratios": [], "verdicts": []})
        family["verdicts"].append(entry["verdict"])
        if entry["ratio"]:
            family["ratios"].append((entry["ratio"]["median"], row["case"]))
    for family in out.values():
        values = [ratio for ratio, _ in family["ratios"]]
        family["geomean"] = stats.geomean(values)
        family["worst"] = max(family["ratios"], default=None)
        family["wins"] = family["verdicts"].count("FASTER")
        family["ties"] = family["verdicts"].count("TIE")
        family["losses"] = sum(family["verdicts"].count(v) for v in ("SLOWER", "WRONG", "IMPOSSIBLE"))
        family["n"] = len(family["verdicts"])
    return out


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for name in ("operator", "case", "mode", "arm", "err", "worst grad", "ms", "best other", "ms", "ratio", "%fl"):
        out.add_column(name, justify="right" if name in ("err", "ms", "ratio", "%fl") else "left", no_wrap=True)
    out.add_column("verdict", no_wrap=True)
    for entry in entries:
        row, best = entry["row"], entry["best"]
        clock = entry.get("clock")
        err, grad, _ = report.error_cells(row, report.outputs_of(row))
        out.add_row(
            row["op"],
            row["case"],
            row["mode"],
            report.arm_name(row),
            err,
            grad,
            report.number(row["times"][clock]["median"]) if clock else "-",
            report.arm_name(best) if best else "-",
            report.number(best["times"][clock]["median"]) if best else "-",
            report.with_interval(entry["ratio"]),
            f"{100 * row['floor_share']:.0f}" if row.get("floor_share") else "-",
            Text(entry["verdict"], style=report.COLORS.get(entry["verdict"], "default")),
        )
    return out


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise UsageError("usage: python -m bench.verdict DIR_OR_FILE")
    documents = results.load_folder(pathlib.Path(argv[1]))
    entries = verdicts(documents, flags.FLAGS.ours)
    if not entries:
        raise UsageError(f"{argv[1]}: no row of arm {flags.FLAGS.ours!r}")
    console = Console(width=cli.WIDTH, highlight=False)
    devices = sorted({entry["device"] for entry in entries})
    dates = sorted({document["device"]["date"] for _, document in documents})
    clocks = sorted({stats.CLOCK_TITLES[e["clock"]] for e in entries if e.get("clock")})
    console.print(
        f"{', '.join(devices)}; measured {', '.join(dates)}; times: {', '.join(clocks) or 'none'}", markup=False
    )
    if not all(document["device"]["gpu"] for _, document in documents):
        console.print("Some results have no GPU behind them: their times mean nothing.", style="bold")
    console.print(table(entries))
    console.print()
    for (op, mode), family in families(entries).items():
        worst = f"worst {family['worst'][0]:.2f} ({family['worst'][1]})" if family["worst"] else "nothing to compare"
        console.print(
            f"{op}, {MODE_TITLES.get(mode, mode)}: geometric mean of time ratios {family['geomean']:.3f}, {worst}, "
            f"wins {family['wins']} / {family['n']}, ties {family['ties']}, losses {family['losses']}",
            markup=False,
        )
    for row, ratio, verdict in repeats(documents):
        name = f"{row['op']} {row['case']} {row['mode']}: {row['arm']} against itself"
        console.print(f"{name} {report.with_interval(ratio)} {verdict}", markup=False)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("ours", "pallas", "The arm that the verdict is on.")
    cli.run(main)
