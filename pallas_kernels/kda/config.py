"""Configurations of the KDA kernels: what can be chosen, and what is chosen on a device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json

from pallas_kernels.backend_triton import PRECISIONS, ceil_pow2

BLOCK = 16  # Rows of a diagonal block: the smallest tile of the tensor cores, and the reach of one anchor of the decay.
MAX_DIM = 256
MIN_SEGMENT = 8  # Chunks: below it the two more launches cost what the split gains.
# Bytes of shared memory that a block of the serial Triton kernels takes with float32 operands, 32 tokens a chunk and K
# above 128, as the compiler counts them. No row of the table is so large; what the rows take fits every card.
LARGEST_SHARED = 154624
BACKEND_FIELDS = ("serial", "prepare", "gradients")


@dataclasses.dataclass(frozen=True)
class KdaConfig:
    """How the four kernels are cut and launched.

    Attributes:
      chunk_size: tokens a chunk, C: 16 or 32. Gradients of more were not held to the oracle on a GPU, and cost more.
      v_tile: columns of the value dimension that one program of the serial kernels holds.
      prepare: the backend of the kernel that prepares chunks: "triton", or "mosaic" for Hopper.
      prepare_warps: warps a program of that kernel.
      serial: the backend of the serial kernels, "triton", or "mosaic" for Hopper, where v_tile, the warps and stages of
        the Triton kernels, and segments play no part.
      hopper_stages: chunks whose tiles the Hopper kernels have in shared memory or on their way there.
      state_warps, state_stages: warps and pipeline stages of the serial forward kernel.
      state_bwd_warps, state_bwd_stages: the same for the serial backward kernel.
      gradients: the backend of the backward's kernels of one chunk, that which prepares it again from P and M, and
        that which forms the gradients: "triton", or "mosaic" for Hopper, where prepare_warps, k_tile and grads_warps
        play no part in them.
      grads_warps: warps of the kernel that forms the gradients.
      k_tile: key channels that one program of that kernel holds.
      segments: into how many parts a sequence may be split, so that few heads fill the card; each part then acts on
        the state as an affine map, found in parallel. 1: never.
      always_exact: run what the diagonal blocks have for rows off the fast path even where there are none. It changes
        no bit: for tests.
    """

    chunk_size: int = 32
    v_tile: int = 64
    prepare: str = "triton"
    prepare_warps: int = 4
    serial: str = "triton"
    hopper_stages: int = 3
    state_warps: int = 4
    state_stages: int = 2
    state_bwd_warps: int = 4
    state_bwd_stages: int = 2
    gradients: str = "triton"
    grads_warps: int = 4
    k_tile: int = 64
    segments: int = 1
    always_exact: bool = False

    def __post_init__(self):
        if self.chunk_size not in (16, 32):
            raise ValueError(f"chunk_size must be 16 or 32, got {self.chunk_size}")
        if self.v_tile not in (16, 32, 64, 128):
            raise ValueError(f"v_tile must be 16, 32, 64 or 128, got {self.v_tile}")
        if self.k_tile not in (16, 32, 64, 128, 256):
            raise ValueError(f"k_tile must be 16, 32, 64, 128 or 256, got {self.k_tile}")
        for name in ("prepare_warps", "state_warps", "state_bwd_warps", "grads_warps"):
            if getattr(self, name) not in (1, 2, 4, 8):
                raise ValueError(f"{name} must be 1, 2, 4 or 8, got {getattr(self, name)}")
        for name in BACKEND_FIELDS:
            if getattr(self, name) not in ("triton", "mosaic"):
                raise ValueError(f"{name} must be 'triton' or 'mosaic', got {getattr(self, name)!r}")
        for name in ("state_stages", "state_bwd_stages", "hopper_stages"):
            if not 1 <= getattr(self, name) <= 4:
                raise ValueError(f"{name} must lie between 1 and 4, got {getattr(self, name)}")
        if not 1 <= self.segments <= 64:
            raise ValueError(f"segments must lie between 1 and 64, got {self.segments}")

    def on_triton(self) -> KdaConfig:
        """The same with every kernel on the Triton backend."""
        return dataclasses.replace(self, **dict.fromkeys(BACKEND_FIELDS, "triton"))

    def segments_of(self, chunks: int) -> int:
        """Segments for a sequence of so many chunks: none is empty, and none shorter than MIN_SEGMENT chunks."""
        segments = 1 if self.serial == "mosaic" else max(1, min(self.segments, chunks // MIN_SEGMENT))
        length = -(-chunks // segments)
        return -(-chunks // length)


@functools.cache
def _table() -> list[dict]:
    return json.loads(importlib.resources.files("pallas_kernels.kda").joinpath("configs.json").read_text())


def choose_config(
    device_kind: str,
    *,
    K: int,
    V: int,
    T: int,
    batch_heads: int,
    precision: str,
    chunk_size: int | None = None,
    packed: bool = False,
    block_shared: int | None = None,
) -> KdaConfig:
    """The configuration for a call, read from configs.json without timing anything.

    A configuration can be miscompiled: a row enters the table only after its results were held to the oracle on a GPU.

    Args:
      device_kind: `jax.Device.device_kind`, such as "NVIDIA H200"; any other string gets the general rows.
      K, V, T: key dim, value dim, tokens.
      batch_heads: B * HV, or that of packed sequences and HV.
      precision: "fp32", "tf32" or "16bit".
      chunk_size: the chunk size the caller insists on, or None.
      packed: whether sequences are packed: none is split then.
      block_shared: bytes of shared memory that a block can have on the device; None where it does not matter.

    Raises:
      ValueError: for sizes or a precision outside of what the kernels serve, or shared memory that the device lacks.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if not (1 <= K <= MAX_DIM and 1 <= V <= MAX_DIM):
        raise ValueError(f"K and V must lie between 1 and {MAX_DIM}, got {K} and {V}")
    row = next(
        row
        for row in _table()
        if row["match"].get("device", device_kind) == device_kind
        and precision in row["match"].get("precision", PRECISIONS)
        and max(K, V) <= row["match"].get("max_dim", MAX_DIM)
        and batch_heads <= row["match"].get("max_batch_heads", batch_heads)
    )
    config = KdaConfig(**row["config"])
    v_tile = min(config.v_tile, max(BLOCK, ceil_pow2(V)))
    config = dataclasses.replace(config, v_tile=v_tile, segments=1 if packed else config.segments)
    if chunk_size is not None:
        # Four chunks of 32 tokens in pieces do not fit into Hopper's shared memory.
        stages = min(config.hopper_stages, 3) if (precision, chunk_size) == ("fp32", 32) else config.hopper_stages
        config = dataclasses.replace(config, chunk_size=chunk_size, hopper_stages=stages)
    large = precision != "16bit" and config.chunk_size == 32 and K > 128
    if large and block_shared is not None and block_shared < LARGEST_SHARED:
        raise ValueError(
            f"chunk_size=32 takes up to {LARGEST_SHARED} bytes of shared memory with float32 inputs and K={K}, and a "
            f"block can have {block_shared} on {device_kind}; chunk_size=16, the default there, fits"
        )
    return config


def hopper_refusal(*, K: int, V: int, T: int, precision: str) -> str | None:
    """Why the serial kernels for Hopper cannot serve a call there, or None where they can."""
    if precision == "tf32":
        return "the serial Hopper kernels have no products in one TF32 pass"
    largest = 128 if precision == "16bit" else 64
    if not 32 < K <= largest or V not in (64, 128, 256):
        return (
            f"the serial Hopper kernels take K from 33 to {largest} under {precision!r} and V of 64, 128 or 256, "
            f"got K={K} and V={V}"
        )
    if T % 8:
        return f"the serial Hopper kernels copy tiles of 8 tokens, into which T={T} cannot be cut"
    return None


def hopper_chunk_refusal(
    *,
    K: int,
    V: int,
    T: int,
    same_heads: bool,
    dtype: str,
    plain: bool,
    precision: str,
    chunk_size: int,
    raw: bool = False,
    packed: bool = False,
) -> str | None:
    """Why the Hopper kernels of one chunk cannot serve a call, or None where they can.

    same_heads: whether there is a value head a key head; plain: whether it is KDA, without segments; raw: whether
    anything comes raw.
    """
    if not plain:
        return "the Hopper kernels of one chunk are for KDA, without segment_ids"
    more = "" if same_heads else " and more value heads"
    if precision == "fp32":
        if raw or packed:
            what = "raw inputs" if raw else "packed sequences"
            return f"the Hopper kernels of one chunk have no float32-accurate products for {what}"
        if (K, V, chunk_size) != (64, 64, 16) or dtype != "float32" or not same_heads:
            return (
                "the Hopper kernels of one chunk with float32-accurate products take float32, K and V of 64, chunks of "
                f"16 and a value head a key head, got {dtype}, K={K}, V={V}, chunks of {chunk_size}{more}"
            )
    elif dtype != "bfloat16":
        return f"the Hopper kernels of one chunk multiply bfloat16, got {dtype}"
    elif K not in (64, 128) or V not in (64, 128, 256) or not same_heads:
        return (
            "the Hopper kernels of one chunk take K of 64 or 128, V of 64, 128 or 256 and a value head a key head, "
            f"got K={K}, V={V}{more}"
        )
    if T % 8:
        return f"the Hopper kernels of one chunk copy tiles of 8 tokens, into which T={T} cannot be cut"
    return None
