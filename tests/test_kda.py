"""The suite that every implementation of `kda` and `gdn2` passes: against the float64 oracle, bit for bit, and more."""

import argparse
import dataclasses
import functools
import itertools
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

import dormouse_jax
from tests import helpers
from tests.helpers import IMPLEMENTATIONS, OPERATORS, STANDARD, Shape

# Interpreted kernels compile slowly, and faster for one block a chunk. On a GPU the configuration table chooses.
SMALL_CHUNKS = {} if helpers.on_gpu() else {"chunk_size": 16}

SHAPES = {
    "one_token": Shape(T=1, K=16, V=16, H=2, HV=2),
    "two_tokens_of_one_channel": Shape(T=2, K=1, V=1),
    "one_token_short_of_a_block": Shape(T=15, K=48, V=60),
    "one_block": Shape(T=16, K=60, V=48, B=3),
    "one_block_and_one_token": Shape(T=17, K=100, V=16, H=2, HV=4),
    "one_token_short_of_a_chunk": Shape(T=63, K=16, V=100),
    "one_chunk_and_one_token": Shape(T=65, K=64, V=64, H=1, HV=3),
    "five_blocks": Shape(T=80, K=128, V=1),
    "two_chunks_and_one_token": Shape(T=129, K=1, V=128),
}
# Where not every case is taken, these are for gdn2 and the others for kda.
OF_GDN2 = ("one_block", "one_token_short_of_a_chunk", "five_blocks")
# What is interpreted of them: each takes half a minute to compile.
INTERPRETED = (
    "one_token",
    "one_block_and_one_token",
    "one_token_short_of_a_chunk",
    "two_chunks_and_one_token",
)
GPU_SHAPES = {
    "of_500": Shape(T=500, K=128, V=128, B=2, H=2, HV=4),
    "of_1500": Shape(T=1500, K=64, V=64, B=1, H=4, HV=4),
    "of_2048_wide": Shape(T=2048, K=256, V=256, H=1, HV=2),
    "of_4096_narrow": Shape(T=4096, K=100, V=60, H=2, HV=2),
}


def each(*, few=lambda case: True, **axes):
    """Named parameters for the product of `axes`, the operators and the implementations.

    Almost all of the suite's time goes into compiling. Kernels on a GPU take all cases; the references, and interpreted
    kernels, which compile slowest, take those that `few` says.
    """
    axes = {"operator": OPERATORS, "implementation": IMPLEMENTATIONS} | axes
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return parameterized.named_parameters(
        {"testcase_name": "_".join(str(value) for value in case.values())} | case
        for case in cases
        if takes_all(case["implementation"]) or few(argparse.Namespace(**case))
    )


def takes_all(implementation):
    return helpers.on_gpu() and implementation == "pallas_triton"


@functools.cache
def standard(operator, **options):
    return helpers.problem(operator, **options)


class AccuracyTest(parameterized.TestCase):
    """Against the recurrence in float64, gradients of all inputs through o and the final state."""

    @each(
        shape=tuple(SHAPES | GPU_SHAPES),
        few=lambda c: (
            (c.shape in SHAPES or helpers.on_gpu())
            and c.operator == ("gdn2" if c.shape in OF_GDN2 else "kda")
            and (c.implementation != "pallas_triton" or c.shape in INTERPRETED)
        ),
    )
    def test_sizes(self, operator, implementation, shape):
        sizes = (SHAPES | GPU_SHAPES)[shape]
        # Odd lengths start from a state, and have a scale of their own.
        odd = sizes.T % 2 == 1
        scale = 0.7 if odd else None
        p = helpers.problem(operator, sizes, state=odd, seed=sizes.T)
        got = helpers.value_and_grads(p, implementation, scale=scale, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p, scale=scale))
        self.assertEqual(got["o"].dtype, jnp.float32)

    @each(
        dtype=("bfloat16", "float16", "tf32"),
        few=lambda c: (
            (c.operator, c.dtype) == ("kda", "bfloat16")
            or (c.operator, c.dtype) in (("gdn2", "float16"), ("kda", "tf32"))
            and c.implementation == "xla"
        ),
    )
    def test_precisions(self, operator, implementation, dtype):
        precision = "tf32" if dtype == "tf32" else "16bit"
        dtype = jnp.float32 if dtype == "tf32" else jnp.dtype(dtype)
        shape = Shape(T=300, K=64, V=64, B=2, H=2, HV=4) if helpers.on_gpu() else STANDARD
        gates = dtype if operator == "kda" and precision == "16bit" else jnp.float32
        p = helpers.problem(operator, shape, dtype=dtype, gate_dtype=gates, decay=0.05)
        got = helpers.value_and_grads(p, implementation, precision=precision, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p), precision=precision)
        expected = {"o": dtype, "final_state": jnp.float32, "dinitial_state": jnp.float32}
        expected |= {f"d{name}": x.dtype for name, x in p.inputs.items()}
        self.assertEqual({name: x.dtype for name, x in got.items()}, expected)

    @each(
        dtype=("bfloat16", "float16"),
        few=lambda c: (c.operator, c.dtype) == ("gdn2", "bfloat16") and c.implementation != "pallas_triton",
    )
    def test_16_bit_gates_are_handled_in_float32(self, operator, implementation, dtype):
        p = helpers.problem(operator, gate_dtype=jnp.dtype(dtype))
        got = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        limit = 2 * float(jnp.finfo(dtype).eps)
        for name, x in helpers.oracle(p).items():
            rounded = name[1:] in p.inputs and p.inputs[name[1:]].dtype == jnp.dtype(dtype)
            helpers.assert_close(got[name], x, rms=limit if rounded else 1e-5, name=name)
            self.assertEqual(got[name].dtype, jnp.dtype(dtype) if rounded else jnp.float32)

    @parameterized.named_parameters(
        (f"{operator}_{implementation}_{chunk_size}_{residuals}", operator, implementation, chunk_size, residuals)
        for implementation, sizes in (("xla", (16, 32, 64, 128)), ("pallas_triton", (16, 32)))
        for operator, chunk_size, residuals in itertools.product(OPERATORS, sizes, ("recompute", "save"))
        if takes_all(implementation)
        or (operator, chunk_size, residuals) == ("gdn2", 32, "recompute")
        or implementation == "xla"
        and (operator, chunk_size, residuals)
        in (("kda", 16, "save"), ("kda", 64, "save"), ("kda", 64, "recompute"), ("gdn2", 128, "save"))
    )
    def test_every_chunk_size_and_residual_policy(self, operator, implementation, chunk_size, residuals):
        shape = Shape(T=200, K=64, V=48, B=2, H=2, HV=4) if helpers.on_gpu() else STANDARD
        p = helpers.problem(operator, shape)
        got = helpers.value_and_grads(p, implementation, chunk_size=chunk_size, residuals=residuals)
        helpers.assert_all_close(got, helpers.oracle(p))

    @each(
        gate=("-1e4", "-inf", "third_-inf", "third_-50", "third_-1e4", "1e-12_a_step", "-50_a_step", "none", "positive")
    )
    def test_gates(self, operator, implementation, gate):
        p = standard(operator)
        g = np.array(p.inputs["g"])
        rng = np.random.default_rng(1)
        T = g.shape[1]
        if gate in ("-1e4", "-inf"):  # A document starts: everything before is forgotten.
            g[:, T // 2] = float(gate)
            g[:, 0] = float(gate)
        elif gate.startswith("third_"):
            g = np.where(rng.random(g.shape) < 1 / 3, float(gate.removeprefix("third_")), g)
        else:
            g[:] = {"1e-12_a_step": -1e-12, "-50_a_step": -50.0, "none": 0.0, "positive": 0.01}[gate]
        if gate == "1e-12_a_step":  # Also the other reading: the decay itself is 1e-12, in some steps.
            g[:, ::3] = np.log(1e-12)
        p = p.replace(g=g)
        got = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        want = helpers.oracle(p)
        # With -50 a step all that passes a token is exp(-50): dg is nothing beside the other gradients.
        helpers.assert_all_close(got, want, floor=1e-3 * float(np.sqrt(np.mean(want["dk"] ** 2))))
        if gate in ("-1e4", "-inf"):
            self.assertFalse(np.any(np.asarray(got["dinitial_state"])))

    @each(
        case=(
            "erasing_nothing",
            "one_key",
            "one_key_back_and_forth",
            "one_key_at_strength_2",
            "one_key_at_strength_2_kept",
        )
    )
    def test_gates_and_keys_that_strain_the_inverse(self, operator, implementation, case):
        p = standard(operator)
        k, g = np.array(p.inputs["k"]), p.inputs["g"]
        strength = 0.0 if case == "erasing_nothing" else 1.9999 if "strength_2" in case else 1.0
        if case != "erasing_nothing":
            k[:] = k[:, :1]
        if case == "one_key_back_and_forth":
            k[:, 1::2] *= -1
        if case != "one_key_at_strength_2":
            g = np.zeros_like(g)
        p = p.replace(k=k, g=g, **{name: np.full_like(p.inputs[name], strength) for name in tuple(p.inputs)[4:]})
        got, want = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), helpers.oracle(p)
        if case != "one_key_at_strength_2_kept":
            helpers.assert_all_close(got, want)
        else:
            # Every step reflects the state and nothing decays: a rounding of one entry of A reaches every later token
            # at twice its size. Rounding an exact A of 64 tokens to float32 once costs up to 7e-6, so that no chunked
            # form in float32 holds the usual bar.
            for name, x in got.items():
                helpers.assert_close(x, want[name], rms=1e-4 if helpers.on_gpu() else 2e-5, name=name)

    @each()
    def test_without_a_final_state(self, operator, implementation):
        p = standard(operator)
        got = helpers.value_and_grads(p, implementation, final_state=False, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p, final_state=False))

    @parameterized.parameters(*OPERATORS)
    def test_recurrent_in_float64(self, operator):
        with jax.enable_x64(True):
            p = helpers.problem(operator, dtype=np.float64, gate_dtype=np.float64)
            got = helpers.value_and_grads(p, "recurrent")
            helpers.assert_all_close(got, helpers.oracle(p), precision="fp64")
            chex.assert_type(list(got.values()), jnp.float64)

    @parameterized.parameters(*OPERATORS)
    def test_recurrent_in_forward_mode(self, operator):
        with jax.enable_x64(True):
            p = helpers.problem(operator, dtype=np.float64, gate_dtype=np.float64)
            rng = np.random.default_rng(5)
            tangents = {name: rng.normal(size=x.shape) for name, x in p.inputs.items()}
            fn = functools.partial(
                getattr(dormouse_jax, operator), implementation="recurrent", initial_state=p.initial_state
            )
            _, do = jax.jvp(lambda inputs: fn(**inputs)[0], (p.inputs,), (tangents,))
            grads = helpers.oracle(p, final_state=False)
            want = sum(np.sum(grads[f"d{name}"] * dx) for name, dx in tangents.items())
            np.testing.assert_allclose(float(jnp.sum(do * p.do)), want, rtol=1e-10)

    # JAX cannot interpret kernels under x64: its interpreter mixes 32 and 64-bit indices.
    @each(few=lambda c: c.operator == "kda" and c.implementation != "pallas_triton")
    def test_float32_stays_float32_under_x64(self, operator, implementation):
        p = standard(operator)
        with jax.enable_x64(True):
            o, state = helpers.call(p, implementation, scale=np.float64(0.5), **SMALL_CHUNKS)
        chex.assert_type([o, state], jnp.float32)
        helpers.assert_close(o, helpers.oracle(p, scale=0.5)["o"], rms=2e-6)


class CausalityTest(parameterized.TestCase):
    """Nothing depends on later tokens, bit for bit."""

    @each()
    def test_later_tokens_change_nothing_before_them(self, operator, implementation):
        p, other = standard(operator), standard(operator, decay=20.0, seed=3)
        for t in (1, 15, 16, 30, STANDARD.T - 1):
            changed = {
                name: np.concatenate([x[:, :t], other.inputs[name][:, t:]], axis=1) for name, x in p.inputs.items()
            }
            do = np.where(np.arange(STANDARD.T)[:, None, None] < t, p.do, 0)
            results = []
            for inputs in (p.inputs, changed):
                run = helpers.value_and_grads(
                    p.replace(do=do, **inputs), implementation, final_state=False, **SMALL_CHUNKS
                )
                results.append({n: x if n == "dinitial_state" else x[:, :t] for n, x in run.items()})
                for name in p.inputs:
                    self.assertFalse(np.any(np.asarray(run[f"d{name}"][:, t:])), f"d{name} of tokens after {t}")
            helpers.assert_same_bits(*results)

    @each(dtype=("bfloat16", "float32"), few=lambda c: (c.operator, c.dtype) == ("kda", "bfloat16"))
    def test_the_last_gate_changes_no_earlier_output(self, operator, implementation, dtype):
        # 22 tokens with bounded gates of about -1.7: the last one takes the sum over the chunk past a threshold.
        p = helpers.problem(operator, Shape(T=22, K=128, V=128, H=4, HV=4), dtype=jnp.dtype(dtype), state=False)
        g = -5 / (1 + np.exp(0.7 + 0.1 * np.random.default_rng(0).normal(size=p.inputs["g"].shape)))
        results = []
        for last in (-0.01, -1.7, -4.99, -90.0):
            g[:, -1] = last
            o, _ = helpers.call(p.replace(g=g), implementation, **SMALL_CHUNKS)
            results.append({"o": o[:, :-1]})
        for result in results[1:]:
            helpers.assert_same_bits(result, results[0])

    @each(where=("token", "state"))
    def test_not_a_number_stays_where_it_is(self, operator, implementation, where):
        p = standard(operator)
        clean, _ = helpers.call(p, implementation, **SMALL_CHUNKS)
        x = np.array(p.inputs["v"] if where == "token" else p.initial_state)
        x[1] = np.nan
        o, state = helpers.call(
            p.replace(**{"v" if where == "token" else "initial_state": x}), implementation, **SMALL_CHUNKS
        )
        helpers.assert_same_bits({"o": o[:1]}, {"o": clean[:1]})
        self.assertTrue(np.all(np.isfinite(state[0])))
        self.assertTrue(np.any(np.isnan(state[1])))


class StateTest(parameterized.TestCase):
    @each()
    def test_two_calls_with_the_state_carried_equal_one(self, operator, implementation):
        p = standard(operator)
        half = helpers.problem(operator, Shape(T=2 * STANDARD.T, K=STANDARD.K, V=STANDARD.V, B=2, H=1, HV=2), seed=9)
        parts = [half.replace(**{n: x[:, i : i + STANDARD.T] for n, x in half.inputs.items()}) for i in (0, STANDARD.T)]
        o1, state = helpers.call(parts[0], implementation, **SMALL_CHUNKS)
        o2, state = helpers.call(parts[1], implementation, initial_state=state, **SMALL_CHUNKS)
        want = helpers.oracle(half)
        helpers.assert_close(np.concatenate([o1, o2], axis=1), want["o"], rms=2e-6)
        helpers.assert_close(state, want["final_state"], rms=2e-6)
        self.assertEqual(state.shape, p.initial_state.shape)

    @each()
    def test_states_with_the_value_axis_first(self, operator, implementation):
        p = standard(operator)
        want = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        turned = p.replace(
            initial_state=np.swapaxes(p.initial_state, -1, -2), dfinal_state=np.swapaxes(p.dfinal_state, -1, -2)
        )
        got = helpers.value_and_grads(turned, implementation, state_v_first=True, **SMALL_CHUNKS)
        for name in ("final_state", "dinitial_state"):
            got[name] = jnp.swapaxes(got[name], -1, -2)
        helpers.assert_same_bits(got, want)

    @each(few=lambda c: c.operator == "kda")
    def test_a_16_bit_state_gets_its_gradient_in_its_dtype(self, operator, implementation):
        p = standard(operator)
        state = jnp.asarray(p.initial_state, jnp.bfloat16)
        p = p.replace(initial_state=state)
        with helpers.kernels_run(implementation):
            grad = jax.grad(
                lambda state: jnp.vdot(
                    getattr(dormouse_jax, operator)(
                        **p.inputs, initial_state=state, implementation=implementation, **SMALL_CHUNKS
                    )[0],
                    p.do,
                )
            )(state)
        self.assertEqual(grad.dtype, jnp.bfloat16)
        helpers.assert_close(grad, helpers.oracle(p, final_state=False)["dinitial_state"], rms=4e-3)

    @each()
    def test_no_final_state_unless_asked_for(self, operator, implementation):
        _, state = helpers.call(standard(operator), implementation, output_final_state=False, **SMALL_CHUNKS)
        self.assertIsNone(state)

    @each()
    def test_an_empty_batch_gives_empty_results(self, operator, implementation):
        p = standard(operator)
        empty = p.replace(
            **{n: x[:0] for n, x in p.inputs.items()},
            initial_state=p.initial_state[:0],
            do=p.do[:0],
            dfinal_state=p.dfinal_state[:0],
        )
        got = helpers.value_and_grads(empty, implementation)
        want = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        self.assertEqual({n: (0, *x.shape[1:]) for n, x in want.items()}, {n: x.shape for n, x in got.items()})


class TransformTest(parameterized.TestCase):
    """Inside JAX's transformations a call gives what it gives outside."""

    def loss(self, p, implementation, **options):
        def fn(inputs):
            operator = getattr(dormouse_jax, p.operator)
            o, _ = operator(
                **inputs, initial_state=p.initial_state, implementation=implementation, **SMALL_CHUNKS, **options
            )
            return jnp.vdot(o, p.do)

        return fn

    @each(
        transform=("jit", "checkpoint", "scan", "all_at_once"),
        few=lambda c: c.transform == "all_at_once" and c.operator == "kda",
    )
    def test_gradients_under(self, operator, implementation, transform):
        p = standard(operator)
        fn = self.loss(p, implementation)
        inputs = jax.tree.map(jnp.asarray, p.inputs)
        with helpers.kernels_run(implementation):
            if transform in ("scan", "all_at_once"):
                layers = jax.tree.map(lambda x: jnp.stack([x, x]), inputs)
                layer = fn
                if transform == "all_at_once":
                    layer = jax.checkpoint(jax.jit(lambda x: jnp.sum(jax.vmap(fn)(x))))
                    layers = jax.tree.map(lambda x: x[:, None], layers)
                total = jax.grad(lambda layers: jax.lax.scan(lambda c, x: (c + layer(x), None), 0.0, layers)[0])
                grads = (jax.jit(total) if transform == "all_at_once" else total)(layers)
                grads = jax.tree.map(lambda d, x: d[1].reshape(x.shape), grads, inputs)
            else:
                grads = jax.jit(jax.grad(fn))(inputs) if transform == "jit" else jax.grad(jax.checkpoint(fn))(inputs)
        want = helpers.oracle(p, final_state=False)
        for name, grad in grads.items():
            helpers.assert_close(grad, want[f"d{name}"], rms=1e-5, name=f"d{name}")

    @each(few=lambda c: c.operator == "kda" and c.implementation != "pallas_triton")
    def test_vmap(self, operator, implementation):
        problems = [standard(operator), standard(operator, seed=4)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(p.inputs for p in problems))
        fn = functools.partial(getattr(dormouse_jax, operator), implementation=implementation, **SMALL_CHUNKS)
        do = jnp.stack([p.do for p in problems])
        with helpers.kernels_run(implementation):
            o, vjp = jax.vjp(jax.vmap(lambda inputs: fn(**inputs)[0]), stacked)
            (grads,) = vjp(do)
        for i, p in enumerate(problems):
            want = helpers.oracle(p.replace(initial_state=None), final_state=False)
            helpers.assert_close(o[i], want["o"], rms=2e-6)
            for name, grad in grads.items():
                helpers.assert_close(grad[i], want[f"d{name}"], rms=1e-5, name=f"d{name}")

    @each(
        axis=("batch", "heads"),
        few=lambda c: c.operator == "kda" and c.axis == ("heads" if c.implementation == "xla" else "batch"),
    )
    def test_shard_map(self, operator, implementation, axis):
        p = helpers.problem(operator, Shape(T=STANDARD.T, K=STANDARD.K, V=STANDARD.V, B=2, H=2, HV=2))
        mesh = jax.make_mesh((min(2, len(jax.devices())),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec("x") if axis == "batch" else PartitionSpec(None, None, "x")
        operator = getattr(dormouse_jax, operator)

        def fn(inputs):
            return operator(**inputs, implementation=implementation, **SMALL_CHUNKS)[0]

        sharded = jax.shard_map(fn, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
        inputs = jax.tree.map(jnp.asarray, p.inputs)
        with helpers.kernels_run(implementation):
            o, vjp = jax.vjp(jax.jit(sharded), inputs)
            (grads,) = vjp(jnp.asarray(p.do))
        want = helpers.oracle(p.replace(initial_state=None), final_state=False)
        helpers.assert_close(o, want["o"], rms=2e-6)
        for name, grad in grads.items():
            helpers.assert_close(grad, want[f"d{name}"], rms=1e-5, name=f"d{name}")


class RepeatabilityTest(parameterized.TestCase):
    @each()
    def test_the_same_call_gives_the_same_bits_and_leaves_its_inputs_alone(self, operator, implementation):
        shape = Shape(T=300, K=64, V=64, B=2, H=2, HV=4) if helpers.on_gpu() else STANDARD
        p = helpers.problem(operator, shape)
        inputs = jax.tree.map(jnp.asarray, p.inputs)
        before = {n: np.array(x) for n, x in inputs.items()}
        first = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        for _ in range(200 if takes_all(implementation) else 2):
            helpers.assert_same_bits(helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), first)
        helpers.call(dataclasses.replace(p, inputs=inputs), implementation, **SMALL_CHUNKS)
        helpers.assert_same_bits(inputs, before)

    @each(few=lambda c: c.operator == "kda" and c.implementation != "pallas_triton")
    def test_calls_of_other_sizes_and_dtypes_between_change_nothing(self, operator, implementation):
        p = standard(operator)
        first, _ = helpers.call(p, implementation, **SMALL_CHUNKS)
        helpers.call(standard(operator, dtype=jnp.bfloat16), implementation, **SMALL_CHUNKS)
        helpers.call(helpers.problem(operator, SHAPES["one_token"]), implementation, **SMALL_CHUNKS)
        again, _ = helpers.call(p, implementation, **SMALL_CHUNKS)
        helpers.assert_same_bits({"o": again}, {"o": first})

    @each(few=lambda c: c.operator == "kda")
    def test_what_lies_behind_an_input_is_not_read(self, operator, implementation):
        import torch

        device = "cuda" if helpers.on_gpu() else "cpu"
        if helpers.on_gpu() and not torch.cuda.is_available():
            self.skipTest("PyTorch here has no CUDA, and it makes the buffers")
        clean = helpers.problem(operator, SHAPES["one_block_and_one_token"] if helpers.on_gpu() else STANDARD)

        def poisoned(x):
            buffer = torch.full((x.size + 65536,), float("nan"), dtype=torch.float32, device=device)
            head = buffer[: x.size].view(x.shape)
            head.copy_(torch.from_numpy(np.array(x)))
            return jax.dlpack.from_dlpack(head), buffer

        inputs, buffers = zip(*(poisoned(x) for x in clean.inputs.values()), strict=True)
        p = dataclasses.replace(clean, inputs=dict(zip(clean.inputs, inputs, strict=True)))
        got = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(clean))
        del buffers


class GroupedHeadsTest(parameterized.TestCase):
    @each(few=lambda c: c.operator == "kda" and c.implementation != "pallas_triton")
    def test_equal_to_repeating_queries_and_keys(self, operator, implementation):
        shape = Shape(T=256, K=128, V=128, B=4, H=16, HV=32) if helpers.on_gpu() else STANDARD
        p = helpers.problem(operator, shape)
        repeats = shape.HV // shape.H
        repeated = dataclasses.replace(p, inputs=p.inputs | {n: np.repeat(p.inputs[n], repeats, axis=2) for n in "qk"})
        o, state = helpers.call(p, implementation, **SMALL_CHUNKS)
        o_repeated, state_repeated = helpers.call(repeated, implementation, **SMALL_CHUNKS)
        helpers.assert_close(o, o_repeated, rms=1e-6)
        helpers.assert_close(state, state_repeated, rms=1e-6)


@unittest.skipUnless(helpers.on_gpu(), "sizes and numbers of calls for a GPU")
class LargeTest(parameterized.TestCase):
    """Kernels where indices, grids and sequences are large."""

    @parameterized.named_parameters(
        # q has more than 2^31 elements, and the grid more than 65535 programs along one axis.
        ("more_than_2_to_the_31_elements", Shape(B=260, T=512, H=128, HV=128, K=128, V=16), "bfloat16"),
        ("65536_sequences_and_heads", Shape(B=2048, T=64, H=32, HV=32, K=16, V=16), "float32"),
    )
    def test_the_last_sequence_and_head(self, shape, dtype):
        B, T, H, K, V = shape.B, shape.T, shape.H, shape.K, shape.V

        @jax.jit
        def random(key):
            q, k, v, g, beta, do = jax.random.split(key, 6)
            return {
                "q": jax.random.normal(q, (B, T, H, K), dtype) / K**0.5,
                "k": jax.random.normal(k, (B, T, H, K), dtype) / K**0.5,
                "v": jax.random.normal(v, (B, T, H, V), dtype),
                "g": -0.1 * jax.random.exponential(g, (B, T, H, K), dtype),
                "beta": jax.nn.sigmoid(jax.random.normal(beta, (B, T, H), dtype)),
            }, jax.random.normal(do, (B, T, H, V), dtype)

        @jax.jit
        def last(inputs, do):
            (o, final_state), vjp = jax.vjp(
                lambda x: dormouse_jax.kda(**x, implementation="pallas", output_final_state=True), inputs
            )
            (grads,) = vjp((do, jnp.zeros_like(final_state)))
            found = {"o": o, "final_state": final_state} | {f"d{n}": d for n, d in grads.items()}
            return {n: x[-1:, -1:] if n == "final_state" else x[-1:, :, -1:] for n, x in found.items()}

        inputs, do = random(jax.random.key(0))
        got = last(inputs, do)
        inputs, do = jax.tree.map(lambda x: np.asarray(x[-1:, :, -1:]), (inputs, do))
        p = helpers.Problem("kda", inputs, None, do, np.zeros((1, 1, K, V), np.float32))
        helpers.assert_all_close(got, helpers.oracle(p), precision="16bit" if dtype == "bfloat16" else "fp32")

    def test_four_calls_of_8192_tokens_with_the_state_carried_equal_one_of_32768(self):
        p = helpers.problem("kda", Shape(T=32768, K=64, V=64, H=1, HV=1), decay=0.01)
        want = helpers.oracle(p)
        state, parts = p.initial_state, []
        for start in range(0, 32768, 8192):
            part = p.replace(**{n: x[:, start : start + 8192] for n, x in p.inputs.items()})
            o, state = helpers.call(part, "pallas", initial_state=state)
            parts.append(o)
        helpers.assert_close(np.concatenate(parts, axis=1), want["o"], rms=2e-6)
        helpers.assert_close(state, want["final_state"], rms=2e-6)
        helpers.assert_all_close(helpers.value_and_grads(p, "pallas"), want)


if __name__ == "__main__":
    absltest.main()
