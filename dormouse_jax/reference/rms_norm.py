"""RMS norms in plain JAX: what the kernels of `rms_norm` are held to, and what runs where there are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def forward(x, scale, other, gate, bias, *, eps: float):
    """As `pallas_kernels.rms_norm.forward`."""
    total = None if other is None else x + other
    wide = (x if total is None else total).astype(jnp.float32).reshape(x.shape[0], -1, scale.shape[0])
    y = wide * (lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * scale)
    y = y.reshape(x.shape)
    if gate is not None:
        y = y * jax.nn.sigmoid(gate.astype(jnp.float32) + bias)
    return total, y.astype(x.dtype)


def backward(x, scale, gate, bias, dy, dsum, *, eps: float):
    """As `pallas_kernels.rms_norm.backward`."""
    given = {"x": x, "scale": scale} if gate is None else {"x": x, "scale": scale, "gate": gate, "bias": bias}
    wide = given | {"x": x.astype(jnp.float32)}

    def normed(wide):
        rest = (wide.get("gate"), wide.get("bias"))
        return forward(wide["x"], wide["scale"], None, *rest, eps=eps)[1]

    _, pull = jax.vjp(normed, wide)
    grads = pull(dy.astype(jnp.float32))[0]
    dx = grads["x"] if dsum is None else grads["x"] + dsum.astype(jnp.float32)
    return dx.astype(x.dtype), grads["scale"], grads.get("gate"), grads.get("bias")
