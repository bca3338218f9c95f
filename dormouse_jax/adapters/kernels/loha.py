"""LoHa on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.adapters.kernels.low_rank import named, pairs
from dormouse_jax.reference.products import Products
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
