"""Compiles the kernels of some cases for one card; started by `bench.compile_gate`, which writes what to do to stdin.

On stdout, a line of JSON for every step: a kernel that is begun, what came of it, a case that launches none, a case
that is done. A compiler may end this process; the line before says in which kernel.

Every kernel is lowered to the text that compilers are given. The numbers of one that was compiled before are known by
a hash of that text, and repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
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
from jax.extend.mlir import ir
from jaxlib.triton import dialect as triton

import dormouse_jax
from bench import compile_races
from bench.compile_cases import Case, cases
from bench.compile_target import CARDS, Card, Target
from dormouse_jax import dispatch
from pallas_kernels import adapters as adapter_kernels
from pallas_kernels import attention as attention_kernels
from pallas_kernels import gemm as gemm_kernels
from pallas_kernels import kda as kda_kernels

LAUNCHES = ("pallas_call", "mpmd_map")
_DUMP = "mosaic_gpu.dump_basename"  # says how many kernels this process lowered before
LIMIT_S = 900  # of one kernel, on a machine that has other work too
PROGRAM_DIGITS = 16  # hexadecimal, of a hash
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
    toolchain = _toolchain(order["tools"], card)
    known: dict[str, dict[str, Any]] = order["known"]
    # With the equations, so that no address in a key is given to something else.
    seen: dict[str, tuple[Any, dict[str, Any]]] = {}
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
                    result = _result(target, equation, toolchain, known, card.is_hopper)
                    seen[key] = equation, result
                    if "recorded" not in result:
                        known |= {result["program"]: result} if "program" in result else {}
                        seconds = time.perf_counter() - started
                        print(f"{seconds:6.1f} s {case.title}: {name}", file=sys.stderr, flush=True)
                say(title=case.title, kernel=name, **seen[key][1])
            say(title=case.title, done=True)


def _launched(case: Case, target: Target) -> tuple[dict[str, tuple[str, Any]], str]:
    """The equations that launch the kernels of a case, by name, the second of a name with #2; with a text that is the
    same for the same kernel, in this process. And why there is none."""
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
        return str(equation)
    blocks = [(x.block_shape, x.index_map_jaxpr) for x in params["grid_mapping"].block_mappings]
    dtypes = [variable.aval.dtype for variable in (*equation.invars, *equation.outvars)]
    return f"{params['jaxpr']} {params['compiler_params']} {params['input_output_aliases']} {blocks} {dtypes}"


def _toolchain(tools: list[str], card: Card) -> str:
    """What decides the machine code of a kernel, its text apart: the compilers' versions and the card's description."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in (tool.split("==")[0] for tool in tools)]
    return "\n".join([*versions, card.description()])


def _said(lowered: Any, toolchain: str) -> str:
    """All that compilers are given: the same in every process and on every machine, whatever the files are called, on
    whatever lines the code stands, and be the grid what it may (it is an argument of Triton's kernels)."""
    said, module = [toolchain], lowered.compiler_ir()
    context = module.context

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            attributes = {name: operation.attributes[name] for name in operation.attributes}
            config = {each.name: each.attr for each in attributes.pop("mhlo.backend_config")}
            # That hash is of the text with the names of files in it.
            config = {
                name: x for name, x in config.items() if name not in ("grid_x", "grid_y", "grid_z", "kernel_hash")
            }
            types = [str(x.type.element_type) for x in (*operation.operands, *operation.results)]
            said.append(f"{types} {sorted((name, str(x)) for name, x in attributes.items())}")
            said.extend(f"{name} {_text(x, context)}" for name, x in sorted(config.items()))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if len(said) == 1:
        raise ValueError("no kernel is launched")
    return "\n".join(said)


def _program(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()[:PROGRAM_DIGITS]


def _may_race(said: str) -> bool:
    """Whether it is a Triton kernel that has products of matrices and loops, which a pipeline can be made of."""
    return '"tt.dot"' in said and '"scf.for"' in said


def programs(case: Case, tools: list[str], card: str) -> dict[str, str]:
    """The hashes of a case's kernels, by name."""
    target, toolchain = Target(CARDS[card]), _toolchain(tools, CARDS[card])
    with _chosen({}):
        kernels, _ = _launched(case, target)
        return {name: _program(_said(_lowered(target, eq), toolchain)) for name, (_, eq) in kernels.items()}


def _text(attribute: Any, context: Any) -> str:
    """An attribute as text; a kernel in MLIR's bytecode without its locations."""
    code = getattr(attribute, "value_bytes", b"")
    if not code.startswith(b"ML\xefR"):
        return str(attribute)
    triton.register_dialect(context)
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True  # Mosaic GPU's bytecode is of a dialect that only XLA has
    try:
        kernel = ir.Module.parse(code, context).operation
        if _DUMP in kernel.attributes:
            del kernel.attributes[_DUMP]
        return str(kernel.get_asm(enable_debug_info=False, print_generic_op_form=True))
    finally:
        context.allow_unregistered_dialects = before


def _lowered(target: Target, equation: Any) -> Any:
    def launch(*arrays):
        return equation.primitive.bind(*arrays, **equation.params)

    return target.lower(launch, *(variable.aval for variable in equation.invars))


def _result(
    target: Target, equation: Any, toolchain: str, known: dict[str, dict[str, Any]], is_hopper: bool
) -> dict[str, Any]:
    """What ptxas says of the kernel that an equation launches, or said when it was recorded, or what the compiler has
    against it, or what there is against what Triton made of it."""
    signal.alarm(LIMIT_S)  # ends the process
    error, program, followed, recorded = None, "", {}, None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with _output_to(log):
            try:
                lowered = _lowered(target, equation)
                said = _said(lowered, toolchain)
                program, may_race = _program(said), is_hopper and _may_race(said)
                if program in known and (not may_race or "products" in known[program]):
                    recorded = known[program]
                elif may_race:
                    scan = _compile_and_scan(target, lowered)
                    followed, error = {"products": scan.products}, "; ".join(scan.races) or None
                else:
                    target.compile(lowered)
            except Exception as raised:  # whatever the compiler says is the result
                error = f"{type(raised).__name__}: {str(raised).strip()}"
        log.seek(0)
        text = log.read()
    signal.alarm(0)
    if error is not None:
        return {"error": error[:600]}
    if recorded is not None:
        return recorded
    numbers, shared = _PTXAS.search(text), _SHARED.findall(text)
    if numbers is None:
        return {"error": f"ptxas did not say what the kernel takes: {text[-300:]}"}
    stores, loads, registers = map(int, numbers.groups())
    memory = max(map(int, shared)) if shared else _scratch_bytes(equation)
    found = {"registers": registers, "stores": stores, "loads": loads, "shared": memory, "program": program}
    return found | followed


def _compile_and_scan(target: Target, lowered: Any) -> compile_races.Scan:
    with tempfile.TemporaryDirectory() as folder:
        target.compile(lowered, pathlib.Path(folder))
        [dump] = pathlib.Path(folder).glob("*.triton-to-llvm.txt")
        return compile_races.scan(dump.read_text())


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


def _changed(config: Any, change: dict[str, Any]) -> Any:
    """With these fields replaced if it has them all, and those of configurations in it where there are fields of it."""
    if not change.keys() <= {field.name for field in dataclasses.fields(config)}:
        return config
    return dataclasses.replace(
        config, **{name: _changed(getattr(config, name), x) if isinstance(x, dict) else x for name, x in change.items()}
    )


@contextlib.contextmanager
def _chosen(change: dict[str, Any]) -> Iterator[None]:
    """Lets the dispatch choose what no GPU has run yet, since it is compiled before it runs; and replaces these fields
    of every configuration that has them all."""
    names = [(module, "choose_config") for module in (kda_kernels, attention_kernels)]
    names += [(gemm_kernels, name) for name in ("choose_triton", "choose_mosaic")]
    names += [(adapter_kernels, f"choose_{name}") for name in ("low_rank", "kronecker", "tokens", "block_diagonal")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(dispatch.UNPROVEN, clear=True))
        for module, name in names:
            choose = getattr(module, name)

            def chosen(*args: Any, _choose: Any = choose, **kwargs: Any) -> Any:
                config = _choose(*args, **kwargs)
                return _changed(config, change)

            stack.enter_context(mock.patch.object(module, name, chosen))
        yield


if __name__ == "__main__":
    main()
