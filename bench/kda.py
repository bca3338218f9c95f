"""KDA and Gated DeltaNet-2: accuracy and time of every implementation.

    python -m bench.kda --impl=pallas,torch
    python -m bench.kda --impl=pallas,xla,torch,fla,jla --preset=report32,kimi8k --json out.json

--impl   arms: pallas, pallas_save (residuals saved), xla, recurrent, torch_loop, torch_solve, torch_exact (no
         positive exponents), torch_compile, torch_compile_max, fla_default, fla_safe, jla; groups: torch (eager row
         loop, eager solve_triangular, torch.compile), fla (both settings), peers (fla, jla), ours, all
--preset report32, report16, kimi8k, train, few, many, long, cpu (default: report32 on a GPU, cpu without one)
--shape  B,T,H,K[,V[,HV]] instead of a preset
--g      a number: every log decay is that constant instead of the preset's recipe
--mode   fwd, fwd_res, fwdbwd; or decode alone: one decoding step (`kda_step`), arms pallas, xla, fla_recurrent, presets
         batch1, batch8, batch64, batch256, cpu
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device
from bench.spec import DTYPES, Arm, Case, Operator, Traffic, UsageError


@dataclasses.dataclass(frozen=True)
class Preset:
    """Shape, dtype and input recipe. chunk: the PyTorch port's. g: a constant log decay, or None for the recipe."""

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    chunk: int = 64
    g: float | None = None
    gate: float | None = None


PRESETS = {
    "report32": Preset(10, 512, 12, 64, 64, "float32", chunk=16, g=-0.054, gate=0.5),
    "report16": Preset(10, 512, 12, 64, 64, "bfloat16", chunk=16, g=-0.054, gate=0.5),
    "kimi8k": Preset(1, 8192, 32, 128, 128, "bfloat16"),
    "train": Preset(8, 2048, 32, 128, 128, "bfloat16"),
    "few": Preset(1, 8192, 4, 128, 128, "bfloat16"),
    "many": Preset(1, 8192, 64, 128, 128, "bfloat16"),
    "long": Preset(1, 65536, 32, 128, 128, "bfloat16"),
    # Two chunks of the default size: what interpret mode manages in seconds.
    "cpu": Preset(1, 128, 2, 64, 64, "float32"),
}

# Largest RMS-relative error of (outputs; dq, dk, dv; gradients of the decay and the gates).
BARS = {
    "fp32": (2e-6, 1e-5, 1e-5),
    "tf32": (1e-3, 5e-3, 5e-3),
    "16bit": (5e-3, 8e-3, 2e-2),
}
_GATE_GRADS = ("dg", "dbeta", "derase", "dwrite")


class KDA(Operator):
    """o = kda(q, k, v, g, beta): one write strength a head."""

    name = "kda"
    differentiable = ("q", "k", "v", "g", "beta")
    cotangents = {"o": "do"}
    gates: Mapping[str, str] = {"beta": ""}  # gate name -> the parameter that is its last axis ("" for none)

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        p = case.params
        B, T, H, HV, K, V = (p[n] for n in ("B", "T", "H", "HV", "K", "V"))
        low = DTYPES[p["dtype"]]

        def normal(seed: int, *shape: int) -> np.ndarray:
            return np.random.default_rng([p["seed"], seed]).standard_normal(shape, dtype=np.float32)

        def unit(seed: int) -> np.ndarray:
            x = normal(seed, B, T, H, K)
            x /= np.sqrt(np.einsum("bthk,bthk->bth", x, x))[..., None]
            return x.astype(low)

        def decay(seed: int) -> np.ndarray:
            if p["g"] is not None:
                return np.full((B, T, HV, K), p["g"], np.float32)
            x = normal(seed, B, T, HV, K)
            # log sigmoid(x) / 4 without overflow
            return (np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))) * np.float32(0.25)

        def gate(seed: int, axis: str) -> np.ndarray:
            shape = (B, T, HV, p[axis]) if axis else (B, T, HV)
            if p["gate"] is not None:
                return np.full(shape, p["gate"], np.float32)
            return np.random.default_rng([p["seed"], seed]).random(shape, dtype=np.float32)

        jobs = {
            "q": lambda: unit(0),
            "k": lambda: unit(1),
            "v": lambda: normal(2, B, T, HV, V).astype(low),
            "g": lambda: decay(3),
            "do": lambda: normal(4, B, T, HV, V).astype(low),
        }
        for index, (name, axis) in enumerate(self.gates.items()):
            jobs[name] = lambda index=index, axis=axis: gate(5 + index, axis)
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:  # numpy's generators release the GIL
            done = {name: pool.submit(job) for name, job in jobs.items()}
            return {name: future.result() for name, future in done.items()}

    def subset(self, case: Case) -> Sequence[Any]:
        """(batch, query head) pairs: all of a small problem, else the corners and two in between."""
        p = case.params
        B, H, T = p["B"], p["H"], p["T"]
        pairs = [[b, h] for b in range(B) for h in range(H)]
        if len(pairs) <= 4:
            return pairs
        if T > 16384:
            return [pairs[0], pairs[-1]]
        return [pairs[i * (len(pairs) - 1) // 3] for i in range(4)]

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        b, h = part
        group = case.params["HV"] // case.params["H"]
        if name.removeprefix("d") in ("q", "k"):
            return array[b : b + 1, :, h : h + 1]
        return array[b : b + 1, :, h * group : (h + 1) * group]

    def oracle_parts(self, case: Case, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        # The parts are independent, so they go through the recurrence side by side, as a batch.
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        whole = self.oracle(case, joined)
        return [{name: array[i : i + 1] for name, array in whole.items()} for i in range(len(parts))]

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        import torch_ref.oracle

        reference = getattr(torch_ref.oracle, f"{self.name}_oracle")
        out = reference(*(inputs[n] for n in self.differentiable), scale=None, do=inputs["do"])
        return {name: np.asarray(out[name]) for name in self.tensors("fwdbwd")}

    def traffic(self, case: Case, mode: str) -> Traffic:
        p = case.params
        B, T, H, HV, K, V = (p[n] for n in ("B", "T", "H", "HV", "K", "V"))
        size = DTYPES[p["dtype"]].itemsize
        qk, v, g = 2 * B * T * H * K * size, B * T * HV * V * size, 4 * B * T * HV * K
        gates = sum(4 * B * T * HV * (p[axis] if axis else 1) for axis in self.gates.values())
        read = qk + v + g + gates
        # The recurrence itself: decay K V, read 2 K V, write 2 K V, output 2 K V a token; the reverse twice that.
        # No product of this device is faster than its bf16 one, so that is the rate of the floor at any precision.
        flops = 7.0 * B * T * HV * K * V
        if mode == "fwdbwd":
            return Traffic(reads=read + v, writes=read + v, flops=3 * flops, rate="bf16")
        return Traffic(reads=read, writes=v, flops=flops, rate="bf16")

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        output, gradient, gate = BARS[arm.precision]
        if tensor in self.cotangents:
            return output
        return gate if tensor in _GATE_GRADS else gradient

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        # Also for the gates, which are float32 everywhere: their gradients are sums of products of these operands.
        return DTYPES[case.params["dtype"]]

    def describe(self, case: Case) -> str:
        p = case.params
        heads = f"H={p['H']}" if p["H"] == p["HV"] else f"H={p['H']} HV={p['HV']}"
        dims = f"K=V={p['K']}" if p["K"] == p["V"] else f"K={p['K']} V={p['V']}"
        g = "" if p["g"] is None else f" g={p['g']:g}"
        return f"B={p['B']} T={p['T']} {heads} {dims} {p['dtype']}{g}"


class GDN2(KDA):
    """o = gdn2(q, k, v, g, erase, write): channel-wise gates."""

    name = "gdn2"
    differentiable = ("q", "k", "v", "g", "erase", "write")
    gates = {"erase": "K", "write": "V"}


# ---- arms ----------------------------------------------------------------------------------------------------------

GROUPS = {
    "torch": ("torch_loop", "torch_solve", "torch_compile"),
    "fla": ("fla_default", "fla_safe"),
    "peers": ("fla_default", "fla_safe", "jla"),
    "ours": ("pallas", "xla", "recurrent"),
}


def arms(dtype: str, precision: str | None = None) -> dict[str, Arm]:
    """Every arm for inputs of `dtype`; `precision` overrides that of our own."""
    natural = "fp32" if dtype == "float32" else "16bit"
    own = {"precision": precision} if precision else {}
    label = precision or natural
    here = "bench.kda_arms:"

    def ours(name: str, implementation: str, **options: Any) -> Arm:
        return Arm(
            name if not precision else f"{name}:{precision}",
            "jax",
            here + "ours",
            {"implementation": implementation, **own, **options},
            requires=("jax",),
            proof=("kda_",) if implementation.startswith("pallas") else (),
            precision=label,
            ours=True,
        )

    def torch(name: str, **options: Any) -> Arm:
        return Arm(name, "torch", here + "torch_port", options, requires=("torch",), precision=natural)

    def fla(name: str, safe_gate: bool) -> Arm:
        configs = os.environ.get("FLA_CONFIG_DIR", str(cli.ROOT / ".peers" / "fla_configs_h200"))
        tuned = os.path.isdir(configs)
        env = {"FLA_CONFIG_DIR": configs, "FLA_CACHE_MODE": os.environ.get("FLA_CACHE_MODE", "fuzzy")} if tuned else {}
        return Arm(
            name,
            "torch",
            here + "fla",
            {"safe_gate": safe_gate},
            requires=("fla", "einops", "triton", "torch"),
            env=env,
            # Without stored configurations its tuner times kernels at the first call: nothing may run beside it.
            exclusive=not tuned,
            precision="tf32" if dtype == "float32" else "16bit",
        )

    found = [
        ours("pallas", "pallas"),
        ours("pallas_save", "pallas", residuals="save"),
        ours("xla", "xla"),
        ours("recurrent", "recurrent"),
        torch("torch_loop", solve="substitution"),
        torch("torch_solve", solve="triangular"),
        torch("torch_exact", solve="triangular", decay="exact"),
        torch("torch_compile", solve="triangular", compile="default"),
        torch("torch_compile_max", solve="triangular", compile="max-autotune-no-cudagraphs"),
        fla("fla_default", False),
        fla("fla_safe", True),
        Arm("jla", "jax", here + "jla", requires=("jla", "jax"), precision="16bit"),
    ]
    return {arm.name.partition(":")[0]: arm for arm in found}


# ---- command -------------------------------------------------------------------------------------------------------


def parse_shape(text: str) -> dict[str, int]:
    """B,T,H,K[,V[,HV]] -> sizes. V defaults to K, HV to H."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not 4 <= len(sizes) <= 6 or min(sizes) < 1:
        raise UsageError(f"--shape: expected B,T,H,K[,V[,HV]] as positive integers, got {text!r}")
    B, T, H, K = sizes[:4]
    V = sizes[4] if len(sizes) > 4 else K
    HV = sizes[5] if len(sizes) > 5 else H
    if K > 256 or V > 256:
        raise UsageError(f"--shape: K and V must be at most 256, got K={K}, V={V}")
    if HV % H:
        raise UsageError(f"--shape: HV must be a multiple of H, got H={H}, HV={HV}")
    return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}


def cases(
    op: str,
    presets: Sequence[str],
    *,
    shape: str | None = None,
    dtype: str | None = None,
    g: float | None = None,
    seed: int = 0,
    name: str = "custom",
) -> list[Case]:
    """Cases of one operator. A shape replaces the presets' and goes by `name`."""
    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype: {dtype!r} is not supported; choose from float32, bfloat16, float16")
    if g is not None and not g <= 0:
        raise UsageError(f"--g: a log decay is at most 0, got {g}")
    out = []
    for each in [name] if shape else cli.choose(presets, PRESETS, "--preset"):
        preset = Preset(1, 1, 1, 1, 1, "float32") if shape else PRESETS[each]
        params = dataclasses.asdict(preset) | {"HV": preset.H, "seed": seed}
        if shape:
            params |= parse_shape(shape)
        if dtype:
            params["dtype"] = dtype
        if g is not None:
            params["g"] = g
        out.append(Case(op, each, params))
    return out


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    F = flags.FLAGS
    if "decode" in F.mode:
        return _decode(F)
    ops = cli.choose(F.op, {"kda": KDA, "gdn2": GDN2}, "--op")
    presets = F.preset or (["report32"] if device.has_gpu() else ["cpu"])
    if F.precision not in (None, "fp32", "tf32", "16bit"):
        raise UsageError(f"--precision: {F.precision!r} is not known; choose from fp32, tf32, 16bit")
    wanted = [case for op in ops for case in cases(op, presets, shape=F.shape, dtype=F.dtype, g=F.g, seed=F.seed)]
    for case in wanted:
        if (F.precision in ("fp32", "tf32")) != (case.params["dtype"] == "float32") and F.precision:
            raise UsageError(f"--precision: {F.precision} does not go with {case.params['dtype']} inputs ({case.name})")
    jobs = [(case, cli.pick_arms(F.impl, arms(case.params["dtype"], F.precision), GROUPS)) for case in wanted]
    return cli.measure(jobs, command="bench.kda")


def _decode(F: flags.FlagValues) -> int:
    from bench import kda_step  # it builds on this module

    if len(F.mode) > 1:
        raise UsageError("--mode: decode goes alone")
    for name in ("shape", "g", "precision"):
        if F[name].value is not None:
            raise UsageError(f"--{name}: not with --mode=decode")
    impl = F.impl if F["impl"].present else None
    return cli.measure(kda_step.jobs(F.preset, impl, dtype=F.dtype, seed=F.seed), command="bench.kda")


def define_flags() -> None:
    cli.define(impl="pallas,torch", preset="")
    flags.DEFINE_list("op", ["kda"], "Operators: kda, gdn2.")
    flags.DEFINE_string("shape", None, "B,T,H,K[,V[,HV]] instead of a preset.")
    flags.DEFINE_string("dtype", None, "float32, bfloat16 or float16 instead of the preset's.")
    flags.DEFINE_float("g", None, "A constant log decay instead of the preset's recipe.")
    flags.DEFINE_string("precision", None, "Precision of our own arms: fp32, tf32 (float32 inputs) or 16bit.")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
