"""The product on Mosaic GPU, for Hopper.

One block runs on each multiprocessor and computes one tile of the output after another. A warpgroup of its three copies
operand tiles into a ring in shared memory, ahead of the two that multiply, also across the end of a tile; those hold
half of the rows each, and while the result leaves through shared memory the ring fills for the next tile.

16-bit operands are read as they are stored: the tensor cores take either axis first.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as backend
from pallas_kernels.gemm.config import TILE_BYTES, TILE_ROWS, MosaicConfig, padded_shape, parts_of
from pallas_kernels.gemm.triton import add_parts

NAME = "gemm_mosaic"
_COPIER = 2  # warpgroups 0 and 1 multiply
_OUT_ROWS = 64  # of a part of the result that leaves through one buffer
_OUT_SLOTS = 2  # such buffers of a warpgroup: one is filled while the other leaves
_STRIP = 8  # width of the strips of tiles walked in turn, so that blocks that run together share operands in L2
_INTERPRETED_BLOCKS = 2  # few, so that each has several tiles


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything about a launch that is not an array. `pieces` bfloat16 arrays add up to an operand: 1 or 3."""

    M: int
    N: int
    K: int
    transpose_a: bool
    transpose_b: bool
    pieces: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    has_bias: bool
    config: MosaicConfig
    more: int = 0  # stages of a second product, added to the first

    @property
    def parts(self) -> tuple[int, int]:
        """Parts of the contraction, and stages of each."""
        return parts_of(self.K, self.config.tile_k, self.config.split)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of the output along M and N, counted in clusters."""
        m, n = self.config.tiles(self.M, self.N)
        return m // (2 if self.config.cluster == "m" else 1), n // (2 if self.config.cluster == "n" else 1)

    @property
    def written(self) -> tuple[int, int]:
        """Shape of what the kernel writes: the output, or one part below the other, each of whole tiles of rows.

        Two of TMA's tiles along each axis at least. An axis of a single one is dropped from its descriptor, and what
        should be written behind the array, and be left out, is then written over what lies in it.
        """
        rows, cols = padded_shape((self.M, self.N), self.out_dtype.name)
        rows, cols = max(rows, 2 * TILE_ROWS), max(cols, 2 * self.out_cols)
        if self.parts[0] > 1:
            rows = self.parts[0] * self.config.tiles(self.M, self.N)[0] * self.config.tile_m
        return rows, cols

    @property
    def out_cols(self) -> int:
        return math.gcd(self.config.tile_n, TILE_BYTES // self.out_dtype.itemsize)

    @property
    def shared_bytes(self) -> int:
        c = self.config
        operands = c.stages * (c.tile_m + c.tile_n) * c.tile_k * self.pieces * self.dtype.itemsize
        return operands + 2 * _OUT_SLOTS * _OUT_ROWS * self.out_cols * self.out_dtype.itemsize


def matmul(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    *,
    transpose_a: bool,
    transpose_b: bool,
    precision: str,
    out_dtype: jnp.dtype,
    config: MosaicConfig,
    interpret: bool,
    more: tuple[jax.Array, jax.Array] | None = None,
    name: str = NAME,
) -> jax.Array:
    """op(a) op(b) + bias as [M, N] in out_dtype, op(x) = x or x^T; arguments as in `pallas_kernels.gemm.matmul`.

    more: operands of a second product of M and N, 16-bit ones, that is added before the sum is rounded.
    """
    K, M = a.shape if transpose_a else a.shape[::-1]
    N = b.shape[0] if transpose_b else b.shape[1]
    if precision == "tf32":
        # Of float32 operands the tensor cores want K along the rows. They cut bits off; a copy can as well be rounded.
        a, transpose_a = _tf32(a.T) if transpose_a else a, False
        b, transpose_b = b if transpose_b else _tf32(b.T), True
    dtype = jnp.dtype(jnp.bfloat16 if precision == "fp32" else a.dtype)
    row_bytes = min(TILE_BYTES, config.tile_k * dtype.itemsize)
    if not transpose_b:  # rows of its tiles are along N
        row_bytes = math.gcd(row_bytes, config.tile_n * dtype.itemsize)
    a, b = (_padded(x, dtype.name, row_bytes) for x in (a, b))
    a_pieces, b_pieces = (split(x) if precision == "fp32" else [x] for x in (a, b))
    whole = parts_of(K, config.tile_k, config.split)[0] == 1
    if more is not None and not (whole and precision == "16bit"):
        raise ValueError(f"a second product needs 16-bit operands and a whole contraction, got {precision!r}, {config}")
    call = _Call(
        M=M,
        N=N,
        K=K,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        pieces=len(a_pieces),
        dtype=dtype,
        out_dtype=jnp.dtype(out_dtype if whole else jnp.float32),
        has_bias=bias is not None and whole,
        config=config,
        more=0 if more is None else -(-more[0].shape[0 if transpose_a else 1] // config.tile_k),
    )
    if call.shared_bytes > backend.SHARED_BYTES:
        raise ValueError(f"{config} takes {call.shared_bytes} bytes of shared memory, of {backend.SHARED_BYTES}")
    inputs = [*a_pieces, *b_pieces]
    if bias is not None and whole:  # read in whole tiles, and without TMA, which would mind where it ends
        columns = config.tiles(M, N)[1] * config.tile_n
        inputs.append(jnp.pad(bias.astype(jnp.float32), (0, columns - N)))
    if more is not None:
        inputs += [_padded(x, dtype.name, row_bytes) for x in _whole_stages(*more, call)]

    def operand(rows, cols, transposed):
        shape = (cols, rows) if transposed else (rows, cols)
        return backend.tiles((config.stages * call.pieces, *shape), call.dtype, row_bytes)

    emptied = backend.barriers if config.cluster is None else backend.cluster_barriers
    scratch = {
        "a_tiles": operand(config.tile_m, config.tile_k, transpose_a),
        "b_tiles": operand(config.tile_k, config.tile_n, transpose_b),
        "out_tiles": backend.tiles(
            (2, _OUT_SLOTS, _OUT_ROWS, call.out_cols), call.out_dtype, call.out_cols * call.out_dtype.itemsize
        ),
        "filled": backend.barriers(config.stages, arrivals=2 * call.pieces),
        "emptied": emptied(config.stages, arrivals=2),
    }
    m_tiles, n_tiles = call.grid
    blocks = _INTERPRETED_BLOCKS * config.cluster_size if interpret else config.blocks
    out = backend.launch(
        functools.partial(_kernel, call=call),
        name,
        inputs,
        jax.ShapeDtypeStruct(call.written, call.out_dtype),
        scratch,
        programs=min(blocks // config.cluster_size, call.parts[0] * m_tiles * n_tiles),
        cluster=config.cluster_size,
        warpgroups=3,
        interpret=interpret,
    )
    if whole:
        return out[:M, :N]
    return add_parts(out.reshape(call.parts[0], -1, out.shape[1])[:, :M, :N], bias, out_dtype)


def split(x: jax.Array) -> list[jax.Array]:
    """float32 x as the sum of three bfloat16 arrays, exactly, by cutting bits off: rounding could reach inf. All of inf
    and NaN is in the first."""
    finite = jnp.abs(x) < jnp.inf
    rest = jnp.where(finite, x, 0.0)
    pieces = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(rest, jnp.uint32)
        pieces.append(lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16))
        rest = rest - lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    pieces[0] = jnp.where(finite, pieces[0], x.astype(jnp.bfloat16))
    return pieces


def _whole_stages(a: jax.Array, b: jax.Array, call: _Call) -> list[jax.Array]:
    """The operands of a second product, with zeros up to a whole number of stages."""
    K = call.more * call.config.tile_k

    def padded(x, axis):
        return jnp.pad(x, [(0, K - size if i == axis else 0) for i, size in enumerate(x.shape)])

    return [padded(a, 0 if call.transpose_a else 1), padded(b, 1 if call.transpose_b else 0)]


def _tf32(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def _padded(x: jax.Array, dtype: str, row_bytes: int) -> jax.Array:
    """x with zeros behind its rows and columns, in a shape of which TMA can copy tiles of `dtype`."""
    rows, cols = padded_shape(x.shape, dtype, row_bytes)
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, cols - x.shape[1])))


def _kernel(*refs, a_tiles, b_tiles, out_tiles, filled, emptied, call: _Call):
    config, pieces, (parts, steps) = call.config, call.pieces, call.parts
    a_refs, b_refs = refs[:pieces], refs[pieces : 2 * pieces]
    bias_ref = refs[2 * pieces] if call.has_bias else None
    more_a_ref, more_b_ref, out_ref = refs[-3:] if call.more else (None, None, refs[-1])
    m_tiles, n_tiles = call.grid
    me, programs = backend.program(), backend.programs()
    mine = lax.div(parts * m_tiles * n_tiles - me + programs - 1, programs)
    part_rows = call.written[0] // parts if parts > 1 else 0

    def corner(i):
        """Of this block's i-th tile: which part of the contraction it sums, its first row and column."""
        index = me + i * programs
        part = lax.div(index, m_tiles * n_tiles) if parts > 1 else 0
        m, n = backend.strip_order(index - part * m_tiles * n_tiles, m_tiles, n_tiles, _STRIP)
        if config.cluster == "m":
            m = 2 * m + backend.block()
        if config.cluster == "n":
            n = 2 * n + backend.block()
        return part, m * config.tile_m, n * config.tile_n

    def copy(a_ref, b_ref, rows, cols, ks, slot, piece):
        a = a_ref.at[(ks, rows) if call.transpose_a else (rows, ks)]
        b = b_ref.at[(cols, ks) if call.transpose_b else (ks, cols)]
        at = slot * pieces + piece
        backend.copy_in(a, a_tiles.at[at], filled.at[slot], shared=config.cluster == "n")
        backend.copy_in(b, b_tiles.at[at], filled.at[slot], shared=config.cluster == "m")

    @pl.when(backend.warpgroup() == _COPIER)
    def _copy():
        backend.become_copier()

        def tile(i, done):
            part, row, col = corner(i)
            rows, cols = pl.ds(row, config.tile_m), pl.ds(col, config.tile_n)

            def step(k, done):
                slot = lax.rem(done, config.stages)
                ks = pl.ds((part * steps + k) * config.tile_k, config.tile_k)
                pl.when(done >= config.stages)(lambda: backend.wait(emptied.at[slot]))
                for piece in range(pieces):
                    copy(a_refs[piece], b_refs[piece], rows, cols, ks, slot, piece)
                return done + 1

            def step_of_more(k, done):
                slot, ks = lax.rem(done, config.stages), pl.ds(k * config.tile_k, config.tile_k)
                pl.when(done >= config.stages)(lambda: backend.wait(emptied.at[slot]))
                copy(more_a_ref, more_b_ref, rows, cols, ks, slot, 0)
                return done + 1

            done = lax.fori_loop(0, steps, step, done)
            return lax.fori_loop(0, call.more, step_of_more, done) if call.more else done

        done = lax.fori_loop(0, mine, tile, jnp.int32(0))

        # A block must not end while another may still arrive at its barriers.
        def drain(i, _):
            backend.wait(emptied.at[lax.rem(i, config.stages)])

        lax.fori_loop(jnp.maximum(done - config.stages, 0), done, drain, None)

    @pl.when(backend.warpgroup() != _COPIER)
    def _multiply():
        backend.become_multiplier()
        me = backend.warpgroup()
        height = config.tile_m // 2
        half = pl.ds(me * height, height)

        def operands(slot, piece_a, piece_b):
            a, b = a_tiles.at[slot * pieces + piece_a], b_tiles.at[slot * pieces + piece_b]
            a = a.at[:, half].transpose((1, 0)) if call.transpose_a else a.at[half]
            return a, b.transpose((1, 0)) if call.transpose_b else b

        def walk(first, number, multiply):
            """Multiplies `number` stages from `first`, counted since the start, on."""

            def step(k, _):
                slot = lax.rem(first + k, config.stages)
                backend.wait(filled.at[slot])
                multiply(slot)
                backend.wait_products()
                backend.arrive(emptied.at[slot])

            lax.fori_loop(0, number, step, None)

        def plain(first):
            def body(total):
                walk(first, steps + call.more, lambda slot: backend.multiply(total, *operands(slot, 0, 0)))
                return total[...]

            return backend.accumulate(body, (height, config.tile_n))

        def exact(first):
            shape = (height, config.tile_n)

            def fold(f, total):
                start, number = first + f * config.fold, jnp.minimum(config.fold, steps - f * config.fold)

                def body(lead, rest):
                    def multiply(slot):
                        for piece_a, piece_b in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1)):
                            backend.multiply(rest, *operands(slot, piece_a, piece_b))
                        backend.multiply(lead, *operands(slot, 0, 0))

                    walk(start, number, multiply)
                    return lead[...], rest[...]

                lead, rest = backend.accumulate(body, shape, shape)
                # Where an operand is inf the other products multiply it by pieces that are zero.
                return total + jnp.where(jnp.abs(lead) < jnp.inf, lead + rest, lead)

            return lax.fori_loop(0, -(-steps // config.fold), fold, backend.zeros(shape))

        def tile(i, first):
            part, row, col = corner(i)
            total = exact(first) if pieces > 1 else plain(first)
            if bias_ref is not None:
                total += backend.load_row(bias_ref.at[pl.ds(col, config.tile_n)], total.shape)
            total = total.astype(call.out_dtype)
            row += part * part_rows
            cuts = [(m, n) for m in range(0, height, _OUT_ROWS) for n in range(0, config.tile_n, call.out_cols)]
            for index, (m, n) in enumerate(cuts):
                backend.copy_out(
                    total[m : m + _OUT_ROWS, n : n + call.out_cols],
                    out_tiles.at[me, index % _OUT_SLOTS],
                    out_ref.at[pl.ds(row + me * height + m, _OUT_ROWS), pl.ds(col + n, call.out_cols)],
                    unread=_OUT_SLOTS - 1 if index or len(cuts) % _OUT_SLOTS == 0 else 0,
                )
            return first + (steps + call.more)

        lax.fori_loop(0, mine, tile, jnp.int32(0))
        backend.finish_copies_out()
