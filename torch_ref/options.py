"""The oracle of a whole call of `kda` or `gdn2`: raw inputs and packed sequences around the recurrence, in float64.

What is raw is computed by PyTorch in float64, and autograd takes the oracle's gradients back through it:

    g := -exp(A_log) softplus(g + dt_bias)   or   lower_bound sigmoid(exp(A_log) (g + dt_bias))
    beta := sigmoid(beta)   or   2 sigmoid(beta)
    q, k := x / sqrt(sum x^2 + 1e-6)

Packed sequences are run one after the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_ref import oracle


def log_decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """The log decay [..., HV, K] from a raw gate, with A_log [HV] and dt_bias [HV * K]."""
    if dt_bias is not None:
        x = x + dt_bias.view(x.shape[-2:])
    rate = 1.0 if A_log is None else A_log.exp()[:, None]
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def l2_normalize(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def call_oracle(
    operator: str,
    inputs: dict[str, Any],
    *,
    do: Any,
    dfinal_state: Any = None,
    initial_state: Any = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Sequence[int] | np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Results and gradients of a call by name: o, final_state, d<input> for every input, dinitial_state.

    Args:
      operator: "kda" or "gdn2".
      inputs: the array arguments by name, A_log and dt_bias among them; arrays of any float dtype.
      do, dfinal_state, initial_state: [B, T, HV, V] and [N, HV, K, V], with N = B unless `cu_seqlens` says otherwise.
      The others: as in `dormouse_jax.kda`.
    """
    leaves = {name: _leaf(x) for name, x in inputs.items()}
    x = {name: leaf for name, leaf in leaves.items() if name not in ("A_log", "dt_bias")}
    if use_gate_in_kernel:
        x["g"] = log_decay(x["g"], leaves.get("A_log"), leaves.get("dt_bias"), lower_bound)
    if use_beta_sigmoid_in_kernel:
        x["beta"] = torch.sigmoid(x["beta"]) * (2 if allow_neg_eigval else 1)
    if use_qk_l2norm_in_kernel:
        x |= {name: l2_normalize(x[name]) for name in "qk"}

    arrays = {name: a.detach().numpy() for name, a in x.items()}
    state = {"scale": scale, "initial_state": initial_state, "dfinal_state": dfinal_state}
    if cu_seqlens is not None:
        found = _of_sequences(operator, arrays, do, np.asarray(cu_seqlens), **state)
    elif segment_ids is not None:
        found = _of_segments(operator, arrays, do, np.asarray(segment_ids), **state)
    else:
        found = _run(operator, arrays, do, **state)

    results = {name: found[name] for name in ("o", "final_state", "dinitial_state")}
    torch.autograd.backward(list(x.values()), [torch.from_numpy(np.array(found[f"d{name}"])) for name in x])
    return results | {f"d{name}": leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None}


def _leaf(x: Any) -> Tensor:
    return torch.tensor(np.asarray(x, np.float64), requires_grad=True)


def _run(operator: str, arrays: dict[str, np.ndarray], do, **state) -> dict[str, np.ndarray]:
    fn = oracle.kda_oracle if operator == "kda" else oracle.gdn2_oracle
    return fn(**arrays, do=do, **state)


def _of_sequences(
    operator: str, arrays: dict[str, np.ndarray], do, cu_seqlens: np.ndarray, *, scale, initial_state, dfinal_state
) -> dict[str, np.ndarray]:
    """B = 1, a state for every sequence: [N, HV, K, V]. A sequence without tokens hands its state on."""
    N, HV, K, V = len(cu_seqlens) - 1, *(arrays[n].shape[i] for n, i in (("v", 2), ("q", 3), ("v", 3)))
    zeros = np.zeros((N, HV, K, V))
    S0, dS1 = (zeros if x is None else np.asarray(x, np.float64) for x in (initial_state, dfinal_state))
    found = {f"d{name}": np.zeros(x.shape) for name, x in arrays.items()}
    found |= {"o": np.zeros(arrays["v"].shape), "final_state": S0.copy(), "dinitial_state": dS1.copy()}
    for n, (start, stop) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        if start == stop:
            continue
        part = {name: x[:, start:stop] for name, x in arrays.items()}
        state = {"initial_state": S0[n : n + 1], "dfinal_state": dS1[n : n + 1]}
        for name, x in _run(operator, part, do[:, start:stop], scale=scale, **state).items():
            if name.endswith("_state"):
                found[name][n] = x[0]
            else:
                found[name][:, start:stop] = x
    return found


def _of_segments(
    operator: str, arrays: dict[str, np.ndarray], do, segment_ids: np.ndarray, *, scale, initial_state, dfinal_state
) -> dict[str, np.ndarray]:
    """Every run of equal ids is a sequence. The first takes the row's initial state, the last leaves its final one."""
    rows = []
    for b, ids in enumerate(segment_ids):
        starts = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
        row = {name: x[b : b + 1] for name, x in arrays.items()}
        (HV, K), V = row["g"].shape[2:], row["v"].shape[3]
        S0, dS1 = (np.zeros((len(starts) - 1, HV, K, V)) for _ in range(2))
        if initial_state is not None:
            S0[0] = initial_state[b]
        if dfinal_state is not None:
            dS1[-1] = dfinal_state[b]
        found = _of_sequences(
            operator, row, do[b : b + 1], np.array(starts), scale=scale, initial_state=S0, dfinal_state=dS1
        )
        rows.append(found | {"final_state": found["final_state"][-1:], "dinitial_state": found["dinitial_state"][:1]})
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
