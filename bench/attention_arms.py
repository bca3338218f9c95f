"""The arms of the attention benchmark, each built inside its own worker process: a dict of inputs to {"o": output}."""

from __future__ import annotations

import contextlib
from typing import Any

from bench.runtimes import Unsupported
from bench.spec import Built, Case


def _operands(inputs: Any) -> tuple[Any, Any, Any]:
    return inputs["q"], inputs["k"], inputs["v"]


def ours(case: Case, options: dict[str, Any]) -> Built:
    """dormouse_jax by implementation name; Pallas kernels in interpret mode where there is no GPU."""
    import jax

    import dormouse_jax

    interpret = options["implementation"].startswith("pallas") and jax.default_backend() != "gpu"
    context = dormouse_jax.interpret_kernels if interpret else contextlib.nullcontext

    def forward(inputs):
        with context():  # read when the call is traced
            return {"o": dormouse_jax.attention(*_operands(inputs), causal=case.params["causal"], **options)}

    return Built(forward, note="interpret mode" if interpret else "")


def jax_nn(case: Case, options: dict[str, Any]) -> Built:
    """jax.nn.dot_product_attention, whose layout is ours, on cuDNN or in XLA's own operations."""
    import jax

    if options["implementation"] == "cudnn" and case.params["dtype"] == "float32":
        raise Unsupported("cuDNN's attention takes 16-bit inputs only")
    if options["implementation"] == "cudnn" and jax.default_backend() != "gpu":
        raise Unsupported("cuDNN needs a GPU")
    on_cpu = jax.default_backend() != "gpu"
    products = {"fp32": "highest", "tf32": "highest" if on_cpu else "tensorfloat32"}.get(options["precision"])

    def forward(inputs):
        with jax.default_matmul_precision(products) if products else contextlib.nullcontext():
            o = jax.nn.dot_product_attention(
                *_operands(inputs), is_causal=case.params["causal"], implementation=options["implementation"]
            )
        return {"o": o}

    return Built(forward)


def sdpa(case: Case, options: dict[str, Any]) -> Built:
    """torch's scaled_dot_product_attention on one of its back-ends, which refuses what it cannot do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_ref.attention

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }

    def forward(inputs):
        with sdpa_kernel(backends[options["backend"]]):
            try:
                o = torch_ref.attention.attention(*_operands(inputs), causal=case.params["causal"])
            except RuntimeError as error:
                if str(error).startswith(("No available kernel", "No viable backend")):
                    raise Unsupported(f"the back-end {options['backend']} does not take this call") from error
                raise
        return {"o": o}

    return Built(forward)


def composite(case: Case, options: dict[str, Any]) -> Built:
    """A softmax between two products, in torch."""
    import torch_ref.attention

    def forward(inputs):
        o = torch_ref.attention.attention_composite(*_operands(inputs), causal=case.params["causal"])
        return {"o": o}

    return Built(forward)
