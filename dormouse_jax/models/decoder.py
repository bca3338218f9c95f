"""A decoder-only language model of Kimi Delta Attention layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from dormouse_jax import validation as check
from dormouse_jax.layers import CausalAttention, KimiDeltaAttention
from dormouse_jax.layers.kimi_delta_attention import PROJECTIONS, elementwise, recomputed
from dormouse_jax.models.config import DecoderConfig
from dormouse_jax.rms_norm import rms_norm

# What is kept for the backward of a group of layers, other than its input: policies of `jax.checkpoint`.
REMAT = {"none": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class DecoderCache(NamedTuple):
    """What a decoder keeps of the tokens so far; a pytree.

    layers: a tuple with one layer cache for each layer of a group, whose arrays have the leading axes
      `[loops, num_groups]`.
    """

    layers: tuple[Any, ...]


class Decoder(nnx.Module):
    """A decoder of bytes, or other ids.

        x  = W_e one_hot(ids)
        x += mixer(RMSNorm(x));  x += SwiGLU(RMSNorm(x))    for every layer, and the whole stack `loops` times
        logits = W_h RMSNorm(x)

    Layers repeat in groups: of one layer, or of attention_every layers whose last one has softmax attention. They are
    written out one after the other. With scan_layers, all groups are one computation, scanned over their parameters:
    compiling takes as long as for one group, and a step of training longer, for it copies what the backward needs into
    arrays of all groups and out of them.

    Parameters, float32 all of them, by their path, where G is the number of groups, i a layer of a group, D hidden_size
    and F intermediate_size; products are x W:

        embed.kernel [vocab_size, D]                  head.kernel [D, vocab_size]       norm.scale [D]
        groups.layers.i.mixer_norm.scale [G, D]       groups.layers.i.mlp_norm.scale [G, D]
        groups.layers.i.gate_up.kernel [G, D, 2 F]    groups.layers.i.down.kernel [G, F, D]; gates are the first F
        groups.layers.i.mixer.…                       those of a `layers` module, behind an axis [G]

    Args:
      config: the sizes.
      implementation: of `kda`, `kda_step`, `short_convolution`, `rms_norm` and `attention`, which take "xla" where it
        is one that they lack.
      residuals: of `kda`, "recompute" or "save".
      remat: what is kept of a group for the backward. "none": inputs and results of products, and what `kda` and
        `attention` keep; "dots": results of products with weights; "full": its input. With the last two, forwards of
        the operators run twice.
      scan_layers: whether a call and `loss` scan over the groups, or all layers are written out one after the other.
      rngs: `nnx.Rngs` for the initial values.

    Raises:
      ValueError: remat or residuals is not one of these.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        implementation: str | None = None,
        residuals: str = "recompute",
        remat: str = "none",
        scan_layers: bool = False,
        rngs: nnx.Rngs,
    ):
        check.require_choice("Decoder", "remat", remat, tuple(REMAT))
        self.config, self.remat, self.scan_layers = config, remat, scan_layers
        self.implementation = implementation
        # A product with one-hot rows, and not a look-up, whose gradient a GPU sums by atomics, in any order.
        self.embed = _linear(config, config.vocab_size, config.hidden_size, 1.0, rngs)

        @nnx.split_rngs(splits=config.num_groups)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def groups(rngs):
            return _Group(config, implementation, residuals, rngs)

        self.groups = groups(rngs)
        self.norm = _norm(config, rngs)
        # Small, so that the first prediction is close to uniform.
        self.head = _linear(config, config.hidden_size, config.vocab_size, 1 / config.hidden_size, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Logits `[B, T, vocab_size]` in float32 for the id after each of ids `[B, T]`, integers."""
        graph, weights = nnx.split(self.groups)

        def group(stream, weights):
            return nnx.merge(graph, weights)(*stream)

        if self.remat != "none":  # In the body of a loop nothing is found to be computed twice.
            group = jax.checkpoint(group, policy=REMAT[self.remat], prevent_cse=not self.scan_layers)

        def iteration(stream, _):
            return lax.scan(lambda stream, weights: (group(stream, weights), None), stream, weights)

        x = self._embed(ids)
        stream = x, jnp.zeros_like(x)  # whose sum is the residual stream: the norms add, in one pass
        if self.scan_layers:
            stream, _ = lax.scan(iteration, stream, None, length=self.config.loops)
        else:  # A scan that is unrolled stacks what the backward needs all the same.
            group = jax.jit(group)  # traced once
            for each in _unstacked(weights, self.config.num_groups) * self.config.loops:
                stream = group(stream, each)
        x, y = stream
        return self.head(_add_and_norm(x, y, self.norm, self.implementation)[1]).astype(jnp.float32)

    def loss(self, ids: jax.Array) -> jax.Array:
        """The mean cross-entropy in nats of predicting each of ids `[B, T + 1]` but the first: a float32 scalar."""
        check.require_shape("Decoder", "ids", ids, "[B, T + 1]", ("B", "T + 1"))
        losses = optax.softmax_cross_entropy_with_integer_labels(self(ids[:, :-1]), ids[:, 1:].astype(jnp.int32))
        return losses.mean()

    def prefill(self, ids: jax.Array, length: int) -> tuple[jax.Array, DecoderCache]:
        """Logits of a prompt ids `[B, T]`, as from a call, and the cache after it.

        length: the most tokens, the prompt's among them, that layers of softmax attention are to remember.
        """
        graph, weights = nnx.split(self.groups)

        def group(x, weights):
            return nnx.merge(graph, weights).prefill(x, length)

        def iteration(x, _):
            return lax.scan(group, x, weights)

        x, layers = lax.scan(iteration, self._embed(ids), None, length=self.config.loops)
        return self._logits(x), DecoderCache(layers)

    def step(self, ids: jax.Array, cache: DecoderCache) -> tuple[jax.Array, DecoderCache]:
        """Logits `[B, vocab_size]` after one more id a sequence, ids `[B]`, and the cache after it."""
        check.require_shape("Decoder", "ids", ids, "[B]", ("B",))
        graph, weights = nnx.split(self.groups)

        def group(x, weights_and_cache):
            weights, cache = weights_and_cache
            return nnx.merge(graph, weights).step(x, cache)

        def iteration(x, cache):
            return lax.scan(group, x, (weights, cache))

        x, layers = lax.scan(iteration, self._embed(ids), cache.layers)
        return self._logits(x), DecoderCache(layers)

    def _embed(self, ids):
        return self.embed(jax.nn.one_hot(ids, self.config.vocab_size, dtype=self.config.dtype))

    def _logits(self, x):
        return self.head(self.norm(x)).astype(jnp.float32)


class _Layer(nnx.Module):
    """A mixer of tokens and a SwiGLU, each behind a norm and beside the residual stream."""

    def __init__(self, config: DecoderConfig, mixer: str, implementation: str | None, residuals: str, rngs: nnx.Rngs):
        sizes: dict[str, Any] = {"num_heads": config.num_heads, "head_dim": config.head_dim, "dtype": config.dtype}
        self.mixer_norm, self.mlp_norm = _norm(config, rngs), _norm(config, rngs)
        self.implementation = implementation
        if mixer == "attention":
            implementation = "xla" if implementation == "recurrent" else implementation
            self.mixer = CausalAttention(config.hidden_size, **sizes, implementation=implementation, rngs=rngs)
        else:
            options: dict[str, Any] = {"conv_size": config.conv_size, "norm_eps": config.norm_eps}
            options |= {"residuals": residuals, "implementation": implementation}
            self.mixer = KimiDeltaAttention(config.hidden_size, **sizes, **options, rngs=rngs)
        D, F = config.hidden_size, config.intermediate_size
        self.gate_up = _linear(config, D, 2 * F, D**-0.5, rngs)
        self.down = _linear(config, F, D, F**-0.5, rngs)
        # What the layers add to the residual stream keeps its size however many there are.
        depth = (2 * config.num_layers * config.loops) ** -0.5
        for linear in (self.mixer.o_proj, self.down):
            linear.kernel[...] *= depth

    def __call__(self, x, y):
        """The same of what comes after: the residual stream and what is yet to be added to it."""
        x, h = _add_and_norm(x, y, self.mixer_norm, self.implementation)
        x, h = _add_and_norm(x, self.mixer(h), self.mlp_norm, self.implementation)
        return x, self._mlp(h)

    def prefill(self, x, length):
        room = (length,) if isinstance(self.mixer, CausalAttention) else ()
        y, cache = self.mixer.prefill(self.mixer_norm(x), *room)
        x = x + y
        return x + self._mlp(self.mlp_norm(x)), cache

    def step(self, x, cache):
        y, cache = self.mixer.step(self.mixer_norm(x), cache)
        x = x + y
        return x + self._mlp(self.mlp_norm(x)), cache

    def _mlp(self, h):
        return self.down(recomputed(_swiglu)(self.gate_up(h)))


class _Group(nnx.Module):
    """The layers that repeat."""

    def __init__(self, config: DecoderConfig, implementation: str | None, residuals: str, rngs: nnx.Rngs):
        self.layers = nnx.List([_Layer(config, mixer, implementation, residuals, rngs) for mixer in config.mixers])

    def __call__(self, x, y):
        for layer in self.layers:
            x, y = layer(x, y)
        return x, y

    def prefill(self, x, length):
        caches = []
        for layer in self.layers:
            x, cache = layer.prefill(x, length)
            caches.append(cache)
        return x, tuple(caches)

    def step(self, x, caches):
        after = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer.step(x, cache)
            after.append(cache)
        return x, tuple(after)


def _unstacked(weights: Any, num_groups: int) -> list[Any]:
    """The weights of each group. By `lax.split`, whose gradient is a concatenation; that of slices is a sum of arrays
    padded with zeros."""
    leaves, structure = jax.tree.flatten(weights)
    pieces = [[x.squeeze(0) for x in lax.split(leaf, (1,) * num_groups)] for leaf in leaves]
    return [jax.tree.unflatten(structure, group) for group in zip(*pieces, strict=True)]


def _add_and_norm(x, y, norm: nnx.RMSNorm, implementation: str | None):
    """(x + y, its norm)"""
    options: dict[str, Any] = {"epsilon": norm.epsilon, "implementation": elementwise(implementation)}
    scale: Any = norm.scale
    return rms_norm(y, scale[...], residual=x, **options)


def _swiglu(gate_up):
    size = gate_up.shape[-1] // 2
    return jax.nn.silu(gate_up[..., :size]) * gate_up[..., size:]


def _linear(config: DecoderConfig, rows: int, columns: int, stddev: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        rows,
        columns,
        use_bias=False,
        kernel_init=nnx.initializers.normal(stddev),
        dtype=jnp.dtype(config.dtype),
        precision=PROJECTIONS["fp32" if config.dtype == "float32" else "16bit"],
        rngs=rngs,
    )


def _norm(config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.hidden_size, epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), rngs=rngs)
