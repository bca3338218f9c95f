"""The matrix product in plain JAX: what the kernels of `gemm` are held to, and what runs where there are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

PRESETS = {
    ("tf32", "float32"): lax.DotAlgorithmPreset.TF32_TF32_F32,
    ("16bit", "bfloat16"): lax.DotAlgorithmPreset.BF16_BF16_F32,
    ("16bit", "float16"): lax.DotAlgorithmPreset.F16_F16_F32,
}


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: jnp.dtype,
    platform: str,
) -> jax.Array:
    """op(a) op(b) + bias in `out_dtype`, summed in float32. Arguments as in `dormouse_jax.gemm`.

    XLA knows the tensor cores' formats on GPUs only. On another `platform` the products are float32.
    """
    preset = PRESETS.get((precision, str(a.dtype))) if platform == "gpu" else None
    if preset is None:
        a, b, preset = a.astype(jnp.float32), b.astype(jnp.float32), lax.Precision.HIGHEST
    contract = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    total = lax.dot_general(a, b, (contract, ((), ())), precision=preset, preferred_element_type=jnp.float32)
    if bias is not None:
        total += bias.astype(jnp.float32)
    return total.astype(out_dtype)
