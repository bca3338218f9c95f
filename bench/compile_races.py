"""A data race that Triton's software pipeline can make of a kernel for Hopper, looked for in the text of its passes.

On Hopper a product of matrices (`ttng.warp_group_dot`) runs on beside the program, and reads operands from shared
memory until a `warp_group_dot_wait`. A pipelined loop copies the tiles of later steps into rings of shared memory
meanwhile. Where a tile feeds such a product and something else besides, say a product that takes it from registers,
Triton can give it a ring of as many places as tiles are on their way: the next copy then lands in the tile that is
being read, and results differ from run to run.

`scan` follows the program for more steps than a ring has places. What counts the places are scalars that start at
constants, so that the place of each copy is known, and so is what the products in flight read.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence

PASS = "// -----// IR Dump Before SCFToControlFlowPass"  # the last one that sees loops
ADVICE = (
    "make all products of the tile asynchronous (64 rows of it, or of its transpose), or let one that is waited for in "
    "the same step come after it, or take one stage"
)

_OPERATION = re.compile(r'\s*(?:%(\w+)(?::(\d+))? = )?"([\w.]+)"\(([^()]*)\)')
_OPERAND = re.compile(r"%([\w#]+)")
_ARGUMENT = re.compile(r"%(\w+):")
_ALLOCATED = re.compile(r"-> !ttg\.memdesc<(?:(\d+)x)?(\w+)")
_FILE = re.compile(r"pallas_kernels/((?!backend_triton)[\w/]+\.py:\d+)")  # who calls the backend says more

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.maxsi": max,
    "arith.minsi": min,
}
# By MLIR's number of a predicate, of signed numbers and of unsigned ones, which counters of places never tell apart.
_COMPARISONS = (operator.eq, operator.ne, *(operator.lt, operator.le, operator.gt, operator.ge) * 2)
_VIEWS = ("ttg.memdesc_trans", "ttg.memdesc_subslice", "ttg.memdesc_reshape", "ttg.memdesc_reinterpret")
_POINTERS = ("tt.splat", "tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.bitcast", "ttg.convert_layout")
_READS = ("ttg.local_load", "ttg.local_dealloc")  # which wait for what they need

type _Value = (
    int | _Tile | str | None
)  # a scalar, shared memory, which argument is pointed into, or what is not followed


@dataclasses.dataclass(frozen=True)
class Scan:
    """What was found in a kernel.

    Attributes:
      products: how many of its products run beside the program.
      races: a line for every tile that is overwritten while one of them may read it.
    """

    products: int
    races: tuple[str, ...]


def scan(dump: str) -> Scan:
    """Looks through what XLA dumps of the passes that lower a Triton kernel (`--xla_dump_emitter_re=triton-to-llvm`).

    Raises:
      ValueError: that pass, or an operation in it, is not known here, so that nothing can be said.
    """
    start = dump.rfind(PASS)
    if start < 0:
        raise ValueError(f"{PASS!r} is not in what the compiler says of its passes: {dump[:200]!r}")
    end = dump.find("// -----// IR Dump", start + len(PASS))
    lines = dump[start : end if end >= 0 else len(dump)].splitlines()
    products = sum('"ttng.warp_group_dot"' in line and "isAsync = true" in line for line in lines)
    if not products:
        return Scan(0, ())
    program = _Program(lines)
    program.run(_region(iter(lines))[0])
    return Scan(products, tuple(program.races.values()))


@dataclasses.dataclass
class _Operation:
    """`%result:number = "name"(%operands) <{attributes}> ({regions}) : types location`, on a line but for regions."""

    name: str
    results: list[str]
    operands: list[str]
    line: str
    regions: list[_Region] = dataclasses.field(default_factory=list)

    def number(self, attribute: str) -> int:
        found = re.search(rf"\b{attribute} = (-?\d+)", self.line)
        if found is None:
            raise ValueError(f"no {attribute} in {self.line.strip()[:200]}")
        return int(found[1])


@dataclasses.dataclass
class _Region:
    arguments: list[str] = dataclasses.field(default_factory=list)
    operations: list[_Operation] = dataclasses.field(default_factory=list)


def _region(lines: Iterator[str]) -> tuple[_Region, bool]:
    """What comes before the end of a region, or of the text, and whether another region of the operation follows."""
    region = _Region()
    for line in lines:
        if line.lstrip().startswith("}"):
            return region, line.rstrip().endswith("{")
        if line.lstrip().startswith("^"):
            if region.operations:
                raise ValueError("a region has more than one block")
            region.arguments = _ARGUMENT.findall(line)
        elif found := _OPERATION.match(line):
            result, number, name, operands = found.groups()
            results = [result] if number is None else [f"{result}#{i}" for i in range(int(number))]
            region.operations.append(_Operation(name, results if result else [], _OPERAND.findall(operands), line))
            more = line.rstrip().endswith("({")
            while more:
                inner, more = _region(lines)
                region.operations[-1].regions.append(inner)
    return region, False


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A place of a ring, or of None any; or shared memory without places, which is all of it one."""

    memory: str
    place: int | None

    def meets(self, other: _Tile) -> bool:
        return self.memory == other.memory and (None in (self.place, other.place) or self.place == other.place)


class _Program:
    """A run of a program, of which scalars and places in shared memory are followed where they are known."""

    def __init__(self, lines: Sequence[str]):
        self.races: dict[str, str] = {}  # by the memory
        self._values: dict[str, _Value] = {}
        self._reading: list[list[_Tile]] = []  # by the products in flight, the oldest first
        self._described: dict[str, str] = {}
        self._locations = _locations(lines)
        rings = [line for line in lines if '"ttg.local_alloc"()' in line]
        places = [int(found[1]) for line in rings if (found := _ALLOCATED.search(line)) and found[1]]
        # Around every ring, and on, since the first steps find no products in flight.
        self._steps = max(places, default=1) + 3

    def run(self, region: _Region) -> list[_Value]:
        """What the region yields."""
        for operation in region.operations:
            values = [self._values.get(name) for name in operation.operands]
            if operation.name in ("scf.yield", "scf.condition"):
                return values
            results = self._step(operation, values)
            self._values.update(zip(operation.results, results, strict=False))
        return []

    def _step(self, operation: _Operation, values: list[_Value]) -> list[_Value]:
        """The results as far as they are known."""
        name = operation.name
        unknown: list[_Value] = [None] * len(operation.results)
        if name in ("builtin.module", "tt.func"):
            [body] = operation.regions
            self._values.update({each: f"argument {i}" for i, each in enumerate(body.arguments)})
            return self.run(body)
        if name == "scf.for":
            return self._loop(operation, values)
        if name == "scf.while":
            return self._while(operation, values)
        if name == "scf.if":
            return self._either(operation, values)
        if name == "arith.constant":
            found = re.search(r"value = (-?\d+|true|false)\b(?![.x])", operation.line)
            return [None if found is None else int(json.loads(found[1]))]
        if name in _ARITHMETIC or name == "arith.cmpi":
            left, right = values
            if not (isinstance(left, int) and isinstance(right, int)):
                return unknown
            compute = _ARITHMETIC.get(name) or _COMPARISONS[operation.number("predicate")]
            return [int(compute(left, right))]
        if name == "arith.select":
            condition, yes, no = values
            return [yes if yes == no else None if not isinstance(condition, int) else yes if condition else no]
        if name == "ttg.local_alloc":
            [memory] = operation.results
            self._described[memory] = self._describe(operation)
            tile = _Tile(memory, None)
            if values:
                self._write(tile)
            return [tile]
        if name == "ttg.memdesc_index":
            ring, place = values
            if not isinstance(ring, _Tile):
                raise ValueError(f"of unknown memory: {operation.line.strip()[:200]}")
            return [_Tile(ring.memory, place if isinstance(place, int) else None)]
        if name in _VIEWS or name in _POINTERS:
            return values[:1]
        if name in ("ttg.async_copy_global_to_local", "ttg.local_store"):
            tile = values[1]
            if not isinstance(tile, _Tile):
                raise ValueError(f"into unknown memory: {operation.line.strip()[:200]}")
            self._write(tile, values[0])
            return unknown
        if name == "ttng.warp_group_dot":
            self._reading.append([x for x in values[:2] if isinstance(x, _Tile)])
            if "isAsync = true" not in operation.line:
                self._reading.clear()
            return unknown
        if name == "ttng.warp_group_dot_wait":
            del self._reading[: max(0, len(self._reading) - operation.number("pendings"))]
            return values
        for region in operation.regions:
            self.run(region)
        if "!ttg.memdesc" in operation.line and name not in _READS:
            raise ValueError(f"an operation on shared memory is not known: {operation.line.strip()[:200]}")
        return unknown

    def _loop(self, operation: _Operation, values: list[_Value]) -> list[_Value]:
        first, _, by, *carried = values
        [body] = operation.regions
        for step in range(self._steps):
            counter = first + step * by if isinstance(first, int) and isinstance(by, int) else None
            self._values.update(zip(body.arguments, [counter, *carried], strict=True))
            carried = self.run(body)
        return carried

    def _while(self, operation: _Operation, carried: list[_Value]) -> list[_Value]:
        before, after = operation.regions
        for _ in range(self._steps):
            self._values.update(zip(before.arguments, carried, strict=True))
            _, *left = self.run(before)
            self._values.update(zip(after.arguments, left, strict=True))
            carried = self.run(after)
        return carried

    def _either(self, operation: _Operation, values: list[_Value]) -> list[_Value]:
        """Both ways; afterwards, whatever was in flight at the end of either is."""
        before, found, reading = list(self._reading), [], []
        for region in operation.regions:
            self._reading = list(before)
            found.append(self.run(region))
            reading.append(self._reading)
        longest = max(map(len, reading), default=0)
        padded = [[[]] * (longest - len(way)) + way for way in reading]
        self._reading = [[tile for tiles in products for tile in tiles] for products in zip(*padded, strict=True)]
        return [x if x == y else None for x, y in zip(*found, strict=True)] if len(found) == 2 else []

    def _write(self, tile: _Tile, source: _Value = None) -> None:
        """Notes a race where a product in flight may read the tile."""
        if any(tile.meets(read) for product in self._reading for read in product):
            what, of = self._described[tile.memory], f" of {source}" if isinstance(source, str) else ""
            race = f"a product may read {what}{of} while the tile of another step is written there: {ADVICE}"
            self.races.setdefault(tile.memory, race)

    def _describe(self, operation: _Operation) -> str:
        """`a tile 32x256xbf16 in a ring of 2 (adapters/low_rank.py:225)`."""
        found = _ALLOCATED.search(operation.line)
        places, shape = found.groups() if found else (None, "?")
        is_ring = not operation.operands and places
        what = f"{shape} in a ring of {places}" if is_ring else "x".join(filter(None, (places, shape)))
        return f"a tile {what}{self._where(operation.line)}"

    def _where(self, line: str) -> str:
        """The innermost line of a kernel's own file, in brackets, where the compiler knows of one."""
        left = re.findall(r"#loc\d*", line)[-1:]
        seen = set(left)
        while left:
            text = self._locations.get(left.pop(0), "")
            if found := _FILE.search(text):
                return f" ({found[1]})"
            inner = [name for name in re.findall(r"#loc\d*", text) if name not in seen]
            seen.update(inner)
            left = inner + left
        return ""


def _locations(lines: Sequence[str]) -> dict[str, str]:
    """The text that stands for each `#loc…`; that of a call takes two lines."""
    found: dict[str, str] = {}
    name = None
    for line in lines:
        if line.startswith("#loc"):
            name, _, text = line.partition(" = ")
            found[name] = text
        elif name and line.startswith(" at "):
            found[name] += line
        else:
            name = None
    return found
