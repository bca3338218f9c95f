"""What the forward and the backward kernels share: decays of a 16-row block, its exact path, and the inverse.

A chunk is cut into blocks of 16 rows (tokens). With g the log-decays of a block,

    prefix_i = sum_{t <= i} g_t      suffix_j = sum_{t > j} g_t      total = sum_t g_t

exp(G_i - G_j) for i and j in different blocks is exp(prefix_i) exp(totals of the blocks between) exp(suffix_j): sums
of numbers <= 0
without a difference anywhere, hence no cancellation and no exponential above 1. Within a block, exp(G_i - G_j) is
exp(prefix_i) exp(-prefix_j) on the fast path (tensor cores), for rows whose prefix stays above -FAST_LIMIT, and comes
from a running sum of g over (j, i] on the exact path, for the other rows; the 16-bit kernels for Hopper have halves of
blocks in its place (`mosaic_tiles.HALVES`). Which path a row takes depends on rows up to it alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.config import BLOCK

# exp(-127) is 0 in float32 (flushed): clamping there changes nothing and keeps -inf out of products.
MIN_LOG_DECAY = -127.0

# How far below the block's start a row may have decayed and still be factored through it. The factor exp(-prefix)
# reaches
# exp(limit): 60 leaves room for large keys in the exponent range of bfloat16 and TF32. Rounding prefix itself costs a
# relative limit * 2^-24, which float32-accurate results cannot afford at 60.
FAST_LIMIT = {"fp32": 16.0, "tf32": 60.0, "16bit": 60.0}


def iotas() -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a block, [16, 1] and [1, 16]."""
    i = jnp.arange(BLOCK)
    return i[:, None], i[None, :]


class MaskedSum:
    """mask @ x for 0/1 masks [16, 16]: sums of chosen rows of x [16, K], by tensor cores, from bfloat16 pieces of x.

    Exact but for float32's accumulation under "fp32", where x is all of its three pieces; to 2^-16 elsewhere, with two.
    """

    def __init__(self, x: jax.Array, precision: str, interpret: bool):
        self.dot = Dot("16bit", interpret)
        self.pieces = bt.pieces(x)[: 3 if precision == "fp32" else 2]

    def __call__(self, mask: jax.Array) -> jax.Array:
        products = [self.dot(mask.astype(jnp.bfloat16), x) for x in reversed(self.pieces)]
        return sum(products[1:], start=products[0])


@dataclasses.dataclass
class Decays:
    """Decays of one block, from its log-decays g [16, K] in float32.

    Attributes:
      prefix: log, [16, K].
      up, down, whole: exp of prefix, suffix and total, [16, K]; all rows of `whole` are the same.
    """

    prefix: jax.Array
    up: jax.Array
    down: jax.Array
    whole: jax.Array
    precision: str
    interpret: bool

    @classmethod
    def of(cls, g: jax.Array, precision: str, interpret: bool) -> Decays:
        row, col = iotas()
        total = MaskedSum(g, precision, interpret)
        prefix = total(row >= col)
        up, down, whole = (bt.exp(x, interpret) for x in (prefix, total(row < col), total(row + col >= 0)))
        return cls(prefix, up, down, whole, precision, interpret)

    def anchor(self) -> jax.Array:
        """exp(-prefix), for keys behind the anchor at the block's start; clamped where rows leave the fast path."""
        return bt.exp(jnp.minimum(-self.prefix, FAST_LIMIT[self.precision]), self.interpret)

    def depth(self) -> jax.Array:
        """How far every row has decayed since the block's start, in its deepest channel, [16]."""
        return jnp.max(-self.prefix, axis=1)


def clamp(g: jax.Array) -> jax.Array:
    return jnp.maximum(g.astype(jnp.float32), MIN_LOG_DECAY)


def take_row(x: jax.Array, onehot: jax.Array) -> jax.Array:
    """The row of x [16, K] that onehot [16, 1] marks, [1, K]."""
    return jnp.sum(jnp.where(onehot, x, 0.0), axis=0)[None, :]


def exact_products(left: tuple[jax.Array, ...], k: jax.Array, g: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, [16, 16], for every x in `left`, by running sums in float32.

    Walks over j from the last row to the first and keeps the sum of g over (j, i] for every row i; nothing is
    subtracted.
    """
    row, col = iotas()

    def step(s, carry):
        span, *products = carry
        j = BLOCK - 1 - s
        onehot = row == j
        weighted = jnp.where(row >= j, bt.exp(span, interpret), 0.0) * take_row(k, onehot)
        products = [
            jnp.where(col == j, jnp.sum(x * weighted, axis=1)[:, None], p) for x, p in zip(left, products, strict=False)
        ]
        span = jnp.where(row >= j, span + take_row(g, onehot), span)
        return (span, *products)

    zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    _, *products = lax.fori_loop(0, BLOCK, step, (jnp.zeros_like(g), *(zero for _ in left)))
    return tuple(products)


def invert(m_ref, chunk: int, interpret: bool) -> None:
    """Replaces the strictly lower A [C, C] in m_ref by M = (I + A)^-1; what lies above the diagonal must be zero.

    Blocks of 16 rows by forward substitution, all blocks of the chunk side by side: row i of M is e_i - sum_j A_ij
    M_j. Then pairs of
    blocks are merged by M_21 = -M_22 A_21 M_11. The matrix goes through memory because a scalar A_ij can be read from
    there by every thread that needs it, where exchanging it between threads would cost a barrier each.
    """
    dot32 = Dot("fp32", interpret)
    first = jnp.arange(chunk // BLOCK) * BLOCK
    col = jnp.arange(BLOCK)[None, :]
    bt.barrier(interpret)
    M: list[jax.Array] = []
    for i in range(BLOCK):
        row = jnp.broadcast_to((col == i).astype(jnp.float32), (chunk // BLOCK, BLOCK))
        for j in range(i):
            row -= bt.gather_tile(m_ref, first + i, first + j)[:, None] * M[j]
        M.append(row)
    bt.barrier(interpret)
    for i in range(BLOCK):
        bt.scatter_tile(m_ref, (first + i)[:, None], first[:, None] + col, M[i])
    size = BLOCK
    while size < chunk:
        bt.barrier(interpret)
        merged = []
        for start in range(0, chunk, 2 * size):
            upper, lower = (start, size, None), (start + size, size, None)
            left = dot32(bt.load_tile(m_ref, lower, upper), bt.load_tile(m_ref, upper, upper))
            merged.append((lower, upper, -dot32(bt.load_tile(m_ref, lower, lower), left)))
        bt.barrier(interpret)
        for lower, upper, tile in merged:
            bt.store_tile(m_ref, lower, upper, tile)
        size *= 2
    bt.barrier(interpret)
