"""The arms of the KDA benchmark, each built inside its own worker process.

An arm's function gets the case and its options and returns the forward function, from a dict of the operator's inputs
to {"o": output}; the runtime differentiates it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from bench.runtimes import Unsupported
from bench.spec import Built, Case


def _names(case: Case) -> tuple[str, ...]:
    return ("q", "k", "v", "g", "beta") if case.op == "kda" else ("q", "k", "v", "g", "erase", "write")


def ours(case: Case, options: dict[str, Any]) -> Built:
    """dormouse_jax by implementation name; Pallas kernels in interpret mode where there is no GPU."""
    import jax

    import dormouse_jax

    function = getattr(dormouse_jax, case.op)
    interpret = options["implementation"].startswith("pallas") and jax.default_backend() != "gpu"
    context = dormouse_jax.interpret_kernels if interpret else contextlib.nullcontext

    def forward(inputs):
        with context():  # read when the call is traced
            o, _ = function(*(inputs[n] for n in _names(case)), **options)
        return {"o": o}

    return Built(forward, note="interpret mode" if interpret else "")


# A whole-function compile unrolls the loop over chunks. Beyond this many (what the report presets have) that takes
# many minutes, and the parts are compiled once each and looped over instead.
_WHOLE_CHUNKS = 32


def torch_port(case: Case, options: dict[str, Any]) -> Built:
    """The chunked PyTorch port: eager, whole under torch.compile, or in compiled parts."""
    import torch

    import torch_ref.kda

    function = getattr(torch_ref.kda, f"chunk_{case.op}")
    p = case.params
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(p["dtype"])
    settings: dict[str, Any] = {
        "chunk_size": p["chunk"],
        "solve": options["solve"],
        "decay": options.get("decay", "factored"),
        "matmul_dtype": dtype,
    }
    note = f"chunk {p['chunk']}, {settings['decay']} decay"
    mode = options.get("compile")
    whole = -(-p["T"] // p["chunk"]) <= _WHOLE_CHUNKS
    if mode and torch.cuda.is_available() and not whole:
        if mode != "default":
            raise Unsupported(f"{mode} compiles whole functions, and this one has {-(-p['T'] // p['chunk'])} chunks")
        settings["compile_parts"] = True
        note += ", compiled in parts (a whole function would unroll every chunk)"

    def forward(inputs):
        o, _ = function(*(inputs[n] for n in _names(case)), **settings)
        return {"o": o}

    if mode and not torch.cuda.is_available():
        # Inductor's C++ for this graph is some 40 files, minutes of compiling for times that mean nothing here.
        forward = torch.compile(forward, backend="aot_eager", dynamic=False)
        note += ", graph run by aot_eager on the CPU"
    elif mode and whole:
        forward = torch.compile(forward, mode=mode, dynamic=False)
    return Built(forward, note=note)


def fla(case: Case, options: dict[str, Any]) -> Built:
    """flash-linear-attention's Triton kernels, with its own tuned configurations where FLA_CONFIG_DIR has them."""
    import os

    import torch

    if not torch.cuda.is_available():
        raise Unsupported("flash-linear-attention's kernels need a GPU")
    if case.op == "kda":
        from fla.ops.kda import chunk_kda as function
    else:
        from fla.ops.gdn2 import chunk_gdn2 as function

        if case.params["HV"] != case.params["H"]:
            raise Unsupported("its gdn2 takes no grouped value heads")
    scale = case.params["K"] ** -0.5

    def forward(inputs):
        o, _ = function(
            *(inputs[n] for n in _names(case)),
            scale=scale,
            initial_state=None,
            output_final_state=False,
            safe_gate=options["safe_gate"],
        )
        return {"o": o}

    configs = os.environ.get("FLA_CONFIG_DIR")
    return Built(forward, note="stored configurations" if configs else "tuned at the first call (in its compile time)")


def jla(case: Case, options: dict[str, Any]) -> Built:
    """jax-linear-attention's Mosaic GPU kernels."""
    import jax

    if jax.default_backend() != "gpu":
        raise Unsupported("jax-linear-attention's kernels need a Hopper GPU")
    if case.params["dtype"] != "bfloat16":
        raise Unsupported(f"jax-linear-attention takes bfloat16 only, not {case.params['dtype']}")
    if {case.params["K"], case.params["V"]} - {64, 128} or case.params["HV"] != case.params["H"]:
        raise Unsupported("jax-linear-attention takes head dims 64 and 128 and no grouped value heads")
    from jla.ops import linear_attention

    gates = ("g", "beta") if case.op == "kda" else ("g", "erase", "write")
    spelled = {"erase": "b", "write": "w"}
    scale = case.params["K"] ** -0.5

    def forward(inputs):
        given = {spelled.get(n, n): inputs[n] for n in gates}
        o, _ = linear_attention(case.op, inputs["q"], inputs["k"], inputs["v"], impl="mosaic_gpu", scale=scale, **given)
        return {"o": o}

    return Built(forward)
