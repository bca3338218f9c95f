"""What the operators' tests share: inputs, runs, the oracle, and comparisons that say what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import dormouse_jax
from dormouse_jax import dispatch
from torch_ref import options as torch_options

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPERATORS = ("kda", "gdn2")
IMPLEMENTATIONS = ("recurrent", "xla", "pallas_triton")

# Interpreted kernels of Mosaic GPU block threads of XLA's pool, one a warpgroup: as few as there may be cores could
# all be blocked.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# shard_map wants more than one device; where JAX has started already, it has to make do with one.
with contextlib.suppress(RuntimeError):
    jax.config.update("jax_num_cpu_devices", 8)


@functools.cache
def on_gpu() -> bool:
    """Whether the tests run on a GPU: Pallas kernels then run natively, and sizes are larger."""
    return jax.default_backend() == "gpu"


if on_gpu():
    # The tests are how what no GPU has run yet is shown to be right.
    dispatch.UNPROVEN.clear()
else:
    # There the tests' time goes into compiling, interpreted kernels above all. What is compiled is kept for other
    # processes and later runs.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def kernels_run(implementation: str) -> contextlib.AbstractContextManager[None]:
    """A context in which `implementation` can run on this machine."""
    interpret = implementation.startswith("pallas") and not on_gpu()
    return dormouse_jax.interpret_kernels() if interpret else contextlib.nullcontext()


def each(*, interpreted=(), few=lambda case: True, **axes):
    """Named parameters for the product of `axes` and the implementations. Kernels on a GPU take all cases, the
    references those that `few` says, and interpreted kernels, which compile slowly, those that `interpreted` names."""
    axes = axes | {"implementation": IMPLEMENTATIONS}
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    named = {"_".join(str(value) for value in case.values()): case for case in cases}

    def taken(name, case):
        if case["implementation"] == "pallas_triton":
            return on_gpu() or name in interpreted
        return few(argparse.Namespace(**case))

    return parameterized.named_parameters(
        {"testcase_name": name} | case for name, case in named.items() if taken(name, case)
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; axis names as in `dormouse_jax.kda`."""

    T: int
    K: int
    V: int
    B: int = 1
    H: int = 1
    HV: int = 1


# Most tests use this one shape, so that it is compiled once: grouped heads, a last chunk that is not full, sizes that
# are no power of two.
STANDARD = Shape(B=2, T=39, H=1, HV=2, K=20, V=24)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of a call and cotangents of its results, NumPy arrays of the dtypes that the operator is to see."""

    operator: str
    inputs: dict[str, np.ndarray]  # q, k, v, g, then beta, or erase and write; A_log and dt_bias of raw gates
    initial_state: np.ndarray | None
    do: np.ndarray
    dfinal_state: np.ndarray
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # that change what is computed, by name

    def replace(self, **arrays: Any) -> Problem:
        """The same problem with other inputs (by name), initial_state, do or dfinal_state; dtypes are kept."""
        inputs = dict(self.inputs)
        fields = {}
        for name, x in arrays.items():
            old = inputs[name] if name in inputs else getattr(self, name)
            x = x if x is None or old is None else np.asarray(x).astype(old.dtype)
            if name in inputs:
                inputs[name] = x
            else:
                fields[name] = x
        return dataclasses.replace(self, inputs=inputs, **fields)


def problem(
    operator: str,
    shape: Shape = STANDARD,
    *,
    dtype: Any = jnp.float32,
    gate_dtype: Any = jnp.float32,
    decay: float = 0.3,
    state: bool = True,
    seed: int = 0,
) -> Problem:
    """A random problem like those of a trained layer: keys of norm 1, gates in (0, 1), log decays of mean -`decay`."""
    rng = np.random.default_rng(seed)
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def gate(*sizes):
        return 1 / (1 + np.exp(-rng.normal(size=sizes)))

    inputs = {
        "q": unit(rng.normal(size=(B, T, H, K))),
        "k": unit(rng.normal(size=(B, T, H, K))),
        "v": rng.normal(size=(B, T, HV, V)),
        "g": -decay * rng.exponential(size=(B, T, HV, K)),
    }
    if operator == "kda":
        gates = {"beta": gate(B, T, HV)}
    else:
        gates = {"erase": gate(B, T, HV, K), "write": gate(B, T, HV, V)}
    data = {name: x.astype(dtype) for name, x in inputs.items()} | {
        name: x.astype(gate_dtype) for name, x in gates.items()
    }
    data["g"] = inputs["g"].astype(gate_dtype)
    wide = np.promote_types(dtype, np.float32) if dtype == np.float64 else np.float32
    return Problem(
        operator,
        data,
        rng.normal(size=(B, HV, K, V)).astype(wide) if state else None,
        rng.normal(size=(B, T, HV, V)).astype(dtype),
        rng.normal(size=(B, HV, K, V)).astype(wide),
    )


RAW_OPTIONS = ("l2norm", "gate", "bounded_gate", "rateless_gate", "beta", "beta_to_2")


def raw(p: Problem, *names: str, seed: int = 1, decay: float = 0.3) -> Problem:
    """The problem with raw inputs, of trained layers' sizes, in place of those that the options named compute.

    Names: "l2norm", raw queries and keys; "gate", "bounded_gate" and "rateless_gate" (bounded, without A_log), raw
    gates with a bias a channel, which make log decays of about -`decay`; "beta" and "beta_to_2" (allow_neg_eigval).
    """
    rng = np.random.default_rng(seed)
    inputs, options = dict(p.inputs), dict(p.options)
    HV, K = inputs["g"].shape[2:]

    def like(name, x):
        inputs[name] = np.asarray(x).astype(inputs[name].dtype)

    for name in names:
        if name == "l2norm":
            for x in "qk":
                size = np.exp(rng.normal(size=inputs[x].shape[:-1]))[..., None]
                like(x, size * rng.normal(size=inputs[x].shape))
            options["use_qk_l2norm_in_kernel"] = True
        elif name in ("beta", "beta_to_2"):
            like("beta", 2 * rng.normal(size=inputs["beta"].shape))
            options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": name == "beta_to_2"}
        else:
            # softplus(-2) is about 0.13, and 5 sigmoid(-2) 0.6.
            like("g", rng.normal(size=inputs["g"].shape))
            inputs["dt_bias"] = (rng.normal(size=HV * K) - 2).astype(np.float32)
            if name != "rateless_gate":
                spread = rng.normal(size=HV) / 2
                inputs["A_log"] = (spread + (np.log(decay / 0.13) if name == "gate" else 0)).astype(np.float32)
            options |= {"use_gate_in_kernel": True, "lower_bound": None if name == "gate" else -decay / 0.12}
    return dataclasses.replace(p, inputs=inputs, options=options)


def packed(operator: str, lengths: tuple[int, ...], shape: Shape = STANDARD, seed: int = 0, **options: Any) -> Problem:
    """A random problem of packed sequences of these lengths, each with a state of its own: B = 1, T their sum."""
    p = problem(operator, dataclasses.replace(shape, B=1, T=max(sum(lengths), 1)), seed=seed, **options)
    T, rng = sum(lengths), np.random.default_rng(seed + 1)
    inputs = {name: x[:, :T] for name, x in p.inputs.items()}
    states = [rng.normal(size=(len(lengths), *p.dfinal_state.shape[1:])).astype(np.float32) for _ in range(2)]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Problem(operator, inputs, states[0], p.do[:, :T], states[1], {"cu_seqlens": cu_seqlens})


def call(p: Problem, implementation: str | None, **options: Any) -> tuple[jax.Array, jax.Array]:
    """(o, final_state) of the operator on the problem's inputs."""
    options = {"output_final_state": True, "initial_state": p.initial_state} | p.options | options
    with kernels_run(implementation or ""):
        return getattr(dormouse_jax, p.operator)(**p.inputs, implementation=implementation, **options)


def value_and_grads(
    p: Problem, implementation: str | None, *, final_state: bool = True, **options: Any
) -> dict[str, jax.Array]:
    """Results and the gradient of every input: o, final_state, dq, dk, ..., dinitial_state.

    Without `final_state` it is neither asked for nor part of the gradients.
    """
    options = p.options | options

    def fn(inputs, state):
        operator = getattr(dormouse_jax, p.operator)
        o, S = operator(
            **inputs, initial_state=state, output_final_state=final_state, implementation=implementation, **options
        )
        return (o, S) if final_state else (o,)

    with kernels_run(implementation or ""):
        outputs, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, p.inputs), p.initial_state)
        inputs, state = vjp(tuple(jnp.asarray(d) for d in (p.do, p.dfinal_state)[: len(outputs)]))
    results = dict(zip(("o", "final_state"), outputs, strict=False))
    results |= {f"d{name}": dx for name, dx in inputs.items()}
    return results if p.initial_state is None else results | {"dinitial_state": state}


def oracle(p: Problem, *, scale: float | None = None, final_state: bool = True) -> dict[str, np.ndarray]:
    """What `value_and_grads` should give, in float64."""
    dfinal = p.dfinal_state if final_state else None
    state = {"initial_state": p.initial_state, "do": p.do, "dfinal_state": dfinal}
    want = torch_options.call_oracle(p.operator, p.inputs, scale=scale, **state, **p.options)
    left_out = set() if final_state else {"final_state"}
    left_out |= {"dinitial_state"} if p.initial_state is None else set()
    return {name: x for name, x in want.items() if name not in left_out}


def bars(precision: str) -> dict[str, float]:
    """The largest RMS error over the RMS of the oracle that each result may have."""
    if precision == "16bit":
        of_gates = ("dg", "dbeta", "derase", "dwrite", "dA_log", "ddt_bias")
        return {"o": 5e-3, "final_state": 5e-3} | dict.fromkeys(of_gates, 2e-2) | {"": 8e-3}
    value, gradient = {"fp32": (2e-6, 1e-5), "tf32": (1e-3, 5e-3), "fp64": (1e-13, 1e-12)}[precision]
    # The gradient of A_log is a sum over tokens and channels, most of which cancels.
    return {"o": value, "final_state": value, "dA_log": 3 * gradient, "": gradient}


def assert_all_close(
    got: Mapping[str, Any], want: Mapping[str, Any], *, precision: str = "fp32", floor: float = 0.0
) -> None:
    """Holds results to the oracle at the bars of `precision`; all must be finite."""
    assert set(got) == set(want), f"results {sorted(got)}, expected {sorted(want)}"
    limits = bars(precision)
    for name, x in got.items():
        assert_close(x, want[name], rms=limits.get(name, limits[""]), name=name, floor=floor)


def assert_close(got: Any, want: Any, *, rms: float, name: str = "result", floor: float = 0.0) -> None:
    """Fails unless the RMS of got - want is at most `rms` times the RMS of want (or of `floor`, where that is larger).

    The message has the error, and the index and values of the worst element.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return
    error = np.abs(got - want)
    bad = ~np.isfinite(error)
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(np.argmax(bad), bad.shape))
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} not finite, first {list(index)}: {got[index]}, expected {want[index]}"
        )
    size = max(np.sqrt(np.mean(want**2)), floor, np.finfo(np.float64).tiny)
    relative = np.sqrt(np.mean(error**2)) / size
    if not relative <= rms:
        index = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
        raise AssertionError(
            f"{name}: RMS error {relative:.2e} of the RMS, allowed {rms:.1e}; "
            f"worst {list(index)}: {got[index]:.9g}, expected {want[index]:.9g}"
        )


def assert_same_bits(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Fails unless every array is equal bit for bit, but for the sign of zero."""
    assert set(got) == set(want), f"results {sorted(got)}, expected {sorted(want)}"
    for name, x in got.items():
        a, b = np.asarray(x), np.asarray(want[name])
        assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype}{a.shape}, expected {b.dtype}{b.shape}"
        same = (a == b) | ((a != a) & (b != b))
        if not same.all():
            index = tuple(int(i) for i in np.unravel_index(np.argmin(same), same.shape))
            raise AssertionError(
                f"{name}: {(~same).sum()} of {same.size} differ, first {list(index)}: {a[index]!r} and {b[index]!r}"
            )
