"""Kimi Delta Attention and Gated DeltaNet-2: the public operators `kda` and `gdn2`.

Both are the gated delta rule; `kda` gates what is erased and what is written with one beta per token, `gdn2` with a
vector each. Below: the public functions, validation, dispatch, forward, backward, and the `custom_vjp` that joins the
last two.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import gates, packing
from dormouse_jax.dispatch import (
    Device,
    device_of,
    interpreting,
    require_hopper,
    require_triton,
    warn_once,
)
from dormouse_jax.explain import OperatorCall, jitted
from dormouse_jax.kda_arguments import Arguments, Options, validate
from dormouse_jax.reference import chunked, recurrent


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
      initial_state: `[N, HV, K, V]`, where N is B unless `cu_seqlens` says otherwise; zeros by default.
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
      implementation: "pallas" (the best Pallas kernels for the device), "pallas_triton", "pallas_mosaic" (the
        kernels for Hopper cards, the serial ones at least), "xla" (chunked jnp) or "recurrent" (`lax.scan` over tokens;
        the only one with forward-mode derivatives). None takes "pallas" on an NVIDIA GPU and under
        `interpret_kernels()`, where it can serve the call, and "xla" elsewhere.
      use_qk_l2norm_in_kernel: whether q and k are given raw, and are divided by sqrt(sum x^2 + 1e-6) over K.
      use_gate_in_kernel: whether g is a raw gate x, any real number, and the log decay is
        -exp(A_log) softplus(x + dt_bias), or lower_bound sigmoid(exp(A_log) (x + dt_bias)) with a lower bound.
      use_beta_sigmoid_in_kernel: whether beta is given raw, and the strength of the correction is its sigmoid.
      allow_neg_eigval: whether it is twice the sigmoid; needs use_beta_sigmoid_in_kernel.
      lower_bound: a Python number < 0, of the gate in the kernel; unbounded by default.
      A_log: `[HV]`, of the gate in the kernel. It may be left out where there is a lower bound: the rate is then 1.
      dt_bias: `[HV * K]`, of the gate in the kernel; zeros by default.
      cu_seqlens: `[N + 1]`, int32 or int64, for B = 1: N sequences are packed one after the other, the n-th of them in
        the tokens cu_seqlens[n] up to cu_seqlens[n + 1]. It starts with 0, does not decrease (a sequence may be empty:
        its final state is its initial state) and ends with T, which may be 0. States are `[N, HV, K, V]`. Under `jit`
        it may be traced; its values are not checked then, and one that does not end with T leaves results undefined.
      segment_ids: `[B, T]`, int32 or int64: another way to say that sequences are packed. Where a token's id is not
        that of the token before, the state is forgotten. The first segment of a row takes its initial state, the last
        one leaves its final state.

    Returns:
      `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; final_state `[N, HV, K, V]` in float32 (float64 for float64
      inputs), or None. Both are differentiable with respect to q, k, v, g, beta, A_log, dt_bias and initial_state.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above.
      NotImplementedError: the named implementation cannot serve the call.

    The operator is deterministic, and o_t depends on no later token, bit for bit. Under `jax.shard_map`, over batch and
    heads, it needs check_vma=False. From Kimi Team, "Kimi Linear: An
    Expressive, Efficient Attention Architecture", 2025 (arXiv:2510.26692). Arguments follow `chunk_kda` of
    flash-linear-attention.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    arrays |= {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state}
    arrays |= {"cu_seqlens": cu_seqlens, "segment_ids": segment_ids}
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        chunk_size=chunk_size,
        precision=precision,
        residuals=residuals,
        implementation=implementation,
    )
    return _delta_rule("kda", arrays, options)


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
    arrays = {"q": q, "k": k, "v": v, "g": g, "erase": erase, "write": write}
    arrays |= {"A_log": A_log, "dt_bias": dt_bias, "initial_state": initial_state}
    arrays |= {"cu_seqlens": cu_seqlens, "segment_ids": segment_ids}
    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        chunk_size=chunk_size,
        precision=precision,
        residuals=residuals,
        implementation=implementation,
    )
    return _delta_rule("gdn2", arrays, options)


def _delta_rule(operator: str, given: dict[str, Any], options: Options):
    """One call of either operator, from arguments as given to results as returned."""
    x, options = validate(operator, given, options)
    (B, T, HV, V), K = x.v.shape, x.q.shape[3]
    if 0 in (B, T):
        # Nothing to compute, and kernels need a grid.
        o, final_state = jnp.zeros(x.v.shape, x.q.dtype), x.initial_state
        if final_state is None:
            N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
            final_state = jnp.zeros((N, HV, K, V), jnp.promote_types(x.q.dtype, jnp.float32))
    else:
        plan = _plan(operator, options, x)
        if plan.raw is None and (options.gate or options.beta_sigmoid or options.l2norm or x.starts is not None):
            # Computed again for the backward: to keep its float32 intermediates would take more memory than the inputs.
            computed = functools.partial(_computed, options=options, exact=not plan.implementation.startswith("pallas"))
            x = jax.checkpoint(computed, prevent_cse=False)(x)
        run = _by_autodiff if plan.implementation == "recurrent" else _with_backward
        o, final_state = run(plan, x)
    if not options.output_final_state:
        return o, None
    return o, jnp.swapaxes(final_state, -1, -2) if options.state_v_first else final_state


def _computed(x: Arguments, options: Options, exact: bool) -> Arguments:
    """The arguments with gates, beta, queries and keys computed from raw ones, for implementations that leave it to
    XLA to fuse that into what reads them. exact: queries and keys stay in float32, else they are rounded to v's dtype.
    """
    wide = jnp.promote_types(x.q.dtype, jnp.float32)
    if options.gate:
        g = gates.log_decay(x.g.astype(wide), x.A_log, x.dt_bias, options.lower_bound)
        x = x._replace(g=g, A_log=None, dt_bias=None)
    if options.beta_sigmoid:
        x = x._replace(erase=gates.beta_sigmoid(x.erase.astype(wide), options.neg_eigval))
    if options.l2norm:
        dtype = wide if exact else x.v.dtype
        x = x._replace(q=gates.l2_normalize(x.q).astype(dtype), k=gates.l2_normalize(x.k).astype(dtype))
    if x.starts is not None:  # A segment starts by forgetting everything.
        x = x._replace(g=jnp.where(x.starts[..., None, None], -jnp.inf, x.g), starts=None)
    return x


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    operator: str
    implementation: str  # "pallas_mosaic", "pallas_triton", "xla" or "recurrent"
    config: Any
    raw: Any  # which inputs the kernels take raw; None where they are computed before the call
    scale: float
    precision: str
    residuals: str
    final_state: bool  # whether the final state is wanted
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]

    def call(self, direction: str) -> OperatorCall:
        return OperatorCall(
            operator=self.operator,
            direction=direction,
            implementation=self.implementation,
            precision=self.precision,
            interpret=self.interpret,
            config=self.config,
            passed_over=self.passed_over,
        )


def _plan(operator: str, options: Options, x: Arguments) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    device, interpret = device_of(*(array for array in x if array is not None)), interpreting()
    (B, T, HV, V), K = x.v.shape, x.q.shape[3]
    N = 1 if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    sizes: dict[str, Any] = {"K": K, "V": V, "T": T, "batch_heads": B * N * HV}
    sizes |= {"precision": options.precision, "chunk_size": options.chunk_size}
    asked = options.implementation

    def plan(implementation, config, passed_over=(), raw=None):
        interpreted = interpret and implementation.startswith("pallas")
        return _Plan(
            operator,
            implementation,
            config,
            raw,
            options.scale,
            options.precision,
            options.residuals,
            bool(options.output_final_state),
            interpreted,
            tuple(passed_over),
        )

    if asked == "recurrent":
        return plan(
            "recurrent", None, [(name, "implementation='recurrent' was asked for") for name in ("pallas", "xla")]
        )
    passed_over = [("pallas_triton", "implementation='xla' was asked for")]
    if asked != "xla":
        try:
            raw = _kernels().Raw(
                options.l2norm, options.gate, options.lower_bound, options.beta_sigmoid, options.neg_eigval
            )
            of_call = sizes | {"packed": x.cu_seqlens is not None}
            of_chunk = {name: sizes[name] for name in ("K", "V", "T")}
            of_chunk |= {"same_heads": x.q.shape[2] == HV, "dtype": str(x.q.dtype)}

            def choose(raw, starts):
                plain, any_raw = operator == "kda" and not starts, raw is not None and any(dataclasses.astuple(raw))
                return _kernel_config(device, interpret, asked, of_call, of_chunk | {"plain": plain}, any_raw)

            config, passed_over = choose(raw, x.starts is not None)
            if x.starts is not None:
                # Hopper's kernels of a chunk know no starts: for them they are gates that forget everything.
                computed, without_starts = choose(None, False)
                if computed.gradients == "mosaic":
                    raw, config, passed_over = None, computed, without_starts
            on_mosaic = config != config.on_triton()
            return plan("pallas_mosaic" if on_mosaic else "pallas_triton", config, passed_over, raw=raw)
        except NotImplementedError as reason:
            if asked is not None:
                raise NotImplementedError(
                    f"{operator}: implementation={asked!r} cannot serve this call: {reason}"
                ) from reason
            if device.platform == "gpu" or interpret:
                warn_once(f"{operator}: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
            passed_over = [("pallas_triton", str(reason))]
    sizes |= {"batch_heads": B * HV, "sequences": N}
    return plan("xla", chunked.choose_config(device.platform, dtype=x.q.dtype, **sizes), passed_over)


def _kernel_config(
    device: Device,
    interpret: bool,
    asked: str | None,
    sizes: dict[str, Any],
    of_chunk: dict[str, Any],
    any_raw: bool,
) -> tuple[Any, list[tuple[str, str]]]:
    """The configuration of the kernels, whose fields name the backend of each, and what was passed over; or a
    NotImplementedError that says why they cannot serve the call.

    of_chunk: what `hopper_chunk_refusal` wants to know of the call's arrays. any_raw: whether the kernels get anything
    raw.
    """
    require_triton(device, interpret)
    try:
        kernels = _kernels()
        shared = None if interpret else device.block_shared
        config = kernels.choose_config(device.kind, block_shared=shared, **sizes)
    except (ImportError, ValueError) as reason:
        raise NotImplementedError(str(reason)) from reason
    if asked == "pallas_triton":
        return config.on_triton(), [("pallas_mosaic", "implementation='pallas_triton' was asked for")]
    if asked == "pallas_mosaic":
        config = dataclasses.replace(config, serial="mosaic")
    if config == config.on_triton():
        return config, [("pallas_mosaic", "it is no faster here")]
    of_serial = {name: sizes[name] for name in ("K", "V", "T", "precision")}
    try:
        require_hopper(device, interpret, asked)
        serial_refusal = kernels.hopper_refusal(**of_serial)
        if asked == "pallas_mosaic" and serial_refusal is not None:
            raise NotImplementedError(serial_refusal)
    except NotImplementedError as reason:
        if asked == "pallas_mosaic":
            raise
        return config.on_triton(), [("pallas_mosaic", str(reason))]
    of_chunk |= {"precision": sizes["precision"], "chunk_size": config.chunk_size}
    chunk_refusal = kernels.hopper_chunk_refusal(**of_chunk, raw=any_raw, packed=sizes["packed"])
    refusals = {"serial": serial_refusal, "prepare": chunk_refusal, "gradients": chunk_refusal}
    refused = {name: why for name, why in refusals.items() if why is not None and getattr(config, name) == "mosaic"}
    config = dataclasses.replace(config, **dict.fromkeys(refused, "triton"))
    return config, [("pallas_mosaic", why) for why in dict.fromkeys(refused.values())]


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    import pallas_kernels.kda

    return pallas_kernels.kda


def _by_autodiff(plan: _Plan, x: Arguments):
    return jitted(_recurrent, plan, "forward")(x)


def _recurrent(plan, x):
    o, final_state = recurrent.forward(*_operands(x), scale=plan.scale, cu_seqlens=x.cu_seqlens)
    return o, final_state if plan.final_state else None


def _operands(x: Arguments):
    """q, k, v, g, erase, write and the initial state: what every implementation takes."""
    return x.q, x.k, x.v, x.g, x.erase, x.write, x.initial_state


# Forward


def _forward(plan, x):
    return _forward_kernels(plan, x, save=False)[:2]


def _forward_with_residuals(plan, x):
    return _forward_kernels(plan, x, save=plan.residuals == "save")


def _forward_kernels(plan, x, save):
    if plan.implementation == "xla":
        o, final_state, residuals = chunked.forward(
            *_operands(x), scale=plan.scale, config=plan.config, save=save, cu_seqlens=x.cu_seqlens
        )
    else:
        o, final_state, residuals = _kernels().forward(*_operands(x), save=save, **_of_kernels(plan, x))
    # A state that nobody wants is left out here, so that its gradient is None in the backward, not an array of zeros.
    return o, final_state if plan.final_state else None, residuals


# Backward


def _backward(plan, x, residuals, o, do, dfinal_state):
    arrays = (*_operands(x), residuals, do, dfinal_state)
    if plan.implementation == "xla":
        *grads, dstate = chunked.backward(*arrays, scale=plan.scale, config=plan.config, cu_seqlens=x.cu_seqlens)
        return Arguments(*grads, initial_state=dstate)
    return Arguments(*_kernels().backward(*arrays, o=o, **_of_kernels(plan, x)))


def _of_kernels(plan: _Plan, x: Arguments) -> dict[str, Any]:
    """What the kernels' forward and backward take alike."""
    packed = None
    if x.cu_seqlens is not None:
        found = packing.chunks(x.cu_seqlens, x.q.shape[1], plan.config.chunk_size)
        packed = _kernels().Packing(found.rows, jnp.stack([found.first, x.cu_seqlens], axis=1))
    return ({} if plan.raw is None else {"raw": plan.raw}) | {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "starts": x.starts,
        "packing": packed,
        "scale": plan.scale,
        "precision": plan.precision,
        "config": plan.config,
        "interpret": plan.interpret,
    }


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan: _Plan, x: Arguments):
    return jitted(_forward, plan, "forward")(x)


def _with_backward_fwd(plan, x):
    phase = "forward with residuals" if plan.residuals == "save" else "forward"
    o, final_state, residuals = jitted(_forward_with_residuals, plan, phase)(x)
    # The gradients of raw queries and keys are formed with the help of o.
    return (o, final_state), (x, residuals, o if plan.raw is not None and plan.raw.l2norm else None)


def _with_backward_bwd(plan, kept, cotangents):
    return (jitted(_backward, plan, "backward")(*kept, *cotangents),)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
