"""The forward kernel for Hopper, on Pallas's Mosaic GPU backend.

One block runs on each multiprocessor and serves one tile of 128 queries of a head after another, 64 queries in each of
two warpgroups, which walk over the keys that they see. A third warpgroup copies tiles of keys and values into a ring in
shared memory, ahead of them, also across the end of a tile of queries. The two take turns: while one has the tensor
cores, for the scores of one tile and the values of the one before, be it of other queries, the other forms
exponentials; in 16 bit one forms its own as soon as the scores are there, while the product with values runs on.

float32 inputs come as three bfloat16 pieces each, which add up to them exactly; six products of pieces are as exact as
float32 arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
_INTERPRETED_BLOCKS = 2  # few, so that each has several tiles of queries


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
    def walked(self) -> int:
        """Bytes of the keys and values of all heads, in 16-bit pieces."""
        return 4 * self.pieces * self.sizes.B * self.sizes.HK * self.sizes.Tk * self.sizes.D

    def steps(self, tile: Any, xp: Any) -> Any:
        """Tiles of keys that any query of the tile-th tile of queries sees, one at least, with numpy or jax.numpy."""
        every = -(-self.sizes.Tk // self.tiles.k)
        if not self.sizes.causal:
            return xp.full_like(tile, every)
        last = xp.minimum((tile + 1) * (GROUPS * ROWS), self.sizes.Tq) + (self.sizes.Tk - self.sizes.Tq)
        # Where no query of the block sees a key, all of the first tile is masked.
        return xp.clip((last + (self.tiles.k - 1)) >> (self.tiles.k.bit_length() - 1), 1, every)

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


def head_and_block(index: Any, blocks: int, heads: int, walked: int, xp: Any = jnp) -> tuple[Any, Any]:
    """Of the index-th piece of work, which head it is of, and which of the blocks of that head; with numpy or
    jax.numpy.

    walked: bytes of what the blocks of all heads walk over. The first block of every head comes before the second of
    any, so that the shortest fill the card at the end, but by groups of heads for which these stay in the cache.
    """
    div, rem = (lax.div, lax.rem) if xp is jnp else (np.floor_divide, np.remainder)
    groups = -(-heads // max(heads * _CACHED // walked, 1))
    each = -(-heads // groups)
    missing = groups * each - heads  # in the first group: the last one evens out what programs have to do
    group = div(index + missing * blocks, each * blocks)
    first = xp.maximum(group * each - missing, 0)
    here, rest = (group + 1) * each - missing - first, index - first * blocks
    return first + rem(rest, here), div(rest, here)


@functools.lru_cache(maxsize=64)
def _shares(call: _Call, programs: int) -> np.ndarray:
    """Which tiles of queries each program serves: int32 [rounds, programs] of places in the order, -1 where a program
    has no more, as it has not in the last two rows; the first are 0, 1, 2, ...

    Each tile goes to the program that has least to do so far.
    """
    heads = call.sizes.B * call.sizes.H
    _, tiles = head_and_block(np.arange(heads * call.query_tiles), call.query_tiles, heads, call.walked, np)
    costs = 2 * call.steps(call.query_tiles - 1 - tiles, np) + 1  # the end of a tile takes about half a step
    shares: list[list[int]] = [[] for _ in range(programs)]
    queue = [(0, program) for program in range(programs)]
    for i, cost in enumerate(costs.tolist()):
        load, program = queue[0]
        shares[program].append(i)
        heapq.heapreplace(queue, (load + cost, program))
    table = np.full((max(map(len, shares)) + 2, programs), -1, np.int32)
    for program, share in enumerate(shares):
        table[: len(share), program] = share
    return table


def _kernel(
    order_ref, *refs, q_tiles, k_tiles, v_tiles, o_tiles, q_full, k_full, k_empty, v_full, v_empty, turn,
    call: _Call, left: Any = None,
):  # fmt: skip
    sizes, tiles, pieces = call.sizes, call.tiles, call.pieces
    q_refs, k_refs, v_refs = refs[:pieces], refs[pieces : 2 * pieces], refs[2 * pieces : 3 * pieces]
    o_ref, lse_ref = refs[-2:]
    ahead = sizes.Tk - sizes.Tq

    def work(i):
        """The place in the order of this program's i-th tile of queries, below 0 where it has no more."""
        return order_ref[i * bm.programs() + bm.program()]

    def place(index):
        """Batch element, head and first query of a tile of queries, and the tiles of keys that it sees."""
        head, tile = head_and_block(index, call.query_tiles, sizes.B * sizes.H, call.walked)
        tile = call.query_tiles - 1 - tile  # The longest rows first.
        return lax.div(head, sizes.H), lax.rem(head, sizes.H), tile * (GROUPS * ROWS), call.steps(tile, jnp)

    def slot(n):
        return lax.rem(n, tiles.stages)

    @pl.when(bm.warpgroup() == _COPIER)
    def _copy():
        bm.become_copier()

        def block(carry):
            i, index, done = carry
            following = work(i + 1)
            batch, head, _, steps = place(index)
            kept = lax.div(head, sizes.group)

            def step(n, done):
                keys, at = pl.ds(n * tiles.k, tiles.k), slot(done)
                for refs, ring, full, empty in ((k_refs, k_tiles, k_full, k_empty), (v_refs, v_tiles, v_full, v_empty)):
                    pl.when(done >= tiles.stages)(lambda empty=empty: bm.wait(empty.at[at]))
                    for piece, ref in enumerate(refs):
                        bm.copy_in(ref.at[batch, keys, kept], ring.at[at * pieces + piece], full.at[at])
                return done + 1

            return i + 1, following, lax.fori_loop(0, steps, step, done)

        start = jnp.int32(0), bm.program(), jnp.int32(0)
        *_, done = lax.while_loop(lambda carry: carry[1] >= 0, block, start)

        def drain(n, _):  # No barrier may be given up before all have seen it.
            bm.wait(k_empty.at[slot(n)])
            bm.wait(v_empty.at[slot(n)])

        lax.fori_loop(jnp.maximum(done - tiles.stages, 0), done, drain, None)

    @pl.when(bm.warpgroup() != _COPIER)
    def _attend():
        bm.become_multiplier()
        me = bm.warpgroup()

        def queries(i):
            """Where those of this program's i-th tile lie."""
            return me * 2 + lax.rem(i, 2)

        def fetch(i, index):
            batch, head, first, _ = place(index)
            for piece, ref in enumerate(q_refs):
                source = ref.at[batch, pl.ds(first + me * ROWS, ROWS), head]
                bm.copy_in(source, q_tiles.at[queries(i) * pieces + piece], q_full.at[queries(i)])

        def operand(value):
            """A left operand: the registers themselves, which interpret mode takes from memory alone."""
            if not call.interpret:
                return value
            left[me, ...] = value
            return left.at[me]

        def score(total, at, n):
            for a, b in PAIRS[pieces]:
                bm.multiply(total, q_tiles.at[at * pieces + a], bm.transpose(k_tiles.at[slot(n) * pieces + b]))

        def weigh(total, p, n):
            for a, b in PAIRS[pieces]:
                bm.multiply(total, operand(p[a]), v_tiles.at[slot(n) * pieces + b])

        # Sums of products of pieces start anew with every tile, and are added up outside of the tensor cores, which
        # round toward zero.
        def start(o, acc):
            if pieces == 1:
                bm.start_from(o, acc, call.interpret)

        def finish(o, acc):
            return bm.read_from(o, acc, call.interpret) if pieces == 1 else bm.read(o) + acc

        def products(o, s, p, acc, n, at, following):
            """Starts the scores of tile `following` with the queries `at`, and the values of tile n, both counted since
            the start. The two warpgroups take turns at it."""
            bm.wait(turn.at[me])
            start(o, acc)
            score(s, at, following)
            weigh(o, p, n)
            bm.arrive(turn.at[1 - me])

        def block(carry):
            i, index, following, done, s = carry
            after, more = work(i + 2), following >= 0
            batch, head, first, steps = place(index)
            row = first + me * ROWS
            shapes = (ROWS, sizes.D), (ROWS, tiles.k)

            def mask(n, s):
                query, key = bm.indices((ROWS, tiles.k))
                key = key + n * tiles.k
                seen = key <= query + (row + ahead) if sizes.causal else key < sizes.Tk
                return jnp.where(seen, s, -jnp.inf)

            def soften(s, m, l):
                """exp of scores s, less the largest score so far, what they make of m and l, and what the sums so far
                shrink by."""
                to_base_2 = call.scale * LOG2_E
                above = jnp.maximum(m, jnp.max(s, axis=1) * to_base_2)
                p = jnp.exp2(s * to_base_2 - bm.spread_rows(above, (ROWS, tiles.k)))
                shrink = jnp.exp2(m - above)
                l = l * shrink + jnp.sum(p, axis=1)
                return p, above, l, shrink

            def step(n, carry, masked=False):
                p, acc, m, l = carry
                at = done + n
                bm.wait(k_full.at[slot(at)])
                bm.wait(v_full.at[slot(at - 1)])

                def body(o, s):
                    products(o, s, p, acc, at - 1, queries(i), at)
                    # The values' product runs on under the exponentials, but for pieces, which leave no registers.
                    s = bm.settled(bm.read(s, running=1)) if pieces == 1 else bm.read(s)
                    bm.arrive(k_empty.at[slot(at)])
                    total = finish(o, acc) if pieces > 1 else acc
                    found = soften(mask(n, s) if masked else s, m, l)
                    return *found, finish(o, acc) if pieces == 1 else total

                weights, above, sum_, shrink, total = bm.accumulators(body, *shapes)
                bm.arrive(v_empty.at[slot(at - 1)])
                # Registers of the operand are free for the next one only now.
                weights = in_pieces(bm.settled(weights), pieces, k_tiles.dtype)
                return weights, total * bm.spread_rows(shrink, total.shape), above, sum_

            # Tiles of which each query of this warpgroup sees all.
            whole = jnp.where(sizes.Tk % tiles.k == 0, steps, steps - 1)
            if sizes.causal:
                whole = jnp.clip(lax.div(jnp.maximum(row + ahead + 1, 0), tiles.k), 0, whole)
            if call.masked:
                s = lax.cond(whole == 0, functools.partial(mask, 0), lambda s: s, s)
            p, m, l, _ = soften(s, bm.column(ROWS, LEAST_SCORE), bm.column(ROWS, 0.0))
            carry = in_pieces(p, pieces, k_tiles.dtype), bm.zeros(shapes[0]), m, l
            carry = lax.fori_loop(1, whole, step, carry)
            if call.masked:
                carry = lax.fori_loop(jnp.maximum(whole, 1), steps, functools.partial(step, masked=True), carry)
            p, acc, m, l = carry
            # All scores of this tile of queries are there: others can take its place.
            pl.when(after >= 0)(lambda: fetch(i + 2, after))
            last = done + steps - 1
            bm.wait(v_full.at[slot(last)])

            @pl.when(more)
            def _await_others():
                bm.wait(k_full.at[slot(last + 1)])
                bm.wait(q_full.at[queries(i + 1)])

            # Where there are no more the scores are those of this tile again, which nobody reads.
            to_come = more.astype(jnp.int32)

            def end(o, s):
                products(o, s, p, acc, last, queries(i + to_come), last + to_come)
                s = bm.read(s)
                return finish(o, acc), s

            acc, s = bm.accumulators(end, *shapes)
            bm.arrive(v_empty.at[slot(last)])
            pl.when(more)(lambda: bm.arrive(k_empty.at[slot(last + 1)]))
            acc = acc * bm.spread_rows(jnp.where(l == 0.0, 0.0, 1.0 / l), acc.shape)
            bm.await_buffers(0)
            o_tiles[me, ...] = acc.astype(o_tiles.dtype)
            rows = pl.ds(row, ROWS)
            bm.copy_buffers_out([(o_tiles.at[me], o_ref.at[batch, rows, head])])
            # inf: the backward then forms exp(score - inf) = 0 of whatever scores there are.
            lse_ref[batch, head, rows] = jnp.where(l == 0.0, jnp.inf, m + jnp.log(l) * LOG2_E)
            return i + 1, following, after, last + 1, s

        pl.when(me == 1)(lambda: bm.arrive(turn.at[0]))
        fetch(jnp.int32(0), bm.program())
        second = work(1)
        bm.wait(q_full.at[queries(0)])
        bm.wait(k_full.at[0])

        def first_scores(s):
            score(s, queries(0), 0)
            return bm.read(s)

        s = bm.accumulators(first_scores, (ROWS, tiles.k))
        bm.arrive(k_empty.at[0])
        pl.when(second >= 0)(lambda: fetch(jnp.int32(1), second))
        lax.while_loop(lambda carry: carry[1] >= 0, block, (jnp.int32(0), bm.program(), second, jnp.int32(0), s))
        pl.when(me == 0)(lambda: bm.wait(turn.at[0]))
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
    every = sizes.B * sizes.H * call.query_tiles
    programs = min(every, _INTERPRETED_BLOCKS if interpret else tiles.blocks or every)
    ring = bm.tiles((tiles.stages * pieces, tiles.k, sizes.D), dtype)
    full, empty = bm.barriers(tiles.stages, pieces), bm.barriers(tiles.stages, GROUPS)
    scratch = {
        "q_tiles": bm.tiles((GROUPS * 2 * pieces, ROWS, sizes.D), dtype),
        "k_tiles": ring,
        "v_tiles": ring,
        "o_tiles": bm.tiles((GROUPS, ROWS, sizes.D), q.dtype),
        "q_full": bm.barriers(GROUPS * 2, pieces),
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
        [jnp.asarray(_shares(call, programs).reshape(-1)), *(piece for of_one in operands for piece in of_one)],
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(bm.whole_tiles((sizes.B, sizes.H, sizes.Tq), 2, GROUPS * ROWS), jnp.float32),
        ],
        scratch,
        programs=programs,
        cluster=1,
        warpgroups=GROUPS + 1,
        interpret=interpret,
    )
    return o, lse[..., : sizes.Tq]
