"""The kernels of one chunk for Hopper, on Pallas's Mosaic GPU backend, for KDA with bfloat16 operands: inputs and
results of `kda_prepare` that is given P and M, and of `kda_grads`; names as in `forward` and `backward`.

Key channels give the rows of every product: a program holds 64 of them, as tiles [64, C] with the chunk's tokens along
the columns, so that decayed keys and queries are left operands straight from registers. Sums over tokens are products
with 0/1 matrices in shared memory, sums over key channels stay in float32. The value side, dR, dP and dA, is formed by
every program of a chunk and written by the first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import FAST_LIMIT
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.mosaic_packing import of_chunks, row_scratch
from pallas_kernels.kda.mosaic_raw import Gate, gate_rows, strength
from pallas_kernels.kda.mosaic_tiles import (
    HALVES,
    ROWS,
    Tiles,
    beta_rows,
    check_sizes,
    exp,
    halving_masks,
    tile_scratch,
)
from pallas_kernels.kda.raw import Raw
from pallas_kernels.kda.sizes import Packing, Sizes


@of_chunks
def _kda_grads(
    q, k, v, g, do, beta, M, S, dS, U, dU, decay, halvings, *refs,
    sizes: Sizes, raw: Raw, scale: float, limit: float, op, always_exact: bool, interpret: bool, span_of: Any,
    q_tile, k_tile, g_tile, v_tile, both, m_tile, s_tile, ds_tile, u_tile, du_tile, beta_row, decay_row,
    masks, near, far, loaded, given_g: Any = None, row_sums: Any = None, gate_rows: Any = None,
    row_tile: Any = None, **left,
):  # fmt: skip
    """refs: o and norms where q and k come raw; exp(A_log) and dt_bias where g does; the results dq, dk, dv, dg, dbeta;
    and what the chunk adds to dA_log and ddt_bias, by key channel, where g comes raw."""
    o, norms, gate, refs = raw_refs(refs, raw)
    dq, dk, dv, dg, dbeta, *dgate = refs
    C, tiles, nt, HV, bv = sizes.C, sizes.bk // ROWS, sizes.nt, sizes.HV, sizes.bv
    tile = lax.rem(bm.program(), tiles)
    n = lax.rem(lax.div(bm.program(), tiles), nt)
    head = lax.div(bm.program(), tiles * nt)
    b, h, span, channels = lax.div(head, HV), lax.rem(head, HV), span_of(n), pl.ds(tile * ROWS, ROWS)
    tokens = span.tokens
    shape = (ROWS, C)
    f32 = jnp.float32
    early = raw.gate or sizes.packed
    if early and g.dtype != f32:  # They share memory: g is read before `near` is written, dg written afterwards.
        near, given_g = near
    elif sizes.packed:
        near, row_tile = near
    given_g = g_tile if given_g is None else given_g
    row_tile = given_g if row_tile is None else row_tile

    copies = [
        (q.at[b, tokens, h, channels], q_tile), (k.at[b, tokens, h, channels], k_tile),
        (g.at[b, tokens, h, channels], given_g), (v.at[b, tokens, h], v_tile),
        (do.at[b, tokens, h], both.at[pl.ds(0, C)]),
        (M.at[head, n], m_tile), (S.at[head, n, :, channels], s_tile), (dS.at[head, n, :, channels], ds_tile),
        (U.at[head, n], u_tile), (dU.at[head, n], du_tile), (beta.at[head, n], beta_row),
        (decay.at[head, n, 0, channels], decay_row),
    ]  # fmt: skip
    if raw.l2norm:  # o lies where dR comes later
        copies += [(o.at[b, tokens, h], both.at[pl.ds(C, C)]), (norms.at[head, n], row_sums.at[0, pl.ds(0, 2 * C)])]
    if raw.gate:
        copies += [(gate.at[h, :, channels], gate_rows)]
    for source, target in copies:
        bm.copy_in(source, target, loaded)

    on = Tiles(C, op, interpret, masks, left)
    on.write_masks()
    operand, product, sums = on.operand, on.product, on.sums
    row, col = on.row, on.col
    gates = Gate.of_rows(raw, gate_rows, span.inside(col))

    bm.commit()
    bm.wait(loaded)
    of_tokens = [q_tile, k_tile, given_g, v_tile, both.at[pl.ds(0, C)]]
    span.keep(*of_tokens, *([both.at[pl.ds(C, C)]] if raw.l2norm else []))

    # The value side. Rows of `both` below C: do. Those from C on: dR.
    beta_of = bm.load_row(beta_row, shape)
    P, A = pl.ds(0, C), pl.ds(C, C)
    slabs = [pl.ds(s * ROWS, ROWS) for s in range(bv // ROWS)]
    value_share, diagonals = bm.row_zeros(C), raw.l2norm or raw.gate
    if diagonals:  # Sums over value columns are diagonals of products.
        of_slabs = [[(bm.transpose(du_tile.at[:, rows]), m_tile)] for rows in slabs]
        if raw.l2norm:  # o is linear in q, so that q . dq is o . do.
            do_o, *dR = on.products([(both, bm.transpose(both.at[A]))], *of_slabs)
        else:
            dR = on.products(*of_slabs)
        for rows, x in zip(slabs, dR, strict=True):
            bm.store_transposed(both.at[A, rows], x.astype(op))
        bm.commit()
        D, dR_v = on.products([(both, bm.transpose(u_tile))], [(both, bm.transpose(v_tile))])
        for rows, x in zip(slabs, dR, strict=True):
            bm.store_transposed(v_tile.at[:, rows], (beta_of * x).astype(op))
    else:
        for rows in slabs:
            dR = product((bm.transpose(du_tile.at[:, rows]), m_tile))
            bm.store_transposed(both.at[A, rows], dR.astype(op))
            value_share += jnp.sum(bm.load_transposed(v_tile.at[:, rows]).astype(f32) * dR, axis=0)
            bm.store_transposed(v_tile.at[:, rows], (beta_of * dR).astype(op))
        bm.commit()
        D = product((both, bm.transpose(u_tile)))

    # Rows i below C: dP_ij. Rows from C on: dR_i U_j = -dA_ij.
    i = lax.rem(row, C)
    in_block = lax.div(i, BLOCK) == lax.div(col, BLOCK)
    D = jnp.where(row < C, D, -D)
    D = jnp.where(row < 2 * C, D, 0.0)
    if early:
        gT = gates.log_decay(bm.load_transposed(given_g).astype(f32))
        bm.commit()
    near[...] = jnp.where(in_block & (i > col), D, 0.0).astype(op)
    far[...] = jnp.where(lax.div(i, BLOCK) > lax.div(col, BLOCK), D, 0.0).astype(op)
    if diagonals:
        for which, x in ((1, D), (2, jnp.where(row < C, do_o, dR_v) if raw.l2norm else dR_v)):
            row_sums.at[which][...] = jnp.sum(jnp.where(i == col, x, 0.0), axis=1)
    else:
        on_diagonal = jnp.sum(jnp.where(row == col, D, 0.0), axis=0)
    bm.commit()

    # The key side. Its order keeps few tiles alive at a time.
    if not early:
        gT = gates.log_decay(bm.load_transposed(given_g).astype(f32))
    bm.store_transposed(g_tile, D)  # For slow rows, once `near` has been read.
    bm.commit()
    S_T, do_T, dR_T = bm.transpose(s_tile), bm.transpose(both.at[P]), bm.transpose(both.at[A])

    def sums_row(which, part):
        return bm.load_row(row_sums.at[which, A if part else P], shape)

    def normalised(tile, which):
        x = bm.load_transposed(tile).astype(f32)
        return x * sums_row(0, which) if raw.l2norm else x

    kT = normalised(k_tile, 1)
    blocks = C > BLOCK

    def rounded(x):
        """x as operands have it; behind a barrier, for the compiler would read one by one what it has just packed."""
        return bm.settled(x.astype(op))

    (suffix,) = sums(gT, "suffix")
    down = exp(suffix)
    end = rounded(kT * down)
    acc_k = product((bm.transpose(ds_tile), bm.transpose(u_tile)))
    if blocks:
        acc_k *= exp(sums(gT, "rest")[0])
    leaving = jnp.sum(end.astype(f32) * acc_k, axis=1)
    squares = product((S_T, ds_tile), n=ROWS)
    big_row, big_col = bm.indices((ROWS, ROWS))
    leaving += jnp.sum(jnp.where(big_row == big_col, squares, 0.0), axis=1) * bm.load_column(decay_row)

    (prefix,) = sums(gT, "prefix")
    up, anchor = exp(prefix), exp(jnp.minimum(-prefix, limit))
    slow = jnp.max(-prefix, axis=0) > limit
    fast = bm.spread_columns(jnp.where(slow, 0.0, 1.0), shape)
    E, far_key = rounded(beta_of * kT * up), rounded(kT * anchor)
    Q = rounded(normalised(q_tile, 0) * scale * up)
    base = exp(sums(gT, "base")[0]) if blocks else 1.0

    def earlier(total, part):
        """Sums over earlier keys, of S and then of every pair of the chunk."""
        total *= base
        if blocks:
            total = product((operand("a", end), bm.transpose(far.at[part])), start=total)
        return total + fast * product((operand("a", far_key), bm.transpose(near.at[part])))

    acc = earlier(product((S_T, do_T)), P)
    dG, dqT = Q.astype(f32) * acc, up * acc
    acc = earlier(-product((S_T, dR_T)), A)
    dG, deT = dG + E.astype(f32) * acc, up * acc
    if blocks:
        acc_k = product((operand("a", E), far.at[A]), (operand("b", Q), far.at[P]), start=acc_k)
    acc = product((operand("a", fast * E), near.at[A]), (operand("b", fast * Q), near.at[P]))
    dG -= end.astype(f32) * acc_k + far_key.astype(f32) * acc
    dkT = down * acc_k + anchor * acc

    def halve(step, carry):
        """Pairs of tokens in the two halves of a block of 16, 8, 4 or 2, whose later one is a slow row: they decay from
        the one to the middle and from there to the other."""
        dqT, deT, dkT, dG = carry
        to_middle, across = (bm.load(halvings.at[step, which]) for which in range(2))
        on.masks.at[0][...] = to_middle
        near[...] = jnp.where(across.astype(f32) > 0.5, bm.load_transposed(g_tile), 0.0).astype(op)
        bm.commit()
        decay = exp(sums(gT, "to_middle")[0])
        key = normalised(k_tile, 1) * decay
        key, Q, E = (
            rounded(key),
            rounded(normalised(q_tile, 0) * scale * decay),
            rounded(bm.load_row(beta_row, shape) * key),
        )
        of_slow = 1.0 - fast
        acc = of_slow * product((operand("a", key), bm.transpose(near.at[P])))
        dG, dqT = dG + Q.astype(f32) * acc, dqT + decay * acc
        acc = of_slow * product((operand("a", key), bm.transpose(near.at[A])))
        dG, deT = dG + E.astype(f32) * acc, deT + decay * acc
        acc = product((operand("a", of_slow * E), near.at[A]), (operand("b", of_slow * Q), near.at[P]))
        return dqT, deT, dkT + decay * acc, dG - key.astype(f32) * acc

    any_slow = jnp.max(jnp.where(slow, 1.0, 0.0)) > 0.5
    steps = len(HALVES) if always_exact else any_slow.astype(jnp.int32) * len(HALVES)
    dqT, deT, dkT, dG = lax.fori_loop(0, steps, halve, (dqT, deT, dkT, dG))

    qT = normalised(q_tile, 0) * scale
    diagonal = sums_row(1, 0) if diagonals else bm.spread_columns(on_diagonal, shape)
    (later,) = sums(dG, ("suffix", "rest") if C > BLOCK else "suffix")
    share = jnp.sum(kT * deT, axis=0)

    def dq_of_tile():
        found = scale * (dqT + diagonal * kT)
        if not raw.l2norm:
            return found
        # q . dq and k . dk over all channels, of which a program has a part, from the value side. qT is scaled, and so
        # is o; without a scale o is 0, and so is the sum.
        return (found - qT * (sums_row(2, 0) * (1.0 / scale if scale else 0.0))) * sums_row(0, 0)

    def dk_of_tile():
        found = dkT + diagonal * qT + beta_of * deT
        if not raw.l2norm:
            return found
        return (found + kT * (beta_of * sums_row(2, 1) + 2.0 * sums_row(1, 1))) * sums_row(0, 1)

    def dg_of_tile():
        return dG + later + bm.spread_rows(leaving, shape)

    if raw.gate:
        dgT, dA_share, bias_share = gates.gradients(gT, dg_of_tile())
    # Results take the place of the inputs that they belong to, once every warp has read the last of those.
    bm.commit()
    bm.store_transposed(q_tile, dq_of_tile().astype(op))
    bm.store_transposed(k_tile, dk_of_tile().astype(op))
    bm.store_transposed(given_g, (dgT if raw.gate else dg_of_tile()).astype(given_g.dtype))
    if diagonals:
        value_share = bm.load_line(row_sums.at[2, A])
    beta_row[...] = share + jnp.where(tile == 0, 1.0, 0.0) * value_share
    if raw.gate:
        gate_rows.at[0][...], gate_rows.at[1][...] = dA_share, bias_share
    of_tokens = [
        (x, ref.at[b, tokens, h, channels], lambda token, ref=ref: ref.at[b, token, h, channels])
        for x, ref in ((q_tile, dq), (k_tile, dk), (given_g, dg))
    ]
    outputs = [(beta_row, dbeta.at[head, tile, n])]
    if raw.gate:
        outputs.append((gate_rows, dgate[0].at[head, n, :, channels]))
    span.copy_out(of_tokens, outputs, row_tile)

    @pl.when(tile == 0)
    def _():
        span.copy_out([(v_tile, dv.at[b, tokens, h], lambda token: dv.at[b, token, h])], [], row_tile)

    bm.finish_copies_out()


@of_chunks
def _kda_prepare(
    q, k, v, g, beta, M, *refs,
    sizes: Sizes, raw: Raw, scale: float, op, interpret: bool, span_of: Any,
    q_tile, k_tile, g_tile, v_tile, m_tile, w_tile, y_tile, beta_row, decay_row, masks, loaded,
    norm_rows: Any = None, gate_rows: Any = None, **left,
):  # fmt: skip
    """refs: norms where q and k come raw, exp(A_log) and dt_bias where g does; the results W, Qhat, Ktil, Y, decay."""
    _, norms, gate, refs = raw_refs(refs, raw, with_o=False)
    W, qhat, ktil, y, decay = refs
    C, tiles, nt, HV = sizes.C, sizes.bk // ROWS, sizes.nt, sizes.HV
    slabs = sizes.bv // ROWS
    tile = lax.rem(bm.program(), tiles)
    n = lax.rem(lax.div(bm.program(), tiles), nt)
    head = lax.div(bm.program(), tiles * nt)
    b, h, span, channels = lax.div(head, HV), lax.rem(head, HV), span_of(n), pl.ds(tile * ROWS, ROWS)
    tokens = span.tokens
    copies = [
        (q.at[b, tokens, h, channels], q_tile), (k.at[b, tokens, h, channels], k_tile),
        (g.at[b, tokens, h, channels], g_tile), (v.at[b, tokens, h], v_tile), (M.at[head, n], m_tile),
        (beta.at[head, n], beta_row),
    ]  # fmt: skip
    copies += [(norms.at[head, n], norm_rows)] if raw.l2norm else []
    copies += [(gate.at[h, :, channels], gate_rows)] if raw.gate else []
    for source, target in copies:
        bm.copy_in(source, target, loaded)
    on = Tiles(C, op, interpret, masks, left)
    on.write_masks()
    bm.commit()
    bm.wait(loaded)
    span.keep(q_tile, k_tile, g_tile, v_tile)
    gates = Gate.of_rows(raw, gate_rows, span.inside(on.col))

    shape, M_T = (ROWS, C), bm.transpose(m_tile)
    f32 = jnp.float32
    beta_of = bm.load_row(beta_row, shape)
    gT = gates.log_decay(bm.load_transposed(g_tile).astype(f32))
    prefix, suffix = on.sums(gT, "prefix", "suffix")
    up, down = exp(prefix), exp(suffix)
    if C > BLOCK:
        base, rest = on.sums(gT, "base", "rest")
        up, down = up * exp(base), down * exp(rest)
    kT, qT = bm.load_transposed(k_tile).astype(f32), bm.load_transposed(q_tile).astype(f32)
    if raw.l2norm:
        kT, qT = kT * bm.load_row(norm_rows.at[pl.ds(C, C)], shape), qT * bm.load_row(norm_rows.at[pl.ds(0, C)], shape)
    W_T = on.product((on.operand("a", beta_of * kT * up), M_T))
    decay_row[...] = jnp.sum(jnp.where(on.col == C - 1, up, 0.0), axis=1)
    bm.store_transposed(w_tile, W_T.astype(op))
    bm.store_transposed(q_tile, (qT * scale * up).astype(op))
    bm.store_transposed(k_tile, (kT * down).astype(op))
    bm.copy_buffers_out(
        [
            (w_tile, W.at[head, n, :, channels]),
            (q_tile, qhat.at[head, n, :, channels]),
            (k_tile, ktil.at[head, n, :, channels]),
            (decay_row, decay.at[head, n, 0, channels]),
        ]
    )
    for turn in range(-(-slabs // tiles)):
        slab = tile + turn * tiles

        @pl.when(slab < slabs)
        def _(slab=slab):
            columns = pl.ds(slab * ROWS, ROWS)
            value = bm.load_transposed(v_tile.at[:, columns]).astype(f32)
            left_y = on.operand("b", beta_of * value)
            bm.copy_out(on.product((left_y, M_T)).astype(op), y_tile, y.at[head, n, columns], unread=0)

    bm.finish_copies_out()


def raw_refs(refs: Sequence[Any], raw: Raw, *, with_o: bool = True) -> tuple[Any, Any, Any, list[Any]]:
    """o, norms and the gate's rows, None where they are no inputs, and the refs that follow."""
    rest = list(refs)
    o = rest.pop(0) if raw.l2norm and with_o else None
    norms = rest.pop(0) if raw.l2norm else None
    return o, norms, rest.pop(0) if raw.gate else None, rest


def _raw_inputs(raw: Raw, sizes: Sizes, matrices, A_log, dt_bias, o=None) -> tuple[list[jax.Array], dict[str, Any]]:
    """What the kernels take besides where inputs come raw, and the scratch for it."""
    inputs: list[jax.Array] = [] if o is None else [o]
    scratch: dict[str, Any] = {}
    if raw.l2norm:  # The norms of a chunk's queries, and then of its keys.
        norms = matrices[2].swapaxes(-1, -2)
        inputs.append(norms.reshape(*norms.shape[:2], 2 * sizes.C))
    if raw.gate:
        inputs.append(gate_rows(A_log, dt_bias, sizes))
        scratch["gate_rows"] = bm.rows((2, ROWS), jnp.float32)
    return inputs, scratch


def prepare(
    q, k, v, g, beta, matrices, A_log=None, dt_bias=None,
    *, scale, config: KdaConfig, interpret, raw: Raw, packing: Packing | None = None,
):  # fmt: skip
    """Runs the Hopper `kda_prepare` on P, M and norms of an earlier run; returns W, Qhat, Ktil, Y and decay as
    `forward.Prepared` has them.

    Raises:
      ValueError: for other than bfloat16, K of 64 or 128, V of 64, 128 or 256, one value head a key head, and T a
        multiple of 8.
    """
    sizes = Sizes.of(q, v, beta, config, packing)
    check_sizes(sizes, q, k, v)
    heads, C, bk, bv, nt = sizes.B * sizes.HV, sizes.C, sizes.bk, sizes.bv, sizes.nt
    op, shape = q.dtype, jax.ShapeDtypeStruct
    inputs = [q, k, v, g, beta_rows(strength(beta, raw), sizes, packing), matrices[1]]
    more, scratch = _raw_inputs(raw, sizes, matrices, A_log, dt_bias)
    scratch |= {"norm_rows": bm.rows((2 * C,), jnp.float32)} if raw.l2norm else {}
    inputs += more
    copies = len(inputs)
    inputs = inputs if packing is None else [packing.rows, *inputs]
    outputs = [shape((heads, nt, C, bk), op)] * 3
    outputs += [shape((heads, nt, bv, C), op), shape((heads, nt, 1, bk), jnp.float32)]
    scratch |= {
        "q_tile": bm.tiles((C, ROWS), op),
        "k_tile": bm.tiles((C, ROWS), op),
        "g_tile": bm.rows((C, ROWS), jnp.float32) if g.dtype == jnp.float32 else bm.tiles((C, ROWS), g.dtype),
        "v_tile": bm.tiles((C, bv), op),
        "m_tile": bm.tiles((C, C), op, 2 * C),
        "w_tile": bm.tiles((C, ROWS), op),
        "y_tile": bm.tiles((ROWS, C), op, 2 * C),
        "beta_row": bm.rows((C,), jnp.float32),
        "decay_row": bm.rows((ROWS,), jnp.float32),
        "loaded": bm.barriers(None, copies),
    }
    scratch |= tile_scratch(C, op, interpret)
    return bm.launch(
        functools.partial(_kda_prepare, sizes=sizes, raw=raw, scale=scale, op=op, interpret=interpret), "kda_prepare",
        inputs, outputs, scratch, programs=heads * nt * (bk // ROWS), cluster=1, warpgroups=1, interpret=interpret,
    )  # fmt: skip


def gradients(
    prepared, states, dS, dU, q, k, v, g, beta, do, A_log=None, dt_bias=None, o=None,
    *, scale, config: KdaConfig, interpret, raw: Raw, packing: Packing | None = None,
):  # fmt: skip
    """Runs the Hopper `kda_grads`; returns dq, dk, dv, dg, dbeta, dA_log and ddt_bias as `backward.gradients` does. o,
    the forward's output, is needed where q and k come raw.

    Raises:
      ValueError: for other than bfloat16, K of 64 or 128, V of 64, 128 or 256, one value head a key head, and T a
        multiple of 8.
    """
    sizes = Sizes.of(q, v, beta, config, packing)
    check_sizes(sizes, q, k, v, do)
    heads, C, bk, bv, nt = sizes.B * sizes.HV, sizes.C, sizes.bk, sizes.bv, sizes.nt
    tiles, op, shape = bk // ROWS, prepared.W.dtype, jax.ShapeDtypeStruct
    dtype_of_g = g.dtype
    if packing is not None and g.dtype != op:  # A row of a packed g leaves in one of two dtypes.
        g = g.astype(jnp.float32)
    betas = strength(beta, raw)
    inputs = [q, k, v, g, do, beta_rows(betas, sizes, packing), prepared.M, states.S, dS, states.U, dU, prepared.decay]
    matrices = prepared.P, prepared.M, prepared.norms
    more, scratch = _raw_inputs(raw, sizes, matrices, A_log, dt_bias, o if raw.l2norm else None)
    copies = len(inputs) + len(more)
    inputs += [jnp.asarray(halving_masks(C), op), *more]
    inputs = inputs if packing is None else [packing.rows, *inputs]
    outputs = [shape(x.shape, x.dtype) for x in (q, k, v)]
    # With one head, a float32 tile of 64 channels is contiguous.
    outputs.append(shape(bm.whole_tiles(g.shape, 1, C) if sizes.HV == 1 else g.shape, g.dtype))
    outputs.append(shape((heads, tiles, nt, C), jnp.float32))
    outputs += [shape((heads, nt, 2, bk), jnp.float32)] if raw.gate else []
    within = 2 * C
    scratch |= {
        "q_tile": bm.tiles((C, ROWS), op),
        "k_tile": bm.tiles((C, ROWS), op),
        "g_tile": bm.rows((C, ROWS), jnp.float32),
        "v_tile": bm.tiles((C, bv), op),
        "both": bm.tiles((ROWS, bv), op),
        "m_tile": bm.tiles((C, C), op, within),
        "s_tile": bm.tiles((bv, ROWS), op),
        "ds_tile": bm.tiles((bv, ROWS), op),
        "u_tile": bm.tiles((C, bv), op),
        "du_tile": bm.tiles((C, bv), op, within),
        "beta_row": bm.rows((C,), jnp.float32),
        "decay_row": bm.rows((ROWS,), jnp.float32),
        "near": bm.tiles((ROWS, C), op, within),
        "far": bm.tiles((ROWS, C), op, within),
        "loaded": bm.barriers(None, copies),
    }
    # Norms, and two rows of sums.
    scratch |= {"row_sums": bm.rows((3, ROWS), jnp.float32)} if raw.l2norm or raw.gate else {}
    # Rows of packed sequences go through a plain tile, which is that of a 16-bit g. What more shared memory they took
    # would be that of a multiprocessor's second program.
    more = row_scratch(sizes, op)
    if g.dtype != jnp.float32:
        more = {"given_g": (bm.rows if sizes.packed else bm.tiles)((C, ROWS), g.dtype)}
    if raw.gate or sizes.packed:
        scratch |= {"near": bm.one_of(scratch["near"], *more.values())} if more else {}
    else:
        scratch |= more
    scratch |= tile_scratch(C, op, interpret)
    body = functools.partial(
        _kda_grads, sizes=sizes, raw=raw, scale=scale, limit=FAST_LIMIT["16bit"], op=op,
        always_exact=config.always_exact, interpret=interpret,
    )  # fmt: skip
    dq, dk, dv, dg, shares, *dgate = bm.launch(
        body, "kda_grads", inputs, outputs, scratch, programs=heads * nt * tiles, cluster=1, warpgroups=1,
        interpret=interpret,
    )  # fmt: skip
    dbeta = shares.sum(axis=1)
    if packing is None:
        dbeta = dbeta.reshape(sizes.B, sizes.HV, nt * C)[..., : sizes.T].swapaxes(1, 2)
    else:
        dbeta = packing.from_chunks(jnp.moveaxis(dbeta, 0, 2), sizes.T)[None]
    dbeta = dbeta * betas * (1.0 - betas / raw.strength) if raw.beta else dbeta
    dA_log = ddt_bias = None
    if raw.gate:
        of_heads = dgate[0].reshape(sizes.B, sizes.HV, nt, 2, bk)
        if packing is not None:  # A slot that is not used leaves no share.
            used = packing.rows[:, 0] < packing.rows[:, 1]
            of_heads = jnp.where(used[:, None, None], of_heads, 0.0)
        dA_log = None if A_log is None else of_heads[..., 0, :].sum(axis=(0, 2, 3)).astype(A_log.dtype)
        ddt_bias = None if dt_bias is None else of_heads[..., 1, :].sum(axis=(0, 2)).reshape(-1).astype(dt_bias.dtype)
    return dq, dk, dv, dg[:, : sizes.T].astype(dtype_of_g), dbeta.astype(beta.dtype), dA_log, ddt_bias
