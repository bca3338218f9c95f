"""Matrix products of a named precision in plain JAX, as einsums."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dormouse_jax.reference.gemm import PRESETS


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of operands rounded to one dtype, summed in float32.

    Attributes:
      precision: "fp32", "tf32" or "16bit".
      dtype: of the operands.
      platform: XLA knows the tensor cores' formats on GPUs only; elsewhere the products are float32.
    """

    precision: str
    dtype: str
    platform: str

    def round(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype)

    def __call__(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = self.round(a), self.round(b)
        preset: Any = PRESETS.get((self.precision, self.dtype)) if self.platform == "gpu" else None
        if preset is None:
            return exact(subscripts, a, b)
        return jnp.einsum(subscripts, a, b, precision=preset, preferred_element_type=jnp.float32)


def exact(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A float32 product of operands as they are, for what is small."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
