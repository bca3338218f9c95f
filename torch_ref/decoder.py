"""The decoder of `dormouse_jax.models` in PyTorch, on the same parameters, and its optimizer.

    x  = W_e[ids]
    x += mixer(RMSNorm(x));  x += SwiGLU(RMSNorm(x))    for every layer, and the whole stack `loops` times
    logits = W_h RMSNorm(x)

A layer is three calls: what is before Kimi Delta Attention, the operator, and what is after it. So each can be eager,
or compiled once for all layers, and the operator can be anyone's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_ref.kda import chunk_kda
from torch_ref.options import l2_normalize, log_decay

Weights = dict[str, Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def ported_kda(chunk_size: int, matmul_dtype: torch.dtype | None) -> Callable[..., Tensor]:
    """o of raw q, k, v `[B, T, H, D]`, g `[B, T, H, D]`, beta `[B, T, H]`, A_log `[H]`, dt_bias `[H D]`, by the port.

    Decays are formed exactly: those of a layer can overflow factored ones.
    """

    def kda(q, k, v, g, beta, A_log, dt_bias):
        dtype = q.dtype
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
        q, k, g = l2_normalize(q), l2_normalize(k), log_decay(g, A_log, dt_bias)
        options = {"chunk_size": chunk_size, "solve": "triangular", "matmul_dtype": matmul_dtype}
        return chunk_kda(q, k, v, g, torch.sigmoid(beta), **options)[0].to(dtype)

    return kda


class Decoder:
    """The model as a function of its parameters, float32 masters that are cast to `dtype` once a call.

    Args:
      parameters: by their paths in the JAX model, those of layers with a leading axis of groups.
      kda: as what `ported_kda` returns.
      compiled: wraps the parts of a layer, as `torch.compile` does; None leaves them eager.
      num_layers: the first so many of the layers that there are parameters of.
      The others: as in `dormouse_jax.models.DecoderConfig`. The remaining sizes are those of the parameters.

    Attributes:
      parameters: leaves by name; `groups.n.` has what `groups.` has at n of the leading axis, so that the gradient of a
        layer is an array of its own.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        kda: Callable[..., Tensor],
        compiled: Wrap | None = None,
        num_layers: int,
        head_dim: int,
        attention_every: int = 0,
        loops: int = 1,
        norm_eps: float = 1e-5,
        dtype: str = "bfloat16",
    ):
        mixers = ["kda"] * (attention_every - 1) + ["attention"] if attention_every else ["kda"]
        groups = num_layers // len(mixers)
        self.kda, self._loops, self._dtype = kda, loops, getattr(torch, dtype)
        self._head_dim, self._eps = head_dim, norm_eps
        parts = (_before_kda, _after_kda, _attention_layer, _loss)
        self._before, self._after, self._attention, self._loss = map(compiled or (lambda part: part), parts)
        self.parameters: Weights = {}
        for name, array in parameters.items():
            if name.startswith("groups."):
                for n in range(groups):
                    self.parameters[f"groups.{n}.{name.removeprefix('groups.')}"] = _leaf(array[n])
            else:
                self.parameters[name] = _leaf(array)
        self._layers = [(mixer, f"groups.{n}.layers.{i}.") for n in range(groups) for i, mixer in enumerate(mixers)]

    def loss(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy in nats of predicting each of ids `[B, T + 1]`, uint8, but the first."""
        ids = ids.long()
        x = F.embedding(ids[:, :-1], self.parameters["embed.kernel"]).to(self._dtype)
        layers = [(mixer, self._weights(prefix)) for mixer, prefix in self._layers]
        for _ in range(self._loops):
            for mixer, w in layers:
                if mixer == "attention":
                    x = self._attention(x, w, self._head_dim, self._eps)
                else:
                    *operands, gate = self._before(x, w, self._head_dim, self._eps)
                    o = self.kda(*operands, w["mixer.A_log"], w["mixer.dt_bias"])
                    x = self._after(x, o, gate, w, self._eps)
        head = self.parameters["head.kernel"].to(self._dtype)
        return self._loss(x, self.parameters["norm.scale"], head, ids[:, 1:], self._eps)

    def _weights(self, prefix: str) -> Weights:
        """Weights of a layer: of projections in the dtype computed in, the others in float32."""
        return {
            name.removeprefix(prefix): x.to(self._dtype) if _is_projection(name) or name.endswith(".bias") else x
            for name, x in self.parameters.items()
            if name.startswith(prefix)
        }


class AdamW:
    """AdamW behind a clip of the global norm, as `dormouse_jax.training.step.optimizer` has them: decay for matrices
    alone. The learning rate of each step is given, so that its schedule is in one place.

    Args:
      parameters: leaves by name.
      weight_decay, clip_norm: the factor, and the largest norm of all gradients together.
    """

    def __init__(self, parameters: Weights, *, weight_decay: float, clip_norm: float):
        self._parameters, self._clip_norm = list(parameters.values()), clip_norm
        decayed = [x for name, x in parameters.items() if _is_projection(name)]
        others = [x for name, x in parameters.items() if not _is_projection(name)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = all(x.is_cuda for x in self._parameters)
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    def step(self, learning_rate: float) -> Tensor:
        """Updates the parameters by their gradients, drops those, and returns their norm before it was clipped."""
        gradients = [x.grad for x in self._parameters if x.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, self._clip_norm / norm.clamp(min=self._clip_norm))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(True)


def _is_projection(name: str) -> bool:
    return name.endswith(".kernel") and not name.endswith("_conv.kernel")


def _before_kda(x: Tensor, w: Weights, head_dim: int, eps: float) -> tuple[Tensor, ...]:
    """q, k, v, g, beta as the operator takes them, and the output gate before its sigmoid."""
    h = _norm(x, w["mixer_norm.scale"], eps)
    q, k, v = (
        _short_convolution(h @ w[f"mixer.{n}_proj.kernel"], w[f"mixer.{n}_conv.kernel"]).unflatten(-1, (-1, head_dim))
        for n in "qkv"
    )
    g = h @ w["mixer.f_proj.0.kernel"] @ w["mixer.f_proj.1.kernel"]
    gate = h @ w["mixer.g_proj.0.kernel"] @ w["mixer.g_proj.1.kernel"] + w["mixer.g_proj.1.bias"]
    return q, k, v, g.unflatten(-1, (-1, head_dim)), h @ w["mixer.b_proj.kernel"], gate.unflatten(-1, (-1, head_dim))


def _after_kda(x: Tensor, o: Tensor, gate: Tensor, w: Weights, eps: float) -> Tensor:
    o = F.rms_norm(o.float(), o.shape[-1:], w["mixer.o_norm.scale"], eps) * torch.sigmoid(gate.float())
    return _mlp(x + o.to(x.dtype).flatten(-2) @ w["mixer.o_proj.kernel"], w, eps)


def _attention_layer(x: Tensor, w: Weights, head_dim: int, eps: float) -> Tensor:
    h = _norm(x, w["mixer_norm.scale"], eps)
    q, k, v = ((h @ w[f"mixer.{n}_proj.kernel"]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for n in "qkv")
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return _mlp(x + o.flatten(-2) @ w["mixer.o_proj.kernel"], w, eps)


def _mlp(x: Tensor, w: Weights, eps: float) -> Tensor:
    gate, up = (_norm(x, w["mlp_norm.scale"], eps) @ w["gate_up.kernel"]).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w["down.kernel"]


def _loss(x: Tensor, scale: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    logits = (_norm(x, scale, eps) @ head).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


def _short_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """silu of the causal convolution of x `[B, T, channels]` with kernel `[size, channels]`."""
    size, T = len(kernel), x.shape[1]
    if torch.compiler.is_compiling():  # Sums of shifted products are one kernel with what is around them.
        x32 = F.pad(x.float(), (0, 0, size - 1, 0))
        terms = (kernel[i] * x32[:, i : i + T] for i in range(size))
        return F.silu(functools.reduce(operator.add, terms)).to(x.dtype)
    weight = kernel.to(x.dtype).T[:, None]
    return F.silu(F.conv1d(F.pad(x.mT, (size - 1, 0)), weight, groups=len(weight)).mT)
