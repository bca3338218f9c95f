"""Rotations of blocks of rows or columns: OFT. D [k, n, n] is what a rotation is more than the identity.

    turn   out = v + blockdiag(D)^T v            of rows, axis 0
           out = v + v blockdiag(D)              of columns, axis 1; either with D^T in place of D
    outer  D_nm = sum_i v_ni g_mi                in each block, of rows; sum_t v_tn g_tm of columns

A program multiplies by a tile of the block-diagonal matrix, which it makes of as many blocks as the tile holds: its
products with zeros cost less than reading narrow blocks would.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import PROGRAMS, Tiles

NAME = "adapter_block_diagonal"


def turn(
    v: jax.Array,
    D: jax.Array,
    *,
    axis: int,
    transpose: bool,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """v [O, I] with the blocks of an axis turned, in out_dtype.

    Args:
      v: any float dtype; its axis `axis` has k n elements.
      D: [k, n, n], n a power of two up to a tile's size, of the dtype that the precision names.
      transpose: whether D^T is in place of D.
      tiles: `rows` along the axis, a multiple of n, and `cols` along the other.
    """
    k, n, _ = D.shape
    out = jax.ShapeDtypeStruct(v.shape, out_dtype)
    (out,) = backend.launch(
        _turn_kernel,
        f"{NAME}_turn",
        (-(-v.shape[1 - axis] // tiles.cols), -(-v.shape[axis] // tiles.rows)),
        [(v, _whole(v)), (D.reshape(k * n, n), pl.BlockSpec((k * n, n), lambda i, j: (0, 0)))],
        [(out, _whole(v))],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        shape=v.shape,
        n=n,
        axis=axis,
        transpose=transpose,
        precision=precision,
        tiles=tiles,
    )
    return out


def outer(
    v: jax.Array, g: jax.Array, n: int, *, axis: int, dtype: jnp.dtype, precision: str, tiles: Tiles, interpret: bool
) -> jax.Array:
    """The blocks [k, n, n] of products of v and g [O, I], taken to `dtype`, in float32; the rest as in `turn`."""
    along, walked = -(-v.shape[axis] // tiles.rows), -(-v.shape[1 - axis] // tiles.cols)
    steps = -(-walked // max(1, min(walked, PROGRAMS // along)))
    parts, size = -(-walked // steps), tiles.rows
    (sums,) = backend.launch(
        _outer_kernel,
        f"{NAME}_outer",
        (along, parts),
        [(v, _whole(v)), (g, _whole(g))],
        [
            (
                jax.ShapeDtypeStruct((parts, along, size, size), jnp.float32),
                pl.BlockSpec((None, None, size, size), lambda i, j: (j, i, 0, 0)),
            )
        ],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        shape=v.shape,
        steps=steps,
        axis=axis,
        dtype=dtype,
        precision=precision,
        tiles=tiles,
    )
    blocks = jnp.sum(sums, axis=0).reshape(along, size // n, n, size // n, n)
    blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)
    return blocks.reshape(-1, n, n)[: v.shape[axis] // n]


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0, 0))


def _spans(
    own, other, shape: tuple[int, int], axis: int, tiles: Tiles, sticks_out: bool = False
) -> tuple[tuple, tuple]:
    """(first, number, limit) of a tile's rows and columns; no limit where it cannot stick out."""
    size, across = shape[axis], shape[1 - axis]
    along = (own * tiles.rows, tiles.rows, size if size % tiles.rows else None)
    walked = (other * tiles.cols, tiles.cols, across if across % tiles.cols or sticks_out else None)
    return (along, walked) if axis == 0 else (walked, along)


def _turn_kernel(v_ref, D_ref, out_ref, *, shape, n, axis, transpose, precision, tiles, interpret):
    dot, own = backend.Dot(precision, interpret), pl.program_id(1)
    spans = _spans(own, pl.program_id(0), shape, axis, tiles)
    index = own * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    block = lax.div(index, jnp.int32(n))
    here = index < shape[axis]
    mask = (block[:, None] == block[None, :]) & here[:, None] & here[None, :]
    within = index - block * n
    first, second = (index[None, :], within[:, None]) if transpose else (index[:, None], within[None, :])
    D = backend.gather_tile(D_ref, first, second, mask)
    v = backend.load_tile(v_ref, *spans)
    operand = v.astype(D.dtype)
    turned = dot(D, operand, (0, 0)) if axis == 0 else dot(operand, D)
    backend.store_tile(out_ref, *spans, v.astype(jnp.float32) + turned)


def _outer_kernel(v_ref, g_ref, out_ref, *, shape, steps, axis, dtype, precision, tiles, interpret):
    dot, own, first = backend.Dot(precision, interpret), pl.program_id(0), pl.program_id(1) * steps

    def step(i, total):
        spans = _spans(own, first + i, shape, axis, tiles, sticks_out=True)
        v, g = (backend.load_tile(ref, *spans).astype(dtype) for ref in (v_ref, g_ref))
        return total + dot(v, g, (1, 1) if axis == 0 else (0, 0))

    size = tiles.rows
    total = lax.fori_loop(0, steps, step, jnp.zeros((size, size), jnp.float32))
    backend.store_tile(out_ref, (0, size, None), (0, size, None), total)
