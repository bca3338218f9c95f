"""Raw inputs on the tiles of the Hopper kernels of one chunk: what `raw` does on those of the Triton kernels, whose
formulas these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.blocks import MIN_LOG_DECAY
from pallas_kernels.kda.mosaic_tiles import exp
from pallas_kernels.kda.raw import LOG1P, Raw
from pallas_kernels.kda.sizes import Sizes

SMALLEST = 1e-37  # A divisor that does not overflow, and no zero that makes NaN of an infinite raw gate.


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + exp(-x))


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), to 6e-5 of itself."""
    t = exp(-jnp.abs(x))
    *rest, last = LOG1P["16bit"]
    y = last * t
    for coefficient in reversed(rest):
        y = (y + coefficient) * t
    return y + jnp.maximum(x, 0.0)


def gate_rows(A_log: jax.Array | None, dt_bias: jax.Array | None, sizes: Sizes) -> jax.Array:
    """exp(A_log), kept from 0, and dt_bias of every value head and key channel, [HV, 2, K] in float32."""
    shape = (sizes.HV, sizes.K)
    rate = jnp.ones(shape)
    if A_log is not None:
        rate = jnp.broadcast_to(jnp.maximum(jnp.exp(A_log.astype(jnp.float32)), SMALLEST)[:, None], shape)
    bias = jnp.zeros(shape) if dt_bias is None else dt_bias.astype(jnp.float32).reshape(shape)
    return jnp.stack([rate, bias], axis=1)


@dataclasses.dataclass(frozen=True)
class Gate:
    """The log decays of a tile, from g as it is given.

    Attributes:
      raw: which inputs come raw.
      rate, bias: give those of the tile's channels, spread over a tile of this shape.
      inside: which tokens there are, as a tile, or None where all are.
    """

    raw: Raw
    rate: Callable[[tuple[int, ...]], jax.Array]
    bias: Callable[[tuple[int, ...]], jax.Array]
    inside: jax.Array | None

    @classmethod
    def of_rows(cls, raw: Raw, rows: Any, inside: jax.Array | None) -> Gate:
        """For tiles [64, C], from [2, 64] in shared memory, rate and bias of the tile's channels."""
        rate, bias = (
            lambda shape, which=which: bm.spread_rows(bm.load_column(rows.at[which]), shape) for which in (0, 1)
        )
        return cls(raw, rate, bias, inside)

    def log_decay(self, x: jax.Array, unit: float = 1.0) -> jax.Array:
        """Log decays, clamped, times `unit`; 0 behind the last token."""
        least = MIN_LOG_DECAY * unit
        if not self.raw.gate:
            return jnp.maximum(x * unit if unit != 1.0 else x, least)
        x, rate = x + self.bias(x.shape), self.rate(x.shape)
        bound = self.raw.lower_bound
        g = softplus(x) * (rate * -unit) if bound is None else bound * unit * sigmoid(rate * x)
        g = jnp.maximum(g, least)
        return g if self.inside is None else jnp.where(self.inside, g, 0.0)

    def gradients(self, g: jax.Array, dg: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradient of the raw gate, and what the tile adds to those of A_log and dt_bias, [64] each.

        All from the log decays, so that no raw gate has to be kept until the end. Behind the last token g is 0, and so
        is what comes of it.
        """
        rate, bound = self.rate(g.shape), self.raw.lower_bound
        # Where everything is forgotten the gradient is 0, and not what rounding leaves of a sum.
        dg = jnp.where(g > MIN_LOG_DECAY, dg, 0.0)
        if bound is None:
            s = g * (-1.0 / rate)  # softplus(x), and sigmoid(x) = 1 - exp(-s)
            sigmoid_of_x = jnp.where(s < 2.0**-6, s - 0.5 * s * s, 1.0 - exp(-s))
            dx, dA = sigmoid_of_x * dg * -rate, g * dg
        else:
            s = g * (1.0 / bound)
            dA = bound * (s - s * s) * dg
            dx = rate * dA
            # rate x is the logit of s; where that is infinite, nothing is left to be multiplied with it.
            dA *= jnp.log(jnp.maximum(s, SMALLEST)) - jnp.log(jnp.maximum(1.0 - s, SMALLEST))
        return dx, jnp.sum(dA, axis=1), jnp.sum(dx, axis=1)


def strength(beta: jax.Array, raw: Raw) -> jax.Array:
    """beta as the formulas take it, in float32. It is small: XLA makes it up."""
    beta = beta.astype(jnp.float32)
    return raw.strength * jax.nn.sigmoid(beta) if raw.beta else beta
