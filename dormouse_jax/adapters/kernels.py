"""What the kernels serve, and their calls in the form that the plain references have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels.adapters as kernels
from dormouse_jax.reference import lokr, lora, oft
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products

_PAIRS = {"lora": (("A", "B"),), "loha": (("A1", "B1"), ("A2", "B2"))}


def choose(operator: str, x: dict[str, Any], precision: str) -> Any:
    """The configuration of an operator's kernels on checked arrays.

    Raises:
      ValueError: there are none that serve the call.
    """
    family, form = operator.split(".")
    if form == "bypass":
        raise ValueError(f"there are no kernels for {operator}")
    if family == "oft":
        O, I = x["base"].shape
        return kernels.choose_block_diagonal(O, I, x["P"].shape[1], precision)
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
    family: str,
    product: Products,
    x: dict[str, Any],
    *,
    scale: float = 1.0,
    detach_norm: bool = True,
    side: str = "",
    neumann: bool = False,
    out_dtype: str,
    tiles: Any,
    interpret: bool,
) -> jax.Array:
    """What the reference's `rebuild` gives, in out_dtype; options as the operators have them."""
    if family == "oft":
        D = product.round(oft.rotation(x["P"], neumann))
        turned = {"axis": 0, "transpose": False} if side == "output" else {"axis": 1, "transpose": True}
        common = {"precision": product.precision, "tiles": tiles, "interpret": interpret}
        return kernels.block_diagonal.turn(x["base"], D, out_dtype=jnp.dtype(out_dtype), **turned, **common)
    common: dict[str, Any] = {"scale": scale, "out_dtype": jnp.dtype(out_dtype), "tiles": tiles, "interpret": interpret}
    if family == "lokr":
        W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
        return kernels.kronecker.forward(W1, W2, x["base"], **common)
    common["precision"], pairs = product.precision, _pairs(family, product, x)
    if x.get("magnitude") is not None:
        common["factor"] = f32(x["magnitude"]) * _inverse_norm(product, x, scale, tiles, interpret)
    return kernels.low_rank.forward(pairs, x["base"], **common)


def _inverse_norm(product: Products, x: dict[str, Any], scale: float, tiles: Any, interpret: bool) -> jax.Array:
    """Of the rows of V = base + s B A."""
    (pair,) = _pairs("lora", product, x)
    common: dict[str, Any] = {"scale": scale, "precision": product.precision, "tiles": tiles, "interpret": interpret}
    return lora.inverse_norm(jnp.sqrt(kernels.low_rank.row_sums(pair, x["base"], None, **common)))


def rebuild_backward(
    family: str,
    product: Products,
    x: dict[str, Any],
    dout: jax.Array,
    *,
    scale: float = 1.0,
    detach_norm: bool = True,
    side: str = "",
    neumann: bool = False,
    tiles: Any,
    interpret: bool,
) -> dict[str, jax.Array]:
    """What the reference's `rebuild_backward` gives."""
    if family == "oft":
        D, base = product.round(oft.rotation(x["P"], neumann)), x["base"]
        common = {"precision": product.precision, "tiles": tiles, "interpret": interpret}
        # W' = R^T W or W R^T: the block of dR is W G^T there and G^T W here.
        axis, left, right = (0, base, dout) if side == "output" else (1, dout, base)
        dR = kernels.block_diagonal.outer(left, right, D.shape[1], axis=axis, dtype=D.dtype, **common)
        turned = {"axis": axis, "transpose": axis == 0, "out_dtype": jnp.dtype(jnp.float32)}
        return {
            "P": oft.backward_of_rotation(x["P"], dR, neumann),
            "base": kernels.block_diagonal.turn(dout, D, **turned, **common),
        }
    common: dict[str, Any] = {"scale": scale, "tiles": tiles, "interpret": interpret}
    if family == "lokr":
        W1, W2 = (lokr.factor(product, x, name) for name in ("W1", "W2"))
        dW1, dW2 = kernels.kronecker.backward(W1, W2, dout, **common)
        return lokr.backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": dout}
    common["precision"], pairs = product.precision, _pairs(family, product, x)
    grads: dict[str, jax.Array] = {"base": dout}
    of_rows: dict[str, Any] = {}
    if x.get("magnitude") is not None:
        m, inverse = f32(x["magnitude"]), _inverse_norm(product, x, scale, tiles, interpret)
        grads["magnitude"] = kernels.low_rank.row_sums(pairs[0], x["base"], dout, **common) * inverse
        of_rows["factor"] = m * inverse
        # Of use where base has a gradient, and else not computed.
        grads["base"] = of_rows["factor"][:, None] * dout
        if not detach_norm:
            e = m * grads["magnitude"] * inverse**2
            of_rows["along"] = e, x["base"]
            V = kernels.low_rank.forward(pairs, x["base"], out_dtype=jnp.dtype(jnp.float32), **common)
            grads["base"] -= e[:, None] * V
    found = kernels.low_rank.backward(pairs, dout, **common, **of_rows)
    names = [name for pair in _PAIRS[family] for name in pair]
    return grads | dict(zip(names, (grad for pair in found for grad in pair), strict=True))


def _pairs(family: str, product: Products, x: dict[str, Any]) -> list[tuple[jax.Array, jax.Array]]:
    return [(product.round(x[down]), product.round(x[up])) for down, up in _PAIRS[family]]
