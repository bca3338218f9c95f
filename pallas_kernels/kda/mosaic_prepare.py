"""`kda_prepare` for Hopper, on Pallas's Mosaic GPU backend, for KDA with bfloat16 operands: names as in `forward`.

A program holds 32 tokens, one chunk or two. Its tiles have tokens as rows, queries over keys, so that P over A is one
product of 64 rows, straight from registers. Sums of log-decays over tokens are products of 0/1 matrices with two
bfloat16 pieces of g.

The inverse doubles blocks, from one row to the chunk: M_21 = -M_22 A_21 M_11 for all pairs of blocks at once is
-M A M where those blocks lie, on the tensor cores from three bfloat16 pieces of each factor, which is float32's
accuracy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import FAST_LIMIT, MIN_LOG_DECAY
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.mosaic_tiles import LOG2_E, ROWS, check_sizes
from pallas_kernels.kda.sizes import Sizes

GROUP = 32  # Tokens of a program.
ROW_BYTES = 2 * GROUP  # Of operands: products over the tokens of a program read no longer rows.
PIECES = 3  # Of a factor in the inverse: 24 bits.
SLAB = 64  # Key channels that a program has in registers.
BARRIERS = False  # Around every store: `commit` stands where one is needed.


def _token_masks(C: int) -> np.ndarray:
    """[64 n, 32]: with which factors log-decays of tokens (columns) add up to the exponents of rows.

    Rows are the program's tokens, twice. The exponents are those of queries and keys as rows of P and A; of keys as
    their columns, in the same block and (second half) later ones; and where a chunk has several blocks, of keys at its
    end (second half), and of queries and keys that meet the chunk's first state.
    """
    i, t = np.arange(GROUP)[:, None], np.arange(GROUP)[None, :]
    block, chunk = i // BLOCK == t // BLOCK, i // C == t // C
    prefix, suffix = (block & (t <= i)).astype(float), (block & (t > i)).astype(float)
    pairs = [(prefix, prefix), (-prefix, suffix)]
    if C > BLOCK:
        entering, leaving = (chunk & (t <= i)).astype(float), (chunk & (t > i)).astype(float)
        pairs += [(0.0 * leaving, leaving), (entering, entering)]
    return np.concatenate([part for pair in pairs for part in pair])


def _chunk_masks(C: int) -> np.ndarray:
    """[32, 32]: which tokens (rows) are those of a chunk (column)."""
    return (np.arange(GROUP)[:, None] // C == np.arange(GROUP)[None, :]).astype(float)


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

    def __call__(self, *pairs: tuple[Any, Any]) -> jax.Array:
        return self.together(list(pairs))[0]

    def accurate(self, x: list[Any], y: list[Any]) -> jax.Array:
        """x y from the pieces of both, largest first: all products but those below float32's last bit."""
        pairs = [(x[i], y[total - i]) for total in reversed(range(len(x))) for i in range(total + 1)]
        return self(*pairs)


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


def _part(x: Any, i: int, axis: int = 0, size: int = ROWS) -> Any:
    """The i-th tile of a value."""
    places = slice(i * size, (i + 1) * size)
    return x[places] if axis == 0 else x[:, places]


def _kda_prepare(
    q, k, v, g, beta, token_masks, chunk_masks, P, M, W, qhat, ktil, y, decay, *,
    sizes: Sizes, scale: float, limit: float, op, always_exact: bool, interpret: bool,
    rows, g_tile, pieces, factors, scaled, p_tile, sums, beta_row, decay_rows, loaded, values_loaded,
    out_tile: Any = None, **left,
):  # fmt: skip
    C, HV, slabs, groups = sizes.C, sizes.HV, sizes.bk // SLAB, -(-sizes.T // GROUP)
    n, head = lax.rem(bm.program(), groups), lax.div(bm.program(), groups)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * GROUP, GROUP)
    first, second, third = (pl.ds(i * GROUP, GROUP) for i in range(3))
    queries_keys, keys_keys = pl.ds(0, ROWS), pl.ds(GROUP, ROWS)
    copies = [(g.at[b, tokens, h, pl.ds(s * SLAB, SLAB)], g_tile.at[pl.ds(s * GROUP, GROUP)]) for s in range(slabs)]
    copies += [(q.at[b, tokens, h], rows.at[first])]
    copies += [(k.at[b, tokens, h], rows.at[x]) for x in (second, third)]
    copies += [(chunk_masks, sums)]
    copies += [(beta.at[head, n], beta_row.at[x]) for x in (first, second)]
    for source, target in copies:
        bm.copy_in(source, target, loaded)

    chunks = GROUP // C
    f32, blocks, shape, wide = jnp.float32, C > BLOCK, (ROWS, GROUP), (ROWS, SLAB)
    product = _Products(op, left, interpret)
    operand = product.operand
    row, col = bm.indices(shape)
    token, of_queries = lax.rem(row, GROUP), row < GROUP
    own, other = lax.div(token, BLOCK), lax.div(col, BLOCK)
    within = lax.rem(col, BLOCK)
    scaled.at[pl.ds(GROUP, ROWS)][...] = bm.zeros(shape).astype(op)
    bm.wait(loaded)

    pieces[...] = _pieces(jnp.maximum(bm.load(g_tile) * LOG2_E, MIN_LOG_DECAY * LOG2_E), op, 2)
    bm.commit()

    def visit(slab, totals):
        """Adds the products of a slab of channels to P over A, in the same block and between blocks."""
        channels = pl.ds(slab * SLAB, SLAB)
        log_decays = [pieces.at[pl.ds(i * ROWS + slab * GROUP, GROUP)] for i in range(2)]
        x, x_keys = bm.load(rows.at[queries_keys, channels]), bm.load(rows.at[keys_keys, channels])

        def scaled_by(factor):
            """Queries, times the scale, over keys, times exp2 of the exponents."""
            return jnp.where(bm.indices(wide)[0] < GROUP, scale, 1.0) * x.astype(f32) * factor

        def exponents(mask, name="mask"):
            left = operand(name, mask)
            return [(left, piece) for piece in reversed(log_decays)]

        def both(first):
            return exponents(bm.load(token_masks.at[pl.ds(first * ROWS, 2 * ROWS)]), "masks")

        total, found = product.together([(bm.transpose(piece), sums) for piece in reversed(log_decays)], both(0))
        for c in range(chunks):
            in_chunk = jnp.where(col == c, total, 0.0)
            decay_rows.at[c, channels][...] = jnp.exp2(jnp.sum(in_chunk, axis=1))
        prefix = _part(found, 0)
        slow = jnp.max(-prefix, axis=1) > limit
        up = scaled_by(jnp.exp2(prefix)).astype(op)
        down = (x_keys.astype(f32) * jnp.exp2(jnp.minimum(_part(found, 1), limit))).astype(op)
        keys = factors.at[pl.ds(0, 2 * ROWS)]
        keys[...] = jnp.concatenate([_part(down, i, 1, GROUP) for i in range(2)], axis=0)

        def exact(j, found):
            """P and A of key j of every block, over these channels."""
            here = (own == other) & (within == j)
            span = (own == other) & (within > j) & (col <= token)
            one = operand("one", jnp.where(here, 1.0, 0.0))
            between, key = product.together(exponents(jnp.where(span, 1.0, 0.0)), [(one, rows.at[second, channels])])
            line = jnp.sum(scaled_by(jnp.exp2(between)) * key, axis=1)
            return jnp.where(here, bm.spread_rows(line, shape), found)

        any_slow = jnp.max(jnp.where(slow, 1.0, 0.0)) > 0.5
        steps = BLOCK if always_exact else any_slow.astype(jnp.int32) * BLOCK
        exactly = lax.fori_loop(0, steps, exact, bm.zeros(shape))

        bm.commit()
        width = 2 * GROUP if blocks else GROUP
        against = [bm.transpose(keys.at[pl.ds(i * ROWS, width)]) for i in range(2)]
        pairs = [(operand(f"a{i}", _part(up, i, 1, GROUP)), against[i]) for i in range(2)]
        if blocks:
            found, exponent = product.together(pairs, both(2))
            down = (x_keys.astype(f32) * jnp.exp2(_part(exponent, 0))).astype(op)
            up = scaled_by(jnp.exp2(_part(exponent, 1))).astype(op)
        else:
            found = product(*pairs)
        near = jnp.where(bm.spread_rows(jnp.where(slow, 1.0, 0.0), shape) > 0.5, exactly, found[:, :GROUP])
        # Results take the place of the inputs: Ktil in the last rows, then Qhat over Ehat.
        rows.at[keys_keys, channels][...] = down
        bm.commit()
        rows.at[queries_keys, channels][...] = up
        return [sum_ + new for sum_, new in zip(totals, (near, *([found[:, GROUP:]] if blocks else [])), strict=True)]

    near, *far = lax.fori_loop(0, slabs, visit, [bm.zeros(shape) for _ in range(2 if blocks else 1)])

    in_block = (own == other) & ((col < token) | of_queries & (col == token))
    D = jnp.where(in_block, near, 0.0)
    if blocks:
        D = jnp.where(own > other, far[0], D)
    A = jnp.where(of_queries, 0.0, D * bm.spread_rows(bm.load_column(beta_row), shape))

    def of_chunks(x):
        """The square blocks on the diagonal of x, side by side along its rows."""
        return x if C == GROUP else x[:, :C] + x[:, C:]

    def rows_of(x):
        return x.at[head, pl.ds(n * GROUP, GROUP)]

    p_tile[...] = of_chunks(D).astype(op)
    factors.at[pl.ds(0, PIECES * ROWS)][...] = _pieces(A, op, PIECES)
    bm.commit()
    for slab in range(sizes.bv // ROWS):
        target = pieces.at[pl.ds(slab * GROUP, GROUP)]
        bm.copy_in(v.at[b, tokens, h, pl.ds(slab * ROWS, ROWS)], target, values_loaded)
    bm.copy_buffers_out(
        [(rows.at[first], rows_of(qhat)), (rows.at[third], rows_of(ktil)), (p_tile.at[first], rows_of(P))]
    )

    right_A, right_M = ([factors.at[pl.ds((f + i) * ROWS + GROUP, GROUP)] for i in range(PIECES)] for f in (0, PIECES))
    # Rows of blocks of 2^n tokens and columns of their neighbours: their numbers differ in bit n, and none above.
    distance = token ^ col

    def double(level, M):
        size = lax.shift_left(1, level)
        M_pieces = _pieces(M, op, PIECES)
        factors.at[pl.ds(PIECES * ROWS, PIECES * ROWS)][...] = M_pieces
        bm.commit()
        MA = product.accurate([operand(f"a{i}", _part(M_pieces, i)) for i in range(PIECES)], right_A)
        MA_pieces = _pieces(MA, op, PIECES)
        MAM = product.accurate([operand(f"b{i}", _part(MA_pieces, i)) for i in range(PIECES)], right_M)
        bm.commit()
        return M - jnp.where((distance >= size) & (distance < 2 * size) & (col < token), MAM, 0.0)

    identity = jnp.where(of_queries, 0.0, jnp.where(distance == 0, 1.0, 0.0))
    pairs_of_two = identity - jnp.where(distance == 1, A, 0.0)
    inverse = lax.fori_loop(1, C.bit_length() - 1, double, pairs_of_two)

    # Results take the place of factors: W in two tiles, then M and Y, unless those are of more chunks than one.
    out = factors.at[pl.ds(2 * ROWS, ROWS + sizes.bv)] if chunks == 1 else out_tile
    out.at[pl.ds(0, ROWS)][...] = of_chunks(inverse).astype(op)
    M_beta = (inverse * bm.load_row(beta_row.at[first], shape)).astype(op)
    scaled.at[queries_keys][...] = M_beta
    bm.commit()
    bm.copy_buffers_out([(out.at[second], rows_of(M))])
    # Two slabs share a product: M over zeros times the first, zeros over M times the second.
    pairs = [(operand("a0", M_beta), rows.at[second, pl.ds((slabs - 1) * SLAB, SLAB)])]
    if slabs == 2:
        pairs += [(operand("a1", bm.load(scaled.at[keys_keys])), rows.at[second, pl.ds(0, SLAB)])]
    bm.wait(values_loaded)
    M_T = bm.transpose(scaled.at[second])
    values = [(bm.transpose(pieces.at[pl.ds(slab * GROUP, GROUP)]), M_T) for slab in range(sizes.bv // ROWS)]
    found, *values = product.together(pairs, *([pair] for pair in values))
    found = found.astype(op)
    factors.at[pl.ds(0, 2 * ROWS)][...] = jnp.concatenate([_part(found, i, 1, GROUP) for i in range(2)], axis=0)
    for slab, value in enumerate(values):
        for c in range(chunks):
            place = pl.ds(ROWS + c * sizes.bv + slab * ROWS, ROWS)
            out.at[place][...] = _part(value.astype(op), c, 1, C)
    bm.commit()
    for slab in range(slabs):
        for half in range(2):
            place = pl.ds(half * ROWS + (slab if slabs == 2 else 1) * GROUP, GROUP)
            channels = pl.ds(slab * SLAB + half * GROUP, GROUP)
            bm.copy_buffers_out([(factors.at[place], rows_of(W).at[:, channels])])
    for c in range(chunks):

        def copy_chunk(c=c):
            tile = out.at[pl.ds(ROWS + c * sizes.bv, sizes.bv)]
            bm.copy_buffers_out(
                [(decay_rows.at[c], decay.at[head, n * chunks + c]), (tile, y.at[head, n * chunks + c])]
            )

        pl.when(n * chunks + c < sizes.nt)(copy_chunk)
    bm.finish_copies_out()


def prepare(q, k, v, g, beta, *, scale, config: KdaConfig, interpret):
    """Runs the Hopper `kda_prepare`; returns P, M, W, Qhat, Ktil, Y and decay as `forward.Prepared` has them.

    Raises:
      ValueError: for other than bfloat16, K of 64 or 128, V of 64, 128 or 256, one value head a key head, and T a
        multiple of 8.
    """
    sizes = Sizes.of(q, v, beta, config)
    check_sizes(sizes, q, k, v)
    heads, C, bk, bv, nt = sizes.B * sizes.HV, sizes.C, sizes.bk, sizes.bv, sizes.nt
    groups, chunks = -(-sizes.T // GROUP), GROUP // C
    op, f32, shape = q.dtype, jnp.float32, jax.ShapeDtypeStruct
    outputs = [shape((heads, nt * C, C), op)] * 2 + [shape((heads, nt * C, bk), op)] * 3
    outputs += [shape((heads, nt, bv, C), op), shape((heads, nt, bk), f32)]
    padded = jnp.pad(beta.astype(f32), ((0, 0), (0, groups * GROUP - sizes.T), (0, 0)))
    inputs = [q, k, v, g.astype(f32), padded.swapaxes(1, 2).reshape(heads, groups, GROUP)]
    inputs += [jnp.asarray(_token_masks(C), op), jnp.asarray(_chunk_masks(C), op)]
    scratch: dict[str, Any] = {
        "rows": bm.tiles((3 * GROUP, bk), op, ROW_BYTES),
        "g_tile": bm.tiles((ROWS, SLAB), f32),
        "pieces": bm.tiles((2 * ROWS, SLAB), op, ROW_BYTES),
        "factors": bm.tiles((max(2 * PIECES * ROWS, 3 * ROWS + bv), GROUP), op, ROW_BYTES),
        "scaled": bm.tiles((3 * GROUP, GROUP), op, ROW_BYTES),
        "p_tile": bm.tiles((ROWS, C), op, 2 * C),
        "out_tile": bm.tiles((ROWS + chunks * bv, C), op, 2 * C) if chunks > 1 else None,
        "sums": bm.tiles((GROUP, GROUP), op, ROW_BYTES),
        "beta_row": bm.rows((ROWS,), f32),
        "decay_rows": bm.rows((chunks, bk), f32),
        "loaded": bm.barriers(None, bk // SLAB + 6),
        "values_loaded": bm.barriers(None, bv // ROWS),
    }
    if interpret:
        scratch["left_masks"] = bm.rows((2 * ROWS, GROUP), op)
        names = ["mask", "one", *(f"{x}{i}" for x in "ab" for i in range(PIECES))]
        scratch |= {f"left_{name}": bm.rows((ROWS, GROUP), op) for name in names}
    scratch = {name: x for name, x in scratch.items() if x is not None}
    body = functools.partial(
        _kda_prepare, sizes=sizes, scale=scale, limit=FAST_LIMIT["16bit"] * LOG2_E, op=op,
        always_exact=config.always_exact, interpret=interpret,
    )  # fmt: skip
    P, M, W, Qhat, Ktil, Y, decay = bm.launch(
        body, "kda_prepare", inputs, outputs, scratch, programs=heads * groups, cluster=1, warpgroups=1,
        interpret=interpret, automatic_barriers=BARRIERS,
    )  # fmt: skip
    tiles = [x.reshape(heads, nt, C, -1) for x in (P, M, W, Qhat, Ktil)]
    return *tiles, Y, decay.reshape(heads, nt, 1, bk)
