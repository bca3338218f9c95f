"""The kernels of one chunk of 16 tokens for Hopper with float32-accurate products, on Pallas's Mosaic GPU backend:
inputs and results of `kda_prepare` and `kda_grads`, of K and V of 64; names as in `forward` and `backward`.

Tiles are as in `mosaic_chunks`, [64, 16], key channels or value columns as rows and tokens along the columns. Every
float32 operand is cut into three bfloat16 pieces, which have all its bits, and a product is six of theirs. The tiles of
the value side, do, dU, U and v, lie one below the other as 64 tokens, so that they are cut at once. States go in
pieces from registers into products.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import FAST_LIMIT, MIN_LOG_DECAY
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.mosaic_tiles import ROWS, beta_rows, check_sizes, exp
from pallas_kernels.kda.sizes import Sizes

PIECES = 3
ROW_BYTES = 2 * BLOCK  # Contiguous bytes of operands: products may then contract 16 tokens.
# Of pieces of two operands, those whose products count, the smallest first.
_PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


def cut(value: jax.Array) -> list[jax.Array]:
    """bfloat16 numbers that add up to a float32 value exactly, largest first. Bits are cut off as those of an integer:
    a conversion there and back would take a slow instruction for every number."""
    found = []
    for _ in range(PIECES - 1):
        bits = lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-1 << 16)
        found.append(lax.bitcast_convert_type(bits, jnp.float32))
        value = value - found[-1]
    return [x.astype(jnp.bfloat16) for x in (*found, value)]


def put(target: Any, value: jax.Array, *, transposed: bool = False) -> None:
    """Stores a float32 value to the pieces [3, ..] of a tile."""
    for i, piece in enumerate(cut(value)):
        if transposed:
            bm.store_transposed(target.at[i], piece)
        else:
            target.at[i][...] = piece


class _Products:
    """Products of this warpgroup in pieces. Left operands are values or pieces in shared memory; in interpret mode,
    which takes none from registers, they go through `left`."""

    def __init__(self, left: dict[str, Any], interpret: bool):
        self.left, self.interpret = left, interpret

    def operand(self, name: str, value: jax.Array) -> list[Any]:
        return [self.there(name, i, piece) for i, piece in enumerate(cut(value))]

    def there(self, name: str, i: int, piece: jax.Array) -> Any:
        """The i-th piece of a left operand."""
        if not self.interpret:
            return piece
        self.left[f"left_{name}"].at[i][...] = piece
        return self.left[f"left_{name}"].at[i]

    def ones(self, name: str) -> list[Any]:
        """A left operand of ones: every row of its products is a sum over rows."""
        value = bm.zeros((ROWS, ROWS)).astype(jnp.bfloat16) + jnp.bfloat16(1)
        if not self.interpret:
            return [value]
        self.left[f"left_{name}"].at[0][...] = value
        return [self.left[f"left_{name}"].at[0]]

    def together(self, *products: list[tuple[list[Any], list[Any]]]) -> list[jax.Array]:
        """For each list of pairs (a, b) the sum of a b, in float32. All run before the first is read. An operand of 0
        and 1 is its only piece."""

        def body(*totals):
            for total, pairs in zip(totals, products, strict=True):
                for i, j in _PAIRS:
                    for a, b in pairs:
                        if i < len(a) and j < len(b):
                            bm.multiply(total, a[i], b[j])
            return [bm.settled(bm.read(total)) for total in totals]

        shapes = [(a[0].shape[0], b[0].shape[1]) for ((a, b), *_) in products]
        return bm.accumulators(body, *shapes)


def _right(pieces: Any, rows: Any, *, transposed: bool = False) -> list[Any]:
    found = [pieces.at[i].at[rows] for i in range(PIECES)]
    return [bm.transpose(x) for x in found] if transposed else found


def _write_masks(masks: Any, row: jax.Array, col: jax.Array, C: int) -> None:
    """Writes 0/1 matrices: rows i of the sum up to token i, then rows of the sum of the tokens after i."""
    chosen = jnp.where(row < C, jnp.where(col <= row, 1.0, 0.0), jnp.where(col > row - C, 1.0, 0.0))
    masks[...] = chosen.astype(jnp.bfloat16)


def _kda_grads(
    q, k, v, g, do, beta, M, S, dS, U, dU, decay, dq, dk, dv, dg, dbeta,
    *, sizes: Sizes, scale: float, limit: float, always_exact: bool, interpret: bool,
    q_tile, k_tile, g_tile, given, s_tile, ds_tile, m_tile, beta_row, decay_row, sides, near, masks, row_sums, loaded,
    **left,
):  # fmt: skip
    C, nt, HV = sizes.C, sizes.nt, sizes.HV
    n, head = lax.rem(bm.program(), nt), lax.div(bm.program(), nt)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * C, C)
    shape, f32 = (ROWS, C), jnp.float32
    DO, DR, U_, V_ = (pl.ds(i * C, C) for i in range(4))  # Rows of `given`, and of `side` with its pieces.
    first, A = DO, DR
    side, dv_tile, D_tile = sides  # One memory: the others are written when no product reads the first any more.
    for source, target in (
        (q.at[b, tokens, h], q_tile), (k.at[b, tokens, h], k_tile), (g.at[b, tokens, h], g_tile),
        (do.at[b, tokens, h], given.at[DO]), (dU.at[head, n], given.at[DR]),
        (U.at[head, n], given.at[U_]), (v.at[b, tokens, h], given.at[V_]),
        (S.at[head, n], s_tile), (dS.at[head, n], ds_tile),
        (M.at[head, n], m_tile.at[first]), (beta.at[head, n], beta_row), (decay.at[head, n, 0], decay_row),
    ):  # fmt: skip
        bm.copy_in(source, target, loaded)
    product = _Products(left, interpret)
    operand, together, ones = product.operand, product.together, product.ones("ones")
    row, col = bm.indices(shape)
    _write_masks(masks, row, col, C)
    prefix_suffix, suffix_only = ([bm.transpose(masks.at[rows])] for rows in (pl.ds(0, 2 * C), DR))
    bm.wait(loaded)
    put(near, bm.load(m_tile))
    put(side, bm.load(given))
    dS_T, S_T = bm.load_transposed(ds_tile), bm.load_transposed(s_tile)
    bm.commit()

    # Values are formed late and tiles read again rather than kept: registers decide how many chunks run at a time.
    leaving = jnp.sum(S_T * dS_T, axis=1) * bm.load_column(decay_row)
    dR, acc_k = together(
        [(_right(side, DR, transposed=True), _right(near, first))],
        [(operand("dS", dS_T), _right(side, U_, transposed=True))],
    )

    def log_decays():
        gT = bm.load_transposed(g_tile)
        return jnp.where(gT >= MIN_LOG_DECAY, gT, MIN_LOG_DECAY)

    [sums] = together([(operand("g", log_decays()), prefix_suffix)])
    prefix, suffix = sums[:, :C], sums[:, C:]
    bm.commit()
    put(side.at[:, DR], dR, transposed=True)
    # Of the last token, a little more is slow: it says whether any is.
    deep = jnp.where(col < C - 1, limit, limit * (1.0 - 1e-5))
    near.at[0][...] = jnp.where(-prefix > deep, 1.0, 0.0).astype(jnp.bfloat16)
    bm.commit()
    D, acc, slow_channels = together(
        [(_right(side, pl.ds(0, ROWS)), _right(side, pl.ds(2 * C, 2 * C), transposed=True))],
        [(operand("S", S_T), _right(side, pl.ds(0, 2 * C), transposed=True))],
        [(ones, [near.at[0]])],
    )
    # Rows i below C: dP_ij. Rows from C on: dR_i U_j = -dA_ij, and dR_i v_j in the columns from C on.
    wide_row, wide_col = bm.indices((ROWS, 2 * C))
    row_sums.at[0][...] = jnp.sum(jnp.where(wide_row == wide_col, D, 0.0), axis=1)
    row_sums.at[1][...] = jnp.sum(jnp.where(row == col, slow_channels, 0.0), axis=1)
    D = jnp.where(row < C, D[:, :C], -D[:, :C])
    bm.commit()
    put(near, jnp.where((row < 2 * C) & (lax.rem(row, C) > col), D, 0.0))
    bm.commit()
    steps = C if always_exact else (row_sums[1, C - 1] > 0.5).astype(jnp.int32) * C

    def fast():
        return jnp.where(bm.load_row(row_sums.at[1, first], shape) > 0.5, 0.0, 1.0)

    def beta_of():
        return bm.load_row(beta_row, shape)

    def keys():
        return bm.load_transposed(k_tile)

    def queries():
        return bm.load_transposed(q_tile) * scale

    up = exp(prefix)
    anchor = exp(jnp.minimum(-prefix, limit))
    far_key, E, Q = keys() * anchor, beta_of() * keys() * up, queries() * up
    near_qe, near_k = together(
        [(operand("key", far_key), _right(near, pl.ds(0, 2 * C), transposed=True))],
        [(operand("E", fast() * E), _right(near, A)), (operand("Q", fast() * Q), _right(near, first))],
    )
    acc_q = acc[:, :C] + fast() * near_qe[:, :C]
    acc_e = fast() * near_qe[:, C:] - acc[:, C:]
    dG = Q * acc_q + E * acc_e - far_key * near_k
    dqT, deT = up * acc_q, up * acc_e
    down = exp(suffix)
    left_k = keys() * down * acc_k
    dG -= left_k
    leaving += jnp.sum(left_k, axis=1)
    dkT = down * acc_k + anchor * near_k

    def exact(step, carry):
        """Key j against the rows that need the exact path."""
        span, dqT, deT, dkT, dG = carry
        j = C - 1 - step
        here, kT = col == j, keys()

        def of_token(x):
            return bm.spread_rows(jnp.sum(jnp.where(here, x, 0.0), axis=1), shape)

        weight = jnp.where(col > j, exp(span) * (1.0 - fast()), 0.0)
        p = bm.load_row(D_tile.at[j, pl.ds(0, C)], shape) * weight
        a = bm.load_row(D_tile.at[j, pl.ds(C, C)], shape) * weight
        k_j = of_token(kT)
        term = a * beta_of() * kT + p * queries()
        dk_j = bm.spread_rows(jnp.sum(term, axis=1), shape)
        dG = dG + term * k_j - jnp.where(here, k_j * dk_j, 0.0)
        span = jnp.where(col >= j, span + of_token(log_decays()), span)
        return span, dqT + p * k_j, deT + a * k_j, dkT + jnp.where(here, dk_j, 0.0), dG

    @pl.when(steps > 0)
    def _():  # Columns of dP and dA are rows here.
        bm.store_transposed(D_tile, functools.reduce(jnp.add, (bm.load(near.at[i]).astype(f32) for i in range(PIECES))))
        bm.commit()

    _, dqT, deT, dkT, dG = lax.fori_loop(0, steps, exact, (bm.zeros(shape), dqT, deT, dkT, dG))

    bm.commit()
    put(near, keys() * deT)
    bm.commit()
    later, share = together([(operand("g", dG), suffix_only)], [(ones, [near.at[i] for i in range(PIECES)])])
    diagonal = bm.load_row(row_sums.at[0, DO], shape)
    # Results take the place of inputs.
    kT, qT = keys(), queries()
    bm.store_transposed(q_tile, scale * (dqT + diagonal * kT))
    bm.store_transposed(k_tile, dkT + diagonal * qT + beta_of() * deT)
    bm.store_transposed(g_tile, dG + later + bm.spread_rows(leaving, shape))
    bm.store_transposed(dv_tile, beta_of() * dR)
    # All rows of share are the same; those of one warp come together as a column of the tile.
    shares = share + bm.load_row(row_sums.at[0, DR], shape)
    row_sums.at[1][...] = jnp.sum(jnp.where(row == col, shares, 0.0), axis=1)
    targets = [(q_tile, dq), (k_tile, dk), (g_tile, dg), (dv_tile, dv)]
    outputs = [(tile, target.at[b, tokens, h]) for tile, target in targets]
    bm.copy_buffers_out([*outputs, (row_sums.at[1, first], dbeta.at[head, n])])
    bm.finish_copies_out()


def _kda_prepare(
    q, k, v, g, beta, *refs,
    sizes: Sizes, scale: float, limit: float, matrices: bool, always_exact: bool, interpret: bool,
    shared_qk, side, shared_g, shared_v, row_values, loaded, v_loaded, **left,
):  # fmt: skip
    """refs: M, given; or the results P and M, where `matrices` says that they are to be formed; the other results, W,
    Qhat, Ktil, Y and decay."""
    *to_P, M, W, Qhat, Ktil, Y, decay = refs
    C, nt, HV = sizes.C, sizes.nt, sizes.HV
    n, head = lax.rem(bm.program(), nt), lax.div(bm.program(), nt)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * C, C)
    shape = (ROWS, C)
    # Scratch of several names is one memory: what is there was read before the next is written.
    (q_tile, k_tile), near = shared_qk
    if matrices:
        (g_tile, m_tile), (masks, lines, v_tile, y_tile) = shared_g, shared_v
    else:
        ((g_tile, m_tile), y_tile), ((masks, v_tile), lines) = shared_g, shared_v
    slow_rows = decay_row = row_values.at[0]
    queries, erased, keys, last = (pl.ds(i * C, C) for i in range(4))  # Rows of `side`, and the first two of `near`.
    copies = [
        (q.at[b, tokens, h], q_tile), (k.at[b, tokens, h], k_tile), (g.at[b, tokens, h], g_tile),
        (beta.at[head, n], row_values.at[1, pl.ds(0, C)]),
    ]  # fmt: skip
    if not matrices:
        copies.append((M.at[head, n], m_tile.at[erased]))
    for source, target in copies:
        bm.copy_in(source, target, loaded)

    def copy_in_values():
        bm.copy_in(v.at[b, tokens, h], v_tile, v_loaded)

    if not matrices:
        copy_in_values()
    product = _Products(left, interpret)
    operand, together = product.operand, product.together
    row, col = bm.indices(shape)
    _write_masks(masks, row, col, C)
    bm.commit()
    bm.wait(loaded)

    def log_decays():
        gT = bm.load_transposed(g_tile)
        return jnp.where(gT >= MIN_LOG_DECAY, gT, MIN_LOG_DECAY)

    [sums] = together([(operand("g", log_decays()), [bm.transpose(masks.at[pl.ds(0, 2 * C)])])])
    prefix, suffix = sums[:, :C], sums[:, C:]
    up = exp(prefix)
    of_chunk = jnp.sum(jnp.where(col == C - 1, up, 0.0), axis=1)

    def keys_of():
        return bm.load_transposed(k_tile)

    def queries_of():
        return bm.load_transposed(q_tile) * scale

    def beta_of():
        return bm.load_row(row_values.at[1, pl.ds(0, C)], shape)

    put(side.at[:, queries], queries_of() * up, transposed=True)
    put(side.at[:, last], keys_of() * exp(suffix), transposed=True)
    put(side.at[:, erased], beta_of() * keys_of() * up, transposed=True)
    if matrices:
        put(side.at[:, keys], keys_of() * exp(jnp.minimum(-prefix, limit)), transposed=True)
        depth = jnp.max(-prefix, axis=0)
        for rows in (queries, erased):
            slow_rows.at[rows][...] = depth
        bm.commit()
        # Rows i below C: P_ij. Rows from C on: A_ij.
        [D] = together([(_right(side, pl.ds(0, ROWS)), _right(side, keys, transposed=True))])

        def exact(step, span):
            """P and A of key j in all rows, as row j of `lines`."""
            j = C - 1 - step
            here = col == j

            def of_token(x):
                return bm.spread_rows(jnp.sum(jnp.where(here, x, 0.0), axis=1), shape)

            weighted = jnp.where(col >= j, exp(span), 0.0) * of_token(keys_of())
            lines.at[j, queries][...] = jnp.sum(queries_of() * weighted, axis=0)
            lines.at[j, erased][...] = jnp.sum(beta_of() * keys_of() * weighted, axis=0)
            return jnp.where(col >= j, span + of_token(log_decays()), span)

        steps = C if always_exact else (jnp.max(depth) > limit).astype(jnp.int32) * C
        lax.fori_loop(0, steps, exact, bm.zeros(shape))
        bm.commit()
        slow = bm.spread_rows(bm.load_column(slow_rows), shape) > limit
        D = jnp.where(slow, bm.load_transposed(lines), D)
        bm.commit()
        copy_in_values()
        inverse = bm.invert_blocks(jnp.where((row >= C) & (row < 2 * C) & (col < row - C), D, 0.0), interpret)
        m_tile[...] = inverse
        put(near, jnp.where(row < C, jnp.where(col <= row, D, 0.0), inverse))
    else:
        bm.commit()
        put(near, bm.load(m_tile))
    decay_row[...] = of_chunk
    bm.wait(v_loaded)
    values = operand("y", beta_of() * bm.load_transposed(v_tile))
    bm.commit()
    M_T = _right(near, erased, transposed=True)
    E = [product.there("E", i, bm.load_transposed(side.at[i].at[erased])) for i in range(PIECES)]
    W_T, Y_T = together([(E, M_T)], [(values, M_T)])
    put(side.at[:, erased], W_T, transposed=True)
    y_tile[...] = Y_T
    outputs = [(y_tile, Y.at[head, n]), (decay_row, decay.at[head, n, 0])]
    for i in range(PIECES):
        piece = pl.ds(i * C, C)
        for rows, target in ((queries, Qhat), (erased, W), (last, Ktil)):
            outputs.append((side.at[i].at[rows], target.at[head, n, piece]))
        outputs += [(near.at[i].at[queries], P.at[head, n, piece]) for P in to_P]
    if matrices:
        outputs.append((m_tile.at[erased], M.at[head, n]))
    bm.copy_buffers_out(outputs)
    bm.finish_copies_out()


def _left_scratch(interpret: bool, **widths: int) -> dict[str, Any]:
    """Shared memory `left_<name>` for left operands [64, width], in interpret mode alone."""
    return {f"left_{name}": bm.rows((PIECES, ROWS, n), jnp.bfloat16) for name, n in widths.items() if interpret}


def _check(sizes: Sizes, config: KdaConfig, *arrays: jax.Array) -> None:
    """Raises ValueError for what these kernels do not take."""
    check_sizes(sizes, *arrays, precision="fp32")
    if config.serial != "mosaic":
        raise ValueError(f"serial must be 'mosaic', whose kernels take operands in pieces, got {config.serial!r}")


def gradients(
    prepared, states, dS, dU, q, k, v, g, beta, do, *, scale, config: KdaConfig, interpret
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Runs the Hopper `kda_grads` with float32-accurate products; returns dq, dk, dv, dg and dbeta."""
    sizes = Sizes.of(q, v, beta, config)
    _check(sizes, config, q, k, v, do)
    heads, C, nt, f32, op = sizes.B * sizes.HV, sizes.C, sizes.nt, jnp.float32, jnp.bfloat16
    dtype_of_g, g = g.dtype, g.astype(f32)
    inputs = [q, k, v, g, do, beta_rows(beta, sizes), prepared.M, states.S, dS, states.U, dU, prepared.decay]
    outputs = [jax.ShapeDtypeStruct(x.shape, f32) for x in (q, k, v, g)]
    outputs.append(jax.ShapeDtypeStruct((heads, nt, C), f32))
    scratch = {
        "q_tile": bm.tiles((C, ROWS), f32),
        "k_tile": bm.tiles((C, ROWS), f32),
        "g_tile": bm.tiles((C, ROWS), f32),
        "given": bm.tiles((ROWS, ROWS), f32),
        "s_tile": bm.tiles((ROWS, ROWS), f32),
        "ds_tile": bm.tiles((ROWS, ROWS), f32),
        "m_tile": bm.rows((ROWS, C), f32),
        "sides": bm.one_of(
            bm.tiles((PIECES, ROWS, ROWS), op, ROW_BYTES), bm.tiles((C, ROWS), f32), bm.rows((C, ROWS), f32)
        ),
        "near": bm.tiles((PIECES, ROWS, C), op, ROW_BYTES),
        "masks": bm.tiles((ROWS, C), op, ROW_BYTES),
        "beta_row": bm.rows((C,), f32),
        "decay_row": bm.rows((ROWS,), f32),
        "row_sums": bm.rows((2, ROWS), f32),
        "loaded": bm.barriers(None, len(inputs)),
    }
    scratch |= _left_scratch(interpret, dS=ROWS, S=ROWS, g=C, key=C, E=C, Q=C, ones=ROWS)
    body = functools.partial(
        _kda_grads, sizes=sizes, scale=scale, limit=FAST_LIMIT["fp32"], always_exact=config.always_exact,
        interpret=interpret,
    )  # fmt: skip
    dq, dk, dv, dg, dbeta = bm.launch(
        body, "kda_grads", inputs, outputs, scratch, programs=heads * nt, cluster=1, warpgroups=1,
        interpret=interpret, automatic_barriers=False,
    )  # fmt: skip
    dbeta = dbeta.reshape(sizes.B, sizes.HV, nt * C)[..., : sizes.T].swapaxes(1, 2)
    return dq, dk, dv, dg.astype(dtype_of_g), dbeta.astype(beta.dtype)


def prepare(q, k, v, g, beta, matrices=None, *, scale, config: KdaConfig, interpret) -> tuple[jax.Array, ...]:
    """Runs the Hopper `kda_prepare` with float32-accurate products; returns P and M, formed here or given, and W, Qhat,
    Ktil, Y and decay as `forward.Prepared` has them, W, Qhat, Ktil and P in pieces."""
    sizes = Sizes.of(q, v, beta, config)
    _check(sizes, config, q, k, v)
    heads, C, nt, f32, op = sizes.B * sizes.HV, sizes.C, sizes.nt, jnp.float32, jnp.bfloat16
    inputs = [q, k, v, g.astype(f32), beta_rows(beta, sizes)]
    inputs += [] if matrices is None else [matrices[1]]
    shape, rows = jax.ShapeDtypeStruct, PIECES * C
    outputs = [shape((heads, nt, rows, C), op), shape((heads, nt, C, C), f32)] if matrices is None else []
    outputs += [shape((heads, nt, rows, ROWS), op)] * 3
    outputs += [shape((heads, nt, ROWS, C), f32), shape((heads, nt, 1, ROWS), f32)]
    tile, m_tile = bm.tiles((C, ROWS), f32), bm.rows((ROWS, C), f32)
    scratch = {
        "shared_qk": bm.one_of([tile, tile], bm.tiles((PIECES, ROWS, C), op, ROW_BYTES)),
        "side": bm.tiles((PIECES, ROWS, ROWS), op),
        "row_values": bm.rows((2, ROWS), f32),
        "loaded": bm.barriers(None, len(inputs) - 1),
        "v_loaded": bm.barriers(None, 1),
    }
    masks, lines = bm.tiles((ROWS, C), op, ROW_BYTES), bm.rows((C, ROWS), f32)
    if matrices is None:  # Less than 45 KB, with what reductions take: five programs a multiprocessor.
        scratch |= {"shared_g": bm.one_of(tile, m_tile), "shared_v": bm.one_of(masks, lines, tile, m_tile)}
    else:
        scratch |= {"shared_g": bm.one_of([tile, m_tile], m_tile), "shared_v": bm.one_of([masks, tile], lines)}
    scratch |= _left_scratch(interpret, g=C, E=C, y=C)
    body = functools.partial(
        _kda_prepare, sizes=sizes, scale=scale, limit=FAST_LIMIT["fp32"], matrices=matrices is None,
        always_exact=config.always_exact, interpret=interpret,
    )  # fmt: skip
    found = bm.launch(
        body, "kda_prepare", inputs, outputs, scratch, programs=heads * nt, cluster=1, warpgroups=1,
        interpret=interpret, automatic_barriers=False,
    )  # fmt: skip
    return (*([] if matrices is None else matrices[:2]), *found)
