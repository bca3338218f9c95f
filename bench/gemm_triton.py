"""The matrix product as a Triton kernel launched through jax-triton, without Pallas."""

from __future__ import annotations

import jax
import jax_triton
import triton
import triton.language as tl

_TILE_M, _TILE_N, _GROUP = 128, 128, 8


@triton.jit
def _kernel(
    a,
    b,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_M: tl.constexpr,
    A_K: tl.constexpr,
    B_K: tl.constexpr,
    B_N: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [M, N] = a b; A_M is the distance between elements of a whose row differs by one, and so on."""
    index = tl.program_id(0)
    m_tiles, n_tiles = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    strip, within = index // (GROUP * n_tiles), index % (GROUP * n_tiles)
    height = tl.minimum(m_tiles - strip * GROUP, GROUP)
    rows = (strip * GROUP + within % height) * TILE_M + tl.arange(0, TILE_M)
    cols = within // height * TILE_N + tl.arange(0, TILE_N)
    ks = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        inside = k + ks < K
        x = tl.load(a + rows[:, None] * A_M + (k + ks)[None, :] * A_K, (rows < M)[:, None] & inside[None, :], 0.0)
        y = tl.load(b + (k + ks)[:, None] * B_K + cols[None, :] * B_N, inside[:, None] & (cols < N)[None, :], 0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask)


def matmul(a: jax.Array, b: jax.Array, *, transpose_a: bool, transpose_b: bool, precision: str) -> jax.Array:
    """op(a) op(b), as `dormouse_jax.gemm`: "fp32" in three TF32 passes. Forward only."""
    K, M = a.shape if transpose_a else a.shape[::-1]
    N = b.shape[0] if transpose_b else b.shape[1]
    return jax_triton.triton_call(
        a,
        b,
        kernel=_kernel,
        out_shape=jax.ShapeDtypeStruct((M, N), a.dtype),
        grid=(triton.cdiv(M, _TILE_M) * triton.cdiv(N, _TILE_N),),
        num_warps=8,
        num_stages=3,
        M=M,
        N=N,
        K=K,
        A_M=1 if transpose_a else K,
        A_K=M if transpose_a else 1,
        B_K=1 if transpose_b else N,
        B_N=K if transpose_b else 1,
        TILE_M=_TILE_M,
        TILE_N=_TILE_N,
        TILE_K=64 if a.dtype.itemsize == 2 else 32,
        GROUP=_GROUP,
        PRECISION="tf32x3" if precision == "fp32" else "tf32",
    )
