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
    """Row and column numbers of a [copies * C, C] tile of token pairs, and the masks made of them.

    With copies=2, C query rows lie over C rows of erased keys: one product then serves P and A, dP and dA, dq and de.
    """

    C: int
    copies: int = 1

    @property
    def size(self) -> int:
        return self.C * self.copies

    @property
    def index(self) -> jax.Array:
        return jnp.arange(self.size)[:, None]

    @property
    def row(self) -> jax.Array:
        """The token of every row, [copies * C, 1]."""
        return self.index % self.C

    @property
    def col(self) -> jax.Array:
        return jnp.arange(self.C)[None, :]

    @property
    def blocks(self) -> int:
        """Blocks in a chunk."""
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

    def causal(self) -> jax.Array:
        """Where the column's token acts on the row's: strictly before it for erased keys, up to it for queries."""
        return self.row + jnp.where(self.index < self.C, 1, 0) > self.col if self.copies == 2 else self.row > self.col


def masked_sum(mask: jax.Array, x: jax.Array, precision: str, interpret: bool) -> jax.Array:
    """mask @ x for a 0/1 mask [R, S]: sums of chosen rows of x [S, K].

    Accurate to 2^-22 under "fp32"; to 2^-17 elsewhere, where two bfloat16 pieces of x are enough.
    """
    if precision == "fp32":
        return Dot("fp32", interpret)(mask.astype(jnp.float32), x)
    dot, ones = Dot("16bit", interpret), mask.astype(jnp.bfloat16)
    head = x.astype(jnp.bfloat16)
    return dot(ones, head) + dot(ones, (x - head.astype(jnp.float32)).astype(jnp.bfloat16))


class Decays:
    """The decays of one chunk, for a tile of channels: g [R, K], log, clamped at MIN_LOG_DECAY; R rows as in `Rows`."""

    def __init__(self, g: jax.Array, rows: Rows, precision: str):
        self.rows, self.limit = rows, FAST_LIMIT[precision]
        self.g = jnp.maximum(g.astype(jnp.float32), MIN_LOG_DECAY)
        blocks = self.g.reshape(rows.size // BLOCK, BLOCK, -1)
        if precision == "fp32":
            # Multiples of 2^-10 add up without rounding, so that the difference below costs no digit of the small remainders.
            coarse = jnp.floor(blocks * 1024.0) * (1.0 / 1024.0)
            fine = blocks - coarse
            prefix, prefix_fine = jnp.cumsum(coarse, axis=1), jnp.cumsum(fine, axis=1)
            total, total_fine = jnp.sum(coarse, axis=1), jnp.sum(fine, axis=1)
            suffix = (total[:, None, :] - prefix) + (total_fine[:, None, :] - prefix_fine)
            prefix, self.total_log = prefix + prefix_fine, total + total_fine
        else:  # A difference costs 2^-24 of the total, far below the operands' rounding.
            prefix = jnp.cumsum(blocks, axis=1)
            self.total_log = jnp.sum(blocks, axis=1)
            suffix = self.total_log[:, None, :] - prefix
        self.prefix, self.suffix = prefix.reshape(self.g.shape), suffix.reshape(self.g.shape)
        deepest = jnp.max(-self.prefix, axis=1)
        self.slow = (deepest > self.limit)[:, None]
        self._any_slow = jnp.max(deepest, axis=0) > self.limit

    def _spread(self, x: jax.Array, half: int, after: bool) -> jax.Array:
        """x times the decay of the blocks of the row's run of `half` blocks that lie before (after) the row's own block."""
        if half == 1:
            return x
        n = self.rows.size // BLOCK
        block, other = jnp.arange(n)[:, None, None], jnp.arange(n)[None, :, None]
        chosen = (block // half == other // half) & ((other > block) if after else (other < block))
        log = jnp.sum(jnp.where(chosen, self.total_log[None, :, :], 0.0), axis=1)
        blocks = x.reshape(n, BLOCK, -1) * jnp.exp(log)[:, None, :]
        return blocks.reshape(x.shape)

    def up(self, half: int) -> jax.Array:
        """exp of the sum of g from the start of the row's run of `half` blocks through the row, [C, K]."""
        return self._spread(jnp.exp(self.prefix), half, after=False)

    def down(self, half: int) -> jax.Array:
        """exp of the sum of g from after the row to the end of its run of `half` blocks, [C, K]."""
        return self._spread(jnp.exp(self.suffix), half, after=True)

    def anchor(self) -> jax.Array:
        """exp(-prefix), for keys behind the anchor at their block's start; clamped where rows leave the fast path."""
        return jnp.exp(jnp.minimum(-self.prefix, self.limit))

    def total(self) -> jax.Array:
        """exp(G_C), [1, K]; for tiles of one copy."""
        return jnp.exp(jnp.sum(self.total_log, axis=0))[None, :]

    def exact_steps(self, always: bool):
        """Steps of the exact path's loop: 16, or 0 where no row of the chunk needs it."""
        return BLOCK if always else self._any_slow.astype(jnp.int32) * BLOCK
