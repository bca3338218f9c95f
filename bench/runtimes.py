"""The three ways an arm is run: JAX, PyTorch, plain numpy. One runtime lives in each worker process.

A runtime holds the inputs on its device, turns the arm's forward into the functions that the modes need, and samples
them. Times are milliseconds, sizes bytes. `sample(what)` means
  device_cold  the sum of kernel durations of one call, after a kernel that writes 4x the L2 has emptied it
  device_warm  the same, called back to back
  wall         host clock from the call to its last result being ready
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench import device
from bench.spec import Arm, Built, Case, Operator, load

FLUSH_NAME = "bench_l2_flush"
_FLUSH_BLOCK = 16384  # float32 elements one program of the flush writes: 64 KiB
# Device records of torch's profiler that are no kernels: copies and fills by DMA, and annotations that span kernels.
_NOT_KERNELS = ("Memcpy", "Memset", "gpu_", "ProfilerStep", "##", "Torch-Compiled Region", "Context Sync")
_DEFAULT_L2 = 64 << 20  # only when the driver does not say


class Unsupported(Exception):
    """The arm says that it cannot do this case; the text goes into its NOT MEASURED row."""


def flush_elements(l2_bytes: int | None) -> int:
    """float32 elements in 4x the L2, a whole number of flush blocks."""
    wanted = 4 * (l2_bytes or _DEFAULT_L2) // 4
    return -(-wanted // _FLUSH_BLOCK) * _FLUSH_BLOCK


def tally(records: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """[(kernel name, ms)] of one call -> [{"name", "count", "ms"}], in order of first launch."""
    out: dict[str, dict[str, Any]] = {}
    for name, ms in records:
        row = out.setdefault(name, {"name": name, "count": 0, "ms": 0.0})
        row["count"] += 1
        row["ms"] += ms
    return list(out.values())


class Runtime:
    """Common part: builds the arm and keeps mode -> function."""

    def __init__(self, operator: Operator, case: Case, arm: Arm, inputs: Mapping[str, np.ndarray]):
        self.operator, self.case, self.arm = operator, case, arm
        self.inputs = {name: self.put(array) for name, array in inputs.items()}
        target = load(arm.target)
        with_inputs = "inputs" in inspect.signature(target).parameters
        extra = {"inputs": self.inputs} if with_inputs else {}
        built = target(case, dict(arm.options), **extra)
        self.built: Built = built if isinstance(built, Built) else Built(forward=built)
        self.functions: dict[str, Any] = {}

    def put(self, array: np.ndarray) -> Any:
        return np.array(array)

    def whole(self, array: Any) -> Any:
        """An output as it should be before parts of it are taken."""
        return array

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def function(self, mode: str) -> Callable[..., Any]:
        if mode in self.built.modes:
            return self.built.modes[mode]
        raise Unsupported(f"no {mode} for this arm")

    def prepare(self, mode: str) -> dict[str, Any]:
        """Compiles, runs once. Returns compile_s, wall_s (one warm call), memory_bytes, allocations, traced."""
        raise NotImplementedError

    def outputs(self, mode: str) -> Mapping[str, Any]:
        raise NotImplementedError

    def repeat(self, mode: str, n: int) -> int:
        """How many of n further calls differ from the first in any bit of any output."""
        first = {name: np.asarray(array).tobytes() for name, array in self.outputs(mode).items()}
        again = ({name: np.asarray(array).tobytes() for name, array in self.outputs(mode).items()} for _ in range(n))
        return sum(other != first for other in again)

    def sample(self, mode: str, what: str, n: int) -> dict[str, Any]:
        """{"ms": n times, "kernels": tally of one call}"""
        raise NotImplementedError


class NumpyRuntime(Runtime):
    """For arms that are plain host code: wall time only."""

    def prepare(self, mode: str) -> dict[str, Any]:
        function = self.function(mode)
        start = time.perf_counter()
        function(self.inputs)
        return {"compile_s": 0.0, "wall_s": time.perf_counter() - start, "memory_bytes": 0, "allocations": 0}

    def outputs(self, mode: str) -> Mapping[str, Any]:
        return self.function(mode)(self.inputs)

    def sample(self, mode: str, what: str, n: int) -> dict[str, Any]:
        if what != "wall":
            raise Unsupported("host code has no device time")
        function, ms = self.function(mode), []
        for _ in range(n):
            start = time.perf_counter()
            function(self.inputs)
            ms.append((time.perf_counter() - start) * 1e3)
        return {"ms": ms, "kernels": []}


# ---- JAX -----------------------------------------------------------------------------------------------------------


class JaxRuntime(Runtime):
    """One jitted function a mode, all inputs arguments, every cotangent returned; CUPTI kernel times on a GPU."""

    def __init__(self, operator: Operator, case: Case, arm: Arm, inputs: Mapping[str, np.ndarray]):
        import jax

        self.jax = jax
        self.gpu = jax.default_backend() == "gpu"
        self.compiled: dict[str, Any] = {}
        self.flush: Any = None
        self.traced: dict[str, list[str]] = {}
        self.explained: dict[str, list[str]] = {}
        super().__init__(operator, case, arm, inputs)

    def put(self, array: np.ndarray) -> Any:
        return self.jax.block_until_ready(self.jax.device_put(np.asarray(array)))

    def whole(self, array: Any) -> Any:
        # Every slice of a JAX array is a program to compile; copying the array to the host is quicker, up to a size.
        return np.asarray(array) if array.nbytes < 1 << 28 else array

    def function(self, mode: str) -> Callable[..., Any]:
        if mode in self.built.modes:
            return self.built.modes[mode]
        forward = self.built.forward
        if forward is None:
            raise Unsupported(f"no {mode} for this arm")
        names, cotangents, vjp = self.operator.differentiable, self.operator.cotangents, self.jax.vjp

        def differentiate(inputs):
            rest = {k: x for k, x in inputs.items() if k not in names}
            return vjp(lambda d: forward({**rest, **d}), {n: inputs[n] for n in names})

        def fwd_res(inputs):
            out, pull = differentiate(inputs)
            # Residuals that are the inputs themselves cost nothing; returning them would add copies.
            kept = [x for x in self.jax.tree.leaves(pull) if not any(x is i for i in inputs.values())]
            return {**out, "residuals": kept}

        def fwdbwd(inputs):
            out, pull = differentiate(inputs)
            (grads,) = pull({o: inputs[c] for o, c in cotangents.items()})
            return {**out, **{f"d{n}": grads[n] for n in names}}

        return {"fwd": forward, "fwd_res": fwd_res, "fwdbwd": fwdbwd}[mode]

    def _compile(self, mode: str) -> Any:
        if mode not in self.compiled:
            function = self.function(mode)

            def call(kept, updated):
                return function({**kept, **updated})

            call.__name__ = f"bench_{mode}"
            jitted = self.jax.jit(call, donate_argnums=1)
            traced = jitted.trace(*self._arguments())
            self.traced[mode] = sorted(set(pallas_names(traced.jaxpr)))
            self.explained[mode] = self._explain(jitted)
            self.compiled[mode] = traced.lower().compile()
        return self.compiled[mode]

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of one call: the inputs that it keeps, and copies of those that it may update in place."""
        updated = self.operator.updated
        kept = {name: x for name, x in self.inputs.items() if name not in updated}
        return self.jax.block_until_ready((kept, {name: self.jax.numpy.copy(self.inputs[name]) for name in updated}))

    def _explain(self, jitted: Any) -> list[str]:
        """What our own operators chose in an already traced function: implementation, configuration, kernels."""
        ours = sys.modules.get("dormouse_jax")
        return [] if ours is None else [str(call) for call in ours.explain(jitted, *self._arguments())]

    def _compiled_flush(self) -> Any:
        """A program of one kernel that writes 4x the L2. What is launched after it, on the same stream, starts cold."""
        if self.flush is None:
            self.flush = _jax_flush()
        return self.flush

    def prepare(self, mode: str) -> dict[str, Any]:
        start = time.perf_counter()
        compiled = self._compile(mode)
        compile_s = time.perf_counter() - start
        memory, output = _jax_memory(compiled)
        self._refuse_huge(memory + output)
        cold_error = ""
        if self.gpu:
            try:
                self._compiled_flush()
            except Exception as error:  # the warm time is still worth having; the row says why cold is missing
                cold_error = one_line(error)
        out = self.jax.block_until_ready(compiled(*self._arguments()))
        residual = 0
        if mode == "fwd_res":
            residual = sum(x.nbytes for x in self.jax.tree.leaves(out.get("residuals", [])))
        arrays = len(self.jax.tree.leaves(out))
        del out
        arguments = self._arguments()
        start = time.perf_counter()
        self.jax.block_until_ready(compiled(*arguments))
        return {
            "compile_s": compile_s,
            "wall_s": time.perf_counter() - start,
            "memory_bytes": memory + residual,
            # XLA takes one block for all temporaries and one for each output.
            "allocations": arrays + (1 if memory else 0),
            "traced": self.traced.get(mode, []),
            "explain": self.explained.get(mode, []),
            "cold_error": cold_error,
        }

    def _refuse_huge(self, size: int) -> None:
        limit = float(os.environ.get("BENCH_MEMORY_LIMIT", 100e9))
        if size > limit:
            raise Unsupported(f"needs {size / 1e9:.0f} GB beyond its inputs, the limit is {limit / 1e9:.0f} GB")

    def outputs(self, mode: str) -> Mapping[str, Any]:
        return self._compile(mode)(*self._arguments())

    def repeat(self, mode: str, n: int) -> int:
        jax = self.jax

        def bits(x):
            return jax.lax.bitcast_convert_type(x, jax.numpy.dtype(f"uint{8 * x.dtype.itemsize}"))

        @jax.jit
        def differ(a, b):
            pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
            return jax.numpy.any(jax.numpy.stack([jax.numpy.any(bits(x) != bits(y)) for x, y in pairs]))

        first = self.outputs(mode)
        return sum(bool(differ(first, self.outputs(mode))) for _ in range(n))

    def sample(self, mode: str, what: str, n: int) -> dict[str, Any]:
        if what == "wall":
            compiled, ms = self._compile(mode), []
            for _ in range(n):
                arguments = self._arguments()
                start = time.perf_counter()
                self.jax.block_until_ready(compiled(*arguments))
                ms.append((time.perf_counter() - start) * 1e3)
            return {"ms": ms, "kernels": []}
        if not self.gpu:
            raise Unsupported("no device timer without a GPU")
        from jax.experimental.mosaic.gpu import profiler

        compiled, cold = self._compile(mode), what == "device_cold"
        if cold or self.operator.updated:
            # It calls once to warm up, and always with the same arguments: those of each call are made beforehand.
            arguments = [self._arguments() for _ in range(n + 1)]
            calls_of = _OneAfterTheOther(compiled, arguments, self._compiled_flush() if cold else None)
            _, timings = profiler.measure(calls_of, aggregate=False, iterations=n)()
        else:
            _, timings = profiler.measure(compiled, aggregate=False, iterations=n)(*self._arguments())
        if not timings:
            raise Unsupported("CUPTI recorded no kernels")
        calls: Any = timings if n > 1 else [timings]
        calls = [[(str(name), float(ms)) for name, ms in call] for call in calls]
        if cold:
            if not all(any(FLUSH_NAME in name for name, _ in call) for call in calls):
                raise Unsupported("the L2 flush is not among the kernels")
            calls = [[(name, ms) for name, ms in call if FLUSH_NAME not in name] for call in calls]
        return {"ms": [sum(ms for _, ms in call) for call in calls], "kernels": tally(calls[0])}


@functools.cache
def _jax_flush() -> Any:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltr

    size = flush_elements(device.l2_bytes())

    def body(out_ref):
        out_ref[...] = jnp.full((_FLUSH_BLOCK,), pl.program_id(0), jnp.float32)

    flush = pl.pallas_call(
        body,
        grid=(size // _FLUSH_BLOCK,),
        out_specs=pl.BlockSpec((_FLUSH_BLOCK,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((size,), jnp.float32),
        compiler_params=pltr.CompilerParams(num_warps=8, num_stages=1),
        name=FLUSH_NAME,
    )
    return jax.jit(flush).lower().compile()


class _OneAfterTheOther:
    """A compiled function whose every call takes the next of some arguments, and launches `first` before it.

    It passes for a `jax.stages.Wrapped`, which the profiler calls as it is: anything else it puts through `jax.jit`,
    and then the function runs while it is traced, and never again.
    """

    def __init__(self, compiled: Any, arguments: list[tuple[Any, ...]], first: Any = None):
        self.compiled, self.arguments, self.first = compiled, arguments, first

    def __call__(self) -> Any:
        if self.first is not None:
            self.first()
        return self.compiled(*self.arguments.pop())

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("it is compiled already")

    lower = eval_shape = trace


def pallas_names(jaxpr: Any) -> list[str]:
    """Names of every pallas_call in a (closed) jaxpr, nested ones included, in order."""
    found: list[str] = []

    def visit(value: Any) -> None:
        if hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):  # a ClosedJaxpr
            value = value.jaxpr
        if not hasattr(value, "eqns"):
            return
        for eqn in value.eqns:
            if eqn.primitive.name in ("pallas_call", "mpmd_map"):  # of Pallas's Triton backend, of Mosaic GPU
                name = eqn.params.get("name")
                if not name and hasattr(eqn.params.get("jaxpr"), "debug_info"):
                    name = eqn.params["jaxpr"].debug_info.func_name
                found.append(str(name or "pallas_call"))
                continue
            for parameter in eqn.params.values():
                for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                    visit(item)

    visit(jaxpr)
    return found


def _jax_memory(compiled: Any) -> tuple[int, int]:
    """(temporary bytes, output bytes) that XLA planned; (0, 0) where the backend does not say."""
    try:
        stats = compiled.memory_analysis()
    except NotImplementedError:
        return 0, 0
    if stats is None:
        return 0, 0
    return int(stats.temp_size_in_bytes), int(stats.output_size_in_bytes)


# ---- PyTorch -------------------------------------------------------------------------------------------------------


class TorchRuntime(Runtime):
    """Autograd for the modes; kernel records of torch's profiler on a GPU."""

    def __init__(self, operator: Operator, case: Case, arm: Arm, inputs: Mapping[str, np.ndarray]):
        import torch

        self.torch = torch
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.compiles = "compile" in arm.options
        self.flush_name = ""
        if self.gpu:
            torch.cuda.set_device(0)
            torch.backends.cuda.matmul.allow_tf32 = arm.precision == "tf32"
            total = torch.cuda.get_device_properties(0).total_memory
            limit = float(os.environ.get("BENCH_MEMORY_LIMIT", 100e9))
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
            self.scratch = _torch_scratch()
        super().__init__(operator, case, arm, inputs)

    def put(self, array: np.ndarray) -> Any:
        torch, array = self.torch, np.array(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).to(self.device).view(torch.bfloat16)
        return torch.from_numpy(array).to(self.device)

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.detach().to(self.torch.float64).cpu().numpy()

    def sync(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def function(self, mode: str) -> Callable[..., Any]:
        if mode in self.built.modes:
            return self.built.modes[mode]
        forward = self.built.forward
        if forward is None:
            raise Unsupported(f"no {mode} for this arm")
        torch, names, cotangents = self.torch, self.operator.differentiable, self.operator.cotangents

        def leaves(inputs):
            return {k: x.detach().requires_grad_(True) if k in names else x for k, x in inputs.items()}

        def fwd(inputs):
            with torch.no_grad():
                return forward(inputs)

        def fwd_res(inputs):
            return forward(leaves(inputs))

        def fwdbwd(inputs):
            given = leaves(inputs)
            out = forward(given)
            grads = torch.autograd.grad(
                [out[o] for o in cotangents], [given[n] for n in names], [inputs[c] for c in cotangents.values()]
            )
            return {
                **{o: out[o].detach() for o in cotangents},
                **{f"d{n}": x for n, x in zip(names, grads, strict=True)},
            }

        return {"fwd": fwd, "fwd_res": fwd_res, "fwdbwd": fwdbwd}[mode]

    def prepare(self, mode: str) -> dict[str, Any]:
        torch = self.torch
        graphs = self._graphs()
        function = self.functions[mode] = self.function(mode)
        start = time.perf_counter()
        try:
            function(self.inputs)
        except torch.cuda.OutOfMemoryError as error:
            raise Unsupported(f"out of memory (limit 100 GB): {one_line(error)}") from error
        self.sync()
        first_s = time.perf_counter() - start
        if self.compiles and self._graphs() == graphs:
            raise Unsupported("torch.compile captured no graph: this would be the eager arm again")
        start = time.perf_counter()
        function(self.inputs)
        self.sync()
        wall_s = time.perf_counter() - start
        memory, allocations = None, None  # torch's CPU allocator keeps no peak
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            count = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
            out = function(self.inputs)
            self.sync()
            returned = sum(x.numel() * x.element_size() for x in out.values())
            memory = torch.cuda.max_memory_allocated() - before - returned
            allocations = torch.cuda.memory_stats().get("allocation.all.allocated", 0) - count
            del out
        return {
            "compile_s": max(0.0, first_s - wall_s),
            "wall_s": wall_s,
            "memory_bytes": memory,
            "allocations": allocations,
            "graphs": self._graphs() - graphs,
        }

    def _graphs(self) -> int:
        """Graphs that torch.compile has captured so far."""
        return self.torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiles else 0

    def outputs(self, mode: str) -> Mapping[str, Any]:
        return self.functions[mode](self.inputs)

    def repeat(self, mode: str, n: int) -> int:
        torch, first = self.torch, self.outputs(mode)

        def bits(x):
            return x.detach().contiguous().view(torch.uint8)

        again = (self.outputs(mode) for _ in range(n))
        return sum(not all(torch.equal(bits(other[k]), bits(first[k])) for k in first) for other in again)

    def _flush(self) -> None:
        self.scratch.fill_(1.0)

    def sample(self, mode: str, what: str, n: int) -> dict[str, Any]:
        function = self.functions[mode]
        if what == "wall":
            ms = []
            for _ in range(n):
                self.sync()
                start = time.perf_counter()
                function(self.inputs)
                self.sync()
                ms.append((time.perf_counter() - start) * 1e3)
            return {"ms": ms, "kernels": []}
        if not self.gpu:
            raise Unsupported("no device timer without a GPU")
        cold = what == "device_cold"
        if cold and not self.flush_name:
            # The flush is known by the name it has when it runs alone, not by a guess at how torch spells it.
            names = [name for name, _, _ in torch_kernels(self._flush)]
            if len(names) != 1:
                raise Unsupported(f"the L2 flush launched {len(names)} kernels")
            self.flush_name = names[0]
        function(self.inputs)  # warm-up, as the JAX timer does

        def body():
            for _ in range(n):
                if cold:
                    self._flush()
                function(self.inputs)

        records = torch_kernels(body)
        calls: list[list[tuple[str, float]]] = []
        if cold:
            for name, _, ms in records:
                if name == self.flush_name:
                    calls.append([])
                elif calls:
                    calls[-1].append((name, ms))
            if len(calls) != n:
                raise Unsupported(f"{len(calls)} L2 flushes among the kernels, expected {n}")
        elif len(records) % n == 0:
            each = len(records) // n
            calls = [[(name, ms) for name, _, ms in records[i * each : (i + 1) * each]] for i in range(n)]
        else:
            raise Unsupported(f"{len(records)} kernels do not divide into {n} calls")
        if not any(calls):
            raise Unsupported("the profiler recorded no kernels")
        return {"ms": [sum(ms for _, ms in call) for call in calls], "kernels": tally(calls[0])}


@functools.cache
def _torch_scratch() -> Any:
    import torch

    # float64, so that the fill kernel's name differs from anything an arm launches.
    return torch.empty(flush_elements(device.l2_bytes()) // 2, dtype=torch.float64, device="cuda")


def torch_kernels(body: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """[(kernel name, start ns, ms)] of what `body` launched on a GPU, in order of start, copies and fills left out."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        body()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    records = []
    kept = profile.profiler.kineto_results if profile.profiler is not None else None
    if kept is None:
        raise RuntimeError("torch's profiler kept no records")
    for event in kept.events():
        name = event.name()
        if event.device_type() != cuda or name.startswith(_NOT_KERNELS):
            continue
        records.append((name, event.start_ns(), event.duration_ns() / 1e6))
    return sorted(records, key=lambda r: r[1])


RUNTIMES = {"jax": JaxRuntime, "torch": TorchRuntime, "numpy": NumpyRuntime}


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """First meaningful line of an error, short enough for a row."""
    text = str(error).strip() or type(error).__name__
    line = next((part.strip() for part in text.splitlines() if part.strip()), text)
    if isinstance(error, BaseException) and not isinstance(error, (Unsupported, NotImplementedError)):
        line = f"{type(error).__name__}: {line}"
    return line if len(line) <= limit else line[: limit - 1] + "…"
