"""LoRA on so few tokens that one tile has all of them, where reading the layer's weight takes the time.

    u = x W^T,  h = s x A^T;   y = u + h B^T + bias               x [T, I], W [O, I], A [r, I], B [O, r]
    v = g W,    p = s g B;     dx = v + p A, dA = p^T x, dB = g^T h        g [T, O] the cotangent of y

A product has few tiles then, and parts of its contraction make them enough for a card: u and h, or v and p, come of one
launch, in parts. What reads them next adds them up, always in the same order, so that no launch is spent on that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import FewTokens, padded_rank

NAME = "adapter_few_tokens"


def contract(
    x: jax.Array, weight: jax.Array, factor: jax.Array, *, along_rows: bool, config: FewTokens, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Parts of u and of h, not scaled: [parts, T, O] and [parts, T, r] in float32.

    Args:
      x: [T, K], of 16 bit like the others.
      weight, factor: W and A, contracted along their columns; or W and B along their rows.
    """
    (T, K), N, r = x.shape, weight.shape[1 if along_rows else 0], factor.shape[1 if along_rows else 0]
    steps = -(-K // (config.depth * config.split))
    parts = -(-K // (config.depth * steps))
    outs = [jax.ShapeDtypeStruct((parts, T, size), jnp.float32) for size in (N, r)]
    u, h = backend.launch(
        _contract_kernel,
        f"{NAME}_contract",
        (1 + -(-N // config.cols), parts),
        [(each, _whole(each)) for each in (x, weight, factor)],
        [(out, pl.BlockSpec((None, *out.shape[1:]), lambda i, j: (j, 0, 0))) for out in outs],
        num_warps=config.warps,
        num_stages=config.stages,
        interpret=interpret,
        sizes=(T, N, K, r),
        steps=steps,
        along_rows=along_rows,
        config=config,
    )
    return u, h


def finish(
    u: jax.Array,
    h: jax.Array,
    factor: jax.Array,
    bias: jax.Array | None,
    *,
    scale: float,
    along_rows: bool,
    out_dtype: jnp.dtype,
    config: FewTokens,
    interpret: bool,
) -> jax.Array:
    """u + h B^T + bias, or v + p A, [T, N] in out_dtype, of parts; h and p are scaled and rounded first.

    factor: B, contracted along its columns, or A along its rows. bias: [N], any float dtype, or None.
    """
    (parts, T, N), r = u.shape, h.shape[2]
    inputs = [u.reshape(parts * T, N), h.reshape(parts * T, r), factor]
    inputs += [] if bias is None else [bias.reshape(1, N)]
    out = jax.ShapeDtypeStruct((T, N), out_dtype)
    (found,) = backend.launch(
        _finish_kernel,
        f"{NAME}_finish",
        (-(-N // config.out_cols),),
        [(each, _whole(each)) for each in inputs],
        [(out, _whole(out))],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        sizes=(parts, T, N, r),
        scale=scale,
        along_rows=along_rows,
        cols=config.out_cols,
    )
    return found


def gradients(
    x: jax.Array,
    g: jax.Array,
    h: jax.Array,
    p: jax.Array,
    *,
    scale: float,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    config: FewTokens,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """(dA [r, I], dB [O, r]) in these dtypes, of parts of h and p."""
    (parts, T, r), I, O = h.shape, x.shape[1], g.shape[1]
    inputs = [x, g, h.reshape(parts * T, r), p.reshape(p.shape[0] * T, r)]
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(((r, I), (O, r)), dtypes, strict=True)]
    dA, dB = backend.launch(
        _gradients_kernel,
        f"{NAME}_gradients",
        (-(-I // config.out_cols) + -(-O // config.out_cols),),
        [(each, _whole(each)) for each in inputs],
        [(out, _whole(out)) for out in outs],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        sizes=(T, r, I, O),
        parts=(parts, p.shape[0]),
        scale=scale,
        cols=config.out_cols,
    )
    return dA, dB


def _whole(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0, 0))


def _axis(size: int, first: Any = 0) -> tuple:
    """(first, number, limit) of an axis that a tile holds all of."""
    padded = padded_rank(size)
    return first, padded, None if padded == size else (first, first + size)


def _strip(tile: Any, cols: int, size: int) -> tuple:
    return tile * cols, cols, size if size % cols else None


def _contract_kernel(
    x_ref, weight_ref, factor_ref, u_ref, h_ref, *, sizes, steps, along_rows, config: FewTokens, interpret
):
    T, N, K, r = sizes
    dot, tile = backend.Dot("16bit", interpret), pl.program_id(0)
    first = pl.program_id(1) * (steps * config.depth)
    tokens, limit = _axis(T), K if K % (steps * config.depth) else None

    def product(ref, out_ref, cols):
        def step(k, total):
            span = (first + k * config.depth, config.depth, limit)
            w = backend.load_tile(ref, *((span, cols) if along_rows else (cols, span)))
            return total + dot(backend.load_tile(x_ref, tokens, span), w, (1, 0 if along_rows else 1))

        zeros = jnp.zeros((tokens[1], cols[1]), jnp.float32)
        backend.store_tile(out_ref, tokens, cols, lax.fori_loop(0, steps, step, zeros))

    pl.when(tile == 0)(lambda: product(factor_ref, h_ref, _axis(r)))
    pl.when(tile > 0)(lambda: product(weight_ref, u_ref, _strip(tile - 1, config.cols, N)))


def _sum_of_parts(ref, parts: int, T: int, cols: tuple) -> jax.Array:
    """Of [parts T, N]: these columns of the sum over the parts, [T, N] with zeros below."""
    total = backend.load_tile(ref, _axis(T), cols)
    for part in range(1, parts):
        total += backend.load_tile(ref, _axis(T, part * T), cols)
    return total


def _finish_kernel(u_ref, h_ref, factor_ref, *refs, sizes, scale, along_rows, cols, interpret):
    parts, T, N, r = sizes
    strip, ranks = _strip(pl.program_id(0), cols, N), _axis(r)
    h = (scale * _sum_of_parts(h_ref, parts, T, ranks)).astype(factor_ref.dtype)
    factor = backend.load_tile(factor_ref, *((ranks, strip) if along_rows else (strip, ranks)))
    out = _sum_of_parts(u_ref, parts, T, strip)
    out += backend.Dot("16bit", interpret)(h, factor, (1, 0 if along_rows else 1))
    if len(refs) == 2:
        out += backend.load_tile(refs[0], (0, 1, None), strip).astype(jnp.float32)
    backend.store_tile(refs[-1], _axis(T), strip, out)


def _gradients_kernel(x_ref, g_ref, h_ref, p_ref, dA_ref, dB_ref, *, sizes, parts, scale, cols, interpret):
    T, r, I, O = sizes
    dot, tile, tokens, ranks = backend.Dot("16bit", interpret), pl.program_id(0), _axis(T), _axis(r)
    strips = -(-I // cols)

    @pl.when(tile < strips)
    def _dA():
        strip = _strip(tile, cols, I)
        p = (scale * _sum_of_parts(p_ref, parts[1], T, ranks)).astype(x_ref.dtype)
        backend.store_tile(dA_ref, ranks, strip, dot(p, backend.load_tile(x_ref, tokens, strip), (0, 0)))

    @pl.when(tile >= strips)
    def _dB():
        strip = _strip(tile - strips, cols, O)
        h = (scale * _sum_of_parts(h_ref, parts[0], T, ranks)).astype(g_ref.dtype)
        backend.store_tile(dB_ref, strip, ranks, dot(backend.load_tile(g_ref, tokens, strip), h, (0, 0)))
