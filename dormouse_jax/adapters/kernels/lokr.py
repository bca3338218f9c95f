"""LoKr on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference import lokr
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import kronecker, tokens


def rebuild(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
    common: dict[str, Any] = {"scale": scale, "tiles": tiles, "interpret": interpret}
    return kronecker.forward(W1, W2, x["base"], out_dtype=out_dtype, **common), None


def rebuild_backward(
    product: Products, x, kept, dout, *, scale: float, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
    dW1, dW2 = kronecker.backward(W1, W2, dout, scale=scale, tiles=tiles, interpret=interpret)
    return lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": dout}


def bypass(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    u = None if x["base"] is None else product.round(product("ti,oi->to", x["x"], x["base"]))
    common = _common(product, scale, tiles, interpret)
    return tokens.forward(x["x"], *_factors(product, x), u, x["bias"], out_dtype=out_dtype, **common), None


def bypass_backward(product: Products, x, kept, dout, *, scale: float, tiles: Any, interpret: bool):
    grads = {"bias": jnp.sum(f32(dout), axis=0)}
    u, dtype = None, x["x"].dtype
    if x["base"] is not None:
        u = product.round(product("to,oi->ti", dout, x["base"]))
        grads["base"] = product("to,ti->oi", dout, x["x"])  # not computed where nobody wants it
    common = _common(product, scale, tiles, interpret)
    dx, dW1, dW2 = tokens.backward(x["x"], *_factors(product, x), dout, u, out_dtype=dtype, **common)
    return grads | lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"x": dx}


def _factors(product: Products, x) -> list[jax.Array]:
    return [product.round(lokr.factor(product, x, name)) for name in ("W1", "W2")]


def _common(product: Products, scale: float, tiles: Any, interpret: bool) -> dict[str, Any]:
    return {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
