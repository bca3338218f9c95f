"""Configurations of the adapter kernels: what can be chosen, and what is chosen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.backend_triton import MIN_CONTRACTION, PRECISIONS, ceil_pow2
from pallas_kernels.gemm import MosaicConfig

MAX_RANK = 128  # a tile holds whole ranks
MAX_BLOCK = 64  # a tile holds whole blocks
MAX_FEW_TOKENS = 128  # a tile holds all of them
MAX_FACTOR = 128  # a tile holds either factor of a Kronecker product
LARGE_SHARED = 232448  # bytes of shared memory of a block on data-centre cards from Hopper on
MAX_ELEMENTS = 2**31 - 1  # the Triton backend counts elements in 32 bits
# Programs that sums over a weight are split into: two a multiprocessor of the largest cards. More of them would write
# more parts.
PROGRAMS = 264
# Elements of a weight from which on wide tiles still make programs enough.
WIDE = 2**22


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernels of a weight are cut and launched.

    Attributes:
      rows, cols: of the weight, or of LoKr's W2, that one program works on at a time.
      warps, stages: warps a program, and stages of its software pipeline.
    """

    rows: int
    cols: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        for name in ("rows", "cols"):
            size = getattr(self, name)
            if size not in (16, 32, 64, 128, 256):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {size}")
        _check_launch(self.warps, self.stages)


@dataclasses.dataclass(frozen=True)
class LowRankTiles:
    """The tiles of a weight whose update is of low rank, forward and backward."""

    forward: Tiles
    backward: Tiles


@dataclasses.dataclass(frozen=True)
class KroneckerTiles:
    """How a weight under a Kronecker product is cut and launched.

    Attributes:
      forward: the tiles of the weight.
      backward: the tiles of W2.
      at_once: blocks of the weight that a program of the backward reads before it works on the first.
      programs: of the backward.
    """

    forward: Tiles
    backward: Tiles
    at_once: int
    programs: int

    def __post_init__(self):
        for name in ("at_once", "programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class FewTokens:
    """How the kernels of LoRA on few tokens are cut and launched.

    Attributes:
      cols: of the layer's product that one program computes, for all tokens.
      depth: of its contraction that it takes at a time.
      split: the parts that the contraction is cut into, at most.
      out_cols: columns that a program of what follows works on.
      warps, stages: warps a program of the product, and stages of its software pipeline.
    """

    cols: int
    depth: int
    split: int
    out_cols: int = 32
    warps: int = 4
    stages: int = 4

    def __post_init__(self):
        for name in ("cols", "depth", "out_cols"):
            size = getattr(self, name)
            if size not in (16, 32, 64, 128):
                raise ValueError(f"{name} must be 16, 32, 64 or 128, got {size}")
        if self.split < 1:
            raise ValueError(f"split must be at least 1, got {self.split}")
        _check_launch(self.warps, self.stages)


@dataclasses.dataclass(frozen=True)
class BypassConfig:
    """How a layer under LoRA, LoHa or LoKr is computed on its tokens.

    Attributes:
      update: the tiles of the kernels that form the update, or add it: LowRankTiles or TokenTiles.
      few: how LoRA's kernels of few tokens are cut, which are all that runs then; None where there are more.
      forward, backward, weight: the configurations of the layer's own products, of y, of the gradient of x and, for
        LoHa, of the gradient of the weight, where the Hopper kernel computes them; None where XLA does.
    """

    update: Any
    few: FewTokens | None = None
    forward: MosaicConfig | None = None
    backward: MosaicConfig | None = None
    weight: MosaicConfig | None = None


@dataclasses.dataclass(frozen=True)
class TokenTiles:
    """How the kernels of tokens under a Kronecker product are cut and launched.

    Attributes:
      W2_first: whether W2 meets the tokens before W1 does.
      forward_programs, backward_programs: that tokens are shared out to at most. Those of the backward leave a part of
        the gradients each.
      warps, stages: warps a program, and stages of its software pipeline.
    """

    W2_first: bool
    forward_programs: int
    backward_programs: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        for name in ("forward_programs", "backward_programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _check_launch(self.warps, self.stages)


def _check_launch(warps: int, stages: int) -> None:
    if warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {warps}")
    if not 1 <= stages <= 8:
        raise ValueError(f"stages must lie between 1 and 8, got {stages}")


def choose_low_rank(
    O: int, I: int, rank: int, *, pairs: int, precision: str, dora: bool = False, block_shared: int = LARGE_SHARED
) -> LowRankTiles:
    """The tiles of a weight [O, I] whose update comes from `pairs` products of this rank.

    Args:
      dora: whether its rows have magnitudes.
      block_shared: bytes of shared memory that a block can have.

    Raises:
      ValueError: the kernels do not serve it.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if rank > MAX_RANK:
        raise ValueError(f"the kernels take ranks up to {MAX_RANK}, and this is {rank}")
    _require_countable(O, I)
    # By the bytes of all pairs' factors at a row and a column: larger tiles spill, or do not fit into the shared memory
    # of consumer cards. Float32 operands are three 16-bit pieces, and products of them take the most registers.
    R = padded_rank(rank)
    across = R * pairs * {"16bit": 2, "tf32": 4, "fp32": 6}[precision]
    largest = next(size for size, limit in ((64, 256), (32, 512), (16, math.inf)) if across <= limit)
    largest = min(largest, 32) if precision == "fp32" else largest
    forward = Tiles(_cut(O, largest), _cut(I, largest), warps=8 if precision == "fp32" and pairs == 2 else 4)
    half = precision == "16bit"
    if half and O * I >= WIDE:
        if pairs == 1 and largest == 64:
            forward = Tiles(_cut(O, 64), _cut(I, 128), warps=8 if R <= 32 else 4)
        elif pairs == 2 and R <= 32:
            forward = Tiles(_cut(O, 32), _cut(I, 128))
    # Wide strips leave few shares of dB; dA of one is held in registers, and of two products the products' tiles.
    # Where dA, or dA^T, has 64 rows and more, a tile of the weight must have as many: both products of G are then
    # asynchronous ones of Hopper. Else Triton's pipeline loads the next G over the one that the product for dA reads.
    warps, stages = 8, 2
    if half and block_shared >= LARGE_SHARED and R * pairs <= 128 and not dora and R <= 64:
        # As timed on an H200. In a larger weight narrow strips leave too many shares of dB.
        if pairs == 2:
            rows, cols, warps, stages = (64, 128, 4, 2) if R == 16 else (64, 128, 8, 3)
        elif R == 64:
            rows, cols, stages = 64, 256, 3
        else:
            rows, cols, warps, stages = (64, 128, 4, 3) if O * I <= 4 * WIDE else (64, 256, 8, 2)
    elif half:
        rows, cols = (
            (64, 256 if pairs == 1 and not dora else 128) if R * pairs <= 64 else (64 if pairs == 1 else 32, 128)
        )
        if block_shared < LARGE_SHARED and R * pairs >= 64:
            rows, cols = 32, 64 if R * pairs <= 128 else 32
    else:
        rows, cols = (32, 64) if R * pairs <= (64 if block_shared >= LARGE_SHARED else 32) else (16, 32)
        if R * pairs > 128:
            rows, cols = 16, 16
    return LowRankTiles(forward, Tiles(_cut(O, rows), _cut(I, cols), warps=warps, stages=stages))


def choose_few_tokens(T: int, O: int, I: int, rank: int, *, block_shared: int = LARGE_SHARED) -> FewTokens:
    """How LoRA of 16 bit on T tokens is cut, for a layer [O, I]; block_shared as in `choose_low_rank`.

    Raises:
      ValueError: the kernels do not serve it.
    """
    if T > MAX_FEW_TOKENS:
        raise ValueError(f"a tile holds {MAX_FEW_TOKENS} tokens, and these are {T}")
    if rank > MAX_RANK:
        raise ValueError(f"the kernels take ranks up to {MAX_RANK}, and this is {rank}")
    _require_countable(O, I)
    cols = 64
    # Of either product: two programs a multiprocessor, each with four steps or more.
    split = max(1, min(PROGRAMS // -(-max(O, I) // cols), min(O, I) // (4 * 64)))
    return FewTokens(cols, 64, split, stages=4 if block_shared >= LARGE_SHARED else 3)


def choose_kronecker(W1: tuple[int, int], W2: tuple[int, int]) -> KroneckerTiles:
    """The tiles of a weight that is the Kronecker product of matrices of these shapes, and of W2 in its backward.

    Raises:
      ValueError: the kernels do not serve it.
    """
    O, I = W1[0] * W2[0], W1[1] * W2[1]
    _require_countable(O, I)
    backward = Tiles(_cut(W2[0], 64), _cut(W2[1], 64))
    forward = backward if O * I < WIDE else Tiles(_cut(O, 64), _cut(I, 128))
    # Few tiles of W2 want many blocks on their way to each program, many tiles many programs.
    tiles_of_block = -(-W2[0] // backward.rows) * -(-W2[1] // backward.cols)
    if tiles_of_block >= 16:
        return KroneckerTiles(forward, backward, at_once=2, programs=2 * PROGRAMS)
    if O * I >= WIDE:
        return KroneckerTiles(forward, dataclasses.replace(backward, warps=8), at_once=8, programs=PROGRAMS // 2)
    return KroneckerTiles(forward, backward, at_once=4, programs=PROGRAMS)


def choose_tokens(
    W1: tuple[int, int], W2: tuple[int, int], T: int, precision: str, block_shared: int = LARGE_SHARED
) -> TokenTiles:
    """How T tokens are cut under the Kronecker product of matrices of these shapes; block_shared as in
    `choose_low_rank`.

    Raises:
      ValueError: the kernels do not serve it.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    (a, b), (c, d) = W1, W2
    largest = MAX_FACTOR // (1 if precision == "16bit" else 2) // (1 if block_shared >= LARGE_SHARED else 2)
    if max(a, b, c, d) > largest:
        raise ValueError(f"the kernels take factors of sizes up to {largest}, and these are {a} x {b} and {c} x {d}")
    _require_countable(T, max(a * c, b * d))
    A, B, C, D = (padded_rank(size) for size in (a, b, c, d))
    large = max(A, B, C, D) > (64 if precision == "16bit" else 32)
    return TokenTiles(
        W2_first=B * C * (D + A) <= A * D * (B + C),
        forward_programs=2 * PROGRAMS,
        backward_programs=PROGRAMS,
        warps=8 if large else 4,
        stages=3 if precision == "16bit" and block_shared >= LARGE_SHARED and not large else 2,
    )


def choose_block_diagonal(O: int, I: int, n: int, precision: str) -> Tiles:
    """The tiles of a weight [O, I] that blocks of n turn: rows along the turned axis, cols along the other.

    Raises:
      ValueError: the kernels do not serve it.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if n > MAX_BLOCK or n & (n - 1):
        raise ValueError(f"the kernels take blocks of a power of two up to {MAX_BLOCK}, and these are of {n}")
    _require_countable(O, I)
    size = max(n, 32 if precision == "fp32" else 64)
    wide = precision == "16bit" and n < 64 and O * I >= WIDE // 4  # of blocks of 64 smaller cards spill them
    return Tiles(size, 32 if precision == "fp32" else 128 if wide else 64)


def padded_rank(rank: int) -> int:
    """The length of the contractions over the rank."""
    return max(MIN_CONTRACTION, ceil_pow2(rank))


def _require_countable(O: int, I: int) -> None:
    if O * I > MAX_ELEMENTS:
        raise ValueError(f"the kernels take weights of up to {MAX_ELEMENTS} elements, and this has {O} x {I}")


def _cut(size: int, largest: int) -> int:
    return min(largest, max(16, ceil_pow2(size)))
