"""Reads public figures of common devices and of their usual links from TOML files.

Each file of the folder ``devices`` describes a device; the file is named after the
device. The files of the folders in ``AUTOPAR_DEVICES`` (separated as in ``PATH``) are
read, too. A file has the fields of `_GpuFile`, `_TpuFile` or `_CpuFile`.

Peak rates are rates of one device for dense products (without sparsity). The peak rates
come from the vendors' datasheets, which each file names. The datasheets also state the
power limit. The memory of a GPU is the size that its driver reports:
`device_memory_size` of OpenXLA's target configurations
(xla/backends/gpu/target_config/specs/*.txtpb), for a card of 80 GB about 85e9 bytes.
Programs do not reach the rates of a datasheet. Factors in the files and in this module
give the fraction that they reach. `autopar profile` measures the real figures, which
then replace the figures of the preset.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tomllib

import msgspec

from autopar.cluster.specs import (
    CALIBRATIONS,
    HOST_BYTES_PER_S,
    ClusterError,
    DeviceSpec,
    Level,
    LinkSpec,
)

# Assumption: NCCL's buffers, the compiler's scratch space and fragmentation take a
# tenth of a GPU's memory. JAX itself reserves 75 % of the memory unless
# XLA_PYTHON_CLIENT_MEM_FRACTION is larger:
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
USABLE_MEMORY = 0.9
# Assumption: about the fraction that the STREAM kernels reach on current GPUs
# (https://github.com/UoB-HPC/BabelStream).
STREAM_EFFICIENCY = 0.9
# Assumption: the fraction of its rate that a network reaches.
NETWORK_EFFICIENCY = 0.9

# Time of one step of a collective, for models of collectives that do not distinguish
# protocols. `autopar.cost.collectives` has NCCL's latencies by algorithm and protocol.
# For a network, these latencies are multiplied by the network's latency divided by
# InfiniBand's latency. TPU links take about 1 us per hop
# (https://jax-ml.github.io/scaling-book/sharding/).
PCIE_LATENCY_S = 4e-6
INFINIBAND_LATENCY_S = 8e-6
ICI_LATENCY_S = 1e-6

# Assumptions: the time between the end of a kernel and the start of a kernel that
# depends on it.
GPU_KERNEL_LATENCY_S = 2e-6
TPU_KERNEL_LATENCY_S = 1e-6
CPU_KERNEL_LATENCY_S = 2e-6

# Assumption: large products reach nearly the peak rate. The reason: whole training
# steps on v5e reach up to 0.86 of the peak rate.
TPU_EFFICIENCY = 0.95

_FOLDERS_VARIABLE = "AUTOPAR_DEVICES"
_GPU_LEVELS = ("pod", "host", "device")
_TORUS_LEVELS = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Figures of a device, and of the usual links between such devices.

    ``inner`` is the link between devices of a host, ``outer`` the link between hosts.
    All dimensions of a torus have the same kind of links. A dimension has wrap-around
    links only if its size is a multiple of ``wrap_multiple``. ``power_w`` is the power
    limit of the datasheet in watts; 0 means that it is not known.
    """

    device: DeviceSpec
    inner: LinkSpec
    outer: LinkSpec
    wrap_multiple: int = 1
    power_w: float = 0.0

    @property
    def is_torus(self) -> bool:
        """Whether the levels are dimensions of a torus."""
        return self.inner.topology == "ring"

    @property
    def open_link(self) -> LinkSpec:
        """The links of a torus dimension without wrap-around, which have half the
        bandwidth.
        """
        half = self.inner.bandwidth_bytes_per_s / 2
        return dataclasses.replace(self.inner, bandwidth_bytes_per_s=half)

    def levels(self, sizes: tuple[int, ...]) -> tuple[Level, ...]:
        """Levels of these sizes, outermost first."""
        if self.is_torus:
            named = zip(_TORUS_LEVELS, sizes, strict=False)
            return tuple(
                Level(name=n, size=s, link=self._torus_link(s)) for n, s in named
            )
        links = [self.outer] * (len(sizes) - 1) + [self.inner]
        named = zip(_GPU_LEVELS[-len(sizes) :], sizes, links, strict=True)
        return tuple(Level(name=n, size=s, link=link) for n, s, link in named)

    def _torus_link(self, size: int) -> LinkSpec:
        """The link of a torus dimension of this size, with wrap-around or without."""
        return self.inner if size % self.wrap_multiple == 0 else self.open_link


class _Link(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The links of a device to the other devices of its host.

    Attributes:
      gb_per_s: rate of all links of a device together in one direction, in GB/s.
      efficiency: fraction of this rate that collectives reach.
      latency_s: seconds of one step of a collective.
      rates: name of the class of links whose measured rates hold for these links
        (`autopar.cluster.rates`).
    """

    gb_per_s: float
    latency_s: float
    efficiency: float = 1.0
    rates: str = ""

    def spec(self) -> LinkSpec:
        return LinkSpec(
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.gb_per_s * 1e9 * self.efficiency,
            rates=self.rates,
        )


class _HostFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that files of GPUs and files of CPUs both have.

    Attributes:
      tera_flops: dtype -> peak rate of matrix products, in 1e12 operations per second.
      vector_tera_flops: peak rate of elementwise operations, in 1e12 per second.
      memory_bytes: memory of a device.
      memory_gb_per_s: bandwidth of this memory.
      host_gb_per_s: rate of copies between the memories of a device and its host, in
        each direction.
      efficiency: fraction of the peak rate that the best products reach if nothing else
        runs.
      network_gbit_per_s: rate of a device's network port, in Gbit/s.
      network_latency_s: seconds of one step of a collective over the network.
      inner: links between the devices of a host.
    """

    tera_flops: dict[str, float]
    vector_tera_flops: float
    memory_bytes: float
    memory_gb_per_s: float
    host_gb_per_s: float = HOST_BYTES_PER_S / 1e9
    efficiency: float
    network_gbit_per_s: float
    inner: _Link
    network_latency_s: float = INFINIBAND_LATENCY_S

    def outer(self, rates: str) -> LinkSpec:
        rate = self.network_gbit_per_s / 8 * 1e9 * NETWORK_EFFICIENCY
        return LinkSpec(
            latency_s=self.network_latency_s, bandwidth_bytes_per_s=rate, rates=rates
        )

    def peaks(self) -> tuple[tuple[str, float], ...]:
        return tuple((k, v * 1e12) for k, v in self.tera_flops.items())


class _GpuFile(_HostFile, tag_field="kind", tag="gpu", kw_only=True):
    """A GPU.

    Attributes:
      sustained: rate of products within a training step, as a fraction of their rate if
        nothing else runs.
      rates: name of the table of measured products of this device
        (`autopar.cluster.rates`).
      power_w: power limit of the datasheet, in watts.
      workspace_bytes: XLA's workspace for matrix products; None: XLA's default.
    """

    sustained: float
    rates: str
    power_w: float
    workspace_bytes: int | None = None

    def preset(self, name: str) -> Preset:
        device = DeviceSpec(
            name=name,
            kind="gpu",
            peak_flops_per_s=self.peaks(),
            memory_bytes=round(self.memory_bytes * USABLE_MEMORY),
            memory_bandwidth_bytes_per_s=self.memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
            matmul_efficiency=self.efficiency,
            sustained=self.sustained,
            kernel_latency_s=GPU_KERNEL_LATENCY_S,
            vector_flops_per_s=self.vector_tera_flops * 1e12,
            rates=self.rates,
            workspace_bytes=self.workspace_bytes,
            host_bytes_per_s=self.host_gb_per_s * 1e9,
        )
        inner, outer = self.inner.spec(), self.outer("network")
        return Preset(device=device, inner=inner, outer=outer, power_w=self.power_w)


class _CpuFile(_HostFile, tag_field="kind", tag="cpu", kw_only=True):
    """A part of a host's processor cores that counts as one device."""

    def preset(self, name: str) -> Preset:
        device = DeviceSpec(
            name=name,
            kind="cpu",
            peak_flops_per_s=self.peaks(),
            memory_bytes=round(self.memory_bytes),
            memory_bandwidth_bytes_per_s=self.memory_gb_per_s * 1e9,
            matmul_efficiency=self.efficiency,
            kernel_latency_s=CPU_KERNEL_LATENCY_S,
            vector_flops_per_s=self.vector_tera_flops * 1e12,
            host_bytes_per_s=self.host_gb_per_s * 1e9,
        )
        return Preset(device=device, inner=self.inner.spec(), outer=self.outer(""))


class _TpuFile(
    msgspec.Struct,
    tag_field="kind",
    tag="tpu",
    forbid_unknown_fields=True,
    kw_only=True,
):
    """A TPU, whose links form a torus.

    Attributes:
      tera_flops: peak rate of matrix products in bfloat16, in 1e12 operations per
        second.
      vector_tera_flops: peak rate of elementwise operations, in 1e12 per second.
      memory_gib: memory that the runtime leaves to a program, in GiB.
      memory_gb_per_s: bandwidth of this memory.
      host_gb_per_s: rate of copies between the memories of a device and its host, in
        each direction.
      link_gb_per_s: rate of one link in one direction, in GB/s; a device has two links
        in each dimension.
      wrap_multiple: see `Preset`.
      vector_memory_mib: vector memory of a chip with one core, in MiB. The cost model
        has special memory rules for such chips.
      memory_overhead: memory that a compiled program needs, divided by the predicted
        memory.
    """

    tera_flops: float
    vector_tera_flops: float
    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float
    wrap_multiple: int
    host_gb_per_s: float = HOST_BYTES_PER_S / 1e9
    vector_memory_mib: int = 0
    memory_overhead: float | None = None

    def preset(self, name: str) -> Preset:
        own = None
        if self.memory_overhead is not None:
            usual = CALIBRATIONS["tpu"]
            own = dataclasses.replace(usual, memory_overhead=self.memory_overhead)
        peak = self.tera_flops
        tera = {"float32": peak, "bfloat16": peak, "int8": 2 * peak}
        device = DeviceSpec(
            name=name,
            kind="tpu",
            peak_flops_per_s=tuple((k, v * 1e12) for k, v in tera.items()),
            memory_bytes=round(self.memory_gib * 2**30),
            memory_bandwidth_bytes_per_s=self.memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
            matmul_efficiency=TPU_EFFICIENCY,
            kernel_latency_s=TPU_KERNEL_LATENCY_S,
            vector_flops_per_s=self.vector_tera_flops * 1e12,
            on_chip_bytes=self.vector_memory_mib * 2**20,
            host_bytes_per_s=self.host_gb_per_s * 1e9,
            calibration=own,
        )
        link = LinkSpec(
            latency_s=ICI_LATENCY_S,
            bandwidth_bytes_per_s=2 * self.link_gb_per_s * 1e9,
            topology="ring",
        )
        multiple = self.wrap_multiple
        return Preset(device=device, inner=link, outer=link, wrap_multiple=multiple)


def read_presets(*folders: pathlib.Path) -> dict[str, Preset]:
    """Name -> device, for all devices that TOML files in the folders describe.

    Raises:
      ClusterError: a folder cannot be read, a file is wrong, or two files have the same
        name.
    """
    found: dict[str, Preset] = {}
    for folder in folders:
        try:
            paths = sorted(x for x in folder.iterdir() if x.suffix == ".toml")
        except OSError as error:
            raise ClusterError(
                f"{folder}: the folder of devices cannot be read: {error.strerror}. "
                f"Set {_FOLDERS_VARIABLE} to folders of TOML files, or unset it."
            ) from error
        for path in paths:
            name = path.stem.lower()
            if name in found:
                raise ClusterError(f"{path}: there is a device {name!r} already.")
            found[name] = _read(path, name)
    return found


def _read(path: pathlib.Path, name: str) -> Preset:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(data, _GpuFile | _TpuFile | _CpuFile).preset(name)
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:  # errors of TOML, msgspec and the values
        raise ClusterError(f"{path}: {error}") from error


_FOLDERS = [
    pathlib.Path(__file__).parent / "devices",
    *map(
        pathlib.Path,
        filter(None, os.environ.get(_FOLDERS_VARIABLE, "").split(os.pathsep)),
    ),
]
PRESETS: dict[str, Preset] = read_presets(*_FOLDERS)
DEFAULT_PRESET = "h100"


def preset(name: str) -> Preset:
    """The preset with this name, in upper or lower case."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ClusterError(
            f"unknown device {name!r}; the presets are {', '.join(PRESETS)}. "
            "Example: Cluster.parse('8x8:h100'). Describe any other device in a TOML "
            "file and pass its path."
        )
    return found
