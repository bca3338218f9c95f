"""One step of training, and one of validation, on all devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from dormouse_jax.models import Decoder

DATA = "data"  # the axis of the mesh that batches are split over


class TrainState(NamedTuple):
    """What a step of training changes; a pytree."""

    params: Any
    opt_state: Any


def optimizer(
    *, learning_rate: float, warmup_steps: int, steps: int, weight_decay: float, clip_norm: float
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW behind a clip of the global norm, and its learning rate: up in a line, down along a cosine to a tenth.

    The decay is for matrices alone: not for norms, biases, gates and convolutions.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, 0.1 * learning_rate)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw), schedule


def _is_matrix(params: Any) -> Any:
    def decays(path, _):
        names = [str(getattr(key, "key", key)) for key in path]
        return "kernel" in names and not any(name.endswith("_conv") for name in names)

    return jax.tree.map_with_path(decays, params)


def make_steps(
    model: Decoder, transformation: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`(train, validate)`, jitted for a mesh with the axis "data".

    train(state, ids) -> (state, metrics): one update from ids `[B, T + 1]`, split over the devices; the state,
      which all of them have, is donated. metrics: "loss" and "grad_norm", float32 scalars, of the parameters before.
    validate(params, ids) -> the mean loss.
    """
    graph = nnx.graphdef(model)

    def loss(params, ids):
        return nnx.merge(graph, params).loss(ids)

    def train(state, ids):
        value, grads = jax.value_and_grad(loss)(state.params, ids)
        value, grads = lax.pmean((value, grads), DATA)
        updates, opt_state = transformation.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    def validate(params, ids):
        return lax.pmean(loss(params, ids), DATA)

    # Under shard_map, since nothing splits a kernel by itself. What it cannot check are the kernels' results.
    options: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P(DATA)), "check_vma": False}
    return (
        jax.jit(jax.shard_map(train, out_specs=(P(), P()), **options), donate_argnums=0),
        jax.jit(jax.shard_map(validate, out_specs=P(), **options)),
    )
