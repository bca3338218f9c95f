"""`explain`: which implementation each operator call inside a function took, and why."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core

# The record of every traced operator call by the name of the jitted function that it runs in: a name is all that a
# jaxpr keeps of it. Names are made from what the record says, so that one name never means two things.
_records: dict[str, OperatorCall] = {}

# The primitives that launch kernels: of Pallas's Triton backend and of Mosaic GPU.
_LAUNCHES = ("pallas_call", "mpmd_map")

# What JAX may move out of a loop when it differentiates it, since it is the same in every turn, leaving it under the
# name of the call that it was part of.
_LAYOUT = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose")


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """One operator call inside a function.

    Attributes:
      operator: "kda", "gdn2", "kda_step", "gemm", "attention" or that of an adapter, "lora.rebuild".
      direction: "forward", "forward with residuals" (of a differentiated call that keeps some) or "backward".
      implementation: the one that runs.
      precision: the precision of its products.
      interpret: whether its kernels run in interpret mode.
      config: the kernels' configuration, None where there is nothing to configure.
      passed_over: (implementation, reason) for each better implementation that was not taken.
      kernels: names of the Pallas kernels that it launches, in order; empty where XLA makes the kernels.
    """

    operator: str
    direction: str
    implementation: str
    precision: str
    interpret: bool = False
    config: Any = None
    passed_over: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        mode = ", interpreted" if self.interpret else ""
        text = f"{self.operator} {self.direction}: {self.implementation} ({self.precision}{mode})"
        if self.config is not None:
            text += f"\n  config: {self.config}"
        text += f"\n  kernels: {', '.join(self.kernels) or 'made by XLA'}"
        return text + "".join(f"\n  not {name}: {reason}" for name, reason in self.passed_over)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[OperatorCall]:
    """What every operator call inside `fn(*args, **kwargs)` runs, in program order, backward calls included.

    It reads the jaxpr of `fn` and runs nothing. Of a function that `jax.jit` has traced before, that is the jaxpr it
    was traced to.

    Args:
      fn: a function of arrays, jitted or not.
      *args, **kwargs: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      One `OperatorCall` for every call in the program; a call in a loop counts once. The implementation "recurrent"
      has no backward of its own: what JAX derives from it appears as further forward calls.

    >>> for call in dormouse_jax.explain(jax.grad(loss), params, batch):
    ...     print(call)
    """
    if hasattr(fn, "trace"):
        closed = fn.trace(*args, **kwargs).jaxpr
    else:
        # Only arrays are traced, so that options such as output_final_state=True stay what they are.
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) for x in leaves]

        def of_arrays(*arrays):
            rest = iter(arrays)
            args, kwargs = tree.unflatten(next(rest) if t else x for t, x in zip(traced, leaves, strict=True))
            return fn(*args, **kwargs)

        closed = jax.make_jaxpr(of_arrays)(*(x for t, x in zip(traced, leaves, strict=True) if t))
    return list(_operator_calls(closed))


def record(call: OperatorCall) -> str:
    """Files a call under the name that the jitted function it runs in must have for `explain` to find it."""
    digest = hashlib.sha256(repr(call).encode()).hexdigest()[:8]
    name = f"dormouse_{call.operator}_{call.direction}_{call.implementation}_{digest}"
    name = name.replace(" ", "_").replace(".", "_")
    _records[name] = call
    return name


class Plan(Protocol):
    """A call as an operator has planned it: hashable, everything about it that is not an array."""

    def call(self, direction: str) -> OperatorCall: ...


@functools.lru_cache(maxsize=4096)
def jitted(function: Callable[..., Any], plan: Plan, direction: str) -> Callable[..., Any]:
    """`function(plan, *arrays)` of the arrays, jitted under a name from which `explain` knows what the plan calls."""

    def run(*arrays):
        return function(plan, *arrays)

    run.__name__ = run.__qualname__ = record(plan.call(direction))
    return jax.jit(run)


def _operator_calls(jaxpr: Any) -> Iterator[OperatorCall]:
    for eqn in _open(jaxpr).eqns:
        call = _records.get(str(eqn.params.get("name")))
        if call is None:
            for inner in _inner_jaxprs(eqn.params):
                yield from _operator_calls(inner)
            continue
        bodies = list(_inner_jaxprs(eqn.params))
        if all(inner.primitive.name in _LAYOUT for body in bodies for inner in _open(body).eqns):
            continue
        yield dataclasses.replace(call, kernels=tuple(name for body in bodies for name in _kernels(body)))


def _kernels(jaxpr: Any) -> Iterator[str]:
    for eqn in _open(jaxpr).eqns:
        if eqn.primitive.name in _LAUNCHES:
            yield str(eqn.params["name"])
        else:
            for inner in _inner_jaxprs(eqn.params):
                yield from _kernels(inner)


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs of an equation: of a call, a loop body, the branches of a condition."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                yield part
