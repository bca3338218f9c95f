"""Softmax attention in plain JAX: what the kernels of `attention` are held to, and what runs where there are none.

It forms the matrix of scores, [Tq, Tk], of every head: memory grows with its size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax.reference.gemm import PRESETS

LOG2_E = 1.4426950408889634


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: jax.Array | None,
    *,
    causal: bool,
    scale: float,
    precision: str,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    """o [B, Tq, H, D] in q's dtype, and the base-2 logarithm [B, H, Tq] of the sum over keys of exp(scores), inf where
    a query sees no key.

    spans: [B, T, 2], of every token the first and the last + 1 of its sequence; None where nothing is packed. The
    others: as in `dormouse_jax.attention`. XLA knows the tensor cores' formats on GPUs only; on another `platform` the
    products are float32.
    """
    product = _Product(precision, platform)
    seen = visible(q.shape[1], k.shape[1], spans, causal)
    s = jnp.where(seen, product("btngd,bsnd->bngts", _grouped(q, k), k) * (scale * LOG2_E), -jnp.inf)
    largest = jnp.max(s, axis=-1, keepdims=True)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    e = jnp.exp2(s - largest)
    total = jnp.sum(e, axis=-1, keepdims=True)
    o = product.of_seen("bngts,bsnd->bngtd", e, v, seen) * jnp.where(total == 0, 0.0, 1 / total)
    lse = jnp.where(total == 0, jnp.inf, largest + jnp.log2(total))
    B, Tq, H, D = q.shape
    o = jnp.moveaxis(o, 3, 1).reshape(B, Tq, H, D).astype(q.dtype)
    return o, lse.reshape(B, H, Tq)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: jax.Array | None,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    *,
    causal: bool,
    scale: float,
    precision: str,
    platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv, each in its input's dtype, from what `forward` returned and the cotangent of o."""
    product = _Product(precision, platform)
    seen = visible(q.shape[1], k.shape[1], spans, causal)
    (B, Tq, H, _), HK = q.shape, k.shape[2]
    queries, d = _grouped(q, k), _grouped(do, k)
    s = product("btngd,bsnd->bngts", queries, k) * (scale * LOG2_E)
    p = jnp.where(seen, jnp.exp2(jnp.where(seen, s, -jnp.inf) - lse.reshape(B, HK, H // HK, Tq, 1)), 0.0)
    delta = jnp.einsum("btngd,btngd->bngt", d.astype(jnp.float32), _grouped(o, k).astype(jnp.float32))
    dp = product("btngd,bsnd->bngts", d, v)
    ds = jnp.where(seen, p * (dp - delta[..., None]), 0.0) * scale
    dq = product.of_seen("bngts,bsnd->bngtd", ds, k, seen)
    dk = product.of_seen("bngts,btngd->bsnd", ds, queries, seen)
    dv = product.of_seen("bngts,btngd->bsnd", p, d, seen)
    return jnp.moveaxis(dq, 3, 1).reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def visible(Tq: int, Tk: int, spans: jax.Array | None, causal: bool) -> jax.Array:
    """Which keys each query sees, [1 or B, 1, 1, Tq, Tk]."""
    row, col = jnp.arange(Tq)[:, None], jnp.arange(Tk)[None, :]
    seen = (col <= row + (Tk - Tq) if causal else jnp.ones((Tq, Tk), bool))[None]
    if spans is not None:
        seen = seen & (spans[:, :, :1] <= col) & (col < spans[:, :, 1:])
    return seen[:, None, None]


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """Query heads by the key head that they read: [B, Tq, HK, H / HK, D]."""
    B, Tq, H, D = x.shape
    return x.reshape(B, Tq, k.shape[2], H // k.shape[2], D)


class _Product:
    """einsum in float32 with operands of the precision's dtype."""

    def __init__(self, precision: str, platform: str):
        self.precision, self.platform = precision, platform

    def __call__(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        a = a.astype(b.dtype)  # weights, to 16 bits where values are
        preset = PRESETS.get((self.precision, str(b.dtype))) if self.platform == "gpu" else None
        if preset is None:
            a, b, preset = a.astype(jnp.float32), b.astype(jnp.float32), lax.Precision.HIGHEST
        return jnp.einsum(spec, a, b, precision=preset, preferred_element_type=jnp.float32)

    def of_seen(self, spec: str, weights: jax.Array, x: jax.Array, seen: jax.Array) -> jax.Array:
        """The product of weights [B, HK, H / HK, Tq, Tk] that are 0 where a query does not see a key. There x may be
        inf or NaN, which would make a NaN of 0."""
        finite = jnp.isfinite(x)

        def spoiled(total):
            marks = jnp.broadcast_to(seen, weights.shape).astype(jnp.float32)
            met = jnp.einsum(spec, marks, (~finite).astype(jnp.float32), precision=lax.Precision.HIGHEST)
            return jnp.where(met > 0, jnp.nan, total)

        total = self(spec, weights, jnp.where(finite, x, 0))
        return lax.cond(jnp.all(finite), lambda total: total, spoiled, total)
