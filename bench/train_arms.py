"""The arms of `bench.train_step`, each in its own worker: the same decoder, parameters, optimizer and text.

A trainer is asked, in this order: `build` (compile, nothing of the size of the whole model where that can be avoided),
`start` (parameters and the optimizer's state to the device), `train` (steps one by one, with their losses), `memory`,
`sample` (times of a part).
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.runtimes import Unsupported, one_line, pallas_names, tally, torch_kernels
from bench.spec import DTYPES, Arm, Case, save_arrays

# Parts that are timed: the loss alone, the loss with all gradients, a whole step, and one call of the KDA operator with
# its gradients, at the shape that layers have.
PARTS = ("forward", "gradients", "step", "kda")

# Names of kernels that multiply matrices, of cuBLAS, CUTLASS, XLA and Triton.
_GEMM = re.compile(r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|wgrad|(^|_)dot(_|$)", re.IGNORECASE)

# A Pallas kernel in a compiled program, of Triton or Mosaic GPU, with its name.
_PALLAS_CALL = re.compile(r'custom-call\(.*op_name="[^"]*/([^/"]+)/(?:pallas_call|mpmd_map)"')


def make_inputs(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """What all arms get, on the host: parameters by their path in the JAX model, "ids" `[steps, B, T + 1]` uint8 in the
    order of training, and "learning_rates" `[steps]`."""
    import jax
    from flax import nnx

    from dormouse_jax.models import Decoder, DecoderConfig
    from dormouse_jax.training.corpus import Corpus, standard_library
    from dormouse_jax.training.step import optimizer

    p = case.params
    B, T, steps = p["batch_size"], p["sequence_length"], p["optimizer"]["steps"]
    corpus = Corpus.read(standard_library(), T)
    ids = np.stack([corpus.batch(p["seed"], step, B, T) for step in range(steps)])
    _, schedule = optimizer(**p["optimizer"])
    config = DecoderConfig(**p["decoder"])
    state = jax.jit(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(p["seed"])), nnx.Param))()
    parameters = {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(state)}
    rates = np.asarray(schedule(np.arange(steps)), np.float32)
    save_arrays(folder, parameters | {"ids": ids, "learning_rates": rates})
    return {"parameters": sum(x.size for x in parameters.values()), "corpus": corpus.digest}


def is_gemm(kernel: str) -> bool:
    return bool(_GEMM.search(kernel))


def in_program(text: str) -> list[str]:
    """Names of the Pallas kernels in a compiled program for a GPU, from its text."""
    return sorted(set(_PALLAS_CALL.findall(text)))


def is_launch_of(launched: str, kernel: str) -> bool:
    """Whether a launched kernel is this Pallas kernel, as the backends and XLA spell its name on the device."""
    return re.fullmatch(rf"{re.escape(kernel)}(_mosaic_gpu\w*|_+\d+)*", launched) is not None


class Trainer:
    """Common part: the steps, and what a sample is.

    Attributes:
      step: the index of the next step.
    """

    def __init__(self, case: Case, arm: Arm, arrays: Mapping[str, np.ndarray]):
        self.p, self.arm, self.step = case.params, arm, 0
        self.ids, self.rates = arrays["ids"], arrays["learning_rates"]
        self.parameters = {name: x for name, x in arrays.items() if name not in ("ids", "learning_rates")}
        sizes = self.p["decoder"]
        self.kda_shape = (self.p["batch_size"], self.p["sequence_length"], sizes["num_heads"], sizes["head_dim"])
        self.gpu = False

    # What a framework adds: `call` runs a part once and returns what to wait for.

    def call(self, part: str) -> Any:
        raise NotImplementedError

    def wait(self, results: Any) -> None:
        raise NotImplementedError

    def kernels(self, part: str, n: int) -> list[tuple[str, float]]:
        """[(name, ms)] of the kernels of n calls of a part."""
        raise NotImplementedError

    def missing_kernels(self, launched: list[str]) -> list[str]:
        """Kernels that the arm claims to run, and that are not among those launched."""
        return []

    # What the parent asks.

    def train(self, n: int) -> list[dict[str, float]]:
        """n steps one by one: index, loss and norm of the gradients before the update, milliseconds."""
        found = []
        for _ in range(n):
            index, start = self.step, time.perf_counter()
            results = self.call("step")
            self.wait(results)
            ms = (time.perf_counter() - start) * 1e3
            loss, norm = (float(x) for x in results)
            found.append({"step": index, "loss": loss, "grad_norm": norm, "ms": ms})
        return found

    def sample(self, part: str, clock: str, n: int) -> dict[str, Any]:
        """Milliseconds of one call, the mean of n calls that follow each other as in training: "wall", of the host, or
        "device", the sum of kernels, with a tally of those of one call. And the steps that this took."""
        self.wait(self.call(part))
        first = self.step
        if clock == "wall":
            start, results = time.perf_counter(), None
            for _ in range(n):
                results = self.call(part)
            self.wait(results)
            return {"ms": (time.perf_counter() - start) * 1e3 / n, "steps": [first, self.step - 1], "kernels": []}
        if not self.gpu:
            raise Unsupported("no device timer without a GPU")
        records = self.kernels(part, n)
        if not records:
            raise Unsupported("the profiler recorded no kernels")
        kernels = [{**k, "count": k["count"] / n, "ms": k["ms"] / n} for k in tally(records)]
        missing = self.missing_kernels([name for name, _ in records]) if part == "step" else []
        return {
            "ms": sum(k["ms"] for k in kernels),
            "gemm_ms": sum(k["ms"] for k in kernels if is_gemm(k["name"])),
            "steps": [first, self.step - 1],
            "kernels": kernels,
            "missing": missing,
        }

    def _batch(self, step: int) -> np.ndarray:
        return np.asarray(self.ids[step % len(self.ids)])


# ---- JAX -----------------------------------------------------------------------------------------------------------


class JaxTrainer(Trainer):
    """The step of `dormouse_jax.train` as it is, with `implementation` of the arm's options."""

    def __init__(self, case: Case, arm: Arm, arrays: Mapping[str, np.ndarray]):
        super().__init__(case, arm, arrays)
        import jax

        self.jax, self.gpu = jax, jax.default_backend() == "gpu"
        self.compiled: dict[str, Any] = {}
        self.claimed: list[str] = []

    def build(self) -> dict[str, Any]:
        import concurrent.futures

        import jax.numpy as jnp
        from flax import nnx
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        import dormouse_jax
        from dormouse_jax.models import Decoder, DecoderConfig
        from dormouse_jax.training.step import DATA, TrainState, make_steps, optimizer

        jax, p, implementation = self.jax, self.p, self.arm.options["implementation"]
        config = DecoderConfig(**p["decoder"])
        mesh = jax.make_mesh((1,), (DATA,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        self.placement = NamedSharding(mesh, P())
        self.transformation, _ = optimizer(**p["optimizer"])
        model = nnx.eval_shape(lambda: Decoder(config, **self.arm.options, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model, nnx.Param)
        state = TrainState(params, jax.eval_shape(self.transformation.init, params))
        ids = jax.ShapeDtypeStruct(self.ids.shape[1:], jnp.uint8)
        state, params, ids = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.placement), (state, params, ids)
        )
        self.flat = nnx.to_flat_state(params)
        train, _ = make_steps(model, self.transformation, mesh)

        def loss(params, ids):
            return nnx.merge(graph, params).loss(ids)

        def operator(inputs, do):
            options: dict[str, Any] = {f"use_{n}_in_kernel": True for n in ("qk_l2norm", "gate", "beta_sigmoid")}
            o, vjp = jax.vjp(lambda x: dormouse_jax.kda(**x, **options, implementation=implementation)[0], inputs)
            return o, vjp(do)

        self.operands = self._operands()
        inputs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.operands.items()}
        interpret = implementation.startswith("pallas") and not self.gpu
        start = time.perf_counter()
        with dormouse_jax.interpret_kernels() if interpret else contextlib.nullcontext():
            traced = {
                "step": train.trace(state, ids),
                "gradients": jax.jit(jax.value_and_grad(loss)).trace(params, ids),
                "forward": jax.jit(loss).trace(params, ids),
                "kda": jax.jit(operator).trace(inputs, inputs["v"]),
            }
            calls = dormouse_jax.explain(train, state, ids)
        trace_s = time.perf_counter() - start
        self.claimed = sorted({name for call in calls for name in call.kernels})
        inside = set(pallas_names(traced["step"].jaxpr))
        found = {
            "trace_s": trace_s,
            "missing": [name for name in self.claimed if name not in inside]
            + [prefix for prefix in self.arm.proof if not any(name.startswith(prefix) for name in self.claimed)],
            "in_program": sorted(inside),
            "explain": [str(call) for call in dict.fromkeys(calls)],
            "note": "interpret mode" if interpret else "",
        }
        if found["missing"]:
            return found
        with concurrent.futures.ThreadPoolExecutor(len(PARTS)) as pool:
            compiled = {part: pool.submit(lambda x=x: x.lower().compile()) for part, x in traced.items()}
            # What it takes before training can start: the other parts are of this benchmark alone.
            self.compiled["step"], compile_s = compiled["step"].result(), time.perf_counter() - start
            self.compiled |= {part: future.result() for part, future in compiled.items()}
        found["compile_s"] = compile_s
        if self.gpu:  # Interpreted kernels are part of the program, and have no name in it.
            found["in_program"] = in_program(self.compiled["step"].as_text())
            found["missing"] = [name for name in self.claimed if name not in found["in_program"]]
        return found

    def _operands(self) -> dict[str, Any]:
        """Operands of a KDA call as a layer has them before the first step, random."""
        B, T, H, D = self.kda_shape
        rng, dtype = np.random.default_rng(0), DTYPES[self.p["decoder"]["dtype"]]
        raw = {n: rng.standard_normal((B, T, H, D), np.float32).astype(dtype) for n in ("q", "k", "v", "g")}
        first = {n: self.parameters[f"groups.layers.0.mixer.{n}"][0] for n in ("A_log", "dt_bias")}
        return raw | {"beta": rng.standard_normal((B, T, H), np.float32).astype(dtype)} | first

    def start(self) -> dict[str, Any]:
        from flax import nnx

        from dormouse_jax.training.step import TrainState

        def put(x):
            return self.jax.device_put(np.asarray(x), self.placement)

        flat = [(path, var.replace(put(self.parameters[".".join(map(str, path))]))) for path, var in self.flat]
        params = nnx.from_flat_state(flat)
        opt_state = self.jax.jit(self.transformation.init, out_shardings=self.placement)(params)
        self.state = TrainState(params, opt_state)
        self.operands = self.jax.device_put(self.operands)
        return {}

    def memory(self) -> int | None:
        """Bytes that a step holds at its peak: parameters, the optimizer's state, and what XLA planned beside them."""
        found = self.compiled["step"].memory_analysis()
        if found is None:
            return None
        whole = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        return int(whole + found.temp_size_in_bytes)

    def call(self, part: str) -> Any:
        if part == "kda":
            return self.compiled[part](self.operands, self.operands["v"])
        ids = self.jax.device_put(self._batch(self.step), self.placement)
        if part != "step":
            return self.compiled[part](self.state.params, ids)
        self.state, metrics = self.compiled[part](self.state, ids)
        self.step += 1
        return metrics["loss"], metrics["grad_norm"]

    def wait(self, results: Any) -> None:
        self.jax.block_until_ready(results)

    def kernels(self, part: str, n: int) -> list[tuple[str, float]]:
        from jax.experimental.mosaic.gpu import profiler

        _, timings = profiler.measure(_Call(lambda: self.call(part)), aggregate=False, iterations=n)()
        calls: Any = (timings or []) if n > 1 else [timings or []]
        return [(str(name), float(ms)) for call in calls for name, ms in call]

    def missing_kernels(self, launched: list[str]) -> list[str]:
        return [name for name in self.claimed if not any(is_launch_of(x, name) for x in launched)]


class _Call:
    """Passes for a `jax.stages.Wrapped`, which the profiler calls as it is: it jits anything else."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function

    def __call__(self) -> Any:
        return self.function()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("it is compiled already")

    lower = eval_shape = trace


# ---- PyTorch -------------------------------------------------------------------------------------------------------


class TorchTrainer(Trainer):
    """`torch_ref.decoder`. Options: "kda", "port" or "fla"; "compile", whether torch.compile makes the operator of the
    port and the parts of layers around the operator, each once for all layers."""

    def __init__(self, case: Case, arm: Arm, arrays: Mapping[str, np.ndarray]):
        super().__init__(case, arm, arrays)
        import torch

        self.torch, self.gpu = torch, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.gpu else "cpu")
        self.compiles, fla = bool(arm.options.get("compile")), arm.options["kda"] == "fla"
        if fla and not self.gpu:
            raise Unsupported("flash-linear-attention's kernels need a GPU")
        wrap = None
        if self.compiles:
            torch._dynamo.reset()
            # Inductor's C++ takes minutes to compile, for times that mean nothing.
            wrap = functools.partial(
                torch.compile, dynamic=False, fullgraph=True, backend="inductor" if self.gpu else "aot_eager"
            )
        self.wrap = wrap
        self.kda = _fla_kda() if fla else self._ported_kda()

    def _ported_kda(self) -> Callable[..., Any]:
        from torch_ref.decoder import ported_kda

        dtype = self.p["decoder"]["dtype"]
        kda = ported_kda(self.p["torch_chunk"], None if dtype == "float32" else getattr(self.torch, dtype))
        return self.wrap(kda) if self.wrap else kda

    def _model(self, groups: int | None = None) -> Any:
        """The decoder, or its first groups of layers only."""
        from torch_ref.decoder import Decoder

        sizes = {n: self.p["decoder"][n] for n in ("head_dim", "attention_every", "loops", "norm_eps", "dtype")}
        layers = self.p["decoder"]["num_layers"] if groups is None else groups * max(1, sizes["attention_every"])
        put = {
            name: self.torch.from_numpy(np.array(x[:groups] if name.startswith("groups.") else x)).to(self.device)
            for name, x in self.parameters.items()
        }
        return Decoder(put, kda=self.kda, compiled=self.wrap, num_layers=layers, **sizes)

    def build(self) -> dict[str, Any]:
        # A model of one group of layers: all groups run the same code at the same shapes.
        first, again = self._seconds_of_gradients(self._model(groups=1))
        graphs = self._graphs()
        if self.compiles and not graphs:
            raise Unsupported("torch.compile captured no graph: this would be the eager arm again")
        if self.gpu:
            self.torch.cuda.empty_cache()
        note = "graphs run by aot_eager on the CPU" if self.compiles and not self.gpu else ""
        return {"compile_s": max(0.0, first - again), "graphs": graphs, "missing": [], "note": note}

    def _seconds_of_gradients(self, model: Any) -> list[float]:
        """Those of a first and of a second call."""
        batch, seconds = self._put(self._batch(0)), []
        for _ in range(2):
            start = time.perf_counter()
            model.loss(batch).backward()
            self._sync()
            seconds.append(time.perf_counter() - start)
        return seconds

    def start(self) -> dict[str, Any]:
        from torch_ref.decoder import AdamW

        self.model = self._model()
        self.adamw = AdamW(
            self.model.parameters,
            weight_decay=self.p["optimizer"]["weight_decay"],
            clip_norm=self.p["optimizer"]["clip_norm"],
        )
        B, T, H, D = self.kda_shape
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        options["dtype"] = getattr(torch, self.p["decoder"]["dtype"])
        raw = [torch.randn((B, T, H, D), **options) for _ in range(4)] + [torch.randn((B, T, H), **options)]
        layer = "groups.0.layers.0.mixer."
        gate = [self.model.parameters[layer + n].detach().clone() for n in ("A_log", "dt_bias")]
        self.operands = [x.requires_grad_(True) for x in (*raw, *gate)]
        return {}

    def memory(self) -> int | None:
        """Bytes that torch's allocator holds at the peak of a step."""
        if not self.gpu:
            return None  # torch's CPU allocator keeps no peak
        self.torch.cuda.reset_peak_memory_stats()
        self.wait(self.call("step"))
        return int(self.torch.cuda.max_memory_allocated())

    def call(self, part: str) -> Any:
        torch = self.torch
        try:
            if part == "kda":
                o = self.kda(*self.operands)
                return torch.autograd.grad(o, self.operands, self.operands[2])
            ids = self._put(self._batch(self.step))
            loss = self.model.loss(ids)
            if part == "forward":
                return loss.detach()
            if part == "gradients":
                return torch.autograd.grad(loss, list(self.model.parameters.values()))
            loss.backward()
            norm = self.adamw.step(float(self.rates[min(self.step, len(self.rates) - 1)]))
        except torch.cuda.OutOfMemoryError as error:
            raise Unsupported(f"out of memory: {one_line(error)}") from error
        self.step += 1
        return loss.detach(), norm

    def wait(self, results: Any) -> None:
        del results
        self._sync()

    def kernels(self, part: str, n: int) -> list[tuple[str, float]]:
        def body():
            for _ in range(n):
                self.call(part)

        return [(name, ms) for name, _, ms in torch_kernels(body)]

    def _sync(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def _put(self, ids: np.ndarray) -> Any:
        return self.torch.from_numpy(np.array(ids)).to(self.device)

    def _graphs(self) -> int:
        return self.torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiles else 0


def _fla_kda() -> Callable[..., Any]:
    from fla.ops.kda import chunk_kda

    def kda(q, k, v, g, beta, A_log, dt_bias):
        options: dict[str, Any] = {f"use_{n}_in_kernel": True for n in ("qk_l2norm", "gate", "beta_sigmoid")}
        return chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **options)[0]

    return kda


TRAINERS: dict[str, Any] = {"jax": JaxTrainer, "torch": TorchTrainer}
