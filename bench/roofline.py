"""Rooflines of this device, measured on the spot: copy bandwidth and matmul rates.

Bandwidth counts bytes read and written; rates are 2 m n k over the kernel time. Random data: zeros run faster.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.spec import Traffic


def probe(kind: str) -> dict[str, Any]:
    """{"bandwidth": bytes/s, "flops": {"bf16": flop/s, "tf32": ..., "float32": ...}, "l2_bytes", "how"}"""
    return _probe_jax() if kind == "jax" else _probe_torch() if kind == "torch" else _probe_numpy()


def _probe_jax() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    def best(f: Any, *args: Any) -> float:
        _, ms = profiler.measure(jax.jit(f), iterations=10)(*args)
        if ms is None:
            raise RuntimeError("CUPTI reported no kernels")
        return float(np.median(ms)) / 1e3

    words = 1 << 28  # 1 GiB of float32 read, 1 GiB written
    x = jnp.ones(words, jnp.float32)
    bandwidth = 8 * words / best(lambda x: x * np.float32(1.0001), x)
    del x
    flops = {}
    a, b = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.float32) for i in (0, 1))
    dots = {
        "bf16": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
        "tf32": (jnp.float32, jax.lax.DotAlgorithmPreset.TF32_TF32_F32),
        "float32": (jnp.float32, jax.lax.Precision.HIGHEST),
    }
    for name, (dtype, precision) in dots.items():
        n = 4096 if name == "float32" else 8192  # XLA tries many float32 kernels, and they are slow
        x, y = a[:n, :n].astype(dtype), b[:n, :n].astype(dtype)
        flops[name] = 2 * n**3 / best(lambda x, y, p=precision: jnp.matmul(x, y, precision=p), x, y)
    how = "XLA: 1 GiB scaled copy, 8192^3 dots (float32 4096^3), CUPTI kernel times"
    return {"bandwidth": bandwidth, "flops": flops, "how": how}


def _probe_torch() -> dict[str, Any]:
    import torch

    def best(f: Any) -> float:
        for _ in range(3):
            f()
        times = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            f()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return float(np.median(times))

    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / best(lambda: y.copy_(x))
    del x, y
    n, flops = 8192, {}
    a, b = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    for name, dtype, tf32 in (
        ("bf16", torch.bfloat16, False),
        ("tf32", torch.float32, True),
        ("float32", torch.float32, False),
    ):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x, y = a.to(dtype), b.to(dtype)
        flops[name] = 2 * n**3 / best(lambda x=x, y=y: x @ y)
    return {"bandwidth": bandwidth, "flops": flops, "how": "torch: 1 GiB copy, 8192^3 matmuls, CUDA events"}


def _probe_numpy() -> dict[str, Any]:
    def best(f: Any) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    rng = np.random.default_rng(0)
    x = rng.standard_normal(1 << 23, dtype=np.float32)
    y = np.empty_like(x)
    n = 512
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    rate = 2 * n**3 / best(lambda: a @ b)
    return {
        "bandwidth": 2 * x.nbytes / best(lambda: np.copyto(y, x)),
        "flops": {"bf16": rate, "tf32": rate, "float32": rate},
        "how": "numpy: 32 MiB copy, 512^3 matmul, host clock (rough)",
    }


def floor_ms(traffic: Traffic, probed: dict[str, Any]) -> float:
    """The larger of bytes over bandwidth and operations over matmul rate, in milliseconds."""
    seconds = (traffic.reads + traffic.writes) / probed["bandwidth"]
    rate = probed["flops"].get(traffic.rate)
    if traffic.flops and rate:
        seconds = max(seconds, traffic.flops / rate)
    return seconds * 1e3


def impossible_ms(traffic: Traffic, probed: dict[str, Any], l2_bytes: int | None) -> float:
    """No cold call can be faster: every compulsory byte read, and every one written that L2 cannot still hold."""
    kept = l2_bytes or 0
    return (traffic.reads + max(0, traffic.writes - kept)) / probed["bandwidth"] * 1e3
