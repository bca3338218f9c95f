"""OFT on kernels: those turn, and give the gradient of P; the layer's own product is XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products
from pallas_kernels.adapters import block_diagonal as kernels


def _common(product: Products, tiles: Any, interpret: bool) -> dict[str, Any]:
    common = {"precision": product.precision, "tiles": tiles, "interpret": interpret}
    return common | {"dtype": jnp.dtype(product.dtype)}


def rebuild(
    product: Products, x, *, side: str, neumann: bool, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, None]:
    turned: dict[str, Any] = {"axis": 0, "transpose": False} if side == "output" else {"axis": 1, "transpose": True}
    common = _common(product, tiles, interpret) | {"neumann": neumann, "out_dtype": out_dtype}
    return kernels.turn(x["base"], x["P"], **turned, **common), None


def rebuild_backward(product: Products, x, kept, dout, *, side: str, neumann: bool, tiles: Any, interpret: bool):
    base, P, common = x["base"], x["P"], _common(product, tiles, interpret)
    # W' = R^T W or W R^T: the block of dR is W G^T there and G^T W here.
    axis, left, right = (0, base, dout) if side == "output" else (1, dout, base)
    parts = kernels.outer(left, right, P, axis=axis, **common)
    turned: dict[str, Any] = {"axis": axis, "transpose": axis == 0, "neumann": neumann, "out_dtype": base.dtype}
    return {
        "P": kernels.backward(P, parts, neumann=neumann, interpret=interpret),
        "base": kernels.turn(dout, P, **turned, **common),  # not computed where nobody wants it
    }


def bypass(
    product: Products, x, *, side: str, neumann: bool, out_dtype: jnp.dtype, tiles: Any, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    turned: dict[str, Any] = {"axis": 1, "transpose": False, "neumann": neumann}
    turned |= _common(product, tiles, interpret)
    if x["base"] is None:
        return kernels.turn(x["x"], x["P"], out_dtype=out_dtype, **turned), None
    if side == "input":
        y = product("ti,oi->to", _turned_input(product, x, turned), x["base"])
        return (y if x["bias"] is None else y + f32(x["bias"])).astype(out_dtype), None
    u = product.round(product("ti,oi->to", x["x"], x["base"]))
    return kernels.turn(u, x["P"], bias=x["bias"], out_dtype=out_dtype, **turned), u


def _turned_input(product: Products, x, turned: dict[str, Any]) -> jax.Array:
    return kernels.turn(x["x"], x["P"], out_dtype=jnp.dtype(product.dtype), **turned)


def bypass_backward(product: Products, x, kept, dout, *, side: str, neumann: bool, tiles: Any, interpret: bool):
    P, base = x["P"], x["base"]
    turned: dict[str, Any] = {"axis": 1, "neumann": neumann, **_common(product, tiles, interpret)}
    grads: dict[str, jax.Array] = {"bias": jnp.sum(f32(dout), axis=0)}
    v, g, dtype = x["x"], dout, x["x"].dtype
    if base is not None and side == "input":
        g = product.round(product("to,oi->ti", dout, base))
        again = _turned_input(product, x, turned | {"transpose": False})
        grads["base"] = product("to,ti->oi", dout, again)  # neither is computed where nobody wants it
    elif base is not None:
        v, dtype = kept, jnp.dtype(product.dtype)
    before, parts = kernels.turn_and_outer(v, g, P, transpose=True, out_dtype=dtype, **turned)
    grads["P"] = kernels.backward(P, parts, neumann=neumann, interpret=interpret)
    if base is None or side == "input":
        return grads | {"x": before}
    return grads | {"x": product("to,oi->ti", before, base), "base": product("to,ti->oi", before, x["x"])}
