"""Matrix products with a bias: a kernel on Pallas's Triton backend for every card, one on Mosaic GPU for Hopper."""

from __future__ import annotations

import functools

import jax
import jax.custom_batching
import jax.numpy as jnp

from pallas_kernels.gemm import triton as _triton
from pallas_kernels.gemm.config import (
    MosaicConfig,
    Problem,
    TritonConfig,
    choose_mosaic,
    choose_triton,
    why_triton,
    why_xla,
)

__all__ = [
    "MosaicConfig",
    "Problem",
    "TritonConfig",
    "choose_mosaic",
    "choose_triton",
    "matmul",
    "why_triton",
    "why_xla",
]


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: jnp.dtype,
    config: TritonConfig | MosaicConfig,
    interpret: bool,
    more: tuple[jax.Array, jax.Array] | None = None,
    name: str | None = None,
) -> jax.Array:
    """op(a) op(b) + bias. Under `jax.vmap` the products of a batch are computed one after the other, by the kernel that
    one product takes: with a batch it would be another kernel, not held to float64 on a GPU.

    Args:
      a: [M, K], or [K, M] with transpose_a.
      b: [K, N], or [N, K] with transpose_b; a's dtype.
      bias: [N], or None.
      precision: "fp32" or "tf32" for float32 operands, "16bit" for bfloat16 and float16.
      out_dtype: of the [M, N] output. Sums, and the bias, are float32 before it.
      config: of the kernel to run.
      interpret: whether it runs in interpret mode.
      more: operands of a second product, stored as the first's are, that is added before the output is rounded. Only
        the Hopper kernel takes them, of 16 bit and with a contraction that is not split.
      name: of that kernel with a second product, in profiles; by default its own.
    """
    arguments = {
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "precision": precision,
        "out_dtype": out_dtype,
        "interpret": interpret,
    }
    if isinstance(config, TritonConfig):
        if more is not None:
            raise ValueError("the Triton kernel takes no second product")
        run = _triton.matmul
    else:
        from pallas_kernels.gemm import mosaic  # imported where it is used: it changes with every release of JAX

        run = mosaic.matmul
    run = functools.partial(run, config=config, **arguments)
    if more is None:
        return jax.custom_batching.sequential_vmap(run)(a, b, bias)
    named = {} if name is None else {"name": name}
    return jax.custom_batching.sequential_vmap(lambda *given: run(*given[:3], more=given[3], **named))(a, b, bias, more)
