"""The Kimi Delta Attention layer: from hidden states to hidden states, for whole sequences and token by token."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from dormouse_jax import validation as check
from dormouse_jax.kda import kda
from dormouse_jax.rms_norm import rms_norm
from dormouse_jax.short_convolution import short_convolution
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
      implementation: of `kda`, `kda_step`, `short_convolution` and `rms_norm`; "recurrent", "xla", "pallas", … What the
        last two lack of these is "xla" there, and for one token they always are.
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
        y, _ = self._sequence(x, segment_ids=segment_ids)
        return y

    def prefill(self, x: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        """y of the tokens x `[B, T, hidden_size]` that follow those of `cache`, and the cache after them."""
        cache = self.init_cache(x.shape[0]) if cache is None else cache
        return self._sequence(x, cache)

    def step(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """y `[B, hidden_size]` of one token x `[B, hidden_size]` a sequence, and the cache after it.

        Under `jax.jit`, donate the cache: its state is then updated in place.
        """
        check.require_shape("KimiDeltaAttention", "x", x, "[B, hidden_size]", ("B", self.hidden_size))
        x = x.astype(self.dtype)
        operands, gate, windows = self._operands(x[:, None], cache, join=False)
        q, k, v, g, beta = (a[:, 0] for a in operands)
        o, state = kda_step(q, k, v, g, beta, cache.state, **self._gates(), implementation=self.implementation)
        return self._output(o, gate[:, 0]), Cache(*windows, state=state)

    def init_cache(self, batch_size: int) -> Cache:
        """The cache before the first token."""
        rows, key_dim = self.conv_size - 1, self.num_heads * self.head_dim
        return Cache(
            q=jnp.zeros((batch_size, rows, key_dim), self.dtype),
            k=jnp.zeros((batch_size, rows, key_dim), self.dtype),
            v=jnp.zeros((batch_size, rows, self.num_v_heads * self.head_v_dim), self.dtype),
            state=jnp.zeros((batch_size, self.num_v_heads, self.head_dim, self.head_v_dim), jnp.float32),
        )

    def _sequence(self, x, cache=None, segment_ids=None):
        """y of x, and the next cache; without a cache x begins the sequences, and what is returned for one means
        nothing."""
        check.require_shape("KimiDeltaAttention", "x", x, "[B, T, hidden_size]", ("B", "T", self.hidden_size))
        x = x.astype(self.dtype)
        operands, gate, windows = self._operands(x, cache, segment_ids)
        o, state = kda(
            *operands,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            **self._gates(),
            segment_ids=segment_ids,
            precision=self.precision,
            residuals=self.residuals,
            implementation=self.implementation,
        )
        return self._output(o, gate), Cache(*windows, state=state)  # pyright: ignore[reportArgumentType]

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

    def _operands(self, x, cache=None, segment_ids=None, join=True):
        """Of x [B, T, hidden_size]: q, k, v, g and beta, raw as the operators take them; the inner result of the output
        gate's projections; the next windows.

        join: whether projections of x that can be are one product. That copies their weights, which for one token takes
        longer than the product.
        """
        projections, convs = (self.q_proj, self.k_proj, self.v_proj), (self.q_conv, self.k_conv, self.v_conv)
        cached = (None,) * 3 if cache is None else (cache.q, cache.k, cache.v)
        outputs: list[Any] = []
        windows: list[Any] = []
        for group in [slice(0, 3)] if join and _can_join(projections) else [slice(i, i + 1) for i in range(3)]:
            ys, ends = self._convolved(_product(projections[group], x), convs[group], cached[group], segment_ids)
            outputs, windows = [*outputs, *ys], [*windows, *ends]
        low_rank = (self.f_proj[0], self.g_proj[0], self.b_proj)
        if join and _can_join(low_rank):
            # Behind a barrier, or XLA makes one product of this and that of q, k and v, and then copies its parts.
            small = _product(low_rank, lax.optimization_barrier(x))
            f, gate, beta = jnp.split(small, _ends([p.out_features for p in low_rank]), axis=-1)
        else:
            f, gate, beta = (linear(x) for linear in low_rank)
        q, k, g = (a.reshape(*a.shape[:2], -1, self.head_dim) for a in (*outputs[:2], self.f_proj[1](f)))
        v = outputs[2].reshape(*x.shape[:2], -1, self.head_v_dim)
        return (q, k, v, g, beta), gate, windows

    def _convolved(self, x, convs, cached, segment_ids):
        """The results of convolutions whose inputs lie next to each other in x [B, T, channels], and the last
        conv_size - 1 inputs of each; behind those that are cached, where they are."""
        kernel = jnp.concatenate([conv.kernel[...] for conv in convs], axis=1)
        bias = None if convs[0].bias is None else jnp.concatenate([conv.bias[...] for conv in convs])
        sizes, T, past = [conv.kernel[...].shape[1] for conv in convs], x.shape[1], 0
        if cached[0] is not None:
            x, past = jnp.concatenate([jnp.concatenate(cached, axis=-1), x], axis=1), self.conv_size - 1
        implementation = "xla" if T == 1 else elementwise(self.implementation)
        ys = short_convolution(x, kernel, bias, sizes=sizes, segment_ids=segment_ids, implementation=implementation)
        return [y[:, past:] for y in ys], jnp.split(x[:, T:], _ends(sizes), axis=-1)

    def _output(self, o, gate):
        up, bias = self.g_proj[1], None
        if (
            type(up) is nnx.Linear and up.bias is not None and up.dot_general is lax.dot_general
        ):  # The norm adds the bias, in float32.
            axes = (((gate.ndim - 1,), (0,)), ((), ()))
            gate = lax.dot_general(gate, up.kernel[...].astype(self.dtype), axes, precision=up.precision)
            bias = up.bias[...].reshape(o.shape[-2:])
        else:
            gate = up(gate)
        implementation = "xla" if o.ndim == 3 or o.shape[1] == 1 else elementwise(self.implementation)
        options: dict[str, Any] = {"epsilon": self.o_norm.epsilon, "implementation": implementation}
        scale: Any = self.o_norm.scale
        y: Any = rms_norm(o, scale[...], gate=gate.reshape(o.shape), gate_bias=bias, **options)
        return self.o_proj(y.reshape(*o.shape[:-2], -1))

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


def elementwise(implementation: str | None) -> str | None:
    """The implementation of the operators that are not matrix products, from that of `kda`."""
    if implementation is None:
        return None
    return "pallas" if implementation.startswith("pallas") else "xla"


class ShortConvolution(nnx.Module):
    """The parameters of a `short_convolution` over `size` tokens."""

    def __init__(self, channels: int, size: int, *, use_bias: bool, param_dtype: Any, rngs: nnx.Rngs):
        bound = size**-0.5
        kernel = jax.random.uniform(rngs.params(), (size, channels), param_dtype, -bound, bound)
        self.kernel = nnx.Param(kernel)
        self.bias = nnx.Param(jnp.zeros(channels, param_dtype)) if use_bias else nnx.data(None)


def _can_join(linears: Sequence[Any]) -> bool:
    """Whether modules in the place of projections are still those that a product with all weights can replace: there
    may be adapters around them, or other products in them."""
    return all(type(p) is nnx.Linear and p.bias is None and p.dot_general is lax.dot_general for p in linears)


def _product(linears: Sequence[Any], x: jax.Array) -> jax.Array:
    """What several projections make of x [B, T, hidden_size], next to each other."""
    if len(linears) == 1:
        return linears[0](x)
    kernel = jnp.concatenate([linear.kernel[...].astype(x.dtype) for linear in linears], axis=1)
    return lax.dot_general(x, kernel, (((2,), (0,)), ((), ())), precision=linears[0].precision)


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes are to be split."""
    return np.cumsum(sizes)[:-1].tolist()


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
