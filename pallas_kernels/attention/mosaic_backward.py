"""The backward kernels for Hopper, on Pallas's Mosaic GPU backend.

Both are one: each of two warpgroups holds 64 rows of the matrix of scores, and walks over its columns in tiles that a
third copies into a ring in shared memory. Rows are keys for the gradients of keys and values, and queries for that of
queries:

    s = a1 b1^T,  dp = a2 b2^T,  p = exp(s - lse),  ds = p (dp - delta),  first += ds b1,  second += p b2

with a1, a2 = k, v and b1, b2 = q, do in the one, a1, a2 = q, do and b1, b2 = k, v and no second sum in the other.
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
from pallas_kernels.attention.mosaic import GROUPS, PAIRS, ROWS, head_and_block, in_pieces
from pallas_kernels.attention.sizes import Sizes
from pallas_kernels.backend_triton import LOG2_E
from pallas_kernels.gemm.mosaic import split

_COPIER = GROUPS


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything about a launch that is not an array.

    keys: whether rows are keys. pieces: 1, or 3 bfloat16 arrays that add up to a float32 operand.
    """

    sizes: Sizes
    tiles: HopperTiles
    scale: float
    pieces: int
    keys: bool
    interpret: bool

    @property
    def rows(self) -> int:
        return self.sizes.Tk if self.keys else self.sizes.Tq

    @property
    def columns(self) -> int:
        return self.sizes.Tq if self.keys else self.sizes.Tk

    @property
    def heads(self) -> int:
        """Heads of the arrays that rows belong to."""
        return self.sizes.HK if self.keys else self.sizes.H

    @property
    def blocks(self) -> int:
        """Blocks of one head."""
        return -(-self.rows // (GROUPS * ROWS))


def _kernel(*refs, a_tiles, b_tiles, out_tiles, numbers, a_full, full, empty, call: _Call, left: Any = None):
    sizes, width, stages, pieces = call.sizes, call.tiles.k, call.tiles.stages, call.pieces
    a_refs, b_refs = refs[: 2 * pieces], refs[2 * pieces : 4 * pieces]
    number_refs, out_refs = refs[4 * pieces : 4 * pieces + 2], refs[4 * pieces + 2 :]
    heads_of_columns = sizes.H if call.keys else sizes.HK
    walked = 2 * pieces * sizes.B * heads_of_columns * call.columns * sizes.D * b_tiles.dtype.itemsize
    index, block = head_and_block(bm.program(), call.blocks, sizes.B * call.heads, walked)
    if not call.keys:  # the longest rows first
        block = call.blocks - 1 - block
    batch, head = lax.div(index, call.heads), lax.rem(index, call.heads)
    first, ahead = block * (GROUPS * ROWS), sizes.Tk - sizes.Tq

    # Tiles of columns that any row of the block sees, of each head that they belong to.
    begin, end = 0, -(-call.columns // width)
    if sizes.causal and call.keys:
        begin = lax.div(jnp.maximum(first - ahead, 0), width)
    elif sizes.causal:
        last = jnp.minimum(first + GROUPS * ROWS, sizes.Tq) + ahead
        # Where no query of the block sees a key, all of the first tile is masked.
        end = jnp.clip(lax.div(last + (width - 1), width), 1, end)
    heads = sizes.group if call.keys else 1

    def head_of_columns(h):
        return head * heads + h if call.keys else lax.div(head, sizes.group)

    def slot(count):
        return lax.rem(count, stages)

    @pl.when(bm.warpgroup() == _COPIER)
    def _copy():
        bm.become_copier()

        def of_head(h, count):
            def step(n, count):
                at, columns, of = slot(count), pl.ds(n * width, width), head_of_columns(h)
                pl.when(count >= stages)(lambda: bm.wait(empty.at[at]))
                for i, ref in enumerate(b_refs):
                    bm.copy_in(ref.at[batch, columns, of], b_tiles.at[at * 2 * pieces + i], full.at[at])
                if call.keys:
                    for i, ref in enumerate(number_refs):
                        bm.copy_in(ref.at[batch, of, columns], numbers.at[at * 2 + i], full.at[at])
                return count + 1

            return lax.fori_loop(begin, end, step, count)

        count = lax.fori_loop(0, heads, of_head, jnp.int32(0))

        def drain(n, _):  # No barrier may be given up before all have seen it.
            bm.wait(empty.at[slot(n)])

        lax.fori_loop(jnp.maximum(count - stages, 0), count, drain, None)

    @pl.when(bm.warpgroup() != _COPIER)
    def _sum():
        bm.become_multiplier()
        me = bm.warpgroup()
        row = first + me * ROWS
        rows = pl.ds(row, ROWS)
        for i, ref in enumerate(a_refs):
            bm.copy_in(ref.at[batch, rows, head], a_tiles.at[me * 2 * pieces + i], a_full.at[me])
        if not call.keys:
            for i, ref in enumerate(number_refs):
                bm.copy_in(ref.at[batch, head, rows], numbers.at[me * 2 + i], a_full.at[me])
        bm.wait(a_full.at[me])

        def a(which, piece):
            return a_tiles.at[(me * 2 + which) * pieces + piece]

        def b(at, which, piece):
            return b_tiles.at[(at * 2 + which) * pieces + piece]

        def number(at, which):
            """lse (0) or delta (1) where it belongs among the scores."""
            if call.keys:
                return bm.load_row(numbers.at[at * 2 + which], (ROWS, width))
            return bm.spread_rows(bm.load_column(numbers.at[me * 2 + which]), (ROWS, width))

        def operand(value, which):
            """A left operand: the registers themselves, which interpret mode takes from memory alone."""
            if not call.interpret:
                return value
            left[me * 2 + which, ...] = value
            return left.at[me * 2 + which]

        def step(n, carry, masked):
            count, *sums = carry
            at = slot(count)
            bm.wait(full.at[at])

            def scores(s, dp):
                for which, total in enumerate((s, dp)):
                    for i, j in PAIRS[pieces]:
                        bm.multiply(total, a(which, i), bm.transpose(b(at, which, j)))
                s = bm.settled(bm.read(s, running=len(PAIRS[pieces])))  # the other product runs on
                return jnp.exp2(s * (call.scale * LOG2_E) - number(at, 0)), bm.read(dp)

            p, dp = bm.accumulators(scores, (ROWS, width), (ROWS, width))
            ds = p * (dp - number(at, 1))
            if masked:
                i, j = bm.indices((ROWS, width))
                i, j = i + row, j + n * width
                query, key = (j, i) if call.keys else (i, j)
                seen = key <= query + ahead if sizes.causal else key < sizes.Tk
                p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)

            def products(*totals, chosen):
                # All that changes registers comes before the first product.
                weights = [in_pieces((ds, p)[which], pieces, b_tiles.dtype) for which in chosen]
                if pieces == 1:
                    for total, which in zip(totals, chosen, strict=True):
                        bm.start_from(total, sums[which], call.interpret)
                for total, of_one, which in zip(totals, weights, chosen, strict=True):
                    for i, j in PAIRS[pieces]:
                        bm.multiply(total, operand(of_one[i], which), b(at, which, j))
                if pieces == 1:
                    return [
                        bm.read_from(t, sums[which], call.interpret) for t, which in zip(totals, chosen, strict=True)
                    ]
                # These start anew with every tile, and are added up outside of the tensor cores, which round toward
                # zero.
                return [bm.read(total) + sums[which] for total, which in zip(totals, chosen, strict=True)]

            # Pieces take registers: of one sum after the other.
            each = [tuple(range(len(sums)))] if pieces == 1 else [(which,) for which in range(len(sums))]
            for chosen in each:
                found = bm.accumulators(functools.partial(products, chosen=chosen), *((ROWS, sizes.D) for _ in chosen))
                for which, value in zip(chosen, found, strict=True):
                    sums[which] = value
            bm.arrive(empty.at[at])
            return count + 1, *sums

        # Tiles of columns of which each row of this warpgroup sees all, or each column is seen by all rows.
        if not sizes.causal:
            whole = (begin, end if call.keys or sizes.Tk % width == 0 else end - 1)
        elif call.keys:
            seen_by_all = lax.div(jnp.maximum(row + (ROWS - 1) - ahead, 0) + (width - 1), width)
            whole = (jnp.clip(seen_by_all, begin, end), end)
        else:
            whole = (begin, jnp.clip(lax.div(jnp.maximum(row + ahead + 1, 0), width), 0, end))

        def of_head(_, carry):
            for low, high, masked in ((begin, whole[0], True), (*whole, False), (whole[1], end, True)):
                if not (isinstance(low, int) and isinstance(high, int) and low >= high) and low is not high:
                    carry = lax.fori_loop(low, high, functools.partial(step, masked=masked), carry)
            return carry

        carry = (jnp.int32(0), *(bm.zeros((ROWS, sizes.D)) for _ in out_refs))
        carry = lax.fori_loop(0, heads, of_head, carry) if heads > 1 else of_head(0, carry)
        for which, (total, ref) in enumerate(zip(carry[1:], out_refs, strict=True)):
            total = total * call.scale if which == 0 else total
            bm.copy_out(total.astype(out_tiles.dtype), out_tiles.at[me], ref.at[batch, rows, head], unread=0)
        bm.finish_copies_out()


def _launch(name: str, a: list, b: list, numbers: list, call: _Call, like: list[jax.Array]) -> list[jax.Array]:
    """The sums, of the shapes and dtypes of `like`. a, b: the pieces of a1 and a2, and of b1 and b2."""
    sizes, tiles, pieces = call.sizes, call.tiles, call.pieces
    dtype, own = a[0].dtype, 0 if call.keys else 2
    scratch = {
        "a_tiles": bm.tiles((GROUPS * 2 * pieces, ROWS, sizes.D), dtype),
        "b_tiles": bm.tiles((tiles.stages * 2 * pieces, tiles.k, sizes.D), dtype),
        "out_tiles": bm.tiles((GROUPS, ROWS, sizes.D), like[0].dtype),
        "numbers": bm.rows((tiles.stages * 2, tiles.k) if call.keys else (GROUPS * 2, ROWS), jnp.float32),
        "a_full": bm.barriers(GROUPS, 2 * pieces + own),
        "full": bm.barriers(tiles.stages, 2 * pieces + 2 - own),
        "empty": bm.barriers(tiles.stages, GROUPS),
    }
    if call.interpret:
        scratch["left"] = bm.rows((GROUPS * 2, ROWS, tiles.k), dtype)
    return bm.launch(
        functools.partial(_kernel, call=call),
        name,
        [*a, *b, *numbers],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        scratch,
        programs=sizes.B * call.heads * call.blocks,
        cluster=1,
        warpgroups=GROUPS + 1,
        interpret=call.interpret,
    )


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    do: jax.Array,
    *,
    causal: bool,
    scale: float,
    dkv: HopperTiles,
    dq: HopperTiles,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv as of `pallas_kernels.attention.backward`, with delta [B, H, Tq]; float32 inputs are multiplied
    float32-accurately."""
    operands = [split(x) if x.dtype == jnp.float32 else [x] for x in (q, k, v, do)]
    of_queries, of_keys = [*operands[0], *operands[3]], [*operands[1], *operands[2]]
    sizes, pieces, numbers = Sizes.of(q, k, causal), len(operands[0]), [lse, delta]
    call = _Call(sizes, dkv, scale, pieces, True, interpret)
    dk, dv = _launch("attention_dkv_hopper", of_keys, of_queries, numbers, call, [k, v])
    call = _Call(sizes, dq, scale, pieces, False, interpret)
    (of_q,) = _launch("attention_dq_hopper", of_queries, of_keys, numbers, call, [q])
    return of_q, dk, dv
