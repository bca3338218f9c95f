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
from collections.abc import Iterator, Sequence

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

    def same_block(self) -> jax.Array:
        return self.row // BLOCK == self.col // BLOCK

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

    def pick(self, per_block: Sequence[jax.Array]) -> jax.Array:
        """Spreads one [1, K] row a block over the block's rows: [C, K]."""
        out = jnp.broadcast_to(per_block[0], (self.C, per_block[0].shape[1]))
        for r in range(1, self.blocks):
            out = jnp.where(self.row // BLOCK == r, per_block[r], out)
        return out

    def block_totals(self, x: jax.Array) -> list[jax.Array]:
        """Sum of x [C, K] over the rows of each block, [1, K] each."""
        if self.blocks == 1:
            return [jnp.sum(x, axis=0)[None, :]]
        return [jnp.sum(jnp.where(self.row // BLOCK == r, x, 0.0), axis=0)[None, :] for r in range(self.blocks)]


def masked_sum(mask: jax.Array, x: jax.Array, precision: str, interpret: bool) -> jax.Array:
    """mask @ x for a 0/1 mask [C, C]: the sum of chosen rows of x [C, K].

    Accurate to 2^-22 under "fp32"; to 2^-17 elsewhere, where two bfloat16 pieces of x are enough.
    """
    if precision == "fp32":
        return Dot("fp32", interpret)(mask.astype(jnp.float32), x)
    dot, ones = Dot("16bit", interpret), mask.astype(jnp.bfloat16)
    head = x.astype(jnp.bfloat16)
    return dot(ones, head) + dot(ones, (x - head.astype(jnp.float32)).astype(jnp.bfloat16))


@dataclasses.dataclass
class Decays:
    """The decays of one chunk, for a tile of channels.

    Attributes:
      prefix: [C, K], log.
      up, down: exp(prefix) and exp(suffix), [C, K].
      block: exp(total) of every block, [1, K] each.
      depth: the deepest total of the chunk, a scalar: whether any row can need the exact path.
    """

    rows: Rows
    prefix: jax.Array
    up: jax.Array
    down: jax.Array
    block: list[jax.Array]
    depth: jax.Array

    @classmethod
    def of(cls, g: jax.Array, rows: Rows, precision: str, interpret: bool) -> Decays:
        """From log-decays g [C, K] that are already clamped at MIN_LOG_DECAY."""
        same = rows.same_block()
        prefix = masked_sum(same & (rows.row >= rows.col), g, precision, interpret)
        totals = rows.block_totals(g)
        if precision == "fp32":
            suffix = masked_sum(same & (rows.row < rows.col), g, precision, interpret)
        else:  # A difference costs 2^-24 of the total, far below the operands' rounding.
            suffix = rows.pick(totals) - prefix
        deepest = totals[0]
        for total in totals[1:]:
            deepest = jnp.minimum(deepest, total)
        depth = -jnp.min(jnp.min(deepest, axis=0), axis=0)
        return cls(rows, prefix, jnp.exp(prefix), jnp.exp(suffix), [jnp.exp(x) for x in totals], depth)

    def _products(self, half: int, after: bool) -> jax.Array | None:
        """Per row, the decay of the blocks of its run of `half` blocks that lie before (after) its own block."""
        if half == 1:
            return None
        per_block = []
        for r in range(self.rows.blocks):
            run = r // half * half
            product = jnp.ones_like(self.block[0])
            for other in range(r + 1, run + half) if after else range(run, r):
                product *= self.block[other]
            per_block.append(product)
        return self.rows.pick(per_block)

    def from_start(self, x: jax.Array, half: int) -> jax.Array:
        """x * exp(decay from the start of the row's run of `half` blocks to the row), for x already times `up`."""
        products = self._products(half, after=False)
        return x if products is None else x * products

    def to_end(self, x: jax.Array, half: int) -> jax.Array:
        """x * exp(decay from after the row to the end of its run), for x already times `down`."""
        products = self._products(half, after=True)
        return x if products is None else x * products

    def anchored(self, k: jax.Array, precision: str) -> jax.Array:
        """k exp(-prefix): keys behind the anchor at their block's start, exponents clamped where rows leave the fast path."""
        return k * jnp.exp(jnp.minimum(-self.prefix, FAST_LIMIT[precision]))

    def slow(self, precision: str) -> jax.Array:
        """Rows that need the exact path, [C, 1] bool."""
        return jnp.max(-self.prefix, axis=1)[:, None] > FAST_LIMIT[precision]

    def exact_steps(self, precision: str, always: bool):
        """Steps of the exact path's loop: 16, or 0 where no row of the chunk needs it."""
        return BLOCK if always else (self.depth > FAST_LIMIT[precision]).astype(jnp.int32) * BLOCK
