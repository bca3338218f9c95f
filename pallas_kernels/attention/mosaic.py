"""The forward kernel for Hopper, on Pallas's Mosaic GPU backend.

A block holds 128 queries of one head, 64 in each of two warpgroups, and walks over the keys that they see. A third
warpgroup copies tiles of keys and values into a ring in shared memory, ahead of them. The two take turns: while one has
the tensor cores, for the values of one tile and the scores of the next, the other forms exponentials.

float32 inputs come as three bfloat16 pieces each, which add up to them exactly; six products of pieces are as exact as
float32 arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.attention.config import HopperTiles
from pallas_kernels.attention.forward import LEAST_SCORE
from pallas_kernels.attention.sizes import Sizes
from pallas_kernels.backend_triton import LOG2_E
from pallas_kernels.gemm.mosaic import split

ROWS = 64  # queries of a warpgroup: the rows of one product of the tensor cores
GROUPS = 2  # warpgroups that multiply
_COPIER = GROUPS
# Products of the pieces of two operands, the smallest first.
PAIRS = {1: ((0, 0),), 3: ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))}
# Bytes of what blocks walk over, of all heads together, that stay in the L2 cache beside all else.
_CACHED = 24 << 20


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything about a launch that is not an array. `pieces` arrays add up to an operand: 1 or 3."""

    sizes: Sizes
    tiles: HopperTiles
    scale: float
    pieces: int
    interpret: bool

    @property
    def query_tiles(self) -> int:
        return -(-self.sizes.Tq // (GROUPS * ROWS))

    @property
    def masked(self) -> bool:
        """Whether a query may see a part of a tile of keys only."""
        return self.sizes.causal or self.sizes.Tk % self.tiles.k != 0


def in_pieces(x: jax.Array, pieces: int, dtype: Any) -> list[jax.Array]:
    """float32 x rounded to `dtype`, or as the sum of as many numbers of it."""
    found = []
    for piece in range(pieces):
        found.append(x.astype(dtype))
        if piece < pieces - 1:
            x = x - found[-1].astype(jnp.float32)
    return found


def head_and_block(blocks: int, heads: int, walked: int) -> tuple[jax.Array, jax.Array]:
    """Which head a program serves, and which of the blocks of that head.

    walked: bytes of what the blocks of all heads walk over. Where these stay in the cache, the first block of every
    head comes before the second of any, so that the shortest fill the card at the end; otherwise all blocks of a head
    come together, which read the same.
    """
    if walked <= _CACHED:
        return lax.rem(bm.program(), heads), lax.div(bm.program(), heads)
    return lax.div(bm.program(), blocks), lax.rem(bm.program(), blocks)


def _kernel(
    *refs, q_tiles, k_tiles, v_tiles, o_tiles, lse_rows, q_full, k_full, k_empty, v_full, v_empty, turn, call: _Call,
    left: Any = None,
):  # fmt: skip
    sizes, tiles, pieces = call.sizes, call.tiles, call.pieces
    q_refs, k_refs, v_refs = refs[:pieces], refs[pieces : 2 * pieces], refs[2 * pieces : 3 * pieces]
    o_ref, lse_ref = refs[-2:]
    walked = 2 * pieces * sizes.B * sizes.HK * sizes.Tk * sizes.D * k_tiles.dtype.itemsize
    head, tile = head_and_block(call.query_tiles, sizes.B * sizes.H, walked)
    tile = call.query_tiles - 1 - tile  # The longest rows first.
    batch, head = lax.div(head, sizes.H), lax.rem(head, sizes.H)
    first = tile * (GROUPS * ROWS)
    ahead = sizes.Tk - sizes.Tq
    steps = -(-sizes.Tk // tiles.k)
    if sizes.causal:
        last = jnp.minimum(first + GROUPS * ROWS, sizes.Tq) + ahead
        # Where no query of the block sees a key, all of the first tile is masked.
        steps = jnp.clip(lax.div(last + (tiles.k - 1), tiles.k), 1, steps)

    def slot(n):
        return lax.rem(n, tiles.stages)

    @pl.when(bm.warpgroup() == _COPIER)
    def _copy():
        bm.become_copier()
        kept = lax.div(head, sizes.group)

        def step(n, _):
            keys = pl.ds(n * tiles.k, tiles.k)
            for refs, ring, full, empty in ((k_refs, k_tiles, k_full, k_empty), (v_refs, v_tiles, v_full, v_empty)):
                pl.when(n >= tiles.stages)(lambda empty=empty: bm.wait(empty.at[slot(n)]))
                for piece, ref in enumerate(refs):
                    bm.copy_in(ref.at[batch, keys, kept], ring.at[slot(n) * pieces + piece], full.at[slot(n)])

        lax.fori_loop(0, steps, step, None)

        def drain(n, _):  # No barrier may be given up before all have seen it.
            bm.wait(k_empty.at[slot(n)])
            bm.wait(v_empty.at[slot(n)])

        lax.fori_loop(jnp.maximum(steps - tiles.stages, 0), steps, drain, None)

    @pl.when(bm.warpgroup() != _COPIER)
    def _attend():
        bm.become_multiplier()
        me = bm.warpgroup()
        row = first + me * ROWS
        rows = pl.ds(row, ROWS)
        pl.when(me == 1)(lambda: bm.arrive(turn.at[0]))
        for piece, ref in enumerate(q_refs):
            bm.copy_in(ref.at[batch, rows, head], q_tiles.at[me * pieces + piece], q_full.at[me])
        bm.wait(q_full.at[me])

        def operand(value):
            """A left operand: the registers themselves, which interpret mode takes from memory alone."""
            if not call.interpret:
                return value
            left[me, ...] = value
            return left.at[me]

        def score(total, n):
            for a, b in PAIRS[pieces]:
                bm.multiply(total, q_tiles.at[me * pieces + a], bm.transpose(k_tiles.at[slot(n) * pieces + b]))

        def weigh(total, p, n):
            for a, b in PAIRS[pieces]:
                bm.multiply(total, operand(p[a]), v_tiles.at[slot(n) * pieces + b])

        def soften(n, s, acc, m, l, masked):
            """exp of scores s, less the largest score so far, in pieces, and what they make of the sums."""
            if masked:
                query, key = bm.indices((ROWS, tiles.k))
                key = key + n * tiles.k
                seen = key <= query + (row + ahead) if sizes.causal else key < sizes.Tk
                s = jnp.where(seen, s, -jnp.inf)
            to_base_2 = call.scale * LOG2_E
            above = jnp.maximum(m, jnp.max(s, axis=1) * to_base_2)
            p = jnp.exp2(s * to_base_2 - bm.spread_rows(above, (ROWS, tiles.k)))
            shrink = jnp.exp2(m - above)
            l = l * shrink + jnp.sum(p, axis=1)
            acc = acc * bm.spread_rows(shrink, acc.shape)
            return in_pieces(p, pieces, k_tiles.dtype), acc, above, l

        def step(n, carry, masked=False):
            s, acc, m, l = carry
            p, acc, m, l = soften(n, s, acc, m, l, masked)
            bm.wait(v_full.at[slot(n)])
            bm.wait(k_full.at[slot(n + 1)])
            bm.wait(turn.at[me])

            def products(o, s):
                start(o, acc)
                weigh(o, p, n)
                score(s, n + 1)
                bm.arrive(turn.at[1 - me])
                s = bm.read(s)
                return finish(o, acc), s

            acc, s = bm.accumulators(products, acc.shape, (ROWS, tiles.k))
            bm.arrive(v_empty.at[slot(n)])
            bm.arrive(k_empty.at[slot(n + 1)])
            return s, acc, m, l

        # Sums of products of pieces start anew with every tile, and are added up outside of the tensor cores, which
        # round toward zero.
        def start(o, acc):
            if pieces == 1:
                bm.start_from(o, acc, call.interpret)

        def finish(o, acc):
            return bm.read_from(o, acc, call.interpret) if pieces == 1 else bm.read(o) + acc

        bm.wait(k_full.at[0])

        def first_scores(s):
            score(s, 0)
            return bm.read(s)

        s = bm.accumulators(first_scores, (ROWS, tiles.k))
        bm.arrive(k_empty.at[0])
        m, l = bm.column(ROWS, LEAST_SCORE), bm.column(ROWS, 0.0)
        carry = s, bm.zeros((ROWS, sizes.D)), m, l
        whole = steps - 1
        if sizes.causal:  # tiles of which each query of this warpgroup sees all
            whole = jnp.clip(lax.div(jnp.maximum(row + ahead + 1, 0), tiles.k), 0, whole)
        carry = lax.fori_loop(0, whole, step, carry)
        if sizes.causal:
            carry = lax.fori_loop(whole, steps - 1, functools.partial(step, masked=True), carry)
        s, acc, m, l = carry
        p, acc, m, l = soften(steps - 1, s, acc, m, l, call.masked)
        pl.when(me == 0)(lambda: bm.wait(turn.at[0]))
        bm.wait(v_full.at[slot(steps - 1)])

        def last_values(o):
            start(o, acc)
            weigh(o, p, steps - 1)
            return finish(o, acc)

        acc = bm.accumulators(last_values, acc.shape)
        bm.arrive(v_empty.at[slot(steps - 1)])
        acc = acc * bm.spread_rows(jnp.where(l == 0.0, 0.0, 1.0 / l), acc.shape)
        o_tiles[me, ...] = acc.astype(o_tiles.dtype)
        # inf: the backward then forms exp(score - inf) = 0 of whatever scores there are.
        lse_rows[me, ...] = jnp.where(l == 0.0, jnp.inf, m + jnp.log(l) * LOG2_E)
        bm.copy_buffers_out(
            [(o_tiles.at[me], o_ref.at[batch, rows, head]), (lse_rows.at[me], lse_ref.at[batch, head, rows])]
        )
        bm.finish_copies_out()


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float, tiles: HopperTiles, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """o and lse as of `pallas_kernels.attention.forward`, which is not for packed sequences; float32 inputs are
    multiplied float32-accurately."""
    sizes = Sizes.of(q, k, causal)
    operands = [split(x) if x.dtype == jnp.float32 else [x] for x in (q, k, v)]
    pieces, dtype = len(operands[0]), operands[0][0].dtype
    call = _Call(sizes, tiles, scale, pieces, interpret)
    ring = bm.tiles((tiles.stages * pieces, tiles.k, sizes.D), dtype)
    full, empty = bm.barriers(tiles.stages, pieces), bm.barriers(tiles.stages, GROUPS)
    scratch = {
        "q_tiles": bm.tiles((GROUPS * pieces, ROWS, sizes.D), dtype),
        "k_tiles": ring,
        "v_tiles": ring,
        "o_tiles": bm.tiles((GROUPS, ROWS, sizes.D), q.dtype),
        "lse_rows": bm.rows((GROUPS, ROWS), jnp.float32),
        "q_full": bm.barriers(GROUPS, pieces),
        "k_full": full,
        "k_empty": empty,
        "v_full": full,
        "v_empty": empty,
        "turn": bm.barriers(GROUPS, 1),
    }
    if interpret:
        scratch["left"] = bm.rows((GROUPS, ROWS, tiles.k), dtype)
    o, lse = bm.launch(
        functools.partial(_kernel, call=call),
        "attention_forward_hopper",
        [piece for of_one in operands for piece in of_one],
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(bm.whole_tiles((sizes.B, sizes.H, sizes.Tq), 2, GROUPS * ROWS), jnp.float32),
        ],
        scratch,
        programs=sizes.B * sizes.H * call.query_tiles,
        cluster=1,
        warpgroups=GROUPS + 1,
        interpret=interpret,
    )
    return o, lse[..., : sizes.Tq]
