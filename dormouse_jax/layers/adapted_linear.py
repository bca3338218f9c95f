"""A linear layer of Flax NNX under an adapter."""

from __future__ import annotations

import jax
from flax import nnx
from jax import lax

from dormouse_jax.adapters import Adapter


class AdapterParam(nnx.Param):
    """A parameter of an adapter, so that `nnx.DiffState(0, AdapterParam)` differentiates these alone."""


class AdaptedLinear(nnx.Module):
    """An `nnx.Linear` under an adapter: LoRA, LoHa, LoKr or OFT.

        y = x W'^T + bias,    W' [O, I] what the adapter makes of the layer's weight

    It computes the adapter's bypass, in which W' is not formed, until `merge` writes W' into the layer.

    Args:
      linear: the layer, which it holds and calls its own. Its `dtype` is the one that inputs are taken to, as there.
      adapter: an `Adapter`, such as `adapters.init_lora(...)` or `adapters.from_peft(...)` give. Its arrays become
        `AdapterParam`s, by name in `adapter_params`.
      precision, implementation: of the products, as in `dormouse_jax.adapters`.

    Raises:
      TypeError: linear is no `nnx.Linear`, or adapter no `Adapter`.
      ValueError: linear has a dot_general of its own, which the adapter's products would pass over, or the adapter does
        not fit its weight.
    """

    def __init__(
        self,
        linear: nnx.Linear,
        adapter: Adapter,
        *,
        precision: str | None = None,
        implementation: str | None = None,
    ):
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"AdaptedLinear: linear must be an nnx.Linear, got {type(linear).__name__}")
        if not isinstance(adapter, Adapter):
            raise TypeError(f"AdaptedLinear: adapter must be an Adapter, got {type(adapter).__name__}")
        if linear.dot_general is not lax.dot_general:
            raise ValueError("AdaptedLinear: linear must have the dot_general of JAX, got one of its own")
        self.linear = linear
        self.family, self.adapter_options = adapter.family, tuple(adapter.options.items())
        self.options = (("precision", precision), ("implementation", implementation))
        self.adapter_params = nnx.Dict({name: AdapterParam(x) for name, x in adapter.arrays.items()})
        self.unmerged_kernel = nnx.data(None)
        jax.eval_shape(self._rebuilt)  # raises where shapes or options do not fit

    @property
    def adapter(self) -> Adapter:
        """The adapter with its parameters as they are now."""
        arrays = {name: param[...] for name, param in self.adapter_params.items()}
        return Adapter(self.family, arrays, dict(self.adapter_options))

    @property
    def merged(self) -> bool:
        """Whether the layer's weight is W'."""
        return self.unmerged_kernel is not None

    def __call__(self, x: jax.Array) -> jax.Array:
        """y `[..., O]` of x `[..., I]`."""
        if self.merged:
            return self.linear(x)
        bias = None if self.linear.bias is None else self.linear.bias[...]
        x = x if self.linear.dtype is None else x.astype(self.linear.dtype)
        return self.adapter.bypass(x, self.linear.kernel[...].T, bias, **dict(self.options))

    def _rebuilt(self) -> jax.Array:
        return self.adapter.rebuild(self.linear.kernel[...].T, **dict(self.options)).T

    def merge(self) -> None:
        """Writes W', in the weight's dtype, into the layer, which then computes alone. The weight that it had is kept
        for `unmerge`: a sum cannot be undone exactly, nor can a rounding.

        Raises:
          ValueError: it is merged.
        """
        if self.merged:
            raise ValueError("AdaptedLinear: merge needs a layer that is not merged, got a merged one")
        kernel = self.linear.kernel[...]
        self.linear.kernel[...] = self._rebuilt()
        self.unmerged_kernel = nnx.Variable(kernel)

    def unmerge(self) -> None:
        """Puts back the weight that `merge` found, bit for bit.

        Raises:
          ValueError: it is not merged.
        """
        if self.unmerged_kernel is None:
            raise ValueError("AdaptedLinear: unmerge needs a merged layer, got one that is not")
        self.linear.kernel[...] = self.unmerged_kernel[...]
        self.unmerged_kernel = nnx.data(None)
