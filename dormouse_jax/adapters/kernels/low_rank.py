"""What LoRA and LoHa share on kernels: updates that are one low-rank product or two of them, multiplied."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference.products import Products
from pallas_kernels import gemm

# The names of the arrays of each product B A, by family.
PAIRS = {"lora": (("A", "B"),), "loha": (("A1", "B1"), ("A2", "B2"))}


def pairs(family: str, product: Products, x) -> list[tuple[jax.Array, jax.Array]]:
    return [(product.round(x[down]), product.round(x[up])) for down, up in PAIRS[family]]


def named(family: str, grads) -> dict[str, jax.Array]:
    """Gradients of the products' arrays by name."""
    names = [name for pair in PAIRS[family] for name in pair]
    return dict(zip(names, (grad for pair in grads for grad in pair), strict=True))


def sum_of_products(
    a: jax.Array,
    b: jax.Array,
    more: tuple[jax.Array, jax.Array],
    bias: jax.Array | None,
    *,
    transpose_b: bool,
    out_dtype: jnp.dtype,
    config: Any,
    interpret: bool,
) -> jax.Array:
    """a op(b) + more[0] op(more[1]) + bias of 16-bit operands, by the Hopper kernel, rounded once."""
    options: dict[str, Any] = {"precision": "16bit", "transpose_a": False, "transpose_b": transpose_b, "more": more}
    options["name"] = "adapter_sum_of_products"
    return gemm.matmul(a, b, bias, out_dtype=out_dtype, config=config, interpret=interpret, **options)
