"""Raw gates, beta, queries and keys: the options `use_..._in_kernel`, for every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import dormouse_jax
from dormouse_jax import gates
from tests import helpers
from tests.helpers import OPERATORS, Shape

SMALL_CHUNKS = {} if helpers.on_gpu() else {"chunk_size": 16}
SMALL = Shape(B=2, T=39, H=1, HV=2, K=20, V=24)

# What is tried together: every option alone, and all of them with each kind of gate.
TOGETHER = {
    "l2norm": ("l2norm",),
    "gate": ("gate",),
    "bounded_gate": ("bounded_gate",),
    "rateless_gate": ("rateless_gate",),
    "beta": ("beta",),
    "beta_to_2": ("beta_to_2",),
    "all": ("l2norm", "gate", "beta"),
    "all_bounded": ("l2norm", "bounded_gate", "beta_to_2"),
}


def for_operator(operator, names):
    """gdn2 has no beta."""
    return tuple(name for name in names if operator == "kda" or not name.startswith("beta"))


class RawTest(parameterized.TestCase):
    @helpers.each(
        operator=OPERATORS,
        together=tuple(TOGETHER),
        few=lambda c: (
            c.together.startswith("all") if c.operator == "gdn2" else c.implementation == "xla" or "_" in c.together
        ),
        interpreted=("kda_all_pallas_triton", "kda_all_bounded_pallas_triton", "gdn2_all_pallas_triton"),
    )
    def test_against_the_oracle(self, operator, together, implementation):
        names = for_operator(operator, TOGETHER[together])
        if not names:
            self.skipTest("an option of beta alone, and gdn2 has none")
        shape = Shape(T=150, K=128, V=100, B=2, H=2, HV=4) if helpers.on_gpu() else SMALL
        p = helpers.raw(helpers.problem(operator, shape), *names)
        got = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p))

    @helpers.each(dtype=("bfloat16", "float16", "tf32"), interpreted=("bfloat16_pallas_triton",))
    def test_precisions(self, dtype, implementation):
        precision = "tf32" if dtype == "tf32" else "16bit"
        dtype = jnp.float32 if dtype == "tf32" else jnp.dtype(dtype)
        shape = Shape(T=300, K=64, V=64, B=2, H=2, HV=4) if helpers.on_gpu() else SMALL
        p = helpers.problem("kda", shape, dtype=dtype, gate_dtype=dtype)
        p = helpers.raw(p, "l2norm", "gate", "beta", decay=0.05)
        got = helpers.value_and_grads(p, implementation, precision=precision, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p), precision=precision)
        expected = {"o": dtype, "final_state": jnp.float32, "dinitial_state": jnp.float32}
        expected |= {f"d{name}": x.dtype for name, x in p.inputs.items()}
        self.assertEqual({name: x.dtype for name, x in got.items()}, expected)

    @helpers.each(
        residuals=("recompute", "save"), few=lambda c: c.implementation == "xla", interpreted=("save_pallas_triton",)
    )
    def test_residual_policies(self, residuals, implementation):
        p = helpers.raw(helpers.problem("kda", SMALL), "l2norm", "bounded_gate", "beta")
        got = helpers.value_and_grads(p, implementation, residuals=residuals, **SMALL_CHUNKS)
        helpers.assert_all_close(got, helpers.oracle(p))

    @helpers.each(
        gate=("gate", "bounded_gate"),
        saturation=("open", "closed", "mixed"),
        interpreted=("gate_mixed_pallas_triton",),
    )
    def test_saturated_gates(self, gate, saturation, implementation):
        p = helpers.raw(helpers.problem("kda", SMALL), "l2norm", gate, "beta")
        raw = np.array(p.inputs["g"])
        if saturation == "mixed":
            choice = np.random.default_rng(2).integers(0, 6, size=raw.shape)
            raw = np.select([choice == 0, choice == 1], [-1e4, 1e4], raw)
            raw[:, SMALL.T // 2] = 1e4  # A document starts.
        else:
            raw = raw + (1e3 if saturation == "open" else -1e3)
        p = p.replace(g=raw)
        got, want = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), helpers.oracle(p)
        # What is saturated has no gradient to compare with; the scale is then that of the others.
        helpers.assert_all_close(got, want, floor=1e-3 * float(np.sqrt(np.mean(want["dv"] ** 2))))

    @helpers.each(option=("l2norm", "gate", "bounded_gate", "beta_to_2"), few=lambda c: c.option != "l2norm")
    def test_equals_computing_it_before_the_call(self, option, implementation):
        p = helpers.raw(helpers.problem("kda", SMALL), option)
        inputs = {name: jnp.asarray(x) for name, x in p.inputs.items()}
        rate, bias = inputs.pop("A_log", None), inputs.pop("dt_bias", None)
        if option == "l2norm":
            inputs |= {name: gates.l2_normalize(inputs[name]) for name in "qk"}
        elif option == "beta_to_2":
            inputs |= {"beta": gates.beta_sigmoid(inputs["beta"], True)}
        else:
            inputs |= {"g": gates.log_decay(inputs["g"], rate, bias, p.options["lower_bound"])}
        o, state = helpers.call(p, implementation, **SMALL_CHUNKS)
        with helpers.kernels_run(implementation):
            want, want_state = dormouse_jax.kda(
                **inputs,
                initial_state=p.initial_state,
                output_final_state=True,
                implementation=implementation,
                **SMALL_CHUNKS,
            )
        helpers.assert_close(o, want, rms=1e-6)
        helpers.assert_close(state, want_state, rms=1e-6)

    @helpers.each()
    def test_a_zero_query_and_key_have_finite_gradients(self, implementation):
        p = helpers.raw(helpers.problem("kda", SMALL), "l2norm")
        q, k = np.array(p.inputs["q"]), np.array(p.inputs["k"])
        q[:, 3], k[:, 20] = 0, 0
        p = p.replace(q=q, k=k)
        helpers.assert_all_close(helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), helpers.oracle(p))

    @helpers.each(dtype=("bfloat16", "float32"), interpreted=("bfloat16_pallas_triton",))
    def test_the_last_gate_changes_no_earlier_output_or_gradient(self, dtype, implementation):
        # 22 tokens with bounded gates of about -1.7: the last one takes the sum over the chunk past a threshold.
        shape = Shape(T=22, K=128, V=128, H=4, HV=4) if helpers.on_gpu() else Shape(T=22, K=32, V=16, H=1, HV=2)
        p = helpers.problem("kda", shape, dtype=jnp.dtype(dtype), state=False)
        raw = -0.7 + 0.1 * np.random.default_rng(0).normal(size=p.inputs["g"].shape)
        inputs = p.inputs | {
            "beta": np.ones_like(p.inputs["beta"]),
            "A_log": np.zeros(shape.HV, np.float32),
            "dt_bias": np.zeros(shape.HV * shape.K, np.float32),
        }
        do = np.array(p.do)
        do[:, -1] = 0
        results = []
        for last in (-100.0, -0.7, 3.0, 100.0):
            raw[:, -1] = last
            options = {"use_gate_in_kernel": True, "lower_bound": -5.0}
            problem = helpers.Problem("kda", inputs | {"g": raw.astype(p.inputs["g"].dtype)}, None, do, p.dfinal_state)
            run = helpers.value_and_grads(problem, implementation, final_state=False, **options, **SMALL_CHUNKS)
            results.append({name: x[:, :-1] for name, x in run.items() if x.ndim > 2} | {"dA_log": run["dA_log"]})
        for result in results[1:]:
            helpers.assert_same_bits(result, results[0])

    @helpers.each()
    def test_value_heads_have_gates_of_their_own(self, implementation):
        shape = Shape(T=256, K=128, V=128, B=4, H=16, HV=32) if helpers.on_gpu() else Shape(T=20, K=8, V=8, H=2, HV=4)
        p = helpers.raw(helpers.problem("kda", shape), "gate")
        repeated = p.inputs | {n: np.repeat(p.inputs[n], shape.HV // shape.H, axis=2) for n in "qk"}
        grads = []
        for inputs in (p.inputs, repeated):
            with helpers.kernels_run(implementation):

                def loss(A_log, dt_bias, inputs=inputs):
                    o, _ = dormouse_jax.kda(
                        **inputs | {"A_log": A_log, "dt_bias": dt_bias},
                        implementation=implementation,
                        **p.options,
                        **SMALL_CHUNKS,
                    )
                    return jnp.vdot(o, p.do)

                grads.append(jax.grad(loss, argnums=(0, 1))(p.inputs["A_log"], p.inputs["dt_bias"]))
        for got, want in zip(*grads, strict=True):
            helpers.assert_close(got, want, rms=1e-5)

    @helpers.each()
    def test_one_key_with_a_raw_beta_that_makes_2_of_it(self, implementation):
        # Every step reflects the state along the one key: the stress of the inverse.
        p = helpers.raw(helpers.problem("kda", SMALL), "l2norm", "gate", "beta_to_2")
        k = np.repeat(p.inputs["k"][:, :1], SMALL.T, axis=1)
        p = p.replace(k=k, beta=np.full_like(p.inputs["beta"], 4.0))
        got, want = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), helpers.oracle(p)
        helpers.assert_all_close(got, want, floor=1e-3 * float(np.sqrt(np.mean(want["dv"] ** 2))))

    @helpers.each(axis=("batch", "heads"), few=lambda c: c.axis == ("heads" if c.implementation == "xla" else "batch"))
    def test_shard_map_with_the_gates_parameters_replicated_or_split(self, axis, implementation):
        p = helpers.problem("kda", dataclasses.replace(SMALL, B=2, H=2, HV=2), state=False)
        p = helpers.raw(p, "l2norm", "gate", "beta")
        mesh = jax.make_mesh((min(2, len(jax.devices())),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        of_tokens, of_gate = (P("x"), P()) if axis == "batch" else (P(None, None, "x"), P("x"))
        specs = {name: of_gate if name in ("A_log", "dt_bias") else of_tokens for name in p.inputs}

        def fn(inputs):
            return dormouse_jax.kda(**inputs, implementation=implementation, **p.options, **SMALL_CHUNKS)[0]

        sharded = jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=of_tokens, check_vma=False)
        with helpers.kernels_run(implementation):
            o, vjp = jax.vjp(jax.jit(sharded), jax.tree.map(jnp.asarray, p.inputs))
            (grads,) = vjp(jnp.asarray(p.do))
        want = helpers.oracle(p, final_state=False)
        helpers.assert_all_close({"o": o} | {f"d{name}": grad for name, grad in grads.items()}, want)

    @helpers.each()
    def test_vmap_over_the_gates_parameters(self, implementation):
        problems = [helpers.raw(helpers.problem("kda", SMALL, state=False), "gate", seed=seed) for seed in (1, 2)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(p.inputs for p in problems))

        def fn(inputs):
            options = problems[0].options | SMALL_CHUNKS
            return dormouse_jax.kda(**inputs, implementation=implementation, **options)[0]

        with helpers.kernels_run(implementation):
            _, vjp = jax.vjp(jax.vmap(fn), stacked)
            (grads,) = vjp(jnp.stack([p.do for p in problems]))
        for i, p in enumerate(problems):
            want = helpers.oracle(p, final_state=False)
            for name in ("g", "A_log", "dt_bias"):
                bars = helpers.bars("fp32")
                helpers.assert_close(grads[name][i], want[f"d{name}"], rms=bars.get(f"d{name}", bars[""]), name=name)

    @helpers.each()
    def test_the_same_bits_every_time(self, implementation):
        shape = Shape(T=300, K=64, V=64, B=2, H=2, HV=4) if helpers.on_gpu() else SMALL
        p = helpers.raw(helpers.problem("kda", shape), "l2norm", "gate", "beta")
        first = helpers.value_and_grads(p, implementation, **SMALL_CHUNKS)
        for _ in range(100 if helpers.on_gpu() and implementation == "pallas_triton" else 2):
            helpers.assert_same_bits(helpers.value_and_grads(p, implementation, **SMALL_CHUNKS), first)

    def test_recurrent_in_float64(self):
        with jax.enable_x64(True):
            p = helpers.problem("kda", dtype=np.float64, gate_dtype=np.float64)
            p = helpers.raw(p, "l2norm", "bounded_gate", "beta_to_2")
            got = helpers.value_and_grads(p, "recurrent")
            for name in ("dA_log", "ddt_bias"):
                helpers.assert_close(got.pop(name), helpers.oracle(p)[name], rms=1e-6, name=name)
            want = {name: x for name, x in helpers.oracle(p).items() if name in got}
            helpers.assert_all_close(got, want, precision="fp64")


if __name__ == "__main__":
    absltest.main()
