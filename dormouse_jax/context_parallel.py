"""Kimi Delta Attention on sequences that are split over devices along time.

All that a device's part of a sequence makes of the state S that enters it is affine in S:

    o_t = o0_t + S^T r_t        the state after it = E + D S

o0 and E are what the operator gives from a state of zeros; r_t and D what it gives from the identity as a state (of
value dim K) with all values at zero. So every device runs the operator twice on its own part, all devices exchange
(D, E), and each composes those of the parts before its own into the state that enters it.

The gradient of the loss in the states takes the way back by the transposed maps: with c_i = sum_t r_t do_t^T what the
outputs of part i ask of the state that enters it, dS_i = D_i^T dS_{i+1} + c_i.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax.kda import kda as kda_on_one_device


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    axis_name: str,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """`dormouse_jax.kda` inside `jax.shard_map`, where the time axis is split over the mesh axis `axis_name`.

    >>> sharded = jax.shard_map(
    ...     functools.partial(dormouse_jax.context_parallel.kda, axis_name="sequence"),
    ...     mesh=mesh, in_specs=P(None, "sequence"), out_specs=(P(None, "sequence"), None), check_vma=False,
    ... )

    Batch and heads may be split over other axes of the mesh.

    Args:
      q, k, v, g, beta, segment_ids: as in `dormouse_jax.kda`, of the part that this device has; parts follow each other
        in the order of the axis.
      axis_name: the mesh axis.
      initial_state: the state before the first part, the same on all devices of the axis.
      A_log, dt_bias, options, and all else: as in `dormouse_jax.kda`; no cu_seqlens.

    Returns:
      `(o, final_state)`: o of this device's part; the state after the last one, the same on all devices of the
      axis, or None. Both are differentiable as those of `dormouse_jax.kda`, in reverse mode.

    A forward costs that of the operator twice, with value dims V and K, and a product of `[T, K]` and `[K, V]` a head.
    A backward costs that of the operator once and as large a product; it keeps the inputs and the r_t, `[B, T, HV, K]`
    in q's dtype. Each device sends `[B, HV, K, K + V]` float32 numbers in a forward, `[B, HV, K, V]` in a backward.

    Raises: as `dormouse_jax.kda`.
    """
    if options.pop("cu_seqlens", None) is not None:
        raise NotImplementedError("context_parallel.kda: cu_seqlens is not implemented; segment_ids say the same")
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    if state_v_first and initial_state is not None:
        initial_state = jnp.swapaxes(initial_state, -1, -2)
    call = _Call(axis_name, bool(output_final_state), tuple(sorted(options.items())))
    o, final_state = _run(call, x, segment_ids, initial_state)
    if final_state is not None and state_v_first:
        final_state = jnp.swapaxes(final_state, -1, -2)
    return o, final_state


@dataclasses.dataclass(frozen=True)
class _Call:
    """All about a call that is not an array."""

    axis_name: str
    output_final_state: bool
    options: tuple[tuple[str, Any], ...]

    def kda(self, x: dict[str, Any], segment_ids: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        """The operator on this device's part, from `state`."""
        options = dict(self.options) | {"initial_state": state, "output_final_state": True}
        o, final_state = kda_on_one_device(**x, segment_ids=segment_ids, **options)
        assert final_state is not None
        return o, final_state

    def continues(self, segment_ids: jax.Array | None, index: jax.Array) -> jax.Array:
        """Whether a row's first token here is of the segment of the last token before it, `[B, 1, 1, 1]`."""
        if segment_ids is None:
            return jnp.ones((1, 1, 1, 1), bool)
        last = lax.all_gather(segment_ids[:, -1], self.axis_name)[index - 1]
        return ((index == 0) | (last == segment_ids[:, 0]))[:, None, None, None]


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Of operands in the dtype of `a`, bfloat16 ones on tensor cores, accumulated in float32 or wider."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    if a.dtype == jnp.bfloat16:
        b, precision = b.astype(a.dtype), lax.DotAlgorithmPreset.BF16_BF16_F32
    else:
        a, b, precision = a.astype(wide), b.astype(wide), lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=wide)


def _run_fwd(call: _Call, x: dict[str, Any], segment_ids: Any, initial_state: jax.Array | None):
    index, devices = lax.axis_index(call.axis_name), lax.axis_size(call.axis_name)
    o, E = call.kda(x, segment_ids, None)
    K = x["q"].shape[-1]
    identity = jnp.broadcast_to(jnp.eye(K, dtype=E.dtype), (*E.shape[:2], K, K))
    without_values = x | {"v": jnp.zeros((*x["v"].shape[:-1], K), x["v"].dtype)}
    continues = call.continues(segment_ids, index)
    r, D = (jnp.where(continues, y, 0) for y in call.kda(without_values, segment_ids, identity))
    D, E = lax.all_gather((D, E), call.axis_name)

    def after(i, S):
        return _product("bhij,bhjv->bhiv", D[i], S) + E[i]

    first = jnp.zeros(E.shape[1:], E.dtype) if initial_state is None else initial_state.astype(E.dtype)
    state = lax.fori_loop(0, devices, lambda i, S: jnp.where(i < index, after(i, S), S), first)
    final_state = lax.fori_loop(0, devices, after, first) if call.output_final_state else None
    # Heads first: XLA on a CPU has no bfloat16 products of the other order.
    passed_on = jnp.swapaxes(_product("bhtk,bhkv->bhtv", jnp.swapaxes(r, 1, 2), state), 1, 2)
    o = (o.astype(E.dtype) + passed_on).astype(o.dtype)
    # The operator's own backward, with what it was traced with. Of its forward nothing is needed: jitted, none runs.
    _, pull = jax.vjp(lambda x, S: call.kda(x, segment_ids, S), x, jnp.where(continues, state, 0.0))
    return (o, final_state), (pull, D, r, initial_state)


def _run_bwd(call: _Call, kept, cotangents):
    pull, D, r, initial_state = kept
    do, dfinal_state = cotangents
    index, devices = lax.axis_index(call.axis_name), lax.axis_size(call.axis_name)
    own = _product("bthk,bthv->bhkv", r, do)
    # Every device returned the same final state: the loss depends on it through all of them.
    last = jnp.zeros_like(own) if dfinal_state is None else lax.psum(dfinal_state, call.axis_name)
    own = lax.all_gather(own, call.axis_name)

    def before(n, dS):
        i = devices - 1 - n
        return jnp.where(i > index, _product("bhji,bhjv->bhiv", D[i], dS) + own[i], dS)

    dx, dstate = pull((do, lax.fori_loop(0, devices, before, last)))
    if initial_state is None:
        return dx, None, None
    return dx, None, jnp.where(index == 0, dstate, 0.0).astype(initial_state.dtype)


_run = jax.custom_vjp(lambda *arguments: _run_fwd(*arguments)[0], nondiff_argnums=(0,))
_run.defvjp(_run_fwd, _run_bwd)
