"""Products of a layer's own size on the Hopper kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference.products import Products
from pallas_kernels import gemm


def product(
    products: Products,
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: Any,
    config: gemm.MosaicConfig,
    interpret: bool,
    transpose_a: bool = False,
    transpose_b: bool = False,
    more: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """op(a) op(b) + op(more[0]) op(more[1]) + bias in out_dtype, rounded once; operands are of 16 bit."""
    a, b = products.round(a), products.round(b)
    options: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b, "config": config, "more": more}
    options |= {"name": "adapter_sum_of_products", "interpret": interpret}
    return gemm.matmul(a, b, bias, precision=products.precision, out_dtype=jnp.dtype(out_dtype), **options)
