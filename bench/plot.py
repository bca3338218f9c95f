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
LABELS = {
    "fla_default": "FLA",
    "fla_safe": "FLA safe_gate",
    "fla_recurrent": "FLA recurrent",
    "fla": "PyTorch with FLA",
    "fla_compile": "torch.compile with FLA",
    "torch_eager": "PyTorch",
    "jla": "jax-linear-attention",
    "torch_loop": "torch row loop",
    "torch_solve": "torch solve_triangular",
    "torch_exact": "torch exact decay",
    "torch_compile": "torch.compile",
    "torch_compile_max": "torch.compile max",
    "pallas": "pallas (ours)",
    "pallas_save": "pallas, saved residuals (ours)",
    "xla": "xla",
    "recurrent": "recurrent (ours)",
}

Row = Mapping[str, Any]


class Style:
    """Color and label by arm, fixed for a whole figure set."""

    def __init__(self, arms: Sequence[str]):
        self.arms = sorted(arms, key=lambda a: (list(PALETTE).index(base(a)) if base(a) in PALETTE else 99, a))
        spare = iter(_SPARE * 10)
        self.color = {arm: PALETTE.get(base(arm)) or next(spare) for arm in self.arms}

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


def _panels(
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
    text: Callable[[float], str] = report.number,
    rule: float | None = None,
    ascending: bool = True,
) -> Any:
    """A panel a mode, a band a case, in it a line an arm (the best on top): dot, number and name side by side."""
    modes = _by_mode(rows)
    heights = {}  # case -> lines that its band needs, the same in every panel
    for cases in modes.values():
        for case, members in cases.items():
            shown = sum(_drawable(value(row)) for row in members)
            heights[case] = max(heights.get(case, 1), shown)
    bottoms, y = {}, 0.0
    for case in heights:
        bottoms[case] = y
        y += heights[case] + 0.9
    figure, axes = plt.subplots(
        1, len(modes), figsize=(2.6 + 4.6 * len(modes), 1.3 + 0.175 * y), squeeze=False, sharey=True
    )
    for axis, (mode, cases) in zip(axes[0], modes.items(), strict=True):
        axis.set_xscale("log")
        for case, members in cases.items():
            bottom, height = bottoms[case], heights[case]
            axis.axhspan(bottom - 0.6, bottom + height - 0.4, color="#f5f5f5", zorder=0)
            floor = tick(members[0]) if tick else None
            if floor:
                axis.plot([floor] * 2, [bottom - 0.6, bottom + height - 0.4], color="#222222", lw=1.2, ls=(0, (2, 1.2)))
            drawn = [(x, row) for row in members if (x := value(row)) is not None and _drawable(x)]
            drawn.sort(key=lambda pair: pair[0], reverse=ascending)
            for line, (x, row) in enumerate(drawn, start=height - len(drawn)):
                _dot(axis, bottom + line, x, row, faint(row) if faint else None, style, text)
        if rule is not None:
            axis.axvline(rule, color="#222222", linewidth=1)
        _log_ticks(axis)
        axis.set_title(MODE_TITLES[mode].split(" (")[0])
        axis.set_xlabel(xlabel)
        axis.set_ylim(-0.9, y - 0.6)
        low, high = axis.get_xlim()
        axis.set_xlim(
            low, high * (high / low) ** (0.9 if high / low < 60 else 0.48)
        )  # room for the names right of the dots
    labels = {case: _case_label(members[0]) for cases in modes.values() for case, members in cases.items()}
    axes[0][0].set_yticks(
        [bottoms[c] + (heights[c] - 1) / 2 for c in bottoms], [labels[c] for c in bottoms], fontsize=7.5
    )
    first = next(iter(modes.values()))
    top = next((case for case in reversed(bottoms) if case in first), None)
    if tick is not None and top is not None and tick(first[top][0]):
        axes[0][0].annotate(
            tick_label,
            (tick(first[top][0]), bottoms[top] + heights[top] - 0.4),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=7.5,
            color="#222222",
        )
    height = figure.get_figheight()
    figure.suptitle(title, x=0.01, y=1 - 0.08 / height, ha="left", va="top", fontsize=11, fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.05 / height))
    return figure


def _drawable(x: float | None) -> bool:
    return x is not None and math.isfinite(x) and x > 0


def _dot(
    axis: Any, y: float, x: float, row: Row, soft: float | None, style: Style, text: Callable[[float], str]
) -> None:
    color, ours = style.color[row["arm"]], base(row["arm"]) == "pallas"
    right = x
    if soft is not None and _drawable(soft):
        axis.plot([x, soft], [y, y], color=color, alpha=0.25, linewidth=1.2, zorder=2)
        axis.plot([soft], [y], "o", color=color, alpha=0.35, markersize=5, markeredgewidth=0, zorder=2)
        right = max(x, soft)
    axis.plot([x], [y], "o", color=color, markersize=7.5 if ours else 6, markeredgewidth=0, zorder=3)
    axis.annotate(
        f"{text(x)}  {style.label(row['arm'])}{report.arm_name(row).removeprefix(row['arm'])}",
        (right, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color=color,
        fontweight="bold" if ours else "normal",
        annotation_clip=False,
        bbox={"facecolor": "#f5f5f5", "edgecolor": "none", "pad": 0.4},
    )


def _log_ticks(axis: Any) -> None:
    """1, 2, 5 where a decade or two are shown, powers of ten where it is more; plain numbers."""
    from matplotlib import ticker

    low, high = axis.get_xlim()
    subs = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=20))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if 1e-4 <= x < 1e5 else f"1e{round(math.log10(x))}")


def _worst(row: Row, what: str) -> float | None:
    errors = row.get("errors") or {}
    if not errors or row["status"] == "NOT MEASURED":
        return None
    return max(error[what] for error in errors.values())


def figures(rows: Sequence[Row], device: Mapping[str, Any]) -> dict[str, Any]:
    """name -> matplotlib figure, for the rows of one operator and device."""
    rows = [row for row in rows if "#" not in row["arm"]]  # An arm's second turn is the verdict's business.
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
        "time": _panels(
            plt,
            rows,
            style,
            lambda row: time_of(row, clock),
            f"milliseconds ({name}{'; wall faint' if clock != 'wall' else ''})",
            f"{op}: time, {where}",
            faint=wall,
            tick=lambda row: row["floor_ms"],
            tick_label="roofline",
        ),
        "roofline": _panels(
            plt,
            rows,
            style,
            lambda row: 100 * row["floor_share"] if row.get("floor_share") and row["status"] == "OK" else None,
            "% of the roofline (100: no call can be faster)",
            f"{op}: share of the roofline, {where}",
            text=lambda x: f"{report.number(x, 2)} %",
            ascending=False,
        ),
        "memory": _panels(
            plt,
            rows,
            style,
            lambda row: row["memory_bytes"] / 2**20 if row.get("memory_bytes") else None,
            "MiB beyond inputs and outputs",
            f"{op}: memory, {where}",
        ),
        "accuracy": _panels(
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
        out["speedup"] = _panels(
            plt,
            [row for row in rows if results.key(row) in ratios],
            style,
            lambda row: ratios[results.key(row)],
            f"times slower than pallas (ours), {name}",
            f"{op}: speed-up of pallas over each arm, {where}",
            text=lambda x: f"{x:.2f}x",
            rule=1.0,
            ascending=False,
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
            figure.savefig(path, metadata=metadata, bbox_inches="tight", pad_inches=0.12)
            print(path)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Folder of the figures; default: beside the results.")
    flags.DEFINE_enum("format", "png", ["png", "svg", "pdf"], "File format.")
    cli.run(main)
