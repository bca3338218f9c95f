"""`layers.KimiDeltaAttention`: against the PyTorch layer with the same weights, and token by token against itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec as P

import torch_ref.layer
from dormouse_jax.layers import KimiDeltaAttention
from tests import helpers

SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 16, "num_v_heads": 4, "head_v_dim": 20}
VARIANTS = {
    "plain": {},
    "bounded_gate_and_strengths_to_2": {"lower_bound": -5.0, "allow_neg_eigval": True},
    "convolutions_with_bias_over_2_tokens": {"conv_size": 2, "conv_bias": True},
    "no_convolution_over_tokens": {"conv_size": 1},
}
# Arguments that weights do not tell.
TOLD = ("lower_bound", "allow_neg_eigval")


@functools.cache
def port(variant="plain"):
    """The PyTorch layer in float64."""
    torch.manual_seed(len(variant))
    return torch_ref.layer.KimiDeltaAttention(**SIZES, **VARIANTS[variant]).double()


def imported(variant="plain", **options):
    told = {name: x for name, x in VARIANTS[variant].items() if name in TOLD}
    return KimiDeltaAttention.from_fla_state_dict(port(variant).state_dict(), **told, **options)


# Jitted, since compiling every operation by itself would take most of these tests' time.
forward = nnx.jit(lambda layer, x, segment_ids=None: layer(x, segment_ids))
prefill = nnx.jit(lambda layer, x, cache=None: layer.prefill(x, cache))
step = nnx.jit(lambda layer, x, cache: layer.step(x, cache), donate_argnums=2)


def inputs(T=37, B=2, seed=0):
    return np.random.default_rng(seed).normal(size=(B, T, SIZES["hidden_size"])).astype(np.float32)


class ImportedWeightsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{variant}_{implementation}", variant, implementation)
        for variant, implementation in itertools.product(VARIANTS, ("xla", "recurrent"))
        if implementation == "xla" or variant == "plain"
    )
    def test_output_and_gradients_equal_those_of_the_pytorch_layer(self, variant, implementation):
        layer, x, theirs = imported(variant, implementation=implementation), inputs(), port(variant)
        x_torch = torch.from_numpy(x).double().requires_grad_()
        want = theirs(x_torch)
        dy = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
        names, params = zip(*theirs.named_parameters(), strict=True)
        grads = torch.autograd.grad(want, (x_torch, *params), torch.from_numpy(dy).double())

        helpers.assert_close(forward(layer, x), want.detach().numpy(), rms=3e-6)
        grad = nnx.jit(nnx.grad(lambda layer, x: jnp.vdot(layer(x), dy), argnums=(0, 1)))
        got, dx = grad(layer, x)
        helpers.assert_close(dx, grads[0].numpy(), rms=1e-5, name="dx")
        holder = imported(variant)
        nnx.update(holder, got)
        ours = holder._by_fla_name()
        self.assertEqual(set(ours), set(names))
        self.assertLen(nnx.to_flat_state(nnx.state(holder, nnx.Param)), len(names))
        for name, want in zip(names, grads[1:], strict=True):
            grad, to_ours = ours[name]
            helpers.assert_close(grad[...], to_ours(want.numpy()), rms=2e-5, name=name)

    def test_kernels(self):
        x = inputs(T=17, B=1)
        with torch.no_grad():
            want = port()(torch.from_numpy(x).double()).numpy()
        layer = imported(implementation="pallas")
        # Interpreted, the kernels of whole sequences compile for long; their own tests have them.
        y, cache = prefill(layer if helpers.on_gpu() else imported(), x[:, :16])
        with helpers.kernels_run("pallas_triton"):
            last, _ = step(layer, x[:, 16], cache)
        helpers.assert_close(jnp.concatenate([y, last[:, None]], axis=1), want, rms=3e-6)

    @parameterized.named_parameters(("torch", lambda w: w), ("numpy", lambda w: w.numpy()))
    def test_names_behind_a_prefix_among_others(self, convert):
        weights = {f"model.layers.3.attn.{n}": convert(w) for n, w in port().state_dict().items()}
        weights["model.embeddings.weight"] = np.zeros(3)
        layer = KimiDeltaAttention.from_fla_state_dict(weights, prefix="model.layers.3.attn.")
        helpers.assert_same_bits({"y": forward(layer, inputs())}, {"y": forward(imported(), inputs())})

    def test_bfloat16_weights(self):
        weights = {n: w.bfloat16() for n, w in port().state_dict().items()}
        layer = KimiDeltaAttention.from_fla_state_dict(weights, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        self.assertEqual((layer.q_proj.kernel[...].dtype, layer.A_log[...].dtype), (jnp.bfloat16, jnp.float32))
        x = inputs()
        y, cache = prefill(layer, x[:, :-1])
        last, after = step(layer, x[:, -1], cache)
        self.assertEqual([str(a.dtype) for a in (y, last, *after)], ["bfloat16"] * 5 + ["float32"])
        with torch.no_grad():
            want = port()(torch.from_numpy(x).double())
        helpers.assert_close(jnp.concatenate([y, last[:, None]], axis=1), want.numpy(), rms=3e-2)

    @parameterized.named_parameters(
        ("missing", "k_proj.weight", None, "the weight k_proj.weight is missing"),
        ("missing_and_needed_for_sizes", "b_proj.weight", None, "the weight b_proj.weight is missing"),
        ("unknown", "q_proj.bias", np.zeros(32), "no place for the weights q_proj.bias"),
        ("shape", "o_proj.weight", np.zeros((24, 81)), "o_proj.weight must have the size of [80, 24] as the other"),
        (
            "sizes",
            "f_proj.1.weight",
            np.zeros((63, 20)),
            "f_proj.1.weight [HV K, V] and b_proj.weight [HV, hidden] do not",
        ),
    )
    def test_weights_that_do_not_fit(self, name, weight, message):
        weights = {n: w.numpy() for n, w in port().state_dict().items()} | {name: weight}
        weights = {n: w for n, w in weights.items() if w is not None}
        with self.assertRaises(ValueError) as caught:
            KimiDeltaAttention.from_fla_state_dict(weights)
        self.assertIn(
            f"from_fla_state_dict: {message}", str(caught.exception).replace("q_proj.weight [H K, hidden], ", "")
        )

    def test_sizes_are_not_to_be_given(self):
        with self.assertRaisesRegex(TypeError, "num_heads is told by the weights"):
            imported(num_heads=2)


class CacheTest(parameterized.TestCase):
    @parameterized.parameters("bounded_gate_and_strengths_to_2", "no_convolution_over_tokens")
    def test_two_prompts_and_then_token_by_token(self, variant):
        layer, x = imported(variant), inputs(T=30)
        want = forward(layer, x)
        first, cache = prefill(layer, x[:, :1])
        second, cache = prefill(layer, x[:, 1:20], cache)
        parts = [first, second]
        for t in range(20, 30):
            before = cache.state
            y, cache = step(layer, x[:, t], cache)
            self.assertTrue(before.is_deleted())
            parts.append(y[:, None])
        helpers.assert_close(jnp.concatenate(parts, axis=1), want, rms=3e-6)
        _, whole = prefill(layer, x)
        for name, a, b in zip(cache._fields, cache, whole, strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype), name)
            helpers.assert_close(a, b, rms=3e-6, name=name)

    def test_from_the_first_token_on(self):
        layer, x = imported(), inputs(T=4)
        cache, parts = layer.init_cache(2), []
        for t in range(4):
            y, cache = step(layer, x[:, t], cache)
            parts.append(y)
        helpers.assert_close(jnp.stack(parts, axis=1), forward(layer, x), rms=3e-6)


class LayerTest(parameterized.TestCase):
    def test_initial_values(self):
        layer = KimiDeltaAttention(64, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
        self.assertEqual(forward(layer, inputs()[..., :1].repeat(64, -1)).shape, (2, 37, 64))
        rate, step = jnp.exp(layer.A_log[...]), jax.nn.softplus(layer.dt_bias[...])
        self.assertBetween(float(rate.min()), 1, float(rate.max()))
        self.assertBetween(float(rate.max()), float(rate.min()), 16.01)
        self.assertBetween(float(step.min()), 0.99e-3, float(step.max()))
        self.assertBetween(float(step.max()), float(step.min()), 0.101)
        self.assertEqual(layer.o_norm.scale[...].shape, (16,))

    @parameterized.parameters("bounded_gate_and_strengths_to_2", "convolutions_with_bias_over_2_tokens")
    def test_packed_sequences_know_nothing_of_each_other(self, variant):
        layer, x, lengths = imported(variant), inputs(T=20, B=1), (10, 10)
        ids = np.repeat(np.array([7, 3], np.int32), lengths)[None]
        ends = np.cumsum(lengths)
        alone = [forward(layer, x[:, end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        helpers.assert_close(forward(layer, x, ids), jnp.concatenate(alone, axis=1), rms=3e-6)

    def test_a_token_changes_nothing_before_it(self):
        layer, x = imported(), inputs()
        changed = np.concatenate([x[:, :20], inputs(seed=5)[:, 20:]], axis=1)
        helpers.assert_same_bits({"y": forward(layer, x)[:, :20]}, {"y": forward(layer, changed)[:, :20]})

    @parameterized.named_parameters(
        ("heads", {"num_v_heads": 3}, ValueError, "num_v_heads must be a multiple of num_heads = 2, got 3"),
        ("no_convolution", {"conv_size": 0}, ValueError, "conv_size must be at least 1, got 0"),
        ("half_a_head", {"head_dim": 0.5}, TypeError, "head_dim must be a Python int, got float"),
        ("dtype", {"dtype": jnp.int8}, TypeError, "dtype must be float32, bfloat16 or float16, got int8"),
        ("precision", {"precision": "16bit"}, ValueError, "precision must be one of 'fp32', 'tf32', got '16bit'"),
    )
    def test_bad_options(self, options, exception, message):
        with self.assertRaises(exception) as caught:
            KimiDeltaAttention(**(SIZES | options), rngs=nnx.Rngs(0))
        self.assertEqual(str(caught.exception), f"KimiDeltaAttention: {message}")

    def test_bad_inputs(self):
        layer = imported()
        with self.assertRaisesRegex(ValueError, r"x must have shape \[B, T, hidden_size\]"):
            forward(layer, inputs()[0])
        with self.assertRaisesRegex(ValueError, r"x must have shape \[B, hidden_size\]"):
            step(layer, inputs(), layer.init_cache(2))


class TransformTest(absltest.TestCase):
    def test_a_scan_over_checkpointed_layers_equals_a_loop(self):
        layers, x = [imported(), imported("bounded_gate_and_strengths_to_2")], inputs(T=20)
        # One structure for both: what differs between them are weights alone.
        graph, first = nnx.split(layers[0])
        states = [first, nnx.state(layers[1])]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

        @jax.jit
        @jax.value_and_grad
        def scanned(stacked):
            block = jax.checkpoint(lambda x, state: x + nnx.merge(graph, state)(x))
            return jnp.sum(jax.lax.scan(lambda x, state: (block(x, state), None), x, stacked)[0] ** 2)

        @jax.jit
        @jax.value_and_grad
        def looped(states):
            y = x
            for state in states:
                y = y + nnx.merge(graph, state)(y)
            return jnp.sum(y**2)

        (loss, grads), (want, want_grads) = scanned(stacked), looped(states)
        helpers.assert_close(loss, want, rms=1e-6)
        for i in (0, 1):
            for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads[i]), strict=True):
                helpers.assert_close(got[i], expected, rms=1e-5)

    def test_gradients_of_weights_that_devices_share(self):
        x, dy = inputs(T=20), np.random.default_rng(1).normal(size=(2, 20, 24)).astype(np.float32)
        graph, state = nnx.split(imported())
        devices = min(2, len(jax.devices()))
        mesh = jax.make_mesh((devices,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

        def whole(state, x):
            return nnx.merge(graph, state)(x)

        split = jax.shard_map(whole, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch"), check_vma=False)
        got, want = (jax.jit(jax.grad(lambda s, f=f: jnp.vdot(f(s, x), dy)))(state) for f in (split, whole))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            helpers.assert_close(a, b, rms=1e-5)


if __name__ == "__main__":
    absltest.main()
