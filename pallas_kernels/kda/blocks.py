"""What the forward and the backward kernels share: decays inside a chunk, and the tiles that carry them.

A chunk is cut into blocks of 16 rows (tokens). With g the log-decays,

    prefix_i = sum of g over the block's rows <= i      suffix_j = sum of g over the block's rows > j      total_r = sum over block r

exp(G_i - G_j) for i and j in different blocks is exp(prefix_i) * exp(totals between) * exp(suffix_j): sums of numbers <= 0, so no
exponential exceeds 1. Pairs of blocks are taken level by level, like the merges of a binary tree: at a level of `half` blocks, rows of
every odd run of `half` blocks meet the rows of the run before it, behind an anchor on the border between the two. One matrix product
of the whole chunk serves a level; what belongs to other levels is masked away.

Inside a block, exp(G_i - G_j) = exp(prefix_i) * exp(-prefix_j) on the fast path, for rows whose prefix stays above -FAST_LIMIT. The
other rows take the exact path: a running sum of g over (j, i]. Which path a row takes depends on rows up to it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.config import BLOCK

# exp(-127) is 0 in float32 (flushed): clamping there changes nothing and keeps -inf out of products.
MIN_LOG_DECAY = -127.0

# How far below the block's start a row may have decayed and still be factored through it. The factor exp(-prefix) reaches
# exp(limit): 60 leaves room for large keys in the exponent range of bfloat16 and TF32. Rounding prefix itself costs a relative
# limit * 2^-24, which float32-accurate results cannot afford at 60.
FAST_LIMIT = {"fp32": 16.0, "tf32": 60.0, "16bit": 60.0}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row and column numbers of a chunk of C tokens, and the masks made of them."""

    C: int

    @property
    def row(self) -> jax.Array:
        return jnp.arange(self.C)[:, None]

    @property
    def col(self) -> jax.Array:
        return jnp.arange(self.C)[None, :]

    @property
    def blocks(self) -> int:
        return self.C // BLOCK

    def run(self, half: int) -> jax.Array:
        """Where row and column lie in the same run of `half` blocks."""
        return self.row // (half * BLOCK) == self.col // (half * BLOCK)

    def levels(self) -> Iterator[int]:
        """The sizes, in blocks, of the runs that meet at each level: 1, 2, ... below the whole chunk."""
        half = 1
        while 2 * half <= self.blocks:
            yield half
            half *= 2

    def meet(self, half: int) -> jax.Array:
        """Where a row's run and a column's run of `half` blocks meet."""
        row_run, col_run = self.row // (half * BLOCK), self.col // (half * BLOCK)
        return (row_run % 2 == 1) & (row_run == col_run + 1)


def masked_sum(mask: jax.Array, x: jax.Array, precision: str, interpret: bool) -> jax.Array:
    """mask @ x for a 0/1 mask [C, C]: the sum of chosen rows of x [C, K].

    Accurate to 2^-22 under "fp32"; to 2^-17 elsewhere, where two bfloat16 pieces of x are enough.
    """
    if precision == "fp32":
        return Dot("fp32", interpret)(mask.astype(jnp.float32), x)
    dot, ones = Dot("16bit", interpret), mask.astype(jnp.bfloat16)
    head = x.astype(jnp.bfloat16)
    return dot(ones, head) + dot(ones, (x - head.astype(jnp.float32)).astype(jnp.bfloat16))


class Decays:
    """The decays of one chunk, for a tile of channels: g [C, K], log, clamped at MIN_LOG_DECAY.

    Every factor is summed anew from g by a product with a 0/1 matrix, when it is needed: that is cheaper than to keep it, and a sum
    over each row's own run needs no exchange of rows between threads.
    """

    def __init__(self, g: jax.Array, rows: Rows, precision: str, interpret: bool):
        self.rows, self.precision, self.interpret = rows, precision, interpret
        self.g = jnp.maximum(g.astype(jnp.float32), MIN_LOG_DECAY)
        self.prefix = self._sum(rows.run(1) & (rows.row >= rows.col))
        self.limit = FAST_LIMIT[precision]
        deepest = jnp.max(-self.prefix, axis=1)
        self.slow = (deepest > self.limit)[:, None]
        self._any_slow = jnp.max(deepest, axis=0) > self.limit

    def _sum(self, mask: jax.Array) -> jax.Array:
        return masked_sum(mask, self.g, self.precision, self.interpret)

    def up(self, half: int) -> jax.Array:
        """exp of the sum of g from the start of the row's run of `half` blocks through the row, [C, K]."""
        if half == 1:
            return jnp.exp(self.prefix)
        return jnp.exp(self._sum(self.rows.run(half) & (self.rows.row >= self.rows.col)))

    def down(self, half: int) -> jax.Array:
        """exp of the sum of g from after the row to the end of its run of `half` blocks, [C, K]."""
        return jnp.exp(self._sum(self.rows.run(half) & (self.rows.row < self.rows.col)))

    def anchor(self) -> jax.Array:
        """exp(-prefix), for keys behind the anchor at their block's start; clamped where rows leave the fast path."""
        return jnp.exp(jnp.minimum(-self.prefix, self.limit))

    def total(self) -> jax.Array:
        """exp(G_C), [1, K]."""
        return jnp.exp(jnp.sum(self.g, axis=0))[None, :]

    def exact_steps(self, always: bool):
        """Steps of the exact path's loop: 16, or 0 where no row of the chunk needs it."""
        return BLOCK if always else self._any_slow.astype(jnp.int32) * BLOCK
