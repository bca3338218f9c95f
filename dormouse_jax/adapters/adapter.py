"""An adapter as a value: its family, arrays and options; how one starts, and what PEFT and LyCORIS store of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dormouse_jax import validation as check
from dormouse_jax.adapters import loha, lokr, lora, oft

FAMILIES = {"lora": lora, "loha": loha, "lokr": lokr, "oft": oft}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter of one linear layer.

    Attributes:
      family: "lora", "loha", "lokr" or "oft".
      arrays: its parameters by the names of the arguments of `rebuild`; those of a LoKr factor that is a product are
        W1a and W1b, W2a and W2b.
      options: the other arguments of `rebuild`: alpha, rank_stabilized, detach_norm; scale; side, neumann.
    """

    family: str
    arrays: Mapping[str, Any]
    options: Mapping[str, Any]

    def __post_init__(self):
        check.require_choice("Adapter", "family", self.family, tuple(FAMILIES))

    def rebuild(self, base: jax.Array, **options: Any) -> jax.Array:
        """The weight `[O, I]` that the adapter makes of a layer's; options are precision and implementation."""
        return FAMILIES[self.family].rebuild(base=base, **self._arguments(), **options)

    def bypass(self, x: jax.Array, base: jax.Array, bias: jax.Array | None = None, **options: Any) -> jax.Array:
        """The layer `[..., O]` of x `[..., I]` under the adapter; options are precision and implementation."""
        return FAMILIES[self.family].bypass(x, base=base, bias=bias, **self._arguments(), **options)

    def _arguments(self) -> dict[str, Any]:
        arguments = dict(self.arrays)
        for name in ("W1", "W2"):
            if name + "a" in arguments:
                arguments[name] = (arguments.pop(name + "a"), arguments.pop(name + "b"))
        return arguments | dict(self.options)


# How adapters start: with the layer as it is


def init_lora(
    key: jax.Array,
    out_features: int,
    in_features: int,
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool = False,
    base: jax.Array | None = None,
    detach_norm: bool = True,
    dtype: Any = jnp.float32,
) -> Adapter:
    """A LoRA whose update is zero: A uniform up to I^-1/2, B zero.

    With the layer's weight `base` `[O, I]` it is a DoRA, whose magnitude starts as the norms of base's rows.
    """
    _positive("init_lora", out_features=out_features, in_features=in_features, rank=rank)
    bound = in_features**-0.5
    arrays = {
        "A": jax.random.uniform(key, (rank, in_features), dtype, -bound, bound),
        "B": jnp.zeros((out_features, rank), dtype),
    }
    options: dict[str, Any] = {"alpha": alpha, "rank_stabilized": rank_stabilized}
    if base is not None:
        check.require_shape("init_lora", "base", base, "[O, I]", (out_features, in_features))
        arrays["magnitude"] = jnp.linalg.norm(base.astype(jnp.float32), axis=1).astype(dtype)
        options["detach_norm"] = detach_norm
    return Adapter("lora", arrays, options)


def init_loha(
    key: jax.Array,
    out_features: int,
    in_features: int,
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool = False,
    dtype: Any = jnp.float32,
) -> Adapter:
    """A LoHa whose update is zero: A1 and A2 normal, B1 normal of deviation 0.1, B2 zero."""
    _positive("init_loha", out_features=out_features, in_features=in_features, rank=rank)
    keys = jax.random.split(key, 3)
    arrays = {
        "A1": jax.random.normal(keys[0], (rank, in_features), dtype),
        "B1": 0.1 * jax.random.normal(keys[1], (out_features, rank), dtype),
        "A2": jax.random.normal(keys[2], (rank, in_features), dtype),
        "B2": jnp.zeros((out_features, rank), dtype),
    }
    return Adapter("loha", arrays, {"alpha": alpha, "rank_stabilized": rank_stabilized})


def init_lokr(
    key: jax.Array,
    out_features: int,
    in_features: int,
    *,
    scale: float,
    factor: int = -1,
    rank: int | None = None,
    dtype: Any = jnp.float32,
) -> Adapter:
    """A LoKr whose update is zero: W1 uniform up to b^-1/2, W2 zero.

    a and b are the smaller factors that `factorize` finds. W2 is full, or with a rank the product of a uniform and a
    zero array.
    """
    _positive("init_lokr", out_features=out_features, in_features=in_features)
    (a, c), (b, d) = factorize(out_features, factor), factorize(in_features, factor)
    first, second = jax.random.split(key)
    arrays = {"W1": jax.random.uniform(first, (a, b), dtype, -(b**-0.5), b**-0.5)}
    if rank is None:
        arrays["W2"] = jnp.zeros((c, d), dtype)
    else:
        _positive("init_lokr", rank=rank)
        arrays["W2a"] = jax.random.uniform(second, (c, rank), dtype, -(rank**-0.5), rank**-0.5)
        arrays["W2b"] = jnp.zeros((rank, d), dtype)
    return Adapter("lokr", arrays, {"scale": scale})


def init_oft(
    out_features: int,
    in_features: int,
    *,
    block_size: int,
    side: str = "input",
    neumann: bool = False,
    dtype: Any = jnp.float32,
) -> Adapter:
    """An OFT that rotates nothing: P zero, in blocks of block_size of the inputs or outputs."""
    _positive("init_oft", out_features=out_features, in_features=in_features, block_size=block_size)
    check.require_choice("init_oft", "side", side, oft.SIDES)
    size = in_features if side == "input" else out_features
    if size % block_size:
        raise ValueError(f"init_oft: block_size must divide the {side}'s {size} features, got {block_size}")
    P = jnp.zeros((size // block_size, block_size, block_size), dtype)
    return Adapter("oft", {"P": P}, {"side": side, "neumann": neumann})


def factorize(size: int, factor: int = -1) -> tuple[int, int]:
    """Two factors of `size`, the smaller one first: `factor` and the other where it divides, else the most nearly equal
    ones of which the smaller is at most `factor`; -1 sets no such limit."""
    _positive("factorize", size=size)
    if factor != -1:
        _positive("factorize", factor=factor)
        if size % factor == 0:
            return min(factor, size // factor), max(factor, size // factor)
    largest = math.isqrt(size) if factor == -1 else min(factor, math.isqrt(size))
    small = next(m for m in range(largest, 0, -1) if size % m == 0)
    return small, size // small


def _positive(operator: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if check.as_index(operator, name, size) < 1:
            raise ValueError(f"{operator}: {name} must be at least 1, got {size}")


# What PEFT and LyCORIS store

_LOHA = {"hada_w1_a": "B1", "hada_w1_b": "A1", "hada_w2_a": "B2", "hada_w2_b": "A2"}
_LOKR = {f"lokr_w{i}{part}": f"W{i}{part.strip('_')}" for i in (1, 2) for part in ("", "_a", "_b")}
_PEFT_LORA = {"lora_A.weight": "A", "lora_B.weight": "B", "lora_magnitude_vector.weight": "magnitude"}
_PEFT_OFT = {"oft_R.weight": "P"}
_LYCORIS_LORA = {"lora_down.weight": "A", "lora_up.weight": "B", "dora_scale": "magnitude"}
_LYCORIS_OFT = {"oft_blocks": "P"}
_PEFT = {"lora": _PEFT_LORA, "loha": _LOHA, "lokr": _LOKR, "oft": _PEFT_OFT}
_LYCORIS = {"lora": _LYCORIS_LORA, "loha": _LOHA, "lokr": _LOKR, "oft": _LYCORIS_OFT}


def _named(
    operator: str, tensors: Mapping[str, Any], names: Mapping[str, Mapping[str, str]]
) -> tuple[str, dict[str, jax.Array]]:
    """The family that the names tell, and the arrays by our names."""
    for family, ours in names.items():
        if tensors and set(tensors) <= set(ours):
            return family, {ours[name]: check.as_array(operator, name, x) for name, x in tensors.items()}
    expected = "; ".join(f"{family}: {', '.join(ours)}" for family, ours in names.items())
    raise ValueError(
        f"{operator}: tensors must be those of a linear layer ({expected}), got {', '.join(sorted(tensors))}"
    )


def _rank_of_lokr(arrays: Mapping[str, Any]) -> int | None:
    """Of the factors that are products; None where both are full."""
    return next((arrays[n].shape[1] for n in ("W2a", "W1a") if n in arrays), None)


def _divisor(rank: int, rank_stabilized: bool) -> float:
    return math.sqrt(rank) if rank_stabilized else rank


def from_peft(
    tensors: Mapping[str, Any],
    *,
    alpha: float | None = None,
    rank: int | None = None,
    rank_stabilized: bool = False,
    neumann: bool = True,
) -> Adapter:
    """An adapter from the tensors that PEFT stores for one linear layer.

    Args:
      tensors: by name without the layer's and the adapter's: lora_A.weight `[r, I]`, lora_B.weight `[O, r]`,
        lora_magnitude_vector.weight `[O]`; hada_w1_a `[O, r]`, hada_w1_b `[r, I]`, hada_w2_a, hada_w2_b; lokr_w1
        `[a, b]`, or lokr_w1_a `[a, r]` and lokr_w1_b `[r, b]`, lokr_w2 likewise; oft_R.weight `[k, n (n - 1) / 2]`, the
        upper triangles of the blocks (not shared ones).
      alpha: lora_alpha or alpha of its configuration; not for OFT.
      rank: r of its configuration, of a LoKr whose factors are both full, which it scales by alpha / r all the same.
      rank_stabilized: use_rslora.
      neumann: use_cayley_neumann (of five terms), which is on by default there. Where it is off PEFT has the rotation
        of -Q, so P comes out negated.

    Raises:
      ValueError: for names or shapes that are none of these, and for an alpha or rank that is missing.
    """
    operator = "from_peft"
    family, arrays = _named(operator, tensors, _PEFT)
    if family == "oft":
        return Adapter("oft", {"P": _blocks(arrays["P"], neumann)}, {"side": "input", "neumann": neumann})
    if alpha is None:
        raise ValueError(f"{operator}: alpha must be given for {family}, got None")
    if family == "lokr":
        found = _rank_of_lokr(arrays) or rank
        if found is None:
            raise ValueError(f"{operator}: rank must be given for lokr with both factors full, got None")
        return Adapter(family, arrays, {"scale": alpha / _divisor(found, rank_stabilized)})
    options: dict[str, Any] = {"alpha": alpha, "rank_stabilized": rank_stabilized}
    if "magnitude" in arrays:
        options["detach_norm"] = True
    return Adapter(family, arrays, options)


def to_peft(adapter: Adapter) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, the other arguments of `from_peft`) of an adapter, from which that makes it again."""
    arrays, options = dict(adapter.arrays), adapter.options
    if adapter.family == "oft":
        if options["side"] != "input":
            raise ValueError(f"to_peft: side must be 'input', which is what PEFT rotates, got {options['side']!r}")
        neumann, Q = options.get("neumann", False), arrays["P"] - arrays["P"].mT
        rows, columns = np.triu_indices(Q.shape[-1], 1)
        triangle = Q[:, rows, columns]
        return {"oft_R.weight": triangle if neumann else -triangle}, {"neumann": neumann}
    tensors = {theirs: arrays[ours] for theirs, ours in _PEFT[adapter.family].items() if ours in arrays}
    if adapter.family == "lokr":
        rank = _rank_of_lokr(arrays)
        if rank is not None:
            return tensors, {"alpha": options["scale"] * rank}
        rank = max(arrays["W2"].shape)  # PEFT has full factors from about this rank on
        return tensors, {"alpha": options["scale"] * rank, "rank": rank}
    return tensors, {"alpha": options["alpha"], "rank_stabilized": options.get("rank_stabilized", False)}


def _blocks(triangle: jax.Array, neumann: bool) -> jax.Array:
    """P [k, n, n] whose upper triangles are given as [k, n (n - 1) / 2]."""
    if triangle.ndim != 2:
        raise ValueError(f"from_peft: oft_R.weight must have shape [k, n (n - 1) / 2], got {list(triangle.shape)}")
    elements = triangle.shape[1]
    n = (1 + math.isqrt(1 + 8 * elements)) // 2
    if n * (n - 1) // 2 != elements:
        raise ValueError(f"from_peft: oft_R.weight must have n (n - 1) / 2 columns for some n, got {elements}")
    P = jnp.zeros((triangle.shape[0], n, n), triangle.dtype)
    return P.at[:, *np.triu_indices(n, 1)].set(triangle if neumann else -triangle)


def from_lycoris(tensors: Mapping[str, Any], *, rank_stabilized: bool = False) -> Adapter:
    """An adapter from the tensors that LyCORIS stores for one linear layer.

    Args:
      tensors: by name without the layer's: lora_down.weight `[r, I]`, lora_up.weight `[O, r]`, dora_scale `[O, 1]`;
        hada_w1_a and so on and lokr_w1 and so on as in `from_peft`; oft_blocks `[k, n, n]`; and alpha, a number. An
        alpha of 0, or none, is the rank: a scale of 1. With both factors of a LoKr full it is ignored, as there. Of an
        OFT it is the bound of the constrained variant, which must be 0.
      rank_stabilized: rs_lora, which is not stored.

    Raises:
      ValueError: for names or shapes that are none of these, such as a dora_scale `[1, I]` of norms of columns.
    """
    operator = "from_lycoris"
    tensors = dict(tensors)
    alpha = float(tensors.pop("alpha", 0.0))
    family, arrays = _named(operator, tensors, _LYCORIS)
    if family == "oft":
        if alpha != 0:
            raise ValueError(f"{operator}: alpha must be 0 for oft, whose rotations are not constrained, got {alpha}")
        if arrays["P"].ndim != 3:
            raise ValueError(f"{operator}: oft_blocks must have shape [k, n, n], got {list(arrays['P'].shape)}")
        return Adapter("oft", arrays, {"side": "output", "neumann": False})
    if family == "lokr":
        rank = _rank_of_lokr(arrays)
        scale = 1.0 if rank is None else (alpha or rank) / _divisor(rank, rank_stabilized)
        return Adapter("lokr", arrays, {"scale": scale})
    rank = arrays["A" if family == "lora" else "A1"].shape[0]
    options: dict[str, Any] = {"alpha": alpha or float(rank), "rank_stabilized": rank_stabilized}
    if "magnitude" in arrays:
        rows = arrays["B"].shape[0]
        check.require_shape(operator, "dora_scale", arrays["magnitude"], "[O, 1]", (rows, 1))
        arrays["magnitude"] = arrays["magnitude"][:, 0]
        options["detach_norm"] = False
    return Adapter(family, arrays, options)


def to_lycoris(adapter: Adapter) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, the other arguments of `from_lycoris`) of an adapter, from which that makes it again."""
    arrays, options = dict(adapter.arrays), adapter.options
    tensors = {theirs: arrays[ours] for theirs, ours in _LYCORIS[adapter.family].items() if ours in arrays}
    if adapter.family == "oft":
        if options["side"] != "output" or options.get("neumann"):
            raise ValueError(
                f"to_lycoris: side must be 'output' and neumann False, as in LyCORIS, got {options['side']!r} and "
                f"{options.get('neumann')}"
            )
        return tensors | {"alpha": np.float32(0.0)}, {}
    if adapter.family == "lokr":
        rank, scale = _rank_of_lokr(arrays), options["scale"]
        if rank is None and scale != 1:
            raise ValueError(
                f"to_lycoris: scale must be 1 with both factors full, where LyCORIS has no other, got {scale}; "
                f"W1 can take it"
            )
        return tensors | {"alpha": np.float32(scale * (rank or 1))}, {}
    if "dora_scale" in tensors:
        tensors["dora_scale"] = tensors["dora_scale"][:, None]
    return tensors | {"alpha": np.float32(options["alpha"])}, {"rank_stabilized": options.get("rank_stabilized", False)}
