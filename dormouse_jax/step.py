"""One token of Kimi Delta Attention: the public operator `kda_step`, for decoding.

In this order: the public function, dispatch, forward, backward, and the `custom_vjp` that joins them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dormouse_jax import gates
from dormouse_jax.dispatch import device_of, interpreting, require_triton, warn_once
from dormouse_jax.explain import OperatorCall, record
from dormouse_jax.kda_arguments import Arguments, Options, validate
from dormouse_jax.reference import recurrent


def kda_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    state_v_first: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of Kimi Delta Attention a sequence, from a state to the next.

        S   <- diag(exp(g)) S
        S'   = S + beta k (v - S^T k)^T
        o    = scale S'^T q

    `kda` on T tokens equals `kda_step` on each of them with the state carried, and the two can follow each other: `kda`
    reads a prompt, `kda_step` continues from its final state.

    The kernel reads the state once and writes it once, in place where its memory can be had: give it up by donation
    (`jax.jit(step, donate_argnames="state")`), or carry it through `lax.scan` or `lax.while_loop`. A state that is kept
    is copied first.

    Args:
      q, k: `[B, H, K]`, float32, bfloat16 or float16, or float64 with implementation="recurrent".
      v: `[B, HV, V]`, q's dtype; HV is a multiple of H.
      g: `[B, HV, K]`, the natural log of the decay, <= 0. Any of the three float dtypes, as beta; they are handled in
        float32.
      beta: `[B, HV]`.
      state: `[B, HV, K, V]`, any float dtype; only a float32 one can be updated in place.
      scale: a Python number; K^-1/2 by default.
      use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, A_log,
        dt_bias: as in `kda`; what they make of q, k, g and beta is in `dormouse_jax.gates`.
      state_v_first: whether the states given and returned are `[B, HV, V, K]`. The kernel wants the other order, so
        that this costs two transpositions of the state.
      implementation: "pallas", "pallas_triton", "pallas_mosaic", or "xla" and "recurrent", which are the same plain
        jnp here: one token has no chunks. None takes "pallas" on an NVIDIA GPU and under `interpret_kernels()`, and
        "xla" elsewhere.

    Returns:
      `(o, state)`: o `[B, HV, V]` in q's dtype, the state in float32 (float64 for float64 inputs). Both are
      differentiable with respect to every array given; through a kernel in reverse mode only.

    Raises:
      ValueError, TypeError, NotImplementedError: as `kda`.

    All arithmetic is in float32. Source as for `kda`.
    """
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "state": state}
    options = Options(
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        implementation=implementation,
    )
    x, options = validate("kda_step", given, options)
    if x.q.shape[0] == 0:
        # Nothing to compute, and kernels need a grid.
        o, state = jnp.zeros(x.v.shape, x.q.dtype), x.initial_state
    else:
        plan = _plan(x, options)
        run = _with_backward if plan.implementation == "pallas_triton" else _forward
        o, state = run(plan, x)
    return o, jnp.swapaxes(state, -1, -2) if options.state_v_first else state


# Dispatch


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a call will run: everything about it that is not an array."""

    implementation: str  # "pallas_triton", "xla" or "recurrent"
    config: Any
    options: Options
    interpret: bool
    passed_over: tuple[tuple[str, str], ...]


def _plan(x: Arguments, options: Options) -> _Plan:
    """Chooses the implementation: the one asked for, or else the best that can serve the call."""
    asked = options.implementation
    device, interpret = device_of(*(array for array in x if array is not None)), interpreting()
    if asked == "pallas_mosaic":
        raise NotImplementedError(
            "kda_step: implementation='pallas_mosaic' cannot serve this call: there is no Mosaic GPU kernel of it yet"
        )
    if asked in ("xla", "recurrent"):
        return _Plan(asked, None, options, False, (("pallas_triton", f"implementation={asked!r} was asked for"),))
    try:
        require_triton(device, interpret)
        try:
            config = _kernels().choose_step_config(K=x.q.shape[-1], V=x.v.shape[-1])
        except ImportError as reason:
            raise NotImplementedError(str(reason)) from reason
        return _Plan("pallas_triton", config, options, interpret, ())
    except NotImplementedError as reason:
        if asked is not None:
            raise NotImplementedError(
                f"kda_step: implementation={asked!r} cannot serve this call: {reason}"
            ) from reason
        if device.platform == "gpu" or interpret:
            warn_once(f"kda_step: taking the slower implementation 'xla', not 'pallas_triton': {reason}")
        return _Plan("xla", None, options, False, (("pallas_triton", str(reason)),))


def _kernels() -> Any:
    import pallas_kernels.kda.step

    return pallas_kernels.kda.step


@functools.lru_cache(maxsize=4096)
def _jitted(plan: _Plan):
    """The forward of a plan, jitted under a name from which `explain` knows the plan."""

    def run(x):
        if plan.implementation != "pallas_triton":
            return _jnp(plan.options, x)
        options, kernels = plan.options, _kernels()
        raw = kernels.Raw(options.l2norm, options.gate, options.lower_bound, options.beta_sigmoid, options.neg_eigval)
        return kernels.step(
            *(x.q, x.k, x.v, x.g, x.erase, x.A_log, x.dt_bias, x.initial_state),
            scale=options.scale,
            raw=raw,
            config=plan.config,
            interpret=plan.interpret,
        )

    run.__name__ = run.__qualname__ = record(
        OperatorCall("kda_step", "forward", plan.implementation, "fp32", plan.interpret, plan.config, plan.passed_over)
    )
    return jax.jit(run)


# Forward


def _jnp(options: Options, x: Arguments) -> tuple[jax.Array, jax.Array]:
    q, k, v, g, beta = x.q, x.k, x.v, x.g, x.erase
    if options.l2norm:
        q, k = gates.l2_normalize(q), gates.l2_normalize(k)
    if options.gate:
        g = gates.log_decay(g, x.A_log, x.dt_bias, options.lower_bound)
    if options.beta_sigmoid:
        beta = gates.beta_sigmoid(beta, options.neg_eigval)
    return recurrent.step(q, k, v, g, beta[..., None], beta[..., None], x.initial_state, scale=options.scale)


def _forward(plan: _Plan, x: Arguments) -> tuple[jax.Array, jax.Array]:
    return _jitted(plan)(x)


# Backward


def _backward(plan: _Plan, x: Arguments, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Arguments]:
    """Of one token: nothing to keep but the inputs, and plain jnp is bound by the same reads of the state."""
    _, pull = jax.vjp(functools.partial(_jnp, plan.options), x)
    return pull(cotangents)


# The two joined

_with_backward = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_with_backward.defvjp(lambda plan, x: (_forward(plan, x), x), _backward)
