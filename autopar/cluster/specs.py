"""Figures of devices, links and levels that the cost model needs.

A calibration holds constants of a kind of device that no datasheet gives.

The constants correct the formulas of `autopar.cost` for the behaviour of compilers and
of shared machines. A device has the calibration of its kind (`CALIBRATIONS`) unless its
cluster file has a table ``[device.calibration]``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from autopar.cluster.rates import DEVICE_RATES, LINK_RATES
from autopar_errors import InputError


class ClusterError(InputError):
    """The description of a cluster is wrong; the message shows a correct one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Corrections of the cost model for one kind of device.

    Attributes:
      skew: factor by which every collective takes longer, because devices that reach
        the collective early wait for the others. The factor is 1 if devices share no
        hardware.
      half_rate_side: number of elements of a matrix side at which a product runs at
        half the full rate, because a part of a tile or vector is not used.
      vector_slowdown: factor by which operators other than matrix products take longer
        than their roofline time.
      patch_passes: how often a convolution writes or reads its unfolded patches
        (im2col) in memory; 0 if convolutions do not unfold patches.
      memory_overhead: memory that a program needs, divided by the predicted peak of
        live buffers. The ratio covers copies into other memory orders, and
        fragmentation.
      combined_kinds: kinds of collectives of which the compiler joins several to one
        message.
      combined_bytes: the most bytes of results in a joined message; a larger array has
        its own message. 1e18 means no limit.
      combined_arrays: the most arrays in a joined message.
      arrays_apart: whether the arrays of a joined message between hosts are sent one
        after the other, so that each array adds the latency of the link.
      forms_reduce_scatter: whether the compiler makes reduce-scatters. If False, the
        program runs an all-reduce instead, and each device keeps a slice of the result.
      copies_pieces: whether the program copies data for a collective: packs the
        operand, or moves pieces of the result to their places.
      reassociates: whether the compiler replaces the sum of two all-reduces by one
        all-reduce of the sum.
      overlap: fraction of the work with which communication may overlap; 0 if a device
        either works or communicates.
      contention: by how many seconds a second of overlapping communication lengthens
        the work.
      whole_messages: whether a message can overlap with work only as a whole, and sums
        of gradients also overlap with the optimizer's update (`autopar.cost.overlap`).
        If False, each array of a message can overlap by itself.
      makes_room: whether the cost model assumes that the compiler saves memory if
        memory is short (`autopar.cost.live`). While messages are sent, the compiler
        often fails to save memory. So the planner makes a plan that relies on it only
        if no other plan fits, and keeps such a plan only if it compiles.
    """

    skew: float = 1.0
    half_rate_side: float = 0.0
    vector_slowdown: float = 1.0
    patch_passes: float = 0.0
    memory_overhead: float = 1.2
    combined_kinds: tuple[str, ...] = ()
    combined_bytes: float = 1e18
    combined_arrays: int = 256
    arrays_apart: bool = False
    forms_reduce_scatter: bool = True
    copies_pieces: bool = True
    reassociates: bool = False
    overlap: float = 0.0
    contention: float = 0.0
    whole_messages: bool = False
    makes_room: bool = False

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("skew", "vector_slowdown", "memory_overhead"):
            value = getattr(self, name)
            if not (value >= 1 and math.isfinite(value)):
                raise ClusterError(
                    f"Calibration: {name} must be a finite number of at least 1, got "
                    f"{value!r}."
                )
        for name in ("half_rate_side", "patch_passes", "combined_bytes"):
            value = getattr(self, name)
            if not value >= 0:
                raise ClusterError(
                    f"Calibration: {name} must be zero or positive, got {value!r}."
                )
        for name in ("overlap", "contention"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ClusterError(
                    f"Calibration: {name} must lie between 0 and 1, got {value!r}."
                )
        if self.combined_arrays < 1:
            raise ClusterError(
                "Calibration: combined_arrays must be 1 or more, got "
                f"{self.combined_arrays!r}."
            )


# 30 MiB + 7 bytes is the value of the thresholds
# xla_gpu_{all_reduce,all_gather,reduce_scatter}_ combine_threshold_bytes (openxla/xla,
# xla/service/collective_utils.h). The limit of 256 arrays is in
# xla/service/gpu/gpu_compiler.cc. The compiler for TPUs is not public; the same values
# are assumed for it. On CPUs (jaxlib 0.10.2), 25 arrays with 3.2 GB of gradients became
# one all-reduce, and 401 arrays became two all-reduces of 256 and 145 arrays.
# All-gathers were not joined (benchmarks/combined_collectives.py).
_COMBINED_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_COMBINED_BYTES = 30.0 * 1024 * 1024 + 7

CALIBRATIONS = {
    "cpu": Calibration(
        # Simulated devices share the processor cores. This value was chosen by hand. A
        # least-squares fit to measured steps gave 1.9 (docs/cost-model.md).
        skew=1.5,
        # A vector register (AVX2) holds 8 numbers of 32 bits. The value was not fitted
        # to measurements.
        half_rate_side=8.0,
        # XLA's CPU code for element-wise operators and reductions takes longer than one
        # pass over memory. This value was chosen by hand. A least-squares fit to
        # measured steps gave about 3. But with 3, the steps of the fastest plans of
        # some examples were predicted less well.
        vector_slowdown=2.0,
        # XLA on CPUs computes convolutions as products with unfolded patches (Eigen).
        # The patches are written and read once, mostly in the cache. So writing and
        # reading are assumed to take half a pass over memory.
        patch_passes=0.5,
        # The overhead covers fragmentation of the heap, and copies for which no rule is
        # known. In the programs of the examples, the predicted peak of buffers is up to
        # 8 % below XLA's.
        memory_overhead=1.05,
        combined_kinds=("all_reduce",),
        # XLA passes the arrays to gloo one by one. At 1 Gbit/s, 70 arrays of 4 KiB take
        # 36 to 186 ms between two hosts, and 294 to 371 ms among four hosts. One array
        # of 280 KiB takes 2 ms and 6 ms (benchmarks/network/collectives.py --arrays
        # 70).
        arrays_apart=True,
        # XLA's CPU pipeline has no pass that forms a reduce-scatter.
        forms_reduce_scatter=False,
    ),
    # `half_rate_side` is assumed to be a quarter of the side of the tiles that GPU
    # libraries prefer (64), or of a TPU's matrix unit (128). On GPUs the predicted peak
    # of buffers is about what XLA allocates (docs/record, compilers of accelerators).
    # `memory_overhead` of TPUs is the value that was chosen for CPUs.
    "gpu": Calibration(
        half_rate_side=16.0,
        memory_overhead=1.0,
        combined_kinds=_COMBINED_KINDS,
        combined_bytes=_COMBINED_BYTES,
        # XLA for GPUs makes the dimension that a collective gathers, scatters or splits
        # the outermost in memory, so that no pieces are copied
        # (xla/service/gpu/transforms/layout_assignment.cc). Matrix products can read
        # operands in any memory order.
        copies_pieces=False,
        # The compiler reassociates sums (autopar_passes.sums.stacked).
        reassociates=True,
        overlap=1.0,
        # Collectives use streaming multiprocessors and memory bandwidth. Work that
        # overlaps with them is 18.9 % slower on average (arXiv 2507.03114).
        contention=0.189,
        # In programs compiled for H100, whole messages overlap with work (docs/record).
        # Compiled programs for TPUs have more and smaller messages than the limits
        # above allow, and no rule for this is known.
        whole_messages=True,
    ),
    "tpu": Calibration(
        half_rate_side=32.0,
        combined_kinds=_COMBINED_KINDS,
        combined_bytes=_COMBINED_BYTES,
        # With this setting, the bytes of reduce-scatters are predicted exactly for
        # tensor-parallel plans on 16 v5e. Without it, the prediction is 1.2 to 1.6
        # times the true bytes (libtpu 0.0.42).
        reassociates=True,
        # In a TPU separate engines do the transfers between chips. No published figure
        # for the slowdown of overlapping work was found.
        overlap=1.0,
    ),
}


Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"
]
"""The kind of a collective. Here and in every cost, the size `nbytes` of a collective
is: `all_reduce`: local input; `all_gather`: result; `reduce_scatter`: input;
`all_to_all` and `collective_permute`: local input. All sizes are bytes of one device.
"""

KINDS: tuple[str, ...] = get_args(Kind)
TOPOLOGIES = ("switch", "ring", "line")
DEVICE_KINDS = ("gpu", "tpu", "cpu")

# If a device has no rate for a dtype, the rate of the first of these dtypes that has
# one is used. XLA widens 8-bit floats to bfloat16 where the hardware has no instruction
# for them, and the two 16-bit floats share the same units on every device in `presets`.
_STAND_INS = {
    "float8": ("float8", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "int4": ("int4", "int8"),
    "uint4": ("int4", "int8"),
    "uint8": ("int8",),
}
# PCIe 3.0 with 16 lanes: half of the rate of PCIe 4.0 (`cluster/devices/a100.toml`).
HOST_BYTES_PER_S = 12.4e9
# Dtypes for which the matrix units of GPUs and TPUs are not used: the units do not
# support them, or are not faster than the vector units (float64 on an A100 and an
# H100).
_VECTOR_ONLY = frozenset(
    {
        "bool", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float64",
        "complex64", "complex128",
    }
)  # fmt: skip


# Largest number of devices of a cluster, and largest value of a rate, a time or a
# number of bytes. Within these limits, products of several values stay finite.
MOST_DEVICES, _LARGEST = 1 << 20, 1e60
_LONGEST_SHOWN = 200


def _require(condition: bool, owner: str, what: str, value: object) -> None:
    if not condition:
        raise ClusterError(f"{owner}: {what}, got {show(value)}.")


def show(value: object) -> str:
    """A value as text for an error message; a long text is cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer with too many digits for Python to write
        text = "a number of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _positive(owner: str, name: str, value: float) -> None:
    good = 1 / _LARGEST <= value <= _LARGEST
    _require(good, owner, f"{name} must be positive and finite", value)


def _not_negative(owner: str, name: str, value: float) -> None:
    good = 0 <= value <= _LARGEST
    _require(good, owner, f"{name} must be zero or positive, and finite", value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """A fit to measured times of a collective in groups of one size.

    The time is ``max(latency_s + s_per_byte * n, large_s_per_byte * n)``, where n is
    the size in bytes, counted as in `Kind`. The second term is for buffers that are
    larger than a cache; it is zero if there is no such effect. `relative_error` is the
    root mean square of ``predicted / measured - 1`` over the fitted points.
    """

    kind: str
    group_size: int
    latency_s: float
    s_per_byte: float
    large_s_per_byte: float = 0.0
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        owner = "CollectiveFit"
        _require(self.kind in KINDS, owner, f"kind must be one of {KINDS}", self.kind)
        enough = self.group_size >= 2
        _require(enough, owner, "group_size must be 2 or more", self.group_size)
        _not_negative(owner, "latency_s", self.latency_s)
        _not_negative(owner, "s_per_byte", self.s_per_byte)
        _not_negative(owner, "large_s_per_byte", self.large_s_per_byte)
        _not_negative(owner, "relative_error", self.relative_error)

    def seconds(self, nbytes: float) -> float:
        """The time of the collective at this size."""
        small_s = self.latency_s + self.s_per_byte * nbytes
        return max(small_s, self.large_s_per_byte * nbytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One class of links between devices, under the alpha-beta model.

    Attributes:
      latency_s: time of an empty message between two neighbours.
      bandwidth_bytes_per_s: bytes per second that one device reaches in collectives
        when it sends through this level in one direction and all other devices send,
        too.
      topology: "switch" (any device sends to any other at full rate), "ring" (a torus
        dimension with wrap-around; each of the two directions has half the bandwidth)
        or "line" (a part of a torus dimension, without wrap-around).
      rates: where times of collectives on the link come from, one of `LINK_RATES`:
        XLA's measurements on a device, or NCCL's latencies on a class of links. "":
        times are computed only from latency and bandwidth.
      measured: fits to measured times, which the cost model uses for these kinds of
        collectives in place of its formulas.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    topology: str = "switch"
    rates: str = ""
    # The hash leaves out this field, because cost functions look up links in caches
    # many thousand times.
    measured: tuple[CollectiveFit, ...] = dataclasses.field(default=(), hash=False)

    def __post_init__(self) -> None:
        """Check the values."""
        _not_negative("LinkSpec", "latency_s", self.latency_s)
        _positive("LinkSpec", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        known = self.topology in TOPOLOGIES
        what = f"topology must be one of {TOPOLOGIES}"
        _require(known, "LinkSpec", what, self.topology)
        what = f"rates must be one of {LINK_RATES}"
        _require(self.rates in LINK_RATES, "LinkSpec", what, self.rates)
        what = "only a switch has rates"
        plain = self.topology == "switch" or not self.rates
        _require(plain, "LinkSpec", what, self.topology)
        cases = [(fit.kind, fit.group_size) for fit in self.measured]
        once = len(set(cases)) == len(cases)
        what = "each (kind, group_size) may be measured once"
        _require(once, "LinkSpec", what, cases)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one simulated CPU device).

    Attributes:
      name: the name of a preset, or any other name.
      kind: "gpu", "tpu" or "cpu".
      peak_flops_per_s: (dtype name, FLOP/s of dense matrix products) pairs; float32 is
        required. The rate of float32 is for XLA's default computation of float32
        operands (TF32 on GPUs since Ampere, one bfloat16 pass on TPUs).
      memory_bytes: memory of the device that a program may use.
      memory_bandwidth_bytes_per_s: bytes read plus bytes written per second in a large
        copy.
      matmul_efficiency: fraction of the peak rate that a large matrix product reaches.
      kernel_latency_s: time of an operator with almost no work.
      vector_flops_per_s: rate of all operators except matrix products; 0 means the
        float32 peak.
      sustained: rate of products within a training step, where the power limit lowers
        the clock, divided by their rate if nothing else runs.
      power_part: power limit of the device as a fraction of the datasheet's power
        limit.
      rates: name of the table of measured matrix products, one of `DEVICE_RATES`; "":
        no table.
      workspace_bytes: workspace of the library for matrix products; None: as on the
        newest devices of this kind (`autopar.cost.live.habits_of`).
      on_chip_bytes: on-chip memory in which the compiler puts buffers: a TPU's vector
        memory; 0 for other devices.
      host_bytes_per_s: bytes per second in each direction between the memories of the
        device and its host, while all devices of the host copy.
      codec_s_per_element: (codec as text, seconds) pairs: how many seconds per element
        encoding and decoding add to the sum of a gradient, as measured.
      calibration: corrections of the cost model; None: the corrections for this kind of
        device.
    """

    name: str
    kind: str
    peak_flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float
    kernel_latency_s: float
    vector_flops_per_s: float = 0.0
    rates: str = ""
    sustained: float = 1.0
    power_part: float = 1.0
    workspace_bytes: int | None = None
    on_chip_bytes: int = 0
    host_bytes_per_s: float = HOST_BYTES_PER_S
    # This field is not hashed, because cost functions look up devices in caches many
    # thousand times.
    codec_s_per_element: tuple[tuple[str, float], ...] = dataclasses.field(
        default=(), hash=False
    )
    calibration: Calibration | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Check the values."""
        owner = f"DeviceSpec {self.name!r}"
        what = f"kind must be one of {DEVICE_KINDS}"
        _require(self.kind in DEVICE_KINDS, owner, what, self.kind)
        dtypes = [dtype for dtype, _ in self.peak_flops_per_s]
        what = "peak_flops_per_s must name each dtype once, float32 among them"
        good = "float32" in dtypes and len(set(dtypes)) == len(dtypes)
        _require(good, owner, what, dtypes)
        for dtype, value in self.peak_flops_per_s:
            _positive(owner, f"peak_flops_per_s of {dtype}", value)
        _positive(owner, "memory_bytes", self.memory_bytes)
        bandwidth = self.memory_bandwidth_bytes_per_s
        _positive(owner, "memory_bandwidth_bytes_per_s", bandwidth)
        part = 0 < self.matmul_efficiency <= 1
        what = "matmul_efficiency must be above 0 and at most 1"
        _require(part, owner, what, self.matmul_efficiency)
        part, what = 0 < self.sustained <= 1, "sustained must be above 0 and at most 1"
        _require(part, owner, what, self.sustained)
        part = 0 < self.power_part <= 1
        what = "power_part must be above 0 and at most 1"
        _require(part, owner, what, self.power_part)
        _not_negative(owner, "kernel_latency_s", self.kernel_latency_s)
        _not_negative(owner, "vector_flops_per_s", self.vector_flops_per_s)
        _not_negative(owner, "workspace_bytes", self.workspace_bytes or 0)
        _not_negative(owner, "on_chip_bytes", self.on_chip_bytes)
        _positive(owner, "host_bytes_per_s", self.host_bytes_per_s)
        what = f"rates must be one of {DEVICE_RATES}"
        _require(self.rates in DEVICE_RATES, owner, what, self.rates)
        texts = [text for text, _ in self.codec_s_per_element]
        what = "codec_s_per_element must name each codec once"
        _require(len(set(texts)) == len(texts), owner, what, texts)
        for text, value in self.codec_s_per_element:
            _not_negative(owner, f"codec_s_per_element of {text}", value)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in `dtype` (a NumPy or ml_dtypes name).

        If ``peak_flops_per_s`` does not list the dtype, the rate of the dtype to which
        it is widened is used. A dtype that no matrix unit supports (`_VECTOR_ONLY`)
        runs on the vector units. If neither applies, the rate of float32 is used.
        """
        peaks = dict(self.peak_flops_per_s)
        family = "float8" if dtype.startswith("float8") else dtype
        for name in (dtype, *_STAND_INS.get(family, ())):
            if name in peaks:
                return peaks[name]
        if dtype in _VECTOR_ONLY:
            return min(self.vector_peak, peaks["float32"])
        return peaks["float32"]

    def at_speed(self, speed: float) -> DeviceSpec:
        """The same device while it computes, and moves its memory, at another speed.

        Args:
          speed: new speed divided by the old speed, above 0.
        """
        _positive(f"DeviceSpec {self.name!r}", "speed", speed)
        peaks = tuple((dtype, x * speed) for dtype, x in self.peak_flops_per_s)
        codecs = tuple((text, x / speed) for text, x in self.codec_s_per_element)
        return dataclasses.replace(
            self,
            peak_flops_per_s=peaks,
            vector_flops_per_s=self.vector_flops_per_s * speed,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * speed,
            host_bytes_per_s=self.host_bytes_per_s * speed,
            kernel_latency_s=self.kernel_latency_s / speed,
            codec_s_per_element=codecs,
        )

    @property
    def corrections(self) -> Calibration:
        """The corrections of the cost model for this device."""
        return self.calibration or CALIBRATIONS[self.kind]

    @property
    def vector_peak(self) -> float:
        """FLOP/s of operators that are not matrix products."""
        return self.vector_flops_per_s or self.peak("float32")

    @property
    def kept_rate(self) -> float:
        """Rate of products within a training step, as a fraction of their rate if
        nothing else runs.

        `sustained` holds for the datasheet's power limit. With a lower limit, the clock
        falls with the cube root of the power: power is proportional to the clock times
        the squared voltage, and voltage is proportional to the clock (Mudge, "Power: A
        First-Class Architectural Design Constraint", IEEE Computer 34(4), 2001).
        """
        return self.sustained * self.power_part ** (1 / 3)

    @property
    def streams(self) -> bool:
        """Whether the compiler can compute an operand of a product while the product
        reads it.

        A TPU's vector unit computes the operand tile by tile, in parallel with the
        matrix unit (`autopar.steps.fusion.made_again`).
        """
        return self.kind == "tpu"

    @property
    def rounds_operands(self) -> bool:
        """Whether matrix products of float32 read operands as bfloat16, so that only
        bfloat16 copies of them are kept in memory.

        XLA's compiler for TPUs rounds operands in this way (`autopar.steps.rounding`).
        """
        return self.kind == "tpu"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """`size` equal parts joined by one class of links, such as hosts in a pod."""

    name: str
    size: int
    link: LinkSpec

    def __post_init__(self) -> None:
        """Check the size."""
        owner, what = f"Level {show(self.name)}", "size must be 1 or more"
        _require(self.size >= 1, owner, what, self.size)
        what = f"size must be at most {MOST_DEVICES}"
        _require(self.size <= MOST_DEVICES, owner, what, self.size)
