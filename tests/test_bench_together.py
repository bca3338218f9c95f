"""Many cases measured at once: the rows of the case by case measurement, and what goes wrong stays where it is."""

import os
import unittest.mock

from absl.testing import absltest, parameterized

from bench import adapters, families, harness, toy
from bench.spec import save_arrays
from bench.together import Together

MODES = ("fwd", "fwdbwd")


def together(jobs, seconds=200.0, modes=MODES):
    session = Together(harness.Options(rounds=2))
    with session:
        return session.measure_all([(case, arms, modes) for case, arms in jobs], seconds)


class TogetherTest(parameterized.TestCase):
    def test_every_arm_and_case_has_its_rows_whatever_an_arm_does(self):
        cases, known = toy.cases(["small", "large"]), toy.arms()
        names = ("good", "sleeps", "wrong_gradient", "raises", "absent")
        rows = together([(case, [known[name] for name in names]) for case in cases])
        self.assertEqual(
            [(row["case"], row["arm"], row["mode"]) for row in rows],
            [(case, name, mode) for case in ("small", "large") for name in names for mode in MODES],
        )
        for row in rows:
            wrong = row["arm"] == "wrong_gradient" and row["mode"] == "fwdbwd"
            want = {"raises": "NOT MEASURED", "absent": "NOT MEASURED"}.get(row["arm"], "WRONG" if wrong else "OK")
            self.assertEqual(row["status"], want, row)
            self.assertEqual(bool(row["times"]), want == "OK")
        self.assertEqual({row["verdict"] for row in rows if row["arm"] == "sleeps"}, {"SLOWER"})
        self.assertIn("does not take such a case", next(row["reason"] for row in rows if row["arm"] == "raises"))

    def test_a_dead_worker_takes_its_own_rows_alone(self):
        (case,), known = toy.cases(["small"]), toy.arms()
        rows = together([(case, [known["crashes"], known["good"]])])
        for row in rows:
            self.assertEqual(row["status"], "OK" if row["arm"] == "good" else "NOT MEASURED", row)
        self.assertIn("simulated crash", rows[0]["reason"])

    def test_without_a_reference_nothing_is_measured(self):
        (case,), known = toy.cases(["small"]), toy.arms()

        def without_a_cotangent(session, case):  # which the forward alone does not need
            inputs = toy.Toy().inputs(case)
            save_arrays(session.folder / case.key, {name: inputs[name] for name in ("x", "w")})

        with unittest.mock.patch.object(Together, "_write", without_a_cotangent):
            (row,) = together([(case, [known["in_torch"]])], modes=("fwd",))
        self.assertEqual((row["status"], row["times"]), ("NOT MEASURED", {}))
        self.assertEqual(row["reason"], "no reference: KeyError: 'dy'")

    def test_what_comes_too_late_says_so(self):
        (case,), known = toy.cases(["small"]), toy.arms()
        for row in together([(case, [known["good"]])], seconds=0.0):
            self.assertEqual((row["status"], row["times"]), ("NOT MEASURED", {}))
            self.assertIn("time budget", row["reason"])

    def test_adapters_are_compiled_by_several_threads_and_workers(self):
        known = adapters.arms()
        arms = [known[name] for name in ("xla", "torch_eager", "torch_compile")]
        cases = adapters.cases(["lora_rebuild_cpu_bf16", "lokr_bypass_cpu_fp16", "oft_rebuild_cpu_bf16"])
        with unittest.mock.patch.object(os, "cpu_count", return_value=6):  # two workers of PyTorch
            rows = together([(case, arms) for case in cases])
        for row in rows:
            self.assertEqual(row["status"], "OK", row)
        self.assertTrue(all(row["graphs"] >= 1 for row in rows if row["arm"] == "torch_compile"))


class FamiliesTest(absltest.TestCase):
    def test_means_are_of_the_cases_that_have_both_arms(self):
        def row(case, arm, ms, **changes):
            error = {"rms": 1e-3, "nonfinite": 0, "bar": 5e-3}
            errors = {"out": error | {"ulp": 2.0 if arm == "pallas" else 8.0}, "dA": error | {"ulp": 4.0}}
            base = {"op": "lora_rebuild", "case": case, "params": {"dtype": "bfloat16"}, "mode": "fwdbwd", "arm": arm}
            base |= {"status": "OK", "times": {"device_cold": {"median": ms}}, "errors": errors, "reads": 60}
            return base | {"writes": 40, "memory_bytes": 0 if arm == "pallas" else 50} | changes

        rows = [row("a", "pallas", 1.0), row("a", "torch_eager", 2.0), row("a", "torch_compile", 4.0)]
        rows += [row("b", "pallas", 1.0), row("b", "torch_eager", 8.0), row("b", "torch_compile", 2.0)]
        rows += [row("b", "xla", 0.5), row("c", "pallas", 9.0, status="WRONG", times={}), row("c", "torch_eager", 1.0)]
        (cells,) = families.table(rows)
        want = ("lora_rebuild bf16", "fwd+bwd", "2 of 3", "4.00", "2.83", "2.00", "0.50 (1)", "0.50", "1.50")
        self.assertEqual(cells, (*want, "2.0 / 8.0", "4.0 / 4.0"))


if __name__ == "__main__":
    absltest.main()
