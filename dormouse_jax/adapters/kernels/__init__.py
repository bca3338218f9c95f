"""The operators on Pallas kernels, a module a family.

Its functions are those of the family's plain reference, with `out_dtype`, `tiles` and `interpret` besides. `rebuild`
and `bypass` give the result and what the backward needs beyond the arrays of the call, `rebuild_backward` and
`bypass_backward` the gradients, of any float dtype. Products of a layer's weight with its tokens are XLA's.
"""

from __future__ import annotations

from typing import Any

import pallas_kernels.adapters as kernels
from dormouse_jax.adapters.kernels.low_rank import PAIRS


def choose(operator: str, x: dict[str, Any], precision: str, block_shared: int) -> Any:
    """The configuration of an operator's kernels on checked arrays, in blocks of so many bytes of shared memory.

    Raises:
      ValueError: there are none that serve the call.
    """
    family, form = operator.split(".")
    if form == "bypass" and not x["x"].shape[0]:
        raise ValueError("the kernels take at least one token")
    if family == "oft":
        n = x["P"].shape[1]
        if form == "rebuild":
            return kernels.choose_block_diagonal(*x["base"].shape, n, precision)
        (T, features), base = x["x"].shape, x["base"]
        return kernels.choose_block_diagonal(T, features if base is None else max(base.shape), n, precision)
    if family == "lokr":
        W1, W2 = (_shape(x, name) for name in ("W1", "W2"))
        if form == "bypass":
            return kernels.choose_tokens(W1, W2, x["x"].shape[0], precision, block_shared)
        return kernels.choose_kronecker(W1, W2)
    if form == "bypass":
        raise ValueError(f"there are no kernels for {operator}")
    (down, up), *_ = pairs = PAIRS[family]
    (rank, I), O = x[down].shape, x[up].shape[0]
    options = {"precision": precision, "dora": x.get("magnitude") is not None, "block_shared": block_shared}
    return kernels.choose_low_rank(O, I, rank, pairs=len(pairs), **options)


def _shape(x: dict[str, Any], factor: str) -> tuple[int, int]:
    if factor in x:
        return x[factor].shape
    return x[factor + "a"].shape[0], x[factor + "b"].shape[1]
