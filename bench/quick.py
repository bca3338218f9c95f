"""Operators at a small shape, accuracy and time: did a change break or slow anything, in about a minute?

python -m bench.quick [--dtype=float32|bfloat16|float16]
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from bench import attention, cli, device, kda

_SHAPE = {True: "2,1024,16,64", False: "1,64,1,32"}  # by whether there is a GPU
_ATTENTION = {True: "4,1024,16,16,64", False: "1,64,1,1,32"}
_ATTENTION_IMPL = {True: ("pallas", "jax_cudnn", "sdpa"), False: ("pallas", "xla", "composite")}
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_IMPL = {True: ("pallas", "xla", "torch_solve", "fla_safe", "jla"), False: ("pallas", "xla", "torch_solve")}


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    gpu = device.has_gpu()
    if not F["mode"].present:
        # Interpret mode compiles for seconds a function: on the CPU the one that contains both directions has to do.
        F.mode = ["fwd", "fwdbwd"] if gpu else ["fwdbwd"]
    jobs = []
    for op in ("kda", "gdn2"):
        for case in kda.cases(op, [], shape=_SHAPE[gpu], dtype=F.dtype or "float32", seed=F.seed, name="quick"):
            jobs.append((case, cli.pick_arms(F.impl or _IMPL[gpu], kda.arms(case.params["dtype"]), kda.GROUPS)))
    if not F.impl:  # names of KDA's arms
        precision = _PRECISIONS[F.dtype or "float32"]
        wanted = attention.cases([], shape=_ATTENTION[gpu], precision=precision, seed=F.seed, name="quick")
        jobs += attention.jobs(wanted, _ATTENTION_IMPL[gpu])
    return cli.measure(jobs, "bench.quick", default_rounds=5 if gpu else 1)


if __name__ == "__main__":
    cli.define(impl="", preset="")
    flags.DEFINE_string("dtype", None, "float32 (default), bfloat16 or float16.")
    cli.run(main)
