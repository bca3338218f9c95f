"""Trains a byte-level decoder of Kimi Delta Attention layers.

    python -m dormouse_jax.train [--config 1m] [--data FILE ...] [--out DIR] [--resume]

Without --data it reads the Python sources of the standard library. A run that was stopped in any way goes on from its
last checkpoint with the same command and --resume.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax

from dormouse_jax.kda_arguments import IMPLEMENTATIONS
from dormouse_jax.training import OneLineParser, UsageError, command


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        "dormouse_jax.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
    )
    add = parser.add_argument
    add("--config", default="1m", help="sizes by name: 1m, report, 340m (default 1m)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other sizes, as in loops=2 (models.DecoderConfig)")
    add("--data", nargs="+", type=pathlib.Path, metavar="FILE", help="text files; @LIST reads arguments from a file")
    add("--out", type=pathlib.Path, metavar="DIR", help="folder of the run (default out/CONFIG)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    for name, what in (
        ("batch-size", "sequences a step"),
        ("sequence-length", "tokens a sequence"),
        ("steps", "updates of the parameters"),
    ):
        add(f"--{name}", type=_positive, metavar="N", help=f"{what} (default: that of --config)")
    add("--learning-rate", type=float, metavar="X", help="its peak (default: that of --config)")
    add("--warmup-steps", type=int, metavar="N", help="steps up to the peak (default: a twentieth of them)")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices (default 0.1)")
    add("--clip-norm", type=float, default=1.0, metavar="X", help="largest norm of the gradients (default 1)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and the order of the text (default 0)")
    add("--eval-every", type=_positive, default=100, metavar="N", help="steps between validations (default 100)")
    add("--eval-batches", type=_positive, default=8, metavar="N", help="batches of a validation (default 8)")
    add("--checkpoint-every", type=_positive, default=100, metavar="N", help="steps between checkpoints (default 100)")
    add("--implementation", choices=IMPLEMENTATIONS, help="of the operators (default: the best for the device)")
    add("--residuals", choices=("recompute", "save"), default="recompute", help="what kda keeps for its backward")
    add("--remat", choices=("none", "dots", "full"), default="none", help="what layers compute again in their backward")
    add(
        "--scan-layers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="one computation for all layers: quicker to compile, slower to run (default: each layer written out)",
    )
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _decoder(sizes: Any, changes: list[str]) -> Any:
    """The sizes with those of --set."""
    types = {field.name: type(getattr(sizes, field.name)) for field in dataclasses.fields(sizes)}
    values = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in types:
            raise UsageError(f"--set: {name!r} is not known; choose from {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise UsageError(f"--set: {name} must be of type {types[name].__name__}, got {value!r}") from None
    try:
        return dataclasses.replace(sizes, **values)
    except ValueError as error:
        raise UsageError(f"--set: {error}") from None


@command("dormouse_jax.train")
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        from dormouse_jax.models import PRESETS
        from dormouse_jax.training.checkpoint import Run
        from dormouse_jax.training.corpus import Corpus, standard_library
        from dormouse_jax.training.loop import train
    except ImportError as error:
        raise UsageError(f"{error.name} is not there; the extra 'train' of dormouse_jax installs it") from error

    if args.config not in PRESETS:
        raise UsageError(f"--config: {args.config!r} is not known; choose from {', '.join(PRESETS)}")
    preset = PRESETS[args.config]
    length, steps = args.sequence_length or preset.sequence_length, args.steps or preset.steps
    corpus = Corpus.read(args.data or standard_library(), length)
    run = Run(
        decoder=_decoder(preset.decoder, args.set),
        corpus=corpus.digest,
        batch_size=args.batch_size or preset.batch_size,
        sequence_length=length,
        steps=steps,
        learning_rate=preset.learning_rate if args.learning_rate is None else args.learning_rate,
        warmup_steps=steps // 20 if args.warmup_steps is None else args.warmup_steps,
        weight_decay=args.weight_decay,
        clip_norm=args.clip_norm,
        seed=args.seed,
        eval_every=args.eval_every,
        eval_batches=args.eval_batches,
    )
    out = args.out or pathlib.Path("out") / args.config
    if jax.config.jax_compilation_cache_dir is None:
        # Compiling anew may choose other kernels on a GPU, which round differently.
        jax.config.update("jax_compilation_cache_dir", str((out / "compiled").absolute()))
    try:
        train(
            run,
            corpus,
            out,
            checkpoint_every=args.checkpoint_every,
            resume=args.resume,
            model_options={
                name: getattr(args, name) for name in ("implementation", "residuals", "remat", "scan_layers")
            },
        )
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
