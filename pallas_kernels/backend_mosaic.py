"""The only file that knows how Pallas's Mosaic GPU backend spells things.

A "thread" of this backend is a warpgroup of 128. Operands of the tensor cores lie in shared memory in tiles of eight
rows, swizzled; copies by the tensor memory accelerator (TMA) lay them out so, fill what lies outside of an array with
zeros, and write nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

# Registers a thread, of 65536 a multiprocessor: warpgroups that only copy leave theirs to two that multiply.
_COPY_REGISTERS = 40
_MULTIPLY_REGISTERS = 232

# Shared memory that a block can have on Hopper, and what is kept of it for barriers.
SHARED_BYTES = 232448 - 1024


def launch(
    body: Callable[..., None],
    name: str,
    inputs: Sequence[jax.Array],
    output: Any,
    scratch: Mapping[str, Any],
    *,
    programs: int,
    cluster: int,
    warpgroups: int,
    interpret: bool,
    automatic_barriers: bool = True,
) -> Any:
    """Launches `body(*input refs, *output refs, **scratch refs)` as `programs` clusters of `cluster` blocks.

    output: a `jax.ShapeDtypeStruct`, or a list of them; what is returned is likewise.

    automatic_barriers: whether every store to shared memory is between two barriers of the warpgroup. Without them, a
    `commit` has to stand between what one warp writes and another reads, and between a read and a later write.

    `program()`, `block()` and `warpgroup()` say which one runs. Every element of the output must be written.
    """
    kernel = plgpu.kernel(
        body,
        out_type=output,
        scratch_types=dict(scratch),
        grid=(programs,),
        grid_names=("program",),
        cluster=(cluster,),
        cluster_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=not automatic_barriers,
        ),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    with jax.enable_x64(False):  # under it a kernel's own numbers would be 64-bit ones
        return kernel(*inputs)


def program() -> jax.Array:
    """Which cluster of the launch this is."""
    return lax.axis_index("program")


def programs() -> int:
    return lax.axis_size("program")


def block() -> jax.Array:
    """Which block of its cluster this is."""
    return lax.axis_index("block")


def warpgroup() -> jax.Array:
    """Which warpgroup of its block this is."""
    return lax.axis_index("warpgroup")


# Scratch


def tiles(shape: tuple[int, ...], dtype: Any, row_bytes: int = 128) -> Any:
    """Shared memory for arrays [..., rows, columns] that TMA fills or empties and the tensor cores read.

    row_bytes: what of a row is contiguous, 32, 64 or 128 bytes that divide it; the operands of a product have the same.
    """
    width = row_bytes // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(row_bytes))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def rows(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for plain arrays, rows of numbers that are no operands."""
    return plgpu.SMEM(shape, dtype)


def one_of(*scratch: Any) -> Any:
    """Shared memory that is one of these at a time: a body gets a ref to each. What is written through one must not be
    read through another."""
    return plgpu.RefUnion(*scratch)


def barriers(number: int | None, arrivals: int) -> Any:
    """Barriers of this block's warpgroups and copies, each complete after so many arrivals; None: one, not an array."""
    if number is None:
        return plgpu.Barrier(num_arrivals=arrivals)
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)


def cluster_barriers(number: int, arrivals: int) -> Any:
    """Barriers at which the warpgroups of every block of the cluster arrive, `arrivals` of each block."""
    return plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=arrivals, num_barriers=number)


wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive


# Copies


def copy_in(source: Any, target: Any, barrier: Any, *, shared: bool = False) -> None:
    """Starts a copy from device to shared memory that arrives at `barrier`.

    shared: every block of the cluster gets the same tile, and copies a part of it to all.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=("block",) if shared else None)


def copy_out(value: jax.Array, buffer: Any, target: Any, *, unread: int) -> None:
    """Stores `value` to device memory through `buffer`, once at most `unread` earlier copies have yet to be read out
    of their buffers."""
    plgpu.wait_smem_to_gmem(unread, wait_read_only=True)
    buffer[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def await_buffers(unread: int) -> None:
    """Waits until at most `unread` earlier copies of this warpgroup have yet to be read out of their buffers."""
    plgpu.wait_smem_to_gmem(unread, wait_read_only=True)


def commit() -> None:
    """Shows this warpgroup's stores to shared memory to the tensor cores and copies that follow."""
    plgpu.commit_smem()


def whole_tiles(shape: Sequence[int], axis: int, tile: int) -> tuple[int, ...]:
    """`shape` with an axis made up to whole tiles.

    For outputs that buffers of `rows` are copied to in tiles that are contiguous there: such a copy ends at the end of
    the array, but not at that of an axis, and would go on in what comes next.
    """
    return tuple(-(-n // tile) * tile if i == axis else n for i, n in enumerate(shape))


def copy_buffers_out(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Starts copies of whole buffers, (buffer, target) each, to device memory, after the stores to them."""
    plgpu.commit_smem()
    for buffer, target in pairs:
        plgpu.copy_smem_to_gmem(buffer, target)


def copy_row_out(row: Any, target: Any) -> None:
    """Starts a copy of a plain 1D buffer, after `commit`, to device memory."""
    plgpu.copy_smem_to_gmem(row, target)


def finish_copies_out() -> None:
    """Waits until the buffers of this warpgroup's copies can be given up."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# Products


def become_copier() -> None:
    plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")


def become_multiplier() -> None:
    plgpu.set_max_registers(_MULTIPLY_REGISTERS, action="increase")


def accumulate(body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """`body` of float32 accumulators of these shapes, zero at first. What it reads of them waits for the products."""
    return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def accumulators(body: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """As `accumulate`, with a scope for each, as interpret mode needs them when products take registers."""
    if not shapes:
        return body()
    *rest, last = shapes
    scope = plgpu.ACC(last, jnp.float32)
    return pl.run_scoped(lambda total: accumulators(lambda *others: body(*others, total), *rest), scope)


def read(total: Any, *, running: int = 0) -> jax.Array:
    """An accumulator's value, once at most `running` of this warpgroup's products are unfinished."""
    return plgpu.wgmma_accumulator_load(total, wait_n=running)


def start_from(total: Any, value: jax.Array, interpret: bool) -> None:
    """Starts an accumulator from `value`. Interpret mode cannot: there `read_from` adds it."""
    if not interpret:
        total[...] = value


def read_from(total: Any, value: jax.Array, interpret: bool) -> jax.Array:
    """`read` of an accumulator that `start_from` started."""
    return read(total) + value if interpret else read(total)


def settled(value: jax.Array) -> jax.Array:
    """An accumulator's value that the compiler may not use before the wait it came from: where it does, products run
    one by one."""
    return lax.optimization_barrier(value)


def transpose(ref: Any) -> Any:
    """A tile in shared memory, seen with rows and columns exchanged."""
    return ref.transpose((1, 0))


def load(ref: Any) -> jax.Array:
    """A tile in shared or device memory, spread over the registers as accumulators are."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def load_transposed(ref: Any) -> jax.Array:
    """A tile [n, m] in shared memory as a value [m, n], spread over the registers as accumulators are."""
    value = plgpu.load(transpose(ref), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(value, plgpu.Layout.WGMMA)


def indices(shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a value that is spread over the registers as accumulators are."""
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
    return rows, columns


def row_zeros(n: int) -> jax.Array:
    """float32 zeros [n], laid out as a sum over rows is."""
    return plgpu.layout_cast(jnp.zeros((n,), jnp.float32), plgpu.Layout.WGMMA.reduce(0))


def column(n: int, value: float) -> jax.Array:
    """float32 [n], all of one value, laid out as a sum over columns is."""
    return plgpu.layout_cast(jnp.full((n,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_column(ref: Any) -> jax.Array:
    """A 1D ref, laid out as a sum over columns is."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def spread_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """vector [m], such as a sum over columns, in every column of a value [m, n]."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def spread_columns(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """vector [n], such as a sum over rows, in every row of a value [m, n]."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def store_transposed(ref: Any, value: jax.Array) -> None:
    """Stores a value [m, n], spread as accumulators are, to a tile [n, m] in shared memory."""
    transpose(ref)[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def multiply(total: Any, a: Any, b: Any) -> None:
    """Starts total += a b on the tensor cores, with a [64 m, k] and b [k, n <= 256] in shared memory: 16-bit, or
    float32 that is read as TF32 and has k along its rows in memory."""
    plgpu.wgmma(total, a, b)


def wait_products() -> None:
    """Waits for the products that this warpgroup has started."""
    plgpu.wgmma_wait(0)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """float32 zeros, spread over the registers as accumulators are."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def load_line(ref: Any) -> jax.Array:
    """A 1D ref, laid out as a sum over rows is."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def load_row(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """A 1D ref as every row of an array of this shape."""
    return lax.broadcast_in_dim(load_line(ref), shape, (1,))


def invert_blocks(blocks: jax.Array, interpret: bool) -> jax.Array:
    """(I + A)^-1 for four strictly lower matrices A [16, 16] one below the other: float32 [64, 16], spread over the
    registers as accumulators are. Every warp has one, and takes it by forward substitution, M_i = e_i - sum_j A_ij M_j.

    Interpret mode, which knows no warps, does the same on whole arrays.
    """
    if interpret:
        a = blocks.reshape(4, 16, 16)
        found = jnp.broadcast_to(jnp.eye(16), a.shape)
        for j in range(15):
            found = found - a[:, :, j, None] * found[:, j, None, :]
        return found.reshape(blocks.shape)
    layout = plgpu.Layout.WGMMA
    return plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(blocks.shape, blocks.dtype, layout=layout)
    )(_substitute)(blocks)


def _substitution() -> str:
    """The instructions of `invert_blocks`, M in operands 0 to 7 from A in 8 to 15, both in this order: columns from 0
    or 8, rows from 0 or 8, column. Lane l has rows l / 4 and 8 more, columns 2 (l % 4) and 1 more."""
    M, A = (
        {(t, h, e): f"${first + 4 * t + 2 * h + e}" for t in (0, 1) for h in (0, 1) for e in (0, 1)} for first in (0, 8)
    )
    lines = [
        "{ .reg .b32 lane, row, quad, first, from; .reg .f32 a0, a1, m; .reg .pred p;",
        "mov.u32 lane, %laneid; shr.u32 row, lane, 2; and.b32 quad, lane, 3; and.b32 first, lane, 28;",
    ]
    for (t, h, e), m in M.items():
        if t == h:
            lines += [f"shl.b32 from, quad, 1; add.u32 from, from, {e}; setp.eq.u32 p, from, row;"]
            lines += [f"selp.f32 {m}, 0f3F800000, 0f00000000, p;"]
        else:
            lines += [f"mov.f32 {m}, 0f00000000;"]
    for j in range(15):
        half, place = divmod(j, 8)
        halves = (0, 1) if j < 7 else (1,)  # Of the rows: those with a row below j.
        lines += [f"add.u32 from, first, {place // 2};"]
        for h in halves:
            lines += [f"shfl.sync.idx.b32 a{h}, {A[half, h, place % 2]}, from, 31, -1; neg.f32 a{h}, a{h};"]
        lines += [f"add.u32 from, quad, {4 * place};"]
        for t in range(half + 1):
            for e in (0, 1):
                lines += [f"shfl.sync.idx.b32 m, {M[t, half, e]}, from, 31, -1;"]
                lines += [f"fma.rn.f32 {M[t, h, e]}, a{h}, m, {M[t, h, e]};" for h in halves]
    return "\n".join([*lines, "}"])


def _substitute(_, blocks):
    f32 = ir.F32Type.get()
    pairs = blocks.registers
    assert pairs.size == 4, pairs.shape
    numbers = [
        vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
        for pair in pairs.flatten()
        for e in (0, 1)
    ]
    found = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 8),
        numbers,
        _substitution(),
        ",".join(["=&f"] * 8 + ["f"] * 8),
        has_side_effects=True,
    )
    found = [llvm.extractvalue(f32, found, [i]) for i in range(8)]
    made = np.empty(4, np.dtype(object))
    for i in range(4):
        made[i] = vector.from_elements(ir.VectorType.get((2,), f32), found[2 * i : 2 * i + 2])
    return mosaic_gpu.FragmentedArray(_registers=made.reshape(pairs.shape), _layout=blocks.layout, _is_signed=None)


def strip_order(index: jax.Array, m_tiles: int, n_tiles: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The tile (m, n) that comes at `index`, walking strips `width` tiles wide along n to and fro."""
    return plgpu.planar_snake(index, (m_tiles, n_tiles), 1, width)
