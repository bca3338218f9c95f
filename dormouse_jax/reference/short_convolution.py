"""Short causal convolutions in plain JAX: what the kernels of `short_convolution` are held to, and what runs where
there are none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def forward(x, weight, bias, starts, *, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """As `pallas_kernels.short_convolution.forward`: sums of shifted products, which XLA makes one elementwise kernel
    of."""
    (_, T, _), taps = x.shape, weight.shape[0]
    padded, z = jnp.pad(x.astype(jnp.float32), ((0, 0), (taps - 1, 0), (0, 0))), jnp.zeros((), jnp.float32)
    for k in range(taps):
        term = weight[k] * padded[:, k : k + T]
        if starts is not None and k < taps - 1:
            term = jnp.where((jnp.arange(T) - taps + 1 + k >= starts)[..., None], term, 0.0)
        z = z + term
    if bias is not None:
        z = z + bias
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return tuple(jnp.split(jax.nn.silu(z).astype(x.dtype), ends, axis=-1))


def backward(x, weight, bias, starts, dys, *, sizes: tuple[int, ...]):
    """As `pallas_kernels.short_convolution.backward`."""
    arrays = (x, weight) if bias is None else (x, weight, bias)
    _, pull = jax.vjp(lambda x, weight, bias=None: forward(x, weight, bias, starts, sizes=sizes), *arrays)
    grads = pull(tuple(dys))
    return (*grads, None) if bias is None else grads
