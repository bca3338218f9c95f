"""Sizes and block specifications shared by the KDA kernels."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend_triton import ceil_pow2
from pallas_kernels.kda.config import BLOCK, KdaConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one call. K and V are the caller's; `bk` and `bv` are padded to the tensor cores' powers of two.

    Attributes:
      B, T, H, HV, K, V: batch, tokens, query/key heads, value heads, key dim, value dim.
      C: tokens a chunk.
      channelwise: erase and write gates a channel (the general rule) rather than one beta a token.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    channelwise: bool

    @classmethod
    def of(cls, q: jax.Array, v: jax.Array, erase: jax.Array, config: KdaConfig) -> Sizes:
        B, T, H, K = q.shape
        return cls(B, T, H, v.shape[2], K, v.shape[3], config.chunk_size, channelwise=erase.ndim == 4)

    @property
    def bk(self) -> int:
        return max(BLOCK, ceil_pow2(self.K))

    @property
    def bv(self) -> int:
        return max(BLOCK, ceil_pow2(self.V))

    @property
    def nt(self) -> int:
        """Number of chunks."""
        return -(-self.T // self.C)

    @property
    def blocks(self) -> int:
        """Number of 16-row blocks in a chunk."""
        return self.C // BLOCK

    # The limits that masks compare with: None where a tile cannot stick out, so that no mask is emitted.
    @property
    def row_limit(self) -> int | None:
        return None if self.T % self.C == 0 else self.T

    @property
    def k_limit(self) -> int | None:
        return None if self.bk == self.K else self.K

    @property
    def v_limit(self) -> int | None:
        return None if self.bv == self.V else self.V

    def rows(self, start, size: int = BLOCK) -> tuple:
        return (start, size, self.row_limit)

    def k_cols(self) -> tuple:
        return (0, self.bk, self.k_limit)

    def v_cols(self, start: int | jax.Array = 0, size: int | None = None) -> tuple:
        return (start, self.bv if size is None else size, self.v_limit)

    # Block specifications. A grid ends in (.., chunk or value tile, B * HV), and its first axis varies fastest.
    def head(self, array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        """[B, T, heads, dim] or [B, T, HV], seen as [T, dim] or [T, 1] by the program of one value head."""
        HV, group = self.HV, self.HV // array.shape[2]
        if len(array.shape) == 3:
            return pl.BlockSpec((None, self.T, 1), lambda *i: (i[-1] // HV, 0, i[-1] % HV))
        return pl.BlockSpec((None, self.T, None, array.shape[3]), lambda *i: (i[-1] // HV, 0, i[-1] % HV // group, 0))

    def state(self) -> pl.BlockSpec:
        """[B, HV, K, V], seen as [K, V]."""
        HV = self.HV
        return pl.BlockSpec((None, None, self.K, self.V), lambda *i: (i[-1] // HV, i[-1] % HV, 0, 0))

    def chunk(self, *tile: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """An intermediate [B * HV, NT, *tile], seen as [*tile] by the program of one chunk."""
        zeros = (0,) * len(tile)
        return (self.B * self.HV, self.nt, *tile), pl.BlockSpec((None, None, *tile), lambda *i: (i[-1], i[-2], *zeros))

    def chunks(self, *tile: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """The same array, seen as [NT, *tile] by the program that walks over a head's chunks."""
        zeros = (0,) * len(tile)
        return (self.B * self.HV, self.nt, *tile), pl.BlockSpec((None, self.nt, *tile), lambda *i: (i[-1], 0, *zeros))


def operand_dtype(dtype, precision: str):
    """The dtype in which matmul operands and tiles between kernels are kept."""
    return jnp.dtype(dtype) if precision == "16bit" else jnp.dtype(jnp.float32)
