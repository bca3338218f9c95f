"""Linear layers under adapters, on Pallas's Triton backend: LoRA and LoHa (`low_rank`; of LoRA `few_tokens` too), LoKr
(`kronecker` of weights, `tokens` of activations), OFT (`block_diagonal`).

The update of a tile of the weight is formed where the base is added to it, and formed again where its cotangent is
read, so that no array of the weight's size exists but the base, the result and its cotangent.
"""

from pallas_kernels.adapters import block_diagonal, few_tokens, kronecker, low_rank, sums, tokens
from pallas_kernels.adapters.config import (
    MAX_FEW_TOKENS,
    BypassConfig,
    FewTokens,
    KroneckerTiles,
    LowRankTiles,
    Tiles,
    TokenTiles,
    choose_block_diagonal,
    choose_few_tokens,
    choose_kronecker,
    choose_low_rank,
    choose_tokens,
)

__all__ = [
    "MAX_FEW_TOKENS",
    "BypassConfig",
    "FewTokens",
    "KroneckerTiles",
    "LowRankTiles",
    "Tiles",
    "TokenTiles",
    "block_diagonal",
    "choose_block_diagonal",
    "choose_few_tokens",
    "choose_kronecker",
    "choose_low_rank",
    "choose_tokens",
    "few_tokens",
    "kronecker",
    "low_rank",
    "sums",
    "tokens",
]
