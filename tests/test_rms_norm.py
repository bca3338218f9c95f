"""`rms_norm` against its definition in float64."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized

import dormouse_jax
from dormouse_jax import rms_norm
from tests import helpers


class Case(NamedTuple):
    """Shape of x, whether there are a residual and a gate, and how many of x's last axes the gate's bias has."""

    shape: tuple[int, ...]
    residual: bool = False
    gate: bool = False
    bias: int = 0


CASES = {
    "alone": Case((3, 40)),
    "residual": Case((2, 7, 64), residual=True),
    "gate_of_heads": Case((2, 29, 3, 24), gate=True, bias=2),
    "gate_without_bias": Case((5, 32), gate=True),
    "everything": Case((4, 33, 128), residual=True, gate=True, bias=1),
    "one_row": Case((128,), residual=True),
    "layer": Case((2, 2048, 1024), residual=True),
    "odd_layer": Case((1, 1003, 515), residual=True),
    "heads": Case((2, 2048, 8, 128), gate=True, bias=2),
    "odd_heads": Case((1, 1003, 3, 76), gate=True, bias=2),
    "several_warps": Case((2, 301, 10240), residual=True),
}
INTERPRETED = ("residual", "gate_of_heads")
TOLERANCES = {"float32": (1e-6, 1e-5), "bfloat16": (4e-3, 4e-3), "float16": (6e-4, 6e-4)}


def cases():
    for (name, case), dtype, implementation in itertools.product(CASES.items(), TOLERANCES, ("xla", "pallas")):
        small = np.prod(case.shape) < 1e5
        if implementation == "xla":
            taken = small and (dtype == "float32" or name == "everything")
        else:
            taken = helpers.on_gpu() or (dtype == "float32" and name in INTERPRETED)
        if taken:
            yield f"{name}_{dtype}_{implementation}", case, dtype, implementation


def problem(case, dtype):
    """Arrays by the names of the arguments, and gradients of the results."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=case.shape).astype(dtype)}
    arrays["scale"] = rng.normal(size=case.shape[-1:]).astype(np.float32)
    arrays |= {name: rng.normal(size=case.shape).astype(dtype) for name in ("residual", "gate") if getattr(case, name)}
    if case.bias:
        arrays["gate_bias"] = rng.normal(size=case.shape[-case.bias :]).astype(np.float32)
    return arrays, [rng.normal(size=case.shape).astype(dtype) for _ in range(1 + case.residual)]


def oracle(case, arrays, gradients):
    """Results and gradients by name. What is normed is the sum as it is rounded."""
    x = {name: torch.from_numpy(a.astype(np.float64)).requires_grad_() for name, a in arrays.items()}
    total = x["x"]
    if case.residual:
        rounded = (arrays["x"] + arrays["residual"]).astype(np.float64)
        total = total + x["residual"]
        total = total + (torch.from_numpy(rounded) - total).detach()
    y = total / torch.sqrt((total**2).mean(-1, keepdim=True) + 1e-5) * x["scale"]
    if case.gate:
        y = y * torch.sigmoid(x["gate"] + (x["gate_bias"] if case.bias else 0))
    results = [total, y] if case.residual else [y]
    grads = torch.autograd.grad(results, list(x.values()), [torch.from_numpy(g.astype(np.float64)) for g in gradients])
    return [a.detach().numpy() for a in results], {n: g.numpy() for n, g in zip(x, grads, strict=True)}


def run(arrays, gradients, implementation):
    """The same of an implementation."""

    @jax.jit
    def both(arrays, gradients):
        results, pull = jax.vjp(lambda arrays: rms_norm(**arrays, implementation=implementation), arrays)
        return results, pull(tuple(gradients) if len(gradients) > 1 else gradients[0])[0]

    with helpers.kernels_run(implementation):
        results, grads = both(arrays, gradients)
    return jax.tree.leaves(results), grads


class RmsNormTest(parameterized.TestCase):
    @parameterized.named_parameters(cases())
    def test_results_and_gradients_equal_the_definition(self, case, dtype, implementation):
        arrays, gradients = problem(case, jnp.dtype(dtype))
        want, want_grads = oracle(case, arrays, gradients)
        got, grads = run(arrays, gradients, implementation)
        rms, grad_rms = TOLERANCES[dtype]
        for name, a, b in zip(("y", "sum"), got[::-1], want[::-1], strict=False):
            self.assertEqual(a.dtype, jnp.dtype(dtype))
            helpers.assert_close(a, b, rms=rms, name=name)
        self.assertEqual((len(got), set(grads)), (len(want), set(want_grads)))
        for name, grad in grads.items():
            self.assertEqual(grad.dtype, arrays[name].dtype, name)
            helpers.assert_close(grad, want_grads[name], rms=grad_rms, name=f"d{name}")
        if helpers.on_gpu() or implementation == "xla":  # Interpreted it would compile again.
            again, grads_again = run(arrays, gradients, implementation)
            helpers.assert_same_bits(dict(enumerate(got)), dict(enumerate(again)))
            helpers.assert_same_bits(grads, grads_again)

    def test_a_row_that_is_not_finite_reaches_no_other(self):
        case = CASES["everything"]
        arrays, gradients = problem(case, np.float32)
        x = arrays["x"].copy()
        x[2, 7] = np.nan
        implementation = "pallas" if helpers.on_gpu() else "xla"
        (total, y), grads = run(arrays, gradients, implementation)
        (total_changed, y_changed), grads_changed = run(arrays | {"x": x}, gradients, implementation)
        others = np.ones(case.shape[:2], bool)
        others[2, 7] = False
        pairs = ((total, total_changed), (y, y_changed), *((grads[n], grads_changed[n]) for n in ("x", "gate")))
        for a, b in pairs:
            helpers.assert_same_bits({"rows": np.asarray(a)[others]}, {"rows": np.asarray(b)[others]})

    def test_explain_names_the_kernels(self):
        x = jax.ShapeDtypeStruct((4, 32), jnp.bfloat16)
        with helpers.kernels_run("pallas"):
            calls = dormouse_jax.explain(jax.grad(lambda x: rms_norm(x, jnp.ones(32)).astype(jnp.float32).sum()), x)
        found = [(call.operator, call.direction, call.kernels) for call in calls]
        want = [("rms_norm", "forward", ("rms_norm",)), ("rms_norm", "backward", ("rms_norm_backward",))]
        self.assertEqual(found, want)

    def test_no_rows(self):
        total, y = rms_norm(jnp.zeros((0, 8)), jnp.ones(8), residual=jnp.zeros((0, 8)))
        self.assertEqual((total.shape, y.shape), ((0, 8), (0, 8)))

    @parameterized.named_parameters(
        ("x", {"x": np.float32(1)}, ValueError, "x must have shape [..., D] with D at least 1, got []"),
        ("scale", {"scale": np.zeros(7)}, ValueError, "scale must have shape [D] = [8], got [7]"),
        ("dtype", {"x": np.zeros((3, 8), int)}, TypeError, "x must be float32, bfloat16 or float16, got int32"),
        ("residual", {"residual": np.zeros((2, 8))}, ValueError, "residual must have shape that of x = [3, 8]"),
        ("gate", {"gate": np.zeros((3, 8), np.float16)}, TypeError, "gate must be float32, got float16"),
        ("bias", {"gate_bias": np.zeros(8)}, ValueError, "gate_bias must be None without a gate, got one"),
        (
            "bias_of_other_heads",
            {"gate": np.zeros((3, 8)), "gate_bias": np.zeros((2, 8))},
            ValueError,
            "gate_bias must have the shape of x's last axis or last two, of [3, 8], got [2, 8]",
        ),
        ("epsilon", {"epsilon": 0}, ValueError, "epsilon must be a positive finite number, got 0.0"),
        ("implementation", {"implementation": "triton"}, ValueError, "implementation must be one of None, 'pallas'"),
    )
    def test_bad_arguments(self, change, exception, message):
        given = {"x": np.zeros((3, 8)), "scale": np.zeros(8)} | change
        given = {n: a.astype(np.float32) if getattr(a, "dtype", None) == np.float64 else a for n, a in given.items()}
        with self.assertRaises(exception) as caught:
            rms_norm(**given)
        self.assertStartsWith(str(caught.exception), f"rms_norm: {message}")

    def test_rows_longer_than_the_kernels_hold(self):
        x, scale = jnp.ones((1, 16385)), jnp.ones(16385)
        with helpers.kernels_run("pallas"):
            with self.assertRaisesRegex(NotImplementedError, "cannot serve this call: .* at most 16384 numbers"):
                rms_norm(x, scale, implementation="pallas")
            with self.assertWarnsRegex(RuntimeWarning, "taking the slower implementation 'xla'"):
                rms_norm(x, scale)


if __name__ == "__main__":
    absltest.main()
