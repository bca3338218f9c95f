"""What the Hopper kernels of one chunk share: tiles [64, C], key channels or value columns as rows and tokens along the
columns, their products with a left operand from registers, and sums over tokens."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.config import hopper_chunk_refusal
from pallas_kernels.kda.sizes import Packing, Sizes

ROWS = 64  # Of a tile: the rows of one product of the tensor cores.
LOG2_E = 1.4426950408889634

# Pairs of tokens of a block of 16 by where they part: into the halves, of 2**n tokens, of it or of a smaller block.
HALVES = (3, 2, 1, 0)


def to_middle(token: Any, other: Any, n: int) -> Any:
    """Whether the decay between a token and the middle of its block of 2 * 2**n tokens has that of the token `other`:
    integers, or arrays of them."""
    return ((token >> n) == (other >> n)) & ((((token >> n) & 1) == 1) == (other <= token))


def across_middle(later: Any, earlier: Any, n: int) -> Any:
    """Whether two tokens are in the second and in the first half of one block of 2 * 2**n."""
    return (((later >> n) & 1) == 1) & ((later >> n) == (earlier >> n) + 1)


MASKS = ("prefix", "suffix", "base", "rest")


def _masks(token: Any, of: Any) -> dict[str, Any]:
    """The 0/1 matrices of `Tiles.sums`, MASKS: whether a sum for the token `of` takes that of `token`."""
    own, block = token >> 4, of >> 4
    chosen = ((own == block) & (token <= of), (own == block) & (token > of), own < block, own > block)
    return dict(zip(MASKS, chosen, strict=True))


def halving_masks(C: int) -> np.ndarray:
    """[4, 2, 64, C]: for each of HALVES, what `Tiles.masks[0]` is with `to_middle` in the place of `prefix`; and which
    tokens (rows from 0 on, and again from C on) and keys (columns) it parts."""
    row, col = np.arange(ROWS)[:, None], np.arange(C)[None, :]
    token, which = row % C, row // C
    masks = _masks(token, col)
    rest = [masks[name] & (which == i) for i, name in enumerate(MASKS)][1:]
    sums = [functools.reduce(operator.or_, [to_middle(col, token, n) & (which == 0), *rest]) for n in HALVES]
    pairs = [across_middle(token, col, n) & (which < 2) for n in HALVES]
    return np.stack([np.stack(sums), np.stack(pairs)], axis=1).astype(float)


def exp(x: jax.Array) -> jax.Array:
    return jnp.exp2(x * LOG2_E)


def tile_scratch(C: int, op: Any, interpret: bool) -> dict[str, Any]:
    """Shared memory that `Tiles` needs: `masks`, and in interpret mode `left_a`, `left_b`."""
    masks = {"masks": bm.tiles((-(-4 * C // ROWS), ROWS, C), op, 2 * C)}
    return masks | ({f"left_{name}": bm.rows((ROWS, C), op) for name in "ab"} if interpret else {})


def beta_rows(beta: jax.Array, sizes: Sizes, packing: Packing | None = None) -> jax.Array:
    """beta [B, T, HV] as [B * HV, NT, C] in float32, zeros where a chunk has no token: copies take whole rows."""
    if packing is not None:
        return jnp.moveaxis(packing.into_chunks(beta[0].astype(jnp.float32), sizes.C), 2, 0)
    padded = jnp.pad(beta.astype(jnp.float32), ((0, 0), (0, sizes.nt * sizes.C - sizes.T), (0, 0)))
    return padded.swapaxes(1, 2).reshape(sizes.B * sizes.HV, sizes.nt, sizes.C)


def check_sizes(sizes: Sizes, *arrays: jax.Array, precision: str = "16bit") -> None:
    """Raises ValueError for what the Hopper kernels of one chunk do not take."""
    for x in arrays:
        reason = hopper_chunk_refusal(
            K=sizes.K, V=sizes.V, T=sizes.T, same_heads=sizes.H == sizes.HV, dtype=str(x.dtype),
            plain=not sizes.channelwise, precision=precision, chunk_size=sizes.C, packed=sizes.packed,
        )  # fmt: skip
        if reason is not None:
            raise ValueError(reason)


class Tiles:
    """Tiles of one chunk of C tokens, for one warpgroup.

    Attributes:
      row, col: row and column numbers of a tile.
    """

    def __init__(self, C: int, op: Any, interpret: bool, masks: Any, left: dict[str, Any]):
        self.C, self.op, self.interpret, self.masks, self.left = C, op, interpret, masks, left
        self.row, self.col = bm.indices((ROWS, C))
        self.slots = {name: divmod(i * C, ROWS) for i, name in enumerate(MASKS)}
        self.slots["to_middle"] = self.slots["prefix"]

    def write_masks(self) -> None:
        """Writes the 0/1 matrices of `sums`: which tokens (rows) a sum for a token (column) takes. `bm.commit` must
        follow.

        prefix: up to the token, in its block of 16; suffix: after it, in its block; base and rest: in the blocks before
        and after its own.
        """
        t, which = lax.rem(self.row, self.C), lax.div(self.row, self.C)
        chosen = _masks(t, self.col)
        for part in range(self.masks.shape[0]):
            ones = [x & (which == self.slots[n][1] // self.C) for n, x in chosen.items() if self.slots[n][0] == part]
            self.masks.at[part][...] = jnp.where(functools.reduce(operator.or_, ones), 1.0, 0.0).astype(self.op)

    def operand(self, name: str, value: jax.Array) -> Any:
        """A left operand: the registers themselves, which interpret mode takes from memory alone (`left_<name>`)."""
        value = value.astype(self.op)
        if not self.interpret:
            return value
        self.left[f"left_{name}"][...] = value
        return self.left[f"left_{name}"]

    def product(self, *pairs: tuple[Any, Any], start: jax.Array | None = None, n: int | None = None) -> jax.Array:
        """start + the sum of a b over pairs (a, b), [64, n or C] in float32."""

        def body(total):
            if start is not None:
                bm.start_from(total, start, self.interpret)
            for a, b in pairs:
                bm.multiply(total, a, b)
            return bm.settled(bm.read(total) if start is None else bm.read_from(total, start, self.interpret))

        return bm.accumulators(body, (ROWS, n or self.C))

    def products(self, *lists: list[tuple[Any, Any]]) -> list[jax.Array]:
        """For each list of pairs (a, b) the sum of a b, as `product`. All run before the first is read."""

        def body(*totals):
            for total, pairs in zip(totals, lists, strict=True):
                for a, b in pairs:
                    bm.multiply(total, a, b)
            return [bm.settled(bm.read(total)) for total in totals]

        return bm.accumulators(body, *((ROWS, self.C) for _ in lists))

    def sums(self, value: jax.Array, *names: str | tuple[str, ...]) -> list[jax.Array]:
        """Sums of a tile over tokens by the masks of these names, from two 16-bit pieces: to 2^-17. A tuple of names:
        by all of them together."""
        high = bm.settled(value.astype(self.op))
        pieces = self.operand("a", value - high.astype(jnp.float32)), self.operand("b", high)
        groups = [name if isinstance(name, tuple) else (name,) for name in names]
        return [self.product(*((x, self._mask(name)) for x in pieces for name in group)) for group in groups]

    def _mask(self, name: str) -> Any:
        part, start = self.slots[name]
        return self.masks.at[part].at[pl.ds(start, self.C)]
