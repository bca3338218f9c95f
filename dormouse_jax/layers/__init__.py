"""Layers on Flax NNX. Imported on its own: `import dormouse_jax` needs no Flax."""

try:
    import flax.nnx  # noqa: F401
except ImportError as error:
    raise ImportError("dormouse_jax.layers needs Flax; the extra 'train' of dormouse_jax installs it") from error

from dormouse_jax.layers.adapted_linear import AdaptedLinear, AdapterParam
from dormouse_jax.layers.causal_attention import CausalAttention, KeyValueCache
from dormouse_jax.layers.kimi_delta_attention import Cache, KimiDeltaAttention

__all__ = ["AdaptedLinear", "AdapterParam", "Cache", "CausalAttention", "KeyValueCache", "KimiDeltaAttention"]
