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
    """All gradients of one chunk of one value head, for one tile of key channels. Grid (K tiles, NT, B * HV).

    What belongs to the value side is formed in every program, and written by the first one.
    """
    op = operand_dtype(q_ref.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    f32 = jnp.float32
    r = Rows(sizes.C)
    tile, start = pl.program_id(0), pl.program_id(1) * sizes.C
    tokens, all_c = sizes.rows(start, sizes.C), (0, sizes.C, None)
    kc = (tile * k_tile, k_tile, sizes.k_limit)
    padded_k = (tile * k_tile, k_tile, None)
    gate = kc if sizes.channelwise else (0, 1, None)
    slab = min(sizes.bv, V_SLAB)

    # The value side: dR, dv and dwrite, dP and dA, and the three products with the states.
    M = bt.load_tile(m_ref, all_c, all_c).astype(op)
    dP = dA = acc_q = acc_e = acc_k = dG_end = dbeta = 0.0
    for first in range(0, sizes.bv, slab):
        padded_v, vc = (first, slab, None), sizes.v_cols(first, slab)
        U = bt.load_tile(u_ref, all_c, padded_v)
        do = bt.load_tile(do_ref, tokens, vc).astype(op)
        S, dS = bt.load_tile(s_ref, padded_v, padded_k), bt.load_tile(ds_ref, padded_v, padded_k)
        dR = dot(M, bt.load_tile(du_ref, all_c, padded_v), (0, 0))
        dRo = dR.astype(op)
        dP += dot(do, U, (1, 1))
        dA -= dot(dRo, U, (1, 1))
        acc_q += dot(do, S)
        acc_e -= dot(dRo, S)
        acc_k += dot(U, dS)
        dG_end += jnp.sum(S.astype(f32) * dS.astype(f32), axis=0)[None, :]

        v = bt.load_tile(v_ref, tokens, vc).astype(f32)
        if not sizes.channelwise:
            dbeta += jnp.sum(v * dR, axis=1)[:, None]

        @pl.when(tile == 0)
        def _(v=v, dR=dR, vc=vc):
            write = bt.load_tile(write_ref, tokens, vc if sizes.channelwise else (0, 1, None)).astype(f32)
            bt.store_tile(dv_ref, tokens, vc, write * dR)
            if sizes.channelwise:
                bt.store_tile(dwrite_refs[0], tokens, vc, v * dR)

    on_diagonal = jnp.sum(jnp.where(r.row == r.col, dP, 0.0), axis=1)[:, None]
    below = r.row > r.col
    dP, dA = jnp.where(below, dP, 0.0), jnp.where(below, dA, 0.0)

    # The key side.
    k = bt.load_tile(k_ref, tokens, kc).astype(f32)
    q = bt.load_tile(q_ref, tokens, kc).astype(f32) * scale
    erase = bt.load_tile(erase_ref, tokens, gate).astype(f32)
    e = erase * k
    g = jnp.maximum(bt.load_tile(g_ref, tokens, kc).astype(f32), MIN_LOG_DECAY)
    d = Decays.of(g, r, precision, interpret)
    E, Q, K = e * d.up, q * d.up, k * d.down

    # From and to the states.
    dq, de, dk = d.from_start(acc_q, r.blocks), d.from_start(acc_e, r.blocks), d.to_end(acc_k, r.blocks)
    to_state = K * dk
    dG = Q * dq + E * de - to_state
    dG_end = dG_end * bt.load_tile(decay_ref, (0, 1, None), padded_k) + jnp.sum(to_state, axis=0)[None, :]
    # Between blocks.
    for half in r.levels():
        dPl, dAl = (jnp.where(r.meet(half), x, 0.0).astype(op) for x in (dP, dA))
        El, Ql, Kl = d.from_start(E, half).astype(op), d.from_start(Q, half).astype(op), d.to_end(K, half).astype(op)
        near_q, near_e = dot(dPl, Kl), dot(dAl, Kl)
        near_k = dot(dAl, El, (0, 0)) + dot(dPl, Ql, (0, 0))
        dG += Ql.astype(f32) * near_q + El.astype(f32) * near_e - Kl.astype(f32) * near_k
        dq, de, dk = dq + d.from_start(near_q, half), de + d.from_start(near_e, half), dk + d.to_end(near_k, half)
    dk *= d.down
    # Inside blocks, fast path.
    inside = r.same_block() & ~d.slow(precision)
    dPl, dAl = (jnp.where(inside, x, 0.0).astype(diagonal) for x in (dP, dA))
    keys = d.anchored(k, precision).astype(diagonal)
    El, Ql = E.astype(diagonal), Q.astype(diagonal)
    near_q, near_e = dot_diagonal(dPl, keys), dot_diagonal(dAl, keys)
    near_k = dot_diagonal(dAl, El, (0, 0)) + dot_diagonal(dPl, Ql, (0, 0))
    dG += Ql.astype(f32) * near_q + El.astype(f32) * near_e - keys.astype(f32) * near_k
    dq, de, dk = (dq + near_q) * d.up, (de + near_e) * d.up, dk + d.anchored(near_k, precision)

    def exact(s, carry):
        """Key j of every diagonal block against the rows that need the exact path, as in kda_prepare."""
        span, dq, de, dk, dG = carry
        j = BLOCK - 1 - s
        k_j, g_j = (sizes.block_rows(x, start, j, kc) for x in (k_ref, g_ref))
        weight = jnp.where((r.row % BLOCK > j) & d.slow(precision), jnp.exp(span), 0.0)
        column = r.col == r.row // BLOCK * BLOCK + j
        p = jnp.sum(jnp.where(column, dP, 0.0), axis=1)[:, None] * weight
        a = jnp.sum(jnp.where(column, dA, 0.0), axis=1)[:, None] * weight
        term = a * e + p * q
        dk_j = jnp.where(r.row % BLOCK == j, r.pick(r.block_totals(term)), 0.0)
        dG = dG + term * k_j - k_j * dk_j
        span = jnp.where(r.row % BLOCK >= j, span + jnp.maximum(g_j, MIN_LOG_DECAY), span)
        return span, dq + p * k_j, de + a * k_j, dk + dk_j, dG

    steps = d.exact_steps(precision, always_exact)
    _, dq, de, dk, dG = lax.fori_loop(0, steps, exact, (jnp.zeros_like(g), dq, de, dk, dG))

    # The terms i == j, whose decay is 1, have no part in dG.
    bt.store_tile(dq_ref, tokens, kc, scale * (dq + on_diagonal * k))
    bt.store_tile(dk_ref, tokens, kc, dk + on_diagonal * q + erase * de)
    bt.store_tile(dg_ref, tokens, kc, masked_sum(r.row <= r.col, dG, precision, interpret) + dG_end)
    if sizes.channelwise:
        bt.store_tile(derase_ref, tokens, kc, k * de)
    else:
        dbeta = jnp.where(tile == 0, dbeta, 0.0) + jnp.sum(k * de, axis=1)[:, None]
        bt.store_tile(derase_ref, tokens, (tile, 1, None), dbeta)


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
    k_tile = min(config.k_tile, sizes.bk)
    tiles = sizes.bk // k_tile
    grouped = sizes.HV != sizes.H
    inputs = [(x, sizes.head(x)) for x in (q, k, v, g, erase, erase if write is None else write, do)]
    inputs += [(x, sizes.chunk(*x.shape[2:])[1]) for x in (prepared.M, states.S, dS, states.U, dU, prepared.decay)]
    shape = jax.ShapeDtypeStruct
    # Shares that are summed below, in float32 and in a fixed order: dq and dk over the value heads of a group, dbeta over key tiles.
    dqk = [shape((sizes.B, sizes.T, sizes.HV, sizes.K), jnp.float32 if grouped else x.dtype) for x in (q, k)]
    if write is None:
        derase = shape((sizes.B, sizes.T, sizes.HV, tiles), erase.dtype if tiles == 1 else jnp.float32)
    else:
        derase = shape(erase.shape, erase.dtype)
    shapes = [*dqk, shape(v.shape, v.dtype), shape(g.shape, g.dtype), derase]
    if write is not None:
        shapes.append(shape(write.shape, write.dtype))
    dq, dk, dv, dg, derase, *dwrite = bt.launch(
        kda_grads,
        "kda_grads",
        (tiles, sizes.nt, sizes.B * sizes.HV),
        inputs,
        [(x, sizes.head(x)) for x in shapes],
        num_warps=config.grads_warps,
        num_stages=1,
        interpret=interpret,
        sizes=sizes,
        scale=scale,
        k_tile=k_tile,
        precision=precision,
        always_exact=config.always_exact,
    )
    if grouped:
        split = (sizes.B, sizes.T, sizes.H, sizes.HV // sizes.H, sizes.K)
        dq, dk = (x.reshape(split).sum(axis=3).astype(like.dtype) for x, like in ((dq, q), (dk, k)))
    if write is None:
        derase = derase.sum(axis=3).astype(erase.dtype) if tiles > 1 else derase.reshape(erase.shape)
    return dq, dk, dv, dg, derase, dwrite[0] if dwrite else None
