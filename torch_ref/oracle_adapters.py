"""float64 results of adapters: every weight formed as its formula says, every gradient by autograd.

Shares no formula with the operators beyond the definitions: the Kronecker product and the inverse are PyTorch's, and a
bypass is the linear layer of the rebuilt weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]


def _scale(options: Mapping[str, Any], rank: int) -> float:
    return options["alpha"] / (math.sqrt(rank) if options.get("rank_stabilized") else rank)


def _lora(x: Tensors, **options: Any) -> torch.Tensor:
    weight = _scale(options, x["A"].shape[0]) * (x["B"] @ x["A"])
    if "base" in x:
        weight = weight + x["base"]
    if "magnitude" not in x:
        return weight
    norm = weight.norm(dim=1)
    norm = norm.detach() if options.get("detach_norm", True) else norm
    return (x["magnitude"] / norm)[:, None] * weight


def _loha(x: Tensors, **options: Any) -> torch.Tensor:
    update = _scale(options, x["A1"].shape[0]) * (x["B1"] @ x["A1"]) * (x["B2"] @ x["A2"])
    return update + x["base"] if "base" in x else update


def _lokr(x: Tensors, *, scale: float) -> torch.Tensor:
    W1, W2 = (x[n] if n in x else x[n + "a"] @ x[n + "b"] for n in ("W1", "W2"))
    update = scale * torch.kron(W1.contiguous(), W2.contiguous())
    return update + x["base"] if "base" in x else update


def _oft(x: Tensors, *, side: str, neumann: bool = False) -> torch.Tensor:
    P = x["P"]
    eye = torch.eye(P.shape[1], dtype=P.dtype, device=P.device)
    Q = P - P.mT
    if neumann:
        R = eye + 2 * Q + 2 * Q @ Q + 2 * Q @ Q @ Q + Q @ Q @ Q @ Q
    else:
        R = (eye + Q) @ torch.linalg.inv(eye - Q)
    rotation = torch.block_diag(*R)
    # Without a layer's weight the operator rotates what it is given.
    base = x["base"] if "base" in x else torch.eye(rotation.shape[0], dtype=P.dtype, device=P.device)
    return rotation.T @ base if side == "output" else base @ rotation.T


_WEIGHTS = {"lora": _lora, "loha": _loha, "lokr": _lokr, "oft": _oft}


def adapter_oracle(
    operator: str,
    arrays: Mapping[str, Any],
    *,
    dout: Any = None,
    wanted: Any = None,
    device: str = "cpu",
    **options: Any,
) -> dict[str, np.ndarray]:
    """float64 results by name: out, and with its cotangent `dout` the gradients, "d" and the array's name.

    Args:
      operator: "lora.rebuild", "lora.bypass" and so on.
      arrays: array-likes of any dtype by the names that the operators of `dormouse_jax.adapters` give them, those of a
        LoKr factor that is a product as W1a, W1b; None for one that is not given.
      dout: the cotangent of out; None for no gradients.
      wanted: names of the arrays whose gradients are computed; all by default.
      device: where it is computed.
      options: the operator's: alpha, rank_stabilized, detach_norm; scale; side, neumann.
    """
    family, form = operator.split(".")

    def put(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array).astype(np.float64)).to(device)

    x = {n: put(a) for n, a in arrays.items() if a is not None}
    names = list(x) if wanted is None else list(wanted)
    if dout is not None:
        for name in names:
            x[name].requires_grad_(True)
    out = _WEIGHTS[family](x, **options)
    if form == "bypass":
        out = x["x"] @ out.T
        out = out + x["bias"] if "bias" in x else out
    found = {"out": out.detach().cpu().numpy()}
    if dout is not None:
        grads = torch.autograd.grad(out, [x[name] for name in names], put(dout))
        found |= {f"d{name}": grad.cpu().numpy() for name, grad in zip(names, grads, strict=True)}
    return found
