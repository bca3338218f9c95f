"""Softmax attention in PyTorch, and its float64 oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_ROWS = 1024  # queries that the oracle works on at a time


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """o [B, Tq, H, D] from q [B, Tq, H, D] and k, v [B, Tk, HK, D], by PyTorch's own operator, whichever of its
    back-ends is enabled. Causal: aligned to the end, as in `dormouse_jax.attention`."""
    Tq, Tk = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None
    if causal and Tq != Tk:  # is_causal aligns to the start
        mask = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return o.transpose(1, 2)


def attention_composite(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None
) -> torch.Tensor:
    """The same from plain operations: two products around a softmax, with a matrix [Tq, Tk] for every head."""
    Tq, Tk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
        s = s.masked_fill(~seen, -torch.inf)
    return (torch.softmax(s, dim=-1) @ v).transpose(1, 2)


def visible(
    Tq: int,
    Tk: int,
    *,
    causal: bool,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
) -> np.ndarray:
    """Which keys each query sees: bool [Tq, Tk], or [B, T, T] with `segment_ids` [B, T]."""
    row, col = np.arange(Tq)[:, None], np.arange(Tk)[None, :]
    seen = col <= row + (Tk - Tq) if causal else np.ones((Tq, Tk), bool)
    if cu_seqlens is not None:
        sequence = np.searchsorted(np.asarray(cu_seqlens), np.arange(Tq), side="right")
        return seen & (sequence[:, None] == sequence[None, :])
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        run = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
        return seen & (run[:, :, None] == run[:, None, :])
    return seen


def attention_oracle(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Any = None,
    segment_ids: Any = None,
    do: Any = None,
) -> dict[str, np.ndarray]:
    """float64 results by name: o, and with the cotangent `do` of o also dq, dk and dv.

    Array-likes of any dtype and of the shapes that `dormouse_jax.attention` takes, taken to float64 first. A query that
    sees no key gives 0. Heads are worked on one by one, some queries at a time.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (B, Tq, H, D), Tk, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    scale = D**-0.5 if scale is None else scale
    seen = visible(Tq, Tk, causal=causal, cu_seqlens=cu_seqlens, segment_ids=segment_ids)
    seen = np.broadcast_to(seen, (B, Tq, Tk))
    found = {"o": np.zeros(q.shape)}
    if do is not None:
        do = np.asarray(do).astype(np.float64)
        found |= {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    for b, h, first in itertools.product(range(B), range(H), range(0, Tq, _ROWS)):
        rows, kept = np.s_[b, first : first + _ROWS, h], np.s_[b, :, h // group]
        s = np.where(seen[b, first : first + _ROWS], scale * (q[rows] @ k[kept].T), -np.inf)
        largest = s.max(axis=1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isfinite(largest), largest, 0.0))
        total = p.sum(axis=1, keepdims=True)
        p /= np.where(total == 0, 1.0, total)
        found["o"][rows] = p @ v[kept]
        if do is not None:
            ds = p * (do[rows] @ v[kept].T - np.sum(do[rows] * found["o"][rows], axis=1, keepdims=True))
            found["dq"][rows] = scale * (ds @ k[kept])
            found["dk"][kept] += scale * (ds.T @ q[rows])
            found["dv"][kept] += p.T @ do[rows]
    return found
