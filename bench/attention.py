"""Softmax attention: accuracy and time of every implementation.

    python -m bench.attention --impl=pallas,jax,sdpa
    python -m bench.attention --impl=all --preset=report_fp32,t4096_d128_bf16 --json out.json

--impl   arms: pallas, pallas_triton, pallas_mosaic, xla (ours in jax.numpy); jax_cudnn and jax_xla
         (jax.nn.dot_product_attention); sdpa_flash, sdpa_cudnn, sdpa_mem_efficient and sdpa_math, the back-ends of
         torch's scaled_dot_product_attention; composite (a softmax between two products, in torch).
         Groups: ours, jax, sdpa, torch, all
--preset names of SHAPE_PRECISION, such as report_bf16, or a SHAPE for all its precisions (default: report on a GPU,
         cpu without one). Shapes: report (B=10 T=512 H=12 D=64); t512 to t16384 with _d64 and _d128, 16384 tokens in 32
         or 16 heads; grouped (32 query heads that read 8 key heads). Precisions: bf16, fp16, tf32, fp32.
--shape  B,T,H,HK,D instead of a preset's shape, with --precision
--causal whether a query sees keys up to its own time only (default), or all
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device
from bench.spec import DTYPES, Arm, Case, Operator, Traffic, UsageError
from torch_ref.attention import attention_oracle


@dataclasses.dataclass(frozen=True)
class Preset:
    """Axis names as in `dormouse_jax.attention`, with as many queries as keys."""

    B: int
    T: int
    H: int
    HK: int
    D: int


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = (
    {"report": Preset(10, 512, 12, 12, 64)}
    | {f"t{T}_d{D}": Preset(16384 // T, T, 2048 // D, 2048 // D, D) for T in _LENGTHS for D in (64, 128)}
    | {"grouped": Preset(4, 4096, 32, 8, 128), "cpu": Preset(1, 80, 2, 1, 32)}
)
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
PRESETS = {f"{shape}_{precision}": (shape, precision) for shape in SHAPES for precision in PRECISIONS}

# What bench.run_all measures.
SWEEP = (
    "report_fp32",
    "report_tf32",
    "report_bf16",
    "report_fp16",
    *(f"t{T}_d{D}_bf16" for D in (64, 128) for T in _LENGTHS),
    "t4096_d64_fp32",
    "t4096_d128_fp32",
    "grouped_bf16",
)


class Attention(Operator):
    """o = softmax(scale q k^T) v."""

    name = "attention"
    differentiable = ("q", "k", "v")
    cotangents = {"o": "do"}

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        p, dtype = case.params, DTYPES[case.params["dtype"]]
        rng = np.random.default_rng(p["seed"])
        heads = {"q": p["H"], "k": p["HK"], "v": p["HK"], "do": p["H"]}
        return {
            name: rng.standard_normal((p["B"], p["T"], number, p["D"]), dtype=np.float32).astype(dtype)
            for name, number in heads.items()
        }

    def subset(self, case: Case) -> Sequence[Any]:
        # A batch element and a key head with the query heads that read it: the first and the last, or the last.
        p = case.params
        ends = [[0, 0]] if p["T"] <= 2048 else []
        return [pair for pair in ends if pair != [p["B"] - 1, p["HK"] - 1]] + [[p["B"] - 1, p["HK"] - 1]]

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        batch, head = part
        heads = case.params["H"] // case.params["HK"] if name in ("q", "o", "do", "dq") else 1
        return array[batch : batch + 1, :, head * heads : (head + 1) * heads]

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        q, k, v, do = (inputs[name] for name in ("q", "k", "v", "do"))
        return attention_oracle(q, k, v, causal=case.params["causal"], do=do)

    def traffic(self, case: Case, mode: str) -> Traffic:
        p = case.params
        size = p["B"] * p["T"] * p["D"] * DTYPES[p["dtype"]].itemsize
        of_queries, of_keys = p["H"] * size, p["HK"] * size
        scores = p["B"] * p["H"] * (p["T"] * (p["T"] + 1) // 2 if p["causal"] else p["T"] ** 2)
        # Two products; a backward adds five. Float32-accurate ones cost six of bfloat16 pieces.
        flops = 4.0 * scores * p["D"] * (6 if p["precision"] == "fp32" else 1)
        rate = "tf32" if p["precision"] == "tf32" else "bf16"
        if mode == "fwdbwd":
            moved = {"reads": 2 * of_queries + 2 * of_keys, "writes": 2 * of_queries + 2 * of_keys}
            return Traffic(**moved, flops=3.5 * flops, rate=rate)
        return Traffic(reads=of_queries + 2 * of_keys, writes=of_queries, flops=flops, rate=rate)

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        value, gradient = {"fp32": (2e-6, 1e-5), "tf32": (1e-3, 5e-3), "16bit": (5e-3, 8e-3)}[arm.precision]
        return value if tensor == "o" else gradient

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        return DTYPES[case.params["dtype"]]

    def describe(self, case: Case) -> str:
        p = case.params
        sizes = " ".join(f"{name}={p[name]}" for name in ("B", "T", "H", "HK", "D"))
        return (
            f"{sizes} {'causal' if p['causal'] else 'full'} {p['precision'] if p['dtype'] == 'float32' else p['dtype']}"
        )


# ---- arms ----------------------------------------------------------------------------------------------------------

_SDPA = ("flash", "cudnn", "mem_efficient", "math")
GROUPS = {
    "ours": ("pallas", "xla"),
    "jax": ("jax_cudnn", "jax_xla"),
    "sdpa": tuple(f"sdpa_{backend}" for backend in _SDPA),
    "torch": (*(f"sdpa_{backend}" for backend in _SDPA), "composite"),
}


def arms(precision: str) -> dict[str, Arm]:
    """Every arm at one precision: "fp32", "tf32" or "16bit"."""
    here = "bench.attention_arms:"

    def ours(name: str) -> Arm:
        kernels = name != "xla"
        return Arm(
            name,
            "jax",
            here + "ours",
            {"implementation": name, "precision": precision},
            requires=("jax",),
            proof=("attention_",) if kernels else (),
            precision=precision,
            ours=True,
            exclusive=not kernels,  # XLA times candidates on the device while it compiles products
        )

    def other(name: str, framework: str, target: str, exclusive: bool = False, **options: str) -> Arm:
        return Arm(
            name, framework, here + target, options, requires=(framework,), precision=precision, exclusive=exclusive
        )

    found = [ours(name) for name in ("pallas", "pallas_triton", "pallas_mosaic", "xla")]
    found += [
        other(f"jax_{name}", "jax", "jax_nn", name == "xla", implementation=name, precision=precision)
        for name in ("cudnn", "xla")
    ]
    found += [other(f"sdpa_{backend}", "torch", "sdpa", backend=backend) for backend in _SDPA]
    found.append(other("composite", "torch", "composite"))
    return {arm.name: arm for arm in found}


# ---- command -------------------------------------------------------------------------------------------------------


def cases(
    presets: Sequence[str],
    *,
    shape: str | None = None,
    precision: str = "bf16",
    causal: bool = True,
    seed: int = 0,
    name: str = "custom",
) -> list[Case]:
    """Cases of the presets, or one of a shape "B,T,H,HK,D"."""
    if shape is not None:
        try:
            sizes = Preset(*(int(part) for part in shape.split(",")))
        except (TypeError, ValueError):
            sizes = None
        if sizes is None or min(dataclasses.astuple(sizes)) < 1 or sizes.H % sizes.HK:
            raise UsageError(f"--shape: expected B,T,H,HK,D as positive integers, H a multiple of HK, got {shape!r}")
        cli.choose([precision], PRECISIONS, "--precision")
        return [_case(name, sizes, precision, causal, seed)]
    found = []
    for name in cli.choose(presets, PRESETS | dict.fromkeys(SHAPES), "--preset"):
        pairs = [PRESETS[name]] if name in PRESETS else [(name, precision) for precision in PRECISIONS]
        found += [_case(f"{s}_{p}", SHAPES[s], p, causal, seed) for s, p in pairs]
    return found


def _case(name: str, preset: Preset, precision: str, causal: bool, seed: int) -> Case:
    dtype = PRECISIONS[precision]
    params = dataclasses.asdict(preset) | {"dtype": dtype, "causal": causal, "seed": seed}
    return Case("attention", name, params | {"precision": precision if dtype == "float32" else "16bit"})


def jobs(wanted: Sequence[Case], impl: Sequence[str]) -> list[tuple[Case, list[Arm]]]:
    """The cases with their arms, by names and groups."""
    return [(case, cli.pick_arms(impl, arms(case.params["precision"]), GROUPS)) for case in wanted]


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    presets = F.preset or (["report"] if device.has_gpu() else ["cpu"])
    wanted = cases(presets, shape=F.shape, precision=F.precision, causal=F.causal, seed=F.seed)
    return cli.measure(jobs(wanted, F.impl), command="bench.attention")


if __name__ == "__main__":
    cli.define(impl="pallas,xla,jax,sdpa", preset="")
    flags.DEFINE_string("shape", None, "B,T,H,HK,D instead of a preset.")
    flags.DEFINE_string("precision", "bf16", f"Of --shape: {', '.join(PRECISIONS)}.")
    flags.DEFINE_bool("causal", True, "Whether a query sees keys up to its own time only.")
    cli.run(main)
