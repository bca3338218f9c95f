"""The GEMM kernels apart from the operator: which is chosen where, what lowers for a GPU, how float32 is split."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dormouse_jax
from pallas_kernels import gemm as kernels
from pallas_kernels.gemm import config, mosaic
from tests import helpers

TRANSPOSES = tuple(itertools.product((False, True), repeat=2))


def on(kind):
    """A context in which calls are planned and lowered for this card, which need not be there."""
    device = jax.sharding.AbstractDevice(kind, 132, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def gradients(a, b, bias, dout, **options):
    _, vjp = jax.vjp(lambda a, b, bias: dormouse_jax.gemm(a, b, bias=bias, **options), a, b, bias)
    return vjp(dout)


def arrays(M, N, K, dtype, transposes=(False, False)):
    """Shapes of a, b, bias and dout."""
    shapes = (K, M) if transposes[0] else (M, K), (N, K) if transposes[1] else (K, N), (N,), (M, N)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def products_only(a, b, dout, **options):
    _, vjp = jax.vjp(lambda a, b: dormouse_jax.gemm(a, b, **options), a, b)
    return vjp(dout)


class DispatchTest(parameterized.TestCase):
    @parameterized.parameters(
        ("NVIDIA H200", "float32", (5120, 8192, 2048), "pallas_mosaic", "pallas_mosaic"),
        ("NVIDIA H200", "float32", (4093, 4094, 4095), "pallas_mosaic", "pallas_mosaic"),  # padded
        ("NVIDIA H200", "float32", (256, 512, 16384), "pallas_mosaic", "pallas_mosaic"),  # in parts
        # cuBLAS was faster, as fast, or should be:
        ("NVIDIA H200", "float32", (16, 14336, 4096), "xla", "xla and pallas_mosaic"),
        ("NVIDIA H200", "float32", (512, 512, 512), "xla", "xla"),
        ("NVIDIA H200", "bfloat16", (4096, 4096, 4096), "xla", "xla"),
        ("NVIDIA H200", "float16", (16, 14336, 4096), "xla", "xla"),
        ("NVIDIA A100-SXM4-80GB", "float32", (4096, 4096, 4096), "xla", "xla"),
    )
    def test_chosen(self, kind, dtype, sizes, forward, backward):
        a, b, _, dout = arrays(*sizes, dtype)
        with on(kind):
            calls = dormouse_jax.explain(products_only, a, b, dout)
        self.assertEqual([c.direction for c in calls], ["forward", "backward"])
        self.assertEqual([c.implementation for c in calls], [forward, backward])
        name = forward.replace("pallas", "gemm")
        self.assertEqual(calls[0].kernels, () if forward == "xla" else (name,))
        better = {"pallas_mosaic": (), "pallas_triton": ("pallas_mosaic",), "xla": ("pallas_mosaic", "pallas_triton")}
        self.assertEqual(tuple(name for name, _ in calls[0].passed_over), better[forward])

    @parameterized.parameters(
        ((333, 256, 128), "bfloat16", r"tiles of 8 rows of 128 bytes, into which a, \[333, 128\] of bfloat16, cannot"),
        ((512, 100, 128), "bfloat16", r"into which b, \[128, 100\] of bfloat16, cannot be cut"),
        ((16, 4096, 128), "bfloat16", r"too many for an output of \[16, 4096\]"),
        ((4096, 4096, 4096), "bfloat16", r"as fast as ours in 16 bit"),
        ((512, 512, 512), "float32", r"fill less than 50% of the card, and an output of \[512, 512\] fills"),
    )
    def test_why_not_the_hopper_kernel(self, sizes, dtype, reason):
        a, b, *_ = arrays(*sizes, dtype)
        named = functools.partial(dormouse_jax.gemm, implementation="pallas_mosaic")
        with on("NVIDIA H200"):
            (call,) = dormouse_jax.explain(dormouse_jax.gemm, a, b)
            self.assertRegex(dict(call.passed_over)["pallas_mosaic"], reason)
            (call,) = dormouse_jax.explain(named, a, b)  # by name it takes what it would not be chosen for
        self.assertEqual(call.implementation, "pallas_mosaic")

    @parameterized.parameters(*itertools.product(("fp32", "tf32", "bfloat16", "float16"), TRANSPOSES))
    def test_lowers_for_a_gpu(self, precision, transposes):
        dtype = jnp.float32 if precision in ("fp32", "tf32") else jnp.dtype(precision)
        options = dict(zip(("transpose_a", "transpose_b"), transposes, strict=True))
        options |= {"precision": precision} if dtype == jnp.float32 else {}
        given = arrays(256, 128, 192, dtype, transposes)
        for kind, name in (("NVIDIA H200", "mosaic"), ("NVIDIA GeForce RTX 4090", "triton")):
            with on(kind):
                fn = jax.jit(lambda *x: gradients(*x, **options, implementation=f"pallas_{name}"))  # noqa: B023
                if name == "triton":
                    self.assertIn("gemm_triton", fn.trace(*given).lower(lowering_platforms=("cuda",)).as_text())
                else:  # lowering takes a second each
                    self.assertIn("gemm_mosaic", str(fn.trace(*given).jaxpr))

    def test_batches_lower_for_a_gpu(self):
        with on("NVIDIA H200"):
            gemm = functools.partial(dormouse_jax.gemm, implementation="pallas_mosaic")
            fn = jax.jit(jax.vmap(jax.vmap(gemm, (0, None)), (0, 0)))
            a, b = jax.ShapeDtypeStruct((2, 3, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64, 256), jnp.bfloat16)
            self.assertIn("gemm_mosaic", fn.trace(a, b).lower(lowering_platforms=("cuda",)).as_text())

    def test_where_xla_is_faster_nothing_is_warned_of(self):
        a, b, *_ = arrays(16, 14336, 4096, "float32")
        with on("NVIDIA H200"), warnings.catch_warnings():
            warnings.simplefilter("error")
            (call,) = dormouse_jax.explain(dormouse_jax.gemm, a, b)
        self.assertEqual(call.implementation, "xla")


class ConfigTest(parameterized.TestCase):
    def problem(self, M, N, K, precision="16bit", **options):
        dtype = "bfloat16" if precision == "16bit" else "float32"
        return kernels.Problem(M, N, K, precision, dtype, dtype, **options)

    @parameterized.parameters(*itertools.product(("fp32", "tf32", "16bit"), ("NVIDIA H200", "NVIDIA A100", "cpu")))
    def test_every_size_has_a_configuration(self, precision, kind):
        for sizes in itertools.product((1, 16, 64, 1000, 4096, 65536), repeat=3):
            problem = self.problem(*sizes, precision)
            if max(sizes[0] * sizes[2], sizes[1] * sizes[2], sizes[0] * sizes[1]) > config.MAX_ELEMENTS:
                with self.assertRaisesRegex(ValueError, "counts to 2147483647"):
                    kernels.choose_triton(problem, device_kind=kind)
                continue
            chosen = kernels.choose_triton(problem, device_kind=kind, cores=80)
            self.assertEqual(chosen.tile_m > chosen.tile_n, sizes[0] >= sizes[1] and chosen.tile_m != chosen.tile_n)
            self.assertLessEqual(config.parts_of(sizes[2], chosen.tile_k, chosen.split)[0], 16)

    @parameterized.parameters(
        ((8192, 8192, 8192), "16bit", (128, 256), 1),
        ((1024, 6144, 4096), "16bit", (128, 192), 1),  # whole rounds of tiles
        ((5120, 2048, 8192), "16bit", (256, 160), 1),
        ((128, 14336, 4096), "16bit", (128, 128), 1),
        ((256, 512, 16384), "fp32", (128, 128), 16),  # eight tiles, each in 16 parts
    )
    def test_tiles_of_the_hopper_kernel(self, sizes, precision, tile, split):
        problem = self.problem(*sizes, precision)
        chosen = kernels.choose_mosaic(problem, device_kind="NVIDIA H200", cores=132)
        self.assertEqual((chosen.tile_m, chosen.tile_n, chosen.split), (*tile, split))
        self.assertEqual(chosen.blocks, 132)

    @parameterized.parameters(
        ((16, 14336, 4096), (16, 64), 1),
        ((1, 14336, 4096), (16, 64), 1),
        ((16, 4096, 14336), (16, 64), 4),  # 64 tiles
        ((17, 14336, 4096), (64, 128), 2),
        ((4096, 16, 4096), (128, 16), 8),  # few columns
    )
    def test_tiles_of_the_triton_kernel(self, sizes, tile, split):
        chosen = kernels.choose_triton(self.problem(*sizes), device_kind="NVIDIA H200", cores=132)
        self.assertEqual((chosen.tile_m, chosen.tile_n, chosen.split), (*tile, split))

    @parameterized.parameters((100, 32, 1), (100, 32, 3), (65, 32, 16), (1, 16, 4), (4096, 64, 13))
    def test_parts_of_a_contraction_cover_it_and_none_is_empty(self, K, tile_k, split):
        parts, steps = config.parts_of(K, tile_k, split)
        self.assertBetween(parts, 1, split)
        self.assertGreaterEqual(parts * steps * tile_k, K)
        self.assertLess((parts - 1) * steps * tile_k, K)

    @parameterized.parameters(*(row["config"] for row in config._table()["mosaic"]))
    def test_configurations_of_the_hopper_kernel_fit_into_shared_memory(self, **settings):
        chosen = config.MosaicConfig(**settings)
        row = next(row for row in config._table()["mosaic"] if row["config"] == settings)
        pieces, dtype = {"fp32": (3, jnp.bfloat16), "tf32": (1, jnp.float32)}.get(
            row["match"]["precision"][0], (1, jnp.bfloat16)
        )
        for out_dtype in row["match"].get("out_dtype", ("bfloat16", "float32")):
            call = mosaic._Call(
                1, 1, 1, False, False, pieces, jnp.dtype(dtype), jnp.dtype(out_dtype), False, chosen
            )  # fmt: skip
            self.assertLessEqual(call.shared_bytes, mosaic.backend.SHARED_BYTES)

    @parameterized.parameters(
        (config.TritonConfig, {"tile_m": 48, "tile_n": 16, "tile_k": 16}, "tile_m must be 16, 32, 64, 128 or 256"),
        (config.TritonConfig, {"tile_m": 16, "tile_n": 16, "tile_k": 8}, "tile_k must be 16, 32, 64, 128 or 256"),
        (config.TritonConfig, {"tile_m": 16, "tile_n": 16, "tile_k": 16, "warps": 3}, "warps must be"),
        (config.TritonConfig, {"tile_m": 16, "tile_n": 16, "tile_k": 16, "split": 0}, "split must be at least 1"),
        (config.MosaicConfig, {"tile_m": 64}, "tile_m must be 128 or 256"),
        (config.MosaicConfig, {"cluster": "k"}, "cluster must be None, 'm' or 'n'"),
        (config.MosaicConfig, {"stages": 1}, "stages must lie between 2 and 8"),
        (config.MosaicConfig, {"tile_m": 256}, "24576 sums, got 128 x 256"),
    )
    def test_a_configuration_that_cannot_be_is_refused(self, kind, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            kind(**settings)

    def test_a_configuration_too_large_for_shared_memory_is_refused(self):
        ones = jnp.ones((128, 128), jnp.bfloat16)
        with self.assertRaisesRegex(ValueError, "bytes of shared memory"):
            kernels.matmul(
                ones, ones, None, transpose_a=False, transpose_b=False, precision="16bit", out_dtype=jnp.bfloat16,
                config=kernels.MosaicConfig(stages=8), interpret=True,
            )  # fmt: skip

    @parameterized.parameters(
        ((5, 3), "bfloat16", (5, 8)),
        ((9, 60), "bfloat16", (16, 64)),
        ((8, 64), "bfloat16", (8, 64)),
        ((16, 72), "bfloat16", (16, 128)),
        ((1, 33), "float32", (1, 64)),
    )
    def test_what_arrays_are_padded_to(self, shape, dtype, padded):
        self.assertEqual(config.padded_shape(shape, dtype), padded)


class SplitTest(parameterized.TestCase):
    """float32 as three bfloat16 numbers."""

    def test_pieces_add_up_exactly(self):
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32)
        x = bits.view(np.float32)
        x = x[np.isfinite(x) & (np.abs(x) > 2.0**-100)]
        x = np.concatenate([x, np.float32([0.0, -0.0, 1.0, np.finfo(np.float32).max, -np.finfo(np.float32).max])])
        pieces = [np.asarray(p) for p in mosaic.split(jnp.asarray(x)[None])]
        self.assertTrue(all(p.dtype == jnp.bfloat16 for p in pieces))
        np.testing.assert_array_equal(sum(p.astype(np.float64) for p in pieces)[0], x.astype(np.float64))
        for piece in pieces:  # toward zero: none is larger than what it is a part of
            self.assertTrue(np.all(np.abs(piece[0].astype(np.float64)) <= np.abs(x)))

    def test_what_is_not_finite_is_all_in_the_first(self):
        x = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
        x[3] = np.uint32(0x7F800001).view(np.float32)  # a NaN whose upper 16 bits are those of inf
        first, second, third = (np.asarray(p, np.float32)[0] for p in mosaic.split(jnp.asarray(x)[None]))
        np.testing.assert_array_equal(first[:2], x[:2])
        self.assertTrue(np.all(np.isnan(first[2:])))
        self.assertFalse(np.any(second) or np.any(third))


def check_a_configuration(chosen, M, N, K, precision, transposes, *, dtype="bfloat16", out_dtype="float32", bias=True):
    """Holds a kernel with this configuration to float64, and a second call of it to the first. dtype: of 16-bit
    operands."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(dtype if precision == "16bit" else jnp.float32)
    flip_a, flip_b = transposes
    a = rng.normal(size=(K, M) if flip_a else (M, K)).astype(dtype)
    b = rng.normal(size=(N, K) if flip_b else (K, N)).astype(dtype)
    row = rng.normal(size=N).astype(np.float32)

    @jax.jit
    def run(a, b, row):
        return kernels.matmul(
            a, b, row if bias else None, transpose_a=flip_a, transpose_b=flip_b, precision=precision,
            out_dtype=jnp.dtype(out_dtype), config=chosen, interpret=not helpers.on_gpu(),
        )  # fmt: skip

    arrays = [jnp.asarray(x) for x in (a, b, row)]
    got = np.asarray(run(*arrays))
    want = (a.T if flip_a else a).astype(np.float64) @ (b.T if flip_b else b).astype(np.float64) + row * bias
    bar = {"fp32": 2e-6, "tf32": 1e-3, "16bit": 3e-6}[precision] + 0.5 * float(jnp.finfo(got.dtype).eps)
    helpers.assert_close(got, want, rms=bar)
    if helpers.on_gpu():
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(run(*arrays)), got)


def needs_hopper(test):
    if helpers.on_gpu() and jax.devices()[0].compute_capability != "9.0":
        test.skipTest("needs a Hopper GPU")


class HopperKernelTest(parameterized.TestCase):
    """What a configuration can ask for; small tiles where it is interpreted."""

    @parameterized.named_parameters(
        ("cluster_along_m", {"cluster": "m"}, "16bit", (300, 200, 104)),
        ("cluster_along_n_in_parts", {"cluster": "n", "split": 3}, "16bit", (200, 130, 232)),
        ("float32_in_parts", {"cluster": "m", "fold": 1, "split": 2}, "fp32", (130, 68, 101)),
        ("one_tile", {"cluster": "n"}, "16bit", (8, 32, 8)),
        ("narrow_rows_of_tiles", {"tile_n": 160, "tile_k": 64, "cluster": "m"}, "16bit", (136, 168, 72)),
    )
    def test_against_float64(self, settings, precision, sizes):
        needs_hopper(self)
        chosen = kernels.MosaicConfig(**{"tile_m": 128, "tile_n": 64, "tile_k": 32, "stages": 2} | settings)
        check_a_configuration(chosen, *sizes, precision, (False, False))


@absltest.skipIf(not helpers.on_gpu(), "interpreting tiles this large takes minutes")
class TableTest(parameterized.TestCase):
    """Every configuration of the table on the GPU that it is for: a kernel that compiles can still be miscompiled."""

    @parameterized.parameters(*itertools.product(range(len(config._table()["mosaic"])), TRANSPOSES))
    def test_hopper_kernel(self, index, transposes):
        needs_hopper(self)
        row = config._table()["mosaic"][index]
        (precision,) = row["match"]["precision"]
        bf16, fp16 = ("bfloat16", "float16") if precision == "16bit" else ("float32", "float32")
        check = functools.partial(check_a_configuration, precision=precision, transposes=transposes)
        # Few blocks, so that each computes several tiles; then parts of the contraction, more than there are blocks;
        # whole tiles, with another output; arrays smaller than what TMA copies at once.
        whole = kernels.MosaicConfig(**row["config"], blocks=6)
        check(whole, 900, 1100, 777, out_dtype=bf16)
        other = {"out_dtype": bf16} if "out_dtype" in row["match"] else {}
        if not other:
            check(dataclasses.replace(whole, split=3, blocks=10), 300, 520, 1000, dtype=fp16, out_dtype=fp16)
        check(dataclasses.replace(whole, blocks=132), 1024, 768, 512, bias=False, **other)
        check(whole, 264, 320, 16, dtype=fp16, out_dtype=fp16)
        check(whole, 264, 320, 3, dtype=fp16, bias=False, **other)
        check(whole, 8, 64, 8, out_dtype=bf16)  # one tile of what TMA copies, along every axis

    def test_more_elements_than_an_int32_counts(self):
        needs_hopper(self)
        a, b = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
            for i, shape in enumerate(((65600, 32768), (32768, 128)))
        )
        self.assertGreater(a.size, 2**31 - 1)
        got = np.asarray(dormouse_jax.gemm(a, b, implementation="pallas_mosaic")[-8:])
        want = np.asarray(a[-8:], np.float64) @ np.asarray(b, np.float64)
        helpers.assert_close(got, want, rms=5e-3)

    @parameterized.parameters(*itertools.product(range(len(config._table()["triton"])), TRANSPOSES))
    def test_triton_kernel(self, index, transposes):
        row = config._table()["triton"][index]
        chosen = kernels.TritonConfig(**row["config"])
        turned = dataclasses.replace(chosen, tile_m=chosen.tile_n, tile_n=chosen.tile_m)
        for precision in row["match"].get("precision", ("fp32", "tf32")):
            bf16, fp16 = ("bfloat16", "float16") if precision == "16bit" else ("float32", "float32")
            check = functools.partial(check_a_configuration, precision=precision, transposes=transposes)
            for each, M, N in ((chosen, 300, 200), (turned, 200, 300)):
                check(each, M, N, 520, out_dtype=bf16)
                check(dataclasses.replace(each, split=3), M, N, 520, dtype=fp16, out_dtype=fp16)
            for each, M, N in ((chosen, 512, 256), (turned, 256, 512)):  # no tile sticks out
                check(each, M, N, 512, dtype=fp16, bias=False)


if __name__ == "__main__":
    absltest.main()
