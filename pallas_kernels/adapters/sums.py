"""Sums of what programs left, one part each: all of a call in one launch, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as backend

NAME = "adapter_add_parts"
_ELEMENTS = 2048  # that a program reads at a time
_MOST_PARTS = 32  # at a time


def add_parts(
    parts: Sequence[jax.Array], scales: Sequence[float], dtypes: Sequence[jnp.dtype], *, interpret: bool
) -> list[jax.Array]:
    """The sum over the first axis of each array, times the scale and in the dtype beside it."""
    flat = [x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in parts]
    rows = [min(_MOST_PARTS, backend.ceil_pow2(x.shape[0])) for x in flat]
    programs = [-(-x.shape[1] // (_ELEMENTS // r)) for x, r in zip(flat, rows, strict=True)]
    outs = [jax.ShapeDtypeStruct((1, x.shape[1]), dtype) for x, dtype in zip(flat, dtypes, strict=True)]
    found = backend.launch(
        _kernel,
        NAME,
        (sum(programs),),
        [(x, pl.BlockSpec(x.shape, lambda i: (0, 0))) for x in flat],
        [(x, pl.BlockSpec(x.shape, lambda i: (0, 0))) for x in outs],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        shapes=tuple(x.shape for x in flat),
        rows=tuple(rows),
        programs=tuple(programs),
        scales=tuple(scales),
    )
    return [x.reshape(part.shape[1:]) for x, part in zip(found, parts, strict=True)]


def _kernel(*refs, shapes, rows, programs, scales, interpret):
    own, first = pl.program_id(0), 0
    for index, (length, size) in enumerate(shapes):
        height, number = rows[index], programs[index]

        @pl.when((own >= first) & (own < first + number))
        def _(index=index, first=first, length=length, size=size, height=height, width=_ELEMENTS // height):
            cols = ((own - first) * width, width, size if size % width else None)

            def step(i, total):
                there = (i * height, height, length if length % height else None)
                return total + jnp.sum(backend.load_tile(refs[index], there, cols), axis=0, keepdims=True)

            total = lax.fori_loop(0, -(-length // height), step, jnp.zeros((1, width), jnp.float32))
            backend.store_tile(refs[len(shapes) + index], (0, 1, None), cols, scales[index] * total)

        first += number
