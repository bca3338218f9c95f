"""The KDA recurrence and its gradient in float64, token by token: what every implementation is measured against.

Per batch element and value head, with a state S in R^{K x V} that starts as `initial_state` or 0:

    S'  = diag(exp(g_t)) S_{t-1}                      decay
    u_t = write_t * v_t - S'^T (erase_t * k_t)        what is missing at this key
    S_t = S' + k_t u_t^T                              correct and write
    o_t = scale * S_t^T q_t                           read

KDA (Kimi Linear, arXiv:2510.26692) has erase_t = write_t = beta_t, a scalar; the general rule has channel-wise gates.

The gradient is the same recurrence run backwards, written by hand. With dS the gradient of the loss in S_t, the part
of the future included, and y_t = write_t * v_t, e_t = erase_t * k_t:

    dS  += scale * q_t do_t^T                 dq_t = scale * S_t do_t
    du_t = dS^T k_t                           dk_t = dS u_t         (+ erase_t * de_t)
    dS' = dS - e_t du_t^T                     de_t = -S' du_t       dy_t = du_t
    dg_t = exp(g_t) * sum_v dS' * S_{t-1}     dS  <- diag(exp(g_t)) dS'

It never divides and exponentiates only g, so g = -inf (or -1e4) gives exact zeros and no NaN. States are kept every
sqrt(T) tokens and recomputed inside a segment.

Batch elements and heads are independent: give slices of a large case to check a few of them.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Pairs of (batch, head) run together in groups whose float64 states take about this much, so that they stay in cache.
_GROUP_BYTES = 1 << 18


def recurrent_forward(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    erase: Any,
    write: Any,
    *,
    scale: float,
    initial_state: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of this module in float64.

    Args:
      q, k: [B, T, H, K]. Arrays here may be NumPy arrays of any float dtype (ml_dtypes included), torch tensors, or
        anything that `numpy.asarray` takes; all are converted to float64 first.
      v: [B, T, HV, V], HV a multiple of H; value head h reads query and key head h // (HV / H).
      g: [B, T, HV, K], natural log of the decay; -inf forgets everything.
      erase: [B, T, HV, K] or, the same for every channel, [B, T, HV].
      write: [B, T, HV, V] or [B, T, HV].
      scale: factor on the output.
      initial_state: [B, HV, K, V], or None for zeros.

    Returns:
      o [B, T, HV, V] and the final state [B, HV, K, V], both float64.

    Raises:
      ValueError: shapes that do not fit together.
    """
    case = _Case(q, k, v, g, erase, write, scale, initial_state)
    with _one_thread():
        for pairs in case.groups():
            _Group(case, pairs).forward()
    return case.output()


def recurrent_vjp(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    erase: Any,
    write: Any,
    *,
    scale: float,
    initial_state: Any = None,
    do: Any,
    dfinal_state: Any = None,
) -> dict[str, np.ndarray]:
    """The recurrence and its hand-written reverse in float64.

    Gradients are those of sum(o * do) + sum(final_state * dfinal_state).

    Args:
      q, k, v, g, erase, write, scale, initial_state: as in `recurrent_forward`.
      do: [B, T, HV, V], the gradient in o.
      dfinal_state: [B, HV, K, V], the gradient in the final state, or None for zeros.

    Returns:
      float64 arrays by name: o, final_state, dq, dk, dv, dg, derase, dwrite (each in the shape of its input; dq and dk
      summed over the value heads that share them) and dinitial_state [B, HV, K, V].

    Raises:
      ValueError: shapes that do not fit together.
    """
    case = _Case(q, k, v, g, erase, write, scale, initial_state, do=do, dfinal_state=dfinal_state)
    with _one_thread():
        for pairs in case.groups():
            _Group(case, pairs).forward_and_reverse()
    o, final_state = case.output()
    return {"o": o, "final_state": final_state, **case.gradients()}


def gdn2_oracle(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    erase: Any,
    write: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    do: Any = None,
    dfinal_state: Any = None,
) -> dict[str, np.ndarray]:
    """The general rule (Gated DeltaNet-2) with its public defaults: `scale` None is K^-1/2.

    Shapes as in `recurrent_forward`. Returns o and final_state and, when `do` is given, the gradients of
    `recurrent_vjp`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if do is None:
        if dfinal_state is not None:
            raise ValueError("oracle: dfinal_state needs do (give zeros for a loss on the final state alone)")
        o, final_state = recurrent_forward(q, k, v, g, erase, write, scale=factor, initial_state=initial_state)
        return {"o": o, "final_state": final_state}
    return recurrent_vjp(
        q, k, v, g, erase, write, scale=factor, initial_state=initial_state, do=do, dfinal_state=dfinal_state
    )


def kda_oracle(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    do: Any = None,
    dfinal_state: Any = None,
) -> dict[str, np.ndarray]:
    """Kimi Delta Attention: `gdn2_oracle` with erase = write = beta [B, T, HV], and dbeta = derase + dwrite."""
    result = gdn2_oracle(
        q, k, v, g, beta, beta, scale=scale, initial_state=initial_state, do=do, dfinal_state=dfinal_state
    )
    if do is not None:
        result["dbeta"] = result.pop("derase") + result.pop("dwrite")
    return result


class _Case:
    """A whole call: float64 inputs, and the outputs that groups of (batch, value head) pairs fill in."""

    def __init__(self, q, k, v, g, erase, write, scale, initial_state, do=None, dfinal_state=None):
        self.q, self.k, self.v, self.g = (_float64(x) for x in (q, k, v, g))
        self.erase, self.write, self.scale = _float64(erase), _float64(write), float(scale)
        if self.q.ndim != 4 or self.v.ndim != 4:
            raise ValueError("oracle: q must be [B, T, H, K] and v [B, T, HV, V]")
        (B, T, H, K), (HV, V) = self.q.shape, self.v.shape[2:]
        if HV % H:
            raise ValueError(f"oracle: the number of value heads {HV} must be a multiple of that of key heads {H}")
        self.T, self.K, self.V, self.group, self.state_shape = T, K, V, HV // H, (B, HV, K, V)
        # A gate that is the same for every channel gets a last axis of one, and loses it again in its gradient.
        self.erase_given, self.write_given = self.erase.shape, self.write.shape
        self.erase, self.write = (x[..., None] if x.ndim == 3 else x for x in (self.erase, self.write))
        self.S0, self.dS1, self.do = (None if x is None else _float64(x) for x in (initial_state, dfinal_state, do))
        state = self.state_shape
        _check("k", self.k, (B, T, H, K))
        _check("v", self.v, (B, T, HV, V))
        _check("g", self.g, (B, T, HV, K))
        _check("erase", self.erase, (B, T, HV, K), (B, T, HV, 1))
        _check("write", self.write, (B, T, HV, V), (B, T, HV, 1))
        _check("do", self.do, (B, T, HV, V))
        _check("initial_state", self.S0, state)
        _check("dfinal_state", self.dS1, state)

        def empty(*shape):
            return torch.empty(shape, dtype=torch.float64)

        self.o, self.S1 = empty(B, T, HV, V), empty(*state)
        if self.do is not None:  # dq and dk per value head until `gradients` sums them over each group
            self.dq, self.dk = empty(B, T, HV, K), empty(B, T, HV, K)
            self.dv, self.dg, self.dS0 = empty(B, T, HV, V), empty(B, T, HV, K), empty(*state)
            self.derase, self.dwrite = torch.empty_like(self.erase), torch.empty_like(self.write)

    def groups(self) -> Iterator[list[tuple[int, int]]]:
        """Lists of (batch, value head) pairs to run together."""
        B, HV = self.state_shape[:2]
        size = max(1, _GROUP_BYTES // (8 * self.K * self.V))
        pairs = [(b, h) for b in range(B) for h in range(HV)]
        for start in range(0, len(pairs), size):
            yield pairs[start : start + size]

    def output(self) -> tuple[np.ndarray, np.ndarray]:
        return self.o.numpy(), self.S1.numpy()

    def gradients(self) -> dict[str, np.ndarray]:
        over_group = (*self.q.shape[:3], self.group, self.K)
        result = {
            "dq": self.dq.reshape(over_group).sum(3),
            "dk": self.dk.reshape(over_group).sum(3),
            "dv": self.dv,
            "dg": self.dg,
            "derase": self.derase.reshape(self.erase_given),
            "dwrite": self.dwrite.reshape(self.write_given),
            "dinitial_state": self.dS0,
        }
        return {name: x.numpy() for name, x in result.items()}


class _Group:
    """N pairs of a case, worked on in time-first segments.

    Rows [L, N, 1, X] and columns [L, N, X, 1] make a token a few products.
    """

    def __init__(self, case: _Case, pairs: list[tuple[int, int]]):
        self.case = case
        self.batch, self.head = (torch.tensor(x) for x in zip(*pairs, strict=True))
        self.key_head = self.head // case.group
        length = math.isqrt(case.T - 1) + 1
        self.segments = [slice(start, min(start + length, case.T)) for start in range(0, case.T, length)]
        self.shape, self.length = (len(pairs), case.K, case.V), length

    def forward(self) -> list[Tensor]:
        """Fills in o and the final state; returns the states that enter the segments."""
        S, checkpoints = self._state(self.case.S0), []
        for part in self.segments:
            checkpoints.append(S.clone())
            x = self._load(part)
            _, o = self._run(x, [S] * (len(x.k) + 1))
            self._store("o", part, o)
        self.case.S1[self.batch, self.head] = S
        return checkpoints

    def forward_and_reverse(self) -> None:
        """Fills in o, the final state and every gradient."""
        checkpoints, dS = self.forward(), self._state(self.case.dS1)
        states = torch.empty(self.length + 1, *self.shape, dtype=torch.float64)
        for part in reversed(self.segments):
            states[0] = checkpoints.pop()
            x = self._load(part)
            u, _ = self._run(x, states.unbind())
            self._reverse(part, x, u, states, dS)
        self.case.dS0[self.batch, self.head] = dS

    def _run(self, x: SimpleNamespace, S: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """u and o of a segment. S[t] becomes the state before its token t; all may be one tensor, updated in place."""
        u, o = torch.empty_like(x.y), torch.empty_like(x.y)
        r = torch.empty_like(x.y[0]).unsqueeze(1)
        steps = zip(S, S[1:], *map(_columns, (x.decay, x.k)), *map(_rows, (x.e, x.y, x.q, u, o)), strict=False)
        for before, after, decay, k_column, e, y, q, u_t, o_t in steps:
            torch.mul(before, decay, out=after)
            torch.bmm(e, after, out=r)
            torch.sub(y, r, out=u_t)
            after.baddbmm_(k_column, u_t)
            torch.bmm(q, after, out=o_t)
        return u, o

    def _reverse(self, part: slice, x: SimpleNamespace, u: Tensor, states: Tensor, dS: Tensor) -> None:
        """Takes dS, in place, from the end of a segment to its start and fills in the segment's gradients."""
        dq, dk, de, dg = (torch.empty_like(x.k) for _ in range(4))
        assert self.case.do is not None  # The reverse runs only where there is a gradient to take back.
        do, du = self._time_first(self.case.do, part), torch.empty_like(u)
        S, ST = states.unbind(), states.transpose(2, 3).unbind()
        dST, product = dS.transpose(1, 2), torch.empty_like(dS)
        columns = map(_columns, (x.decay, x.q, x.e))
        rows = map(_rows, (x.k, u, do, dq, dk, de, du))
        steps = list(zip(S, ST, ST[1:], dg, *columns, *rows, strict=False))
        for S_old, ST_old, ST_new, dg_t, decay, q_col, e_col, k, u_t, do_t, dq_t, dk_t, de_t, du_t in reversed(steps):
            dS.baddbmm_(q_col, do_t)
            torch.bmm(do_t, ST_new, out=dq_t)
            torch.bmm(k, dS, out=du_t)
            torch.bmm(u_t, dST, out=dk_t)
            dS.baddbmm_(e_col, du_t, alpha=-1)
            torch.bmm(du_t, ST_old, out=de_t)  # of the state before its decay: negated and decayed below
            torch.mul(dS, S_old, out=product)
            torch.sum(product, -1, out=dg_t)
            dS.mul_(decay)
        de.mul_(x.decay).neg_()
        self._store("dq", part, dq.mul_(self.case.scale))
        self._store("dg", part, dg.mul_(x.decay))
        self._store("dk", part, dk.addcmul_(de, x.erase))
        self._store("derase", part, de.mul_(x.k))
        self._store("dv", part, du * x.write)
        self._store("dwrite", part, du.mul_(x.v))

    def _load(self, part: slice) -> SimpleNamespace:
        """The inputs of a segment, [L, N, X], as the steps want them."""
        case, load = self.case, self._time_first
        x = SimpleNamespace(k=load(case.k, part, self.key_head), v=load(case.v, part))
        x.q = load(case.q, part, self.key_head).mul_(case.scale)
        x.decay = load(case.g, part).exp_()
        x.erase, x.write = load(case.erase, part), load(case.write, part)
        x.e, x.y = x.erase * x.k, x.write * x.v
        return x

    def _time_first(self, x: Tensor, part: slice, head: Tensor | None = None) -> Tensor:
        """A segment of [B, T, heads, X] as [L, N, X], a copy."""
        return x[self.batch, part, self.head if head is None else head].transpose(0, 1).contiguous()

    def _store(self, name: str, part: slice, x: Tensor) -> None:
        """[L, N, X] into the case's [B, T, HV, X]; a gate without channels gets the sum over them."""
        target = getattr(self.case, name)
        if target.shape[-1] == 1:
            x = x.sum(-1, keepdim=True)
        target[self.batch, part, self.head] = x.transpose(0, 1)

    def _state(self, given: Tensor | None) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.float64) if given is None else given[self.batch, self.head].clone()


def _float64(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64)
    return torch.from_numpy(np.array(np.asarray(x), dtype=np.float64))


def _check(name: str, x: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) not in shapes:
        raise ValueError(f"oracle: {name} must have shape {list(shapes[0])}, got {list(x.shape)}")


def _rows(x: Tensor) -> tuple[Tensor, ...]:
    return x.unsqueeze(-2).unbind()


def _columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.unsqueeze(-1).unbind()


@contextlib.contextmanager
def _one_thread():
    """A step is too small to share between threads: on two cores sharing it gained nothing, on many it costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
