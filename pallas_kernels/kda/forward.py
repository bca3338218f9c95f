"""Forward kernels of KDA and of the general rule with channel-wise gates (names as in the formulas below).

With e = erase * k, y = write * v, G the cumulative log-decay inside a chunk of C tokens and S0 the state entering it:

    A_ij   = sum_c e_ic k_jc exp(G_ic - G_jc)          j < i
    P_ij   = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    M      = (I + A)^-1
    Qhat_i = scale q_i exp(G_i),  Ehat_i = e_i exp(G_i),  Ktil_j = k_j exp(G_C - G_j)
    U      = M y - W S0  with  W = M Ehat
    o      = Qhat S0 + P U
    S1     = diag(exp(G_C)) S0 + Ktil^T U

`kda_prepare` forms everything that does not depend on the state, all chunks in parallel. `kda_state` walks over the chunks and keeps
S^T in registers: with the value dimension as rows, S^T and U^T are always the left operand of a product, which the tensor cores read
from registers, so the serial chain never passes through shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.blocks import MIN_LOG_DECAY, Decays, Rows, masked_sum
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.sizes import Sizes, operand_dtype

V_SLAB = 128  # Value columns that the parallel kernels hold at a time.


class Prepared(NamedTuple):
    """Tiles of every chunk, [B * HV, NT, ...], K and V padded.

    QW [2 C, bk], Qhat over W; Ktil [C, bk]; Y [bv, C], the transpose of M y; P [C, C]; M [C, C] in float32; decay [1, bk], exp(G_C).
    """

    QW: jax.Array
    Ktil: jax.Array
    Y: jax.Array
    P: jax.Array
    M: jax.Array
    decay: jax.Array


class States(NamedTuple):
    """State entering every chunk, transposed, [B * HV, NT, bv, bk], and U [B * HV, NT, C, bv]."""

    S: jax.Array
    U: jax.Array


def diagonal_dot(precision: str, op, interpret: bool) -> tuple[Dot, jnp.dtype]:
    """The product, and its operands' dtype, for factors behind an anchor: they outgrow float16, where one TF32 pass has the same
    mantissa and float32's range."""
    if op == jnp.float16:
        return Dot("tf32", interpret), jnp.dtype(jnp.float32)
    return Dot(precision, interpret), op


def stacked(q_ref, k_ref, erase_ref, start, kc, two: Rows, sizes: Sizes, scale: float):
    """scale q over erase * k, [2 C, K], and the factors themselves, scale over erase."""
    upper, tokens = two.index < two.C, start + two.row
    factor = sizes.gather(erase_ref, tokens, kc if sizes.channelwise else (0, 1, None))
    factor = jnp.where(upper, scale, factor)
    x = sizes.gather(q_ref, tokens, kc, upper) + sizes.gather(k_ref, tokens, kc, ~upper)
    return x * factor, factor


def invert(m_ref, rows: Rows, interpret: bool) -> None:
    """Replaces the strictly lower A [C, C] in m_ref by M = (I + A)^-1, upper zeros included.

    Blocks of 16 rows by forward substitution, all blocks of the chunk side by side: row i of M is e_i - sum_j A_ij M_j. Then pairs of
    blocks are merged by M_21 = -M_22 A_21 M_11. The matrix goes through memory because a scalar A_ij can be read from there by every
    thread that needs it, where exchanging it between threads would cost a barrier each.
    """
    dot32 = Dot("fp32", interpret)
    first = jnp.arange(rows.blocks) * BLOCK
    col = jnp.arange(BLOCK)[None, :]
    bt.barrier(interpret)
    M: list[jax.Array] = []
    for i in range(BLOCK):
        row = jnp.broadcast_to((col == i).astype(jnp.float32), (rows.blocks, BLOCK))
        for j in range(i):
            row -= bt.gather_tile(m_ref, first + i, first + j)[:, None] * M[j]
        M.append(row)
    bt.barrier(interpret)
    for i in range(BLOCK):
        bt.scatter_tile(m_ref, (first + i)[:, None], first[:, None] + col, M[i])
    for half in rows.levels():
        size = half * BLOCK
        bt.barrier(interpret)
        merged = []
        for start in range(0, rows.C, 2 * size):
            upper, lower = (start, size, None), (start + size, size, None)
            left = dot32(bt.load_tile(m_ref, lower, upper), bt.load_tile(m_ref, upper, upper))
            merged.append((lower, upper, -dot32(bt.load_tile(m_ref, lower, lower), left)))
        bt.barrier(interpret)
        for lower, upper, tile in merged:
            bt.store_tile(m_ref, lower, upper, tile)
    bt.barrier(interpret)


def kda_prepare(
    q_ref, k_ref, v_ref, g_ref, erase_ref, write_ref,
    qw_ref, ktil_ref, y_ref, p_ref, m_ref, decay_ref, *debug_refs,
    sizes: Sizes, scale: float, k_tile: int, precision: str, always_exact: bool, interpret: bool,
):  # fmt: skip
    """All state-free tiles of one chunk of one value head. Grid (NT, B * HV)."""
    op = operand_dtype(q_ref.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    one, two = Rows(sizes.C), Rows(sizes.C, copies=2)
    start = pl.program_id(0) * sizes.C
    tokens, all_c, all_2c = sizes.rows(start, sizes.C), (0, sizes.C, None), (0, 2 * sizes.C, None)
    f32 = jnp.float32

    def channels(tile, AP):
        """Adds the part of P and A of one tile of key channels, and writes that tile of Qhat, Ehat and Ktil."""
        kc, padded = (tile * k_tile, k_tile, sizes.k_limit), (tile * k_tile, k_tile, None)
        k = bt.load_tile(k_ref, tokens, kc).astype(f32)
        x, _ = stacked(q_ref, k_ref, erase_ref, start, kc, two, sizes, scale)
        keys = Decays(bt.load_tile(g_ref, tokens, kc), one, precision)
        rows = Decays(sizes.gather(g_ref, start + two.row, kc), two, precision)

        near = dot_diagonal((x * rows.up(1)).astype(diagonal), (k * keys.anchor()).astype(diagonal), (1, 1))

        def exact(s, carry):
            """Column j of every diagonal block, for rows that need it: from the last j, with the sum of g over (j, i] at hand."""
            span, near = carry
            j = BLOCK - 1 - s
            k_j, g_j = (sizes.gather(ref, start + two.row // BLOCK * BLOCK + j, kc) for ref in (k_ref, g_ref))
            weighted = jnp.where(two.row % BLOCK >= j, jnp.exp(span), 0.0) * k_j
            here = (two.col == two.row // BLOCK * BLOCK + j) & rows.slow
            near = jnp.where(here, jnp.sum(x * weighted, axis=1)[:, None], near)
            span = jnp.where(two.row % BLOCK >= j, span + jnp.maximum(g_j, MIN_LOG_DECAY), span)
            return span, near

        _, near = lax.fori_loop(0, rows.exact_steps(always_exact), exact, (jnp.zeros_like(x), near))
        AP += jnp.where(two.run(1) & two.causal(), near, 0.0)
        for half in two.levels():
            far = dot((x * rows.up(half)).astype(op), (k * keys.down(half)).astype(op), (1, 1))
            AP += jnp.where(two.meet(half), far, 0.0)

        bt.store_tile(qw_ref, all_2c, padded, x * rows.up(one.blocks))
        bt.store_tile(ktil_ref, all_c, padded, k * keys.down(one.blocks))
        bt.store_tile(decay_ref, (0, 1, None), padded, keys.total())
        if debug_refs:  # G of the formulas, for tests that compare tensor for tensor.
            bt.store_tile(debug_refs[0], all_c, padded, masked_sum(one.row >= one.col, keys.g, precision, interpret))
        return AP

    tiles = sizes.bk // k_tile
    AP = jnp.zeros((2 * sizes.C, sizes.C), f32)
    AP = channels(0, AP) if tiles == 1 else lax.fori_loop(0, tiles, channels, AP)
    P, A = jnp.split(AP, 2)
    bt.store_tile(m_ref, all_c, all_c, A)
    bt.store_tile(p_ref, all_c, all_c, P)
    if debug_refs:
        bt.store_tile(debug_refs[1], all_c, all_c, A)

    invert(m_ref, one, interpret)
    M = bt.load_tile(m_ref, all_c, all_c).astype(op)
    lower = (sizes.C, sizes.C, None)

    def erased(tile, carry):
        """W = M Ehat, in place."""
        padded = (tile * k_tile, k_tile, None)
        W = dot(M, bt.load_tile(qw_ref, lower, padded))
        bt.barrier(interpret)
        bt.store_tile(qw_ref, lower, padded, W)
        return carry

    if tiles == 1:
        erased(0, 0)
    else:
        lax.fori_loop(0, tiles, erased, 0)
    slab = min(sizes.bv, V_SLAB)
    for first in range(0, sizes.bv, slab):
        vc = sizes.v_cols(first, slab)
        write = bt.load_tile(write_ref, tokens, vc if sizes.channelwise else (0, 1, None)).astype(f32)
        y = (write * bt.load_tile(v_ref, tokens, vc).astype(f32)).astype(op)
        bt.store_tile(y_ref, (first, slab, None), all_c, dot(y, M, (0, 1)))


def kda_state(
    qw_ref, ktil_ref, y_ref, p_ref, decay_ref, *refs,
    sizes: Sizes, v_tile: int, precision: str, has_initial: bool, save: bool, interpret: bool,
):  # fmt: skip
    """Walks over the chunks of one value head with a tile of S^T, [v_tile, bk], in registers. Grid (V tiles, B * HV).

    refs: initial_state if has_initial, then o, final_state, and S, U if save.
    """
    refs = list(refs)
    initial_ref = refs.pop(0) if has_initial else None
    o_ref, final_ref = refs[:2]
    op = operand_dtype(o_ref.dtype, precision)
    dot = Dot(precision, interpret)
    first = pl.program_id(0) * v_tile
    k_rows, vc = sizes.k_cols(), sizes.v_cols(first, v_tile)
    full_k, full_c, tile = pl.ds(0, sizes.bk), pl.ds(0, sizes.C), pl.ds(first, v_tile)
    lower_c = pl.ds(sizes.C, sizes.C)

    def step(n, S):
        So = S.astype(op)
        U = y_ref[n, tile, full_c].astype(jnp.float32) - dot(So, qw_ref[n, lower_c, full_k], (1, 1))
        Uo = U.astype(op)
        o = dot(So, qw_ref[n, full_c, full_k], (1, 1)) + dot(Uo, p_ref[n, full_c, full_c], (1, 1))
        bt.store_tile(o_ref, sizes.rows(n * sizes.C, sizes.C), vc, o.T)
        if save:
            states_ref, u_ref = refs[2:]
            states_ref[n, tile, full_k] = So
            u_ref[n, full_c, tile] = Uo.T
        return S * decay_ref[n, 0, full_k][None, :] + dot(Uo, ktil_ref[n, full_c, full_k])

    if initial_ref is None:
        S = jnp.zeros((v_tile, sizes.bk), jnp.float32)
    else:
        S = bt.load_tile(initial_ref, k_rows, vc).astype(jnp.float32).T
    S = lax.fori_loop(0, sizes.nt, step, S)
    bt.store_tile(final_ref, k_rows, vc, S.T)


def prepare(q, k, v, g, erase, write, *, scale, precision, config: KdaConfig, interpret, debug=False):
    """Runs `kda_prepare`; returns Prepared, and with debug=True also (G [.., C, bk], A [.., C, C]) in float32."""
    sizes = Sizes.of(q, v, erase, config)
    op = operand_dtype(q.dtype, precision)
    write = erase if write is None else write
    C, bk, bv = sizes.C, sizes.bk, sizes.bv
    tiles = [(2 * C, bk), (C, bk), (bv, C), (C, C), (C, C), (1, bk)]
    dtypes = [op, op, op, op, jnp.float32, jnp.float32]
    if debug:
        tiles += [(C, bk), (C, C)]
        dtypes += [jnp.float32] * 2
        dtypes[3] = jnp.float32
    outputs = []
    for tile, dtype in zip(tiles, dtypes):
        shape, spec = sizes.chunk(*tile)
        outputs.append((jax.ShapeDtypeStruct(shape, dtype), spec))
    out = bt.launch(
        kda_prepare,
        "kda_prepare",
        (sizes.nt, sizes.B * sizes.HV),
        [(x, sizes.head(x)) for x in (q, k, v, g, erase, write)],
        outputs,
        num_warps=config.prepare_warps,
        num_stages=1,
        interpret=interpret,
        sizes=sizes,
        scale=scale,
        k_tile=min(config.k_tile, bk),
        precision=precision,
        always_exact=config.always_exact,
    )
    return Prepared(*out[:6]), out[6:]


def run_states(prepared: Prepared, initial_state, q, v, erase, *, precision, config: KdaConfig, interpret, save):
    """Runs `kda_state`; returns o, final_state and States or None."""
    sizes = Sizes.of(q, v, erase, config)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    C, bk, bv = sizes.C, sizes.bk, sizes.bv
    inputs = [
        (x, sizes.chunks(*x.shape[2:])[1])
        for x in (prepared.QW, prepared.Ktil, prepared.Y, prepared.P, prepared.decay)
    ]
    if initial_state is not None:
        inputs.append((initial_state, sizes.state()))
    o = jax.ShapeDtypeStruct(v.shape, q.dtype)
    final = jax.ShapeDtypeStruct((sizes.B, sizes.HV, sizes.K, sizes.V), jnp.float32)
    outputs = [(o, sizes.head(o)), (final, sizes.state())]
    if save:
        for tile in ((bv, bk), (C, bv)):
            shape, spec = sizes.chunks(*tile)
            outputs.append((jax.ShapeDtypeStruct(shape, op), spec))
    o, final, *states = bt.launch(
        kda_state,
        "kda_state",
        (bv // v_tile, sizes.B * sizes.HV),
        inputs,
        outputs,
        num_warps=config.state_warps,
        num_stages=config.state_stages,
        interpret=interpret,
        sizes=sizes,
        v_tile=v_tile,
        precision=precision,
        has_initial=initial_state is not None,
        save=save,
    )
    return o, final, States(*states) if save else None
