"""The arguments of `kda`, `gdn2` and `kda_step`: what a call may give, and the checks of all that can be known without
values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dormouse_jax import packing
from dormouse_jax import validation as check

IMPLEMENTATIONS = ("pallas", "pallas_triton", "pallas_mosaic", "xla", "recurrent")
CHUNK_SIZES = (16, 32, 64, 128)
MAX_DIM = 256


class Arguments(NamedTuple):
    """The arrays of a call, in the dtypes and layouts that implementations take. None: not given; no T: `kda_step`."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV, K], raw with Options.gate
    erase: Any  # [B, T, HV], beta of kda, raw with Options.beta_sigmoid; [B, T, HV, K] of gdn2
    write: Any = None  # [B, T, HV, V] of gdn2
    A_log: Any = None  # [HV]
    dt_bias: Any = None  # [HV * K]
    initial_state: Any = None  # [N, HV, K, V], with N = B unless sequences are packed
    cu_seqlens: Any = None  # [N + 1] int32, with B = 1
    starts: Any = None  # [B, T] bool, where another segment begins than that of the token before


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call: as given, and after `validate` with their defaults filled in."""

    scale: Any = None
    output_final_state: Any = False
    l2norm: Any = False
    gate: Any = False
    beta_sigmoid: Any = False
    neg_eigval: Any = False
    lower_bound: Any = None
    state_v_first: Any = False
    chunk_size: Any = None
    precision: Any = None
    residuals: str = "recompute"
    implementation: str | None = None


def validate(operator: str, given: dict[str, Any], options: Options) -> tuple[Arguments, Options]:
    """Checks everything about a call that can be known without values.

    Args:
      operator: "kda", "gdn2" or "kda_step", which every error names.
      given: the array arguments by the names of the public function. A_log, dt_bias, initial_state, cu_seqlens and
        segment_ids may be None.
      options: as given.
    """
    cu_seqlens, segment_ids = given.pop("cu_seqlens", None), given.pop("segment_ids", None)
    optional = ("A_log", "dt_bias", "initial_state")
    arrays: dict[str, Any] = {
        name: None if x is None and name in optional else check.as_array(operator, name, x) for name, x in given.items()
    }
    K = _require_shapes(operator, arrays, bool(options.state_v_first), cu_seqlens)
    options = _validate_options(operator, options, str(arrays["q"].dtype), K)
    _require_gate(operator, arrays, options)
    _require_dtypes(operator, arrays, options.implementation)
    packed = _packed(operator, arrays["q"].shape, cu_seqlens, segment_ids)

    arrays |= {"erase": arrays.pop("beta")} if "beta" in arrays else {}
    state = arrays.pop("state" if operator == "kda_step" else "initial_state")
    if state is not None:
        state = state.astype(jnp.promote_types(arrays["q"].dtype, jnp.float32))
        state = jnp.swapaxes(state, -1, -2) if options.state_v_first else state
    return Arguments(**arrays, initial_state=state, **packed), options


def _packed(operator: str, q_shape: tuple[int, ...], cu_seqlens: Any, segment_ids: Any) -> dict[str, jax.Array]:
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError(f"{operator}: segment_ids must be None with cu_seqlens, which says as much, got both")
    if cu_seqlens is not None:
        return {"cu_seqlens": packing.require_cu_seqlens(operator, cu_seqlens, *q_shape[:2])}
    if segment_ids is not None:
        return {"starts": packing.segment_starts(operator, segment_ids, *q_shape[:2])}
    return {}


def _require_shapes(
    operator: str, arrays: dict[str, jax.Array | None], state_v_first: bool, cu_seqlens: Any = None
) -> int:
    """Checks every shape but those of what says how sequences are packed; returns K."""

    def require(name: str, axes: str, *shape: int | str) -> tuple[Any, ...]:
        x = arrays.get(name)
        if x is not None:
            check.require_shape(operator, name, x, axes, shape)
        return () if x is None else x.shape

    times = () if operator == "kda_step" else ("T",)
    head = ", ".join(("[B", *times))
    B, *times, H, K = require("q", f"{head}, H, K]", "B", *times, "H", "K")
    require("k", f"{head}, H, K]", B, *times, H, K)
    HV, V = require("v", f"{head}, HV, V]", B, *times, "HV", "V")[-2:]
    if 0 in times and cu_seqlens is None:
        raise ValueError(f"{operator}: T must be at least 1, got q of shape {[B, *times, H, K]}")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            f"{operator}: HV must be a multiple of H, got v with HV = {HV} and q with H = {H}, "
            f"of shapes {[B, *times, HV, V]} and {[B, *times, H, K]}"
        )
    for name, axis, size in (("q", "K", K), ("v", "V", V)):
        if not 1 <= size <= MAX_DIM:
            raise ValueError(f"{operator}: {axis}, the last axis of {name}, must be from 1 to {MAX_DIM}, got {size}")
    require("g", f"{head}, HV, K]", B, *times, HV, K)
    require("beta", f"{head}, HV]", B, *times, HV)
    require("erase", f"{head}, HV, K]", B, *times, HV, K)
    require("write", f"{head}, HV, V]", B, *times, HV, V)
    require("A_log", "[HV]", HV)
    require("dt_bias", "[HV * K]", HV * K)
    axis, N = ("B", B) if cu_seqlens is None else ("N", max(np.size(cu_seqlens) - 1, 0))
    for name in ("state", "initial_state"):
        if state_v_first:
            require(name, f"[{axis}, HV, V, K]", N, HV, V, K)
        else:
            require(name, f"[{axis}, HV, K, V]", N, HV, K, V)
    return K


def _require_gate(operator: str, arrays: dict[str, jax.Array | None], options: Options) -> None:
    """Checks that what belongs to the gate in the kernel comes with it, and the other way round."""
    if options.gate:
        if arrays["A_log"] is None and options.lower_bound is None:
            raise ValueError(
                f"{operator}: A_log must be given with use_gate_in_kernel=True where there is no lower_bound, got None"
            )
        return
    for name, value in (("A_log", arrays["A_log"]), ("dt_bias", arrays["dt_bias"])):
        if value is not None:
            raise ValueError(
                f"{operator}: {name} must be None without use_gate_in_kernel=True, got an array of shape "
                f"{list(value.shape)}"
            )
    if options.lower_bound is not None:
        raise ValueError(
            f"{operator}: lower_bound must be None without use_gate_in_kernel=True, got {options.lower_bound}"
        )


def _require_dtypes(operator: str, arrays: dict[str, jax.Array | None], implementation: str | None) -> None:
    q = arrays["q"]
    assert q is not None
    floats = ("float32", "bfloat16", "float16") + (("float64",) if implementation == "recurrent" else ())
    check.require_dtype(operator, "q", q, floats)
    for name in ("k", "v"):
        x = arrays[name]
        assert x is not None
        if x.dtype != q.dtype:
            raise TypeError(f"{operator}: {name} must have q's dtype {q.dtype}, got {x.dtype}")
    gates = floats if q.dtype == "float64" else floats[:3]
    for name, x in arrays.items():
        if x is not None:
            check.require_dtype(operator, name, x, gates)


def _validate_options(operator: str, options: Options, dtype: str, K: int) -> Options:
    check.require_choice(operator, "implementation", options.implementation, (None, *IMPLEMENTATIONS))
    check.require_choice(operator, "residuals", options.residuals, ("recompute", "save"))
    check.require_choice(operator, "chunk_size", options.chunk_size, (None, *CHUNK_SIZES))
    check.require_choice(operator, "precision", options.precision, (None, "fp32", "tf32", "16bit"))
    of_dtype = {"float32": ("fp32", "tf32"), "float64": ("fp64",)}.get(dtype, ("16bit",))
    precision = of_dtype[0] if options.precision is None else options.precision
    if precision not in of_dtype and dtype in ("float32", "bfloat16", "float16", "float64"):
        expected = " or ".join(repr(p) for p in of_dtype if p != "fp64") or "None"
        raise ValueError(f"{operator}: precision must be {expected} for inputs of dtype {dtype}, got {precision!r}")
    if dtype == "float64" and options.implementation not in (None, "recurrent"):
        raise NotImplementedError(
            f"{operator}: implementation={options.implementation!r} cannot serve this call: "
            "only 'recurrent' takes float64"
        )
    if options.neg_eigval and not options.beta_sigmoid:
        raise ValueError(
            f"{operator}: allow_neg_eigval must be False without use_beta_sigmoid_in_kernel=True, got True"
        )
    bound = options.lower_bound
    if bound is not None:
        bound = check.as_float(operator, "lower_bound", bound)
        if not (math.isfinite(bound) and bound < 0):
            raise ValueError(f"{operator}: lower_bound must be a finite number below 0, got {bound}")
    scale = K**-0.5 if options.scale is None else check.as_float(operator, "scale", options.scale)
    flags = ("output_final_state", "l2norm", "gate", "beta_sigmoid", "neg_eigval", "state_v_first")
    given = {name: bool(getattr(options, name)) for name in flags}
    return dataclasses.replace(options, scale=scale, lower_bound=bound, precision=precision, **given)
