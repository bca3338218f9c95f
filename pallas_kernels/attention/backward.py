"""The backward kernels: one walks over queries for the gradients of a tile of keys and values, one over keys for that
of a tile of queries. Both form the scores; neither adds to what another program adds to, so sums have one order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.attention.config import AttentionConfig, HopperTiles, Tiles
from pallas_kernels.attention.sizes import Sight, Sizes, walk, weighted


def attention_dkv(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, spans_ref, dk_ref, dv_ref,
    *, sizes: Sizes, tiles: Tiles, scale: float, precision: str, interpret: bool,
):  # fmt: skip
    """dk and dv of one tile of keys, of all query heads that read it. Grid (key tiles, B * HK).

    Scores have keys as rows, so that they are left operands of the products that follow.
    """
    dot, sight = bt.Dot(precision, interpret), Sight(sizes, spans_ref)
    first = pl.program_id(0) * tiles.k
    rows, channels = sizes.keys(first, tiles.k), sizes.channels()
    k, v = bt.load_tile(k_ref, rows, channels), bt.load_tile(v_ref, rows, channels)

    def queries_of(key):
        return sight.queries_of(key, tiles.q)

    start, stop = queries_of(first + jnp.arange(tiles.k)[:, None])

    def head(h, carry):
        def step(n, carry, masked):
            dk, dv = carry
            queries, one = sizes.queries(n * tiles.q, tiles.q), (h, 1, None)
            q = bt.load_tile(q_ref, queries, sizes.channels(h))
            do = bt.load_tile(do_ref, queries, sizes.channels(h))
            lse, delta = bt.load_tile(lse_ref, one, queries), bt.load_tile(delta_ref, one, queries)
            s = dot(k, q, (1, 1))
            p = bt.exp2(bt.fma(s, scale * bt.LOG2_E, -lse, interpret), interpret)
            ds = p * (dot(v, do, (1, 1)) - delta)
            seen = None
            if masked:
                query = n * tiles.q + jnp.arange(tiles.q)[None, :]
                seen = (query >= start) & (query < stop)
                p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)
            return dk + weighted(dot, ds, q, seen), dv + weighted(dot, p, do, seen)

        return walk(queries_of, first, tiles.k, sizes.Tk, tiles.q, step, carry)

    zeros = jnp.zeros((tiles.k, sizes.bd), jnp.float32)
    dk, dv = head(0, (zeros, zeros)) if sizes.group == 1 else lax.fori_loop(0, sizes.group, head, (zeros, zeros))
    bt.store_tile(dk_ref, rows, channels, dk * scale)
    bt.store_tile(dv_ref, rows, channels, dv)


def attention_dq(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, spans_ref, dq_ref,
    *, sizes: Sizes, tiles: Tiles, scale: float, precision: str, interpret: bool,
):  # fmt: skip
    """dq of one tile of queries. Grid (query tiles, B * H)."""
    dot, sight = bt.Dot(precision, interpret), Sight(sizes, spans_ref)
    first = (pl.num_programs(0) - 1 - pl.program_id(0)) * tiles.q  # the longest rows first
    rows, channels, one = sizes.queries(first, tiles.q), sizes.channels(), (0, 1, None)
    q, do = bt.load_tile(q_ref, rows, channels), bt.load_tile(do_ref, rows, channels)
    lse, delta = bt.load_tile(lse_ref, rows, one), bt.load_tile(delta_ref, rows, one)
    start, stop = sight.keys_of(first + jnp.arange(tiles.q)[:, None])

    def step(n, dq, masked):
        keys = sizes.keys(n * tiles.k, tiles.k) if masked else (n * tiles.k, tiles.k, None)
        k, v = bt.load_tile(k_ref, keys, channels), bt.load_tile(v_ref, keys, channels)
        p = bt.exp2(bt.fma(dot(q, k, (1, 1)), scale * bt.LOG2_E, -lse, interpret), interpret)
        ds = p * (dot(do, v, (1, 1)) - delta)
        seen = None
        if masked:
            key = n * tiles.k + jnp.arange(tiles.k)[None, :]
            seen = (key >= start) & (key < stop)
            ds = jnp.where(seen, ds, 0.0)
        return dq + weighted(dot, ds, k, seen)

    zeros = jnp.zeros((tiles.q, sizes.bd), jnp.float32)
    dq = walk(sight.keys_of, first, tiles.q, sizes.Tq, tiles.k, step, zeros)
    bt.store_tile(dq_ref, rows, channels, dq * scale)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: jax.Array | None,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    *,
    causal: bool,
    scale: float,
    precision: str,
    config: AttentionConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv, from what `forward` returned and the cotangent of o; arguments as there."""
    sizes = Sizes.of(q, k, causal)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    if isinstance(config.dkv, HopperTiles) and isinstance(config.dq, HopperTiles):
        assert spans is None
        # Imported where it is used: it changes with every release of JAX.
        from pallas_kernels.attention import mosaic_backward

        tiles = {"dkv": config.dkv, "dq": config.dq, "interpret": interpret}
        return mosaic_backward.backward(q, k, v, lse, delta, do, causal=causal, scale=scale, **tiles)
    assert isinstance(config.dkv, Tiles) and isinstance(config.dq, Tiles)

    def launch(body, tiles, grid, arrays, heads, outputs):
        inputs: list = [*arrays, (None, None) if spans is None else (spans, sizes.spans(heads))]
        return bt.launch(
            body,
            body.__name__,
            grid,
            inputs,
            outputs,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            interpret=interpret,
            sizes=sizes,
            tiles=tiles,
            scale=scale,
            precision=precision,
        )

    flat = (sizes.B, sizes.Tq, sizes.H * sizes.D)
    dk, dv = launch(
        attention_dkv,
        config.dkv,
        (-(-sizes.Tk // config.dkv.k), sizes.B * sizes.HK),
        [
            (q.reshape(flat), sizes.its_query_heads()),
            (k, sizes.key_head()),
            (v, sizes.key_head()),
            (do.reshape(flat), sizes.its_query_heads()),
            (lse, sizes.its_query_rows()),
            (delta, sizes.its_query_rows()),
        ],
        sizes.HK,
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), sizes.key_head()) for x in (k, v)],
    )
    (dq,) = launch(
        attention_dq,
        config.dq,
        (-(-sizes.Tq // config.dq.q), sizes.B * sizes.H),
        [
            (q, sizes.query_head()),
            (k, sizes.its_key_head()),
            (v, sizes.its_key_head()),
            (do, sizes.query_head()),
            (lse[..., None], sizes.query_row()),
            (delta[..., None], sizes.query_row()),
        ],
        sizes.H,
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), sizes.query_head())],
    )
    return dq, dk, dv
