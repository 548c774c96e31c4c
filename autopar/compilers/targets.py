"""Describes the devices for which XLA can compile.

The figures of GPUs come from openxla/xla, ``xla/backends/gpu/target_config/specs``
(``a100_sxm_80``, ``h100_sxm``, ``h200``, ``b200``, ``v100``). Those of GPUs with the
compute capabilities 8.6 and 8.9 come from NVIDIA's datasheets, and from the table of
limits in the CUDA C++ Programming Guide. The compiler identifies a TPU by its name. The
clock of a TPU comes from
https://jax-ml.github.io/scaling-book/tpus/.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from autopar.cluster import Cluster
from autopar.cluster.presets import USABLE_MEMORY
from autopar.errors import PlanError

# The most threads of a streaming multiprocessor, where it is not 2048 (the CUDA C++
# Programming Guide).
_THREADS_PER_CORE: Final = {(8, 6): 1536, (8, 9): 1536}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The figures of a GPU that the compiler needs.

    Attributes:
      name: name of the GPU as its driver reports it.
      capability: CUDA compute capability, such as (9, 0).
      cores: number of streaming multiprocessors.
      fpus_per_core: number of floating point units of a streaming multiprocessor.
      clock_ghz: clock of the streaming multiprocessors, in GHz.
      memory_bytes: memory of the GPU.
      memory_bytes_per_s: memory bandwidth.
      l2_bytes: size of the L2 cache.
      shared_bytes: shared memory of a streaming multiprocessor.
      shared_optin_bytes: the most shared memory that a thread block may request.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    shared_bytes: int
    shared_optin_bytes: int

    def text(self) -> str:
        """The description as the compiler reads it: the text of a
        ``GpuTargetConfigProto``.
        """
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  threads_per_core_limit: {_THREADS_PER_CORE.get(self.capability, 2048)}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block_optin: {self.shared_optin_bytes}
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {self.memory_bytes_per_s} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{self.name}"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of device for which a step can be compiled without access to one.

    Attributes:
      name: name of the target; the preset of such devices has the same name.
      kind: as in `autopar.cluster.specs.DeviceSpec`, "gpu", "tpu" or "cpu".
      gpu: figures of the GPU; None for other kinds.
      clock_hz: clock of a TPU in Hz, to convert the compiler's cycles to seconds; 0 for
        other kinds.
    """

    name: str
    kind: str
    gpu: Gpu | None = None
    clock_hz: float = 0.0

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "cuda" if self.kind == "gpu" else self.kind

    @property
    def extra(self) -> str:
        """The extra of autopar's package that installs the compiler."""
        return f"{self.kind}-compiler"

    @property
    def module(self) -> str:
        """A Python module by whose presence one can tell that the compiler is
        installed.
        """
        return _MODULES[self.kind]


_MODULES: Final = {"gpu": "jax_plugins.xla_cuda12", "tpu": "libtpu", "cpu": "jaxlib"}
# CPU devices. JAX itself can compile for any number of them.
CPU: Final = Target(name="cpu", kind="cpu")
_H100: Final = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3_352_320_000_000,
    l2_bytes=52_428_800,
    shared_bytes=233_472,
    shared_optin_bytes=232_448,
)
_L4: Final = Gpu(
    name="NVIDIA L4",
    capability=(8, 9),
    cores=58,
    fpus_per_core=128,
    clock_ghz=2.04,
    memory_bytes=24_152_899_584,
    memory_bytes_per_s=300_000_000_000,
    l2_bytes=50_331_648,
    shared_bytes=102_400,
    shared_optin_bytes=101_376,
)
_GPUS: Final = {
    "l4": _L4,
    "l40s": dataclasses.replace(
        _L4,
        name="NVIDIA L40S",
        cores=142,
        clock_ghz=2.52,
        memory_bytes=48_305_799_168,
        memory_bytes_per_s=864_000_000_000,
        l2_bytes=100_663_296,
    ),
    "rtx4090": dataclasses.replace(
        _L4,
        name="NVIDIA GeForce RTX 4090",
        cores=128,
        clock_ghz=2.52,
        memory_bytes=25_757_220_864,
        memory_bytes_per_s=1_008_000_000_000,
        l2_bytes=75_497_472,
    ),
    "a10g": dataclasses.replace(
        _L4,
        name="NVIDIA A10G",
        capability=(8, 6),
        cores=80,
        clock_ghz=1.71,
        memory_bytes=24_146_608_128,
        memory_bytes_per_s=600_000_000_000,
        l2_bytes=6_291_456,
    ),
    "v100": Gpu(
        name="Tesla V100-SXM2-16GB",
        capability=(7, 0),
        cores=80,
        fpus_per_core=64,
        clock_ghz=1.53,
        memory_bytes=16_935_682_048,
        memory_bytes_per_s=898_048_000_000,
        l2_bytes=6_291_456,
        shared_bytes=98_304,
        shared_optin_bytes=98_304,
    ),
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory_bytes=85_100_068_864,
        memory_bytes_per_s=2_039_040_000_000,
        l2_bytes=41_943_040,
        shared_bytes=167_936,
        shared_optin_bytes=166_912,
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200 141GB HBM3e",
        memory_bytes=151_397_597_184,
        memory_bytes_per_s=4_800_000_000_000,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        memory_bytes=191_514_411_008,
        memory_bytes_per_s=7_672_320_000_000,
        l2_bytes=132_644_864,
        shared_bytes=233_472,
        shared_optin_bytes=232_448,
    ),
}
_TPU_CLOCKS_HZ: Final = {"v5e": 1.5e9, "v5p": 1.75e9}

TARGETS: Final = {
    name: Target(name=name, kind="gpu", gpu=gpu) for name, gpu in _GPUS.items()
} | {
    name: Target(name=name, kind="tpu", clock_hz=clock)
    for name, clock in _TPU_CLOCKS_HZ.items()
}


# The option of XLA for the percentage of a device's memory within which the scheduler
# and rematerialisation try to keep a program (openxla/xla,
# ``xla/debug_options_flags.cc``).
_SLOP_OPTION: Final = "xla_gpu_memory_limit_slop_factor"
_SLOP_FACTOR: Final = 95
# The memory in a preset is a rounded number. If a plan may use at least this fraction
# of it, it counts as the whole memory.
_WHOLE_MEMORY: Final = 0.999


def room_options(cluster: Cluster) -> dict[str, str]:
    """Compiler options that make XLA save memory, so that a program stays within the
    plan's limit.

    By itself the compiler only knows the memory of the device. If a plan may use less,
    the compiler would keep more arrays in memory than the plan allows.

    >>> room_options(Cluster.parse("8:h100,memory=40GB"))
    {'xla_gpu_memory_limit_slop_factor': '49'}
    >>> room_options(Cluster.parse("8:h100"))
    {}

    Args:
      cluster: the cluster, which tells how much memory a program may use. If its
        devices are unequal, they have different memory, and the result is empty.
    """
    if cluster.groups:
        return {}
    device = cluster.device
    target = TARGETS.get(device.name)
    if device.kind != "gpu" or target is None or target.gpu is None:
        return {}
    usable = target.gpu.memory_bytes * USABLE_MEMORY
    share = device.memory_bytes / usable
    if share > _WHOLE_MEMORY:
        return {}
    return {_SLOP_OPTION: str(max(1, int(_SLOP_FACTOR * share)))}


def target_of(name: str) -> Target:
    """The target with this name.

    Raises:
      PlanError: there is no such target.
    """
    found = TARGETS.get(name.lower())
    if found is None:
        known = ", ".join(TARGETS)
        raise PlanError(
            f"there is no description of a device '{name}' to compile for; "
            f"the targets are {known}."
        )
    return found


# The slices of TPUs that Google offers, in order of their number of chips
# (https://cloud.google.com/tpu/docs/v5e, .../v5p).
_V5E = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_V5P = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_SLICES = {"v5e": _V5E, "v5p": _V5P}


def topology(target: Target, cluster: Cluster) -> str:
    """The text that describes the devices of a cluster to the compiler of a target.

    For GPUs it is the number of hosts and of devices per host, as in ``1x8x8``. For
    TPUs it is the name of the slice that has the shape of the cluster; for a cluster
    with only one level, of the slice with as many chips.

    Raises:
      PlanError: the cluster has another kind of device, or no slice has its shape.
    """
    if cluster.groups:
        raise PlanError(
            f"a cluster of unlike devices cannot be compiled for: {cluster}."
        )
    if cluster.device.kind != target.kind:
        raise PlanError(
            f"the plan is for {cluster}, whose devices are {cluster.device.kind}s, and "
            f"{target.name} is a {target.kind}; plan for --cluster 2x4:{target.name}."
        )
    if target.kind == "cpu":
        return target.name
    sizes = [level.size for level in cluster.levels]
    if target.kind == "gpu":
        return f"1x{math.prod(sizes[:-1])}x{sizes[-1]}"
    shape = _slice(target.name, sizes)
    if shape is None:
        raise PlanError(
            f"no slice of {target.name} has the shape {'x'.join(map(str, sizes))}; "
            f"the slices are {', '.join(_SLICES[target.name])}."
        )
    return f"{target.name}:{shape}"


def _slice(name: str, sizes: Sequence[int]) -> str | None:
    """The name of the slice with these sizes or, if there is only one size, with this
    number of chips.
    """
    shapes = {text: tuple(map(int, text.split("x"))) for text in _SLICES[name]}
    if len(sizes) == 1:
        counts = {math.prod(shape): text for text, shape in shapes.items()}
        return counts.get(sizes[0])
    known = any(sorted(shape) == sorted(sizes) for shape in shapes.values())
    return "x".join(map(str, sizes)) if known else None
