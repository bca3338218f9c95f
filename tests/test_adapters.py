"""The adapters against float64, their conventions, their errors, and inside JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized

import dormouse_jax
import torch_ref.adapters
from dormouse_jax import adapters
from dormouse_jax.reference import loha as loha_reference
from tests import helpers
from tests.adapter_problems import CASES, assert_right, call, ones, operator_of, problem, value_and_grads
from torch_ref.oracle_adapters import adapter_oracle


class AccuracyTest(parameterized.TestCase):
    """Against float64: the output, and the gradients of every array."""

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in CASES)
    def test_float32(self, name):
        assert_right(name, *problem(name), **CASES[name])

    @parameterized.named_parameters(
        (f"{name.replace('.', '_')}_{dtype}", name, dtype) for name in CASES for dtype in ("bfloat16", "float16")
    )
    def test_16_bit(self, name, dtype):
        assert_right(name, *problem(name, dtype=dtype), **CASES[name])

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in CASES)
    def test_float32_factors_of_a_16_bit_layer(self, name):
        arrays, dout = problem(name, dtype="bfloat16", factor_dtype="float32")
        assert_right(name, arrays, dout, **CASES[name])
        form = "base" if name.endswith("rebuild") else "x"
        self.assertEqual(call(name, arrays, **CASES[name]).dtype, arrays[form].dtype)

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n != "oft.rebuild")
    def test_without_base(self, name):
        assert_right(name, *problem(name, base=False), **CASES[name])

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n.endswith("bypass"))
    def test_without_bias(self, name):
        assert_right(name, *problem(name, bias=False), **CASES[name])

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in CASES)
    def test_of_rank_and_sizes_one(self, name):
        sizes = {"O": 1, "I": 1, "r": 1, "T": 1, "n": 1, "factors": (1, 1)}
        arrays, dout = problem(name, **sizes)
        if name.startswith("oft"):  # the rotation of one number: its gradient is exactly zero
            got = value_and_grads(name, arrays, dout, **CASES[name])
            np.testing.assert_array_equal(got.pop("dP"), 0.0)
            want = adapter_oracle(name, arrays, dout=dout, **CASES[name])
            for n, x in got.items():
                helpers.assert_close(x, want[n], rms=1e-6, name=n)
        else:
            assert_right(name, arrays, dout, **CASES[name])

    @parameterized.product(
        form=("rebuild", "bypass"), detach_norm=(True, False), dtype=("float32", "bfloat16"), rank_stabilized=(True,)
    )
    def test_dora(self, form, dtype, **options):
        arrays, dout = problem(f"lora.{form}", magnitude=True, dtype=dtype)
        assert_right(f"lora.{form}", arrays, dout, alpha=2.0, **options)

    @parameterized.product(form=("rebuild", "bypass"), low_rank=(("W1",), ("W2",), ("W1", "W2")))
    def test_factors_of_lokr_that_are_products(self, form, low_rank):
        assert_right(f"lokr.{form}", *problem(f"lokr.{form}", low_rank=low_rank, r=2), scale=-1.5)

    @parameterized.named_parameters(("W2_first", (5, 3), 30, 21), ("W1_first", (2, 7), 30, 21))
    def test_either_order_of_a_lokr_bypass(self, factors, O, I):
        assert_right("lokr.bypass", *problem("lokr.bypass", O=O, I=I, factors=factors), scale=0.7)

    @parameterized.product(
        form=("rebuild", "bypass"), side=("input", "output"), neumann=(False, True), dtype=("float32", "bfloat16")
    )
    def test_oft(self, form, dtype, **options):
        arrays, dout = problem(f"oft.{form}", side=options["side"], dtype=dtype)
        assert_right(f"oft.{form}", arrays, dout, **options)

    def test_oft_of_one_block_far_from_the_identity(self):
        arrays, dout = problem("oft.rebuild", O=21, n=21)
        arrays["P"] = 9 * arrays["P"]
        assert_right("oft.rebuild", arrays, dout, side="output", bar=3e-6)

    def test_blocks_of_rows_of_a_loha_bypass(self):
        before, loha_reference.ROWS = loha_reference.ROWS, 13  # three blocks, the last of which sticks out
        try:
            assert_right("loha.bypass", *problem("loha.bypass", O=31, seed=1), alpha=1.0)
        finally:
            loha_reference.ROWS = before

    def test_a_small_update_of_a_16_bit_layer_is_not_rounded_away(self):
        arrays, _ = problem("loha.bypass", dtype="bfloat16", factor_dtype="float32", bias=False)
        arrays["x"] = arrays["x"].astype(np.float32)
        arrays["B1"] = arrays["B1"] * np.float32(2.0**-10)
        alone = dict(arrays, base=None)
        with_base, update = (call("loha.bypass", x, alpha=1.0) for x in (arrays, alone))
        base = arrays["x"].astype(jnp.bfloat16).astype(np.float64) @ arrays["base"].astype(np.float64).T
        helpers.assert_close(np.asarray(with_base, np.float64) - base, update, rms=1e-2)

    def test_a_row_of_zeros_has_no_direction(self):
        arrays, dout = problem("lora.rebuild", magnitude=True)
        arrays["base"][4], arrays["B"][4] = 0.0, 0.0
        for name in ("lora.rebuild", "lora.bypass"):
            if name == "lora.bypass":
                arrays["x"], dout = np.ones((2, 21), np.float32), np.ones((2, 30), np.float32)
            got = value_and_grads(name, arrays, dout, alpha=1.0, detach_norm=False)
            self.assertTrue(all(np.isfinite(np.asarray(x)).all() for x in got.values()), got)
            np.testing.assert_array_equal(got["out"][4] if name == "lora.rebuild" else got["out"][:, 4], 0.0)

    @parameterized.named_parameters(
        (name.replace(".", "_"), name) for name in CASES if helpers.on_gpu() or name == "lora.bypass"
    )
    def test_tf32_is_accepted_and_at_least_as_exact_as_that(self, name):
        assert_right(name, *problem(name), precision="tf32", bar=3e-3, **CASES[name])


class ConventionsTest(parameterized.TestCase):
    """What a number in a checkpoint means."""

    @parameterized.product(family=("lora", "loha"), rank_stabilized=(False, True))
    def test_alpha_is_divided_by_the_rank_or_its_root(self, family, rank_stabilized):
        name = f"{family}.rebuild"
        arrays, _ = problem(name, r=4, base=False)
        one = call(name, arrays, alpha=4.0)  # a scale of 1
        got = call(name, arrays, alpha=6.0, rank_stabilized=rank_stabilized)
        np.testing.assert_allclose(got, one * (3.0 if rank_stabilized else 1.5), rtol=1e-6)

    def test_the_scale_of_lokr_is_what_is_given(self):
        arrays, _ = problem("lokr.rebuild", base=False)
        got = call("lokr.rebuild", arrays, scale=1.0)
        np.testing.assert_array_equal(got, np.kron(arrays["W1"], arrays["W2"]))

    def test_rotations_turn_rows_or_columns(self):
        P = np.zeros((1, 2, 2), np.float32)
        P[0, 0, 1] = 1.0  # Q = [[0, 1], [-1, 0]], R = [[0, 1], [-1, 0]]: a quarter turn
        base = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
        R = np.array([[0.0, 1.0], [-1.0, 0.0]])
        np.testing.assert_allclose(adapters.oft.rebuild(P, base, side="output"), R.T @ base, atol=1e-6)
        np.testing.assert_allclose(adapters.oft.rebuild(P, base, side="input"), base @ R.T, atol=1e-6)
        x = np.array([[1.0, 2.0]], np.float32)
        np.testing.assert_allclose(adapters.oft.bypass(x, P, side="input"), x @ R, atol=1e-6)

    def test_neumann_is_near_the_exact_rotation(self):
        arrays, _ = problem("oft.rebuild")
        arrays["P"] = arrays["P"] / 20
        exact, series = (call("oft.rebuild", arrays, side="output", neumann=n) for n in (False, True))
        turned = call("oft.rebuild", arrays | {"P": -arrays["P"]}, side="output")
        helpers.assert_close(series, exact, rms=1e-4)
        self.assertGreater(np.abs(np.asarray(series - turned)).max(), 0.01)

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n.endswith("bypass"))
    def test_bypass_is_the_layer_of_the_rebuilt_weight_with_its_bias(self, name):
        arrays, _ = problem(name)
        of_weight = {n: x for n, x in arrays.items() if n not in ("x", "bias")}
        weight = call(name.replace("bypass", "rebuild"), of_weight, **CASES[name])
        want = arrays["x"].astype(np.float64) @ np.asarray(weight, np.float64).T + arrays["bias"]
        helpers.assert_close(call(name, arrays, **CASES[name]), want, rms=1e-6)


class TransformTest(parameterized.TestCase):
    """Inside JAX's transformations a call gives what it gives outside."""

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in CASES)
    def test_vmap_under_jit(self, name):
        one, dout = problem(name)
        two, dout2 = problem(name, seed=1)
        stacked = {n: np.stack([one[n], two[n]]) for n in one}

        @jax.jit
        def fn(arrays):
            return jax.vmap(lambda x: call(name, x, **CASES[name]))(arrays)

        out, vjp = jax.vjp(fn, stacked)
        (grads,) = vjp(jnp.stack([dout, dout2]))
        got = {"out": out} | {f"d{n}": x for n, x in grads.items()}
        wants = [adapter_oracle(name, x, dout=d, **CASES[name]) for x, d in ((one, dout), (two, dout2))]
        for n, x in got.items():
            helpers.assert_close(x, np.stack([want[n] for want in wants]), rms=1e-6, name=n)

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n.endswith("bypass"))
    def test_gradients_in_a_scan_under_jit_and_checkpoint_of_tokens_of_three_axes(self, name):
        arrays, dout = problem(name, T=12)
        want = adapter_oracle(name, arrays, dout=dout, **CASES[name])
        rest = {n: x for n, x in arrays.items() if n != "x"}

        @jax.jit
        @jax.grad
        def total(x):
            def layer(c, x):
                y = call(name, rest | {"x": x}, **CASES[name])
                return c + jnp.vdot(y, dout.reshape(y.shape)), None

            return jax.lax.scan(jax.checkpoint(layer), 0.0, x)[0]

        dx = total(jnp.stack([arrays["x"].reshape(3, 4, -1)] * 2))
        helpers.assert_close(dx[1].reshape(12, -1), want["dx"], rms=1e-6)

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n.endswith("bypass"))
    def test_a_bypass_keeps_nothing_of_the_weights_size_but_the_base(self, name):
        arrays, _ = problem(name)
        _, vjp = jax.vjp(lambda x: call(name, x, **CASES[name]), jax.tree.map(jnp.asarray, arrays))
        large = [x for x in jax.tree.leaves(vjp) if x.shape == arrays["base"].shape]
        self.assertLen(large, 1)
        np.testing.assert_array_equal(large[0], arrays["base"])

    @parameterized.named_parameters((n.replace(".", "_"), n) for n in CASES if n.endswith("bypass"))
    def test_no_tokens(self, name):
        arrays, dout = problem(name, T=0)
        got = value_and_grads(name, arrays, dout, **CASES[name])
        self.assertEqual(got["out"].shape, dout.shape)
        self.assertTrue(all((np.asarray(got[f"d{n}"]) == 0).all() for n in arrays))

    @parameterized.named_parameters((name.replace(".", "_"), name) for name in CASES)
    def test_the_same_bits_again(self, name):
        arrays, dout = problem(name, dtype="bfloat16")
        first, again = (value_and_grads(name, arrays, dout, **CASES[name]) for _ in range(2))
        helpers.assert_same_bits(again, first)

    def test_explain_tells_forward_and_backward(self):
        arrays, dout = problem("lora.bypass")
        fn = jax.grad(lambda x: jnp.vdot(call("lora.bypass", x, alpha=1.0, implementation="xla"), dout))
        calls = dormouse_jax.explain(fn, arrays)
        self.assertEqual(
            [(c.operator, c.direction, c.implementation, c.precision) for c in calls],
            [
                ("lora.bypass", "forward with residuals", "xla", "fp32"),
                ("lora.bypass", "backward", "xla", "fp32"),
            ],
        )


class TwinsTest(parameterized.TestCase):
    """The PyTorch ports that ours are timed against compute the same."""

    @parameterized.named_parameters(
        *((name.replace(".", "_"), name, CASES[name]) for name in CASES),
        ("dora", "lora.rebuild", {"alpha": 3.0}),
        ("oft_rebuild_input", "oft.rebuild", {"side": "input"}),
        ("oft_bypass_input", "oft.bypass", {"side": "input"}),
    )
    def test_values_and_gradients(self, name, options):
        given = self.id().endswith("dora")
        arrays, dout = problem(name, magnitude=given, side=options.get("side", "output"))
        want = adapter_oracle(name, arrays, dout=dout, **options)
        x = {n: torch.from_numpy(a).requires_grad_() for n, a in arrays.items()}
        scale = {"scale": options["alpha"] / 3} if "alpha" in options else options
        out = getattr(torch_ref.adapters, name.replace(".", "_"))(**x, **scale)
        grads = torch.autograd.grad(out, list(x.values()), torch.from_numpy(dout).to(out.dtype))
        got = {"out": out.detach()} | {f"d{n}": g for n, g in zip(x, grads, strict=True)}
        self.assertEqual(set(got), set(want))
        for n, value in got.items():
            helpers.assert_close(value.numpy(), want[n], rms=1e-6, name=n)


def _changed(name, **changes):
    """The arguments of a call, with some changed."""
    arrays, _ = problem(name)
    return name, arrays | CASES[name] | changes


class ErrorsTest(parameterized.TestCase):
    """Calls that cannot be served: what is raised, and what it says."""

    @parameterized.named_parameters(
        ("a_list", *_changed("lora.rebuild", A=[[1.0]]), TypeError, "A must be an array, got list"),
        ("one_axis", *_changed("lora.rebuild", A=ones(3)), ValueError, "A must have shape [r, I], got [3]"),
        (
            "rank",
            *_changed("lora.rebuild", B=ones(30, 4)),
            ValueError,
            "B must have shape [O, r] = [O, 3], got [30, 4]",
        ),
        (
            "no_rank",
            *_changed("lora.rebuild", A=ones(0, 21), B=ones(30, 0)),
            ValueError,
            "r, O and I must be at least 1",
        ),
        (
            "base",
            *_changed("lora.rebuild", base=ones(21, 30)),
            ValueError,
            "base must have shape [O, I] = [30, 21], got [21, 30]",
        ),
        (
            "x",
            *_changed("lora.bypass", x=ones(2, 20)),
            ValueError,
            "x must have shape [..., I] = [..., 21], got [2, 20]",
        ),
        ("bias", *_changed("lora.bypass", bias=ones(21)), ValueError, "bias must have shape [O] = [30], got [21]"),
        ("no_base", *_changed("lokr.bypass", base=None), ValueError, "bias must be None without base, got one of"),
        (
            "magnitude",
            *_changed("lora.rebuild", magnitude=ones(30, 1)),
            ValueError,
            "magnitude must have shape [O] = [30], got [30, 1]",
        ),
        (
            "magnitude_of_nothing",
            *_changed("lora.rebuild", magnitude=ones(30), base=None),
            ValueError,
            "base must be given with magnitude",
        ),
        ("alpha", *_changed("lora.rebuild", alpha="one"), TypeError, "alpha must be a Python number, got str"),
        (
            "infinite",
            *_changed("lora.rebuild", alpha=float("inf")),
            ValueError,
            "alpha must be a finite number, got inf",
        ),
        (
            "stabilized",
            *_changed("loha.rebuild", rank_stabilized=1),
            ValueError,
            "rank_stabilized must be one of False",
        ),
        ("detached", *_changed("lora.rebuild", detach_norm=None), ValueError, "detach_norm must be one of False, True"),
        (
            "rank_2",
            *_changed("loha.rebuild", A2=ones(4, 21)),
            ValueError,
            "A2 must have shape [r, I] = [3, 21], got [4",
        ),
        ("scale", *_changed("lokr.rebuild", scale=None), TypeError, "scale must be a Python number, got NoneType"),
        ("three", *_changed("lokr.rebuild", W1=(ones(2, 2),) * 3), ValueError, "W1 must be an array or a pair of them"),
        (
            "product",
            *_changed("lokr.rebuild", W1=(ones(5, 2), ones(4, 3))),
            ValueError,
            "W1a must have shape [a, r] = [a, 4], got [5, 2]",
        ),
        (
            "kronecker",
            *_changed("lokr.rebuild", W2=ones(6, 6)),
            ValueError,
            "base must have shape [O, I] = [30, 18], got [30, 21]",
        ),
        ("blocks", *_changed("oft.rebuild", P=ones(10, 3, 2)), ValueError, "P must have shape [k, n, n], k and n at"),
        (
            "rows",
            *_changed("oft.rebuild", P=ones(7, 3, 3)),
            ValueError,
            "base must have shape [O, I] = [21, I], got [30, 21]",
        ),
        (
            "side",
            *_changed("oft.rebuild", side="left"),
            ValueError,
            "side must be one of 'input', 'output', got 'left'",
        ),
        ("series", *_changed("oft.bypass", neumann=5), ValueError, "neumann must be one of False, True, got 5"),
        ("nothing", *_changed("oft.rebuild", base=None), TypeError, "base must be an array, got None"),
        (
            "integers",
            *_changed("lora.rebuild", A=ones(3, 21, dtype=np.int32)),
            TypeError,
            "A must be float32, bfloat16",
        ),
        (
            "precision",
            *_changed("lora.rebuild", precision="16bit"),
            ValueError,
            "precision must be 'fp32' or 'tf32' for",
        ),
        ("unknown", *_changed("lora.rebuild", precision="half"), ValueError, "precision must be one of None, 'fp32'"),
        (
            "implementation",
            *_changed("lora.rebuild", implementation="cuda"),
            ValueError,
            "implementation must be one of",
        ),
    )
    def test_refused(self, name, arguments, error, message):
        with self.assertRaises(error) as caught:
            operator_of(name)(**arguments)
        self.assertStartsWith(str(caught.exception), f"{name}: {message}")

    def test_float16_does_not_meet_bfloat16(self):
        arrays, _ = problem("lora.rebuild", dtype="bfloat16", factor_dtype="float16")
        with self.assertRaisesRegex(
            TypeError, "^lora.rebuild: base must be float16, as A is, or float32, got bfloat16"
        ):
            call("lora.rebuild", arrays, alpha=1.0)


if __name__ == "__main__":
    absltest.main()
