"""`short_convolution` against its definition in float64."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized

import dormouse_jax
from dormouse_jax import short_convolution
from tests import helpers


class Shape(NamedTuple):
    """B, T, S, channels of each result, whether there is a bias, whether sequences are packed."""

    B: int
    T: int
    S: int
    sizes: tuple[int, ...]
    bias: bool = False
    packed: bool = False


SHAPES = {
    "three_results": Shape(2, 71, 4, (24, 24, 40)),
    "bias_and_packed": Shape(1, 71, 3, (20,), bias=True, packed=True),
    "no_token_before": Shape(2, 33, 1, (20,), bias=True),
    "fewer_tokens_than_taps": Shape(1, 2, 4, (16,), packed=True),
    "whole_tiles": Shape(2, 128, 4, (1024, 512)),
    "a_tile_that_sticks_out": Shape(3, 200, 8, (520, 300), bias=True, packed=True),
    "many": Shape(8, 2048, 4, (1024, 1024)),  # so many that spans are longer
}
INTERPRETED = ("three_results", "bias_and_packed")  # they compile for seconds
TOLERANCES = {"float32": (1e-6, 1e-5), "bfloat16": (3e-3, 3e-3), "float16": (5e-4, 5e-4)}


def cases():
    for (name, shape), dtype, implementation in itertools.product(SHAPES.items(), TOLERANCES, ("xla", "pallas")):
        small = shape.B * shape.T * sum(shape.sizes) < 1e5
        if implementation == "xla":
            taken = small and (dtype == "float32" or name == "three_results")
        else:
            interpreted = dtype == "float32" and name in INTERPRETED
            taken = (name != "many" or dtype == "bfloat16") if helpers.on_gpu() else interpreted
        if taken:
            yield f"{name}_{dtype}_{implementation}", shape, dtype, implementation


def problem(shape, dtype, seed=0):
    """(x, kernel, bias or None), segment ids or None, dy of every result."""
    rng, C = np.random.default_rng(seed), sum(shape.sizes)
    x = rng.normal(size=(shape.B, shape.T, C)).astype(dtype)
    kernel = rng.normal(size=(shape.S, C)).astype(np.float32)
    bias = rng.normal(size=C).astype(np.float32) if shape.bias else None
    # Ids that come again are other sequences.
    ids = rng.integers(0, 3, size=(shape.B, shape.T // 5 + 1)).repeat(5, axis=1)[:, : shape.T].astype(np.int32)
    dys = tuple(rng.normal(size=(shape.B, shape.T, size)).astype(dtype) for size in shape.sizes)
    return (x, kernel, bias), ids if shape.packed else None, dys


def oracle(shape, arrays, ids, dys):
    """Results and gradients."""
    x, kernel, bias = (None if a is None else torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays)
    sequence = np.zeros((shape.B, shape.T), int)
    if ids is not None:
        sequence[:, 1:] = np.cumsum(ids[:, 1:] != ids[:, :-1], axis=1)
    z = torch.zeros_like(x) + (0 if bias is None else bias)
    for back in range(min(shape.S, shape.T)):
        same = torch.from_numpy(sequence[:, back:] == sequence[:, : shape.T - back])[..., None]
        term = kernel[shape.S - 1 - back] * x[:, : shape.T - back] * same
        z = z + torch.nn.functional.pad(term, (0, 0, back, 0))
    ys = torch.nn.functional.silu(z).split(shape.sizes, dim=-1)
    leaves = [a for a in (x, kernel, bias) if a is not None]
    grads = torch.autograd.grad(ys, leaves, [torch.from_numpy(dy.astype(np.float64)) for dy in dys])
    return [y.detach().numpy() for y in ys], [grad.numpy() for grad in grads]


def run(shape, arrays, ids, dys, implementation):
    """The same of an implementation."""

    @jax.jit
    def both(arrays, dys):
        def call(arrays):
            options = {"sizes": shape.sizes, "segment_ids": ids, "implementation": implementation}
            return short_convolution(*arrays, **options)

        ys, pull = jax.vjp(call, arrays)
        return ys, pull(dys)[0]

    with helpers.kernels_run(implementation):
        ys, grads = both(arrays, dys)
    return list(ys), [grad for grad in grads if grad is not None]


class ShortConvolutionTest(parameterized.TestCase):
    @parameterized.named_parameters(cases())
    def test_results_and_gradients_equal_the_definition(self, shape, dtype, implementation):
        arrays, ids, dys = problem(shape, jnp.dtype(dtype))
        want, want_grads = oracle(shape, arrays, ids, dys)
        got, grads = run(shape, arrays, ids, dys, implementation)
        rms, grad_rms = TOLERANCES[dtype]
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            self.assertEqual(a.dtype, jnp.dtype(dtype))
            helpers.assert_close(a, b, rms=rms, name=f"y{i}")
        for name, a, b in zip(("dx", "dkernel", "dbias"), grads, want_grads, strict=False):
            helpers.assert_close(a, b, rms=grad_rms, name=name)
        self.assertEqual(len(grads), len(want_grads))
        if helpers.on_gpu() or implementation == "xla":  # Interpreted it would compile again.
            again, grads_again = run(shape, arrays, ids, dys, implementation)
            helpers.assert_same_bits(
                dict(enumerate(jax.tree.leaves((got, grads)))), dict(enumerate(jax.tree.leaves((again, grads_again))))
            )

    @parameterized.named_parameters((n, n) for n in (("xla", "pallas") if helpers.on_gpu() else ("xla",)))
    def test_tokens_reach_none_before_them_and_none_of_another_sequence(self, implementation):
        shape = Shape(1, 71, 4, (40,), packed=True)
        arrays, _, dys = problem(shape, np.float32)
        ids = np.repeat(np.array([1, 2], np.int32), (40, 31))[None]
        x = arrays[0].copy()
        x[:, 30:40] = np.nan
        (y,), (dx, _) = run(shape, arrays, ids, dys, implementation)
        (changed,), (dx_changed, _) = run(shape, (x, *arrays[1:]), ids, dys, implementation)
        for rows in (slice(0, 30), slice(40, None)):
            helpers.assert_same_bits({"y": y[:, rows]}, {"y": changed[:, rows]})
        helpers.assert_same_bits({"dx": dx[:, 40:]}, {"dx": dx_changed[:, 40:]})

    def test_one_result_is_no_tuple_and_explain_names_the_kernels(self):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 64, 32), (4, 32))]

        def loss(x, kernel):
            return short_convolution(x, kernel).sum()

        with helpers.kernels_run("pallas"):
            calls = dormouse_jax.explain(jax.grad(loss), *arrays)
        found = [(call.operator, call.direction, call.kernels) for call in calls]
        kernels = ("short_convolution", "short_convolution_backward")
        want = [("short_convolution", d, (k,)) for d, k in zip(("forward", "backward"), kernels, strict=True)]
        self.assertEqual(found, want)

    def test_no_tokens(self):
        y = short_convolution(jnp.zeros((2, 0, 8)), jnp.zeros((4, 8)), sizes=(2, 6))
        self.assertEqual([a.shape for a in y], [(2, 0, 2), (2, 0, 6)])

    @parameterized.named_parameters(
        ("x", {"x": np.zeros((3, 8))}, ValueError, "x must have shape [B, T, C], got [3, 8]"),
        ("kernel", {"kernel": np.zeros((4, 7))}, ValueError, "kernel must have shape [S, C] = [S, 8], got [4, 7]"),
        ("no_taps", {"kernel": np.zeros((0, 8))}, ValueError, "S and C must be at least 1, got kernel of shape [0, 8]"),
        ("bias", {"bias": np.zeros(7)}, ValueError, "bias must have shape [C] = [8], got [7]"),
        ("dtype", {"x": np.zeros((1, 3, 8), int)}, TypeError, "x must be float32, bfloat16 or float16, got int32"),
        ("sizes", {"sizes": (4, 3)}, ValueError, "sizes must be positive and add up to C = 8, got [4, 3]"),
        ("segments", {"segment_ids": np.zeros((1, 4), np.int32)}, ValueError, "segment_ids must have shape [B, T]"),
        (
            "implementation",
            {"implementation": "recurrent"},
            ValueError,
            "implementation must be one of None, 'pallas', 'pallas_triton', 'xla', got 'recurrent'",
        ),
    )
    def test_bad_arguments(self, change, exception, message):
        given = {"x": np.zeros((1, 3, 8)), "kernel": np.zeros((4, 8))} | change
        given = {n: a.astype(np.float32) if getattr(a, "dtype", None) == np.float64 else a for n, a in given.items()}
        with self.assertRaises(exception) as caught:
            short_convolution(**given)
        self.assertStartsWith(str(caught.exception), f"short_convolution: {message}")

    def test_more_taps_than_the_kernels_hold(self):
        x, kernel = jnp.ones((1, 16, 8)), jnp.ones((9, 8))
        with helpers.kernels_run("pallas"):
            with self.assertRaisesRegex(NotImplementedError, "cannot serve this call: .* at most 8 taps, got 9"):
                short_convolution(x, kernel, implementation="pallas")
            with self.assertWarnsRegex(RuntimeWarning, "taking the slower implementation 'xla'"):
                short_convolution(x, kernel)


if __name__ == "__main__":
    absltest.main()
