"""P and M of KDA's chunks for Hopper, on Pallas's Mosaic GPU backend, for bfloat16 operands: names as in `forward`.

A program holds 64 tokens, two chunks or four, and 64 key channels at a time. Tiles have tokens as rows, so that decayed
queries and keys go into products straight from registers. Sums of log-decays over tokens are products of 0/1 matrices
with two bfloat16 pieces of g. Of P and A only the blocks of 16 on and left of the diagonal are kept, as [64, 16]: a
warp's rows are those of one block, which it inverts by itself, in float32.
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
from pallas_kernels.kda.mosaic_tiles import LOG2_E, ROWS, check_sizes
from pallas_kernels.kda.raw import NORM_EPSILON, NOTHING_RAW, Raw
from pallas_kernels.kda.sizes import Packing, Sizes

SLAB = 64  # Key channels that a program has in registers.
PIECES = 3  # Of a factor where blocks are merged: 24 bits, as float32 has.


def _token_masks() -> np.ndarray:
    """[34, 64, 64]: which log-decays (columns) of its block of 16 a token (row) adds up: those up to it; after it;
    for key j of the block, at 2 + 2 j, those after the key up to it, and at 3 + 2 j the key's own."""
    i, t = np.arange(ROWS)[:, None], np.arange(ROWS)[None, :]
    block, of_key = i // BLOCK == t // BLOCK, t % BLOCK
    masks = [t <= i, t > i]
    for j in range(BLOCK):
        masks += [(of_key > j) & (t <= i), of_key == j]
    return np.stack([block & mask for mask in masks]).astype(float)


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

    def visit(slab, carry):
        """Adds the products of a slab of channels to the blocks of P and A, in rows on the fast path."""
        totals, any_slow, squares = carry

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
            own = functools.reduce(
                lambda x, i: jnp.where(block == i, own[:, _block(i)], x), range(1, 4), own[:, :BLOCK]
            )
            sums = [total[0] + jnp.where(bm.spread_rows(slow, shape) > 0.5, 0.0, own)]
            found.append(sums + ([total[1] + jnp.where(row < 2 * BLOCK, *earlier)] if merged else []))
        bm.commit()
        of_next(copy_in_rows)
        return found, jnp.maximum(any_slow, jnp.max(slow)), squares

    def visit_exactly(slab, diagonals):
        """Adds them to the blocks on the diagonal in the other rows, key by key."""
        copy_in_g(slab)
        copy_in_rows(slab)
        _, slow = decays(slab)
        bm.wait(loaded)
        keep_rows(spans, q_tile, k_tile)
        k_slab = bm.load(k_tile)  # Other chunks take 0 times its rows, too.
        k_tile[...] = jnp.where(jnp.abs(k_slab.astype(f32)) < jnp.inf, k_slab, jnp.zeros_like(k_slab))
        bm.commit()

        def exact(j, found):
            """P and A of key j of every block, over these channels."""
            [between] = product.together(exponents(bm.load(token_masks.at[2 + 2 * j])))
            [key] = product.together([(operand("one", bm.load(token_masks.at[3 + 2 * j])), k_tile)])
            key *= jnp.exp2(between)
            lines = [jnp.sum(bm.load(tile).astype(f32) * key, axis=1) for tile in (q_tile, k_tile)]
            chosen = (bm.spread_rows(slow, shape) > 0.5) & (col == j)
            return [jnp.where(chosen, bm.spread_rows(line, shape), x) for x, line in zip(found, lines, strict=True)]

        found = lax.fori_loop(0, BLOCK, exact, [bm.zeros(shape) for _ in diagonals])
        bm.commit()
        return [x + y for x, y in zip(diagonals, found, strict=True)]

    zeros = [[bm.zeros(shape) for _ in range(2 if merged else 1)] for _ in range(2)]
    squares = [bm.column(ROWS, 0.0) for _ in range(2 if raw.l2norm else 0)]
    totals, any_slow, squares = lax.fori_loop(0, slabs, visit, (zeros, jnp.float32(0.0), squares))
    again = slabs if always_exact else (any_slow > 0.5).astype(jnp.int32) * slabs
    diagonals = lax.fori_loop(0, again, visit_exactly, [x[0] for x in totals])
    queries, erased = ([x, *rest] for x, (_, *rest) in zip(diagonals, totals, strict=True))

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
        scratch |= {f"left_{name}": bm.rows((ROWS, n), op) for name, n in (("mask", ROWS), ("up", SLAB), ("one", ROWS))}
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
