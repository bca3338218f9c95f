"""Raw gates, beta, queries and keys in plain jnp, against float64 formulas in PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized
from torch.nn import functional as F

from dormouse_jax import gates
from tests import helpers

HV, K = 3, 5


def log_decay(x, A_log, dt_bias, lower_bound):
    """The formulas, one token and value head after the other."""
    rows = []
    for h in range(HV):
        raw = x[..., h, :] if dt_bias is None else x[..., h, :] + dt_bias[h * K : (h + 1) * K]
        rate = torch.ones((), dtype=x.dtype) if A_log is None else A_log[h].exp()
        rows.append(-rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw))
    return torch.stack(rows, -2)


def beta_sigmoid(x, allow_neg_eigval):
    return torch.sigmoid(x) * (2 if allow_neg_eigval else 1)


def l2_normalize(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def value_and_grads(function, cotangent, *arrays):
    """By JAX in the arrays' own dtypes."""
    y, vjp = jax.vjp(function, *(jnp.asarray(x) for x in arrays))
    return y, vjp(jnp.asarray(cotangent, y.dtype))


def torch_value_and_grads(function, cotangent, *arrays):
    """By PyTorch in float64."""
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in arrays]
    y = function(*leaves)
    y.backward(torch.tensor(np.asarray(cotangent, np.float64)))
    return y.detach().numpy(), [x.grad.numpy() for x in leaves if x.grad is not None]


class GatesTest(parameterized.TestCase):
    def check(self, function, formula, *arrays):
        for dtype, bar in ((np.float64, 1e-14), (np.float32, 1e-5), (jnp.bfloat16, 1e-2)):
            with jax.enable_x64(dtype == np.float64):
                rounded = [np.asarray(x).astype(dtype) for x in arrays]
                cotangent = np.random.default_rng(7).normal(size=rounded[0].shape)
                cotangent = cotangent.astype(np.float64 if dtype == np.float64 else np.float32)
                y, grads = value_and_grads(function, cotangent, *rounded)
                want, want_grads = torch_value_and_grads(formula, cotangent, *rounded)
                self.assertEqual(y.dtype, np.float64 if dtype == np.float64 else np.float32)
                helpers.assert_close(y, want, rms=min(bar, 1e-6))
                for dx, want_dx, x in zip(grads, want_grads, rounded, strict=True):
                    self.assertEqual(dx.dtype, x.dtype)
                    helpers.assert_close(dx, want_dx, rms=bar)

    @parameterized.named_parameters(
        (f"bound_{bound}{'_with_A_log' * rate}{'_with_dt_bias' * bias}", bound, rate, bias)
        for bound in (None, -5.0, -0.1)
        for rate in (True, False)
        for bias in (True, False)
        if rate or bound
    )
    def test_log_decay(self, lower_bound, rate, bias):
        rng = np.random.default_rng(0)
        arrays = {"x": rng.normal(scale=4.0, size=(2, 7, HV, K))}
        arrays |= {"A_log": rng.uniform(-2, 3, size=HV)} if rate else {}
        arrays |= {"dt_bias": rng.normal(size=HV * K)} if bias else {}

        def by(function):
            def run(*values):
                named = dict(zip(arrays, values, strict=True))
                return function(named["x"], named.get("A_log"), named.get("dt_bias"), lower_bound)

            return run

        self.check(by(gates.log_decay), by(log_decay), *arrays.values())

    @parameterized.parameters(False, True)
    def test_beta_sigmoid(self, allow_neg_eigval):
        x = np.random.default_rng(1).normal(scale=3.0, size=(2, 7, HV))
        self.check(lambda x: gates.beta_sigmoid(x, allow_neg_eigval), lambda x: beta_sigmoid(x, allow_neg_eigval), x)

    @parameterized.parameters(1.0, 1e-3, 1e-6, 1e4)
    def test_l2_normalize(self, size):
        self.check(gates.l2_normalize, l2_normalize, size * np.random.default_rng(2).normal(size=(2, 7, HV, K)))

    def test_a_zero_row_stays_zero_with_a_finite_gradient(self):
        y, (dx,) = value_and_grads(gates.l2_normalize, np.ones((2, K), np.float32), np.zeros((2, K), np.float32))
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_allclose(dx, 1e3, rtol=1e-6)

    @parameterized.parameters(None, -5.0)
    def test_saturated_gates_are_finite_where_they_can_be(self, lower_bound):
        x = np.array([-np.inf, -1e4, -100.0, 1e4, np.inf], np.float32)[None] * np.ones((HV, 1), np.float32)
        A_log = np.array([-3.0, 0.0, 3.0], np.float32)

        def g(x, A_log):
            return gates.log_decay(x, A_log, None, lower_bound)

        y = g(jnp.asarray(x), jnp.asarray(A_log))
        np.testing.assert_allclose(y[:, :2], np.zeros((HV, 2)), atol=1e-6)
        if lower_bound is not None:
            np.testing.assert_allclose(y[:, 3:], np.full((HV, 2), lower_bound))
        # Where everything is forgotten, what comes in from the recurrence is an exact zero.
        _, (dx, dA_log) = value_and_grads(g, np.where(np.asarray(y) < -100, 0, 1), x, A_log)
        self.assertTrue(np.isfinite(dx).all())
        self.assertTrue(np.isfinite(dA_log).all())


if __name__ == "__main__":
    absltest.main()
