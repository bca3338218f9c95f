"""A tiny operator (y = x * w) with honest and dishonest arms: what the harness's own tests measure.

python -m bench.toy --impl=good,wrong_gradient,sleeps,cached,crashes,hangs --json out.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli
from bench.spec import Arm, Built, Case, Operator, Traffic


class Toy(Operator):
    name = "toy"
    differentiable = ("x", "w")
    cotangents = {"y": "dy"}

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(case.params["seed"])
        shape = (case.params["rows"], case.params["columns"])
        return {name: rng.standard_normal(shape, dtype=np.float32) for name in ("x", "w", "dy")}

    def subset(self, case: Case) -> Sequence[Any]:
        return (0, case.params["rows"] - 1)

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        return array[part : part + 1]

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        x, w, dy = (inputs[n].astype(np.float64) for n in ("x", "w", "dy"))
        return {"y": x * w, "dx": dy * w, "dw": dy * x}

    def traffic(self, case: Case, mode: str) -> Traffic:
        size = 4 * case.params["rows"] * case.params["columns"]
        return Traffic(reads=3 * size, writes=3 * size) if mode == "fwdbwd" else Traffic(reads=2 * size, writes=size)

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        return 2e-6

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        return np.dtype(np.float32)

    def describe(self, case: Case) -> str:
        return f"y = x * w, {case.params['rows']} x {case.params['columns']} float32"


def _call(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    x, w, dy = inputs["x"], inputs["w"], inputs["dy"]
    return {"y": x * w, "dx": dy * w, "dw": dy * x}


def _built(call: Any) -> Built:
    return Built(modes={"fwd": call, "fwdbwd": call})


def good(case: Case, options: dict[str, Any]) -> Built:
    return _built(_call)


def wrong_gradient(case: Case, options: dict[str, Any]) -> Built:
    return _built(lambda inputs: {**_call(inputs), "dw": 1.01 * _call(inputs)["dw"]})


def sleeps(case: Case, options: dict[str, Any]) -> Built:
    def call(inputs):
        time.sleep(0.02)
        return _call(inputs)

    return _built(call)


def cached(case: Case, options: dict[str, Any], inputs: Mapping[str, np.ndarray]) -> Built:
    """Computes once and returns the same result ever after: right, and faster than its bytes."""
    kept = _call(inputs)
    return _built(lambda inputs: kept)


def jitters(case: Case, options: dict[str, Any]) -> Built:
    """Right, but never twice the same bits."""
    count = iter(range(1 << 30))

    def call(inputs):
        out = _call(inputs)
        out["y"][0, 0] *= np.float32(1 + (next(count) % 2) * 2**-23)
        return out

    return _built(call)


def crashes(case: Case, options: dict[str, Any]) -> Built:
    calls = []

    def call(inputs):
        calls.append(1)
        if len(calls) > options.get("after", 0):
            os.write(2, b"toy: simulated crash\n")
            os.abort()
        return _call(inputs)

    return _built(call)


def crashes_backward(case: Case, options: dict[str, Any]) -> Built:
    return Built(modes={"fwd": _call, "fwdbwd": crashes(case, options).modes["fwdbwd"]})


def hangs(case: Case, options: dict[str, Any]) -> Built:
    def call(inputs):
        time.sleep(3600)

    return _built(call)


def drags(case: Case, options: dict[str, Any]) -> Built:
    """Quick on the small case, endless on the large one: for interrupting."""
    return hangs(case, options) if case.name == "large" else good(case, options)


def differentiated(case: Case, options: dict[str, Any]) -> Any:
    """Only a forward, in JAX or torch alike: the runtime makes the other modes."""
    return lambda inputs: {"y": inputs["x"] * inputs["w"]}


def raises(case: Case, options: dict[str, Any]) -> Built:
    raise NotImplementedError("this arm does not take such a case")


def arms() -> dict[str, Arm]:
    modes = ("fwd", "fwdbwd")
    host = [good, wrong_gradient, sleeps, cached, jitters, crashes, crashes_backward, hangs, drags, raises]
    found = [Arm(f.__name__, "numpy", f"bench.toy:{f.__name__}", ours=f in (good, jitters), modes=modes) for f in host]
    found += [
        Arm("crashes_late", "numpy", "bench.toy:crashes", {"after": 5}, modes=modes),
        Arm("absent", "numpy", "bench.toy:good", requires=("no_such_package",), modes=modes),
        Arm("in_jax", "jax", "bench.toy:differentiated", requires=("jax",), ours=True),
        Arm("in_torch", "torch", "bench.toy:differentiated", requires=("torch",), ours=True),
        Arm("unproved", "jax", "bench.toy:differentiated", requires=("jax",), proof=("toy_kernel",)),
    ]
    return {arm.name: arm for arm in found}


def cases(presets: Sequence[str]) -> list[Case]:
    sizes = {"small": (64, 4096), "large": (2048, 4096)}
    return [
        Case("toy", p, {"rows": sizes[p][0], "columns": sizes[p][1], "seed": 0})
        for p in cli.choose(presets, sizes, "--preset")
    ]


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    known = arms()
    chosen = cli.pick_arms(flags.FLAGS.impl, known, {})
    return cli.measure([(case, chosen) for case in cases(flags.FLAGS.preset)], command="bench.toy")


if __name__ == "__main__":
    cli.define(impl="good", preset="small", mode="fwdbwd")
    cli.run(main)
