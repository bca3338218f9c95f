"""Tokens under an update that is a Kronecker product: LoKr on activations.

    out_t = base_t + s W1 X_t W2^T + bias                       X_t [b, d] a token of x, W1 [a, b], W2 [c, d]
    dX_t = base_t + s W1^T G_t W2                               G_t [a, c] a token of the cotangent of out
    dW1 = s sum_t G_t (X_t W2^T)^T,  dW2 = s sum_t (W1^T G_t)^T X_t

A program takes one token after the other with both factors at hand, so that what lies between their products does not
leave it. Where it takes fewer multiplications W1 comes first: then dW1 = s sum_t (G_t W2) X_t^T and dW2 = s sum_t G_t^T
(W1 X_t). The sums over a program's tokens are added up afterwards, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend
from pallas_kernels.adapters.config import TokenTiles
from pallas_kernels.adapters.sums import add_parts

NAME = "adapter_tokens"


def forward(
    x: jax.Array,
    W1: jax.Array,
    W2: jax.Array,
    base: jax.Array | None,
    bias: jax.Array | None,
    *,
    scale: float,
    precision: str,
    out_dtype: jnp.dtype,
    tiles: TokenTiles,
    interpret: bool,
) -> jax.Array:
    """out [T, a c] in out_dtype.

    Args:
      x: [T, b d], any float dtype.
      W1, W2: [a, b] and [c, d], of the dtype that the precision names.
      base: [T, a c], any float dtype, or None.
      bias: [a c], any float dtype, or None.
    """
    (a, b), (c, d), T = W1.shape, W2.shape, x.shape[0]
    inputs = [x.reshape(T * b, d), W1, W2] + ([] if base is None else [base.reshape(T * a, c)])
    inputs += [] if bias is None else [bias.reshape(a, c)]
    out = jax.ShapeDtypeStruct((T * a, c), out_dtype)
    steps = -(-T // min(T, tiles.forward_programs))
    (found,) = backend.launch(
        _forward_kernel,
        f"{NAME}_forward",
        (-(-T // steps),),
        [(each, _whole(each)) for each in inputs],
        [(out, _whole(out))],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        T=T,
        steps=steps,
        sizes=(a, b, c, d),
        has_base=base is not None,
        has_bias=bias is not None,
        scale=scale,
        precision=precision,
        W2_first=tiles.W2_first,
    )
    return found.reshape(T, a * c)


def backward(
    x: jax.Array,
    W1: jax.Array,
    W2: jax.Array,
    g: jax.Array,
    base: jax.Array | None,
    *,
    scale: float,
    precision: str,
    out_dtype: jnp.dtype,
    dtypes: Sequence[jnp.dtype],
    tiles: TokenTiles,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(dX [T, b d] in out_dtype, dW1, dW2 in these dtypes). Arguments as in `forward`; g [T, a c], base [T, b d]."""
    (a, b), (c, d), T = W1.shape, W2.shape, x.shape[0]
    inputs = [x.reshape(T * b, d), W1, W2, g.reshape(T * a, c)]
    inputs += [] if base is None else [base.reshape(T * b, d)]
    steps = -(-T // min(T, tiles.backward_programs))
    programs = -(-T // steps)
    outs = [jax.ShapeDtypeStruct((T * b, d), out_dtype)]
    outs += [jax.ShapeDtypeStruct((programs, *shape), jnp.float32) for shape in (W1.shape, W2.shape)]
    specs = [_whole(outs[0])] + [pl.BlockSpec((None, *o.shape[1:]), lambda i: (i, 0, 0)) for o in outs[1:]]
    dX, *parts = backend.launch(
        _backward_kernel,
        f"{NAME}_backward",
        (programs,),
        [(each, _whole(each)) for each in inputs],
        list(zip(outs, specs, strict=True)),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        T=T,
        steps=steps,
        sizes=(a, b, c, d),
        has_base=base is not None,
        scale=scale,
        precision=precision,
        W2_first=tiles.W2_first,
    )
    dW1, dW2 = add_parts(parts, [scale] * 2, dtypes, interpret=interpret)
    return dX.reshape(T, b * d), dW1, dW2


def _whole(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda i: (0, 0))


def _axis(size: int, first=0) -> tuple:
    """(first, number, limit) of an axis that a tile holds all of."""
    padded = max(backend.MIN_CONTRACTION, backend.ceil_pow2(size))
    return first, padded, None if padded == size else first + size


def _tokens(T: int, steps: int) -> tuple[jax.Array, jax.Array]:
    """The first of a program's tokens, and the first of the next one's."""
    first = pl.program_id(0) * steps
    return first, jnp.minimum(first + steps, T)


def _forward_kernel(
    x_ref, W1_ref, W2_ref, *refs, T, steps, sizes, has_base, has_bias, scale, precision, W2_first, interpret
):
    a, b, c, d = sizes
    dot = backend.Dot(precision, interpret)
    W1, W2 = backend.load_tile(W1_ref, _axis(a), _axis(b)), backend.load_tile(W2_ref, _axis(c), _axis(d))
    dtype = W1.dtype
    bias = backend.load_tile(refs[-2], _axis(a), _axis(c)).astype(jnp.float32) if has_bias else None

    def token(t, carry):
        X = backend.load_tile(x_ref, _axis(b, t * b), _axis(d)).astype(dtype)
        if W2_first:
            out = scale * dot(W1, dot(X, W2, (1, 1)).astype(dtype))
        else:
            out = scale * dot(dot(W1, X).astype(dtype), W2, (1, 1))
        rows = _axis(a, t * a)
        if has_base:
            out += backend.load_tile(refs[0], rows, _axis(c)).astype(jnp.float32)
        if has_bias:
            out += bias
        backend.store_tile(refs[-1], rows, _axis(c), out)
        return carry

    first, last = _tokens(T, steps)
    lax.fori_loop(first, last, token, 0)


def _backward_kernel(
    x_ref, W1_ref, W2_ref, g_ref, *refs, T, steps, sizes, has_base, scale, precision, W2_first, interpret
):
    a, b, c, d = sizes
    dot = backend.Dot(precision, interpret)
    W1, W2 = backend.load_tile(W1_ref, _axis(a), _axis(b)), backend.load_tile(W2_ref, _axis(c), _axis(d))
    dtype = W1.dtype
    dX_ref, dW1_ref, dW2_ref = refs[-3:]

    def token(t, sums):
        dW1, dW2 = sums
        rows = _axis(b, t * b)
        X = backend.load_tile(x_ref, rows, _axis(d)).astype(dtype)
        G = backend.load_tile(g_ref, _axis(a, t * a), _axis(c)).astype(dtype)
        # The product with Z comes last: Hopper's reads Z from shared memory and is waited for in this step. The other
        # one could run on to the next step, while Triton's pipeline loads another token over the one that it reads.
        if W2_first:
            H, Z = dot(W1, G, (0, 0)).astype(dtype), dot(X, W2, (1, 1)).astype(dtype)
            dX, dW2, dW1 = dot(H, W2), dW2 + dot(H, X, (0, 0)), dW1 + dot(G, Z, (1, 1))
        else:
            H, Z = dot(G, W2).astype(dtype), dot(W1, X).astype(dtype)
            dX, dW1, dW2 = dot(W1, H, (0, 0)), dW1 + dot(H, X, (1, 1)), dW2 + dot(G, Z, (0, 0))
        dX *= scale
        if has_base:
            dX += backend.load_tile(refs[0], rows, _axis(d)).astype(jnp.float32)
        backend.store_tile(dX_ref, rows, _axis(d), dX)
        return dW1, dW2

    zeros = jnp.zeros(W1.shape, jnp.float32), jnp.zeros(W2.shape, jnp.float32)
    first, last = _tokens(T, steps)
    dW1, dW2 = lax.fori_loop(first, last, token, zeros)
    backend.store_tile(dW1_ref, _axis(a), _axis(b), dW1)
    backend.store_tile(dW2_ref, _axis(c), _axis(d), dW2)
