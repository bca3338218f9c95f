"""What the rows of many cases come to: geometric means a family (an operator at a dtype) and mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import report, stats

OURS = "pallas"
PEERS = {
    "eager": ("torch_eager",),
    "compile": ("torch_compile",),
    "torch": ("torch_eager", "torch_compile", "torch_compile_max"),
    "xla": ("xla",),
}
COLUMNS = ("family", "mode", "cases", *PEERS, "worst", "memory", "ULP out", "ULP grad")
LEGEND = (
    "eager, compile, torch (the fastest of PyTorch's), xla: geometric mean of its time over ours, above 1 is a win (of "
    "as many cases, where not all have both); worst: the least of the fastest other's time over ours; memory: peak "
    "bytes, inputs and outputs included, eager's over ours; ULP: max|err| / (RMS(ref) eps(dtype)) of ours / eager, of "
    "the output and of the worst gradient, geometric means."
)
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fwd": "fwd", "fwdbwd": "fwd+bwd"}


def table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Cells under COLUMNS, one tuple an operator, dtype and mode with correct rows of ours."""
    cases: dict[tuple[str, str, str], dict[tuple[str, str], dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        family = cases.setdefault((row["op"], str(row["params"].get("dtype", "")), row["mode"]), {})
        family.setdefault((row["case"], str(row["params"])), {})[row["arm"]] = row
    return [_cells(key, list(members.values())) for key, members in cases.items()]


def _cells(key: tuple[str, str, str], cases: list[dict[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    op, dtype, mode = key
    timed = [arms for arms in cases if _time(arms.get(OURS)) is not None]
    speed = [[s for arms in timed if (s := _speed(arms, peers)) is not None] for peers in PEERS.values()]
    others = [s for arms in timed if (s := _speed(arms, [arm for arm in arms if arm != OURS])) is not None]

    def mean(values: list[float], digits: int = 2) -> str:
        few = f" ({len(values)})" if len(values) < len(timed) else ""
        return f"{stats.geomean(values):.{digits}f}{few}" if values else "-"

    def both(find: Any) -> list[tuple[Any, Any]]:
        pairs = [(find(arms[OURS]), find(arms["torch_eager"])) for arms in timed if "torch_eager" in arms]
        return [(ours, eager) for ours, eager in pairs if ours and eager]

    def ulp(output: bool) -> str:
        pairs = both(lambda row: _ulp(row, output))
        return (
            f"{stats.geomean([ours for ours, _ in pairs]):.1f} / {mean([eager for _, eager in pairs], 1)}"
            if pairs
            else "-"
        )

    memory = [eager / ours for ours, eager in both(_peak)]
    return (
        *(f"{op} {_SHORT.get(dtype, dtype)}".strip(), _SHORT.get(mode, mode)),
        f"{len(timed)}" + (f" of {len(cases)}" if len(timed) < len(cases) else ""),
        *map(mean, speed),
        *(f"{min(others):.2f}" if others else "-", mean(memory), ulp(True), ulp(False)),
    )


def _time(row: Mapping[str, Any] | None) -> float | None:
    clock = stats.primary(row) if row and row["status"] == "OK" else None
    return row["times"][clock]["median"] if row and clock else None


def _speed(arms: Mapping[str, Mapping[str, Any]], peers: Sequence[str]) -> float | None:
    """Time of the fastest of these peers over ours."""
    times = [t for peer in peers if (t := _time(arms.get(peer))) is not None]
    ours = _time(arms[OURS])
    return min(times) / ours if times and ours else None


def _peak(row: Mapping[str, Any]) -> float | None:
    beyond = row.get("memory_bytes")
    return None if beyond is None else row["reads"] + row["writes"] + beyond


def _ulp(row: Mapping[str, Any], output: bool) -> float:
    own = report.outputs_of(row)
    found = [e["ulp"] for name, e in (row.get("errors") or {}).items() if (name in own) == output]
    return max((u for u in found if math.isfinite(u)), default=0.0)


def print_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The table on a terminal, and a line for every row that is wrong, not measured or slower than some other."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for name in COLUMNS:
        out.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for cells in table(rows):
        out.add_row(*cells)
    console.print(out)
    console.print(LEGEND, style="dim", markup=False)
    for row in rows:
        if row["status"] != "OK" or (row["arm"] == OURS and row["verdict"] == "SLOWER"):
            ratio = f" {report.with_interval(row['ratio'])} {row['ratio']['against']}" if row.get("ratio") else ""
            text = f"{row['case']} {row['mode']} {row['arm']}: {row['verdict']}{ratio} {row['reason']}"
            console.print(f"  {text[: console.width - 2]}", markup=False, style="dim")
