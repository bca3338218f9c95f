"""Rotations of blocks of rows or columns: OFT.

    R = (I + Q) (I - Q)^-1,  Q = P - P^T,  in k blocks P [n, n]        or I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 (Neumann)
    turn   out = blockdiag(R)^T v            of rows, axis 0
           out = v blockdiag(R)              of columns, axis 1; either with R^T in place of R
    outer  dR_nm = sum_i v_ni g_mi           in each block, of rows; sum_t v_tn g_tm of columns
    backward   the gradient of P from dR

With N = (I - Q)^-1, R = 2 N - I and dQ = 2 N^T dR N^T. A program makes the rotations of the blocks that its tile holds
before it walks along the other axis, by Gauss-Jordan steps without a choice of pivots: what is left of I - Q after any
of them has a symmetric part of I at least. Only D = R - I is multiplied, as one block-diagonal matrix: its products
with zeros cost less than reading narrow blocks would.
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
    P: jax.Array,
    *,
    axis: int,
    transpose: bool,
    neumann: bool,
    dtype: jnp.dtype,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: Tiles,
    interpret: bool,
    bias: jax.Array | None = None,
) -> jax.Array:
    """v [O, I] with the blocks of an axis turned, plus a bias [I] where there is one, in out_dtype.

    Args:
      v: any float dtype; its axis `axis` has k n elements.
      P: [k, n, n], n a power of two up to a tile's size, any float dtype.
      transpose: whether R^T is in place of R.
      dtype: of the operands, which the precision names.
      tiles: `rows` along the axis, a multiple of n, and `cols` along the other.
    """
    out = jax.ShapeDtypeStruct(v.shape, out_dtype)
    inputs = [v] + ([] if bias is None else [bias.astype(jnp.float32).reshape(1, -1)])
    (found,) = _launch(
        "turn",
        P,
        inputs,
        [(out, _whole(v))],
        axis=axis,
        transpose=transpose,
        neumann=neumann,
        dtype=dtype,
        precision=precision,
        tiles=tiles,
        interpret=interpret,
    )
    return found


def outer(
    v: jax.Array,
    g: jax.Array,
    P: jax.Array,
    *,
    axis: int,
    dtype: jnp.dtype,
    precision: str,
    tiles: Tiles,
    interpret: bool,
) -> jax.Array:
    """dR [parts, k n, n] in float32, to be added up, of v and g [O, I]; P gives its shape, the rest as in `turn`."""
    (found,) = _launch(
        "outer", P, [v, g], [], axis=axis, dtype=dtype, precision=precision, tiles=tiles, interpret=interpret
    )
    return found


def turn_and_outer(
    v: jax.Array,
    g: jax.Array,
    P: jax.Array,
    *,
    axis: int,
    transpose: bool,
    neumann: bool,
    dtype: jnp.dtype,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: Tiles,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """(g turned, dR of v and g in parts) of one read of g, as `turn` and `outer` give them."""
    turned, parts = _launch(
        "turn_and_outer",
        P,
        [v, g],
        [(jax.ShapeDtypeStruct(g.shape, out_dtype), _whole(g))],
        axis=axis,
        transpose=transpose,
        neumann=neumann,
        dtype=dtype,
        precision=precision,
        tiles=tiles,
        interpret=interpret,
    )
    return turned, parts


def backward(P: jax.Array, parts: jax.Array, *, neumann: bool, interpret: bool) -> jax.Array:
    """The gradient of P [k, n, n], in its dtype, from dR in parts. Its products are float32-accurate."""
    k, n, _ = P.shape
    size = max(n, 32)
    flat = P.reshape(k * n, n)
    (dP,) = backend.launch(
        _backward_kernel,
        f"{NAME}_backward",
        (-(-k * n // size),),
        [(flat, _first(flat)), (parts.reshape(-1, n), pl.BlockSpec((parts.shape[0] * k * n, n), lambda i: (0, 0)))],
        [(jax.ShapeDtypeStruct(flat.shape, P.dtype), _first(flat))],
        num_warps=4 if size == 32 else 8,
        num_stages=1,
        interpret=interpret,
        parts=parts.shape[0],
        sizes=(k * n, n),
        neumann=neumann,
        size=size,
    )
    return dP.reshape(P.shape)


def _launch(name, P, inputs, outputs, *, axis, tiles, interpret, transpose=False, neumann=False, **static):
    """Launches programs that each walk along a part of the axis that is not turned."""
    k, n, _ = P.shape
    shape, turns, multiplies = inputs[0].shape, name.startswith("turn"), name.endswith("outer")
    along, walked = -(-shape[axis] // tiles.rows), -(-shape[1 - axis] // tiles.cols)
    steps = -(-walked // max(1, min(walked, PROGRAMS // along)))
    parts, flat = -(-walked // steps), P.reshape(k * n, n)
    if multiplies:
        sums = jax.ShapeDtypeStruct((parts, k * n, n), jnp.float32)
        outputs = [*outputs, (sums, pl.BlockSpec((None, k * n, n), lambda i, j: (j, 0, 0)))]
    return backend.launch(
        _kernel,
        f"{NAME}_{name}",
        (along, parts),
        [(flat, _whole(flat)), *((x, _whole(x)) for x in inputs)],
        outputs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        shape=shape,
        n=n,
        steps=steps,
        sticks_out=parts * steps * tiles.cols > shape[1 - axis],
        axis=axis,
        transpose=transpose,
        neumann=neumann,
        turns=turns,
        multiplies=multiplies,
        has_bias=turns and not multiplies and len(inputs) == 2,
        tiles=tiles,
        **static,
    )


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i, j: (0, 0))


def _first(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i: (0, 0))


# Blocks of a tile: [blocks, n, n] where they are inverted, and [size, size] on the diagonal where they are multiplied


def _skew(P_ref, own, size: int, sizes: tuple[int, int]) -> jax.Array:
    """Q of the tile's blocks [size / n, n, n]; zeros beyond the last block."""
    rows, n = sizes
    blocks = size // n
    block = (own * blocks + jnp.arange(blocks, dtype=jnp.int32))[:, None, None]
    i, j = jnp.arange(n, dtype=jnp.int32)[None, :, None], jnp.arange(n, dtype=jnp.int32)[None, None, :]
    here = jnp.broadcast_to(block * n < rows, (blocks, n, n))
    P, transposed = (backend.gather_tile(P_ref, block * n + row, col, here) for row, col in ((i, j), (j, i)))
    return P.astype(jnp.float32) - transposed.astype(jnp.float32)


def _inverse(Q: jax.Array) -> jax.Array:
    """(I - Q)^-1, in place: the k-th step makes column k of what was the identity beside it from column k."""
    n = Q.shape[-1]
    i = lax.broadcasted_iota(jnp.int32, (1, n, 1), 1)
    j = lax.broadcasted_iota(jnp.int32, (1, 1, n), 2)

    def step(k, M):
        row = jnp.sum(jnp.where(i == k, M, 0.0), axis=1, keepdims=True)
        column = jnp.sum(jnp.where(j == k, M, 0.0), axis=2, keepdims=True)
        pivot = jnp.sum(jnp.where(i == k, column, 0.0), axis=1, keepdims=True)
        row = jnp.where(j == k, 1.0, row) / pivot
        return jnp.where(i == k, row, jnp.where(j == k, 0.0, M) - column * row)

    return lax.fori_loop(0, n, step, jnp.where(i == j, 1.0, 0.0) - Q)


def _spread(blocks: jax.Array) -> jax.Array:
    """[size / n, n, n] as the diagonal of [size, size]."""
    number, n, _ = blocks.shape
    if number == 1:
        return blocks.reshape(n, n)
    shape = (number, n, number, n)
    own, other = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
    spread = jnp.where(own == other, jnp.broadcast_to(blocks[:, :, None, :], shape), 0.0)
    return spread.reshape(number * n, number * n)


def _gathered(matrix: jax.Array, n: int) -> jax.Array:
    """The blocks [size, n] on the diagonal of [size, size]."""
    size = matrix.shape[0]
    if size == n:
        return matrix
    shape = (size, size // n, n)
    own, other = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.sum(jnp.where(lax.div(own, jnp.int32(n)) == other, matrix.reshape(shape), 0.0), axis=1)


def _identity(size: int) -> jax.Array:
    rows, cols = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(rows == cols, 1.0, 0.0)


def _horner(Q: jax.Array, dot: backend.Dot) -> list[jax.Array]:
    """S3 = 2 + Q, S2 = 2 + Q S3, S1 = 2 + Q S2, so that R = I + Q S1, of [size, size]."""
    two = 2.0 * _identity(Q.shape[0])
    found = [two + Q]
    for _ in range(2):
        found.append(two + dot(Q, found[-1]))
    return found


def _turned_by(Q: jax.Array, neumann: bool, interpret: bool) -> jax.Array:
    """D = R - I [size, size]."""
    if neumann:
        dot, Q = backend.Dot("fp32", interpret), _spread(Q)
        return dot(Q, _horner(Q, dot)[-1])
    D = 2.0 * _spread(_inverse(Q))
    return D - 2.0 * _identity(D.shape[0])


# Kernels


def _kernel(
    P_ref,
    v_ref,
    *refs,
    shape,
    n,
    steps,
    sticks_out,
    axis,
    transpose,
    neumann,
    turns,
    multiplies,
    has_bias,
    dtype,
    precision,
    tiles,
    interpret,
):
    dot, own, first = backend.Dot(precision, interpret), pl.program_id(0), pl.program_id(1) * steps
    size, length = tiles.rows, shape[axis]
    along = (own * size, size, length if length % size else None)
    g_ref = refs[0] if multiplies else v_ref
    if turns:
        D = _turned_by(_skew(P_ref, own, size, (length, n)), neumann, interpret).astype(dtype)

    def step(i, total):
        walked = ((first + i) * tiles.cols, tiles.cols, shape[1 - axis] if sticks_out else None)
        spans = (along, walked) if axis == 0 else (walked, along)
        g = backend.load_tile(g_ref, *spans)
        operand = g.astype(dtype)
        if multiplies:
            # Before g is turned: that product is waited for, this one runs on to the next step where it is the last,
            # and Triton's pipeline would load the next g over the one that it reads.
            v = backend.load_tile(v_ref, *spans).astype(dtype)
            total += dot(v, operand, (1, 1) if axis == 0 else (0, 0))
        if turns:
            # Rows: D^T g, of which D is transposed by what is contracted; columns: g D.
            turned = dot(D, operand, (int(transpose), 0)) if axis == 0 else dot(operand, D, (1, int(transpose)))
            turned += g.astype(jnp.float32)
            if has_bias:
                turned += backend.load_tile(refs[0], (0, 1, None), along)
            backend.store_tile(refs[-1 - multiplies], *spans, turned)
        return total

    total = lax.fori_loop(0, steps, step, jnp.zeros((size, size) if multiplies else (1, 1), jnp.float32))
    if multiplies:
        backend.store_tile(refs[-1], along, (0, n, None), _gathered(total, n))


def _backward_kernel(P_ref, parts_ref, out_ref, *, parts, sizes, neumann, size, interpret):
    own, (length, n) = pl.program_id(0), sizes
    along = (own * size, size, length if length % size else None)
    dot, Q = backend.Dot("fp32", interpret), _skew(P_ref, own, size, sizes)

    def add(i, total):
        rows = (i * length + own * size, size, (i + 1) * length if along[2] else None)
        return total + backend.load_tile(parts_ref, rows, (0, n, None))

    dR = lax.fori_loop(0, parts, add, jnp.zeros((size, n), jnp.float32))
    dR = _spread(dR.reshape(size // n, n, n))
    if neumann:
        Q, dQ, d = _spread(Q), jnp.zeros_like(dR), dR
        for S in reversed(_horner(Q, dot)):
            dQ += dot(d, S, (1, 1))
            d = dot(Q, d, (0, 0))
        dQ += d
    else:
        N = _spread(_inverse(Q))
        dQ = 2.0 * dot(dot(N, dR, (0, 0)), N, (1, 1))
    backend.store_tile(out_ref, along, (0, n, None), _gathered(dQ - dQ.T, n))
