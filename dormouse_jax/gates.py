"""What KDA makes of raw gates, raw beta and raw queries and keys when asked to, in plain jnp.

    log decay   g = -exp(A_log) softplus(x + dt_bias)                 in (-inf, 0]
                g = lower_bound sigmoid(exp(A_log) (x + dt_bias))     in [lower_bound, 0], with a lower bound
    strength    beta = sigmoid(x), or 2 sigmoid(x) where eigenvalues may be negative
    norm        y = x / sqrt(sum x^2 + 1e-6) over the last axis

The semantics are those of `chunk_kda` and `fused_recurrent_kda` of flash-linear-attention. The Pallas kernels compute
the same on their tiles; this is the definition that they are held against.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NORM_EPSILON = 1e-6

# Raw gates beyond it saturate all the same, and an infinite one would make NaN of 0 * inf in the gradient of A_log.
_LARGEST_RAW_GATE = 1e30


def log_decay(
    x: jax.Array,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
) -> jax.Array:
    """The natural log of the decay from a raw gate.

    Args:
      x: `[..., HV, K]`, the raw gate.
      A_log: `[HV]`, log of a rate a value head. May be None (a rate of 1) with a `lower_bound` only.
      dt_bias: `[HV * K]`, added to x, or None.
      lower_bound: a Python number < 0 that the log decay stays above, or None for an unbounded gate.

    Returns:
      `[..., HV, K]` in float32 (float64 for a float64 x), at most 0.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(dtype)
    if dt_bias is not None:
        x = x + dt_bias.astype(dtype).reshape(x.shape[-2:])
    x = jnp.clip(x, -_LARGEST_RAW_GATE, _LARGEST_RAW_GATE)
    rate = 1.0 if A_log is None else jnp.exp(A_log.astype(dtype))[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(x)
    return lower_bound * jax.nn.sigmoid(rate * x)


def beta_sigmoid(beta: jax.Array, allow_neg_eigval: bool = False) -> jax.Array:
    """The strength of the correction from a raw beta, in (0, 1), or in (0, 2) with `allow_neg_eigval`.

    Returns float32 (float64 for a float64 beta) of beta's shape.
    """
    beta = jax.nn.sigmoid(beta.astype(jnp.promote_types(beta.dtype, jnp.float32)))
    return 2 * beta if allow_neg_eigval else beta


def l2_normalize(x: jax.Array) -> jax.Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, in float32 (float64 for a float64 x)."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
