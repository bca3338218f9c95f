"""KDA in chunks of C tokens, in plain PyTorch: a second opinion on every tensor of the kernels, and a baseline to beat.

Per (batch, value head) and chunk, with G the inclusive cumulative sum of g inside the chunk, e = erase * k,
y = write * v and S the state that enters:

    A_ij   = sum_c e_ic k_jc exp(G_ic - G_jc)          j < i
    P_ij   = scale sum_c q_ic k_jc exp(G_ic - G_jc)    j <= i
    M      = (I + A)^-1
    Ehat_i = e_i exp(G_i),  Qhat_i = scale q_i exp(G_i),  Ktil_j = k_j exp(G_C - G_j)
    W      = M Ehat,        U = M y - W S              the corrected values
    o      = Qhat S + P U
    S     <- diag(exp(G_C)) S + Ktil^T U

All but U and S is computed for every chunk at once; only the two products of U and S run chunk after chunk.
Gradients come from autograd. Source: Kimi Linear, arXiv:2510.26692, section 3 and appendix.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Solve = Literal["substitution", "triangular"]
Decay = Literal["exact", "factored"]

# Where exp is 0 in the type that G is computed in, so that a cumulative sum over -inf stays finite.
_GATE_FLOOR = {torch.float32: -127.0, torch.float64: -800.0}


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    erase: Tensor,
    write: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    solve: Solve = "substitution",
    decay: Decay = "exact",
    matmul_dtype: torch.dtype | None = None,
    return_intermediates: bool = False,
    compile_parts: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The general rule (Gated DeltaNet-2) by the chunk formulas of this module. Differentiable; CPU or CUDA.

    Computes in float32, or in float64 when an input is float64.

    Args:
      q, k: [B, T, H, K].
      v: [B, T, HV, V], HV a multiple of H; value head h reads query and key head h // (HV / H).
      g: [B, T, HV, K], natural log of the decay, <= 0; -inf forgets everything.
      erase: [B, T, HV, K] or, the same for every channel, [B, T, HV].
      write: [B, T, HV, V] or [B, T, HV].
      scale: factor on the output; None is K^-1/2.
      initial_state: [B, HV, K, V], or None for zeros.
      chunk_size: C, a power of two. T need not be a multiple of it.
      solve: how M is found: "substitution" row by row, or "triangular" by `torch.linalg.solve_triangular`.
      decay: how exp(G_i - G_j) is formed. "exact" never exponentiates a positive number (`_products_exact`);
        "factored" multiplies exp(G_i) with exp(-G_j), as everyday ports do: one large product instead of log2(C) small
        ones, and not finite once a chunk decays by more than e^88 in float32.
      matmul_dtype: rounds both operands of every matrix product to this type, forward and backward, and accumulates in
        float32: the accuracy that 16-bit operands can have. The inverse is never rounded.
      return_intermediates: also return a dictionary.
      compile_parts: run the work on all chunks, the step between two chunks and the readout through `torch.compile`,
        each by itself, and loop in Python. Compiling this whole function unrolls the loop over chunks instead.

    Returns:
      o [B, T, HV, V] in q's dtype, and the final state [B, HV, K, V] in the dtype computed in. With
      `return_intermediates` a third result: G, Ehat, Qhat, Ktil, W [B, HV, NT, C, K], A, P, M [B, HV, NT, C, C],
      My, U [B, HV, NT, C, V] and states [B, HV, NT, K, V] (those that enter the chunks), NT = ceil(T / C), tokens past
      T being zeros.

    Raises:
      ValueError: an unknown `solve` or `decay`, or a chunk size that is no power of two.
    """
    if solve not in ("substitution", "triangular"):
        raise ValueError(f'kda port: solve must be "substitution" or "triangular", got {solve!r}')
    if decay not in ("exact", "factored"):
        raise ValueError(f'kda port: decay must be "exact" or "factored", got {decay!r}')
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"kda port: chunk_size must be a power of two, got {chunk_size}")
    B, T, HV, V = v.shape
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    inputs = (q, k, v, g, erase, write)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    part = _compiled if compile_parts else lambda function: function

    chunks = part(_prepare)(*inputs, scale, chunk_size, solve, decay, matmul_dtype, dtype)
    step = part(_step)
    S = q.new_zeros((B * HV, K, V), dtype=dtype) if initial_state is None else initial_state.to(dtype).flatten(0, 1)
    states, values = [], []
    # unbind and not an index: the gradient of n indices is n full arrays of zeros.
    per_chunk = (x.unbind(1) for x in (chunks.W, chunks.My, chunks.Ktil, chunks.total))
    for W, My, Ktil, total in zip(*per_chunk, strict=True):
        states.append(S)
        S, U = step(S, W, My, Ktil, total, matmul_dtype)
        values.append(U)
    o, states, U = part(_read)(chunks.Qhat, chunks.P, states, values, matmul_dtype)
    o = o.reshape(B, HV, -1, V)[:, :, :T].transpose(1, 2).to(q.dtype)
    final_state = S.reshape(B, HV, K, V)
    if not return_intermediates:
        return o, final_state
    G = _chunked(g.to(torch.float64).clamp(min=_GATE_FLOOR[dtype]), chunk_size).cumsum(2).to(dtype)
    named = {**chunks._asdict(), "G": G, "U": U, "states": states}
    del named["total"]
    return o, final_state, {name: x.unflatten(0, (B, HV)) for name, x in named.items()}


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    solve: Solve = "substitution",
    decay: Decay = "exact",
    matmul_dtype: torch.dtype | None = None,
    return_intermediates: bool = False,
    compile_parts: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Kimi Delta Attention: `chunk_gdn2` with erase = write = beta [B, T, HV]."""
    return chunk_gdn2(
        q,
        k,
        v,
        g,
        beta,
        beta,
        scale=scale,
        initial_state=initial_state,
        chunk_size=chunk_size,
        solve=solve,
        decay=decay,
        matmul_dtype=matmul_dtype,
        return_intermediates=return_intermediates,
        compile_parts=compile_parts,
    )


class _Chunks(NamedTuple):
    """What is known of each chunk before its state: [N, NT, ...], N = B * HV. total is exp(G_C) [N, NT, K, 1]."""

    A: Tensor
    P: Tensor
    M: Tensor
    W: Tensor
    My: Tensor
    Ehat: Tensor
    Qhat: Tensor
    Ktil: Tensor
    total: Tensor


def _prepare(q, k, v, g, erase, write, scale, C, solve, decay, matmul_dtype, dtype) -> _Chunks:
    """Everything that needs no state, for all chunks at once."""
    group = v.shape[2] // q.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    erase, write = (x[..., None] if x.ndim == 3 else x for x in (erase, write))
    q, k, v, g, erase, write = (_chunked(x.to(dtype), C) for x in (q, k, v, g, erase, write))
    q, e, y = scale * q, erase * k, write * v
    products = _products_exact if decay == "exact" else _products_factored
    P, A, from_start, to_end = products(torch.stack((q, e), 3), k, g, matmul_dtype)
    M = _inverse(A, solve)
    Ehat, Qhat, Ktil = e * from_start, q * from_start, k * to_end
    W, My = _matmul(M, Ehat, matmul_dtype), _matmul(M, y, matmul_dtype)
    return _Chunks(A, P, M, W, My, Ehat, Qhat, Ktil, from_start[:, :, -1, :, None])


def _products_exact(rows: Tensor, k: Tensor, g: Tensor, matmul_dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, A, exp(G_i) and exp(G_C - G_j), by doubling: two blocks of h tokens make one of 2 h.

    Between a row i of the second block and a column j of the first the decay is (from the second block's start to i)
    times (from j to the first block's end). Both factors are products of exp(g) <= 1: nothing overflows, nothing is
    the difference of two large sums, and a gate of -inf is a plain zero.

    Args:
      rows: [N, NT, C, 2, K], scale * q and e of every token.
      k, g: [N, NT, C, K].
    """
    N, NT, C, _, K = rows.shape
    diagonal = (_round(rows[..., 0, :], matmul_dtype) * _round(k, matmul_dtype)).sum(-1)
    blocks = torch.stack((diagonal, torch.zeros_like(diagonal)), -1)[..., None]  # [N, NT, blocks, h, 2, h]
    from_start, to_end = g.exp(), torch.ones_like(g)
    h = 1
    while h < C:
        halves = (N, NT, C // (2 * h), 2, h)
        (start0, start1), (end0, end1) = (x.reshape(*halves, K).unbind(3) for x in (from_start, to_end))
        left = rows.reshape(*halves, 2, K)[:, :, :, 1] * start1[..., None, :]
        right = k.reshape(*halves, K)[:, :, :, 0] * end0
        cross = _matmul(left.flatten(3, 4), right.mT, matmul_dtype).unflatten(3, (h, 2))
        first, second = blocks.reshape(*halves, 2, h).unbind(3)
        blocks = torch.cat((F.pad(first, (0, h)), torch.cat((cross, second), -1)), 3)
        from_start = torch.cat((start0, start1 * start0[..., -1:, :]), 3)
        to_end = torch.cat((end0 * start1[..., -1:, :], end1), 3)
        h *= 2
    P, A = blocks.reshape(N, NT, C, 2, C).unbind(3)
    return P, A, from_start.reshape_as(g), to_end.reshape_as(g)


def _products_factored(rows: Tensor, k: Tensor, g: Tensor, matmul_dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_products_exact`, with exp(G_i - G_j) = exp(G_i) exp(-G_j): the second overflows when gates are strong."""
    G = g.cumsum(2)
    left, right = rows * G.exp()[..., None, :], k * (-G).exp()
    P, A = _matmul(left.flatten(2, 3), right.mT, matmul_dtype).unflatten(2, (-1, 2)).unbind(3)
    return P.tril(), A.tril(-1), G.exp(), (G[:, :, -1:] - G).exp()


def _inverse(A: Tensor, solve: Solve) -> Tensor:
    """M = (I + A)^-1 for A [..., C, C] strictly lower triangular."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    if solve == "triangular":
        return torch.linalg.solve_triangular(A + identity, identity.expand_as(A), upper=False, unitriangular=True)
    M = identity[:1].expand_as(A[..., :1, :])
    for i, row in enumerate(A.unbind(-2)):
        if i:
            M = torch.cat((M, identity[i] - row[..., None, :i] @ M), -2)
    return M


def _step(S: Tensor, W: Tensor, My: Tensor, Ktil: Tensor, total: Tensor, matmul_dtype) -> tuple[Tensor, Tensor]:
    """The state after a chunk, and the chunk's U, from the state before it."""
    if matmul_dtype is None:
        U = torch.baddbmm(My, W, S, alpha=-1)
        return torch.baddbmm(total * S, Ktil.mT, U), U
    U = My - _matmul(W, S, matmul_dtype)
    return total * S + _matmul(Ktil.mT, U, matmul_dtype), U


def _read(Qhat: Tensor, P: Tensor, states: list[Tensor], values: list[Tensor], matmul_dtype) -> tuple[Tensor, ...]:
    """o, states and U of all chunks, [N, NT, ...]."""
    S, U = torch.stack(states, 1), torch.stack(values, 1)
    return _matmul(Qhat, S, matmul_dtype) + _matmul(P, U, matmul_dtype), S, U


def _chunked(x: Tensor, C: int) -> Tensor:
    """[B, T, HV, X] -> [B * HV, NT, C, X], zeros past T."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % C))
    return x.reshape(-1, x.shape[2] // C, C, x.shape[3])


def _matmul(a: Tensor, b: Tensor, operand_dtype: torch.dtype | None) -> Tensor:
    return a @ b if operand_dtype is None else _RoundedMatmul.apply(a, b, operand_dtype)


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x as a 16-bit operand would hold it; the gradient goes straight through."""
    return x if dtype is None else x + (x.to(dtype).to(x.dtype) - x).detach()


class _RoundedMatmul(torch.autograd.Function):
    """a @ b with both operands rounded to a dtype first, also in the two products of the backward. No broadcasting."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        wide, a, b = a.dtype, a.to(dtype), b.to(dtype)
        ctx.save_for_backward(a, b)
        return _wide_product(a, b, wide)

    @staticmethod
    def backward(ctx, d: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        wide, d = d.dtype, d.to(a.dtype)
        return _wide_product(d, b.mT, wide), _wide_product(a.mT, d, wide), None


def _wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b of 16-bit operands, accumulated and returned in a wider type: on tensor cores where there are some."""
    if not a.is_cuda or wide != torch.float32:
        return a.to(wide) @ b.to(wide)
    product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=wide)
    return product.reshape(*a.shape[:-1], b.shape[-1])


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False, fullgraph=True)
