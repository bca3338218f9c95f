"""The arms of the GEMM benchmark, each built inside its own worker process: a dict of inputs to {"out": output}."""

from __future__ import annotations

import contextlib
from typing import Any

from bench.runtimes import Unsupported
from bench.spec import Built, Case


def _transposes(case: Case) -> dict[str, bool]:
    return {name: case.params[name] for name in ("transpose_a", "transpose_b")}


def ours(case: Case, options: dict[str, Any]) -> Built:
    """dormouse_jax by implementation name; Pallas kernels in interpret mode where there is no GPU."""
    import jax

    import dormouse_jax

    interpret = options["implementation"].startswith("pallas") and jax.default_backend() != "gpu"
    context = dormouse_jax.interpret_kernels if interpret else contextlib.nullcontext

    def forward(inputs):
        with context():  # read when the call is traced
            return {"out": dormouse_jax.gemm(inputs["a"], inputs["b"], **_transposes(case), **options)}

    return Built(forward, note="interpret mode" if interpret else "")


def xla(case: Case, options: dict[str, Any]) -> Built:
    """jax.lax.dot_general and nothing else; float32 sums of 16-bit operands are XLA's own default."""
    import jax
    from jax import lax

    presets = {"fp32": lax.Precision.HIGHEST, "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32}
    flip = _transposes(case)
    contract = ((0 if flip["transpose_a"] else 1,), (1 if flip["transpose_b"] else 0,))

    def forward(inputs):
        a, b = inputs["a"], inputs["b"]
        precision = presets.get(options["precision"], lax.Precision.DEFAULT)
        if jax.default_backend() != "gpu":
            precision = lax.Precision.HIGHEST
        out = lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=a.dtype)
        return {"out": out}

    return Built(forward)


def torch_port(case: Case, options: dict[str, Any]) -> Built:
    """PyTorch, which calls cuBLAS on a GPU."""
    import torch_ref.gemm

    def forward(inputs):
        return {"out": torch_ref.gemm.gemm(inputs["a"], inputs["b"], **_transposes(case))}  # pyright: ignore[reportArgumentType]

    return Built(forward)


def jax_triton(case: Case, options: dict[str, Any]) -> Built:
    """A kernel written in Triton itself, launched from JAX: what is left when Pallas's Triton backend goes."""
    import jax
    import triton

    if jax.default_backend() != "gpu":
        raise Unsupported("Triton's kernels need a GPU")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 7):
        raise Unsupported(f"jax-triton needs triton 3.7, and this is {triton.__version__}")
    from bench.gemm_triton import matmul

    def forward(inputs):
        return {"out": matmul(inputs["a"], inputs["b"], precision=options["precision"], **_transposes(case))}

    return Built(forward)
