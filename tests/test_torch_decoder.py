"""The PyTorch twin of the decoder and of its training: what `bench.train_step` compares with is the same model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl.testing import absltest, parameterized
from flax import nnx

import torch_ref.decoder
from dormouse_jax.models import Decoder
from dormouse_jax.training.step import DATA, TrainState, make_steps, optimizer
from tests import helpers
from tests.test_models import CONFIG

TRAINING = {"learning_rate": 1e-2, "warmup_steps": 2, "steps": 10, "weight_decay": 0.1, "clip_norm": 0.5}


def ids(step=0):
    return np.random.default_rng(step).integers(0, CONFIG.vocab_size, (2, 24)).astype(np.uint8)


@functools.cache
def model_and_parameters():
    model = Decoder(CONFIG, implementation="xla", rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    # As it begins, the head is so small that the gradients of all else are.
    state["head"]["kernel"] = state["head"]["kernel"] * CONFIG.hidden_size**0.5
    return model, graph, state


def by_name(state):
    return {".".join(map(str, path)): np.array(x[...]) for path, x in nnx.to_flat_state(state)}


@functools.cache
def loss_and_grads():
    _, graph, state = model_and_parameters()
    return jax.jit(jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(jnp.asarray(ids()))))(state)


def twin(compiled=None):
    """The PyTorch decoder with the same parameters."""
    sizes = {name: getattr(CONFIG, name) for name in ("num_layers", "head_dim", "attention_every", "loops", "dtype")}
    parameters = {name: torch.from_numpy(x) for name, x in by_name(model_and_parameters()[2]).items()}
    kda = torch_ref.decoder.ported_kda(8, None)
    return torch_ref.decoder.Decoder(parameters, kda=kda, compiled=compiled, **sizes)


def stacked(leaves):
    """By the names of the JAX model: what belongs to groups, with a leading axis of them."""
    found = {}
    for name, x in leaves.items():
        head, _, rest = name.partition(".")
        if head == "groups":
            rest = rest.partition(".")[2]
            found.setdefault(f"groups.{rest}", []).append(x.detach().numpy())
        else:
            found[name] = x.detach().numpy()
    return {name: np.stack(x) if isinstance(x, list) else x for name, x in found.items()}


class TorchDecoderTest(parameterized.TestCase):
    @parameterized.named_parameters(("eager", None), ("in_compiled_parts", "aot_eager"))
    def test_loss_and_gradients_of_all_parameters_equal_those_of_the_jax_model(self, backend):
        want, want_grads = loss_and_grads()
        compiled = functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True) if backend else None
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model = twin(compiled)
        loss = model.loss(torch.from_numpy(ids()))
        loss.backward()
        helpers.assert_close(loss.item(), want, rms=1e-5, name="loss")
        got = stacked({name: x.grad for name, x in model.parameters.items()})
        want_grads = by_name(want_grads)
        self.assertEqual(set(got), set(want_grads))
        for name, x in want_grads.items():
            self.assertGreater(np.abs(x).max(), 0, name)
            helpers.assert_close(got[name], x, rms=1e-5, name=name)
        if backend:  # Each part once for all layers.
            self.assertEqual(torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs, 4)

    def test_steps_of_training_equal_those_of_the_jax_model(self):
        model, _, state = model_and_parameters()
        transformation, schedule = optimizer(**TRAINING)
        mesh = jax.make_mesh((1,), (DATA,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        train, _ = make_steps(model, transformation, mesh)
        now = jax.tree.map(jnp.copy, TrainState(state, transformation.init(state)))
        other = twin()
        adamw = torch_ref.decoder.AdamW(other.parameters, weight_decay=0.1, clip_norm=0.5)
        for step in range(5):
            now, metrics = train(now, ids(step))
            loss = other.loss(torch.from_numpy(ids(step)))
            loss.backward()
            norm = adamw.step(np.asarray(schedule(step)).item())
            helpers.assert_close(loss.item(), metrics["loss"], rms=1e-5, name=f"loss of step {step}")
            helpers.assert_close(norm.item(), metrics["grad_norm"], rms=1e-4, name=f"norm of step {step}")
            self.assertGreater(norm.item(), 0.5)  # so that the clip is at work
        for name, want in by_name(now.params).items():
            helpers.assert_close(stacked(other.parameters)[name], want, rms=1e-4, name=name)


if __name__ == "__main__":
    absltest.main()
