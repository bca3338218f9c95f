"""What the tests of the adapters share: problems of every family, runs, and comparisons with float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dormouse_jax import adapters
from tests import helpers
from torch_ref.oracle_adapters import adapter_oracle

# Options, and sizes: O and I of the layer, r the rank, [k, n, n] the blocks of OFT, [a, b] of LoKr's W1.
CASES = {
    "lora.rebuild": {"alpha": 3.0},
    "lora.bypass": {"alpha": 3.0},
    "loha.rebuild": {"alpha": 3.0},
    "loha.bypass": {"alpha": 3.0},
    "lokr.rebuild": {"scale": 0.7},
    "lokr.bypass": {"scale": 0.7},
    "oft.rebuild": {"side": "output"},
    "oft.bypass": {"side": "output"},
}


def operator_of(name):
    family, form = name.split(".")
    return getattr(getattr(adapters, family), form)


def call(name, arrays, **options):
    """The operator on arrays by the names that the oracle knows."""
    arrays = {n: x for n, x in arrays.items() if x is not None}
    for factor in ("W1", "W2"):
        if factor + "a" in arrays:
            arrays[factor] = (arrays.pop(factor + "a"), arrays.pop(factor + "b"))
    return operator_of(name)(**arrays, **options)


def problem(
    name,
    *,
    O=30,
    I=21,
    r=3,
    T=17,
    n=3,
    factors=(5, 3),
    low_rank=(),
    dtype="float32",
    factor_dtype=None,
    base=True,
    bias=True,
    magnitude=False,
    side="output",
    seed=0,
):
    """(arrays by name, dout) of a random problem."""
    rng = np.random.default_rng(seed)
    family, form = name.split(".")

    def normal(*shape, of=dtype):
        return rng.normal(size=shape).astype(jnp.dtype(of))

    own = functools.partial(normal, of=factor_dtype or dtype)
    arrays = {}
    if family == "lora":
        arrays = {"A": own(r, I), "B": own(O, r)}
        if magnitude:
            arrays["magnitude"] = own(O)
    elif family == "loha":
        arrays = {"A1": own(r, I), "B1": own(O, r), "A2": own(r, I), "B2": own(O, r)}
    elif family == "lokr":
        a, b = factors
        shapes = {"W1": (a, b), "W2": (O // a, I // b)}
        for factor, (rows, columns) in shapes.items():
            if factor in low_rank:
                arrays |= {factor + "a": own(rows, r), factor + "b": own(r, columns)}
            else:
                arrays[factor] = own(rows, columns)
    else:
        arrays["P"] = (own((O if side == "output" else I) // n, n, n).astype(np.float64) / 3).astype(own(1).dtype)
    rows = O if base or family != "oft" else arrays["P"].shape[0] * n
    if base:
        arrays["base"] = normal(O, I)
    if form == "rebuild":
        return arrays, normal(O, I)
    if bias and base:
        arrays["bias"] = normal(O)
    arrays["x"] = normal(T, I if base or family != "oft" else rows)
    return arrays, normal(T, rows)


def value_and_grads(name, arrays, dout, **options):
    def fn(arrays):
        return call(name, arrays, **options)

    with helpers.kernels_run(options.get("implementation") or ""):
        out, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, arrays))
        (grads,) = vjp(jnp.asarray(dout, out.dtype))
    return {"out": out} | {f"d{n}": x for n, x in grads.items()}


# Largest RMS errors. In 16 bit intermediate results are rounded once or twice, and the result itself.
BARS = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}


def assert_right(name, arrays, dout, *, bar=None, implementation="xla", precision=None, **options):
    got = value_and_grads(name, arrays, dout, implementation=implementation, precision=precision, **options)
    want = adapter_oracle(name, arrays, dout=dout, **options)
    assert set(got) == set(want), (set(got), set(want))
    for n, x in got.items():
        if n != "out":
            assert x.dtype == arrays[n[1:]].dtype, f"{n}: {x.dtype}"
        dtypes = {str(array.dtype) for array in arrays.values()}
        dtype = next(iter(dtypes - {"float32"}), "float32")
        helpers.assert_close(x, want[n], rms=bar or BARS[dtype], name=n)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)
