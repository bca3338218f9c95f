"""The matrix product in PyTorch, and its float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> torch.Tensor:
    """op(a) op(b) + bias as PyTorch computes it: cuBLAS on a GPU, in TF32 for float32 tensors where that is allowed.

    a [M, K] or, transposed, [K, M]; b [K, N] or [N, K]; bias [N], a's dtype like the output.
    """
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    return a @ b if bias is None else torch.addmm(bias, a, b)


def gemm_oracle(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dout: Any = None,
) -> dict[str, np.ndarray]:
    """float64 results by name: out, and with the cotangent `dout` of out also da, db and, with a bias, dbias.

    Array-likes of any dtype, taken to float64 first; gradients have the shapes of what they belong to.
    """
    a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    left, right = a.T if transpose_a else a, b.T if transpose_b else b
    with np.errstate(all="ignore"):
        found = {"out": left @ right if bias is None else left @ right + np.asarray(bias).astype(np.float64)}
        if dout is not None:
            dout = np.asarray(dout).astype(np.float64)
            da, db = dout @ right.T, left.T @ dout
            found |= {"da": da.T if transpose_a else da, "db": db.T if transpose_b else db}
            if bias is not None:
                found["dbias"] = dout.sum(axis=0)
    return found
