"""Short causal convolutions with a silu: the public operator `short_convolution`.

In this order: the public function, dispatch, forward, backward, and the `custom_vjp` that joins the last two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dormouse_jax import packing
from dormouse_jax import validation as check
from dormouse_jax.dispatch import device_of, interpreting, require_proven, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, jitted
from dormouse_jax.reference import short_convolution as reference

IMPLEMENTATIONS = ("pallas", "pallas_triton", "xla")
FLOATS = ("float32", "bfloat16", "float16")
_NAME = "short_convolution"


def short_convolution(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    sizes: Sequence[int] | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """A causal convolution over the last S tokens, each channel by itself, and a silu.

        z_t = bias + sum_k kernel_k x_{t - S + 1 + k}      y_t = z_t sigmoid(z_t)

    where x is 0 before the sequence's first token. All arithmetic is in float32.

    Args:
      x: `[B, T, C]`, float32, bfloat16 or float16.
      kernel: `[S, C]`, any of the three dtypes; the last row is that of the token itself.
      bias: `[C]`, likewise; None for none.
      sizes: of several results that lie next to each other in C, such as those of one product with the weights of
        several projections: the channels of each, which add up to C. None for one result.
      segment_ids: `[B, T]`, int32 or int64, for packed sequences: where a token's id is not that of the token before
        another sequence begins, as in `kda`. None: one sequence a row.
      implementation: "pallas" or "pallas_triton" (kernels, for S up to 8), or "xla". None takes "pallas" on an NVIDIA
        GPU and under `interpret_kernels()`, and "xla" elsewhere.

    Returns:
      y `[B, T, C]` in x's dtype; with `sizes` a tuple of `[B, T, size]`. Differentiable in x, kernel and bias.

    Raises:
      ValueError, TypeError: a shape, a dtype or an option is not one of the above.
      NotImplementedError: the named implementation cannot serve the call.

    For the backward x and the weights are kept. The operator is deterministic: the same inputs give the same bits.
    Under `jax.shard_map`, over the batch, its kernels need check_vma=False.
    """
    x, kernel = (check.as_array(_NAME, name, a) for name, a in (("x", x), ("kernel", kernel)))
    check.require_shape(_NAME, "x", x, "[B, T, C]", ("B", "T", "C"))
    B, T, C = x.shape
    check.require_shape(_NAME, "kernel", kernel, "[S, C]", ("S", C))
    if 0 in kernel.shape:
        raise ValueError(f"{_NAME}: S and C must be at least 1, got kernel of shape {list(kernel.shape)}")
    check.require_dtype(_NAME, "x", x, FLOATS)
    check.require_dtype(_NAME, "kernel", kernel, FLOATS)
    if bias is not None:
        bias = check.as_array(_NAME, "bias", bias)
        check.require_shape(_NAME, "bias", bias, "[C]", (C,))
        check.require_dtype(_NAME, "bias", bias, FLOATS)
    channels = (C,) if sizes is None else tuple(check.as_index(_NAME, "sizes", size) for size in sizes)
    if sum(channels) != C or min(channels, default=0) < 1:
        raise ValueError(f"{_NAME}: sizes must be positive and add up to C = {C}, got {list(channels)}")
    check.require_choice(_NAME, "implementation", implementation, (None, *IMPLEMENTATIONS))
    starts = None
    if segment_ids is not None:
        starts = packing.spans_of_segments(packing.segment_starts(_NAME, segment_ids, B, T))[..., 0]
    if B * T == 0:  # Nothing to compute, and kernels need a grid.
        ys = tuple(jnp.zeros((B, T, size), x.dtype) for size in channels)
    else:
        arrays = _Arguments(x, kernel, bias, starts)
        ys = _with_backward(_plan(arrays, channels, implementation), arrays)
    return ys[0] if sizes is None else ys


class _Arguments(NamedTuple):
    """The arrays of a call."""

    x: Any  # [B, T, C]
    kernel: Any  # [S, C]
    bias: Any = None  # [C]
    starts: Any = None  # [B, T] int32, of every token the first one of its sequence


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    implementation: str  # "pallas_triton" or "xla"
    config: Any
    sizes: tuple[int, ...]
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


def _plan(arrays: _Arguments, sizes: tuple[int, ...], asked: str | None) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    device, interpret = device_of(*(a for a in arrays if a is not None)), interpreting()
    if asked == "xla":
        return _Plan("xla", None, sizes, False, (("pallas_triton", "implementation='xla' was asked for"),))
    try:
        require_triton(device, interpret)
        require_proven(_NAME, interpret, named=asked is not None)
        (B, T, _), taps = arrays.x.shape, arrays.kernel.shape[0]
        try:
            config = _kernels().choose_config(B=B, T=T, taps=taps, sizes=sizes)
        except (ImportError, ValueError) as reason:
            raise NotImplementedError(str(reason)) from reason
        return _Plan("pallas_triton", config, sizes, interpret, ())
    except NotImplementedError as reason:
        if asked is not None:
            raise NotImplementedError(f"{_NAME}: implementation={asked!r} cannot serve this call: {reason}") from reason
        if device.platform == "gpu" or interpret:
            warn_once(f"{_NAME}: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
        return _Plan("xla", None, sizes, False, (("pallas_triton", str(reason)),))


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    import pallas_kernels.short_convolution

    return pallas_kernels.short_convolution


def _of_implementation(plan: _Plan) -> tuple[Any, dict[str, Any]]:
    """The module that runs a plan, and what its forward and backward take alike."""
    if plan.implementation == "xla":
        return reference, {"sizes": plan.sizes}
    return _kernels(), {"sizes": plan.sizes, "config": plan.config, "interpret": plan.interpret}


def _float32(x: _Arguments) -> tuple[Any, ...]:
    bias = None if x.bias is None else x.bias.astype(jnp.float32)
    return x.x, x.kernel.astype(jnp.float32), bias, x.starts


# Forward


def _forward(plan, x):
    module, options = _of_implementation(plan)
    return module.forward(*_float32(x), **options)


# Backward


def _backward(plan, x, dys):
    module, options = _of_implementation(plan)
    dx, dkernel, dbias = module.backward(*_float32(x), dys, **options)
    dbias = None if x.bias is None else dbias.astype(x.bias.dtype)
    return _Arguments(dx, dkernel.astype(x.kernel.dtype), dbias)


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan: _Plan, x: _Arguments):
    return jitted(_forward, plan, "forward")(x)


def _with_backward_fwd(plan, x):
    return _with_backward(plan, x), x


def _with_backward_bwd(plan, x, dys):
    return (jitted(_backward, plan, "backward")(x, dys),)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
