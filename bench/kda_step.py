"""One decoding step of KDA a sequence: `python -m bench.kda --mode=decode`, by batch.

The floor is the state read once and written once, and the inputs. Our arms give their state up at every call, as a
decoding loop does; the copy that each call gets is made outside of its time. FLA's public function returns a new state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench import cli, device, kda
from bench.runtimes import Unsupported
from bench.spec import DTYPES, Arm, Built, Case, Operator, Traffic

_HEADS = {"H": 32, "HV": 32, "K": 128, "V": 128, "dtype": "bfloat16"}
PRESETS: dict[str, dict[str, Any]] = {
    **{f"batch{B}": {"B": B, **_HEADS} for B in (1, 8, 64, 256)},
    "cpu": {"B": 2, "H": 2, "HV": 2, "K": 64, "V": 64, "dtype": "float32"},
}
STATE_BAR = 2e-6  # All arithmetic is in float32, whatever the dtype of q, k and v.
_INPUTS = ("q", "k", "v", "g", "beta", "state")


class KDAStep(Operator):
    """o, state = kda_step(q, k, v, g, beta, state)."""

    name = "kda_step"
    cotangents = {"o": "", "final_state": ""}  # outputs; no gradient is asked for
    updated = {"state": "final_state"}

    def inputs(self, case: Case) -> dict[str, np.ndarray]:
        p = case.params
        found = kda.KDA().inputs(_of_one_token(case))
        state = np.random.default_rng([p["seed"], 100]).standard_normal(
            (p["B"], p["HV"], p["K"], p["V"]), dtype=np.float32
        )
        return {name: found[name][:, 0] for name in _INPUTS[:-1]} | {"state": state}

    def subset(self, case: Case) -> Sequence[Any]:
        return kda.KDA().subset(_of_one_token(case))

    def take(self, case: Case, name: str, array: Any, part: Any) -> Any:
        b, h = part
        group = 1 if name in ("q", "k") else case.params["HV"] // case.params["H"]
        return array[b : b + 1, h * group : (h + 1) * group]

    def oracle(self, case: Case, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        import torch_ref.oracle

        token = (inputs[name][:, None] for name in _INPUTS[:-1])
        out = torch_ref.oracle.kda_oracle(*token, scale=None, initial_state=inputs["state"])
        return {"o": np.asarray(out["o"])[:, 0], "final_state": np.asarray(out["final_state"])}

    def traffic(self, case: Case, mode: str) -> Traffic:
        p = case.params
        one = kda.KDA().traffic(_of_one_token(case), "fwd")
        state = 4 * p["B"] * p["HV"] * p["K"] * p["V"]
        return dataclasses.replace(one, reads=one.reads + state, writes=one.writes + state)

    def bar(self, case: Case, arm: Arm, tensor: str) -> float:
        return STATE_BAR if tensor == "final_state" else kda.BARS[arm.precision][0]

    def tensor_dtype(self, case: Case, tensor: str) -> np.dtype:
        return np.dtype(np.float32) if tensor == "final_state" else DTYPES[case.params["dtype"]]

    def describe(self, case: Case) -> str:
        return kda.KDA().describe(case)


def _of_one_token(case: Case) -> Case:
    return Case("kda", case.name, {"T": 1, "g": None, "gate": None, **case.params})


def cases(presets: Sequence[str], *, dtype: str | None = None, seed: int = 0) -> list[Case]:
    other = {"dtype": dtype} if dtype else {}
    return [Case("kda_step", name, {"T": 1, "g": None, "seed": seed, **PRESETS[name], **other}) for name in presets]


def jobs(
    presets: Sequence[str] | None, impl: Sequence[str] | None, *, dtype: str | None = None, seed: int = 0
) -> list[tuple[Case, list[Arm]]]:
    """Cases by preset name (None: all that this machine can do) with their arms."""
    default = [name for name in PRESETS if name != "cpu"] if device.has_gpu() else ["cpu"]
    wanted = cases(cli.choose(presets or default, PRESETS, "--preset"), dtype=dtype, seed=seed)
    impl = impl or ["pallas", "xla", "fla"]
    return [(case, cli.pick_arms(impl, arms(case.params["dtype"]), GROUPS)) for case in wanted]


# ---- arms ----------------------------------------------------------------------------------------------------------

# The only step in PyTorch is FLA's.
GROUPS = dict.fromkeys(("torch", "fla", "peers"), ("fla_recurrent",)) | {"ours": ("pallas", "xla")}


def arms(dtype: str) -> dict[str, Arm]:
    precision = "fp32" if dtype == "float32" else "16bit"

    def ours_by(name: str, proof: tuple[str, ...] = ()) -> Arm:
        return Arm(
            name,
            "jax",
            "bench.kda_step:ours",
            {"implementation": name},
            requires=("jax",),
            proof=proof,
            precision=precision,
            ours=True,
            modes=("decode",),
        )

    fla = Arm(
        "fla_recurrent",
        "torch",
        "bench.kda_step:fla_recurrent",
        requires=("fla", "einops", "triton", "torch"),
        precision=precision,
        modes=("decode",),
    )
    return {arm.name: arm for arm in (ours_by("pallas", ("kda_step",)), ours_by("xla"), fla)}


def ours(case: Case, options: dict[str, Any]) -> Built:
    """`dormouse_jax.kda_step` by implementation name; the kernel in interpret mode where there is no GPU."""
    import jax

    import dormouse_jax

    interpret = options["implementation"].startswith("pallas") and jax.default_backend() != "gpu"
    context = dormouse_jax.interpret_kernels if interpret else contextlib.nullcontext

    def decode(inputs):
        with context():  # read when the call is traced
            o, state = dormouse_jax.kda_step(*(inputs[n] for n in _INPUTS), **options)
        return {"o": o, "final_state": state}

    return Built(modes={"decode": decode}, note="interpret mode" if interpret else "")


def fla_recurrent(case: Case, options: dict[str, Any]) -> Built:
    """flash-linear-attention's recurrent Triton kernel on sequences of one token."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("flash-linear-attention's kernels need a GPU")
    from fla.ops.kda import fused_recurrent_kda

    def decode(inputs):
        token = (inputs[name][:, None] for name in _INPUTS[:-1])
        with torch.no_grad():
            o, state = fused_recurrent_kda(*token, initial_state=inputs["state"], output_final_state=True)
        return {"o": o[:, 0], "final_state": state}

    return Built(modes={"decode": decode}, note="writes a new state")
