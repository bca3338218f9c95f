"""What the forward and the backward kernels share: the decays of a 16-row block and its exact path.

Inside a block, with g the log-decays (rows are tokens):

    prefix_i = sum_{t <= i} g_t      total = sum_t g_t      suffix_j = sum_{t > j} g_t

so that exp(G_i - G_j) = exp(prefix_i) exp(totals of the blocks between) exp(suffix_j) for i and j in different blocks: sums of
numbers <= 0 without a difference anywhere, hence no cancellation and no exponential above 1. Within one block,
exp(G_i - G_j) = exp(prefix_i) exp(-prefix_j) on the fast path (tensor cores), for rows whose prefix stays above -FAST_LIMIT, and a
running sum of g over (j, i] on the exact path, for the other rows. Which path a row takes depends on rows up to it alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.config import BLOCK

# exp(-127) is 0 in float32 (flushed): clamping there changes nothing and keeps -inf out of products.
MIN_LOG_DECAY = -127.0

# How far below the block's start a row may have decayed and still be factored through it. The factor exp(-prefix) reaches
# exp(limit): 60 leaves room for large keys in the exponent range of bfloat16 and TF32. Rounding prefix itself costs a relative
# limit * 2^-24, which float32-accurate results cannot afford at 60.
FAST_LIMIT = {"fp32": 16.0, "tf32": 60.0, "16bit": 60.0}


def iotas() -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a block, [16, 1] and [1, 16]."""
    i = jnp.arange(BLOCK)
    return i[:, None], i[None, :]


def block_sums(g: jax.Array, dot32: Dot) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prefix [16, K], suffix [16, K] and total [1, K] of the log-decays g [16, K] of a block."""
    row, col = iotas()
    prefix = dot32((row >= col).astype(jnp.float32), g)
    suffix = dot32((row < col).astype(jnp.float32), g)
    return prefix, suffix, jnp.sum(g, axis=0)[None, :]


def slow_rows(prefix: jax.Array, precision: str) -> tuple[jax.Array, jax.Array]:
    """Rows of the block that need the exact path, [16] bool, and how many steps its loop takes (0 or 16)."""
    depth = jnp.max(-prefix, axis=1)
    slow = depth > FAST_LIMIT[precision]
    return slow, jnp.max(slow.astype(jnp.int32), axis=0) * BLOCK


def take_row(x: jax.Array, onehot: jax.Array) -> jax.Array:
    """The row of x [16, K] that onehot [16, 1] marks, [1, K]."""
    return jnp.sum(jnp.where(onehot, x, 0.0), axis=0)[None, :]


def exact_products(
    left: tuple[jax.Array, ...], k: jax.Array, g: jax.Array, steps: jax.Array
) -> tuple[jax.Array, ...]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, [16, 16], for every x in `left`, by differences in float32.

    Walks over j from the last row to the first and keeps the sum of g over (j, i] for every row i; nothing is subtracted.
    """
    row, col = iotas()

    def step(s, carry):
        span, *products = carry
        j = BLOCK - 1 - s
        onehot = row == j
        weighted = jnp.where(row >= j, jnp.exp(span), 0.0) * take_row(k, onehot)
        products = [jnp.where(col == j, jnp.sum(x * weighted, axis=1)[:, None], p) for x, p in zip(left, products)]
        span = jnp.where(row >= j, span + take_row(g, onehot), span)
        return (span, *products)

    zero = jnp.zeros((BLOCK, BLOCK), jnp.float32)
    _, *products = lax.fori_loop(0, steps, step, (jnp.zeros_like(g), *(zero for _ in left)))
    return tuple(products)


def inverse(A: jax.Array, dot32: Dot) -> jax.Array:
    """(I + A)^-1 of a strictly lower 16 x 16 block.

    Blocks of 1, 2, 4, 8 rows are merged in pairs by M_21 = -M_22 A_21 M_11, all pairs of a level at once: the same arithmetic as
    forward substitution, which stays accurate where a product of powers of A does not.
    """
    row, col = iotas()

    def between(size: int) -> jax.Array:
        return jnp.where((row // size == col // size + 1) & (row // size % 2 == 1), A, 0.0)

    M = (row == col).astype(jnp.float32) - between(1)
    for size in (2, 4, 8):
        M = M - dot32(M, dot32(between(size), M))
    return M
