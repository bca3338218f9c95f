"""Kimi Delta Attention on sequences that are split over devices along time.

What a segment of a sequence does to the state that enters it is an affine map, S -> D S + E: E is the state after the
segment from zeros, and D, column by column, the state after it from the unit columns with all values at zero. So every
device first finds (D, E) of its own segment, all devices exchange them, each composes those of the segments before its
own into the state that enters it, and runs its segment from there.

The gradient of the loss in the state takes the way back by the transposed maps: with c_i what a segment's own outputs
ask of the state that enters it, dS_i = D_i^T dS_{i+1} + c_i.
"""

from __future__ import annotations

import dataclasses
import functools
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
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """`dormouse_jax.kda` inside `jax.shard_map`, where the time axis is split over the mesh axis `axis_name`.

    >>> sharded = jax.shard_map(
    ...     functools.partial(dormouse_jax.context_parallel.kda, axis_name="sequence"),
    ...     mesh=mesh, in_specs=P(None, "sequence"), out_specs=(P(None, "sequence"), None), check_vma=False,
    ... )

    Batch and heads may be split over other axes of the mesh.

    Args:
      q, k, v, g, beta: as in `dormouse_jax.kda`, of the segment of this device; segments follow each other in the order
        of the axis.
      axis_name: the mesh axis.
      initial_state: the state before the first segment, the same on all devices of the axis.
      A_log, dt_bias, options, and all else: as in `dormouse_jax.kda`; no cu_seqlens and no segment_ids.

    Returns:
      `(o, final_state)`: o of this device's segment; the state after the last segment, the same on all devices of the
      axis, or None. Both are differentiable as those of `dormouse_jax.kda`, in reverse mode.

    A forward runs the operator three times (once for each of D and E, of value dims K and V), a backward its backward
    once and the part of it that concerns the state once more. Exchanged are [HV, K, K + V] float32 numbers a sequence
    and device forward, and as many backward.

    Raises: as `dormouse_jax.kda`.
    """
    for name in ("cu_seqlens", "segment_ids"):
        if options.pop(name, None) is not None:
            raise NotImplementedError(
                f"context_parallel.kda: {name} is not implemented: sequences are whole batch rows"
            )
    x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    if state_v_first and initial_state is not None:
        initial_state = jnp.swapaxes(initial_state, -1, -2)
    call = _Call(axis_name, bool(output_final_state), tuple(sorted(options.items())))
    o, final_state = _run(call, x, initial_state)
    if final_state is not None and state_v_first:
        final_state = jnp.swapaxes(final_state, -1, -2)
    return o, final_state


@dataclasses.dataclass(frozen=True)
class _Call:
    """All about a call that is not an array."""

    axis_name: str
    output_final_state: bool
    options: tuple[tuple[str, Any], ...]

    def kda(self, x: dict[str, Any], state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The operator on this device's segment, from `state`."""
        o, final_state = kda_on_one_device(**x, initial_state=state, output_final_state=True, **dict(self.options))
        assert final_state is not None
        return o, final_state

    def last_to_all(self, state: jax.Array) -> jax.Array | None:
        """The last device's state on all of them, if it is wanted."""
        if not self.output_final_state:
            return None
        last = lax.axis_index(self.axis_name) == lax.axis_size(self.axis_name) - 1
        return lax.psum(jnp.where(last, state, 0.0), self.axis_name)


def _entering(call: _Call, x: dict[str, Any], initial_state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The state that enters this device's segment, and the D of every segment, [devices, B, HV, K, K]."""
    _, E = call.kda(x, None)
    K = x["q"].shape[-1]
    identity = jnp.broadcast_to(jnp.eye(K, dtype=E.dtype), (*E.shape[:2], K, K))
    without_values = x | {"v": jnp.zeros((*x["v"].shape[:-1], K), x["v"].dtype)}
    _, D = call.kda(without_values, identity)
    D, E = lax.all_gather((D, E), call.axis_name)
    state = jnp.zeros(E.shape[1:], E.dtype) if initial_state is None else initial_state.astype(E.dtype)
    index = lax.axis_index(call.axis_name)

    def after(i, S):
        return jnp.where(i < index, _product("bhij,bhjv->bhiv", D[i], S) + E[i], S)

    return lax.fori_loop(0, D.shape[0], after, state), D


def _product(subscripts: str, D: jax.Array, S: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, D, S, precision=lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: _Call, x: dict[str, Any], initial_state: jax.Array | None):
    state, _ = _entering(call, x, initial_state)
    o, final_state = call.kda(x, state)
    return o, call.last_to_all(final_state)


def _run_fwd(call, x, initial_state):
    state, D = _entering(call, x, initial_state)
    # The operator's own backward, with what it was traced with.
    (o, final_state), pull = jax.vjp(call.kda, x, state)
    like = None if initial_state is None else jnp.zeros_like(initial_state)
    return (o, call.last_to_all(final_state)), (pull, D, final_state, like)


def _run_bwd(call, kept, cotangents):
    pull, D, final_state, like = kept
    do, dfinal_state = cotangents
    zero = jnp.zeros_like(final_state)
    # Every device returned the same final state: the loss depends on it through all of them.
    dstate = zero if dfinal_state is None else lax.psum(dfinal_state, call.axis_name)
    _, own = pull((do, zero))
    own, index = lax.all_gather(own, call.axis_name), lax.axis_index(call.axis_name)

    def before(n, dS):
        i = D.shape[0] - 1 - n
        return jnp.where(i > index, _product("bhji,bhjv->bhiv", D[i], dS) + own[i], dS)

    dx, dentering = pull((do, lax.fori_loop(0, D.shape[0], before, dstate)))
    if like is None:
        return dx, None
    return dx, jnp.where(index == 0, dentering, 0.0).astype(like.dtype)


_run.defvjp(_run_fwd, _run_bwd)
