"""One worker process: runs one arm (or the oracle, or the roofline probe) and answers the parent over a pipe.

Requests come as JSON lines on stdin, replies go as JSON lines to the file descriptor named on the command line, so that
nothing a library prints can spoil the protocol. The parent closing stdin, or dying, ends the worker.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any, TextIO

# Heavy imports happen inside the requests, where a failure becomes a row with its reason.
from bench import device, runtimes
from bench.spec import Arm, Case, load_arrays, operator, save_arrays


class Worker:
    def __init__(self) -> None:
        self.runtime: runtimes.Runtime | None = None
        self.trainer: Any = None

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

    def sample(self, mode: str, what: str, n: int) -> dict[str, Any]:
        assert self.runtime is not None
        return self.runtime.sample(mode, what, n)

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
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
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
            import traceback

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
