"""What raw inputs and packed sequences cost on this GPU, kernel by kernel.

    python -m bench.options [--preset=kimi8k] [--only=packed] [--json=FILE]

Device microseconds, warm L2 (CUPTI), of one forward and backward that recomputes, all kernels of the program counted.
The first row is the call with gates, beta, queries and keys computed beforehand; in the others the kernels compute some
of them from raw ones, or the tokens are packed documents of 512. Every row runs the kernels that are the best for its
call. `differs` is the largest RMS difference of o and dv from what they should be, over its RMS; the float64 oracle is
the tests' business (tests/test_kda_raw.py, tests/test_kda_packed.py).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import cli, device, kda
from bench.spec import UsageError

_CALLS = 7
_DOCUMENT = 512
_LIMIT = 3e-2  # Roundings of 16-bit operands that are formed in another order, and no more.


@dataclasses.dataclass(frozen=True)
class _Row:
    """One call: its arrays by name, its options, and the row that its results should equal."""

    name: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    like: str


def _rows(p: Mapping[str, Any]) -> tuple[list[_Row], Any]:
    import jax
    import jax.numpy as jnp

    from dormouse_jax import gates

    B, T, H, HV, K, V, dtype = (p[name] for name in ("B", "T", "H", "HV", "K", "V", "dtype"))

    @jax.jit
    def random(key):
        keys = jax.random.split(key, 8)
        sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
        raw = {
            name: jax.random.normal(key, size, dtype) for key, (name, size) in zip(keys, sizes.items(), strict=False)
        }
        # Log decays of about -0.05 a step.
        gate = {
            "A_log": 0.3 * jax.random.normal(keys[5], (HV,)) - 1.0,
            "dt_bias": jax.random.normal(keys[6], (HV * K,)) - 2,
        }
        given = {name: gates.l2_normalize(raw[name]).astype(dtype) for name in "qk"} | {"v": raw["v"]}
        given["g"] = gates.log_decay(raw["g"], gate["A_log"], gate["dt_bias"])
        given["beta"] = gates.beta_sigmoid(raw["beta"])
        return raw, gate, given, jax.random.normal(keys[7], (B, T, HV, V), dtype)

    raw, gate, given, do = random(jax.random.key(0))
    wide = {"g": raw["g"].astype(jnp.float32), "beta": raw["beta"].astype(jnp.float32)}
    l2norm, in_gate, beta = ({f"use_{name}_in_kernel": True} for name in ("qk_l2norm", "gate", "beta_sigmoid"))
    bounded = {"lower_bound": -5.0}
    every = l2norm | in_gate | beta
    first = "computed before"
    rows = [
        _Row(first, given, {}, first),
        _Row("raw q, k", given | {n: raw[n] for n in "qk"}, l2norm, first),
        _Row("raw g in float32", given | {"g": wide["g"]} | gate, in_gate, first),
        _Row("raw beta in float32", given | {"beta": wide["beta"]}, beta, first),
        _Row("all raw, g and beta in float32", raw | wide | gate, every, first),
        _Row(f"all raw, g and beta in {dtype}", raw | gate, every, first),
        _Row("all raw, bounded gates", raw | gate, every | bounded, "all raw, bounded gates"),
    ]
    if B == 1 and T % _DOCUMENT == 0:
        documents = T // _DOCUMENT
        cu_seqlens = jnp.arange(documents + 1, dtype=jnp.int32) * _DOCUMENT
        ids = jnp.arange(T, dtype=jnp.int32)[None] // _DOCUMENT
        batch = {name: x.reshape(documents, _DOCUMENT, *x.shape[2:]) for name, x in given.items()}
        rows += [
            _Row(f"a batch of {documents} x {_DOCUMENT}", batch, {}, f"a batch of {documents} x {_DOCUMENT}"),
            _Row(
                f"packed {documents} x {_DOCUMENT}, cu_seqlens",
                given,
                {"cu_seqlens": cu_seqlens},
                f"a batch of {documents} x {_DOCUMENT}",
            ),
            _Row(
                f"packed {documents} x {_DOCUMENT}, segment_ids",
                given,
                {"segment_ids": ids},
                f"a batch of {documents} x {_DOCUMENT}",
            ),
            _Row(
                f"packed {documents} x {_DOCUMENT}, all raw",
                raw | gate,
                every | {"cu_seqlens": cu_seqlens},
                f"a batch of {documents} x {_DOCUMENT}",
            ),
        ]
    return rows, do


def _program(row: _Row, do: Any) -> Callable[[], Any]:
    """A compiled forward and backward of a row, to be called with its arrays and do."""
    import jax

    import dormouse_jax

    options = {name: x for name, x in row.options.items() if not hasattr(x, "shape")}
    packing = {name: x for name, x in row.options.items() if hasattr(x, "shape")}

    def run(arrays, packing, do):
        o, vjp = jax.vjp(lambda x: dormouse_jax.kda(**x, **packing, **options, implementation="pallas")[0], arrays)
        return o, vjp(do.reshape(o.shape))[0]

    return jax.jit(run).lower(row.arrays, packing, do).compile()


def _median(calls: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Median microseconds of every kernel of a call. What runs twice, and XLA's own kernels, are summed up."""
    sums: list[dict[str, float]] = []
    for call in calls:
        total: dict[str, float] = {}
        for name, ms in call:
            name = name.removesuffix("_mosaic_gpu_kernel").removeprefix("kda_") if name.startswith("kda_") else "XLA"
            total[name] = total.get(name, 0.0) + 1e3 * ms
        sums.append(total)
    return {name: statistics.median(x.get(name, 0.0) for x in sums) for name in sums[0]}


def main(argv: Sequence[str]) -> int:
    cli.no_positional(argv)
    [case] = kda.cases("kda", [flags.FLAGS.preset])
    if not device.has_gpu():
        raise UsageError("it times kernels, and there is no NVIDIA GPU here")

    import jax
    from jax.experimental.mosaic.gpu import profiler

    from dormouse_jax import dispatch

    dispatch.UNPROVEN.clear()  # What is measured here may be what the tests are about to prove.
    rows, do = _rows(case.params)
    only = flags.FLAGS.only
    rows = [row for row in rows if only in row.name or any(only in x.name and x.like == row.name for x in rows)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda row: _program(row, do), rows))

    results: dict[str, list[np.ndarray]] = {}
    table: list[dict[str, Any]] = []
    for row, program in zip(rows, programs, strict=True):
        packing = {name: x for name, x in row.options.items() if hasattr(x, "shape")}
        (o, grads), calls = profiler.measure(program, aggregate=False, iterations=_CALLS)(row.arrays, packing, do)  # pyright: ignore[reportCallIssue]
        if calls is None:
            raise RuntimeError("CUPTI reported no kernels")
        results[row.name] = [np.asarray(x, np.float32).reshape(do.shape) for x in (o, grads["v"])]
        pairs = zip(results[row.name], results[row.like], strict=True)
        differs = max(float(np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))) for x, y in pairs)
        finite = all(bool(jax.numpy.isfinite(x).all()) for x in jax.tree.leaves(grads))
        kernels = _median(calls)
        table.append(
            {"name": row.name, "us": sum(kernels.values()), "kernels": kernels, "differs": differs, "finite": finite}
        )
    if flags.FLAGS.json:
        with open(flags.FLAGS.json, "w") as file:
            json.dump({"preset": case.name, "device": jax.devices()[0].device_kind, "rows": table}, file, indent=1)
    print(f"{case.name}: microseconds of kernels, forward and backward")
    base = table[0]["us"]
    for x in table:
        parts = ", ".join(f"{name} {us:.0f}" for name, us in x["kernels"].items())
        print(f"{x['name']:36} {x['us']:7.0f} {x['us'] / base - 1:+7.1%}  differs {x['differs']:.0e}   {parts}")
    wrong = [x["name"] for x in table if not (x["finite"] and x["differs"] <= _LIMIT)]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    flags.DEFINE_string("preset", "kimi8k", f"One of {', '.join(kda.PRESETS)}.")
    flags.DEFINE_string("only", "", "Rows whose name has this in it, and those that they are compared with.")
    flags.DEFINE_string("json", None, "File for the results.")
    cli.run(main)
