"""A layer of causal softmax attention: for whole sequences and token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dormouse_jax import validation as check
from dormouse_jax.attention import attention
from dormouse_jax.layers.kimi_delta_attention import PROJECTIONS


class KeyValueCache(NamedTuple):
    """What a layer keeps of the tokens so far; a pytree.

    k, v: `[B, L, H, D]`, of which the first `length` tokens are there.
    length: int32, how many tokens those are.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array


class CausalAttention(nnx.Module):
    """Causal softmax attention as a layer, without encodings of positions.

        y = W_o attention(W_q x, W_k x, W_v x)

    Beside layers with a decay, which know of positions, it needs no encoding of them (Kimi Team, arXiv:2510.26692).

    Args:
      hidden_size: channels of x and y.
      num_heads, head_dim: heads H and their dim D.
      dtype: in which the layer computes, and returns y: float32, bfloat16 or float16.
      param_dtype: of the projections.
      implementation: of `attention`.
      rngs: `nnx.Rngs` for the initial values.

    Raises:
      ValueError, TypeError: for sizes that are no positive ints.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        for name, value in (("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim)):
            if check.as_index("CausalAttention", name, value) < 1:
                raise ValueError(f"CausalAttention: {name} must be at least 1, got {value}")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.dtype, self.implementation = jnp.dtype(dtype), implementation

        def linear(rows: int, columns: int) -> nnx.Linear:
            precision = PROJECTIONS["fp32" if self.dtype == jnp.float32 else "16bit"]
            options: dict[str, Any] = {"dtype": self.dtype, "param_dtype": param_dtype, "precision": precision}
            return nnx.Linear(rows, columns, use_bias=False, **options, rngs=rngs)

        channels = num_heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden_size, channels) for _ in range(3))
        self.o_proj = linear(channels, hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """y `[B, T, hidden_size]` of x `[B, T, hidden_size]`."""
        return self._sequence(x)[0]

    def prefill(self, x: jax.Array, length: int) -> tuple[jax.Array, KeyValueCache]:
        """y of the first tokens x `[B, T, hidden_size]`, and the cache after them, with room for `length` tokens."""
        T = x.shape[1]
        if length < T:
            raise ValueError(f"CausalAttention: length must be at least the T = {T} of x, got {length}")
        y, k, v = self._sequence(x)
        room = ((0, 0), (0, length - T), (0, 0), (0, 0))
        return y, KeyValueCache(jnp.pad(k, room), jnp.pad(v, room), jnp.int32(T))

    def step(self, x: jax.Array, cache: KeyValueCache) -> tuple[jax.Array, KeyValueCache]:
        """y `[B, hidden_size]` of one token x `[B, hidden_size]` a sequence, and the cache after it.

        A cache that is full cannot be told from another under `jit`: its last token is overwritten.
        """
        check.require_shape("CausalAttention", "x", x, "[B, hidden_size]", ("B", self.hidden_size))
        q, k, v = self._operands(x[:, None])
        at = (0, cache.length, 0, 0)
        after = KeyValueCache(
            lax.dynamic_update_slice(cache.k, k, at), lax.dynamic_update_slice(cache.v, v, at), cache.length + 1
        )
        # One query has no tiles: the operator is for sequences.
        with jax.default_matmul_precision("float32"):
            seen = jnp.full(x.shape[:1], after.length)
            o = jax.nn.dot_product_attention(q, after.k, after.v, key_value_seq_lengths=seen)
        return self.o_proj(o.reshape(x.shape[0], -1)), after

    def _sequence(self, x):
        check.require_shape("CausalAttention", "x", x, "[B, T, hidden_size]", ("B", "T", self.hidden_size))
        q, k, v = self._operands(x)
        o = attention(q, k, v, implementation=self.implementation)
        return self.o_proj(o.reshape(*x.shape[:2], -1)), k, v

    def _operands(self, x):
        x = x.astype(self.dtype)
        return (p(x).reshape(*x.shape[:2], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
