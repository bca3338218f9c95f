"""LoHa in plain JAX, forward and backward.

    rebuild  W' = base + s (B1 A1) * (B2 A2),    elementwise
    bypass   y  = x base^T + s x ((B1 A1) * (B2 A2))^T + bias

A bypass works on blocks of rows of the update, so that all of it exists at no time. Results and gradients are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax.reference import layer
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products

ROWS = 1024  # of the update in a block of a bypass


def _factors(product: Products, x):
    return tuple(product("or,ri->oi", x[f"B{i}"], x[f"A{i}"]) for i in (1, 2))


def _backward_of_factors(product: Products, x, dP):
    """Gradients of A1, B1, A2 and B2 from those of B1 A1 and B2 A2."""
    grads = {f"B{i}": product("oi,ri->or", d, x[f"A{i}"]) for i, d in enumerate(dP, 1)}
    return grads | {f"A{i}": product("or,oi->ri", x[f"B{i}"], d) for i, d in enumerate(dP, 1)}


def rebuild(product: Products, x, *, scale: float):
    P1, P2 = _factors(product, x)
    return layer.plus(scale * P1 * P2, x["base"]), None


def rebuild_backward(product: Products, x, kept, dout, *, scale: float):
    P1, P2 = _factors(product, x)
    G = f32(dout)
    return _backward_of_factors(product, x, (scale * G * P2, scale * G * P1)) | {"base": G}


def _blocks(O: int) -> tuple[int, int]:
    """How many blocks of rows there are, and the rows of each; they may stick out by a few."""
    number = -(-O // ROWS)
    return number, -(-O // number)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def bypass(product: Products, x, *, scale: float):
    O, (number, rows) = x["B1"].shape[0], _blocks(x["B1"].shape[0])
    padded = x | {name: _pad(x[name], 0, number * rows) for name in ("B1", "B2")}
    of_block = functools.partial(lax.dynamic_slice_in_dim, slice_size=rows)

    def block(i, y):
        P1, P2 = _factors(product, padded | {name: of_block(padded[name], i * rows) for name in ("B1", "B2")})
        part = scale * product("ti,oi->to", x["x"], P1 * P2)
        return lax.dynamic_update_slice_in_dim(y, part, i * rows, axis=1)

    y = lax.fori_loop(0, number, block, jnp.zeros((x["x"].shape[0], number * rows), jnp.float32))[:, :O]
    return layer.plus(layer.forward(product, x, y), x["bias"]), None


def bypass_backward(product: Products, x, kept, dout, *, scale: float):
    O, (number, rows) = x["B1"].shape[0], _blocks(x["B1"].shape[0])
    padded = x | {name: _pad(x[name], 0, number * rows) for name in ("B1", "B2")}
    g = _pad(dout, 1, number * rows)
    of_block = functools.partial(lax.dynamic_slice_in_dim, slice_size=rows)

    def block(sums, i):
        here = padded | {name: of_block(padded[name], i * rows) for name in ("B1", "B2")}
        P1, P2 = _factors(product, here)
        d = of_block(g, i * rows, axis=1)
        dP = scale * product("to,ti->oi", d, x["x"])
        grads = _backward_of_factors(product, here, (dP * P2, dP * P1))
        grads["x"] = scale * product("to,oi->ti", d, P1 * P2)
        return {name: total + grads[name] for name, total in sums.items()}, (grads["B1"], grads["B2"])

    zeros = {name: jnp.zeros(x[name].shape, jnp.float32) for name in ("x", "A1", "A2")}
    sums, of_rows = lax.scan(block, zeros, jnp.arange(number))
    dB1, dB2 = (d.reshape(number * rows, -1)[:O] for d in of_rows)
    grads = sums | {"B1": dB1, "B2": dB2, "bias": jnp.sum(f32(dout), axis=0)}
    return grads | layer.backward(product, x, sums["x"], dout)
