"""A run of training, from its beginning or from its last checkpoint."""

from __future__ import annotations

import functools
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dormouse_jax.explain import explain
from dormouse_jax.models import Decoder
from dormouse_jax.training import UsageError, log
from dormouse_jax.training.checkpoint import Checkpoints, Run, require_same
from dormouse_jax.training.corpus import Corpus
from dormouse_jax.training.step import DATA, TrainState, make_steps, optimizer

# After so many steps their losses are fetched, which is when the host waits for the devices.
_FETCH_EVERY = 10


class Trainer:
    """What a run computes: its first state, the batch of a step, the update, the validation loss.

    Attributes:
      update: `(state, ids) -> (state, metrics)`, as of `make_steps`, jitted.
      learning_rates: `[steps]`, of the updates.
    """

    def __init__(self, run: Run, corpus: Corpus, devices: Sequence[Any], model_options: Mapping[str, Any]):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(devices),), (DATA,), axis_types=auto, devices=devices)
        self._run, self._corpus = run, corpus
        self._everywhere, self._split = NamedSharding(mesh, P()), NamedSharding(mesh, P(DATA))
        self._transformation, schedule = optimizer(
            learning_rate=run.learning_rate,
            warmup_steps=run.warmup_steps,
            steps=run.steps,
            weight_decay=run.weight_decay,
            clip_norm=run.clip_norm,
        )
        self.learning_rates = np.asarray(schedule(np.arange(run.steps)))
        model = nnx.eval_shape(lambda: Decoder(run.decoder, **model_options, rngs=nnx.Rngs(0)))
        self.update, self._validate = make_steps(model, self._transformation, mesh)
        sequences = corpus.validation_sequences(run.eval_batches * run.batch_size, run.sequence_length)
        self._validation = [self._put(ids) for ids in np.split(sequences, run.eval_batches)]

    def _initial(self) -> TrainState:
        params = nnx.state(Decoder(self._run.decoder, rngs=nnx.Rngs(self._run.seed)), nnx.Param)
        return TrainState(params, self._transformation.init(params))

    def _put(self, ids: np.ndarray) -> jax.Array:
        return jax.device_put(ids, self._split)

    def initial_state(self) -> TrainState:
        return jax.jit(self._initial, out_shardings=self._everywhere)()

    def state_shapes(self) -> TrainState:
        """Shapes of a state, and where its arrays belong."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), jax.eval_shape(self._initial)
        )

    def batch(self, step: int) -> jax.Array:
        run = self._run
        return self._put(self._corpus.batch(run.seed, step, run.batch_size, run.sequence_length))

    def validation_loss(self, state: TrainState) -> float:
        return float(jnp.stack([self._validate(state.params, ids) for ids in self._validation]).mean())


def train(
    run: Run,
    corpus: Corpus,
    out: pathlib.Path,
    *,
    checkpoint_every: int,
    resume: bool = False,
    model_options: Mapping[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
    console: Console | None = None,
) -> None:
    """Trains a decoder.

    What a step computes is a function of `run`, the text and the step alone. So a run that was killed, and goes on from
    its last checkpoint on the same devices, has the losses of one that was not, bit for bit; on a GPU where it is not
    compiled anew (jax_compilation_cache_dir), for which XLA may choose other kernels.

    Args:
      run: the model and how it is trained.
      corpus: the text, that of run.corpus.
      out: folder for checkpoints/, log.jsonl and loss.png.
      checkpoint_every: after how many steps a checkpoint is written, other than after the last.
      resume: whether to go on with the run that is in `out`.
      model_options: options of `Decoder`: implementation, residuals, remat, scan_layers.
      devices: over which batches are split; all by default.
      console: for progress.

    Raises:
      UsageError: `out` has a run and resume is False, or has none and it is True; the run there is another one; a batch
        cannot be split over the devices; the loss is no longer finite.
    """
    console = console or Console(highlight=False)
    devices = list(devices or jax.devices())
    if run.batch_size % len(devices):
        raise UsageError(f"a batch of {run.batch_size} sequences cannot be split over {len(devices)} devices")
    record_path, folder = out / "log.jsonl", out / "checkpoints"
    saved = folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())
    if (record_path.exists() or saved) != resume:
        raise UsageError(
            f"there is no run in {out} to go on with"
            if resume
            else f"{out} has a run already: go on with it by --resume, or choose another folder by --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, create=True)
    start = checkpoints.latest
    if start is not None:
        require_same(checkpoints.run(start), run, out)
    trainer = Trainer(run, corpus, devices, model_options or {})
    state = trainer.initial_state() if start is None else checkpoints.restore(start, trainer.state_shapes())

    sizes = {
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        "training_bytes": len(corpus.training),
        "validation_bytes": len(corpus.validation),
    }
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    say(
        f"{sizes['parameters'] / 1e6:.1f} M parameters on {len(devices)} x {devices[0].device_kind}, "
        f"{sizes['training_bytes']} bytes to train on, {sizes['validation_bytes']} to validate with"
    )
    operators = explain(trainer.update, state, trainer.batch(0))
    for call in dict.fromkeys(operators):
        name, kernels = str(call).split("\n")[0], ", ".join(call.kernels)
        say(f"{name}: {kernels or 'made by XLA'}")
    began = time.perf_counter()
    update = trainer.update.lower(state, trainer.batch(0)).compile()
    say(f"compiled in {time.perf_counter() - began:.1f} s" + (f", on from step {start}" if start else ""))

    record = log.Log(record_path, keep=start)
    entropies = corpus.entropies()
    kinds = [device.device_kind for device in devices]
    header = {
        "run": run.to_json(),
        "entropies": entropies,
        **sizes,
        "devices": kinds,
        "operators": [str(call) for call in operators],
    }
    record.write("start", start or 0, header)
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = progress.add_task("", total=run.steps, completed=start or 0, speed="")

    def evaluate(step: int, speed: str = "") -> None:
        loss = trainer.validation_loss(state)
        record.write("eval", step, {"validation_loss": loss})
        say(
            f"step {step}: validation loss {loss:.4f} nats a byte (entropies: unigram {entropies['unigram']:.4f}, "
            f"bigram {entropies['bigram']:.4f}){speed}"
        )

    with progress:
        if start is None:
            evaluate(0)
        pending: list[Any] = []
        clock, seconds, timed = time.perf_counter(), 0.0, 0
        for step in range((start or 0) + 1, run.steps + 1):
            state, metrics = update(state, trainer.batch(step))
            pending.append(metrics)
            evaluates, saves = (step == run.steps or step % every == 0 for every in (run.eval_every, checkpoint_every))
            if not (evaluates or saves or len(pending) == _FETCH_EVERY):
                continue
            fetched, first = jax.device_get(pending), step - len(pending) + 1
            pending.clear()
            seconds, timed = seconds + time.perf_counter() - clock, timed + len(fetched)
            for i, metrics in enumerate(fetched, first):
                values = {name: float(x) for name, x in metrics.items()}
                record.write("train", i, values | {"learning_rate": float(trainer.learning_rates[i - 1])})
                if not math.isfinite(values["loss"]):
                    record.close()
                    raise UsageError(f"the loss of step {i} is {values['loss']}; a lower --learning-rate may help")
            speed = timed * run.batch_size * run.sequence_length / seconds
            progress.update(task, completed=step, speed=f"{speed:,.0f} tokens/s")
            if evaluates:
                record.write("speed", step, {"tokens_per_second": speed})
                evaluate(step, f", {speed:,.0f} tokens/s")
                seconds, timed = 0.0, 0
            if saves:
                record.flush()
                checkpoints.save(step, run, state)
                log.plot(log.read(record_path), entropies, out / "loss.png")
            clock = time.perf_counter()
    record.close()
    checkpoints.close()
    say(f"{run.steps} steps are done: {out / 'loss.png'}, {record_path}")
