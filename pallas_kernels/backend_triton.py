"""The only file that knows how Pallas's Triton backend spells things.

Every kernel of this backend goes through these few functions, so that a precision is always named, a tile that sticks
out of its
array is always masked (the backend checks no bounds), and interpret mode runs the same kernel body on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltr

LOG2_E = 1.4426950408889634
PRECISIONS = ("fp32", "tf32", "16bit")

# The tensor cores' 16-bit products contract 16 values at a time; the backend is silently wrong below that.
MIN_CONTRACTION = 16

_PRESETS = {
    ("fp32", "float32"): lax.DotAlgorithmPreset.BF16_BF16_F32,
    ("tf32", "float32"): lax.DotAlgorithmPreset.TF32_TF32_F32,
    ("ieee", "float32"): lax.DotAlgorithmPreset.F32_F32_F32,
    ("16bit", "bfloat16"): lax.DotAlgorithmPreset.BF16_BF16_F32,
    ("16bit", "float16"): lax.DotAlgorithmPreset.F16_F16_F32,
}


@dataclasses.dataclass(frozen=True)
class Dot:
    """Matrix products of one named precision, with float32 accumulation.

    Attributes:
      precision: "fp32" (three TF32 passes, float32-accurate), "tf32" (one pass), "ieee" (CUDA cores) or "16bit".
      interpret: whether the kernel runs in interpret mode, where every product is a float32 product of the rounded
      operands.
    """

    precision: str
    interpret: bool

    def __call__(self, a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
        """`a` times `b` in float32, contracting axis contract[0] of `a` with contract[1] of `b`."""
        size = a.shape[contract[0]]
        if size < MIN_CONTRACTION:
            raise ValueError(f"dot: the contraction must be at least {MIN_CONTRACTION} long, got {size}")
        key = (self.precision, str(a.dtype))
        if key not in _PRESETS or a.dtype != b.dtype:
            raise ValueError(f"dot: precision {self.precision!r} does not take operands {a.dtype} and {b.dtype}")
        preset: Any = _PRESETS[key]
        dims = (((contract[0],), (contract[1],)), ((), ()))

        def product(a, b):
            return lax.dot_general(a, b, dims, precision=preset, preferred_element_type=jnp.float32)

        if self.interpret:
            a, b, preset = a.astype(jnp.float32), b.astype(jnp.float32), lax.Precision.HIGHEST
        elif self.precision == "fp32":
            # Six products of bfloat16 pieces, the smallest first: as accurate as three TF32 passes and as many
            # tensor-core
            # instructions, but pieces take half the room and need no rounding, on which the backend spends a dozen
            # instructions.
            (a0, a1, a2), (b0, b1, b2) = pieces(a), pieces(b)
            small = product(a2, b0) + product(a1, b1) + product(a0, b2)
            return small + product(a1, b0) + product(a0, b1) + product(a0, b0)
        return product(a, b)


def pieces(x: jax.Array) -> list[jax.Array]:
    """float32 x as a sum of three bfloat16 numbers, exactly: eight bits of the significand each, cut off rather than
    rounded, by integer instructions, where a conversion would take the slow special-function unit."""
    found = []
    for last in (False, False, True):
        bits = lax.bitcast_convert_type(x, jnp.int32)
        found.append(lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16))
        if not last:
            x = x - lax.bitcast_convert_type(bits & jnp.int32(-(1 << 16)), jnp.float32)
    return found


def ceil_pow2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def load_tile(ref, rows: tuple[Any, int, Any], cols: tuple[Any, int, Any]) -> jax.Array:
    """Loads a 2D tile, with zeros outside the array.

    Args:
      ref: a 2D ref.
      rows: (first row, number of rows, limit). limit: rows of the array, or None where the tile cannot stick out; or,
        of a part of the array, the pair of its first row and the one after its last.
      cols: the same for columns.
    """
    mask = inside(rows, cols)
    view = ref.at[_span(rows), _span(cols)]
    return pltr.load(view) if mask is None else pltr.load(view, mask=mask, other=0.0)


def store_tile(ref, rows: tuple[Any, int, Any], cols: tuple[Any, int, Any], value: jax.Array) -> None:
    """Stores a 2D tile, leaving out what lies outside the array. Arguments as in `load_tile`."""
    pltr.store(ref.at[_span(rows), _span(cols)], value.astype(ref.dtype), mask=inside(rows, cols))


def gather_tile(ref, rows: jax.Array, cols: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Loads ref[rows, cols] for integer arrays that broadcast together, with zeros where mask is false."""
    shape = jnp.broadcast_shapes(rows.shape, cols.shape)
    view = ref.at[jnp.broadcast_to(rows, shape), jnp.broadcast_to(cols, shape)]
    if mask is None:
        return pltr.load(view)
    return pltr.load(view, mask=jnp.broadcast_to(mask, shape), other=0.0)


def scatter_tile(ref, rows: jax.Array, cols: jax.Array, value: jax.Array) -> None:
    """Stores value as ref[rows, cols]. Arguments as in `gather_tile`."""
    view = ref.at[jnp.broadcast_to(rows, value.shape), jnp.broadcast_to(cols, value.shape)]
    pltr.store(view, value.astype(ref.dtype))


def exp(x: jax.Array, interpret: bool) -> jax.Array:
    """exp(x) in float32, to 2^-22 relative, 0 below the smallest normal number.

    One multiplication and one special-function instruction: the backend's own exp spends ten more on ranges that do
    not occur.
    """
    return exp2(x * LOG2_E, interpret)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2^x in float32, as exact as `exp`, by one special-function instruction."""
    if interpret:
        return jnp.exp2(x)
    return pltr.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]


def fma(a: jax.Array, b: Any, c: Any, interpret: bool) -> jax.Array:
    """a * b + c in float32 by one instruction, which the backend does not make of a product and a sum."""
    if interpret:
        return a * b + c
    return pltr.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, *(jnp.broadcast_to(jnp.asarray(x, jnp.float32), a.shape) for x in (b, c))],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )[0]


def reciprocal(x: jax.Array, interpret: bool) -> jax.Array:
    """1 / x in float32, to 2^-23 relative, by one special-function instruction; 0 for infinite x."""
    if interpret:
        return 1.0 / x
    return pltr.elementwise_inline_asm(
        "rcp.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]


def barrier(interpret: bool) -> None:
    """Makes a program's earlier stores visible to its later loads, whichever of its threads made them."""
    if not interpret:
        pltr.debug_barrier()


def _span(axis):
    """The slice of (first, number, size). JAX refuses a slice that it can see to stick out, masked or not, so `first`
    is an array, which it does not look into; of one type, as interpret mode wants it under x64."""
    return pl.ds(jnp.asarray(axis[0], jnp.int32), axis[1])


def inside(rows: tuple[Any, int, Any], cols: tuple[Any, int, Any]) -> jax.Array | None:
    """Where a tile lies inside its array; None where it cannot stick out. Arguments as in `load_tile`."""
    mask = None
    if rows[2] is not None:
        mask = jnp.broadcast_to(_within(*rows)[:, None], (rows[1], cols[1]))
    if cols[2] is not None:
        in_cols = jnp.broadcast_to(_within(*cols)[None, :], (rows[1], cols[1]))
        mask = in_cols if mask is None else mask & in_cols
    return mask


def _within(start: Any, size: int, limit: Any) -> jax.Array:
    index = start + jnp.arange(size)
    return (limit[0] <= index) & (index < limit[1]) if isinstance(limit, tuple) else index < limit


def launch(
    body: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    *,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
    **static: Any,
) -> list[jax.Array]:
    """Launches `body(*input refs, *output refs, interpret=, **static)` over `grid` (first axis fastest).

    The kernel's name in profiles and in the jaxpr is `name`. Every element of every output must be written by the body.
    aliases: index of an input -> index of the output that takes its memory; a program may read of that input only what
    no other program writes.
    """
    kernel = functools.partial(body, interpret=interpret, **static)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltr.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )(*[array for array, _ in inputs])
