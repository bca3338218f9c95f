"""OFT in plain JAX, forward and backward.

    Q = P - P^T,  R = (I + Q) (I - Q)^-1  or  I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 (Neumann),   in k blocks of n
    rebuild  W' = blockdiag(R^T) base (output side),       base blockdiag(R^T) (input side)
    bypass   y  = (x base^T) blockdiag(R) + bias,          (x blockdiag(R)) base^T + bias

Only D = R - I is multiplied: near the identity, which training starts from, rounding it costs little. With N =
(I - Q)^-1, D = 2 Q N, and the gradient of Q is 2 N^T dR N^T. Results and gradients are float32, as all of R is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dormouse_jax.reference import layer
from dormouse_jax.reference.layer import f32
from dormouse_jax.reference.products import Products, exact

_BLOCKS = "kab,kbc->kac"


def _skew(P: jax.Array) -> jax.Array:
    return f32(P) - f32(P).mT


def _inverse(Q: jax.Array) -> jax.Array:
    """(I - Q)^-1, which always exists: the symmetric part of I - Q is I."""
    eye = jnp.eye(Q.shape[-1], dtype=jnp.float32)
    return jnp.linalg.solve(eye - Q, jnp.broadcast_to(eye, Q.shape))


def _horner(Q: jax.Array) -> list[jax.Array]:
    """S3 = 2 + Q, S2 = 2 + Q S3, S1 = 2 + Q S2, so that R = I + Q S1."""
    two = 2 * jnp.eye(Q.shape[-1], dtype=jnp.float32)
    found = [two + Q]
    for _ in range(2):
        found.append(two + exact(_BLOCKS, Q, found[-1]))
    return found


def rotation(P: jax.Array, neumann: bool) -> jax.Array:
    """D = R - I [k, n, n]."""
    Q = _skew(P)
    return exact(_BLOCKS, Q, _horner(Q)[-1] if neumann else 2 * _inverse(Q))


def backward_of_rotation(P: jax.Array, dR: jax.Array, neumann: bool) -> jax.Array:
    """The gradient of P from that of R."""
    Q = _skew(P)
    if neumann:
        dQ, d = jnp.zeros_like(Q), dR
        for S in reversed(_horner(Q)):
            dQ += exact("kac,kbc->kab", d, S)
            d = exact("kba,kbc->kac", Q, d)
        dQ += d
    else:
        N = _inverse(Q)
        dQ = 2 * exact("kac,kbc->kab", exact("kba,kbc->kac", N, dR), N)
    return dQ - dQ.mT


def rebuild(product: Products, x, *, side: str, neumann: bool):
    D, base = rotation(x["P"], neumann), x["base"]
    k, n = D.shape[:2]
    if side == "output":
        turned = product("knm,kni->kmi", D, base.reshape(k, n, -1))
    else:
        turned = product("okm,knm->okn", base.reshape(-1, k, n), D)
    return layer.plus(turned.reshape(base.shape), base), None


def rebuild_backward(product: Products, x, kept, dout, *, side: str, neumann: bool):
    D, base, G = rotation(x["P"], neumann), x["base"], dout
    k, n = D.shape[:2]
    if side == "output":
        W, G = base.reshape(k, n, -1), G.reshape(k, n, -1)
        dD, dW = product("kni,kmi->knm", W, G), product("knm,kmi->kni", D, G)
    else:
        W, G = base.reshape(-1, k, n), G.reshape(-1, k, n)
        dD, dW = product("okn,okm->knm", G, W), product("okn,knm->okm", G, D)
    dP = backward_of_rotation(x["P"], dD, neumann)
    return {"P": dP, "base": layer.plus(dW.reshape(base.shape), dout)}


def _turn(product: Products, v: jax.Array, D: jax.Array, subscripts: str) -> jax.Array:
    """v blockdiag(R) [T, k n], or with R^T."""
    k, n = D.shape[:2]
    turned = product(subscripts, v.reshape(v.shape[0], k, n), D)
    return f32(v) + turned.reshape(v.shape)


_FORTH, _BACK = "tkn,knm->tkm", "tkm,knm->tkn"


def bypass(product: Products, x, *, side: str, neumann: bool):
    D = rotation(x["P"], neumann)
    if x["base"] is None:
        return _turn(product, x["x"], D, _FORTH), None
    if side == "input":
        y = product("ti,oi->to", _turn(product, x["x"], D, _FORTH), x["base"])
        return layer.plus(y, x["bias"]), None
    u = product("ti,oi->to", x["x"], x["base"])
    return layer.plus(_turn(product, u, D, _FORTH), x["bias"]), product.round(u)


def bypass_backward(product: Products, x, kept, dout, *, side: str, neumann: bool):
    D = rotation(x["P"], neumann)
    k, n = D.shape[:2]
    grads = {"bias": jnp.sum(f32(dout), axis=0)}
    if x["base"] is None:
        turned, of_turned = x["x"], dout
    elif side == "input":
        turned, of_turned = x["x"], product("to,oi->ti", dout, x["base"])
        grads["base"] = product("to,ti->oi", dout, _turn(product, x["x"], D, _FORTH))
    else:
        turned, of_turned = kept, dout
    T = turned.shape[0]
    dD = product("tkn,tkm->knm", turned.reshape(T, k, n), of_turned.reshape(T, k, n))
    before = _turn(product, of_turned, D, _BACK)
    grads["P"] = backward_of_rotation(x["P"], dD, neumann)
    if x["base"] is None or side == "input":
        return grads | {"x": before}
    return grads | layer.backward(product, x, jnp.zeros((), jnp.float32), before)
