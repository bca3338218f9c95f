"""Matrix products: accuracy and time of every implementation.

    python -m bench.gemm --impl=pallas,xla,torch
    python -m bench.gemm --impl=all --preset=report_bf16,report_fp32:fwd,square8k_bf16:fwdbwd --json out.json

--impl   arms: pallas, pallas_triton, xla (jax.lax.dot_general), torch (cuBLAS), jax_triton (a Triton kernel launched
         through jax-triton); groups: ours, all, and peer: what sets the bar, XLA's dot in 16 bit, which chooses among
         cuBLAS's kernels and its own by timing them, and torch's cuBLAS for float32, where it takes XLA 9 s to choose
         the same kernel
--preset names of SHAPE_PRECISION, such as report_bf16, or a SHAPE for all its precisions (default: report on a GPU,
         cpu without one). Shapes: report, square4k, square8k; qkv, proj, up, down of a transformer of width 4096 and
         hidden width 14336 at 1k, 4k and 16k tokens (up4k); skinny1, skinny16, skinny64; odd; report_tn, _nt, _tt, the
         transposes. Precisions: bf16, fp16, tf32, fp32. In tf32 every arm computes in TF32, in fp32 none does. A preset
         with :fwd or :fwdbwd is measured in that mode alone, instead of those of --mode
--shape  M,N,K instead of a preset's shape, with --precision
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device
from bench.spec import DTYPES, MODE_TITLES, Arm, Case, Operator, Traffic, UsageError


@dataclasses.dataclass(frozen=True)
class Preset:
    """out[M, N] = op(a) op(b) over a contraction of K; a stored as [K, M] and b as [N, K] where they are transposed."""

    M: int
    N: int
    K: int
    transpose_a: bool = False
    transpose_b: bool = False


_TOKENS = {"1k": 1024, "4k": 4096, "16k": 16384}
_LAYERS = {"qkv": (6144, 4096), "proj": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336)}

SHAPES = (
    {
        "report": Preset(5120, 8192, 2048),
        "report_tn": Preset(5120, 8192, 2048, True, False),
        "report_nt": Preset(5120, 8192, 2048, False, True),
        "report_tt": Preset(5120, 8192, 2048, True, True),
        "square4k": Preset(4096, 4096, 4096),
        "square8k": Preset(8192, 8192, 8192),
    }
    | {f"{layer}{n}": Preset(T, N, K) for layer, (N, K) in _LAYERS.items() for n, T in _TOKENS.items()}
    | {f"skinny{M}": Preset(M, 14336, 4096) for M in (1, 16, 64)}
    | {"odd": Preset(1000, 1023, 777), "cpu": Preset(40, 24, 64)}
)
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
PRESETS = {f"{shape}_{precision}": (shape, precision) for shape in SHAPES for precision in PRECISIONS}

# What bench.run_all measures.
SWEEP = (
    *(f"{shape}_{precision}" for shape in ("report", "square8k") for precision in ("bf16", "fp16", "tf32", "fp32")),
    *(f"square4k_{precision}" for precision in ("bf16", "tf32", "fp32")),
    *(f"{layer}4k_bf16" for layer in _LAYERS),
    *(f"{layer}{n}_bf16" for layer in ("up", "down") for n in ("1k", "16k")),
    "down4k_fp32",
    *(f"skinny{M}_bf16" for M in (1, 16, 64)),
    "odd_bf16",
    "odd_fp32",
    *(f"report_{t}_bf16" for t in ("tn", "nt", "tt")),
)

_DRAWN = 1 << 21  # elements of an input that are drawn at once, each lot from a seed of its own
_SAMPLE = 64  # rows of the output, and of either gradient, that are held to float64


class GEMM(Operator):
    """out = op(a) op(b)."""

    name = "gemm"
    differentiable = ("a", "b")
    cotangents = {"out": "dout"}
    keeps_oracle = False  # of a sample of rows it takes less time than a fingerprint of the inputs

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        p, dtype = case.params, DTYPES[case.params["dtype"]]
        M, N, K = p["M"], p["N"], p["K"]
        shapes = {
            "a": (K, M) if p["transpose_a"] else (M, K),
            "b": (N, K) if p["transpose_b"] else (K, N),
            "dout": (M, N),
        }

        inputs = {name: np.empty(shape, dtype) for name, shape in shapes.items()}

        def draw(name: str, first: int) -> None:
            part = inputs[name].reshape(-1)[first : first + _DRAWN]
            seed = [p["seed"], list(shapes).index(name), first]
            part[:] = np.random.default_rng(seed).standard_normal(part.size, dtype=np.float32)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            parts = [(name, first) for name, x in inputs.items() for first in range(0, x.size, _DRAWN)]
            list(pool.map(lambda part: draw(*part), parts))
        return inputs

    def subset(self, case: Case) -> Sequence[Any]:
        # One part: sampled rows of the output and of a's gradient, and values of K of b's.
        return [0]

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        p = case.params
        rows, ks = (slice(None, None, max(1, p[axis] // _SAMPLE)) for axis in "MK")
        if name in ("out", "dout"):
            return array[rows] if name == "out" else array
        if name == "da":
            return array[:, rows] if p["transpose_a"] else array[rows]
        if name == "db":
            return array[:, ks] if p["transpose_b"] else array[ks]
        return array

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        p = case.params
        rows, ks = (slice(None, None, max(1, p[axis] // _SAMPLE)) for axis in "MK")
        a = inputs["a"].T if p["transpose_a"] else inputs["a"]
        b = inputs["b"].T if p["transpose_b"] else inputs["b"]
        wide = b.astype(np.float64)
        found = {"out": a[rows].astype(np.float64) @ wide, "da": inputs["dout"][rows].astype(np.float64) @ wide.T}
        found["db"] = a[:, ks].T.astype(np.float64) @ inputs["dout"].astype(np.float64)
        for name in "ab":
            if p[f"transpose_{name}"]:
                found[f"d{name}"] = found[f"d{name}"].T
        return {name: np.ascontiguousarray(x) for name, x in found.items()}

    def traffic(self, case: Case, mode: str) -> Traffic:
        p = case.params
        M, N, K = p["M"], p["N"], p["K"]
        size = DTYPES[p["dtype"]].itemsize
        operands, out = (M * K + K * N) * size, M * N * size
        # Float32-accurate products cost six products of bfloat16 pieces, or three TF32 ones, which is the same.
        flops = 2.0 * M * N * K * (6 if p["precision"] == "fp32" else 1)
        rate = "tf32" if p["precision"] == "tf32" else "bf16"
        if mode == "fwdbwd":
            return Traffic(reads=operands + out, writes=operands + out, flops=3 * flops, rate=rate)
        return Traffic(reads=operands, writes=out, flops=flops, rate=rate)

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        # Roundings of a float32 sum grow as the square root of its length.
        p = case.params
        length = {"out": p["K"], "da": p["N"], "db": p["M"]}[tensor]
        return {"fp32": 2e-6 * max(1.0, length / 1024) ** 0.5, "tf32": 1e-3, "16bit": 4e-3}[arm.precision]

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        return DTYPES[case.params["dtype"]]

    def describe(self, case: Case) -> str:
        p = case.params
        stored = "".join("NT"[p[f"transpose_{name}"]] for name in "ab")
        return f"M={p['M']} N={p['N']} K={p['K']} {stored} {p['precision'] if p['dtype'] == 'float32' else p['dtype']}"


# ---- arms ----------------------------------------------------------------------------------------------------------

GROUPS = {"ours": ("pallas", "pallas_triton")}


def arms(precision: str) -> dict[str, Arm]:
    """Every arm for products of one precision: "fp32", "tf32" or "16bit"."""
    here = "bench.gemm_arms:"

    def ours(name: str, **options: Any) -> Arm:
        options = {"implementation": name, "precision": precision, **options}
        return Arm(
            name, "jax", here + "ours", options, requires=("jax",), proof=("gemm_",), precision=precision, ours=True
        )

    found = [
        ours("pallas"),
        ours("pallas_triton"),
        # XLA times candidates on the device while it compiles.
        Arm(
            "xla", "jax", here + "xla", {"precision": precision}, requires=("jax",), precision=precision, exclusive=True
        ),
        # The runtime allows TF32 where that is the arm's precision, and nowhere else.
        Arm("torch", "torch", here + "torch_port", requires=("torch",), precision=precision),
        Arm(
            "jax_triton",
            "jax",
            here + "jax_triton",
            {"precision": precision},
            requires=("jax_triton", "triton", "jax"),
            precision=precision,
            modes=("fwd",),
        ),
    ]
    return {arm.name: arm for arm in found}


# ---- command -------------------------------------------------------------------------------------------------------


def cases(presets: Sequence[str], *, shape: str | None = None, precision: str = "bf16", seed: int = 0) -> list[Case]:
    """Cases of the presets, or one of a shape "M,N,K"."""
    if shape is not None:
        try:
            M, N, K = (int(part) for part in shape.split(","))
        except ValueError:
            M = N = K = 0
        if min(M, N, K) < 1:
            raise UsageError(f"--shape: expected M,N,K as positive integers, got {shape!r}")
        cli.choose([precision], PRECISIONS, "--precision")
        return [_case("custom", Preset(M, N, K), precision, seed)]
    known = PRESETS | dict.fromkeys(SHAPES)
    found = []
    for name in cli.choose(presets, known, "--preset"):
        pairs = [PRESETS[name]] if name in PRESETS else [(name, precision) for precision in PRECISIONS]
        found += [_case(f"{s}_{p}", SHAPES[s], p, seed) for s, p in pairs]
    return found


def _case(name: str, preset: Preset, precision: str, seed: int) -> Case:
    dtype = PRECISIONS[precision]
    params = dataclasses.asdict(preset) | {"dtype": dtype, "seed": seed}
    return Case("gemm", name, params | {"precision": precision if dtype == "float32" else "16bit"})


def jobs(wanted: Sequence[Case], impl: Sequence[str]) -> list[tuple[Case, list[Arm]]]:
    """The cases with their arms, by names and groups."""
    found = []
    for case in wanted:
        precision = case.params["precision"]
        groups = GROUPS | {"peer": ("xla" if precision == "16bit" else "torch",)}
        found.append((case, cli.pick_arms(impl, arms(precision), groups)))
    return found


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    wanted: list[Case] = []
    modes: dict[str, tuple[str, ...]] = {}
    for text in F.preset or ["report" if device.has_gpu() else "cpu"]:
        name, _, mode = text.partition(":")
        found = cases([name], shape=F.shape, precision=F.precision, seed=F.seed)
        new = [case for case in found if case not in wanted]
        if mode:
            modes |= {case.key: tuple(cli.choose([mode], MODE_TITLES, "--preset")) for case in new}
        wanted += new
    return cli.measure(jobs(wanted, F.impl), command="bench.gemm", case_modes=modes)


if __name__ == "__main__":
    cli.define(impl="pallas,xla,torch,jax_triton", preset="")
    flags.DEFINE_string("shape", None, "M,N,K instead of a preset.")
    flags.DEFINE_string("precision", "bf16", f"Of --shape: {', '.join(PRECISIONS)}.")
    cli.run(main)
