"""P and M of KDA's chunks for Hopper, on Pallas's Mosaic GPU backend, for bfloat16 operands: names as in `forward`.

A program holds 64 tokens, two chunks or four, and 64 key channels at a time. Tiles have tokens as rows, so that decayed
queries and keys go into products straight from registers. Sums of log-decays over tokens are products of 0/1 matrices
with two bfloat16 pieces of g. Of P and A only the blocks of 16 on and left of the diagonal are kept, as [64, 16]: a
warp's rows are those of one block, which it inverts by itself, in float32. Rows off the fast path of `blocks` come from
halves of blocks instead, without an exponential above 1 (`halve`).
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
PIECES = 3  # Of a factor where blocks are merged: 24 bits, as float32 has.


def _token_masks() -> np.ndarray:
    """[6, 64, 64]: which log-decays (columns) of its block of 16 a token (row) adds up: those up to it; after it; and
    those between it and the middle of its block of 16, 8, 4 and 2."""
    i, t = np.arange(ROWS)[:, None], np.arange(ROWS)[None, :]
    masks = [(i // BLOCK == t // BLOCK) & mask for mask in (t <= i, t > i)]
    masks += [to_middle(i, t, n) for n in HALVES]
    return np.stack(masks).astype(float)


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
def _kda_matrices(
    q, k, g, beta, token_masks, *refs,
    sizes: Sizes, raw: Raw, scale: float, limit: float, op, always_exact: bool, interpret: bool,
    q_tile, k_tile, g_tile, pieces, keys, out, g_loaded, loaded, factors: Any = None, norm_rows: Any = None,
    spans: Sequence[Span] = (), **left,
):  # fmt: skip
    """refs: exp(A_log) and dt_bias where g comes raw; the results P and M, and norms where q and k come raw. Those are
    factors of rows and columns of P and A, which come once all channels were seen."""
    refs = list(refs)
    gate: Any = refs.pop(0) if raw.gate else None
    P, M, *norms = refs
    HV, slabs, groups = sizes.HV, sizes.bk // SLAB, _groups(sizes)
    n, head = lax.rem(bm.program(), groups), lax.div(bm.program(), groups)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * ROWS, ROWS)

    def copy_in(source, slab, target, barrier):
        channels = pl.ds(slab * SLAB, SLAB)
        if not spans:
            bm.copy_in(source.at[b, tokens, h, channels], target, barrier)
        for i, span in enumerate(spans):
            bm.copy_in(source.at[b, span.tokens, h, channels], target.at[pl.ds(i * sizes.C, sizes.C)], barrier)

    def copy_in_g(slab):
        copy_in(g, slab, g_tile, g_loaded)

    def copy_in_rows(slab):
        for source, target in ((q, q_tile), (k, k_tile)):
            copy_in(source, slab, target, loaded)

    copy_in_g(0)
    copy_in_rows(0)
    f32, merged, shape = jnp.float32, sizes.C > BLOCK, (ROWS, BLOCK)
    product = _Products(op, left, interpret)
    operand = product.operand
    row, col = bm.indices(shape)
    within, block = lax.rem(row, BLOCK), lax.div(row, BLOCK)
    second = lax.rem(block, 2) == 1
    high, low = (pieces.at[pl.ds(i * ROWS, ROWS)] for i in range(2))
    near, far = keys.at[pl.ds(0, ROWS)], keys.at[pl.ds(ROWS if merged else 0, ROWS)]

    def exponents(mask):
        left = operand("mask", mask)
        return [(left, low), (left, high)]

    def log2_decays(slab):
        """Logarithms to the base 2, clamped, once g is there."""
        tile, gates = (ROWS, SLAB), None
        if raw.gate:
            rate = bm.spread_rows(bm.load_column(gate.at[h, 0, pl.ds(0, ROWS)]), tile)  # the same for all channels
            bias = bm.load_row(gate.at[h, 1, pl.ds(slab * SLAB, SLAB)], tile)
            if spans:
                inside = own_rows(spans, tile)
            else:
                inside = None if sizes.T % ROWS == 0 else n * ROWS + bm.indices(tile)[0] < sizes.T
            gates = Gate(raw, lambda _: rate, lambda _: bias, inside)
        bm.wait(g_loaded)
        keep_rows(spans, g_tile)
        x, least = bm.load(g_tile).astype(f32), MIN_LOG_DECAY * LOG2_E
        x = x * LOG2_E if gates is None else gates.log_decay(x, LOG2_E)
        return jnp.where(x >= least, x, least)  # Of what is not a number, other chunks' sums would take 0 times it.

    def decays(slab):
        """Sums of log-decays up to every token, once g is there, and which rows (1) they keep from the fast path."""
        pieces[...] = _pieces(log2_decays(slab), op, 2)
        bm.commit()
        [prefix] = product.together(exponents(bm.load(token_masks.at[0])))
        return prefix, jnp.where(jnp.max(-prefix, axis=1) > limit, 1.0, 0.0)

    def scaled(tile, factor):
        return (bm.load(tile).astype(f32) * factor).astype(op)

    def of_own_block(x):
        """[64, 64] against all keys as [64, 16] against those of a row's block."""
        return functools.reduce(lambda y, i: jnp.where(block == i, x[:, _block(i)], y), range(1, 4), x[:, :BLOCK])

    def halve(slow, again, diagonals):
        """Adds the products of the slab in memory to the blocks on the diagonal, in slow rows: a pair of tokens in the
        two halves of a block of 16, 8, 4 or 2 decays from the one to the middle and from there to the other."""

        def itself(_, found):
            own = jnp.sum(bm.load(q_tile).astype(f32) * bm.load(k_tile).astype(f32), axis=1)
            return jnp.where((bm.spread_rows(slow, shape) > 0.5) & (col == within), bm.spread_rows(own, shape), found)

        def halves(step, diagonals):
            [between] = product.together(exponents(bm.load(token_masks.at[2 + step])))
            decay = jnp.exp2(between)
            near[...] = scaled(k_tile, decay)
            bm.commit()
            chosen = (bm.spread_rows(slow, shape) > 0.5) & across_middle(within, col, HALVES[0] - step)
            found = []
            for tile, diagonal in zip((q_tile, k_tile), diagonals, strict=True):
                [own] = product.together([(operand("up", scaled(tile, decay)), bm.transpose(near))])
                found.append(jnp.where(chosen, diagonal + of_own_block(own), diagonal))
            bm.commit()  # Before the next keys.
            return found

        diagonals = lax.fori_loop(0, again * len(HALVES), halves, diagonals)
        return [diagonals[0] + lax.fori_loop(0, again, itself, bm.zeros(shape)), diagonals[1]]

    def visit(slab, carry):
        """Adds the products of a slab of channels to the blocks of P and A."""
        totals, squares = carry

        def of_next(copy):
            pl.when(slab + 1 < slabs)(lambda: copy(slab + 1))

        prefix, slow = decays(slab)
        of_next(copy_in_g)
        bm.wait(loaded)
        keep_rows(spans, q_tile, k_tile)
        near[...] = scaled(k_tile, jnp.exp2(jnp.minimum(-prefix, limit)))
        if merged:
            [suffix] = product.together(exponents(bm.load(token_masks.at[1])))
            far[...] = scaled(k_tile, jnp.exp2(suffix))
        bm.commit()
        up, found = jnp.exp2(prefix), []
        ups, squares = [], list(squares)
        for which, tile in enumerate((q_tile, k_tile)):
            x = bm.load(tile).astype(f32)
            ups.append((x * up).astype(op))
            if raw.l2norm:
                squares[which] += jnp.sum(x * x, axis=1)
        for total, x in zip(totals, ups, strict=True):
            rows = operand("up", x)
            pairs = [[(rows, bm.transpose(near))]]
            if merged:
                pairs += [[(rows, bm.transpose(far.at[pl.ds(c * 2 * BLOCK, BLOCK)]))] for c in range(2)]
            own, *earlier = product.together(*pairs)
            sums = [total[0] + jnp.where(bm.spread_rows(slow, shape) > 0.5, 0.0, of_own_block(own))]
            found.append(sums + ([total[1] + jnp.where(row < 2 * BLOCK, *earlier)] if merged else []))
        bm.commit()
        again = 1 if always_exact else (jnp.max(slow) > 0.5).astype(jnp.int32)
        diagonals = halve(slow, again, [x for x, *_ in found])
        found = [[x, *rest] for x, (_, *rest) in zip(diagonals, found, strict=True)]
        of_next(copy_in_rows)
        return found, squares

    zeros = [[bm.zeros(shape) for _ in range(2 if merged else 1)] for _ in range(2)]
    squares = [bm.column(ROWS, 0.0) for _ in range(2 if raw.l2norm else 0)]
    (queries, erased), squares = lax.fori_loop(0, slabs, visit, (zeros, squares))

    def write(diagonal, earlier, target):
        """Writes a matrix from its blocks on the diagonal and left of it."""
        if merged:
            out.at[:, pl.ds(0, BLOCK)][...] = jnp.where(second, earlier, diagonal).astype(op)
            out.at[:, pl.ds(BLOCK, BLOCK)][...] = jnp.where(second, diagonal, 0.0).astype(op)
        else:
            out[...] = diagonal.astype(op)
        bm.copy_buffers_out([(out, target.at[head, tokens])])

    if raw.l2norm:
        rows_of = [lax.rsqrt(x + NORM_EPSILON) for x in squares]
        for which, x in enumerate(rows_of):
            norm_rows.at[which][...] = x
        bm.commit()
        bm.copy_buffers_out([(norm_rows.at[which], norms[0].at[head, which, tokens]) for which in range(2)])
        of_block = [bm.load_row(norm_rows.at[1, pl.ds(c * BLOCK, BLOCK)], shape) for c in range(ROWS // BLOCK)]
        columns = [functools.reduce(lambda x, c: jnp.where(block == c, of_block[c], x), range(1, 4), of_block[0])]
        columns += [jnp.where(row < 2 * BLOCK, of_block[0], of_block[2])] if merged else []
        queries, erased = (
            [bm.spread_rows(of, shape) * y * x for x, y in zip(found, columns, strict=True)]
            for of, found in zip(rows_of, (queries, erased), strict=True)
        )
    queries = [scale * x for x in queries]
    write(jnp.where(col <= within, queries[0], 0.0), queries[-1], P)
    beta_of = bm.spread_rows(bm.load_column(beta.at[head, n]), shape)
    A, *A_21 = (beta_of * x for x in erased)
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
    write(inverse, M_21, M)
    bm.finish_copies_out()


def matrices(
    q, k, v, g, beta, A_log=None, dt_bias=None,
    *, scale, config: KdaConfig, interpret, raw: Raw = NOTHING_RAW, packing: Packing | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """P, M and norms of every chunk as `forward.Prepared` has them; of v only the shape matters.

    Raises:
      ValueError: for other than bfloat16, K of 64 or 128, V of 64, 128 or 256, one value head a key head, and T a
        multiple of 8.
    """
    sizes = Sizes.of(q, v, beta, config, packing)
    check_sizes(sizes, q, k, v)
    heads, C, nt, merged = sizes.B * sizes.HV, sizes.C, sizes.nt, sizes.C > BLOCK
    groups = _groups(sizes)
    op, f32 = q.dtype, jnp.float32
    outputs = [jax.ShapeDtypeStruct((heads, nt * C, C), op)] * 2
    outputs += [jax.ShapeDtypeStruct((heads, 2, groups * ROWS), f32)] if raw.l2norm else []  # Whole, contiguous tiles.
    g = g if raw.gate else g.astype(f32)
    beta = strength(beta, raw)
    if packing is not None:
        beta = packing.into_chunks(beta[0], C).reshape(1, nt * C, sizes.HV)
    padded = jnp.pad(beta, ((0, 0), (0, groups * ROWS - beta.shape[1]), (0, 0)))
    inputs = [q, k, g, padded.swapaxes(1, 2).reshape(heads, groups, ROWS), jnp.asarray(_token_masks(), op)]
    inputs += [gate_rows(A_log, dt_bias, sizes)] if raw.gate else []
    inputs = inputs if packing is None else [packing.rows, *inputs]
    parts = ROWS // C if sizes.packed else 1  # In which tiles come.
    scratch: dict[str, Any] = {
        "q_tile": bm.tiles((ROWS, SLAB), op, 2 * SLAB),
        "k_tile": bm.tiles((ROWS, SLAB), op, 2 * SLAB),
        "g_tile": bm.tiles((ROWS, SLAB), g.dtype),
        "pieces": bm.tiles((2 * ROWS, SLAB), op, 2 * SLAB),
        "keys": bm.tiles(((2 if merged else 1) * ROWS, SLAB), op, 2 * SLAB),
        "out": bm.tiles((ROWS, C), op, 2 * BLOCK),
        "g_loaded": bm.barriers(None, parts),
        "loaded": bm.barriers(None, 2 * parts),
    }
    if merged:
        scratch["factors"] = bm.tiles((PIECES * ROWS, BLOCK), op, 2 * BLOCK)
    if raw.l2norm:
        scratch["norm_rows"] = bm.rows((2, ROWS), f32)
    if interpret:
        scratch |= {f"left_{name}": bm.rows((ROWS, n), op) for name, n in (("mask", ROWS), ("up", SLAB))}
        scratch |= {f"left_{x}{i}": bm.rows((ROWS, BLOCK), op) for x in "ab" for i in range(PIECES)}
    body = functools.partial(
        _kda_matrices, sizes=sizes, raw=raw, scale=scale, limit=FAST_LIMIT["16bit"] * LOG2_E, op=op,
        always_exact=config.always_exact, interpret=interpret,
    )  # fmt: skip
    P, M, *norms = bm.launch(
        body, "kda_matrices", inputs, outputs, scratch, programs=heads * groups, cluster=1, warpgroups=1,
        interpret=interpret, automatic_barriers=False,
    )  # fmt: skip
    P, M = (x.reshape(heads, nt, C, C) for x in (P, M))
    return P, M, norms[0][..., : nt * C].reshape(heads, 2, nt, C).transpose(0, 2, 3, 1) if norms else None
