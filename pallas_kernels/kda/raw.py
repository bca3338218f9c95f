"""Raw gates, beta, queries and keys made up on the kernels' tiles. `dormouse_jax.gates` has the definitions.

g    = -rate softplus(x)         or    lower_bound sigmoid(rate x)          with rate = exp(A_log), x = raw + dt_bias
dx   = -rate sigmoid(x) dg       or    rate lower_bound s (1 - s) dg        with s = sigmoid(rate x)
dA_log = sum g dg                or    sum x dx                             ddt_bias = sum dx
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend_triton as bt
from pallas_kernels.kda.blocks import MIN_LOG_DECAY

NORM_EPSILON = 1e-6

# Raw gates beyond it saturate all the same, and an infinite one would make NaN of 0 * inf.
LARGEST_RAW_GATE = 1e30

# log(1 + t) / t on [0, 1], polynomials of the smallest relative error: 3e-8, and 6e-5 where operands are rounded more.
# A logarithm of the special-function unit is exact to 2^-22 absolutely, which small gates over many tokens are not.
LOG1P = {
    "fp32": (0.99999997, -0.499994931, 0.333190968, -0.248429818, 0.191060051, -0.136632423, 0.0782259104,
             -0.0295052133, 0.00523268791),
    "tf32": (0.999943278, -0.496977794, 0.306300873, -0.157427118, 0.041347258),
}  # fmt: skip
LOG1P["16bit"] = LOG1P["tf32"]


@dataclasses.dataclass(frozen=True)
class Raw:
    """Which inputs come raw, and are made into what the formulas take by the kernel.

    Attributes:
      l2norm: q and k are to be normalised.
      gate: g is -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).
      lower_bound: of the log decay, or None for the first of the two.
      beta: beta is to go through a sigmoid, doubled with neg_eigval.
    """

    l2norm: bool = False
    gate: bool = False
    lower_bound: float | None = None
    beta: bool = False
    neg_eigval: bool = False

    @property
    def strength(self) -> float:
        """What the sigmoid of beta is multiplied with."""
        return 2.0 if self.neg_eigval else 1.0


NOTHING_RAW = Raw()


def sigmoid(x: jax.Array, interpret: bool) -> jax.Array:
    return bt.reciprocal(1.0 + bt.exp(-x, interpret), interpret)


def softplus(x: jax.Array, precision: str, interpret: bool) -> jax.Array:
    """log(1 + exp(x)), to float32's accuracy relative to itself under "fp32"."""
    t = bt.exp(-jnp.abs(x), interpret)
    *rest, last = LOG1P[precision]
    y = jnp.full_like(t, last)
    for coefficient in reversed(rest):
        y = bt.fma(y, t, coefficient, interpret)
    return bt.fma(y, t, jnp.maximum(x, 0.0), interpret)


@dataclasses.dataclass
class Gate:
    """The gate of one value head for a tile of key channels.

    Attributes:
      rate: exp(A_log), [1, 1], or None for 1.
      bias: [1, channels], or None.
    """

    rate: jax.Array | None
    bias: jax.Array | None
    lower_bound: float | None
    precision: str
    interpret: bool

    @classmethod
    def load(cls, A_log_ref: Any, dt_bias_ref: Any, cols: tuple, raw: Raw, precision: str, interpret: bool) -> Gate:
        one = (0, 1, None)
        rate = None if A_log_ref is None else jnp.exp(bt.load_tile(A_log_ref, one, one).astype(jnp.float32))
        bias = None if dt_bias_ref is None else bt.load_tile(dt_bias_ref, one, cols).astype(jnp.float32)
        return cls(rate, bias, raw.lower_bound, precision, interpret)

    def _biased(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return x if self.bias is None else x + self.bias

    def _paced(self, x: jax.Array) -> jax.Array:
        return x if self.rate is None else x * self.rate

    def log_decay(self, x: jax.Array) -> jax.Array:
        x = self._biased(x)
        if self.lower_bound is None:
            assert self.rate is not None
            return softplus(x, self.precision, self.interpret) * -self.rate
        return self.lower_bound * sigmoid(self._paced(x), self.interpret)

    def gradients(self, x: jax.Array, g: jax.Array, dg: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradient of the raw gate and, element by element, of A_log, from that of the clamped log decay g."""
        x = jnp.clip(self._biased(x), -LARGEST_RAW_GATE, LARGEST_RAW_GATE)
        # Where everything is forgotten the gradient is 0, and not what rounding leaves of a sum.
        dg = jnp.where(g > MIN_LOG_DECAY, dg, 0.0)
        if self.lower_bound is None:
            assert self.rate is not None
            return sigmoid(x, self.interpret) * dg * -self.rate, g * dg
        s = sigmoid(self._paced(x), self.interpret)
        dx = self._paced(self.lower_bound * (s - s * s) * dg)
        return dx, x * dx
