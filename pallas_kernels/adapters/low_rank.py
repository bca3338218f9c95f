"""Updates that are one low-rank product, or two of them multiplied elementwise: LoRA and LoHa.

    V = base + s P,  P = P1 or P1 * P2,  Pi = Bi Ai              A [r, I], B [O, r]
    out = V, or f V by rows                                      f [O] (DoRA: magnitude over the norm of V's row)
    dPi = G, or G * P3-i;  dBi = s dPi Ai^T,  dAi = s Bi^T dPi   G [O, I] the cotangent of V, or f G - e V by rows

The backward reads G once: a program walks down a part of a strip of columns, adds up dA of the strip, and leaves the
strip's share of dB of every row. Parts and shares are added up afterwards, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import PROGRAMS, LowRankTiles, Tiles, padded_rank
from pallas_kernels.adapters.sums import add_parts

NAME = "adapter_low_rank"

Pairs = Sequence[tuple[jax.Array, jax.Array]]


def forward(
    pairs: Pairs,
    base: jax.Array | None,
    *,
    scale: float,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: LowRankTiles,
    interpret: bool,
    factor: jax.Array | None = None,
    bias: jax.Array | None = None,
    transposed: bool = False,
) -> jax.Array:
    """base + scale P + bias [O, I] in out_dtype.

    Args:
      pairs: one or two (A [r, I], B [O, r]), of the dtype that the precision names.
      base: [O, I], any float dtype, or None.
      precision: "fp32", "tf32" or "16bit".
      factor: [O] float32, by which the rows of the sum are multiplied, or None.
      bias: [I], any float dtype, or None.
      transposed: whether A is given as A^T [I, r].
    """
    (O, rank), I, cut = pairs[0][1].shape, pairs[0][0].shape[0 if transposed else 1], tiles.forward
    inputs = [x for pair in pairs for x in pair] + ([] if base is None else [base])
    inputs += [] if factor is None else [factor.reshape(O, 1)]
    inputs += [] if bias is None else [bias.reshape(1, I)]
    (out,) = backend.launch(
        _forward_kernel,
        f"{NAME}_forward",
        (-(-I // cut.cols), -(-O // cut.rows)),
        [(x, _whole(x)) for x in inputs],
        [(jax.ShapeDtypeStruct((O, I), out_dtype), pl.BlockSpec((O, I), lambda j, i: (0, 0)))],
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
        pairs=len(pairs),
        has_base=base is not None,
        has_factor=factor is not None,
        has_bias=bias is not None,
        transposed=transposed,
        sizes=(O, I, rank),
        scale=scale,
        precision=precision,
        tiles=cut,
    )
    return out


def row_sums(
    pair: tuple[jax.Array, jax.Array],
    base: jax.Array,
    G: jax.Array | None,
    *,
    scale: float,
    precision: str,
    tiles: LowRankTiles,
    interpret: bool,
) -> jax.Array:
    """Sums of V * V by rows, or of G * V, [O] in float32, with V = base + scale B A. Arguments as in `forward`."""
    (O, rank), I, cut = pair[1].shape, pair[0].shape[1], tiles.forward
    col_tiles = -(-I // cut.cols)
    inputs = [*pair, base] + ([] if G is None else [G])
    (sums,) = backend.launch(
        _row_sums_kernel,
        f"{NAME}_row_sums",
        (col_tiles, -(-O // cut.rows)),
        [(x, _whole(x)) for x in inputs],
        [
            (
                jax.ShapeDtypeStruct((col_tiles, O, 1), jnp.float32),
                pl.BlockSpec((None, O, 1), lambda j, i: (j, 0, 0)),
            )
        ],
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
        sizes=(O, I, rank),
        scale=scale,
        precision=precision,
        tiles=cut,
    )
    return jnp.sum(sums, axis=(0, 2))


def backward(
    pairs: Pairs,
    G: jax.Array,
    *,
    scale: float,
    precision: str,
    dtypes: Sequence[tuple[jnp.dtype, jnp.dtype]],
    tiles: LowRankTiles,
    interpret: bool,
    factor: jax.Array | None = None,
    along: tuple[jax.Array, jax.Array] | None = None,
    scales: tuple[float, float] | None = None,
    transposed: bool = False,
) -> list[tuple[jax.Array, jax.Array]]:
    """(dA [r, I], dB [O, r]) of each pair, in the dtypes given for it; dA as [I, r] where A is given transposed.

    Arguments as in `forward`, and
      G: [O, I], any float dtype.
      factor: f [O], of a single pair, or None for 1.
      along: (e [O] float32, base [O, I]) where V's part of the cotangent counts, which a factor has then too.
      scales: in place of s in dA and dB.
    """
    (O, rank), I, cut = pairs[0][1].shape, pairs[0][0].shape[0 if transposed else 1], tiles.backward
    strips, row_tiles = -(-I // cut.cols), -(-O // cut.rows)
    inputs = [*(x for pair in pairs for x in pair), G]
    inputs += [] if factor is None else [factor.reshape(O, 1)]
    inputs += [] if along is None else [along[0].reshape(O, 1), along[1]]
    steps = -(-row_tiles // max(1, min(row_tiles, PROGRAMS // strips)))
    parts = -(-row_tiles // steps)
    dA = (I, rank) if transposed else (rank, I)
    outs = [
        (jax.ShapeDtypeStruct((parts, *dA), jnp.float32), pl.BlockSpec((None, *dA), lambda j, i: (i, 0, 0))),
        (jax.ShapeDtypeStruct((strips, O, rank), jnp.float32), pl.BlockSpec((None, O, rank), lambda j, i: (j, 0, 0))),
    ]
    found = backend.launch(
        _backward_kernel,
        f"{NAME}_backward",
        (strips, parts),
        [(x, _whole(x)) for x in inputs],
        outs * len(pairs),
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
        pairs=len(pairs),
        number=len(inputs),
        transposed=transposed,
        sizes=(O, I, rank),
        scale=scale,
        steps=steps,
        precision=precision,
        tiles=cut,
    )
    scales = (scale, scale) if scales is None else scales
    sums = add_parts(found, scales * len(pairs), [dtype for pair in dtypes for dtype in pair], interpret=interpret)
    return list(zip(sums[::2], sums[1::2], strict=True))


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)


def _spans(row_tile, col_tile, sizes: tuple[int, int, int], tiles: Tiles, sticks_out: bool = False):
    """(first, number, limit) of a tile's rows, columns and ranks; no limit where it cannot stick out. sticks_out:
    whether there are tiles below the weight."""
    O, I, rank = sizes
    rows = (row_tile * tiles.rows, tiles.rows, O if O % tiles.rows or sticks_out else None)
    cols = (col_tile * tiles.cols, tiles.cols, I if I % tiles.cols else None)
    R = padded_rank(rank)
    return rows, cols, (0, R, rank if rank != R else None)


def _column(rows: tuple) -> tuple[tuple, tuple]:
    """The spans of these rows of an array [O, 1]."""
    return rows, (0, 1, None)


def _forward_kernel(
    *refs, pairs, has_base, has_factor, has_bias, transposed, sizes, scale, precision, tiles, interpret
):
    dot = backend.Dot(precision, interpret)
    rows, cols, ranks = _spans(pl.program_id(1), pl.program_id(0), sizes, tiles)
    # First what takes longest to come.
    base = backend.load_tile(refs[2 * pairs], rows, cols) if has_base else None
    P = 1.0
    for i in range(pairs):
        A = backend.load_tile(refs[2 * i], *((cols, ranks) if transposed else (ranks, cols)))
        P = dot(backend.load_tile(refs[2 * i + 1], rows, ranks), A, (1, int(transposed))) * P
    out = scale * P
    if base is not None:
        out += base.astype(jnp.float32)
    if has_factor:
        out *= backend.load_tile(refs[2 * pairs + has_base], *_column(rows))
    if has_bias:
        out += backend.load_tile(refs[-2], (0, 1, None), cols).astype(jnp.float32)
    backend.store_tile(refs[-1], rows, cols, out)


def _row_sums_kernel(A_ref, B_ref, base_ref, *refs, sizes, scale, precision, tiles, interpret):
    rows, cols, ranks = _spans(pl.program_id(1), pl.program_id(0), sizes, tiles)
    A, B = backend.load_tile(A_ref, ranks, cols), backend.load_tile(B_ref, rows, ranks)
    V = scale * backend.Dot(precision, interpret)(B, A) + backend.load_tile(base_ref, rows, cols).astype(jnp.float32)
    G = backend.load_tile(refs[0], rows, cols).astype(jnp.float32) if len(refs) == 2 else V
    backend.store_tile(refs[-1], *_column(rows), jnp.sum(G * V, axis=1, keepdims=True))


def _backward_kernel(*refs, pairs, number, transposed, sizes, scale, steps, precision, tiles, interpret):
    dot = backend.Dot(precision, interpret)
    strip, part = pl.program_id(0), pl.program_id(1)
    G_ref, *of_rows = refs[2 * pairs : number]
    dA_refs, dB_refs = refs[number::2], refs[number + 1 :: 2]
    # The last part may have tiles outside of the weight: there all is zero.
    sticks_out = sizes[0] % (steps * tiles.rows) != 0
    _, cols, ranks = _spans(0, strip, sizes, tiles)
    of_A = (cols, ranks) if transposed else (ranks, cols)
    A = [backend.load_tile(refs[2 * i], *of_A) for i in range(pairs)]
    across = (1, 1 - int(transposed)), (1, int(transposed))  # what of A is contracted: columns for dB, ranks for P

    def step(k, totals):
        rows, cols, ranks = _spans(part * steps + k, strip, sizes, tiles, sticks_out)
        G = backend.load_tile(G_ref, rows, cols)
        B = [backend.load_tile(refs[2 * i + 1], rows, ranks) for i in range(pairs)]
        if of_rows:
            G = G.astype(jnp.float32) * backend.load_tile(of_rows[0], *_column(rows))
        if len(of_rows) == 3:
            base = backend.load_tile(of_rows[2], rows, cols).astype(jnp.float32)
            G -= backend.load_tile(of_rows[1], *_column(rows)) * (base + scale * dot(B[0], A[0], across[1]))
        if pairs == 1:
            dP = [G]
        else:
            G = G.astype(jnp.float32)
            dP = [G * dot(B[1], A[1], across[1]), G * dot(B[0], A[0], across[1])]
        dP = [d.astype(A[0].dtype) for d in dP]
        for i in range(pairs):
            backend.store_tile(dB_refs[i], rows, ranks, dot(dP[i], A[i], across[0]))
        found = ((dP[i], B[i]) if transposed else (B[i], dP[i]) for i in range(pairs))
        return tuple(total + dot(*operands, (0, 0)) for total, operands in zip(totals, found, strict=True))

    zeros = jnp.zeros([number for _, number, _ in of_A], jnp.float32)
    totals = jax.lax.fori_loop(0, steps, step, (zeros,) * pairs)
    for out, total in zip(dA_refs, totals, strict=True):
        backend.store_tile(out, *of_A, total)
