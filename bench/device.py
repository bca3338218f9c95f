"""What the machine is: card, driver, clocks, L2 size, versions. Nothing here needs JAX or torch."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
from typing import Any

_SMI_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
    "clocks_event_reasons.active",
)
# Bits of clocks_event_reasons.active (NVML's nvmlClocksEventReasons).
_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
VERSIONED = (
    "jax",
    "jaxlib",
    "torch",
    "triton",
    "numpy",
    "fla-core",
    "flash-linear-attention",
    "jax-linear-attention",
    "jax-triton",
    "flax",
    "optax",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)


def has_gpu() -> bool:
    """True when an NVIDIA driver answers, unless JAX_PLATFORMS=cpu or CUDA_VISIBLE_DEVICES hides the cards."""
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", None) in ("", "-1"):
        return False
    return bool(_smi("name"))


def _smi(*fields: str) -> list[str]:
    exe = shutil.which("nvidia-smi") or next(
        (p for p in ("/usr/local/nvidia/bin/nvidia-smi", "/usr/bin/nvidia-smi") if os.path.exists(p)), None
    )
    if exe is None:
        return []
    command = [exe, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if first.isdigit():
        command.append(f"--id={first}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0 or not done.stdout.strip():
        return []
    return [part.strip() for part in done.stdout.strip().splitlines()[0].split(",")]


def state() -> dict[str, Any]:
    """Clocks, temperature, power and throttle reasons now; {} without a driver."""
    values = _smi(*_SMI_FIELDS)
    if len(values) != len(_SMI_FIELDS):
        values = _smi(*_SMI_FIELDS[:-1])  # drivers before 535 call the last field something else
    out: dict[str, Any] = dict(zip(_SMI_FIELDS, values, strict=False))
    if "clocks_event_reasons.active" in out:
        try:
            bits = int(out["clocks_event_reasons.active"], 16)
            out["throttle"] = [text for bit, text in _REASONS.items() if bits & bit]
        except ValueError:
            out["throttle"] = [out["clocks_event_reasons.active"]]
    return out


def l2_bytes() -> int | None:
    """Size of the device's L2 as its driver reports it, in bytes; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    l2_attribute = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    if cuda.cuDeviceGetAttribute(ctypes.byref(size), l2_attribute, device):
        return None
    return size.value


def cpu_name() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def commit() -> str:
    """BENCH_COMMIT where it is set, for copies that are no checkout of their own; else the checkout's commit, with "+"
    when files differ from it, or "" outside of one."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    root = pathlib.Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() if head.returncode == 0 else ""


def describe() -> dict[str, Any]:
    """The header of a result file."""
    gpu = has_gpu()
    now = state() if gpu else {}
    return {
        "kind": now.get("name", "") if gpu else f"CPU: {cpu_name()}",
        "gpu": gpu,
        "driver": now.get("driver_version", ""),
        "l2_bytes": l2_bytes() if gpu else None,
        "state_before": now,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "commit": commit(),
    }
