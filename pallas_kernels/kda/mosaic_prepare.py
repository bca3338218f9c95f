"""All tiles of KDA's chunks in one kernel for Hopper, on Pallas's Mosaic GPU backend, for bfloat16 operands: names as
in `forward`.

A program holds 64 tokens, two chunks or four, and 64 key channels at a time. Tiles have tokens as rows, so that decayed
queries and keys go into products straight from registers. Sums of log-decays over tokens are products of 0/1 matrices
with two bfloat16 pieces of g. Of P and A only the blocks of 16 on and left of the diagonal are kept, as [64, 16]: a
warp's rows are those of one block, which it inverts by itself, in float32. Rows off the fast path of `blocks` come from
halves of blocks instead, without an exponential above 1 (`halve`).

Qhat and Ktil leave with their channels, in the place of q and k; keys decayed from the chunk's start wait in shared
memory for M. W is a product with M scaled by beta straight from registers, Y^T one of transposed values with the same
from shared memory, chunk by chunk: what is not a number stays in its own chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import FAST_LIMIT, MIN_LOG_DECAY
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.mosaic_packing import Span, keep_rows, own_rows
from pallas_kernels.kda.mosaic_raw import Gate, gate_rows, strength
from pallas_kernels.kda.mosaic_tiles import HALVES, LOG2_E, ROWS, across_middle, check_sizes, to_middle
from pallas_kernels.kda.raw import NORM_EPSILON, NOTHING_RAW, Raw
from pallas_kernels.kda.sizes import Packing, Sizes

SLAB = 64  # Key channels that a program has in registers.
VALUES = 128  # Value columns, at most.
PIECES = 3  # Of a factor where blocks are merged: 24 bits, as float32 has.


PREFIX, SUFFIX, HALVING = range(3)  # Of the masks.


def _token_masks() -> np.ndarray:
    """[6, 64, 64]: which log-decays (columns) of its block of 16 a token (row) adds up: those up to it; after it; and
    those between it and the middle of its block of 16, 8, 4 and 2."""
    i, t = np.arange(ROWS)[:, None], np.arange(ROWS)[None, :]
    masks = [(i // BLOCK == t // BLOCK) & mask for mask in (t <= i, t > i)]
    masks += [to_middle(i, t, n) for n in HALVES]
    return np.stack(masks).astype(float)


def _block_masks() -> np.ndarray:
    """[8, 64]: which tokens (columns) are those of a block of 16 (row)."""
    return (np.arange(ROWS)[None, :] // BLOCK == np.arange(8)[:, None]).astype(float)


class _Products:
    """Products of this warpgroup, with left operands from registers.

    In interpret mode, which takes left operands from memory alone, they go through `left`.
    """

    def __init__(self, op: Any, left: dict[str, Any], interpret: bool):
        self.op, self.left, self.interpret = op, left, interpret

    def operand(self, name: str, value: jax.Array) -> Any:
        value = value.astype(self.op)
        if not self.interpret:
            return value
        self.left[f"left_{name}"][...] = value
        return self.left[f"left_{name}"]

    def together(self, *products: list[tuple[Any, Any]]) -> list[jax.Array]:
        """For each list of pairs (a, b) the sum of a b, in float32. All run before the first is read."""

        def body(*totals):
            for total, pairs in zip(totals, products, strict=True):
                for a, b in pairs:
                    bm.multiply(total, a, b)
            return [bm.settled(bm.read(total)) for total in totals]

        return bm.accumulators(body, *((pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in products))


def _pieces(x: jax.Array, op: Any, count: int) -> jax.Array:
    """x as a sum of bfloat16 numbers, largest first, one below the other. Three have all bits of float32.

    Bits are cut off, or rounded, as those of integers: a conversion there and back would take a slow instruction for
    every number.
    """
    found, half = [], 0 if count > 2 else 1 << 15
    for _ in range(count - 1):
        bits = (lax.bitcast_convert_type(x, jnp.int32) + half) & jnp.int32(-1 << 16)
        found.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - found[-1]
    return jnp.concatenate([*found, x], axis=0).astype(op)


def _block(i: int) -> slice:
    return slice(i * BLOCK, (i + 1) * BLOCK)


def _groups(sizes: Sizes) -> int:
    """Programs of a value head, of 64 rows each."""
    return -(-(sizes.nt * sizes.C if sizes.packed else sizes.T) // ROWS)


def _of_packed_groups(body: Callable[..., None]) -> Callable[..., None]:
    """Gives the kernel the chunks of its 64 rows, of packed sequences, whose `rows` are the first input; groups of
    slots that are not used are left out."""

    @functools.wraps(body)
    def kernel(*refs, sizes: Sizes, **rest):
        if not sizes.packed:
            body(*refs, sizes=sizes, **rest)
            return
        rows, *refs = refs
        first = lax.rem(bm.program(), _groups(sizes)) * (ROWS // sizes.C)
        spans = []
        for i in range(ROWS // sizes.C):
            n = jnp.minimum(first + i, sizes.nt - 1)
            own = rows[n, 0], rows[n, 1]
            spans.append(Span(sizes, lax.div(own[0], sizes.C) * sizes.C, own))
        used = spans[0].own[0] < spans[0].own[1]
        pl.when(used)(functools.partial(body, *refs, sizes=sizes, spans=spans, **rest))

    return kernel


@_of_packed_groups
def _kda_prepare(
    q, k, v, g, beta, token_masks, block_masks, *refs,
    sizes: Sizes, raw: Raw, scale: float, limit: float, op, always_exact: bool, interpret: bool,
    q_tile, k_tile, g_tile, shared_pieces, shared_keys, erased, out, shared_m, block_sums, block_decays, decay_rows,
    row_values, g_loaded, loaded, values_loaded, rest_loaded, spans: Sequence[Span] = (), **left,
):  # fmt: skip
    """refs: exp(A_log) and dt_bias where g comes raw; the results P, M, W, Qhat, Ktil, Y and decay, and norms where q
    and k come raw. Scratch that is two arrays is one memory, never needed for both at once."""
    refs = list(refs)
    gate: Any = refs.pop(0) if raw.gate else None
    P, M, W, qhat, ktil, y, decay, *norms = refs
    C, HV, slabs, groups = sizes.C, sizes.HV, sizes.bk // SLAB, _groups(sizes)
    chunks, merged = ROWS // C, C > BLOCK
    n, head = lax.rem(bm.program(), groups), lax.div(bm.program(), groups)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * ROWS, ROWS)
    (pieces, v_tile), (keys, y_tile) = shared_pieces, shared_keys
    m_tile, factors = shared_m if merged else (shared_m, shared_m)  # The second is for merging blocks.
    beta_row, *norm_rows = (row_values.at[i] for i in range(row_values.shape[0]))

    def channels(slab):
        return pl.ds(slab * SLAB, SLAB)

    def copy_in(source, columns, target, barrier):
        if not spans:
            bm.copy_in(source.at[b, tokens, h, columns], target, barrier)
        for i, span in enumerate(spans):
            bm.copy_in(source.at[b, span.tokens, h, columns], target.at[pl.ds(i * C, C)], barrier)

    copy_in(g, channels(0), g_tile, g_loaded)
    bm.copy_in(block_masks, block_sums, rest_loaded)
    for slab in range(slabs):
        for source, tile in ((q, q_tile), (k, k_tile)):
            copy_in(source, channels(slab), tile.at[slab], loaded.at[slab])
    bm.copy_in(beta.at[head, n], beta_row, rest_loaded)
    f32, shape, wide = jnp.float32, (ROWS, BLOCK), (ROWS, SLAB)
    product = _Products(op, left, interpret)
    operand = product.operand
    row, col = bm.indices(shape)
    within, block = lax.rem(row, BLOCK), lax.div(row, BLOCK)
    second = lax.rem(block, 2) == 1
    high, low = (pieces.at[pl.ds(i * ROWS, ROWS)] for i in range(2))
    near, far = keys.at[pl.ds(0, ROWS)], keys.at[pl.ds(ROWS if merged else 0, ROWS)]

    def exponents(mask, name="mask"):
        left = operand(name, mask)
        return [(left, low), (left, high)]

    def mask_of(which):
        return bm.load(token_masks.at[which])

    def log2_decays(slab):
        """Logarithms to the base 2, clamped, once g is there."""
        gates = None
        if raw.gate:
            rate = bm.spread_rows(bm.load_column(gate.at[h, 0, pl.ds(0, ROWS)]), wide)  # the same for all channels
            bias = bm.load_row(gate.at[h, 1, channels(slab)], wide)
            if spans:
                inside = own_rows(spans, wide)
            else:
                inside = None if sizes.T % ROWS == 0 else n * ROWS + bm.indices(wide)[0] < sizes.T
            gates = Gate(raw, lambda _: rate, lambda _: bias, inside)
        bm.wait(g_loaded)
        keep_rows(spans, g_tile)
        x, least = bm.load(g_tile).astype(f32), MIN_LOG_DECAY * LOG2_E
        x = x * LOG2_E if gates is None else gates.log_decay(x, LOG2_E)
        return jnp.where(x >= least, x, least)  # Of what is not a number, other chunks' sums would take 0 times it.

    def of_own_block(x):
        """[64, 64] against all keys as [64, 16] against those of a row's block."""
        return functools.reduce(lambda y, i: jnp.where(block == i, x[:, _block(i)], y), range(1, 4), x[:, :BLOCK])

    def of_own_chunk(values):
        """Of values [64, n] for every chunk the rows of that chunk."""
        own = lax.div(bm.indices(values[0].shape)[0], C)
        return functools.reduce(lambda x, c: jnp.where(own == c, values[c], x), range(1, chunks), values[0])

    def of_other_block(parity):
        """The decay of a chunk's first block (parity 0) in rows of its second one, or the other way round; else 1."""
        if not merged:
            return 1.0
        wide_row = bm.indices(wide)[0]
        decays = [bm.load_row(block_decays.at[2 * c + parity], wide) for c in range(chunks)]
        other = lax.rem(lax.div(wide_row, BLOCK), 2) == 1 - parity
        return jnp.where(other, jnp.where(wide_row < C, *decays), 1.0)

    def await_rows(slab):
        bm.wait(loaded.at[slab])
        keep_rows(spans, q_tile.at[slab], k_tile.at[slab])

    rows_of = []  # What rows of queries and of keys are multiplied by.
    if raw.l2norm:
        for slab in range(slabs):
            await_rows(slab)
        for which, tile in enumerate((q_tile, k_tile)):
            loaded_slabs = (bm.load(tile.at[slab]).astype(f32) for slab in range(slabs))
            squares = functools.reduce(jnp.add, (jnp.sum(x * x, axis=1) for x in loaded_slabs))
            rows_of.append(lax.rsqrt(squares + NORM_EPSILON))
            norm_rows[which][...] = rows_of[which]
        bm.copy_buffers_out([(norm_rows[which], norms[0].at[head, which, tokens]) for which in range(2)])

    def times(which, x, factor):
        """Queries (0) or keys (1) times a factor."""
        x = x.astype(f32) * factor
        return (x * bm.spread_rows(rows_of[which], wide) if raw.l2norm else x).astype(op)

    def scaled(which, slab, factor):
        return times(which, bm.load((q_tile, k_tile)[which].at[slab]), factor)

    def masks_of_sums():
        return [mask_of(PREFIX), mask_of(SUFFIX)]

    def sums(masks):
        """Sums of log-decays up to every token in its block and after it, and of whole blocks, [64, 8]."""
        whole = [(bm.transpose(x), bm.transpose(block_sums)) for x in (low, high)]
        return product.together(*(exponents(*x) for x in zip(masks, ("mask", "suffix"), strict=True)), whole)

    def halve(slab, slow, diagonals):
        """Adds the products of the slab in memory to the blocks on the diagonal, in slow rows: a pair of tokens in the
        two halves of a block of 16, 8, 4 or 2 decays from the one to the middle and from there to the other."""

        def halves(step, diagonals):
            [between] = product.together(exponents(mask_of(HALVING + step)))
            decay = jnp.exp2(between)
            near[...] = scaled(1, slab, decay)
            bm.commit()
            chosen = (bm.spread_rows(slow, shape) > 0.5) & across_middle(within, col, HALVES[0] - step)
            found = []
            for which, diagonal in enumerate(diagonals):
                [own] = product.together([(operand("up_q", scaled(which, slab, decay)), bm.transpose(near))])
                found.append(jnp.where(chosen, diagonal + of_own_block(own), diagonal))
            bm.commit()  # Before the next keys.
            return found

        queries, erased_keys = lax.fori_loop(0, len(HALVES), halves, diagonals)
        own = jnp.sum(bm.load(q_tile.at[slab]).astype(f32) * bm.load(k_tile.at[slab]).astype(f32), axis=1)
        own = bm.spread_rows(functools.reduce(jnp.multiply, rows_of, own), shape)
        itself = (bm.spread_rows(slow, shape) > 0.5) & (col == within)
        return [jnp.where(itself, queries + own, queries), erased_keys]

    def visit(slab, totals):
        """Adds the products of a slab of channels to the blocks of P and A, and hands out Qhat, Ktil and the chunks'
        decay of these channels."""
        masks = masks_of_sums()  # They come before g does.
        pieces[...] = _pieces(log2_decays(slab), op, 2)
        bm.commit()
        found = sums(masks)
        slow = jnp.where(jnp.max(-found[0], axis=1) > limit, 1.0, 0.0)
        pl.when(slab + 1 < slabs)(lambda: copy_in(g, channels(slab + 1), g_tile, g_loaded))
        if not raw.l2norm:
            await_rows(slab)
        again = 1 if always_exact else (jnp.max(slow) > 0.5).astype(jnp.int32)

        def slow_rows(_, carry):
            diagonals = halve(slab, slow, carry[1])
            return sums(masks_of_sums()), diagonals  # Formed again, not to be kept in registers meanwhile.

        (prefix, suffix, whole), diagonals = lax.fori_loop(0, again, slow_rows, (found, [x for x, *_ in totals]))
        near[...] = scaled(1, slab, jnp.exp2(jnp.minimum(-prefix, limit)))
        if merged:
            far[...] = scaled(1, slab, jnp.exp2(suffix))
        column = bm.indices((SLAB, 8))[1]
        ends = [jnp.exp2(jnp.sum(jnp.where(column == i, whole, 0.0), axis=1)) for i in range(ROWS // BLOCK)]
        for i, x in enumerate(ends):
            block_decays.at[i][...] = x
        for c in range(chunks):
            of_chunk = ends[c * (C // BLOCK) : (c + 1) * (C // BLOCK)]
            decay_rows.at[c, channels(slab)][...] = functools.reduce(jnp.multiply, of_chunk)
        bm.commit()
        # Results take the place of inputs, all before the products, which need the registers.
        up = jnp.exp2(prefix)
        there = bm.load(k_tile.at[slab])
        k_tile.at[slab][...] = times(1, there, jnp.exp2(suffix) * of_other_block(1))
        rows_k = operand("up_k", times(1, there, up))
        entering = up * of_other_block(0)
        erased.at[:, channels(slab)][...] = times(1, there, entering)
        there = bm.load(q_tile.at[slab])
        rows_q = operand("up_q", times(0, there, up))
        q_tile.at[slab][...] = times(0, there, entering * scale)
        rights = [near] + ([far.at[pl.ds(c * 2 * BLOCK, BLOCK)] for c in range(2)] if merged else [])
        products = product.together(*([(rows, bm.transpose(x))] for rows in (rows_q, rows_k) for x in rights))
        found = []
        for which, (diagonal, (_, *total)) in enumerate(zip(diagonals, totals, strict=True)):
            own, *earlier = products[which * len(rights) : (which + 1) * len(rights)]
            diagonal += jnp.where(bm.spread_rows(slow, shape) > 0.5, 0.0, of_own_block(own))
            found.append([diagonal] + ([total[0] + jnp.where(row < 2 * BLOCK, *earlier)] if merged else []))
        results = ((q_tile, qhat), (k_tile, ktil))
        bm.copy_buffers_out([(tile.at[slab], to.at[head, tokens, channels(slab)]) for tile, to in results])
        return found

    bm.wait(rest_loaded)
    zeros = [[bm.zeros(shape) for _ in range(2 if merged else 1)] for _ in range(2)]
    queries, erased_keys = lax.fori_loop(0, slabs, visit, zeros)
    columns = pl.ds(0, v_tile.shape[1])
    copy_in(v, columns, v_tile, values_loaded)

    def halves(diagonal, earlier):
        """The columns of a matrix, 16 at a time, from its blocks on the diagonal and left of it."""
        return [jnp.where(second, earlier, diagonal), jnp.where(second, diagonal, 0.0)] if merged else [diagonal]

    def write(columns, target):
        for i, x in enumerate(columns):
            out.at[:, pl.ds(i * BLOCK, BLOCK)][...] = x.astype(op)
        bm.copy_buffers_out([(out, target.at[head, tokens])])

    queries = [scale * x for x in queries]
    write(halves(jnp.where(col <= within, queries[0], 0.0), queries[-1]), P)
    A, *A_21 = (bm.spread_rows(bm.load_column(beta_row), shape) * x for x in erased_keys)
    inverse = bm.invert_blocks(jnp.where(col < within, A, 0.0), interpret)
    M_21 = inverse
    if merged:
        # Right factors: rows of first blocks hold M_11, those of second blocks A_21.
        factors[...] = _pieces(jnp.where(second, A_21[0], inverse), op, PIECES)
        bm.commit()

        def merge(name, x, first):
            """x times a right factor of every chunk, from pieces: all products but those below float32's last bit."""
            x = _pieces(x, op, PIECES)
            x = [operand(f"{name}{i}", x[i * ROWS : (i + 1) * ROWS]) for i in range(PIECES)]
            y = [
                [factors.at[pl.ds(i * ROWS + (2 * c + first) * BLOCK, BLOCK)] for i in range(PIECES)] for c in range(2)
            ]
            order = [(i, total - i) for total in reversed(range(PIECES)) for i in range(total + 1)]
            return jnp.where(row < 2 * BLOCK, *product.together(*([(x[i], z[j]) for i, j in order] for z in y)))

        M_21 = -merge("b", merge("a", inverse, 1), 0)
    bm.await_buffers(0)
    bm.commit()
    blocks = halves(inverse, M_21)
    write(blocks, M)
    # M with beta of its columns, for W and Y.
    for i, x in enumerate(blocks):
        betas = [bm.load_row(beta_row.at[pl.ds(c * C + i * BLOCK, BLOCK)], shape) for c in range(chunks)]
        blocks[i] = (x * of_own_chunk(betas)).astype(op)
    M_beta = jnp.concatenate(blocks, axis=1) if merged else blocks[0]
    m_tile[...] = M_beta
    bm.commit()
    left_M = operand("m", M_beta)
    together = min(slabs, 4 // chunks)  # So many values [64, 128] there are registers for.
    for first in range(0, slabs, together):
        of = range(first, first + together)
        found = product.together(
            *([(left_M, erased.at[pl.ds(c * C, C), channels(slab)])] for slab in of for c in range(chunks))
        )
        for i, slab in enumerate(of):
            q_tile.at[slab][...] = of_own_chunk(found[i * chunks : (i + 1) * chunks]).astype(op)
    bm.copy_buffers_out([(q_tile.at[slab], W.at[head, tokens, channels(slab)]) for slab in range(slabs)])
    for turn in range(sizes.bv // v_tile.shape[1]):
        if turn:
            bm.await_buffers(0)
            bm.commit()
            columns = pl.ds(turn * v_tile.shape[1], v_tile.shape[1])
            copy_in(v, columns, v_tile, values_loaded)
        bm.wait(values_loaded)
        keep_rows(spans, v_tile)
        places = [(c, pl.ds(first, ROWS)) for c in range(chunks) for first in range(0, v_tile.shape[1], ROWS)]
        found = product.together(
            *(
                [(bm.transpose(v_tile.at[rows, of_slab]), bm.transpose(m_tile.at[rows]))]
                for rows, of_slab in ((pl.ds(c * C, C), of_slab) for c, of_slab in places)
            )
        )
        for (c, of_slab), x in zip(places, found, strict=True):
            y_tile.at[c, of_slab][...] = x.astype(op)
        for c in range(chunks):

            def copy_chunk(c=c, columns=columns, turn=turn):
                at = n * chunks + c
                rows = [] if turn else [(decay_rows.at[c], decay.at[head, at, 0])]
                bm.copy_buffers_out([*rows, (y_tile.at[c], y.at[head, at, columns])])

            pl.when(n * chunks + c < sizes.nt)(copy_chunk)
    bm.finish_copies_out()


def prepare(
    q, k, v, g, beta, A_log=None, dt_bias=None,
    *, scale, config: KdaConfig, interpret, raw: Raw = NOTHING_RAW, packing: Packing | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Runs the Hopper `kda_prepare`; returns W, Qhat, Ktil, Y, P, M, decay and norms as `forward.Prepared` has them.

    Raises:
      ValueError: for other than bfloat16, K of 64 or 128, V of 64, 128 or 256, one value head a key head, and T a
        multiple of 8.
    """
    sizes = Sizes.of(q, v, beta, config, packing)
    check_sizes(sizes, q, k, v)
    heads, C, bk, bv, nt, merged = sizes.B * sizes.HV, sizes.C, sizes.bk, sizes.bv, sizes.nt, sizes.C > BLOCK
    groups, chunks, slabs, values = _groups(sizes), ROWS // C, bk // SLAB, min(bv, VALUES)
    op, f32, shape = q.dtype, jnp.float32, jax.ShapeDtypeStruct
    outputs = [shape((heads, nt * C, C), op)] * 2 + [shape((heads, nt * C, bk), op)] * 3
    outputs += [shape((heads, nt, bv, C), op), shape((heads, nt, 1, bk), f32)]
    outputs += [shape((heads, 2, groups * ROWS), f32)] if raw.l2norm else []  # Whole, contiguous tiles.
    g = g if raw.gate else g.astype(f32)
    beta = strength(beta, raw)
    if packing is not None:
        beta = packing.into_chunks(beta[0], C).reshape(1, nt * C, sizes.HV)
    padded = jnp.pad(beta, ((0, 0), (0, groups * ROWS - beta.shape[1]), (0, 0)))
    inputs = [q, k, v, g, padded.swapaxes(1, 2).reshape(heads, groups, ROWS)]
    inputs += [jnp.asarray(_token_masks(), op), jnp.asarray(_block_masks(), op)]
    inputs += [gate_rows(A_log, dt_bias, sizes)] if raw.gate else []
    inputs = inputs if packing is None else [packing.rows, *inputs]
    parts = chunks if sizes.packed else 1  # In which tiles come.
    pieces, keys = bm.tiles((2 * ROWS, SLAB), op, 2 * SLAB), bm.tiles(((1 + merged) * ROWS, SLAB), op, 2 * SLAB)
    m_tile, factors = bm.tiles((ROWS, C), op, 2 * C), bm.tiles((PIECES * ROWS, BLOCK), op, 2 * BLOCK)
    scratch: dict[str, Any] = {
        "q_tile": bm.tiles((slabs, ROWS, SLAB), op, 2 * SLAB),
        "k_tile": bm.tiles((slabs, ROWS, SLAB), op, 2 * SLAB),
        "g_tile": bm.tiles((ROWS, SLAB), g.dtype),
        "shared_pieces": bm.one_of(pieces, bm.tiles((ROWS, values), op, 2 * C)),
        "shared_keys": bm.one_of(keys, bm.tiles((chunks, values, C), op, 2 * C)),
        "erased": bm.tiles((ROWS, bk), op, 2 * C),
        "out": bm.tiles((ROWS, C), op, 2 * BLOCK),
        "shared_m": bm.one_of(m_tile, factors) if merged else m_tile,
        "block_sums": bm.tiles((8, ROWS), op, 2 * SLAB),
        "block_decays": bm.rows((ROWS // BLOCK, SLAB), f32),
        "decay_rows": bm.rows((chunks, bk), f32),
        "row_values": bm.rows((3 if raw.l2norm else 1, ROWS), f32),  # beta, and norms
        "g_loaded": bm.barriers(None, parts),
        "loaded": bm.barriers(slabs, 2 * parts),
        "values_loaded": bm.barriers(None, parts),
        "rest_loaded": bm.barriers(None, 2),
    }
    if interpret:
        widths = {"mask": ROWS, "suffix": ROWS, "up_q": SLAB, "up_k": SLAB, "m": C}
        widths |= {f"{x}{i}": BLOCK for x in "ab" for i in range(PIECES)}
        scratch |= {f"left_{name}": bm.rows((ROWS, n), op) for name, n in widths.items()}
    body = functools.partial(
        _kda_prepare, sizes=sizes, raw=raw, scale=scale, limit=FAST_LIMIT["16bit"] * LOG2_E, op=op,
        always_exact=config.always_exact, interpret=interpret,
    )  # fmt: skip
    P, M, W, Qhat, Ktil, Y, decay, *norms = bm.launch(
        body, "kda_prepare", inputs, outputs, scratch, programs=heads * groups, cluster=1, warpgroups=1,
        interpret=interpret, automatic_barriers=False,
    )  # fmt: skip
    P, M, W, Qhat, Ktil = (x.reshape(heads, nt, C, -1) for x in (P, M, W, Qhat, Ktil))
    of_chunks = norms[0][..., : nt * C].reshape(heads, 2, nt, C).transpose(0, 2, 3, 1) if norms else None
    return W, Qhat, Ktil, Y, P, M, decay, of_chunks
