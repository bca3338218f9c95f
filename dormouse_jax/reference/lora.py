"""LoRA in plain JAX, forward and backward.

    rebuild  V = base + s B A,                    W' = V, or (m / n) V by rows, n the norms of V's rows (DoRA)
    bypass   u = x base^T + s (x A^T) B^T,        y = u + bias, or (m / n) u + bias

The norms of a bypass come without V: with K = A A^T, n^2 = |base|^2 + 2 s (base A^T) . B + s^2 (B K) . B by rows.
Results and gradients are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dormouse_jax.reference import layer
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products, exact


def inverse_norm(norm: jax.Array) -> jax.Array:
    """1 / norm; 0 for a row of zeros, whose direction is none."""
    return jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1.0), 0.0)


def rebuild(product: Products, x, *, scale: float, detach_norm: bool):
    V = layer.plus(scale * product("or,ri->oi", x["B"], x["A"]), x["base"])
    if x["magnitude"] is None:
        return V, None
    norm = jnp.sqrt(jnp.sum(V * V, axis=1))
    return (f32(x["magnitude"]) * inverse_norm(norm))[:, None] * V, None


def rebuild_backward(product: Products, x, kept, dout, *, scale: float, detach_norm: bool):
    A, B, G = x["A"], x["B"], f32(dout)
    grads = {}
    if x["magnitude"] is not None:
        V = layer.plus(scale * product("or,ri->oi", B, A), x["base"])
        inverse, m = inverse_norm(jnp.sqrt(jnp.sum(V * V, axis=1))), f32(x["magnitude"])
        grads["magnitude"] = jnp.sum(G * V, axis=1) * inverse
        along = 0.0 if detach_norm else (m * grads["magnitude"] * inverse**2)[:, None] * V
        G = (m * inverse)[:, None] * G - along
    dB, dA = scale * product("oi,ri->or", G, A), scale * product("or,oi->ri", B, G)
    return grads | {"A": dA, "B": dB, "base": G}


def _norms(product: Products, x, scale: float):
    """1 / n, and base A^T + s B K, whose products with B are n^2's parts that depend on A and B."""
    A, B, base = product.round(x["A"]), product.round(x["B"]), f32(x["base"])
    inner, K = product("oi,ri->or", x["base"], A), exact("ri,si->rs", A, A)
    BK = exact("or,rs->os", B, K)
    square = jnp.sum(base * base, axis=1) + jnp.sum((2 * scale * inner + scale**2 * BK) * f32(B), axis=1)
    return inverse_norm(jnp.sqrt(jnp.maximum(square, 0.0))), inner + scale * BK


def bypass(product: Products, x, *, scale: float, detach_norm: bool):
    h = product.round(product("ti,ri->tr", x["x"], x["A"]))
    u = layer.forward(product, x, scale * product("tr,or->to", h, x["B"]))
    if x["magnitude"] is None:
        return layer.plus(u, x["bias"]), (h, None)
    inverse, _ = _norms(product, x, scale)
    return layer.plus(f32(x["magnitude"]) * inverse * u, x["bias"]), (h, product.round(u))


def bypass_backward(product: Products, x, kept, dout, *, scale: float, detach_norm: bool):
    A, B, (h, u), g = x["A"], x["B"], kept, f32(dout)
    grads = {"bias": jnp.sum(g, axis=0)}
    of_norm = None
    if x["magnitude"] is not None:
        (inverse, along), m = _norms(product, x, scale), f32(x["magnitude"])
        grads["magnitude"] = jnp.sum(g * f32(u), axis=0) * inverse
        of_norm = None if detach_norm else -m * grads["magnitude"] * inverse**2  # the gradient of n^2 / 2
        g = m * inverse * g
    g = product.round(g)
    p = product.round(scale * product("to,or->tr", g, B))
    grads |= {"B": scale * product("to,tr->or", g, h), "A": product("tr,ti->ri", p, x["x"])}
    grads |= layer.backward(product, x, product("tr,ri->ti", p, A), g)
    if of_norm is not None:
        eB = of_norm[:, None] * f32(product.round(B))
        grads["B"] += scale * of_norm[:, None] * along
        grads["A"] += scale * product("or,oi->ri", eB, x["base"])
        grads["A"] += scale**2 * exact("rs,si->ri", exact("or,os->rs", eB, product.round(B)), product.round(A))
        V = f32(x["base"]) + scale * product("or,ri->oi", B, A)
        grads["base"] += of_norm[:, None] * V
    return grads
