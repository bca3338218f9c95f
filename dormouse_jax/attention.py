"""Softmax attention: the public operator `attention`.

Below: the public function, validation, dispatch, forward, backward, and the `custom_vjp` that joins the last two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dormouse_jax import packing
from dormouse_jax import validation as check
from dormouse_jax.dispatch import (
    Device,
    device_of,
    interpreting,
    require_hopper,
    require_triton,
    warn_once,
)
from dormouse_jax.explain import OperatorCall, jitted
from dormouse_jax.reference import attention as reference

IMPLEMENTATIONS = ("pallas", "pallas_triton", "pallas_mosaic", "xla")
FLOATS = ("float32", "bfloat16", "float16")
MAX_DIM = 256


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention.

        p_ts = exp(scale q_t . k_s) / sum_s' exp(scale q_t . k_s')
        o_t  = sum_s p_ts v_s

    per batch element and query head, the sums over the keys that query t sees. B batch, Tq queries and Tk keys, H query
    heads, HK key and value heads (H is a multiple of HK: query head h reads key head h // (H / HK)), D from 1 to 256.

    Args:
      q: `[B, Tq, H, D]`, float32, bfloat16 or float16.
      k, v: `[B, Tk, HK, D]`, q's dtype.
      causal: whether query t sees keys up to its own time only. The last query and the last key have the same time:
        query t sees the keys s <= t + Tk - Tq. With Tq > Tk the first queries see none.
      scale: a positive Python number; D^-1/2 by default.
      cu_seqlens: `[N + 1]`, int32 or int64, for B = 1 and Tq = Tk = T: N sequences are packed one after the other, the
        n-th of them in the tokens cu_seqlens[n] up to cu_seqlens[n + 1], and see no other. It starts with 0, does not
        decrease and ends with T, which may be 0. Under `jit` it may be traced; its values are not checked then, and one
        that does not end with T leaves results undefined.
      segment_ids: `[B, T]`, int32 or int64, for Tq = Tk = T: another way to say that sequences are packed. Where a
        token's id is not that of the token before another sequence begins, as in `kda`; an id that comes again later
        is another sequence.
      precision: of the matrix products. "fp32" (float32-accurate; the default for float32 inputs), "tf32" (one TF32
        pass, float32 inputs) or "16bit" (16-bit operands; the default for bfloat16 and float16). Sums, scores and their
        exponentials are float32 always.
      implementation: "pallas" (the best Pallas kernels for the device), "pallas_triton", "pallas_mosaic" (kernels
        for Hopper cards: Tq and Tk multiples of 8, nothing packed, in 16 bit with D of 64 or 128, in "fp32" with
        D of 64) or "xla", which forms the matrix of scores. None takes "pallas" on an NVIDIA GPU and under
        `interpret_kernels()`, and "xla" elsewhere.

    Returns:
      `[B, Tq, H, D]` in q's dtype, differentiable in q, k and v. A query that sees no key gives 0 and has no gradient.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above.
      NotImplementedError: the named implementation cannot serve the call.

    The kernels keep the inputs, o and one number a query for the backward: memory is linear in Tq and Tk. The operator
    is deterministic, and o_t depends on no key that it does not see, bit for bit, be that key or its value inf or NaN;
    but with "pallas_mosaic" an input that is inf or NaN reaches results of its tile, up to 127 tokens away.
    Under `jax.shard_map`, over batch and heads, it needs check_vma=False. After Dao, "FlashAttention-2: Faster
    Attention with Better Parallelism and Work Partitioning", 2023 (arXiv:2307.08691), and Shah et al.,
    "FlashAttention-3", 2024 (arXiv:2407.08608).
    """
    options = _Options(causal, scale, precision, implementation)
    x, options = _validate({"q": q, "k": k, "v": v}, cu_seqlens, segment_ids, options)
    if 0 in x.q.shape[:2]:
        return jnp.zeros(x.q.shape, x.q.dtype)  # Nothing to compute, and kernels need a grid.
    return _with_backward(_plan(options, x), x)


class _Arguments(NamedTuple):
    """The arrays of a call."""

    q: Any  # [B, Tq, H, D]
    k: Any  # [B, Tk, HK, D]
    v: Any  # [B, Tk, HK, D]
    spans: Any = None  # [B, T, 2] int32, of every token the first and the last + 1 of its sequence


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call: as given, and after `_validate` with their defaults filled in."""

    causal: Any
    scale: Any
    precision: Any
    implementation: Any


# Validation


def _validate(given: dict[str, Any], cu_seqlens: Any, segment_ids: Any, options: _Options):
    """Checks everything about a call that can be known without values."""
    q, k, v = (check.as_array("attention", name, x) for name, x in given.items())
    check.require_shape("attention", "q", q, "[B, Tq, H, D]", ("B", "Tq", "H", "D"))
    B, Tq, H, D = q.shape
    check.require_shape("attention", "k", k, "[B, Tk, HK, D]", (B, "Tk", "HK", D))
    Tk, HK = k.shape[1:3]
    check.require_shape("attention", "v", v, "[B, Tk, HK, D]", (B, Tk, HK, D))
    if min(Tq, Tk) < 1 and cu_seqlens is None:
        raise ValueError(
            f"attention: Tq and Tk must be at least 1, got q of shape {list(q.shape)} and k of shape {list(k.shape)}"
        )
    if H < 1 or HK < 1 or H % HK:
        raise ValueError(
            f"attention: H must be a multiple of HK, got q with H = {H} and k with HK = {HK}, "
            f"of shapes {list(q.shape)} and {list(k.shape)}"
        )
    if not 1 <= D <= MAX_DIM:
        raise ValueError(f"attention: D, the last axis of q, must be from 1 to {MAX_DIM}, got {D}")
    check.require_dtype("attention", "q", q, FLOATS)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"attention: {name} must have q's dtype {q.dtype}, got {x.dtype}")

    check.require_choice("attention", "causal", options.causal, (False, True))
    check.require_choice("attention", "implementation", options.implementation, (None, *IMPLEMENTATIONS))
    check.require_choice("attention", "precision", options.precision, (None, "fp32", "tf32", "16bit"))
    of_dtype = ("fp32", "tf32") if q.dtype == jnp.float32 else ("16bit",)
    precision = of_dtype[0] if options.precision is None else options.precision
    if precision not in of_dtype:
        expected = " or ".join(repr(p) for p in of_dtype)
        raise ValueError(f"attention: precision must be {expected} for inputs of dtype {q.dtype}, got {precision!r}")
    scale = D**-0.5 if options.scale is None else check.as_float("attention", "scale", options.scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"attention: scale must be a positive finite number, got {scale}")
    options = dataclasses.replace(options, scale=scale, precision=precision)
    return _Arguments(q, k, v, _spans(q.shape, Tk, cu_seqlens, segment_ids)), options


def _spans(q_shape: tuple[int, ...], Tk: int, cu_seqlens: Any, segment_ids: Any) -> jax.Array | None:
    B, T = q_shape[:2]
    names = [name for name, x in (("cu_seqlens", cu_seqlens), ("segment_ids", segment_ids)) if x is not None]
    if not names:
        return None
    if len(names) == 2:
        raise ValueError("attention: segment_ids must be None with cu_seqlens, which says as much, got both")
    if Tk != T:
        raise ValueError(f"attention: Tq and Tk must be equal with {names[0]}, got {T} and {Tk}")
    if cu_seqlens is not None:
        return packing.spans_of_sequences(packing.require_cu_seqlens("attention", cu_seqlens, B, T), T)
    return packing.spans_of_segments(packing.segment_starts("attention", segment_ids, B, T))


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    implementation: str  # "pallas_mosaic", "pallas_triton" or "xla"
    config: Any
    causal: bool
    scale: float
    precision: str
    platform: str
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]

    def call(self, direction: str) -> OperatorCall:
        return OperatorCall(
            operator="attention",
            direction=direction,
            implementation=self.implementation,
            precision=self.precision,
            interpret=self.interpret,
            config=self.config,
            passed_over=self.passed_over,
        )


def _plan(options: _Options, x: _Arguments) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    device, interpret, asked = device_of(*(a for a in x if a is not None)), interpreting(), options.implementation

    def plan(implementation, config, passed_over):
        return _Plan(
            implementation,
            config,
            bool(options.causal),
            options.scale,
            options.precision,
            device.platform,
            interpret and implementation.startswith("pallas"),
            tuple(passed_over),
        )

    if asked == "xla":
        reason = "implementation='xla' was asked for"
        return plan("xla", None, [("pallas_mosaic", reason), ("pallas_triton", reason)])
    try:
        config = _triton_config(device, interpret, x.q.shape[-1], options.precision)
    except NotImplementedError as reason:
        if asked is not None:
            raise _refusal(asked, reason) from reason
        if device.platform == "gpu" or interpret:
            warn_once(f"attention: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
        return plan("xla", None, [("pallas_triton", str(reason))])
    try:
        return plan("pallas_mosaic", _hopper_config(device, interpret, options, x), [])
    except NotImplementedError as reason:
        if asked == "pallas_mosaic":
            raise _refusal(asked, reason) from reason
        return plan("pallas_triton", config, [("pallas_mosaic", str(reason))])


def _refusal(asked: str, reason: Exception) -> NotImplementedError:
    return NotImplementedError(f"attention: implementation={asked!r} cannot serve this call: {reason}")


def _triton_config(device: Device, interpret: bool, D: int, precision: str) -> Any:
    """The configuration of the Triton kernels, or a NotImplementedError that says why they cannot serve the call."""
    require_triton(device, interpret)
    try:
        return _kernels().choose_config(device.kind, D=D, precision=precision)
    except (ImportError, ValueError) as reason:
        raise NotImplementedError(str(reason)) from reason


def _hopper_config(device: Device, interpret: bool, options: _Options, x: _Arguments) -> Any:
    """The same of the kernels for Hopper."""
    asked = options.implementation
    if asked == "pallas_triton":
        raise NotImplementedError("implementation='pallas_triton' was asked for")
    require_hopper(device, interpret, asked)
    Tq, Tk, D = x.q.shape[1], x.k.shape[1], x.q.shape[3]
    try:
        return _kernels().choose_hopper(
            D=D, Tq=Tq, Tk=Tk, precision=options.precision, packed=x.spans is not None, cores=device.cores
        )
    except ValueError as reason:
        raise NotImplementedError(str(reason)) from reason


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    import pallas_kernels.attention

    return pallas_kernels.attention


def _of_implementation(plan: _Plan) -> tuple[Any, dict[str, Any]]:
    """The module that runs a plan, and what its forward and backward take alike."""
    common = {"causal": plan.causal, "scale": plan.scale, "precision": plan.precision}
    if plan.implementation == "xla":
        return reference, common | {"platform": plan.platform}
    return _kernels(), common | {"config": plan.config, "interpret": plan.interpret}


# Forward


def _forward(plan, x):
    """o, and the logarithm of the sum of the exponentials [B, H, Tq]."""
    module, options = _of_implementation(plan)
    return module.forward(*x, **options)


# Backward


def _backward(plan, x, o, lse, do):
    module, options = _of_implementation(plan)
    return _Arguments(*module.backward(*x, o, lse, do, **options))


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan: _Plan, x: _Arguments):
    return jitted(_forward, plan, "forward")(x)[0]


def _with_backward_fwd(plan, x):
    o, lse = jitted(_forward, plan, "forward")(x)
    return o, (x, o, lse)


def _with_backward_bwd(plan, kept, do):
    return (jitted(_backward, plan, "backward")(*kept, do),)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
