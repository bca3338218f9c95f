"""Softmax attention, forward and backward, on Pallas's Triton backend, and on Mosaic GPU for Hopper.

Both directions walk over tiles of the matrix of scores and keep none of it (FlashAttention-2): the forward leaves o and
a number a query, the backward forms the scores again. With s = scale q k^T and the cotangent do of o,

    lse   = log sum_s exp(s_ts)
    p     = exp(s - lse)               o  = p v
    delta = sum_d do_td o_td           dv = p^T do
    ds    = p (do v^T - delta)         dq = scale ds k,  dk = scale ds^T q

where p = 0 for keys that a query does not see. Logarithms are to base 2, whose exponential is one instruction.
"""

from pallas_kernels.attention.backward import backward
from pallas_kernels.attention.config import AttentionConfig, HopperTiles, Tiles, choose_config, choose_hopper
from pallas_kernels.attention.forward import forward

__all__ = ["AttentionConfig", "HopperTiles", "Tiles", "backward", "choose_config", "forward", "choose_hopper"]
