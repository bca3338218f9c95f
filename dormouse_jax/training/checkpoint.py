"""Checkpoints: what a run was, and the state that it reached."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from dormouse_jax.models import DecoderConfig
from dormouse_jax.training import UsageError
from dormouse_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Run:
    """All that the losses of a run depend on, but for the hardware and what rounds differently.

    Attributes:
      decoder: the model's sizes.
      corpus: SHA-256 of the text.
      batch_size, sequence_length, steps: sequences a step, their tokens, and the number of steps.
      learning_rate, warmup_steps, weight_decay, clip_norm: of the optimizer.
      seed: of the initial parameters and of the order of the text.
      eval_every, eval_batches: after how many steps the model is validated, and with how many batches.
    """

    decoder: DecoderConfig
    corpus: str
    batch_size: int
    sequence_length: int
    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    clip_norm: float
    seed: int
    eval_every: int
    eval_batches: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        return cls(**{**data, "decoder": DecoderConfig(**data["decoder"])})


class Checkpoints:
    """The checkpoints of one run, in a folder of their own; the last two are kept.

    One is there whole or not at all: it is written beside its place, and then moved. `save` returns when it is there.
    """

    def __init__(self, folder: pathlib.Path, *, create: bool):
        """create: whether to make a folder that is not there; a UsageError otherwise."""
        self.folder = folder.absolute()
        if not (create or folder.is_dir()):
            raise UsageError(f"there are no checkpoints in {folder}")
        # A save that goes on in the background would lose an interval more when the process is killed meanwhile.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False, create=create)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("run", *TrainState._fields))

    @property
    def latest(self) -> int | None:
        """The step of the last checkpoint, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, run: Run, state: TrainState) -> None:
        items = {name: ocp.args.StandardSave(part) for name, part in state._asdict().items()}
        self._manager.save(step, args=ocp.args.Composite(run=ocp.args.JsonSave(run.to_json()), **items))

    def run(self, step: int) -> Run:
        """What the run of a checkpoint was.

        Raises:
          UsageError: it is not of this version.
        """
        try:
            return Run.from_json(self._restore(step, run=ocp.args.JsonRestore())["run"])
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self.folder / str(step)} is no checkpoint of this version: {error}") from error

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The state of a checkpoint. shapes: `jax.ShapeDtypeStruct`s with shardings, which say where it is put."""
        return TrainState(**{name: self.part(step, name, tree) for name, tree in shapes._asdict().items()})

    def part(self, step: int, name: str, shapes: Any) -> Any:
        """One field of the state of a checkpoint, as by `restore`."""
        return self._restore(step, **{name: ocp.args.StandardRestore(shapes)})[name]

    def _restore(self, step, **items):
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def close(self) -> None:
        self._manager.close()


def require_same(there: Run, here: Run, folder: pathlib.Path) -> None:
    """Raises a UsageError that names what differs between a checkpoint's run and the one that was asked for."""

    def flat(run):
        data = run.to_json()
        return data | data.pop("decoder")

    theirs, ours = flat(there), flat(here)
    differs = [f"{name} is {theirs[name]} there and {ours[name]} here" for name in ours if theirs[name] != ours[name]]
    if differs:
        raise UsageError(f"{folder} has a checkpoint of another configuration: {'; '.join(differs)}")
