"""Language models on Flax NNX. Imported on its own: `import dormouse_jax` needs neither Flax nor Optax."""

try:
    import flax.nnx  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"dormouse_jax.models needs {error.name}; the extra 'train' of dormouse_jax installs it"
    ) from error

from dormouse_jax.models.config import PRESETS, DecoderConfig, Preset
from dormouse_jax.models.decoder import Decoder, DecoderCache

__all__ = ["PRESETS", "Decoder", "DecoderCache", "DecoderConfig", "Preset"]
