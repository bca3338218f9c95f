"""The forward kernel: a program holds a tile of queries of one head and walks over the keys that they see."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.attention.config import AttentionConfig, HopperTiles, Tiles
from pallas_kernels.attention.sizes import Sight, Sizes, walk, weighted

# What the largest score starts from: masked scores, -inf, stay below it, so that no difference of two is a NaN.
LEAST_SCORE = float(jnp.finfo(jnp.float32).min)


def attention_forward(
    q_ref, k_ref, v_ref, spans_ref, o_ref, lse_ref,
    *, sizes: Sizes, tiles: Tiles, scale: float, precision: str, interpret: bool,
):  # fmt: skip
    """o and lse of one tile of queries. Grid (query tiles, B * H).

    m is the largest score so far, l the sum of exp(score - m), and acc that of v weighted by it.
    """
    dot, sight = bt.Dot(precision, interpret), Sight(sizes, spans_ref)
    # The longest rows first, so that short ones fill the card at the end.
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.q
    rows, channels = sizes.queries(first, tiles.q), sizes.channels()
    q = bt.load_tile(q_ref, rows, channels)
    start, stop = sight.keys_of(first + jnp.arange(tiles.q)[:, None])
    to_base_2 = scale * bt.LOG2_E

    def step(n, carry, masked):
        acc, m, l = carry
        keys = sizes.keys(n * tiles.k, tiles.k) if masked else (n * tiles.k, tiles.k, None)
        s = dot(q, bt.load_tile(k_ref, keys, channels), (1, 1))
        v = bt.load_tile(v_ref, keys, channels)
        seen = None
        if masked:
            key = n * tiles.k + jnp.arange(tiles.k)[None, :]
            seen = (key >= start) & (key < stop)
            s = jnp.where(seen, s, -jnp.inf)
        above = jnp.maximum(m, jnp.max(s, axis=1) * to_base_2)
        p = bt.exp2(bt.fma(s, to_base_2, -above[:, None], interpret), interpret)
        shrink = bt.exp2(m - above, interpret)
        return acc * shrink[:, None] + weighted(dot, p, v, seen), above, l * shrink + jnp.sum(p, axis=1)

    zeros = jnp.zeros((tiles.q,), jnp.float32)
    carry = jnp.zeros((tiles.q, sizes.bd), jnp.float32), zeros + LEAST_SCORE, zeros
    acc, m, l = walk(sight.keys_of, first, tiles.q, sizes.Tq, tiles.k, step, carry)
    bt.store_tile(o_ref, rows, channels, acc * jnp.where(l == 0, 0.0, 1.0 / l)[:, None])
    # inf: the backward then forms exp(score - inf) = 0 of whatever scores there are.
    lse = jnp.where(l == 0, jnp.inf, m + jnp.log(l) * bt.LOG2_E)
    bt.store_tile(lse_ref, rows, (0, 1, None), lse[:, None])


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: jax.Array | None,
    *,
    causal: bool,
    scale: float,
    precision: str,
    config: AttentionConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """o [B, Tq, H, D] and the base-2 lse [B, H, Tq], inf where a query sees no key.

    Args:
      q, k, v: [B, Tq, H, D] and [B, Tk, HK, D].
      spans: [B, T, 2] int32, of every token the first and the last + 1 of its sequence; None where nothing is packed.
      scale: positive.
      precision: "fp32" or "tf32" for float32 inputs, "16bit" for bfloat16 and float16.
      config, interpret: of the kernels, and whether they run in interpret mode.
    """
    sizes, tiles = Sizes.of(q, k, causal), config.forward
    if isinstance(tiles, HopperTiles):
        assert spans is None
        from pallas_kernels.attention import mosaic  # imported where it is used: it changes with every release of JAX

        return mosaic.forward(q, k, v, causal=causal, scale=scale, tiles=tiles, interpret=interpret)
    lse = jax.ShapeDtypeStruct((sizes.B, sizes.H, sizes.Tq, 1), jnp.float32)
    inputs: list = [(q, sizes.query_head()), (k, sizes.its_key_head()), (v, sizes.its_key_head())]
    inputs.append((None, None) if spans is None else (spans, sizes.spans(sizes.H)))
    o, lse = bt.launch(
        attention_forward,
        "attention_forward",
        (-(-sizes.Tq // tiles.q), sizes.B * sizes.H),
        inputs,
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), sizes.query_head()), (lse, sizes.query_row())],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
        sizes=sizes,
        tiles=tiles,
        scale=scale,
        precision=precision,
    )
    return o, lse[..., 0]
