"""Adapters: accuracy and time of every implementation, as a new weight (rebuild) and on activations (bypass).

    python -m bench.adapters
    python -m bench.adapters --impl=all --preset=lokr_4096x4096_square_bf16,lora_bypass_t4096_fp16 --json out.json

--impl   arms: pallas, xla (ours in plain JAX); torch_eager, torch_compile and
         torch_compile_max (its default mode, and max-autotune-no-cudagraphs), twins that form no Kronecker product;
         groups: ours, torch, all (default: ours and torch; without a GPU not torch_compile_max)
--preset names of ROW_PRECISION, a ROW for both precisions (bf16 alone without a GPU), or a set of rows: lora, loha,
         lokr, oft, lora_bypass, loha_bypass, lokr_bypass, oft_bypass, sweep, report, cpu (default: report on a GPU, cpu
         without one), or a set at one precision: sweep_bf16. Rows: lora_OxI_rRANK and loha_OxI_rRANK; lokr_OxI_square
         and lokr_OxI_f8 (the smaller factors as near to the larger as they can be, or 8); oft_OxI_nBLOCK (on the
         output side); FAMILY_bypass_tTOKENS. Precisions: fp16, bf16.
--together=80  all rows in a few minutes: compiled side by side for 80 seconds, then timed by the device's clock

The base is not differentiated, as where an adapter is trained; the adapter's parameters are, and a bypass's x.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device
from bench.spec import DTYPES, Arm, Case, Operator, Traffic


@dataclasses.dataclass(frozen=True)
class Preset:
    """An adapter of a layer [O, I]: its rank, LoKr's factors (a, b) or the block of OFT; T tokens of a bypass."""

    family: str
    O: int
    I: int
    rank: int = 1
    factors: tuple[int, int] = (1, 1)
    block: int = 1
    T: int = 0

    @property
    def op(self) -> str:
        return f"{self.family}_{'bypass' if self.T else 'rebuild'}"


_LAYERS = (
    *((640, 640), (1280, 1280), (5120, 1280), (1280, 5120)),
    *((3072, 3072), (12288, 3072), (4096, 4096), (11008, 4096)),
)
_TOKENS = (77, 1024, 4096, 16384)


def _lokr(O: int, I: int, factor: int | None = None, T: int = 0) -> Preset:
    """W1 [factor, factor], or as nearly square as O and I let both factors be."""

    def smaller(size: int) -> int:
        return max(m for m in range(1, math.isqrt(size) + 1) if size % m == 0)

    return Preset("lokr", O, I, factors=(factor or smaller(O), factor or smaller(I)), T=T)


def _rows() -> dict[str, Preset]:
    rows = {}
    for family in ("lora", "loha"):
        rows |= {f"{family}_{O}x{I}_r{r}": Preset(family, O, I, r) for O, I in _LAYERS for r in (4, 16, 64)}
        rows |= {f"{family}_bypass_t{T}": Preset(family, 3072, 3072, 16, T=T) for T in _TOKENS}
    rows |= {f"lokr_{O}x{I}_{name}": _lokr(O, I, f) for O, I in _LAYERS for name, f in (("square", None), ("f8", 8))}
    rows |= {f"lokr_bypass_t{T}": _lokr(4096, 4096, T=T) for T in _TOKENS}
    rows |= {f"oft_{O}x{I}_n{n}": Preset("oft", O, I, block=n) for O, I in _LAYERS[:4] for n in (4, 16)}
    return rows | {f"oft_bypass_t{T}": Preset("oft", 1280, 1280, block=16, T=T) for T in _TOKENS[:3]}


SWEEP = _rows()
CPU = {
    f"{family}_{form}_cpu": Preset(family, 24, 18, rank=3, factors=(4, 3), block=4, T=T)
    for family in ("lora", "loha", "lokr", "oft")
    for form, T in (("rebuild", 0), ("bypass", 10))
}
REPORT = (
    *("lora_3072x3072_r16", "loha_3072x3072_r16", "lokr_4096x4096_square", "oft_1280x1280_n16"),
    *(f"{family}_bypass_t4096" for family in ("lora", "loha", "lokr", "oft")),
)
ROWS = SWEEP | CPU
PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
PRESETS = {f"{row}_{precision}": (row, precision) for row in ROWS for precision in PRECISIONS}
_FAMILIES = {op: tuple(row for row, p in SWEEP.items() if p.op == op) for op in sorted({p.op for p in SWEEP.values()})}
SETS = {op.replace("_rebuild", ""): rows for op, rows in _FAMILIES.items()}
SETS |= {"sweep": tuple(SWEEP), "cpu": tuple(CPU), "report": REPORT}


class AdapterOperator(Operator):
    """One family's rebuild or bypass."""

    cotangents = {"out": "dout"}

    def __init__(self, family: str, form: str):
        self.family, self.form, self.name = family, form, f"{family}_{form}"
        own = {"lora": ("A", "B"), "loha": ("A1", "B1", "A2", "B2"), "lokr": ("W1", "W2"), "oft": ("P",)}[family]
        self.own = own
        self.differentiable = own if form == "rebuild" else ("x", *own)

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        p = case.params
        O, I, r, T, n = (p[name] for name in ("O", "I", "rank", "T", "block"))
        a, b = p["factors"]
        # Updates about as large as the layer: what is small beside it could be wrong unseen.
        shapes = {
            "lora": {"A": ((r, I), I**-0.5), "B": ((O, r), r**-0.5)},
            "loha": {"A1": ((r, I), I**-0.5), "B1": ((O, r), r**-0.5), "A2": ((r, I), 1), "B2": ((O, r), r**-0.5)},
            "lokr": {"W1": ((a, b), b**-0.5), "W2": ((O // a, I // b), (I // b) ** -0.5)},
            "oft": {"P": ((O // n, n, n), 0.1)},
        }[self.family]
        shapes = shapes | {"base": ((O, I), I**-0.5), "dout": ((T or O, O if T else I), 1)}
        if T:
            shapes["x"] = ((T, I), 1)
        rng = np.random.default_rng(p["seed"])
        dtype = DTYPES[p["dtype"]]
        return {
            name: (np.float32(size) * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
            for name, (shape, size) in shapes.items()
        }

    def subset(self, case: Case) -> Sequence[Any]:
        return [0]  # all of it: every gradient of a factor is a sum over all of the weight

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        return array

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        import torch  # which the workers of JAX arms do not load

        from torch_ref.oracle_adapters import adapter_oracle

        arrays = {name: x for name, x in inputs.items() if name != "dout"}
        return adapter_oracle(
            f"{self.family}.{self.form}",
            arrays,
            dout=inputs["dout"],
            wanted=self.differentiable,
            device="cuda" if torch.cuda.is_available() else "cpu",
            **options(case, self.family),
        )

    def traffic(self, case: Case, mode: str) -> Traffic:
        p, size = case.params, DTYPES[case.params["dtype"]].itemsize
        O, I, T = p["O"], p["I"], p["T"]
        a, b = p["factors"]
        c, d = O // a, I // b
        own = {
            "lora": p["rank"] * (O + I),
            "loha": 2 * p["rank"] * (O + I),
            "lokr": a * b + c * d,
            "oft": O * p["block"],
        }[self.family]
        given, result = (T * I, T * O) if T else (0, O * I)
        # Multiplications of the adapter, forward; a backward has twice as many.
        if not T:
            flops = {"lora": p["rank"], "loha": 2 * p["rank"] + 1, "lokr": 1, "oft": p["block"]}[self.family] * O * I
            base = 0
        else:
            per_token = {
                "lora": p["rank"] * (O + I),
                "loha": 0,  # part of the layer's own product, if the update is added to its weight first
                "lokr": min(b * c * (d + a), a * d * (b + c)),
                "oft": O * p["block"],
            }[self.family]
            flops, base = T * per_token, T * O * I
        # The layer's product has only the backward of x, but for LoHa, whose update needs that of its weight.
        passes = (3 if self.family == "loha" else 2) if mode == "fwdbwd" else 1
        flops = 2.0 * (flops * (3 if mode == "fwdbwd" else 1) + base * passes)
        reads, writes = own + O * I + given, result
        if mode == "fwdbwd":
            reads, writes = reads + result, writes + own + given
        return Traffic(reads=reads * size, writes=writes * size, flops=flops, rate="bf16")

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        return 5e-3 if tensor == "out" else 8e-3

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        return DTYPES[case.params["dtype"]]

    def describe(self, case: Case) -> str:
        p = case.params
        own = {
            "lora": f"r={p['rank']}",
            "loha": f"r={p['rank']}",
            "lokr": "W1=[{}, {}]".format(*p["factors"]),
            "oft": f"n={p['block']}",
        }[self.family]
        return f"O={p['O']} I={p['I']} {own}{' T={}'.format(p['T']) if p['T'] else ''} {p['dtype']}"


def options(case: Case, family: str) -> dict[str, Any]:
    """What an operator is told: a scale of 1, and the output side, which is the report's."""
    own = {"lora": {"alpha": float(case.params["rank"])}, "lokr": {"scale": 1.0}, "oft": {"side": "output"}}
    return own["lora" if family == "loha" else family]


# What `bench.spec` makes operators of.
lora_rebuild = functools.partial(AdapterOperator, "lora", "rebuild")
lora_bypass = functools.partial(AdapterOperator, "lora", "bypass")
loha_rebuild = functools.partial(AdapterOperator, "loha", "rebuild")
loha_bypass = functools.partial(AdapterOperator, "loha", "bypass")
lokr_rebuild = functools.partial(AdapterOperator, "lokr", "rebuild")
lokr_bypass = functools.partial(AdapterOperator, "lokr", "bypass")
oft_rebuild = functools.partial(AdapterOperator, "oft", "rebuild")
oft_bypass = functools.partial(AdapterOperator, "oft", "bypass")


# ---- arms ----------------------------------------------------------------------------------------------------------

GROUPS = {"ours": ("pallas", "xla"), "torch": ("torch_eager", "torch_compile", "torch_compile_max")}


def arms() -> dict[str, Arm]:
    here = "bench.adapters_arms:"

    def torch(name: str, **options: str) -> Arm:
        # torch.compile may time candidates on the device.
        return Arm(
            name,
            "torch",
            here + "torch_port",
            options,
            requires=("torch",),
            precision="16bit",
            exclusive=bool(options),
        )

    def ours(name: str) -> Arm:
        kernels = name != "xla"
        return Arm(
            name,
            "jax",
            here + "ours",
            {"implementation": name},
            requires=("jax",),
            proof=("adapter_",) if kernels else (),
            precision="16bit",
            ours=True,
            exclusive=not kernels,  # XLA times candidates on the device while it compiles products
        )

    found = [
        ours("pallas"),
        ours("xla"),
        torch("torch_eager"),
        torch("torch_compile", compile="default"),
        torch("torch_compile_max", compile="max-autotune-no-cudagraphs"),
    ]
    return {arm.name: arm for arm in found}


# ---- command -------------------------------------------------------------------------------------------------------


def cases(presets: Sequence[str], *, seed: int = 0) -> list[Case]:
    """Cases of the presets: of a row or a set of rows, those of each precision.

    Without a GPU a case is compiled for nothing but its accuracy, and one precision has to do.
    """
    precisions = tuple(PRECISIONS) if device.has_gpu() else ("bf16",)
    known = {name: [pair] for name, pair in PRESETS.items()}
    for name, rows in {**{row: (row,) for row in ROWS}, **SETS}.items():
        known[name] = [(row, precision) for row in rows for precision in precisions]
    for name, rows in SETS.items():
        known |= {f"{name}_{precision}": [(row, precision) for row in rows] for precision in PRECISIONS}
    pairs = [pair for name in cli.choose(presets, known, "--preset") for pair in known[name]]
    return [_case(row, precision, seed) for row, precision in dict.fromkeys(pairs)]


def _case(row: str, precision: str, seed: int) -> Case:
    preset = ROWS[row]
    params = dataclasses.asdict(preset) | {"factors": list(preset.factors), "dtype": PRECISIONS[precision]}
    return Case(preset.op, f"{row}_{precision}", params | {"seed": seed})


def jobs(wanted: Sequence[Case], impl: Sequence[str]) -> list[tuple[Case, list[Arm]]]:
    """The cases with their arms, by names and groups."""
    impl = impl or (["ours", "torch"] if device.has_gpu() else ["ours", "torch_eager", "torch_compile"])
    picked = cli.pick_arms(impl, arms(), GROUPS)
    return [(case, picked) for case in wanted]


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    wanted = cases(F.preset or ["report" if device.has_gpu() else "cpu"], seed=F.seed)
    return cli.measure(jobs(wanted, F.impl), command="bench.adapters")


if __name__ == "__main__":
    cli.define(impl="", preset="")
    cli.run(main)
