"""What a configuration of the KDA kernels costs on this GPU, kernel by kernel: how kda/configs.json is made.

    python -m bench.tune --preset=kimi8k --try='{"chunk_size": 16}' --try='{"v_tile": 32, "state_warps": 4}'

The first row is the table's configuration, every --try replaces fields of it. Device microseconds, warm L2 (CUPTI), of
the forward and of the backward that recomputes. `differs` is the largest RMS difference of o and the gradients from the
first row's, over their RMS: far above the rounding of the operands, it tells a miscompiled configuration. A row enters
the table only after the tests have held it to the oracle.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device, kda
from bench.spec import UsageError

_CALLS = 5


def _changes(texts: Sequence[str] | None) -> list[dict[str, Any]]:
    try:
        found = [json.loads(text) for text in texts or ()]
    except json.JSONDecodeError as error:
        raise UsageError(f"--try: {error}") from None
    if not all(isinstance(x, dict) for x in found):
        raise UsageError("--try: expected a JSON object, such as '{\"chunk_size\": 16}'")
    return [{}, *found]


def _median(calls: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Median microseconds of every kernel of a call; a kernel that runs twice counts twice."""
    sums: list[dict[str, float]] = []
    for call in calls:
        total: dict[str, float] = {}
        for name, ms in call:
            total[name] = total.get(name, 0.0) + 1e3 * ms
        sums.append(total)
    return {name: statistics.median(x[name] for x in sums) for name in sums[0]}


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    changes = _changes(flags.FLAGS["try"].value)
    [case] = kda.cases("kda", [flags.FLAGS.preset])
    if not device.has_gpu():
        raise UsageError("it times kernels, and there is no NVIDIA GPU here")

    import jax
    from jax.experimental.mosaic.gpu import profiler

    from pallas_kernels import kda as kernels

    p = case.params
    precision = flags.FLAGS.precision or ("fp32" if p["dtype"] == "float32" else "16bit")
    arrays = {name: jax.numpy.asarray(x) for name, x in kda.KDA().inputs(case).items()}
    inputs, do = [arrays[name] for name in ("q", "k", "v", "g", "beta")], arrays["do"]
    base = kernels.choose_config(
        jax.devices()[0].device_kind,
        K=p["K"],
        V=p["V"],
        T=p["T"],
        batch_heads=p["B"] * p["HV"],
        precision=precision,
    )

    def build(change: dict[str, Any]) -> Any:
        try:
            config = dataclasses.replace(base, **change)
            options: Any = {"scale": p["K"] ** -0.5, "precision": precision, "config": config, "interpret": False}

            def forward(q, k, v, g, beta):
                return kernels.forward(q, k, v, g, beta, None, None, **options)[::2]

            def backward(q, k, v, g, beta, residuals, do):
                return kernels.backward(q, k, v, g, beta, None, None, residuals, do, None, **options)[:5]

            residuals = jax.eval_shape(forward, *inputs)[1]
            programs = jax.jit(forward).lower(*inputs), jax.jit(backward).lower(*inputs, residuals, do)
            return tuple(program.compile() for program in programs)
        except Exception as error:  # whatever the compiler says is the row
            return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"

    print(f"{case.name}, {precision}: microseconds of kernels\n{base}", flush=True)
    # All are compiled before one is timed: compiling times kernels of its own.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        built = list(pool.map(build, changes))
    first: list[np.ndarray] = []
    for change, programs in zip(changes, built, strict=True):
        label = json.dumps(change) if change else "the table's"
        if isinstance(programs, str):
            print(f"{label}\n    {programs}")
            continue
        (o, residuals), forward = profiler.measure(programs[0], aggregate=False, iterations=_CALLS)(*inputs)
        grads, backward = profiler.measure(programs[1], aggregate=False, iterations=_CALLS)(*inputs, residuals, do)
        if forward is None or backward is None:
            raise RuntimeError("CUPTI reported no kernels")
        results = [np.asarray(x, np.float32) for x in (o, *grads)]
        first = first or results
        differs = max(
            float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))) for x, y in zip(results, first, strict=True)
        )
        parts = [_median(x) for x in (forward, backward)]
        fwd, bwd = (sum(x.values()) for x in parts)
        print(f"{label}\n    forward {fwd:.0f}, forward + backward {fwd + bwd:.0f}, differs {differs:.1e}")
        for part in parts:
            print("    " + ", ".join(f"{name.removeprefix('kda_')} {us:.0f}" for name, us in part.items()), flush=True)
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("preset", "report32", f"One of {', '.join(kda.PRESETS)}.")
    flags.DEFINE_multi_string("try", [], "A JSON object of KdaConfig's fields to replace.")
    flags.DEFINE_string("precision", None, "fp32, tf32 (float32 inputs) or 16bit.")
    cli.run(main)
