"""Figures from result files alone: no GPU, no JAX, no torch.

    python -m bench.plot bench/results [--out DIR] [--format=png|svg]

For each operator and device: <op>_time (device time bold, wall time faint, roofline dashed), <op>_speedup,
<op>_roofline, <op>_memory and <op>_accuracy. Cases are ordered by their compulsory bytes, the largest at the top.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from bench import cli, report, results, stats
from bench.spec import MODE_TITLES, UsageError
from bench.verdict import base

# One color a kind of arm, the same in every figure. Ours stands out; the palette is safe for color-blind readers.
PALETTE = {
    "pallas": "#d1495b",
    "pallas_save": "#e89aa5",
    "xla": "#7a6c9d",
    "recurrent": "#b8a9d9",
    "fla_default": "#3d7ea6",
    "fla_safe": "#00507a",
    "jla": "#2a9d6f",
    "torch_loop": "#c9a227",
    "torch_solve": "#a67c00",
    "torch_exact": "#7f6000",
    "torch_compile": "#e07b39",
    "torch_compile_max": "#b0521a",
}
_SPARE = ("#666666", "#999999", "#444444", "#bbbbbb")
_MARKERS = "oDs^vPX<>*"
LABELS = {
    "fla_default": "FLA",
    "fla_safe": "FLA safe_gate",
    "jla": "jax-linear-attention",
    "torch_loop": "torch row loop",
    "torch_solve": "torch solve_triangular",
    "torch_exact": "torch exact decay",
    "torch_compile": "torch.compile",
    "torch_compile_max": "torch.compile max",
    "pallas": "pallas (ours)",
    "pallas_save": "pallas, saved residuals (ours)",
    "xla": "xla (ours)",
    "recurrent": "recurrent (ours)",
}

Row = Mapping[str, Any]


class Style:
    """Color, marker and label by arm, fixed for a whole figure set."""

    def __init__(self, arms: Sequence[str]):
        self.arms = sorted(arms, key=lambda a: (list(PALETTE).index(base(a)) if base(a) in PALETTE else 99, a))
        spare = iter(_SPARE * 10)
        self.color = {arm: PALETTE.get(base(arm)) or next(spare) for arm in self.arms}
        self.marker = {arm: _MARKERS[i % len(_MARKERS)] for i, arm in enumerate(self.arms)}

    def label(self, arm: str) -> str:
        return LABELS.get(base(arm), base(arm)) + arm.removeprefix(base(arm))


def _setup() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.grid": True,
            "axes.grid.axis": "x",
            "grid.color": "#e6e6e6",
            "grid.linewidth": 0.8,
            "axes.axisbelow": True,
            "ytick.left": False,
            "figure.dpi": 110,
            "savefig.dpi": 160,
            "svg.hashsalt": "bench",  # the same file from the same data
        }
    )
    return plt


def _case_label(row: Row) -> str:
    title = row.get("title", "")
    return f"{row['case']}\n{title}" if title else row["case"]


def _by_mode(rows: Sequence[Row]) -> dict[str, dict[tuple[str, str], list[Row]]]:
    """mode -> (case, parameters) -> rows, cases by compulsory bytes."""
    out: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for (_, case, params, mode), members in results.group(rows).items():
        out.setdefault(mode, {})[case, params] = members
    for mode, cases in out.items():
        out[mode] = dict(sorted(cases.items(), key=lambda item: item[1][0]["reads"] + item[1][0]["writes"]))
    return {mode: out[mode] for mode in MODE_TITLES if mode in out}


def _clock(rows: Sequence[Row]) -> str:
    """One clock for a figure: the best that any row has."""
    have = {clock for row in rows for clock in row["times"]}
    return next((clock for clock in stats.CLOCKS if clock in have), "wall")


def _dots(
    plt: Any,
    rows: Sequence[Row],
    style: Style,
    value: Callable[[Row], float | None],
    xlabel: str,
    title: str,
    *,
    faint: Callable[[Row], float | None] | None = None,
    tick: Callable[[Row], float | None] | None = None,
    tick_label: str = "",
    log: bool = True,
    text: Callable[[float], str] | None = None,
    rule: float | None = None,
) -> Any:
    """A dot plot: a panel a mode, a line a case, a dot an arm; the best and our own dot carry their numbers."""
    modes = _by_mode(rows)
    most = max(len(cases) for cases in modes.values())
    figure, axes = plt.subplots(
        1, len(modes), figsize=(3.2 + 3.9 * len(modes), 1.9 + 0.62 * most), squeeze=False, sharey=len(modes) > 1
    )
    seen: dict[str, Any] = {}
    for axis, (mode, cases) in zip(axes[0], modes.items(), strict=True):
        for y, members in enumerate(cases.values()):
            axis.axhline(y, color="#efefef", linewidth=6, zorder=0)
            values = {}
            for row in members:
                x = value(row)
                if x is None or not math.isfinite(x) or (log and x <= 0):
                    continue
                values[row["arm"]] = x
                ours = bool(row.get("ours"))
                soft = faint(row) if faint else None
                color, marker = style.color[row["arm"]], style.marker[row["arm"]]
                if soft is not None:
                    axis.plot([soft], [y], marker, color=color, alpha=0.28, markersize=6, markeredgewidth=0)
                (seen[row["arm"]],) = axis.plot(
                    [x],
                    [y],
                    marker,
                    color=color,
                    markersize=9 if ours else 7,
                    markeredgecolor="white",
                    markeredgewidth=0.8,
                    linestyle="none",
                    zorder=4 if ours else 3,
                )
            floor = tick(members[0]) if tick else None
            if floor:
                axis.plot([floor, floor], [y - 0.36, y + 0.36], color="#222222", linewidth=1.4, linestyle=(0, (2, 1.2)))
            mine = next((a for a in values if base(a) == "pallas"), None)
            if text is not None and mine is not None:
                axis.annotate(
                    text(values[mine]),
                    (values[mine], y),
                    xytext=(0, 8),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7.5,
                    color=style.color[mine],
                    fontweight="bold",
                )
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(lambda x, _: report.number(x))
        if rule is not None:
            axis.axvline(rule, color="#222222", linewidth=1)
        axis.set_title(MODE_TITLES[mode].split(" (")[0])
        axis.set_xlabel(xlabel)
        axis.set_yticks(range(len(cases)), [_case_label(members[0]) for members in cases.values()], fontsize=7.5)
        axis.set_ylim(-0.6, len(cases) - 0.3)
        axis.margins(x=0.08)
    handles = [seen[arm] for arm in style.arms if arm in seen]
    labels = [style.label(arm) for arm in style.arms if arm in seen]
    if tick_label:
        handles.append(plt.Line2D([], [], color="#222222", linewidth=1.4, linestyle=(0, (2, 1.2))))
        labels.append(tick_label)
    columns = min(6, max(1, len(labels)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    lines = -(-len(labels) // columns)
    height = figure.get_figheight()
    figure.tight_layout(rect=(0, 0.23 * lines / height, 1, 1 - 0.05 / height))
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=8, handletextpad=0.3)
    return figure


def _worst(row: Row, what: str) -> float | None:
    errors = row.get("errors") or {}
    if not errors or row["status"] == "NOT MEASURED":
        return None
    return max(error[what] for error in errors.values())


def figures(rows: Sequence[Row], device: Mapping[str, Any]) -> dict[str, Any]:
    """name -> matplotlib figure, for the rows of one operator and device."""
    plt = _setup()
    style = Style(sorted({row["arm"] for row in rows}))
    op = rows[0]["op"]
    clock = _clock(rows)
    name = stats.CLOCK_TITLES[clock]
    note = "" if device["gpu"] else " (no GPU: times mean nothing)"
    where = f"{device['kind']}, {device['date'].split()[0]}{note}"

    def time_of(row: Row, which: str) -> float | None:
        return row["times"][which]["median"] if row["times"].get(which) else None

    def wall(row: Row) -> float | None:
        return time_of(row, "wall") if clock != "wall" else None

    ratios = _speedups(rows, clock)
    out = {
        "time": _dots(
            plt,
            rows,
            style,
            lambda row: time_of(row, clock),
            f"milliseconds ({name}{'; wall faint' if clock != 'wall' else ''})",
            f"{op}: time, {where}",
            faint=wall,
            tick=lambda row: row["floor_ms"],
            tick_label="roofline",
            text=report.number,
        ),
        "roofline": _dots(
            plt,
            rows,
            style,
            lambda row: 100 * row["floor_share"] if row.get("floor_share") and row["status"] == "OK" else None,
            "% of the roofline (100: no call can be faster)",
            f"{op}: share of the roofline, {where}",
            text=lambda x: f"{x:.0f} %",
        ),
        "memory": _dots(
            plt,
            rows,
            style,
            lambda row: row["memory_bytes"] / 2**20 if row.get("memory_bytes") else None,
            "MiB beyond inputs and outputs",
            f"{op}: memory, {where}",
            text=report.number,
        ),
        "accuracy": _dots(
            plt,
            rows,
            style,
            lambda row: _worst(row, "ulp"),
            "largest error of any output or gradient, in ULP of its RMS",
            f"{op}: accuracy against the float64 oracle, {where}",
            text=lambda x: report.number(x, 2),
        ),
    }
    if ratios:
        out["speedup"] = _dots(
            plt,
            [row for row in rows if results.key(row) in ratios],
            style,
            lambda row: ratios[results.key(row)],
            f"times slower than pallas (ours), {name}",
            f"{op}: speed-up of pallas over each arm, {where}",
            rule=1.0,
        )
    return out


def _speedups(rows: Sequence[Row], clock: str) -> dict[tuple[str, ...], float]:
    """results.key(row) -> its time over that of our pallas arm in the same table (paired)."""
    out = {}
    for members in results.group(rows).values():
        mine = next((r for r in members if base(r["arm"]) == "pallas" and r["times"].get(clock)), None)
        for row in members:
            if mine is not None and row is not mine and row["times"].get(clock) and row["status"] == "OK":
                out[results.key(row)] = stats.against(row, mine, clock)["median"]
    return out


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise UsageError("usage: python -m bench.plot DIR_OR_FILE [--out DIR]")
    source = pathlib.Path(argv[1])
    out = pathlib.Path(flags.FLAGS.out) if flags.FLAGS.out else (source if source.is_dir() else source.parent)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("matplotlib is not installed: pip install '.[plot]'") from error
    sets: dict[tuple[str, str], tuple[list[Row], Mapping[str, Any]]] = {}
    for _, document in results.load_folder(source):
        for row in document["rows"]:
            rows, _ = sets.setdefault((document["device"]["kind"], row["op"]), ([], document["device"]))
            rows.append(row)
    several = len({kind for kind, _ in sets}) > 1
    out.mkdir(parents=True, exist_ok=True)
    for (kind, op), (rows, device) in sets.items():
        prefix = f"{''.join(c if c.isalnum() else '_' for c in kind)}_" if several else ""
        for name, figure in figures(rows, device).items():
            path = out / f"{prefix}{op}_{name}.{flags.FLAGS.format}"
            metadata = {"Date": None} if flags.FLAGS.format == "svg" else {"Software": None}
            figure.savefig(path, metadata=metadata)
            print(path)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder of the figures; default: beside the results.")
    flags.DEFINE_enum("format", "png", ["png", "svg", "pdf"], "File format.")
    cli.run(main)
