"""Everything, one result file an operator, resuming where an earlier run was cut off.

    python -m bench.run_all --out out
    python -m bench.run_all --out out --family=kda --preset=report32,kimi8k --budget=500

Denominators first: every file begins with the rooflines, measured before the first arm. A case whose rows are all in
its file is not run again, so the same command continues after Ctrl-C, a crash or the end of --budget (seconds for the
whole command).
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence

from absl import flags

from bench import adapters, attention, cli, device, gemm, kda, kda_step
from bench.spec import Arm, Case, UsageError

Jobs = list[tuple[Case, list[Arm]]]


def _kda_jobs(op: str) -> Callable[[Sequence[str] | None], Jobs]:
    def jobs(presets: Sequence[str] | None) -> Jobs:
        gpu = device.has_gpu()
        if gpu:
            default = [name for name in kda.PRESETS if name != "cpu"] if op == "kda" else ["report32", "kimi8k"]
            impl = ["pallas", "xla", "torch", "fla", "jla"]
        else:
            default, impl = ["cpu"], ["pallas", "xla", "recurrent", "torch"]
        impl, wanted = flags.FLAGS.impl or impl, kda.cases(op, presets or default)
        return [(case, cli.pick_arms(impl, kda.arms(case.params["dtype"]), kda.GROUPS)) for case in wanted]

    return jobs


def _gemm_jobs(presets: Sequence[str] | None) -> Jobs:
    gpu = device.has_gpu()
    impl = ["pallas", "xla", "torch", "jax_triton"] if gpu else ["pallas", "xla", "torch"]
    return gemm.jobs(gemm.cases(presets or (gemm.SWEEP if gpu else ["cpu"])), flags.FLAGS.impl or impl)


def _attention_jobs(presets: Sequence[str] | None) -> Jobs:
    gpu = device.has_gpu()
    impl = ["pallas", "xla", "jax", "torch"] if gpu else ["pallas", "xla", "jax_xla", "composite"]
    wanted = attention.cases(presets or (attention.SWEEP if gpu else ["cpu"]))
    return attention.jobs(wanted, flags.FLAGS.impl or impl)


def _adapter_jobs(presets: Sequence[str] | None) -> Jobs:
    wanted = adapters.cases(presets or ["sweep" if device.has_gpu() else "cpu"])
    return adapters.jobs(wanted, flags.FLAGS.impl)


# Result file (without .json) -> its jobs. Families come in this order.
FAMILIES: dict[str, Callable[[Sequence[str] | None], Jobs]] = {
    "kda": _kda_jobs("kda"),
    "gdn2": _kda_jobs("gdn2"),
    "gemm": _gemm_jobs,
    "attention": _attention_jobs,
    "adapters": _adapter_jobs,
    "kda_step": lambda presets: kda_step.jobs(presets, flags.FLAGS.impl or None),
}
MODES = {"kda_step": ("decode",)}  # of families that have their own


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    if not F.out:
        raise UsageError("--out: names no folder")
    out, status, start, budget = pathlib.Path(F.out), 0, time.monotonic(), F.budget
    for family in cli.choose(F.family or list(FAMILIES), FAMILIES, "--family"):
        if budget is not None:
            F.budget = max(1.0, budget - (time.monotonic() - start))
        jobs = FAMILIES[family](F.preset or None)
        status |= cli.measure(jobs, "bench.run_all", path=out / f"{family}.json", resume=True, run=MODES.get(family))
    return status


if __name__ == "__main__":
    cli.define(impl="", preset="")
    flags.DEFINE_string("out", None, "Folder of the result files.")
    flags.DEFINE_list("family", [], f"Only these: {', '.join(FAMILIES)}.")
    cli.run(main)
