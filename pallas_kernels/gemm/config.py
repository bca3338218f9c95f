"""Configurations of the GEMM kernels: what can be chosen, and what is chosen on a device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

import jax.numpy as jnp

from pallas_kernels.backend_triton import PRECISIONS

# Streaming multiprocessors of a card that does not say how many it has: those of an H100 and an H200.
DEFAULT_CORES = 132
# The Triton backend counts elements in 32 bits.
MAX_ELEMENTS = 2**31 - 1
# Parts of a split contraction: most of them, and how long one is at least (Hopper kernel).
MAX_SPLIT = 16
MIN_PART = 256
# What adding parts up takes: to start with, and by bytes of float32 written and read.
ADDING_S = 2e-6
ADDING_BYTES_S = 2e12
# Rows or columns up to which an output is the Triton kernel's.
SMALL = 64
# Part of its multiplications that the Hopper kernel has to need to be faster than cuBLAS, which splits contractions and
# has smaller tiles. In float32 it is 0.4, as 128 TFLOP/s of a full card are to cuBLAS's 51.
FILLED = 0.5
# M N K from which on the Hopper kernel gains more on the Triton kernel than copies that pad its operands cost.
WORTH_PADDING = 1 << 29
# The tensor memory accelerator (TMA) of Hopper copies tiles of so many rows, of so many bytes each. An array has a
# whole number of them; one that is smaller than a tile has rows of a multiple of 16 bytes.
TILE_ROWS = 8
TILE_BYTES = 128
TMA_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product: out[M, N] = op(a) op(b), and how its arrays are stored.

    Attributes:
      M, N, K: rows and columns of the output, length of the contraction.
      precision: "fp32", "tf32" or "16bit".
      dtype, out_dtype: names of the operands' and the output's dtypes.
      transpose_a, transpose_b: whether a is stored as [K, M], b as [N, K].
      bias: whether one is added.
    """

    M: int
    N: int
    K: int
    precision: str
    dtype: str
    out_dtype: str
    transpose_a: bool = False
    transpose_b: bool = False
    bias: bool = False

    @property
    def stored(self) -> dict[str, tuple[tuple[int, int], str]]:
        """The shape and dtype of each of its matrices, by name."""
        a = (self.K, self.M) if self.transpose_a else (self.M, self.K)
        b = (self.N, self.K) if self.transpose_b else (self.K, self.N)
        return {"a": (a, self.dtype), "b": (b, self.dtype), "the output": ((self.M, self.N), self.out_dtype)}

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if min(self.M, self.N, self.K) < 1:
            raise ValueError(f"M, N and K must be at least 1, got {self.M}, {self.N} and {self.K}")


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How the Triton kernel is cut and launched.

    Attributes:
      tile_m, tile_n: rows and columns of the output that one program computes.
      tile_k: how much of the contraction it takes at once.
      group: rows of tiles that are walked column by column, so that programs that run together share operands in L2.
      split: into how many parts the contraction is split, added up afterwards in a fixed order: for outputs of too few
        tiles to fill the card.
      warps, stages: warps a program, and stages of its software pipeline.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int = 8
    split: int = 1
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        for name in ("tile_m", "tile_n", "tile_k"):
            size = getattr(self, name)
            if not 16 <= size <= 256 or size & (size - 1):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {size}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {self.warps}")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 1 and 8, got {self.stages}")
        for name in ("group", "split"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How the Hopper kernel is cut and launched.

    A block has one warpgroup that copies operands in and two that multiply; each of the two holds half of the rows.

    Attributes:
      tile_m, tile_n: rows and columns of the output tile of one block.
      tile_k: how much of the contraction one stage holds.
      stages: depth of the ring of operand tiles in shared memory.
      cluster: "m", "n" or None. Two blocks, neighbours along that axis, each copy half of the operand that they share,
        for both.
      fold: stages after which float32-accurate products are added to the sum outside of the tensor cores, which round
        every addition toward zero.
      split: into how many parts the contraction is split, added up afterwards in a fixed order: for outputs of too few
        tiles to fill the card.
      blocks: how many blocks run at a time, a multiple of the cluster's size: one a multiprocessor.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    cluster: str | None = None
    fold: int = 4
    split: int = 1
    blocks: int = DEFAULT_CORES

    def __post_init__(self):
        if self.tile_m not in (128, 256):
            raise ValueError(f"tile_m must be 128 or 256, got {self.tile_m}")
        if self.tile_n not in (64, 128, 160, 192, 256):
            raise ValueError(f"tile_n must be 64, 128, 160, 192 or 256, got {self.tile_n}")
        # A thread holds that many sums, of 232 registers.
        if self.tile_m // 2 * self.tile_n > 192 * 128:
            raise ValueError(f"a warpgroup can hold 24576 sums, got {self.tile_m // 2} x {self.tile_n}")
        if self.tile_k not in (32, 64, 128):
            raise ValueError(f"tile_k must be 32, 64 or 128, got {self.tile_k}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 2 and 8, got {self.stages}")
        if self.cluster not in (None, "m", "n"):
            raise ValueError(f"cluster must be None, 'm' or 'n', got {self.cluster!r}")
        for name in ("fold", "split", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def cluster_size(self) -> int:
        return 1 if self.cluster is None else 2

    def tiles(self, M: int, N: int) -> tuple[int, int]:
        """Tiles of an [M, N] output along its axes, in whole clusters."""
        m, n = -(-M // self.tile_m), -(-N // self.tile_n)
        return m + m % 2 * (self.cluster == "m"), n + n % 2 * (self.cluster == "n")


def parts_of(K: int, tile_k: int, split: int) -> tuple[int, int]:
    """(parts, steps of tile_k in each) of a contraction over K that is split into at most so many parts, none empty."""
    steps = -(-K // (tile_k * split))
    return -(-K // (tile_k * steps)), steps


def padded_shape(shape: tuple[int, ...], dtype: str, row_bytes: int = TILE_BYTES) -> tuple[int, int]:
    """The least shape not smaller than this one of which TMA can copy tiles with rows of so many bytes."""
    size = jnp.dtype(dtype).itemsize
    multiples = (TILE_ROWS, 1), (row_bytes // size, TMA_BYTES // size)
    rows, cols = (n + -n % (tile if n > tile else least) for n, (tile, least) in zip(shape, multiples, strict=True))
    return rows, cols


@functools.cache
def _table() -> dict[str, list[dict]]:
    return json.loads(importlib.resources.files("pallas_kernels.gemm").joinpath("configs.json").read_text())


def _rows(backend: str, problem: Problem, device_kind: str) -> list[dict]:
    """The rows of the table that fit a product on a device, those that come first being the better match."""
    small = min(problem.M, problem.N)

    def fits(match: dict) -> bool:
        return (
            match.get("device", device_kind) == device_kind
            and problem.precision in match.get("precision", PRECISIONS)
            and small <= match.get("max_small", small)
            and match.get("max_rows", problem.M) >= problem.M
            and problem.out_dtype in match.get("out_dtype", (problem.out_dtype,))
        )

    return [row for row in _table()[backend] if fits(row["match"])]


def choose_triton(problem: Problem, *, device_kind: str, cores: int | None = None) -> TritonConfig:
    """The configuration of the Triton kernel for a product, read from configs.json without timing anything.

    A configuration can be miscompiled: a row enters the table only after its results were held to float64 on a GPU.

    Args:
      problem: the product.
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H200"; any other string gets the general rows.
      cores: streaming multiprocessors of the device, None where it does not say.

    Raises:
      ValueError: the kernel does not take such sizes.
    """
    M, N, K = problem.M, problem.N, problem.K
    for what, ((rows, cols), _) in problem.stored.items():
        if rows * cols > MAX_ELEMENTS:
            raise ValueError(f"{what} has {rows * cols} elements, and the Triton kernel counts to {MAX_ELEMENTS}")
    row = _rows("triton", problem, device_kind)[0]
    settings = dict(row["config"])
    # Rows are for tall outputs; a wide one gets its tile turned.
    if M < N:
        settings["tile_m"], settings["tile_n"] = settings["tile_n"], settings["tile_m"]
    config = TritonConfig(**settings)
    tiles = -(-M // config.tile_m) * -(-N // config.tile_n)
    # A part of the contraction is worth its partial sums from about eight steps on.
    split = min(row["fill"] * (cores or DEFAULT_CORES) // tiles, K // (8 * config.tile_k), MAX_SPLIT)
    return dataclasses.replace(config, split=max(1, split))


def why_triton(problem: Problem) -> str:
    """Why the Triton kernel should take less time for a product on a Hopper card than the Hopper kernel; "" where it
    should not."""
    M, N, K = problem.M, problem.N, problem.K
    if min(M, N) <= SMALL:
        return f"the Hopper kernel's tiles have 128 rows, too many for an output of [{M}, {N}]"
    if problem.precision != "16bit" or M * N * K >= WORTH_PADDING:
        return ""
    # A 16-bit array that TMA cannot copy is copied by XLA first. Of float32 operands copies are made anyway.
    for name, (shape, dtype) in problem.stored.items():
        if padded_shape(shape, dtype) != shape:
            return (
                f"the Hopper kernel copies tiles of {TILE_ROWS} rows of {TILE_BYTES} bytes, into which {name}, "
                f"{list(shape)} of {dtype}, cannot be cut, and the product is too small to be worth padding it"
            )
    return ""


def why_xla(problem: Problem, config: TritonConfig | MosaicConfig) -> str:
    """Why XLA's product (cuBLAS) should take less time on a GPU than the kernel with this configuration; "" where it
    should not. By measurements on one H200: docs/gemm-tuning.md."""
    M, N = problem.M, problem.N
    if problem.precision == "16bit":
        return "XLA's product is as fast as ours in 16 bit, or up to 7 % faster"
    if isinstance(config, TritonConfig):
        return f"XLA's product is faster than the Triton kernel; this is {problem.precision}, an output of [{M}, {N}]"
    (m, n), parts = config.tiles(M, N), parts_of(problem.K, config.tile_k, config.split)[0]
    rounds = -(-m * n * parts // config.blocks)
    filled = M * N * parts / (rounds * config.blocks * config.tile_m * config.tile_n)
    if filled >= FILLED:
        return ""
    return (
        f"XLA's product is faster where the Hopper kernel's tiles of [{config.tile_m}, {config.tile_n}] fill less than "
        f"{FILLED:.0%} of the card, and an output of [{M}, {N}] fills {filled:.0%}"
    )


def choose_mosaic(problem: Problem, *, device_kind: str, cores: int | None = None) -> MosaicConfig:
    """The configuration of the Hopper kernel for a product: of the table's, whole or split, the one that should take
    the least time. Arguments and errors as in `choose_triton`."""
    M, N, K = problem.M, problem.N, problem.K
    cores = cores or DEFAULT_CORES
    rows = _rows("mosaic", problem, device_kind)

    def seconds(row: dict, config: MosaicConfig) -> float:
        parts, steps = parts_of(K, config.tile_k, config.split)
        m, n = config.tiles(M, N)
        rounds = -(-m * n * parts // (cores - cores % config.cluster_size))
        operations = 2 * rounds * config.tile_m * config.tile_n * config.tile_k * steps
        adding = (ADDING_S + parts * M * N * 8 / ADDING_BYTES_S) * (parts > 1)  # written and read in float32
        return operations * DEFAULT_CORES / (row["tflops"] * 1e12) + adding

    # Parts are float32: a row of other outputs has none.
    found = [
        (row, MosaicConfig(**row["config"], split=split))
        for row in rows
        for split in range(1, 1 + ("out_dtype" in row["match"] or max(1, min(MAX_SPLIT, K // MIN_PART))))
    ]
    _, config = min(found, key=lambda each: seconds(*each))
    return dataclasses.replace(config, blocks=cores - cores % config.cluster_size)
