"""RMS norms with the sum before and the gate behind: the public operator `rms_norm`.

In this order: the public function, dispatch, forward, backward, and the `custom_vjp` that joins the last two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dormouse_jax import validation as check
from dormouse_jax.dispatch import device_of, interpreting, require_proven, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, jitted
from dormouse_jax.reference import rms_norm as reference

IMPLEMENTATIONS = ("pallas", "pallas_triton", "xla")
FLOATS = ("float32", "bfloat16", "float16")
_NAME = "rms_norm"


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_bias: jax.Array | None = None,
    epsilon: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """An RMS norm along the last axis, and what often stands next to one.

        x = x + residual                                     rounded to x's dtype
        y = x / sqrt(mean(x^2) + epsilon) scale              times sigmoid(gate + gate_bias) with a gate

    Each part but the norm is optional. All arithmetic other than the sum is in float32.

    Args:
      x: `[..., D]`, float32, bfloat16 or float16.
      scale: `[D]`, any of the three dtypes.
      residual: x's shape and dtype.
      gate: x's shape and dtype.
      gate_bias: `[D]`, or `[H, D]` where x is `[..., H, D]`; it needs a gate. 0 by default.
      epsilon: a positive Python number.
      implementation: "pallas" or "pallas_triton" (kernels, for D up to 16384), or "xla". None takes "pallas" on an
        NVIDIA GPU and under `interpret_kernels()`, and "xla" elsewhere.

    Returns:
      y in x's shape and dtype; with a residual `(x + residual, y)`. Differentiable in every array.

    Raises:
      ValueError, TypeError: a shape, a dtype or an option is not one of the above.
      NotImplementedError: the named implementation cannot serve the call.

    For the backward the sum, and the gate, are kept. The operator is deterministic: the same inputs give the same bits.
    Under `jax.shard_map`, over axes other than the last, its kernels need check_vma=False. From Zhang and Sennrich,
    "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
    """
    x, scale = (check.as_array(_NAME, name, a) for name, a in (("x", x), ("scale", scale)))
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"{_NAME}: x must have shape [..., D] with D at least 1, got {list(x.shape)}")
    check.require_shape(_NAME, "scale", scale, "[D]", x.shape[-1:])
    check.require_dtype(_NAME, "x", x, FLOATS)
    check.require_dtype(_NAME, "scale", scale, FLOATS)
    for name, a in (("residual", residual), ("gate", gate)):
        if a is not None:
            check.require_shape(_NAME, name, check.as_array(_NAME, name, a), "that of x", x.shape)
            check.require_dtype(_NAME, name, a, (str(x.dtype),))
    if gate_bias is not None:
        if gate is None:
            raise ValueError(f"{_NAME}: gate_bias must be None without a gate, got one")
        gate_bias = check.as_array(_NAME, "gate_bias", gate_bias)
        if gate_bias.ndim not in (1, 2) or gate_bias.shape != x.shape[-gate_bias.ndim :]:
            raise ValueError(
                f"{_NAME}: gate_bias must have the shape of x's last axis or last two, of {list(x.shape)}, "
                f"got {list(gate_bias.shape)}"
            )
        check.require_dtype(_NAME, "gate_bias", gate_bias, FLOATS)
    epsilon = check.as_float(_NAME, "epsilon", epsilon)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"{_NAME}: epsilon must be a positive finite number, got {epsilon}")
    check.require_choice(_NAME, "implementation", implementation, (None, *IMPLEMENTATIONS))

    if x.size == 0:  # Nothing to compute, and kernels need a grid.
        total, y = x, x
    else:
        # A bias for every head makes a row of all heads, of which each is normed.
        width = x.shape[-1] if gate_bias is None else gate_bias.size
        flat = [None if a is None else a.reshape(-1, width) for a in (x, residual, gate)]
        if gate is not None and gate_bias is None:
            gate_bias = jnp.zeros(width, jnp.float32)
        arrays = _Arguments(flat[0], scale, flat[1], flat[2], None if gate_bias is None else gate_bias.reshape(-1))
        total, y = _with_backward(_plan(arrays, epsilon, implementation), arrays)
    y = y.reshape(x.shape)
    return y if residual is None else (total.reshape(x.shape), y)


class _Arguments(NamedTuple):
    """The arrays of a call."""

    x: Any  # [rows, groups * D]
    scale: Any  # [D]
    residual: Any = None  # [rows, groups * D]
    gate: Any = None  # [rows, groups * D]
    bias: Any = None  # [groups * D], with a gate


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    implementation: str  # "pallas_triton" or "xla"
    config: Any
    epsilon: float
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]

    def call(self, direction: str) -> OperatorCall:
        return OperatorCall(
            operator=_NAME,
            direction=direction,
            implementation=self.implementation,
            precision="fp32",
            interpret=self.interpret,
            config=self.config,
            passed_over=self.passed_over,
        )


def _plan(arrays: _Arguments, epsilon: float, asked: str | None) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    device, interpret = device_of(*(a for a in arrays if a is not None)), interpreting()
    if asked == "xla":
        return _Plan("xla", None, epsilon, False, (("pallas_triton", "implementation='xla' was asked for"),))
    try:
        require_triton(device, interpret)
        require_proven(_NAME, interpret, named=asked is not None)
        (rows, columns), dim = arrays.x.shape, arrays.scale.shape[0]
        try:
            config = _kernels().choose_config(rows=rows, groups=columns // dim, dim=dim, gated=arrays.gate is not None)
        except (ImportError, ValueError) as reason:
            raise NotImplementedError(str(reason)) from reason
        return _Plan("pallas_triton", config, epsilon, interpret, ())
    except NotImplementedError as reason:
        if asked is not None:
            raise NotImplementedError(f"{_NAME}: implementation={asked!r} cannot serve this call: {reason}") from reason
        if device.platform == "gpu" or interpret:
            warn_once(f"{_NAME}: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
        return _Plan("xla", None, epsilon, False, (("pallas_triton", str(reason)),))


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    import pallas_kernels.rms_norm

    return pallas_kernels.rms_norm


def _of_implementation(plan: _Plan) -> tuple[Any, dict[str, Any]]:
    """The module that runs a plan, and what its forward and backward take alike."""
    if plan.implementation == "xla":
        return reference, {"eps": plan.epsilon}
    return _kernels(), {"eps": plan.epsilon, "config": plan.config, "interpret": plan.interpret}


def _float32(a: Any) -> Any:
    return None if a is None else a.astype(jnp.float32)


# Forward


def _forward(plan, a):
    module, options = _of_implementation(plan)
    return module.forward(a.x, _float32(a.scale), a.residual, a.gate, _float32(a.bias), **options)


# Backward


def _backward(plan, a, total, dtotal, dy):
    module, options = _of_implementation(plan)
    x = a.x if total is None else total
    dx, dscale, dgate, dbias = module.backward(x, _float32(a.scale), a.gate, _float32(a.bias), dy, dtotal, **options)
    dbias = None if dbias is None else dbias.astype(a.bias.dtype)
    return _Arguments(dx, dscale.astype(a.scale.dtype), None if total is None else dx, dgate, dbias)


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan: _Plan, a: _Arguments):
    return jitted(_forward, plan, "forward")(a)


def _with_backward_fwd(plan, a):
    total, y = _with_backward(plan, a)
    # What there is a sum of is not needed beside it.
    kept = a if total is None else a._replace(x=None, residual=None)
    return (total, y), (kept, total)


def _with_backward_bwd(plan, kept, gradients):
    return (jitted(_backward, plan, "backward")(*kept, *gradients),)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
