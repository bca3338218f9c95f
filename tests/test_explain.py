"""`explain`: what it finds in a jaxpr."""

import functools

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import dormouse_jax
from tests import helpers
from tests.helpers import Shape

INPUTS = helpers.problem("kda", Shape(T=20, K=8, V=8, H=2, HV=2)).inputs


def loss(inputs, **options):
    return jnp.sum(dormouse_jax.kda(**inputs, **options)[0])


class ExplainTest(parameterized.TestCase):
    def found(self, fn, *args, **kwargs):
        return [(c.operator, c.implementation, c.direction) for c in dormouse_jax.explain(fn, *args, **kwargs)]

    def test_the_operator_itself(self):
        self.assertEqual(self.found(dormouse_jax.kda, **INPUTS, implementation="xla"), [("kda", "xla", "forward")])

    def test_a_call_that_is_not_differentiated_keeps_no_residuals(self):
        fn = functools.partial(loss, implementation="xla", residuals="save")
        self.assertEqual(self.found(fn, INPUTS), [("kda", "xla", "forward")])
        self.assertEqual(
            self.found(jax.grad(fn), INPUTS), [("kda", "xla", "forward with residuals"), ("kda", "xla", "backward")]
        )
        outputs = jax.make_jaxpr(fn)(INPUTS).jaxpr
        saved = jax.make_jaxpr(functools.partial(loss, implementation="xla"))(INPUTS).jaxpr
        self.assertEqual(
            [str(v.aval) for e in outputs.eqns for v in e.outvars], [str(v.aval) for e in saved.eqns for v in e.outvars]
        )

    @parameterized.named_parameters(
        ("plain", lambda f: f),
        ("jit", jax.jit),
        ("vmap", lambda f: lambda x: jax.vmap(f)(jax.tree.map(lambda x: x[None], x))),
        ("checkpoint", jax.checkpoint),
        ("scan", lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=3)),
        ("cond", lambda f: lambda x: jax.lax.cond(x["q"].sum() > 0, f, lambda x: 0.0, x)),
        ("while", lambda f: lambda x: jax.lax.while_loop(lambda c: c < 1, lambda c: c + f(x), 0.0)),
    )
    def test_inside(self, transform):
        fn = transform(functools.partial(loss, implementation="xla"))
        self.assertEqual(self.found(fn, INPUTS), [("kda", "xla", "forward")])

    def test_a_function_jitted_and_called_is_not_traced_again(self):
        traces = []

        @jax.jit
        @jax.grad
        def fn(inputs):
            traces.append(0)
            return loss(inputs)

        with dormouse_jax.interpret_kernels():
            before = self.found(fn, INPUTS)
        # Outside the context it is still what it was traced to.
        self.assertEqual(self.found(fn, INPUTS), before)
        self.assertEqual(before, [("kda", "pallas_triton", "forward"), ("kda", "pallas_triton", "backward")])
        self.assertLen(traces, 1)

        @jax.jit
        def called(inputs):
            traces.append(0)
            return loss(inputs, implementation="xla")

        called(INPUTS)
        self.assertEqual(self.found(called, INPUTS), [("kda", "xla", "forward")])
        self.assertLen(traces, 2)

    def test_kernels_and_configuration(self):
        with dormouse_jax.interpret_kernels():
            forward, backward = dormouse_jax.explain(jax.grad(loss), INPUTS)
        self.assertNotEmpty(forward.kernels)
        self.assertTrue(all(name.startswith("kda_") for name in forward.kernels + backward.kernels), forward.kernels)
        # The backward has the forward's kernels again, since it keeps no residuals, and its own.
        self.assertContainsSubset(forward.kernels, backward.kernels)
        self.assertGreater(len(backward.kernels), len(forward.kernels))
        self.assertTrue(forward.interpret)
        self.assertIn(f"kernels: {', '.join(forward.kernels)}", str(forward))
        self.assertIn("chunk_size", str(forward))

    def test_what_jax_moves_out_of_a_loop_is_no_call(self):
        raw = helpers.problem("kda", Shape(T=20, K=8, V=8, H=2, HV=2)).inputs | {
            "A_log": jnp.zeros(2),
            "dt_bias": jnp.zeros(16),
        }

        def looped(inputs):
            fn = functools.partial(loss, use_gate_in_kernel=True)
            return jax.lax.scan(lambda c, q: (c + fn(inputs | {"q": q}), None), 0.0, inputs["q"][None])[0]

        with dormouse_jax.interpret_kernels():
            got = self.found(jax.grad(looped), raw)
        self.assertEqual(got, [("kda", "pallas_triton", "forward"), ("kda", "pallas_triton", "backward")])

    def test_two_operators_in_program_order(self):
        general = helpers.problem("gdn2", Shape(T=20, K=8, V=8)).inputs

        def fn(a, b):
            return loss(a, implementation="recurrent") + jnp.sum(dormouse_jax.gdn2(**b, implementation="xla")[0])

        self.assertEqual(self.found(fn, INPUTS, general), [("kda", "recurrent", "forward"), ("gdn2", "xla", "forward")])

    def test_shapes_alone_are_enough(self):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), INPUTS)
        self.assertEqual(self.found(loss, shapes, implementation="xla"), [("kda", "xla", "forward")])

    def test_a_function_without_an_operator(self):
        self.assertEqual(self.found(jnp.sin, INPUTS["q"]), [])

    def test_what_was_passed_over_says_why(self):
        with jax.default_device(jax.devices("cpu")[0]):
            (call,) = dormouse_jax.explain(dormouse_jax.kda, **INPUTS)
        self.assertIn("interpret_kernels", dict(call.passed_over)["pallas_triton"])
        self.assertIn("not pallas_triton:", str(call))


if __name__ == "__main__":
    absltest.main()
