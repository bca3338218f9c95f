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
from pallas_kernels.kda.forward import V_SLAB, Prepared, States, diagonal_dot, stacked
from pallas_kernels.kda.sizes import Sizes, operand_dtype


def kda_state_bwd(
    do_ref, qw_ref, ktil_ref, p_ref, decay_ref, *refs,
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
    lower_c = pl.ds(sizes.C, sizes.C)

    def step(s, dS):
        n = sizes.nt - 1 - s
        dSo = dS.astype(op)
        ds_ref[n, tile, full_k] = dSo
        do = bt.load_tile(do_ref, sizes.rows(n * sizes.C, sizes.C), vc).astype(op).T
        dU = dot(do, p_ref[n, full_c, full_c]) + dot(dSo, ktil_ref[n, full_c, full_k], (1, 1))
        dUo = dU.astype(op)
        du_ref[n, full_c, tile] = dUo.T
        decayed = dS * decay_ref[n, 0, full_k][None, :]
        return decayed + dot(do, qw_ref[n, full_c, full_k]) - dot(dUo, qw_ref[n, lower_c, full_k])

    if dfinal_ref is None:
        dS = jnp.zeros((v_tile, sizes.bk), jnp.float32)
    else:
        dS = bt.load_tile(dfinal_ref, k_rows, vc).astype(jnp.float32).T
    dS = lax.fori_loop(0, sizes.nt, step, dS)
    if has_initial:
        bt.store_tile(refs[2], k_rows, vc, dS.T)


def kda_grads(
    q_ref, k_ref, v_ref, g_ref, erase_ref, write_ref, do_ref, m_ref, s_ref, ds_ref, u_ref, du_ref, decay_ref,
    dr_ref, dq_ref, dk_ref, dv_ref, dg_ref, derase_ref, *dwrite_refs,
    sizes: Sizes, scale: float, k_tile: int, precision: str, always_exact: bool, interpret: bool,
):  # fmt: skip
    """All gradients of one chunk of one value head. Grid (NT, B * HV)."""
    op = operand_dtype(q_ref.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    f32 = jnp.float32
    one, two = Rows(sizes.C), Rows(sizes.C, copies=2)
    start = pl.program_id(0) * sizes.C
    tokens, all_c = sizes.rows(start, sizes.C), (0, sizes.C, None)
    upper = two.index < sizes.C
    slab = min(sizes.bv, V_SLAB)
    slabs = range(0, sizes.bv, slab)

    # The value side: dv and dwrite, and do over -dR, whose product with U is dP over dA.
    M = bt.load_tile(m_ref, all_c, all_c).astype(op)
    dPA = jnp.zeros((2 * sizes.C, sizes.C), f32)
    dbeta = jnp.zeros((sizes.C, 1), f32)
    for first in slabs:
        padded_v, vc = (first, slab, None), sizes.v_cols(first, slab)
        dR = dot(M, bt.load_tile(du_ref, all_c, padded_v), (0, 0))
        bt.store_tile(dr_ref, all_c, padded_v, -dR)
        v = bt.load_tile(v_ref, tokens, vc).astype(f32)
        write = bt.load_tile(write_ref, tokens, vc if sizes.channelwise else (0, 1, None)).astype(f32)
        bt.store_tile(dv_ref, tokens, vc, write * dR)
        if sizes.channelwise:
            bt.store_tile(dwrite_refs[0], tokens, vc, v * dR)
        else:
            dbeta += jnp.sum(v * dR, axis=1)[:, None]
    bt.barrier(interpret)

    def outer(first):
        """do over -dR, [2 C, slab]."""
        do = sizes.gather(do_ref, start + two.row, sizes.v_cols(first, slab), upper).astype(op)
        lanes = first + jnp.arange(slab)[None, :]
        return jnp.where(upper, do, bt.gather_tile(dr_ref, two.row, lanes))

    for first in slabs:
        dPA += dot(outer(first), bt.load_tile(u_ref, all_c, (first, slab, None)), (1, 1))
    on_diagonal = jnp.sum(jnp.where((two.row == two.col) & upper, dPA, 0.0), axis=1)[:, None]
    dPA = jnp.where(two.row > two.col, dPA, 0.0)

    def channels(tile, dbeta):
        """The key side, for one tile of key channels."""
        kc, padded = (tile * k_tile, k_tile, sizes.k_limit), (tile * k_tile, k_tile, None)
        k = bt.load_tile(k_ref, tokens, kc).astype(f32)
        x, factor = stacked(q_ref, k_ref, erase_ref, start, kc, two, sizes, scale)
        keys = Decays(bt.load_tile(g_ref, tokens, kc), one, precision)
        rows = Decays(sizes.gather(g_ref, start + two.row, kc), two, precision)

        # From and to the states.
        dx, dk, dG_end = 0.0, 0.0, 0.0
        for first in slabs:
            padded_v = (first, slab, None)
            S, dS = bt.load_tile(s_ref, padded_v, padded), bt.load_tile(ds_ref, padded_v, padded)
            dx += dot(outer(first), S)
            dk += dot(bt.load_tile(u_ref, all_c, padded_v), dS)
            dG_end += jnp.sum(S.astype(f32) * dS.astype(f32), axis=0)[None, :]
        dx, dk = dx * rows.up(one.blocks), dk * keys.down(one.blocks)
        dG_rows, dG_keys = x * dx, k * dk
        dG_end = dG_end * bt.load_tile(decay_ref, (0, 1, None), padded) + jnp.sum(dG_keys, axis=0)[None, :]

        def near(dot, dtype, where, up, down, sums):
            """Adds the pairs of one level. Both ends of a pair use the same rounded factors, so that dG cancels as it should."""
            dx, dk, dG_rows, dG_keys = sums
            pairs = jnp.where(where, dPA, 0.0).astype(dtype)
            X, K = (x * up).astype(dtype), (k * down).astype(dtype)
            at_x, at_k = dot(pairs, K), dot(pairs, X, (0, 0))
            dG_rows, dG_keys = dG_rows + X.astype(f32) * at_x, dG_keys + K.astype(f32) * at_k
            return dx + up * at_x, dk + down * at_k, dG_rows, dG_keys

        sums = dx, dk, dG_rows, dG_keys
        for half in two.levels():
            sums = near(dot, op, two.meet(half), rows.up(half), keys.down(half), sums)
        sums = near(dot_diagonal, diagonal, two.run(1) & ~rows.slow, rows.up(1), keys.anchor(), sums)

        def exact(s, carry):
            """Key j of every diagonal block against the rows that need the exact path, as in kda_prepare."""
            span, dx, dk, dG_rows, dG_keys = carry
            j = BLOCK - 1 - s
            k_j, g_j = (sizes.gather(ref, start + two.row // BLOCK * BLOCK + j, kc) for ref in (k_ref, g_ref))
            weight = jnp.where((two.row % BLOCK > j) & rows.slow, jnp.exp(span), 0.0)
            pairs = jnp.sum(jnp.where(two.col == two.row // BLOCK * BLOCK + j, dPA, 0.0), axis=1)[:, None] * weight
            to_j = (one.row % BLOCK == j) & (one.row // BLOCK == jnp.arange(two.size)[None, :] % two.C // BLOCK)
            at_j = masked_sum(to_j, pairs * x, precision, interpret)
            span = jnp.where(two.row % BLOCK >= j, span + jnp.maximum(g_j, MIN_LOG_DECAY), span)
            return span, dx + pairs * k_j, dk + at_j, dG_rows + pairs * x * k_j, dG_keys + k * at_j

        init = (jnp.zeros_like(x), *sums)
        _, dx, dk, dG_rows, dG_keys = lax.fori_loop(0, rows.exact_steps(always_exact), exact, init)

        later = one.row <= jnp.arange(two.size)[None, :] % two.C
        dg = masked_sum(later, dG_rows, precision, interpret) - masked_sum(one.row <= one.col, dG_keys, precision, interpret)
        bt.store_tile(dg_ref, tokens, kc, dg + dG_end)
        # The terms i == j, whose decay is 1, have no part in dG.
        dk_own = jnp.where(upper, on_diagonal * x, factor * dx)
        dx = factor * dx if sizes.channelwise is None else dx
        dq, de = jnp.split(dx, 2)
        own_q, own_e = jnp.split(dk_own, 2)
        (diagonal_q, _) = jnp.split(on_diagonal * jnp.ones_like(x), 2)
        bt.store_tile(dq_ref, tokens, kc, scale * (dq + diagonal_q * k))
        bt.store_tile(dk_ref, tokens, kc, dk + own_q + own_e)
        if sizes.channelwise:
            bt.store_tile(derase_ref, tokens, kc, k * de)
            return dbeta
        return dbeta + jnp.sum(k * de, axis=1)[:, None]

    tiles = sizes.bk // k_tile
    dbeta = channels(0, dbeta) if tiles == 1 else lax.fori_loop(0, tiles, channels, dbeta)
    if not sizes.channelwise:
        bt.store_tile(derase_ref, tokens, (0, 1, None), dbeta)


def run_states_bwd(prepared: Prepared, do, dfinal_state, has_initial, q, v, erase, *, precision, config: KdaConfig, interpret):
    """Runs `kda_state_bwd`; returns dS [B * HV, NT, bv, bk], dU [B * HV, NT, C, bv] and dinitial_state or None."""
    sizes = Sizes.of(q, v, erase, config)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    inputs = [(do, sizes.head(do))] + [
        (x, sizes.chunks(*x.shape[2:])[1])
        for x in (prepared.QW, prepared.Ktil, prepared.P, prepared.decay)
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
    dR, dR_spec = sizes.chunk(sizes.C, sizes.bv)  # Scratch of the kernel: the backend has no other.
    _, dq, dk, dv, dg, derase, *dwrite = bt.launch(
        kda_grads,
        "kda_grads",
        (sizes.nt, sizes.B * sizes.HV),
        inputs,
        [(shape(dR, dU.dtype), dR_spec), *((x, sizes.head(x)) for x in shapes)],
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
