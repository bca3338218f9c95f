"""What every operator's dispatch needs: the device a call will run on, interpret mode, and warnings given once."""

from __future__ import annotations

import contextlib
import contextvars
import os
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

OLDEST_CAPABILITY = 8.0  # of Pallas's Triton backend
HOPPER = "9.0"  # the only compute capability with the instructions of our Mosaic GPU kernels
HOPPER_CARDS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA H20", "NVIDIA GH200")

# Bytes of shared memory that a block can have, by compute capability, and by kind where that is not known. What is in
# neither table is taken for a consumer card.
BLOCK_SHARED = {"8.0": 166912, "8.7": 166912} | dict.fromkeys(("9.0", "10.0", "10.1", "10.3", "11.0"), 232448)
BLOCK_SHARED_OF_KIND = dict.fromkeys(("NVIDIA A100", "NVIDIA A800", "NVIDIA A30"), 166912)
BLOCK_SHARED_OF_KIND |= dict.fromkeys(
    (*HOPPER_CARDS, "NVIDIA B200", "NVIDIA GB200", "NVIDIA B300", "NVIDIA GB300"), 232448
)
CONSUMER_SHARED = 101376

# What no GPU has held to the float64 oracle yet. It is not chosen there, though interpret mode runs it; an entry goes
# once the tests, which lift this, have passed on one.
UNPROVEN: dict[str, str] = {"adapters_few_tokens": "kernels of LoRA on few tokens"}

_interpret: contextvars.ContextVar[bool] = contextvars.ContextVar("dormouse_interpret", default=False)
_warned: set[str] = set()


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Runs Pallas kernels in interpret mode: the same kernel code, slow, on any device. For tests.

    Inside it the default implementation is the Pallas one on every device. The environment variable
    DORMOUSE_INTERPRET=1 does the same for a whole process. Both are read when a public function is called, and hold
    for its backward too; a function that `jax.jit` has traced before keeps what it was traced with.
    """
    token = _interpret.set(True)
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreting() -> bool:
    """Whether a call made now runs its kernels in interpret mode."""
    return _interpret.get() or os.environ.get("DORMOUSE_INTERPRET", "0") not in ("", "0")


class Device(NamedTuple):
    """The kind of device that a call will run on."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # as JAX names it: "NVIDIA H200"
    compute_capability: str | None = None  # of an NVIDIA GPU, where it is known: "9.0"
    cores: int | None = None  # streaming multiprocessors of a GPU, where it is known

    @property
    def is_nvidia(self) -> bool:
        return self.platform == "gpu" and self.kind.startswith(("NVIDIA", "Tesla", "GeForce", "Quadro"))

    @property
    def is_hopper(self) -> bool:
        """Whether it is a card with the instructions of our Mosaic GPU kernels."""
        if self.compute_capability is not None:
            return self.compute_capability == HOPPER
        return self.kind.startswith(HOPPER_CARDS)

    @property
    def block_shared(self) -> int:
        """Bytes of shared memory that a block can have at least, on an NVIDIA GPU that the kernels support."""
        if self.compute_capability is not None:
            return BLOCK_SHARED.get(self.compute_capability, CONSUMER_SHARED)
        kinds = [size for kind, size in BLOCK_SHARED_OF_KIND.items() if self.kind.startswith(kind)]
        return kinds[0] if kinds else CONSUMER_SHARED


def device_of(*arrays: jax.Array) -> Device:
    """The device that a call with these arrays will run on, tracers included.

    In this order: the mesh in use, the device that an array was put on, `jax.default_device`, the first device of JAX's
    default backend.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.abstract_device is not None and mesh.abstract_device.platform is not None:
        abstract = mesh.abstract_device
        return Device(abstract.platform, abstract.device_kind, cores=abstract.num_cores)
    for x in arrays:
        if not isinstance(x, Tracer) and x.committed:
            device = next(iter(x.devices()))
            return _describe(device)
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return _describe(default)


def _describe(device: Any) -> Device:
    capability, cores = (getattr(device, name, None) for name in ("compute_capability", "core_count"))
    return Device(device.platform, device.device_kind, capability, cores if device.platform == "gpu" else None)


def require_triton(device: Device, interpret: bool) -> None:
    """Raises a NotImplementedError that says why where Pallas's Triton kernels cannot run."""
    if interpret:
        return
    if not device.is_nvidia:
        raise NotImplementedError(
            f"Pallas kernels need an NVIDIA GPU, and this call runs on a device of platform {device.platform!r} "
            f"({device.kind}); to run them there all the same, slowly, use dormouse_jax.interpret_kernels()"
        )
    if device.compute_capability is not None and float(device.compute_capability) < OLDEST_CAPABILITY:
        raise NotImplementedError(
            f"Pallas kernels need compute capability {OLDEST_CAPABILITY}, "
            f"and {device.kind} has {device.compute_capability}"
        )


def require_hopper(device: Device, interpret: bool, asked: str | None) -> None:
    """Raises a NotImplementedError that says why where the Mosaic GPU kernels cannot run."""
    if interpret and asked != "pallas_mosaic":
        raise NotImplementedError("interpret mode runs Hopper kernels only where they are asked for by name")
    if not (interpret or device.is_hopper):
        raise NotImplementedError(f"Hopper kernels need compute capability {HOPPER}, and this is {device.kind}")


def require_proven(feature: str, interpret: bool, *, named: bool = False) -> None:
    """Raises a NotImplementedError for a feature of UNPROVEN, but for interpret mode. named: whether the call asks for
    it by name, so that it is to run all the same, with one warning."""
    if feature in UNPROVEN and not interpret:
        reason = f"{UNPROVEN[feature]} were not held to the oracle on a GPU yet"
        if not named:
            raise NotImplementedError(reason)
        warn_once(f"running what was asked for by name: {reason}")


def warn_once(message: str) -> None:
    """Warns of a slower implementation, once a process for each message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=5)
