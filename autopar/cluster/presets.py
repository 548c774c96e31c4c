"""Public figures of common devices and of their usual links.

Peaks are dense (without sparsity) and per device. The peaks come from the vendors'
datasheets, which are named next to each device and also state the power limit. The
memory of a GPU is the size that its driver reports: `device_memory_size` of OpenXLA's
target configurations (xla/backends/gpu/target_config/specs/*.txtpb), for a card of 80
GB about 85e9 bytes. Programs do not reach the datasheet's figures; the factors below
give the reachable fraction. `autopar profile` replaces all of these figures by
measurements.
"""

import dataclasses
from collections.abc import Callable

from autopar.cluster.specs import (
    CALIBRATIONS,
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
# Rings over NVLink reach 235 of 300 GB/s on 8 A100 and 376 of 450 GB/s on 8 H200
# (https://github.com/stas00/ml-engineering, network benchmarks; 'bus bandwidth' as
# defined in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Large
# all-gathers on 8 B200 reach 617 of 900 GB/s (XLA's tables, `autopar.cluster.rates`).
# The factors for older links and for networks are assumptions.
AMPERE_NVLINK_EFFICIENCY = 0.783
HOPPER_NVLINK_EFFICIENCY = 0.836
BLACKWELL_NVLINK_EFFICIENCY = 0.686
OLD_LINK_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.9

# Time of one step of a collective, for models without protocols.
# `autopar.cost.collectives` has NCCL's latencies by algorithm and protocol. The
# latencies of networks are scaled by the network's latency divided by InfiniBand's. The
# values for Ethernet and shared memory are assumptions. TPU links take about 1 us per
# hop (https://jax-ml.github.io/scaling-book/sharding/).
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

# A matrix product by itself runs faster than within a step, because in a step the power
# limit lowers the clock. For example, an A100 reaches 257 TFLOP/s for a product of
# random numbers and 295 TFLOP/s for zeros (thonking.ai, "Strangely, matrix
# multiplications on GPUs run faster when given predictable data"). With these fractions
# the prediction error over published steps is least, with equal weight for each source
# (`benchmarks/published.py`, which also does leave-one-source-out tests). There were no
# published steps for Blackwell, so Hopper's fraction is assumed.
AMPERE_SUSTAINED = 0.755
HOPPER_SUSTAINED = 0.64

# The workspace that XLA gives to products of cuBLAS before Hopper (openxla/xla,
# ``xla/service/gpu/transforms/gemm_rewriter.cc``).
EARLY_WORKSPACE_BYTES = 2**22

# Assumption: large products reach nearly the peak, because whole training steps on v5e
# reach up to 0.86 of the peak.
TPU_EFFICIENCY = 0.95
# The rules for the memory of v5e were derived from models with two layers. For six
# programs with six layers, the compiler needs 1.07 to 1.30 times the memory that these
# rules predict (docs/record). The reason is not known. With this factor, the prediction
# is 0.92 to 1.13 times the needed memory.
V5E_MEMORY_OVERHEAD = 1.25

_GPU_LEVELS = ("pod", "host", "device")
_TORUS_LEVELS = ("x", "y", "z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device with the links between such devices.

    `inner` is the link between devices of a host, `outer` the link between hosts. A
    torus has links of one class in every dimension. A torus has wrap-around links only
    in dimensions whose size is a multiple of `wrap_multiple`. `power_w` is the power
    limit of the datasheet; 0 means that the power is not known.
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
        """The links of a torus dimension without wrap-around, with half the
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
        """The link of a ring, or the open link if a dimension of this size has no
        wrap-around.
        """
        return self.inner if size % self.wrap_multiple == 0 else self.open_link


def _gpu(
    name: str,
    *,
    tera_flops: dict[str, float],
    vector_tera_flops: float,
    memory_bytes: float,
    memory_gb_per_s: float,
    inner: LinkSpec,
    network_gbit_per_s: float,
    power_w: float,
    efficiency: float,
    sustained: float,
    rates: str,
    network_latency_s: float = INFINIBAND_LATENCY_S,
    workspace_bytes: int | None = None,
) -> Preset:
    """A GPU; `rates` names its table of products (`autopar.cluster.rates`)."""
    device = DeviceSpec(
        name=name,
        kind="gpu",
        peak_flops_per_s=tuple((k, v * 1e12) for k, v in tera_flops.items()),
        memory_bytes=round(memory_bytes * USABLE_MEMORY),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
        matmul_efficiency=efficiency,
        sustained=sustained,
        kernel_latency_s=GPU_KERNEL_LATENCY_S,
        vector_flops_per_s=vector_tera_flops * 1e12,
        rates=rates,
        workspace_bytes=workspace_bytes,
    )
    outer = LinkSpec(
        latency_s=network_latency_s,
        bandwidth_bytes_per_s=network_gbit_per_s / 8 * 1e9 * NETWORK_EFFICIENCY,
        rates="network",
    )
    return Preset(device=device, inner=inner, outer=outer, power_w=power_w)


def _nvlink(gb_per_s: float, efficiency: float, rates: str = "nvlink") -> LinkSpec:
    """NVLink behind a switch; `gb_per_s` is the rate of all links of a GPU together, in
    one direction.
    """
    bandwidth = gb_per_s * 1e9 * efficiency
    return LinkSpec(
        latency_s=NVLINK_LATENCY_S, bandwidth_bytes_per_s=bandwidth, rates=rates
    )


def _tpu(
    name: str,
    *,
    tera_flops: float,
    vector_tera_flops: float,
    memory_gib: float,
    memory_gb_per_s: float,
    link_gb_per_s: float,
    wrap_multiple: int,
    vector_memory_mib: int = 0,
) -> Preset:
    """A TPU; `link_gb_per_s` is the rate of one link in one direction. Each dimension
    has two links.

    `memory_gib` is the memory that the runtime leaves to a program. `vector_memory_mib`
    is the vector memory of a chip with one core (jax,
    ``jax/_src/pallas/mosaic/tpu_info.py``). Chips with one core have their own memory
    rules and their own factor.
    """
    usual = CALIBRATIONS["tpu"]
    own = dataclasses.replace(usual, memory_overhead=V5E_MEMORY_OVERHEAD)
    tera = {"float32": tera_flops, "bfloat16": tera_flops, "int8": 2 * tera_flops}
    device = DeviceSpec(
        name=name,
        kind="tpu",
        peak_flops_per_s=tuple((k, v * 1e12) for k, v in tera.items()),
        memory_bytes=round(memory_gib * 2**30),
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9 * STREAM_EFFICIENCY,
        matmul_efficiency=TPU_EFFICIENCY,
        kernel_latency_s=TPU_KERNEL_LATENCY_S,
        vector_flops_per_s=vector_tera_flops * 1e12,
        on_chip_bytes=vector_memory_mib * 2**20,
        calibration=own if vector_memory_mib else None,
    )
    link = LinkSpec(
        latency_s=ICI_LATENCY_S,
        bandwidth_bytes_per_s=2 * link_gb_per_s * 1e9,
        topology="ring",
    )
    return Preset(device=device, inner=link, outer=link, wrap_multiple=wrap_multiple)


def _ampere(name: str, memory_bytes: float, memory_gb_per_s: float) -> Preset:
    # NVIDIA A100 SXM datasheets; a DGX A100 has one 200 Gb/s port per GPU. Products of
    # the best shapes reach 0.869 of the peak (stas00/ml-engineering, MAMF).
    return _gpu(
        name,
        tera_flops={"float32": 156, "bfloat16": 312, "float16": 312, "int8": 624},
        vector_tera_flops=19.5,
        memory_bytes=memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        inner=_nvlink(300, AMPERE_NVLINK_EFFICIENCY),
        network_gbit_per_s=200,
        power_w=400,
        efficiency=0.869,
        sustained=AMPERE_SUSTAINED,
        rates="a100",
        workspace_bytes=EARLY_WORKSPACE_BYTES,
    )


def _a100() -> Preset:
    return _ampere("a100", memory_bytes=85.10e9, memory_gb_per_s=2039)


def _a100_40() -> Preset:
    return _ampere("a100-40", memory_bytes=42.33e9, memory_gb_per_s=1555)


def _hopper(name: str, memory_bytes: float, memory_gb_per_s: float) -> Preset:
    # NVIDIA H100 SXM and H200 SXM datasheets, without sparsity; a DGX H100 has one 400
    # Gb/s port per GPU. At full load Hopper lowers its clock: products of the best
    # shapes reach 0.803 of the peak (stas00/ml-engineering, MAMF). XLA's tables were
    # measured on the H100. The H200 differs only in its memory.
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
        memory_bytes=memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        inner=_nvlink(450, HOPPER_NVLINK_EFFICIENCY, "h100"),
        network_gbit_per_s=400,
        power_w=700,
        efficiency=0.803,
        sustained=HOPPER_SUSTAINED,
        rates="h100",
    )


def _h100() -> Preset:
    return _hopper("h100", memory_bytes=84.94e9, memory_gb_per_s=3350)


def _h200() -> Preset:
    return _hopper("h200", memory_bytes=151.40e9, memory_gb_per_s=4800)


def _blackwell(
    name: str,
    faster: float,
    memory_bytes: float,
    memory_gb_per_s: float,
    power_w: float,
) -> Preset:
    # NVIDIA HGX B200 and GB200 NVL72 datasheets, one GPU, without sparsity; `faster` is
    # the peak divided by the peak of the B200. Products of the best shapes on a B200
    # reach 0.776 of the peak (stas00/ml-engineering, MAMF).
    tera = {
        "float32": 1125.0,
        "bfloat16": 2250.0,
        "float16": 2250.0,
        "float8": 4500.0,
        "int8": 4500.0,
    }
    return _gpu(
        name,
        tera_flops={dtype: faster * value for dtype, value in tera.items()},
        vector_tera_flops=75 * faster,
        memory_bytes=memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        inner=_nvlink(900, BLACKWELL_NVLINK_EFFICIENCY, name),
        network_gbit_per_s=400,
        power_w=power_w,
        efficiency=0.776,
        sustained=HOPPER_SUSTAINED,
        rates="b200",
    )


def _b200() -> Preset:
    return _blackwell(
        "b200", 1.0, memory_bytes=191.51e9, memory_gb_per_s=7700, power_w=1000
    )


def _gb200() -> Preset:
    # One NVLink domain has 72 GPUs: "72:gb200", or "2x72:gb200" for two racks.
    return _blackwell(
        "gb200", 10 / 9, memory_bytes=197.90e9, memory_gb_per_s=8000, power_w=1200
    )


def _v100() -> Preset:
    # NVIDIA V100 SXM2 32GB datasheet, memory as nvidia-smi reports it; a DGX-1 has four
    # 100 Gb/s ports for 8 GPUs. The V100 has no units for TF32 and bfloat16: both run
    # on the float32 units.
    return _gpu(
        "v100",
        tera_flops={"float32": 15.7, "bfloat16": 15.7, "float16": 125, "int8": 62.8},
        vector_tera_flops=15.7,
        memory_bytes=34.09e9,
        memory_gb_per_s=900,
        inner=_nvlink(150, OLD_LINK_EFFICIENCY),
        network_gbit_per_s=50,
        power_w=300,
        efficiency=0.75,  # assumption
        sustained=1.0,
        rates="v100",
        workspace_bytes=EARLY_WORKSPACE_BYTES,
    )


def _t4() -> Preset:
    # NVIDIA T4 datasheet, memory as nvidia-smi reports it; PCIe 3.0 x16 has 15.75 GB/s
    # per direction. Network: an AWS g4dn.12xlarge has 50 Gb/s for 4 GPUs. The 70 W
    # limit keeps the clock low.
    pcie = LinkSpec(
        latency_s=PCIE_LATENCY_S,
        bandwidth_bytes_per_s=15.75e9 * OLD_LINK_EFFICIENCY,
        rates="pcie",
    )
    return _gpu(
        "t4",
        tera_flops={"float32": 8.1, "bfloat16": 8.1, "float16": 65, "int8": 130},
        vector_tera_flops=8.1,
        memory_bytes=15.84e9,
        memory_gb_per_s=320,
        inner=pcie,
        network_gbit_per_s=12.5,
        power_w=70,
        efficiency=0.5,  # assumption
        sustained=1.0,
        rates="t4",
        network_latency_s=ETHERNET_LATENCY_S,
        workspace_bytes=EARLY_WORKSPACE_BYTES,
    )


# https://cloud.google.com/tpu/docs/v5e and .../v5p; links and the vector unit (8x128
# lanes x 4 ALUs x cores x clock) from https://jax-ml.github.io/scaling-book/tpus/. v5e
# has wrap-around links only in dimensions of size 16, v5p in dimensions whose size is a
# multiple of 4. The memory is the limit that the compiler states for programs that do
# not fit: 15.75 of 16 GiB on v5e, 95.74 of 96 GiB on v5p.
def _v5e() -> Preset:
    return _tpu(
        "v5e",
        tera_flops=197,
        vector_tera_flops=6.1,
        memory_gib=15.75,
        memory_gb_per_s=819,
        link_gb_per_s=45,
        wrap_multiple=16,
        vector_memory_mib=128,
    )


def _v5p() -> Preset:
    return _tpu(
        "v5p",
        tera_flops=459,
        vector_tera_flops=14,
        memory_gib=95.74,
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
    "a100-40": _a100_40,
    "h100": _h100,
    "h200": _h200,
    "b200": _b200,
    "gb200": _gb200,
    "v100": _v100,
    "t4": _t4,
    "v5e": _v5e,
    "v5p": _v5p,
    "cpu": _cpu,
}

PRESETS: dict[str, Preset] = {name: make() for name, make in _MAKERS.items()}
DEFAULT_PRESET = "h100"


def preset(name: str) -> Preset:
    """The preset with a name; upper and lower case are equal."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ClusterError(
            f"unknown device {name!r}; the presets are {', '.join(PRESETS)}. "
            "Example: Cluster.parse('8x8:h100'). Describe any other device in a TOML "
            "file and pass its path."
        )
    return found
