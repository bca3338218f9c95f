"""LoHa on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.adapters.kernels import layer
from dormouse_jax.adapters.kernels.low_rank import PAIRS, named, pairs
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import BypassConfig
from pallas_kernels.adapters import low_rank as kernels


def rebuild(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
    return kernels.forward(pairs("loha", product, x), x["base"], out_dtype=out_dtype, **common), None


def rebuild_backward(
    product: Products, x, kept, dout, *, scale: float, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
    dtypes = [(x["A1"].dtype, x["B1"].dtype), (x["A2"].dtype, x["B2"].dtype)]
    return named("loha", kernels.backward(pairs("loha", product, x), dout, dtypes=dtypes, **common)) | {"base": dout}


def rounds_the_sum(x: dict[str, Any], precision: str) -> bool:
    """Whether a bypass may multiply by base + update as one weight in the products' precision.

    Not where float32 factors say that the update counts beyond what of it a sum with a 16-bit base keeps.
    """
    return precision != "16bit" or all(x[name].dtype != jnp.float32 for pair in PAIRS["loha"] for name in pair)


def bypass(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: BypassConfig, interpret: bool
) -> tuple[jax.Array, None]:
    tokens, base, bias = product.round(x["x"]), x["base"], x["bias"]
    one = base is not None and rounds_the_sum(x, product.precision)
    update = _weight(product, x, base if one else None, scale, tiles, interpret)
    if tiles.forward is not None:
        options: dict[str, Any] = {"config": tiles.forward, "out_dtype": out_dtype, "interpret": interpret}
        options |= {"bias": bias, "transpose_b": True}
        if one or base is None:
            return layer.product(product, tokens, update, **options), None
        return layer.product(product, tokens, base, more=(tokens, update), **options), None
    y = product("ti,oi->to", tokens, update)
    if base is not None and not one:
        y += product("ti,oi->to", tokens, base)
    return (y if bias is None else y + f32(bias)).astype(out_dtype), None


def bypass_backward(
    product: Products, x, kept, dout, *, scale: float, tiles: BypassConfig, interpret: bool
) -> dict[str, jax.Array]:
    g, base, dtype = product.round(dout), x["base"], jnp.dtype(product.dtype)
    # Of the gradient of x rounding the sum of weights takes no more than its own rounding does.
    weight = _weight(product, x, base, scale, tiles, interpret)
    # A sum over all tokens could leave float16's range, and a base of float32 has a gradient of its precision.
    exact = dtype == jnp.float16 or (base is not None and base.dtype == jnp.float32)
    G = _product(product, g, x["x"], jnp.float32 if exact else dtype, tiles.weight, interpret, transpose_a=True)
    dx = _product(product, g, weight, x["x"].dtype, tiles.backward, interpret)
    grads = {"x": dx, "bias": jnp.sum(f32(dout), axis=0), "base": G}
    G = G if dtype == jnp.float16 else product.round(G)
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "interpret": interpret}
    dtypes = [(x["A1"].dtype, x["B1"].dtype), (x["A2"].dtype, x["B2"].dtype)]
    found = kernels.backward(pairs("loha", product, x), G, dtypes=dtypes, tiles=tiles.update, **common)
    return grads | named("loha", found)


def _product(
    product: Products, a, b, out_dtype: Any, config: Any, interpret: bool, transpose_a: bool = False
) -> jax.Array:
    """op(a) b in out_dtype, on the Hopper kernel where it has a configuration."""
    if config is None:
        return product("ki,kj->ij" if transpose_a else "ik,kj->ij", a, b).astype(out_dtype)
    return layer.product(
        product, a, b, out_dtype=out_dtype, config=config, interpret=interpret, transpose_a=transpose_a
    )


def _weight(
    product: Products, x, base: jax.Array | None, scale: float, tiles: BypassConfig, interpret: bool
) -> jax.Array:
    """The update [O, I], or its sum with base, in the dtype of the products' operands."""
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "interpret": interpret}
    out_dtype = jnp.dtype(product.dtype)
    return kernels.forward(pairs("loha", product, x), base, out_dtype=out_dtype, tiles=tiles.update, **common)
