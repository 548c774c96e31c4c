"""Measures devices and their links, and saves the figures for the planner.

The result is a `Cluster` with the rates that this machine reaches while all devices
work. CPU devices that are simulated share the processor cores. So simulated devices are
measured together, as a training step uses them. Several processes measure together,
too. The links between processes are then a level of the cluster, and are timed.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autopar.cluster import (
    Cluster,
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Level,
    LinkSpec,
    local,
)
from autopar.cluster.presets import PCIE_LATENCY_S, preset
from autopar.cluster.specs import KINDS
from autopar.cost.collectives import bytes_ratio, collective_s
from autopar.cost.compute import roofline_s
from autopar.profiling import kernels
from autopar.units import seconds_text
from autopar.whole_files import export_whole

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """The sizes to measure. The fields ``check_*`` are only used to test predictions,
    not for fits.
    """

    dtypes: tuple[str, ...]
    matmul_sizes: tuple[int, ...]
    # Bytes of the arrays of all devices together. The arrays of each device must be
    # larger than the largest cache.
    stream_bytes: int
    # On slow links, the largest of these are not timed (`kernels.LONG_S`).
    collective_bytes: tuple[int, ...]
    check_matmul_size: int
    check_bytes: tuple[int, ...]
    # Elements of the gradient that each codec sends on each device; 0: no codec is
    # timed.
    codec_elements: int = 0
    # The codecs to time; None: the result of `kernels.timed_codecs`.
    codecs: tuple[str, ...] | None = None
    rounds: int = 5


CPU_SETTINGS = ProfileSizes(
    dtypes=("float32", "bfloat16", "float16"),
    matmul_sizes=(96, 192, 384, 640),
    stream_bytes=1 << 29,
    collective_bytes=(1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23),
    check_matmul_size=512,
    check_bytes=(1 << 18, 1 << 22),
    codec_elements=1 << 20,
)
ACCELERATOR_SETTINGS = ProfileSizes(
    dtypes=("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
    matmul_sizes=(512, 1024, 2048, 4096, 8192),
    stream_bytes=1 << 32,
    collective_bytes=(1 << 12, 1 << 18, 1 << 21, 1 << 24, 1 << 27),
    check_matmul_size=3072,
    check_bytes=(1 << 20, 1 << 26),
    codec_elements=1 << 24,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The predicted and the measured seconds of a program not used for fits."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def relative_error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured cluster, with the errors of the predictions that its figures give."""

    cluster: Cluster
    checks: tuple[Check, ...]
    elapsed_s: float

    def __str__(self) -> str:
        """A table of the device, of the fits, and of the tests of predictions."""
        head = f"{self.cluster}, measured in {self.elapsed_s:.0f} s; per device:"
        fits: list[str] = []
        for level in self.cluster.levels:
            if level.link.measured:
                fits.append(f"{_among(level.name):21s}group  latency us   GB/s sent"
                            " rms error")  # fmt: skip
                fits += [_fit_line(f) for f in level.link.measured]
        checks = [f"{'held out':34s} predicted us measured us    error"]
        checks += [
            f"  {c.name:33s} {c.predicted_s * 1e6:11.1f} {c.measured_s * 1e6:11.1f}"
            f" {c.relative_error:+8.0%}"
            for c in self.checks
        ]
        return "\n".join([head, *_device_lines(self.cluster.device), *fits, *checks])


def _device_lines(device: DeviceSpec) -> list[str]:
    peaks = [f"{k} {v / 1e9:.4g} GFLOP/s" for k, v in device.peak_flops_per_s]
    return [
        f"  matrix products: {', '.join(peaks)}",
        f"  vector operators: {device.vector_peak / 1e9:.4g} GFLOP/s",
        f"  memory: {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s",
        f"  smallest operator: {seconds_text(device.kernel_latency_s)}",
        *(
            f"  codec {text}: {1e9 * s:.3g} ns an element"
            for text, s in device.codec_s_per_element
        ),
    ]


def _among(level: str) -> str:
    """The heading for the fits of the links of a level."""
    return f"collective of {level}s"


def _fit_line(found: CollectiveFit) -> str:
    slope = max(found.s_per_byte, found.large_s_per_byte)
    sent = bytes_ratio(found.kind, found.group_size) / slope / 1e9 if slope else 0.0
    return (
        f"  {found.kind:18s} {found.group_size:4d} {found.latency_s * 1e6:11.1f}"
        f" {sent:11.3g} {found.relative_error:10.0%}"
    )


Key = tuple[str | int, ...]
"""The key of a measurement, such as ("matmul", "float32", 512)."""


def divisors(number: int) -> tuple[int, ...]:
    """All group sizes above 1 that divide ``number`` devices evenly."""
    return tuple(k for k in range(2, number + 1) if number % k == 0)


def _matmuls(
    devices: Sequence[Any], settings: ProfileSizes, dtype: str, progress: Progress
) -> dict[Key, kernels.TimedLoop]:
    """The programs with products of a dtype; none if the backend does not support the
    dtype.
    """
    sizes = settings.matmul_sizes
    if dtype == "float32":
        sizes = (*sizes, settings.check_matmul_size)
    try:
        return {("matmul", dtype, n): kernels.matmul(devices, dtype, n) for n in sizes}
    except Exception as error:  # the error depends on the backend
        if dtype == "float32":
            raise
        progress(f"no matrix products of {dtype}: {type(error).__name__}")
        return {}


def _programs(
    devices: Sequence[Any], settings: ProfileSizes, neighbours: int, progress: Progress
) -> dict[Key, kernels.TimedLoop]:
    """Compiles all programs to time, including those that only test predictions.

    ``neighbours`` is the number of devices on one machine.
    """
    found: dict[Key, kernels.TimedLoop] = {}
    for dtype in settings.dtypes:
        progress(f"compiling matrix products of {dtype}")
        found |= _matmuls(devices, settings, dtype, progress)
    found["kernels",] = kernels.tiny_products(devices)
    found["vector",] = kernels.vector(devices)
    found["stream",] = kernels.stream(devices, _stream_bytes(neighbours, settings))
    sizes = local.level_sizes(devices)
    for level, size in enumerate(sizes):
        ordered = _along(devices, sizes, level)
        for kind, k in itertools.product(KINDS, divisors(size)):
            progress(f"compiling {kind} in groups of {k}")
            held_out = settings.check_bytes if k == size else ()
            for n in (*settings.collective_bytes, *held_out):
                program = kernels.collective(ordered, kind, k, n)
                found[kind, level, k, n] = dataclasses.replace(
                    program, series=f"{kind} {level} {k}", nbytes=n
                )
    if len(devices) > 1:
        size = settings.check_matmul_size
        found["both", size] = kernels.matmul_then_reduce(devices, size)
    if settings.codec_elements:
        found["codec", ""] = kernels.plain_loop(devices, settings.codec_elements)
        texts = settings.codecs
        if texts is None:
            texts = kernels.timed_codecs(settings.codec_elements)
        for text in texts:
            progress(f"compiling codec {text}")
            found["codec", text] = kernels.codec_loop(
                devices, text, settings.codec_elements
            )
    return found


def _along(devices: Sequence[Any], sizes: Sequence[int], level: int) -> list[Any]:
    """Orders the devices such that devices of a group along a level are adjacent."""
    grid = np.array(devices, dtype=object).reshape(sizes)
    return list(np.moveaxis(grid, level, -1).reshape(-1))


def _stream_bytes(neighbours: int, settings: ProfileSizes) -> int:
    """Bytes of an array on one device, if ``neighbours`` devices share a memory."""
    return settings.stream_bytes // neighbours // kernels.STREAM_ARRAYS // 4 * 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The median seconds of a trip of each program."""

    devices: Sequence[Any]
    settings: ProfileSizes
    neighbours: int
    seconds: dict[Key, float]
    # Bytes of an array -> seconds in which every device receives such an array from the
    # previous process.
    transfer_s: dict[int, float]

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of one device in large matrix products."""
        sizes = self.settings.matmul_sizes
        flops = [2.0 * n**3 for n in sizes]
        times_s = [self.seconds["matmul", dtype, n] for n in sizes]
        _, slope = kernels.fit_line(flops, times_s)
        return kernels.round_off(1 / slope if slope else flops[-1] / times_s[-1])

    def collective(self, kind: str, level: int, group_size: int) -> CollectiveFit:
        """The fit to the measured times of a collective."""
        keys = [(kind, level, group_size, n) for n in self.settings.collective_bytes]
        points = [(float(k[-1]), self.seconds[k]) for k in keys if k in self.seconds]
        return kernels.fit_collective(kind, group_size, points)

    def codecs(self) -> tuple[tuple[str, float], ...]:
        """(codec, seconds) pairs: by how much longer an element takes with the codec
        than in a plain sum.
        """
        elements = kernels.timed_elements(self.settings.codec_elements)
        plain_s = self.seconds.get(("codec", ""), 0.0)
        return tuple(
            (str(key[1]), kernels.round_off(max(0.0, seconds - plain_s) / elements))
            for key, seconds in self.seconds.items()
            if key[0] == "codec" and key[1]
        )


def _device(times: _Times, memory_bytes: int) -> DeviceSpec:
    """Computes the figures of a device, without its links."""
    dtypes = [
        k for k in times.settings.dtypes if any(k in key for key in times.seconds)
    ]
    # The cost model uses one name for all 8-bit floats.
    names = ["float8" if "float8" in dtype else dtype for dtype in dtypes]
    rates = [times.matmul_rate(dtype) for dtype in dtypes]
    vector_flops = 2.0 * kernels.VECTOR_STEPS * kernels.VECTOR_SIZE
    traffic = kernels.STREAM_ARRAYS * _stream_bytes(times.neighbours, times.settings)
    kernel_s = times.seconds["kernels",] / kernels.KERNELS
    first = times.devices[0]
    known = local.preset_name(first.device_kind)
    return DeviceSpec(
        name=f"{'-'.join(first.device_kind.lower().split())}-measured",
        kind=first.platform if first.platform in ("cpu", "tpu") else "gpu",
        peak_flops_per_s=tuple(zip(names, rates, strict=True)),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=kernels.round_off(
            traffic / times.seconds["stream",]
        ),
        matmul_efficiency=1.0,  # the peaks are attained rates
        kernel_latency_s=kernels.round_off(kernel_s),
        vector_flops_per_s=kernels.round_off(vector_flops / times.seconds["vector",]),
        # The workspace is a setting of the compiler, which measured times do not show.
        workspace_bytes=None if known is None else preset(known).device.workspace_bytes,
        on_chip_bytes=0 if known is None else preset(known).device.on_chip_bytes,
        codec_s_per_element=times.codecs(),
    )


def _level(times: _Times, index: int, kept: Level) -> Level:
    """A level with the link's measured fits, one for every collective and group size.

    A level with only one part needs no link between parts, so its link stays as it is.
    """
    count = kept.size
    if count == 1:
        return kept
    cases = itertools.product(KINDS, divisors(count))
    fits = tuple(times.collective(kind, index, k) for kind, k in cases)
    latency_s, slope = _plain(times, index, fits, count)
    bandwidth = 1 / slope if slope else kept.link.bandwidth_bytes_per_s
    link = LinkSpec(
        latency_s=kernels.round_off(latency_s),
        bandwidth_bytes_per_s=kernels.round_off(bandwidth),
        measured=fits,
    )
    return dataclasses.replace(kept, link=link)


def _plain(
    times: _Times, index: int, fits: Sequence[CollectiveFit], count: int
) -> tuple[float, float]:
    """Latency and seconds per byte of a link, for messages that are not collectives.

    For links between processes, both come from timed transfers between processes if
    there are any, and otherwise from all-gathers.
    """
    if index == 0 and times.transfer_s:
        sizes = [n for n in times.settings.collective_bytes if n in times.transfer_s]
        points = [times.transfer_s[n] for n in sizes]
        latency_s, slope = kernels.fit_line(sizes, points)
        return latency_s, slope or points[-1] / sizes[-1]
    whole = next(f for f in fits if f.kind == "all_gather" and f.group_size == count)
    slope = max(whole.s_per_byte, whole.large_s_per_byte)
    return whole.latency_s / (count - 1), slope / bytes_ratio("all_gather", count)


def _predictions(cluster: Cluster, settings: ProfileSizes) -> dict[Key, float]:
    """What the cost model predicts for the programs that test predictions, in
    seconds.
    """
    axes = cluster.default_mesh().axes
    size = settings.check_matmul_size
    flops, nbytes = 2.0 * size**3, 3.0 * 4 * size**2
    device = cluster.device
    product_s = roofline_s(flops, nbytes, "float32", device, is_matrix=True)
    matmul_s = device.kernel_latency_s + float(product_s)
    found: dict[Key, float] = {("matmul", "float32", size): matmul_s}
    if cluster.num_devices > 1:
        for axis, kind, n in itertools.product(axes, KINDS, settings.check_bytes):
            found[kind, axis.level, axis.size, n] = collective_s(kind, n, (axis,))
        reduce_s = collective_s("all_reduce", 4.0 * size**2, axes)
        found["both", size] = matmul_s + reduce_s
    return found


def _known_parts(
    devices: Sequence[Any], neighbours: Sequence[Any]
) -> tuple[int, tuple[Level, ...]]:
    """Memory of a device; and the levels, with the links to use if they are not
    measured.

    Args:
      devices: the measured devices.
      neighbours: those of the measured devices that are on this machine.
    """
    mine = [d for d in devices if d.process_index == neighbours[0].process_index]
    if local.preset_name(devices[0].device_kind) is not None:
        device, _ = local.from_preset(neighbours)
        return device.memory_bytes, local.from_preset(devices)[1]
    stats = mine[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ClusterError(
            f"the device {devices[0].device_kind!r} does not say how much memory it "
            "has: describe it in a TOML file (docs/cost-model.md has an example)."
        )
    # The kind of link is not known; PCIe 4.0 x16 is assumed.
    link = LinkSpec(latency_s=PCIE_LATENCY_S, bandwidth_bytes_per_s=25e9)
    sizes = local.level_sizes(devices)
    names = ("host", "device")[-len(sizes) :]
    levels = [
        Level(name=n, size=s, link=link) for n, s in zip(names, sizes, strict=True)
    ]
    return int(stats["bytes_limit"]), tuple(levels)


def run(
    devices: int | None = None,
    progress: Progress | None = None,
    settings: ProfileSizes | None = None,
) -> Profile:
    """Measures the devices, and tests predictions from the result on other programs.

    All processes of a `jax.distributed` job must call this function. All processes get
    the same result. Each measured time is that of the slowest process.

    Args:
      devices: how many of the devices to measure, beginning with the first; default:
        all.
      progress: called with a line of text at each step of the measurement.
      settings: sizes to measure, and number of rounds; default: those for the backend.

    Raises:
      ClusterError: there are several processes, and ``devices`` leaves out some of
        their devices; or they have different numbers of devices.
    """
    start = time.perf_counter()
    taken: Sequence[Any] = local.take_devices(devices)
    _check(taken)
    default = CPU_SETTINGS if taken[0].platform == "cpu" else ACCELERATOR_SETTINGS
    chosen, say = settings or default, progress or (lambda _: None)
    neighbours = kernels.on_this_machine(taken)
    memory_bytes, kept = _known_parts(taken, neighbours)
    programs = _programs(taken, chosen, len(neighbours), say)
    say(f"timing {len(programs)} programs in {chosen.rounds} rounds")
    times_s = kernels.trip_times_s(list(programs.values()), chosen.rounds)
    timed = zip(programs, times_s, strict=True)
    seconds = {key: found for key, found in timed if found is not None}
    times = _Times(
        devices=taken,
        settings=chosen,
        neighbours=len(neighbours),
        seconds=seconds,
        transfer_s=_transfers(chosen, say),
    )
    levels = tuple(_level(times, k, level) for k, level in enumerate(kept))
    cluster = Cluster(device=_device(times, memory_bytes), levels=levels)
    checks = [
        Check(name=programs[key].name, predicted_s=value, measured_s=seconds[key])
        for key, value in _predictions(cluster, chosen).items()
        if key in seconds
    ]
    if times.transfer_s:
        checks += _transfer_checks(times, cluster.levels[0].link)
    elapsed_s = time.perf_counter() - start
    return Profile(cluster=cluster, checks=tuple(checks), elapsed_s=elapsed_s)


def _transfers(settings: ProfileSizes, say: Progress) -> dict[int, float]:
    """Times the transfers between processes that pipeline stages use."""
    if jax.process_count() == 1:
        return {}
    say("timing transfers between processes")
    sizes = (*settings.collective_bytes, *settings.check_bytes)
    found = kernels.seconds(sizes, settings.rounds)
    if not found:
        say("no transfers between processes on this backend: an all-gather stands in")
    return found


def _transfer_checks(times: _Times, link: LinkSpec) -> list[Check]:
    """Measured transfers that were not used for fits, with predictions from latency and
    bandwidth of the link.
    """
    return [
        Check(
            name=kernels.transfer_name(n),
            predicted_s=link.latency_s + n / link.bandwidth_bytes_per_s,
            measured_s=times.transfer_s[n],
        )
        for n in times.settings.check_bytes
        if n in times.transfer_s
    ]


def _check(devices: Sequence[Any]) -> None:
    """Checks that no process has other devices than these, and that all processes have
    equally many.
    """
    counts = collections.Counter(d.process_index for d in devices)
    if len(counts) == 1 and jax.process_count() == 1:
        return
    if len(devices) < jax.device_count():
        raise ClusterError(
            f"profile: {len(devices)} of the {jax.device_count()} devices of "
            f"{jax.process_count()} processes are asked for. Profile all of them, or "
            "start fewer processes."
        )
    if len(set(counts.values())) > 1:
        raise ClusterError(
            "profile: the processes have different numbers of devices "
            f"({', '.join(map(str, counts.values()))}). Profile each kind of host by "
            "itself, and join them as groups in a TOML file."
        )


def measure(devices: int | None = None, progress: Progress | None = None) -> Cluster:
    """Measures this process's devices. `run` also returns the errors of predictions."""
    return run(devices, progress).cluster


def save(cluster: Cluster, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Writes a measured cluster to ``path``, by default where `Cluster.local` reads."""
    if path is None:
        kind = local.take_devices(None)[0].device_kind
        path = local.profile_path(kind, cluster.num_devices)
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes of a machine may write the same file at the same time.
    export_whole(target, cluster.to_toml().encode())
    return target
