"""`kda_step`: one token against the float64 oracle, many tokens against `kda`, and the state updated in place."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import dormouse_jax
from tests import helpers
from tests.helpers import IMPLEMENTATIONS, Shape
from tests.test_kda_lowering import MESH

SHAPES = {
    "odd_sizes_and_grouped_heads": Shape(T=1, B=2, H=1, HV=2, K=20, V=37),
    "one_channel": Shape(T=1, B=3, H=2, HV=2, K=1, V=1),
    "of_128": Shape(T=1, B=1, H=2, HV=4, K=128, V=128),
    "of_256": Shape(T=1, B=1, H=1, HV=1, K=256, V=256),
}
STANDARD = SHAPES["odd_sizes_and_grouped_heads"]


def step(p, implementation, t=0, state=None, **options):
    """(o, state) of token t of a problem."""
    inputs = {name: x[:, t] for name, x in p.inputs.items()}
    state = p.initial_state if state is None else state
    with helpers.kernels_run(implementation or ""):
        return dormouse_jax.kda_step(**inputs, state=state, implementation=implementation, **options)


def value_and_grads(p, implementation, **options):
    """As `helpers.value_and_grads`, of a problem of one token."""

    def fn(inputs, state):
        return dormouse_jax.kda_step(**inputs, state=state, implementation=implementation, **options)

    with helpers.kernels_run(implementation):
        (o, state), pull = jax.vjp(fn, {n: jnp.asarray(x[:, 0]) for n, x in p.inputs.items()}, p.initial_state)
        inputs, dstate = pull((jnp.asarray(p.do[:, 0]), jnp.asarray(p.dfinal_state)))
    found = {"o": o} | {f"d{name}": x for name, x in inputs.items()}
    return {name: x[:, None] for name, x in found.items()} | {"final_state": state, "dinitial_state": dstate}


class AccuracyTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{shape}_{dtype}_{implementation}", shape, dtype, implementation)
        for shape, dtype, implementation in itertools.product(
            SHAPES, ("float32", "bfloat16", "float16"), IMPLEMENTATIONS
        )
        if helpers.on_gpu()
        or (dtype, implementation) == ("bfloat16", "pallas_triton")
        and shape == "odd_sizes_and_grouped_heads"
        or dtype == "float32"
        and shape != "of_256"
    )
    def test_value_and_gradients(self, shape, dtype, implementation):
        p = helpers.problem("kda", SHAPES[shape], dtype=jnp.dtype(dtype), seed=len(shape))
        got = value_and_grads(p, implementation, scale=0.7)
        helpers.assert_all_close(got, helpers.oracle(p, scale=0.7), precision="fp32" if dtype == "float32" else "16bit")
        expected = {"o": dtype, "final_state": "float32", "dinitial_state": "float32"}
        expected |= {f"d{name}": str(x.dtype) for name, x in p.inputs.items()}
        self.assertEqual({name: str(x.dtype) for name, x in got.items()}, expected)

    @parameterized.product(implementation=("xla", "pallas_triton"), gate=(-np.inf, 0.0))
    def test_gates(self, implementation, gate):
        p = helpers.problem("kda", STANDARD)
        g = np.array(p.inputs["g"])
        g[..., ::2] = gate
        p = p.replace(g=g)
        helpers.assert_all_close(value_and_grads(p, implementation), helpers.oracle(p))

    def test_in_float64(self):
        with jax.enable_x64(True):
            p = helpers.problem("kda", STANDARD, dtype=np.float64, gate_dtype=np.float64)
            helpers.assert_all_close(value_and_grads(p, "recurrent"), helpers.oracle(p), precision="fp64")

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_16_bit_states_come_back_in_float32(self, implementation):
        p = helpers.problem("kda", STANDARD)
        rounded = jnp.asarray(p.initial_state, jnp.bfloat16)
        o, state = step(p, implementation, state=rounded)
        want = helpers.oracle(p.replace(initial_state=rounded))
        self.assertEqual((o.dtype, state.dtype), (jnp.float32, jnp.float32))
        helpers.assert_close(state, want["final_state"], rms=2e-6)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_states_with_the_value_axis_first(self, implementation):
        p = helpers.problem("kda", STANDARD)
        o, state = step(p, implementation)
        turned_o, turned = step(p, implementation, state=np.swapaxes(p.initial_state, -1, -2), state_v_first=True)
        helpers.assert_same_bits({"o": turned_o, "state": jnp.swapaxes(turned, -1, -2)}, {"o": o, "state": state})

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_an_empty_batch(self, implementation):
        p = helpers.problem("kda", STANDARD)
        p = p.replace(**{n: x[:0] for n, x in p.inputs.items()}, initial_state=p.initial_state[:0])
        o, state = step(p, implementation)
        self.assertEqual((o.shape, state.shape), ((0, 2, 37), (0, 2, 20, 37)))


RAW = {
    "gate": {"use_gate_in_kernel": True},
    "bounded_gate": {"use_gate_in_kernel": True, "lower_bound": -5.0},
    "bounded_gate_without_rate_or_bias": {"use_gate_in_kernel": True, "lower_bound": -5.0},
    "beta": {"use_beta_sigmoid_in_kernel": True},
    "beta_to_2": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "norm": {"use_qk_l2norm_in_kernel": True},
    "all": {
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "use_qk_l2norm_in_kernel": True,
    },
}


class RawInputTest(parameterized.TestCase):
    """Raw gates, beta, queries and keys, against the definitions in float64."""

    @parameterized.named_parameters(
        (f"{case}_{implementation}", case, implementation)
        for case, implementation in itertools.product(RAW, ("xla", "pallas_triton"))
    )
    def test_value_and_gradients(self, case, implementation):
        p, rng, options = helpers.problem("kda", STANDARD), np.random.default_rng(7), RAW[case]
        raw = p.replace(q=3 * p.inputs["q"], k=5 * p.inputs["k"]) if "norm" in case or case == "all" else p
        if case != "norm":
            raw = raw.replace(beta=rng.normal(size=p.inputs["beta"].shape))
        inputs = {name: x[:, 0] for name, x in raw.inputs.items()} | {"state": p.initial_state}
        if "gate" in case or case == "all":
            inputs["g"] = rng.normal(scale=3, size=inputs["g"].shape).astype(np.float32)
            if "without" not in case:
                inputs["A_log"] = rng.normal(size=2).astype(np.float32)
                inputs["dt_bias"] = rng.normal(size=2 * 20).astype(np.float32)
        found = []
        for dtype, name in ((np.float32, implementation), (np.float64, "recurrent")):
            with jax.enable_x64(dtype == np.float64), helpers.kernels_run(name):
                given = {n: jnp.asarray(x, dtype) for n, x in inputs.items()}
                fn = functools.partial(dormouse_jax.kda_step, implementation=name, **options)
                (o, state), pull = jax.vjp(lambda x, fn=fn: fn(**x), given)
                (grads,) = pull((jnp.asarray(p.do[:, 0], dtype), jnp.asarray(p.dfinal_state, dtype)))
            found.append({"o": o, "final_state": state} | {f"d{n}": d for n, d in grads.items()})
        helpers.assert_all_close(*found)

    @parameterized.parameters("xla", "pallas_triton")
    def test_saturated_gates(self, implementation):
        p = helpers.problem("kda", STANDARD)
        g = np.array(p.inputs["g"])
        g[..., ::2], g[..., 1::2] = 1e4, -1e4
        A_log, dt_bias = np.zeros(2, np.float32), np.zeros(40, np.float32)
        with helpers.kernels_run(implementation):
            for bound, want in ((None, -1e4), (-5.0, -5.0)):
                fn = functools.partial(
                    dormouse_jax.kda_step,
                    **{n: x[:, 0] for n, x in p.inputs.items() if n != "g"},
                    state=p.initial_state,
                    implementation=implementation,
                )
                o, state = fn(g=g[:, 0], use_gate_in_kernel=True, lower_bound=bound, A_log=A_log, dt_bias=dt_bias)
                expected = np.where(np.arange(20) % 2 == 0, want, 0.0).astype(np.float32)
                want_o, want_state = fn(g=np.broadcast_to(expected, g[:, 0].shape))
                helpers.assert_close(o, want_o, rms=1e-6)
                helpers.assert_close(state, want_state, rms=1e-6)


class ChainingTest(parameterized.TestCase):
    """A sequence in parts, the state carried from each to the next, gives what it gives in one call."""

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_a_prompt_in_two_calls_and_then_token_by_token(self, implementation):
        p = helpers.problem("kda", Shape(T=50, B=2, H=1, HV=2, K=20, V=24))
        outputs, state, first = [], p.initial_state, 0
        for last in (23, 43):  # Of 23 and of 20 tokens: neither fills its chunks.
            part = p.replace(**{n: x[:, first:last] for n, x in p.inputs.items()})
            o, state = helpers.call(part, implementation, initial_state=state, chunk_size=16)
            outputs.append(o)
            first = last
        for t in range(first, 50):
            o, state = step(p, implementation, t, state)
            outputs.append(o[:, None])
        want = helpers.oracle(p)
        helpers.assert_close(np.concatenate(outputs, axis=1), want["o"], rms=2e-6)
        helpers.assert_close(state, want["final_state"], rms=2e-6)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_gradients_through_a_scan_over_tokens(self, implementation):
        p = helpers.problem("kda", Shape(T=5, B=2, H=1, HV=2, K=20, V=37))

        def scanned(inputs, state):
            def token(state, x):
                return dormouse_jax.kda_step(**x, state=state, implementation=implementation)[::-1]

            state, o = jax.lax.scan(token, state, {n: jnp.moveaxis(x, 1, 0) for n, x in inputs.items()})
            return jnp.moveaxis(o, 0, 1), state

        with helpers.kernels_run(implementation):
            (o, state), pull = jax.vjp(jax.jit(scanned), jax.tree.map(jnp.asarray, p.inputs), p.initial_state)
            inputs, dstate = pull((jnp.asarray(p.do), jnp.asarray(p.dfinal_state)))
        got = {"o": o, "final_state": state, "dinitial_state": dstate} | {f"d{n}": x for n, x in inputs.items()}
        helpers.assert_all_close(got, helpers.oracle(p))


class InPlaceTest(parameterized.TestCase):
    def arguments(self):
        p = helpers.problem("kda", STANDARD)
        return {n: jnp.asarray(x[:, 0]) for n, x in p.inputs.items()} | {"state": jnp.asarray(p.initial_state)}

    def test_a_donated_state_is_updated_where_it_lies(self):
        arguments = self.arguments()
        want, _ = step(helpers.problem("kda", STANDARD), "recurrent")
        with helpers.kernels_run("pallas_triton"):
            fn = jax.jit(functools.partial(dormouse_jax.kda_step, implementation="pallas"), donate_argnames="state")
            compiled = fn.lower(**arguments).compile()
            address = arguments["state"].unsafe_buffer_pointer()
            o, state = compiled(**arguments)
        self.assertTrue(arguments["state"].is_deleted())
        self.assertEqual(state.unsafe_buffer_pointer(), address)
        self.assertGreaterEqual(compiled.memory_analysis().alias_size_in_bytes, state.nbytes)
        helpers.assert_close(o, want, rms=2e-6)
        if helpers.on_gpu():
            # Neither a copy of the state nor a second one.
            self.assertNotIn(" copy(", compiled.as_text())
            self.assertLess(compiled.memory_analysis().temp_size_in_bytes, state.nbytes)

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_a_state_that_is_kept_keeps_its_values(self, implementation):
        arguments = self.arguments()
        before = np.array(arguments["state"])
        with helpers.kernels_run(implementation):
            for call in (dormouse_jax.kda_step, jax.jit(dormouse_jax.kda_step, static_argnames="implementation")):
                _, state = call(**arguments, implementation=implementation)
                np.testing.assert_array_equal(arguments["state"], before)
                self.assertNotEqual(state.unsafe_buffer_pointer(), arguments["state"].unsafe_buffer_pointer())

    def test_the_kernel_is_told_to_take_the_memory_of_the_state(self):
        arguments = self.arguments()
        with jax.sharding.use_abstract_mesh(MESH):
            traced = jax.jit(dormouse_jax.kda_step, donate_argnames="state").trace(**arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "custom_call" in line and "kda_step" in line)
        self.assertRegex(line, r"output_operand_alias<output_tuple_indices = \[1\], operand_index = 5")


class TransformTest(parameterized.TestCase):
    @parameterized.product(implementation=("xla", "pallas_triton"), mapped=("everything", "state"))
    def test_vmap(self, implementation, mapped):
        problems = [helpers.problem("kda", STANDARD, seed=seed) for seed in (0, 1)]
        arguments = [{n: x[:, 0] for n, x in p.inputs.items()} | {"state": p.initial_state} for p in problems]
        names = list(arguments[0]) if mapped == "everything" else [mapped]
        axes = {name: 0 if name in names else None for name in arguments[0]}
        each = [arguments[0] | {name: a[name] for name in names} for a in arguments]
        stacked = {n: np.stack([a[n] for a in each]) if n in names else each[0][n] for n in axes}
        fn = functools.partial(dormouse_jax.kda_step, implementation=implementation)
        with helpers.kernels_run(implementation):
            o, state = jax.vmap(lambda a: fn(**a), in_axes=(axes,))(stacked)
            want = [fn(**a) for a in each]
        helpers.assert_close(o, np.stack([w[0] for w in want]), rms=1e-6)
        helpers.assert_close(state, np.stack([w[1] for w in want]), rms=1e-6)

    @parameterized.product(implementation=("xla", "pallas_triton"), axis=("batch", "heads"))
    def test_shard_map(self, implementation, axis):
        p = helpers.problem("kda", Shape(T=1, B=2, H=2, HV=2, K=20, V=24))
        mesh = jax.make_mesh((min(2, len(jax.devices())),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec("x") if axis == "batch" else PartitionSpec(None, "x")
        fn = functools.partial(dormouse_jax.kda_step, implementation=implementation)
        arguments = [x[:, 0] for x in p.inputs.values()] + [p.initial_state]
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=(spec,) * 6, out_specs=(spec, spec), check_vma=False)
        with helpers.kernels_run(implementation):
            o, state = jax.jit(sharded)(*arguments)
        want = helpers.oracle(p)
        helpers.assert_close(o, want["o"][:, 0], rms=2e-6)
        helpers.assert_close(state, want["final_state"], rms=2e-6)

    def test_explain(self):
        p = helpers.problem("kda", STANDARD)
        with dormouse_jax.interpret_kernels():
            (call,) = dormouse_jax.explain(lambda p: step(p, None), p)
        self.assertEqual((call.operator, call.implementation), ("kda_step", "pallas_triton"))
        self.assertEqual(call.kernels, ("kda_step",))
        (call,) = dormouse_jax.explain(lambda p: step(p, "xla"), p)
        self.assertEqual((call.implementation, call.kernels), ("xla", ()))
        self.assertIn("was asked for", dict(call.passed_over)["pallas_triton"])

    @parameterized.parameters(*IMPLEMENTATIONS)
    def test_the_same_call_gives_the_same_bits(self, implementation):
        p = helpers.problem("kda", SHAPES["of_128"])
        first = value_and_grads(p, implementation)
        for _ in range(200 if helpers.on_gpu() else 2):
            helpers.assert_same_bits(value_and_grads(p, implementation), first)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


class ErrorTest(parameterized.TestCase):
    """B=2, H=1, HV=2, K=20, V=37."""

    @parameterized.named_parameters(
        ("q_with_tokens", {"q": ones(2, 1, 1, 20)}, {}, ValueError, "q must have shape [B, H, K], got [2, 1, 1, 20]"),
        (
            "k_differs",
            {"k": ones(2, 1, 21)},
            {},
            ValueError,
            "k must have shape [B, H, K] = [2, 1, 20], got [2, 1, 21]",
        ),
        ("v_of_other_batch", {"v": ones(3, 2, 37)}, {}, ValueError, "v must have shape [B, HV, V] = [2, HV, V], got"),
        ("heads", {"q": ones(2, 3, 20), "k": ones(2, 3, 20)}, {}, ValueError, "HV must be a multiple of H, got v with"),
        ("wide_V", {"v": ones(2, 2, 257)}, {}, ValueError, "V, the last axis of v, must be from 1 to 256, got 257"),
        ("g", {"g": ones(2, 2)}, {}, ValueError, "g must have shape [B, HV, K] = [2, 2, 20], got [2, 2]"),
        ("beta", {"beta": ones(2, 1)}, {}, ValueError, "beta must have shape [B, HV] = [2, 2], got [2, 1]"),
        (
            "state_turned",
            {"state": ones(2, 2, 37, 20)},
            {},
            ValueError,
            "state must have shape [B, HV, K, V] = [2, 2, 20, 37], got [2, 2, 37, 20]",
        ),
        (
            "state_not_turned",
            {},
            {"state_v_first": True},
            ValueError,
            "state must have shape [B, HV, V, K] = [2, 2, 37, 20], got [2, 2, 20, 37]",
        ),
        ("no_state", {"state": None}, {}, TypeError, "state must be an array, got NoneType"),
        (
            "integer_state",
            {"state": ones(2, 2, 20, 37, dtype=np.int32)},
            {},
            TypeError,
            "state must be float32",
        ),
        (
            "half_k",
            {"k": ones(2, 1, 20, dtype=np.float16)},
            {},
            TypeError,
            "k must have q's dtype float32, got",
        ),
        ("integer_q", {"q": ones(2, 1, 20, dtype=np.int32)}, {}, TypeError, "q must be float32, bfloat16 or float16"),
        ("scale", {}, {"scale": "large"}, TypeError, "scale must be a Python number, got str"),
        ("no_A_log", {}, {"use_gate_in_kernel": True}, ValueError, "A_log must be given with use_gate_in_kernel=True"),
        ("A_log_alone", {"A_log": ones(2)}, {}, ValueError, "A_log must be None without use_gate_in_kernel=True, got"),
        ("bound_alone", {}, {"lower_bound": -5.0}, ValueError, "lower_bound must be None without use_gate_in_kernel"),
        ("A_log_of_H", {"A_log": ones(1)}, {}, ValueError, "A_log must have shape [HV] = [2], got [1]"),
        ("square_bias", {"dt_bias": ones(2, 20)}, {}, ValueError, "dt_bias must have shape [HV * K] = [40], got"),
        ("bound", {}, {"lower_bound": 5}, ValueError, "lower_bound must be a finite number below 0, got 5.0"),
        ("neg_eigval", {}, {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval must be False without use_beta_"),
        ("unknown", {}, {"implementation": "cuda"}, ValueError, "implementation must be one of None, 'pallas'"),
        (
            "mosaic",
            {},
            {"implementation": "pallas_mosaic"},
            NotImplementedError,
            "implementation='pallas_mosaic'",
        ),
    )
    def test_message(self, replace, options, exception, message):
        p = helpers.problem("kda", STANDARD)
        arguments = {n: x[:, 0] for n, x in p.inputs.items()} | {"state": p.initial_state} | replace
        with self.assertRaises(exception) as caught:
            dormouse_jax.kda_step(**arguments, **options)
        self.assertTrue(str(caught.exception).startswith(f"kda_step: {message}"), caught.exception)

    def test_kernels_asked_for_where_they_cannot_run(self):
        p = helpers.problem("kda", STANDARD)
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu), self.assertRaisesRegex(NotImplementedError, "kda_step: .*need an NVIDIA GPU"):
            dormouse_jax.kda_step(*(x[:, 0] for x in p.inputs.values()), p.initial_state, implementation="pallas")

    def test_float64_in_a_kernel(self):
        with jax.enable_x64(True), self.assertRaisesRegex(NotImplementedError, "only 'recurrent' takes"):
            step(helpers.problem("kda", STANDARD, dtype=np.float64), "pallas")


if __name__ == "__main__":
    absltest.main()
