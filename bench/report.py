"""Tables and headers on the terminal, within 120 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import results, stats
from bench.spec import MODE_TITLES

COLORS = {
    "FASTER": "green",
    "TIE": "cyan",
    "SLOWER": "red",
    "AMBIGUOUS": "yellow",
    "WRONG": "bold red",
    "IMPOSSIBLE": "bold magenta",
    "NOT MEASURED": "dim",
    "ALONE": "default",
}
_DEFINITIONS = """\
cold, warm: device time of one call, the sum of its kernels' durations, with the L2 flushed by a kernel that writes 4x
its size, and called back to back; median over rounds. Clocks: JAX by CUPTI, torch by its profiler.
An arm's products have the inputs' own precision (float32-accurate, or 16 bit) unless its name says otherwise.
wall: host clock from call to results ready. bwd: the difference between forward + backward and forward, by name only.
MiB: bytes beyond inputs and outputs (XLA's temporaries, torch's peak). krn/al: kernels launched, allocations.
cmp s: seconds to compile, a self-tuning arm's tuner included (+ seconds of tuning where the arm tells them apart).
err: RMS error over RMS of the fp64 oracle; ULP: max|err| / (RMS(ref) eps(dtype)). The worst gradient is named.
floor: compulsory bytes over the copy bandwidth (or operations over the matmul rate), as measured here just now.
ratio: time over the fastest correct other arm's, paired by round. ±: 95 % interval. TIE: interval inside +-3 %."""


def print_header(console: Console, document: Mapping[str, Any], definitions: str = _DEFINITIONS) -> None:
    device = document["device"]
    console.rule(f"[bold]{document['command']}"[: console.width - 4])
    console.print(definitions, style="dim", markup=False)
    if not device["gpu"]:
        console.print("NO GPU: kernels run in interpret mode, accuracy is real, the times mean nothing.", style="bold")
    where = f"{device['kind']}, {device['cores']} cores" + (f", driver {device['driver']}" if device["driver"] else "")
    console.print(f"{where}, {device['date']}, commit {device['commit'] or 'unknown'}", markup=False)
    console.print(", ".join(f"{k} {v}" for k, v in device["versions"].items()), markup=False)
    _print_state(console, "before", device.get("state_before") or {})


def _print_state(console: Console, when: str, state: Mapping[str, Any]) -> None:
    if state:
        console.print(
            f"{when}: SM {state.get('clocks.sm')} MHz (max {state.get('clocks.max.sm')}), memory "
            f"{state.get('clocks.mem')} MHz, {state.get('temperature.gpu')} C, {state.get('power.draw')} W, "
            f"clocks held by: {', '.join(state.get('throttle', [])) or 'nothing'}",
            markup=False,
        )


def print_rooflines(console: Console, document: Mapping[str, Any]) -> None:
    probed = document["rooflines"]
    if not probed:
        return
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in probed["flops"].items())
    l2 = f", L2 {probed['l2_bytes'] / 2**20:.0f} MiB" if probed.get("l2_bytes") else ""
    console.print(f"roofline ({probed['how']}): copy {probed['bandwidth'] / 1e12:.3g} TB/s, {rates}{l2}", markup=False)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits without an exponent where that is short."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "inf" if value > 0 else "nan"
    if value == 0:
        return "0"
    if value < 0:
        return "-" + number(-value, digits)
    if value >= 10**digits or value < 1e-4:
        return f"{value:.0f}" if value >= 10**digits else f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def scientific(value: float) -> str:
    """ "1.2e-7": two digits, no zeros in the exponent."""
    if not math.isfinite(value):
        return number(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def arm_name(row: Mapping[str, Any]) -> str:
    """The arm, with the precision of its products where that is not the inputs' own."""
    natural = "fp32" if row["params"].get("dtype", "float32") == "float32" else "16bit"
    return (
        row["arm"]
        if row["precision"] == natural or row["precision"] in row["arm"]
        else f"{row['arm']} {row['precision']}"
    )


def error_cells(row: Mapping[str, Any], outputs: Sequence[str]) -> tuple[str, str, str]:
    """(error of the output, error of the worst gradient with its name, largest ULP)."""
    errors = row.get("errors") or {}
    if not errors:
        return "-", "-", "-"
    own = [errors[name]["rms"] for name in errors if name in outputs]
    grads = {name: e["rms"] for name, e in errors.items() if name not in outputs}
    worst = max(grads, key=lambda name: grads[name] / errors[name]["bar"]) if grads else ""
    ulp = max(e["ulp"] for e in errors.values())
    return (
        scientific(max(own)) if own else "-",
        f"{scientific(grads[worst])} {worst}" if worst else "-",
        number(ulp, 2) if ulp < 1e5 else f"1e{round(math.log10(ulp))}" if math.isfinite(ulp) else number(ulp),
    )


def with_interval(summary: Mapping[str, float] | None) -> str:
    """ "0.512 ±.4%": the median and the farther end of its 95 % interval."""
    if not summary:
        return "-"
    median = summary["median"]
    away = 100 * max(summary["high"] - median, median - summary["low"]) / median if median else 0.0
    return f"{number(median)} ±{f'{away:.1f}'.lstrip('0') if away < 0.95 else f'{away:.0f}'}%"


def outputs_of(row: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that are outputs: all of them where there are no gradients, else the first."""
    names = list(row.get("errors") or {})
    if row["mode"] != "fwdbwd":
        return names
    return names[:1] if names else []


def print_tables(console: Console, rows: Sequence[Mapping[str, Any]], gpu: bool) -> None:
    """One table an (operator, case, mode)."""
    forward = {
        (r["op"], r["case"], r["arm"]): r["times"]
        for r in rows
        if r["mode"] == "fwd" and r["status"] in ("OK", "IMPOSSIBLE")
    }
    for (op, case, _, mode), members in results.group(rows).items():
        first = members[0]
        fits = ", fits in L2" if first.get("fits_l2") else ""
        size = (first["reads"] + first["writes"]) / 1e6
        console.print(
            f"\n{op} {case}: {first.get('title', '')} · {MODE_TITLES.get(mode, mode)} · {number(size)} MB, "
            f"floor {number(first['floor_ms'])} ms{fits}",
            style="bold",
            markup=False,
        )
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
        clocks = ["cold ms", "warm", "wall"] if gpu else ["wall ms"]
        with_backward = mode == "fwdbwd"
        extra = (["err grad"], ["bwd"]) if with_backward else ([], [])
        launches = ["krn/al"] if gpu else []
        for name in (
            "arm",
            "err",
            *extra[0],
            "ULP",
            *clocks,
            *extra[1],
            "MiB",
            *launches,
            "cmp s",
            "%fl",
            "ratio",
            "verdict",
        ):
            left = name in ("arm", "verdict", "err grad")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        notes = []
        for row in sorted(members, key=_order):
            table.add_row(*_cells(row, gpu, with_backward, forward.get((op, case, row["arm"]))))
            notes += [f"{row['arm']}: {text}" for text in (row["reason"], row.get("note", "")) if text]
        console.print(table)
        for note in notes:
            console.print("  " + note[: 3 * console.width], markup=False, style="dim")


def print_kernels(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """What each arm launched in one call, the longest first, and what our operators chose."""
    for row in rows:
        if not row["kernels"] and not row.get("explain"):
            continue
        console.print(f"\n{row['op']} {row['case']} {row['mode']} {row['arm']}", style="bold", markup=False)
        for kernel in sorted(row["kernels"], key=lambda k: -k["ms"]):
            name = kernel["name"].replace("\n", " ")
            console.print(f"  {number(1e3 * kernel['ms']):>8} us x {kernel['count']:<4} {name[:96]}", markup=False)
        for line in "\n".join(row.get("explain", [])).splitlines():
            console.print(f"  {line[: console.width - 4]}", markup=False, style="dim")


def _order(row: Mapping[str, Any]) -> float:
    clock = stats.primary(row)
    return row["times"][clock]["median"] if clock else math.inf


def _cells(row: Mapping[str, Any], gpu: bool, with_backward: bool, forward: Mapping[str, Any] | None) -> list[Any]:
    times = row["times"]
    out, grad, ulp = error_cells(row, outputs_of(row))
    clock = stats.primary(row)
    backward = "-"
    if with_backward and forward and clock and forward.get(clock):
        backward = number(times[clock]["median"] - forward[clock]["median"])
    cells: list[Any] = [arm_name(row), out, *([grad] if with_backward else []), ulp]
    if gpu:
        cells.append(with_interval(times.get("device_cold")))
        cells += [number(times[c]["median"]) if times.get(c) else "-" for c in ("device_warm", "wall")]
    else:
        cells.append(number(times["wall"]["median"]) if times.get("wall") else "-")
    if with_backward:
        cells.append(backward)
    memory = row.get("memory_bytes")
    cells.append(number(memory / 2**20) if memory is not None else "-")
    if gpu:
        cells.append(f"{row['launches'] or '-'}/{row.get('allocations') or '-'}")
    spent = [row.get("compile_s"), row.get("tune_s")]
    cells.append("+".join(number(seconds, 2) for seconds in spent if seconds is not None) or "-")
    cells.append(f"{100 * row['floor_share']:.0f}" if row.get("floor_share") else "-")
    cells.append(with_interval(row.get("ratio")))
    cells.append(Text(row["verdict"], style=COLORS.get(row["verdict"], "default")))
    return cells


def print_footer(console: Console, document: Mapping[str, Any]) -> None:
    _print_state(console, "after", document["device"].get("state_after") or {})
    counted = {v: sum(r["verdict"] == v for r in document["rows"]) for v in (*stats.VERDICTS, "ALONE")}
    console.print("  ".join(f"{v} {n}" for v, n in counted.items() if n), style="bold")
