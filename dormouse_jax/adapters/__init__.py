"""Adapters of linear layers: LoRA, LoHa, LoKr and OFT, each as a new weight (`rebuild`) and on activations (`bypass`).

A layer computes y = x W^T + bias with W `[O, I]`. `rebuild` gives the weight that the adapter makes of W, or its update
alone; `bypass` applies the same to activations, without a weight of that size in its forward or kept for its backward.
"""

from dormouse_jax.adapters import loha, lokr, lora, oft

__all__ = ["loha", "lokr", "lora", "oft"]
