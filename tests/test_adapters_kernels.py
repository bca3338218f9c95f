"""The adapters' kernels against float64, and what is chosen for a call."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dormouse_jax
from dormouse_jax import dispatch
from dormouse_jax.adapters import call as call_module
from pallas_kernels import gemm
from pallas_kernels.adapters import block_diagonal, config, low_rank
from tests import helpers
from tests.adapter_problems import CASES, assert_right, call, ones, problem, value_and_grads
from torch_ref.oracle_adapters import adapter_oracle

KERNELS = ("lora.rebuild", "loha.rebuild", "lokr.rebuild")


def few_programs(number):
    """A context in which sums over a weight are split into about this many programs, so that each walks further."""
    stack = contextlib.ExitStack()
    for module in (config, low_rank, block_diagonal):
        stack.enter_context(mock.patch.object(module, "PROGRAMS", number))
    jax.clear_caches()  # what was traced before has the programs that it had then
    return stack


class KernelsTest(parameterized.TestCase):
    """The Pallas kernels against float64: where tiles stick out, and where programs walk along parts."""

    @parameterized.named_parameters(
        ("lora_float32", "lora.rebuild", "float32", {"O": 35, "I": 130}),
        ("lora_rank_20_bfloat16", "lora.rebuild", "bfloat16", {"O": 70, "I": 66, "r": 20}),
        ("loha_float32", "loha.rebuild", "float32", {"O": 35, "I": 130}),
        ("loha_float16", "loha.rebuild", "float16", {"O": 70, "I": 66}),
        ("lokr_float32", "lokr.rebuild", "float32", {}),
        (
            "lokr_bfloat16_of_large_blocks",
            "lokr.rebuild",
            "bfloat16",
            {"O": 140, "I": 66, "factors": (2, 1)},
        ),
        ("lokr_of_products", "lokr.rebuild", "float32", {"low_rank": ("W1", "W2"), "r": 2}),
        ("lokr_of_wide_blocks", "lokr.rebuild", "float32", {"O": 15, "I": 140, "factors": (5, 2)}),
    )
    def test_value_and_gradients(self, name, dtype, sizes):
        arrays, dout = problem(name, dtype=dtype, **sizes)
        assert_right(name, arrays, dout, implementation="pallas_triton", **CASES[name])

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in KERNELS)
    def test_parts_that_reach_beyond_the_weight(self, name):
        sizes = {} if name.startswith("lokr") else {"O": 35, "I": 130}
        with few_programs(4):
            assert_right(name, *problem(name, **sizes), implementation="pallas_triton", **CASES[name])

    @parameterized.named_parameters(
        ("lora", "lora.rebuild", {"O": 70, "I": 140}),
        ("lora_rank_40", "lora.rebuild", {"O": 35, "I": 270, "r": 40}),
        ("loha", "loha.rebuild", {"O": 70, "I": 140}),
        ("loha_rank_20", "loha.rebuild", {"O": 70, "I": 140, "r": 20}),
        ("lokr", "lokr.rebuild", {"O": 70, "I": 140, "factors": (7, 4)}),
        ("oft", "oft.rebuild", {"O": 80, "I": 140, "n": 16}),
    )
    def test_tiles_of_large_weights(self, name, sizes):
        arrays, dout = problem(name, dtype="bfloat16", **sizes)
        options = {"side": "output"} if name == "oft.rebuild" else CASES[name]
        with mock.patch.object(config, "WIDE", 1):
            assert_right(name, arrays, dout, implementation="pallas_triton", **options)

    def test_lokr_of_many_tiles_of_W2(self):
        arrays, dout = problem("lokr.rebuild", O=410, I=250, factors=(2, 1))
        assert_right("lokr.rebuild", arrays, dout, implementation="pallas_triton", **CASES["lokr.rebuild"])

    @parameterized.parameters(
        ("float32", True, {"O": 35, "I": 66}), ("float32", False, {"O": 35, "I": 66}), ("bfloat16", False, {})
    )
    def test_dora(self, dtype, detach_norm, sizes):
        arrays, dout = problem("lora.rebuild", magnitude=True, dtype=dtype, **sizes)
        options = {"alpha": 2.0, "detach_norm": detach_norm, "implementation": "pallas_triton"}
        assert_right("lora.rebuild", arrays, dout, **options)

    @parameterized.parameters(
        ("output", False, "float32", {"O": 40, "I": 75, "n": 4}),
        ("input", False, "float32", {"O": 75, "I": 40, "n": 8}),
        ("output", True, "bfloat16", {"O": 80, "I": 21, "n": 16}),
        ("input", True, "float16", {"O": 30, "I": 66, "n": 2}),
        ("output", False, "float32", {"O": 64, "I": 21, "n": 64}),
    )
    def test_oft(self, side, neumann, dtype, sizes):
        arrays, dout = problem("oft.rebuild", side=side, dtype=dtype, **sizes)
        if sizes["n"] == 64:
            arrays["P"] = arrays["P"] / 4
        options = {"side": side, "neumann": neumann, "implementation": "pallas_triton"}
        assert_right("oft.rebuild", arrays, dout, **options)

    @parameterized.parameters(
        ("output", False, "bfloat16", {"T": 70, "n": 4, "O": 40}),
        ("input", True, "float32", {"T": 33, "n": 8, "I": 40}),
        ("input", False, "float16", {"T": 17, "n": 2, "base": False, "I": 10}),
    )
    def test_oft_bypass(self, side, neumann, dtype, sizes):
        arrays, dout = problem("oft.bypass", side=side, dtype=dtype, **sizes)
        options = {"side": side, "neumann": neumann, "implementation": "pallas_triton"}
        with few_programs(2):
            assert_right("oft.bypass", arrays, dout, **options)

    @parameterized.named_parameters(
        ("float32", "float32", {"T": 7}),
        ("W1_first", "bfloat16", {"T": 5, "factors": (2, 7), "O": 68}),
        ("of_products_without_base", "float16", {"T": 3, "base": False, "low_rank": ("W2",), "r": 2}),
        ("without_bias", "float32", {"T": 1, "bias": False}),
    )
    def test_lokr_bypass(self, dtype, sizes):
        with few_programs(2):
            assert_right(
                "lokr.bypass", *problem("lokr.bypass", dtype=dtype, **sizes), implementation="pallas", scale=0.7
            )

    @parameterized.named_parameters(
        ("lora_float32", "lora.bypass", "float32", {"T": 35, "I": 66}),
        ("lora_float16_without_bias", "lora.bypass", "float16", {"T": 5, "bias": False, "r": 20}),
        ("lora_without_base", "lora.bypass", "float32", {"base": False}),
        ("lora_float32_factors", "lora.bypass", "bfloat16", {"factor_dtype": "float32", "T": 129}),
        ("loha_float32", "loha.bypass", "float32", {}),
        ("loha_bfloat16", "loha.bypass", "bfloat16", {}),
        ("loha_float32_factors_without_base", "loha.bypass", "float16", {"factor_dtype": "float32", "base": False}),
    )
    def test_low_rank_bypass(self, name, dtype, sizes):
        arrays, dout = problem(name, dtype=dtype, **sizes)
        with few_programs(2):
            assert_right(name, arrays, dout, implementation="pallas_triton", **CASES[name])

    @parameterized.named_parameters(
        ("in_parts", "bfloat16", {"T": 33, "O": 520, "I": 600}),
        ("in_parts_that_reach_beyond", "float16", {"T": 77, "O": 600, "I": 520, "r": 20, "bias": False}),
    )
    def test_lora_of_few_tokens(self, dtype, sizes):
        arrays, dout = problem("lora.bypass", dtype=dtype, **sizes)
        assert_right("lora.bypass", arrays, dout, implementation="pallas_triton", **CASES["lora.bypass"])

        def result(x):
            return call("lora.bypass", x, implementation="pallas_triton", **CASES["lora.bypass"])

        with helpers.kernels_run("pallas"):
            (found,) = dormouse_jax.explain(result, arrays)
        self.assertEqual(found.kernels, ("adapter_few_tokens_contract", "adapter_few_tokens_finish"))
        self.assertEqual(found.config.few.split, 2)

    @parameterized.named_parameters(
        ("lora", "lora.bypass", "bfloat16", {}),
        ("lora_float16_without_bias", "lora.bypass", "float16", {"bias": False, "r": 70}),
        ("loha", "loha.bypass", "bfloat16", {"factor_dtype": "float32"}),
        ("loha_as_one_weight", "loha.bypass", "float16", {}),
        ("lokr", "lokr.bypass", "bfloat16", {"factors": (8, 8)}),
    )
    def test_products_on_hopper(self, name, dtype, sizes):
        size = (640, 384, 512) if helpers.on_gpu() else (128, 128, 72)
        arrays, dout = problem(name, dtype=dtype, **dict(zip(("T", "O", "I"), size, strict=True)), **sizes)
        assert_right(name, arrays, dout, implementation="pallas_mosaic", **CASES[name])

    def test_a_small_update_of_a_16_bit_layer_is_not_rounded_away(self):
        arrays, _ = problem("loha.bypass", dtype="bfloat16", factor_dtype="float32", bias=False)
        arrays["x"] = arrays["x"].astype(np.float32)
        arrays["B1"] = arrays["B1"] * np.float32(2.0**-10)
        with helpers.kernels_run("pallas"):
            both = (
                call("loha.bypass", x, alpha=1.0, implementation="pallas") for x in (arrays, dict(arrays, base=None))
            )
            with_base, update = both
        base = arrays["x"].astype(jnp.bfloat16).astype(np.float64) @ arrays["base"].astype(np.float64).T
        helpers.assert_close(np.asarray(with_base, np.float64) - base, update, rms=1e-2)

    def test_oft_far_from_the_identity(self):
        arrays, dout = problem("oft.rebuild", O=16, n=16)
        arrays["P"] = 9 * arrays["P"]
        assert_right("oft.rebuild", arrays, dout, side="output", bar=3e-6, implementation="pallas_triton")

    def test_parts_of_an_oft_that_reach_beyond_the_weight(self):
        arrays, dout = problem("oft.rebuild", O=40, I=150, n=4)
        with few_programs(4):
            assert_right("oft.rebuild", arrays, dout, side="output", implementation="pallas_triton")

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in KERNELS)
    def test_without_base_float32_factors_and_vmap(self, name):
        one, dout = problem(name, base=False)
        two, dout2 = problem(name, base=False, seed=1)

        def fn(arrays):
            return jax.vmap(lambda x: call(name, x, implementation="pallas_triton", **CASES[name]))(arrays)

        with helpers.kernels_run("pallas_triton"):
            out, vjp = jax.vjp(fn, {n: jnp.stack([one[n], two[n]]) for n in one})
            (grads,) = vjp(jnp.stack([dout, dout2]))
        wants = [adapter_oracle(name, x, dout=d, **CASES[name]) for x, d in ((one, dout), (two, dout2))]
        for n, x in ({"out": out} | {f"d{n}": x for n, x in grads.items()}).items():
            helpers.assert_close(x, np.stack([want[n] for want in wants]), rms=1e-6, name=n)

    def test_float32_factors_of_a_16_bit_base(self):
        arrays, dout = problem("loha.rebuild", dtype="bfloat16", factor_dtype="float32")
        assert_right("loha.rebuild", arrays, dout, implementation="pallas_triton", alpha=3.0)

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in KERNELS)
    def test_the_same_bits_again(self, name):
        arrays, dout = problem(name, dtype="bfloat16")
        options = CASES[name] | {"implementation": "pallas_triton"}
        first = value_and_grads(name, arrays, dout, **options)
        for _ in range(5 if helpers.on_gpu() else 1):
            helpers.assert_same_bits(value_and_grads(name, arrays, dout, **options), first)

    def test_explain_tells_the_kernels_or_why_there_are_none(self):
        with dormouse_jax.interpret_kernels():
            for name, kernels in (
                ("loha.rebuild", ["adapter_low_rank_forward", "adapter_low_rank_backward", "adapter_add_parts"]),
                ("lokr.rebuild", ["adapter_kronecker_forward", "adapter_kronecker_backward", "adapter_add_parts"]),
            ):
                arrays, dout = problem(name)
                fn = jax.grad(lambda x, name=name, dout=dout: jnp.vdot(call(name, x, **CASES[name]), dout))
                calls = dormouse_jax.explain(fn, arrays)
                self.assertEqual([k for c in calls for k in c.kernels], kernels)
                self.assertEqual({c.implementation for c in calls}, {"pallas_triton"})
            (found,) = dormouse_jax.explain(
                lambda x: call("oft.bypass", x, side="input"), {"x": ones(4, 6), "P": ones(2, 3, 3)}
            )
        reason = "the kernels take blocks of a power of two up to 64, and these are of 3"
        self.assertEqual(found.passed_over, (("pallas_triton", reason),))

    @parameterized.named_parameters(
        ("magnitude", "lora.bypass", {"magnitude": True}, "the kernels of activations take no magnitude"),
        ("tokens", "lokr.bypass", {"T": 0}, "the kernels take at least one token"),
        ("factors", "lokr.bypass", {"O": 130, "factors": (130, 3)}, "the kernels take factors of sizes up to"),
        ("oft", "oft.rebuild", {"n": 3}, "the kernels take blocks of a power of two up to 64, and these are of 3"),
        ("rank", "loha.rebuild", {"r": 129}, "the kernels take ranks up to 128, and this is 129"),
    )
    def test_what_they_do_not_serve_is_refused_by_name_and_else_computed_by_xla(self, name, sizes, message):
        arrays, _ = problem(name, **sizes)
        with helpers.kernels_run("pallas_triton"):
            with self.assertRaisesRegex(
                NotImplementedError, f"{name}: implementation='pallas' cannot serve this call: {message}"
            ):
                call(name, arrays, implementation="pallas", **CASES[name])
            got = call(name, arrays, **CASES[name])
        np.testing.assert_array_equal(got, call(name, arrays, implementation="xla", **CASES[name]))

    def test_a_gpu_takes_none_unasked_before_they_were_proven_there(self):
        x = call_module.arrays("lokr.rebuild", W1=ones(2, 2), W2=ones(2, 2), base=None)
        device = dispatch.Device("gpu", "NVIDIA H200", "9.0")
        with mock.patch.dict(dispatch.UNPROVEN, {"adapters": "the adapter kernels"}):
            with self.assertWarnsRegex(RuntimeWarning, "lokr.rebuild: taking 'xla', not 'pallas_triton': the adapter"):
                chosen, *_ = call_module._choose("lokr.rebuild", x, "float32", "fp32", device, False, None)
            self.assertEqual(chosen, "xla")
            dispatch._warned.clear()
            with self.assertWarnsRegex(RuntimeWarning, "asked for by name: the adapter kernels were not held"):
                chosen, *_ = call_module._choose("lokr.rebuild", x, "float32", "fp32", device, False, "pallas")
            self.assertEqual(chosen, "pallas_triton")

    def test_few_tokens_have_kernels_of_their_own_where_those_were_proven(self):
        x = call_module.arrays("lora.bypass", x=ones(77, 520), A=ones(4, 520), B=ones(600, 4), base=ones(600, 520))
        x = {name: array.astype(jnp.bfloat16) for name, array in x.items()}
        device = dispatch.Device("gpu", "NVIDIA H200", "9.0", 132)
        for unproven, want in (({}, True), ({"adapters_few_tokens": "few"}, False)):
            with mock.patch.dict(dispatch.UNPROVEN, unproven, clear=True):
                found = call_module._choose("lora.bypass", x, "bfloat16", "16bit", device, False, None)
            self.assertEqual((found[0], found[1].few is not None), ("pallas_triton", want))
        x["x"] = jnp.ones((129, 520), jnp.bfloat16)
        self.assertIsNone(call_module._choose("lora.bypass", x, "bfloat16", "16bit", device, False, None)[1].few)

    def test_tiles_of_the_hopper_kernel_fit_with_a_float32_result(self):
        sizes = {"x": (4096, 5120), "base": (5120, 5120)} | {"A1": (16, 5120), "A2": (16, 5120)}
        sizes |= {"B1": (5120, 16), "B2": (5120, 16)}
        x = dict(call_module.arrays("loha.bypass", **{name: ones(1, 1) for name in sizes}))
        x |= {name: jax.ShapeDtypeStruct(size, jnp.float16) for name, size in sizes.items()}
        device = dispatch.Device("gpu", "NVIDIA H200", "9.0", 132)
        chosen, tiles, *_ = call_module._choose("loha.bypass", x, "float16", "16bit", device, False, None)
        self.assertEqual(chosen, "pallas_mosaic")
        # The gradient of the weight, of which a sum in float16 could overflow.
        options = {"precision": "16bit", "out_dtype": jnp.dtype(jnp.float32), "config": tiles.weight}
        fn = functools.partial(gemm.matmul, bias=None, transpose_a=True, transpose_b=False, interpret=False, **options)
        self.assertEqual(jax.eval_shape(fn, x["x"], x["x"]).shape, (5120, 5120))

    def test_by_name_without_a_gpu(self):
        if helpers.on_gpu():
            self.skipTest("there is a GPU")
        arrays, _ = problem("lokr.rebuild")
        with self.assertRaisesRegex(NotImplementedError, "'pallas_triton' cannot serve this call: Pallas"):
            call("lokr.rebuild", arrays, scale=1.0, implementation="pallas_triton")


if __name__ == "__main__":
    absltest.main()
