"""Fills the README's results between its markers from committed result files. Nothing there is typed.

    python -m bench.readme [--results bench/results] [--check]

The tables are the verdict's: losses first; of adapters, whose cases are many, the means. Three folders get tables of
their own: `ports`, what took part in an earlier run only, such as the PyTorch port, whose compiler takes minutes;
`train_step`, the results of `bench.train_step`; and `training`, the logs of `dormouse_jax.train`, each with its plot
beside it. --check writes nothing and fails when the README is not up to date.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from bench import cli, families, report, results, stats, train_step
from bench.plot import LABELS
from bench.spec import MODE_TITLES, OPERATORS, UsageError
from bench.verdict import base, verdicts
from bench.verdict import families as by_family
from dormouse_jax.training import log

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
Documents = Sequence[tuple[pathlib.Path, Mapping[str, Any]]]
_ADAPTERS = tuple(op for op, target in OPERATORS.items() if target.startswith("bench.adapters:"))
_SHOWN = ("python", "jax", "torch", "triton", "fla-core", "jax-linear-attention")


def _label(row: Mapping[str, Any]) -> str:
    """The arm as a reader knows it, with the precision of its products where that is not the inputs' own."""
    precision = report.arm_name(row).removeprefix(row["arm"])
    return str(LABELS.get(base(row["arm"]), row["arm"])).replace(" (ours)", "") + precision


def markdown(
    documents: Documents,
    root: pathlib.Path,
    ports: Documents = (),
    training: Sequence[pathlib.Path] = (),
    steps: Documents = (),
) -> str:
    """The block between the markers."""
    entries = verdicts(documents, "pallas")
    if not entries:
        raise UsageError("the results hold no row of arm 'pallas'")
    lines = []
    for device in sorted({entry["device"] for entry in entries}):
        chosen = [doc for _, doc in documents if doc["device"]["kind"] == device]
        mine = [entry for entry in entries if entry["device"] == device]
        versions = {k: v for doc in chosen for k, v in doc["device"]["versions"].items()}
        dates = sorted({doc["device"]["date"].split()[0] for doc in chosen})
        driver = chosen[0]["device"].get("driver")
        clocks = {entry["clock"] for entry in mine if entry.get("clock")}
        clock = next((c for c in stats.CLOCKS if c in clocks), "wall")
        stack = ", ".join(f"{k} {versions[k]}" for k in _SHOWN if k in versions)
        lines += [
            f"**{device}**, {', '.join(dates)}{f', driver {driver}' if driver else ''}; {stack}.",
            f"Milliseconds of {stats.CLOCK_TITLES[clock]}; ratio: ours over the fastest correct other implementation "
            "in the same run, below 1 is a win. Losses first.",
            "",
        ]
        for op in [op for op in OPERATORS if any(entry["row"]["op"] == op for entry in mine)]:
            if op not in _ADAPTERS:
                lines += _table(op, [entry for entry in mine if entry["row"]["op"] == op])
        lines += _means([row for doc in chosen for row in doc["rows"] if row["op"] in _ADAPTERS])
    for path, document in ports:
        lines += _ports(path, document)
    figures = [p for path, _ in documents for p in sorted(path.parent.glob("*_time.png"))]
    figures = [p for p in figures if not p.name.startswith(_ADAPTERS)]
    for figure in dict.fromkeys(figures):
        lines += [f"![{figure.stem.replace('_', ' ')}]({figure.relative_to(root).as_posix()})", ""]
    for path, document in steps:
        lines += _steps(path, document)
    lines += _training(training, root)
    files = ", ".join(f"`{path.relative_to(root).as_posix()}`" for path, _ in documents)
    lines += [f"From {files} by `python -m bench.readme`; raw samples are in there."]
    return "\n".join(lines)


def _means(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of adapters, a line a family and mode."""
    if not rows:
        return []
    cells = [families.COLUMNS, ("---",) * len(families.COLUMNS), *families.table(rows)]
    return [f"Adapters. {families.LEGEND}", "", *(f"| {' | '.join(line)} |" for line in cells), ""]


def _ports(path: pathlib.Path, document: Mapping[str, Any]) -> list[str]:
    """The table of a run with the PyTorch port and plain JAX, in which ours may be older than in the other tables."""
    device = document["device"]
    lines = [
        f"The PyTorch port and `xla`, {device['kind']}, {device['date'].split()[0]}, at commit "
        f"{device['commit'][:7]} (`{path.parent.name}/{path.name}`); ratio: over ours in that run.",
        "",
        "| | | ours | implementation | time | error, worst gradient | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for members in results.group(document["rows"]).values():
        mine = next(row for row in members if row["arm"] == "pallas")
        clock = stats.primary(mine)
        assert clock is not None
        ours = report.number(mine["times"][clock]["median"])
        for row in members:
            if not base(row["arm"]).startswith(("torch", "xla")):
                continue
            time, ratio = row["reason"], "-"
            if row["status"] == "OK":
                time = report.number(row["times"][clock]["median"])
                ratio = f"{stats.against(row, mine, clock)['median']:.1f}"
            error, gradient, _ = report.error_cells(row, report.outputs_of(row))
            accuracy = error if gradient == "-" else f"{error}, {gradient}"
            mode = MODE_TITLES[row["mode"]].split(" (")[0]
            lines.append(f"| {row['case']} | {mode} | {ours} | {_label(row)} | {time} | {accuracy} | {ratio} |")
    return [*lines, ""]


def _steps(path: pathlib.Path, document: Mapping[str, Any]) -> list[str]:
    """The tables of a run of `bench.train_step`, one a preset."""
    device = document["device"]
    lines = [
        f"A step of training, end to end, {device['kind']}, {device['date'].split()[0]}, at commit "
        f"{device['commit'][:7]} (`{path.parent.name}/{path.name}`): the same decoder, parameters, text and AdamW. "
        "tokens/s and ms by the host's clock; the split and the shares by the time of kernels; ratio: of tokens/s, "
        "ours over theirs; loss: the last that is compared, and the largest difference from the median of all arms.",
        "",
    ]
    number = report.number
    for members in results.group(document["rows"]).values():
        p, d = members[0]["params"], members[0]["params"]["decoder"]
        ours = next((row for row in members if row["arm"] == "pallas" and row["times"]), None)
        lines += [
            f"| {members[0]['case']}: {members[0]['parameters'] / 1e6:.0f} M, batch {p['batch_size']} x "
            f"{p['sequence_length']}, {d['dtype']} | tokens/s | ratio | ms | forward, backward, optimizer "
            "| KDA, GEMM, rest | MFU | GB | loss |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in sorted(members, key=lambda row: -row.get("tokens_per_second", 0)):
            name = str(LABELS.get(row["arm"], row["arm"])).replace(" (ours)", "")
            if not row["times"]:
                lines.append(f"| {name} | {row['verdict']}: {row['reason'].replace('|', '/')} | | | | | | | |")
                continue
            ratio = f"{ours['tokens_per_second'] / row['tokens_per_second']:.2f}" if ours and row is not ours else "-"
            shares, share = row.get("shares_ms"), train_step.mfu(row, device["kind"])
            whole = row["parts_ms"]["step"]
            cells = (
                name,
                f"{row['tokens_per_second']:,.0f}",
                ratio,
                number(row["times"]["wall"]["median"]),
                ", ".join(number(x) for x in row["split_ms"].values()),
                ", ".join(f"{100 * x / whole:.0f} %" for x in shares.values()) if shares else "-",
                f"{100 * share:.1f} %" if share else "-",
                number(row["memory_bytes"] / 1e9) if row["memory_bytes"] else "-",
                f"{row['losses'][-1]['loss']:.4f}, {report.scientific(row['loss_apart'])}",
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def _training(paths: Sequence[pathlib.Path], root: pathlib.Path) -> list[str]:
    """The table of logs of `dormouse_jax.train`, and their plots."""
    if not paths:
        return []
    lines = [
        "Training by `python -m dormouse_jax.train`: losses on the validation text in nats a byte, which a model that "
        "sees no context, or one byte of it, brings down to the entropies at best; the median of tokens a second.",
        "",
        "| log | model | devices | steps x tokens | tokens/s | loss before | after | unigram, bigram entropy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in paths:
        record = log.read(path)
        start = next(line for line in record if line["kind"] == "start")
        losses = [line["validation_loss"] for line in record if line["kind"] == "eval"]
        speed = f"{statistics.median(line['tokens_per_second'] for line in record if line['kind'] == 'speed'):,.0f}"
        run, entropies = start["run"], start["entropies"]
        resumed = [line["step"] for line in record if line["kind"] == "start"][1:]
        steps = f"{run['steps']} x {run['batch_size'] * run['sequence_length']}"
        steps += f", stopped and resumed at {', '.join(map(str, resumed))}" if resumed else ""
        devices = f"{len(start['devices'])} x {start['devices'][0]}"
        model, both = f"{start['parameters'] / 1e6:.1f} M", f"{entropies['unigram']:.3f}, {entropies['bigram']:.3f}"
        if start["devices"][0] == "cpu":  # It says as little as any time without a GPU.
            speed = "-"
        cells = (f"`{path.name}`", model, devices, steps, speed, f"{losses[0]:.3f}", f"{losses[-1]:.3f}", both)
        lines.append(f"| {' | '.join(cells)} |")
    figures = [path.with_suffix(".png") for path in paths]
    return [*lines, "", *(f"![{f.stem}]({f.relative_to(root).as_posix()})" for f in figures), ""]


def _table(op: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"| {op} | | ours | error, worst gradient | fastest other | ratio | of the roofline | verdict |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, entries),
        "",
    ]
    for (_, mode), family in by_family(entries).items():
        if family["ratios"]:
            ratio, case = family["worst"]
            lines.append(
                f"* {op}, {MODE_TITLES[mode]}: geometric mean of the ratios {family['geomean']:.2f}, worst "
                f"{ratio:.2f} ({case}), {family['wins']} of {family['n']} faster."
            )
    return [*lines, ""]


def _line(entry: Mapping[str, Any]) -> str:
    row, best, clock = entry["row"], entry["best"], entry.get("clock")
    error, gradient, _ = report.error_cells(row, report.outputs_of(row))
    accuracy = error if gradient == "-" else f"{error}, {gradient}"
    other = f"{_label(best)} {report.number(best['times'][clock]['median'])}" if best else "-"
    ratio = entry["ratio"]
    shown = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"
    share = f"{100 * row['floor_share']:.0f} %" if row.get("floor_share") else "-"
    time = report.number(row["times"][clock]["median"]) if clock else "-"
    verdict = entry["verdict"] + (f": {row['reason']}" if row["reason"] else "")
    return (
        f"| {row['case']} ({row.get('title', '')}) | {MODE_TITLES[row['mode']].split(' (')[0]} | "
        f"{time} | {accuracy} | {other} | {shown} | {share} | {verdict.replace('|', '/')} |"
    )


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    readme = cli.ROOT / "README.md"
    folder = pathlib.Path(flags.FLAGS.results).resolve()
    text = readme.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UsageError(f"{readme}: needs one {BEGIN} before one {END}")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    ports = results.load_folder(folder / "ports") if (folder / "ports").is_dir() else []
    steps = results.load_folder(folder / "train_step") if (folder / "train_step").is_dir() else []
    training = sorted((folder / "training").glob("*.jsonl"))
    block = markdown(results.load_folder(folder), cli.ROOT, ports, training, steps)
    filled = f"{head}{BEGIN}\n{block}\n{tail}"
    if flags.FLAGS.check:
        if filled != text:
            raise UsageError(f"{readme}: not up to date with {folder}; run python -m bench.readme")
    else:
        readme.write_text(filled)
        print(readme)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("results", str(cli.ROOT / "bench" / "results"), "Folder of the committed results.")
    flags.DEFINE_bool("check", False, "Only say whether the README is up to date.")
    cli.run(main)
