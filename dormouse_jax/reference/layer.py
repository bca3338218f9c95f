"""The linear layer that an adapter sits on, where it has its weight: x W^T, and the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference.products import Products


def f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def plus(total: jax.Array, addend: jax.Array | None) -> jax.Array:
    """A float32 sum, or the first part where there is no second."""
    return total if addend is None else total + f32(addend)


def forward(product: Products, x: Mapping[str, Any], update: jax.Array) -> jax.Array:
    """x base^T + update [T, O]."""
    return update if x["base"] is None else product("ti,oi->to", x["x"], x["base"]) + update


def backward(product: Products, x: Mapping[str, Any], dx: jax.Array, g: jax.Array) -> dict[str, Any]:
    """Gradients of x, which `dx` is the adapter's part of, and of base; `g` [T, O] is the cotangent before the bias."""
    if x["base"] is None:
        return {"x": dx}
    return {"x": dx + product("to,oi->ti", g, x["base"]), "base": product("to,ti->oi", g, x["x"])}
