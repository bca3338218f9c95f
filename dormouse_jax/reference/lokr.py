"""LoKr in plain JAX, forward and backward.

    rebuild  W' = base + s W1 (x) W2,                         W1 [a, b], W2 [c, d], O = a c, I = b d
    bypass   y  = x base^T + s reshape(W1 X W2^T) + bias,     X [b, d] the token x

(x) is the Kronecker product, which is formed in the sum of a rebuild only. A factor may be a product itself, W1 =
W1a W1b. Results and gradients are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dormouse_jax.reference import layer
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products


def factor(product: Products, x, name: str) -> jax.Array:
    """W1 or W2 in float32."""
    if x.get(name) is not None:
        return f32(x[name])
    return product("ar,rb->ab", x[name + "a"], x[name + "b"])


def backward_of_factors(product: Products, x, **dW: jax.Array):
    """Gradients of the factors' arrays from those of W1 and W2."""
    grads = dict(dW)
    for name, d in dW.items():
        if x.get(name) is None:
            grads[name + "a"] = product("ab,rb->ar", d, x[name + "b"])
            grads[name + "b"] = product("ar,ab->rb", x[name + "a"], d)
    return grads


def rebuild(product: Products, x, *, scale: float):
    W1, W2 = factor(product, x, "W1"), factor(product, x, "W2")
    (a, b), (c, d) = W1.shape, W2.shape
    update = (scale * W1)[:, None, :, None] * W2[None, :, None, :]
    return layer.plus(update.reshape(a * c, b * d), x["base"]), None


def rebuild_backward(product: Products, x, kept, dout, *, scale: float):
    W1, W2, G = factor(product, x, "W1"), factor(product, x, "W2"), f32(dout)
    blocks = scale * G.reshape(W1.shape[0], W2.shape[0], W1.shape[1], W2.shape[1])
    # Sums of products, not matrix products: those would want the blocks transposed in memory.
    dW1 = jnp.sum(blocks * W2[None, :, None, :], axis=(1, 3))
    dW2 = jnp.sum(blocks * W1[:, None, :, None], axis=(0, 2))
    return backward_of_factors(product, x, W1=dW1, W2=dW2) | {"base": G}


def _first_second(W1: jax.Array, W2: jax.Array) -> bool:
    """Whether W2 should meet the tokens before W1 does, by the number of multiplications."""
    (a, b), (c, d) = W1.shape, W2.shape
    return b * c * (d + a) <= a * d * (b + c)


def bypass(product: Products, x, *, scale: float):
    W1, W2 = factor(product, x, "W1"), factor(product, x, "W2")
    T = x["x"].shape[0]
    X = x["x"].reshape(T, W1.shape[1], W2.shape[1])
    if _first_second(W1, W2):
        Y = product("ab,tbc->tac", W1, product("tbd,cd->tbc", X, W2))
    else:
        Y = product("tad,cd->tac", product("ab,tbd->tad", W1, X), W2)
    return layer.plus(layer.forward(product, x, scale * Y.reshape(T, W1.shape[0] * W2.shape[0])), x["bias"]), None


def bypass_backward(product: Products, x, kept, dout, *, scale: float):
    W1, W2 = factor(product, x, "W1"), factor(product, x, "W2")
    T = x["x"].shape[0]
    X = x["x"].reshape(T, W1.shape[1], W2.shape[1])
    G = dout.reshape(T, W1.shape[0], W2.shape[0])
    if _first_second(W1, W2):
        Z, H = product("tbd,cd->tbc", X, W2), product("ab,tac->tbc", W1, G)
        dX, dW1, dW2 = product("tbc,cd->tbd", H, W2), product("tac,tbc->ab", G, Z), product("tbc,tbd->cd", H, X)
    else:
        Z, H = product("ab,tbd->tad", W1, X), product("tac,cd->tad", G, W2)
        dX, dW1, dW2 = product("ab,tad->tbd", W1, H), product("tad,tbd->ab", H, X), product("tac,tad->cd", G, Z)
    grads = backward_of_factors(product, x, W1=scale * dW1, W2=scale * dW2)
    grads["bias"] = jnp.sum(f32(dout), axis=0)
    return grads | layer.backward(product, x, scale * dX.reshape(x["x"].shape), dout)
