"""Fast, exact Kimi Delta Attention for JAX on NVIDIA GPUs."""

import importlib.metadata

from dormouse_jax import adapters, context_parallel
from dormouse_jax.attention import attention
from dormouse_jax.dispatch import interpret_kernels
from dormouse_jax.explain import explain
from dormouse_jax.gemm import gemm
from dormouse_jax.kda import gdn2, kda
from dormouse_jax.rms_norm import rms_norm
from dormouse_jax.short_convolution import short_convolution
from dormouse_jax.step import kda_step

try:
    __version__ = importlib.metadata.version("dormouse_jax")
except importlib.metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0+source"

__all__ = [
    "__version__",
    "adapters",
    "attention",
    "context_parallel",
    "explain",
    "gdn2",
    "gemm",
    "interpret_kernels",
    "kda",
    "kda_step",
    "rms_norm",
    "short_convolution",
]
