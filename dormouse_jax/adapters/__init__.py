"""Adapters of linear layers: LoRA, LoHa, LoKr and OFT, each as a new weight (`rebuild`) and on activations (`bypass`).

A layer computes y = x W^T + bias with W `[O, I]`. `rebuild` gives the weight that the adapter makes of W, or its update
alone; `bypass` applies the same to activations, without a weight of that size in its forward or kept for its backward.
`Adapter` holds one as a value, `init_…` start one, and `from_…` and `to_…` convert what PEFT and LyCORIS store;
`dormouse_jax.layers.AdaptedLinear` puts one on a layer of Flax NNX.
"""

from dormouse_jax.adapters import loha, lokr, lora, oft
from dormouse_jax.adapters.adapter import (
    Adapter,
    factorize,
    from_lycoris,
    from_peft,
    init_loha,
    init_lokr,
    init_lora,
    init_oft,
    to_lycoris,
    to_peft,
)

__all__ = [
    "Adapter",
    "factorize",
    "from_lycoris",
    "from_peft",
    "init_loha",
    "init_lokr",
    "init_lora",
    "init_oft",
    "loha",
    "lokr",
    "lora",
    "oft",
    "to_lycoris",
    "to_peft",
]
