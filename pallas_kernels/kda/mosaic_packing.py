"""Packed sequences in the Hopper kernels: tiles of C tokens of which some rows may be another chunk's.

The tensor memory accelerator copies whole tiles. What it brings of other rows is replaced by zeros in shared memory; a
tile whose rows are not all the chunk's own leaves row by row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.mosaic_tiles import ROWS
from pallas_kernels.kda.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens of a chunk.

    Attributes:
      start: the token of its tile's first row, a multiple of C.
      own: its first token and the one after its last, of packed sequences; None where the tile's are all its own.
    """

    sizes: Sizes
    start: Any
    own: tuple[Any, Any] | None = None

    @property
    def tokens(self) -> Any:
        return pl.ds(self.start, self.sizes.C)

    def inside(self, row: jax.Array) -> jax.Array | None:
        """Which rows of the tile are tokens of the chunk; None where all are."""
        if self.own is not None:
            return self.is_own(row)
        return None if self.sizes.T % self.sizes.C == 0 else self.start + row < self.sizes.T

    def is_own(self, row: jax.Array) -> jax.Array:
        """Which rows of the tile are the chunk's, of packed sequences."""
        assert self.own is not None
        token = self.start + row
        return (self.own[0] <= token) & (token < self.own[1])

    @property
    def shared(self) -> Any:
        """Whether rows of the tile are not the chunk's, of packed sequences."""
        assert self.own is not None
        first, end = self.own
        return (first > self.start) | (end < self.start + self.sizes.C)

    def keep(self, *tiles: Any) -> None:
        """Replaces other chunks' rows of these tiles [C, n] in shared memory by zeros."""
        if self.own is None:
            return

        @pl.when(self.shared)
        def _():
            inside = self.is_own(bm.indices((ROWS, self.sizes.C))[1])
            for tile in tiles:
                for columns in _slabs(tile):
                    value = bm.load_transposed(tile.at[:, columns])
                    bm.store_transposed(tile.at[:, columns], jnp.where(inside, value, jnp.zeros_like(value)))
            bm.commit()

    def copy_out(
        self, of_tokens: Sequence[tuple[Any, Any, Callable]], others: Sequence[tuple[Any, Any]], row_tile: Any
    ) -> None:
        """Starts copies to device memory, after the stores to what is copied.

        of_tokens: the chunk's rows of tiles [C, n]: a tile, where all of it goes, and a function from a token to where
          its row goes.
        others: pairs of a buffer and where it goes.
        row_tile: [C, 64] in plain shared memory, through which rows go. It may be one of the tiles, and those of
          another dtype are plain themselves; None where all are.
        """
        everything = [(tile, target) for tile, target, _ in of_tokens] + list(others)
        if self.own is None or not of_tokens:
            bm.copy_buffers_out(everything)
            return
        pl.when(jnp.logical_not(self.shared))(functools.partial(bm.copy_buffers_out, everything))

        @pl.when(self.shared)
        def _():
            bm.copy_buffers_out(others)
            for tile, _, place in sorted(of_tokens, key=lambda x: x[0] is not row_tile):
                through = row_tile is not None and tile is not row_tile and tile.dtype == row_tile.dtype
                for columns in _slabs(tile):
                    if through:
                        bm.await_buffers(0)
                        bm.store_transposed(row_tile, bm.load_transposed(tile.at[:, columns]))
                        bm.commit()
                    self._copy_rows_out(row_tile if through else tile, place, columns)

    def _copy_rows_out(self, rows: Any, place: Callable, columns: Any) -> None:
        assert self.own is not None

        @pl.loop(*self.own)
        def _(token):
            bm.copy_row_out(rows.at[token - self.start], place(token).at[columns])


def own_rows(spans: Sequence[Span], shape: tuple[int, int]) -> jax.Array:
    """Which rows of a tile [64, n], in which the chunks of `spans` lie one below the other, are the chunks' own."""
    row, C = bm.indices(shape)[0], spans[0].sizes.C
    own = [(lax.div(row, C) == i) & span.is_own(lax.rem(row, C)) for i, span in enumerate(spans)]
    return functools.reduce(jnp.logical_or, own)


def keep_rows(spans: Sequence[Span], *tiles: Any) -> None:
    """Replaces other rows than `own_rows` by zeros in tiles in shared memory; of no spans all rows stay."""
    if not spans:
        return

    @pl.when(functools.reduce(jnp.logical_or, [span.shared for span in spans]))
    def _():
        inside = own_rows(spans, (ROWS, tiles[0].shape[1]))
        for tile in tiles:
            value = bm.load(tile)
            tile[...] = jnp.where(inside, value, jnp.zeros_like(value))
        bm.commit()


def row_scratch(sizes: Sizes, op: Any) -> dict[str, Any]:
    """Shared memory for `Span.copy_out` of packed sequences: `row_tile`."""
    return {"row_tile": bm.rows((sizes.C, ROWS), op)} if sizes.packed else {}


def of_chunks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a kernel of a kernel's body of one chunk: it gets `span_of`, a function from its chunk to that `Span`. Of
    packed sequences, whose `rows` are the first input, slots that are not used are left out."""

    @functools.wraps(body)
    def kernel(*refs, sizes: Sizes, **rest):
        if not sizes.packed:
            body(*refs, sizes=sizes, span_of=lambda n: Span(sizes, n * sizes.C), **rest)
            return
        rows, *refs = refs
        n = lax.rem(lax.div(bm.program(), sizes.bk // ROWS), sizes.nt)
        first, end = rows[n, 0], rows[n, 1]

        def span_of(_):
            return Span(sizes, lax.div(first, sizes.C) * sizes.C, (first, end))

        pl.when(first < end)(functools.partial(body, *refs, sizes=sizes, span_of=span_of, **rest))

    return kernel


def _slabs(tile: Any) -> list[Any]:
    return [pl.ds(i * ROWS, ROWS) for i in range(tile.shape[1] // ROWS)]
