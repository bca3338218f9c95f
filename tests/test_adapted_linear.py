"""Adapters on layers of Flax NNX, and what PEFT and LyCORIS store of one."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from dormouse_jax import adapters
from dormouse_jax.layers import AdaptedLinear, AdapterParam
from tests.helpers import assert_close

I, O = 12, 20


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def linear(**options):
    layer = nnx.Linear(I, O, rngs=nnx.Rngs(0), **options)
    if layer.bias is not None:
        layer.bias[...] = normal(O, seed=9).astype(layer.bias[...].dtype)
    return layer


def fresh(name, layer):
    """An adapter that changes nothing yet."""
    key = jax.random.key(1)
    return {
        "lora": lambda: adapters.init_lora(key, O, I, rank=3, alpha=6.0),
        "dora": lambda: adapters.init_lora(key, O, I, rank=3, alpha=6.0, base=layer.kernel[...].T),
        "loha": lambda: adapters.init_loha(key, O, I, rank=3, alpha=2.0, rank_stabilized=True),
        "lokr": lambda: adapters.init_lokr(key, O, I, scale=0.5),
        "low_rank_lokr": lambda: adapters.init_lokr(key, O, I, scale=0.5, factor=2, rank=2),
        "oft_input": lambda: adapters.init_oft(O, I, block_size=3),
        "oft_output": lambda: adapters.init_oft(O, I, block_size=4, side="output"),
        "oft_neumann": lambda: adapters.init_oft(O, I, block_size=4, side="input", neumann=True),
    }[name]()


NAMES = ("lora", "dora", "loha", "lokr", "low_rank_lokr", "oft_input", "oft_output", "oft_neumann")


def trained(name, layer):
    """The same some steps later."""
    adapter = fresh(name, layer)
    moved = {n: x + 0.2 * normal(*x.shape, seed=i) for i, (n, x) in enumerate(adapter.arrays.items())}
    return adapters.Adapter(adapter.family, moved, adapter.options)


class AdaptedLinearTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Of the layers of Flax that ours are held to: on a GPU XLA would multiply float32 in one TF32 pass.
        self.enter_context(jax.default_matmul_precision("highest"))

    @parameterized.parameters(*NAMES)
    def test_starts_as_the_layer_itself(self, name):
        layer = linear()
        x = normal(2, 5, I)
        want = layer(x)
        assert_close(AdaptedLinear(layer, fresh(name, layer))(x), want, rms=1e-6)

    @parameterized.parameters(*NAMES)
    def test_merges_and_unmerges(self, name):
        layer, x = linear(), normal(2, 5, I)
        kernel, plain = np.array(layer.kernel[...]), np.array(layer(x))
        adapted = AdaptedLinear(layer, trained(name, layer))
        y = np.array(adapted(x))
        self.assertGreater(np.abs(y - plain).max(), 0.05)
        adapted.merge()
        self.assertTrue(adapted.merged)
        assert_close(adapted(x), y, rms=1e-6, name="merged")
        assert_close(layer(x), y, rms=1e-6, name="the layer itself")
        adapted.unmerge()
        np.testing.assert_array_equal(layer.kernel[...], kernel)
        np.testing.assert_array_equal(adapted(x), y)

    def test_a_16_bit_layer_is_restored_bit_for_bit(self):
        layer = linear(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        kernel = np.array(layer.kernel[...])
        adapted = AdaptedLinear(layer, trained("lora", layer))
        y = adapted(normal(5, I))
        self.assertEqual(y.dtype, jnp.bfloat16)
        adapted.merge()
        self.assertEqual(layer.kernel[...].dtype, jnp.bfloat16)
        assert_close(adapted(normal(5, I)), y, rms=1e-2)
        adapted.unmerge()
        np.testing.assert_array_equal(layer.kernel[...], kernel)

    def test_trains_the_adapter_alone(self):
        layer = linear()
        adapted, x, target = AdaptedLinear(layer, fresh("lora", layer)), normal(40, I), normal(40, O, seed=1)

        @nnx.jit
        def step(module):
            def loss(module):
                return jnp.mean((module(x) - target) ** 2)

            value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, AdapterParam))(module)
            params = nnx.state(module, AdapterParam)
            nnx.update(module, jax.tree.map(lambda p, g: p - 0.3 * g, params, grads))
            return value

        kernel = np.array(layer.kernel[...])
        losses = [float(step(adapted)) for _ in range(20)]
        self.assertLess(losses[-1], 0.9 * losses[0])
        np.testing.assert_array_equal(layer.kernel[...], kernel)
        self.assertEqual(set(nnx.state(adapted, AdapterParam)["adapter_params"]), {"A", "B"})

    def test_without_a_bias(self):
        layer = linear(use_bias=False)
        x, adapted = normal(5, I), AdaptedLinear(layer, trained("lokr", layer))
        want = x @ np.asarray(adapted.adapter.rebuild(layer.kernel[...].T)).T
        assert_close(adapted(x), want, rms=1e-6)

    def test_errors_say_what_is_wrong(self):
        layer = linear()
        adapter = fresh("lora", layer)
        with self.assertRaisesRegex(TypeError, "linear must be an nnx.Linear, got Conv"):
            AdaptedLinear(nnx.Conv(3, 4, 2, rngs=nnx.Rngs(0)), adapter)
        with self.assertRaisesRegex(TypeError, "adapter must be an Adapter, got dict"):
            AdaptedLinear(layer, dict(adapter.arrays))
        with self.assertRaisesRegex(ValueError, "linear must have the dot_general of JAX"):
            AdaptedLinear(linear(dot_general=lambda *a, **k: None), adapter)
        with self.assertRaisesRegex(ValueError, r"base must have shape \[O, I\] = \[12, 20\], got \[20, 12\]"):
            AdaptedLinear(layer, adapters.init_lora(jax.random.key(0), I, O, rank=2, alpha=1.0))
        adapted = AdaptedLinear(layer, adapter)
        with self.assertRaisesRegex(ValueError, "unmerge needs a merged layer"):
            adapted.unmerge()
        adapted.merge()
        with self.assertRaisesRegex(ValueError, "merge needs a layer that is not merged"):
            adapted.merge()


class InitTest(parameterized.TestCase):
    @parameterized.parameters(
        (4096, -1, (64, 64)),
        (11008, -1, (86, 128)),
        (4096, 8, (8, 512)),
        (30, 4, (3, 10)),
        (7, -1, (1, 7)),
        (8, 4, (2, 4)),
    )
    def test_factorize(self, size, factor, want):
        self.assertEqual(adapters.factorize(size, factor), want)

    def test_errors_say_what_is_wrong(self):
        with self.assertRaisesRegex(ValueError, "init_lora: rank must be at least 1, got 0"):
            adapters.init_lora(jax.random.key(0), 4, 4, rank=0, alpha=1.0)
        with self.assertRaisesRegex(ValueError, "init_oft: block_size must divide the input's 12 features, got 5"):
            adapters.init_oft(O, I, block_size=5)
        with self.assertRaisesRegex(ValueError, "factorize: factor must be at least 1, got 0"):
            adapters.factorize(12, 0)
        with self.assertRaisesRegex(
            ValueError, "Adapter: family must be one of 'lora', 'loha', 'lokr', 'oft', got 'ia3'"
        ):
            adapters.Adapter("ia3", {}, {})


class CheckpointTest(parameterized.TestCase):
    """Tensors made here, in the layouts and scales that the two libraries document."""

    def weight(self, adapter, base):
        return np.asarray(adapter.rebuild(base), np.float64)

    def test_lora_of_peft(self):
        base, A, B = normal(O, I), normal(4, I, seed=1), normal(O, 4, seed=2)
        tensors = {"lora_A.weight": A, "lora_B.weight": B}
        assert_close(self.weight(adapters.from_peft(tensors, alpha=8), base), base + 2 * B @ A, rms=1e-6)
        got = adapters.from_peft(tensors, alpha=8, rank_stabilized=True)
        assert_close(self.weight(got, base), base + 4 * B @ A, rms=1e-6)

    def test_dora_of_both(self):
        base, A, B, m = normal(O, I), normal(4, I, seed=1), normal(O, 4, seed=2), normal(O, seed=3)
        V = base + 2 * B @ A
        want = (m / np.linalg.norm(V, axis=1))[:, None] * V
        peft = {"lora_A.weight": A, "lora_B.weight": B, "lora_magnitude_vector.weight": m}
        lycoris = {"lora_down.weight": A, "lora_up.weight": B, "dora_scale": m[:, None], "alpha": np.float32(8)}
        for adapter, detached in ((adapters.from_peft(peft, alpha=8), True), (adapters.from_lycoris(lycoris), False)):
            assert_close(self.weight(adapter, base), want, rms=1e-6)
            self.assertEqual(adapter.options["detach_norm"], detached)
        with self.assertRaisesRegex(ValueError, r"dora_scale must have shape \[O, 1\] = \[20, 1\], got \[1, 12\]"):
            adapters.from_lycoris(lycoris | {"dora_scale": normal(1, I)})

    def test_lora_of_lycoris_of_alpha_0(self):
        base, A, B = normal(O, I), normal(4, I, seed=1), normal(O, 4, seed=2)
        tensors = {"lora_down.weight": A, "lora_up.weight": B}
        for extra in ({}, {"alpha": np.float32(0)}):
            assert_close(self.weight(adapters.from_lycoris(tensors | extra), base), base + B @ A, rms=1e-6)

    def test_loha_of_both(self):
        base, shapes = (
            normal(O, I),
            {"hada_w1_a": (O, 4), "hada_w1_b": (4, I), "hada_w2_a": (O, 4), "hada_w2_b": (4, I)},
        )
        t = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        want = base + 0.5 * (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
        assert_close(self.weight(adapters.from_peft(t, alpha=2), base), want, rms=1e-6)
        assert_close(self.weight(adapters.from_lycoris(t | {"alpha": np.float32(2)}), base), want, rms=1e-6)

    def test_lokr_with_full_factors_differs_between_the_two(self):
        base, w1, w2 = normal(O, I), normal(4, 3), normal(5, 4, seed=1)
        tensors = {"lokr_w1": w1, "lokr_w2": w2}
        peft = adapters.from_peft(tensors, alpha=6, rank=12)
        assert_close(self.weight(peft, base), base + 0.5 * np.kron(w1, w2), rms=1e-6)
        lycoris = adapters.from_lycoris(tensors | {"alpha": np.float32(6)})
        assert_close(self.weight(lycoris, base), base + np.kron(w1, w2), rms=1e-6)
        with self.assertRaisesRegex(ValueError, "rank must be given for lokr with both factors full"):
            adapters.from_peft(tensors, alpha=6)
        with self.assertRaisesRegex(ValueError, "scale must be 1 with both factors full"):
            adapters.to_lycoris(peft)

    def test_lokr_with_a_low_rank_factor(self):
        base, w1, a, b = normal(O, I), normal(4, 3), normal(5, 2, seed=1), normal(2, 4, seed=2)
        tensors = {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b}
        want = base + 1.5 * np.kron(w1, a @ b)
        assert_close(self.weight(adapters.from_peft(tensors, alpha=3), base), want, rms=1e-6)
        assert_close(self.weight(adapters.from_lycoris(tensors | {"alpha": np.float32(3)}), base), want, rms=1e-6)

    @parameterized.parameters(False, True)
    def test_oft_of_peft_rotates_inputs_and_its_exact_branch_the_other_way(self, neumann):
        base, vector = normal(O, I), normal(4, 3, seed=1) / 3
        Q = np.zeros((4, 3, 3))
        Q[:, [0, 0, 1], [1, 2, 2]] = vector
        Q -= Q.transpose(0, 2, 1)
        eye = np.eye(3)
        if neumann:
            R = eye + 2 * Q + 2 * Q @ Q + 2 * Q @ Q @ Q + Q @ Q @ Q @ Q
        else:
            R = (eye - Q) @ np.linalg.inv(eye + Q)
        x = normal(7, I, seed=2)
        want = np.einsum("tkn,knm->tkm", x.reshape(7, 4, 3), R).reshape(7, I) @ base.T
        adapter = adapters.from_peft({"oft_R.weight": vector}, neumann=neumann)
        assert_close(adapter.bypass(x, base), want, rms=1e-6)

    def test_oft_of_lycoris_rotates_outputs(self):
        base, P = normal(O, I), normal(5, 4, 4, seed=1) / 3
        Q = P - P.transpose(0, 2, 1)
        R = (np.eye(4) + Q) @ np.linalg.inv(np.eye(4) - Q)
        want = np.einsum("knm,kni->kmi", R, base.reshape(5, 4, I)).reshape(O, I)
        adapter = adapters.from_lycoris({"oft_blocks": P, "alpha": np.float32(0)})
        assert_close(self.weight(adapter, base), want, rms=1e-6)

    @parameterized.parameters(*NAMES)
    def test_round_trips(self, name):
        layer = linear()
        base, adapter = layer.kernel[...].T, trained(name, layer)
        want = self.weight(adapter, base)
        peft = (adapters.to_peft, adapters.from_peft)
        lycoris = (adapters.to_lycoris, adapters.from_lycoris)
        if name == "lokr":  # LyCORIS has no scale there
            adapter = adapters.Adapter("lokr", adapter.arrays, {"scale": 1.0})
            want = self.weight(adapter, base)
        for to, back in (peft, lycoris):
            wrong_side = (to, name) in ((adapters.to_peft, "oft_output"), (adapters.to_lycoris, "oft_input"))
            if wrong_side or (to, name) == (adapters.to_lycoris, "oft_neumann"):
                with self.assertRaisesRegex(ValueError, "side must be"):
                    to(adapter)
                continue
            tensors, settings = to(adapter)
            again = back({n: np.asarray(x) for n, x in tensors.items()}, **settings)
            assert_close(self.weight(again, base), want, rms=1e-6, name=to.__name__)
            tensors_again, _ = to(again)
            for n, x in tensors.items():
                np.testing.assert_array_equal(tensors_again[n], x, err_msg=n)

    def test_unknown_tensors_are_refused(self):
        with self.assertRaisesRegex(ValueError, "from_peft: tensors must be those of a linear layer .* got lokr_t2"):
            adapters.from_peft({"lokr_t2": normal(2, 2, 3, 3)}, alpha=1)
        with self.assertRaisesRegex(ValueError, "from_lycoris: alpha must be 0 for oft"):
            adapters.from_lycoris({"oft_blocks": normal(5, 4, 4), "alpha": np.float32(0.1)})
        with self.assertRaisesRegex(ValueError, "from_lycoris: tensors must be .* got oft_blocks, rescale"):
            adapters.from_lycoris({"oft_blocks": normal(5, 4, 4), "rescale": normal(O, 1)})
        with self.assertRaisesRegex(ValueError, "must have n \\(n - 1\\) / 2 columns for some n, got 4"):
            adapters.from_peft({"oft_R.weight": normal(3, 4)})
        with self.assertRaisesRegex(ValueError, "from_peft: alpha must be given for lora, got None"):
            adapters.from_peft({"lora_A.weight": normal(4, I), "lora_B.weight": normal(O, 4)})


if __name__ == "__main__":
    absltest.main()
