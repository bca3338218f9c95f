"""Raw inputs on the tiles [64, C] of the Hopper kernels of one chunk: what `raw` does on those of the Triton kernels,
whose formulas these are."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import MIN_LOG_DECAY
from pallas_kernels.kda.mosaic_tiles import exp
from pallas_kernels.kda.raw import LARGEST_RAW_GATE, LOG1P, Raw
from pallas_kernels.kda.sizes import Sizes

SMALLEST = 1e-37  # A divisor that does not overflow.


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + exp(-x))


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), to 6e-5 of itself."""
    t = exp(jnp.minimum(x, -x))
    *rest, last = LOG1P["16bit"]
    y = last * t
    for coefficient in reversed(rest):
        y = (y + coefficient) * t
    return y + jnp.maximum(x, 0.0)


def gate_rows(A_log: jax.Array | None, dt_bias: jax.Array | None, sizes: Sizes) -> jax.Array:
    """exp(A_log) and dt_bias of every value head and key channel, [HV, 2, K] in float32."""
    shape = (sizes.HV, sizes.K)
    rate = jnp.ones(shape) if A_log is None else jnp.broadcast_to(jnp.exp(A_log.astype(jnp.float32))[:, None], shape)
    bias = jnp.zeros(shape) if dt_bias is None else dt_bias.astype(jnp.float32).reshape(shape)
    return jnp.stack([rate, bias], axis=1)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The log decays of a tile, from g as it is given.

    Attributes:
      raw: which inputs come raw.
      rows: [2, 64] in shared memory, rate and bias of the tile's channels; None unless the gate is raw.
      inside: which tokens there are, [64, C], or None where all are.
    """

    raw: Raw
    rows: Any
    inside: jax.Array | None

    def _column(self, which: int, shape: tuple[int, ...]) -> jax.Array:
        return bm.spread_rows(bm.load_column(self.rows.at[which]), shape)

    def _within(self, x: jax.Array) -> jax.Array:
        return x if self.inside is None else jnp.where(self.inside, x, 0.0)

    def _biased(self, x: jax.Array) -> jax.Array:
        return jnp.clip(x + self._column(1, x.shape), -LARGEST_RAW_GATE, LARGEST_RAW_GATE)

    def log_decay(self, x: jax.Array) -> jax.Array:
        """Log decays, clamped; 0 behind the last token."""
        if not self.raw.gate:
            return jnp.maximum(x, MIN_LOG_DECAY)
        x, rate = self._biased(x), self._column(0, x.shape)
        bound = self.raw.lower_bound
        g = softplus(x) * -rate if bound is None else bound * sigmoid(rate * x)
        return self._within(jnp.maximum(g, MIN_LOG_DECAY))

    def gradients(self, g: jax.Array, dg: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradient of the raw gate, and what the tile adds to those of A_log and dt_bias, [64] each.

        All from the log decays, so that no raw gate has to be kept until the end. Behind the last token g is 0, and so
        is what comes of it.
        """
        rate, bound = self._column(0, g.shape), self.raw.lower_bound
        # Where everything is forgotten the gradient is 0, and not what rounding leaves of a sum.
        dg = jnp.where(g > MIN_LOG_DECAY, dg, 0.0)
        if bound is None:
            s = g * (-1.0 / jnp.maximum(rate, SMALLEST))  # softplus(x), and sigmoid(x) = 1 - exp(-s)
            sigmoid_of_x = jnp.where(s < 2.0**-6, s - 0.5 * s * s, 1.0 - exp(-s))
            dx, dA = sigmoid_of_x * dg * -rate, g * dg
        else:
            s = g * (1.0 / bound)
            dA = bound * (s - s * s) * dg
            dx = rate * dA
            # rate x is the logit of s; where that is infinite, nothing is left to be multiplied with it.
            dA *= jnp.log(jnp.maximum(s, SMALLEST)) - jnp.log(jnp.maximum(1.0 - s, SMALLEST))
        return dx, jnp.sum(dA, axis=1), jnp.sum(dx, axis=1)
