"""OFT: the operators `oft.rebuild` and `oft.bypass`."""

from __future__ import annotations

from typing import Any

import jax

from dormouse_jax import validation as check
from dormouse_jax.adapters import call

SIDES = ("input", "output")


def rebuild(
    P: jax.Array,
    base: jax.Array,
    *,
    side: str,
    neumann: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The weight of a linear layer under OFT: its rows or columns rotated, in k blocks of n.

        Q  = P - P^T,    R = (I + Q) (I - Q)^-1 (Cayley), in each block
        W' = blockdiag(R)^T base on the output side,    base blockdiag(R)^T on the input side

    Args:
      P: `[k, n, n]`, float32, bfloat16 or float16; only its skew part counts.
      base: `[O, I]`, the layer's weight, with k n = O on the output side and k n = I on the input side.
      side: "output", the rotation that LyCORIS applies, or "input", PEFT's.
      neumann: whether R is I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4, which is near it for a small Q. PEFT approximates this R, but
        its exact branch has R^T.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_triton" or "xla", plain JAX. None takes
        "pallas" on an NVIDIA GPU, where a GPU has shown it to be right, and under `interpret_kernels()`, and "xla"
        elsewhere. Kernels take blocks whose n is a power of two up to 64.

    Returns:
      `[O, I]` in base's dtype. Differentiable in P and base; gradients have their dtypes. R is computed in float32, and
      R - I is rounded where products are 16 bit.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.

    From Qiu et al., "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", 2023 (arXiv:2306.07280).
    """
    operator = "oft.rebuild"
    if base is None:
        raise TypeError(f"{operator}: base must be an array, got None: there is no update without a weight")
    x = call.arrays(operator, P=P, base=base)
    size = _check(operator, x, side, neumann)
    check.require_shape(operator, "base", x["base"], "[O, I]", (size, "I") if side == "output" else ("O", size))
    _require_features(operator, x["base"])
    return call.call(
        operator,
        x,
        precision=precision,
        implementation=implementation,
        out_dtype=x["base"].dtype,
        side=side,
        neumann=bool(neumann),
    )


def bypass(
    x: jax.Array,
    P: jax.Array,
    *,
    side: str,
    base: jax.Array | None = None,
    bias: jax.Array | None = None,
    neumann: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A linear layer under OFT, on its tokens.

        y = (x base^T) blockdiag(R) + bias on the output side,    (x blockdiag(R)) base^T + bias on the input side

    It is x W'^T + bias with the W' of `rebuild`: the bias is not rotated. Without base it is x blockdiag(R), to be
    applied to the outputs of a layer, before its bias, or to its inputs.

    Args:
      x: `[..., I]`, float32, bfloat16 or float16; without base `[..., k n]`.
      P: `[k, n, n]`; only its skew part counts.
      side: "output" or "input", as in `rebuild`.
      base: `[O, I]`, the layer's weight, with k n = O or I by side; None for the rotation alone.
      bias: `[O]`, of the layer, any of the three dtypes; it needs base.
      neumann: as in `rebuild`.
      precision: of the matrix products. "fp32" (float32-accurate; the default where all operands are float32), "tf32"
        (one TF32 pass, float32 operands) or "16bit" (operands rounded to the 16-bit dtype; the default where one has
        it). Sums are float32 always.
      implementation: "pallas" (the best kernels for the device), "pallas_triton" or "xla", plain JAX. None takes
        "pallas" on an NVIDIA GPU, where a GPU has shown it to be right, and under `interpret_kernels()`, and "xla"
        elsewhere. Kernels take blocks whose n is a power of two up to 64.

    Returns:
      `[..., O]` in x's dtype; without base x's shape. Differentiable in every array; gradients have its dtype. For the
      backward x base^T is kept on the output side.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above; float16 meets bfloat16.
      NotImplementedError: the named implementation cannot serve the call.
    """
    operator = "oft.bypass"
    arrays = call.arrays(operator, x=x, P=P, base=base, bias=bias)
    O = I = _check(operator, arrays, side, neumann)
    if base is not None:
        shape = (O, "I") if side == "output" else ("O", I)
        check.require_shape(operator, "base", arrays["base"], "[O, I]", shape)
        _require_features(operator, arrays["base"])
        O, I = arrays["base"].shape
    call.base_and_bias(operator, arrays, O, I)
    shape, dtype = arrays["x"].shape, arrays["x"].dtype
    arrays["x"] = call.tokens(operator, arrays["x"], I, "[..., k n]" if base is None else "[..., I]")
    y = call.call(
        operator,
        arrays,
        precision=precision,
        implementation=implementation,
        out_dtype=dtype,
        keeps=base is not None and side == "output",
        side=side,
        neumann=bool(neumann),
    )
    return y.reshape(*shape[:-1], O)


def _check(operator: str, x: call.Arrays, side: Any, neumann: Any) -> int:
    """Checks what both operators take; k n."""
    check.require_choice(operator, "side", side, SIDES)
    check.require_choice(operator, "neumann", neumann, (False, True))
    P = x["P"]
    if P.ndim != 3 or P.shape[1] != P.shape[2] or min(P.shape) < 1:
        raise ValueError(f"{operator}: P must have shape [k, n, n], k and n at least 1, got {list(P.shape)}")
    return P.shape[0] * P.shape[1]


def _require_features(operator: str, base: jax.Array) -> None:
    if min(base.shape) < 1:
        raise ValueError(f"{operator}: O and I must be at least 1, got base of shape {list(base.shape)}")
