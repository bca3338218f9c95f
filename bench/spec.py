"""What an operator benchmark is made of: cases, arms, and the operator that knows inputs, oracle, bytes and flops.

Everything here crosses process borders as JSON, so it is made of plain values. No JAX, no torch in this module.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

MODES = ("fwd", "fwd_res", "fwdbwd")  # of an operator that is differentiated
MODE_TITLES = {
    "fwd": "forward",
    "fwd_res": "forward with residuals (as the differentiated node)",
    "fwdbwd": "forward + backward",
    "decode": "one decoding step",
}

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}


class UsageError(ValueError):
    """A bad flag or file. The command prints the text as one line and exits non-zero, without a traceback."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: operator, name (the preset's, or "custom") and JSON-able parameters (shape, dtype, recipe, seed)."""

    op: str
    name: str
    params: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Stable identity over runs: what `gate` and `run_all` match on."""
        text = json.dumps([self.op, self.name, dict(self.params)], sort_keys=True)
        return f"{self.op}-{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "name": self.name, "params": dict(self.params)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Case:
        return Case(data["op"], data["name"], data["params"])


@dataclasses.dataclass(frozen=True)
class Arm:
    """One implementation to measure.

    target: "module:function"; the worker imports it and calls `function(case, options)`, which returns the forward
      function (dict of arrays -> dict of outputs), or a `Built` when the arm brings its own modes.
    framework: "jax", "torch" or "numpy": which runtime compiles, differentiates and times it.
    requires: packages that must be importable; a missing one makes a NOT MEASURED row with the reason.
    proof: every prefix here must start the name of some launched kernel, else the row is NOT MEASURED: the path
      claimed is not the path that ran.
    precision: how its products are computed ("fp32", "tf32", "16bit"): chooses the accuracy bar.
    ours: our own arms are held to the bar itself, others to `PEER_SLACK` times the bar.
    exclusive: set-up times kernels on the device (an autotuner), so nothing else may run beside it.
    """

    name: str
    framework: str
    target: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    proof: tuple[str, ...] = ()
    precision: str = "fp32"
    ours: bool = False
    exclusive: bool = False
    modes: tuple[str, ...] = MODES

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Arm:
        data = dict(data)
        for key in ("requires", "proof", "modes"):
            data[key] = tuple(data[key])
        return Arm(**data)


@dataclasses.dataclass(frozen=True)
class Built:
    """What an arm's target may return instead of a bare forward function.

    forward: dict of arrays -> dict of outputs; the runtime differentiates it.
    modes: mode -> function, for an arm that brings its own (they are called as they are).
    note: shown under the table (for example which configuration was chosen).
    tune_s: seconds the arm itself spent timing candidates, if it knows.
    """

    forward: Callable[..., Any] | None = None
    modes: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    note: str = ""
    tune_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call cannot do without. reads, writes: bytes; flops: operations; rate: which matmul rate bounds them."""

    reads: int
    writes: int
    flops: float = 0.0
    rate: str = "float32"


class Operator:
    """Base of an operator benchmark; one subclass per operator, named by its module in `OPERATORS`."""

    name: str = ""
    differentiable: tuple[str, ...] = ()
    cotangents: Mapping[str, str] = {}  # output name -> name of the input that holds its cotangent
    keeps_oracle: bool = True  # on disk, by a fingerprint of the inputs, for later runs
    updated: Mapping[str, str] = {}  # input that a call may update in place -> the output that takes its memory

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        """Seeded inputs, cotangents included, in the dtypes that every arm gets."""
        raise NotImplementedError

    def subset(self, case: Case) -> Sequence[Any]:
        """The parts of the problem that the oracle computes (JSON-able), all of it where that is cheap."""
        raise NotImplementedError

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        """The slice of input, output or gradient `name` that belongs to `part`, by basic indexing only."""
        raise NotImplementedError

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """float64 outputs and gradients ("d" + input name) for the inputs of one part."""
        raise NotImplementedError

    def oracle_parts(self, case: Case, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """The oracle of every part; an operator whose parts are independent may do them side by side."""
        return [self.oracle(case, part) for part in parts]

    def traffic(self, case: Case, mode: str) -> Traffic:
        raise NotImplementedError

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        """Largest RMS-relative error of `tensor` ("o", "dq", ...) that is still right at the arm's precision."""
        raise NotImplementedError

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        """The dtype whose eps the ULP column uses."""
        raise NotImplementedError

    def describe(self, case: Case) -> str:
        """The problem in a few words for a table's title."""
        raise NotImplementedError

    def tensors(self, mode: str) -> tuple[str, ...]:
        """Outputs, and gradients where `mode` has them, in the order they are shown."""
        grads = tuple(f"d{n}" for n in self.differentiable) if mode == "fwdbwd" else ()
        return tuple(self.cotangents) + grads


OPERATORS: dict[str, str] = {
    "kda": "bench.kda:KDA",
    "gdn2": "bench.kda:GDN2",
    "kda_step": "bench.kda_step:KDAStep",
    "gemm": "bench.gemm:GEMM",
    "attention": "bench.attention:Attention",
    **{
        f"{family}_{form}": f"bench.adapters:{family}_{form}"
        for family in ("lora", "loha", "lokr", "oft")
        for form in ("rebuild", "bypass")
    },
    "toy": "bench.toy:Toy",
}


def operator(name: str) -> Operator:
    if name not in OPERATORS:
        raise UsageError(f"unknown operator {name!r}; known: {', '.join(OPERATORS)}")
    return load(OPERATORS[name])()


def load(target: str) -> Any:
    """`"module:attribute"` -> the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of `names` that cannot be imported, found without importing the heavy ones."""

    def absent(name: str) -> bool:
        # Only the top package is looked up: find_spec of a submodule imports its parents.
        return importlib.util.find_spec(name.partition(".")[0]) is None

    return [n for n in names if absent(n)]


# ---- arrays on disk ------------------------------------------------------------------------------------------------
# Raw .npy files in a directory plus an index with the dtypes: bfloat16 has no .npy spelling of its own, and separate
# files can be memory-mapped, so that eight workers share one copy of a large input.


def save_arrays(folder: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        index[name] = array.dtype.name
        np.save(folder / f"{name}.npy", array.view(np.uint16) if array.dtype.name == "bfloat16" else array)
    temporary = folder / "index.json.part"
    temporary.write_text(json.dumps(index))
    temporary.replace(folder / "index.json")  # last, so that a folder with an index is complete


def load_arrays(folder: pathlib.Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    index = json.loads((folder / "index.json").read_text())
    out = {}
    for name in index if names is None else names:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
        out[name] = array.view(ml_dtypes.bfloat16) if index[name] == "bfloat16" else array
    return out
