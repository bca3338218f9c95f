"""What the operators of all adapter families share: checks of their arguments, the plan of a call, and its backward."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import validation as check
from dormouse_jax.dispatch import (
    Device,
    device_of,
    interpreting,
    require_hopper,
    require_proven,
    require_triton,
    warn_once,
)
from dormouse_jax.explain import OperatorCall, jitted
from dormouse_jax.reference.products import Products

IMPLEMENTATIONS = ("pallas", "pallas_triton", "pallas_mosaic", "xla")
ON_HOPPER = ("lora.bypass", "loha.bypass", "lokr.bypass")  # what kernels that only Hopper cards run are used for
FLOATS = ("float32", "bfloat16", "float16")
# Arrays that no product takes, so that they do not choose its precision.
ELEMENTWISE = ("bias", "magnitude")

Arrays = Mapping[str, Any]  # by name; None for an array that is not given


# Validation


def arrays(operator: str, **given: Any) -> dict[str, Any]:
    """The arrays by name, None where there is none, all of a dtype that adapters take."""
    found = {name: None if x is None else check.as_array(operator, name, x) for name, x in given.items()}
    for name, x in found.items():
        if x is not None:
            check.require_dtype(operator, name, x, FLOATS)
    return found


def tokens(operator: str, x: jax.Array, features: int, axes: str) -> jax.Array:
    """`x` [..., features] as [T, features]."""
    if x.ndim < 1 or x.shape[-1] != features:
        raise ValueError(f"{operator}: x must have shape {axes} = [..., {features}], got {list(x.shape)}")
    return x.reshape(math.prod(x.shape[:-1]), features)


def base_and_bias(operator: str, x: Arrays, O: int, I: int) -> None:
    """Checks the layer's own arrays against the sizes that the adapter has."""
    if x["base"] is not None:
        check.require_shape(operator, "base", x["base"], "[O, I]", (O, I))
    if x.get("bias") is not None:
        if x["base"] is None:
            raise ValueError(f"{operator}: bias must be None without base, got one of shape {list(x['bias'].shape)}")
        check.require_shape(operator, "bias", x["bias"], "[O]", (O,))


def sizes_of_product(operator: str, down: str, up: str, x: Arrays, axes: tuple[str, str, str]) -> tuple[int, int, int]:
    """(rank, rows, columns) of the product of x[up] `[rows, rank]` with x[down] `[rank, columns]`."""
    rank, rows, columns = axes
    check.require_shape(operator, down, x[down], f"[{rank}, {columns}]", axes[::2])
    check.require_shape(operator, up, x[up], f"[{rows}, {rank}]", (rows, x[down].shape[0]))
    sizes = (x[down].shape[0], x[up].shape[0], x[down].shape[1])
    if min(sizes) < 1:
        raise ValueError(
            f"{operator}: {rank}, {rows} and {columns} must be at least 1, got {down} of shape {list(x[down].shape)} "
            f"and {up} of shape {list(x[up].shape)}"
        )
    return sizes


def number(operator: str, name: str, value: Any) -> float:
    found = check.as_float(operator, name, value)
    if not math.isfinite(found):
        raise ValueError(f"{operator}: {name} must be a finite number, got {found}")
    return found


def scale_of_rank(operator: str, alpha: Any, rank: int, rank_stabilized: Any) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    check.require_choice(operator, "rank_stabilized", rank_stabilized, (False, True))
    return number(operator, "alpha", alpha) / (math.sqrt(rank) if rank_stabilized else rank)


def _dtype(operator: str, x: Arrays) -> str:
    """Of the products' operands: the 16-bit one where there is any."""
    halves: dict[str, str] = {}
    for name, array in x.items():
        if array is not None and name not in ELEMENTWISE and array.dtype != jnp.float32:
            halves.setdefault(array.dtype.name, name)
    if len(halves) > 1:
        (dtype, name), (other_dtype, other) = halves.items()
        raise TypeError(f"{operator}: {other} must be {dtype}, as {name} is, or float32, got {other_dtype}")
    return next(iter(halves), "float32")


# Dispatch


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call: everything about it that is not an array."""

    operator: str  # "lora.rebuild"
    implementation: str  # "pallas_mosaic", "pallas_triton" or "xla"
    config: Any
    products: Products
    out_dtype: str
    keeps: bool  # whether the backward needs more than the arrays of the call
    interpret: bool
    options: tuple[tuple[str, Any], ...]  # what the operator is told
    passed_over: tuple[tuple[str, str], ...]

    @property
    def family(self) -> str:
        return self.operator.split(".")[0]

    def function(self, direction: str) -> Callable[..., Any]:
        """The family's function of kernels or of plain JAX; direction is "" or "_backward"."""
        options = dict(self.options)
        if self.implementation == "xla":
            module = importlib.import_module(f"dormouse_jax.reference.{self.family}")
        else:
            module = importlib.import_module(f"dormouse_jax.adapters.kernels.{self.family}")
            options |= {"tiles": self.config, "interpret": self.interpret}
        return functools.partial(getattr(module, self.operator.split(".")[1] + direction), self.products, **options)

    def call(self, direction: str) -> OperatorCall:
        return OperatorCall(
            operator=self.operator,
            direction=direction,
            implementation=self.implementation,
            precision=self.products.precision,
            interpret=self.interpret,
            config=self.config,
            passed_over=self.passed_over,
        )


def call(
    operator: str,
    x: Arrays,
    *,
    precision: Any,
    implementation: Any,
    out_dtype: Any = None,
    keeps: bool = False,
    **options: Any,
) -> jax.Array:
    """Runs an operator on checked arrays.

    out_dtype: of the result; the dtype of the products' operands by default.
    """
    check.require_choice(operator, "implementation", implementation, (None, *IMPLEMENTATIONS))
    check.require_choice(operator, "precision", precision, (None, "fp32", "tf32", "16bit"))
    dtype = _dtype(operator, x)
    of_dtype = ("fp32", "tf32") if dtype == "float32" else ("16bit",)
    precision = of_dtype[0] if precision is None else precision
    if precision not in of_dtype:
        expected = " or ".join(repr(p) for p in of_dtype)
        raise ValueError(f"{operator}: precision must be {expected} for operands of dtype {dtype}, got {precision!r}")
    device, interpret = device_of(*(array for array in x.values() if array is not None)), interpreting()
    chosen, config, passed_over = _choose(operator, dict(x), dtype, precision, device, interpret, implementation)
    plan = Plan(
        operator=operator,
        implementation=chosen,
        config=config,
        products=Products(precision, dtype, device.platform),
        out_dtype=jnp.dtype(dtype if out_dtype is None else out_dtype).name,
        keeps=keeps,
        interpret=interpret and chosen != "xla",
        options=tuple(options.items()),
        passed_over=passed_over,
    )
    return _with_backward(plan, dict(x))


def _choose(
    operator: str,
    x: dict[str, Any],
    dtype: str,
    precision: str,
    device: Device,
    interpret: bool,
    asked: str | None,
) -> tuple[str, Any, tuple[tuple[str, str], ...]]:
    """The implementation, the one asked for or else the best that can serve the call; its configuration; and why
    better ones were passed over."""
    candidates = (*(("pallas_mosaic",) if operator in ON_HOPPER or asked == "pallas_mosaic" else ()), "pallas_triton")
    if asked == "xla":
        return "xla", None, tuple((name, "implementation='xla' was asked for") for name in candidates)
    passed_over, withheld = [], None
    for name in candidates:
        if asked not in (None, "pallas", name):
            passed_over.append((name, f"implementation={asked!r} was asked for"))
            continue
        hopper, named = name == "pallas_mosaic", asked == name or (asked == "pallas" and name == candidates[-1])
        found = None
        try:
            require_triton(device, interpret)
            if hopper:
                require_hopper(device, interpret, asked)
            found = _config(operator, x, dtype, precision, device, hopper=hopper, forced=interpret or asked == name)
            require_proven("adapters_hopper" if hopper else "adapters", interpret, named=named)
            break
        except NotImplementedError as reason:
            passed_over.append((name, str(reason)))
            if found is not None:  # where there is no kernel nothing is faster
                withheld = withheld or f"{name!r}: {reason}"
    else:
        if asked is not None:
            reason = dict(passed_over)[asked if asked in candidates else candidates[-1]]
            raise NotImplementedError(f"{operator}: implementation={asked!r} cannot serve this call: {reason}")
        name, found = "xla", None
    if withheld:
        warn_once(f"{operator}: taking {name!r}, not {withheld}")
    return name, found, tuple(passed_over)


def _config(operator: str, *of_call: Any, **options: Any) -> Any:
    """The configuration of the kernels, or a NotImplementedError that says why they cannot serve the call."""
    try:
        return _kernels().choose(operator, *of_call, **options)
    except (ImportError, ValueError) as reason:
        raise NotImplementedError(str(reason)) from reason


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import, and its Triton backend is on its way out of JAX.
    from dormouse_jax.adapters import kernels

    return kernels


# Forward


def _forward(plan, x):
    return _forward_with_residuals(plan, x)[0]


def _forward_with_residuals(plan, x):
    out_dtype = jnp.dtype(plan.out_dtype)
    if plan.implementation == "xla":
        out, kept = plan.function("")(x)
        return out.astype(out_dtype), kept
    return plan.function("")(x, out_dtype=out_dtype)


# Backward


def _backward(plan, x, kept, dout):
    grads = plan.function("_backward")(x, kept, dout)
    return {name: None if array is None else grads[name].astype(array.dtype) for name, array in x.items()}


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan: Plan, x: dict[str, Any]):
    return jitted(_forward, plan, "forward")(x)


def _with_backward_fwd(plan, x):
    if not plan.keeps:
        return jitted(_forward, plan, "forward")(x), (x, None)
    out, kept = jitted(_forward_with_residuals, plan, "forward with residuals")(x)
    return out, (x, kept)


def _with_backward_bwd(plan, kept, dout):
    return (jitted(_backward, plan, "backward")(*kept, dout),)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
