"""Short causal convolutions with a silu, on Pallas's Triton backend.

Of every channel, with S taps w and an optional bias b, where x_s is 0 for a token s outside of the sequence of t:

    z_t = b + sum_k w_k x_{t - S + 1 + k}       y_t = z_t sigmoid(z_t)

Backward, z computed again:

    du_t = dy_t sigmoid(z_t) (1 + z_t (1 - sigmoid(z_t)))
    dx_s = sum_k w_k du_{s + S - 1 - k}         dw_k = sum_t du_t x_{t - S + 1 + k}         db = sum_t du_t

A program walks along a span of tokens, a row of channels a step. What later tokens need of earlier ones stays in
registers, so that every array is read once and written once; the time is that of the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.kda.raw import sigmoid

MAX_TAPS = 8  # they are held in registers, with as many rows of x and of du
_TILES = (512, 256, 128)
_CHANNELS_OF_WARP = 128  # four a lane, which 16-bit loads of 8 bytes bring
_MANY = 4096  # warps, of spans of 64 tokens: more than twice what the multiprocessors of any card hold of the kernels


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are cut and launched.

    Attributes:
      tile: channels of a program, a power of two.
      span: tokens of a program.
      ahead: tokens that are loaded before the first of them is computed with; it divides span.
    """

    tile: int
    span: int = 64
    ahead: int = 4

    def __post_init__(self):
        if self.tile not in (16, 32, 64, *_TILES):
            raise ValueError(f"tile must be a power of two from 16 to {_TILES[0]}, got {self.tile}")
        if self.ahead < 1 or self.span < 1 or self.span % self.ahead:
            raise ValueError(f"span must be a multiple of ahead, got {self.span} and {self.ahead}")

    @property
    def warps(self) -> int:
        return max(1, self.tile // _CHANNELS_OF_WARP)


def choose_config(*, B: int, T: int, taps: int, sizes: Sequence[int]) -> Config:
    """The configuration for x `[B, T, sum(sizes)]`. Raises a ValueError for what the kernels do not serve."""
    if taps > MAX_TAPS:
        raise ValueError(f"the kernel must have at most {MAX_TAPS} taps, got {taps}")
    dividing = [tile for tile in _TILES if not any(size % tile for size in sizes)]
    tile = dividing[0] if dividing else min(_TILES[0], max(16, bt.ceil_pow2(max(sizes))))
    warps = B * -(-T // 64) * sum(-(-size // tile) for size in sizes) * max(1, tile // _CHANNELS_OF_WARP)
    return Config(tile, span=64 if warps >= _MANY else 32)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a program works on: channels of one result, and the tokens of one span."""

    inputs: tuple[Any, int, Any]  # columns of x and of the weights, as in `load_tile`
    outputs: tuple[Any, int, Any]  # columns of the result
    first: Any  # token
    T: int
    tokens: Any  # the limit of rows: None where no span sticks out

    def row(self, ref, t, columns) -> jax.Array:
        """Row t of the span, or one after it, in float32."""
        return bt.load_tile(ref, (t, 1, self.tokens), columns).astype(jnp.float32)

    def start(self, ref, t) -> jax.Array:
        """The first token of t's sequence; of the last token's where t lies after all tokens, which adds nothing."""
        return ref[jnp.minimum(t, self.T - 1), 0]

    def outside(self, ref, t, columns) -> jax.Array:
        """A row that may lie before or after all tokens, where there are zeros."""
        return bt.load_tile(ref, (t, 1, (0, self.T)), columns).astype(jnp.float32)


def _each_part(body, sizes: tuple[int, ...], T: int, config: Config) -> None:
    """Calls body(index of the result, part) for the program's own one. Grid (tiles of channels, spans, B)."""
    index, first_tile, first_column = pl.program_id(0), 0, 0
    tokens = None if T % config.span == 0 else T
    for i, size in enumerate(sizes):
        column = (index - first_tile) * config.tile
        whole = size % config.tile == 0
        inputs = (first_column + column, config.tile, None if whole else first_column + size)
        outputs = (column, config.tile, None if whole else size)
        part = _Part(inputs, outputs, pl.program_id(1) * config.span, T, tokens)
        last_tile = first_tile + -(-size // config.tile)
        if len(sizes) == 1:
            body(i, part)
        else:
            pl.when((index >= first_tile) & (index < last_tile))(lambda i=i, part=part: body(i, part))
        first_tile, first_column = last_tile, first_column + size


def _convolved(taps, weights, bias, interpret: bool) -> jax.Array:
    z = taps[-1] * weights[-1] if bias is None else bt.fma(taps[-1], weights[-1], bias, interpret)
    for x, w in zip(taps[:-1], weights[:-1], strict=True):
        z = bt.fma(x, w, z, interpret)
    return z


def _of_sequence(taps, t, start) -> list[jax.Array]:
    """The tokens up to t where they are not before `start`; 0 where they are. None: all are not."""
    if start is None:
        return list(taps)
    last = len(taps) - 1
    return [jnp.where(t - last + k >= start, x, 0.0) for k, x in enumerate(taps[:-1])] + [taps[-1]]


def short_convolution(
    x_ref, weight_ref, *refs, sizes, taps: int, T: int, config: Config, has_bias: bool, packed: bool, interpret: bool
):  # fmt: skip
    """refs: the bias and the first tokens of sequences where there are such, then the results."""
    refs = list(refs)
    bias_ref = refs.pop(0) if has_bias else None
    starts_ref = refs.pop(0) if packed else None

    def body(i, part):
        weights = [bt.load_tile(weight_ref, (k, 1, None), part.inputs) for k in range(taps)]
        bias = None if bias_ref is None else bt.load_tile(bias_ref, (0, 1, None), part.inputs)
        past = tuple(part.outside(x_ref, part.first - taps + 1 + k, part.inputs) for k in range(taps - 1))

        def some(n, past):
            rows = [part.first + n * config.ahead + r for r in range(config.ahead)]
            loaded = [part.row(x_ref, t, part.inputs) for t in rows]
            for t, x in zip(rows, loaded, strict=True):
                start = part.start(starts_ref, t) if packed else None
                z = _convolved(_of_sequence((*past, x), t, start), weights, bias, interpret)
                bt.store_tile(refs[i], (t, 1, part.tokens), part.outputs, z * sigmoid(z, interpret))
                past = (*past, x)[1:]
            return past

        lax.fori_loop(0, config.span // config.ahead, some, past)

    _each_part(body, sizes, T, config)


def short_convolution_backward(
    x_ref, weight_ref, *refs, sizes, taps: int, T: int, config: Config, has_bias: bool, packed: bool, interpret: bool
):  # fmt: skip
    """refs: the bias and the first tokens of sequences where there are such, dy of every result; then dx, and this
    span's part of the weights' gradients, with that of the bias behind."""
    refs = list(refs)
    bias_ref = refs.pop(0) if has_bias else None
    starts_ref = refs.pop(0) if packed else None
    *dy_refs, dx_ref, sums_ref = refs

    def body(i, part):
        weights = [bt.load_tile(weight_ref, (k, 1, None), part.inputs) for k in range(taps)]
        bias = None if bias_ref is None else bt.load_tile(bias_ref, (0, 1, None), part.inputs)
        zeros = jnp.zeros((1, config.tile), jnp.float32)
        # Of the taps - 1 tokens before the current one: x, du, and where their sequences start.
        before = [part.first - taps + 1 + k for k in range(taps - 1)]
        xs = tuple(part.outside(x_ref, t, part.inputs) for t in before)
        dus, starts = (zeros,) * (taps - 1), (jnp.int32(0),) * (taps - 1 if packed else 0)
        sums = (zeros,) * (taps + has_bias)

        def token(t, x, dy, start, carry, own: bool):
            """Takes the walk to token t. own: whether it belongs to the span, and not to the one after it."""
            xs, dus, starts, sums = carry
            seen = _of_sequence((*xs, x), t, start)
            z = _convolved(seen, weights, bias, interpret)
            s = sigmoid(z, interpret)
            du = dy * s * bt.fma(z, 1.0 - s, 1.0, interpret)
            if own:
                sums = tuple(bt.fma(du, x, total, interpret) for x, total in zip(seen, sums, strict=False))
                sums = (*sums, carry[3][-1] + du) if has_bias else sums
            dus, starts = (*dus, du), (*starts, start) if packed else ()
            # The oldest of the tokens has been seen by all that see it.
            oldest = t - taps + 1
            reaching = [jnp.where(oldest >= s, du, 0.0) for du, s in zip(dus, starts, strict=True)] if packed else dus
            dx = _convolved(reaching[::-1], weights, None, interpret)
            bt.store_tile(dx_ref, (oldest, 1, (part.first, T)), part.inputs, dx)
            return (*xs, x)[1:], dus[1:], starts[1:], sums

        def some(n, carry):
            rows = [part.first + n * config.ahead + r for r in range(config.ahead)]
            loaded = [(part.row(x_ref, t, part.inputs), part.row(dy_refs[i], t, part.outputs)) for t in rows]
            for t, (x, dy) in zip(rows, loaded, strict=True):
                start = part.start(starts_ref, t) if packed else None
                carry = token(t, x, dy, start, carry, own=True)
            return carry

        carry = lax.fori_loop(0, config.span // config.ahead, some, (xs, dus, starts, sums))
        rows = [part.first + config.span + r for r in range(taps - 1)]
        loaded = [(part.outside(x_ref, t, part.inputs), part.outside(dy_refs[i], t, part.outputs)) for t in rows]
        for t, (x, dy) in zip(rows, loaded, strict=True):
            start = part.start(starts_ref, t) if packed else None
            carry = token(t, x, dy, start, carry, own=False)
        for k, total in enumerate(carry[3]):
            bt.store_tile(sums_ref, (k, 1, None), part.inputs, total)

    _each_part(body, sizes, T, config)


def forward(x, weight, bias, starts, *, sizes: tuple[int, ...], config: Config, interpret: bool) -> tuple[Any, ...]:
    """Results `[B, T, size]` for each of sizes, in x's dtype.

    x `[B, T, C]`, C the sum of sizes; weight `[S, C]` and bias `[C]` or None, float32; starts `[B, T]` int32, of every
    token the first one of its sequence, or None.
    """
    inputs, grid, static = _common(x, weight, bias, starts, sizes, config)
    outputs = [_whole(jax.ShapeDtypeStruct((*x.shape[:2], size), x.dtype)) for size in sizes]
    return tuple(_launch(short_convolution, grid, inputs, outputs, interpret, static))


def backward(x, weight, bias, starts, dys, *, sizes: tuple[int, ...], config: Config, interpret: bool):
    """(dx in x's dtype, dweight, dbias or None) of the gradients of the results; otherwise as `forward`."""
    inputs, grid, static = _common(x, weight, bias, starts, sizes, config)
    inputs += [(dy, _batch_element(dy.shape)) for dy in dys]
    (B, _, C), spans = x.shape, grid[1]
    rows = weight.shape[0] + (bias is not None)
    by_span = pl.BlockSpec((None, rows, C), lambda _, i, b: (b * spans + i, 0, 0))
    sums = (jax.ShapeDtypeStruct((B * spans, rows, C), jnp.float32), by_span)
    outputs = [_whole(jax.ShapeDtypeStruct(x.shape, x.dtype)), sums]
    dx, sums = _launch(short_convolution_backward, grid, inputs, outputs, interpret, static)
    total = sums.sum(0)
    return dx, total[: weight.shape[0]], None if bias is None else total[-1]


def _common(x, weight, bias, starts, sizes, config: Config):
    """The inputs of both kernels, their grid, and what they are specialised for."""
    B, T, C = x.shape
    inputs = [(x, _batch_element(x.shape)), (weight, pl.BlockSpec(weight.shape, lambda *_: (0, 0)))]
    if bias is not None:
        inputs.append((bias.reshape(1, C), pl.BlockSpec((1, C), lambda *_: (0, 0))))
    if starts is not None:
        inputs.append((starts[..., None], _batch_element((B, T, 1))))
    grid = (sum(-(-size // config.tile) for size in sizes), -(-T // config.span), B)
    static = {"sizes": sizes, "taps": weight.shape[0], "T": T, "config": config}
    return inputs, grid, static | {"has_bias": bias is not None, "packed": starts is not None}


def _batch_element(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape[1:]), lambda _, i, b: (b, 0, 0))


def _whole(shape: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    return shape, _batch_element(shape.shape)


def _launch(body, grid, inputs, outputs, interpret: bool, static: dict[str, Any]) -> list[jax.Array]:
    name, warps = body.__name__, static["config"].warps
    return bt.launch(body, name, grid, inputs, outputs, num_warps=warps, num_stages=1, interpret=interpret, **static)
