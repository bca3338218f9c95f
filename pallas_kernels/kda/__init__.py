"""Kimi Delta Attention and the general delta rule with channel-wise gates: forward and backward on Pallas's Triton
backend, with kernels for Hopper on its Mosaic GPU backend.

Arrays as in `dormouse_jax.kda`; KDA passes beta [B, T, HV] as `erase` and None as `write`, the general rule erase [B,
T, HV, K] and write [B, T, HV, V]. What `raw` says comes raw is made up in the kernels. With a `packing`, B is 1 and
states are [N, HV, K, V]; starts [B, T] marks tokens that forget everything before them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.kda import backward as _backward
from pallas_kernels.kda import forward as _forward
from pallas_kernels.kda.config import KdaConfig, choose_config, hopper_chunk_refusal, hopper_refusal
from pallas_kernels.kda.raw import NOTHING_RAW, Raw
from pallas_kernels.kda.sizes import Packing, Sizes

__all__ = [
    "KdaConfig",
    "Packing",
    "Raw",
    "Residuals",
    "backward",
    "choose_config",
    "forward",
    "forward_intermediates",
    "hopper_chunk_refusal",
    "hopper_refusal",
]


class Residuals(NamedTuple):
    """What the forward leaves for the backward: the [C, C] matrices P and M of every chunk with the norms of raw
    queries and keys, what it has found of the segments of split sequences, and under residuals="save" all the rest
    (None otherwise)."""

    matrices: tuple[jax.Array, jax.Array, jax.Array | None]
    split: _forward.Segments | None
    saved: tuple[_forward.Prepared, _forward.States] | None


def forward(
    q, k, v, g, erase, write, initial_state,
    *, scale: float, precision: str, config: KdaConfig, interpret: bool, save: bool = False,
    raw: Raw = NOTHING_RAW, A_log: jax.Array | None = None, dt_bias: jax.Array | None = None,
    starts: jax.Array | None = None, packing: Packing | None = None,
):  # fmt: skip
    """Returns o [B, T, HV, V] in q's dtype, final_state [N, HV, K, V] in float32, and Residuals: all with save=True."""
    common = {"precision": precision, "config": config, "interpret": interpret}
    prepared = _prepare(
        q, k, v, g, erase, write, A_log, dt_bias, starts, scale=scale, raw=raw, packing=packing, **common
    )
    split = _forward.find_segments(prepared, initial_state, q, v, erase, **common)
    o, final, states = _run_states(prepared, split, initial_state, q, v, erase, save=save, packing=packing, **common)
    saved = (prepared, states) if states is not None else None
    return o, final, Residuals((prepared.P, prepared.M, prepared.norms), split, saved)


def _prepare(
    q, k, v, g, erase, write, A_log, dt_bias, starts, *, scale, precision, config: KdaConfig, interpret, raw, packing,
    matrices=None,
) -> _forward.Prepared:  # fmt: skip
    """`prepare` of the configuration's backend."""
    if (config.prepare if matrices is None else config.gradients) == "triton":
        return _forward.prepare(
            q, k, v, g, erase, write, A_log, dt_bias, starts,
            scale=scale, precision=precision, config=config, interpret=interpret, raw=raw, packing=packing,
            matrices=matrices,
        )[0]  # fmt: skip
    assert write is None and starts is None
    if precision == "fp32":
        from pallas_kernels.kda import mosaic_exact

        P, M, W, Qhat, Ktil, Y, decay = mosaic_exact.prepare(
            q, k, v, g, erase, matrices, scale=scale, config=config, interpret=interpret
        )
        return _forward.Prepared(W, Qhat, Ktil, Y, P, M, decay, None)
    arguments, options = (q, k, v, g, erase), {"scale": scale, "config": config, "interpret": interpret}
    options |= {"raw": raw, "packing": packing}
    if matrices is None:
        from pallas_kernels.kda import mosaic_prepare

        return _forward.Prepared(*mosaic_prepare.prepare(*arguments, A_log, dt_bias, **options))
    from pallas_kernels.kda import mosaic_chunks

    P, M, norms = matrices
    W, Qhat, Ktil, Y, decay = mosaic_chunks.prepare(*arguments, matrices, A_log, dt_bias, **options)
    return _forward.Prepared(W, Qhat, Ktil, Y, P, M, decay, norms)


def _run_states(
    prepared, split, *arrays, precision, config: KdaConfig, interpret, save, with_output=True, packing=None
):
    """`run_states` of the configuration's backend."""
    common = {"config": config, "interpret": interpret, "save": save, "with_output": with_output}
    if config.serial == "triton":
        return _forward.run_states(prepared, split, *arrays, precision=precision, packing=packing, **common)
    o, final, states = _hopper().run_states(prepared, *arrays, packing=packing, **common)
    return o, final, None if states is None else _forward.States(*states)


def _hopper():
    # Imported where it is used: no card but Hopper needs it, and its API moves with every release of JAX.
    from pallas_kernels.kda import mosaic

    return mosaic


def backward(
    q, k, v, g, erase, write, initial_state, residuals: Residuals, do, dfinal_state,
    *, scale: float, precision: str, config: KdaConfig, interpret: bool,
    raw: Raw = NOTHING_RAW, A_log: jax.Array | None = None, dt_bias: jax.Array | None = None,
    starts: jax.Array | None = None, packing: Packing | None = None, o: jax.Array | None = None,
):  # fmt: skip
    """Returns dq, dk, dv, dg, derase, dwrite, dA_log, ddt_bias and dinitial_state, each in the dtype of what it belongs
    to, and None where that is None; dfinal_state may be None for zero.

    o, the forward's output, is needed where q and k come raw. What the forward did not save is formed again from the
    inputs and the matrices.
    """
    common = {"precision": precision, "config": config, "interpret": interpret}
    of_inputs = {"scale": scale, "raw": raw, "packing": packing, **common}
    if residuals.saved is None:
        prepared = _prepare(q, k, v, g, erase, write, A_log, dt_bias, starts, matrices=residuals.matrices, **of_inputs)
        _, _, states = _run_states(
            prepared, residuals.split, initial_state, q, v, erase,
            save=True, with_output=False, packing=packing, **common,
        )  # fmt: skip
        assert states is not None
    else:
        prepared, states = residuals.saved
    has_initial = initial_state is not None
    if config.serial == "mosaic":
        dS, dU, dinitial = _hopper().run_states_bwd(
            prepared, do, dfinal_state, has_initial, q, v, erase, config=config, interpret=interpret, packing=packing
        )
    else:
        dS, dU, dinitial = _backward.run_states_bwd(
            prepared, residuals.split, do, dfinal_state, has_initial, q, v, erase, packing=packing, **common
        )
    if config.gradients == "mosaic" and precision == "fp32":
        from pallas_kernels.kda import mosaic_exact

        assert write is None and starts is None
        grads = mosaic_exact.gradients(
            prepared, states, dS, dU, q, k, v, g, erase, do, scale=scale, config=config, interpret=interpret
        )
        return *grads, None, None, None, dinitial
    if config.gradients == "mosaic":
        from pallas_kernels.kda import mosaic_chunks

        assert write is None and starts is None
        *grads, dA_log, ddt_bias = mosaic_chunks.gradients(
            prepared, states, dS, dU, q, k, v, g, erase, do, A_log, dt_bias, o,
            scale=scale, config=config, interpret=interpret, raw=raw, packing=packing,
        )  # fmt: skip
        return *grads, None, dA_log, ddt_bias, dinitial
    grads = _backward.gradients(
        prepared, states, dS, dU, q, k, v, g, erase, write, do, A_log, dt_bias, starts, o, **of_inputs
    )
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
    split = _forward.find_segments(prepared, initial_state, q, v, erase, **common)
    _, _, states = _run_states(prepared, split, initial_state, q, v, erase, save=True, **common)
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
