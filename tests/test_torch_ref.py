"""The references against each other: plain autograd, the oracle's hand-written reverse, the chunked port."""

import ast
import pathlib
import sys
from unittest import mock

import ml_dtypes
import numpy as np
import torch
from absl.testing import absltest, parameterized

from tests.helpers import assert_close
from torch_ref import kda, oracle

_GRADIENTS = ("dq", "dk", "dv", "dg", "derase", "dwrite", "dinitial_state")
_INPUTS = ("q", "k", "v", "g", "erase", "write")


def _case(*, B=2, T=23, H=1, HV=2, K=5, V=7, operator="gdn2", decay=0.5, seed=0):
    """Inputs and cotangents in float64 by name; for kda, erase and write are the same [B, T, HV]."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape))

    k = normal(B, T, H, K)
    case = {
        "q": normal(B, T, H, K),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": normal(B, T, HV, V),
        "g": -decay * normal(B, T, HV, K).abs(),
        "erase": normal(B, T, HV, K).sigmoid(),
        "write": normal(B, T, HV, V).sigmoid(),
        "initial_state": normal(B, HV, K, V),
        "do": normal(B, T, HV, V),
        "dfinal_state": normal(B, HV, K, V),
    }
    if operator == "kda":
        case["erase"] = case["write"] = normal(B, T, HV).sigmoid()
    return case


def _forget(case):
    """The same case with document starts and gates that no float32 cumulative sum survives."""
    g = case["g"].clone()
    T = g.shape[1]
    g[:, T // 3] = -torch.inf
    g[:, T // 2, :, ::2] = -1e4
    g[:, 2 * T // 3 :, :, 1] = -50.0
    g[:, -1, :, 0] = np.log(1e-12)
    return case | {"g": g}


def _oracle(case):
    return oracle.gdn2_oracle(**case)


def _differentiate(function, case):
    """o, final_state and torch's own gradients of function(q, ..., write, initial_state), in the case's dtypes."""
    leaves = [case[name].detach().clone().requires_grad_() for name in (*_INPUTS, "initial_state")]
    o, S = function(*leaves)
    grads = torch.autograd.grad((o * case["do"]).sum() + (S * case["dfinal_state"]).sum(), leaves)
    return {"o": o.detach(), "final_state": S.detach()} | dict(zip(_GRADIENTS, grads, strict=True))


def _recurrence(q, k, v, g, erase, write, S):
    """The definition once more, as plainly as it can be written, for autograd."""
    group, outputs = v.shape[2] // q.shape[2], []
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    erase, write = (x[..., None] if x.ndim == 3 else x for x in (erase, write))
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S
        read = torch.einsum("bhkv,bhk->bhv", S, erase[:, t] * k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write[:, t] * v[:, t] - read)
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, 1), S


def _port(**options):
    def function(q, k, v, g, erase, write, S):
        return kda.chunk_gdn2(q, k, v, g, erase, write, initial_state=S, **options)

    return function


def _assert_all_close(got, want, *, value, gradient=None):
    for name, x in got.items():
        assert_close(x, want[name], rms=value if name in ("o", "final_state") else gradient, name=name)


class OracleTest(parameterized.TestCase):
    @parameterized.product(operator=("kda", "gdn2"), T=(1, 2, 23), HV=(1, 4))
    def test_reverse_is_the_gradient_of_the_recurrence(self, operator, T, HV):
        case = _case(T=T, H=max(1, HV // 2), HV=HV, operator=operator)
        _assert_all_close(_differentiate(_recurrence, case), _oracle(case), value=1e-14, gradient=1e-13)

    def test_reverse_is_the_gradient_where_the_past_is_forgotten(self):
        case = _forget(_case(T=30, HV=1))
        _assert_all_close(_differentiate(_recurrence, case), _oracle(case), value=1e-14, gradient=1e-13)

    def test_kda_is_the_general_rule_with_one_gate(self):
        case = _case(operator="kda")
        general = _oracle(case)
        beta = case.pop("erase")
        del case["write"]
        got = oracle.kda_oracle(beta=beta, **case)
        self.assertNotIn("derase", got)
        np.testing.assert_array_equal(got["dbeta"], general["derase"] + general["dwrite"])
        self.assertEqual(got["dbeta"].shape, tuple(beta.shape))

    def test_a_scalar_gate_has_the_summed_gradient_of_its_channels(self):
        case = _case(operator="kda")
        scalar = _oracle(case)
        case["erase"] = case["erase"][..., None].expand(case["g"].shape)
        case["write"] = case["write"][..., None].expand(case["v"].shape)
        wide = _oracle(case)
        np.testing.assert_array_equal(wide["o"], scalar["o"])
        assert_close(wide["derase"].sum(-1), scalar["derase"], rms=1e-14, name="derase")
        assert_close(wide["dwrite"].sum(-1), scalar["dwrite"], rms=1e-14, name="dwrite")

    def test_state_and_final_gradient_may_be_left_out(self):
        case = _case() | {"initial_state": None, "dfinal_state": None}
        zeros = torch.zeros(2, 2, 5, 7, dtype=torch.float64)
        want = _oracle(case | {"initial_state": zeros, "dfinal_state": zeros})
        for name, x in _oracle(case).items():
            np.testing.assert_array_equal(x, want[name], err_msg=name)

    def test_forward_alone_gives_the_same_values(self):
        case = _case()
        want = _oracle(case)
        got = oracle.gdn2_oracle(**case | {"do": None, "dfinal_state": None})
        self.assertEqual(sorted(got), ["final_state", "o"])
        for name, x in got.items():
            np.testing.assert_array_equal(x, want[name], err_msg=name)

    def test_a_few_pairs_of_a_case_give_their_part_of_it(self):
        case = _case(B=3, H=2, HV=4)
        whole = _oracle(case)
        keys, values = slice(1, 2), slice(2, 4)
        part = {
            name: x[1:2, keys] if name.endswith("state") else x[1:2, :, keys if name in ("q", "k") else values]
            for name, x in case.items()
        }
        part |= {name: case[name][1:2, values] for name in ("initial_state", "dfinal_state")}
        for name, x in _oracle(part).items():
            state = name.endswith("state")
            heads = keys if name in ("dq", "dk") else values
            assert_close(x, whole[name][1:2, heads] if state else whole[name][1:2, :, heads], rms=1e-14, name=name)

    def test_how_pairs_are_grouped_changes_nothing(self):
        case = _case(B=3, HV=2)
        want = _oracle(case)
        with mock.patch.object(oracle, "_GROUP_BYTES", 4 * 8 * 5 * 7):  # groups of 4 and 2 pairs
            got = _oracle(case)
        _assert_all_close(got, want, value=1e-14, gradient=1e-14)

    def test_minus_infinity_is_a_document_start(self):
        case = _case(T=30)
        case["g"][:, 10] = -torch.inf
        late = {name: x if name.endswith("state") else x[:, 10:] for name, x in case.items()}
        whole, part = _oracle(case), _oracle(late | {"initial_state": None})
        for name, x in part.items():
            if name != "dinitial_state":
                assert_close(whole[name] if name == "final_state" else whole[name][:, 10:], x, rms=1e-14, name=name)
        np.testing.assert_array_equal(whole["dg"][:, 10], 0.0)

    def test_no_gradient_crosses_a_document_start(self):
        case = _case(T=30)
        case["g"][:, 10] = -torch.inf
        case["do"][:, :10] = 0.0
        got = _oracle(case)
        np.testing.assert_array_equal(got["dinitial_state"], 0.0)
        for name in ("dq", "dk", "dv", "dg", "derase", "dwrite"):
            np.testing.assert_array_equal(got[name][:, :10], 0.0, err_msg=name)

    @parameterized.parameters("numpy bfloat16", "torch bfloat16", "numpy float16", "torch leaf")
    def test_inputs_are_widened_before_anything_else(self, kind):
        case = _case()
        narrow = {
            "numpy bfloat16": lambda x: x.numpy().astype(ml_dtypes.bfloat16),
            "torch bfloat16": lambda x: x.to(torch.bfloat16),
            "numpy float16": lambda x: x.numpy().astype(np.float16),
            "torch leaf": lambda x: x.clone().requires_grad_(),
        }[kind]
        given = {name: narrow(x) for name, x in case.items()}
        kept = {}
        for name, x in given.items():
            kept[name] = x.astype(np.float64) if isinstance(x, np.ndarray) else x.detach().double().numpy()
        want = _oracle(kept)
        for name, x in _oracle(given).items():
            self.assertEqual(x.dtype, np.float64)
            np.testing.assert_array_equal(x, want[name], err_msg=name)

    def test_inputs_are_left_as_they_were(self):
        case = _case()
        before = {name: x.clone() for name, x in case.items()}
        _oracle(case)
        for name, x in case.items():
            self.assertTrue(torch.equal(x, before[name]), name)

    @parameterized.parameters(
        ("v", (2, 23, 2)),
        ("k", (2, 22, 1, 5)),
        ("g", (2, 23, 2, 1)),
        ("erase", (2, 23, 1)),
        ("write", (2, 23, 2, 5)),
        ("do", (2, 23, 2, 1)),
        ("initial_state", (2, 2, 7, 5)),
    )
    def test_a_wrong_shape_is_named(self, name, shape):
        case = _case() | {name: torch.ones(shape)}
        with self.assertRaisesRegex(ValueError, rf"\b{name}\b"):
            _oracle(case)

    def test_value_heads_must_share_key_heads_evenly(self):
        with self.assertRaisesRegex(ValueError, "multiple"):
            _oracle(_case(H=2, HV=3))

    def test_the_thread_count_is_put_back(self):
        before = torch.get_num_threads()
        _oracle(_case())
        self.assertEqual(torch.get_num_threads(), before)


class PortTest(parameterized.TestCase):
    @parameterized.product(
        solve=("substitution", "triangular"),
        shape=((1, 16), (15, 16), (33, 16), (40, 8), (70, 64), (5, 1)),
        operator=("kda", "gdn2"),
    )
    def test_float64_equals_the_oracle(self, solve, shape, operator):
        T, C = shape
        case = _case(T=T, H=2, HV=4, operator=operator)
        got = _differentiate(_port(solve=solve, chunk_size=C), case)
        _assert_all_close(got, _oracle(case), value=1e-13, gradient=1e-12)

    @parameterized.product(solve=("substitution", "triangular"), C=(16, 64))
    def test_strong_gates_are_exact_in_float64_and_float32(self, solve, C):
        case = _forget(_case(T=150, K=12, V=9, decay=2.0))
        got = _differentiate(_port(solve=solve, chunk_size=C), case)
        _assert_all_close(got, _oracle(case), value=1e-13, gradient=1e-12)
        case = {name: x.float() for name, x in case.items()}
        got = _differentiate(_port(solve=solve, chunk_size=C), case)
        _assert_all_close(got, _oracle(case), value=5e-7, gradient=2e-6)

    @parameterized.parameters((1, 1), (1, 6), (48, 3), (100, 60))
    def test_any_head_size(self, K, V):
        case = {name: x.float() for name, x in _case(B=1, T=40, K=K, V=V).items()}
        got = _differentiate(_port(chunk_size=16), case)
        _assert_all_close(got, _oracle(case), value=5e-7, gradient=2e-6)

    # With beta near 2 the state is reflected again and again: even a perfect inverse, rounded to float32, then leaves
    # up to 6e-6 in the final state.
    @parameterized.product(solve=("substitution", "triangular"), beta_and_most=((1.0, 1e-6, 5e-6), (1.99, 1e-5, 2e-5)))
    def test_identical_keys_do_not_break_the_inverse(self, solve, beta_and_most):
        beta, value, gradient = beta_and_most
        case = _case(B=1, T=64, K=16, V=8, operator="kda")
        case["k"][:] = case["k"][:, :1]
        case["erase"] = case["write"] = torch.full_like(case["erase"], beta)
        case["g"].zero_()
        case = {name: x.float() for name, x in case.items()}
        got = _differentiate(_port(solve=solve, chunk_size=64), case)
        _assert_all_close(got, _oracle(case), value=value, gradient=gradient)

    def test_intermediates_are_what_the_formulas_say(self):
        C = 16
        case = _case(T=40, H=1, HV=2)
        q, k, v, g, erase, write = (case[name] for name in _INPUTS)
        o, S, x = kda.chunk_gdn2(
            q, k, v, g, erase, write, initial_state=case["initial_state"], chunk_size=C, return_intermediates=True
        )

        def chunks(x):  # [B, T, heads, X] -> [B, HV, NT, C, X], zeros past T
            x = torch.cat((x, torch.zeros_like(x[:, :8])), 1).unflatten(1, (-1, C))
            return x.permute(0, 3, 1, 2, 4).expand(-1, 2, -1, -1, -1)

        q, k, v, g, erase, write = (chunks(x) for x in (q, k, v, g, erase, write))
        G, e, y, scale = g.cumsum(3), erase * k, write * v, 5**-0.5
        i, j = torch.arange(C)[:, None], torch.arange(C)[None]
        D = torch.where((i >= j)[..., None], G[..., :, None, :] - G[..., None, :, :], 0.0).exp()
        A = torch.where(i > j, torch.einsum("bhnic,bhnjc,bhnijc->bhnij", e, k, D), 0.0)
        P = torch.where(i >= j, scale * torch.einsum("bhnic,bhnjc,bhnijc->bhnij", q, k, D), 0.0)
        M = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + A)
        Ehat, Qhat, Ktil = e * G.exp(), scale * q * G.exp(), k * (G[..., -1:, :] - G).exp()
        U = M @ (y - Ehat @ x["states"])
        states_after = G[..., -1, :, None].exp() * x["states"] + Ktil.mT @ U
        want = {"G": G, "A": A, "P": P, "M": M, "W": M @ Ehat, "My": M @ y, "U": U}
        want |= {"Ehat": Ehat, "Qhat": Qhat, "Ktil": Ktil}
        want["states"] = torch.cat((case["initial_state"][:, :, None], states_after[:, :, :-1]), 2)
        self.assertEqual(set(x), set(want))
        for name, y in want.items():
            assert_close(x[name], y, rms=1e-13, name=name)
        assert_close(S, states_after[:, :, -1], rms=1e-13, name="final_state")
        out = (Qhat @ x["states"] + P @ U).flatten(2, 3)[:, :, :40].transpose(1, 2)
        assert_close(o, out, rms=1e-13, name="o")

    def test_intermediates_stay_finite_behind_strong_gates(self):
        case = {name: x.float() for name, x in _forget(_case(T=40)).items()}
        *_, x = kda.chunk_gdn2(*(case[name] for name in _INPUTS), chunk_size=16, return_intermediates=True)
        for name, y in x.items():
            self.assertTrue(torch.isfinite(y).all(), name)

    def test_factored_decay_agrees_while_gates_are_weak(self):
        case = {name: x.float() for name, x in _case(T=40, decay=0.2).items()}
        got = _differentiate(_port(decay="factored", chunk_size=16), case)
        _assert_all_close(got, _oracle(case), value=2e-6, gradient=1e-5)

    def test_factored_decay_overflows_where_the_exact_one_does_not(self):
        case = {name: x.float() for name, x in _case(T=40).items()}
        case["g"].fill_(-8.0)  # e^128 inside a chunk of 16
        got = _differentiate(_port(decay="factored", chunk_size=16), case)
        self.assertFalse(all(torch.isfinite(x).all() for x in got.values()))
        got = _differentiate(_port(chunk_size=16), case)
        _assert_all_close(got, _oracle(case), value=5e-7, gradient=2e-6)

    @parameterized.parameters((torch.bfloat16, 1e-2), (torch.float16, 1.2e-3))
    def test_rounded_operands_cost_what_their_type_costs(self, dtype, most):
        case = {name: x.float() for name, x in _case(T=70, K=32, V=32).items()}
        got, want = _differentiate(_port(chunk_size=16, matmul_dtype=dtype), case), _oracle(case)
        for name, x in got.items():
            assert_close(x, want[name], rms=most, name=name)
            error = np.sqrt(np.mean((x.numpy() - want[name]) ** 2) / np.mean(want[name] ** 2))
            self.assertGreater(error, most / 50, f"{name} was not rounded")

    def test_results_and_gradients_have_their_dtypes(self):
        case = {name: x.to(torch.bfloat16) for name, x in _case().items()}
        case |= {name: case[name].float() for name in ("initial_state", "dfinal_state", "g")}
        got = _differentiate(_port(chunk_size=16), case)
        self.assertEqual(got["o"].dtype, torch.bfloat16)
        self.assertEqual(got["final_state"].dtype, torch.float32)
        for name in _INPUTS:
            self.assertEqual(got[f"d{name}"].dtype, case[name].dtype, name)

    def test_later_tokens_change_no_earlier_bit(self):
        case = {name: x.float() for name, x in _case(T=40).items()}
        run = _port(chunk_size=16)
        o, _ = run(*(case[name] for name in (*_INPUTS, "initial_state")))
        for name in _INPUTS:
            changed = case[name].clone()
            changed[:, 20:] *= 3.0
            o2, _ = run(*((case | {name: changed})[n] for n in (*_INPUTS, "initial_state")))
            self.assertTrue(torch.equal(o[:, :20], o2[:, :20]), name)

    # What torch.compile captures is tested; what its backends make of it is theirs to test, and takes a minute.
    def test_the_whole_function_is_one_graph(self):
        case = {name: x.float() for name, x in _case(T=7).items()}
        torch._dynamo.reset()
        compiled = torch.compile(_port(chunk_size=4), backend="eager", fullgraph=True, dynamic=False)
        _assert_all_close(_differentiate(compiled, case), _oracle(case), value=5e-7, gradient=2e-6)

    def test_parts_compiled_by_themselves_give_the_same(self):
        case = {name: x.float() for name, x in _case(T=7).items()}
        torch._dynamo.reset()
        kda._compiled.cache_clear()
        self.addCleanup(kda._compiled.cache_clear)
        compile_part = torch.compile
        with mock.patch.object(torch, "compile", lambda f, **options: compile_part(f, backend="eager", **options)):
            got = _differentiate(_port(solve="triangular", chunk_size=4, compile_parts=True), case)
        _assert_all_close(got, _oracle(case), value=5e-7, gradient=2e-6)

    @parameterized.parameters({"solve": "products"}, {"decay": "guess"}, {"chunk_size": 24}, {"chunk_size": 0})
    def test_an_unknown_option_is_named(self, **option):
        case = _case()
        with self.assertRaisesRegex(ValueError, next(iter(option))):
            kda.chunk_gdn2(*(case[name] for name in _INPUTS), **option)


class MutationTest(parameterized.TestCase):
    """A reference that is wrong in one place must not pass for right."""

    def _correct_too_much(products):
        def mutant(rows, k, g, matmul_dtype):
            P, A, *decays = products(rows, k, g, matmul_dtype)
            return P, 1.02 * A, *decays

        return mutant

    def _decay_of_the_last_token_twice(products):
        def mutant(rows, k, g, matmul_dtype):
            P, A, from_start, to_end = products(rows, k, g, matmul_dtype)
            return P, A, from_start, to_end * g[:, :, -1:].exp()

        return mutant

    def _first_order(inverse):
        return lambda A, solve: torch.eye(A.shape[-1], dtype=A.dtype) - A

    def _no_decay(step):
        return lambda S, W, My, Ktil, total, matmul_dtype: step(S, W, My, Ktil, torch.ones_like(total), matmul_dtype)

    def _no_read_of_the_state(read):
        return lambda Qhat, P, states, values, dtype: read(Qhat, P, [0 * S for S in states], values, dtype)

    @parameterized.named_parameters(
        ("the_correction_is_two_hundredths_too_strong", "_products_exact", _correct_too_much),
        ("the_last_gate_decays_its_own_key", "_products_exact", _decay_of_the_last_token_twice),
        ("the_inverse_stops_at_first_order", "_inverse", _first_order),
        ("the_state_does_not_decay", "_step", _no_decay),
        ("the_output_ignores_the_state", "_read", _no_read_of_the_state),
    )
    def test_caught(self, function, mutate):
        case = {name: x.float() for name, x in _case(T=40, decay=0.05).items()}
        want = _oracle(case)
        with mock.patch.object(kda, function, mutate(getattr(kda, function))):
            got = _differentiate(_port(solve="triangular", chunk_size=16), case)
        with self.assertRaisesRegex(AssertionError, "RMS error"):
            _assert_all_close(got, want, value=1e-3, gradient=1e-3)

    @parameterized.parameters(*_GRADIENTS)
    def test_a_gradient_off_by_a_thousandth_is_caught(self, name):
        case = _case()
        want = _oracle(case)
        with self.assertRaisesRegex(AssertionError, name):
            _assert_all_close(want | {name: want[name] * 1.001}, want, value=1e-4, gradient=1e-4)


class ImportTest(absltest.TestCase):
    def test_the_references_import_torch_and_numpy_alone(self):
        for path in sorted(pathlib.Path(kda.__file__).parent.glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for package in (name.partition(".")[0] for name in names):
                    self.assertIn(package, {"torch_ref", "torch", "numpy", *sys.stdlib_module_names}, path.name)


if __name__ == "__main__":
    absltest.main()
