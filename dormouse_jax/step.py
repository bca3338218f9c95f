"""One token of Kimi Delta Attention: the public operator `kda_step`, for decoding.

In this order: the public function, validation, dispatch, forward, backward, and the `custom_vjp` that joins them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import gates
from dormouse_jax import validation as check
from dormouse_jax.dispatch import device_of, interpreting, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, record
from dormouse_jax.kda_arguments import IMPLEMENTATIONS, MAX_DIM
from dormouse_jax.reference import recurrent


def kda_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    state_v_first: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of Kimi Delta Attention a sequence, from a state to the next.

        S   <- diag(exp(g)) S
        S'   = S + beta k (v - S^T k)^T
        o    = scale S'^T q

    `kda` on T tokens equals `kda_step` on each of them with the state carried, and the two can follow each other: `kda`
    reads a prompt, `kda_step` continues from its final state.

    The kernel reads the state once and writes it once, in place where its memory can be had: give it up by donation
    (`jax.jit(step, donate_argnames="state")`), or carry it through `lax.scan` or `lax.while_loop`. A state that is kept
    is copied first.

    Args:
      q, k: `[B, H, K]`, float32, bfloat16 or float16, or float64 with implementation="recurrent".
      v: `[B, HV, V]`, q's dtype; HV is a multiple of H.
      g: `[B, HV, K]`, the natural log of the decay, <= 0. Any of the three float dtypes, as beta; they are handled in
        float32.
      beta: `[B, HV]`.
      state: `[B, HV, K, V]`, any float dtype; only a float32 one can be updated in place.
      scale: a Python number; K^-1/2 by default.
      use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log,
        dt_bias: as in `kda`; what they make of q, k, g and beta is in `dormouse_jax.gates`.
      state_v_first: whether the states given and returned are `[B, HV, V, K]`. The kernel wants the other order, so
        that this costs two transpositions of the state.
      implementation: "pallas", "pallas_triton", "pallas_mosaic", or "xla" and "recurrent", which are the same plain
        jnp here: one token has no chunks. None takes "pallas" on an NVIDIA GPU and under `interpret_kernels()`, and
        "xla" elsewhere.

    Returns:
      `(o, state)`: o `[B, HV, V]` in q's dtype, the state in float32 (float64 for float64 inputs). Both are
      differentiable with respect to every array given; through a kernel in reverse mode only.

    Raises:
      ValueError, TypeError, NotImplementedError: as `kda`.

    All arithmetic is in float32. Source as for `kda`.
    """
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "state": state}
    options = _Options(
        scale=scale,
        l2norm=bool(use_qk_l2norm_in_kernel),
        gate=bool(use_gate_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel),
        neg_eigval=bool(allow_neg_eigval),
        lower_bound=lower_bound,
        state_v_first=bool(state_v_first),
        implementation=implementation,
    )
    arrays, options = _validate(inputs, options)
    if arrays["q"].shape[0] == 0:
        # Nothing to compute, and kernels need a grid.
        return jnp.zeros(arrays["v"].shape, arrays["q"].dtype), state
    plan = _plan(arrays, options)
    run = _with_backward if plan.implementation == "pallas_triton" else _forward
    o, state = run(plan, *arrays.values())
    return o, jnp.swapaxes(state, -1, -2) if state_v_first else state


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call: as given, and after validation with their defaults filled in."""

    scale: Any
    l2norm: bool
    gate: bool
    beta_sigmoid: bool
    neg_eigval: bool
    lower_bound: Any
    state_v_first: bool
    implementation: str | None


# Validation


def _validate(inputs: dict[str, Any], options: _Options) -> tuple[dict[str, Any], _Options]:
    """Checks everything that can be known without values; returns the arrays in the dtypes that implementations take,
    and the options with their defaults filled in."""
    optional = ("A_log", "dt_bias")
    arrays: dict[str, Any] = {
        name: None if x is None and name in optional else check.as_array("kda_step", name, x)
        for name, x in inputs.items()
    }
    q, v, state = arrays["q"], arrays["v"], arrays["state"]
    check.require_shape("kda_step", "q", q, "[B, H, K]", ("B", "H", "K"))
    B, H, K = q.shape
    check.require_shape("kda_step", "k", arrays["k"], "[B, H, K]", (B, H, K))
    check.require_shape("kda_step", "v", v, "[B, HV, V]", (B, "HV", "V"))
    HV, V = v.shape[1:]
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            f"kda_step: HV must be a multiple of H, got v with HV = {HV} and q with H = {H}, "
            f"of shapes {list(v.shape)} and {list(q.shape)}"
        )
    for name, axis, size in (("q", "K", K), ("v", "V", V)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(f"kda_step: {axis}, the last axis of {name}, must be from 1 to {MAX_DIM}, got {size}")
    check.require_shape("kda_step", "g", arrays["g"], "[B, HV, K]", (B, HV, K))
    check.require_shape("kda_step", "beta", arrays["beta"], "[B, HV]", (B, HV))
    for name, axes, size in (("A_log", "[HV]", HV), ("dt_bias", "[HV * K]", HV * K)):
        if arrays[name] is not None:
            check.require_shape("kda_step", name, arrays[name], axes, (size,))
    if options.state_v_first:
        check.require_shape("kda_step", "state", state, "[B, HV, V, K]", (B, HV, V, K))
    else:
        check.require_shape("kda_step", "state", state, "[B, HV, K, V]", (B, HV, K, V))

    options = _validate_options(arrays, options)
    floats = ("float32", "bfloat16", "float16") + (("float64",) if options.implementation == "recurrent" else ())
    check.require_dtype("kda_step", "q", q, floats)
    for name in ("k", "v"):
        if arrays[name].dtype != q.dtype:
            raise TypeError(f"kda_step: {name} must have q's dtype {q.dtype}, got {arrays[name].dtype}")
    for name, x in arrays.items():
        if x is not None:
            check.require_dtype("kda_step", name, x, floats if q.dtype == "float64" else floats[:3])
    state = state.astype(jnp.promote_types(q.dtype, jnp.float32))
    arrays["state"] = jnp.swapaxes(state, -1, -2) if options.state_v_first else state
    return arrays, options


def _validate_options(arrays: dict[str, Any], options: _Options) -> _Options:
    check.require_choice("kda_step", "implementation", options.implementation, (None, *IMPLEMENTATIONS))
    if arrays["q"].dtype == "float64" and options.implementation not in (None, "recurrent"):
        raise NotImplementedError(
            f"kda_step: implementation={options.implementation!r} cannot serve this call: "
            "only 'recurrent' takes float64"
        )
    if options.neg_eigval and not options.beta_sigmoid:
        raise ValueError("kda_step: allow_neg_eigval must be False without use_beta_sigmoid_in_kernel=True, got True")
    bound = options.lower_bound
    if bound is not None:
        bound = check.as_float("kda_step", "lower_bound", bound)
        if not (math.isfinite(bound) and bound < 0):
            raise ValueError(f"kda_step: lower_bound must be a finite number below 0, got {bound}")
    given = {"A_log": arrays["A_log"], "dt_bias": arrays["dt_bias"], "lower_bound": bound}
    if options.gate and arrays["A_log"] is None and bound is None:
        raise ValueError(
            "kda_step: A_log must be given with use_gate_in_kernel=True where there is no lower_bound, got None"
        )
    for name, x in given.items():
        if x is not None and not options.gate:
            got = x if name == "lower_bound" else f"an array of shape {list(x.shape)}"
            raise ValueError(f"kda_step: {name} must be None without use_gate_in_kernel=True, got {got}")
    K = arrays["q"].shape[-1]
    scale = K**-0.5 if options.scale is None else check.as_float("kda_step", "scale", options.scale)
    return dataclasses.replace(options, scale=scale, lower_bound=bound)


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    implementation: str  # "pallas_triton", "xla" or "recurrent"
    config: Any
    options: _Options
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]


def _plan(arrays: dict[str, Any], options: _Options) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    asked = options.implementation
    device, interpret = device_of(*(x for x in arrays.values() if x is not None)), interpreting()
    if asked == "pallas_mosaic":
        raise NotImplementedError(
            "kda_step: implementation='pallas_mosaic' cannot serve this call: there is no Mosaic GPU kernel of it yet"
        )
    if asked in ("xla", "recurrent"):
        return _Plan(asked, None, options, False, (("pallas_triton", f"implementation={asked!r} was asked for"),))
    try:
        require_triton(device, interpret)
        try:
            config = _kernels().choose_step_config(K=arrays["q"].shape[-1], V=arrays["v"].shape[-1])
        except ImportError as reason:
            raise NotImplementedError(str(reason)) from reason
        return _Plan("pallas_triton", config, options, interpret, ())
    except NotImplementedError as reason:
        if asked is not None:
            raise NotImplementedError(
                f"kda_step: implementation={asked!r} cannot serve this call: {reason}"
            ) from reason
        if device.platform == "gpu" or interpret:
            warn_once(f"kda_step: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
        return _Plan("xla", None, options, False, (("pallas_triton", str(reason)),))


def _kernels() -> Any:
    import pallas_kernels.kda.step

    return pallas_kernels.kda.step


@functools.lru_cache(maxsize=4096)
def _jitted(plan: _Plan):
    """The forward of a plan, jitted under a name from which `explain` knows the plan."""

    def run(*arrays):
        if plan.implementation != "pallas_triton":
            return _jnp(plan.options, *arrays)
        options, kernels = plan.options, _kernels()
        raw = kernels.Raw(options.l2norm, options.gate, options.lower_bound, options.beta_sigmoid, options.neg_eigval)
        return kernels.step(*arrays, scale=options.scale, raw=raw, config=plan.config, interpret=plan.interpret)

    run.__name__ = run.__qualname__ = record(
        OperatorCall("kda_step", "forward", plan.implementation, "fp32", plan.interpret, plan.config, plan.passed_over)
    )
    return jax.jit(run)


# Forward


def _jnp(options, q, k, v, g, beta, A_log, dt_bias, state):
    if options.l2norm:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    if options.gate:
        g = gates.log_decay(g, A_log, dt_bias, options.lower_bound)
    if options.beta_sigmoid:
        beta = gates.beta_sigmoid(beta, options.neg_eigval)
    return recurrent.step(q, k, v, g, beta[..., None], beta[..., None], state, scale=options.scale)


def _forward(plan, *inputs):
    return _jitted(plan)(*inputs)


# Backward


def _backward(plan, inputs, cotangents):
    """Of one token: nothing to keep but the inputs, and plain jnp is bound by the same reads of the state."""
    _, pull = jax.vjp(functools.partial(_jnp, plan.options), *inputs)
    return pull(cotangents)


# The two joined

_with_backward = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_with_backward.defvjp(lambda plan, *inputs: (_forward(plan, *inputs), inputs), _backward)
