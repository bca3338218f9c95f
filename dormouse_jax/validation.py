"""Checks of arguments whose errors say what was expected and what came."""

from __future__ import annotations

import operator as op
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def as_array(operator: str, name: str, x: Any) -> jax.Array:
    """`x` as a JAX array, or a TypeError that names it."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{operator}: {name} must be an array, got {type(x).__name__}")
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{operator}: {name} must be an array that JAX can take, got {type(x).__name__}") from error


def require_shape(operator: str, name: str, x: jax.Array, axes: str, shape: Sequence[int | str]) -> None:
    """Raises a ValueError unless `x` has `shape`, in which a string stands for any size.

    >>> require_shape("kda", "g", g, "[B, T, HV, K]", (2, 128, 4, 64))
    ValueError: kda: g must have shape [B, T, HV, K] = [2, 128, 4, 64], got [2, 128, 4]
    """
    fits = x.ndim == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, x.shape, strict=True))
    if not fits:
        sizes = f" = [{', '.join(str(n) for n in shape)}]" if any(isinstance(n, int) for n in shape) else ""
        raise ValueError(f"{operator}: {name} must have shape {axes}{sizes}, got {list(x.shape)}")


def require_dtype(operator: str, name: str, x: jax.Array, dtypes: Sequence[str]) -> None:
    """Raises a TypeError unless the dtype of `x` is one of `dtypes`."""
    if str(x.dtype) not in dtypes:
        expected = " or ".join([", ".join(dtypes[:-1]), dtypes[-1]] if len(dtypes) > 1 else dtypes)
        raise TypeError(f"{operator}: {name} must be {expected}, got {x.dtype}")


def require_choice(operator: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises a ValueError unless `value` is one of `choices`."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{operator}: {name} must be one of {expected}, got {value!r}")


def as_float(operator: str, name: str, value: Any) -> float:
    """A Python number out of `value`, or a TypeError that names it: kernels are compiled for the number."""
    try:
        return float(value)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        raise TypeError(f"{operator}: {name} must be a Python number, got {type(value).__name__}") from None


def as_index(operator: str, name: str, value: Any) -> int:
    """A Python int out of `value`, or a TypeError that names it."""
    try:
        return op.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        raise TypeError(f"{operator}: {name} must be a Python int, got {type(value).__name__}") from None
