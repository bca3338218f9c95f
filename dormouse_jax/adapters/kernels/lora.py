"""LoRA on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.adapters.kernels import layer
from dormouse_jax.adapters.kernels.low_rank import named, pairs
from dormouse_jax.reference import lora
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import BypassConfig, FewTokens, few_tokens
from pallas_kernels.adapters import low_rank as kernels


def rebuild(
    product: Products,
    x,
    *,
    scale: float,
    detach_norm: bool,
    out_dtype: jnp.dtype,
    tiles: Any,
    interpret: bool,
) -> tuple[jax.Array, None]:
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
    factor = None
    if x["magnitude"] is not None:
        factor = f32(x["magnitude"]) * _inverse_norm(product, x, common)
    return kernels.forward(pairs("lora", product, x), x["base"], factor=factor, out_dtype=out_dtype, **common), None


def _inverse_norm(product: Products, x, common: dict[str, Any]) -> jax.Array:
    """Of the rows of V = base + s B A."""
    (pair,) = pairs("lora", product, x)
    return lora.inverse_norm(jnp.sqrt(kernels.row_sums(pair, x["base"], None, **common)))


def rebuild_backward(
    product: Products, x, kept, dout, *, scale: float, detach_norm: bool, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
    (pair,) = given = pairs("lora", product, x)
    grads: dict[str, jax.Array] = {"base": dout}
    of_rows: dict[str, Any] = {}
    if x["magnitude"] is not None:
        m, inverse = f32(x["magnitude"]), _inverse_norm(product, x, common)
        grads["magnitude"] = kernels.row_sums(pair, x["base"], dout, **common) * inverse
        of_rows["factor"] = m * inverse
        # Of use where base has a gradient, and else not computed.
        grads["base"] = of_rows["factor"][:, None] * dout
        if not detach_norm:
            e = m * grads["magnitude"] * inverse**2
            of_rows["along"] = e, x["base"]
            V = kernels.forward(given, x["base"], out_dtype=jnp.dtype(jnp.float32), **common)
            grads["base"] -= e[:, None] * V
    dtypes = [(x["A"].dtype, x["B"].dtype)]
    return grads | named("lora", kernels.backward(given, dout, dtypes=dtypes, **common, **of_rows))


def bypass(
    product: Products,
    x,
    *,
    scale: float,
    detach_norm: bool,
    out_dtype: jnp.dtype,
    tiles: BypassConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    tokens, B = product.round(x["x"]), product.round(x["B"])
    if tiles.few is not None:
        A, base = product.round(x["A"]), product.round(x["base"])
        u, h = few_tokens.contract(tokens, base, A, along_rows=False, config=tiles.few, interpret=interpret)
        shape: dict[str, Any] = {"along_rows": False, "out_dtype": out_dtype, "config": tiles.few}
        return few_tokens.finish(u, h, B, x["bias"], scale=scale, interpret=interpret, **shape), h
    h = product.round(scale * product("ti,ri->tr", tokens, x["A"]))
    if tiles.forward is not None:
        options: dict[str, Any] = {"config": tiles.forward, "out_dtype": out_dtype, "interpret": interpret}
        options |= {"more": (h, B), "bias": x["bias"], "transpose_b": True}
        return layer.product(product, tokens, x["base"], **options), h
    u = None if x["base"] is None else product.round(product("ti,oi->to", tokens, x["base"]))
    common = _common(product, tiles, interpret)
    return kernels.forward([(B, h)], u, bias=x["bias"], out_dtype=out_dtype, transposed=True, **common), h


def bypass_backward(
    product: Products, x, kept, dout, *, scale: float, detach_norm: bool, tiles: BypassConfig, interpret: bool
) -> dict[str, jax.Array]:
    A, B, h, g, base = product.round(x["A"]), product.round(x["B"]), kept, product.round(dout), x["base"]
    if tiles.few is not None:
        return _few_tokens_backward(product, x, kept, dout, scale, tiles.few, interpret)
    common, dtype = _common(product, tiles, interpret), jnp.dtype(product.dtype)
    # One read of g for dB = g^T h and p = s g B; h has s already.
    dtypes = [(x["B"].dtype, dtype)]
    ((dB, p),) = kernels.backward([(B, h)], g, dtypes=dtypes, scales=(1.0, scale), transposed=True, **common)
    grads = {"A": product("tr,ti->ri", p, x["x"]), "B": dB, "bias": jnp.sum(f32(dout), axis=0)}
    if base is not None:
        grads["base"] = product("to,ti->oi", g, x["x"])  # not computed where nobody wants it
    if tiles.backward is not None and base is not None:
        options: dict[str, Any] = {"config": tiles.backward, "out_dtype": x["x"].dtype, "interpret": interpret}
        return grads | {"x": layer.product(product, g, base, more=(p, A), **options)}
    u = None if base is None else product.round(product("to,oi->ti", g, base))
    return grads | {"x": kernels.forward([(A, p)], u, out_dtype=x["x"].dtype, **common)}


def _few_tokens_backward(
    product: Products, x, h: jax.Array, dout, scale: float, config: FewTokens, interpret: bool
) -> dict[str, jax.Array]:
    tokens, A, B, base, g = (product.round(a) for a in (x["x"], x["A"], x["B"], x["base"], dout))
    common: dict[str, Any] = {"config": config, "interpret": interpret}
    v, p = few_tokens.contract(g, base, B, along_rows=True, **common)
    dx = few_tokens.finish(v, p, A, None, scale=scale, along_rows=True, out_dtype=x["x"].dtype, **common)
    dtypes = (x["A"].dtype, x["B"].dtype)
    dA, dB = few_tokens.gradients(tokens, g, h, p, scale=scale, dtypes=dtypes, **common)
    # The last two are not computed where nobody wants them.
    return {"x": dx, "A": dA, "B": dB, "bias": jnp.sum(f32(dout), axis=0), "base": product("to,ti->oi", g, tokens)}


def _common(product: Products, tiles: BypassConfig, interpret: bool) -> dict[str, Any]:
    return {"scale": 1.0, "precision": product.precision, "tiles": tiles.update, "interpret": interpret}
