"""The benchmark of adapters: its inputs, rows and arms."""

import collections
import dataclasses

from absl.testing import absltest, parameterized

from bench import adapters, device, harness, runtimes
from bench.spec import load, operator
from tests.helpers import assert_close

KRONECKER = ["adapter_add_parts", "adapter_kronecker_backward", "adapter_kronecker_forward"]


class AdaptersTest(parameterized.TestCase):
    @parameterized.parameters(*adapters.CPU)
    def test_arms_are_held_to_the_oracle(self, row):
        (case,) = adapters.cases([f"{row}_fp16"])
        known = adapters.arms()
        inputs = (op := operator(case.op)).inputs(case)
        want = op.oracle(case, inputs)
        for arm in (known["pallas"], known["xla"], known["torch_eager"]):
            framework = runtimes.RUNTIMES[arm.framework]
            runtime = framework(op, case, arm, inputs)
            runtime.prepare("fwdbwd")
            got = runtime.outputs("fwdbwd")
            self.assertEqual(set(got), set(want), arm.name)
            for tensor, x in got.items():
                assert_close(runtime.to_numpy(x), want[tensor], rms=op.bar(case, arm, tensor) / 4, name=tensor)

    def test_the_kernels_are_seen_to_run_and_a_call_without_any_says_so(self):
        with harness.Session(harness.Options(rounds=2)) as session:
            rows = {}
            served, refused = adapters.cases(["lokr_rebuild_cpu_bf16", "oft_bypass_cpu_bf16"])
            refused = dataclasses.replace(refused, params=refused.params | {"block": 3})
            for case in (served, refused):
                rows |= {row["op"]: row for row in session.measure(case, [adapters.arms()["pallas"]], ("fwdbwd",))}
        self.assertEqual(rows["lokr_rebuild"]["status"], "OK", rows["lokr_rebuild"]["reason"])
        self.assertEqual(rows["lokr_rebuild"]["traced"], KRONECKER)
        self.assertEqual(rows["oft_bypass"]["status"], "NOT MEASURED")
        self.assertRegex(
            rows["oft_bypass"]["reason"], "the kernels take blocks of a power of two up to 64, and these are of 3"
        )

    def test_a_wrong_arm_is_caught_and_a_compiled_one_captures_a_graph(self):
        (case,) = adapters.cases(["lokr_bypass_cpu_bf16"])
        known = adapters.arms()
        wrong = dataclasses.replace(
            known["torch_eager"], name="wrong", target="tests.test_bench_adapters:half_of_an_update"
        )
        with harness.Session(harness.Options(rounds=2)) as session:
            rows = {r["arm"]: r for r in session.measure(case, [known["torch_compile"], wrong], ("fwdbwd",))}
        self.assertEqual(rows["torch_compile"]["status"], "OK", rows["torch_compile"]["reason"])
        self.assertGreaterEqual(rows["torch_compile"]["graphs"], 1)
        self.assertEqual(rows["wrong"]["status"], "WRONG")

    def test_the_sweep_has_the_rows_that_it_should(self):
        counts = collections.Counter(preset.op for preset in adapters.SWEEP.values())
        want = {"lora_rebuild": 24, "loha_rebuild": 24, "lokr_rebuild": 16, "oft_rebuild": 8}
        want |= {"lora_bypass": 4, "loha_bypass": 4, "lokr_bypass": 4, "oft_bypass": 3}
        self.assertEqual(counts, want)
        self.assertEqual(adapters.SWEEP["lokr_11008x4096_square"].factors, (86, 64))
        self.assertEqual(adapters.SWEEP["lokr_4096x4096_f8"].factors, (8, 8))
        self.assertLen({case.key for case in adapters.cases(["sweep"])}, 87 * (2 if device.has_gpu() else 1))

    def test_the_least_that_a_rebuild_moves(self):
        (case,) = adapters.cases(["lokr_4096x4096_square_bf16"])
        op, weight, own = operator(case.op), 2 * 4096**2, 2 * 2 * 64**2
        forward, both = op.traffic(case, "fwd"), op.traffic(case, "fwdbwd")
        self.assertEqual((forward.reads, forward.writes), (weight + own, weight))
        self.assertEqual((both.reads, both.writes), (2 * weight + own, weight + own))


def half_of_an_update(case, options):
    built = load("bench.adapters_arms:torch_port")(case, options)

    def forward(inputs):
        return built.forward({**inputs, "W1": 0.5 * inputs["W1"]})

    return forward


if __name__ == "__main__":
    absltest.main()
