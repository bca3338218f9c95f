"""Calls of `kda` and `gdn2` that cannot be served: what is raised, and what it says."""

import dataclasses
import functools
import os
import re
import unittest.mock
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import dormouse_jax
from dormouse_jax import dispatch
from tests import helpers
from tests.helpers import OPERATORS, Shape

SHAPE = Shape(T=8, K=6, V=5, B=2, H=2, HV=4)
FLOAT32 = {"K": 64, "V": 64, "dtype": jnp.float32}


def call(operator, replace=None, **options):
    """Calls the operator on small valid inputs with some of them replaced."""
    inputs = helpers.problem(operator, SHAPE).inputs | (replace or {})
    return getattr(dormouse_jax, operator)(**inputs, **options)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# (name, inputs replaced, options, exception, message). Every message starts with the operator's name.
COMMON = [
    (
        "g_without_K",
        {"g": ones(2, 8, 4)},
        {},
        ValueError,
        "g must have shape [B, T, HV, K] = [2, 8, 4, 6], got [2, 8, 4]",
    ),
    (
        "q_and_k_differ",
        {"k": ones(2, 8, 2, 7)},
        {},
        ValueError,
        "k must have shape [B, T, H, K] = [2, 8, 2, 6], got [2, 8, 2, 7]",
    ),
    ("q_of_three_axes", {"q": ones(2, 8, 6)}, {}, ValueError, "q must have shape [B, T, H, K], got [2, 8, 6]"),
    (
        "v_of_other_length",
        {"v": ones(2, 9, 4, 5)},
        {},
        ValueError,
        "v must have shape [B, T, HV, V] = [2, 8, HV, V], got [2, 9, 4, 5]",
    ),
    (
        "HV_not_a_multiple_of_H",
        {"v": ones(2, 8, 3, 5)},
        {},
        ValueError,
        "HV must be a multiple of H, got v with HV = 3 and q with H = 2",
    ),
    (
        "float16_with_bfloat16",
        {"q": ones(2, 8, 2, 6, dtype=np.float16), "k": ones(2, 8, 2, 6, dtype=jnp.bfloat16)},
        {},
        TypeError,
        "k must have q's dtype float16, got bfloat16",
    ),
    (
        "float32_v",
        {n: ones(2, 8, 2, 6, dtype=np.float16) for n in "qk"},
        {},
        TypeError,
        "v must have q's dtype float16, got float32",
    ),
    (
        "integer_q",
        {"q": ones(2, 8, 2, 6, dtype=np.int32)},
        {},
        TypeError,
        "q must be float32, bfloat16 or float16, got int32",
    ),
    (
        "integer_g",
        {"g": ones(2, 8, 4, 6, dtype=np.int32)},
        {},
        TypeError,
        "g must be float32, bfloat16 or float16, got int32",
    ),
    (
        "complex_v",
        {"v": ones(2, 8, 4, 5, dtype=np.complex64)},
        {},
        TypeError,
        "v must have q's dtype float32, got complex64",
    ),
    ("a_list", {"q": [1.0]}, {}, TypeError, "q must be an array, got list"),
    ("none", {"k": None}, {}, TypeError, "k must be an array, got NoneType"),
    ("strings", {"v": np.full((2, 8, 4, 5), "x")}, {}, TypeError, "v must be an array that JAX can take, got ndarray"),
    (
        "K_of_257",
        {"q": ones(2, 8, 2, 257), "k": ones(2, 8, 2, 257), "g": ones(2, 8, 4, 257)},
        {},
        ValueError,
        "K, the last axis of q, must be from 1 to 256, got 257",
    ),
    ("V_of_257", {"v": ones(2, 8, 4, 257)}, {}, ValueError, "V, the last axis of v, must be from 1 to 256, got 257"),
    ("V_of_0", {"v": ones(2, 8, 4, 0)}, {}, ValueError, "V, the last axis of v, must be from 1 to 256, got 0"),
    ("no_heads", {"q": ones(2, 8, 0, 6), "k": ones(2, 8, 0, 6)}, {}, ValueError, "HV must be a multiple of H"),
    (
        "no_tokens",
        {"q": ones(2, 0, 2, 6), "k": ones(2, 0, 2, 6), "v": ones(2, 0, 4, 5), "g": ones(2, 0, 4, 6)},
        {},
        ValueError,
        "T must be at least 1, got q of shape [2, 0, 2, 6]",
    ),
    (
        "state_transposed",
        {},
        {"initial_state": ones(2, 4, 5, 6)},
        ValueError,
        "initial_state must have shape [B, HV, K, V] = [2, 4, 6, 5], got [2, 4, 5, 6]",
    ),
    (
        "state_not_transposed",
        {},
        {"initial_state": ones(2, 4, 6, 5), "state_v_first": True},
        ValueError,
        "initial_state must have shape [B, HV, V, K] = [2, 4, 5, 6], got [2, 4, 6, 5]",
    ),
    (
        "integer_state",
        {},
        {"initial_state": ones(2, 4, 6, 5, dtype=np.int32)},
        TypeError,
        "initial_state must be float32, bfloat16 or float16, got int32",
    ),
    (
        "unknown_implementation",
        {},
        {"implementation": "nonsense"},
        ValueError,
        "implementation must be one of None, 'pallas', 'pallas_triton', 'pallas_mosaic', 'xla', 'recurrent', "
        "got 'nonsense'",
    ),
    (
        "unknown_residuals",
        {},
        {"residuals": "all"},
        ValueError,
        "residuals must be one of 'recompute', 'save', got 'all'",
    ),
    (
        "unknown_precision",
        {},
        {"precision": "high"},
        ValueError,
        "precision must be one of None, 'fp32', 'tf32', '16bit', got 'high'",
    ),
    (
        "precision_of_other_dtype",
        {},
        {"precision": "16bit"},
        ValueError,
        "precision must be 'fp32' or 'tf32' for inputs of dtype float32, got '16bit'",
    ),
    ("chunk_size_of_48", {}, {"chunk_size": 48}, ValueError, "chunk_size must be one of None, 16, 32, 64, 128, got 48"),
    (
        "chunk_size_of_64.0",
        {},
        {"chunk_size": 64.0},
        ValueError,
        "chunk_size must be one of None, 16, 32, 64, 128, got 64.0",
    ),
    ("scale_array", {}, {"scale": ones(3)}, TypeError, "scale must be a Python number, got ndarray"),
    ("scale_word", {}, {"scale": "half"}, TypeError, "scale must be a Python number, got str"),
    (
        "mosaic",
        {},
        {"implementation": "pallas_mosaic"},
        NotImplementedError,
        "implementation='pallas_mosaic' cannot serve this call: ",
    ),
    (
        "gate_without_A_log",
        {},
        {"use_gate_in_kernel": True},
        ValueError,
        "A_log must be given with use_gate_in_kernel=True where there is no lower_bound, got None",
    ),
    (
        "A_log_without_gate",
        {"A_log": ones(4)},
        {},
        ValueError,
        "A_log must be None without use_gate_in_kernel=True, got an array of shape [4]",
    ),
    (
        "dt_bias_without_gate",
        {"dt_bias": ones(24)},
        {},
        ValueError,
        "dt_bias must be None without use_gate_in_kernel=True, got an array of shape [24]",
    ),
    (
        "lower_bound_without_gate",
        {},
        {"lower_bound": -5.0},
        ValueError,
        "lower_bound must be None without use_gate_in_kernel=True, got -5.0",
    ),
    (
        "A_log_of_the_query_heads",
        {"A_log": ones(2)},
        {"use_gate_in_kernel": True},
        ValueError,
        "A_log must have shape [HV] = [4], got [2]",
    ),
    (
        "dt_bias_of_two_axes",
        {"A_log": ones(4), "dt_bias": ones(4, 6)},
        {"use_gate_in_kernel": True},
        ValueError,
        "dt_bias must have shape [HV * K] = [24], got [4, 6]",
    ),
    (
        "integer_A_log",
        {"A_log": ones(4, dtype=np.int32)},
        {"use_gate_in_kernel": True},
        TypeError,
        "A_log must be float32, bfloat16 or float16, got int32",
    ),
    (
        "lower_bound_above_0",
        {},
        {"use_gate_in_kernel": True, "lower_bound": 5.0},
        ValueError,
        "lower_bound must be a finite number below 0, got 5.0",
    ),
    (
        "lower_bound_of_0",
        {"A_log": ones(4)},
        {"use_gate_in_kernel": True, "lower_bound": 0},
        ValueError,
        "lower_bound must be a finite number below 0, got 0.0",
    ),
    (
        "infinite_lower_bound",
        {},
        {"use_gate_in_kernel": True, "lower_bound": float("-inf")},
        ValueError,
        "lower_bound must be a finite number below 0, got -inf",
    ),
    (
        "lower_bound_array",
        {},
        {"use_gate_in_kernel": True, "lower_bound": ones(3)},
        TypeError,
        "lower_bound must be a Python number, got ndarray",
    ),
    (
        "cu_seqlens_with_a_batch",
        {},
        {"cu_seqlens": np.array([0, 8])},
        ValueError,
        "B must be 1 with cu_seqlens, got q with B = 2",
    ),
    (
        "cu_seqlens_of_one_number",
        {},
        {"cu_seqlens": np.array([0])},
        ValueError,
        "cu_seqlens must have shape [N + 1] with N >= 1, got [1]",
    ),
    (
        "cu_seqlens_of_floats",
        {},
        {"cu_seqlens": np.array([0.0, 8.0], np.float32)},
        TypeError,
        "cu_seqlens must be int32 or int64, got float32",
    ),
    ("cu_seqlens_list", {}, {"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be an array, got list"),
    (
        "segment_ids_of_other_length",
        {},
        {"segment_ids": np.zeros((2, 7), np.int32)},
        ValueError,
        "segment_ids must have shape [B, T] = [2, 8], got [2, 7]",
    ),
    (
        "segment_ids_of_floats",
        {},
        {"segment_ids": ones(2, 8)},
        TypeError,
        "segment_ids must be int32 or int64, got float32",
    ),
    (
        "both_kinds_of_packing",
        {},
        {"segment_ids": np.zeros((2, 8), np.int32), "cu_seqlens": np.array([0, 8])},
        ValueError,
        "segment_ids must be None with cu_seqlens, which says as much, got both",
    ),
]

OF_KDA = [
    (
        "beta_with_channels",
        {"beta": ones(2, 8, 4, 6)},
        {},
        ValueError,
        "beta must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 4, 6]",
    ),
    (
        "boolean_beta",
        {"beta": ones(2, 8, 4, dtype=bool)},
        {},
        TypeError,
        "beta must be float32, bfloat16 or float16, got bool",
    ),
    (
        "neg_eigval_of_a_given_beta",
        {},
        {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval must be False without use_beta_sigmoid_in_kernel=True, got True",
    ),
]

OF_GDN2 = [
    (
        "erase_of_one_gate",
        {"erase": ones(2, 8, 4)},
        {},
        ValueError,
        "erase must have shape [B, T, HV, K] = [2, 8, 4, 6], got [2, 8, 4]",
    ),
    (
        "write_over_keys",
        {"write": ones(2, 8, 4, 6)},
        {},
        ValueError,
        "write must have shape [B, T, HV, V] = [2, 8, 4, 5], got [2, 8, 4, 6]",
    ),
    (
        "beta_sigmoid",
        {},
        {"use_beta_sigmoid_in_kernel": True},
        TypeError,
        "use_beta_sigmoid_in_kernel is an option of beta",
    ),
    ("neg_eigval", {}, {"allow_neg_eigval": True}, TypeError, "allow_neg_eigval is an option of beta"),
]

CASES = [
    (f"{operator}_{name}", operator, *case)
    for operator, own in (("kda", OF_KDA), ("gdn2", OF_GDN2))
    for name, *case in COMMON + own
]


class ErrorsTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_message(self, operator, inputs, options, exception, message):
        with self.assertRaises(exception) as raised:
            call(operator, inputs, **options)
        self.assertStartsWith(str(raised.exception), f"{operator}: {message}")
        self.assertIs(type(raised.exception), exception)

    @parameterized.named_parameters(
        *(case for case in CASES if case[4] is not NotImplementedError and "list" not in case[0])
    )
    def test_message_under_jit(self, operator, inputs, options, exception, message):
        arrays = {n: x for n, x in inputs.items() if isinstance(x, np.ndarray) and x.dtype.kind not in "US"}
        if len(arrays) < len(inputs):
            self.skipTest("not an array that can be traced")
        with self.assertRaisesRegex(exception, re.escape(f"{operator}: {message}")):
            jax.jit(functools.partial(call, operator, **options))(arrays)

    @parameterized.named_parameters(
        ("starting_late", [1, 8], "cu_seqlens must start with 0, got 1"),
        ("decreasing", [0, 6, 5, 8], "cu_seqlens must not decrease, got 5 after 6 at 2"),
        ("ending_early", [0, 3, 7], "cu_seqlens must end with T = 8, got 7"),
        ("ending_late", [0, 3, 9], "cu_seqlens must end with T = 8, got 9"),
        ("of_two_states", [0, 3, 8], "initial_state must have shape [N, HV, K, V] = [2, 4, 6, 5], got [1, 4, 6, 5]"),
    )
    def test_packings_that_are_none(self, cu_seqlens, message):
        p = helpers.problem("kda", dataclasses.replace(SHAPE, B=1))
        options = {"initial_state": p.initial_state} if "state" in message else {}
        for array in (np.array(cu_seqlens), jnp.array(cu_seqlens)):
            with self.assertRaisesRegex(ValueError, re.escape(f"kda: {message}")):
                dormouse_jax.kda(**p.inputs, cu_seqlens=array, **options)

    @parameterized.parameters("recurrent", "xla")
    def test_a_traced_packing_that_is_none_is_not_checked_and_harms_nothing(self, implementation):
        p = helpers.problem("kda", dataclasses.replace(SHAPE, B=1))
        run = jax.jit(lambda x, cu_seqlens: dormouse_jax.kda(**x, cu_seqlens=cu_seqlens, implementation=implementation))
        want, _ = run(p.inputs, jnp.array([0, 3, 8]))
        for bad in ([0, 3, 900], [-5, 3, 8], [0, 3, 5], [2, 3, 8]):
            o, _ = run(p.inputs, jnp.array(bad))
            self.assertEqual(o.shape, want.shape)

    @parameterized.parameters(*OPERATORS)
    def test_16_bit_inputs_take_no_other_precision(self, operator):
        p = helpers.problem(operator, SHAPE, dtype=jnp.bfloat16)
        for precision in ("fp32", "tf32"):
            with self.assertRaisesRegex(
                ValueError, f"precision must be '16bit' for inputs of dtype bfloat16, got '{precision}'"
            ):
                helpers.call(p, "xla", precision=precision)

    @parameterized.parameters(*OPERATORS)
    def test_float64_is_for_recurrent_alone(self, operator):
        with jax.enable_x64(True):
            p = helpers.problem(operator, SHAPE, dtype=np.float64, gate_dtype=np.float64)
            with self.assertRaisesRegex(TypeError, "q must be float32, bfloat16 or float16, got float64"):
                helpers.call(p, None)
            for implementation in ("xla", "pallas", "pallas_triton"):
                with self.assertRaisesRegex(
                    NotImplementedError, f"'{implementation}' cannot serve this call: only 'recurrent'"
                ):
                    helpers.call(p, implementation)
            with self.assertRaisesRegex(ValueError, "precision must be None for inputs of dtype float64, got 'fp32'"):
                helpers.call(p, "recurrent", precision="fp32")
            mixed = p.inputs | {"g": p.inputs["g"].astype(np.float32)}
            self.assertEqual(getattr(dormouse_jax, operator)(**mixed, implementation="recurrent")[0].dtype, jnp.float64)
            with self.assertRaisesRegex(TypeError, "g must be float32, bfloat16 or float16, got float64"):
                call(operator, {"g": p.inputs["g"]})

    @parameterized.parameters(*OPERATORS)
    def test_a_traced_scale_is_refused(self, operator):
        with self.assertRaisesRegex(TypeError, f"{operator}: scale must be a Python number"):
            jax.jit(lambda scale: call(operator, scale=scale)[0])(0.5)

    @parameterized.parameters(*OPERATORS)
    def test_false_and_none_are_no_use_of_an_option(self, operator):
        want, _ = call(operator)
        got, _ = call(
            operator,
            use_qk_l2norm_in_kernel=False,
            use_gate_in_kernel=False,
            use_beta_sigmoid_in_kernel=False,
            allow_neg_eigval=False,
            lower_bound=None,
            A_log=None,
            dt_bias=None,
            cu_seqlens=None,
            segment_ids=None,
            safe_gate=True,
        )
        np.testing.assert_array_equal(got, want)


class DispatchTest(parameterized.TestCase):
    """Which implementation is taken when none, or one that cannot serve the call, is asked for."""

    def implementation(self, operator="kda", **options):
        (found,) = dormouse_jax.explain(functools.partial(call, operator), **options)
        return found

    def test_kernels_asked_for_on_a_cpu_say_how_to_run_them(self):
        if helpers.on_gpu():
            self.skipTest("there is a GPU")
        for implementation in ("pallas", "pallas_triton"):
            with self.assertRaisesRegex(
                NotImplementedError,
                f"kda: implementation='{implementation}' cannot serve this call: .*interpret_kernels",
            ):
                call("kda", implementation=implementation)

    def test_a_cpu_takes_xla_without_a_warning(self):
        with jax.default_device(jax.devices("cpu")[0]), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = self.implementation()
        self.assertEqual(found.implementation, "xla")
        self.assertEqual(found.passed_over[0][0], "pallas_triton")

    def test_arrays_put_on_a_cpu_take_xla(self):
        p = helpers.problem("kda", SHAPE)
        inputs = jax.device_put(p.inputs, jax.devices("cpu")[0])
        (found,) = dormouse_jax.explain(lambda: dormouse_jax.kda(**inputs))
        self.assertEqual(found.implementation, "xla")

    def test_interpret_kernels_takes_the_kernels_and_ends(self):
        with dormouse_jax.interpret_kernels():
            with dormouse_jax.interpret_kernels():
                self.assertTrue(self.implementation().interpret)
            found = self.implementation()
        self.assertEqual(found.implementation, "pallas_triton")
        self.assertTrue(found.interpret)
        self.assertFalse(self.implementation().interpret)

    @parameterized.parameters(("1", True), ("0", False), ("", False))
    def test_the_environment_variable(self, value, interpreted):
        with unittest.mock.patch.dict(os.environ, DORMOUSE_INTERPRET=value):
            self.assertEqual(self.implementation().interpret, interpreted)

    def test_a_gpu_that_the_kernels_cannot_serve_takes_xla_and_warns_once(self):
        gpu = dispatch.Device("gpu", "AMD Instinct MI300X")
        with unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu):
            with self.assertWarnsRegex(
                RuntimeWarning, "kda: taking the slower implementation 'xla', .* NVIDIA GPU"
            ) as caught:
                found = self.implementation()
            self.assertEqual(found.implementation, "xla")
            self.assertIn("NVIDIA", dict(found.passed_over)["pallas_triton"])
            self.assertEqual(caught.filename, __file__)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                self.implementation()
            with self.assertRaisesRegex(NotImplementedError, "NVIDIA"):
                call("kda", implementation="pallas")

    def test_an_old_nvidia_gpu_says_so(self):
        gpu = dispatch.Device("gpu", "Tesla T4", "7.5")
        with (
            unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu),
            self.assertRaisesRegex(NotImplementedError, "need compute capability 8.0, and Tesla T4 has 7.5"),
        ):
            call("kda", implementation="pallas")

    def test_an_nvidia_gpu_takes_the_kernels(self):
        gpu = dispatch.Device("gpu", "NVIDIA H200", "9.0")
        with unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu):
            found = self.implementation()
        self.assertEqual((found.implementation, found.interpret), ("pallas_triton", False))

    @parameterized.named_parameters(
        ("hopper", {}, ("mosaic", "mosaic"), None),
        ("another_card", {"capability": "8.0"}, ("triton", "triton"), "need compute capability 9.0"),
        ("odd_tokens", {"T": 65}, ("triton", "triton"), "tiles of 8 tokens"),
        ("odd_values", {"V": 96}, ("triton", "triton"), "V of 64, 128 or 256"),
        ("odd_keys", {"K": 100}, ("mosaic", "triton"), "K of 64 or 128"),
        ("grouped_heads", {"H": 8}, ("mosaic", "triton"), "a value head a key head"),
        ("float16", {"dtype": jnp.float16}, ("mosaic", "triton"), "multiply bfloat16"),
        ("general_rule", {"operator": "gdn2"}, ("mosaic", "triton"), "are for KDA"),
        ("raw", {"options": {"use_qk_l2norm_in_kernel": True}}, ("mosaic", "mosaic"), None),
        ("packed", {"options": {"cu_seqlens": np.array([0, 9, 64])}}, ("mosaic", "mosaic"), None),
        (
            "packed_odd_tokens",
            {"T": 65, "options": {"cu_seqlens": np.array([0, 9, 65])}},
            ("triton", "triton"),
            "tiles of 8 tokens",
        ),
        ("few_heads", {"H": 4, "HV": 4, "T": 8192}, ("triton", "mosaic"), None),
        ("float32", FLOAT32, ("mosaic", "mosaic"), None),
        ("float32_of_another_dim", FLOAT32 | {"K": 40}, ("mosaic", "triton"), "K and V of 64, .* got float32, K=40"),
        ("float32_grouped_heads", FLOAT32 | {"H": 8}, ("mosaic", "triton"), "chunks of 16 and more value heads"),
        ("float32_odd_tokens", FLOAT32 | {"T": 65}, ("triton", "triton"), "tiles of 8 tokens"),
        ("float32_chunk", FLOAT32 | {"options": {"chunk_size": 32}}, ("mosaic", "triton"), "chunks of 32"),
        (
            "float32_raw",
            FLOAT32 | {"options": {"use_qk_l2norm_in_kernel": True}},
            ("mosaic", "triton"),
            "float32-accurate products for raw inputs",
        ),
        (
            "float32_packed",
            FLOAT32 | {"options": {"cu_seqlens": np.array([0, 9, 64])}},
            ("mosaic", "triton"),
            "float32-accurate products for packed sequences",
        ),
        (
            "float32_segments",
            FLOAT32 | {"options": {"segment_ids": np.arange(64)[None] // 9}},
            ("mosaic", "mosaic"),
            None,
        ),
        ("tf32", FLOAT32 | {"options": {"precision": "tf32"}}, ("triton", "triton"), "no faster here"),
    )
    def test_the_hopper_kernels_go_by_card_and_call(self, case, expected, reason):
        case = {"capability": "9.0", "T": 64, "K": 128, "V": 128, "H": 16, "HV": 16, "dtype": jnp.bfloat16} | case
        gpu = dispatch.Device("gpu", "NVIDIA card", case.pop("capability"))
        operator, dtype, options = case.pop("operator", "kda"), case.pop("dtype"), case.pop("options", {})
        inputs = helpers.problem(operator, helpers.Shape(**case), dtype=dtype, state=False).inputs
        call = functools.partial(getattr(dormouse_jax, operator), **inputs, **options)
        with unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu):
            (found,) = dormouse_jax.explain(call)
            (named,) = dormouse_jax.explain(functools.partial(call, implementation="pallas_triton"))
        self.assertEqual((found.config.serial, found.config.gradients), expected)
        if dtype == jnp.float32:
            self.assertEqual(found.config.prepare, found.config.gradients)
        self.assertEqual(found.implementation, "pallas_mosaic" if "mosaic" in expected else "pallas_triton")
        self.assertRegex(dict(found.passed_over).get("pallas_mosaic", ""), reason or "^$")
        self.assertEqual((named.implementation, named.config), ("pallas_triton", named.config.on_triton()))

    @parameterized.named_parameters(
        ("rtx_4090", "NVIDIA GeForce RTX 4090", "8.9", 101376),
        ("rtx_5090_in_a_mesh", "NVIDIA GeForce RTX 5090", None, 101376),
        ("a100", "NVIDIA A100-SXM4-80GB", "8.0", 166912),
        ("a100_in_a_mesh", "NVIDIA A100-SXM4-80GB", None, 166912),
        ("h200_in_a_mesh", "NVIDIA H200", None, 232448),
        ("b200", "NVIDIA B200", "10.0", 232448),
    )
    def test_a_chunk_that_needs_more_shared_memory_than_a_card_has_is_refused(self, kind, capability, shared):
        gpu = dispatch.Device("gpu", kind, capability)
        self.assertEqual(gpu.block_shared, shared)
        p = helpers.problem("kda", helpers.Shape(T=64, K=256, V=256), state=False)

        def find(**options):
            return dormouse_jax.explain(lambda: dormouse_jax.kda(**p.inputs, **options))[0]

        with (
            unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            self.assertEqual(find().implementation, "pallas_triton")
            self.assertEqual(find(chunk_size=16).implementation, "pallas_triton")
            large = find(chunk_size=32)
            if shared >= 154624:
                self.assertEqual(large.implementation, "pallas_triton")
                return
            self.assertEqual(large.implementation, "xla")
            self.assertIn("takes up to 154624 bytes of shared memory", dict(large.passed_over)["pallas_triton"])
            with self.assertRaisesRegex(NotImplementedError, f"block can have 101376 on {kind}"):
                find(chunk_size=32, implementation="pallas")

    @parameterized.named_parameters(
        ("starts", "kda", {}, "mosaic"),
        ("raw_too", "kda", {"use_qk_l2norm_in_kernel": True}, "mosaic"),
        ("the_general_rule", "gdn2", {}, "triton"),
    )
    def test_segments_are_gates_where_hopper_kernels_serve_the_rest(self, operator, options, gradients):
        gpu = dispatch.Device("gpu", "NVIDIA H200", "9.0")
        p = helpers.problem(operator, helpers.Shape(T=64, K=128, V=128, H=16, HV=16), dtype=jnp.bfloat16)
        ids = np.arange(64)[None] // 24
        with unittest.mock.patch("dormouse_jax.kda.device_of", return_value=gpu):
            run = functools.partial(getattr(dormouse_jax, operator), **p.inputs, segment_ids=ids, **options)
            (found,) = dormouse_jax.explain(run)
        self.assertEqual((found.config.serial, found.config.gradients), ("mosaic", gradients))

    def test_a_reason_of_the_kernels_is_passed_on(self):
        with dormouse_jax.interpret_kernels():
            with self.assertRaisesRegex(
                NotImplementedError, "'pallas' cannot serve this call: .*chunk_size must be 16 or 32"
            ):
                call("kda", implementation="pallas", chunk_size=128)
            with self.assertWarnsRegex(RuntimeWarning, "chunk_size must be 16 or 32"):
                self.assertEqual(self.implementation(chunk_size=128).implementation, "xla")

    def test_the_mesh_in_use_names_the_device(self):
        device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh):
            self.assertEqual(dispatch.device_of(), dispatch.Device("gpu", "NVIDIA H200", cores=132))


if __name__ == "__main__":
    absltest.main()
