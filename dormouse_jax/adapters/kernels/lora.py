"""LoRA on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.adapters.kernels.low_rank import named, pairs
from dormouse_jax.reference import lora
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
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
