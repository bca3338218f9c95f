"""The arms of the adapters' benchmark, each built inside its own worker process: inputs to {"out": output}."""

from __future__ import annotations

import contextlib
from typing import Any

from bench.adapters import options as operator_options
from bench.spec import Built, Case


def _arguments(inputs: Any) -> dict[str, Any]:
    return {name: x for name, x in inputs.items() if name != "dout"}


def ours(case: Case, options: dict[str, Any]) -> Built:
    """dormouse_jax by implementation name; Pallas kernels in interpret mode where there is no GPU."""
    import jax

    import dormouse_jax
    from dormouse_jax import adapters

    family, form = case.op.split("_")
    function = getattr(getattr(adapters, family), form)
    told = operator_options(case, family) | options

    interpret = options["implementation"].startswith("pallas") and jax.default_backend() != "gpu"
    context = dormouse_jax.interpret_kernels if interpret else contextlib.nullcontext

    def forward(inputs):
        with context():  # read when the call is traced
            return {"out": function(**_arguments(inputs), **told)}

    return Built(forward, note="interpret mode" if interpret else "")


def torch_port(case: Case, options: dict[str, Any]) -> Built:
    """The PyTorch twin: eager, or whole under torch.compile."""
    import torch

    import torch_ref.adapters

    family, _ = case.op.split("_")
    function = getattr(torch_ref.adapters, case.op)
    told = {"side": "output"} if family == "oft" else {"scale": 1.0}

    def forward(inputs):
        return {"out": function(**_arguments(inputs), **told)}

    mode = options.get("compile")
    if mode is None:
        return Built(forward)
    if not torch.cuda.is_available():
        # Inductor would compile C++ for times that mean nothing here.
        return Built(
            torch.compile(forward, backend="aot_eager", dynamic=False), note="graph run by aot_eager on the CPU"
        )
    return Built(torch.compile(forward, mode=mode, dynamic=False))
