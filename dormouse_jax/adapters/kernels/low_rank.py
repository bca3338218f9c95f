"""What LoRA and LoHa share on kernels: updates that are one low-rank product or two of them, multiplied."""

from __future__ import annotations

import jax

from dormouse_jax.reference.products import Products

# The names of the arrays of each product B A, by family.
PAIRS = {"lora": (("A", "B"),), "loha": (("A1", "B1"), ("A2", "B2"))}


def pairs(family: str, product: Products, x) -> list[tuple[jax.Array, jax.Array]]:
    return [(product.round(x[down]), product.round(x[up])) for down, up in PAIRS[family]]


def named(family: str, grads) -> dict[str, jax.Array]:
    """Gradients of the products' arrays by name."""
    names = [name for pair in PAIRS[family] for name in pair]
    return dict(zip(names, (grad for pair in grads for grad in pair), strict=True))
