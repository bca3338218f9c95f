"""What the kernels serve, and their calls in the form that the plain references have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels.adapters as kernels
from dormouse_jax.reference import lokr
from dormouse_jax.reference.products import Products

_PAIRS = {"lora": (("A", "B"),), "loha": (("A1", "B1"), ("A2", "B2"))}


def choose(operator: str, x: dict[str, Any], precision: str) -> Any:
    """The configuration of an operator's kernels on checked arrays.

    Raises:
      ValueError: there are none that serve the call.
    """
    family, form = operator.split(".")
    if form == "bypass" or family == "oft":
        raise ValueError(f"there are no kernels for {operator}")
    if x.get("magnitude") is not None:
        raise ValueError(f"the kernels of {operator} take no magnitude")
    if family == "lokr":
        W1, W2 = (_shape(x, name) for name in ("W1", "W2"))
        return kernels.choose_kronecker(W1, W2)
    (down, up), *_ = pairs = _PAIRS[family]
    (rank, I), O = x[down].shape, x[up].shape[0]
    return kernels.choose_low_rank(O, I, rank, pairs=len(pairs), precision=precision)


def _shape(x: dict[str, Any], factor: str) -> tuple[int, int]:
    if factor in x:
        return x[factor].shape
    return x[factor + "a"].shape[0], x[factor + "b"].shape[1]


def rebuild(
    family: str, product: Products, x: dict[str, Any], *, scale: float, out_dtype: str, tiles: Any, interpret: bool
) -> jax.Array:
    """What the reference's `rebuild` gives, in out_dtype."""
    common = {"scale": scale, "out_dtype": jnp.dtype(out_dtype), "tiles": tiles, "interpret": interpret}
    if family == "lokr":
        W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
        return kernels.kronecker.forward(W1, W2, x["base"], **common)
    return kernels.low_rank.forward(_pairs(family, product, x), x["base"], precision=product.precision, **common)


def rebuild_backward(
    family: str, product: Products, x: dict[str, Any], dout: jax.Array, *, scale: float, tiles: Any, interpret: bool
) -> dict[str, jax.Array]:
    """What the reference's `rebuild_backward` gives."""
    common = {"scale": scale, "tiles": tiles, "interpret": interpret}
    if family == "lokr":
        W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
        dW1, dW2 = kernels.kronecker.backward(W1, W2, dout, **common)
        return lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": dout}
    found = kernels.low_rank.backward(_pairs(family, product, x), dout, precision=product.precision, **common)
    names = [name for pair in _PAIRS[family] for name in pair]
    return dict(zip(names, (grad for pair in found for grad in pair), strict=True)) | {"base": dout}


def _pairs(family: str, product: Products, x: dict[str, Any]) -> list[tuple[jax.Array, jax.Array]]:
    return [(product.round(x[down]), product.round(x[up])) for down, up in _PAIRS[family]]
