"""Matrix products: the public operator `gemm`.

Below: the public function, validation, dispatch, forward, backward, and the `custom_vjp` that joins the last two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import validation as check
from dormouse_jax.dispatch import Device, device_of, interpreting, require_hopper, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, record
from dormouse_jax.reference import gemm as reference

IMPLEMENTATIONS = ("pallas", "pallas_triton", "pallas_mosaic", "xla")
FLOATS = ("float32", "bfloat16", "float16")


def gemm(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: str | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """A matrix product.

        out = op(a) op(b) + bias,    op(x) = x, or x^T where it is transposed

    M, N, K >= 1, any. A batch of products is a `jax.vmap` of this.

    Args:
      a: `[M, K]`, or `[K, M]` with transpose_a; float32, bfloat16 or float16.
      b: `[K, N]`, or `[N, K]` with transpose_b; a's dtype.
      bias: `[N]`, added to every row; any of the three dtypes, handled in float32. None for none.
      transpose_a, transpose_b: whether a, b are used transposed. They are read as they are stored; nothing is copied,
        but by the tf32 product on a Hopper card, whose tensor cores want float32 operands with K last: an operand
        that is not stored so is transposed for it first.
      precision: of the products. "fp32" (float32-accurate; the default for float32 inputs), "tf32" (one TF32 pass,
        float32 inputs) or "16bit" (16-bit operands; the default for bfloat16 and float16). Sums are float32 always.
      out_dtype: of the output, float32, bfloat16 or float16; a's dtype by default.
      implementation: "pallas" (the best Pallas kernel for the device), "pallas_triton", "pallas_mosaic" (Hopper) or
        "xla". None takes the fastest by measurements on an H200: on an NVIDIA GPU "pallas" or "xla", product by
        product, and "xla" elsewhere; "pallas" under `interpret_kernels()`. On a GPU a kernel serves products for which
        its configuration was held to float64 there.

    Returns:
      `[M, N]` in out_dtype, differentiable in a, b and bias. In the backward the cotangent of the output is rounded to
      a's dtype before it meets a and b, and summed for bias in float32.

    Raises:
      ValueError: a shape, or the value of an option, is not one of the above.
      TypeError: a dtype, or the type of an argument, is not one of the above.
      NotImplementedError: the named implementation cannot serve the call, or where it is differentiated a gradient.

    "fp32" is computed on tensor cores: each operand is the sum of three bfloat16 numbers, exactly, and the six products
    that count are added up in float32. inf and NaN come out as they do from float32 arithmetic, and the largest floats
    do not overflow; the pieces of numbers below 2^-100 may underflow, so that products of those can lose relative
    accuracy. The operator is deterministic. Under `jax.shard_map` it needs check_vma=False.
    """
    a, b, bias, options = _validate(
        a, b, bias, _Options(transpose_a, transpose_b, precision, out_dtype, implementation)
    )
    plan = _plan(options, a, b, bias)
    return _with_backward(plan, a, b, bias)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of a call, as given."""

    transpose_a: Any
    transpose_b: Any
    precision: Any
    out_dtype: Any
    implementation: Any


# Validation


def _validate(a: Any, b: Any, bias: Any, options: _Options):
    """Checks everything about a call that can be known without values; fills in the options' defaults."""
    a, b = check.as_array("gemm", "a", a), check.as_array("gemm", "b", b)
    for name in ("transpose_a", "transpose_b"):
        check.require_choice("gemm", name, getattr(options, name), (False, True))
    check.require_choice("gemm", "implementation", options.implementation, (None, *IMPLEMENTATIONS))
    check.require_choice("gemm", "precision", options.precision, (None, "fp32", "tf32", "16bit"))

    axes = ("K", "M") if options.transpose_a else ("M", "K")
    check.require_shape("gemm", "a", a, f"[{', '.join(axes)}]", axes)
    K, M = a.shape if options.transpose_a else a.shape[::-1]
    if options.transpose_b:
        check.require_shape("gemm", "b", b, "[N, K]", ("N", K))
    else:
        check.require_shape("gemm", "b", b, "[K, N]", (K, "N"))
    N = b.shape[0] if options.transpose_b else b.shape[1]
    if min(M, N, K) < 1:
        raise ValueError(
            f"gemm: M, N and K must be at least 1, got a of shape {list(a.shape)} and b of shape {list(b.shape)}"
        )
    check.require_dtype("gemm", "a", a, FLOATS)
    if b.dtype != a.dtype:
        raise TypeError(f"gemm: b must have a's dtype {a.dtype}, got {b.dtype}")
    if bias is not None:
        bias = check.as_array("gemm", "bias", bias)
        check.require_shape("gemm", "bias", bias, "[N]", (N,))
        check.require_dtype("gemm", "bias", bias, FLOATS)

    of_dtype = ("fp32", "tf32") if a.dtype == jnp.float32 else ("16bit",)
    precision = of_dtype[0] if options.precision is None else options.precision
    if precision not in of_dtype:
        expected = " or ".join(repr(p) for p in of_dtype)
        raise ValueError(f"gemm: precision must be {expected} for inputs of dtype {a.dtype}, got {precision!r}")
    try:
        out_dtype = jnp.dtype(a.dtype if options.out_dtype is None else options.out_dtype)
    except TypeError:
        out_dtype = None
    if out_dtype is None or out_dtype.name not in FLOATS:
        raise TypeError(f"gemm: out_dtype must be float32, bfloat16 or float16, got {options.out_dtype!r}")
    return a, b, bias, dataclasses.replace(options, precision=precision, out_dtype=out_dtype.name)


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product that a call runs: everything about it that is not an array."""

    implementation: str  # "pallas_mosaic", "pallas_triton" or "xla"
    config: Any
    transpose_a: bool
    transpose_b: bool
    out_dtype: str
    passed_over: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A call: everything about it that is not an array. The products that it runs are chosen when they are needed."""

    options: _Options
    device: Device
    interpret: bool
    M: int
    N: int
    K: int
    dtype: str
    has_bias: bool

    # Below: (M, N, K), and whether the first and second operands are transposed. With dC [M, N] the cotangent of the
    # output, dA = dC op(b)^T and dB = op(a)^T dC, each stored as a and b are.

    @functools.cached_property
    def out(self) -> _Product:
        flip_a, flip_b = self.options.transpose_a, self.options.transpose_b
        return _product(self, (self.M, self.N, self.K), flip_a, flip_b, self.options.out_dtype, self.has_bias)

    @functools.cached_property
    def da(self) -> _Product:
        M, N, K, flip_b = self.M, self.N, self.K, self.options.transpose_b
        if self.options.transpose_a:
            return _product(self, (K, M, N), flip_b, True, self.dtype)
        return _product(self, (M, K, N), False, not flip_b, self.dtype)

    @functools.cached_property
    def db(self) -> _Product:
        M, N, K, flip_a = self.M, self.N, self.K, self.options.transpose_a
        if self.options.transpose_b:
            return _product(self, (N, K, M), True, flip_a, self.dtype)
        return _product(self, (K, N, M), not flip_a, False, self.dtype)


def _plan(options: _Options, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> _Plan:
    device = device_of(a, b, *(() if bias is None else (bias,)))
    K, M = a.shape if options.transpose_a else a.shape[::-1]
    N = b.shape[0] if options.transpose_b else b.shape[1]
    return _Plan(options, device, interpreting(), M, N, K, a.dtype.name, bias is not None)


def _product(
    plan: _Plan,
    sizes: tuple[int, int, int],
    transpose_a: bool,
    transpose_b: bool,
    out_dtype: str,
    has_bias: bool = False,
) -> _Product:
    """Chooses the implementation of a product: the one asked for, or else the best that can serve it."""
    asked, device, interpret = plan.options.implementation, plan.device, plan.interpret

    def product(implementation, config, passed_over):
        return _Product(implementation, config, transpose_a, transpose_b, out_dtype, tuple(passed_over))

    if asked == "xla":
        reason = "implementation='xla' was asked for"
        return product("xla", None, [("pallas_mosaic", reason), ("pallas_triton", reason)])
    problem = {"dtype": plan.dtype, "out_dtype": out_dtype, "precision": plan.options.precision, "bias": has_bias}
    problem |= dict(zip("MNK", sizes, strict=True)) | {"transpose_a": transpose_a, "transpose_b": transpose_b}
    passed_over, withheld = [], None
    for implementation, choose in (("pallas_mosaic", _mosaic_config), ("pallas_triton", _triton_config)):
        if asked not in (None, "pallas", implementation):
            passed_over.append((implementation, f"implementation={asked!r} was asked for"))
            continue
        try:
            return product(implementation, choose(device, interpret, asked, problem), passed_over)
        except NotImplementedError as reason:
            passed_over.append((implementation, str(reason)))
            if isinstance(reason, _Withheld) and withheld is None:
                withheld = f"{implementation!r}: {reason}"
    if asked is not None:
        reason = passed_over[0 if asked == "pallas_mosaic" else -1][1]
        raise NotImplementedError(f"gemm: implementation={asked!r} cannot serve this call: {reason}")
    if withheld is not None:
        warn_once(f"gemm: taking 'xla', not {withheld}")
    return product("xla", None, passed_over)


class _Withheld(NotImplementedError):
    """A kernel cannot be taken for a product that it should compute faster than XLA does."""


def _triton_config(device: Device, interpret: bool, asked: str | None, problem: dict[str, Any]) -> Any:
    """The configuration of the Triton kernel, or a NotImplementedError that says why it cannot serve the product."""
    require_triton(device, interpret)
    return _chosen("choose_triton", device, interpret, asked, problem)


def _mosaic_config(device: Device, interpret: bool, asked: str | None, problem: dict[str, Any]) -> Any:
    """The same for the Hopper kernel."""
    require_triton(device, interpret)  # what that asks for is the least that this kernel needs
    require_hopper(device, interpret, asked)
    return _chosen("choose_mosaic", device, interpret, asked, problem)


def _chosen(choose: str, device: Device, interpret: bool, asked: str | None, problem: dict[str, Any]) -> Any:
    """What the kernels' function `choose` says, unless another implementation should be faster and can be taken."""
    try:
        kernels = _kernels()
    except ImportError as reason:
        raise _Withheld(str(reason)) from reason
    product = kernels.Problem(**problem)
    if choose == "choose_mosaic" and asked != "pallas_mosaic" and (reason := kernels.why_triton(product)):
        raise NotImplementedError(reason)
    try:
        config = getattr(kernels, choose)(product, device_kind=device.kind, cores=device.cores)
    except ValueError as reason:
        raise NotImplementedError(str(reason)) from reason
    if asked is None and not interpret and (reason := kernels.why_xla(product, config)):
        raise NotImplementedError(reason)
    return config


def _kernels() -> Any:
    # Imported where it is used: Pallas takes a while to import.
    import pallas_kernels.gemm

    return pallas_kernels.gemm


@functools.lru_cache(maxsize=4096)
def _jitted(
    function: Callable[..., Any], plan: _Plan, products: tuple[_Product, ...], direction: str
) -> Callable[..., Any]:
    """`function` of a plan and its products, jitted under a name from which `explain` knows them."""

    def run(*arrays):
        return function(plan, products, *arrays)

    # Either gradient may have an implementation and a configuration of its own.
    implementations = tuple(dict.fromkeys(product.implementation for product in products))
    configs = tuple(product.config for product in products)
    run.__name__ = run.__qualname__ = record(
        OperatorCall(
            operator="gemm",
            direction=direction,
            implementation=" and ".join(implementations),
            precision=plan.options.precision,
            interpret=plan.interpret and implementations != ("xla",),
            config=configs[0] if len(set(configs)) == 1 else configs,
            passed_over=tuple(dict.fromkeys(reason for product in products for reason in product.passed_over)),
        )
    )
    return jax.jit(run)


def _run(plan: _Plan, product: _Product, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> jax.Array:
    arguments: dict[str, Any] = {"transpose_a": product.transpose_a, "transpose_b": product.transpose_b}
    arguments |= {"precision": plan.options.precision, "out_dtype": jnp.dtype(product.out_dtype)}
    if product.implementation == "xla":
        return reference.matmul(a, b, bias, platform=plan.device.platform, **arguments)
    return _kernels().matmul(a, b, bias, config=product.config, interpret=plan.interpret, **arguments)


# Forward


def _forward(plan, products, a, b, bias):
    return _run(plan, products[0], a, b, bias)


# Backward


def _backward(plan, products, a, b, bias, dout):
    d = dout.astype(a.dtype)
    da = _run(plan, products[0], *((b, d) if plan.options.transpose_a else (d, b)), None)
    db = _run(plan, products[1], *((d, a) if plan.options.transpose_b else (a, d)), None)
    dbias = None if bias is None else jnp.sum(dout, axis=0, dtype=jnp.float32).astype(bias.dtype)
    return da, db, dbias


# The two joined


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_backward(plan, a, b, bias):
    return _jitted(_forward, plan, (plan.out,), "forward")(a, b, bias)


def _with_backward_fwd(plan, a, b, bias):
    return _jitted(_forward, plan, (plan.out,), "forward")(a, b, bias), (a, b, bias)


def _with_backward_bwd(plan, inputs, dout):
    return _jitted(_backward, plan, (plan.da, plan.db), "backward")(*inputs, dout)


_with_backward.defvjp(_with_backward_fwd, _with_backward_bwd)
