"""RMS norms, with a sum before and a gate behind, on Pallas's Triton backend.

Of every row of D numbers:

    x   = x_1 + x_2                   where there are two, rounded to their dtype
    n   = x / sqrt(mean(x^2) + eps)
    y   = n scale                     or n scale s with a gate, s = sigmoid(gate + bias)

Backward, with dn = dy, or dy s, and a gradient dsum of x itself:

    dx     = (dn scale - n mean(dn scale n)) / sqrt(mean(x^2) + eps) + dsum
    dgate  = dy n scale s (1 - s)
    dscale = sum dn n                 dbias = sum dgate

A program has whole rows, so that each array is read once and written once; the time is that of the memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.kda.raw import sigmoid

MAX_DIM = 16384
_OF_WARP = 1024  # numbers that a warp holds of each of some arrays; half as many with a gate, which brings more
_WARPS = 1452  # at most, where that is enough: eleven for every multiprocessor of an H200, which holds twelve


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernels are cut.

    Attributes:
      rows: that a program takes at a time, a power of two.
      turns: how often it does; gradients of the weights are summed over all of them.
      warps: warps a program.
    """

    rows: int
    turns: int
    warps: int

    def __post_init__(self):
        if self.rows < 1 or self.rows & (self.rows - 1) or self.turns < 1:
            raise ValueError(f"rows must be a power of two and turns positive, got {self.rows} and {self.turns}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {self.warps}")

    @property
    def span(self) -> int:
        """Rows of a program."""
        return self.rows * self.turns


def choose_config(*, rows: int, groups: int, dim: int, gated: bool) -> Config:
    """The configuration for x `[rows, groups * dim]`. Raises a ValueError for what the kernels do not serve."""
    if dim > MAX_DIM:
        raise ValueError(f"rows must have at most {MAX_DIM} numbers, got {dim}")
    held, width = _OF_WARP // 2 if gated else _OF_WARP, bt.ceil_pow2(dim)
    taken, warps = max(1, held // width), min(16, max(1, width // held))
    turns = -(-rows * groups * warps // (taken * _WARPS))
    return Config(taken, turns=min(64, turns), warps=warps)


def _tiles(rows: int, dim: int, config: Config):
    """As `load_tile` takes them: n -> the rows of turn n; the columns of the program's group; those of an array of one
    group. Grid (groups, spans)."""
    first, width = pl.program_id(1) * config.span, bt.ceil_pow2(dim)
    limit = None if rows % config.span == 0 else rows
    column = pl.program_id(0) * dim
    columns = (column, width, None if width == dim else column + dim)
    return lambda n: (first + n * config.rows, config.rows, limit), columns, (0, width, None if width == dim else dim)


def _inverse_rms(x, dim: int, eps: float) -> jax.Array:
    return lax.rsqrt(jnp.sum(x * x, axis=1)[:, None] * (1 / dim) + eps)


def rms_norm(
    x_ref, scale_ref, *refs,
    rows: int, dim: int, eps: float, config: Config, adds: bool, gated: bool, interpret: bool,
):  # fmt: skip
    """refs: the other summand, gate and bias where there are such; then the sum where there is one, and y."""
    refs, f32 = list(refs), jnp.float32
    other_ref = refs.pop(0) if adds else None
    gate_ref, bias_ref = (refs.pop(0), refs.pop(0)) if gated else (None, None)
    turn, columns, own = _tiles(rows, dim, config)
    scale = bt.load_tile(scale_ref, (0, 1, None), own)
    bias = bt.load_tile(bias_ref, (0, 1, None), columns) if gated else jnp.float32(0)

    def some(n, _):
        x = bt.load_tile(x_ref, turn(n), columns).astype(f32)
        if adds:
            total = (x + bt.load_tile(other_ref, turn(n), columns).astype(f32)).astype(x_ref.dtype)
            bt.store_tile(refs[0], turn(n), columns, total)
            x = total.astype(f32)
        y = x * (_inverse_rms(x, dim, eps) * scale)
        if gated:
            y = y * sigmoid(bt.load_tile(gate_ref, turn(n), columns).astype(f32) + bias, interpret)
        bt.store_tile(refs[-1], turn(n), columns, y)
        return jnp.int32(0)

    lax.fori_loop(0, config.turns, some, jnp.int32(0))


def rms_norm_backward(
    x_ref, scale_ref, *refs,
    rows: int, dim: int, eps: float, config: Config, adds: bool, gated: bool, interpret: bool,
):  # fmt: skip
    """refs: gate and bias where there are such, dy, the gradient of the sum where there is one; then dx, dgate, and the
    program's part of the gradients of scale and bias."""
    refs, f32 = list(refs), jnp.float32
    gate_ref, bias_ref = (refs.pop(0), refs.pop(0)) if gated else (None, None)
    dy_ref = refs.pop(0)
    dsum_ref = refs.pop(0) if adds else None
    dx_ref, sums_ref = refs[0], refs[-1]
    turn, columns, own = _tiles(rows, dim, config)
    scale = bt.load_tile(scale_ref, (0, 1, None), own)
    bias = bt.load_tile(bias_ref, (0, 1, None), columns) if gated else jnp.float32(0)

    def some(n, sums):
        x = bt.load_tile(x_ref, turn(n), columns).astype(f32)
        dn = bt.load_tile(dy_ref, turn(n), columns).astype(f32)
        inverse = _inverse_rms(x, dim, eps)
        normed = x * inverse
        if gated:
            s = sigmoid(bt.load_tile(gate_ref, turn(n), columns).astype(f32) + bias, interpret)
            dn = dn * s
            dgate = dn * normed * scale * (1.0 - s)
            bt.store_tile(refs[1], turn(n), columns, dgate)
            sums = (sums[0], sums[1] + dgate)
        sums = (bt.fma(dn, normed, sums[0], interpret), *sums[1:])
        dn = dn * scale
        mean = jnp.sum(dn * normed, axis=1)[:, None] * (1 / dim)
        dx = (dn - normed * mean) * inverse
        if adds:
            dx = dx + bt.load_tile(dsum_ref, turn(n), columns).astype(f32)
        bt.store_tile(dx_ref, turn(n), columns, dx)
        return sums

    zeros = (jnp.zeros((config.rows, columns[1]), f32),) * (1 + gated)
    for i, total in enumerate(lax.fori_loop(0, config.turns, some, zeros)):
        bt.store_tile(sums_ref, (i, 1, None), columns, jnp.sum(total, axis=0)[None, :])


def forward(x, scale, other, gate, bias, *, eps: float, config: Config, interpret: bool):
    """(the sum, None without `other`; y in x's dtype).

    x, and other and gate where they are not None, `[rows, groups * dim]`; scale `[dim]` and, with a gate, bias
    `[groups * dim]`, float32.
    """
    extra = [a for a in (other, gate) if a is not None]
    inputs, grid, static = _common(x, scale, extra, bias, eps, config)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = [(shape, _whole(x.shape))] * (1 + (other is not None))
    flags = {"adds": other is not None, "gated": gate is not None}
    *total, y = bt.launch(
        rms_norm,
        "rms_norm",
        grid,
        inputs,
        outputs,
        num_warps=config.warps,
        num_stages=1,
        interpret=interpret,
        **flags,
        **static,
    )
    return total[0] if total else None, y


def backward(x, scale, gate, bias, dy, dsum, *, eps: float, config: Config, interpret: bool):
    """(dx, dscale, dgate, dbias) of the gradients of y and of the sum; x is the sum. What is not there is None."""
    extra = [a for a in (gate,) if a is not None]
    inputs, grid, static = _common(x, scale, extra, bias, eps, config)
    inputs += [(a, _whole(x.shape)) for a in (dy, dsum) if a is not None]
    outputs = [(jax.ShapeDtypeStruct(x.shape, x.dtype), _whole(x.shape))]
    if gate is not None:
        outputs.append((jax.ShapeDtypeStruct(x.shape, gate.dtype), _whole(x.shape)))
    number = 1 if gate is None else 2
    sums_shape = jax.ShapeDtypeStruct((grid[1], number, x.shape[1]), jnp.float32)
    outputs.append((sums_shape, pl.BlockSpec((None, number, x.shape[1]), lambda _, i: (i, 0, 0))))
    flags = {"adds": dsum is not None, "gated": gate is not None}
    dx, *dgate, sums = bt.launch(
        rms_norm_backward, "rms_norm_backward", grid, inputs, outputs,
        num_warps=config.warps, num_stages=1, interpret=interpret, **flags, **static,
    )  # fmt: skip
    sums = sums.sum(0)
    dscale = sums[0].reshape(-1, scale.shape[0]).sum(0)
    return (dx, dscale, dgate[0], sums[1]) if dgate else (dx, dscale, None, None)


def _common(x, scale, extra, bias, eps: float, config: Config):
    """The inputs that both kernels have first, their grid, and what they are specialised for."""
    dim, (rows, columns) = scale.shape[0], x.shape
    inputs: list[tuple[Any, pl.BlockSpec]] = [(x, _whole(x.shape)), (scale.reshape(1, dim), _whole((1, dim)))]
    inputs += [(a, _whole(x.shape)) for a in extra]
    if bias is not None:
        inputs.append((bias.reshape(1, columns), _whole((1, columns))))
    grid = (columns // dim, -(-rows // config.span))
    return inputs, grid, {"rows": rows, "dim": dim, "eps": eps, "config": config}


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))
