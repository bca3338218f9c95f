"""`kda_prepare` for Hopper, on Pallas's Mosaic GPU backend, for KDA with bfloat16 operands: names as in `forward`.

A program holds one chunk. Tiles [64, C] have key channels as rows, as in `mosaic_chunks`; erased keys and queries then
go, transposed and stacked, through shared memory, so that A and P are one product [64, C] a tile of channels. The
inverse is substitution by rows, in float32, with the coefficients read one by one.
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
from pallas_kernels.kda.mosaic_tiles import ROWS, Tiles, beta_rows, check_sizes, exp, tile_scratch
from pallas_kernels.kda.sizes import Sizes


def _kda_prepare(
    q, k, v, g, beta, P, M, W, qhat, ktil, y, decay, *,
    sizes: Sizes, scale: float, limit: float, op, always_exact: bool, interpret: bool,
    q_tile, k_tile, g_tile, v_tile, w_tile, y_tile, all_rows, near_rows, near_keys, far_keys, p_tile, m_tile,
    m_rows, beta_row, decay_row, masks, loaded, **left,
):  # fmt: skip
    C, tiles, nt, HV = sizes.C, sizes.bk // ROWS, sizes.nt, sizes.HV
    n, head = lax.rem(bm.program(), nt), lax.div(bm.program(), nt)
    b, h, tokens = lax.div(head, HV), lax.rem(head, HV), pl.ds(n * C, C)
    copies = [
        (q.at[b, tokens, h], q_tile), (k.at[b, tokens, h], k_tile), (g.at[b, tokens, h], g_tile),
        (v.at[b, tokens, h], v_tile), (beta.at[head, n], beta_row),
    ]  # fmt: skip
    for source, target in copies:
        bm.copy_in(source, target, loaded)
    on = Tiles(C, op, interpret, masks, left)
    on.write_masks()
    row, col, shape, f32 = on.row, on.col, (ROWS, C), jnp.float32
    first_row, first_col = bm.indices((ROWS, BLOCK))
    number = jnp.sum(jnp.where(first_row == 0, first_col, 0).astype(f32), axis=0)  # 0 to 15, laid out as rows of M are.
    bm.commit()
    bm.wait(loaded)

    blocks = C > BLOCK
    beta_of = bm.load_row(beta_row, shape)
    within = lax.rem(col, BLOCK)
    near, far = bm.zeros(shape), bm.zeros(shape)
    carried = []
    for tile in range(tiles):
        channels = pl.ds(tile * ROWS, ROWS)
        gT = jnp.maximum(bm.load_transposed(g_tile.at[:, channels]), MIN_LOG_DECAY)
        kT = bm.load_transposed(k_tile.at[:, channels]).astype(f32)
        qT = bm.load_transposed(q_tile.at[:, channels]).astype(f32) * scale
        bm.store_transposed(g_tile.at[:, channels], bm.zeros(shape))  # For what the exact path finds.
        prefix, suffix = on.sums(gT, "prefix", "suffix")
        up, down, anchor = exp(prefix), exp(suffix), exp(jnp.minimum(-prefix, limit))
        slow = jnp.max(-prefix, axis=0) > limit
        fast = bm.spread_columns(jnp.where(slow, 0.0, 1.0), shape)
        E, Q = beta_of * kT * up, qT * up
        bm.store_transposed(near_rows.at[pl.ds(0, C)], (fast * E).astype(op))
        bm.store_transposed(near_rows.at[pl.ds(C, C)], (fast * Q).astype(op))
        bm.store_transposed(near_keys, (kT * anchor).astype(op))
        if blocks:
            bm.store_transposed(all_rows.at[pl.ds(0, C)], E.astype(op))
            bm.store_transposed(all_rows.at[pl.ds(C, C)], Q.astype(op))
            bm.store_transposed(far_keys, (kT * down).astype(op))
        bm.commit()
        near = on.product((near_rows, bm.transpose(near_keys)), start=near)
        if blocks:
            far = on.product((all_rows, bm.transpose(far_keys)), start=far)

        def exact(step, span, gT=gT, kT=kT, qT=qT, fast=fast, tile=tile):
            """Key j of every block against the rows of its block that need the exact path, over these channels."""
            j = BLOCK - 1 - step
            here = within == j

            def of_block(x):
                found = bm.zeros(shape)
                for r in range(C // BLOCK):
                    mine = lax.div(col, BLOCK) == r
                    total = bm.spread_rows(jnp.sum(jnp.where(mine & here, x, 0.0), axis=1), shape)
                    found = jnp.where(mine, total, found)
                return found

            weight = jnp.where(within >= j, exp(span) * (1.0 - fast), 0.0) * of_block(kT)
            for part, x in enumerate((beta_of * kT, qT)):
                line = jnp.sum(x * weight, axis=0)
                for r in range(C // BLOCK):
                    g_tile.at[r * BLOCK + j, pl.ds(tile * ROWS + part * C, C)][...] = line
            return jnp.where(within >= j, span + of_block(gT), span)

        any_slow = jnp.max(jnp.where(slow, 1.0, 0.0)) > 0.5
        steps = BLOCK if always_exact else any_slow.astype(jnp.int32) * BLOCK
        lax.fori_loop(0, steps, exact, bm.zeros(shape))
        bm.commit()
        near += bm.load_transposed(g_tile.at[:, channels])

        if blocks:
            base, rest = on.sums(gT, "base", "rest")
            up, down = up * exp(base), down * exp(rest)
        carried.append((beta_of * kT * up).astype(op))
        decay_row.at[channels][...] = jnp.sum(jnp.where(col == C - 1, up, 0.0), axis=1)
        bm.store_transposed(q_tile.at[:, channels], (qT * up).astype(op))
        bm.store_transposed(k_tile.at[:, channels], (kT * down).astype(op))

    # Rows below C: A_ij, strictly lower; rows from C on: P_ij, lower.
    i = lax.rem(row, C)
    own, other = lax.div(i, BLOCK), lax.div(col, BLOCK)
    D = jnp.where((own == other) & (i > col) | (row >= C) & (i == col), near, 0.0)
    if blocks:
        D = jnp.where(own > other, far, D)
    D = jnp.where(row < 2 * C, D, 0.0)
    # A^T, whose coefficients the substitution reads, takes the place of g.
    bm.store_transposed(g_tile.at[:, pl.ds(0, ROWS)], D)
    p_tile[...] = D.astype(op)
    m_rows[...] = bm.zeros(shape)
    bm.commit()

    # Row i of the inverse of a diagonal block is e_i - sum_j A_ij M_j.
    inverse: list[list[jax.Array]] = []
    for r in range(C // BLOCK):
        start, rows = r * BLOCK, []
        for line in range(BLOCK):
            value = jnp.where(number == line, 1.0, 0.0)
            for j in range(line):
                value -= g_tile[start + j, start + line] * rows[j]
            rows.append(value)
            m_rows.at[start + line, pl.ds(start, BLOCK)][...] = value
        inverse.append(rows)
    if blocks:  # M_10 = -M_11 A_10 M_00
        bm.commit()
        right = []
        for line in range(BLOCK):
            value = bm.row_zeros(BLOCK)
            for j in range(BLOCK):
                value += g_tile[j, BLOCK + line] * inverse[0][j]
            right.append(value)
        for line in range(BLOCK):
            value = bm.row_zeros(BLOCK)
            for j in range(line + 1):
                value -= m_rows[BLOCK + line, BLOCK + j] * right[j]
            m_rows.at[BLOCK + line, pl.ds(0, BLOCK)][...] = value
    bm.commit()
    m_tile[...] = bm.load(m_rows).astype(op)
    bm.commit()

    M_T = bm.transpose(m_tile.at[pl.ds(0, C)])
    for tile, Ehat in enumerate(carried):
        bm.store_transposed(w_tile.at[:, pl.ds(tile * ROWS, ROWS)], on.product((on.operand("a", Ehat), M_T)).astype(op))
    bm.copy_buffers_out(
        [
            (q_tile, qhat.at[head, n]),
            (k_tile, ktil.at[head, n]),
            (w_tile, W.at[head, n]),
            (p_tile.at[pl.ds(C, C)], P.at[head, n]),
            (m_tile.at[pl.ds(0, C)], M.at[head, n]),
            (decay_row, decay.at[head, n, 0]),
        ]
    )
    for slab in range(sizes.bv // ROWS):
        columns = pl.ds(slab * ROWS, ROWS)
        value = beta_of * bm.load_transposed(v_tile.at[:, columns]).astype(f32)
        Y = on.product((on.operand("b", value), M_T)).astype(op)
        bm.copy_out(Y, y_tile, y.at[head, n, columns], unread=0)
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
    op, shape = q.dtype, jax.ShapeDtypeStruct
    outputs = [shape((heads, nt, C, C), op)] * 2
    outputs += [shape((heads, nt, C, bk), op)] * 3
    outputs += [shape((heads, nt, bv, C), op), shape((heads, nt, 1, bk), jnp.float32)]
    scratch: dict[str, Any] = {
        "q_tile": bm.tiles((C, bk), op),
        "k_tile": bm.tiles((C, bk), op),
        "g_tile": bm.rows((C, bk), jnp.float32),
        "v_tile": bm.tiles((C, bv), op),
        "w_tile": bm.tiles((C, bk), op),
        "y_tile": bm.tiles((ROWS, C), op, 2 * C),
        "all_rows": bm.tiles((ROWS, ROWS), op),
        "near_rows": bm.tiles((ROWS, ROWS), op),
        "near_keys": bm.tiles((C, ROWS), op),
        "far_keys": bm.tiles((C, ROWS), op),
        "p_tile": bm.tiles((ROWS, C), op, 2 * C),
        "m_tile": bm.tiles((ROWS, C), op, 2 * C),
        "m_rows": bm.rows((ROWS, C), jnp.float32),
        "beta_row": bm.rows((C,), jnp.float32),
        "decay_row": bm.rows((bk,), jnp.float32),
        "loaded": bm.barriers(None, 5),
    }
    scratch |= tile_scratch(C, op, interpret)
    body = functools.partial(
        _kda_prepare, sizes=sizes, scale=scale, limit=FAST_LIMIT["16bit"], op=op, always_exact=config.always_exact,
        interpret=interpret,
    )  # fmt: skip
    return bm.launch(
        body, "kda_prepare", [q, k, v, g.astype(jnp.float32), beta_rows(beta, sizes)], outputs, scratch,
        programs=heads * nt, cluster=1, warpgroups=1, interpret=interpret,
    )  # fmt: skip
