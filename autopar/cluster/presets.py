"""Public figures of common devices and of the links they usually come with.

Peaks are dense (no sparsity), per device, from the vendors' datasheets named beside
each; memory is taken as decimal even where a vendor means GiB (7 % more). What a
datasheet promises and what a program attains differ; the factors below say by how
much. `autopar profile` replaces all of it by measurement.
"""

import dataclasses
from collections.abc import Callable

from autopar.cluster.errors import ClusterError
from autopar.cluster.specs import DeviceSpec, Level, LinkSpec

# Assumption: the driver, the compiler's scratch space and fragmentation take a tenth.
# JAX itself reserves 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more:
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
USABLE_MEMORY = 0.9
# Assumption, near what the STREAM kernels reach on current GPUs
# (https://github.com/UoB-HPC/BabelStream).
STREAM_EFFICIENCY = 0.9
# The bus bandwidth that nccl-tests report of large all-reduces on 8 A100 is 230-250 of
# 300 GB/s (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md says
# what that is). All-reduces on H100 reach more, by reductions inside the switch,
# which are not modelled. The factor for networks is an assumption.
NVLINK_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.9

# Time of one step of a collective, of the order of the hardware latencies of rings in
# NCCL's tuner (src/graph/tuning.cc: NVLink 0.5-3.4 us, PCIe 1-6 us, network 3-14 us,
# by protocol); Ethernet and shared memory are assumptions; TPU links take
# about 1 us a hop (https://jax-ml.github.io/scaling-book/sharding/).
NVLINK_LATENCY_S = 2e-6
PCIE_LATENCY_S = 4e-6
INFINIBAND_LATENCY_S = 8e-6
ETHERNET_LATENCY_S = 30e-6
ICI_LATENCY_S = 1e-6
SHARED_MEMORY_LATENCY_S = 20e-6

# Assumptions: the gap between two dependent kernels.
GPU_KERNEL_LATENCY_S = 2e-6
TPU_KERNEL_LATENCY_S = 1e-6
CPU_KERNEL_LATENCY_S = 2e-6

_GPU_LEVELS = ("pod", "host", "device")
_TORUS_LEVELS = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device with the links between such devices.

    `inner` joins the devices of a host, `outer` everything beyond it. A torus has
    links of one class in every dimension, and wrap-around links only where a
    dimension's size is a multiple of `wrap_multiple`.
    """

    device: DeviceSpec
    inner: LinkSpec
    outer: LinkSpec
    wrap_multiple: int = 1

    @property
    def is_torus(self) -> bool:
        """Whether the levels are dimensions of a torus."""
        return self.inner.topology == "ring"

    @property
    def open_link(self) -> LinkSpec:
        """The links of a torus dimension whose ends are not joined: half as fast."""
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
        """The ring's link, or the open link if a dimension of this size has no ring."""
        return self.inner if size % self.wrap_multiple == 0 else self.open_link


def _gpu(
    name: str,
    *,
    tera_flops: dict[str, float],
    vector_tera_flops: float,
    memory_gb: float,
    memory_gb_per_s: float,
    inner: LinkSpec,
    network_gbit_per_s: float,
    efficiency: float,
    network_latency_s: float = INFINIBAND_LATENCY_S,
) -> Preset:
    device = DeviceSpec(
        name=name,
        kind="gpu",
        peak_flops_per_s=tuple((k, v * 1e12) for k, v in tera_flops.items()),
        memory_bytes=round(memory_gb * 1e9 * USABLE_MEMORY),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
        matmul_efficiency=efficiency,
        kernel_latency_s=GPU_KERNEL_LATENCY_S,
        vector_flops_per_s=vector_tera_flops * 1e12,
    )
    outer = LinkSpec(
        latency_s=network_latency_s,
        bandwidth_bytes_per_s=network_gbit_per_s / 8 * 1e9 * NETWORK_EFFICIENCY,
    )
    return Preset(device=device, inner=inner, outer=outer)


def _nvlink(gb_per_s: float) -> LinkSpec:
    """NVLink behind a switch; `gb_per_s` is one direction, all links of a GPU."""
    bandwidth = gb_per_s * 1e9 * NVLINK_EFFICIENCY
    return LinkSpec(latency_s=NVLINK_LATENCY_S, bandwidth_bytes_per_s=bandwidth)


def _tpu(
    name: str,
    *,
    tera_flops: float,
    vector_tera_flops: float,
    memory_gb: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    wrap_multiple: int,
) -> Preset:
    """A TPU; `link_gb_per_s` is one link, one direction, two links a dimension."""
    tera = {"float32": tera_flops, "bfloat16": tera_flops, "int8": 2 * tera_flops}
    device = DeviceSpec(
        name=name,
        kind="tpu",
        peak_flops_per_s=tuple((k, v * 1e12) for k, v in tera.items()),
        memory_bytes=round(memory_gb * 1e9 * USABLE_MEMORY),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
        matmul_efficiency=0.8,  # assumption
        kernel_latency_s=TPU_KERNEL_LATENCY_S,
        vector_flops_per_s=vector_tera_flops * 1e12,
    )
    link = LinkSpec(
        latency_s=ICI_LATENCY_S,
        bandwidth_bytes_per_s=2 * link_gb_per_s * 1e9,
        topology="ring",
    )
    return Preset(device=device, inner=link, outer=link, wrap_multiple=wrap_multiple)


def _a100() -> Preset:
    # NVIDIA A100 80GB SXM datasheet; a DGX A100 has one 200 Gb/s port per GPU. The
    # efficiency is an assumption.
    return _gpu(
        "a100",
        tera_flops={"float32": 156, "bfloat16": 312, "float16": 312, "int8": 624},
        vector_tera_flops=19.5,
        memory_gb=80,
        memory_gb_per_s=2039,
        inner=_nvlink(300),
        network_gbit_per_s=200,
        efficiency=0.8,
    )


def _hopper(name: str, memory_gb: float, memory_gb_per_s: float) -> Preset:
    # NVIDIA H100 SXM and H200 SXM datasheets, without sparsity; a DGX H100 has one
    # 400 Gb/s port per GPU. At full load Hopper lowers its clock: 0.7 of the peak is
    # what large bfloat16 products keep (assumption).
    return _gpu(
        name,
        tera_flops={
            "float32": 494.7,
            "bfloat16": 989.4,
            "float16": 989.4,
            "float8": 1978.9,
            "int8": 1978.9,
        },
        vector_tera_flops=67,
        memory_gb=memory_gb,
        memory_gb_per_s=memory_gb_per_s,
        inner=_nvlink(450),
        network_gbit_per_s=400,
        efficiency=0.7,
    )


def _h100() -> Preset:
    return _hopper("h100", memory_gb=80, memory_gb_per_s=3350)


def _h200() -> Preset:
    return _hopper("h200", memory_gb=141, memory_gb_per_s=4800)


def _b200() -> Preset:
    # NVIDIA HGX B200 datasheet, an eighth of the board, without sparsity.
    return _gpu(
        "b200",
        tera_flops={
            "float32": 1125,
            "bfloat16": 2250,
            "float16": 2250,
            "float8": 4500,
            "int8": 4500,
        },
        vector_tera_flops=75,
        memory_gb=180,
        memory_gb_per_s=7700,
        inner=_nvlink(900),
        network_gbit_per_s=400,
        efficiency=0.7,  # assumption, as for Hopper
    )


def _v100() -> Preset:
    # NVIDIA V100 SXM2 32GB datasheet; a DGX-1 has four 100 Gb/s ports for 8 GPUs.
    # No TF32 and no bfloat16 units: both run on the float32 units.
    return _gpu(
        "v100",
        tera_flops={"float32": 15.7, "bfloat16": 15.7, "float16": 125, "int8": 62.8},
        vector_tera_flops=15.7,
        memory_gb=32,
        memory_gb_per_s=900,
        inner=_nvlink(150),
        network_gbit_per_s=50,
        efficiency=0.75,  # assumption
    )


def _t4() -> Preset:
    # NVIDIA T4 datasheet; PCIe 3.0 x16 is 15.75 GB/s a direction. Network: an AWS
    # g4dn.12xlarge has 50 Gb/s for 4 GPUs. The 70 W limit keeps the clock low.
    pcie = LinkSpec(
        latency_s=PCIE_LATENCY_S,
        bandwidth_bytes_per_s=15.75e9 * NVLINK_EFFICIENCY,
    )
    return _gpu(
        "t4",
        tera_flops={"float32": 8.1, "bfloat16": 8.1, "float16": 65, "int8": 130},
        vector_tera_flops=8.1,
        memory_gb=16,
        memory_gb_per_s=320,
        inner=pcie,
        network_gbit_per_s=12.5,
        efficiency=0.5,  # assumption
        network_latency_s=ETHERNET_LATENCY_S,
    )


# https://cloud.google.com/tpu/docs/v5e and .../v5p; links and the vector unit (8x128
# lanes x 4 ALUs x cores x clock) from https://jax-ml.github.io/scaling-book/tpus/.
# v5e joins the ends of a dimension of 16 only, v5p those of multiples of 4.
def _v5e() -> Preset:
    return _tpu(
        "v5e",
        tera_flops=197,
        vector_tera_flops=6.1,
        memory_gb=16,
        memory_gb_per_s=819,
        link_gb_per_s=45,
        wrap_multiple=16,
    )


def _v5p() -> Preset:
    return _tpu(
        "v5p",
        tera_flops=459,
        vector_tera_flops=14,
        memory_gb=95,
        memory_gb_per_s=2765,
        link_gb_per_s=90,
        wrap_multiple=4,
    )


def _cpu() -> Preset:
    # Assumption: one device is one core with AVX2 at 3 GHz (2 fused multiply-adds of
    # 8 lanes a cycle: 96 GFLOP/s), a share of 10 GB/s of memory bandwidth, 4 GB of
    # memory, and 10 Gb/s Ethernet between hosts. XLA's CPU backend computes bfloat16
    # and float16 in float32. Profile the machine before trusting any of this.
    device = DeviceSpec(
        name="cpu",
        kind="cpu",
        peak_flops_per_s=(("float32", 96e9), ("float64", 48e9)),
        memory_bytes=4_000_000_000,
        memory_bandwidth_bytes_per_s=10e9,
        matmul_efficiency=0.7,
        kernel_latency_s=CPU_KERNEL_LATENCY_S,
        vector_flops_per_s=24e9,
    )
    inner = LinkSpec(latency_s=SHARED_MEMORY_LATENCY_S, bandwidth_bytes_per_s=4e9)
    outer = LinkSpec(
        latency_s=ETHERNET_LATENCY_S,
        bandwidth_bytes_per_s=1.25e9 * NETWORK_EFFICIENCY,
    )
    return Preset(device=device, inner=inner, outer=outer)


_MAKERS: dict[str, Callable[[], Preset]] = {
    "a100": _a100,
    "h100": _h100,
    "h200": _h200,
    "b200": _b200,
    "v100": _v100,
    "t4": _t4,
    "v5e": _v5e,
    "v5p": _v5p,
    "cpu": _cpu,
}

PRESETS: dict[str, Preset] = {name: make() for name, make in _MAKERS.items()}
DEFAULT_PRESET = "h100"


def preset(name: str) -> Preset:
    """The preset of that name, in any case."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ClusterError(
            f"unknown device {name!r}; the presets are {', '.join(PRESETS)}. "
            "Example: Cluster.parse('8x8:h100'). Describe any other device in a TOML "
            "file and pass its path."
        )
    return found
