"""Operator calls that between them launch every kernel in every configuration that the dispatch can choose on a card.

They follow from the tables of configurations, through the functions that the dispatch chooses by: sizes are scanned,
and one call is kept for each configuration found.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from bench.compile_target import Card
from pallas_kernels import attention as attention_kernels
from pallas_kernels import gemm as gemm_kernels
from pallas_kernels import kda as kda_kernels
from pallas_kernels.backend_triton import ceil_pow2
from pallas_kernels.kda.config import MAX_DIM

PRECISIONS = (("bfloat16", "16bit"), ("float16", "16bit"), ("float32", "fp32"), ("float32", "tf32"))
LEAST_PADDED = 16  # the kernels' smallest tile
TOKENS, ODD_TOKENS = 4096, 1003
HEADS = 2  # value heads, of one query/key head
MANY = 256  # batch times value heads: more than any limit in the tables
# Dims at which a chunk size that the caller insists on is compiled too: it is no row of the table. In TF32 it is the
# largest, where it takes more shared memory than some cards have; in float32 the one that Hopper has kernels for, too.
CHUNKED_DIMS = {"16bit": (128,), "fp32": (64, 128), "tf32": (256,)}
GEMM_SIZES = (16, 64, 256, 1024, 1280, 2048, 3072, 5120, 8192)
GEMM_DEPTHS = (512, 2048, 8192)
GEMM_ODD = (1003, 515, 517)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: the operator, its result and, with `backward`, the gradients of all arrays.

    Attributes:
      operator: name in `dormouse_jax`, with dots.
      title: what sets it apart from the card's other cases.
      dtype: of the main inputs.
      arrays: name -> (shape, dtype).
      options: the call's other arguments.
      backward: whether it is differentiated.
      fast: whether it belongs to the subset that every run of the tests compiles.
    """

    operator: str
    title: str
    dtype: str
    arrays: dict[str, tuple[tuple[int, ...], str]]
    options: dict[str, Any]
    backward: bool = True
    fast: bool = False


def cases(card: Card) -> list[Case]:
    """The calls for a card, the same in every process."""
    found = [*_delta_rule(card), *_steps(), *_short_convolutions(), *_rms_norms(), *_gemm(card), *_attention(card)]
    found += [*_adapters(), *_bypasses(card)]
    titles = [case.title for case in found]
    repeated = {title for title in titles if titles.count(title) > 1}
    if repeated:
        raise AssertionError(f"two cases are called {sorted(repeated)}")
    return found


# kda and gdn2


def _delta_rule(card: Card) -> Iterator[Case]:
    for dtype, precision in PRECISIONS:
        common: dict[str, Any] = {"dtype": dtype, "precision": precision}
        if dtype == "float16":  # it takes bfloat16's configurations
            yield _kda_case("kda", K=64, V=64, batch_heads=MANY, fast=True, **common)
            continue
        for dim, batch_heads in _kda_sizes(card, precision):
            fast = (dim, batch_heads) == (64, MANY)
            yield _kda_case("kda", K=dim, V=dim, batch_heads=batch_heads, fast=fast, **common)
            # What is chosen for another backend, asked for by name.
            config = _kda_config(card, precision, dim, batch_heads)
            if card.is_hopper and config != config.on_triton():
                options: dict[str, Any] = {"implementation": "pallas_triton"}
                yield _kda_case("kda", "triton", K=dim, V=dim, batch_heads=batch_heads, **options, **common)
            if card.is_hopper and "mosaic" in (config.prepare, config.gradients):
                sized = {"K": dim, "V": dim, "batch_heads": batch_heads, "query_heads": HEADS}
                yield _kda_case("kda", "equal heads", **sized, **common)
        for dim in CHUNKED_DIMS[precision]:
            chosen = _kda_config(card, precision, dim, MANY).chunk_size
            for chunk_size in {16, 32} - {chosen} if precision != "tf32" or card.block_shared < 200_000 else ():
                sizes: dict[str, Any] = {"K": dim, "V": dim, "batch_heads": MANY}
                yield _kda_case("kda", f"chunk {chunk_size}", chunk_size=chunk_size, **sizes, **common)
        if precision != "tf32":
            dim = 128 if precision == "16bit" else 64
            sizes: dict[str, Any] = {"K": dim, "V": dim, "batch_heads": MANY}
            yield _kda_case("kda", "raw", raw=True, **sizes, **common)
            yield _kda_case("kda", "saving", saving=True, **sizes, **common)
            if precision == "16bit":
                yield _kda_case("kda", "packed", packed=True, **sizes, **common)
                if card.is_hopper and dtype == "bfloat16":
                    yield _kda_case("kda", "packed equal heads", packed=True, query_heads=HEADS, **sizes, **common)
            yield _kda_case("gdn2", **sizes, **common)
            sizes: dict[str, Any] = {"K": dim - 28, "V": dim // 2 + 8, "batch_heads": MANY, "tokens": ODD_TOKENS}
            yield _kda_case("kda", "odd", **sizes, **common)


def _kda_config(card: Card, precision: str, dim: int, batch_heads: int) -> Any:
    return kda_kernels.choose_config(card.kind, K=dim, V=dim, T=TOKENS, batch_heads=batch_heads, precision=precision)


def _kda_sizes(card: Card, precision: str) -> list[tuple[int, int]]:
    """(dim, batch heads) of which the kernels are different ones: the largest of each configuration, and the smallest
    dim in 16 bit or where it has a row of its own."""
    found: dict[Any, tuple[int, int]] = {}
    for dim, batch_heads in itertools.product(range(40, MAX_DIM + 1, 8), range(HEADS, MANY + 1, HEADS)):
        config = _kda_config(card, precision, dim, batch_heads)
        found[config, max(128, ceil_pow2(dim))] = dim, batch_heads
    # A small V gets a tile of its size, from any row.
    small, larger = (dataclasses.replace(_kda_config(card, precision, n, MANY), v_tile=16) for n in (LEAST_PADDED, 64))
    smallest = [(LEAST_PADDED, MANY)] if precision == "16bit" or small != larger else []
    return [*smallest, *dict.fromkeys(found.values())]


def _kda_case(
    operator: str,
    what: str = "",
    *,
    dtype: str,
    precision: str,
    K: int,
    V: int,
    batch_heads: int,
    tokens: int = TOKENS,
    query_heads: int = 1,
    raw: bool = False,
    saving: bool = False,
    packed: bool = False,
    fast: bool = False,
    **options: Any,
) -> Case:
    # Few heads and a large batch: programs depend on the number of heads, but not on the batch.
    B, HV, H = batch_heads // HEADS, HEADS, query_heads
    head = (1, B * tokens) if packed else (B, tokens)
    f32 = "float32"
    arrays: dict[str, Any] = dict.fromkeys("qk", ((*head, H, K), dtype)) | {"v": ((*head, HV, V), dtype)}
    arrays["g"] = (*head, HV, K), dtype if raw else f32
    if operator == "kda":
        arrays["beta"] = (*head, HV), dtype if raw else f32
    else:
        arrays |= {"erase": ((*head, HV, K), f32), "write": ((*head, HV, V), f32)}
    if raw:
        arrays |= {"A_log": ((HV,), f32), "dt_bias": ((HV * K,), f32)}
        options |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    if packed:
        arrays["cu_seqlens"] = (B + 1,), "int32"
    if saving:
        options["residuals"] = "save"
    else:
        arrays["initial_state"] = (B, HV, K, V), f32
        options["output_final_state"] = True
    options["precision"] = precision
    size = f"K={K} V={V} heads={batch_heads}"
    title = " ".join(word for word in (operator, what, dtype, precision, size) if word)
    return Case(operator, title, dtype, arrays, options, fast=fast)


# kda_step


def _steps() -> Iterator[Case]:
    for dtype, dim, raw in itertools.product(
        ("bfloat16", "float16", "float32"), (16, 64, 100, 128, 256), (False, True)
    ):
        B, HV, H = 64, HEADS, 1
        arrays: dict[str, Any] = dict.fromkeys("qk", ((B, H, dim), dtype)) | {"v": ((B, HV, dim), dtype)}
        arrays |= {"g": ((B, HV, dim), dtype), "beta": ((B, HV), dtype), "state": ((B, HV, dim, dim), "float32")}
        options: dict[str, Any] = {}
        if raw:
            arrays |= {"A_log": ((HV,), "float32"), "dt_bias": ((HV * dim,), "float32")}
            names = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
            options = dict.fromkeys(names, True)
        title = f"kda_step{' raw' if raw else ''} {dtype} K=V={dim}"
        yield Case("kda_step", title, dtype, arrays, options, backward=False, fast=dim == 128)


# short_convolution


def _short_convolutions() -> Iterator[Case]:
    for dtype in ("bfloat16", "float16", "float32"):
        for what, B, T, taps, sizes in (
            ("", 8, 2048, 4, (1024, 1024, 1024)),
            ("small", 2, 512, 4, (256, 256, 768)),
            ("odd", 2, ODD_TOKENS, 8, (520, 300)),
        ):
            C = sum(sizes)
            arrays: dict[str, Any] = {"x": ((B, T, C), dtype), "kernel": ((taps, C), "float32")}
            options: dict[str, Any] = {"sizes": sizes, "implementation": "pallas_triton"}
            if what == "odd":
                arrays |= {"bias": ((C,), "float32"), "segment_ids": ((B, T), "int32")}
            title = f"short_convolution{f' {what}' if what else ''} {dtype}"
            yield Case("short_convolution", title, dtype, arrays, options, fast=dtype == "bfloat16" and not what)


# rms_norm


def _rms_norms() -> Iterator[Case]:
    for dtype in ("bfloat16", "float16", "float32"):
        for what, shape, extra in (
            ("", (8, 2048, 1024), ("residual",)),
            ("gated", (8, 2048, 8, 128), ("gate", "gate_bias")),
            ("gated alone", (8, 2048, 4, 256), ("gate",)),
            ("odd", (3, ODD_TOKENS, 515), ()),
            ("odd gated", (3, ODD_TOKENS, 3, 76), ("residual", "gate", "gate_bias")),
            ("long", (1, ODD_TOKENS, 10240), ("residual",)),
        ):
            arrays: dict[str, Any] = {"x": (shape, dtype), "scale": (shape[-1:], "float32")}
            arrays |= {name: (shape[-2:], "float32") if name == "gate_bias" else (shape, dtype) for name in extra}
            title = f"rms_norm{f' {what}' if what else ''} {dtype}"
            fast = dtype == "bfloat16" and what in ("", "gated")
            yield Case("rms_norm", title, dtype, arrays, {"implementation": "pallas_triton"}, fast=fast)


# gemm


def _gemm(card: Card) -> Iterator[Case]:
    implementations = ["pallas_triton"] + (["pallas_mosaic"] if card.is_hopper else [])
    for (dtype, precision), implementation in itertools.product(PRECISIONS, implementations):
        sizes = _gemm_sizes(card, dtype, precision, implementation)
        if dtype == "float16":
            sizes = sizes[:1]  # it takes bfloat16's configurations
        for n, size in enumerate([*sizes, GEMM_ODD]):
            # Between them: every pair of storage orders, with and without a bias, both output dtypes.
            sized = {"size": size, "dtype": dtype, "precision": precision, "implementation": implementation}
            yield _gemm_case(bias=True, fast=n == 0 and dtype != "float16", **sized)
            if n == 0:
                yield _gemm_case(transpose_a=True, transpose_b=True, out_dtype="float32", **sized)


def _gemm_sizes(card: Card, dtype: str, precision: str, implementation: str) -> list[tuple[int, int, int]]:
    """(M, N, K) of which the kernels are different ones: the first of each configuration, split or not."""
    choose = gemm_kernels.choose_mosaic if implementation == "pallas_mosaic" else gemm_kernels.choose_triton
    found: dict[Any, tuple[int, int, int]] = {}
    for M, N, K in itertools.product(GEMM_SIZES, GEMM_SIZES, GEMM_DEPTHS):
        problem = gemm_kernels.Problem(M, N, K, precision, dtype, dtype)
        config = choose(problem, device_kind=card.kind, cores=card.cores)
        alike = dataclasses.replace(config, split=min(config.split, 2))
        found.setdefault(alike, (M, N, K))
    return list(found.values())


def _gemm_case(
    *,
    size: tuple[int, int, int],
    dtype: str,
    precision: str,
    implementation: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: bool = False,
    out_dtype: str | None = None,
    fast: bool = False,
) -> Case:
    M, N, K = size
    arrays: dict[str, Any] = {
        "a": ((K, M) if transpose_a else (M, K), dtype),
        "b": ((N, K) if transpose_b else (K, N), dtype),
    }
    if bias:
        arrays["bias"] = (N,), "float32"
    options: dict[str, Any] = {"precision": precision, "implementation": implementation, "out_dtype": out_dtype}
    options |= {"transpose_a": transpose_a, "transpose_b": transpose_b}
    order = ("T" if transpose_a else "N") + ("T" if transpose_b else "N")
    title = f"gemm {implementation.removeprefix('pallas_')} {order} {dtype} {precision} {M}x{N}x{K}"
    return Case("gemm", title, dtype, arrays, options, fast=fast)


# attention


def _attention(card: Card) -> Iterator[Case]:
    for dtype, precision in PRECISIONS:
        found: dict[Any, int] = {}  # the largest dim of each configuration
        for D in (16, 32, 64, 128, MAX_DIM):
            config = attention_kernels.choose_config(card.kind, D=D, precision=precision)
            found[config, max(D, 64)] = D
        dims = [64] if dtype == "float16" else list(found.values())  # it takes bfloat16's configurations
        for D in dims:
            fast = D == 64 and dtype != "float16"
            yield _attention_case(dtype, precision, D, fast=fast, implementation="pallas_triton")
            if card.is_hopper and D in (64, 128) and (precision == "16bit" or precision == "fp32" and D == 64):
                yield _attention_case(dtype, precision, D, "hopper", fast=fast, implementation="pallas_mosaic")
        if precision != "tf32" and dtype != "float16":
            yield _attention_case(dtype, precision, 100, "odd", tokens=ODD_TOKENS, causal=False)
            yield _attention_case(dtype, precision, 128, "packed", packed=True)


def _attention_case(
    dtype: str,
    precision: str,
    D: int,
    what: str = "",
    *,
    tokens: int = TOKENS,
    packed: bool = False,
    fast: bool = False,
    **options: Any,
) -> Case:
    B, HK, group = 1 if packed else 2, 2, 2
    keys = (B, tokens, HK, D), dtype
    arrays: dict[str, Any] = {"q": ((B, tokens, group * HK, D), dtype), "k": keys, "v": keys}
    if packed:
        arrays["cu_seqlens"] = (5,), "int32"
    title = " ".join(word for word in ("attention", what, dtype, precision, f"D={D}") if word)
    return Case("attention", title, dtype, arrays, options | {"precision": precision}, fast=fast)


# adapters


def _adapters() -> Iterator[Case]:
    for dtype, precision in PRECISIONS:
        for O, I, what in ((4096, 4096, ""), (1003, 515, "odd")):
            common: dict[str, Any] = {"dtype": dtype, "precision": precision, "what": what}
            for rank in (16, 64, 128) if not what else (20,):
                pair = {"A": (rank, I), "B": (O, rank)}
                pairs = {f"{name}{i}": shape for name, shape in pair.items() for i in (1, 2)}
                fast = dtype == "bfloat16" and rank == 16
                for family, shapes in (("lora", pair), ("loha", pairs)):
                    arrays = shapes | {"base": (O, I)}
                    yield _adapter_case(family, f"r={rank}", arrays, fast=fast, alpha=1.0, **common)
                if rank < 128:
                    arrays, options = pair | {"base": (O, I), "magnitude": (O,)}, {"alpha": 1.0, "detach_norm": False}
                    yield _adapter_case("lora", f"r={rank} DoRA", arrays, **options, **common)
        if precision == "16bit":
            arrays = {"A": (16, 8192), "B": (8192, 16), "base": (8192, 8192)}
            yield _adapter_case("lora", "r=16", arrays, alpha=1.0, dtype=dtype, precision=precision, what="large")
        for side, n in (("output", 16), ("input", 64)):
            arrays = {"P": (1280 // n, n, n), "base": (1280, 1280)}
            options = {"side": side, "fast": dtype == "bfloat16"}
            yield _adapter_case("oft", f"{side} n={n}", arrays, dtype=dtype, precision=precision, **options)
        if precision != "tf32":  # there are no matrix products
            for a, b, c, d in ((64, 64, 64, 64), (5, 3, 34, 29)):
                arrays = {"W1": (a, b), "W2": (c, d), "base": (a * c, b * d)}
                title, fast = f"W1=[{a}, {b}]", dtype == "bfloat16"
                yield _adapter_case("lokr", title, arrays, dtype=dtype, precision=precision, fast=fast, scale=1.0)


def _bypasses(card: Card) -> Iterator[Case]:
    for dtype, precision in PRECISIONS:
        common: dict[str, Any] = {"dtype": dtype, "precision": precision, "form": "bypass"}
        fast = dtype == "bfloat16"
        on_hopper = ("pallas_mosaic",) if card.is_hopper and precision == "16bit" else ()
        implementations = ("pallas_triton", *on_hopper)
        for T, O, I, rank, what in ((4096, 3072, 3072, 16, ""), (77, 515, 1003, 20, "odd")):
            layer = {"x": (T, I), "base": (O, I), "bias": (O,)}
            pair = {"A": (rank, I), "B": (O, rank)}
            pairs = {f"{name}{i}": shape for name, shape in pair.items() for i in (1, 2)}
            for implementation in implementations:
                options = {"alpha": 1.0, "implementation": implementation}
                for family, arrays in (("lora", pair), ("loha", pairs)):
                    yield _adapter_case(family, f"r={rank}", arrays | layer, what=what, **options, **common)
        if precision == "16bit":
            arrays = {"x": (77, 3072), "A": (16, 3072), "B": (3072, 16), "base": (3072, 3072)}
            yield _adapter_case("lora", "r=16", arrays, what="few tokens", alpha=1.0, fast=fast, **common)
        for n in (4, 64):
            arrays = {"x": (4096, 1280), "P": (1280 // n, n, n), "base": (1280, 1280)}
            yield _adapter_case("oft", f"n={n}", arrays, side="output", fast=fast and n == 4, **common)
        roomy = card.is_hopper or precision != "16bit" and card.block_shared >= 232448
        largest = (128 if precision == "16bit" else 64) // (1 if roomy else 2)
        for a, b, c, d in dict.fromkeys(((32, 32, 32, 32), (largest,) * 4, (5, 3, 34, 29), (64, 16, 64, 64))):
            if max(a, b, c, d) <= largest:
                arrays = {"x": (4096, b * d), "W1": (a, b), "W2": (c, d), "base": (a * c, b * d)}
                title = f"W1=[{a}, {b}] W2=[{c}, {d}]"
                for implementation in implementations if a == 32 else ("pallas_triton",):
                    options = {"scale": 1.0, "implementation": implementation}
                    yield _adapter_case("lokr", title, arrays, fast=fast and a == 32, **options, **common)


def _adapter_case(
    family: str,
    sizes: str,
    shapes: dict[str, tuple[int, ...]],
    *,
    dtype: str,
    precision: str,
    form: str = "rebuild",
    what: str = "",
    fast: bool = False,
    implementation: str = "pallas_triton",
    **options: Any,
) -> Case:
    backend = "Hopper" if implementation == "pallas_mosaic" else ""
    title = " ".join(word for word in (f"{family}.{form}", backend, what, dtype, precision, sizes) if word)
    arrays: dict[str, Any] = {name: (shape, dtype) for name, shape in shapes.items()}
    options |= {"precision": precision, "implementation": implementation}
    return Case(f"adapters.{family}.{form}", title, dtype, arrays, options, fast=fast)
