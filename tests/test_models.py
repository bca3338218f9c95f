"""The decoder: what its scans compute, its modes, and what runs in it."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

import dormouse_jax
from dormouse_jax.layers import CausalAttention
from dormouse_jax.models import PRESETS, Decoder, DecoderConfig
from tests import helpers

# Two groups of a KDA and an attention layer, run twice: every axis that is scanned over is there.
CONFIG = DecoderConfig(
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    head_dim=8,
    intermediate_size=24,
    attention_every=2,
    loops=2,
    vocab_size=11,
    dtype="float32",
)


def decoder(config=CONFIG, **options):
    return Decoder(config, rngs=nnx.Rngs(0), **options)


@functools.cache
def weights():
    """Parameters of CONFIG, made once: their values matter to no test, but that the head's are not small."""
    state = nnx.state(decoder())
    state["head"]["kernel"] = state["head"]["kernel"] * CONFIG.hidden_size**0.5
    return state


def with_weights(config=CONFIG, **options):
    model = nnx.eval_shape(lambda: decoder(config, **options))
    nnx.update(model, weights())
    return model


def ids(T=23, B=2, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (B, T)).astype(np.uint8)


forward = nnx.jit(lambda model, ids: model(ids))
step = nnx.jit(lambda model, ids, cache: model.step(ids, cache))


@functools.cache
def loss_and_grads(**options):
    graph, state = nnx.split(with_weights(**options))
    loss, grads = jax.jit(jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(ids())))(state)
    return {"loss": loss} | {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}


class DecoderTest(parameterized.TestCase):
    def test_scans_equal_loops_over_the_layers(self):
        model, x = with_weights(), ids()
        graph, state = nnx.split(model)

        graph_of_groups, _ = nnx.split(model.groups)

        @functools.partial(jax.jit, static_argnums=0)
        def layer(i, weights, h):
            layer = nnx.merge(graph_of_groups, weights).layers[i]
            h = h + layer.mixer(layer.mixer_norm(h))
            a = layer.mlp_norm(h)
            gate, up = (a @ part for part in jnp.split(layer.gate_up.kernel[...], 2, axis=1))
            return h + (jax.nn.silu(gate) * up) @ layer.down.kernel[...]

        def looped(state):
            model = nnx.merge(graph, state)
            _, stacked = nnx.split(model.groups)
            h = model.embed.kernel[...][x[:, :-1]]
            for _ in range(CONFIG.loops):
                for g in range(CONFIG.num_groups):
                    for i in range(len(CONFIG.mixers)):
                        h = layer(i, jax.tree.map(lambda a, g=g: a[g], stacked), h)
            h = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * model.norm.scale[...]
            log_p = jax.nn.log_softmax(h @ model.head.kernel[...])
            return -jnp.take_along_axis(log_p, x[:, 1:, None].astype(int), axis=-1).mean()

        want, want_grads = jax.value_and_grad(looped)(state)
        got = loss_and_grads()
        want_grads = {".".join(map(str, path)): grad[...] for path, grad in nnx.to_flat_state(want_grads)}
        helpers.assert_close(got["loss"], want, rms=1e-6)
        self.assertEqual(set(got), {"loss", *want_grads})
        for name, grad in want_grads.items():
            self.assertGreater(float(jnp.abs(grad).max()), 0, name)
            helpers.assert_close(got[name], grad, rms=1e-4, name=name)

    @parameterized.parameters(
        {"remat": "dots"},
        {"remat": "full", "residuals": "save"},
        {"scan_layers": True},
        {"remat": "full", "scan_layers": True},
    )
    def test_what_is_kept_for_the_backward_changes_no_result(self, **options):
        want, got = loss_and_grads(), loss_and_grads(**options)
        for name, x in got.items():
            helpers.assert_close(x, want[name], rms=1e-4, name=name)

    def test_residuals_are_those_of_kda(self):
        graph, state = nnx.split(with_weights(residuals="save"))
        calls = dormouse_jax.explain(jax.grad(lambda state: nnx.merge(graph, state).loss(ids())), state)
        self.assertIn(("kda", "forward with residuals"), [(call.operator, call.direction) for call in calls])

    def test_a_prompt_and_then_token_by_token(self):
        model, x = with_weights(), ids(T=9)
        want = forward(model, x)
        logits, cache = nnx.jit(lambda model, ids: model.prefill(ids, length=9))(model, x[:, :4])
        parts = [logits]
        for t in range(4, 9):
            logits, cache = step(model, x[:, t], cache)
            parts.append(logits[:, None])
        helpers.assert_close(jnp.concatenate(parts, axis=1), want, rms=1e-5)

    def test_a_token_changes_nothing_before_it(self):
        x = ids()
        changed = np.concatenate([x[:, :12], ids(seed=1)[:, 12:]], axis=1)
        a, b = (forward(with_weights(), x)[:, :12] for x in (x, changed))
        helpers.assert_same_bits({"logits": a}, {"logits": b})

    def test_bfloat16_activations_have_float32_parameters_and_logits(self):
        model = with_weights(dataclasses.replace(CONFIG, dtype="bfloat16"))
        logits = forward(model, ids())
        self.assertEqual(logits.dtype, jnp.float32)
        helpers.assert_close(logits, forward(with_weights(), ids()), rms=5e-2)
        shapes = nnx.eval_shape(lambda: nnx.state(decoder(dataclasses.replace(CONFIG, dtype="bfloat16"))))
        self.assertEqual({str(x.dtype) for x in jax.tree.leaves(shapes)}, {"float32"})

    def test_the_first_prediction_is_nearly_uniform(self):
        model = decoder()
        self.assertAlmostEqual(float(model.loss(ids(T=50))), math.log(CONFIG.vocab_size), delta=0.1)

    @parameterized.parameters(
        ("1m", 0.9e6, 1.1e6, ("kda", "kda", "kda", "attention")),
        ("report", 25e6, 35e6, ("kda",)),
        ("340m", 335e6, 345e6, ("kda",)),
    )
    def test_presets(self, name, least, most, mixers):
        config = PRESETS[name].decoder
        model = nnx.eval_shape(lambda: decoder(config))
        self.assertBetween(sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model))), least, most)
        self.assertEqual(config.mixers, mixers)


class ImplementationTest(parameterized.TestCase):
    @parameterized.parameters("xla", "recurrent", "pallas")
    def test_it_is_the_one_of_every_operator(self, implementation):
        if implementation == "pallas" and helpers.on_gpu():
            self.skipTest("names of the kernels depend on the card")
        with helpers.kernels_run(implementation):
            graph, state = nnx.split(with_weights(implementation=implementation))
            calls = dormouse_jax.explain(jax.grad(lambda state, x: nnx.merge(graph, state).loss(x)), state, ids())
            cache = nnx.eval_shape(lambda: with_weights().prefill(ids(T=3), 8)[1])
            of_step = dormouse_jax.explain(
                lambda state, x, c: nnx.merge(graph, state).step(x, c), state, ids()[:, 0], cache
            )
        elementwise = ("short_convolution", "rms_norm")
        calls += [call for call in of_step if call.operator not in elementwise]  # XLA's for one token
        took = {(call.operator, call.direction.split()[0]): call.implementation for call in calls}
        name = {"pallas": "pallas_triton"}.get(implementation, implementation)
        others = "xla" if name == "recurrent" else name
        want = {("kda", "forward"): name, ("kda_step", "forward"): name, ("attention", "forward"): others}
        backward = {("kda", "backward"): name, ("attention", "backward"): others}
        want |= dict.fromkeys(itertools.product(elementwise, ("forward", "backward")), others)
        want |= {key: x for key, x in backward.items() if x != "recurrent"}
        self.assertEqual(took, want)
        for call in calls:
            self.assertEqual(bool(call.kernels), implementation == "pallas", call)


class ErrorTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"loops": 1.5}, TypeError, "loops must be a Python int, got float"),
        ({"attention_every": 3}, ValueError, "attention_every must divide num_layers = 4, got 3"),
        ({"norm_eps": 0}, ValueError, "norm_eps must be positive, got 0"),
        ({"dtype": "float64"}, ValueError, "dtype must be one of 'float32', 'bfloat16', 'float16', got 'float64'"),
    )
    def test_sizes(self, options, exception, message):
        with self.assertRaises(exception) as caught:
            dataclasses.replace(CONFIG, **options)
        self.assertEqual(str(caught.exception), f"DecoderConfig: {message}")

    def test_options(self):
        with self.assertRaisesRegex(ValueError, "Decoder: remat must be one of 'none', 'dots', 'full', got 'some'"):
            decoder(remat="some")
        with self.assertRaisesRegex(ValueError, "KimiDeltaAttention: residuals must be one of"):
            nnx.eval_shape(lambda: decoder(residuals="some"))

    def test_sizes_of_attention(self):
        with self.assertRaisesRegex(ValueError, "CausalAttention: head_dim must be at least 1, got 0"):
            CausalAttention(8, num_heads=2, head_dim=0, rngs=nnx.Rngs(0))

    def test_inputs(self):
        model = with_weights()
        with self.assertRaisesRegex(ValueError, r"Decoder: ids must have shape \[B, T \+ 1\]"):
            model.loss(ids()[0])
        with self.assertRaisesRegex(ValueError, r"Decoder: ids must have shape \[B\]"):
            model.step(ids(), None)
        with self.assertRaisesRegex(ValueError, r"CausalAttention: length must be at least the T = 23 of x, got 5"):
            model.prefill(ids(), 5)


if __name__ == "__main__":
    absltest.main()
