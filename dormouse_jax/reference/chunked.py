"""The chunked form in plain jnp, forward and backward: the "xla" implementation.

Per chunk of C tokens, with S0 the state that enters it, G the cumulative sum of g, e = erase * k and y = write * v:

    A_ij = sum_c e_ic k_jc exp(G_ic - G_jc)          j < i
    P_ij = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    M = (I + A)^-1      Ehat = e exp(G)      Qhat = scale q exp(G)      Ktil = k exp(G_C - G)      W = M Ehat
    U = M y - W S0      o = Qhat S0 + P U    S1 = diag(exp(G_C)) S0 + Ktil^T U

Everything but the states is computed for many chunks at once; the states follow in a scan. Long sequences go group of
chunks by group of chunks, so that what is held at a time is bounded. Arrays of N chunks are `[N, B, HV, C, dim]`.

Packed sequences are brought into chunks of one sequence each, the rest of a sequence's first and last chunk filled with
zeros, which change no state. The scan then carries the states of all sequences.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax import packing

# Rows of a block. Inside one, exp(G_i - G_j) is computed for every pair; between two, it is factored at the later
# block's first row, where both factors are at most one.
BLOCK = 16

# exp(-127) is 0 in float32: a stronger decay changes nothing, and -inf would make NaN of a difference.
STRONGEST_DECAY = -127.0

# Bytes that one [N, B, HV, C, dim] array of a group of chunks may take.
_GROUP_BYTES = {"cpu": 16 << 20, "gpu": 64 << 20}


@dataclasses.dataclass(frozen=True)
class ChunkedConfig:
    """How the chunked form is computed.

    Attributes:
      chunk_size: tokens in a chunk, a power of two from 16 to 128.
      chunks_per_group: chunks that are computed at once.
      products: precision of the products with the state and with the inverse: "fp32", "tf32" or "bf16".
    """

    chunk_size: int
    chunks_per_group: int
    products: str

    def __post_init__(self):
        if self.chunk_size not in (16, 32, 64, 128):
            raise ValueError(f"chunk_size must be 16, 32, 64 or 128, got {self.chunk_size}")
        if self.chunks_per_group < 1:
            raise ValueError(f"chunks_per_group must be at least 1, got {self.chunks_per_group}")
        if self.products not in ("fp32", "tf32", "bf16"):
            raise ValueError(f"products must be 'fp32', 'tf32' or 'bf16', got {self.products!r}")


def choose_config(
    platform: str,
    *,
    K: int,
    V: int,
    T: int,
    batch_heads: int,
    precision: str,
    dtype: jnp.dtype,
    chunk_size: int | None,
    sequences: int = 1,
) -> ChunkedConfig:
    """A configuration for `batch_heads` rows of T tokens, each of so many sequences, on "cpu", "gpu" or another
    platform.

    XLA knows one-pass TF32 on GPUs only, and elsewhere "tf32" is computed as "fp32". float16 operands go through TF32,
    which keeps all of their 11 bits and has the range that states and gradients need.
    """
    if chunk_size is None:
        length = -(-T // sequences)
        chunk_size = next((C for C in (16, 32) if length <= C), 32 if platform == "cpu" else 64)
    chunks = packing.number_of_slots(T, sequences, chunk_size)
    chunk_bytes = 4 * chunk_size * max(K, V) * max(batch_heads, 1)
    most = max(1, _GROUP_BYTES.get(platform, _GROUP_BYTES["gpu"]) // chunk_bytes)
    groups = -(-chunks // most)
    products = "bf16" if precision == "16bit" and dtype == jnp.bfloat16 else "fp32" if precision == "fp32" else "tf32"
    if products == "tf32" and platform != "gpu":
        products = "fp32"
    return ChunkedConfig(chunk_size, -(-chunks // groups), products)


class Residuals(NamedTuple):
    """What residuals="save" keeps for the backward, in chunks `[N, B, HV, ...]`."""

    M: jax.Array  # [N, B, HV, C, C]
    P: jax.Array  # [N, B, HV, C, C]
    states: jax.Array  # [N, B, HV, K, V]: the state that enters each chunk


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    erase: jax.Array,
    write: jax.Array | None,
    initial_state: jax.Array | None,
    *,
    scale: float,
    config: ChunkedConfig,
    save: bool = False,
    cu_seqlens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Chunked forward. Arguments and results as in `reference.recurrent.forward`, residuals (or None) third."""
    layout = _Layout(q, v, config, cu_seqlens)
    inputs = tuple(layout.pad(x) for x in (q, k, v, g, erase, write))

    def group(S, index):
        x = _load(inputs, index, layout, scale)
        c = _prepare(x, *_pair_products(x), config.products)
        S1, (states, U) = _scan_states(c, S, config.products, layout.sequences(index))
        o = _dot("nbhik,nbhkv->nbhiv", c.Qhat, states, config.products)
        o = o + _dot("nbhij,nbhjv->nbhiv", c.P, U, config.products)
        return S1, (layout.tokens(o).astype(v.dtype), Residuals(c.M, c.P, states) if save else None)

    final_state, (o, residuals) = layout.scan(group, layout.state(initial_state))
    if residuals is not None:
        residuals = Residuals(*(x.reshape(-1, *x.shape[2:]) for x in residuals))
    return layout.join(o), final_state, residuals


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    erase: jax.Array,
    write: jax.Array | None,
    initial_state: jax.Array | None,
    residuals: Residuals | None,
    do: jax.Array,
    dfinal_state: jax.Array | None,
    *,
    scale: float,
    config: ChunkedConfig,
    cu_seqlens: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """Chunked backward: gradients of q, k, v, g, erase, write and initial_state, None where the input is None.

    Without residuals it computes everything again from the inputs; of long sequences it first finds the state that
    enters each group of chunks.
    """
    layout = _Layout(q, v, config, cu_seqlens)
    inputs = tuple(layout.pad(x) for x in (q, k, v, g, erase, write))
    do = layout.pad(do)  # pyright: ignore[reportAssignmentType]
    products = config.products

    def entering_state(S, index):
        x = _load(inputs, index, layout, scale)
        c = _prepare(x, *_pair_products(x), products)
        return _scan_states(c, S, products, layout.sequences(index))[0], S

    S0 = layout.state(initial_state)
    if residuals is not None:
        kept = Residuals(*(x.reshape(layout.groups, layout.chunks, *x.shape[1:]) for x in residuals))
    else:
        kept = layout.scan(entering_state, S0)[1] if layout.groups > 1 else S0[None]

    def group(dS, index_and_kept):
        index, kept = index_and_kept
        x = _load(inputs, index, layout, scale)
        if isinstance(kept, Residuals):
            c = _prepare(x, kept.M, kept.P, products)
            states = kept.states
            U = c.My - _dot("nbhik,nbhkv->nbhiv", c.W, states, products)
        else:
            c = _prepare(x, *_pair_products(x), products)
            states, U = _scan_states(c, kept, products, layout.sequences(index))[1]
        dO = layout.load(do, index)
        dS0, (dS1, dU) = _scan_state_gradients(c, dO, dS, products, layout.sequences(index))
        return dS0, _gradients(inputs, x, c, states, U, dO, dS1, dU, layout, scale, products)

    dS = jnp.zeros_like(S0) if dfinal_state is None else dfinal_state.astype(jnp.float32)
    dS, grads = layout.scan(group, dS, kept, reverse=True)
    grads = [layout.join(d) for d in grads]
    # Where everything is forgotten the gradient is 0, and not what rounding leaves of a sum: a raw gate behind g may
    # multiply it by 1e4.
    grads[3] = jnp.where(g > STRONGEST_DECAY, grads[3], 0)
    dwrite = None if write is None else grads[5]
    return *grads[:5], dwrite, None if initial_state is None else dS.astype(initial_state.dtype)


# Tokens and chunks


class _Layout:
    """Where the tokens of `[B, T, heads, dim]` arrays lie in groups of chunks `[N, B, HV, C, dim]`."""

    def __init__(self, q, v, config, cu_seqlens=None):
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.C, self.chunks = config.chunk_size, config.chunks_per_group
        self.group = self.C * self.chunks
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = packing.number_of_slots(self.T, 1 if cu_seqlens is None else self.N, self.C)
        self.groups = -(-slots // self.chunks)
        self.packed = None
        if cu_seqlens is not None:
            found = packing.chunks(cu_seqlens, self.T, self.C)
            fill = self.groups * self.chunks - slots
            rows = jnp.pad(found.rows, ((0, fill), (0, 0)))
            token = rows[:, :1] // self.C * self.C + jnp.arange(self.C, dtype=jnp.int32)
            # Which token a row of a chunk holds (T: none), and which row of all chunks a token lies in.
            token = jnp.where((rows[:, :1] <= token) & (token < rows[:, 1:]), token, self.T).reshape(-1)
            sequence = packing.sequence_of_tokens(cu_seqlens, self.T)
            row = (found.first[sequence] - cu_seqlens[sequence] // self.C) * self.C
            row += jnp.arange(self.T, dtype=jnp.int32)
            self.packed = token, row, jnp.pad(found.sequence, (0, fill))

    def state(self, state):
        """The initial state in float32."""
        if state is None:
            return jnp.zeros((self.N, self.HV, self.K, self.V), jnp.float32)
        return state.astype(jnp.float32)

    def sequences(self, index):
        """The sequences that the chunks of a group belong to, or None where each row is one."""
        if self.packed is None:
            return None
        return lax.dynamic_slice_in_dim(self.packed[2], index * self.chunks, self.chunks)

    def pad(self, x):
        """Tokens as the chunks of all groups hold them, with zeros, which change no state, where there is none."""
        if x is None:
            return None
        if self.packed is not None:
            return jnp.take(x, self.packed[0], axis=1, mode="fill", fill_value=0)
        short = self.groups * self.group - self.T
        return x if short == 0 else jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2))

    def load(self, x, index):
        """Group `index` of a padded array of tokens, in float32 and with a head for every value head."""
        if self.groups > 1:
            x = lax.dynamic_slice_in_dim(x, index * self.group, self.group, axis=1)
        x = x.reshape(self.B, self.chunks, self.C, x.shape[2], -1).astype(jnp.float32)
        x = jnp.transpose(x, (1, 0, 3, 2, 4))
        return jnp.repeat(x, self.HV // x.shape[2], axis=2)

    def tokens(self, x):
        """The inverse of `load`: `[N, B, heads, C, dim]` to `[B, tokens of a group, heads, dim]`."""
        return jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(self.B, self.group, x.shape[2], x.shape[4])

    def join(self, x):
        """`[groups, B, tokens of a group, ...]` to `[B, T, ...]`."""
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(self.B, self.groups * self.group, *x.shape[3:])
        return x[:, : self.T] if self.packed is None else jnp.take(x, self.packed[1], axis=1, mode="clip")

    def scan(self, body, carry, xs=None, reverse=False):
        """`lax.scan` of `body` over the groups, without a loop when there is one."""
        if self.groups == 1:
            x = 0 if xs is None else (0, jax.tree.map(lambda x: x[0], xs))
            carry, ys = body(carry, x)
            return carry, jax.tree.map(lambda y: y[None], ys)
        indices = jnp.arange(self.groups)
        return lax.scan(body, carry, indices if xs is None else (indices, xs), reverse=reverse)


class _Decay(NamedTuple):
    """G in two parts. `hi` is a multiple of 1/1024 and exact up to 2^24 of them, so that differences of a large G keep
    the accuracy of a small one."""

    hi: jax.Array
    lo: jax.Array

    def __getitem__(self, index):
        return _Decay(self.hi[index], self.lo[index])

    def since(self, other):
        """G - G of `other`."""
        return (self.hi - other.hi) + (self.lo - other.lo)


class _Inputs(NamedTuple):
    """One group of chunks, float32."""

    q: jax.Array  # scaled
    k: jax.Array
    v: jax.Array
    erase: jax.Array  # [..., K], or [..., 1] for one gate a token
    write: jax.Array  # [..., V], or [..., 1]
    e: jax.Array  # erase * k
    G: _Decay


class _Chunks(NamedTuple):
    """What the scan over states and the backward read, named as in the module docstring."""

    M: jax.Array
    P: jax.Array
    W: jax.Array
    My: jax.Array
    Ehat: jax.Array
    Qhat: jax.Array
    Ktil: jax.Array
    from_start: jax.Array  # exp(G)
    to_end: jax.Array  # exp(G_C - G)
    total: jax.Array  # exp(G_C), [N, B, HV, K]


def _load(inputs, index, layout, scale):
    q, k, v, g, erase = (layout.load(x, index) for x in inputs[:5])
    write = erase if inputs[5] is None else layout.load(inputs[5], index)
    g = jnp.maximum(g, STRONGEST_DECAY)
    hi = jnp.round(g * 1024) / 1024
    G = _Decay(jnp.cumsum(hi, axis=-2), jnp.cumsum(g - hi, axis=-2))
    return _Inputs(scale * q, k, v, erase, write, erase * k, G)


# Forward


def _dot(spec, a, b, products):
    """An einsum with float32 accumulation in the precision that `products` names."""
    if products == "bf16":
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        precision = lax.DotAlgorithmPreset.BF16_BF16_F32
    else:
        precision = lax.Precision.HIGHEST if products == "fp32" else lax.DotAlgorithmPreset.TF32_TF32_F32
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x):
    """`[..., C, dim]` to `[..., C / BLOCK, BLOCK, dim]`."""
    return x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def _block_decays(G):
    """exp(G_i - G_j) for the pairs j <= i of each block, 0 for the others: `[..., C / BLOCK, i, j, K]`."""
    G = _Decay(_blocks(G.hi), _blocks(G.lo))
    difference = G[..., :, None, :].since(G[..., None, :, :])
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[..., None]
    return jnp.exp(jnp.where(causal, difference, -jnp.inf))


def _diagonal_blocks(x):
    """The diagonal blocks of `[..., C, C]`: `[..., C / BLOCK, BLOCK, BLOCK]`."""
    starts = range(0, x.shape[-1], BLOCK)
    return jnp.stack([x[..., r : r + BLOCK, r : r + BLOCK] for r in starts], axis=-3)


def _pair_products(x):
    """The inverse M and the attention matrix P of every chunk. All products are float32-accurate: they are few."""
    q, k, e, G = x.q, x.k, x.e, x.G
    C = q.shape[-2]
    D = _block_decays(G)
    k_block = _blocks(k)[..., None, :, :]
    strictly = jnp.tril(jnp.ones((BLOCK, BLOCK), jnp.float32), -1)
    A_diagonal = strictly * jnp.sum(_blocks(e)[..., :, None, :] * k_block * D, axis=-1)
    P_diagonal = jnp.sum(_blocks(q)[..., :, None, :] * k_block * D, axis=-1)

    A_rows, P_rows = [], []
    for b, r in enumerate(range(0, C, BLOCK)):
        parts_A, parts_P = [A_diagonal[..., b, :, :]], [P_diagonal[..., b, :, :]]
        if r:
            rows, before, first = slice(r, r + BLOCK), slice(0, r), G[..., r : r + 1, :]
            from_first = jnp.exp(G[..., rows, :].since(first))
            to_first = jnp.exp(first.since(G[..., before, :]))
            e_and_q = jnp.concatenate([e[..., rows, :] * from_first, q[..., rows, :] * from_first], axis=-2)
            left = _dot("...ic,...jc->...ij", e_and_q, k[..., before, :] * to_first, "fp32")
            parts_A.insert(0, left[..., :BLOCK, :])
            parts_P.insert(0, left[..., BLOCK:, :])
        right = [(0, 0)] * (q.ndim - 1) + [(0, C - r - BLOCK)]
        A_rows.append(jnp.pad(jnp.concatenate(parts_A, axis=-1), right))
        P_rows.append(jnp.pad(jnp.concatenate(parts_P, axis=-1), right))
    return _unit_lower_inverse(jnp.concatenate(A_rows, axis=-2)), jnp.concatenate(P_rows, axis=-2)


def _unit_lower_inverse(A):
    """(I + A)^-1 of strictly lower triangular `[..., C, C]` in float32.

    The diagonal blocks by forward substitution, then pairs of blocks by M_21 = -M_22 A_21 M_11. Products of powers of A
    would lose all accuracy on repeated keys.
    """
    C = A.shape[-1]
    blocks = _diagonal_blocks(A)

    def row(i, M):
        A_i = lax.dynamic_index_in_dim(blocks, i, axis=-2, keepdims=False)
        M_i = lax.dynamic_index_in_dim(M, i, axis=-2, keepdims=False) - jnp.sum(A_i[..., :, None] * M, axis=-2)
        return lax.dynamic_update_index_in_dim(M, M_i, i, axis=-2)

    M = lax.fori_loop(1, BLOCK, row, jnp.broadcast_to(jnp.eye(BLOCK, dtype=A.dtype), blocks.shape))
    size = BLOCK
    while size < C:
        A_21 = jnp.stack([A[..., r + size : r + 2 * size, r : r + size] for r in range(0, C, 2 * size)], axis=-3)
        M_11, M_22 = M[..., 0::2, :, :], M[..., 1::2, :, :]
        M_21 = -_dot("...ij,...jk->...ik", M_22, _dot("...ij,...jk->...ik", A_21, M_11, "fp32"), "fp32")
        top = jnp.concatenate([M_11, jnp.zeros_like(M_11)], axis=-1)
        M = jnp.concatenate([top, jnp.concatenate([M_21, M_22], axis=-1)], axis=-2)
        size *= 2
    return M[..., 0, :, :]


def _prepare(x, M, P, products):
    """Everything about the chunks that needs no state."""
    last = x.G[..., -1:, :]
    from_start, to_end = jnp.exp(x.G.hi + x.G.lo), jnp.exp(last.since(x.G))
    Ehat = x.e * from_start
    W = _dot("...ij,...jk->...ik", M, Ehat, products)
    My = _dot("...ij,...jv->...iv", M, x.write * x.v, products)
    total = from_start[..., -1, :]
    return _Chunks(M, P, W, My, Ehat, x.q * from_start, x.k * to_end, from_start, to_end, total)


def _scan_states(c, S, products, sequences):
    """The state after the last chunk, and of each chunk the state that enters it and U."""

    def chunk(S, c):
        U = c.My - _dot("bhik,bhkv->bhiv", c.W, S, products)
        S1 = c.total[..., None] * S + _dot("bhjk,bhjv->bhkv", c.Ktil, U, products)
        return S1, (S, U)

    return _scan_chunks(chunk, S, c, sequences)


def _scan_chunks(chunk, S, xs, sequences, reverse=False):
    """`lax.scan` of `chunk` over chunks. Those of packed sequences take their sequence's state from all of them, and
    put it back."""

    def packed_chunk(states, x):
        n, x = x
        S, y = chunk(lax.dynamic_slice_in_dim(states, n, 1), x)
        return lax.dynamic_update_slice_in_dim(states, S, n, 0), y

    if sequences is None:
        return lax.scan(chunk, S, xs, reverse=reverse)
    return lax.scan(packed_chunk, S, (sequences, xs), reverse=reverse)


# Backward


def _scan_state_gradients(c, dO, dS, products, sequences):
    """The gradient of the state that enters the first chunk, and of each chunk dS1 and dU.

    dU = P^T do + Ktil dS1,   dS0 = diag(exp(G_C)) dS1 + Qhat^T do - W^T dU
    """
    dU_output = _dot("nbhij,nbhiv->nbhjv", c.P, dO, products)
    dS_output = _dot("nbhik,nbhiv->nbhkv", c.Qhat, dO, products)

    def chunk(dS1, inputs):
        c, dU_output, dS_output = inputs
        dU = dU_output + _dot("bhjk,bhkv->bhjv", c.Ktil, dS1, products)
        dS0 = c.total[..., None] * dS1 + dS_output - _dot("bhik,bhiv->bhkv", c.W, dU, products)
        return dS0, (dS1, dU)

    return _scan_chunks(chunk, dS, (c, dU_output, dS_output), sequences, reverse=True)


def _pair_gradients(x, dA, dP):
    """Gradients of q, e and k through the pairs j < i of A and P; dA and dP are strictly lower triangular."""
    q, k, e, G = x.q, x.k, x.e, x.G
    C = q.shape[-2]
    D = _block_decays(G)
    dA_D, dP_D = (_diagonal_blocks(d)[..., None] * D for d in (dA, dP))
    k_block = _blocks(k)[..., None, :, :]
    dq = jnp.sum(dP_D * k_block, axis=-2).reshape(q.shape)
    de = jnp.sum(dA_D * k_block, axis=-2).reshape(e.shape)
    dk = jnp.sum(dA_D * _blocks(e)[..., :, None, :] + dP_D * _blocks(q)[..., :, None, :], axis=-3).reshape(k.shape)

    dq_rows, de_rows = [jnp.zeros_like(q[..., :BLOCK, :])], [jnp.zeros_like(e[..., :BLOCK, :])]
    for r in range(BLOCK, C, BLOCK):
        rows, before, first = slice(r, r + BLOCK), slice(0, r), G[..., r : r + 1, :]
        from_first = jnp.exp(G[..., rows, :].since(first))
        to_first = jnp.exp(first.since(G[..., before, :]))
        d = jnp.concatenate([dA[..., rows, before], dP[..., rows, before]], axis=-2)
        left = _dot("...ij,...jc->...ic", d, k[..., before, :] * to_first, "fp32")
        de_rows.append(left[..., :BLOCK, :] * from_first)
        dq_rows.append(left[..., BLOCK:, :] * from_first)
        e_and_q = jnp.concatenate([e[..., rows, :] * from_first, q[..., rows, :] * from_first], axis=-2)
        dk = dk.at[..., before, :].add(_dot("...ij,...ic->...jc", d, e_and_q, "fp32") * to_first)
    return dq + jnp.concatenate(dq_rows, axis=-2), de + jnp.concatenate(de_rows, axis=-2), dk


def _gradients(inputs, x, c, states, U, dO, dS1, dU, layout, scale, products):
    """Gradients of the inputs of one group of chunks, in the layout and dtype of the inputs."""
    C = x.q.shape[-2]
    strictly = jnp.tril(jnp.ones((C, C), jnp.float32), -1)
    dP = _dot("nbhiv,nbhjv->nbhij", dO, U, products)
    dR = _dot("nbhij,nbhiv->nbhjv", c.M, dU, products)
    dA = -strictly * _dot("nbhiv,nbhjv->nbhij", dR, U, products)
    dq_state = c.from_start * _dot("nbhiv,nbhkv->nbhik", dO, states, products)
    de_state = -c.from_start * _dot("nbhiv,nbhkv->nbhik", dR, states, products)
    dk_state = c.to_end * _dot("nbhjv,nbhkv->nbhjk", U, dS1, products)
    dq_pairs, de_pairs, dk_pairs = _pair_gradients(x, dA, strictly * dP)

    # g_t decays all that reaches from before t to t or later. What ends inside the chunk adds to dg of the tokens up to
    # its end, what starts inside to dg of the tokens after its start, and a pair of the chunk's tokens to those
    # between.
    ends = x.q * (dq_state + dq_pairs) + x.e * (de_state + de_pairs) - x.k * dk_pairs
    starts = jnp.cumsum(x.k * dk_state, axis=-2)
    passes = c.total * jnp.sum(states * dS1, axis=-1)
    dg = lax.cumsum(ends, axis=ends.ndim - 2, reverse=True) + passes[..., None, :]
    dg = dg + jnp.pad(starts[..., :-1, :], [(0, 0)] * (starts.ndim - 2) + [(1, 0), (0, 0)])

    dP_diagonal = jnp.diagonal(dP, axis1=-2, axis2=-1)[..., None]
    de = de_state + de_pairs
    dq = scale * (dq_state + dq_pairs + dP_diagonal * x.k)
    dk = dk_state + dk_pairs + dP_diagonal * x.q + x.erase * de
    dv = x.write * dR
    derase, dwrite = x.k * de, x.v * dR

    def over_group(d):
        N, B, _, _, K = d.shape
        return d.reshape(N, B, layout.H, -1, C, K).sum(axis=3)

    grads = [over_group(dq), over_group(dk), dv, dg, derase, dwrite]
    if inputs[5] is None:  # One gate a token for both: its gradient is the sum of all.
        grads[4:] = [jnp.sum(derase, axis=-1, keepdims=True) + jnp.sum(dwrite, axis=-1, keepdims=True)]
    grads = [layout.tokens(d) for d in grads]
    return tuple(d.reshape(*d.shape[:2], *x.shape[2:]).astype(x.dtype) for x, d in zip(inputs, grads, strict=False))
