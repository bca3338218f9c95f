"""`python -m dormouse_jax.train` and `python -m dormouse_jax.generate`: runs, kills, checkpoints, texts, errors."""

import collections
import contextlib
import functools
import io
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from dormouse_jax import generate, train
from dormouse_jax.models import DecoderConfig
from dormouse_jax.training import UsageError, log
from dormouse_jax.training.corpus import Corpus, standard_library
from dormouse_jax.training.decoding import Generator
from dormouse_jax.training.step import optimizer
from tests import helpers

# A model of a few thousand parameters on this repository's Python, small enough to train in a second.
SIZES = "hidden_size=32 num_layers=2 num_heads=2 head_dim=16 intermediate_size=48 attention_every=2"
TEXT = sorted((helpers.ROOT / "dormouse_jax").rglob("*.py"))
FLAGS = [
    *("--set", *SIZES.split(), "--data", *map(str, TEXT)),
    *["--batch-size", "8", "--sequence-length", "32", "--steps", "60", "--learning-rate", "1e-2"],
    *["--eval-every", "20", "--eval-batches", "4", "--checkpoint-every", "20"],
]

# The command in a process that kills itself, as it is about to compute the step after `at`.
KILLED = """
import os, signal, sys
from tests import helpers
from dormouse_jax import train
from dormouse_jax.training import loop
batch = loop.Trainer.batch
def fatal(self, step):
    if step == int(sys.argv[1]) + 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(self, step)
loop.Trainer.batch = fatal
train.main(sys.argv[2:])
"""


def run(main, *args):
    """A command's exit status, and what it printed."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def curve(folder):
    """The losses of a run."""
    return [line for line in log.read(folder / "log.jsonl") if line["kind"] in ("train", "eval")]


def new_folder(test):
    folder = tempfile.TemporaryDirectory()
    test.addCleanup(folder.cleanup)
    return pathlib.Path(folder.name)


@functools.cache
def kept_folder():
    """One for the process, which goes when that ends."""
    return tempfile.TemporaryDirectory()


@functools.cache
def trained():
    """The folder of a run that nothing interrupted, and what it printed."""
    folder = pathlib.Path(kept_folder().name) / "run"
    status, out, err = run(train.main, *FLAGS, "--out", folder)
    assert status == 0, err
    return folder, out


class TrainTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = new_folder(self)

    def test_it_learns(self):
        folder, out = trained()
        losses = {line["step"]: line["validation_loss"] for line in curve(folder) if line["kind"] == "eval"}
        self.assertEqual(list(losses), [0, 20, 40, 60])
        self.assertAlmostEqual(losses[0], math.log(256), delta=0.2)
        (start,) = (line for line in log.read(folder / "log.jsonl") if line["kind"] == "start")
        self.assertLess(losses[60], start["entropies"]["unigram"])
        self.assertIn(f"step 60: validation loss {losses[60]:.4f} nats a byte (entropies: unigram", out)
        self.assertIn("kda backward: xla (fp32)" if not helpers.on_gpu() else "kda backward: pallas", out)
        steps = [line["step"] for line in curve(folder) if line["kind"] == "train"]
        self.assertEqual(steps, list(range(1, 61)))
        self.assertGreater((folder / "loss.png").stat().st_size, 10000)

    def test_killed_and_resumed_it_has_the_same_losses_bit_for_bit(self):
        args = [sys.executable, "-c", KILLED, "45", *FLAGS, "--out", str(self.folder / "run")]
        env = {**os.environ, "PYTHONPATH": str(helpers.ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        killed = subprocess.run(args, env=env, capture_output=True, text=True, cwd=helpers.ROOT)
        self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        record = self.folder / "run" / "log.jsonl"
        # What was computed after the last checkpoint, up to a line that was being written.
        with record.open("a") as file:
            file.write('{"kind": "train", "step": 41, "loss": 0.0}\n{"kind": "tra')
        status, out, err = run(train.main, *FLAGS, "--out", self.folder / "run", "--resume")
        self.assertEqual(status, 0, err)
        self.assertIn("on from step 40", out)
        self.assertEqual(curve(self.folder / "run"), curve(trained()[0]))
        steps = [line["step"] for line in log.read(record) if line["kind"] == "start"]
        self.assertEqual(steps, [0, 40])

    def test_devices_share_a_batch(self):
        if len(jax.devices()) == 1:
            self.skipTest("there is one device")
        from dormouse_jax.training import loop
        from dormouse_jax.training.checkpoint import Run

        (start,) = (line for line in log.read(trained()[0] / "log.jsonl") if line["kind"] == "start")
        self.assertLen(start["devices"], len(jax.devices()))
        run_ = Run.from_json(start["run"])
        one = loop.Trainer(run_, Corpus.read(TEXT, 32), jax.devices()[:1], {})
        state, want = one.initial_state(), curve(trained()[0])[1:4]
        for step, line in enumerate(want, 1):
            state, metrics = one.update(state, one.batch(step))
            self.assertAlmostEqual(float(metrics["loss"]), line["loss"], delta=1e-4)
            helpers.assert_close(metrics["grad_norm"], line["grad_norm"], rms=1e-3)

    def test_a_run_is_not_mixed_with_another(self):
        folder, _ = trained()
        before = curve(folder)
        for flags, message in (
            ([], f"{folder} has a run already: go on with it by --resume, or choose another folder by --out"),
            (
                ["--resume", "--seed", 1, "--set", "loops=2"],
                f"{folder} has a checkpoint of another configuration: seed is 0 there and 1 here; loops is 1 there "
                "and 2 here",
            ),
        ):
            # The sizes of --set come last, so that they are those that count.
            args = [*FLAGS, "--out", folder, *flags]
            if "--set" in flags:
                args[args.index("--set") : args.index("--data")] = []
                args[args.index("loops=2") :] = ["loops=2", *SIZES.split()]
            status, _, err = run(train.main, *args)
            self.assertEqual((status, err), (2, f"dormouse_jax.train: {message}\n"))
        self.assertEqual(curve(folder), before)

    @parameterized.parameters(
        (["--config", "7b"], "--config: '7b' is not known; choose from 1m, report, 340m"),
        (["--set", "size=3"], "--set: 'size' is not known; choose from hidden_size, num_layers,"),
        (["--set", "loops=two"], "--set: loops must be of type int, got 'two'"),
        (["--set", "loops=0"], "--set: DecoderConfig: loops must be at least 1, got 0"),
        (["--steps", "0"], "argument --steps: invalid _positive value: '0'"),
        (["--data", "no/such/file"], "cannot read no/such/file: No such file or directory"),
        (["--data", "."], "cannot read .: Is a directory"),
        (["--data", "/dev/null"], "the corpus is empty: 1 file(s) without a byte"),
        (["--resume"], "there is no run in "),
        (["--implementation", "fast"], "argument --implementation: invalid choice: 'fast' (choose from "),
    )
    def test_errors_are_one_line(self, flags, message):
        status, _, err = run(train.main, "--out", self.folder / "run", *flags)
        self.assertEqual(status, 2)
        self.assertStartsWith(err, f"dormouse_jax.train: {message}")
        self.assertEqual(err.count("\n"), 1)
        self.assertFalse((self.folder / "run" / "log.jsonl").exists())

    def test_an_implementation_that_cannot_run_here(self):
        if helpers.on_gpu():
            self.skipTest("it can")
        for _ in range(2):  # The first leaves nothing that the second could take for a run.
            status, _, err = run(train.main, *FLAGS, "--out", self.folder / "run", "--implementation", "pallas")
            self.assertEqual(status, 2)
            self.assertRegex(err, "^dormouse_jax.train: [a-z_]+: implementation='pallas' cannot serve this call")
            self.assertEqual(err.count("\n"), 1)

    def test_a_batch_that_cannot_be_split(self):
        if len(jax.devices()) == 1:
            self.skipTest("there is one device")
        status, _, err = run(train.main, "--out", self.folder / "run", "--batch-size", 9)
        message = f"a batch of 9 sequences cannot be split over {len(jax.devices())} devices"
        self.assertEqual((status, err), (2, f"dormouse_jax.train: {message}\n"))

    def test_a_loss_that_is_not_finite_ends_it(self):
        flags = [flag.replace("every=2", "every=1") for flag in FLAGS]  # Attention alone is faster to compile.
        status, _, err = run(train.main, *flags, "--out", self.folder / "run", "--learning-rate", "1e30")
        self.assertEqual(status, 2)
        self.assertRegex(
            err, r"^dormouse_jax.train: the loss of step \d+ is (nan|inf); a lower --learning-rate may help"
        )


class GenerateTest(parameterized.TestCase):
    def test_the_same_text_from_the_same_seed(self):
        texts = {}
        for name, flags in {"": (), "again": (), "other seed": ("--seed", 1), "longer": ("--tokens", 70)}.items():
            status, texts[name], err = run(generate.main, trained()[0], "--prompt", "import", "--tokens", 40, *flags)
            self.assertEqual(status, 0, err)
        self.assertStartsWith(texts[""], "import")
        self.assertEqual(texts[""], texts["again"])
        self.assertNotEqual(texts[""], texts["other seed"])
        self.assertStartsWith(texts["longer"], texts[""].rstrip("\ufffd\n"))

    def test_without_a_temperature_it_is_the_likeliest_byte_of_the_whole_text(self):
        generator = Generator.of_run(trained()[0])
        text = b"".join(generator(b"def f", 40, temperature=0.0))
        self.assertLen(text, 40)
        model = nnx.merge(generator._graph, generator._params)
        logits = model(jnp.asarray(np.frombuffer(b"def f" + text, np.uint8))[None])[0, 4:-1]
        chosen = np.take_along_axis(np.asarray(logits), np.frombuffer(text, np.uint8)[:, None].astype(int), axis=1)
        helpers.assert_close(chosen[:, 0], logits.max(axis=-1), rms=1e-4)

    def test_draws_follow_the_logits(self):
        class Uneven(nnx.Module):
            def prefill(self, ids, length):
                return jnp.zeros((1, ids.shape[1], 4)) + jnp.log(jnp.array([1.0, 2.0, 4.0, 0.0])), ()

            def step(self, ids, cache):
                return self.prefill(ids[:, None], 0)[0][:, 0], cache

        for temperature, want in ((1.0, [1 / 7, 2 / 7, 4 / 7]), (0.5, [1 / 21, 4 / 21, 16 / 21]), (0.0, [0, 0, 1])):
            text = b"".join(Generator(Uneven())(b"a", 4000, temperature=temperature))
            counts = collections.Counter(text)
            for byte, share in enumerate([*want, 0]):
                self.assertAlmostEqual(counts[byte] / 4000, share, delta=0.03)

    @parameterized.parameters(
        (["--prompt", ""], "--prompt must have at least one byte"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be a number >= 0, got -1.0"),
        ([], "there are no checkpoints in {}/checkpoints"),
    )
    def test_errors_are_one_line(self, flags, message):
        folder = new_folder(self)
        status, _, err = run(generate.main, folder, *flags)
        self.assertEqual((status, err), (2, f"dormouse_jax.generate: {message.format(folder)}\n"))

    def test_a_checkpoint_of_another_version(self):
        folder = new_folder(self)
        shutil.copytree(trained()[0], folder / "run")
        path = folder / "run" / "checkpoints" / "60" / "run" / "metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"heads": 3}))
        status, _, err = run(generate.main, folder / "run")
        self.assertEqual(status, 2)
        self.assertStartsWith(
            err, f"dormouse_jax.generate: {folder}/run/checkpoints/60 is no checkpoint of this version"
        )
        self.assertEqual(err.count("\n"), 1)


class CorpusTest(parameterized.TestCase):
    def corpus(self, *texts, sequence_length=7):
        folder = new_folder(self)
        paths = [folder / str(i) for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        return Corpus.read(paths, sequence_length)

    def test_split(self):
        text = bytes(range(256)) * 10
        corpus = self.corpus(text[:700], text[700:])
        self.assertEqual(corpus.validation.tobytes(), text[19 * 128 : 20 * 128])
        self.assertEqual(corpus.training.tobytes(), text[: 19 * 128] + text[20 * 128 :])
        self.assertEqual(corpus.digest, self.corpus(text).digest)
        self.assertNotEqual(corpus.digest, self.corpus(text[1:]).digest)

    def test_the_shortest_text_has_both_parts(self):
        corpus = self.corpus(b"x" * 160)
        self.assertEqual((len(corpus.training), len(corpus.validation)), (152, 8))
        self.assertEqual(corpus.validation_sequences(3, 7).shape, (3, 8))
        with self.assertRaisesRegex(
            UsageError, "the corpus has 159 bytes, and sequences of 7 tokens need at least 160"
        ):
            self.corpus(b"x" * 159)

    def test_a_batch_is_a_function_of_seed_and_step(self):
        corpus = self.corpus(np.random.default_rng(0).bytes(4000))
        batch = corpus.batch(0, 5, 3, 7)
        self.assertEqual((batch.shape, batch.dtype), ((3, 8), np.uint8))
        np.testing.assert_array_equal(batch, corpus.batch(0, 5, 3, 7))
        for other in ((1, 5), (0, 6)):
            self.assertFalse(np.array_equal(batch, corpus.batch(*other, 3, 7)))
        text = corpus.training.tobytes()
        self.assertTrue(all(row.tobytes() in text for row in batch))

    def test_every_sequence_can_be_drawn(self):
        corpus = self.corpus(bytes(range(160)))
        starts = np.unique(corpus.batch(0, 0, 5000, 7)[:, 0])
        np.testing.assert_array_equal(starts, np.arange(152 - 7))
        np.testing.assert_array_equal(corpus.validation_sequences(1, 7)[0], np.arange(152, 160))

    def test_entropies(self):
        corpus = Corpus(np.zeros(0, np.uint8), np.frombuffer(b"abababac" * 4, np.uint8), "")
        entropies = corpus.entropies()
        share = np.array([16, 12, 4]) / 32
        self.assertAlmostEqual(entropies["unigram"], -(share * np.log(share)).sum())
        # After an a comes b 12 times and c 4; after b and c an a always.
        self.assertAlmostEqual(entropies["bigram"], -(12 * math.log(12 / 16) + 4 * math.log(4 / 16)) / 31)

    def test_the_standard_library(self):
        paths = standard_library()
        self.assertEqual(paths, sorted(paths))
        names = {path.name for path in paths}
        self.assertContainsSubset({"argparse.py", "dataclasses.py"}, names)
        self.assertFalse([path for path in paths if "site-packages" in path.parts])


class OptimizerTest(absltest.TestCase):
    def test_the_learning_rate_goes_up_and_down_and_matrices_alone_decay(self):
        from dormouse_jax.models import Decoder

        sizes = DecoderConfig(hidden_size=8, num_layers=1, num_heads=1, head_dim=8, intermediate_size=8)
        params = nnx.eval_shape(lambda: nnx.state(Decoder(sizes, rngs=nnx.Rngs(0))))
        params = jax.tree.map(lambda x: jnp.ones(x.shape), params)
        options = {"learning_rate": 0.5, "warmup_steps": 10, "steps": 100, "weight_decay": 0.1, "clip_norm": 1.0}
        transformation, schedule = optimizer(**options)
        rates = [float(schedule(n)) for n in (0, 5, 10, 55, 100)]
        np.testing.assert_allclose(rates, [0, 0.25, 0.5, 0.275, 0.05], rtol=1e-5)

        @jax.jit
        def second_update(params):
            state, zero = transformation.init(params), jax.tree.map(jnp.zeros_like, params)
            _, state = transformation.update(zero, state, params)
            return transformation.update(zero, state, params)[0]

        updates = second_update(params)
        moved = {".".join(map(str, path)) for path, x in nnx.to_flat_state(updates) if float(jnp.abs(x[...]).max()) > 0}
        mixer = {f"{n}_proj.kernel" for n in "qkvbo"} | {f"{n}_proj.{i}.kernel" for n in "fg" for i in (0, 1)}
        layer = {"gate_up.kernel", "down.kernel"} | {f"mixer.{name}" for name in mixer}
        self.assertEqual(moved, {"embed.kernel", "head.kernel"} | {f"groups.layers.0.{name}" for name in layer})


if __name__ == "__main__":
    absltest.main()
