"""Updates that are a Kronecker product: LoKr.

    out[u c + i, v d + j] = base + s W1[u, v] W2[i, j]            W1 [a, b], W2 [c, d], out [a c, b d]
    dW1[u, v] = s <G_uv, W2>,  dW2 = s sum_uv W1[u, v] G_uv       G_uv [c, d] the blocks of the cotangent of out

The backward reads the cotangent once: a program walks over a part of the blocks with one tile of W2, for which it adds
up dW2, and leaves the tile's share of dW1 of every block. Parts and shares are added up afterwards, in a fixed order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import KroneckerTiles
from pallas_kernels.adapters.sums import add_parts

NAME = "adapter_kronecker"


def forward(
    W1: jax.Array,
    W2: jax.Array,
    base: jax.Array | None,
    *,
    scale: float,
    out_dtype: jnp.dtype,
    tiles: KroneckerTiles,
    interpret: bool,
) -> jax.Array:
    """base + scale W1 (x) W2 [a c, b d] in out_dtype; W1 [a, b], W2 [c, d] and base, or None, of any float dtypes."""
    O, I = W1.shape[0] * W2.shape[0], W1.shape[1] * W2.shape[1]
    inputs, cut = [W1, W2] + ([] if base is None else [base]), tiles.forward
    (out,) = backend.launch(
        _forward_kernel,
        f"{NAME}_forward",
        (-(-I // cut.cols), -(-O // cut.rows)),
        [(x, _whole(x)) for x in inputs],
        [(jax.ShapeDtypeStruct((O, I), out_dtype), pl.BlockSpec((O, I), lambda j, i: (0, 0)))],
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
        block=W2.shape,
        sizes=(O, I),
        scale=scale,
        tiles=cut,
    )
    return out


def backward(
    W1: jax.Array,
    W2: jax.Array,
    G: jax.Array,
    *,
    scale: float,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    tiles: KroneckerTiles,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """(dW1 [a, b], dW2 [c, d]) in these dtypes. Arguments as in `forward`; G [a c, b d], any float dtype."""
    (a, b), (c, d), cut = W1.shape, W2.shape, tiles.backward
    tiles_of_block = -(-c // cut.rows) * -(-d // cut.cols)
    at_once = min(tiles.at_once, a * b)
    groups = -(-a * b // at_once)
    steps = -(-groups // max(1, min(groups, tiles.programs // tiles_of_block)))
    parts = -(-groups // steps)
    shares, sums = backend.launch(
        _backward_kernel,
        f"{NAME}_backward",
        (tiles_of_block, parts),
        [(x, _whole(x)) for x in (W1, W2, G)],
        [
            (
                jax.ShapeDtypeStruct((tiles_of_block, 1, a * b), jnp.float32),
                pl.BlockSpec((None, 1, a * b), lambda t, p: (t, 0, 0)),
            ),
            (jax.ShapeDtypeStruct((parts, c, d), jnp.float32), pl.BlockSpec((None, c, d), lambda t, p: (p, 0, 0))),
        ],
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
        shapes=((a, b), (c, d)),
        steps=steps,
        at_once=at_once,
        tiles=cut,
    )
    dW1, dW2 = add_parts([shares, sums], [scale] * 2, dtypes, interpret=interpret)
    return dW1.reshape(a, b), dW2


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)


def _indices(axis: tuple) -> jax.Array:
    return jnp.asarray(axis[0], jnp.int32) + jnp.arange(axis[1], dtype=jnp.int32)


def _forward_kernel(W1_ref, W2_ref, *refs, block, sizes, scale, tiles, interpret):
    (c, d), (O, I) = block, sizes
    rows = (pl.program_id(1) * tiles.rows, tiles.rows, O if O % tiles.rows else None)
    cols = (pl.program_id(0) * tiles.cols, tiles.cols, I if I % tiles.cols else None)
    mask, row, col = backend.inside(rows, cols), _indices(rows), _indices(cols)
    u, v = lax.div(row, jnp.int32(c)), lax.div(col, jnp.int32(d))
    i, j = row - u * c, col - v * d
    W1 = backend.gather_tile(W1_ref, u[:, None], v[None, :], mask).astype(jnp.float32)
    W2 = backend.gather_tile(W2_ref, i[:, None], j[None, :], mask).astype(jnp.float32)
    out = scale * W1 * W2
    if len(refs) == 2:
        out += backend.load_tile(refs[0], rows, cols).astype(jnp.float32)
    backend.store_tile(refs[-1], rows, cols, out)


def _backward_kernel(W1_ref, W2_ref, G_ref, dW1_ref, dW2_ref, *, shapes, steps, at_once, tiles, interpret):
    (a, b), (c, d) = shapes
    tile, first = pl.program_id(0), pl.program_id(1) * steps
    across = -(-d // tiles.cols)
    rows = (lax.div(tile, jnp.int32(across)) * tiles.rows, tiles.rows, c)
    cols = (lax.rem(tile, jnp.int32(across)) * tiles.cols, tiles.cols, d)
    in_block, i, j = backend.inside(rows, cols), _indices(rows), _indices(cols)
    W2 = backend.load_tile(W2_ref, rows, cols).astype(jnp.float32)

    def read(block):
        """W1 and G of a block."""
        there = jnp.minimum(block, a * b - 1)  # what the last part has too many of is read masked
        u, v = lax.div(there, jnp.int32(b)), lax.rem(there, jnp.int32(b))
        mask = in_block & (block < a * b)
        G = backend.gather_tile(G_ref, (u * c + i)[:, None], (v * d + j)[None, :], mask)
        return backend.load_tile(W1_ref, (u, 1, None), (v, 1, None)), G

    def step(k, dW2):
        blocks = [jnp.asarray((first + k) * at_once + n, jnp.int32) for n in range(at_once)]
        for block, (W1, G) in zip(blocks, [read(block) for block in blocks], strict=True):
            G = G.astype(jnp.float32)
            share = jnp.sum(jnp.sum(G * W2, axis=1, keepdims=True), axis=0, keepdims=True)
            backend.store_tile(dW1_ref, (0, 1, None), (block, 1, a * b), share)
            dW2 += W1.astype(jnp.float32) * G
        return dW2

    dW2 = lax.fori_loop(0, steps, step, jnp.zeros((tiles.rows, tiles.cols), jnp.float32))
    backend.store_tile(dW2_ref, rows, cols, dW2)
