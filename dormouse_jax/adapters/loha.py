"""LoHa: the operators `loha.rebuild` and `loha.bypass`."""

from __future__ import annotations

from typing import Any

import jax

from dormouse_jax.adapters import call


def rebuild(
    A1: jax.Array,
    B1: jax.Array,
    A2: jax.Array,
    B2: jax.Array,
    *,
    alpha: float,
    base: jax.Array | None = None,
    rank_stabilized: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The weight of a linear layer under LoHa.

        W' = base + s (B1 A1) * (B2 A2),    elementwise; s = alpha / r, or alpha / sqrt(r) with rank_stabilized

    Args:
      A1, A2: `[r, I]`, float32, bfloat16 or float16.
      B1, B2: `[O, r]`.
      alpha: a Python number.
      base: `[O, I]`, the layer's weight; None for the update alone.
      rank_stabilized: whether s falls with the root of the rank.
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

    From Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning", 2021
    (arXiv:2108.06098).
    """
    operator = "loha.rebuild"
    x = call.arrays(operator, A1=A1, B1=B1, A2=A2, B2=B2, base=base)
    scale, _ = _check(operator, x, alpha, rank_stabilized)
    return call.call(
        operator,
        x,
        precision=precision,
        implementation=implementation,
        out_dtype=None if base is None else x["base"].dtype,
        scale=scale,
    )


def bypass(
    x: jax.Array,
    A1: jax.Array,
    B1: jax.Array,
    A2: jax.Array,
    B2: jax.Array,
    *,
    alpha: float,
    base: jax.Array | None = None,
    bias: jax.Array | None = None,
    rank_stabilized: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A linear layer under LoHa, on its tokens.

        y = x base^T + s x ((B1 A1) * (B2 A2))^T + bias,    s = alpha / r, or alpha / sqrt(r) with rank_stabilized

    It is x W'^T + bias with the W' of `rebuild`. Plain JAX forms blocks of rows of it, one after the other. Kernels
    multiply by W' in the products' dtype, but for float32 factors of a 16-bit base: the update has a product of its own
    then, so that one too small to change the rounded base is not lost. In the gradient of x it counts as in W'.

    Args:
      x: `[..., I]`, float32, bfloat16 or float16.
      A1, A2: `[r, I]`.
      B1, B2: `[O, r]`.
      alpha: a Python number.
      base: `[O, I]`, the layer's weight; None for the update of y alone.
      bias: `[O]`, of the layer, any of the three dtypes; it needs base.
      rank_stabilized: as in `rebuild`.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_mosaic" (Hopper, 16-bit operands: the
        layer's products are kernels too; a 16-bit base with float32 factors has both of y in one), "pallas_triton"
        (they are XLA's) or "xla", plain JAX. None takes "pallas" on an NVIDIA GPU, where a GPU has shown it to be
        right, and under `interpret_kernels()`, and "xla" elsewhere. Kernels take ranks up to 128; they form the
        update, or its sum with base, for as long as they multiply by it.

    Returns:
      `[..., O]` in x's dtype. Differentiable in every array; gradients have its dtype. For the backward nothing but the
      arguments is kept.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.
    """
    operator = "loha.bypass"
    arrays = call.arrays(operator, x=x, A1=A1, B1=B1, A2=A2, B2=B2, base=base, bias=bias)
    scale, (O, I) = _check(operator, arrays, alpha, rank_stabilized)
    shape, dtype = arrays["x"].shape, arrays["x"].dtype
    arrays["x"] = call.tokens(operator, arrays["x"], I, "[..., I]")
    y = call.call(operator, arrays, precision=precision, implementation=implementation, out_dtype=dtype, scale=scale)
    return y.reshape(*shape[:-1], O)


def _check(operator: str, x: call.Arrays, alpha: Any, rank_stabilized: Any):
    """Checks what both operators take; (s, (O, I))."""
    r, O, I = call.sizes_of_product(operator, "A1", "B1", x, ("r", "O", "I"))
    for name, axes, shape in (("A2", "[r, I]", (r, I)), ("B2", "[O, r]", (O, r))):
        if x[name].shape != shape:
            raise ValueError(f"{operator}: {name} must have shape {axes} = {list(shape)}, got {list(x[name].shape)}")
    call.base_and_bias(operator, x, O, I)
    return call.scale_of_rank(operator, alpha, r, rank_stabilized), (O, I)
