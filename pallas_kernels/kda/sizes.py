"""Sizes and block specifications shared by the KDA kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend_triton import ceil_pow2
from pallas_kernels.kda.config import BLOCK, KdaConfig


class Packing(NamedTuple):
    """Where the chunks of packed sequences lie, B = 1: int32 arrays, or a program's refs.

    Attributes:
      rows: [slots, 2], the first token of a chunk and the one after its last; equal in a slot that is not used. They
        lie between two multiples of the chunk size: token t is row t % C of its chunk.
      bounds: [N + 1, 2], the first chunk and the first token of every sequence; the last row says where all end.
    """

    rows: Any
    bounds: Any

    def launched(self) -> tuple[Packing, Packing]:
        """The arrays and their block specifications: every program sees all of them."""
        return self, Packing(*(pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in self))

    def into_chunks(self, x: jax.Array, C: int) -> jax.Array:
        """x [T, ..] as [slots, C, ..], zeros where a chunk has no token."""
        first, end = self.rows[:, :1], self.rows[:, 1:]
        token = lax.div(first, C) * C + jnp.arange(C, dtype=jnp.int32)
        own = ((first <= token) & (token < end)).reshape(*token.shape, *[1] * (x.ndim - 1))
        return jnp.where(own, jnp.take(x, token, axis=0, mode="clip"), 0)

    def from_chunks(self, x: jax.Array, T: int) -> jax.Array:
        """The inverse: x [slots, C, ..] as [T, ..]."""
        C, token = x.shape[1], jnp.arange(T, dtype=jnp.int32)
        (chunk, start), ends = self.bounds[:-1].T, self.bounds[1:, 1]
        sequence = jnp.minimum(jnp.sum(token[:, None] >= ends, axis=1, dtype=jnp.int32), ends.size - 1)
        row = ((chunk - lax.div(start, C)) * C)[sequence] + token
        return jnp.take(x.reshape(-1, *x.shape[2:]), row, axis=0, mode="clip")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one call. K and V are the caller's; `bk` and `bv` are padded to the tensor cores' powers of two.

    Attributes:
      B, T, H, HV, K, V: batch, tokens, query/key heads, value heads, key dim, value dim.
      C: tokens a chunk.
      channelwise: erase and write gates a channel (the general rule) rather than one beta a token.
      N: sequences, each with a state: B, unless they are packed.
      slots: chunks of packed sequences, or None.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    channelwise: bool
    N: int
    slots: int | None = None

    @classmethod
    def of(
        cls, q: jax.Array, v: jax.Array, erase: jax.Array, config: KdaConfig, packing: Packing | None = None
    ) -> Sizes:
        B, T, H, K = q.shape
        N, slots = (B, None) if packing is None else (packing.bounds.shape[0] - 1, packing.rows.shape[0])
        return cls(B, T, H, v.shape[2], K, v.shape[3], config.chunk_size, erase.ndim == 4, N, slots)

    @property
    def packed(self) -> bool:
        return self.slots is not None

    @property
    def bk(self) -> int:
        return max(BLOCK, ceil_pow2(self.K))

    @property
    def bv(self) -> int:
        return max(BLOCK, ceil_pow2(self.V))

    @property
    def nt(self) -> int:
        """Number of chunks."""
        return -(-self.T // self.C) if self.slots is None else self.slots

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

    def sequence_chunks(self, packing: Packing | None, head) -> tuple[Any, Any, Any]:
        """First and last + 1 chunk of the sequence of a state, counted over sequences and value heads, and a function
        from a chunk to its rows."""
        if packing is None:
            return 0, self.nt, lambda n: self.rows(n * self.C, self.C)
        sequence = head // self.HV
        begin, token = packing.bounds[sequence, 0], packing.bounds[sequence, 1]
        end, limit = packing.bounds[sequence + 1, 0], packing.bounds[sequence + 1, 1]
        first = lax.div(token, self.C) - begin  # In tiles of C tokens, less that in chunks.
        return begin, end, lambda n: ((first + n) * self.C, self.C, (token, limit))

    def k_cols(self) -> tuple:
        return (0, self.bk, self.k_limit)

    def v_cols(self, start: int | jax.Array = 0, size: int | None = None) -> tuple:
        return (start, self.bv if size is None else size, self.v_limit)

    # Block specifications. A grid ends in (.., chunk or value tile, sequences * HV), and its first axis varies fastest.
    # Sequences are the batch, but that all packed ones together are one row of tokens.
    def _row(self, i):
        return 0 if self.packed else i // self.HV

    def head(self, array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        """[B, T, heads, dim] or [B, T, HV], seen as [T, dim] or [T, 1] by the program of one value head."""
        HV, group = self.HV, self.HV // array.shape[2]
        if len(array.shape) == 3:
            return pl.BlockSpec((None, self.T, 1), lambda *i: (self._row(i[-1]), 0, i[-1] % HV))
        return pl.BlockSpec(
            (None, self.T, None, array.shape[3]), lambda *i: (self._row(i[-1]), 0, i[-1] % HV // group, 0)
        )

    def state(self) -> pl.BlockSpec:
        """[N, HV, K, V], seen as [K, V]."""
        HV = self.HV
        return pl.BlockSpec((None, None, self.K, self.V), lambda *i: (i[-1] // HV, i[-1] % HV, 0, 0))

    def chunk(self, *tile: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """An intermediate [B * HV, NT, *tile], seen as [*tile] by the program of one chunk."""
        zeros = (0,) * len(tile)
        return (self.B * self.HV, self.nt, *tile), pl.BlockSpec((None, None, *tile), lambda *i: (i[-1], i[-2], *zeros))

    def chunks(self, *tile: int) -> tuple[tuple[int, ...], pl.BlockSpec]:
        """The same array, seen as [NT, *tile] by the program that walks over a head's chunks."""
        zeros, packed, HV = (0,) * len(tile), self.packed, self.HV
        spec = pl.BlockSpec((None, self.nt, *tile), lambda *i: (i[-1] % HV if packed else i[-1], 0, *zeros))
        return (self.B * self.HV, self.nt, *tile), spec


def operand_dtype(dtype, precision: str):
    """The dtype in which matmul operands and tiles between kernels are kept."""
    return jnp.dtype(dtype) if precision == "16bit" else jnp.dtype(jnp.float32)
