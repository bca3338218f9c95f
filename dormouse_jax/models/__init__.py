"""Language models on Flax NNX. Imported on its own: `import dormouse_jax` needs no Flax."""

from dormouse_jax.models.config import PRESETS, DecoderConfig, Preset
from dormouse_jax.models.decoder import Decoder, DecoderCache

__all__ = ["PRESETS", "Decoder", "DecoderCache", "DecoderConfig", "Preset"]
