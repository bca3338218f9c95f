"""From samples to numbers: errors, medians with bootstrap intervals, paired ratios, verdicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

VERDICTS = ("WRONG", "IMPOSSIBLE", "NOT MEASURED", "SLOWER", "AMBIGUOUS", "TIE", "FASTER")  # worst first
TIE_BAND = 0.03  # a ratio whose whole interval lies within +-3 % of 1 is a tie
# Other people's arms may exceed the accuracy bar this many times before they count as wrong: the bars are what this
# project promises, and nobody's time should be dropped for a rounding that they never promised to avoid.
PEER_SLACK = 3.0
# A time under this share of the compulsory bytes over the measured bandwidth cannot be. On the CPU caches hold whole
# problems and the bandwidth probe is rough, so only the absurd is refused there.
POSSIBLE_GPU, POSSIBLE_CPU = 0.95, 0.05
_BOOTSTRAP = 2000
_CHUNK = 1 << 18  # elements whose errors are added up at a time
# A row's times, by the names `runtimes.Runtime.sample` gives them, the primary ones first.
CLOCKS = ("device_cold", "device_warm", "wall")
CLOCK_TITLES = {"device_cold": "device, cold L2", "device_warm": "device, warm L2", "wall": "wall"}


def eps(dtype: np.dtype) -> float:
    return {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}[np.dtype(dtype).name]


@dataclasses.dataclass
class Error:
    """Accumulates RMS-relative error and ULP over the parts of one tensor."""

    square_error: float = 0.0
    square_reference: float = 0.0
    worst: float = 0.0
    count: int = 0
    nonfinite: int = 0

    def add(self, got: np.ndarray, want: np.ndarray) -> None:
        if got.shape != want.shape:
            raise ValueError(f"shape {list(got.shape)} instead of {list(want.shape)}")
        got, want = got.reshape(-1), want.reshape(-1)
        for start in range(0, got.size, _CHUNK):  # what stays in a cache is several times quicker
            piece = slice(start, start + _CHUNK)
            self._add(got[piece].astype(np.float64), np.asarray(want[piece], np.float64))

    def _add(self, got: np.ndarray, want: np.ndarray) -> None:
        error = got - want
        bad = int(np.count_nonzero(~np.isfinite(error)))
        self.nonfinite += bad
        if bad:
            return
        self.square_error += float(np.sum(error * error))
        self.square_reference += float(np.sum(want * want))
        self.worst = max(self.worst, float(np.max(np.abs(error))))
        self.count += got.size

    def result(self, dtype: np.dtype) -> dict[str, float]:
        """{"rms": RMS error over RMS of the reference, "ulp": max|err| / (RMS(ref) eps(dtype)), "nonfinite": n}."""
        if self.nonfinite or not self.count:
            return {"rms": math.inf, "ulp": math.inf, "nonfinite": self.nonfinite}
        reference = math.sqrt(self.square_reference / self.count)
        error = math.sqrt(self.square_error / self.count)
        if reference == 0.0:  # an all-zero reference: only exact zeros are right
            return {"rms": 0.0 if error == 0.0 else math.inf, "ulp": 0.0 if error == 0.0 else math.inf, "nonfinite": 0}
        return {"rms": error / reference, "ulp": self.worst / (reference * eps(dtype)), "nonfinite": 0}


def _rng(samples: Sequence[float]) -> np.random.Generator:
    # Seeded by the data: the same samples give the same interval on every redraw.
    return np.random.default_rng(abs(hash(tuple(round(s, 9) for s in samples))) % 2**32)


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, bootstrap 95 % interval of the median, min, max and the raw samples (one per round)."""
    x = np.asarray(samples, np.float64)
    draws = np.median(_rng(samples).choice(x, size=(_BOOTSTRAP, x.size)), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return {
        "median": float(np.median(x)),
        "low": float(low),
        "high": float(high),
        "min": float(x.min()),
        "max": float(x.max()),
        "samples": [float(s) for s in x],
    }


def paired_ratio(mine: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """mine / other: median of the per-round ratios and its bootstrap interval, the rounds drawn in pairs.

    Where the two sides have different numbers of rounds (slow arms run fewer), the common rounds are used.
    """
    n = min(len(mine), len(other))
    ratio = np.asarray(mine[:n], np.float64) / np.asarray(other[:n], np.float64)
    draws = np.median(_rng(list(ratio)).choice(ratio, size=(_BOOTSTRAP, n)), axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return {"median": float(np.median(ratio)), "low": float(low), "high": float(high), "rounds": n}


def compare(ratio: Mapping[str, float]) -> str:
    """FASTER, TIE, SLOWER or AMBIGUOUS from a ratio of times (mine / other) with its interval."""
    low, high = ratio["low"], ratio["high"]
    if low >= 1 - TIE_BAND and high <= 1 + TIE_BAND:
        return "TIE"
    if high < 1.0:
        return "FASTER"
    if low > 1.0:
        return "SLOWER"
    return "AMBIGUOUS"


def primary(row: Mapping[str, Any]) -> str | None:
    """The clock that the row is judged by: cold device time, else warm, else wall; None without any time."""
    return next((clock for clock in CLOCKS if row.get("times", {}).get(clock)), None)


def fastest(rows: Sequence[dict[str, Any]], clock: str) -> dict[str, Any] | None:
    """The fastest correct row on that clock."""
    timed = [row for row in rows if row["status"] == "OK" and row["times"].get(clock)]
    return min(timed, key=lambda row: row["times"][clock]["median"], default=None)


def against(row: Mapping[str, Any], best: Mapping[str, Any], clock: str) -> dict[str, Any]:
    """Paired ratio of two rows of one run, with the name of the other arm and the clock."""
    ratio = paired_ratio(row["times"][clock]["samples"], best["times"][clock]["samples"])
    return {**ratio, "against": best["arm"], "clock": clock}


def judge(rows: list[dict[str, Any]]) -> None:
    """Adds "verdict" and, where there is something to compare with, "ratio" to rows of one run and one case.

    Each row is compared with the fastest correct *other* arm of its mode, on the same clock, round by round. A row with
    nothing to compare with is ALONE.
    """
    for row in rows:
        row["verdict"] = row["status"]
        row.pop("ratio", None)
        clock = primary(row)
        if row["status"] != "OK" or clock is None:
            continue
        best = fastest([other for other in rows if other is not row and other["mode"] == row["mode"]], clock)
        if best is None:
            row["verdict"] = "ALONE"
            continue
        row["ratio"] = against(row, best, clock)
        row["verdict"] = compare(row["ratio"])


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else math.nan
