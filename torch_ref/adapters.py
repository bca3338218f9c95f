"""Adapters in PyTorch, as someone who knows their algebra writes them: what ours are timed against, eager and compiled.

No Kronecker product is formed and nothing is inverted where a solve does. Arguments as in `dormouse_jax.adapters`, of
one dtype; the scale s is given as a number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def lora_rebuild(A: Tensor, B: Tensor, *, base: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """base + s B A [O, I]; with a magnitude [O], its rows made as long as that (DoRA, the norm detached)."""
    weight = torch.addmm(base, B, A, alpha=scale)
    if magnitude is None:
        return weight
    norm = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
    return (magnitude / norm).to(weight.dtype)[:, None] * weight


def lora_bypass(x: Tensor, A: Tensor, B: Tensor, *, base: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """x base^T + s (x A^T) B^T + bias [T, O]."""
    return torch.addmm(F.linear(x, base, bias), F.linear(x, A), B.T, alpha=scale)


def loha_rebuild(A1: Tensor, B1: Tensor, A2: Tensor, B2: Tensor, *, base: Tensor, scale: float) -> Tensor:
    """base + s (B1 A1) * (B2 A2) [O, I]."""
    return torch.addcmul(base, B1 @ A1, B2 @ A2, value=scale)


def loha_bypass(
    x: Tensor,
    A1: Tensor,
    B1: Tensor,
    A2: Tensor,
    B2: Tensor,
    *,
    base: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """One product with the rebuilt weight: as the update has full rank, its own product would cost as much again."""
    return F.linear(x, loha_rebuild(A1, B1, A2, B2, base=base, scale=scale), bias)


def lokr_rebuild(W1: Tensor, W2: Tensor, *, base: Tensor, scale: float) -> Tensor:
    """base + s W1 (x) W2 [O, I], W1 [a, b] and W2 [c, d]: blocks of the base plus multiples of W2."""
    (a, b), (c, d) = W1.shape, W2.shape
    blocks = torch.addcmul(base.view(a, c, b, d), W1[:, None, :, None], W2[None, :, None, :], value=scale)
    return blocks.view(a * c, b * d)


def lokr_bypass(x: Tensor, W1: Tensor, W2: Tensor, *, base: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """x base^T + s reshape(W1 X W2^T) + bias [T, O], X [b, d] the token x."""
    X = x.view(x.shape[0], W1.shape[1], W2.shape[1])
    return torch.add(F.linear(x, base, bias), (W1 @ F.linear(X, W2)).flatten(1), alpha=scale)


def rotation(P: Tensor) -> Tensor:
    """(I + Q) (I - Q)^-1 of Q = P - P^T, for blocks P [k, n, n]; in float32, in which PyTorch solves, and P's dtype."""
    Q = P.float() - P.float().mT
    eye = torch.eye(P.shape[-1], device=P.device)
    # The two factors commute, so the inverse may come first, which is what a solve computes.
    return torch.linalg.solve(eye - Q, eye + Q).to(P.dtype)


def oft_rebuild(P: Tensor, *, base: Tensor, side: str = "output") -> Tensor:
    """blockdiag(R)^T base, or base blockdiag(R)^T on the input side [O, I]."""
    (k, n, _), (O, I) = P.shape, base.shape
    if side == "output":
        return (rotation(P).mT @ base.view(k, n, I)).view(O, I)
    return torch.einsum("okm,knm->okn", base.view(O, k, n), rotation(P)).reshape(O, I)


def oft_bypass(x: Tensor, P: Tensor, *, base: Tensor, side: str = "output", bias: Tensor | None = None) -> Tensor:
    """(x base^T) blockdiag(R) + bias, or (x blockdiag(R)) base^T + bias on the input side [T, O]."""
    k, n, _ = P.shape

    def turn(v: Tensor) -> Tensor:
        return torch.einsum("tkn,knm->tkm", v.view(-1, k, n), rotation(P)).reshape(v.shape)

    if side == "input":
        return F.linear(turn(x), base, bias)
    y = turn(F.linear(x, base))
    return y if bias is None else y + bias
