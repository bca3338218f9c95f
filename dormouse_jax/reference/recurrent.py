"""The recurrence itself, one token a step: the definition that every other implementation is held against.

Per batch element and value head:

    S <- diag(exp(g_t)) S
    S <- S + k_t (write_t * v_t - S^T (erase_t * k_t))^T
    o_t = scale * S^T q_t
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax import packing


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    erase: jax.Array,
    write: jax.Array,
    state: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence.

    Args:
      q, k: `[B, H, K]`.
      v: `[B, HV, V]`.
      g: `[B, HV, K]`.
      erase, write: `[B, HV, K]` and `[B, HV, V]`, or `[B, HV, 1]`.
      state: `[B, HV, K, V]`, float32, or float64 for float64 inputs: the dtype of all arithmetic.
      scale: factor of the output.

    Returns:
      `(o, state)`, `[B, HV, V]` in v's dtype and `[B, HV, K, V]`.
    """
    out, group = v.dtype, v.shape[1] // q.shape[1]
    q, k, v, g, erase, write = (x.astype(state.dtype) for x in (q, k, v, g, erase, write))
    q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
    state = jnp.exp(g)[..., None] * state
    u = write * v - jnp.einsum("bhkv,bhk->bhv", state, erase * k, precision=lax.Precision.HIGHEST)
    state = state + k[..., :, None] * u[..., None, :]
    o = scale * jnp.einsum("bhkv,bhk->bhv", state, q, precision=lax.Precision.HIGHEST)
    return o.astype(out), state


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    erase: jax.Array,
    write: jax.Array | None,
    initial_state: jax.Array | None,
    *,
    scale: float,
    cu_seqlens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence with `lax.scan`; differentiable by JAX in forward and in reverse mode.

    Args:
      q, k: `[B, T, H, K]`.
      v: `[B, T, HV, V]`.
      g: `[B, T, HV, K]`, natural log of the decay.
      erase: `[B, T, HV, K]`, or `[B, T, HV]` for one gate a token.
      write: `[B, T, HV, V]`, or None for the gate of `erase`.
      initial_state: `[B, HV, K, V]`, or None for zeros.
      scale: factor of the output.
      cu_seqlens: `[N + 1]`, where packed sequences begin and end; states are then `[N, HV, K, V]`, and B is 1.

    Returns:
      `(o, final_state)`, `[B, T, HV, V]` in v's dtype and `[N, HV, K, V]`. All arithmetic is in float64 for float64
      inputs and in float32 for all others.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    erase = erase if erase.ndim == 4 else erase[..., None]
    write = erase if write is None else write
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = jnp.zeros((N, HV, K, V), dtype) if initial_state is None else initial_state.astype(dtype)

    # Segments of about sqrt(T) steps, each a checkpoint: reverse mode then keeps 2 sqrt(T) states instead of T. The
    # steps that fill up the last segment have q = k = v = g = erase = write = 0 and leave the state alone.
    steps = math.isqrt(T - 1) + 1
    segments = -(-T // steps)

    def by_segment(x):
        x = jnp.pad(jnp.moveaxis(x, 1, 0), [(0, segments * steps - T)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(segments, steps, *x.shape[1:])

    def token(S, inputs):
        q_t, k_t, v_t, g_t, erase_t, write_t = inputs
        o_t, S = step(q_t, k_t, v_t, g_t, erase_t, write_t, S, scale=scale)
        return S, o_t

    def packed_token(states, inputs):
        """A token of one sequence among many: its state is taken from all of them and put back."""
        sequence, *inputs = inputs
        S, o_t = token(lax.dynamic_slice_in_dim(states, sequence[0], 1), inputs)
        return lax.dynamic_update_slice_in_dim(states, S, sequence[0], 0), o_t

    xs = [by_segment(x) for x in (q, k, v, g, erase, write)]
    if cu_seqlens is not None:
        xs.insert(0, by_segment(packing.sequence_of_tokens(cu_seqlens, T)[None]))

    @jax.checkpoint
    def segment(S, inputs):
        return lax.scan(token if cu_seqlens is None else packed_token, S, inputs)

    final_state, o = lax.scan(segment, state, xs)
    o = o.reshape(segments * steps, B, HV, V)[:T]
    return jnp.moveaxis(o, 0, 1), final_state
