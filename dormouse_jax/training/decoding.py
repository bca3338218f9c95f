"""Text out of a checkpoint."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dormouse_jax.models import Decoder
from dormouse_jax.training import UsageError
from dormouse_jax.training.checkpoint import Checkpoints

# Bytes that are decoded before the host looks at them.
_PART = 32


class Generator:
    """Continues texts.

    Args:
      model: a decoder of bytes.
    """

    def __init__(self, model: Decoder):
        self._graph, self._params = nnx.split(model)
        self.tokens_per_second = 0.0  # of the last text, without the first part, in which programs are compiled

    @classmethod
    def of_run(cls, folder: pathlib.Path, implementation: str | None = None) -> Generator:
        """With the last checkpoint of the run in a folder.

        Raises:
          UsageError: there is none, or it is not of this version.
        """
        checkpoints = Checkpoints(folder / "checkpoints", create=False)
        step = checkpoints.latest
        if step is None:
            raise UsageError(f"there are no checkpoints in {folder / 'checkpoints'}")
        sizes = checkpoints.run(step).decoder
        model = nnx.eval_shape(lambda: Decoder(sizes, implementation=implementation, rngs=nnx.Rngs(0)))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.state(model, nnx.Param)
        )
        nnx.update(model, checkpoints.part(step, "params", shapes))
        checkpoints.close()
        return cls(model)

    def __call__(self, prompt: bytes, tokens: int, *, temperature: float = 1.0, seed: int = 0) -> Iterator[bytes]:
        """`tokens` bytes that follow a prompt, part by part.

        temperature: the logits are divided by it before a byte is drawn; 0 takes the likeliest byte.
        """
        key = jax.random.key(seed)
        parts = -(-tokens // _PART)
        ids = jnp.asarray(np.frombuffer(prompt, np.uint8))[None]
        logits, cache = self._prefill(self._params, ids, len(prompt) + parts * _PART)
        began = time.perf_counter()
        for i in range(parts):
            drawn, logits, cache = self._decode(self._params, logits, cache, jax.random.fold_in(key, i), temperature)
            part = bytes(np.asarray(drawn))[: tokens - i * _PART]
            if i == 0:
                began = time.perf_counter()
            yield part
        self.tokens_per_second = max(tokens - _PART, 0) / (time.perf_counter() - began)

    @functools.cached_property
    def _prefill(self) -> Any:
        def run(params, ids, length):
            logits, cache = nnx.merge(self._graph, params).prefill(ids, length)
            return logits[:, -1], cache

        return jax.jit(run, static_argnums=2)

    @functools.cached_property
    def _decode(self) -> Any:
        def run(params, logits, cache, key, temperature):
            model = nnx.merge(self._graph, params)

            def one(carry, key):
                logits, cache = carry
                # At a temperature of 0 all draws but the likeliest have a probability of 0.
                drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
                return model.step(drawn, cache), drawn[0].astype(jnp.uint8)

            (logits, cache), drawn = jax.lax.scan(one, (logits, cache), jax.random.split(key, _PART))
            return drawn, logits, cache

        return jax.jit(run, donate_argnums=2)
