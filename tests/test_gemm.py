"""The suite that every implementation of `gemm` passes: against float64, at the formats' edges, and transformed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import dormouse_jax
from dormouse_jax import gemm
from tests import helpers
from torch_ref.gemm import gemm_oracle

IMPLEMENTATIONS = ("xla", "pallas_triton", "pallas_mosaic")
TRANSPOSES = tuple(itertools.product((False, True), repeat=2))
LARGEST = float(np.finfo(np.float32).max)


def runs(implementation: str) -> bool:
    """Whether this machine can run it: natively, or interpreted."""
    return implementation != "pallas_mosaic" or not helpers.on_gpu() or jax.devices()[0].compute_capability == "9.0"


def each(*, few=lambda *case: True, **axes):
    """Named parameters for the product of `axes` and the implementations; where kernels are interpreted, those of
    Mosaic GPU, which interpret slowest, take the cases that `few` says, by the axes' values."""
    cases = itertools.product(IMPLEMENTATIONS, *axes.values())
    names = ("implementation", *axes)
    return parameterized.named_parameters(
        {"testcase_name": "_".join(str(value) for value in case).replace(" ", "")} | dict(zip(names, case, strict=True))
        for case in cases
        if runs(case[0]) and (case[0] != "pallas_mosaic" or helpers.on_gpu() or few(*case[1:]))
    )


def problem(M, N, K, *, dtype="float32", transpose_a=False, transpose_b=False, bias=None, out_dtype=None, seed=0):
    """(arrays by name, dout) of a random problem; `bias` is its dtype."""
    rng = np.random.default_rng(seed)
    arrays = {
        "a": rng.normal(size=(K, M) if transpose_a else (M, K)).astype(jnp.dtype(dtype)),
        "b": rng.normal(size=(N, K) if transpose_b else (K, N)).astype(jnp.dtype(dtype)),
    }
    if bias is not None:
        arrays["bias"] = rng.normal(size=N).astype(jnp.dtype(bias))
    # What the backward rounds the cotangent to, so that the oracle sees the same one.
    dout = rng.normal(size=(M, N)).astype(jnp.dtype(dtype)).astype(jnp.dtype(out_dtype or dtype))
    return arrays, dout


def value_and_grads(arrays, dout, implementation, **options):
    def fn(arrays):
        return gemm(**arrays, implementation=implementation, **options)

    with helpers.kernels_run(implementation):
        out, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, arrays))
        (grads,) = vjp(jnp.asarray(dout))
    return {"out": out} | {f"d{name}": x for name, x in grads.items()}


def call(arrays, implementation, **options):
    with helpers.kernels_run(implementation):
        return np.asarray(gemm(**arrays, implementation=implementation, **options))


def assert_accurate(got, want, dtypes, precision):
    """Holds every result to float64: to the operands' precision, and half a unit of its own dtype."""
    assert set(got) == set(want), (set(got), set(want))
    for name, x in got.items():
        assert x.dtype == dtypes[name], f"{name}: {x.dtype}, expected {dtypes[name]}"
        bar = {"fp32": 2e-6, "tf32": 1e-3, "16bit": 1e-6}[precision] + 0.5 * float(jnp.finfo(x.dtype).eps)
        helpers.assert_close(x, want[name], rms=bar, name=name)


SIZES = {
    "one": (1, 1, 1),
    "a_row": (1, 40, 48),
    "a_column": (72, 1, 33),
    "less_than_a_tile": (33, 20, 17),
    "odd": (130, 67, 101),
    "whole_tiles": (128, 64, 128),
}
GPU_SIZES = {
    "a_thousand": (1000, 1023, 777),
    "tall": (8200, 136, 512),
    "one_row_of_many": (1, 2048, 4096),
    "sixteen_rows": (16, 1024, 3000),
    "long": (128, 256, 65536),
    "many_tiles": (1536, 2304, 512),
}


class AccuracyTest(parameterized.TestCase):
    """Against float64: the output and the gradients of a, b and bias."""

    @each(
        size=tuple(SIZES | (GPU_SIZES if helpers.on_gpu() else {})),
        few=lambda size: size == "odd",
    )
    def test_sizes_in_float32(self, implementation, size):
        M, N, K = (SIZES | GPU_SIZES)[size]
        arrays, dout = problem(M, N, K, bias="float32", seed=M)
        got = value_and_grads(arrays, dout, implementation)
        # Sums of K or M products grow as their square root, and so do their roundings.
        want = gemm_oracle(**arrays, dout=dout)
        assert_accurate(got, want, dict.fromkeys(got, "float32"), "fp32")

    @each(
        transposes=TRANSPOSES,
        dtype=("float32", "bfloat16"),
        few=lambda transposes, dtype: transposes == (True, True) and dtype == "bfloat16",
    )
    def test_transposes(self, implementation, transposes, dtype):
        options = dict(zip(("transpose_a", "transpose_b"), transposes, strict=True))
        M, N, K = (520, 384, 200) if helpers.on_gpu() else (72, 40, 24)
        if implementation == "pallas_mosaic":
            M, N, K = (576, 320, 192) if helpers.on_gpu() else (192, 64, 64)  # what its tiles divide
        arrays, dout = problem(M, N, K, dtype=dtype, bias="bfloat16", **options)
        got = value_and_grads(arrays, dout, implementation, **options)
        want = gemm_oracle(**arrays, **options, dout=dout)
        precision = "fp32" if dtype == "float32" else "16bit"
        assert_accurate(got, want, dict.fromkeys(got, dtype) | {"dbias": "bfloat16"}, precision)

    @each(
        dtypes=(
            ("bfloat16", "float32", None),
            ("float16", "float16", None),
            ("float16", "bfloat16", None),
            ("float32", "bfloat16", None),
            ("float32", "float32", "tf32"),
        ),
        few=lambda dtypes: dtypes[0] == "float32" and dtypes[2] == "tf32",
    )
    def test_dtypes(self, implementation, dtypes):
        dtype, out_dtype, precision = dtypes
        M, N, K = (256, 384, 512) if helpers.on_gpu() else (40, 64, 64)
        arrays, dout = problem(M, N, K, dtype=dtype, out_dtype=out_dtype)
        got = value_and_grads(arrays, dout, implementation, out_dtype=out_dtype, precision=precision)
        precision = precision or ("fp32" if dtype == "float32" else "16bit")
        want = gemm_oracle(**arrays, dout=dout)
        assert_accurate(got, want, {"out": out_dtype, "da": dtype, "db": dtype}, precision)

    def test_split_contractions_add_up(self):
        # Few tiles and a long contraction: the Triton kernel splits it.
        arrays, dout = problem(4, 24, 2500, bias="float32")
        got = value_and_grads(arrays, dout, "pallas_triton")
        with helpers.kernels_run("pallas_triton"):
            (forward,) = dormouse_jax.explain(
                functools.partial(gemm, implementation="pallas_triton"), arrays["a"], arrays["b"]
            )
        self.assertGreater(forward.config.split, 1)
        assert_accurate(got, gemm_oracle(**arrays, dout=dout), dict.fromkeys(got, "float32"), "fp32")

    @each(few=lambda: False)
    def test_the_same_bits_again(self, implementation):
        arrays, dout = problem(*((1024, 512, 2048) if helpers.on_gpu() else (40, 24, 64)), bias="float32")
        first = value_and_grads(arrays, dout, implementation)
        for _ in range(5 if helpers.on_gpu() else 1):
            helpers.assert_same_bits(value_and_grads(arrays, dout, implementation), first)


class EdgesOfFloat32Test(parameterized.TestCase):
    """Values that splitting into 16-bit pieces could spoil."""

    @each()
    def test_inf_and_nan_come_out_as_from_float32_arithmetic(self, implementation):
        M, N, K = 16, 16, 32
        arrays, _ = problem(M, N, K)
        a, b = arrays["a"].copy(), arrays["b"].copy()
        a[0, 5], a[1, 7], a[2, 9], a[2, 10] = np.inf, np.nan, np.inf, -np.inf
        a[3, 3] = np.uint32(0x7F800001).view(np.float32)  # a NaN whose upper 16 bits are those of inf
        b[5] = np.where(np.arange(N) % 2, 1.0, -2.0)  # their lower pieces are zero
        b[11, 4], b[12, 5] = -np.inf, np.nan
        a[:, 11] = 1.0
        with np.errstate(all="ignore"):
            want = gemm_oracle(a, b)["out"]
        got = call({"a": a, "b": b}, implementation)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.where(np.isinf(got), got, 0), np.where(np.isinf(want), want, 0))
        finite = np.isfinite(want)
        helpers.assert_close(np.where(finite, got, 0), np.where(finite, want, 0), rms=2e-6)

    @each()
    def test_the_largest_floats_do_not_overflow(self, implementation):
        a, b = np.zeros((16, 32), np.float32), np.zeros((32, 16), np.float32)
        a[0, 0], a[1, 1], a[2, :2] = LARGEST, -LARGEST, (LARGEST, LARGEST)
        b[0], b[1] = 1.0, 0.5
        got = call({"a": a, "b": b}, implementation)
        np.testing.assert_array_equal(got[0], np.float32(LARGEST))
        np.testing.assert_array_equal(got[1], np.float32(-LARGEST * 0.5))
        np.testing.assert_array_equal(got[2], np.inf)  # as in float32 arithmetic

    @each()
    def test_small_numbers(self, implementation):
        arrays, _ = problem(16, 16, 32)
        b = arrays["b"] * np.float32(2.0**20)
        for scale, bar in ((2.0**-95, 2e-6), (2.0**-110, 1e-3), (2.0**-140, None)):
            a = (arrays["a"].astype(np.float64) * scale).astype(np.float32)
            got, want = call({"a": a, "b": b}, implementation), gemm_oracle(a, b)["out"]
            if bar is None:  # subnormal operands may be taken for zero, never for more than they are
                self.assertLessEqual(np.max(np.abs(got)), 2 * np.max(np.abs(want)))
            else:
                helpers.assert_close(got, want, rms=bar)


class TransformTest(parameterized.TestCase):
    """Inside JAX's transformations a call gives what it gives outside."""

    @each(axes=((0, 0), (0, None), (None, 0)), few=lambda axes: axes == (0, None))
    def test_vmap(self, implementation, axes):
        dtype = "bfloat16" if implementation == "pallas_mosaic" else "float32"
        sizes = (40, 64, 64)
        one, dout = problem(*sizes, dtype=dtype, bias="float32")
        two, dout2 = problem(*sizes, dtype=dtype, bias="float32", seed=1)
        arrays = {n: np.stack([one[n], two[n]]) for n in one}
        arrays |= {n: one[n] for n, axis in zip("ab", axes, strict=True) if axis is None}
        in_axes = dict(zip("ab", axes, strict=True)) | {"bias": 0}

        def fn(arrays):
            return jax.vmap(lambda x: gemm(**x, implementation=implementation), (in_axes,))(arrays)

        with helpers.kernels_run(implementation):
            out, vjp = jax.vjp(fn, jax.tree.map(jnp.asarray, arrays))
            (grads,) = vjp(jnp.stack([dout, dout2]))
        wants = []
        for i, d in enumerate((dout, dout2)):
            each_ = {n: x if in_axes[n] is None else x[i] for n, x in arrays.items()}
            wants.append(gemm_oracle(**each_, dout=d))
        want = {n: np.stack([w[n] for w in wants]) for n in wants[0]}
        for name, axis in zip("ab", axes, strict=True):
            if axis is None:
                want[f"d{name}"] = want[f"d{name}"].sum(axis=0)
        bar = 2e-6 if dtype == "float32" else 6e-3
        for name, x in {"out": out, **{f"d{n}": g for n, g in grads.items()}}.items():
            helpers.assert_close(x, want[name], rms=bar, name=name)

    @each(few=lambda: False)
    def test_vmap_of_vmap(self, implementation):
        arrays, _ = problem(24, 16, 32)
        a = np.stack([np.stack([arrays["a"] * (1 + i + 2 * j) for i in range(2)]) for j in range(3)])
        fn = functools.partial(gemm, implementation=implementation)
        with helpers.kernels_run(implementation):
            out = jax.jit(jax.vmap(jax.vmap(fn, (0, None)), (0, None)))(a, arrays["b"])
        helpers.assert_close(out, a.astype(np.float64) @ arrays["b"], rms=2e-6)

    @each(few=lambda: False)
    def test_gradients_in_a_scan_under_jit_and_checkpoint(self, implementation):
        arrays, dout = problem(24, 16, 32)
        want = gemm_oracle(**arrays, dout=dout)

        @jax.jit
        @jax.grad
        def total(a):
            layer = jax.checkpoint(lambda a: jnp.vdot(gemm(a, arrays["b"], implementation=implementation), dout))
            return jax.lax.scan(lambda c, a: (c + layer(a), None), 0.0, a)[0]

        with helpers.kernels_run(implementation):
            da = total(jnp.stack([arrays["a"], 2 * arrays["a"]]))
        helpers.assert_close(da[1], want["da"], rms=2e-6)

    @each(few=lambda: False)
    def test_shard_map_over_rows(self, implementation):
        arrays, dout = problem(32, 16, 48)
        mesh = jax.make_mesh((min(2, len(jax.devices())),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = PartitionSpec("x")
        fn = jax.shard_map(
            functools.partial(gemm, implementation=implementation),
            mesh=mesh,
            in_specs=(rows, PartitionSpec()),
            out_specs=rows,
            check_vma=False,
        )
        with helpers.kernels_run(implementation):
            out, vjp = jax.vjp(jax.jit(fn), arrays["a"], arrays["b"])
            da, db = vjp(jnp.asarray(dout))
        want = gemm_oracle(**arrays, dout=dout)
        for name, x in {"out": out, "da": da, "db": db}.items():
            helpers.assert_close(x, want[name], rms=2e-6, name=name)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class ErrorsTest(parameterized.TestCase):
    """Calls that cannot be served: what is raised, and what it says."""

    @parameterized.named_parameters(
        ("a_is_a_list", {"a": [[1.0]]}, TypeError, "a must be an array, got list"),
        ("a_of_three_axes", {"a": ones(2, 4, 3)}, ValueError, "a must have shape [M, K], got [2, 4, 3]"),
        ("b_does_not_match", {"b": ones(4, 5)}, ValueError, "b must have shape [K, N] = [3, N], got [4, 5]"),
        (
            "b_transposed_does_not_match",
            {"b": ones(3, 5), "transpose_b": True},
            ValueError,
            "b must have shape [N, K] = [N, 3], got [3, 5]",
        ),
        ("a_transposed", {"a": ones(4), "transpose_a": True}, ValueError, "a must have shape [K, M], got [4]"),
        ("empty", {"a": ones(0, 3)}, ValueError, "M, N and K must be at least 1, got a of shape [0, 3]"),
        ("integers", {"a": ones(4, 3, dtype=np.int32)}, TypeError, "a must be float32, bfloat16 or float16, got int32"),
        ("mixed", {"b": ones(3, 5, dtype=np.float16)}, TypeError, "b must have a's dtype float32, got float16"),
        ("bias_of_other_length", {"bias": ones(4)}, ValueError, "bias must have shape [N] = [5], got [4]"),
        ("bias_of_integers", {"bias": ones(5, dtype=np.int8)}, TypeError, "bias must be float32, bfloat16 or float16"),
        ("transpose_is_a_string", {"transpose_a": "yes"}, ValueError, "transpose_a must be one of False, True"),
        (
            "unknown_precision",
            {"precision": "high"},
            ValueError,
            "precision must be one of None, 'fp32', 'tf32', '16bit'",
        ),
        (
            "precision_of_16_bit",
            {"precision": "16bit"},
            ValueError,
            "precision must be 'fp32' or 'tf32' for inputs of dtype float32, got '16bit'",
        ),
        (
            "unknown_output",
            {"out_dtype": "int8"},
            TypeError,
            "out_dtype must be float32, bfloat16 or float16, got 'int8'",
        ),
        ("no_dtype", {"out_dtype": "half a byte"}, TypeError, "out_dtype must be float32, bfloat16 or float16"),
        (
            "unknown_implementation",
            {"implementation": "cublas"},
            ValueError,
            "implementation must be one of None, 'pallas'",
        ),
    )
    def test_refused(self, changes, error, message):
        arguments = {"a": ones(4, 3), "b": ones(3, 5)} | changes
        a, b = arguments.pop("a"), arguments.pop("b")
        with self.assertRaises(error) as caught:
            gemm(a, b, **arguments)
        self.assertStartsWith(str(caught.exception), f"gemm: {message}")

    def test_float64_is_refused(self):
        with jax.enable_x64(True), self.assertRaisesRegex(TypeError, "gemm: a must be .*, got float64"):
            gemm(np.ones((4, 3)), np.ones((3, 5)))

    @parameterized.parameters("pallas", "pallas_triton", "pallas_mosaic")
    def test_kernels_by_name_without_a_gpu(self, implementation):
        if helpers.on_gpu():
            self.skipTest("there is a GPU")
        with self.assertRaisesRegex(NotImplementedError, f"gemm: implementation='{implementation}' cannot serve"):
            gemm(ones(4, 3), ones(3, 5), implementation=implementation)


if __name__ == "__main__":
    absltest.main()
