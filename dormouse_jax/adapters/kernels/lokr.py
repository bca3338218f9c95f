"""LoKr on kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference import lokr
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import kronecker as kernels


def rebuild(
    product: Products, x, *, scale: float, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
    common: dict[str, Any] = {"scale": scale, "tiles": tiles, "interpret": interpret}
    return kernels.forward(W1, W2, x["base"], out_dtype=out_dtype, **common), None


def rebuild_backward(
    product: Products, x, kept, dout, *, scale: float, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
    dW1, dW2 = kernels.backward(W1, W2, dout, scale=scale, tiles=tiles, interpret=interpret)
    return lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": dout}
