"""One step of training a decoder, end to end, by implementation of Kimi Delta Attention.

    python -m bench.train_step --impl=pallas,xla,torch,fla [--preset=report,340m] [--json FILE] [--kernels]

All arms have the same parameters, text, order and AdamW: those of `python -m dormouse_jax.train`, the PyTorch arms by
`torch_ref.decoder`. Losses come first: an arm that leaves the others is WRONG and has no time. So is an arm of ours
whose kernels are not in the compiled step.

Presets: report (12 heads of 64, batch 10 x 512, 4 iterations) and 340m on a GPU, cpu without one. Groups of arms: torch
(eager, and torch.compile of the port and of the layers around it), fla (flash-linear-attention's operator, the layers
around it eager and compiled), ours. pallas_save is pallas with residuals="save": KDA keeps for its backward what it
otherwise computes again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench import cli, device, harness, report, results, stats
from bench.spec import Arm, Case, UsageError, missing_packages
from bench.train_arms import PARTS, is_launch_of
from bench.workers import WorkerError

# Largest difference from the median of all arms: of the loss in nats, at every step that is compared, and of the norm
# of the first step's gradients, relative to it. Every implementation rounds 16-bit operands differently, which updates
# amplify: over 10 steps that took the loss down by 0.8 nats, to 2e-3 nats of it.
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (2e-2, 1e-2), "float16": (2e-2, 1e-2)}

# Dense products in 16 bit by the data sheets, operations a second.
_PEAKS = {"H100": 989.4e12, "H200": 989.4e12}

_SAMPLE_S = 0.3  # a sample of the wall clock is of so many steps as take this long
_TOO_LATE = "the time budget was spent before its turn"
_SLOW_S = 1.0  # a step longer than this gets fewer rounds

_DEFINITIONS = f"""\
step: loss, gradients, clip of their norm and AdamW, from parameters to parameters, ids copied to the device included.
ms/step, tok/s: host clock over some steps in a row, once warm; median over rounds, the arms taken in random order.
dev ms: sum of the kernels of a step (JAX by CUPTI, torch by its profiler). forward is the loss alone (torch: with what
autograd keeps), backward is loss and gradients less that, optimizer is the step less those; of kernels on a GPU.
kda: the operator's kernels, from raw q, k, gates and beta, measured alone at the shape of the layers, times its calls.
gemm: kernels of a step that multiply matrices, by their names, less those of the operator; rest: all others.
MFU: model operations over ms/step and the data sheet's rate of dense 16-bit products. Operations of a token: 6 for
every weight of a matrix, once an iteration, the embedding's apart; KDA 3 x 7 H K V a layer (decay K V, read 2 K V,
write 2 K V, output 2 K V; twice that backward); attention 6 T H D a layer. GB: held at the peak of a step (JAX: XLA's
plan, torch: its allocator). cmp s: until the first step can run, without reading parameters, apart from all times.
loss, norm: largest difference from the median of the arms, in nats over the steps from the first to the last loss, and
relative of the norm of the first step's gradients. Tolerances: \
{", ".join(f"{dtype} {loss:g} and {norm:g}" for dtype, (loss, norm) in TOLERANCES.items())}."""

GROUPS = {
    "torch": ("torch_eager", "torch_compile"),
    "fla": ("fla", "fla_compile"),
    "ours": ("pallas", "pallas_save", "xla"),
}


@dataclasses.dataclass(frozen=True)
class _Preset:
    """A preset of `dormouse_jax.models` by name, or None for the one of a machine without a GPU.

    together: whether the devices of all arms fit beside each other, so that rounds can interleave them.
    steps: those whose losses are compared.
    """

    model: str | None
    together: bool
    steps: int
    torch_chunk: int


PRESETS = {
    "cpu": _Preset(None, True, 3, 16),
    "report": _Preset("report", True, 10, 64),
    "340m": _Preset("340m", False, 6, 64),
}


def cases(presets: Sequence[str], *, seed: int = 0) -> list[Case]:
    from dormouse_jax import models

    found = []
    for name in cli.choose(presets, PRESETS, "--preset"):
        chosen = PRESETS[name]
        if chosen.model is None:
            sizes = models.DecoderConfig(
                hidden_size=32, num_layers=2, num_heads=2, head_dim=16, intermediate_size=64, dtype="float32"
            )
            batch_size, sequence_length, learning_rate = 2, 32, 1e-2
        else:
            preset = models.PRESETS[chosen.model]
            sizes, learning_rate = preset.decoder, preset.learning_rate
            batch_size, sequence_length = preset.batch_size, preset.sequence_length
        params = {
            "decoder": dataclasses.asdict(sizes),
            "batch_size": batch_size,
            "sequence_length": sequence_length,
            "torch_chunk": chosen.torch_chunk,
            "optimizer": {
                "learning_rate": learning_rate,
                "warmup_steps": 2,
                "steps": 100,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "seed": seed,
        }
        found.append(Case("train_step", name, params))
    return found


def arms(case: Case) -> dict[str, Arm]:
    precision = "fp32" if case.params["decoder"]["dtype"] == "float32" else "16bit"
    kinds: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
        ("pallas", "jax", {"implementation": "pallas"}, ("jax", "flax", "optax")),
        ("pallas_save", "jax", {"implementation": "pallas", "residuals": "save"}, ("jax", "flax", "optax")),
        ("xla", "jax", {"implementation": "xla"}, ("jax", "flax", "optax")),
        ("torch_eager", "torch", {"kda": "port"}, ("torch",)),
        ("torch_compile", "torch", {"kda": "port", "compile": True}, ("torch",)),
        ("fla", "torch", {"kda": "fla"}, ("fla", "einops", "triton", "torch")),
        ("fla_compile", "torch", {"kda": "fla", "compile": True}, ("fla", "einops", "triton", "torch")),
    ]
    return {
        name: Arm(
            name,
            framework,
            "bench.train_arms:TRAINERS",
            options,
            requires=requires,
            proof=("kda_",) if name.startswith("pallas") else (),
            precision=precision,
            ours=framework == "jax",
            modes=("step",),
        )
        for name, framework, options, requires in kinds
    }


def operations(params: Mapping[str, Any]) -> float:
    """Model operations of a step: as in the header, of the formulas and not of what a kernel computes."""
    p = params["decoder"]
    D, F, H, K = (p[n] for n in ("hidden_size", "intermediate_size", "num_heads", "head_dim"))
    tokens, T = params["batch_size"] * params["sequence_length"], params["sequence_length"]
    channels, every = H * K, p["attention_every"]
    attention = p["num_layers"] // every if every else 0
    kda = p["num_layers"] - attention
    weights = p["num_layers"] * 3 * D * F + attention * 4 * D * channels
    weights += kda * (4 * D * channels + D * H + 2 * (D * K + K * channels))
    mixers = kda * 3 * 7 * H * K * K + attention * 6 * T * H * K
    return float(tokens * (p["loops"] * (6 * weights + mixers) + 6 * D * p["vocab_size"]))


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Run:
    """One arm while it is measured."""

    arm: Arm
    reason: str = ""  # why it was not measured
    wrong: str = ""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    losses: list[dict[str, float]] = dataclasses.field(default_factory=list)
    parts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    wall: list[float] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    memory: int | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def open(self) -> bool:
        return not self.reason and not self.wrong


def measure(
    session: harness.Session, case: Case, chosen: Sequence[Arm], *, steps: int, rounds: int, together: bool
) -> list[dict[str, Any]]:
    """The rows of one case, one for each arm whatever becomes of it."""
    runs, limit = [_Run(arm) for arm in chosen], session.options.arm_limit
    for run in runs:
        if absent := missing_packages(run.arm.requires):
            run.reason = f"not installed: {', '.join(absent)}"
        else:
            session.spawn(run.arm.name, run.arm.framework, run.arm)
    inputs = session.folder / case.key
    session.progress.stage(f"{case.name}: parameters and text", 0)
    sizes: dict[str, Any] = {}
    if any(run.open for run in runs):
        session.spawn("inputs", "jax", None, host_only=True)
        try:
            maker = session.worker("inputs")
            sizes = maker.ask("training", 300, what="inputs", case=case.to_json(), folder=str(inputs))
        except WorkerError as error:
            for run in runs:
                run.reason = run.reason or f"no inputs: {error}"
        session.workers["inputs"].stop()

    def ask(run: _Run, do: str, seconds: float = limit, **args: Any) -> Any:
        """The answer of an arm's worker; None, and a reason, where there is none."""
        try:
            return session.worker(run.arm.name).ask("training", seconds, what=do, **args)
        except WorkerError as error:
            run.reason = run.reason or f"{do}: {error}"
            return None

    def build(run: _Run) -> None:
        found = ask(run, "build", case=case.to_json(), arm=run.arm.to_json(), inputs=str(inputs))
        run.info = found or {}
        _require_kernels(run, run.info.get("missing", []), "the compiled step")
        session.progress.step(run.arm.name)

    ready = [run for run in runs if run.open]
    session.progress.stage(f"{case.name}: compile", len(ready))
    with concurrent.futures.ThreadPoolExecutor(max(1, len(ready))) as pool:
        list(pool.map(build, ready))
    ready = [run for run in ready if run.open]
    order = random.Random(session.options.seed)
    for wave in [ready] if together else [[run] for run in ready]:
        session.progress.stage(f"{case.name}: losses", len(wave))
        for run in wave:
            if session.left() <= 0:
                run.reason = _TOO_LATE
            elif ask(run, "start") is not None:
                run.losses = ask(run, "train", n=steps) or []
            session.progress.step(run.arm.name)
        session.progress.stage(f"{case.name}: parts of the step", len(wave))
        for run in wave:
            _sample_parts(run, ask, session)
            session.progress.step(run.arm.name)
        session.progress.stage(f"{case.name}: rounds", rounds * len(wave))
        for index in range(rounds):
            for run in order.sample(wave, len(wave)):
                if session.left() > 0 or not run.wall:
                    _sample_wall(run, ask, index)
                session.progress.step(run.arm.name)
        for run in wave:
            # What JAX has taken of the device's memory it gives back with its process only.
            if not together:
                session.workers[run.arm.name].stop()
            elif session.workers[run.arm.name].alive:
                session.workers[run.arm.name].send("release", 60)  # answered before whatever is asked next
    _compare_losses(runs, case)
    rows = [_row(case, run, sizes, together) for run in runs]
    stats.judge(rows)
    return rows


def _require_kernels(run: _Run, missing: Sequence[str], where: str) -> None:
    if missing:
        run.wrong = f"its kernels {', '.join(missing)} are not in {where}"


def _sample_parts(run: _Run, ask: Any, session: harness.Session) -> None:
    if not run.open:
        return
    gpu = session.options.gpu
    run.memory = ask(run, "memory")
    for part in PARTS:
        if run.open and session.left() <= 0:
            run.reason = _TOO_LATE
        if not run.open:
            return
        found = ask(run, "sample", part=part, clock="device" if gpu else "wall", n=3)
        if found is not None:
            run.parts[part] = found
            _require_kernels(run, found.get("missing", []), "what was launched")


def _sample_wall(run: _Run, ask: Any, index: int) -> None:
    if not run.open:
        return
    seconds = run.losses[-1]["ms"] / 1e3
    if seconds > _SLOW_S and index >= harness.SLOW_ROUNDS:
        return
    found = ask(run, "sample", part="step", clock="wall", n=min(10, max(1, int(_SAMPLE_S / seconds))))
    if found is not None:
        run.wall.append(found["ms"])
        run.steps = [run.steps[0] if run.steps else found["steps"][0], found["steps"][1]]


def _compare_losses(runs: Sequence[_Run], case: Case) -> None:
    """Holds losses and norms of the gradients to the median of the arms, step by step."""
    trained = [run for run in runs if run.losses]
    loss_tolerance, norm_tolerance = TOLERANCES[case.params["decoder"]["dtype"]]
    for run in trained:
        losses = [abs(x - middle) for x, middle in _beside_median(run, trained, "loss")]
        first, middle = _beside_median(run, trained, "grad_norm")[0]
        # max() passes over what is not a number, and comparisons with it are false.
        loss_apart = max(losses) if all(map(math.isfinite, losses)) else math.inf
        norm_apart = abs(first - middle) / middle
        run.info |= {"loss_apart": loss_apart, "grad_norm_apart": norm_apart}
        if run.open and not (loss_apart <= loss_tolerance and norm_apart <= norm_tolerance):
            run.wrong = (
                f"loss {loss_apart:.1e} nats from the median of the arms, allowed {loss_tolerance:g}; norm of the "
                f"first gradients {norm_apart:.1e}, allowed {norm_tolerance:g}"
            )
    if len(trained) == 1:
        trained[0].notes.append("no other arm to compare losses with")


def _beside_median(run: _Run, others: Sequence[_Run], name: str) -> list[tuple[float, float]]:
    """(what this arm has, the median of all arms that have a number) for every step."""
    found = []
    for i, step in enumerate(run.losses):
        finite = [other.losses[i][name] for other in others if math.isfinite(other.losses[i][name])]
        found.append((step[name], statistics.median(finite) if finite else math.nan))
    return found


def _row(case: Case, run: _Run, sizes: Mapping[str, Any], together: bool) -> dict[str, Any]:
    p, ms = case.params, {part: found["ms"] for part, found in run.parts.items()}
    status = "NOT MEASURED" if run.reason else "WRONG" if run.wrong else "OK"
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "params": dict(p),
        "mode": "step",
        "arm": run.arm.name,
        "framework": run.arm.framework,
        "precision": run.arm.precision,
        "ours": run.arm.ours,
        "status": status,
        "reason": run.reason or run.wrong,
        "note": "; ".join(filter(None, [run.info.get("note", ""), *run.notes])),
        "interleaved": together,
        "parameters": sizes.get("parameters"),
        "corpus": sizes.get("corpus"),
        "losses": run.losses,
        "loss_apart": run.info.get("loss_apart"),
        "grad_norm_apart": run.info.get("grad_norm_apart"),
        "compile_s": run.info.get("compile_s"),
        "trace_s": run.info.get("trace_s"),
        "graphs": run.info.get("graphs"),
        "memory_bytes": run.memory,
        "in_program": run.info.get("in_program", []),
        "explain": run.info.get("explain", []),
        "kernels": run.parts.get("step", {}).get("kernels", []),
        "operator_kernels": run.parts.get("kda", {}).get("kernels", []),
        "times": {},
    }
    if status != "OK":
        return row
    tokens = p["batch_size"] * p["sequence_length"]
    row["times"] = {"wall": stats.summary(run.wall)}
    seconds = row["times"]["wall"]["median"] / 1e3
    row["steps"] = run.steps
    row["tokens_per_second"] = tokens / seconds
    row["operations"] = operations(p)
    row["parts_ms"] = ms
    row["split_ms"] = {
        "forward": ms["forward"],
        "backward": ms["gradients"] - ms["forward"],
        "optimizer": ms["step"] - ms["gradients"],
    }
    if run.parts["step"]["kernels"]:
        d = p["decoder"]
        every = d["attention_every"]
        calls = d["loops"] * (d["num_layers"] - (d["num_layers"] // every if every else 0))
        kda = calls * ms["kda"]
        gemm = run.parts["step"]["gemm_ms"] - calls * run.parts["kda"]["gemm_ms"]
        row["shares_ms"] = {"kda": kda, "gemm": gemm, "rest": ms["step"] - kda - gemm}
        row["launches"] = sum(kernel["count"] for kernel in row["kernels"])
    return row


# ---- showing -------------------------------------------------------------------------------------------------------


def peak(kind: str) -> float | None:
    """The data sheet's rate of dense 16-bit products of a card by its name."""
    return next((rate for card, rate in _PEAKS.items() if card in kind), None)


def mfu(row: Mapping[str, Any], kind: str) -> float | None:
    """Share of the card's peak that the model's operations are; None without a time, for float32, or of other cards."""
    rate = peak(kind)
    if rate is None or row["precision"] != "16bit" or not row["times"]:
        return None
    return row["operations"] / (row["times"]["wall"]["median"] / 1e3) / rate


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right", no_wrap=True)
    return table


def _ordered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: row["times"]["wall"]["median"] if row["times"] else float("inf"))


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]], kind: str, kernels: bool) -> None:
    """The tables of one case."""
    first = rows[0]
    p, d = first["params"], first["params"]["decoder"]
    size = f"{first['parameters'] / 1e6:.3g} M parameters, " if first["parameters"] else ""
    console.print(
        f"\n{first['case']}: {size}{d['num_layers']} layers x {d['loops']}, {d['num_heads']} heads of {d['head_dim']}, "
        f"batch {p['batch_size']} x {p['sequence_length']}, {d['dtype']}"
        + ("" if first["interleaved"] else ", one arm after the other"),
        style="bold",
        markup=False,
    )
    table = _table(
        "arm",
        "first loss",
        "last",
        "loss",
        "norm",
        "ms/step",
        "tok/s",
        "MFU",
        "GB",
        "cmp s",
        "steps",
        "ratio",
        "verdict",
    )
    number = report.number
    for row in _ordered(rows):
        losses, share, memory = row["losses"], mfu(row, kind), row["memory_bytes"]
        table.add_row(
            row["arm"],
            *(f"{losses[i]['loss']:.4f}" if losses else "-" for i in (0, -1)),
            *(report.scientific(row[x]) if row[x] is not None else "-" for x in ("loss_apart", "grad_norm_apart")),
            report.with_interval(row["times"].get("wall")),
            f"{row['tokens_per_second']:,.0f}" if row["times"] else "-",
            f"{100 * share:.1f}%" if share else "-",
            number(memory / 1e9) if memory else "-",
            number(row["compile_s"], 2) if row["compile_s"] is not None else "-",
            "{}-{}".format(*row["steps"]) if row["times"] else "-",
            f"{row['ratio']['median']:.2f}" if row.get("ratio") else "-",
            Text(row["verdict"], style=report.COLORS.get(row["verdict"], "default")),
        )
    console.print(table)
    table = _table(
        "arm",
        "dev ms" if any(row.get("shares_ms") for row in rows) else "ms",
        "forward",
        "backward",
        "optimizer",
        "kda",
        "gemm",
        "rest",
        "launches",
    )
    for row in _ordered(rows):
        if not row["times"]:
            continue
        whole, shares = row["parts_ms"]["step"], row.get("shares_ms", {})
        cells = [f"{number(x)} {100 * x / whole:.0f}%" for x in row["split_ms"].values()]
        cells += [
            f"{number(shares[n])} {100 * shares[n] / whole:.0f}%" if shares else "-" for n in ("kda", "gemm", "rest")
        ]
        table.add_row(row["arm"], number(whole), *cells, f"{row['launches']:.0f}" if shares else "-")
    if table.row_count:
        console.print(table)
    for row in rows:
        for text in filter(None, (row["reason"], row["note"])):
            console.print(f"  {row['arm']}: {text}"[: 3 * console.width], markup=False, style="dim")
        if row["in_program"]:
            where = "launched" if row["kernels"] else "in the compiled step"
            console.print(f"  {row['arm']}: kernels of ours {where}: {_manifest(row)}", markup=False, style="dim")
        if kernels:
            for kernel in sorted(row["kernels"], key=lambda k: -k["ms"]):
                name = kernel["name"].replace("\n", " ")[:90]
                console.print(f"    {number(kernel['ms'])} ms x {kernel['count']:g} {name}", markup=False)


def _manifest(row: Mapping[str, Any]) -> str:
    """The Pallas kernels of the program, with how often a step launches them where that was seen."""

    def count(name: str) -> str:
        seen = sum(kernel["count"] for kernel in row["kernels"] if is_launch_of(kernel["name"], name))
        return f" x {seen:g}" if seen else ""

    return ", ".join(name + count(name) for name in row["in_program"])


# ---- command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    header = device.describe()
    gpu = header["gpu"]
    wanted = cases(F.preset or (["report", "340m"] if gpu else ["cpu"]), seed=F.seed)
    cli.pick_arms(F.impl, arms(wanted[0]), GROUPS)  # Bad names are told before anything starts.
    if missing := missing_packages(["jax", "flax", "optax"]):
        raise UsageError(f"the model needs {', '.join(missing)}; the extra 'train' of dormouse_jax installs it")
    console = Console(width=cli.WIDTH, highlight=False)
    document: dict[str, Any] = {
        "schema": results.SCHEMA,
        "command": cli.command_line("bench.train_step"),
        "device": header,
        "rooflines": None,
        "rows": [],
    }
    report.print_header(console, document, _DEFINITIONS)
    logs = pathlib.Path(F.logs) if F.logs else None
    options = harness.Options(gpu=gpu, seed=F.seed, arm_limit=F.arm_limit, budget=F.budget, logs=logs)
    with harness.Session(options) as session:
        for case in wanted:
            chosen, preset = cli.pick_arms(F.impl, arms(case), GROUPS), PRESETS[case.name]
            session.progress = bar = cli.Bar(Console(stderr=True, width=cli.WIDTH))
            steps, rounds = F.steps or preset.steps, F.rounds or (10 if gpu else 3)
            with bar.bar:
                rows = measure(session, case, chosen, steps=steps, rounds=rounds, together=preset.together)
            document["rows"] += rows
            document["device"]["state_after"] = device.state() if gpu else {}
            if F.json:
                results.save(pathlib.Path(F.json), document)
            print_rows(console, rows, header["kind"], F.kernels)
    report.print_footer(console, document)
    return 1 if any(row["status"] == "WRONG" and row["ours"] for row in document["rows"]) else 0


if __name__ == "__main__":
    flags.DEFINE_list("impl", ["pallas", "xla", "torch", "fla"], "Arms and groups of arms to measure.")
    flags.DEFINE_list("preset", [], f"Of {', '.join(PRESETS)}; report and 340m on a GPU, cpu without one.")
    flags.DEFINE_integer("steps", None, "Steps whose losses are compared (default: the preset's).", lower_bound=1)
    flags.DEFINE_integer("rounds", None, "Rounds (default 10 on a GPU, 3 without one).", lower_bound=1)
    flags.DEFINE_float("arm_limit", 120.0, "Seconds that an arm may take to compile.", lower_bound=1)
    flags.DEFINE_float("budget", None, "Seconds after which what is left becomes NOT MEASURED.", lower_bound=1)
    flags.DEFINE_string("json", None, "File for the results, raw samples included.")
    flags.DEFINE_integer("seed", 0, "Seed of parameters, of the order of the text and of the rounds.")
    flags.DEFINE_bool("kernels", False, "List every arm's kernels of a step.")
    flags.DEFINE_string("logs", None, "Folder that keeps the workers' logs.")
    cli.run(main)
