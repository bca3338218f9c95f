"""Weights of linear layers under adapters, on Pallas's Triton backend: LoRA and LoHa (`low_rank`), LoKr (`kronecker`),
OFT (`block_diagonal`).

The update of a tile of the weight is formed where the base is added to it, and formed again where its cotangent is
read, so that no array of the weight's size exists but the base, the result and its cotangent.
"""

from pallas_kernels.adapters import block_diagonal, kronecker, low_rank
from pallas_kernels.adapters.config import Tiles, choose_block_diagonal, choose_kronecker, choose_low_rank

__all__ = [
    "Tiles",
    "block_diagonal",
    "choose_block_diagonal",
    "choose_kronecker",
    "choose_low_rank",
    "kronecker",
    "low_rank",
]
