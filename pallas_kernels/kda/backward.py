"""Backward kernels of KDA and of the general rule, with the names of `forward`.

Given do and dS1, the gradient of the state leaving a chunk:

    dU  = P^T do + Ktil dS1                  dR = M^T dU     (R = y - Ehat S0)
    dS0 = diag(exp(G_C)) dS1 + Qhat^T do - W^T dU
    dP  = tril(do U^T)                       dA = -stril(dR U^T)
    dy  = dR
    dq_i = scale exp(G_i) (S0 do_i) + scale sum_{j<=i} dP_ij k_j exp(G_i - G_j)
    de_i = -exp(G_i) (S0 dR_i) + sum_{j<i} dA_ij k_j exp(G_i - G_j)
    dk_j = exp(G_C - G_j) (dS1 U_j) + sum_{i>j} dA_ij e_i exp(G_i - G_j) + scale sum_{i>=j} dP_ij q_i exp(G_i - G_j) + erase_j de_j
    dG_i = q_i dq_i + e_i de_i - k_i dk_i    without the terms i == j and before de is folded into dk
    dg   = reverse cumulative sum of dG, plus exp(G_C) rowsum(S0 * dS1) + sum_j Ktil_j (dS1 U_j) at the last row

`kda_state_bwd` walks over the chunks backwards with dS^T in registers and leaves dS1 and dU of every chunk. `kda_grads` forms all
gradients of a chunk, all chunks in parallel. dg is a difference of large sums: both sides use the same rounded operands, so that
what cancels in exact arithmetic cancels here too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.blocks import MIN_LOG_DECAY, Decays, Rows, masked_sum
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.forward import V_SLAB, Prepared, States, diagonal_dot
from pallas_kernels.kda.sizes import Sizes, operand_dtype


def kda_state_bwd(
    do_ref, w_ref, qhat_ref, ktil_ref, p_ref, decay_ref, *refs,
    sizes: Sizes, v_tile: int, precision: str, has_final: bool, has_initial: bool, interpret: bool,
):  # fmt: skip
    """Walks backwards with a tile of dS^T, [v_tile, bk], in registers. Grid (V tiles, B * HV).

    refs: dfinal_state if has_final, then dS, dU, and dinitial_state if has_initial.
    """
    refs = list(refs)
    dfinal_ref = refs.pop(0) if has_final else None
    ds_ref, du_ref = refs[:2]
    op = ds_ref.dtype
    dot = Dot(precision, interpret)
    first = pl.program_id(0) * v_tile
    k_rows, vc = sizes.k_cols(), sizes.v_cols(first, v_tile)
    full_k, full_c, tile = pl.ds(0, sizes.bk), pl.ds(0, sizes.C), pl.ds(first, v_tile)

    def step(s, dS):
        n = sizes.nt - 1 - s
        dSo = dS.astype(op)
        ds_ref[n, tile, full_k] = dSo
        do = bt.load_tile(do_ref, sizes.rows(n * sizes.C, sizes.C), vc).astype(op).T
        dU = dot(do, p_ref[n, full_c, full_c]) + dot(dSo, ktil_ref[n, full_c, full_k], (1, 1))
        dUo = dU.astype(op)
        du_ref[n, full_c, tile] = dUo.T
        decayed = dS * decay_ref[n, 0, full_k][None, :]
        return decayed + dot(do, qhat_ref[n, full_c, full_k]) - dot(dUo, w_ref[n, full_c, full_k])

    if dfinal_ref is None:
        dS = jnp.zeros((v_tile, sizes.bk), jnp.float32)
    else:
        dS = bt.load_tile(dfinal_ref, k_rows, vc).astype(jnp.float32).T
    dS = lax.fori_loop(0, sizes.nt, step, dS)
    if has_initial:
        bt.store_tile(refs[2], k_rows, vc, dS.T)


def kda_grads(
    q_ref, k_ref, v_ref, g_ref, erase_ref, write_ref, do_ref, m_ref, s_ref, ds_ref, u_ref, du_ref, decay_ref,
    dq_ref, dk_ref, dv_ref, dg_ref, derase_ref, *dwrite_refs,
    sizes: Sizes, scale: float, k_tile: int, precision: str, always_exact: bool, interpret: bool,
):  # fmt: skip
    """All gradients of one chunk of one value head. Grid (NT, B * HV)."""
    op = operand_dtype(q_ref.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    f32 = jnp.float32
    r = Rows(sizes.C)
    start = pl.program_id(0) * sizes.C
    tokens, all_c = sizes.rows(start, sizes.C), (0, sizes.C, None)
    slab = min(sizes.bv, V_SLAB)
    slabs = range(0, sizes.bv, slab)

    # The value side: dR, dv and dwrite, dP and dA.
    M = bt.load_tile(m_ref, all_c, all_c).astype(op)
    dP = dA = dbeta = 0.0
    dR = []
    for first in slabs:
        padded_v, vc = (first, slab, None), sizes.v_cols(first, slab)
        U = bt.load_tile(u_ref, all_c, padded_v)
        part = dot(M, bt.load_tile(du_ref, all_c, padded_v), (0, 0))
        dR.append(part.astype(op))
        dP += dot(bt.load_tile(do_ref, tokens, vc).astype(op), U, (1, 1))
        dA -= dot(dR[-1], U, (1, 1))
        v = bt.load_tile(v_ref, tokens, vc).astype(f32)
        write = bt.load_tile(write_ref, tokens, vc if sizes.channelwise else (0, 1, None)).astype(f32)
        bt.store_tile(dv_ref, tokens, vc, write * part)
        if sizes.channelwise:
            bt.store_tile(dwrite_refs[0], tokens, vc, v * part)
        else:
            dbeta += jnp.sum(v * part, axis=1)[:, None]
    on_diagonal = jnp.sum(jnp.where(r.row == r.col, dP, 0.0), axis=1)[:, None]
    dP, dA = (jnp.where(r.row > r.col, x, 0.0).astype(op) for x in (dP, dA))

    def channels(tile, dbeta):
        """The key side, for one tile of key channels."""
        kc, padded = (tile * k_tile, k_tile, sizes.k_limit), (tile * k_tile, k_tile, None)
        k = bt.load_tile(k_ref, tokens, kc).astype(f32)
        q = bt.load_tile(q_ref, tokens, kc).astype(f32) * scale
        erase = bt.load_tile(erase_ref, tokens, kc if sizes.channelwise else (0, 1, None)).astype(f32)
        e = erase * k
        d = Decays(bt.load_tile(g_ref, tokens, kc), r, precision, interpret)

        # From and to the states.
        dq = de = dk = dG_end = 0.0
        for first, dRo in zip(slabs, dR):
            padded_v = (first, slab, None)
            S, dS = bt.load_tile(s_ref, padded_v, padded), bt.load_tile(ds_ref, padded_v, padded)
            dG_end += jnp.sum(S.astype(f32) * dS.astype(f32), axis=0)[None, :]
            dq += dot(bt.load_tile(do_ref, tokens, sizes.v_cols(first, slab)).astype(op), S)
            de -= dot(dRo, S)
            dk += dot(bt.load_tile(u_ref, all_c, padded_v), dS)
        up, down = d.up(r.blocks), d.down(r.blocks)
        dq, de, dk = up * dq, up * de, down * dk
        to_state = k * dk
        dG = q * dq + e * de - to_state
        dG_end = dG_end * bt.load_tile(decay_ref, (0, 1, None), padded) + jnp.sum(to_state, axis=0)[None, :]

        def near(dot, dtype, where, up, down, sums):
            """Adds the pairs of one level. Both ends of a pair use the same rounded factors, so that dG cancels as it should."""
            dq, de, dk, dG = sums
            dPl, dAl = (jnp.where(where, x.astype(f32), 0.0).astype(dtype) for x in (dP, dA))
            E, Q, K = (e * up).astype(dtype), (q * up).astype(dtype), (k * down).astype(dtype)
            at_q, at_e, at_k = dot(dPl, K), dot(dAl, K), dot(dAl, E, (0, 0)) + dot(dPl, Q, (0, 0))
            dG += Q.astype(f32) * at_q + E.astype(f32) * at_e - K.astype(f32) * at_k
            return dq + up * at_q, de + up * at_e, dk + down * at_k, dG

        sums = dq, de, dk, dG
        for half in r.levels():
            sums = near(dot, op, r.meet(half), d.up(half), d.down(half), sums)
        sums = near(dot_diagonal, diagonal, r.run(1) & ~d.slow, d.up(1), d.anchor(), sums)

        def exact(s, carry):
            """Key j of every diagonal block against the rows that need the exact path, as in kda_prepare."""
            span, dq, de, dk, dG = carry
            j = BLOCK - 1 - s
            k_j, g_j = (sizes.block_rows(x, start, j, kc) for x in (k_ref, g_ref))
            weight = jnp.where((r.row % BLOCK > j) & d.slow, jnp.exp(span), 0.0)
            column = r.col == r.row // BLOCK * BLOCK + j
            p, a = (jnp.sum(jnp.where(column, x.astype(f32), 0.0), axis=1)[:, None] * weight for x in (dP, dA))
            term = a * e + p * q
            dk_j = jnp.where(r.row % BLOCK == j, masked_sum(r.run(1), term, precision, interpret), 0.0)
            dG = dG + term * k_j - k_j * dk_j
            span = jnp.where(r.row % BLOCK >= j, span + jnp.maximum(g_j, MIN_LOG_DECAY), span)
            return span, dq + p * k_j, de + a * k_j, dk + dk_j, dG

        steps = d.exact_steps(always_exact)
        _, dq, de, dk, dG = lax.fori_loop(0, steps, exact, (jnp.zeros_like(d.g), *sums))

        # The terms i == j, whose decay is 1, have no part in dG.
        bt.store_tile(dq_ref, tokens, kc, scale * (dq + on_diagonal * k))
        bt.store_tile(dk_ref, tokens, kc, dk + on_diagonal * q + erase * de)
        bt.store_tile(dg_ref, tokens, kc, masked_sum(r.row <= r.col, dG, precision, interpret) + dG_end)
        if sizes.channelwise:
            bt.store_tile(derase_ref, tokens, kc, k * de)
            return dbeta
        return dbeta + jnp.sum(k * de, axis=1)[:, None]

    if sizes.channelwise:
        lax.fori_loop(0, sizes.bk // k_tile, channels, 0)
    else:
        dbeta = lax.fori_loop(0, sizes.bk // k_tile, channels, dbeta)
        bt.store_tile(derase_ref, tokens, (0, 1, None), dbeta)


def run_states_bwd(prepared: Prepared, do, dfinal_state, has_initial, q, v, erase, *, precision, config: KdaConfig, interpret):
    """Runs `kda_state_bwd`; returns dS [B * HV, NT, bv, bk], dU [B * HV, NT, C, bv] and dinitial_state or None."""
    sizes = Sizes.of(q, v, erase, config)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    inputs = [(do, sizes.head(do))] + [
        (x, sizes.chunks(*x.shape[2:])[1])
        for x in (prepared.W, prepared.Qhat, prepared.Ktil, prepared.P, prepared.decay)
    ]
    if dfinal_state is not None:
        inputs.append((dfinal_state, sizes.state()))
    outputs = []
    for tile in ((sizes.bv, sizes.bk), (sizes.C, sizes.bv)):
        shape, spec = sizes.chunks(*tile)
        outputs.append((jax.ShapeDtypeStruct(shape, op), spec))
    if has_initial:
        outputs.append((jax.ShapeDtypeStruct((sizes.B, sizes.HV, sizes.K, sizes.V), jnp.float32), sizes.state()))
    dS, dU, *dinitial = bt.launch(
        kda_state_bwd,
        "kda_state_bwd",
        (sizes.bv // v_tile, sizes.B * sizes.HV),
        inputs,
        outputs,
        num_warps=config.state_bwd_warps,
        num_stages=config.state_bwd_stages,
        interpret=interpret,
        sizes=sizes,
        v_tile=v_tile,
        precision=precision,
        has_final=dfinal_state is not None,
        has_initial=has_initial,
    )
    return dS, dU, dinitial[0] if has_initial else None


def gradients(
    prepared: Prepared, states: States, dS, dU, q, k, v, g, erase, write, do, *, scale, precision, config: KdaConfig, interpret
):
    """Runs `kda_grads`; returns dq, dk, dv, dg, derase and dwrite (None for KDA)."""
    sizes = Sizes.of(q, v, erase, config)
    grouped = sizes.HV != sizes.H
    inputs = [(x, sizes.head(x)) for x in (q, k, v, g, erase, erase if write is None else write, do)]
    inputs += [(x, sizes.chunk(*x.shape[2:])[1]) for x in (prepared.M, states.S, dS, states.U, dU, prepared.decay)]
    shape = jax.ShapeDtypeStruct
    # With grouped value heads every head writes its own float32 share, summed below in a fixed order.
    per_head = (sizes.B, sizes.T, sizes.HV, sizes.K)
    shapes = [shape(per_head, jnp.float32 if grouped else x.dtype) for x in (q, k)]
    shapes += [shape(x.shape, x.dtype) for x in (v, g, erase)]
    if write is not None:
        shapes.append(shape(write.shape, write.dtype))
    dq, dk, dv, dg, derase, *dwrite = bt.launch(
        kda_grads,
        "kda_grads",
        (sizes.nt, sizes.B * sizes.HV),
        inputs,
        [(x, sizes.head(x)) for x in shapes],
        num_warps=config.grads_warps,
        num_stages=1,
        interpret=interpret,
        sizes=sizes,
        scale=scale,
        k_tile=min(config.k_tile, sizes.bk),
        precision=precision,
        always_exact=config.always_exact,
    )
    if grouped:
        split = (sizes.B, sizes.T, sizes.H, sizes.HV // sizes.H, sizes.K)
        dq, dk = (x.reshape(split).sum(axis=3).astype(like.dtype) for x, like in ((dq, q), (dk, k)))
    return dq, dk, dv, dg, derase, dwrite[0] if dwrite else None
