"""LoRA: the operators `lora.rebuild` and `lora.bypass`."""

from __future__ import annotations

from typing import Any

import jax

from dormouse_jax import validation as check
from dormouse_jax.adapters import call


def rebuild(
    A: jax.Array,
    B: jax.Array,
    *,
    alpha: float,
    base: jax.Array | None = None,
    rank_stabilized: bool = False,
    magnitude: jax.Array | None = None,
    detach_norm: bool = True,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The weight of a linear layer under LoRA.

        V  = base + s B A,    s = alpha / r, or alpha / sqrt(r) with rank_stabilized
        W' = V, or with a magnitude (DoRA) W'_o = magnitude_o V_o / |V_o| for each row o

    Args:
      A: `[r, I]`, float32, bfloat16 or float16.
      B: `[O, r]`.
      alpha: a Python number.
      base: `[O, I]`, the layer's weight; None for the update alone.
      rank_stabilized: whether s falls with the root of the rank.
      magnitude: `[O]`, of the rows of W', any of the three dtypes; it needs base. A row of zeros stays one.
      detach_norm: whether the backward takes |V_o| for a constant, as PEFT does; LyCORIS differentiates it.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_triton" or "xla", plain JAX. None takes
        "pallas" on an NVIDIA GPU, where a GPU has shown it to be right, and under `interpret_kernels()`, and "xla"
        elsewhere. Kernels take ranks up to 128.

    Returns:
      `[O, I]` in base's dtype, or without base in the dtype of the products' operands: the 16-bit one where there is
      any. Differentiable in every array; gradients have its dtype.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.

    From Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (arXiv:2106.09685); Kalajdzievski, "A
    Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023 (arXiv:2312.03732); Liu et al., "DoRA:
    Weight-Decomposed Low-Rank Adaptation", 2024 (arXiv:2402.09353).
    """
    operator = "lora.rebuild"
    x = call.arrays(operator, A=A, B=B, base=base, magnitude=magnitude)
    scale, _ = _check(operator, x, alpha, rank_stabilized, detach_norm)
    return call.call(
        operator,
        x,
        precision=precision,
        implementation=implementation,
        out_dtype=None if base is None else x["base"].dtype,
        scale=scale,
        detach_norm=bool(detach_norm),
    )


def bypass(
    x: jax.Array,
    A: jax.Array,
    B: jax.Array,
    *,
    alpha: float,
    base: jax.Array | None = None,
    bias: jax.Array | None = None,
    rank_stabilized: bool = False,
    magnitude: jax.Array | None = None,
    detach_norm: bool = True,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A linear layer under LoRA, on its tokens.

        u = x base^T + s (x A^T) B^T,    s = alpha / r, or alpha / sqrt(r) with rank_stabilized
        y = u + bias, or with a magnitude (DoRA) y_o = magnitude_o u_o / |V_o| + bias_o,    V = base + s B A

    It is x W'^T + bias with the W' of `rebuild`, which is not formed: the norms come from products with A and B.
    "pallas_triton" rounds x base^T to the products' dtype before it adds the rest, but for at most 128 tokens of 16
    bit, which have kernels of their own; these and the others round the sum alone.

    Args:
      x: `[..., I]`, float32, bfloat16 or float16.
      A: `[r, I]`.
      B: `[O, r]`.
      alpha: a Python number.
      base: `[O, I]`, the layer's weight; None for the update of y alone.
      bias: `[O]`, of the layer, any of the three dtypes; it needs base.
      rank_stabilized, magnitude, detach_norm: as in `rebuild`.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_mosaic" (Hopper, 16-bit operands: the update's
        product is part of the layer's), "pallas_triton" (a kernel adds the update to XLA's product) or "xla", plain
        JAX. None takes "pallas" on an NVIDIA GPU, where a GPU has shown it to be right, and under
        `interpret_kernels()`, and "xla" elsewhere. Kernels take ranks up to 128 and no magnitude.

    Returns:
      `[..., O]` in x's dtype. Differentiable in every array; gradients have its dtype. For the backward x A^T is kept,
      and u with a magnitude.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.
    """
    operator = "lora.bypass"
    arrays = call.arrays(operator, x=x, A=A, B=B, base=base, bias=bias, magnitude=magnitude)
    scale, (O, I) = _check(operator, arrays, alpha, rank_stabilized, detach_norm)
    shape, dtype = arrays["x"].shape, arrays["x"].dtype
    arrays["x"] = call.tokens(operator, arrays["x"], I, "[..., I]")
    y = call.call(
        operator,
        arrays,
        precision=precision,
        implementation=implementation,
        out_dtype=dtype,
        keeps=True,
        scale=scale,
        detach_norm=bool(detach_norm),
    )
    return y.reshape(*shape[:-1], O)


def _check(operator: str, x: call.Arrays, alpha: Any, rank_stabilized: Any, detach_norm: Any):
    """Checks what both operators take; (s, (O, I))."""
    r, O, I = call.sizes_of_product(operator, "A", "B", x, ("r", "O", "I"))
    call.base_and_bias(operator, x, O, I)
    check.require_choice(operator, "detach_norm", detach_norm, (False, True))
    if x["magnitude"] is not None:
        check.require_shape(operator, "magnitude", x["magnitude"], "[O]", (O,))
        if x["base"] is None:
            raise ValueError(f"{operator}: base must be given with magnitude, which scales its rows, got None")
    return call.scale_of_rank(operator, alpha, r, rank_stabilized), (O, I)
