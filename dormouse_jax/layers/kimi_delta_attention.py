"""The Kimi Delta Attention layer: from hidden states to hidden states, for whole sequences and token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dormouse_jax import validation as check
from dormouse_jax.kda import kda
from dormouse_jax.step import kda_step

# How projections are multiplied under the precisions of the operators.
PROJECTIONS = {
    "fp32": lax.Precision.HIGHEST,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "16bit": lax.Precision.DEFAULT,
}

# What is elementwise is computed again for the backward, in the same kernels as that: to keep its float32 intermediates
# would take several times the memory, and the time to write and read it.
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class Cache(NamedTuple):
    """What a layer keeps of the tokens so far; a pytree.

    q, k, v: `[B, conv_size - 1, channels]`, the last inputs of the convolutions, oldest first.
    state: `[B, HV, K, V]` in float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    state: jax.Array


class KimiDeltaAttention(nnx.Module):
    """Kimi Delta Attention as a layer.

        q, k  = silu(conv(W_q x)), silu(conv(W_k x))           per head, L2-normalised
        v     = silu(conv(W_v x))
        g     = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias)    or lower_bound sigmoid(exp(A_log) (...))
        beta  = sigmoid(W_b x)                                 twice that with allow_neg_eigval
        y     = W_o (RMSNorm(kda(q, k, v, g, beta)) * sigmoid(W_g2 W_g1 x + b_g))

    with a causal depthwise convolution over `conv_size` tokens, and a norm per head with one weight for all of them.

    Args:
      hidden_size: channels of x and y.
      num_heads, head_dim: query/key heads H, and their key dim K.
      num_v_heads: value heads HV, a multiple of num_heads; num_heads by default.
      head_v_dim: value dim V; head_dim by default. It is also the inner size of the two low-rank projections.
      conv_size: tokens that a convolution sees, the current one included. 1 leaves the convolutions a factor a channel.
      conv_bias: whether convolutions have a bias.
      allow_neg_eigval: strengths up to 2, so that a token can turn a direction of the state around.
      lower_bound: of the log decay, a number < 0; None for the unbounded gate.
      norm_eps: of the output norm.
      dtype: in which the layer computes, and returns y: float32, bfloat16 or float16.
      param_dtype: of the projections and convolutions; A_log, dt_bias and the norm's weight are always float32.
      precision: of the matrix products, projections included: "fp32", "tf32" or "16bit", as in `kda`.
      residuals: what `kda` keeps for the backward, "recompute" or "save".
      implementation: of `kda` and `kda_step`; "recurrent", "xla", "pallas", …
      rngs: `nnx.Rngs` for the initial values.

    Raises:
      ValueError, TypeError: for sizes and options outside of these, as in `kda`.

    Names of the weights and what they do follow the layer of flash-linear-attention, so that `from_fla_state_dict`
    takes its checkpoints. From Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025
    (arXiv:2510.26692).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int = 128,
        num_v_heads: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: str | None = None,
        residuals: str = "recompute",
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        operator = "KimiDeltaAttention"
        self.num_heads, self.head_dim = num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = head_dim if head_v_dim is None else head_v_dim
        for name in ("num_heads", "head_dim", "num_v_heads", "head_v_dim"):
            if check.as_index(operator, name, getattr(self, name)) < 1:
                raise ValueError(f"{operator}: {name} must be at least 1, got {getattr(self, name)}")
        for name, value in (("hidden_size", hidden_size), ("conv_size", conv_size)):
            if check.as_index(operator, name, value) < 1:
                raise ValueError(f"{operator}: {name} must be at least 1, got {value}")
        if self.num_v_heads % num_heads:
            raise ValueError(
                f"{operator}: num_v_heads must be a multiple of num_heads = {num_heads}, got {self.num_v_heads}"
            )
        self.dtype = jnp.dtype(dtype)
        if str(self.dtype) not in ("float32", "bfloat16", "float16"):
            raise TypeError(f"{operator}: dtype must be float32, bfloat16 or float16, got {self.dtype}")
        choices = ("fp32", "tf32") if self.dtype == jnp.float32 else ("16bit",)
        self.precision = choices[0] if precision is None else precision
        check.require_choice(operator, "precision", self.precision, choices)
        self.hidden_size, self.conv_size = hidden_size, conv_size
        check.require_choice(operator, "residuals", residuals, ("recompute", "save"))
        self.residuals, self.implementation = residuals, implementation
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound

        def linear(rows: int, columns: int, use_bias: bool = False) -> nnx.Linear:
            return nnx.Linear(
                rows,
                columns,
                use_bias=use_bias,
                dtype=self.dtype,
                param_dtype=param_dtype,
                precision=PROJECTIONS[self.precision],
                rngs=rngs,
            )

        def conv(channels: int) -> ShortConvolution:
            return ShortConvolution(channels, conv_size, use_bias=conv_bias, param_dtype=param_dtype, rngs=rngs)

        key_dim, value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.q_proj, self.q_conv = linear(hidden_size, key_dim), conv(key_dim)
        self.k_proj, self.k_conv = linear(hidden_size, key_dim), conv(key_dim)
        self.v_proj, self.v_conv = linear(hidden_size, value_dim), conv(value_dim)
        self.f_proj = nnx.List(
            [linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, self.num_v_heads * head_dim)]
        )
        self.b_proj = linear(hidden_size, self.num_v_heads)
        self.g_proj = nnx.List(
            [linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, value_dim, use_bias=True)]
        )
        self.o_norm = nnx.RMSNorm(self.head_v_dim, epsilon=norm_eps, dtype=jnp.float32, rngs=rngs)
        self.o_proj = linear(value_dim, hidden_size)
        # Rates from 1 to 16 and, behind the softplus, time steps from 1e-3 to 0.1: as in Mamba.
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (self.num_v_heads,), minval=1.0, maxval=16.0)))
        low, high = np.log(1e-3), np.log(0.1)
        step = jnp.exp(jax.random.uniform(rngs.params(), (self.num_v_heads * head_dim,), minval=low, maxval=high))
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """y `[B, T, hidden_size]` of x `[B, T, hidden_size]`.

        segment_ids: `[B, T]`, integers: where a token's id is not that of the token before, a sequence begins that
          knows nothing of what is before it. None: one sequence a row.
        """
        y, _ = self._sequence(x, self.init_cache(x.shape[0]), use_state=False, segment_ids=segment_ids)
        return y

    def prefill(self, x: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        """y of the tokens x `[B, T, hidden_size]` that follow those of `cache`, and the cache after them."""
        cache = self.init_cache(x.shape[0]) if cache is None else cache
        return self._sequence(x, cache, use_state=True)

    def step(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """y `[B, hidden_size]` of one token x `[B, hidden_size]` a sequence, and the cache after it.

        Under `jax.jit`, donate the cache: its state is then updated in place.
        """
        check.require_shape("KimiDeltaAttention", "x", x, "[B, hidden_size]", ("B", self.hidden_size))
        x = x.astype(self.dtype)
        (q, k, v, g, beta), windows = self._operands(x[:, None], cache)
        q, k, v, g, beta = (a[:, 0] for a in (q, k, v, g, beta))
        o, state = kda_step(q, k, v, g, beta, cache.state, **self._gates(), implementation=self.implementation)
        return self._output(o, x), Cache(*windows, state)

    def init_cache(self, batch_size: int) -> Cache:
        """The cache before the first token."""
        rows, key_dim = self.conv_size - 1, self.num_heads * self.head_dim
        return Cache(
            q=jnp.zeros((batch_size, rows, key_dim), self.dtype),
            k=jnp.zeros((batch_size, rows, key_dim), self.dtype),
            v=jnp.zeros((batch_size, rows, self.num_v_heads * self.head_v_dim), self.dtype),
            state=jnp.zeros((batch_size, self.num_v_heads, self.head_dim, self.head_v_dim), jnp.float32),
        )

    def _sequence(self, x, cache, use_state, segment_ids=None):
        check.require_shape("KimiDeltaAttention", "x", x, "[B, T, hidden_size]", ("B", "T", self.hidden_size))
        x = x.astype(self.dtype)
        operands, windows = self._operands(x, cache, segment_ids)
        o, state = kda(
            *operands,
            initial_state=cache.state if use_state else None,
            output_final_state=use_state,
            **self._gates(),
            segment_ids=segment_ids,
            precision=self.precision,
            residuals=self.residuals,
            implementation=self.implementation,
        )
        return self._output(o, x), Cache(*windows, state)  # pyright: ignore[reportArgumentType]

    def _gates(self) -> dict[str, Any]:
        return {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "A_log": self.A_log[...],
            "dt_bias": self.dt_bias[...],
        }

    def _operands(self, x, cache, segment_ids=None):
        """q, k, v, g and beta of x [B, T, hidden_size], raw as the operators take them; and the next windows."""
        q, q_window = self.q_conv(self.q_proj(x), cache.q, segment_ids)
        k, k_window = self.k_conv(self.k_proj(x), cache.k, segment_ids)
        v, v_window = self.v_conv(self.v_proj(x), cache.v, segment_ids)
        g = self.f_proj[1](self.f_proj[0](x))
        q, k, g = (a.reshape(*a.shape[:2], -1, self.head_dim) for a in (q, k, g))
        v = v.reshape(*v.shape[:2], -1, self.head_v_dim)
        return (q, k, v, g, self.b_proj(x)), (q_window, k_window, v_window)

    def _output(self, o, x):
        @recomputed
        def gated(o, gate):
            return (self.o_norm(o.astype(jnp.float32)) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(self.dtype)

        o = gated(o, self.g_proj[1](self.g_proj[0](x)).reshape(o.shape))
        return self.o_proj(o.reshape(*x.shape[:-1], -1))

    @classmethod
    def from_fla_state_dict(
        cls, state_dict: Mapping[str, Any], *, prefix: str = "", **options: Any
    ) -> KimiDeltaAttention:
        """A layer with the weights of flash-linear-attention's `KimiDeltaAttention`.

        Args:
          state_dict: that of the PyTorch layer, or of a model around it: NumPy arrays or PyTorch tensors by name.
          prefix: what names of this layer start with, such as "model.layers.3.attn."; other names are left alone.
          options: arguments of this class that the weights do not tell: allow_neg_eigval, lower_bound, norm_eps, dtype,
            param_dtype, precision, residuals, implementation.

        Raises:
          ValueError: a weight is missing, has another shape than the others imply, or has no place in the layer.
        """
        weights = {name.removeprefix(prefix): _to_numpy(w) for name, w in state_dict.items() if name.startswith(prefix)}
        sizes = _sizes(weights, prefix)
        for name in sizes:
            if name in options:
                raise TypeError(f"from_fla_state_dict: {name} is told by the weights, and must not be given")
        layer = cls(**sizes, **options, rngs=nnx.Rngs(0))
        for name, (param, to_ours) in layer._by_fla_name().items():
            if name not in weights:
                raise ValueError(f"from_fla_state_dict: the weight {prefix + name} is missing")
            given, shape = weights.pop(name), param[...].shape
            try:
                ours = to_ours(given)
            except ValueError:
                ours = given
            if ours.shape != shape:
                raise ValueError(
                    f"from_fla_state_dict: {prefix + name} must have the size of {list(shape)} as the other weights "
                    f"imply, got {list(given.shape)}"
                )
            param[...] = jnp.asarray(ours, param[...].dtype)
        if weights:
            raise ValueError(f"from_fla_state_dict: no place for the weights {', '.join(sorted(weights))}")
        return layer

    def _by_fla_name(self) -> dict[str, tuple[nnx.Param, Any]]:
        """Name of a weight there -> the parameter here, and the function that makes one from the other."""

        def flat(w):
            return w.reshape(-1)

        found: dict[str, tuple[Any, Any]] = {
            "A_log": (self.A_log, flat),
            "dt_bias": (self.dt_bias, flat),
            "o_norm.weight": (self.o_norm.scale, flat),
            "g_proj.1.bias": (self.g_proj[1].bias, flat),
        }
        linears = {name: getattr(self, name) for name in ("q_proj", "k_proj", "v_proj", "b_proj", "o_proj")}
        for name in ("f_proj", "g_proj"):
            linears |= {f"{name}.{i}": layer for i, layer in enumerate(getattr(self, name))}
        for name, layer in linears.items():
            found[f"{name}.weight"] = (layer.kernel, np.transpose)
        for name, layer in (("q", self.q_conv), ("k", self.k_conv), ("v", self.v_conv)):
            found[f"{name}_conv1d.weight"] = (layer.kernel, lambda w: w.reshape(w.shape[0], -1).T)
            if layer.bias is not None:
                found[f"{name}_conv1d.bias"] = (layer.bias, flat)
        return found


class ShortConvolution(nnx.Module):
    """A causal convolution over `size` tokens, each channel by itself, and a silu. Sums of shifted products: XLA makes
    one elementwise kernel of them."""

    def __init__(self, channels: int, size: int, *, use_bias: bool, param_dtype: Any, rngs: nnx.Rngs):
        bound = size**-0.5
        kernel = jax.random.uniform(rngs.params(), (size, channels), param_dtype, -bound, bound)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if use_bias else nnx.data(None)

    def __call__(
        self, x: jax.Array, before: jax.Array, segment_ids: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The result `[B, T, channels]` on x, and the last size - 1 inputs, where `before` are those before x.

        Of other segments of `segment_ids` `[B, T]` nothing is seen, nor of `before` where they are given.
        """
        bias = None if self.bias is None else self.bias[...]
        y = recomputed(self._convolved)(self.kernel[...], bias, before, x, segment_ids)
        return y, jnp.concatenate([before, x], axis=1)[:, x.shape[1] :]

    @staticmethod
    def _convolved(kernel, bias, before, x, segment_ids):
        kernel, T, past = kernel.astype(jnp.float32), x.shape[1], before.shape[1]
        x = jnp.concatenate([before, x], axis=1)
        y = jnp.zeros((), jnp.float32)
        for i in range(past + 1):
            term = kernel[i] * x[:, i : i + T].astype(jnp.float32)
            if segment_ids is not None and i < past:
                back = min(past - i, T)
                same = jnp.pad(segment_ids[:, back:] == segment_ids[:, : T - back], ((0, 0), (back, 0)))
                term = jnp.where(same[..., None], term, 0.0)
            y = y + term
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        return jax.nn.silu(y).astype(x.dtype)


def _to_numpy(weight: Any) -> np.ndarray:
    if hasattr(weight, "detach"):  # A PyTorch tensor; NumPy knows no bfloat16 of its own.
        weight = weight.detach().cpu().float().numpy()
    return np.asarray(weight)


def _sizes(weights: Mapping[str, np.ndarray], prefix: str) -> dict[str, Any]:
    """The arguments of the layer that its weights tell."""
    needed = ("q_proj.weight", "f_proj.1.weight", "b_proj.weight", "o_norm.weight", "q_conv1d.weight")
    for name in needed:
        if name not in weights:
            raise ValueError(f"from_fla_state_dict: the weight {prefix + name} is missing")
    q, f, b, norm, conv = (weights[name].shape for name in needed)
    if len(q) != 2 or len(f) != 2 or len(b) != 2 or f[0] % b[0] or q[0] % (f[0] // b[0]):
        raise ValueError(
            "from_fla_state_dict: q_proj.weight [H K, hidden], f_proj.1.weight [HV K, V] and b_proj.weight "
            f"[HV, hidden] do not go together, got {list(q)}, {list(f)} and {list(b)}"
        )
    head_dim = f[0] // b[0]
    return {
        "hidden_size": q[1],
        "num_heads": q[0] // head_dim,
        "head_dim": head_dim,
        "num_v_heads": b[0],
        "head_v_dim": norm[0],
        "conv_size": conv[-1],
        "conv_bias": "q_conv1d.bias" in weights,
    }
