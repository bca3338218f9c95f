"""One token of Kimi Delta Attention for decoding, on Pallas's Triton backend.

Per sequence and value head, with S the state before the token, decayed:

    S <- diag(exp(g)) S
    u  = beta (v - S^T k)
    o  = scale (S^T q + (k . q) u)        the output of S + k u^T, so that both sums over S run side by side
    S <- S + k u^T

The time is that of reading the state once and writing it once; it is updated in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend_triton as bt
from pallas_kernels.kda.config import MAX_DIM
from pallas_kernels.kda.raw import NORM_EPSILON, Gate, Raw, sigmoid

__all__ = ["Raw", "StepConfig", "choose_step_config", "step"]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How the kernel is cut and launched.

    Attributes:
      v_tile: columns of the state that one program holds, a power of two.
      warps: warps a program.
    """

    v_tile: int = 32
    warps: int = 4

    def __post_init__(self):
        if self.v_tile not in (8, 16, 32, 64, 128, 256):
            raise ValueError(f"v_tile must be 8, 16, 32, 64, 128 or 256, got {self.v_tile}")
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"warps must be 1, 2, 4 or 8, got {self.warps}")


def choose_step_config(*, K: int, V: int) -> StepConfig:
    """The configuration for a call. Raises a ValueError for sizes outside of what the kernel serves."""
    if not (1 <= K <= MAX_DIM and 1 <= V <= MAX_DIM):
        raise ValueError(f"K and V must lie between 1 and {MAX_DIM}, got {K} and {V}")
    return StepConfig(v_tile=min(32, max(8, bt.ceil_pow2(V))))


def kda_step(
    q_ref, k_ref, v_ref, g_ref, beta_ref, *refs,
    K: int, V: int, v_tile: int, scale: float, raw: Raw, has_A: bool, has_bias: bool, interpret: bool,
):  # fmt: skip
    """A tile of columns of one head's state. Grid (V tiles, B * HV). refs: A_log and dt_bias where there are such, the
    state, o, the new state."""
    *gate_refs, state_ref, o_ref, new_state_ref = refs
    bk, f32 = bt.ceil_pow2(K), jnp.float32
    channels = (0, bk, None if bk == K else K)
    values = (pl.program_id(0) * v_tile, v_tile, None if V % v_tile == 0 else V)
    one = (0, 1, None)

    q, k, g = (bt.load_tile(ref, channels, one).astype(f32) for ref in (q_ref, k_ref, g_ref))
    v = bt.load_tile(v_ref, one, values).astype(f32)
    beta = bt.load_tile(beta_ref, one, one).astype(f32)
    if raw.l2norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=0)[None, :] + NORM_EPSILON) for x in (q, k))
    if raw.gate:
        rate = jnp.exp(bt.load_tile(gate_refs[0], one, one).astype(f32)) if has_A else None
        bias = bt.load_tile(gate_refs[-1], channels, one).astype(f32) if has_bias else None
        g = Gate(rate, bias, raw.lower_bound, "fp32", interpret).log_decay(g)
    if raw.beta:
        beta = raw.strength * sigmoid(beta, interpret)

    S = bt.load_tile(state_ref, channels, values) * bt.exp(g, interpret)
    u = beta * (v - jnp.sum(S * k, axis=0)[None, :])
    o = jnp.sum(S * q, axis=0)[None, :] + jnp.sum(k * q, axis=0)[None, :] * u
    bt.store_tile(o_ref, one, values, scale * o)
    bt.store_tile(new_state_ref, channels, values, S + k * u)


def step(q, k, v, g, beta, A_log, dt_bias, state, *, scale: float, raw: Raw, config: StepConfig, interpret: bool):
    """Runs `kda_step`.

    q, k [B, H, K]; v [B, HV, V]; g [B, HV, K]; beta [B, HV]; A_log [HV] and dt_bias [HV * K], or None; state [B, HV, K,
    V] in float32. Returns o [B, HV, V] in q's dtype and the new state, which takes the old one's memory where the
    caller has given it up.
    """
    (B, H, K), (_, HV, V) = q.shape, v.shape
    heads, key_heads = (lambda _, n: (n // HV, n % HV, 0, 0)), (lambda _, n: (n // HV, n % HV // (HV // H), 0, 0))
    column, row, number = (None, None, K, 1), (None, None, 1, V), (None, None, 1, 1)
    inputs = [
        (q[..., None], pl.BlockSpec(column, key_heads)),
        (k[..., None], pl.BlockSpec(column, key_heads)),
        (v[:, :, None], pl.BlockSpec(row, heads)),
        (g[..., None], pl.BlockSpec(column, heads)),
        (beta[..., None, None], pl.BlockSpec(number, heads)),
    ]
    if A_log is not None:
        inputs.append((A_log.reshape(HV, 1, 1), pl.BlockSpec(number[1:], lambda _, n: (n % HV, 0, 0))))
    if dt_bias is not None:
        inputs.append((dt_bias.reshape(HV, K, 1), pl.BlockSpec(column[1:], lambda _, n: (n % HV, 0, 0))))
    by_head = pl.BlockSpec((None, None, K, V), heads)
    inputs.append((state, by_head))
    outputs = [(jax.ShapeDtypeStruct((B, HV, 1, V), q.dtype), pl.BlockSpec(row, heads))]
    outputs.append((jax.ShapeDtypeStruct(state.shape, state.dtype), by_head))
    o, state = bt.launch(
        kda_step,
        "kda_step",
        (-(-V // config.v_tile), B * HV),
        inputs,
        outputs,
        num_warps=config.warps,
        num_stages=1,
        interpret=interpret,
        aliases={len(inputs) - 1: 1},
        K=K,
        V=V,
        v_tile=config.v_tile,
        scale=scale,
        raw=raw,
        has_A=A_log is not None,
        has_bias=dt_bias is not None,
    )
    return o[:, :, 0], state
