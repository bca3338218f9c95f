"""Updates that are one low-rank product, or two of them multiplied elementwise: LoRA and LoHa.

    V = base + s P,  P = P1 or P1 * P2,  Pi = Bi Ai              A [r, I], B [O, r]
    out = V, or f V by rows                                      f [O] (DoRA: magnitude over the norm of V's row)
    dPi = G, or G * P3-i;  dBi = s dPi Ai^T,  dAi = s Bi^T dPi   G [O, I] the cotangent of V, or f G - e V by rows

The backward reads G twice, once along its rows for B and once along its columns for A. Where there are few rows or
columns of tiles a program walks along a part of them; the parts are added up afterwards, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import PROGRAMS, Tiles, padded_rank

NAME = "adapter_low_rank"

Pairs = Sequence[tuple[jax.Array, jax.Array]]


def forward(
    pairs: Pairs,
    base: jax.Array | None,
    *,
    scale: float,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: Tiles,
    interpret: bool,
    factor: jax.Array | None = None,
) -> jax.Array:
    """base + scale P [O, I] in out_dtype.

    Args:
      pairs: one or two (A [r, I], B [O, r]), of the dtype that the precision names.
      base: [O, I], any float dtype, or None.
      precision: "fp32", "tf32" or "16bit".
      factor: [O] float32, by which the rows of the sum are multiplied, or None.
    """
    (O, rank), I = pairs[0][1].shape, pairs[0][0].shape[1]
    inputs = [x for pair in pairs for x in pair] + ([] if base is None else [base])
    inputs += [] if factor is None else [factor.reshape(O, 1)]
    (out,) = backend.launch(
        _forward_kernel,
        f"{NAME}_forward",
        (-(-I // tiles.cols), -(-O // tiles.rows)),
        [(x, _whole(x)) for x in inputs],
        [(jax.ShapeDtypeStruct((O, I), out_dtype), pl.BlockSpec((O, I), lambda j, i: (0, 0)))],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        pairs=len(pairs),
        has_base=base is not None,
        has_factor=factor is not None,
        sizes=(O, I, rank),
        scale=scale,
        precision=precision,
        tiles=tiles,
    )
    return out


def row_sums(
    pair: tuple[jax.Array, jax.Array],
    base: jax.Array,
    G: jax.Array | None,
    *,
    scale: float,
    precision: str,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """Sums of V * V by rows, or of G * V, [O] in float32, with V = base + scale B A. Arguments as in `forward`."""
    (O, rank), I = pair[1].shape, pair[0].shape[1]
    col_tiles = -(-I // tiles.cols)
    inputs = [*pair, base] + ([] if G is None else [G])
    (sums,) = backend.launch(
        _row_sums_kernel,
        f"{NAME}_row_sums",
        (col_tiles, -(-O // tiles.rows)),
        [(x, _whole(x)) for x in inputs],
        [
            (
                jax.ShapeDtypeStruct((col_tiles, O, 1), jnp.float32),
                pl.BlockSpec((None, O, 1), lambda j, i: (j, 0, 0)),
            )
        ],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        sizes=(O, I, rank),
        scale=scale,
        precision=precision,
        tiles=tiles,
    )
    return jnp.sum(sums, axis=(0, 2))


def backward(
    pairs: Pairs,
    G: jax.Array,
    *,
    scale: float,
    precision: str,
    tiles: Tiles,
    interpret: bool,
    factor: jax.Array | None = None,
    along: tuple[jax.Array, jax.Array] | None = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """(dA [r, I], dB [O, r]) of each pair in float32.

    Arguments as in `forward`, and
      G: [O, I], any float dtype.
      factor: f [O], of a single pair, or None for 1.
      along: (e [O] float32, base [O, I]) where V's part of the cotangent counts, which a factor has then too.
    """
    (O, rank), I = pairs[0][1].shape, pairs[0][0].shape[1]
    row_tiles, col_tiles = -(-O // tiles.rows), -(-I // tiles.cols)
    inputs = [*(x for pair in pairs for x in pair), G]
    inputs += [] if factor is None else [factor.reshape(O, 1)]
    inputs += [] if along is None else [along[0].reshape(O, 1), along[1]]
    number, inputs = len(inputs), [(x, _whole(x)) for x in inputs]
    found = []
    for name, own, walked, shape in (
        ("dA", col_tiles, row_tiles, (rank, I)),
        ("dB", row_tiles, col_tiles, (O, rank)),
    ):
        steps = -(-walked // max(1, min(walked, PROGRAMS // own)))
        parts = -(-walked // steps)
        out = jax.ShapeDtypeStruct((parts, *shape), jnp.float32)
        spec = pl.BlockSpec((None, *shape), lambda i, j: (j, 0, 0))
        sums = backend.launch(
            _backward_kernel,
            f"{NAME}_{name}",
            (own, parts),
            inputs,
            [(out, spec)] * len(pairs),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            interpret=interpret,
            pairs=len(pairs),
            number=number,
            sizes=(O, I, rank),
            scale=scale,
            steps=steps,
            of_rows=name == "dB",
            precision=precision,
            tiles=tiles,
        )
        found.append([scale * jnp.sum(x, axis=0) for x in sums])
    return list(zip(*found, strict=True))


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0,) * x.ndim)


def _spans(row_tile, col_tile, sizes: tuple[int, int, int], tiles: Tiles, sticks_out: bool = False):
    """(first, number, limit) of a tile's rows, columns and ranks; no limit where it cannot stick out."""
    O, I, rank = sizes
    rows = (row_tile * tiles.rows, tiles.rows, O if O % tiles.rows or sticks_out else None)
    cols = (col_tile * tiles.cols, tiles.cols, I if I % tiles.cols or sticks_out else None)
    R = padded_rank(rank)
    return rows, cols, (0, R, rank if rank != R else None)


def _column(rows: tuple) -> tuple[tuple, tuple]:
    """The spans of these rows of an array [O, 1]."""
    return rows, (0, 1, None)


def _forward_kernel(*refs, pairs, has_base, has_factor, sizes, scale, precision, tiles, interpret):
    dot = backend.Dot(precision, interpret)
    rows, cols, ranks = _spans(pl.program_id(1), pl.program_id(0), sizes, tiles)
    P = 1.0
    for i in range(pairs):
        A, B = backend.load_tile(refs[2 * i], ranks, cols), backend.load_tile(refs[2 * i + 1], rows, ranks)
        P = dot(B, A) * P
    out = scale * P
    if has_base:
        out += backend.load_tile(refs[2 * pairs], rows, cols).astype(jnp.float32)
    if has_factor:
        out *= backend.load_tile(refs[-2], *_column(rows))
    backend.store_tile(refs[-1], rows, cols, out)


def _row_sums_kernel(A_ref, B_ref, base_ref, *refs, sizes, scale, precision, tiles, interpret):
    rows, cols, ranks = _spans(pl.program_id(1), pl.program_id(0), sizes, tiles)
    A, B = backend.load_tile(A_ref, ranks, cols), backend.load_tile(B_ref, rows, ranks)
    V = scale * backend.Dot(precision, interpret)(B, A) + backend.load_tile(base_ref, rows, cols).astype(jnp.float32)
    G = backend.load_tile(refs[0], rows, cols).astype(jnp.float32) if len(refs) == 2 else V
    backend.store_tile(refs[-1], *_column(rows), jnp.sum(G * V, axis=1, keepdims=True))


def _backward_kernel(*refs, pairs, number, sizes, scale, steps, of_rows, precision, tiles, interpret):
    dot = backend.Dot(precision, interpret)
    own, first = pl.program_id(0), pl.program_id(1) * steps
    G_ref, *of_rows_refs = refs[2 * pairs : number]
    outs, R = refs[number:], padded_rank(sizes[2])

    def step(k, totals):
        row_tile, col_tile = (own, first + k) if of_rows else (first + k, own)
        # The last part may have steps outside of the weight: there all tiles are zero.
        rows, cols, ranks = _spans(row_tile, col_tile, sizes, tiles, sticks_out=True)
        A = [backend.load_tile(refs[2 * i], ranks, cols) for i in range(pairs)]
        B = [backend.load_tile(refs[2 * i + 1], rows, ranks) for i in range(pairs)]
        G = backend.load_tile(G_ref, rows, cols).astype(jnp.float32)
        if of_rows_refs:
            G *= backend.load_tile(of_rows_refs[0], *_column(rows))
        if len(of_rows_refs) == 3:
            base = backend.load_tile(of_rows_refs[2], rows, cols).astype(jnp.float32)
            G -= backend.load_tile(of_rows_refs[1], *_column(rows)) * (base + scale * dot(B[0], A[0]))
        if pairs == 1:
            dP = [G]
        else:
            dP = [G * dot(B[1], A[1]), G * dot(B[0], A[0])]
        dP = [d.astype(A[0].dtype) for d in dP]
        if of_rows:
            return tuple(total + dot(dP[i], A[i], (1, 1)) for i, total in enumerate(totals))
        return tuple(total + dot(B[i], dP[i], (0, 0)) for i, total in enumerate(totals))

    shape = (tiles.rows, R) if of_rows else (R, tiles.cols)
    totals = jax.lax.fori_loop(0, steps, step, (jnp.zeros(shape, jnp.float32),) * pairs)
    rows, cols, ranks = _spans(own, own, sizes, tiles)
    for out, total in zip(outs, totals, strict=True):
        backend.store_tile(out, *((rows, ranks) if of_rows else (ranks, cols)), total)
