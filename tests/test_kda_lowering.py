"""The operators lowered for an NVIDIA GPU on a machine that need not have one."""

import itertools

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import dormouse_jax
from tests import helpers
from tests.helpers import OPERATORS, Shape

DEVICE = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
MESH = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=DEVICE)


class LoweringTest(parameterized.TestCase):
    @parameterized.parameters(
        *itertools.product(OPERATORS, ("fp32", "tf32", "bfloat16", "float16"), (False,)),
        ("kda", "fp32", True),
        ("gdn2", "bfloat16", True),
    )
    def test_forward_and_backward(self, operator, precision, x64):
        dtype = jnp.float32 if precision in ("fp32", "tf32") else jnp.dtype(precision)
        p = helpers.problem(operator, Shape(T=100, K=60, V=48, B=1, H=1, HV=2), dtype=dtype)
        options = {"precision": precision} if dtype == jnp.float32 else {}

        def fn(inputs, state, do, dfinal_state):
            op = getattr(dormouse_jax, operator)
            _, vjp = jax.vjp(lambda x, s: op(**x, initial_state=s, output_final_state=True, **options), inputs, state)
            return vjp((do, dfinal_state))

        arguments = (p.inputs, p.initial_state, p.do, p.dfinal_state)
        with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(MESH):
            fn = jax.jit(fn)
            text = fn.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
            calls = dormouse_jax.explain(fn, *arguments)
        self.assertEqual([c.implementation for c in calls], ["pallas_triton"] * 2)
        for name in {name for c in calls for name in c.kernels}:
            self.assertIn(name, text)


if __name__ == "__main__":
    absltest.main()
