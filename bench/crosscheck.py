"""Do two independent timers agree? CUPTI's kernel sums, as every row uses them, against a trace of JAX's own profiler.

    python -m bench.crosscheck [--impl=pallas] [--preset=report32] [--mode=fwd,fwdbwd]

Each timer has a process of its own, since CUPTI takes one subscriber. Exit status 1 when they differ by more than 5 %.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console

from bench import cli, device, harness, kda, report
from bench.spec import Arm, Case, UsageError, operator, save_arrays
from bench.workers import WorkerError

AGREE = 0.05
_CALLS = 10


def kernel_ms(trace: pathlib.Path) -> list[tuple[str, float]]:
    """[(kernel, ms)] of every kernel on a GPU stream in a trace folder of `jax.profiler.trace`, copies left out."""
    files = sorted(trace.glob("**/*.trace.json.gz"))
    if not files:
        raise FileNotFoundError(f"{trace}: the profiler left no trace")
    with gzip.open(files[-1], "rt") as file:
        events = json.load(file)["traceEvents"]
    named = [e for e in events if e.get("ph") == "M"]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["pid"] in gpus and e["args"]["name"].startswith("Stream")
    }
    return [
        (e["name"], e["dur"] / 1e3)
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams and not e["name"].startswith(("Memcpy", "Memset"))
    ]


def _ask(session: harness.Session, arm: Arm, case: Case, inputs: pathlib.Path, mode: str, timer: str) -> float:
    """Median (CUPTI) or mean (trace) milliseconds of one call, in a fresh process."""
    session.spawn(timer, arm.framework, arm)
    worker = session.worker(timer)
    try:
        worker.ask("case", 120, case=case.to_json(), arm=arm.to_json(), inputs=str(inputs))
        worker.ask("prepare", 120, mode=mode)
        if timer == "cupti":
            return statistics.median(worker.ask("sample", 120, mode=mode, what="device_warm", n=_CALLS)["ms"])
        return worker.ask("trace", 120, mode=mode, n=_CALLS, folder=str(inputs.parent / f"trace-{mode}"))["ms"]
    finally:
        worker.stop()


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    if not device.has_gpu():
        raise UsageError("there is no GPU: nothing to time")
    console, worst = Console(width=cli.WIDTH, highlight=False), 0.0
    with harness.Session(harness.Options(gpu=True)) as session:
        for case in kda.cases("kda", F.preset):
            arms = cli.pick_arms(F.impl, kda.arms(case.params["dtype"]), kda.GROUPS)
            inputs = session.folder / case.key
            save_arrays(inputs, operator(case.op).inputs(case))
            for arm in arms:
                if arm.framework != "jax":
                    raise UsageError(f"--impl: {arm.name} is not a JAX arm")
                for mode in cli.modes():
                    try:
                        both: dict[str, Any] = {
                            t: _ask(session, arm, case, inputs, mode, t) for t in ("cupti", "trace")
                        }
                    except WorkerError as error:
                        raise UsageError(f"{case.name} {arm.name} {mode}: {error}") from error
                    apart = both["cupti"] / both["trace"] - 1
                    worst = max(worst, abs(apart))
                    console.print(
                        f"{case.op} {case.name} {mode} {arm.name}: CUPTI {report.number(both['cupti'], 4)} ms, "
                        f"profiler trace {report.number(both['trace'], 4)} ms, {100 * apart:+.1f} %",
                        markup=False,
                    )
    return 0 if worst <= AGREE else 1


if __name__ == "__main__":
    cli.define(impl="pallas", preset="report32")
    cli.run(main)
