"""Sizes and block specifications of the attention kernels, and what both directions do with a tile of scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt

LEAST = 16  # the tensor cores' smallest tile


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of one call. Axis names as in `dormouse_jax.attention`; `bd` is D padded to the tensor cores' powers of
    two."""

    B: int
    Tq: int
    Tk: int
    H: int
    HK: int
    D: int
    causal: bool

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, causal: bool) -> Sizes:
        B, Tq, H, D = q.shape
        return cls(B, Tq, k.shape[1], H, k.shape[2], D, causal)

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.H // self.HK

    @property
    def bd(self) -> int:
        return max(LEAST, bt.ceil_pow2(self.D))

    def channels(self, head: int | jax.Array = 0) -> tuple:
        """The columns of a head where heads lie side by side; no limit where a tile cannot stick out."""
        return (head * self.D, self.bd, None if self.bd == self.D else (head + 1) * self.D)

    def queries(self, first, number: int) -> tuple:
        return (first, number, self.Tq if self.Tq % number else None)

    def keys(self, first, number: int) -> tuple:
        return (first, number, self.Tk if self.Tk % number else None)

    # Block specifications. A grid is (tiles, B * heads), its first axis varies fastest.
    def query_head(self) -> pl.BlockSpec:
        """[B, Tq, H, D], seen as [Tq, D] by a program of one query head."""
        return pl.BlockSpec((None, self.Tq, None, self.D), lambda _, n: (n // self.H, 0, n % self.H, 0))

    def its_key_head(self) -> pl.BlockSpec:
        """[B, Tk, HK, D], seen as [Tk, D] by a program of one query head."""
        H, group = self.H, self.group
        return pl.BlockSpec((None, self.Tk, None, self.D), lambda _, n: (n // H, 0, n % H // group, 0))

    def query_row(self) -> pl.BlockSpec:
        """[B, H, Tq, 1], seen as [Tq, 1] by a program of one query head."""
        return pl.BlockSpec((None, None, self.Tq, 1), lambda _, n: (n // self.H, n % self.H, 0, 0))

    def key_head(self) -> pl.BlockSpec:
        """[B, Tk, HK, D], seen as [Tk, D] by a program of one key head."""
        return pl.BlockSpec((None, self.Tk, None, self.D), lambda _, n: (n // self.HK, 0, n % self.HK, 0))

    def its_query_heads(self) -> pl.BlockSpec:
        """[B, Tq, H * D], seen as [Tq, group * D] by a program of one key head."""
        return pl.BlockSpec((None, self.Tq, self.group * self.D), lambda _, n: (n // self.HK, 0, n % self.HK))

    def its_query_rows(self) -> pl.BlockSpec:
        """[B, H, Tq], seen as [group, Tq] by a program of one key head."""
        return pl.BlockSpec((None, self.group, self.Tq), lambda _, n: (n // self.HK, n % self.HK, 0))

    def spans(self, heads: int) -> pl.BlockSpec:
        """[B, T, 2], seen as [T, 2] by a program of one of so many heads."""
        return pl.BlockSpec((None, self.Tq, 2), lambda _, n: (n // heads, 0, 0))


@dataclasses.dataclass(frozen=True)
class Sight:
    """Which queries see which keys: each a run of the other, whose bounds never decrease.

    spans_ref: [T, 2], of every token the first and the last + 1 of its sequence; None where nothing is packed.
    """

    sizes: Sizes
    spans_ref: Any

    def keys_of(self, query) -> tuple[Any, Any]:
        """First and last + 1 key that a query sees; of an array [n, 1] of queries, arrays."""
        if self.spans_ref is None:
            if not self.sizes.causal:
                return 0, self.sizes.Tk
            return 0, jnp.clip(query + (self.sizes.Tk - self.sizes.Tq + 1), 0, self.sizes.Tk)
        last = jnp.minimum(query, self.sizes.Tq - 1)
        return self._bound(last, 0), query + 1 if self.sizes.causal else self._bound(last, 1)

    def queries_of(self, key, tile: int) -> tuple[Any, Any]:
        """The same of the queries that see a key. Rows of zeros, which add nothing, complete the last tile of `tile`
        queries where nothing is packed."""
        if self.spans_ref is None:
            first = jnp.maximum(key - (self.sizes.Tk - self.sizes.Tq), 0) if self.sizes.causal else 0
            return first, -(-self.sizes.Tq // tile) * tile
        last = jnp.minimum(key, self.sizes.Tk - 1)
        return key if self.sizes.causal else self._bound(last, 0), self._bound(last, 1)

    def _bound(self, token, column: int):
        if token.ndim == 0:
            return self.spans_ref[token, column]
        return bt.gather_tile(self.spans_ref, token, jnp.full((1, 1), column, jnp.int32))


def walk(
    seen_by: Callable[[Any], tuple[Any, Any]],
    first: Any,
    number: int,
    limit: int,
    tile: int,
    step: Callable,
    carry: Any,
) -> Any:
    """carry = step(n, carry, masked=) for every tile n of `tile` rows of which any of `number` tokens from `first` on,
    below `limit`, sees a part; masked: unless each of them sees all of it.

    seen_by: of a token the first row that it sees, and the one after the last.
    """
    last = jnp.minimum(first + number, limit) - 1
    (begin, whole_end), (whole_begin, end) = seen_by(first), seen_by(last)
    begin, end = _div(begin, tile), _div(end + (tile - 1), tile)
    whole_begin, whole_end = _div(whole_begin + (tile - 1), tile), _div(whole_end, tile)
    if not all(isinstance(x, int) for x in (begin, whole_begin)):
        whole_begin = jnp.clip(whole_begin, begin, jnp.maximum(begin, end))
    if not all(isinstance(x, int) for x in (whole_begin, whole_end, end)):
        whole_end = jnp.clip(whole_end, whole_begin, jnp.maximum(whole_begin, end))
    for low, high, masked in ((begin, whole_begin, True), (whole_begin, whole_end, False), (whole_end, end, True)):
        if not (isinstance(low, int) and isinstance(high, int) and low >= high):

            def body(n, carry, masked=masked):
                return step(n, carry, masked=masked)

            carry = lax.fori_loop(jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32), body, carry)
    return carry


def _div(x, tile: int):
    return x // tile if isinstance(x, int) else lax.div(x, jnp.int32(tile))


def weighted(dot: bt.Dot, weights: jax.Array, x: jax.Array, seen: jax.Array | None) -> jax.Array:
    """weights [m, n] times x [n, bd]. Where `seen` is false weights are 0, but x may be inf or NaN, which would make a
    NaN of that; a row that sees inf or NaN is NaN. None: all is seen."""
    if seen is not None:
        finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
        spoiled = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1) > 0
        weights = jnp.where(seen & spoiled[None, :], jnp.nan, weights)
        x = jnp.where(finite, x, jnp.zeros((), x.dtype))
    return dot(weights.astype(x.dtype), x)
