"""The benchmark of the training step is not fooled by an arm that learns something else, or runs other kernels."""

import dataclasses
import io
import math
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax import stages
from jax.experimental.mosaic.gpu import profiler
from rich.console import Console

from bench import cli, harness, readme, results, stats, train_arms, train_step
from bench.spec import Arm, UsageError
from dormouse_jax.models import Decoder, DecoderConfig

ARM = {"framework": "jax", "target": "bench.train_arms:TRAINERS", "precision": "16bit", "modes": ("step",)}


def case(name="report"):
    return train_step.cases([name])[0]


def run(name, loss=2.0, norm=1.0, device=True, ours=False, ms=10.0):
    """A run as it is once everything is measured."""
    kernels = [
        {"name": "kda_state", "count": 32.0, "ms": 2.0},
        {"name": "nvjet_x", "count": 9.0, "ms": 5.0},
        {"name": "fusion", "count": 4.0, "ms": 1.0},
    ]
    operator = [{"name": "kda_state", "count": 2.0, "ms": 0.125}]
    parts = {"forward": 2.0, "gradients": 7.0, "step": 8.0, "kda": 0.125}
    return train_step._Run(
        Arm(name, ours=ours, **ARM),
        losses=[{"step": i, "loss": x, "grad_norm": norm, "ms": ms} for i, x in enumerate((5.5, loss))],
        parts={
            part: {
                "ms": parts[part],
                "gemm_ms": {"step": 5.0}.get(part, 0.0),
                "kernels": {"step": kernels, "kda": operator}.get(part, []) if device else [],
            }
            for part in parts
        },
        info={"compile_s": 12.3, "in_program": ["kda_state"] if ours else []},
        wall=[ms, ms * 1.01, ms * 0.99],
        steps=[10, 99],
        memory=30_000_000_000,
    )


def rows(runs, name="report"):
    train_step._compare_losses(runs, case(name))
    found = [train_step._row(case(name), each, {"parameters": 28_000_000}, True) for each in runs]
    stats.judge(found)
    return {row["arm"]: row for row in found}


class EndToEndTest(absltest.TestCase):
    def test_jax_and_pytorch_have_the_same_losses_and_an_arm_without_its_kernels_no_time(self):
        small = case("cpu")
        small.params["decoder"]["num_layers"] = 1
        known = train_step.arms(small)
        liar = dataclasses.replace(known["pallas"], name="liar", options={"implementation": "xla"})
        fla = known["fla"]  # which needs a GPU even where it is installed
        with harness.Session(harness.Options(gpu=False, arm_limit=300.0)) as session:
            found = train_step.measure(
                session, small, [known["pallas"], known["torch_eager"], liar, fla], steps=3, rounds=2, together=True
            )
        by_arm = {row["arm"]: row for row in found}
        self.assertEqual(by_arm["liar"]["status"], "WRONG")
        self.assertIn("its kernels kda_ are not in the compiled step", by_arm["liar"]["reason"])
        self.assertEqual(by_arm["liar"]["times"], {})
        self.assertEqual(by_arm["fla"]["status"], "NOT MEASURED")
        for name in ("pallas", "torch_eager"):
            row = by_arm[name]
            self.assertEqual(row["status"], "OK", row["reason"])
            self.assertEqual([step["step"] for step in row["losses"]], [0, 1, 2])
            self.assertLess(row["loss_apart"], 1e-5)
            self.assertLess(row["grad_norm_apart"], 1e-5)
            self.assertGreaterEqual(row["steps"][0], 3)  # what was warmed up by the steps that are compared
            self.assertGreater(row["tokens_per_second"], 0)
            self.assertAlmostEqual(sum(row["split_ms"].values()), row["parts_ms"]["step"])
        self.assertContainsSubset({"kda_prepare", "kda_state", "kda_grads"}, by_arm["pallas"]["in_program"])
        self.assertGreater(by_arm["pallas"]["memory_bytes"], 3 * 4 * by_arm["pallas"]["parameters"])
        out = io.StringIO()
        train_step.print_rows(Console(file=out, width=cli.WIDTH), found, "CPU", kernels=True)
        self.assertIn("kernels of ours in the compiled step: kda_", out.getvalue())


class LossesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("another_loss", {"loss": 2.05}, "loss 5.0e-02"),
        ("a_loss_that_is_no_number", {"loss": math.nan}, "loss inf"),
        ("another_gradient", {"norm": 1.1}, "norm of the first gradients 1.0e-01"),
    )
    def test_an_arm_that_leaves_the_others_is_wrong(self, differs, reason):
        found = rows([run("pallas", ours=True), run("fla", **differs), run("torch_eager")])
        self.assertEqual([found[n]["status"] for n in ("pallas", "torch_eager", "fla")], ["OK", "OK", "WRONG"])
        self.assertIn(reason, found["fla"]["reason"])
        self.assertEqual(found["fla"]["times"], {})

    def test_one_arm_alone_says_so(self):
        self.assertIn("no other arm", rows([run("pallas")])["pallas"]["note"])


class Recorded(train_arms.Trainer):
    """A trainer of two kernels, on a GPU that is not there."""

    def __init__(self):
        arrays = {"ids": np.zeros((4, 2, 3), np.uint8), "learning_rates": np.zeros(4, np.float32)}
        super().__init__(case(), Arm("x", **ARM), arrays)
        self.gpu, self.claimed = True, ["kda_state"]

    def call(self, part):
        self.step += part == "step"
        return 2.0, 1.0

    def wait(self, results):
        pass

    def kernels(self, part, n):
        for _ in range(n):
            self.call(part)
        return [("kda_state_mosaic_gpu_kernel", 0.5), ("nvjet_y", 2.0), ("gemm_fusion_dot_3", 1.0)] * n

    missing_kernels = train_arms.JaxTrainer.missing_kernels


class SampleTest(absltest.TestCase):
    def test_kernels_of_one_call_are_the_mean_of_some(self):
        trainer = Recorded()
        self.assertEqual([step["step"] for step in trainer.train(2)], [0, 1])
        found = trainer.sample("step", "device", 3)
        self.assertEqual(found["steps"], [3, 5])  # step 2 warmed up
        self.assertAlmostEqual(found["ms"], 3.5)
        self.assertAlmostEqual(found["gemm_ms"], 3.0)
        self.assertEqual([kernel["count"] for kernel in found["kernels"]], [1, 1, 1])
        self.assertEqual(found["missing"], [])

    def test_a_claimed_kernel_that_is_not_launched_is_missed(self):
        trainer = Recorded()
        trainer.claimed = ["kda_state", "kda_grads"]
        self.assertEqual(trainer.sample("step", "device", 1)["missing"], ["kda_grads"])
        self.assertEqual(trainer.sample("forward", "device", 1)["missing"], [])

    def test_steps_go_on_through_jax_s_profiler(self):
        trainer = Recorded()

        def measure(function, *, aggregate, iterations):
            self.assertIsInstance(function, stages.Wrapped)  # it would be jitted otherwise, and run once

            def timed():
                calls = [[("kda_state", 1.0)] for _ in range(iterations) if function() is not None]
                return None, calls if iterations > 1 else calls[0]

            return timed

        with unittest.mock.patch.object(profiler, "measure", measure):
            for n in (1, 3):
                records = train_arms.JaxTrainer.kernels(trainer, "step", n)  # pyright: ignore[reportArgumentType]
                self.assertEqual(records, [("kda_state", 1.0)] * n)
        self.assertEqual(trainer.step, 4)

    def test_kernels_are_read_from_the_compiled_program(self):
        text = """
          %a = bf16[2] fusion(%b), metadata={op_name="jit(train)/while/body/kda_unused/mpmd_map"}
          %c = f32[2] custom-call(%d), metadata={op_name="jit(train)/x/kda_grads/mpmd_map"}
          %e = custom-call(%f), metadata={op_name="jit(train)/kda_state/pallas_call"}
          %g = custom-call(%h), custom_call_target="__cublas$gemm", metadata={op_name="jit(train)/dot_general"}
        """
        self.assertEqual(train_arms.in_program(text), ["kda_grads", "kda_state"])

    def test_launches_are_known_by_their_names(self):
        for name in ("kda_state", "kda_state__1", "kda_state_mosaic_gpu_kernel", "kda_state_mosaic_gpu_kernel__1"):
            self.assertTrue(train_arms.is_launch_of(name, "kda_state"), name)
        for name in ("kda_state_bwd", "kda_state_bwd_mosaic_gpu_kernel", "my_kda_state"):
            self.assertFalse(train_arms.is_launch_of(name, "kda_state"), name)

    def test_products_are_known_by_their_names(self):
        for name in ("nvjet_tst_128x256", "sm90_xmma_gemm_bf16", "gemm_fusion_dot_12", "cutlass::Kernel2", "dot_7"):
            self.assertTrue(train_arms.is_gemm(name), name)
        for name in ("kda_grads_mosaic_gpu_kernel", "loop_multiply_fusion", "chunk_kda_fwd_kernel_intra_sub_chunk"):
            self.assertFalse(train_arms.is_gemm(name), name)


class ReportTest(parameterized.TestCase):
    def test_shares_are_those_of_the_operator_times_its_calls(self):
        row = rows([run("pallas", ours=True)])["pallas"]  # 4 layers, 4 times
        self.assertEqual(row["shares_ms"], {"kda": 2.0, "gemm": 5.0, "rest": 1.0})
        self.assertEqual(row["split_ms"], {"forward": 2.0, "backward": 5.0, "optimizer": 1.0})
        self.assertEqual(row["tokens_per_second"], 512000)

    def test_products_inside_the_operator_are_no_other_products(self):
        other = run("torch_eager")
        other.parts["kda"]["gemm_ms"] = 0.0625
        self.assertEqual(rows([other])["torch_eager"]["shares_ms"], {"kda": 2.0, "gemm": 4.0, "rest": 2.0})

    @parameterized.parameters("report", "340m")
    def test_operations_are_six_for_every_weight_of_a_matrix_and_the_recurrences(self, name):
        params = case(name).params
        config = DecoderConfig(**params["decoder"])
        state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param)
        sizes = {".".join(map(str, path)): math.prod(x.shape) for path, x in nnx.to_flat_state(state)}
        matrices = sum(n for name, n in sizes.items() if name.endswith("kernel") and "conv" not in name)
        head = sizes["head.kernel"]
        weights = config.loops * (matrices - head - sizes["embed.kernel"]) + head
        mixers = config.loops * config.num_layers * 21 * config.num_heads * config.head_dim**2
        tokens = params["batch_size"] * params["sequence_length"]
        self.assertEqual(train_step.operations(params), tokens * (6 * weights + mixers))

    def test_mfu_is_of_the_card_s_rate(self):
        row = rows([run("pallas")])["pallas"]
        self.assertAlmostEqual(train_step.mfu(row, "NVIDIA H200"), row["operations"] / 0.01 / 989.4e12)
        self.assertIsNone(train_step.mfu(row, "CPU"))

    def test_tables_fit_the_width(self):
        runs = [run("torch_compile", ms=12345.6), run("pallas", ours=True, ms=123.4), run("fla_compile", ms=4567.8)]
        runs[0].steps, runs[0].info["compile_s"] = [10, 1099], 123.4
        runs.append(train_step._Run(Arm("torch_eager", **ARM), reason="out of memory"))
        found, out = rows(runs), io.StringIO()
        train_step.print_rows(Console(file=out, width=cli.WIDTH), list(found.values()), "NVIDIA H200", kernels=True)
        self.assertNotIn("…", out.getvalue())
        for text in ("NOT MEASURED", "10-1099", "out of memory", "kernels of ours launched: kda_state x 32"):
            self.assertIn(text, out.getvalue())

    def test_the_readme_has_a_table_a_preset(self):
        runs = [run("pallas", ours=True), run("fla", ms=15.0), train_step._Run(Arm("xla", **ARM), reason="no | answer")]
        document = {"schema": results.SCHEMA, "command": "", "rows": list(rows(runs).values())}
        document["device"] = {"kind": "NVIDIA H200", "date": "2026-01-01 10:00 UTC", "commit": "0123456789"}
        text = "\n".join(readme._steps(cli.ROOT / "train_step" / "h200.json", document))
        self.assertIn("| report: 28 M, batch 10 x 512, bfloat16 | tokens/s | ratio |", text)
        self.assertRegex(
            text, r"\| pallas \| 512,000 \| - \| 10\.0 \| 2\.00, 5\.00, 1\.00 \| 25 %, 62 %, 12 % \| \S+ % \|"
        )
        self.assertRegex(text, r"\| PyTorch with FLA \| 341,333 \| 1\.50 \| 15\.0 \|")
        self.assertIn("| xla | NOT MEASURED: no / answer | |", text)

    @parameterized.parameters(("--impl=nonsense", "nonsense"), ("--preset=nonsense", "nonsense"))
    def test_bad_names_are_one_line(self, flag, word):
        with self.assertRaisesRegex(UsageError, word):
            if flag.startswith("--preset"):
                train_step.cases([word])
            else:
                cli.pick_arms([word], train_step.arms(case()), train_step.GROUPS)


if __name__ == "__main__":
    absltest.main()
