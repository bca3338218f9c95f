"""LoKr: the operators `lokr.rebuild` and `lokr.bypass`."""

from __future__ import annotations

from typing import Any

import jax

from dormouse_jax import validation as check
from dormouse_jax.adapters import call

Factor = jax.Array | tuple[jax.Array, jax.Array]


def rebuild(
    W1: Factor,
    W2: Factor,
    *,
    scale: float,
    base: jax.Array | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The weight of a linear layer under LoKr.

        W' = base + scale W1 (x) W2,    (x) the Kronecker product; O = a c, I = b d

    Args:
      W1: `[a, b]`, or a pair `[a, r]`, `[r, b]` whose product it is; float32, bfloat16 or float16.
      W2: `[c, d]`, or a pair `[c, r]`, `[r, d]`.
      scale: a Python number. It is never derived from a rank: where both factors are full, PEFT scales by alpha / r and
        LyCORIS by 1.
      base: `[O, I]`, the layer's weight; None for the update alone.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_triton" or "xla", plain JAX. None takes
        "pallas" on an NVIDIA GPU, where a GPU has shown it to be right, and under `interpret_kernels()`, and "xla"
        elsewhere.

    Returns:
      `[O, I]` in base's dtype, or without base in the dtype of the products' operands: the 16-bit one where there is
      any. Differentiable in every array; gradients have its dtype.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.

    From Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation", 2023
    (arXiv:2309.14859).
    """
    operator = "lokr.rebuild"
    x = call.arrays(operator, **_named(operator, "W1", W1), **_named(operator, "W2", W2), base=base)
    _check(operator, x)
    return call.call(
        operator,
        x,
        precision=precision,
        implementation=implementation,
        out_dtype=None if base is None else x["base"].dtype,
        scale=call.number(operator, "scale", scale),
    )


def bypass(
    x: jax.Array,
    W1: Factor,
    W2: Factor,
    *,
    scale: float,
    base: jax.Array | None = None,
    bias: jax.Array | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A linear layer under LoKr, on its tokens.

        y = x base^T + scale reshape(W1 X W2^T) + bias,    X [b, d] the token x, and W1 X W2^T [a, c]

    It is x W'^T + bias with the W' of `rebuild`; no Kronecker product is formed.

    Args:
      x: `[..., I]`, float32, bfloat16 or float16.
      W1, W2, scale: as in `rebuild`.
      base: `[O, I]`, the layer's weight; None for the update of y alone.
      bias: `[O]`, of the layer, any of the three dtypes; it needs base.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_mosaic" (Hopper, 16-bit operands: the
        layer's products are kernels too), "pallas_triton" (they are XLA's) or "xla", plain JAX. None takes "pallas" on
        an NVIDIA GPU, where a GPU has shown it to be right, and under `interpret_kernels()`, and "xla" elsewhere.
        Kernels take factors of sizes up to 128 in 16 bit on Hopper cards and to 64 on others; of float32
        operands up to 64 on data-centre cards from Hopper on, and to 32 on others.

    Returns:
      `[..., O]` in x's dtype. Differentiable in every array; gradients have its dtype. For the backward nothing but the
      arguments is kept.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.
    """
    operator = "lokr.bypass"
    factors = _named(operator, "W1", W1) | _named(operator, "W2", W2)
    arrays = call.arrays(operator, x=x, **factors, base=base, bias=bias)
    O, I = _check(operator, arrays)
    shape, dtype = arrays["x"].shape, arrays["x"].dtype
    arrays["x"] = call.tokens(operator, arrays["x"], I, "[..., I]")
    y = call.call(
        operator,
        arrays,
        precision=precision,
        implementation=implementation,
        out_dtype=dtype,
        scale=call.number(operator, "scale", scale),
    )
    return y.reshape(*shape[:-1], O)


def _named(operator: str, name: str, factor: Any) -> dict[str, Any]:
    """A factor's array, or the two whose product it is, by name."""
    if not isinstance(factor, (tuple, list)):
        return {name: factor}
    if len(factor) != 2:
        raise ValueError(f"{operator}: {name} must be an array or a pair of them, got {len(factor)}")
    return {name + "a": factor[0], name + "b": factor[1]}


def _check(operator: str, x: call.Arrays) -> tuple[int, int]:
    """Checks what both operators take; (O, I)."""
    sizes = []
    for name, rows, columns in (("W1", "a", "b"), ("W2", "c", "d")):
        if name in x:
            check.require_shape(operator, name, x[name], f"[{rows}, {columns}]", (rows, columns))
            sizes.append(x[name].shape)
        else:
            sizes.append(call.sizes_of_product(operator, name + "b", name + "a", x, ("r", rows, columns))[1:])
        if min(sizes[-1]) < 1:
            raise ValueError(f"{operator}: {rows} and {columns} must be at least 1, got {name} {list(sizes[-1])}")
    (a, b), (c, d) = sizes
    call.base_and_bias(operator, x, a * c, b * d)
    return a * c, b * d
