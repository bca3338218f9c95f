"""Forward kernels of KDA and of the general rule with channel-wise gates (names as in the formulas below).

With e = erase * k, y = write * v, G the cumulative log-decay inside a chunk of C tokens and S0 the state entering it:

    A_ij   = sum_c e_ic k_jc exp(G_ic - G_jc)          j < i
    P_ij   = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    M      = (I + A)^-1
    Qhat_i = scale q_i exp(G_i),  Ehat_i = e_i exp(G_i),  Ktil_j = k_j exp(G_C - G_j)
    U      = M y - W S0  with  W = M Ehat
    o      = Qhat S0 + P U
    S1     = diag(exp(G_C)) S0 + Ktil^T U

`kda_prepare` forms everything that does not depend on the state, all chunks in parallel, in 16-row blocks. `kda_state` walks over
the chunks and keeps S^T in registers: with the value dimension as rows, S^T and U^T are always the left operand of a product, which
the tensor cores read from registers, so the serial chain never passes through shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.blocks import (
    FAST_LIMIT,
    MIN_LOG_DECAY,
    block_sums,
    exact_products,
    inverse,
    iotas,
    slow_rows,
)
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.sizes import Sizes, operand_dtype
from jax.experimental import pallas as pl

V_SLAB = 128  # Value columns that kda_prepare and kda_grads hold at a time.


class Prepared(NamedTuple):
    """Tiles of every chunk, [B * HV, NT, ...], K and V padded.

    W, Qhat, Ktil [C, bk]; Y [bv, C], the transpose of M y; P, M [C, C]; decay [bk], exp(G_C).
    """

    W: jax.Array
    Qhat: jax.Array
    Ktil: jax.Array
    Y: jax.Array
    P: jax.Array
    M: jax.Array
    decay: jax.Array


class States(NamedTuple):
    """State entering every chunk, transposed, [B * HV, NT, bv, bk], and U [B * HV, NT, C, bv]."""

    S: jax.Array
    U: jax.Array


def diagonal_factors(k, prefix, precision: str):
    """Keys of a block behind the anchor at its start: k exp(-prefix), with exponents clamped where rows leave the fast path."""
    return k * jnp.exp(jnp.minimum(-prefix, FAST_LIMIT[precision]))


def kda_prepare(
    q_ref, k_ref, v_ref, g_ref, erase_ref, write_ref,
    w_ref, qhat_ref, ktil_ref, y_ref, p_ref, m_ref, decay_ref, *debug_refs,
    sizes: Sizes, scale: float, precision: str, always_exact: bool, interpret: bool,
):  # fmt: skip
    """All state-free tiles of one chunk of one value head. Grid (NT, B * HV)."""
    op = operand_dtype(q_ref.dtype, precision)
    dot = Dot(precision, interpret)
    dot32 = Dot("fp32", interpret)
    # Behind the anchor, factors outgrow float16; one TF32 pass has its mantissa and float32's range.
    dot_diagonal, diagonal = (Dot("tf32", interpret), jnp.float32) if op == jnp.float16 else (dot, op)
    row, col = iotas()
    start = pl.program_id(0) * sizes.C
    kc = sizes.k_cols()

    base = jnp.ones((1, sizes.bk), jnp.float32)  # Decay from the chunk's start to the block's start.
    base_log = jnp.zeros((1, sizes.bk), jnp.float32)
    K_running: list = []  # k_j exp(decay from j to the start of block a); after the last block: Ktil.
    E_hat: list = []
    M: list[dict] = []
    for a in range(sizes.blocks):
        rows = sizes.rows(start + a * BLOCK)
        local = (a * BLOCK, BLOCK, None)
        k = bt.load_tile(k_ref, rows, kc).astype(jnp.float32)
        q = bt.load_tile(q_ref, rows, kc).astype(jnp.float32) * scale
        g = jnp.maximum(bt.load_tile(g_ref, rows, kc).astype(jnp.float32), MIN_LOG_DECAY)
        erase = bt.load_tile(erase_ref, rows, kc if sizes.channelwise else (0, 1, None)).astype(jnp.float32)
        e = erase * k
        prefix, suffix, total = block_sums(g, dot32)
        decayed = jnp.exp(prefix)
        E, Q = e * decayed, q * decayed
        Kd = diagonal_factors(k, prefix, precision).astype(diagonal)

        slow, steps = slow_rows(prefix, precision)
        A_exact, P_exact = exact_products((e, q), k, g, BLOCK if always_exact else steps)
        A = jnp.where(slow[:, None], A_exact, dot_diagonal(E.astype(diagonal), Kd, (1, 1)))
        P = jnp.where(slow[:, None], P_exact, dot_diagonal(Q.astype(diagonal), Kd, (1, 1)))
        A = jnp.where(row > col, A, 0.0)
        bt.store_tile(p_ref, local, local, jnp.where(row >= col, P, 0.0))

        Eo, Qo = E.astype(op), Q.astype(op)
        A_left = []
        for b in range(a):
            Kb = K_running[b].astype(op)
            A_left.append(dot(Eo, Kb, (1, 1)))
            bt.store_tile(p_ref, local, (b * BLOCK, BLOCK, None), dot(Qo, Kb, (1, 1)))

        # Row a of M: M_aa, and M_ab = -M_aa sum_c A_ac M_cb.
        M_a = {a: inverse(A, dot32)}
        for b in range(a):
            left = dot32(A_left[b], M[b][b])
            for c in range(b + 1, a):
                left += dot32(A_left[c], M[c][b])
            M_a[b] = -dot32(M_a[a], left)
        M.append(M_a)

        bt.store_tile(qhat_ref, local, (0, sizes.bk, None), Q * base)
        E_hat.append((E * base).astype(op))
        W = sum(dot(M_a[b].astype(op), E_hat[b]) for b in range(a + 1))
        bt.store_tile(w_ref, local, (0, sizes.bk, None), W)
        for b in range(sizes.blocks):
            tile = M_a[b] if b <= a else jnp.zeros((BLOCK, BLOCK), jnp.float32)
            bt.store_tile(m_ref, local, (b * BLOCK, BLOCK, None), tile)
            if b > a:
                bt.store_tile(p_ref, local, (b * BLOCK, BLOCK, None), tile)

        if debug_refs:  # G and A of the formulas, for tests that compare tensor for tensor.
            bt.store_tile(debug_refs[0], local, (0, sizes.bk, None), prefix + base_log)
            for b in range(sizes.blocks):
                tile = A if b == a else A_left[b] if b < a else jnp.zeros((BLOCK, BLOCK), jnp.float32)
                bt.store_tile(debug_refs[1], local, (b * BLOCK, BLOCK, None), tile)

        block_decay = jnp.exp(total)
        K_running = [x * block_decay for x in K_running] + [k * jnp.exp(suffix)]
        base, base_log = base * block_decay, base_log + total

    bt.store_tile(decay_ref, (0, 1, None), (0, sizes.bk, None), base)
    for b in range(sizes.blocks):
        bt.store_tile(ktil_ref, (b * BLOCK, BLOCK, None), (0, sizes.bk, None), K_running[b])

    slab = min(sizes.bv, V_SLAB)
    for first in range(0, sizes.bv, slab):
        y: list = []
        for a in range(sizes.blocks):
            rows = sizes.rows(start + a * BLOCK)
            vc = sizes.v_cols(first, slab)
            write = bt.load_tile(write_ref, rows, vc if sizes.channelwise else (0, 1, None)).astype(jnp.float32)
            y.append((write * bt.load_tile(v_ref, rows, vc).astype(jnp.float32)).astype(op))
            My = sum(dot(M[a][b].astype(op), y[b]) for b in range(a + 1))
            bt.store_tile(y_ref, (first, slab, None), (a * BLOCK, BLOCK, None), My.T)


def kda_state(
    w_ref, qhat_ref, ktil_ref, y_ref, p_ref, decay_ref, *refs,
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

    def step(n, S):
        So = S.astype(op)
        U = y_ref[n, tile, full_c].astype(jnp.float32) - dot(So, w_ref[n, full_c, full_k], (1, 1))
        Uo = U.astype(op)
        o = dot(So, qhat_ref[n, full_c, full_k], (1, 1)) + dot(Uo, p_ref[n, full_c, full_c], (1, 1))
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
    tiles = [(C, bk), (C, bk), (C, bk), (bv, C), (C, C), (C, C), (1, bk)]
    dtypes = [op] * 4 + [op] * 2 + [jnp.float32]
    if debug:
        dtypes[4:6] = [jnp.float32] * 2
        tiles += [(C, bk), (C, C)]
        dtypes += [jnp.float32] * 2
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
        precision=precision,
        always_exact=config.always_exact,
    )
    return Prepared(*out[:7]), out[7:]


def run_states(prepared: Prepared, initial_state, q, v, erase, *, precision, config: KdaConfig, interpret, save):
    """Runs `kda_state`; returns o, final_state and States or None."""
    sizes = Sizes.of(q, v, erase, config)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    C, bk, bv = sizes.C, sizes.bk, sizes.bv
    inputs = [
        (x, sizes.chunks(*x.shape[2:])[1])
        for x in (prepared.W, prepared.Qhat, prepared.Ktil, prepared.Y, prepared.P, prepared.decay)
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
