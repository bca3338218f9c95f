"""`context_parallel.kda`: sequences split over devices give what they give on one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

import dormouse_jax
from dormouse_jax import context_parallel
from tests import helpers
from tests.helpers import Shape

# On a machine with one GPU there is one segment, with two there are two.
DEVICES = min(8, len(jax.devices()))


def mesh(devices=DEVICES, **other):
    sizes = other | {"sequence": devices}
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def sharded(mesh, spec, state_spec, **options):
    """The function (inputs, state) -> (o, final_state), split as specs say; A_log and dt_bias are on all devices."""

    def fn(inputs, gate, state):
        return context_parallel.kda(
            **inputs, **gate, initial_state=state, axis_name="sequence", output_final_state=True, **options
        )

    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=(spec, P(), state_spec), out_specs=(spec, state_spec), check_vma=False)
    )


def value_and_grads(p, fn, gate=None):
    inputs = jax.tree.map(jnp.asarray, p.inputs)
    (o, final_state), pull = jax.vjp(fn, inputs, gate or {}, p.initial_state)
    dinputs, dgate, dstate = pull((jnp.asarray(p.do), jnp.asarray(p.dfinal_state)))
    results = {"o": o, "final_state": final_state} | {f"d{name}": x for name, x in (dinputs | dgate).items()}
    return results if p.initial_state is None else results | {"dinitial_state": dstate}


class ContextParallelTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{implementation}_{'from_a_state' if state else 'from_zeros'}", implementation, state)
        for implementation, state in itertools.product(helpers.IMPLEMENTATIONS, (True, False))
        if helpers.on_gpu() or implementation != "pallas_triton"
    )
    def test_against_the_oracle(self, implementation, state):
        p = helpers.problem("kda", Shape(T=8 * 24, B=2, H=1, HV=2, K=20, V=24), decay=0.05, state=state)
        fn = sharded(mesh(), P(None, "sequence"), P(), implementation=implementation, chunk_size=16)
        helpers.assert_all_close(value_and_grads(p, fn), helpers.oracle(p))

    def test_kernels_in_two_segments(self):
        p = helpers.problem("kda", Shape(T=32, K=16, V=16), decay=0.05)
        fn = sharded(mesh(min(2, DEVICES)), P(None, "sequence"), P(), implementation="pallas", chunk_size=16)
        with helpers.kernels_run("pallas_triton"):
            got = value_and_grads(p, fn)
        helpers.assert_all_close(got, helpers.oracle(p))

    def test_bfloat16(self):
        shape = Shape(T=8 * 24, B=2, H=1, HV=2, K=32, V=32)
        p = helpers.problem("kda", shape, dtype=jnp.bfloat16, decay=0.05)
        fn = sharded(mesh(), P(None, "sequence"), P())
        helpers.assert_all_close(value_and_grads(p, fn), helpers.oracle(p), precision="16bit")

    def test_batch_and_heads_split_as_well(self):
        p = helpers.problem("kda", Shape(T=2 * 24, B=2, H=2, HV=4, K=20, V=24), decay=0.05)
        axes = {"batch": 2, "heads": 2} if DEVICES == 8 else {"batch": 1, "heads": 1}
        spec, state = P("batch", "sequence", "heads"), P("batch", "heads")
        fn = sharded(mesh(min(2, DEVICES), **axes), spec, state, implementation="xla", chunk_size=16)
        helpers.assert_all_close(value_and_grads(p, fn), helpers.oracle(p))

    @parameterized.parameters("xla", "recurrent")
    def test_raw_inputs_and_gradients_of_what_all_devices_share(self, implementation):
        p = helpers.problem("kda", Shape(T=8 * 8, B=2, H=1, HV=2, K=20, V=24))
        rng = np.random.default_rng(3)
        p = p.replace(g=rng.normal(size=p.inputs["g"].shape), beta=rng.normal(size=p.inputs["beta"].shape))
        gate = {"A_log": rng.normal(size=2).astype(np.float32), "dt_bias": rng.normal(size=40).astype(np.float32)}
        options = {
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "implementation": implementation,
        }

        def on_one_device(inputs, gate, state):
            return dormouse_jax.kda(**inputs, **gate, initial_state=state, output_final_state=True, **options)

        got = value_and_grads(p, sharded(mesh(), P(None, "sequence"), P(), **options), gate)
        helpers.assert_all_close(got, value_and_grads(p, on_one_device, gate))

    def test_states_with_the_value_axis_first(self):
        p = helpers.problem("kda", Shape(T=8 * 4, K=20, V=24), decay=0.05)
        want = sharded(mesh(), P(None, "sequence"), P(), implementation="xla")(p.inputs, {}, p.initial_state)
        turned = np.swapaxes(p.initial_state, -1, -2)
        fn = sharded(mesh(), P(None, "sequence"), P(), implementation="xla", state_v_first=True)
        o, state = fn(p.inputs, {}, turned)
        helpers.assert_same_bits({"o": o, "state": jnp.swapaxes(state, -1, -2)}, {"o": want[0], "state": want[1]})

    def test_without_a_final_state(self):
        p = helpers.problem("kda", Shape(T=8 * 4, K=20, V=24), decay=0.05)

        def fn(inputs):
            return context_parallel.kda(**inputs, axis_name="sequence", implementation="xla")

        spec = P(None, "sequence")
        fn = jax.shard_map(fn, mesh=mesh(), in_specs=(spec,), out_specs=(spec, None), check_vma=False)
        o, pull = jax.vjp(lambda x: fn(x)[0], jax.tree.map(jnp.asarray, p.inputs))
        (grads,) = pull(jnp.asarray(p.do))
        got = {"o": o} | {f"d{name}": x for name, x in grads.items()}
        helpers.assert_all_close(got, helpers.oracle(p.replace(initial_state=None), final_state=False))
        self.assertIsNone(jax.eval_shape(fn, p.inputs)[1])

    @parameterized.parameters("xla", "recurrent")
    def test_packed_sequences(self, implementation):
        # Sequences that end inside a device's part, with it, and after several parts; one that is a part by itself.
        lengths = (5, 3, 17, 7, 8, 24) if DEVICES == 8 else (5, 59)
        p = helpers.problem("kda", Shape(T=8 * 8, B=2, H=1, HV=2, K=20, V=24), decay=0.05)
        ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        ids = np.stack([ids, ids[::-1]])
        spec = P(None, "sequence")

        def fn(inputs, ids, state):
            return context_parallel.kda(
                **inputs,
                segment_ids=ids,
                initial_state=state,
                axis_name="sequence",
                output_final_state=True,
                implementation=implementation,
            )

        split = jax.shard_map(fn, mesh=mesh(), in_specs=(spec, spec, P()), out_specs=(spec, P()), check_vma=False)

        def whole(inputs, _, state):
            return dormouse_jax.kda(
                **inputs, segment_ids=ids, initial_state=state, output_final_state=True, implementation=implementation
            )

        got, want = (
            value_and_grads(p, lambda x, _, state, f=f: jax.jit(lambda x, state: f(x, ids, state))(x, state))
            for f in (split, whole)
        )
        helpers.assert_all_close(got, want)

    def test_cu_seqlens_are_refused(self):
        p = helpers.problem("kda", Shape(T=8, K=4, V=4))
        with self.assertRaisesRegex(NotImplementedError, "context_parallel.kda: cu_seqlens is not implemented"):
            context_parallel.kda(**p.inputs, axis_name="sequence", cu_seqlens=np.zeros(3, np.int32))


if __name__ == "__main__":
    absltest.main()
