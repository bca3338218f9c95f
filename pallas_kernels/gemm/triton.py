"""The product on Pallas's Triton backend: any card from compute capability 8.0, any sizes, strides and precision.

A program computes one tile of the output and walks along the contraction. Operands are read as they are stored: a
transposed one is contracted along its other axis.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.gemm.config import TritonConfig, parts_of

NAME = "gemm_triton"


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: jnp.dtype,
    config: TritonConfig,
    interpret: bool,
) -> jax.Array:
    """op(a) op(b) + bias as [M, N] in out_dtype, op(x) = x or x^T; arguments as in `pallas_kernels.gemm.matmul`."""
    K, M = a.shape if transpose_a else a.shape[::-1]
    N = b.shape[0] if transpose_b else b.shape[1]
    m_tiles, n_tiles = -(-M // config.tile_m), -(-N // config.tile_n)
    parts, steps = parts_of(K, config.tile_k, config.split)
    inputs = [(a, _whole(a)), (b, _whole(b))]
    if bias is not None and parts == 1:
        bias = bias.reshape(1, N)
        inputs.append((bias, _whole(bias)))
    out = jax.ShapeDtypeStruct((parts, M, N), out_dtype if parts == 1 else jnp.float32)
    (out,) = backend.launch(
        functools.partial(_kernel, has_bias=len(inputs) == 3),
        NAME,
        (m_tiles * n_tiles, parts),
        inputs,
        [(out, pl.BlockSpec((None, M, N), lambda i, j: (j, 0, 0)))],
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
        sizes=(M, N, K),
        steps=steps,
        transposes=(transpose_a, transpose_b),
        precision=precision,
        config=config,
    )
    return out[0] if parts == 1 else add_parts(out, bias, out_dtype)


def add_parts(parts: jax.Array, bias: jax.Array | None, out_dtype: jnp.dtype) -> jax.Array:
    """The sum of [parts, M, N] and bias [N]: one addition after the other, so that the order is always the same."""
    total = functools.reduce(jnp.add, list(parts))
    return (total if bias is None else total + bias.astype(jnp.float32)).astype(out_dtype)


def _whole(array: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda i, j: (0,) * array.ndim)


def _kernel(a_ref, b_ref, *refs, has_bias, sizes, steps, transposes, precision, config, interpret):
    M, N, K = sizes
    m_tile, n_tile = _tile(pl.program_id(0), -(-M // config.tile_m), -(-N // config.tile_n), config.group)
    first_k = pl.program_id(1) * (steps * config.tile_k)

    # (first, number, limit) of a tile along each axis; no limit where it cannot stick out, so that no mask is emitted.
    rows = (m_tile * config.tile_m, config.tile_m, M if M % config.tile_m else None)
    cols = (n_tile * config.tile_n, config.tile_n, N if N % config.tile_n else None)
    k_limit = K if K % config.tile_k or K % (steps * config.tile_k) else None

    def step(i, total):
        span = (first_k + i * config.tile_k, config.tile_k, k_limit)
        a = backend.load_tile(a_ref, *((span, rows) if transposes[0] else (rows, span)))
        b = backend.load_tile(b_ref, *((cols, span) if transposes[1] else (span, cols)))
        contract = (0 if transposes[0] else 1, 1 if transposes[1] else 0)
        return total + _product(a, b, contract, precision, interpret)

    zero = jnp.zeros((config.tile_m, config.tile_n), jnp.float32)
    total = jax.lax.fori_loop(0, steps, step, zero)
    if has_bias:
        total += backend.load_tile(refs[0], (0, 1, None), cols).astype(jnp.float32)
    backend.store_tile(refs[-1], rows, cols, total)


def _tile(index, m_tiles: int, n_tiles: int, group: int):
    """The output tile of program `index`: strips of `group` rows of tiles, each walked column by column."""
    strip, within = index // (group * n_tiles), index % (group * n_tiles)
    height = jnp.minimum(m_tiles - strip * group, group)
    return strip * group + within % height, within // height


def _product(a, b, contract, precision: str, interpret: bool):
    """The product of two tiles in float32."""
    if precision != "fp32":
        return backend.Dot(precision, interpret)(a, b, contract)
    # Six products of bfloat16 pieces, accurate to float32. Only the leading one can be right where an operand is inf:
    # the others multiply it by pieces that are zero.
    dot = functools.partial(backend.Dot("16bit", interpret), contract=contract)
    (a0, a1, a2), (b0, b1, b2) = _pieces(a), _pieces(b)
    rest = dot(a2, b0) + dot(a1, b1) + dot(a0, b2) + dot(a1, b0) + dot(a0, b1)
    lead = dot(a0, b0)
    return jnp.where(jnp.abs(lead) < jnp.inf, lead + rest, lead)


def _pieces(x):
    """x as the sum of three bfloat16 numbers; all of inf and NaN is in the first."""
    finite = jnp.abs(x) < jnp.inf
    first, second, third = backend.pieces(jnp.where(finite, x, 0.0))
    return jnp.where(finite, first, x.astype(jnp.bfloat16)), second, third
