"""Sizes of the decoder, and named ones with the batch that each is trained with."""

from __future__ import annotations

import dataclasses

from dormouse_jax import validation as check


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What a decoder's parameters and results depend on.

    Attributes:
      hidden_size: channels of the residual stream.
      num_layers: layers that have parameters, each a mixer of tokens and a SwiGLU.
      num_heads, head_dim: of the mixers; keys and values have the same dim.
      intermediate_size: channels inside a SwiGLU.
      attention_every: the mixer of every n-th layer is softmax attention, that of the others Kimi Delta Attention; 0
        for no attention. It divides num_layers.
      loops: how often the stack of layers is run, each time with the same parameters, on what it gave before.
      vocab_size: 256 for bytes.
      conv_size: tokens that the convolutions of Kimi Delta Attention see.
      norm_eps: of all norms.
      dtype: of activations, "float32", "bfloat16" or "float16". Parameters are float32.

    Raises:
      ValueError, TypeError: for a value outside of these.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    attention_every: int = 0
    loops: int = 1
    vocab_size: int = 256
    conv_size: int = 4
    norm_eps: float = 1e-5
    dtype: str = "bfloat16"

    def __post_init__(self):
        sizes = ("hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size", "attention_every")
        for name in (*sizes, "loops", "vocab_size", "conv_size"):
            value, least = getattr(self, name), 0 if name == "attention_every" else 1
            if check.as_index("DecoderConfig", name, value) < least:
                raise ValueError(f"DecoderConfig: {name} must be at least {least}, got {value}")
        if self.attention_every and self.num_layers % self.attention_every:
            raise ValueError(
                f"DecoderConfig: attention_every must divide num_layers = {self.num_layers}, got {self.attention_every}"
            )
        if not check.as_float("DecoderConfig", "norm_eps", self.norm_eps) > 0:
            raise ValueError(f"DecoderConfig: norm_eps must be positive, got {self.norm_eps}")
        check.require_choice("DecoderConfig", "dtype", self.dtype, ("float32", "bfloat16", "float16"))

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixers of one group, "kda" or "attention": what repeats along the stack."""
        return ("kda",) * (self.attention_every - 1) + ("attention",) if self.attention_every else ("kda",)

    @property
    def num_groups(self) -> int:
        return self.num_layers // len(self.mixers)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A decoder and how it is trained by default: sequences a step, tokens of each, steps, the peak learning rate."""

    decoder: DecoderConfig
    batch_size: int
    sequence_length: int
    steps: int
    learning_rate: float


PRESETS = {
    # About a million parameters, for a CPU, where 16-bit products are slow.
    "1m": Preset(
        DecoderConfig(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            head_dim=32,
            intermediate_size=384,
            attention_every=4,
            dtype="float32",
        ),
        batch_size=8,
        sequence_length=256,
        steps=300,
        learning_rate=3e-3,
    ),
    # The shape at which the operators were first measured: 12 heads of 64, 10 sequences of 512 tokens, 4 iterations.
    "report": Preset(
        DecoderConfig(hidden_size=768, num_layers=4, num_heads=12, head_dim=64, intermediate_size=2048, loops=4),
        batch_size=10,
        sequence_length=512,
        steps=5000,
        learning_rate=1e-3,
    ),
    "340m": Preset(
        DecoderConfig(hidden_size=1024, num_layers=24, num_heads=8, head_dim=128, intermediate_size=3072),
        batch_size=8,
        sequence_length=2048,
        steps=5000,
        learning_rate=6e-4,
    ),
}
