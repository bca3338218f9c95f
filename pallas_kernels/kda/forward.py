"""Forward kernels of KDA and of the general rule with channel-wise gates (names as in the formulas below).

With e = erase * k, y = write * v, G the cumulative log-decay inside a chunk of C tokens and S0 the state entering it:

    A_ij   = sum_c e_ic k_jc exp(G_ic - G_jc)          j < i
    P_ij   = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    M      = (I + A)^-1
    Qhat_i = scale q_i exp(G_i),  Ehat_i = e_i exp(G_i),  Ktil_j = k_j exp(G_C - G_j)
    U      = M y - W S0  with  W = M Ehat
    o      = Qhat S0 + P U
    S1     = diag(exp(G_C)) S0 + Ktil^T U

`kda_prepare` forms everything that does not depend on the state, all chunks in parallel. `kda_state` walks over the
chunks and keeps
S^T in registers: with the value dimension as rows, S^T and U^T are always the left operand of a product, which the
tensor cores read from registers, so the serial chain never passes through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.backend_triton import Dot
from pallas_kernels.kda.blocks import FAST_LIMIT, Decays, exact_products, invert, iotas
from pallas_kernels.kda.config import BLOCK, KdaConfig
from pallas_kernels.kda.raw import NORM_EPSILON, NOTHING_RAW, Raw
from pallas_kernels.kda.sizes import Packing, Sizes, operand_dtype
from pallas_kernels.kda.tokens import Inputs, Tokens

V_SLAB = 128  # Value columns that the parallel kernels hold at a time.


class Prepared(NamedTuple):
    """Tiles of every chunk, [B * HV, NT, ...], K and V padded.

    W, Qhat, Ktil [C, bk]; Y [bv, C], the transpose of M y; P and M [C, C]; decay [1, bk], exp(G_C);
    norms [C, 2] in float32, 1 / norm of queries and of keys, where they come raw.
    """

    W: jax.Array
    Qhat: jax.Array
    Ktil: jax.Array
    Y: jax.Array
    P: jax.Array
    M: jax.Array
    decay: jax.Array
    norms: jax.Array | None


class States(NamedTuple):
    """State entering every chunk, transposed, [B * HV, NT, bv, bk], and U [B * HV, NT, C, bv]."""

    S: jax.Array
    U: jax.Array


class Segments(NamedTuple):
    """What makes the segments of a split sequence independent, all in float32.

    maps: E^T over D^T of every segment, [B * HV, segments, bv + bk, bk]: it makes E + D S of the state S before it.
    starts: the states, transposed, that the segments start from, [B * HV, segments, bv, bk].
    """

    maps: jax.Array
    starts: jax.Array


def diagonal_dot(precision: str, op, interpret: bool) -> tuple[Dot, jnp.dtype]:
    """The product, and its operands' dtype, for factors behind an anchor: they outgrow float16, where one TF32 pass
    has the same mantissa and float32's range."""
    if op == jnp.float16:
        return Dot("tf32", interpret), jnp.dtype(jnp.float32)
    return Dot(precision, interpret), op


def of_used_chunks(axis: int):
    """Makes a kernel leave out the slots that packed sequences do not use; `axis` of the grid counts chunks. Interpret
    mode, which knows no program in a branch, does not."""

    def decorate(body):
        @functools.wraps(body)
        def kernel(x, packing, *refs, sizes, interpret, **static):
            run = functools.partial(body, x, packing, *refs, sizes=sizes, interpret=interpret, **static)
            if packing is None or interpret:
                run()
            else:
                _, (first, end) = chunk_rows(sizes, packing, pl.program_id(axis))
                pl.when(first < end)(run)

        return kernel

    return decorate


@of_used_chunks(axis=0)
def kda_prepare(
    x: Inputs, packing: Packing | None, *refs,
    sizes: Sizes, raw: Raw, scale: float, precision: str, matrices: bool, split: bool, always_exact: bool,
    interpret: bool,
):  # fmt: skip
    """All state-free tiles of one chunk of one value head. Grid (NT, B * HV).

    split: whether W, Qhat, Ktil and P are kept as three bfloat16 pieces, one below the other.

    refs: P, M and, of raw queries and keys, norms, inputs unless `matrices` says that they are to be formed; the other
    results, W, Qhat, Ktil, Y, decay; G and A for tests; and, where M is formed and kept in 16 bit, room for A and M in
    float32.
    """
    p_ref, m_ref, *refs = refs
    norm_ref = refs.pop(0) if raw.l2norm else None
    a_ref = refs.pop() if matrices and m_ref.dtype != jnp.float32 else m_ref
    (w_ref, qhat_ref, ktil_ref, y_ref, decay_ref), debug_refs = refs[:5], refs[5:]
    op = operand_dtype(x.q.dtype, precision)
    dot = Dot(precision, interpret)
    dot_diagonal, diagonal = diagonal_dot(precision, op, interpret)
    row, col = iotas()
    start, limit = chunk_rows(sizes, packing, pl.program_id(0))
    kc, all_k, all_c = sizes.k_cols(), (0, sizes.bk, None), (0, sizes.C, None)
    f32 = jnp.float32

    def local(r):
        return (r * BLOCK, BLOCK, None)

    def put(ref, rows: tuple[Any, int, None], cols, value):
        if not split:
            bt.store_tile(ref, rows, cols, value)
            return
        for i, piece in enumerate(bt.pieces(value)):
            bt.store_tile(ref, (rows[0] + i * sizes.C, rows[1], None), cols, piece)

    def get(ref, rows: tuple[Any, int, None], cols) -> Any:
        if not split:
            return bt.load_tile(ref, rows, cols)
        pieces = (bt.load_tile(ref, (rows[0] + i * sizes.C, rows[1], None), cols) for i in range(3))
        return functools.reduce(jnp.add, (x.astype(f32) for x in pieces))

    tokens = Tokens(x, norm_ref, sizes, raw, start, limit, kc, precision, interpret)
    if raw.l2norm and matrices:
        for column, ref in enumerate((x.q, x.k)):
            rows = bt.load_tile(ref, tokens.rows(0, sizes.C), kc).astype(f32)
            norm = lax.rsqrt(jnp.sum(rows * rows, axis=1)[:, None] + NORM_EPSILON)
            bt.store_tile(norm_ref, all_c, (column, 1, None), norm)
        bt.barrier(interpret)

    def inputs(a):
        """q, k, erase * k and g of block a."""
        k, q = tokens.k(a), tokens.q(a) * scale
        return q, k, tokens.erase(a) * k, tokens.g(a)

    base = jnp.ones((BLOCK, sizes.bk), f32)  # Decay from the chunk's start to the block's start, the same in every row.
    deepest = jnp.zeros((BLOCK, sizes.bk), f32)
    running: list = []  # k_j exp(decay from j to the start of block a); after the last block: Ktil.
    for a in range(sizes.blocks):
        q, k, e, g = inputs(a)
        d = Decays.of(g, precision, interpret)
        E, Q = e * d.up, q * d.up
        if matrices:
            deepest = jnp.maximum(deepest, -d.prefix)
            keys = (k * d.anchor()).astype(diagonal)
            A = dot_diagonal(E.astype(diagonal), keys, (1, 1))
            P = dot_diagonal(Q.astype(diagonal), keys, (1, 1))
            bt.store_tile(a_ref, local(a), local(a), jnp.where(row > col, A, 0.0))
            put(p_ref, local(a), local(a), jnp.where(row >= col, P, 0.0))
            Eo, Qo = E.astype(op), Q.astype(op)
            for b in range(a):
                earlier = running[b].astype(op)
                bt.store_tile(a_ref, local(a), local(b), dot(Eo, earlier, (1, 1)))
                put(p_ref, local(a), local(b), dot(Qo, earlier, (1, 1)))
                bt.store_tile(a_ref, local(b), local(a), jnp.zeros((BLOCK, BLOCK), f32))
                put(p_ref, local(b), local(a), jnp.zeros((BLOCK, BLOCK), f32))
        put(qhat_ref, local(a), all_k, Q * base)
        put(w_ref, local(a), all_k, E * base)  # Ehat for now.
        running = [x * d.whole for x in running] + [k * d.down]
        base *= d.whole
    for b in range(sizes.blocks):
        put(ktil_ref, local(b), all_k, running[b])
    # Every row of base holds exp(G_C): their maximum is it, without a sum of rows that would round.
    bt.store_tile(decay_ref, (0, 1, None), all_k, jnp.max(base, axis=0)[None, :])

    def exact(a, carry):
        """Rows of the diagonal block a that need it, again by the exact path."""
        rows_a = (a * BLOCK, BLOCK, None)
        q, k, e, g = inputs(a)
        slow = (Decays.of(g, precision, interpret).depth() > FAST_LIMIT[precision])[:, None]
        A, P = exact_products((e, q), k, g, interpret)
        A, P = jnp.where(row > col, A, 0.0), jnp.where(row >= col, P, 0.0)
        bt.store_tile(a_ref, rows_a, rows_a, jnp.where(slow, A, bt.load_tile(a_ref, rows_a, rows_a)))
        put(p_ref, rows_a, rows_a, jnp.where(slow, P, get(p_ref, rows_a, rows_a).astype(f32)))
        return carry

    bt.barrier(interpret)
    if matrices:
        any_slow = jnp.max(jnp.max(deepest, axis=1), axis=0) > FAST_LIMIT[precision]
        lax.fori_loop(0, sizes.blocks if always_exact else any_slow.astype(jnp.int32) * sizes.blocks, exact, 0)

    if debug_refs:  # G and A of the formulas, for tests that compare tensor for tensor.
        above = jnp.zeros((1, sizes.bk), f32)
        for a in range(sizes.blocks):
            d = Decays.of(g := inputs(a)[3], precision, interpret)
            bt.store_tile(debug_refs[0], local(a), all_k, d.prefix + above)
            above += jnp.sum(g, axis=0)[None, :]
        bt.barrier(interpret)
        bt.store_tile(debug_refs[1], all_c, all_c, bt.load_tile(a_ref, all_c, all_c))

    if matrices:
        invert(a_ref, sizes.C, interpret)
    M = bt.load_tile(a_ref, all_c, all_c).astype(op)
    if a_ref is not m_ref:
        bt.store_tile(m_ref, all_c, all_c, M)
    W = dot(M, get(w_ref, all_c, all_k))
    bt.barrier(interpret)
    put(w_ref, all_c, all_k, W)
    rows, slab = tokens.rows(0, sizes.C), min(sizes.bv, V_SLAB)
    for first in range(0, sizes.bv, slab):
        vc = sizes.v_cols(first, slab)
        y = (tokens.write(rows, vc) * bt.load_tile(x.v, rows, vc).astype(f32)).astype(op)
        bt.store_tile(y_ref, (first, slab, None), all_c, dot(y, M, (0, 1)))


def kda_state(
    w_ref, qhat_ref, ktil_ref, y_ref, p_ref, decay_ref, packing: Packing | None, *refs,
    sizes: Sizes, v_tile: int, segments: int, precision: str, has_initial: bool, with_output: bool, save: bool,
    interpret: bool,
):  # fmt: skip
    """Walks over the chunks of one segment of a sequence and value head, a tile of S^T, [v_tile, bk], in registers.
    Grid (V tiles, segments, sequences * HV).

    refs: the states that segments start from (segments > 1) or initial_state (if has_initial); then o, final_state if
    with_output, and S, U if save.
    """
    refs = list(refs)
    start_ref = refs.pop(0) if segments > 1 or has_initial else None
    op = ktil_ref.dtype
    dot = Dot(precision, interpret)
    first, segment = pl.program_id(0) * v_tile, pl.program_id(1)
    k_rows, vc = sizes.k_cols(), sizes.v_cols(first, v_tile)
    full_k, full_c, tile = pl.ds(0, sizes.bk), pl.ds(0, sizes.C), pl.ds(first, v_tile)
    begin, end, rows = segment_chunks(sizes, packing, segment, segments)

    def step(n, S):
        So = S.astype(op)
        U = y_ref[n, tile, full_c].astype(jnp.float32) - dot(So, w_ref[n, full_c, full_k], (1, 1))
        Uo = U.astype(op)
        if with_output:
            o = dot(So, qhat_ref[n, full_c, full_k], (1, 1)) + dot(Uo, p_ref[n, full_c, full_c], (1, 1))
            bt.store_tile(refs[0], rows(n), vc, o.T)
        if save:
            states_ref, u_ref = refs[-2:]
            states_ref[n, tile, full_k] = So
            u_ref[n, full_c, tile] = Uo.T
        return S * decay_ref[n, 0, full_k][None, :] + dot(Uo, ktil_ref[n, full_c, full_k])

    if segments > 1:
        S = bt.load_tile(start_ref, (first, v_tile, None), (0, sizes.bk, None))
    else:
        S = load_state(start_ref, k_rows, vc, (v_tile, sizes.bk))
    S = lax.fori_loop(begin, end, step, S)

    if with_output:

        @pl.when(segment == segments - 1)
        def _():
            bt.store_tile(refs[1], k_rows, vc, S.T)


def load_state(ref, k_rows: tuple, v_cols: tuple, shape: tuple[int, int]) -> jax.Array:
    """A tile of a state [K, V], transposed, in float32; zeros where there is none."""
    if ref is None:
        return jnp.zeros(shape, jnp.float32)
    return bt.load_tile(ref, k_rows, v_cols).astype(jnp.float32).T


def chunk_rows(sizes: Sizes, packing: Packing | None, n) -> tuple:
    """The token of a chunk's first row, and what limits its rows: None where no chunk sticks out, T, or the chunk's own
    first token and the one after its last."""
    if packing is None:
        return n * sizes.C, sizes.row_limit
    first, end = packing.rows[n, 0], packing.rows[n, 1]
    return lax.div(first, sizes.C) * sizes.C, (first, end)


def segment_chunks(sizes: Sizes, packing: Packing | None, segment, segments: int) -> tuple:
    """First and last + 1 chunk of a segment of the program's sequence, and a function from a chunk to its rows."""
    begin, end, rows = sizes.sequence_chunks(packing, pl.program_id(2))
    if segments == 1:
        return begin, end, rows
    length = -(-sizes.nt // segments)
    return segment * length, jnp.minimum((segment + 1) * length, sizes.nt), rows


def kda_segment(
    w_ref, ktil_ref, y_ref, decay_ref, map_ref,
    *, sizes: Sizes, tile: int, segments: int, precision: str, interpret: bool,
):  # fmt: skip
    """What a segment does to a state, S -> D S + E, as rows of [bv + bk, bk]: E^T over D^T. Grid (tiles, segments, B
    * HV).

    E is the state after the segment from a zero state, column m of D the state after it from the m-th unit column
    without values.
    """
    op = ktil_ref.dtype
    dot = Dot(precision, interpret)
    first, segment = pl.program_id(0) * tile, pl.program_id(1)
    full_k, full_c = pl.ds(0, sizes.bk), pl.ds(0, sizes.C)
    values = pl.ds(jnp.minimum(first, sizes.bv - tile), tile)

    def step(n, S):
        y = jnp.where(first < sizes.bv, y_ref[n, values, full_c].astype(jnp.float32), 0.0)
        U = y - dot(S.astype(op), w_ref[n, full_c, full_k], (1, 1))
        return S * decay_ref[n, 0, full_k][None, :] + dot(U.astype(op), ktil_ref[n, full_c, full_k])

    row = first + jnp.arange(tile)[:, None]
    S = (row - sizes.bv == jnp.arange(sizes.bk)[None, :]).astype(jnp.float32)
    S = lax.fori_loop(*segment_chunks(sizes, None, segment, segments)[:2], step, S)  # pyright: ignore[reportCallIssue]
    bt.store_tile(map_ref, (first, tile, None), (0, sizes.bk, None), S)


def kda_combine(
    map_ref, *refs, sizes: Sizes, v_tile: int, segments: int, has_initial: bool, precision: str, interpret: bool
):
    """States that the segments of one value head start from, transposed, [segments * bv, bk]. Grid (V tiles, B *
    HV)."""
    refs = list(refs)
    initial_ref = refs.pop(0) if has_initial else None
    dot = state_dot(precision, interpret)
    first = pl.program_id(0) * v_tile
    all_k, height = (0, sizes.bk, None), sizes.bv + sizes.bk
    S = load_state(initial_ref, sizes.k_cols(), sizes.v_cols(first, v_tile), (v_tile, sizes.bk))
    for segment in range(segments):
        bt.store_tile(refs[0], (segment * sizes.bv + first, v_tile, None), all_k, S)
        if segment < segments - 1:
            added = bt.load_tile(map_ref, (segment * height + first, v_tile, None), all_k)
            S = added + dot(S, bt.load_tile(map_ref, (segment * height + sizes.bv, sizes.bk, None), all_k))


def state_dot(precision: str, interpret: bool) -> Dot:
    """Products of whole states. Where chunks round them to 16 bits or to TF32, one pass in TF32 loses no more."""
    return Dot("fp32" if precision == "fp32" else "tf32", interpret)


def launched(packing: Packing | None) -> tuple:
    """What a launch takes in its list of inputs, packed or not."""
    return (None, None) if packing is None else packing.launched()


def prepare(
    q, k, v, g, erase, write, A_log=None, dt_bias=None, starts=None,
    *, scale, precision, config: KdaConfig, interpret, raw: Raw = NOTHING_RAW, packing: Packing | None = None,
    matrices=None, debug=False,
):  # fmt: skip
    """Runs `kda_prepare`; returns Prepared, and with debug=True also (G [.., C, bk], A [.., C, C]) in float32.

    matrices: P, M and norms (None unless q and k come raw), where an earlier run has left them.
    """
    sizes = Sizes.of(q, v, erase, config, packing)
    op = operand_dtype(q.dtype, precision)
    C, bk, bv = sizes.C, sizes.bk, sizes.bv
    inputs: list = [Inputs(q, k, v, g, erase, write, A_log, dt_bias, starts).launched(sizes), launched(packing)]
    # Of the Hopper kernels with float32-accurate products: none else reads W, Qhat, Ktil and P.
    split = config.serial == "mosaic" and precision == "fp32" and not debug
    kept, rows = (jnp.dtype(jnp.bfloat16), 3 * C) if split else (op, C)
    results: list[tuple[tuple[int, ...], Any]] = [((rows, bk), kept)] * 3 + [((bv, C), op), ((1, bk), jnp.float32)]
    if matrices is None:
        norms = [((C, 2), jnp.float32)] if raw.l2norm else []
        kinds = [((C, C), jnp.float32)] * 2 if debug else [((rows, C), kept), ((C, C), op)]
        results = kinds + norms + results
    else:
        inputs += [(x, sizes.chunk(*x.shape[2:])[1]) for x in matrices if x is not None]
    if debug:
        results += [((C, bk), jnp.float32), ((C, C), jnp.float32)]
    elif matrices is None and op != jnp.float32:
        results += [((C, C), jnp.float32)]
    outputs = []
    for tile, dtype in results:
        shape, spec = sizes.chunk(*tile)
        outputs.append((jax.ShapeDtypeStruct(shape, dtype), spec))
    found = list(
        bt.launch(
            kda_prepare,
            "kda_prepare",
            (sizes.nt, sizes.B * sizes.HV),
            inputs,
            outputs,
            num_warps=config.prepare_warps,
            num_stages=1,
            interpret=interpret,
            sizes=sizes,
            raw=raw,
            scale=scale,
            precision=precision,
            matrices=matrices is None,
            split=split,
            always_exact=config.always_exact,
        )
    )
    P, M, norms = matrices or (found.pop(0), found.pop(0), found.pop(0) if raw.l2norm else None)
    W, Qhat, Ktil, Y, decay, *rest = found
    return Prepared(W, Qhat, Ktil, Y, P, M, decay, norms), rest if debug else []


def find_segments(
    prepared: Prepared, initial_state, q, v, erase, *, precision, config: KdaConfig, interpret
) -> Segments | None:
    """Runs `kda_segment` and `kda_combine`, or nothing where the sequence is not split."""
    sizes = Sizes.of(q, v, erase, config)
    segments = config.segments_of(sizes.nt)
    if segments == 1:
        return None
    tile = min(config.v_tile, sizes.bv, sizes.bk)
    rows = sizes.bv + sizes.bk
    inputs = [(x, sizes.chunks(*x.shape[2:])[1]) for x in (prepared.W, prepared.Ktil, prepared.Y, prepared.decay)]
    spec = pl.BlockSpec((None, None, rows, sizes.bk), lambda _, n, bh: (bh, n, 0, 0))
    [maps] = bt.launch(
        kda_segment,
        "kda_segment",
        (rows // tile, segments, sizes.B * sizes.HV),
        inputs,
        [(jax.ShapeDtypeStruct((sizes.B * sizes.HV, segments, rows, sizes.bk), jnp.float32), spec)],
        num_warps=config.state_warps,
        num_stages=config.state_stages,
        interpret=interpret,
        sizes=sizes,
        tile=tile,
        segments=segments,
        precision=precision,
    )
    starts = segment_starts(maps, initial_state, q, v, erase, precision=precision, config=config, interpret=interpret)
    return Segments(maps, starts)


def segment_starts(maps, initial_state, q, v, erase, *, precision, config: KdaConfig, interpret, body=kda_combine):
    """Runs `kda_combine` (or its mirror image, given as body): [B * HV, segments, bv, bk] in float32, and what else
    it returns."""
    sizes = Sizes.of(q, v, erase, config)
    segments, v_tile = maps.shape[1], min(config.v_tile, sizes.bv)

    def head(rows):
        return pl.BlockSpec((None, rows, sizes.bk), lambda _, bh: (bh, 0, 0))

    flat = maps.reshape(maps.shape[0], -1, sizes.bk)
    shape = jax.ShapeDtypeStruct((maps.shape[0], segments * sizes.bv, sizes.bk), jnp.float32)
    inputs = [(flat, head(flat.shape[1]))] + ([] if initial_state is None else [(initial_state, sizes.state())])
    [starts] = bt.launch(
        body,
        body.__name__,
        (sizes.bv // v_tile, sizes.B * sizes.HV),
        inputs,
        [(shape, head(shape.shape[1]))],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        sizes=sizes,
        v_tile=v_tile,
        segments=segments,
        has_initial=initial_state is not None,
        precision=precision,
    )
    return starts.reshape(maps.shape[0], segments, sizes.bv, sizes.bk)


def run_states(
    prepared: Prepared,
    split: Segments | None,
    initial_state,
    q,
    v,
    erase,
    *,
    precision,
    config: KdaConfig,
    interpret,
    save,
    with_output=True,
    packing: Packing | None = None,
):
    """Runs `kda_state`.

    Returns o and final_state (None without `with_output`), and States (None without `save`).
    """
    sizes = Sizes.of(q, v, erase, config, packing)
    op = operand_dtype(q.dtype, precision)
    v_tile = min(config.v_tile, sizes.bv)
    C, bk, bv = sizes.C, sizes.bk, sizes.bv
    inputs: list = [
        (x, sizes.chunks(*x.shape[2:])[1])
        for x in (prepared.W, prepared.Qhat, prepared.Ktil, prepared.Y, prepared.P, prepared.decay)
    ]
    inputs.append(launched(packing))
    segments = 1 if split is None else split.maps.shape[1]
    if split is not None:
        inputs.append((split.starts, pl.BlockSpec((None, None, bv, bk), lambda *i: (i[-1], i[-2], 0, 0))))
    elif initial_state is not None:
        inputs.append((initial_state, sizes.state()))
    o = jax.ShapeDtypeStruct(v.shape, q.dtype)
    final = jax.ShapeDtypeStruct((sizes.N, sizes.HV, sizes.K, sizes.V), jnp.float32)
    results = [(o, sizes.head(o)), (final, sizes.state())] if with_output else []
    if save:
        for tile in ((bv, bk), (C, bv)):
            shape, spec = sizes.chunks(*tile)
            results.append((jax.ShapeDtypeStruct(shape, op), spec))
    found = bt.launch(
        kda_state,
        "kda_state",
        (bv // v_tile, segments, sizes.N * sizes.HV),
        inputs,
        results,
        num_warps=config.state_warps,
        num_stages=config.state_stages,
        interpret=interpret,
        sizes=sizes,
        v_tile=v_tile,
        segments=segments,
        precision=precision,
        has_initial=initial_state is not None,
        with_output=with_output,
        save=save,
    )
    states = States(*found[-2:]) if save else None
    return (*found[:2], states) if with_output else (None, None, states)
