"""Compiles the kernels of some cases for one card; started by `bench.compile_gate`, which writes what to do to stdin.

On stdout, a line of JSON for every step: a kernel that is begun, what came of it, a case that launches none. A compiler
may end this process; the line before says in which kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from operator import attrgetter
from typing import Any
from unittest import mock

import jax
from jax.extend import core

import dormouse_jax
from bench.compile_cases import Case, cases
from bench.compile_target import CARDS, Target
from dormouse_jax import dispatch
from pallas_kernels import gemm as gemm_kernels
from pallas_kernels import kda as kda_kernels

LAUNCHES = ("pallas_call", "mpmd_map")
LIMIT_S = 300  # of one kernel
_PTXAS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)
_SHARED = re.compile(r"Shared memory usage: (\d+) B")


def main() -> None:
    order = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    report = os.fdopen(os.dup(1), "w")

    def say(**line: Any) -> None:
        print(json.dumps(line), file=report, flush=True)

    card = CARDS[order["card"]]
    target, done = Target(card), {tuple(each) for each in order["done"]}
    seen: dict[str, dict[str, Any]] = {}
    wanted = [case for case in cases(card) if case.title in set(order["titles"])]
    with _chosen(order["change"]):
        for case in wanted:
            try:
                kernels, reason = _launched(case, target)
            except NotImplementedError as error:
                kernels, reason = {}, str(error)
            if not kernels:
                say(title=case.title, none=reason)
            for name, (key, equation) in kernels.items():
                if (case.title, name) in done:
                    continue
                if key not in seen:
                    say(title=case.title, begin=name)
                    started = time.perf_counter()
                    seen[key] = _compile(target, equation)
                    print(f"{time.perf_counter() - started:6.1f} s {case.title}: {name}", file=sys.stderr, flush=True)
                say(title=case.title, kernel=name, **seen[key])


def _launched(case: Case, target: Target) -> tuple[dict[str, tuple[str, Any]], str]:
    """The equations that launch the kernels of a case, by name, the second of a name with #2; with a text that is the
    same for the same kernel. And why there is none."""
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in case.arrays.items()}

    def call(arrays):
        return attrgetter(case.operator)(dormouse_jax)(**arrays, **case.options)

    def both(arrays):
        results, gradients = jax.vjp(call, arrays)
        return call(arrays), gradients(results)

    fn = jax.jit(both if case.backward else call)
    with target.in_use():
        jaxpr = fn.trace(arrays).jaxpr
        calls = dormouse_jax.explain(fn, arrays)
    found: dict[str, tuple[str, Any]] = {}
    for equation in _equations(jaxpr):
        key, name = _identity(equation), str(equation.params["name"])
        if key not in [known for known, _ in found.values()]:
            alike = sum(other.split("#")[0] == name for other in found)
            found[f"{name}#{alike + 1}" if alike else name] = key, equation
    return found, "; ".join(dict.fromkeys(f"not {name}: {why}" for c in calls for name, why in c.passed_over))


def _equations(jaxpr: Any) -> Iterator[Any]:
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    for equation in jaxpr.eqns:
        if equation.primitive.name in LAUNCHES:
            yield equation
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from _equations(part)


def _identity(equation: Any) -> str:
    """A text that is the same for launches of the same program, be the grid what it may."""
    params = equation.params
    if equation.primitive.name != "pallas_call":
        text = str(equation)
    else:
        blocks = [(x.block_shape, x.index_map_jaxpr) for x in params["grid_mapping"].block_mappings]
        dtypes = [variable.aval.dtype for variable in (*equation.invars, *equation.outvars)]
        text = f"{params['jaxpr']} {params['compiler_params']} {params['input_output_aliases']} {blocks} {dtypes}"
    return re.sub(r"0x[0-9a-f]+", "", text)


def _compile(target: Target, equation: Any) -> dict[str, Any]:
    """What ptxas says of the kernel that an equation launches, or what the compiler has against it."""

    def launch(*arrays):
        return equation.primitive.bind(*arrays, **equation.params)

    signal.alarm(LIMIT_S)  # ends the process
    error = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with _output_to(log):
            try:
                target.compile(launch, *(variable.aval for variable in equation.invars))
            except Exception as raised:  # whatever the compiler says is the result
                error = f"{type(raised).__name__}: {str(raised).strip()}"
        log.seek(0)
        text = log.read()
    signal.alarm(0)
    if error is not None:
        return {"error": error[:600]}
    said, shared = _PTXAS.search(text), _SHARED.findall(text)
    if said is None:
        return {"error": f"ptxas did not say what the kernel takes: {text[-300:]}"}
    stores, loads, registers = map(int, said.groups())
    memory = max(map(int, shared)) if shared else _scratch_bytes(equation)
    return {"registers": registers, "stores": stores, "loads": loads, "shared": memory}


def _scratch_bytes(equation: Any) -> int:
    """Shared memory of a Mosaic GPU kernel, less its barriers: what the scopes of its body ask for."""
    total = 0
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                jaxpr = part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
                if equation.primitive.name == "run_scoped":
                    refs = [variable.aval for variable in jaxpr.invars if str(variable.aval).startswith("Ref<smem>")]
                    total += sum(ref.size * getattr(ref.dtype, "itemsize", 0) for ref in refs)  # pyright: ignore[reportAttributeAccessIssue]
                total += sum(map(_scratch_bytes, jaxpr.eqns))
    return total


@contextlib.contextmanager
def _output_to(file: Any) -> Iterator[None]:
    """Sends what this process writes to stdout and stderr, its C++ parts included, to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


@contextlib.contextmanager
def _chosen(change: dict[str, Any]) -> Iterator[None]:
    """Lets the dispatch choose what no GPU has run yet, since it is compiled before it runs; and replaces these fields
    of every configuration that has them all."""
    names = [(kda_kernels, "choose_config"), (gemm_kernels, "choose_triton"), (gemm_kernels, "choose_mosaic")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(dispatch.UNPROVEN, clear=True))
        for module, name in names:
            choose = getattr(module, name)

            def chosen(*args: Any, _choose: Any = choose, **kwargs: Any) -> Any:
                config = _choose(*args, **kwargs)
                known = {field.name for field in dataclasses.fields(config)}
                return dataclasses.replace(config, **change) if change.keys() <= known else config

            stack.enter_context(mock.patch.object(module, name, chosen))
        yield


if __name__ == "__main__":
    main()
