"""Kimi Delta Attention and Gated DeltaNet-2: the public operators `kda` and `gdn2`.

Both are the gated delta rule; `kda` gates what is erased and what is written with one beta per token, `gdn2` with a
vector each. Below: the public functions, validation, dispatch, forward, backward, and the `custom_vjp` that joins the
last two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import validation as check
from dormouse_jax.dispatch import Device, device_of, interpreting, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, record
from dormouse_jax.reference import chunked, recurrent

IMPLEMENTATIONS = ("pallas", "pallas_triton", "pallas_mosaic", "xla", "recurrent")
CHUNK_SIZES = (16, 32, 64, 128)
MAX_DIM = 256


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    state_v_first: bool = False,
    chunk_size: int | None = None,
    precision: str | None = None,
    residuals: str = "recompute",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi Delta Attention.

        S   <- diag(exp(g_t)) S_{t-1}
        S_t  = S + beta_t k_t (v_t - S^T k_t)^T
        o_t  = scale S_t^T q_t

    per batch element and value head, with S_0 = `initial_state`. B batch, T >= 1 tokens, H query/key heads, HV value
    heads (a multiple of H: value head h reads query/key head h // (HV / H)), K key dim and V value dim, each from 1 to
    256.

    Args:
      q, k: `[B, T, H, K]`, float32, bfloat16 or float16, or float64 with implementation="recurrent".
      v: `[B, T, HV, V]`, q's dtype.
      g: `[B, T, HV, K]`, the natural log of the decay, <= 0; -inf forgets the state. Any of the three float dtypes, as
        all gates and states; they are handled in float32.
      beta: `[B, T, HV]`, the strength of the correction.
      scale: a Python number; K^-1/2 by default.
      initial_state: `[B, HV, K, V]`; zeros by default.
      output_final_state: whether to return the state after the last token.
      safe_gate: accepted for the sake of callers of flash-linear-attention; every gate is safe here.
      state_v_first: whether the states given and returned are `[B, HV, V, K]`.
      chunk_size: tokens that are computed at once: 16, 32, 64 or 128, of which the Pallas kernels take 16 and 32. By
        default the implementation's choice;
        "recurrent" has no chunks.
      precision: of the matrix products. "fp32" (float32-accurate; the default for float32 inputs), "tf32" (one TF32
        pass, float32 inputs) or "16bit" (16-bit operands with float32 accumulation; the default for bfloat16 and
        float16).
      residuals: what a differentiated call keeps for its backward. "recompute" keeps the inputs and, with the
        kernels, two matrices `[chunk, chunk]` a chunk and value head; "save" keeps all intermediates, for a faster
        backward. JAX differentiates "recurrent" in its own way.
      implementation: "pallas" (the best Pallas kernels for the device), "pallas_triton", "pallas_mosaic", "xla"
        (chunked jnp) or "recurrent" (`lax.scan` over tokens; the only one with forward-mode derivatives). None takes
        "pallas" on an NVIDIA GPU and under `interpret_kernels()`, where it can serve the call, and "xla" elsewhere.
      use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log,
        dt_bias, cu_seqlens, segment_ids: not implemented yet.

    Returns:
      `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; final_state `[B, HV, K, V]` in float32 (float64 for float64
      inputs), or None. Both are differentiable with respect to q, k, v, g, beta and initial_state.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above.
      NotImplementedError: the named implementation cannot serve the call.

    The operator is deterministic, and o_t depends on no later token, bit for bit. Under `jax.shard_map`, over batch and
    heads, it needs check_vma=False. From Kimi Team, "Kimi Linear: An
    Expressive, Efficient Attention Architecture", 2025 (arXiv:2510.26692). Arguments follow `chunk_kda` of
    flash-linear-attention.
    """
    _refuse_options(
        "kda",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
    )
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = _Options(scale, output_final_state, state_v_first, chunk_size, precision, residuals, implementation)
    return _delta_rule("kda", inputs, initial_state, options)


def gdn2(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    erase: jax.Array,
    write: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    state_v_first: bool = False,
    chunk_size: int | None = None,
    precision: str | None = None,
    residuals: str = "recompute",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated DeltaNet-2: the gated delta rule with an erase gate a key channel and a write gate a value channel.

        S   <- diag(exp(g_t)) S_{t-1}
        S_t  = S + k_t (write_t * v_t - S^T (erase_t * k_t))^T
        o_t  = scale S_t^T q_t

    Args:
      erase: `[B, T, HV, K]`.
      write: `[B, T, HV, V]`.
      use_beta_sigmoid_in_kernel, allow_neg_eigval: options of beta, which is not an argument here: a TypeError.
      The others: as in `kda`, of which this is the general case: `kda` is erase = write = beta.

    Returns, raises: as `kda`; differentiable with respect to erase and write in place of beta.
    """
    for name, value in (
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
    ):
        if value:
            raise TypeError(f"gdn2: {name} is an option of beta, and gdn2 has the gates erase and write instead")
    _refuse_options(
        "gdn2",
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=cu_seqlens,
        segment_ids=segment_ids,
    )
    inputs = {"q": q, "k": k, "v": v, "g": g, "erase": erase, "write": write}
    options = _Options(scale, output_final_state, state_v_first, chunk_size, precision, residuals, implementation)
    return _delta_rule("gdn2", inputs, initial_state, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call, as given."""

    scale: Any
    output_final_state: Any
    state_v_first: Any
    chunk_size: Any
    precision: str | None
    residuals: str
    implementation: str | None


def _delta_rule(operator: str, inputs: dict[str, Any], initial_state: Any, options: _Options):
    """One call of either operator, from arguments as given to results as returned."""
    q, k, v, g, erase, write, state, options = _validate(operator, inputs, initial_state, options)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if B == 0:
        # Nothing to compute, and kernels need a grid.
        o = jnp.zeros(v.shape, q.dtype)
        final_state = jnp.zeros((0, HV, K, V), jnp.promote_types(q.dtype, jnp.float32))
    else:
        plan = _plan(operator, options, q, k, v, g, erase, write, state)
        run = _by_autodiff if plan.implementation == "recurrent" else _with_backward
        o, final_state = run(plan, q, k, v, g, erase, write, state)
    if not options.output_final_state:
        return o, None
    return o, jnp.swapaxes(final_state, -1, -2) if options.state_v_first else final_state


# Validation


def _refuse_options(operator: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{operator}: {name} is not implemented yet")


def _validate(operator: str, inputs: dict[str, Any], state: Any, options: _Options):
    """Checks everything about a call that can be known without values.

    Returns q, k, v, g, erase, write and the state as `[B, HV, K, V]` arrays in the dtypes that implementations take
    (write None for kda), and the options with their defaults filled in.
    """
    arrays = {name: check.as_array(operator, name, x) for name, x in inputs.items()}
    q, k, v, g = (arrays[name] for name in "qkvg")

    check.require_shape(operator, "q", q, "[B, T, H, K]", ("B", "T", "H", "K"))
    B, T, H, K = q.shape
    check.require_shape(operator, "k", k, "[B, T, H, K]", (B, T, H, K))
    check.require_shape(operator, "v", v, "[B, T, HV, V]", (B, T, "HV", "V"))
    HV, V = v.shape[2:]
    if T < 1:
        raise ValueError(f"{operator}: T must be at least 1, got q of shape {list(q.shape)}")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            f"{operator}: HV must be a multiple of H, got v with HV = {HV} and q with H = {H}, "
            f"of shapes {list(v.shape)} and {list(q.shape)}"
        )
    for name, axis, size in (("q", "K", K), ("v", "V", V)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(f"{operator}: {axis}, the last axis of {name}, must be from 1 to {MAX_DIM}, got {size}")
    check.require_shape(operator, "g", g, "[B, T, HV, K]", (B, T, HV, K))
    if operator == "kda":
        check.require_shape(operator, "beta", arrays["beta"], "[B, T, HV]", (B, T, HV))
    else:
        check.require_shape(operator, "erase", arrays["erase"], "[B, T, HV, K]", (B, T, HV, K))
        check.require_shape(operator, "write", arrays["write"], "[B, T, HV, V]", (B, T, HV, V))
    if state is not None:
        state = check.as_array(operator, "initial_state", state)
        axes, shape = ("[B, HV, V, K]", (B, HV, V, K)) if options.state_v_first else ("[B, HV, K, V]", (B, HV, K, V))
        check.require_shape(operator, "initial_state", state, axes, shape)

    options = _validate_options(operator, options, str(q.dtype), K)
    floats = ("float32", "bfloat16", "float16") + (("float64",) if options.implementation == "recurrent" else ())
    check.require_dtype(operator, "q", q, floats)
    for name in ("k", "v"):
        if arrays[name].dtype != q.dtype:
            raise TypeError(f"{operator}: {name} must have q's dtype {q.dtype}, got {arrays[name].dtype}")
    gates = floats if q.dtype == "float64" else floats[:3]
    for name in inputs:
        check.require_dtype(operator, name, arrays[name], gates)
    if state is not None:
        check.require_dtype(operator, "initial_state", state, gates)
        state = state.astype(jnp.promote_types(q.dtype, jnp.float32))
        state = jnp.swapaxes(state, -1, -2) if options.state_v_first else state
    erase, write = (arrays["beta"], None) if operator == "kda" else (arrays["erase"], arrays["write"])
    return q, k, v, g, erase, write, state, options


def _validate_options(operator: str, options: _Options, dtype: str, K: int) -> _Options:
    check.require_choice(operator, "implementation", options.implementation, (None, *IMPLEMENTATIONS))
    check.require_choice(operator, "residuals", options.residuals, ("recompute", "save"))
    check.require_choice(operator, "chunk_size", options.chunk_size, (None, *CHUNK_SIZES))
    check.require_choice(operator, "precision", options.precision, (None, "fp32", "tf32", "16bit"))
    of_dtype = {"float32": ("fp32", "tf32"), "float64": ("fp64",)}.get(dtype, ("16bit",))
    precision = of_dtype[0] if options.precision is None else options.precision
    if precision not in of_dtype and dtype in ("float32", "bfloat16", "float16", "float64"):
        expected = " or ".join(repr(p) for p in of_dtype if p != "fp64") or "None"
        raise ValueError(f"{operator}: precision must be {expected} for inputs of dtype {dtype}, got {precision!r}")
    if dtype == "float64" and options.implementation not in (None, "recurrent"):
        raise NotImplementedError(
            f"{operator}: implementation={options.implementation!r} cannot serve this call: "
            "only 'recurrent' takes float64"
        )
    scale = K**-0.5 if options.scale is None else check.as_float(operator, "scale", options.scale)
    return dataclasses.replace(options, scale=scale, precision=precision)


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    operator: str
    implementation: str  # "pallas_triton", "xla" or "recurrent"
    config: Any
    scale: float
    precision: str
    residuals: str
    final_state: bool  # whether the final state is wanted
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]


def _plan(operator, options, q, k, v, g, erase, write, state) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    device, interpret = device_of(q, k, v, g, erase, *(x for x in (write, state) if x is not None)), interpreting()
    sizes: dict[str, Any] = {"K": q.shape[3], "V": v.shape[3], "T": q.shape[1], "batch_heads": v.shape[0] * v.shape[2]}
    sizes |= {"precision": options.precision, "chunk_size": options.chunk_size}
    asked = options.implementation

    def plan(implementation, config, passed_over=()):
        interpreted = interpret and implementation.startswith("pallas")
        return _Plan(
            operator,
            implementation,
            config,
            options.scale,
            options.precision,
            options.residuals,
            bool(options.output_final_state),
            interpreted,
            tuple(passed_over),
        )

    if asked == "pallas_mosaic":
        raise NotImplementedError(
            f"{operator}: implementation='pallas_mosaic' cannot serve this call: "
            "there is no Mosaic GPU kernel of it yet"
        )
    if asked == "recurrent":
        return plan(
            "recurrent", None, [(name, "implementation='recurrent' was asked for") for name in ("pallas", "xla")]
        )
    passed_over = [("pallas_triton", "implementation='xla' was asked for")]
    if asked != "xla":
        try:
            return plan("pallas_triton", _triton_config(device, interpret, sizes))
        except NotImplementedError as reason:
            if asked is not None:
                raise NotImplementedError(
                    f"{operator}: implementation={asked!r} cannot serve this call: {reason}"
                ) from reason
            if device.platform == "gpu" or interpret:
                warn_once(f"{operator}: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
            passed_over = [("pallas_triton", str(reason))]
    return plan("xla", chunked.choose_config(device.platform, dtype=q.dtype, **sizes), passed_over)


def _triton_config(device: Device, interpret: bool, sizes: dict[str, Any]) -> Any:
    """The configuration of the Triton kernels, or a NotImplementedError that says why they cannot serve the call."""
    require_triton(device, interpret)
    try:
        return _triton_kernels().choose_config(device.kind, **sizes)
    except (ImportError, ValueError) as reason:
        raise NotImplementedError(str(reason)) from reason


def _triton_kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    import pallas_kernels.kda

    return pallas_kernels.kda


@functools.lru_cache(maxsize=4096)
def _jitted(function: Callable[..., Any], plan: _Plan, direction: str) -> Callable[..., Any]:
    """`function` of a plan, jitted under a name from which `explain` knows the plan."""

    def run(*arrays):
        return function(plan, *arrays)

    run.__name__ = run.__qualname__ = record(
        OperatorCall(
            operator=plan.operator,
            direction=direction,
            implementation=plan.implementation,
            precision=plan.precision,
            interpret=plan.interpret,
            config=plan.config,
            passed_over=plan.passed_over,
        )
    )
    return jax.jit(run)


def _by_autodiff(plan, *inputs):
    return _jitted(_recurrent, plan, "forward")(*inputs)


def _recurrent(plan, *inputs):
    o, final_state = recurrent.forward(*inputs, scale=plan.scale)
    return o, final_state if plan.final_state else None


# Forward


def _forward(plan, q, k, v, g, erase, write, state):
    return _forward_kernels(plan, q, k, v, g, erase, write, state, save=False)[:2]


def _forward_with_residuals(plan, q, k, v, g, erase, write, state):
    return _forward_kernels(plan, q, k, v, g, erase, write, state, save=plan.residuals == "save")


def _forward_kernels(plan, *inputs, save):
    if plan.implementation == "xla":
        o, final_state, residuals = chunked.forward(*inputs, scale=plan.scale, config=plan.config, save=save)
    else:
        o, final_state, residuals = _triton_kernels().forward(
            *inputs, scale=plan.scale, precision=plan.precision, config=plan.config, interpret=plan.interpret, save=save
        )
    # A state that nobody wants is left out here, so that its gradient is None in the backward, not an array of zeros.
    return o, final_state if plan.final_state else None, residuals


# Backward


def _backward(plan, q, k, v, g, erase, write, state, residuals, do, dfinal_state):
    arrays = (q, k, v, g, erase, write, state, residuals, do, dfinal_state)
    if plan.implementation == "xla":
        return chunked.backward(*arrays, scale=plan.scale, config=plan.config)
    return _triton_kernels().backward(
        *arrays, scale=plan.scale, precision=plan.precision, config=plan.config, interpret=plan.interpret
    )


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan, q, k, v, g, erase, write, state):
    return _jitted(_forward, plan, "forward")(q, k, v, g, erase, write, state)


def _with_backward_fwd(plan, q, k, v, g, erase, write, state):
    inputs = (q, k, v, g, erase, write, state)
    phase = "forward with residuals" if plan.residuals == "save" else "forward"
    o, final_state, residuals = _jitted(_forward_with_residuals, plan, phase)(*inputs)
    return (o, final_state), (inputs, residuals)


def _with_backward_bwd(plan, kept, cotangents):
    inputs, residuals = kept
    return _jitted(_backward, plan, "backward")(*inputs, residuals, *cotangents)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
