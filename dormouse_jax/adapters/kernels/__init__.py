"""The operators on Pallas kernels, a module a family.

Its functions are those of the family's plain reference, with `out_dtype`, `tiles` and `interpret` besides. `rebuild`
and `bypass` give the result and what the backward needs beyond the arrays of the call, `rebuild_backward` and
`bypass_backward` the gradients, of any float dtype. Products of a layer's weight with its tokens are XLA's, but where
`BypassConfig` says otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pallas_kernels.adapters as kernels
from dormouse_jax.adapters.kernels.low_rank import PAIRS
from dormouse_jax.dispatch import UNPROVEN, Device
from pallas_kernels import gemm

# Part of the card that the tiles of a layer's product have to fill for the Hopper kernel, which adds LoRA's update on
# the way, to take less time than XLA's product.
FILLED = 0.75


def choose(
    operator: str, x: dict[str, Any], dtype: str, precision: str, device: Device, *, hopper: bool, forced: bool
) -> Any:
    """The configuration of an operator's kernels on checked arrays.

    Args:
      operator: "lora.rebuild".
      dtype: of the products' operands.
      hopper: whether with the kernels that only Hopper cards run.
      forced: whether they are to run even where others should be faster.

    Raises:
      ValueError: there are none that serve the call.
    """
    family, form = operator.split(".")
    choose = _rebuild if form == "rebuild" else _bypass
    config = choose(family, x, precision, device)
    few_proven = forced or "adapters_few_tokens" not in UNPROVEN
    if operator == "lora.bypass" and not hopper and precision == "16bit" and x["base"] is not None and few_proven:
        T, (O, I) = x["x"].shape[0], x["base"].shape
        if T <= kernels.MAX_FEW_TOKENS:
            few = kernels.choose_few_tokens(T, O, I, x["A"].shape[0], block_shared=device.block_shared)
            config = dataclasses.replace(config, few=few)
    if hopper:
        if not isinstance(config, kernels.BypassConfig):
            raise ValueError(f"there are no Hopper kernels for {operator}")
        config = _on_hopper(family, x, dtype, precision, device, config, forced)
    return config


def _rebuild(family: str, x: dict[str, Any], precision: str, device: Device) -> Any:
    if family == "oft":
        O, I = x["base"].shape
        return kernels.choose_block_diagonal(O, I, x["P"].shape[1], precision)
    if family == "lokr":
        return kernels.choose_kronecker(_shape(x, "W1"), _shape(x, "W2"))
    (down, up), *_ = pairs = PAIRS[family]
    (rank, I), O = x[down].shape, x[up].shape[0]
    options = {"precision": precision, "dora": x.get("magnitude") is not None, "block_shared": device.block_shared}
    return kernels.choose_low_rank(O, I, rank, pairs=len(pairs), **options)


def _bypass(family: str, x: dict[str, Any], precision: str, device: Device) -> Any:
    T = x["x"].shape[0]
    if not T:
        raise ValueError("the kernels take at least one token")
    if family == "oft":
        features = x["x"].shape[1] if x["base"] is None else max(x["base"].shape)
        return kernels.choose_block_diagonal(T, features, x["P"].shape[1], precision)
    if family == "lokr":
        # Blackwell's tensor memory wants 16-bit operands in shared memory once more: 360 KB of what Hopper has 230 for.
        doubled = precision == "16bit" and not device.is_hopper
        shared = device.block_shared // (2 if doubled else 1)
        return kernels.BypassConfig(kernels.choose_tokens(_shape(x, "W1"), _shape(x, "W2"), T, precision, shared))
    if x.get("magnitude") is not None:
        raise ValueError("the kernels of activations take no magnitude")
    (down, up), *_ = pairs = PAIRS[family]
    (rank, I), O = x[down].shape, x[up].shape[0]
    options: dict[str, Any] = {"precision": precision, "block_shared": device.block_shared}
    rows, cols = (T, max(O, I)) if family == "lora" else (O, I)  # of what the kernels write
    return kernels.BypassConfig(kernels.choose_low_rank(rows, cols, rank, pairs=len(pairs), **options))


def _on_hopper(
    family: str,
    x: dict[str, Any],
    dtype: str,
    precision: str,
    device: Device,
    config: kernels.BypassConfig,
    forced: bool,
) -> kernels.BypassConfig:
    """The configuration with the layer's own products on the Hopper kernel."""
    if precision != "16bit":
        raise ValueError(
            f"the Hopper kernel adds products of 16-bit operands, and these are of precision {precision!r}"
        )
    if family == "loha":
        O, I = x["B1"].shape[0], x["A1"].shape[1]
    elif x["base"] is None:
        raise ValueError("without base there is no product of a layer's size")
    else:
        O, I = x["base"].shape
    T = x["x"].shape[0]

    def product(M: int, N: int, K: int, **transposed: bool) -> gemm.MosaicConfig:
        problem = gemm.Problem(M, N, K, precision, dtype, x["x"].dtype.name, **transposed)
        if (reason := gemm.why_triton(problem)) and not forced:
            raise ValueError(reason)
        # Some of these come out in float32, with which the largest tiles do not fit: ones are taken that fit both.
        problem = dataclasses.replace(problem, out_dtype="float32")
        found = gemm.choose_mosaic(problem, device_kind=device.kind, cores=device.cores)
        m, n = found.tiles(M, N)
        filled = M * N / (-(-m * n // found.blocks) * found.blocks * found.tile_m * found.tile_n)
        if not forced and (found.split > 1 or filled < FILLED):
            raise ValueError(f"the Hopper kernel's tiles fill {filled:.0%} of the card only, where [{M}, {N}] come out")
        return dataclasses.replace(found, split=1)

    return dataclasses.replace(
        config,
        forward=product(T, O, I, transpose_b=True),
        backward=product(T, I, O),
        weight=product(O, I, T, transpose_a=True) if family == "loha" else None,
    )


def _shape(x: dict[str, Any], factor: str) -> tuple[int, int]:
    if factor in x:
        return x[factor].shape
    return x[factor + "a"].shape[0], x[factor + "b"].shape[1]
