"""LoKr on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.adapters.kernels import layer
from dormouse_jax.reference import lokr
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import BypassConfig, kronecker, tokens


def rebuild(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    common: dict[str, Any] = {"scale": scale, "tiles": tiles, "interpret": interpret}
    return kronecker.forward(*_factors(product, x), x["base"], out_dtype=out_dtype, **common), None


def rebuild_backward(
    product: Products, x, kept, dout, *, scale: float, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    common: dict[str, Any] = {"scale": scale, "tiles": tiles, "interpret": interpret}
    dW1, dW2 = kronecker.backward(*_factors(product, x), dout, dtypes=_dtypes(x), **common)
    return lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": dout}


def _factors(product: Products, x) -> tuple[jax.Array, jax.Array]:
    """W1 and W2, as they are or in float32."""
    W1, W2 = (lokr.factor(product, x, name) if x.get(name) is None else x[name] for name in ("W1", "W2"))
    return W1, W2


def _dtypes(x) -> tuple[jnp.dtype, jnp.dtype]:
    """Of the gradients of W1 and W2: of products, whose own gradients come from them, float32."""
    W1, W2 = (jnp.dtype(jnp.float32) if x.get(name) is None else x[name].dtype for name in ("W1", "W2"))
    return W1, W2


def bypass(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: BypassConfig, interpret: bool
) -> tuple[jax.Array, None]:
    u = None
    if tiles.forward is not None:
        options: dict[str, Any] = {"config": tiles.forward, "out_dtype": product.dtype, "interpret": interpret}
        u = layer.product(product, x["x"], x["base"], transpose_b=True, **options)
    elif x["base"] is not None:
        u = product.round(product("ti,oi->to", x["x"], x["base"]))
    common = _common(product, scale, tiles, interpret)
    return tokens.forward(x["x"], *_rounded(product, x), u, x["bias"], out_dtype=out_dtype, **common), None


def bypass_backward(product: Products, x, kept, dout, *, scale: float, tiles: BypassConfig, interpret: bool):
    grads = {"bias": jnp.sum(f32(dout), axis=0)}
    u, dtype = None, x["x"].dtype
    if x["base"] is not None:
        if tiles.backward is not None:
            options: dict[str, Any] = {"config": tiles.backward, "out_dtype": product.dtype, "interpret": interpret}
            u = layer.product(product, dout, x["base"], **options)
        else:
            u = product.round(product("to,oi->ti", dout, x["base"]))
        grads["base"] = product("to,ti->oi", dout, x["x"])  # not computed where nobody wants it
    common = _common(product, scale, tiles, interpret)
    dx, dW1, dW2 = tokens.backward(x["x"], *_rounded(product, x), dout, u, out_dtype=dtype, dtypes=_dtypes(x), **common)
    return grads | lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"x": dx}


def _common(product: Products, scale: float, tiles: BypassConfig, interpret: bool) -> dict[str, Any]:
    return {"scale": scale, "precision": product.precision, "tiles": tiles.update, "interpret": interpret}


def _rounded(product: Products, x) -> tuple[jax.Array, jax.Array]:
    W1, W2 = _factors(product, x)
    return product.round(W1), product.round(W2)
