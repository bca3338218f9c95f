"""Backward kernels of KDA and of the general rule, with the names of `forward`.

Given do and dS1, the gradient of the state leaving a chunk:

    dU  = P^T do + Ktil dS1                  dR = M^T dU     (R = y - Ehat S0)
    dS0 = diag(exp(G_C)) dS1 + Qhat^T do - W^T dU
    dP  = tril(do U^T)                       dA = -stril(dR U^T)
    dy  = dR
    dq_i = scale exp(G_i) (S0 do_i) + scale sum_{j<=i} dP_ij k_j exp(G_i - G_j)
    de_i = -exp(G_i) (S0 dR_i) + sum_{j<i} dA_ij k_j exp(G_i - G_j)
    dk_j = exp(G_C - G_j) (dS1 U_j) + sum_{i>j} dA_ij e_i exp(G_i - G_j) + scale sum_{i>=j} dP_ij q_i exp(G_i - G_j) +
    erase_j de_j
    dG_i = q_i dq_i + e_i de_i - k_i dk_i    without the terms i == j and before de is folded into dk
    dg   = reverse cumulative sum of dG, plus exp(G_C) rowsum(S0 * dS1) + sum_j Ktil_j (dS1 U_j) at the last row

`kda_state_bwd` walks over the chunks backwards with dS^T in registers and leaves dS1 and dU of every chunk.
`kda_grads` forms all
gradients of a chunk, all chunks in parallel. dg is a difference of large sums: both sides use the same rounded
operands, so that what cancels in exact arithmetic cancels here too.

Where queries and keys come raw, x = norm * n, their gradients are (dn - n (n . dn)) / norm, a sum over all key channels
of which a program holds a tile. The value side has both sums whole:

    q_i . dq_i = o_i . do_i        since o_i is linear in q_i
    k_i . dk_i = (2 U_i - y_i) . dR_i        U_i . dR_i from k_i as the key that is written, the rest is e_i . de_i
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.blocks import FAST_LIMIT, Decays, MaskedSum, iotas, take_row
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.forward import (
    V_SLAB,
    Prepared,
    Segments,
    States,
    chunk_rows,
    diagonal_dot,
    launched,
    load_state,
    of_used_chunks,
    segment_chunks,
    segment_starts,
    state_dot,
)
from pallas_kernels.kda.raw import NOTHING_RAW, Raw
from pallas_kernels.kda.sizes import Packing, Sizes, operand_dtype
from pallas_kernels.kda.tokens import Inputs, Tokens


def kda_state_bwd(
    do_ref, w_ref, qhat_ref, ktil_ref, p_ref, decay_ref, packing: Packing | None, *refs,
    sizes: Sizes, v_tile: int, segments: int, precision: str, has_final: bool, has_initial: bool, interpret: bool,
):  # fmt: skip
    """Walks backwards over a segment, a tile of dS^T, [v_tile, bk], in registers. Grid (V tiles, segments, sequences *
    HV).

    refs: the gradients that segments end with (segments > 1) or dfinal_state (if has_final); then dS, dU, and
    dinitial_state if has_initial.
    """
    refs = list(refs)
    end_ref = refs.pop(0) if segments > 1 or has_final else None
    ds_ref, du_ref = refs[:2]
    op = ds_ref.dtype
    dot = Dot(precision, interpret)
    first, segment = pl.program_id(0) * v_tile, pl.program_id(1)
    k_rows, vc = sizes.k_cols(), sizes.v_cols(first, v_tile)
    full_k, full_c, tile = pl.ds(0, sizes.bk), pl.ds(0, sizes.C), pl.ds(first, v_tile)
    begin, end, rows = segment_chunks(sizes, packing, segment, segments)

    def step(s, dS):
        n = end - 1 - s
        dSo = dS.astype(op)
        ds_ref[n, tile, full_k] = dSo
        do = bt.load_tile(do_ref, rows(n), vc).astype(op).T
        dU = dot(do, p_ref[n, full_c, full_c]) + dot(dSo, ktil_ref[n, full_c, full_k], (1, 1))
        dUo = dU.astype(op)
        du_ref[n, full_c, tile] = dUo.T
        decayed = dS * decay_ref[n, 0, full_k][None, :]
        return decayed + dot(do, qhat_ref[n, full_c, full_k]) - dot(dUo, w_ref[n, full_c, full_k])

    if segments > 1:
        dS = bt.load_tile(end_ref, (first, v_tile, None), (0, sizes.bk, None))
    else:
        dS = load_state(end_ref, k_rows, vc, (v_tile, sizes.bk))
    dS = lax.fori_loop(0, end - begin, step, dS)
    if has_initial:

        @pl.when(segment == 0)
        def _():
            bt.store_tile(refs[2], k_rows, vc, dS.T)


def kda_segment_bwd(
    do_ref, w_ref, qhat_ref, ktil_ref, p_ref, decay_ref, map_ref, added_ref,
    *, sizes: Sizes, v_tile: int, segments: int, precision: str, interpret: bool,
):  # fmt: skip
    """dS at a segment's start when it is zero at its end, over the D^T of `kda_segment`. Grid (V tiles, segments, B *
    HV)."""
    op = ktil_ref.dtype
    dot = Dot(precision, interpret)
    first, segment = pl.program_id(0) * v_tile, pl.program_id(1)
    full_k, full_c, all_k = pl.ds(0, sizes.bk), pl.ds(0, sizes.C), (0, sizes.bk, None)
    begin, end, rows = segment_chunks(sizes, None, segment, segments)

    def step(s, dS):
        n = end - 1 - s
        do = bt.load_tile(do_ref, rows(n), sizes.v_cols(first, v_tile)).astype(op).T
        dU = dot(do, p_ref[n, full_c, full_c]) + dot(dS.astype(op), ktil_ref[n, full_c, full_k], (1, 1))
        decayed = dS * decay_ref[n, 0, full_k][None, :]
        return decayed + dot(do, qhat_ref[n, full_c, full_k]) - dot(dU.astype(op), w_ref[n, full_c, full_k])

    dS = lax.fori_loop(0, end - begin, step, jnp.zeros((v_tile, sizes.bk), jnp.float32))
    bt.store_tile(added_ref, (first, v_tile, None), all_k, dS)
    # D^T is copied along, a share of its rows by each program, so that the combination reads one array like the
    # forward's.
    share = sizes.bk * v_tile // sizes.bv
    shared = (sizes.bv + pl.program_id(0) * share, share, None)
    bt.store_tile(added_ref, shared, all_k, bt.load_tile(map_ref, shared, all_k))


def kda_combine_bwd(
    map_ref, *refs, sizes: Sizes, v_tile: int, segments: int, has_initial: bool, precision: str, interpret: bool
):
    """dS at the end of every segment, transposed: the mirror image of `kda_combine`, with D in place of D^T."""
    refs = list(refs)
    final_ref = refs.pop(0) if has_initial else None
    dot = state_dot(precision, interpret)
    first = pl.program_id(0) * v_tile
    all_k, height = (0, sizes.bk, None), sizes.bv + sizes.bk
    dS = load_state(final_ref, sizes.k_cols(), sizes.v_cols(first, v_tile), (v_tile, sizes.bk))
    for segment in reversed(range(segments)):
        bt.store_tile(refs[0], (segment * sizes.bv + first, v_tile, None), all_k, dS)
        if segment > 0:
            added = bt.load_tile(map_ref, (segment * height + first, v_tile, None), all_k)
            dS = added + dot(dS, bt.load_tile(map_ref, (segment * height + sizes.bv, sizes.bk, None), all_k), (1, 1))


@of_used_chunks(axis=1)
def kda_grads(
    x: Inputs, packing: Packing | None, do_ref, m_ref, s_ref, ds_ref, u_ref, du_ref, decay_ref, *refs,
    sizes: Sizes, raw: Raw, scale: float, k_tile: int, precision: str, always_exact: bool, interpret: bool,
):  # fmt: skip
    """All gradients of one chunk of one value head, for one tile of key channels. Grid (K tiles, NT, B * HV).

    What belongs to the value side is formed by every program and written by the first one; beta's gradient is written
    in shares, and so are those of A_log (a share a channel) and dt_bias.
    refs: norms and o where q and k come raw; dq, dk, dv, dg, derase; dwrite of the general rule; the shares of dA_log
    and ddt_bias where g comes raw.
    """
    refs = list(refs)
    norm_ref, o_ref = (refs.pop(0), refs.pop(0)) if raw.l2norm else (None, None)
    dq_ref, dk_ref, dv_ref, dg_ref, derase_ref, *refs = refs
    dwrite_ref = refs.pop(0) if sizes.channelwise else None
    op = operand_dtype(x.q.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    f32 = jnp.float32
    row, col = iotas()
    tile, (start, limit) = pl.program_id(0), chunk_rows(sizes, packing, pl.program_id(1))
    kc, nb = (tile * k_tile, k_tile, sizes.k_limit), sizes.blocks
    slab = min(sizes.bv, V_SLAB)
    slabs = range(0, sizes.bv, slab)
    padded_k = (tile * k_tile, k_tile, None)
    tokens = Tokens(x, norm_ref, sizes, raw, start, limit, kc, precision, interpret)
    rows = tokens.rows

    def local(r):
        return (r * BLOCK, BLOCK, None)

    # The value side: dR, dv, dwrite, and the 16 x 16 blocks of dP and dA.
    dP = {(a, b): jnp.zeros((BLOCK, BLOCK), jnp.float32) for a in range(nb) for b in range(a + 1)}
    dA = dict(dP)
    dbeta = [jnp.zeros((BLOCK, 1), jnp.float32) for _ in range(nb)]
    y_dR = list(dbeta)
    o_do = [jnp.zeros((BLOCK, BLOCK), jnp.float32) for _ in range(nb)]
    dR: dict[tuple[int, int], jax.Array] = {}
    for first in slabs:
        vs = (first, slab, None)
        dU = [bt.load_tile(du_ref, local(a), vs) for a in range(nb)]
        U = [bt.load_tile(u_ref, local(b), vs) for b in range(nb)]
        for b in range(nb):
            part = jnp.zeros((BLOCK, slab), f32)
            for a in range(b, nb):
                part += dot(bt.load_tile(m_ref, local(a), local(b)).astype(op), dU[a], (0, 0))
            vc = sizes.v_cols(first, slab)
            v = bt.load_tile(x.v, rows(b), vc).astype(jnp.float32)
            write = tokens.write(rows(b), vc)

            @pl.when(tile == 0)
            def _(b=b, vc=vc, v=v, write=write, part=part):
                bt.store_tile(dv_ref, rows(b), vc, write * part)
                if sizes.channelwise:
                    bt.store_tile(dwrite_ref, rows(b), vc, v * part)

            if not sizes.channelwise:
                v_dR = jnp.sum(v * part, axis=1)[:, None]
                dbeta[b] += jnp.where(tile == 0, v_dR, 0.0)
            if raw.l2norm:
                y_dR[b] += jnp.sum(write * v * part, axis=1)[:, None] if sizes.channelwise else write * v_dR
            dR[b, first] = part.astype(op)
        for a in range(nb):
            do = bt.load_tile(do_ref, rows(a), sizes.v_cols(first, slab)).astype(op)
            if raw.l2norm:
                o_do[a] += dot(do, bt.load_tile(o_ref, rows(a), sizes.v_cols(first, slab)).astype(op), (1, 1))
            for b in range(a + 1):
                dP[a, b] += dot(do, U[b], (1, 1))
                dA[a, b] -= dot(dR[a, first], U[b], (1, 1))

    # The key side, blocks from last to first: dG is summed in reverse.
    K_end, block_decay = [], []  # Keys at their block's end, as operands; decay of every block.
    for r in range(nb):
        d = Decays.of(tokens.g(r), precision, interpret)
        K_end.append((tokens.k(r) * d.down).astype(op))
        block_decay.append(d.whole)

    dG_end = jnp.zeros((1, k_tile), f32)  # Reverse sum of dG over everything after the block.
    for first in slabs:
        S, dS = (bt.load_tile(x, (first, slab, None), padded_k).astype(f32) for x in (s_ref, ds_ref))
        dG_end += jnp.sum(S * dS, axis=0)[None, :]
    dG_end *= bt.load_tile(decay_ref, (0, 1, None), padded_k)
    # U dS1^T carried to the chunk's end: the pairs that leave the chunk.
    from_end = []
    for r in range(nb):
        products = (
            dot(bt.load_tile(u_ref, local(r), (f, slab, None)), bt.load_tile(ds_ref, (f, slab, None), padded_k))
            for f in slabs
        )
        from_end.append(sum(products))
    leaving = jnp.zeros((BLOCK, k_tile), f32)
    later = jnp.ones((BLOCK, k_tile), f32)
    for r in reversed(range(nb)):
        leaving += K_end[r].astype(f32) * later * from_end[r]
        later *= block_decay[r]
    dG_end += jnp.sum(leaving, axis=0)[None, :]

    share_A = share_bias = jnp.zeros((BLOCK, k_tile), f32)
    left: list = [None] * nb  # Erased keys and queries at their block's start, as operands, of the blocks after r.
    for r in reversed(range(nb)):
        k, q = tokens.k(r), tokens.q(r) * scale
        g, erase = tokens.g(r), tokens.erase(r)
        e = erase * k
        d = Decays.of(g, precision, interpret)
        E, Q, anchor = e * d.up, q * d.up, d.anchor()
        depth = d.depth()
        slow = (depth > FAST_LIMIT[precision])[:, None]
        below = row > col
        dP_rr, dA_rr = jnp.where(below, dP[r, r], 0.0), jnp.where(below, dA[r, r], 0.0)
        dPd, dAd = (jnp.where(slow, 0.0, x).astype(diagonal) for x in (dP_rr, dA_rr))
        Ed, Qd, Kd = E.astype(diagonal), Q.astype(diagonal), (k * anchor).astype(diagonal)

        # Sums over earlier keys, nearest last: every block's decay multiplies what lies before it.
        acc_q, acc_e = 0.0, 0.0
        for f in slabs:
            S = bt.load_tile(s_ref, (f, slab, None), padded_k)
            acc_q += dot(bt.load_tile(do_ref, rows(r), sizes.v_cols(f, slab)).astype(op), S)
            acc_e -= dot(dR[r, f], S)
        for b in range(r):
            acc_q = acc_q * block_decay[b] + dot(dP[r, b].astype(op), K_end[b])
            acc_e = acc_e * block_decay[b] + dot(dA[r, b].astype(op), K_end[b])
        # Sums over later queries, nearest last.
        acc_k = from_end[r]
        for a in reversed(range(r + 1, nb)):
            Ea, Qa = left[a]
            acc_k = acc_k * block_decay[a] + dot(dA[a, r].astype(op), Ea, (0, 0)) + dot(dP[a, r].astype(op), Qa, (0, 0))
        left[r] = (E.astype(op), Q.astype(op))
        near_q, near_e = dot_diagonal(dPd, Kd), dot_diagonal(dAd, Kd)
        near_k = dot_diagonal(dAd, Ed, (0, 0)) + dot_diagonal(dPd, Qd, (0, 0))

        dG = left[r][1].astype(f32) * acc_q + left[r][0].astype(f32) * acc_e - K_end[r].astype(f32) * acc_k
        dG += Qd.astype(f32) * near_q + Ed.astype(f32) * near_e - Kd.astype(f32) * near_k
        dq = d.up * (acc_q + near_q)
        de = d.up * (acc_e + near_e)
        dk = d.down * acc_k + anchor * near_k

        def exact(s, carry, *, k=k, q=q, e=e, g=g, slow=slow, dP_rr=dP_rr, dA_rr=dA_rr):
            """Key j against the rows that need the exact path, as in exact_products."""
            span, dq, de, dk, dG = carry
            j = BLOCK - 1 - s
            onehot, below = row == j, (row > j) & slow
            weight = jnp.where(below, bt.exp(span, interpret), 0.0)
            p = jnp.sum(jnp.where(col == j, dP_rr, 0.0), axis=1)[:, None] * weight
            a = jnp.sum(jnp.where(col == j, dA_rr, 0.0), axis=1)[:, None] * weight
            k_j = take_row(k, onehot)
            term = a * e + p * q
            dk_j = jnp.sum(term, axis=0)[None, :]
            dG = dG + term * k_j - jnp.where(onehot, k_j * dk_j, 0.0)
            span = jnp.where(row >= j, span + take_row(g, onehot), span)
            return span, dq + p * k_j, de + a * k_j, dk + jnp.where(onehot, dk_j, 0.0), dG

        any_slow = jnp.max(depth, axis=0) > FAST_LIMIT[precision]
        steps = BLOCK if always_exact else any_slow.astype(jnp.int32) * BLOCK
        _, dq, de, dk, dG = lax.fori_loop(0, steps, exact, (jnp.zeros_like(g), dq, de, dk, dG))

        # The terms i == j, whose decay is 1, have no part in dG.
        if raw.l2norm:
            # The diagonal of dA, as it was formed above, is -U_i . dR_i. One reduction finds all diagonals.
            products = jnp.stack([jnp.stack([dP[r, r], dA[r, r]], -1), jnp.stack([o_do[r], o_do[r]], -1)], -1)
            diagonals = jnp.sum(jnp.where((row == col)[:, :, None, None], products, 0.0), axis=1)
            pairs = (pair.reshape(BLOCK, 2) for pair in jnp.split(diagonals, 2, axis=-1))
            (on_diagonal, minus_U_dR), (q_dq, _) = (jnp.split(pair, 2, axis=-1) for pair in pairs)  # pyright: ignore[reportAssignmentType]
        else:
            on_diagonal = jnp.sum(jnp.where(row == col, dP[r, r], 0.0), axis=1)[:, None]
        dq, dk = scale * (dq + on_diagonal * k), dk + on_diagonal * q + erase * de
        if raw.l2norm:
            # q here is scaled; without a scale, o is 0 and so is the sum.
            dq = tokens.norm(r, 0) * (dq - q * (q_dq * (1.0 / scale if scale else 0.0)))
            dk = tokens.norm(r, 1) * (dk + k * (y_dR[r] + 2.0 * minus_U_dR))
        bt.store_tile(dq_ref, rows(r), kc, dq)
        bt.store_tile(dk_ref, rows(r), kc, dk)
        dg = MaskedSum(dG, precision, interpret)(row <= col) + dG_end
        dg, dA_log = tokens.g_gradients(r, g, dg)
        if dA_log is not None:
            share_A, share_bias = share_A + dA_log, share_bias + dg
        bt.store_tile(dg_ref, rows(r), kc, dg)
        dG_end += jnp.sum(dG, axis=0)[None, :]
        if sizes.channelwise:
            bt.store_tile(derase_ref, rows(r), kc, k * de)
        else:
            db = dbeta[r] + jnp.sum(k * de, axis=1)[:, None]
            bt.store_tile(derase_ref, rows(r), (tile, 1, None), tokens.beta_gradient(erase, db))
    if raw.gate:
        for given, share in ((x.A_log, share_A), (x.dt_bias, share_bias)):
            if given is not None:
                bt.store_tile(refs.pop(0), (0, 1, None), padded_k, jnp.sum(share, axis=0)[None, :])


def run_states_bwd(
    prepared: Prepared, split: Segments | None, do, dfinal_state, has_initial, q, v, erase,
    *, precision, config: KdaConfig, interpret, packing: Packing | None = None,
):  # fmt: skip
    """Runs `kda_state_bwd`, split like the forward; returns dS [B * HV, NT, bv, bk], dU [B * HV, NT, C, bv],
    dinitial_state or None."""
    sizes = Sizes.of(q, v, erase, config, packing)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    tiles = (prepared.W, prepared.Qhat, prepared.Ktil, prepared.P, prepared.decay)
    inputs: list = [(do, sizes.head(do)), *((x, sizes.chunks(*x.shape[2:])[1]) for x in tiles)]
    maps = None if split is None else split.maps
    segments = 1 if maps is None else maps.shape[1]
    grid = (sizes.bv // v_tile, segments, sizes.N * sizes.HV)
    common = {"sizes": sizes, "v_tile": v_tile, "segments": segments, "precision": precision}
    launch = {"num_warps": config.state_bwd_warps, "num_stages": config.state_bwd_stages, "interpret": interpret}
    if maps is not None:
        spec = pl.BlockSpec((None, None, *maps.shape[2:]), lambda _, n, bh: (bh, n, 0, 0))
        shape = jax.ShapeDtypeStruct(maps.shape, maps.dtype)
        [added] = bt.launch(
            kda_segment_bwd, "kda_segment_bwd", grid, [*inputs, (maps, spec)], [(shape, spec)], **launch, **common
        )
        ends = segment_starts(
            added,
            dfinal_state,
            q,
            v,
            erase,
            precision=precision,
            config=config,
            interpret=interpret,
            body=kda_combine_bwd,
        )
        end = [(ends, pl.BlockSpec((None, None, sizes.bv, sizes.bk), lambda *i: (i[-1], i[-2], 0, 0)))]
    else:
        end = [] if dfinal_state is None else [(dfinal_state, sizes.state())]
    outputs = []
    for tile in ((sizes.bv, sizes.bk), (sizes.C, sizes.bv)):
        shape, spec = sizes.chunks(*tile)
        outputs.append((jax.ShapeDtypeStruct(shape, op), spec))
    if has_initial:
        outputs.append((jax.ShapeDtypeStruct((sizes.N, sizes.HV, sizes.K, sizes.V), jnp.float32), sizes.state()))
    dS, dU, *dinitial = bt.launch(
        kda_state_bwd,
        "kda_state_bwd",
        grid,
        [*inputs, launched(packing), *end],
        outputs,
        **launch,
        **common,
        has_final=dfinal_state is not None,
        has_initial=has_initial,
    )
    return dS, dU, dinitial[0] if has_initial else None


def gradients(
    prepared: Prepared, states: States, dS, dU, q, k, v, g, erase, write, do, A_log=None, dt_bias=None,
    starts=None, o=None,
    *, scale, precision, config: KdaConfig, interpret, raw: Raw = NOTHING_RAW, packing: Packing | None = None,
):  # fmt: skip
    """Runs `kda_grads`; returns dq, dk, dv, dg, derase, dwrite (None for KDA), dA_log and ddt_bias (None where there
    are none). o, the forward's output, is needed where q and k come raw."""
    sizes = Sizes.of(q, v, erase, config, packing)
    k_tile = min(config.k_tile, sizes.bk)
    tiles = sizes.bk // k_tile
    grouped = sizes.HV != sizes.H
    inputs: list = [Inputs(q, k, v, g, erase, write, A_log, dt_bias, starts).launched(sizes), launched(packing)]
    inputs.append((do, sizes.head(do)))
    inputs += [(x, sizes.chunk(*x.shape[2:])[1]) for x in (prepared.M, states.S, dS, states.U, dU, prepared.decay)]
    if raw.l2norm:
        inputs += [(prepared.norms, sizes.chunk(sizes.C, 2)[1]), (o, sizes.head(o))]  # pyright: ignore[reportArgumentType]
    shape = jax.ShapeDtypeStruct
    # Shares that are summed below, in float32 and in a fixed order: dq and dk over the value heads of a group, dbeta
    # over key tiles, dA_log and ddt_bias over chunks.
    per_head = (sizes.B, sizes.T, sizes.HV, sizes.K)
    shapes = [shape(per_head, jnp.float32 if grouped else x.dtype) for x in (q, k)]
    shapes += [shape(x.shape, x.dtype) for x in (v, g)]
    shares = write is None and tiles > 1
    shapes.append(shape((*erase.shape, tiles), jnp.float32) if shares else shape(erase.shape, erase.dtype))
    if write is not None:
        shapes.append(shape(write.shape, write.dtype))
    outputs = [(x, sizes.head(x)) for x in shapes]
    of_gate = [x for x in (A_log, dt_bias) if x is not None]
    share, share_spec = sizes.chunk(1, sizes.bk)
    outputs += [(shape(share, jnp.float32), share_spec) for _ in of_gate]
    dq, dk, dv, dg, derase, *rest = bt.launch(
        kda_grads,
        "kda_grads",
        (tiles, sizes.nt, sizes.B * sizes.HV),
        inputs,
        outputs,
        num_warps=config.grads_warps,
        num_stages=1,
        interpret=interpret,
        sizes=sizes,
        raw=raw,
        scale=scale,
        k_tile=k_tile,
        precision=precision,
        always_exact=config.always_exact,
    )
    dwrite = None if write is None else rest.pop(0)
    if shares:
        derase = derase.sum(axis=-1).astype(erase.dtype)
    if grouped:
        split = (sizes.B, sizes.T, sizes.H, sizes.HV // sizes.H, sizes.K)
        dq, dk = (x.reshape(split).sum(axis=3).astype(like.dtype) for x, like in ((dq, q), (dk, k)))

    def over_chunks(x, *axes):
        x = x[..., : sizes.K].reshape(sizes.B, sizes.HV, sizes.nt, sizes.K)
        if packing is not None:  # A slot that is not used leaves no share.
            x = jnp.where((packing.rows[:, 0] < packing.rows[:, 1])[:, None], x, 0.0)
        return x.sum(axis=axes)

    dA_log = None if A_log is None else over_chunks(rest.pop(0), 0, 2, 3).astype(A_log.dtype)
    ddt_bias = None if dt_bias is None else over_chunks(rest.pop(0), 0, 2).reshape(-1).astype(dt_bias.dtype)
    return dq, dk, dv, dg, derase, dwrite, dA_log, ddt_bias
