"""Text as bytes: where it comes from, its split, its batches, and the entropies that a loss is held against."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np

from dormouse_jax.training import UsageError

# Folders of the standard library that not every installation has, or that are not the library's.
_LEFT_OUT = {"__pycache__", "dist-packages", "ensurepip", "idlelib", "site-packages", "test", "tests", "turtledemo"}

# One block in 20 is for validation. Blocks are as long as a few files, and shorter where the text is short.
_VALIDATION_SHARE = 20
_BLOCK = 1 << 16


def standard_library() -> list[pathlib.Path]:
    """The Python sources of the running interpreter's standard library, sorted."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(root).parts))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate with.

    Attributes:
      training, validation: `[N]`, uint8.
      digest: SHA-256 of the whole text.
    """

    training: np.ndarray
    validation: np.ndarray
    digest: str

    @classmethod
    def read(cls, paths: Sequence[pathlib.Path], sequence_length: int) -> Corpus:
        """The files' bytes, one file after the other. Every 20th block of at most 64 KiB is for validation.

        Raises:
          UsageError: a file cannot be read, or the text is too short for sequences of sequence_length tokens.
        """
        parts = []
        for path in paths:
            try:
                parts.append(path.read_bytes())
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
        text = b"".join(parts)
        if not text:
            raise UsageError(f"the corpus is empty: {len(paths)} file(s) without a byte")
        least = _VALIDATION_SHARE * (sequence_length + 1)
        if len(text) < least:
            raise UsageError(
                f"the corpus has {len(text)} bytes, and sequences of {sequence_length} tokens need at least {least}"
            )
        # Blocks at least as long as a sequence, so that both parts have one.
        block = max(sequence_length + 1, min(_BLOCK, len(text) // _VALIDATION_SHARE))
        data = np.frombuffer(text, np.uint8)
        blocks = [data[start : start + block] for start in range(0, len(data), block)]
        every = slice(_VALIDATION_SHARE - 1, None, _VALIDATION_SHARE)
        validation = np.concatenate(blocks[every])
        del blocks[every]
        return cls(np.concatenate(blocks), validation, hashlib.sha256(text).hexdigest())

    def batch(self, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
        """Sequences to train on, `[batch_size, sequence_length + 1]`, uint8: a function of the arguments alone."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.training) - sequence_length, batch_size)
        return self.training[starts[:, None] + np.arange(sequence_length + 1)]

    def validation_sequences(self, count: int, sequence_length: int) -> np.ndarray:
        """`count` sequences to validate with, `[count, sequence_length + 1]`, at even distances."""
        starts = np.linspace(0, len(self.validation) - sequence_length - 1, count).astype(np.int64)
        return self.validation[starts[:, None] + np.arange(sequence_length + 1)]

    def entropies(self) -> dict[str, float]:
        """Entropies of the validation text, in nats a byte: "unigram", of its bytes, and "bigram", of a byte given the
        one before it. They are the losses of the best model that knows no context, and that knows one byte."""
        pairs = np.zeros((256, 256))
        np.add.at(pairs, (self.validation[:-1], self.validation[1:]), 1)
        unigram = _entropy(np.bincount(self.validation, minlength=256))
        return {"unigram": unigram, "bigram": _entropy(pairs) - _entropy(pairs.sum(axis=1))}


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
