"""Configurations of the GEMM kernels: what can be chosen, and what is chosen on a device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

import jax.numpy as jnp

from pallas_kernels.backend_triton import PRECISIONS, ceil_pow2

# Streaming multiprocessors of a card that does not say how many it has: those of an H100 and an H200.
DEFAULT_CORES = 132
# The Triton backend counts elements in 32 bits.
MAX_ELEMENTS = 2**31 - 1
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
    """

    M: int
    N: int
    K: int
    precision: str
    dtype: str
    out_dtype: str
    transpose_a: bool = False
    transpose_b: bool = False

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
      group: width of the strips of tiles that are walked in turn, so that blocks that run together share operands in
        L2.
      group_axis: "m" or "n", the axis of the strips' width.
      fold: stages after which float32-accurate products are added to the sum outside of the tensor cores, which round
        every addition toward zero.
      in_flight: products that a warpgroup leaves running while it issues the next.
      out_slots: buffers of each multiplying warpgroup for parts of its result, so that one is filled while others
        leave.
      blocks: how many blocks run at a time, a multiple of the cluster's size: one a multiprocessor.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    cluster: str | None = None
    group: int = 8
    group_axis: str = "n"
    fold: int = 4
    in_flight: int = 0
    out_slots: int = 2
    blocks: int = DEFAULT_CORES

    def __post_init__(self):
        if self.tile_m not in (128, 256):
            raise ValueError(f"tile_m must be 128 or 256, got {self.tile_m}")
        if self.tile_n not in (64, 128, 192, 256):
            raise ValueError(f"tile_n must be 64, 128, 192 or 256, got {self.tile_n}")
        if self.tile_k not in (32, 64, 128):
            raise ValueError(f"tile_k must be 32, 64 or 128, got {self.tile_k}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 2 and 8, got {self.stages}")
        if self.cluster not in (None, "m", "n"):
            raise ValueError(f"cluster must be None, 'm' or 'n', got {self.cluster!r}")
        if self.group_axis not in ("m", "n"):
            raise ValueError(f"group_axis must be 'm' or 'n', got {self.group_axis!r}")
        for name in ("group", "fold", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.in_flight not in (0, 1):
            raise ValueError(f"in_flight must be 0 or 1, got {self.in_flight}")
        if self.out_slots not in (1, 2, 4):
            raise ValueError(f"out_slots must be 1, 2 or 4, got {self.out_slots}")

    @property
    def cluster_size(self) -> int:
        return 1 if self.cluster is None else 2


def padded_shape(shape: tuple[int, int], dtype: str) -> tuple[int, int]:
    """The least shape not smaller than this one of which TMA can copy tiles."""
    size = jnp.dtype(dtype).itemsize
    multiples = (TILE_ROWS, 1), (TILE_BYTES // size, TMA_BYTES // size)
    rows, cols = (n + -n % (tile if n > tile else least) for n, (tile, least) in zip(shape, multiples, strict=True))
    return rows, cols


@functools.cache
def _table() -> dict[str, list[dict]]:
    return json.loads(importlib.resources.files("pallas_kernels.gemm").joinpath("configs.json").read_text())


def _rows(backend: str, problem: Problem, device_kind: str) -> list[dict]:
    """The rows of the table that fit a product on a device, those that come first being the better match."""
    small, large = sorted((problem.M, problem.N))

    def fits(match: dict) -> bool:
        return (
            match.get("device", device_kind) == device_kind
            and problem.precision in match.get("precision", PRECISIONS)
            and match.get("min_small", small) <= small <= match.get("max_small", small)
            and large <= match.get("max_large", large)
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
    for what, rows, cols in (("a", M, K), ("b", K, N), ("the output", M, N)):
        if rows * cols > MAX_ELEMENTS:
            raise ValueError(f"{what} has {rows * cols} elements, and the Triton kernel counts to {MAX_ELEMENTS}")
    settings = dict(_rows("triton", problem, device_kind)[0]["config"])
    # Rows are for tall outputs; a wide one gets its tile turned.
    if M < N and settings["tile_m"] > settings["tile_n"] or M > N and settings["tile_m"] < settings["tile_n"]:
        settings["tile_m"], settings["tile_n"] = settings["tile_n"], settings["tile_m"]
    for name, size in (("tile_m", M), ("tile_n", N), ("tile_k", K)):
        settings[name] = min(settings[name], max(16, ceil_pow2(size)))
    config = TritonConfig(**settings)
    tiles = -(-M // config.tile_m) * -(-N // config.tile_n)
    cores = cores or DEFAULT_CORES
    # A part of the contraction is worth its partial sums from about eight steps on.
    split = min(2 * cores // tiles, K // (8 * config.tile_k), 16) if 2 * tiles <= cores else 1
    return dataclasses.replace(config, split=max(1, split))


def choose_mosaic(problem: Problem, *, device_kind: str, cores: int | None = None) -> MosaicConfig:
    """The configuration of the Hopper kernel for a product. Arguments as in `choose_triton`.

    Raises:
      ValueError: the kernel does not take such arrays.
    """
    if problem.precision == "16bit":
        # A copy that pads costs about what the Triton kernel loses. Of float32 operands copies are made anyway.
        stored = {
            "a": (problem.K, problem.M) if problem.transpose_a else (problem.M, problem.K),
            "b": (problem.N, problem.K) if problem.transpose_b else (problem.K, problem.N),
            "the output": (problem.M, problem.N),
        }
        for name, shape in stored.items():
            dtype = problem.out_dtype if name == "the output" else problem.dtype
            if padded_shape(shape, dtype) != shape:
                raise ValueError(
                    f"the Hopper kernel copies tiles of {TILE_ROWS} rows of {TILE_BYTES} bytes, into which {name}, "
                    f"{list(shape)} of {dtype}, cannot be cut"
                )
    cores = cores or DEFAULT_CORES
    rows = _rows("mosaic", problem, device_kind)
    if not rows:
        raise ValueError(f"the Hopper kernel has no configuration for [{problem.M}, {problem.N}] outputs")

    def cost(row: dict) -> float:
        """Rounds of tiles that the card needs, each as long as its tile is large and slow."""
        config = MosaicConfig(**row["config"])
        m, n = (-(-size // tile) for size, tile in ((problem.M, config.tile_m), (problem.N, config.tile_n)))
        m += m % 2 if config.cluster == "m" else 0
        n += n % 2 if config.cluster == "n" else 0
        blocks = cores - cores % config.cluster_size
        return -(-m * n // blocks) * config.tile_m * config.tile_n / row["rate"]

    config = MosaicConfig(**min(rows, key=cost)["config"])
    return dataclasses.replace(config, blocks=cores - cores % config.cluster_size)
