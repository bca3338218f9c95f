"""Packed sequences: where each begins and ends, which chunks they are cut into, and the checks of `cu_seqlens`.

N sequences of any length follow each other in T tokens; sequence n has the tokens cu_seqlens[n] up to
cu_seqlens[n + 1]. They are cut into chunks where a sequence ends and at every multiple of C, whatever sequence lies
there: what copies whole tiles wants them aligned. So there are at most ceil(T / C) + N - 1 chunks, a number that is
known without the values of `cu_seqlens`: a call compiles once for all packings of N sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from dormouse_jax import validation as check

INTEGERS = ("int32", "int64")


class Chunks(NamedTuple):
    """The chunks of packed sequences. Those of a sequence follow each other; slots that no sequence needs are last.

    Attributes:
      rows: `[slots, 2]`, the first token of a chunk and the one after its last; both 0 in a slot that is not used.
        They lie between two multiples of C: token t is row t % C of its chunk.
      sequence: `[slots]`, the sequence that it belongs to.
      first: `[N + 1]`, the first chunk of every sequence; the last number is that of all chunks.
    """

    rows: jax.Array
    sequence: jax.Array
    first: jax.Array


def number_of_slots(T: int, N: int, C: int) -> int:
    """The most chunks of up to C tokens that N sequences of T tokens altogether can need."""
    return -(-T // C) + N - 1


def chunks(cu_seqlens: jax.Array, T: int, C: int) -> Chunks:
    """Cuts packed sequences into chunks of up to C tokens; `cu_seqlens` `[N + 1]` may be traced."""
    N = cu_seqlens.shape[0] - 1
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    counts = jnp.where(starts < ends, -(-ends // C) - starts // C, 0)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    slot = jnp.arange(number_of_slots(T, N, C), dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(slot[:, None] >= first[1:], axis=1, dtype=jnp.int32), N - 1)
    tile = (starts[sequence] // C + slot - first[sequence]) * C
    rows = jnp.stack([jnp.maximum(tile, starts[sequence]), jnp.minimum(tile + C, ends[sequence])], axis=1)
    return Chunks(jnp.where((slot < first[-1])[:, None], rows, 0), sequence, first)


def sequence_of_tokens(cu_seqlens: jax.Array, T: int) -> jax.Array:
    """The sequence of every token, `[T]`."""
    token = jnp.arange(T, dtype=jnp.int32)
    after = jnp.sum(token[:, None] >= cu_seqlens[1:], axis=1, dtype=jnp.int32)
    return jnp.minimum(after, cu_seqlens.shape[0] - 2)


def spans_of_sequences(cu_seqlens: jax.Array, T: int) -> jax.Array:
    """`[1, T, 2]`, of every token the first token of its sequence and the one after that sequence's last."""
    sequence = sequence_of_tokens(cu_seqlens, T)
    return jnp.stack([cu_seqlens[sequence], cu_seqlens[sequence + 1]], axis=1)[None]


def spans_of_segments(starts: jax.Array) -> jax.Array:
    """The same for segments, `[B, T, 2]`, from where another one begins, `[B, T]` bool."""
    T = starts.shape[1]
    token = jnp.arange(T, dtype=jnp.int32)
    first = lax.cummax(jnp.where(starts, token, 0), axis=1)
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    return jnp.stack([first, lax.cummin(jnp.where(ends, token + 1, T), axis=1, reverse=True)], axis=2)


def require_cu_seqlens(operator: str, cu_seqlens: Any, B: int, T: int) -> jax.Array:
    """`cu_seqlens` as `[N + 1]` int32, or an error that says what is wrong with it.

    Of a traced array no values are known: it is brought into an order that nothing can go out of bounds with.
    """
    given = check.as_array(operator, "cu_seqlens", cu_seqlens)
    if given.ndim != 1 or given.shape[0] < 2:
        raise ValueError(f"{operator}: cu_seqlens must have shape [N + 1] with N >= 1, got {list(given.shape)}")
    check.require_dtype(operator, "cu_seqlens", given, INTEGERS)
    if B != 1:
        raise ValueError(f"{operator}: B must be 1 with cu_seqlens, got q with B = {B}")
    if isinstance(given, Tracer):
        return lax.cummax(jnp.clip(given, 0, T).astype(jnp.int32))
    values = np.asarray(given)
    if values[0] != 0:
        raise ValueError(f"{operator}: cu_seqlens must start with 0, got {values[0]}")
    if (np.diff(values) < 0).any():
        n = int(np.argmax(np.diff(values) < 0))
        raise ValueError(f"{operator}: cu_seqlens must not decrease, got {values[n + 1]} after {values[n]} at {n + 1}")
    if values[-1] != T:
        raise ValueError(f"{operator}: cu_seqlens must end with T = {T}, got {values[-1]}")
    return given.astype(jnp.int32)


def segment_starts(operator: str, segment_ids: Any, B: int, T: int) -> jax.Array:
    """Where another segment begins, `[B, T]` bool, from its `segment_ids`; not at the first token, which continues
    the initial state."""
    ids = check.as_array(operator, "segment_ids", segment_ids)
    check.require_shape(operator, "segment_ids", ids, "[B, T]", (B, T))
    check.require_dtype(operator, "segment_ids", ids, INTEGERS)
    return jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
