"""Configurations of the attention kernels: what can be chosen, and what is chosen on a device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

from pallas_kernels.backend_triton import PRECISIONS
from pallas_kernels.gemm.config import DEFAULT_CORES

MAX_DIM = 256
_TMA_ROWS = 8  # tokens of the tiles that Hopper's tensor memory accelerator copies


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel is cut and launched.

    Attributes:
      q, k: queries and keys of a tile of scores.
      warps, stages: warps a program, and stages of its software pipeline.
    """

    q: int
    k: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        for name in ("q", "k"):
            size = getattr(self, name)
            if size not in (16, 32, 64, 128, 256):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {size}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {self.warps}")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 1 and 8, got {self.stages}")


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """How a kernel for Hopper is cut, which has 128 rows of scores in a block: columns of a tile, keys where rows are
    queries, how many tiles are in shared memory or on their way there, and of the forward how many blocks there are,
    each of which serves several tiles of queries: one a multiprocessor, or one a tile where it is None."""

    k: int
    stages: int = 2
    blocks: int | None = None

    def __post_init__(self):
        if self.k not in (64, 128):
            raise ValueError(f"k must be 64 or 128, got {self.k}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 2 and 8, got {self.stages}")
        if self.blocks is not None and self.blocks < 1:
            raise ValueError(f"blocks must be at least 1 or None, got {self.blocks}")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The three kernels: the forward, the gradients of keys and values, and the gradient of queries."""

    forward: Tiles | HopperTiles
    dkv: Tiles | HopperTiles
    dq: Tiles | HopperTiles


@functools.cache
def _table() -> list[dict]:
    return json.loads(importlib.resources.files("pallas_kernels.attention").joinpath("configs.json").read_text())


def choose_config(device_kind: str, *, D: int, precision: str) -> AttentionConfig:
    """The configuration of the Triton kernels for a call, read from configs.json without timing anything.

    Args:
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H200"; any other string gets the general rows.
      D: the head dim.
      precision: "fp32", "tf32" or "16bit".

    Raises:
      ValueError: for a head dim or a precision outside of what the kernels serve.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if not 1 <= D <= MAX_DIM:
        raise ValueError(f"D must lie between 1 and {MAX_DIM}, got {D}")
    row = next(
        row
        for row in _table()
        if row["match"].get("device", device_kind) == device_kind
        and precision in row["match"].get("precision", PRECISIONS)
        and row["match"].get("max_dim", MAX_DIM) >= D
    )
    return AttentionConfig(**{name: Tiles(*sizes) for name, sizes in row["config"].items()})


# Of the kernels for Hopper, by precision and head dim.
_HOPPER = {
    ("16bit", 64): AttentionConfig(HopperTiles(128, 4), HopperTiles(128, 2), HopperTiles(128, 3)),
    ("16bit", 128): AttentionConfig(HopperTiles(128, 2), HopperTiles(64, 2), HopperTiles(64, 3)),
    ("fp32", 64): AttentionConfig(HopperTiles(64, 2), HopperTiles(64, 2), HopperTiles(64, 2)),
}


def choose_hopper(
    *, D: int, Tq: int, Tk: int, precision: str, packed: bool, cores: int | None = None
) -> AttentionConfig:
    """The configuration of the kernels for Hopper.

    cores: streaming multiprocessors of the device, None where it does not say.

    Raises:
      ValueError: they cannot serve such a call.
    """
    if packed:
        raise ValueError("the Hopper kernels take no packed sequences")
    if (precision, D) not in _HOPPER:
        raise ValueError(
            "the Hopper kernels are for precision '16bit' with D of 64 or 128 and for 'fp32' with 64, "
            f"and this is {precision!r} with {D}"
        )
    if Tq % _TMA_ROWS or Tk % _TMA_ROWS:
        raise ValueError(
            f"the Hopper kernels copy tiles of {_TMA_ROWS} tokens, into which Tq={Tq} and Tk={Tk} cannot be cut"
        )
    config = _HOPPER[precision, D]
    forward = dataclasses.replace(config.forward, blocks=cores or DEFAULT_CORES)
    return dataclasses.replace(config, forward=forward)
