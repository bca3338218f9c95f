"""The benchmark must not be fooled: dishonest arms, dying workers, spoiled files, Ctrl-C, slowdowns made by hand.

Everything here runs on host code (a toy operator), in seconds; no test asserts a time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest.mock
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized
from jax import stages
from jax.experimental.mosaic.gpu import profiler

from bench import (
    attention,
    cli,
    gate,
    gemm,
    harness,
    kda,
    kda_step,
    readme,
    report,
    results,
    roofline,
    runtimes,
    spec,
    stats,
    toy,
    verdict,
)
from bench.spec import Arm, Case, UsageError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run_toy(names: list[str], *, modes=("fwdbwd",), preset="small", **options: Any) -> dict[str, dict[str, Any]]:
    """Rows by arm name of one case measured in this process's harness."""
    settings = {"modes": modes, "rounds": 5, "gpu": False, "arm_limit": 60.0} | options
    known = toy.arms()
    with harness.Session(harness.Options(**settings)) as session:
        rows = session.measure(toy.cases([preset])[0], [known[name] for name in names])
    return {row["arm"]: row for row in rows} if len(modes) == 1 else {(r["arm"], r["mode"]): r for r in rows}


def command(*args: str, **kwargs: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", *args], cwd=ROOT, env=env, **pipes, **kwargs)


def row(arm: str, samples: list[float], **changes: Any) -> dict[str, Any]:
    """A measured row of a made-up case."""
    error = {"rms": 1e-7, "ulp": 2.0, "nonfinite": 0, "bar": 2e-6}
    base = {
        "op": "kda", "case": "report32", "params": {"T": 512}, "title": "T=512", "mode": "fwdbwd", "arm": arm,
        "framework": "jax", "precision": "fp32", "ours": arm == "pallas", "status": "OK", "reason": "",
        "errors": {"o": error, "dq": dict(error)}, "times": {"device_cold": stats.summary(samples)} if samples else {},
        "memory_bytes": 10 << 20, "allocations": 3, "compile_s": 1.0, "tune_s": None, "kernels": [], "launches": 4,
        "note": "", "reads": 10**8, "writes": 10**7, "flops": 1e9, "floor_ms": 0.02, "floor_share": 0.2,
        "fits_l2": False,
    }  # fmt: skip
    return base | changes


def document(rows: list[dict[str, Any]], kind: str = "NVIDIA Test") -> dict[str, Any]:
    stats.judge(rows)
    device = {"kind": kind, "gpu": True, "driver": "1", "cores": 8, "date": "2026-01-01 00:00 UTC", "commit": "abc"}
    device["versions"] = {"jax": "0.11.2", "torch": "2.11.0"}
    return {"schema": results.SCHEMA, "command": "x", "device": device, "rooflines": None, "rows": rows}


def noisy(ms: float, seed: int = 0, n: int = 10) -> list[float]:
    return list(ms * (1 + 0.002 * np.random.default_rng(seed).standard_normal(n)))


class DishonestArmsTest(parameterized.TestCase):
    def test_each_kind_of_arm_gets_the_verdict_it_deserves(self):
        names = ["good", "wrong_gradient", "sleeps", "cached", "jitters", "crashes", "crashes_late", "raises", "absent"]
        rows = run_toy(names, repeats=3)
        self.assertEqual(list(rows), names)  # never a missing row
        self.assertEqual(rows["good"]["verdict"], "FASTER")
        self.assertEqual(rows["good"]["ratio"]["against"], "sleeps")  # the fastest *correct* other arm
        self.assertEqual(rows["sleeps"]["verdict"], "SLOWER")
        self.assertEqual(rows["wrong_gradient"]["verdict"], "WRONG")
        self.assertEqual(rows["wrong_gradient"]["times"], {})  # a wrong arm has no time
        self.assertStartsWith(rows["wrong_gradient"]["reason"], "dw ")
        self.assertEqual(rows["cached"]["verdict"], "IMPOSSIBLE")
        self.assertEqual(rows["jitters"]["verdict"], "WRONG")
        self.assertIn("repeats differ", rows["jitters"]["reason"])
        self.assertEqual(rows["good"]["repeats"], {"n": 3, "different": 0})
        for name, reason in {
            "crashes": "simulated crash",
            "crashes_late": "simulated crash",
            "raises": "this arm does not take such a case",
            "absent": "not installed: no_such_package",
        }.items():
            self.assertEqual(rows[name]["verdict"], "NOT MEASURED")
            self.assertIn(reason, rows[name]["reason"])

    def test_a_hanging_worker_becomes_a_row_and_the_others_finish(self):
        rows = run_toy(["hangs", "good"], arm_limit=4.0, rounds=3)
        self.assertEqual(rows["hangs"]["verdict"], "NOT MEASURED")
        self.assertIn("no answer to 'prepare' within 4 s", rows["hangs"]["reason"])
        self.assertEqual(rows["good"]["status"], "OK")

    def test_a_mode_that_kills_its_worker_does_not_take_the_others_with_it(self):
        rows = run_toy(["crashes_backward"], modes=("fwdbwd", "fwd"), rounds=3)
        self.assertIn("simulated crash", rows["crashes_backward", "fwdbwd"]["reason"])
        self.assertEqual(rows["crashes_backward", "fwd"]["status"], "OK")

    def test_a_spent_budget_becomes_rows(self):
        rows = run_toy(["good", "sleeps"], budget=0.0)
        for each in rows.values():
            self.assertEqual(each["verdict"], "NOT MEASURED")
            self.assertIn("time budget", each["reason"])

    def test_jax_and_torch_arms_are_differentiated_and_an_unproved_path_is_not_measured(self):
        rows = run_toy(["in_jax", "in_torch", "unproved"], modes=("fwd_res", "fwdbwd"), rounds=2, arm_limit=120.0)
        for arm in ("in_jax", "in_torch"):
            self.assertEqual(rows[arm, "fwdbwd"]["status"], "OK", rows[arm, "fwdbwd"]["reason"])
            self.assertSetEqual(set(rows[arm, "fwdbwd"]["errors"]), {"y", "dx", "dw"})
            self.assertSetEqual(set(rows[arm, "fwd_res"]["errors"]), {"y"})
        self.assertEqual(rows["unproved", "fwdbwd"]["verdict"], "NOT MEASURED")
        self.assertIn("toy_kernel", rows["unproved", "fwdbwd"]["reason"])


class StatisticsTest(parameterized.TestCase):
    @parameterized.parameters(
        (1.00, "TIE"), (1.02, "TIE"), (0.5, "FASTER"), (1.10, "SLOWER"), (0.95, "FASTER")
    )  # fmt: skip
    def test_verdict_of_a_ratio(self, factor: float, expected: str):
        ratio = stats.paired_ratio([factor * x for x in noisy(1.0, 1)], noisy(1.0, 2))
        self.assertEqual(stats.compare(ratio), expected)

    def test_a_wide_interval_is_ambiguous(self):
        ratio = stats.paired_ratio([0.8, 1.3, 0.9, 1.2, 0.85, 1.25], [1.0] * 6)
        self.assertEqual(stats.compare(ratio), "AMBIGUOUS")

    def test_an_arm_ties_with_itself(self):
        rows = [row("pallas", noisy(1.0, 1)), row("pallas#2", noisy(1.0, 2))]
        stats.judge(rows)
        self.assertEqual([r["verdict"] for r in rows], ["TIE", "TIE"])

    def test_a_wrong_arm_is_nobodys_rival(self):
        rows = [row("pallas", noisy(1.0)), row("fla", noisy(0.1), status="WRONG"), row("jla", noisy(2.0))]
        stats.judge(rows)
        self.assertEqual(rows[0]["ratio"]["against"], "jla")

    def test_intervals_are_the_same_on_every_redraw(self):
        self.assertEqual(stats.summary(noisy(1.0)), stats.summary(noisy(1.0)))

    def test_errors(self):
        want = np.array([3.0, -4.0])
        error = stats.Error()
        error.add((want + [0, 0.1]).astype(np.float64), want)
        got = error.result(np.dtype(np.float32))
        self.assertAlmostEqual(got["rms"], 0.1 / 5)
        self.assertAlmostEqual(got["ulp"], 0.1 / (np.sqrt(12.5) * 2**-23), delta=1)

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_a_value_that_is_not_finite_is_an_infinite_error(self, bad: float):
        error = stats.Error()
        error.add(np.array([1.0, bad]), np.array([1.0, 1.0]))
        self.assertEqual(error.result(np.dtype(np.float32))["rms"], np.inf)

    def test_only_zeros_match_a_zero_reference(self):
        for got, expected in ((0.0, 0.0), (1e-30, np.inf)):
            error = stats.Error()
            error.add(np.array([got]), np.array([0.0]))
            self.assertEqual(error.result(np.dtype(np.float32))["rms"], expected)


class FilesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def save(self, name: str, rows: list[dict[str, Any]], kind: str = "NVIDIA Test") -> pathlib.Path:
        results.save(self.folder / name, document(rows, kind))
        return self.folder / name

    def test_what_is_saved_comes_back(self):
        path = self.save("a.json", [row("pallas", noisy(1.0), errors={"o": {"rms": np.inf, "ulp": 1.0, "bar": 1.0}})])
        self.assertEqual(results.load(path)["rows"][0]["errors"]["o"]["rms"], np.inf)
        self.assertNotIn("Infinity", path.read_text())  # JSON proper

    @parameterized.named_parameters(
        ("truncated", lambda text: text[: len(text) // 2], "truncated or not JSON"),
        ("empty", lambda text: "", "truncated or not JSON"),
        ("of_another_program", lambda text: json.dumps({"results": []}), "not a benchmark result"),
        ("a_list", lambda text: "[1, 2]", "not a benchmark result"),
        ("without_rows", lambda text: json.dumps({"schema": results.SCHEMA, "command": ""}), "incomplete"),
        ("with_half_a_row", lambda text: text.replace('"status"', '"state"'), "incomplete: status missing"),
    )
    def test_a_spoiled_file_is_refused_in_one_line(self, spoil, message: str):
        path = self.save("a.json", [row("pallas", noisy(1.0))])
        path.write_text(spoil(path.read_text()))
        with self.assertRaisesRegex(UsageError, message) as caught:
            results.load(path)
        self.assertNotIn("\n", str(caught.exception))

    def gate(self, new: list[dict[str, Any]], old: list[dict[str, Any]], kind: str = "NVIDIA Test") -> int:
        self.save("new.json", new)
        baseline = self.save("old/base.json", old, kind)
        with cli.flags_as(baseline=str(baseline)), contextlib.redirect_stdout(io.StringIO()):
            return gate.main(["gate", str(self.folder / "new.json")])

    def test_the_gate_passes_what_has_not_changed(self):
        rows = [row("pallas", noisy(1.0)), row("fla", noisy(2.0))]
        self.assertEqual(self.gate(copy.deepcopy(rows), rows), 0)
        self.assertEqual(self.gate([row("pallas", noisy(1.0, 7)), row("fla", noisy(2.0, 8))], rows), 0)

    def test_the_gate_fails_a_row_made_ten_percent_slower_by_hand(self):
        old = [row("pallas", noisy(1.0)), row("fla", noisy(2.0))]
        by_samples = [row("pallas", [1.1 * x for x in noisy(1.0)]), row("fla", noisy(2.0))]
        self.assertEqual(self.gate(by_samples, old), 1)
        by_median = copy.deepcopy(old)
        by_median[1]["times"]["device_cold"]["median"] *= 1.1
        self.assertEqual(self.gate(by_median, old), 1)

    @parameterized.named_parameters(
        ("error", {"errors": {n: {"rms": 2e-7, "ulp": 2.0, "nonfinite": 0, "bar": 2e-6} for n in ("o", "dq")}}),
        ("memory", {"memory_bytes": 11 << 20}),
        ("status", {"status": "NOT MEASURED", "times": {}}),
    )
    def test_the_gate_fails_a_row_that_is_worse_in(self, change: dict[str, Any]):
        self.assertEqual(self.gate([row("pallas", noisy(1.0), **change)], [row("pallas", noisy(1.0))]), 1)

    def test_the_gate_fails_when_our_row_is_missing_and_refuses_another_device(self):
        old = [row("pallas", noisy(1.0)), row("fla", noisy(2.0))]
        self.assertEqual(self.gate([row("fla", noisy(2.0))], old), 1)
        with self.assertRaisesRegex(UsageError, "cannot be held against"):
            self.gate(old, old, kind="NVIDIA Other")

    def test_an_arm_that_ran_twice_is_held_against_itself_and_counts_once(self):
        rows = [
            row("pallas", noisy(1.0)),
            row("pallas#2", noisy(1.0)),
            row("fla", noisy(2.0)),
            row("fla#2", noisy(2.2)),
        ]
        documents = [(self.save("a.json", rows), document(rows))]
        self.assertLen(verdict.verdicts(documents, "pallas"), 1)
        found = {again["arm"]: (round(ratio["median"], 2), text) for again, ratio, text in verdict.repeats(documents)}
        self.assertEqual(found, {"pallas#2": (1.0, "TIE"), "fla#2": (1.1, "SLOWER")})

    def test_the_verdict_lists_losses_first(self):
        times = {
            "won": {"pallas": 1.0, "fla": 2.0},
            "lost": {"pallas": 3.0, "jla": 2.0, "fla": 4.0},
            "tied": {"pallas": 1.0, "fla": 1.0},
        }
        rows = [row(arm, noisy(ms), case=case) for case, arms in times.items() for arm, ms in arms.items()]
        entries = verdict.verdicts([(self.save("a.json", rows), document(rows))], "pallas")
        self.assertEqual([e["verdict"] for e in entries], ["SLOWER", "TIE", "FASTER"])
        self.assertEqual(entries[0]["best"]["arm"], "jla")
        family = verdict.families(entries)["kda", "fwdbwd"]
        self.assertAlmostEqual(family["geomean"], (1.5 * 1.0 * 0.5) ** (1 / 3), places=2)
        self.assertEqual((family["wins"], family["ties"], family["losses"], family["n"]), (1, 1, 1, 3))
        self.assertEqual(family["worst"][1], "lost")

    def test_the_readme_block_is_made_from_the_file(self):
        path = self.save("kda.json", [row("pallas", noisy(1.0)), row("fla_safe", noisy(2.0))])
        ports = [row("pallas", noisy(1.0)), row("torch_loop", noisy(7.0)), row("torch_solve", [], status="WRONG")]
        text = readme.markdown([(path, results.load(path))], self.folder, [(path, document(ports))])
        self.assertRegex(text, r"\| 1\.00 \| torch row loop \| 7\.00 \| .* \| 7\.0 \|")
        for part in ("NVIDIA Test", "2026-01-01", "jax 0.11.2", "FLA safe_gate", "FASTER", "kda.json", "1.0e-7"):
            self.assertIn(part, text)

    def test_the_readme_has_adapters_as_means_of_their_cases(self):
        names = {"op": "lora_bypass", "params": {"dtype": "bfloat16"}}
        rows = [row(arm, noisy(ms), case=c, **names) for c in "ab" for arm, ms in {"pallas": 1, "xla": 3}.items()]
        path = self.save("adapters.json", rows)
        (path.parent / "lora_bypass_time.png").touch()
        text = readme.markdown([(path, results.load(path))], self.folder)
        self.assertIn("| lora_bypass bf16 | fwd+bwd | 2 | - | - | - | 3.00 | 3.00 | - | - | - |\n", text)
        self.assertNotIn("png", text)

    def test_the_readme_has_logs_of_training(self):
        start = {"run": {"steps": 20, "batch_size": 2, "sequence_length": 8}, "entropies": {"unigram": 3, "bigram": 2}}
        start |= {"parameters": 1500000, "devices": ["GPU", "GPU"]}
        lines = [{"kind": "start", "step": step, **start} for step in (0, 10)]
        lines += [{"kind": "eval", "step": step, "validation_loss": 5.5 - step / 10} for step in (0, 20)]
        lines += [{"kind": "speed", "step": step, "tokens_per_second": 1000.0 * step} for step in (1, 2, 9)]
        path = self.folder / "small.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        bench = self.save("kda.json", [row("pallas", noisy(1.0))])
        text = readme.markdown([(bench, results.load(bench))], self.folder, training=[path])
        self.assertIn(
            "| `small.jsonl` | 1.5 M | 2 x GPU | 20 x 16, stopped and resumed at 10 | 2,000 | 5.500 | 3.500 | "
            "3.000, 2.000 |\n",
            text,
        )
        self.assertIn("![small](small.png)", text)

    @absltest.skipIf(importlib.util.find_spec("matplotlib") is None, "matplotlib is not installed")
    def test_figures_are_drawn_from_the_file_alone(self):
        from bench import plot

        rows = [row("pallas", noisy(1.0)), row("fla", noisy(2.0)), row("jla", [], status="WRONG")]
        self.save("kda.json", rows)
        with cli.flags_as(out=None, format="png"), contextlib.redirect_stdout(io.StringIO()):
            plot.main(["plot", str(self.folder)])
        drawn = {path.name for path in self.folder.glob("*.png")}
        self.assertSetEqual(drawn, {f"kda_{n}.png" for n in ("time", "roofline", "memory", "accuracy", "speedup")})

    def test_tables_fit_the_width(self):
        from rich.console import Console

        long = {"note": "x" * 500, "memory_bytes": 12345 << 20, "launches": 1234, "allocations": 4321, "tune_s": 210.0}
        rows = [row("torch_compile_max", noisy(123.456), **long), row("fla_default", noisy(98765.4), **long)]
        rows[1] |= {"precision": "tf32"}
        rows += [row("absent", [], status="NOT MEASURED", reason="not installed")]
        for each in rows[:2]:
            each["times"] |= {"device_warm": stats.summary(noisy(123.456)), "wall": stats.summary(noisy(12345.6))}
            each["errors"] = {n: {"rms": 1.23e-7, "ulp": 123456.0, "bar": 1e-5} for n in ("o", "dq", "dbeta")}
        stats.judge(rows)
        out = io.StringIO()
        report.print_tables(Console(file=out, width=cli.WIDTH), rows, gpu=True)
        self.assertLessEqual(max(len(line) for line in out.getvalue().splitlines()), cli.WIDTH)
        self.assertNotIn("…", out.getvalue().split("x" * 50)[0])


class CommandTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("impl", "--impl=nonsense", "nonsense"),
        ("preset", "--preset=nonsense", "nonsense"),
        ("shape", "--shape=1,2", "B,T,H,K"),
        ("grouped_heads", "--shape=1,64,2,64,64,3", "multiple of H"),
        ("dtype", "--dtype=int8", "int8"),
        ("precision", "--precision=tf32 --dtype=bfloat16", "tf32"),
        ("mode", "--mode=decode,fwd", "decode goes alone"),
        ("flag", "--nonsense=1", "nonsense"),
        ("value", "--rounds=many", "rounds"),
        ("positional", "nonsense", "nonsense"),
    )
    def test_a_bad_argument_is_one_line_and_a_failure(self, args: str, word: str):
        done = command("bench.kda", *args.split())
        _, err = done.communicate(timeout=120)
        self.assertNotEqual(done.returncode, 0)
        lines = [line for line in err.splitlines() if line.strip()]
        self.assertLen(lines, 1, err)
        self.assertIn(word, lines[0])

    def test_ctrl_c_leaves_the_finished_rows_on_disk_and_resume_continues(self):
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "out.json"
        args = ("bench.toy", "--impl=good,drags", "--preset=small,large", "--rounds=3", f"--json={path}")
        running = command(*args)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.05)
        self.assertTrue(path.exists(), running.poll())
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
        self.assertEqual(running.returncode, 130)
        rows = results.load(path)["rows"]
        small = [r for r in rows if r["case"] == "small"]
        self.assertEqual([r["status"] for r in small], ["OK", "OK"])
        self.assertTrue(all(r["reason"] == "interrupted" for r in rows if r["case"] == "large"))

        again = command("bench.toy", "--impl=good", "--preset=small,large", "--rounds=3", f"--json={path}", "--resume")
        out, err = again.communicate(timeout=60)
        self.assertEqual(again.returncode, 0, err)
        self.assertIn("1 of 2 cases are done", " ".join(out.split()))
        rows = results.load(path)["rows"]
        self.assertEqual({r["case"] for r in rows if r["arm"] == "good" and r["status"] == "OK"}, {"small", "large"})


class KdaOperatorTest(parameterized.TestCase):
    def case(self, **changes: Any) -> Case:
        (case,) = kda.cases("kda", [], shape="2,32,2,16,8,4")
        return Case(case.op, case.name, {**case.params, **changes})

    def test_inputs_follow_the_recipe(self):
        inputs = kda.KDA().inputs(self.case())
        np.testing.assert_allclose(np.linalg.norm(inputs["q"], axis=-1), 1, rtol=1e-5)
        self.assertEqual(inputs["g"].shape, (2, 32, 4, 16))
        self.assertLess(inputs["g"].max(), 0)
        self.assertAlmostEqual(float(inputs["g"].mean()), -0.806 / 4, delta=0.02)  # E log sigmoid(N(0, 1)) = -0.806
        self.assertBetween(inputs["beta"].min(), 0, 1)
        report32 = kda.KDA().inputs(self.case(g=-0.054, gate=0.5))
        self.assertEqual(set(np.unique(report32["g"])), {np.float32(-0.054)})
        self.assertEqual(set(np.unique(report32["beta"])), {np.float32(0.5)})

    def test_inputs_are_the_same_on_every_call(self):
        first, second = (kda.KDA().inputs(self.case()) for _ in range(2))
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])

    @parameterized.parameters(("report32", 79e6), ("report16", 47e6), ("kimi8k", 404e6), ("train", 807e6))
    def test_compulsory_bytes_of_the_forward(self, preset: str, expected: float):
        (case,) = kda.cases("kda", [preset])
        traffic = kda.KDA().traffic(case, "fwd")
        self.assertAlmostEqual((traffic.reads + traffic.writes) / expected, 1, delta=0.02)

    def test_the_parts_of_the_oracle_are_slices_of_the_whole(self):
        op, case = kda.KDA(), self.case()
        inputs = op.inputs(case)
        whole = op.oracle(case, {n: np.repeat(x, 2, 2) if n in ("q", "k") else x for n, x in inputs.items()})
        whole |= {n: whole[n].reshape(2, 32, 2, 2, 16).sum(3) for n in ("dq", "dk")}  # over the group of value heads
        parts = list(op.subset(case))
        taken = [{n: op.take(case, n, x, part) for n, x in inputs.items()} for part in parts]
        for part, got in zip(parts, op.oracle_parts(case, taken), strict=True):
            for name in op.tensors("fwdbwd"):
                np.testing.assert_allclose(got[name], op.take(case, name, whole[name], part), rtol=1e-9, atol=1e-12)

    def test_own_arms_are_held_to_the_bar_and_tf32_to_a_wider_one(self):
        arms = kda.arms("float32")
        self.assertEqual(kda.KDA().bar(self.case(), arms["pallas"], "o"), 2e-6)
        self.assertEqual(kda.KDA().bar(self.case(), arms["pallas"], "dg"), 1e-5)
        self.assertEqual(kda.KDA().bar(self.case(), arms["fla_safe"], "dq"), 5e-3)
        self.assertTrue(arms["pallas"].ours and not arms["fla_safe"].ours)

    def test_an_arm_named_twice_runs_twice(self):
        known = kda.arms("float32")
        self.assertEqual([a.name for a in cli.pick_arms(["pallas", "pallas"], known, {})], ["pallas", "pallas#2"])
        peers = [a.name for a in cli.pick_arms(["fla", "peers"], known, kda.GROUPS)]
        self.assertEqual(peers, ["fla_default", "fla_safe", "jla"])
        self.assertEqual([a.name for a in cli.pick_arms(["all"], known, kda.GROUPS)], list(known))


class DecodingTest(absltest.TestCase):
    def sampled(self, op: str, what: str) -> tuple[dict[str, Any], list[str]]:
        """What `sample` makes of three calls of the reference, and what was launched while CUPTI listened."""
        (case,) = kda_step.cases(["cpu"]) if op == "kda_step" else kda.cases(op, [], shape="1,4,1,16")
        arms = kda_step.arms("bfloat16") if op == "kda_step" else kda.arms("float32")
        operator = spec.operator(op)
        runtime = runtimes.JaxRuntime(operator, case, arms["xla"], operator.inputs(case))
        mode = "decode" if op == "kda_step" else "fwd"
        compiled, launched = runtime._compile(mode), []

        def call(*arguments):
            launched.append("kernel")
            return compiled(*arguments)

        class Compiled(stages.Compiled):  # which the profiler calls as it is
            def __init__(self):
                pass

            __call__ = staticmethod(call)

        runtime.compiled[mode], runtime.gpu = Compiled(), True
        runtime.flush = lambda: launched.append(runtimes.FLUSH_NAME)
        cupti = types.SimpleNamespace(
            _cupti_init=launched.clear, _cupti_get_timings=lambda finalize: [(name, 1.0) for name in launched]
        )
        library = types.SimpleNamespace(_mosaic_gpu_ext=cupti)
        with unittest.mock.patch.object(profiler, "mosaic_gpu_lib", library):
            return runtime.sample(mode, what, 3), launched

    def test_calls_are_launched_while_the_profiler_listens_each_behind_a_flush_where_it_is_cold(self):
        for op in ("kda", "kda_step"):
            with self.subTest(op):
                found, launched = self.sampled(op, "device_warm")
                self.assertEqual((found["ms"], launched), ([1.0] * 3, ["kernel"] * 3))
                found, launched = self.sampled(op, "device_cold")
                self.assertEqual((found["ms"], launched), ([1.0] * 3, [runtimes.FLUSH_NAME, "kernel"] * 3))

    def test_the_floor_is_the_state_read_once_and_written_once_and_the_inputs(self):
        (case,) = kda_step.cases(["batch64"])
        traffic = kda_step.KDAStep().traffic(case, "decode")
        heads, state = 64 * 32, 4 * 128 * 128
        self.assertEqual(traffic.reads, heads * (state + 3 * 2 * 128 + 4 * 128 + 4))
        self.assertEqual(traffic.writes, heads * (state + 2 * 128))

    def test_a_step_is_measured_and_its_state_is_its_own_at_every_call(self):
        with harness.Session(harness.Options(modes=("decode",), rounds=2, repeats=2)) as session:
            known = kda_step.arms("float32")
            (row,) = session.measure(kda_step.cases(["cpu"])[0], [known["xla"]])
        self.assertEqual((row["status"], row["repeats"]), ("OK", {"n": 2, "different": 0}), row["reason"])
        self.assertLess(row["errors"]["final_state"]["rms"], kda_step.STATE_BAR)
        self.assertEqual(set(row["errors"]), {"o", "final_state"})


class GEMMTest(absltest.TestCase):
    def test_products_are_held_to_float64_and_xla_times_its_candidates_alone(self):
        (case,) = gemm.cases(["cpu_bf16"])
        known = gemm.arms("16bit")
        self.assertEqual([name for name, arm in known.items() if arm.exclusive], ["xla"])
        with harness.Session(harness.Options(rounds=2)) as session:
            rows = session.measure(case, [known["xla"], known["torch"]], ("fwd",))
            both = session.measure(dataclasses.replace(case, name="again"), [known["xla"]])
        self.assertEqual([(row["mode"], row["status"]) for row in rows], [("fwd", "OK")] * 2, rows)
        self.assertEqual([(row["mode"], row["status"]) for row in both], [("fwd", "OK"), ("fwdbwd", "OK")], both)
        self.assertEqual(set(both[1]["errors"]), {"out", "da", "db"})
        for row in both:
            self.assertBetween(row["errors"]["out"]["rms"], 1e-4, 4e-3)

    def test_the_peer_is_what_sets_the_bar_in_a_precision(self):
        found = gemm.jobs(gemm.cases(["odd"]), ["peer"])
        names = {case.name: [arm.name for arm in arms] for case, arms in found}
        self.assertEqual(
            names, {"odd_bf16": ["xla"], "odd_fp16": ["xla"], "odd_tf32": ["torch"], "odd_fp32": ["torch"]}
        )

    def test_a_preset_can_name_its_only_mode(self):
        presets = ["odd_bf16:fwdbwd", "report_fp32", "odd_bf16", "square4k_tf32:fwd"]
        others = {"impl": ["pallas"], "shape": None, "precision": "bf16", "seed": 0}
        with cli.flags_as(preset=presets, **others), unittest.mock.patch.object(cli, "measure") as measure:
            gemm.main(["bench.gemm"])
        (wanted,), named = measure.call_args
        self.assertEqual([case.name for case, _ in wanted], ["odd_bf16", "report_fp32", "square4k_tf32"])
        first, _, last = (case.key for case, _ in wanted)
        self.assertEqual(named["case_modes"], {first: ("fwdbwd",), last: ("fwd",)})
        refused = self.assertRaisesRegex(UsageError, "'bwd' is not known; choose from fwd,")
        with cli.flags_as(preset=["odd_bf16:bwd"], **others), refused:
            gemm.main(["bench.gemm"])

    def test_rows_are_sampled_alike_from_outputs_and_from_the_reference(self):
        for transposes in ("nn", "tn", "nt", "tt"):
            flips = [t == "t" for t in transposes]
            preset = gemm.Preset(200, 130, 300, *flips)
            case = Case("gemm", transposes, dataclasses.asdict(preset) | {"dtype": "float32", "seed": 0})
            op = gemm.GEMM()
            inputs = op.inputs(case)
            a, b, dout = (inputs[name].astype(np.float64) for name in ("a", "b", "dout"))
            left, right = a.T if flips[0] else a, b.T if flips[1] else b
            da, db = dout @ right.T, left.T @ dout
            whole = {"out": left @ right, "da": da.T if flips[0] else da, "db": db.T if flips[1] else db}
            for name, want in op.oracle(case, inputs).items():
                np.testing.assert_allclose(op.take(case, name, whole[name], 0), want, rtol=1e-12, atol=1e-10)


class AttentionTest(absltest.TestCase):
    def test_arms_are_held_to_the_oracle_and_back_ends_that_refuse_say_so(self):
        (case,) = attention.cases(["cpu_bf16"])
        known = attention.arms("16bit")
        arms = [known[name] for name in ("xla", "jax_xla", "composite", "sdpa_math", "sdpa_cudnn")]
        with harness.Session(harness.Options(rounds=2)) as session:
            rows = {row["arm"]: row for row in session.measure(case, arms, ("fwdbwd",))}
        refused = rows.pop("sdpa_cudnn")
        self.assertEqual(refused["status"], "NOT MEASURED")
        self.assertRegex(refused["reason"], "the back-end cudnn does not take this call")
        for name, row in rows.items():
            self.assertEqual(row["status"], "OK", row["reason"])
            self.assertBetween(row["errors"]["o"]["rms"], 1e-4, 5e-3, name)
            self.assertEqual(set(row["errors"]), {"o", "dq", "dk", "dv"})

    def test_parts_are_heads_with_the_queries_that_read_them(self):
        (case,) = attention.cases([], shape="2,40,6,3,16")
        op = attention.Attention()
        inputs = op.inputs(case)
        whole = op.oracle(case, inputs)
        self.assertEqual(op.subset(case), [[0, 0], [1, 2]])
        for part in op.subset(case):
            of_part = {name: op.take(case, name, x, part) for name, x in inputs.items()}
            for name, want in op.oracle(case, of_part).items():
                np.testing.assert_allclose(op.take(case, name, whole[name], part), want, rtol=1e-12, atol=1e-12)

    def test_a_causal_call_does_half_of_the_work(self):
        cases = [attention.cases([], shape="1,1024,2,2,64", causal=causal)[0] for causal in (True, False)]
        half, full = (attention.Attention().traffic(case, "fwdbwd") for case in cases)
        self.assertEqual(full.flops, 14 * 2 * 1024**2 * 64)
        self.assertEqual(half.flops, full.flops * 1025 / 2048)
        self.assertEqual((half.reads, half.writes), (full.reads, full.writes))


class RooflineTest(absltest.TestCase):
    def test_writes_that_the_cache_may_still_hold_are_not_compulsory(self):
        probed = {"bandwidth": 1e12, "flops": {"bf16": 1e15}}
        traffic = kda.Traffic(reads=10**9, writes=10**8, flops=1.0, rate="bf16")
        self.assertAlmostEqual(roofline.floor_ms(traffic, probed), 1.1)
        self.assertAlmostEqual(roofline.impossible_ms(traffic, probed, 60 << 20), 1 + (1e8 - (60 << 20)) / 1e9)

    def test_the_flush_is_four_times_the_cache(self):
        self.assertGreaterEqual(4 * runtimes.flush_elements(60 << 20), 4 * (60 << 20))

    def test_arms_and_cases_survive_the_pipe(self):
        arm = kda.arms("bfloat16")["fla_safe"]
        self.assertEqual(Arm.from_json(json.loads(json.dumps(arm.to_json()))), arm)
        (case,) = kda.cases("gdn2", ["kimi8k"])
        self.assertEqual(Case.from_json(json.loads(json.dumps(case.to_json()))).key, case.key)


if __name__ == "__main__":
    absltest.main()
