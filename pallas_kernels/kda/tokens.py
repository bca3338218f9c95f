"""The tokens of a chunk: how the kernels that work on all chunks in parallel load their inputs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.kda.blocks import MIN_LOG_DECAY, clamp
from pallas_kernels.kda.config import BLOCK
from pallas_kernels.kda.raw import Gate, Raw, sigmoid
from pallas_kernels.kda.sizes import Sizes


class Inputs(NamedTuple):
    """The inputs that belong to tokens and heads: arrays, their block specifications, or a program's refs.

    A_log [HV] and dt_bias [HV * K] belong to raw gates. starts [B, T] marks tokens that forget everything before them.
    """

    q: Any
    k: Any
    v: Any
    g: Any
    erase: Any
    write: Any  # None for KDA: `erase` is beta
    A_log: Any = None
    dt_bias: Any = None
    starts: Any = None

    def launched(self, sizes: Sizes) -> tuple[Inputs, Inputs]:
        """Arrays as programs see them, and their block specifications."""
        arrays = self._replace(write=self.erase if self.write is None else self.write)
        specs = Inputs(*(sizes.head(x) for x in arrays[:6]))
        HV, K = sizes.HV, sizes.K
        if self.A_log is not None:
            arrays = arrays._replace(A_log=self.A_log.reshape(HV, 1, 1))
            specs = specs._replace(A_log=pl.BlockSpec((None, 1, 1), lambda *i: (i[-1] % HV, 0, 0)))
        if self.dt_bias is not None:
            arrays = arrays._replace(dt_bias=self.dt_bias.reshape(HV, 1, K))
            specs = specs._replace(dt_bias=pl.BlockSpec((None, 1, K), lambda *i: (i[-1] % HV, 0, 0)))
        if self.starts is not None:
            arrays = arrays._replace(starts=self.starts.astype(jnp.float32)[..., None])
            specs = specs._replace(starts=pl.BlockSpec((None, sizes.T, 1), lambda *i: (i[-1] // HV, 0, 0)))
        return arrays, specs


@dataclasses.dataclass
class Tokens:
    """One chunk of one value head, for the key channels `cols`. Blocks are numbered r, of 16 rows each.

    Attributes:
      x: the program's refs.
      start, limit: the token of the chunk's first row, and what limits its rows, as `forward.chunk_rows` has them.
      norms: 1 / norm of queries, and of keys, [C, 2], where they come raw.
    """

    x: Inputs
    norms: Any
    sizes: Sizes
    raw: Raw
    start: Any
    limit: Any
    cols: tuple
    precision: str
    interpret: bool

    def __post_init__(self):
        x, raw = self.x, self.raw
        self.gate = Gate.load(x.A_log, x.dt_bias, self.cols, raw, self.precision, self.interpret) if raw.gate else None

    def rows(self, r: int | jax.Array = 0, size: int = BLOCK) -> tuple:
        return (self.start + r * BLOCK, size, self.limit)

    def k(self, r) -> jax.Array:
        return self._normalised(bt.load_tile(self.x.k, self.rows(r), self.cols), r, 1)

    def q(self, r) -> jax.Array:
        return self._normalised(bt.load_tile(self.x.q, self.rows(r), self.cols), r, 0)

    def _normalised(self, x: jax.Array, r, column: int) -> jax.Array:
        return x.astype(jnp.float32) * self.norm(r, column) if self.raw.l2norm else x.astype(jnp.float32)

    def norm(self, r, column: int) -> jax.Array:
        """1 / norm of a block's queries (column 0) or keys (column 1), [16, 1]."""
        return bt.load_tile(self.norms, (r * BLOCK, BLOCK, None), (column, 1, None))

    def raw_g(self, r) -> jax.Array:
        return bt.load_tile(self.x.g, self.rows(r), self.cols)

    def _starts(self, r) -> jax.Array:
        return bt.load_tile(self.x.starts, self.rows(r), (0, 1, None)) > 0.0

    def g(self, r) -> jax.Array:
        """Log decays, clamped; 0 outside of the arrays."""
        g = self.raw_g(r)
        if self.gate is None:
            g = clamp(g)
        else:
            g = clamp(self.gate.log_decay(g))
            inside = bt.inside(self.rows(r), self.cols)
            g = g if inside is None else jnp.where(inside, g, 0.0)
        return g if self.x.starts is None else jnp.where(self._starts(r), MIN_LOG_DECAY, g)

    def g_gradients(self, r, g: jax.Array, dg: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The gradient of a block's g as given, from that of its log decays g, and for raw gates that of A_log, element
        by element; both 0 outside of the arrays."""
        if self.gate is None:
            return dg if self.x.starts is None else jnp.where(self._starts(r), 0.0, dg), None
        inside = bt.inside(self.rows(r), self.cols)
        dg = dg if inside is None else jnp.where(inside, dg, 0.0)
        return self.gate.gradients(self.raw_g(r), g, dg)

    def erase(self, r) -> jax.Array:
        cols = self.cols if self.sizes.channelwise else (0, 1, None)
        return self._strength(bt.load_tile(self.x.erase, self.rows(r), cols))

    def write(self, rows: tuple, vc: tuple) -> jax.Array:
        return self._strength(bt.load_tile(self.x.write, rows, vc if self.sizes.channelwise else (0, 1, None)))

    def _strength(self, beta: jax.Array) -> jax.Array:
        beta = beta.astype(jnp.float32)
        return self.raw.strength * sigmoid(beta, self.interpret) if self.raw.beta else beta

    def beta_gradient(self, beta: jax.Array, dbeta: jax.Array) -> jax.Array:
        """The gradient of beta as given."""
        return dbeta * beta * (1.0 - beta / self.raw.strength) if self.raw.beta else dbeta
