"""NVIDIA cards that need not be there: what a compiler has to know of each, and compiling for them.

A process compiles for one card only, since Mosaic GPU keeps what it has learnt of the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Card:
    """A kind of GPU.

    Attributes:
      kind: `jax.Device.device_kind` of it.
      capability: compute capability.
      cores: streaming multiprocessors.
      core_shared, block_shared: bytes of shared memory of a multiprocessor, and that one block can have.
      core_threads: threads that a multiprocessor holds.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    core_shared: int
    block_shared: int
    core_threads: int

    @property
    def architecture(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def is_hopper(self) -> bool:
        return self.capability == (9, 0)

    def description(self) -> str:
        """The card as XLA's GpuTargetConfigProto, in text format."""
        features = "ACCELERATED_FEATURES" if self.capability >= (9, 0) else "NONE"
        return f"""
            gpu_device_info {{
              name: "{self.kind}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
              cuda_compute_capability {{
                major: {self.capability[0]} minor: {self.capability[1]} feature_extension: {features}
              }}
              core_count: {self.cores} fpus_per_core: 128
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {self.core_threads}
              shared_memory_per_block: 49152 shared_memory_per_core: {self.core_shared}
              shared_memory_per_block_optin: {self.block_shared}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              memory_bandwidth: 1000000000000 l2_cache_size: 50000000 clock_rate_ghz: 1.9
              device_memory_size: 24000000000
              driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.kind}"
        """


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 166912, 2048),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376, 1536),
    "h200": Card("NVIDIA H200", (9, 0), 132, 233472, 232448, 2048),
    "b200": Card("NVIDIA B200", (10, 0), 148, 233472, 232448, 2048),
    "rtx5090": Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 102400, 101376, 1536),
}


class Target:
    """Traces and compiles as if on a card."""

    def __init__(self, card: Card):
        topology = topologies.get_topology_desc(platform="cuda", target_config=card.description(), topology="1x1x1")
        self._device = topology.devices[0]
        self._mesh = topologies.make_mesh(topology, (1,), ("_",))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, calls are traced for the card: Triton reads the mesh's device, Mosaic GPU the default one."""
        with jax.set_mesh(self._mesh), jax.default_device(self._device):
            yield

    def lower(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """The `jax.stages.Lowered` of fn, of arrays with these shapes and dtypes."""
        sharding = jax.NamedSharding(self._mesh, jax.P())
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
        with self.in_use():
            return jax.jit(fn).lower(*avals)

    def compile(self, lowered: Any, dump: pathlib.Path | None = None) -> None:
        """Compiles it to machine code. What the passes that lower a Triton kernel see goes into the folder `dump`."""
        options = {} if dump is None else {"xla_dump_to": str(dump), "xla_dump_emitter_re": "triton-to-llvm"}
        with self.in_use():
            lowered.compile(compiler_options=options)
