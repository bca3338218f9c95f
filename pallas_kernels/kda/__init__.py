"""Kimi Delta Attention and the general delta rule with channel-wise gates: forward and backward on Pallas's Triton
backend.

Arrays as in `dormouse_jax.kda`; KDA passes beta [B, T, HV] as `erase` and None as `write`, the general rule erase [B,
T, HV, K] and write [B, T, HV, V].
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.kda import backward as _backward
from pallas_kernels.kda import forward as _forward
from pallas_kernels.kda.config import KdaConfig, choose_config
from pallas_kernels.kda.sizes import Sizes

__all__ = ["KdaConfig", "Residuals", "backward", "choose_config", "forward", "forward_intermediates"]


class Residuals(NamedTuple):
    """What the forward leaves for the backward under residuals="save"."""

    prepared: _forward.Prepared
    states: _forward.States
    maps: jax.Array | None


def forward(
    q,
    k,
    v,
    g,
    erase,
    write,
    initial_state,
    *,
    scale: float,
    precision: str,
    config: KdaConfig,
    interpret: bool,
    save: bool = False,
    with_output: bool = True,
):
    """Returns o [B, T, HV, V] in q's dtype, final_state [B, HV, K, V] in float32, and Residuals or None.

    With with_output=False only the residuals are formed, and o and final_state are None.
    """
    common = {"precision": precision, "config": config, "interpret": interpret}
    prepared, _ = _forward.prepare(q, k, v, g, erase, write, scale=scale, **common)
    maps = _forward.segment_maps(prepared, q, v, erase, **common)
    o, final, states = _forward.run_states(
        prepared, maps, initial_state, q, v, erase, save=save, with_output=with_output, **common
    )
    return o, final, Residuals(prepared, states, maps) if states is not None else None


def backward(
    q, k, v, g, erase, write, initial_state, residuals: Residuals | None, do, dfinal_state,
    *, scale: float, precision: str, config: KdaConfig, interpret: bool,
):  # fmt: skip
    """Returns dq, dk, dv, dg, derase, dwrite and dinitial_state, each in the dtype of what it belongs to.

    dwrite is None for KDA, dinitial_state is None without an initial state, dfinal_state may be None for zero. Without
    residuals the forward's kernels run again.
    """
    common = {"precision": precision, "config": config, "interpret": interpret}
    if residuals is None:
        _, _, residuals = forward(
            q, k, v, g, erase, write, initial_state, scale=scale, save=True, with_output=False, **common
        )
    assert residuals is not None
    prepared, states, maps = residuals
    dS, dU, dinitial = _backward.run_states_bwd(
        prepared, maps, do, dfinal_state, initial_state is not None, q, v, erase, **common
    )
    grads = _backward.gradients(prepared, states, dS, dU, q, k, v, g, erase, write, do, scale=scale, **common)
    return *grads, dinitial


def forward_intermediates(
    q, k, v, g, erase, write, initial_state, *, scale: float, precision: str, config: KdaConfig, interpret: bool
) -> dict[str, jax.Array]:
    """The kernels' own intermediates by name: G, W [B, HV, NT, C, K], A, P, M [B, HV, NT, C, C], U [B, HV, NT, C, V]
    and states
    [B, HV, NT, K, V]. The same kernel bodies run with two more outputs (G, A), and with P and M in float32."""
    sizes = Sizes.of(q, v, erase, config)
    common = {"precision": precision, "config": config, "interpret": interpret}
    debug, (G, A) = _forward.prepare(q, k, v, g, erase, write, scale=scale, debug=True, **common)
    prepared, _ = _forward.prepare(q, k, v, g, erase, write, scale=scale, **common)
    maps = _forward.segment_maps(prepared, q, v, erase, **common)
    _, _, states = _forward.run_states(prepared, maps, initial_state, q, v, erase, save=True, **common)
    assert states is not None
    found = {
        "G": G[..., : sizes.K],
        "A": A,
        "P": debug.P,
        "M": debug.M,
        "W": debug.W[..., : sizes.K],
        "U": states.U[..., : sizes.V],
        "states": states.S[..., : sizes.V, : sizes.K].swapaxes(-1, -2),
    }
    return {name: x.reshape(sizes.B, sizes.HV, *x.shape[1:]) for name, x in found.items()}
