"""The serial kernels for Hopper, on Pallas's Mosaic GPU backend: inputs and results of `kda_state` and `kda_state_bwd`,
with 64 rows of S^T (or dS^T), [64, bk], in the registers of one warpgroup.

The value dimension gives the rows of every product, so that neither the state nor U passes through shared memory: the
accumulator of one product is, rounded, the left operand of the next. A second warpgroup does nothing but start the
copies of chunks to come.

Float32-accurate products are six of bfloat16 pieces: `kda_prepare` keeps its tiles in three, one below the other, and
the state is cut into three here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_mosaic as bm
from pallas_kernels.kda.config import KdaConfig
from pallas_kernels.kda.mosaic_packing import Span, row_scratch
from pallas_kernels.kda.sizes import Packing, Sizes

ROWS = 64  # Of S^T in a program: the rows of one product of the tensor cores.
BUFFERS = 2  # Chunks whose results are on their way out.


@dataclasses.dataclass(frozen=True)
class _Read:
    """A tile that every chunk brings: the array's number among the inputs, and how products read its rows.

    where: of "rows" (the program's 64 rows of the value dimension), "tokens" ([B, T, HV, V], the chunk's tokens and the
    program's columns) or "" (the whole tile of the chunk).
    """

    array: int
    shape: tuple[int, ...]
    row_bytes: int = 0  # 0: not an operand.
    where: str = ""


def _walk(
    *refs, sizes: Sizes, op, reads: dict[str, _Read], writes: dict[str, str], step: Callable, inputs: int,
    stages: int, start: bool, final: bool, backwards: bool, interpret: bool, **scratch: Any,
):  # fmt: skip
    """state = step(tiles, write, operand, state), chunk after chunk of a sequence, from the last input (if start) or
    zeros to the first output (if final). The other outputs are those of `writes`. Of packed sequences the first input
    is `Packing.bounds`."""
    sources, results = list(refs[:inputs]), list(refs[inputs:])
    bounds = sources.pop(0) if sizes.packed else None
    final_ref = results.pop(0) if final else None
    tiles = sizes.bv // ROWS
    of_state, rows = lax.div(bm.program(), tiles), pl.ds(lax.rem(bm.program(), tiles) * ROWS, ROWS)
    full, empty = scratch["full"], scratch["empty"]
    if bounds is None:
        head, begin, chunks = of_state, None, sizes.nt
    else:
        sequence, head = lax.div(of_state, sizes.HV), lax.rem(of_state, sizes.HV)
        begin, chunks = bounds[sequence, 0], bounds[sequence + 1, 0] - bounds[sequence, 0]
        own = bounds[sequence, 1], bounds[sequence + 1, 1]
        tile_of_begin = lax.div(own[0], sizes.C)

    def place(where: str, n):
        if where == "tokens":
            if sizes.packed:
                return (0, span(n).tokens, head, rows)
            return (lax.div(head, sizes.HV), span(n).tokens, lax.rem(head, sizes.HV), rows)
        return {"": (head, n), "rows": (head, n, rows), "columns": (head, n, slice(None), rows)}[where]

    def chunk(s):
        n = chunks - 1 - s if backwards else s
        return n if begin is None else begin + n

    def span(n):
        if begin is None:
            return Span(sizes, n * sizes.C)
        start = (tile_of_begin + n - begin) * sizes.C
        return Span(sizes, start, (jnp.maximum(own[0], start), jnp.minimum(own[1], start + sizes.C)))

    def operand(value, piece=0):
        """A left operand: the registers themselves, which interpret mode takes from memory alone."""
        if not interpret:
            return value
        ref = scratch[f"left_{value.shape[1]}"].at[piece]
        ref[...] = value
        return ref

    @pl.when(bm.warpgroup() == 0)
    def _():
        bm.become_multiplier()

        def visit(s, state):
            slot, buffer = lax.rem(s, stages), lax.rem(s, BUFFERS)
            buffers = {name: scratch[f"out_{name}"].at[buffer] for name in writes}
            bm.await_buffers(len(writes) * (BUFFERS - 1))
            bm.wait(full.at[slot])

            def write(name, value, *, transposed=False):
                if transposed:
                    bm.store_transposed(buffers[name], value)
                else:
                    buffers[name][...] = value

            tiles_of_chunk = {name: scratch[name].at[slot] for name in reads}
            if sizes.packed:
                span(chunk(s)).keep(*(tiles_of_chunk[name] for name, x in reads.items() if x.where == "tokens"))
            state = step(tiles_of_chunk, write, operand, state)
            bm.arrive(empty.at[slot])
            n = chunk(s)
            of_tokens, others = [], []
            for name, ref in zip(writes, results, strict=True):
                target = buffers[name], ref.at[place(writes[name], n)]
                if writes[name] == "tokens":
                    of_tokens.append((*target, lambda token, ref=ref: ref.at[0, token, head, rows]))
                else:
                    others.append(target)
            span(n).copy_out(of_tokens, others, scratch.get("row_tile"))
            return state

        state = bm.load(sources[-1].at[of_state, rows]) if start else bm.zeros((ROWS, sizes.bk))
        state = lax.fori_loop(0, chunks, visit, state)
        if final_ref is not None:
            final_ref.at[of_state, rows][...] = state
        bm.finish_copies_out()

    @pl.when(bm.warpgroup() == 1)
    def _():
        bm.become_copier()

        @pl.loop(0, chunks)
        def _(s):
            slot = lax.rem(s, stages)

            @pl.when(s >= stages)
            def _():
                bm.wait(empty.at[slot])

            for name, x in reads.items():
                where = place(x.where, chunk(s)) if len(x.shape) == 2 else (head, chunk(s), 0)
                bm.copy_in(sources[x.array].at[where], scratch[name].at[slot], full.at[slot])

        # No barrier may be given up before all have seen it.
        if sizes.packed:

            @pl.loop(jnp.maximum(0, chunks - stages), chunks)
            def _(s):
                bm.wait(empty.at[lax.rem(s, stages)])
        else:
            for s in range(max(0, sizes.nt - stages), sizes.nt):
                bm.wait(empty.at[s % stages])


def _forward_step(tile, write, operand, S, *, op, with_output: bool, save: bool, interpret: bool):
    So = S.astype(op)
    # Before the products: registers that one product has written may not change while another runs.
    decayed = S * bm.load_row(tile["decay"], S.shape)
    left = operand(So)

    def products(u, o, s):
        bm.multiply(u, left, bm.transpose(tile["W"]))
        if with_output:
            bm.multiply(o, left, bm.transpose(tile["Qhat"]))
        if save:
            write("S", So)  # Stores hide behind the products.
        y = bm.load(tile["Y"]).astype(jnp.float32)
        U = (y - bm.read(u, running=int(with_output))).astype(op)
        right = operand(U)
        bm.start_from(s, decayed, interpret)
        bm.multiply(s, right, tile["Ktil"])
        if with_output:
            bm.multiply(o, right, bm.transpose(tile["P"]))
        if save:
            write("U", U, transposed=True)
        S = bm.read_from(s, decayed, interpret)
        if with_output:
            write("o", bm.read(o).astype(op), transposed=True)
        return S

    small = (ROWS, tile["Ktil"].shape[0])
    return bm.accumulators(products, small, small, S.shape)


def _backward_step(tile, write, operand, dS, *, op, interpret: bool):
    dSo = dS.astype(op)
    decayed = dS * bm.load_row(tile["decay"], dS.shape)
    left = operand(dSo)

    def products(u, s):
        bm.start_from(s, decayed, interpret)
        bm.multiply(u, bm.transpose(tile["do"]), tile["P"])
        bm.multiply(u, left, bm.transpose(tile["Ktil"]))
        bm.multiply(s, bm.transpose(tile["do"]), tile["Qhat"])
        write("dS", dSo)  # Stores hide behind the products.
        dU = bm.read(u, running=1)
        bm.multiply(s, operand((-dU).astype(op)), tile["W"])
        write("dU", dU.astype(op), transposed=True)
        return bm.read_from(s, decayed, interpret)

    return bm.accumulators(products, (ROWS, tile["Ktil"].shape[0]), dS.shape)


# Of pieces of two operands, those whose products count, the smallest first.
_PAIRS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


def _pieces(value: jax.Array, operand: Callable) -> list[Any]:
    """Left operands that add up to a float32 value exactly. Bits are cut off as those of an integer: a conversion there
    and back would take a slow instruction for every number."""
    found = []
    for i in range(3):
        if i < 2:
            bits = lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-1 << 16)
            piece = lax.bitcast_convert_type(bits, jnp.float32)
        else:
            piece = value
        found.append(operand(piece.astype(jnp.bfloat16), i))
        value = value - piece
    return found


def _multiply_pieces(total: Any, left: list[Any], tile: Any, rows: int, *, transposed: bool) -> int:
    """Starts total += left tile, or tile^T; returns how many products that are."""
    for i, j in _PAIRS:
        right = tile.at[pl.ds(j * rows, rows)]
        bm.multiply(total, left[i], bm.transpose(right) if transposed else right)
    return len(_PAIRS)


def _exact_forward_step(tile, write, operand, S, *, op, with_output: bool, save: bool, interpret: bool):
    C = tile["Y"].shape[1]
    multiply = functools.partial(_multiply_pieces, rows=C)
    # The tensor cores cut sums off: what a chunk adds to the state is summed apart, and added in float32.
    decayed = S * bm.load_row(tile["decay"], S.shape)
    left = _pieces(S, operand)

    def products(u, o, s):
        multiply(u, left, tile["W"], transposed=True)
        running = multiply(o, left, tile["Qhat"], transposed=True) if with_output else 0
        if save:
            write("S", S)
        U = bm.load(tile["Y"]) - bm.read(u, running=running)
        right = _pieces(U, operand)
        multiply(s, right, tile["Ktil"], transposed=False)
        running = multiply(o, right, tile["P"], transposed=True) if with_output else 0
        if save:
            write("U", U, transposed=True)
        added = bm.settled(bm.read(s, running=running))
        if with_output:
            write("o", bm.read(o), transposed=True)
        return decayed + added

    return bm.accumulators(products, (ROWS, C), (ROWS, C), S.shape)


def _exact_backward_step(tile, write, operand, dS, *, op, interpret: bool):
    C = tile["do"].shape[0]
    multiply = functools.partial(_multiply_pieces, rows=C)
    decayed = dS * bm.load_row(tile["decay"], dS.shape)
    left, do = _pieces(dS, operand), _pieces(bm.load_transposed(tile["do"]), lambda x, i: operand(x, 3 + i))

    def products(u, s):
        multiply(u, do, tile["P"], transposed=False)
        multiply(u, left, tile["Ktil"], transposed=True)
        running = multiply(s, do, tile["Qhat"], transposed=False)
        write("dS", dS)
        dU = bm.read(u, running=running)
        multiply(s, _pieces(-dU, operand), tile["W"], transposed=False)
        write("dU", dU, transposed=True)
        return decayed + bm.settled(bm.read(s))

    return bm.accumulators(products, (ROWS, C), dS.shape)


def _launch(
    name: str, sizes: Sizes, inputs: list, reads: dict[str, _Read], writes: dict[str, tuple[str, Any]], step: Callable,
    *, op: Any, stages: int, start: jax.Array | None, final: bool, backwards: bool, interpret: bool,
    packing: Packing | None,
):  # fmt: skip
    """op: the dtype of what the kernel writes for each chunk. writes: name -> (where, the array's shape and dtype).
    Returns the final state's transpose, if final, and them."""
    if start is not None:
        state = start.astype(jnp.float32).reshape(-1, sizes.K, sizes.V).swapaxes(1, 2)
        inputs = [*inputs, jnp.pad(state, ((0, 0), (0, sizes.bv - sizes.V), (0, sizes.bk - sizes.K)))]
    scratch = {"full": bm.barriers(stages, len(reads)), "empty": bm.barriers(stages, 1)}
    if op != jnp.float32 and any(where == "tokens" for where, _ in writes.values()):
        scratch |= row_scratch(sizes, op)
    for key, x in reads.items():
        shape, dtype = (stages, *x.shape), inputs[x.array].dtype
        scratch[key] = bm.tiles(shape, dtype, x.row_bytes) if x.row_bytes else bm.rows(shape, dtype)
    for key, (where, _) in writes.items():
        tile = (ROWS, sizes.bk) if where == "rows" else (sizes.C, ROWS)
        scratch[f"out_{key}"] = (bm.rows if op == jnp.float32 else bm.tiles)((BUFFERS, *tile), op)
    if interpret:
        operands = jnp.bfloat16 if op == jnp.float32 else op
        scratch |= {f"left_{n}": bm.rows((6, ROWS, n), operands) for n in (sizes.bk, sizes.C)}
    outputs = [jax.ShapeDtypeStruct((sizes.N * sizes.HV, sizes.bv, sizes.bk), jnp.float32)] if final else []
    inputs = inputs if packing is None else [packing.bounds, *inputs]
    body = functools.partial(
        _walk,
        sizes=sizes,
        op=op,
        reads=reads,
        writes={key: where for key, (where, _) in writes.items()},
        step=functools.partial(step, op=op, interpret=interpret),
        inputs=len(inputs),
        stages=stages,
        start=start is not None,
        final=final,
        backwards=backwards,
        interpret=interpret,
    )
    found = bm.launch(
        body,
        name,
        inputs,
        [*outputs, *(x for _, x in writes.values())],
        scratch,
        programs=sizes.N * sizes.HV * sizes.bv // ROWS,
        cluster=1,
        warpgroups=2,
        interpret=interpret,
    )
    state = None
    if final:
        state = found[0][:, : sizes.V, : sizes.K].swapaxes(1, 2).reshape(sizes.N, sizes.HV, sizes.K, sizes.V)
    return state, list(found[len(outputs) :])


def _common(sizes: Sizes, prepared: Any) -> dict[str, Any]:
    """Shapes of the tiles, and arrays that the serial kernels write. "op" is the dtype of these, "rows" those of a tile
    in pieces."""
    heads, C, bk, bv = sizes.B * sizes.HV, sizes.C, sizes.bk, sizes.bv
    found = {"within": 2 * C, "wide": min(128, 2 * bk), "S": (heads, sizes.nt, bv, bk), "U": (heads, sizes.nt, C, bv)}
    return found | {"op": prepared.Y.dtype, "rows": prepared.W.shape[2]}


def run_states(
    prepared, initial_state, q, v, erase,
    *, config: KdaConfig, interpret, save, with_output=True, packing: Packing | None = None,
):  # fmt: skip
    """Runs `kda_state`. Arguments and results as in `forward.run_states`, S and U as a tuple."""
    sizes = Sizes.of(q, v, erase, config, packing)
    x = _common(sizes, prepared)
    C, bk, op, rows = sizes.C, sizes.bk, x["op"], x["rows"]
    within, wide, exact = x["within"], x["wide"], op == jnp.float32
    reads = {
        "W": _Read(0, (rows, bk), wide),
        "Y": _Read(1, (ROWS, C), 0 if exact else within, "rows"),
        "Ktil": _Read(2, (rows, bk), within),
        "decay": _Read(3, (bk,)),
    }
    inputs = [prepared.W, prepared.Y, prepared.Ktil, prepared.decay]
    writes: dict[str, tuple[str, Any]] = {}
    if with_output:
        reads |= {"Qhat": _Read(4, (rows, bk), wide), "P": _Read(5, (rows, C), within)}
        inputs += [prepared.Qhat, prepared.P]
        # With one head, a float32 tile of 64 columns is contiguous.
        shape = bm.whole_tiles(v.shape, 1, C) if exact and sizes.HV == 1 else v.shape
        writes["o"] = ("tokens", jax.ShapeDtypeStruct(shape, q.dtype))
    if save:
        writes |= {"S": ("rows", jax.ShapeDtypeStruct(x["S"], op)), "U": ("columns", jax.ShapeDtypeStruct(x["U"], op))}
    step = functools.partial(_exact_forward_step if exact else _forward_step, with_output=with_output, save=save)
    final, found = _launch(
        "kda_state", sizes, inputs, reads, writes, step, op=op,
        stages=config.hopper_stages, start=initial_state, final=with_output, backwards=False, interpret=interpret,
        packing=packing,
    )  # fmt: skip
    return found[0][:, : sizes.T] if with_output else None, final, tuple(found[-2:]) if save else None


def run_states_bwd(
    prepared, do, dfinal_state, has_initial, q, v, erase,
    *, config: KdaConfig, interpret, packing: Packing | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """Runs `kda_state_bwd`. Arguments and results as in `backward.run_states_bwd`."""
    sizes = Sizes.of(q, v, erase, config, packing)
    x = _common(sizes, prepared)
    C, bk, op, rows = sizes.C, sizes.bk, x["op"], x["rows"]
    within, wide, exact = x["within"], x["wide"], op == jnp.float32
    reads = {
        "do": _Read(0, (C, ROWS), 0 if exact else within, "tokens"),
        "W": _Read(1, (rows, bk), within),
        "Qhat": _Read(2, (rows, bk), within),
        "Ktil": _Read(3, (rows, bk), wide),
        "P": _Read(4, (rows, C), within),
        "decay": _Read(5, (bk,)),
    }
    writes = {"dS": ("rows", jax.ShapeDtypeStruct(x["S"], op)), "dU": ("columns", jax.ShapeDtypeStruct(x["U"], op))}
    inputs = [do, prepared.W, prepared.Qhat, prepared.Ktil, prepared.P, prepared.decay]
    dinitial, found = _launch(
        "kda_state_bwd", sizes, inputs, reads, writes, _exact_backward_step if exact else _backward_step, op=op,
        stages=config.hopper_stages, start=dfinal_state, final=has_initial, backwards=True, interpret=interpret,
        packing=packing,
    )  # fmt: skip
    return found[0], found[1], dinitial
