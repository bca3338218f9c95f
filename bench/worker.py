"""One worker process: runs one arm (or the oracle, or the roofline probe) and answers the parent over a pipe.

Requests come as JSON lines on stdin, replies go as JSON lines to the file descriptor named on the command line, so that
nothing a library prints can spoil the protocol. The parent closing stdin, or dying, ends the worker.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import gc
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

# Heavy imports happen inside the requests, where a failure becomes a row with its reason.
from bench import device, runtimes
from bench.harness import TOO_LATE, accuracy
from bench.spec import Arm, Case, load_arrays, operator, save_arrays

REFERENCE_S = 20.0  # how long a reference may come after the last moment to begin


class Worker:
    def __init__(self) -> None:
        self.runtime: runtimes.Runtime | None = None
        self.trainer: Any = None
        self.held: dict[str, runtimes.Runtime] = {}

    def init(self, framework: str, gpu: bool) -> dict[str, Any]:
        """Imports the framework and wakes its device up, so that this can overlap with other workers' start.

        gpu: whether there is one to use; a framework that cannot is an error, not a slow run on the host.
        """
        start = time.perf_counter()
        if framework == "jax":
            import jax

            jax.config.update("jax_traceback_filtering", "off")
            # Interpreted kernels are large programs, and without a GPU times mean nothing: spend none on compiling.
            jax.config.update("jax_disable_most_optimizations", not gpu)
            import jax.numpy as jnp

            jnp.zeros(8).block_until_ready()
            if gpu and jax.default_backend() != "gpu":
                raise runtimes.Unsupported(f"JAX finds no GPU, only {jax.default_backend()}: is its CUDA plugin there?")
        elif framework == "torch":
            import torch

            if gpu and not torch.cuda.is_available():
                raise runtimes.Unsupported("torch finds no GPU: is it a CUDA build?")
            if gpu:
                torch.zeros(8, device="cuda")
                torch.cuda.synchronize()
            else:
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0))))
        return {"seconds": time.perf_counter() - start}

    def case(self, case: dict, arm: dict, inputs: str) -> dict[str, Any]:
        self.release()
        parsed, the_case = Arm.from_json(arm), Case.from_json(case)
        kind = runtimes.RUNTIMES[parsed.framework]
        runtime = self.runtime = kind(operator(the_case.op), the_case, parsed, load_arrays(pathlib.Path(inputs)))
        return {"note": runtime.built.note, "tune_s": runtime.built.tune_s}

    def prepare(self, mode: str) -> dict[str, Any]:
        assert self.runtime is not None
        return self.runtime.prepare(mode)

    def dump(self, mode: str, folder: str) -> dict[str, Any]:
        """Writes the oracle's parts of the outputs of one call under `folder`."""
        run = self.runtime
        assert run is not None
        outputs = run.outputs(mode)
        outputs = {name: run.whole(outputs[name]) for name in run.operator.tensors(mode)}
        for index, part in enumerate(run.operator.subset(run.case)):
            slices = {
                name: run.to_numpy(run.operator.take(run.case, name, outputs[name], part))
                for name in run.operator.tensors(mode)
            }
            save_arrays(pathlib.Path(folder) / f"part{index}", slices)
        return {}

    def sample(self, mode: str, what: str, n: int, key: str = "") -> dict[str, Any]:
        runtime = self.held[key] if key else self.runtime
        assert runtime is not None
        return runtime.sample(mode, what, n)

    def hold(self, jobs: list[dict[str, Any]], until: float, threads: int = 1, nice: int = 0) -> dict[str, Any]:
        """Prepares many arms on many cases, to be sampled by their keys, and holds them to the reference.

        jobs: {"key", "case", "arm", "modes"; "inputs", "reference": folders that others fill meanwhile}. until: seconds
        of the epoch after which none is begun. threads: how many are compiled side by side. Returns by key and mode
        either "info" of `prepare`, "errors" and what is "wrong", or the "reason" why there is nothing to sample.
        """
        os.nice(nice)
        torch = sys.modules.get("torch")
        if torch is not None:
            import torch._dynamo

            torch.set_num_threads(1)
            # The cases' functions have one code object in common, which past a limit is not compiled any more.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20
        if threads == 1:
            found = [self._hold(job, until) for job in jobs]
        else:
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(lambda job: self._hold(job, until), jobs))
        return {job["key"]: modes for job, modes in zip(jobs, found, strict=True)}

    def _hold(self, job: dict[str, Any], until: float) -> dict[str, Any]:
        case, arm = Case.from_json(job["case"]), Arm.from_json(job["arm"])
        op, found = operator(case.op), {}
        for mode in job["modes"]:
            try:
                runtime = self.held.get(job["key"])
                if runtime is None:
                    _wait_for(pathlib.Path(job["inputs"]) / "index.json", until)
                    inputs = load_arrays(pathlib.Path(job["inputs"]))
                    runtime = runtimes.RUNTIMES[arm.framework](op, case, arm, inputs)
                    self.held[job["key"]] = runtime
                if time.time() > until:
                    raise runtimes.Unsupported(TOO_LATE)
                info = {"note": runtime.built.note, "tune_s": runtime.built.tune_s, **runtime.prepare(mode)}
                errors, wrong = self._accuracy(runtime, mode, pathlib.Path(job["reference"]), until + REFERENCE_S)
                found[mode] = {"info": info, "errors": errors, "wrong": wrong}
            except Exception as error:
                if not isinstance(error, (runtimes.Unsupported, NotImplementedError)):
                    traceback.print_exc()
                found[mode] = {"reason": runtimes.one_line(error)}
        return found

    def _accuracy(self, runtime: runtimes.Runtime, mode: str, reference: pathlib.Path, until: float) -> Any:
        _wait_for(reference / "done", until)
        op, case = runtime.operator, runtime.case
        outputs = {name: runtime.whole(x) for name, x in runtime.outputs(mode).items()}

        def parts(name: str) -> Iterator[tuple[Any, Any]]:
            for index, part in enumerate(op.subset(case)):
                want = load_arrays(reference / f"part{index}", [name])[name]
                yield runtime.to_numpy(op.take(case, name, outputs[name], part)), want

        return accuracy(op, case, runtime.arm, mode, parts)

    def repeat(self, mode: str, n: int) -> dict[str, Any]:
        assert self.runtime is not None
        return {"n": n, "different": self.runtime.repeat(mode, n)}

    def trace(self, mode: str, n: int, folder: str) -> dict[str, Any]:
        """Mean milliseconds of one call by a trace of JAX's own profiler: the second opinion on CUPTI's sums."""
        import jax

        from bench.crosscheck import kernel_ms

        run = self.runtime
        assert run is not None
        jax.block_until_ready(run.outputs(mode))
        with jax.profiler.trace(folder):
            for _ in range(n):
                jax.block_until_ready(run.outputs(mode))
        kernels = kernel_ms(pathlib.Path(folder))
        if not kernels or len(kernels) % n:
            raise runtimes.Unsupported(f"the trace holds {len(kernels)} kernels of {n} calls")
        return {"ms": sum(ms for _, ms in kernels) / n, "kernels": runtimes.tally(kernels)}

    def training(self, what: str, **args: Any) -> Any:
        """A request to what `bench.train_step` measures: see `bench.train_arms`."""
        from bench import train_arms

        if what == "inputs":
            return train_arms.make_inputs(Case.from_json(args["case"]), pathlib.Path(args["folder"]))
        if what == "build":
            self.release()
            kind = train_arms.TRAINERS[args["arm"]["framework"]]
            arrays = load_arrays(pathlib.Path(args["inputs"]))
            self.trainer = kind(Case.from_json(args["case"]), Arm.from_json(args["arm"]), arrays)
            return self.trainer.build()
        return getattr(self.trainer, what)(**args)

    def release(self) -> dict[str, Any]:
        self.runtime = self.trainer = None
        self.held = {}
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None:
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()  # nothing that an earlier case compiled may serve the next
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        jax = sys.modules.get("jax")
        if jax is not None:
            jax.clear_caches()
        return {}

    def oracle(self, case: dict, inputs: str, folder: str) -> dict[str, Any]:
        """The float64 reference of every part, one folder a part, an index last so that a half-written one shows."""
        the_case = Case.from_json(case)
        op, arrays, out = operator(the_case.op), load_arrays(pathlib.Path(inputs)), pathlib.Path(folder)
        start = time.perf_counter()
        taken = [
            {name: op.take(the_case, name, array, part) for name, array in arrays.items()}
            for part in op.subset(the_case)
        ]
        for index, reference in enumerate(op.oracle_parts(the_case, taken)):
            save_arrays(out / f"part{index}", reference)
        (out / "done").write_text(f"{time.perf_counter() - start:.1f} s\n")
        return {"seconds": time.perf_counter() - start}

    def probe(self, kind: str) -> dict[str, Any]:
        from bench import roofline

        return {**roofline.probe(kind), "l2_bytes": None if kind == "numpy" else device.l2_bytes()}


def _wait_for(path: pathlib.Path, until: float) -> None:
    failed = path.with_name("failed")
    while not path.exists():
        if failed.exists():
            raise runtimes.Unsupported(f"no reference: {failed.read_text()}")
        if time.time() > until:
            raise runtimes.Unsupported(TOO_LATE)
        time.sleep(0.05)


def serve(requests: TextIO, replies: TextIO) -> None:
    worker = Worker()
    for line in requests:
        request = json.loads(line)
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["result"] = getattr(worker, request["do"])(**request["args"])
        except (runtimes.Unsupported, NotImplementedError) as error:
            reply["error"] = runtimes.one_line(error)
        except Exception as error:  # any failure of an arm is a row, never the end of the run
            traceback.print_exc()
            reply["error"] = runtimes.one_line(error)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    try:
        # Linux: die with the parent, whatever kills it.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
