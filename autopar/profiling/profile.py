"""Measures the devices of this process, and saves what planning needs of them.

The result is a `Cluster` whose numbers are rates attained on this machine with all
devices at work. Simulated CPU devices share the cores, so they are measured as a
training step uses them: together.
"""

import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.cluster import (
    Cluster,
    ClusterError,
    CollectiveFit,
    DeviceSpec,
    Level,
    LinkSpec,
    local,
)
from autopar.cluster.presets import PCIE_LATENCY_S
from autopar.cluster.specs import KINDS
from autopar.cost.collectives import bytes_ratio, collective_s
from autopar.cost.compute import roofline_s
from autopar.profiling import fit, kernels

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The sizes to measure. Those in `check_*` are held out from every fit."""

    dtypes: tuple[str, ...]
    matmul_sizes: tuple[int, ...]
    # Of all devices together; the arrays of each must exceed the largest cache.
    stream_bytes: int
    collective_bytes: tuple[int, ...]
    check_matmul_size: int
    check_bytes: tuple[int, ...]
    rounds: int = 5


CPU_SETTINGS = Settings(
    dtypes=("float32", "bfloat16", "float16"),
    matmul_sizes=(96, 192, 384, 640),
    stream_bytes=1 << 29,
    collective_bytes=(1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23),
    check_matmul_size=512,
    check_bytes=(1 << 18, 1 << 22),
)
ACCELERATOR_SETTINGS = Settings(
    dtypes=("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
    matmul_sizes=(512, 1024, 2048, 4096, 8192),
    stream_bytes=1 << 32,
    collective_bytes=(1 << 12, 1 << 18, 1 << 21, 1 << 24, 1 << 27),
    check_matmul_size=3072,
    check_bytes=(1 << 20, 1 << 26),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A program that no fit has seen: what the model says, and what it took."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def relative_error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured cluster, and how far its numbers can be trusted."""

    cluster: Cluster
    checks: tuple[Check, ...]
    elapsed_s: float

    def __str__(self) -> str:
        """A table of the device, the fits and the held-out checks."""
        head = f"{self.cluster}, measured in {self.elapsed_s:.0f} s; per device:"
        fits = [_fit_line(f) for f in self.cluster.levels[-1].link.measured]
        if fits:
            fits.insert(
                0, "collective           group  latency us   GB/s sent rms error"
            )
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
        f"  smallest operator: {device.kernel_latency_s * 1e6:.3g} us",
    ]


def _fit_line(found: CollectiveFit) -> str:
    slope = max(found.s_per_byte, found.large_s_per_byte)
    sent = bytes_ratio(found.kind, found.group_size) / slope / 1e9 if slope else 0.0
    return (
        f"  {found.kind:18s} {found.group_size:4d} {found.latency_s * 1e6:11.1f}"
        f" {sent:11.3g} {found.relative_error:10.0%}"
    )


Key = tuple[str | int, ...]
"""What a program measures, such as ("matmul", "float32", 512)."""


def divisors(number: int) -> tuple[int, ...]:
    """The sizes of groups into which `number` devices divide, without 1."""
    return tuple(k for k in range(2, number + 1) if number % k == 0)


def _matmuls(
    devices: Sequence[Any], settings: Settings, dtype: str, progress: Progress
) -> dict[Key, kernels.TimedLoop]:
    """The products of a dtype, or none where the backend has none."""
    sizes = settings.matmul_sizes
    if dtype == "float32":
        sizes = (*sizes, settings.check_matmul_size)
    try:
        return {("matmul", dtype, n): kernels.matmul(devices, dtype, n) for n in sizes}
    except Exception as error:  # whatever a backend says about a dtype it lacks
        if dtype == "float32":
            raise
        progress(f"no matrix products of {dtype}: {type(error).__name__}")
        return {}


def _programs(
    devices: Sequence[Any], settings: Settings, progress: Progress
) -> dict[Key, kernels.TimedLoop]:
    """Compiles all that is timed, the held-out checks included."""
    found: dict[Key, kernels.TimedLoop] = {}
    for dtype in settings.dtypes:
        progress(f"compiling matrix products of {dtype}")
        found |= _matmuls(devices, settings, dtype, progress)
    found["kernels",] = kernels.kernels(devices)
    found["vector",] = kernels.vector(devices)
    found["stream",] = kernels.stream(devices, _stream_bytes(devices, settings))
    count = len(devices)
    for kind, k in itertools.product(KINDS, divisors(count)):
        progress(f"compiling {kind} in groups of {k}")
        held_out = settings.check_bytes if k == count else ()
        for n in (*settings.collective_bytes, *held_out):
            found[kind, k, n] = kernels.collective(devices, kind, k, n)
    if count > 1:
        size = settings.check_matmul_size
        found["both", size] = kernels.matmul_then_reduce(devices, size)
    return found


def _stream_bytes(devices: Sequence[Any], settings: Settings) -> int:
    """Bytes of one array of one device."""
    return settings.stream_bytes // len(devices) // kernels.STREAM_ARRAYS // 4 * 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The median time of a trip of each program, on all of the devices."""

    devices: Sequence[Any]
    settings: Settings
    seconds: dict[Key, float]

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of one device in large products."""
        sizes = self.settings.matmul_sizes
        flops = [2.0 * n**3 for n in sizes]
        times_s = [self.seconds["matmul", dtype, n] for n in sizes]
        _, slope = fit.fit_line(flops, times_s)
        return fit.round_off(1 / slope if slope else flops[-1] / times_s[-1])

    def collective(self, kind: str, group_size: int) -> CollectiveFit:
        """The fit of a collective."""
        sizes = self.settings.collective_bytes
        points = [(float(n), self.seconds[kind, group_size, n]) for n in sizes]
        return fit.fit_collective(kind, group_size, points)


def _device(times: _Times, memory_bytes: int) -> DeviceSpec:
    """All of a device but its links."""
    dtypes = [
        k for k in times.settings.dtypes if any(k in key for key in times.seconds)
    ]
    # The cost model knows all 8-bit floats by one name.
    names = ["float8" if "float8" in dtype else dtype for dtype in dtypes]
    rates = [times.matmul_rate(dtype) for dtype in dtypes]
    vector_flops = 2.0 * kernels.VECTOR_STEPS * kernels.VECTOR_SIZE
    traffic = kernels.STREAM_ARRAYS * _stream_bytes(times.devices, times.settings)
    kernel_s = times.seconds["kernels",] / kernels.KERNELS
    first = times.devices[0]
    return DeviceSpec(
        name=f"{'-'.join(first.device_kind.lower().split())}-measured",
        kind=first.platform if first.platform in ("cpu", "tpu") else "gpu",
        peak_flops_per_s=tuple(zip(names, rates, strict=True)),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=fit.round_off(traffic / times.seconds["stream",]),
        matmul_efficiency=1.0,  # the peaks are attained rates
        kernel_latency_s=fit.round_off(kernel_s),
        vector_flops_per_s=fit.round_off(vector_flops / times.seconds["vector",]),
    )


def _link(times: _Times, kept: LinkSpec) -> LinkSpec:
    """Every collective in groups of every size; of one device, the link `kept`."""
    count = len(times.devices)
    if count == 1:
        return kept
    cases = itertools.product(KINDS, divisors(count))
    fits = tuple(times.collective(kind, k) for kind, k in cases)
    # The plain numbers serve whoever looks at no kind in particular.
    whole = next(f for f in fits if f.kind == "all_gather" and f.group_size == count)
    slope = max(whole.s_per_byte, whole.large_s_per_byte)
    bandwidth = bytes_ratio("all_gather", count) / slope if slope else 0.0
    return LinkSpec(
        latency_s=fit.round_off(whole.latency_s / (count - 1)),
        bandwidth_bytes_per_s=fit.round_off(bandwidth or kept.bandwidth_bytes_per_s),
        measured=fits,
    )


def _predictions(cluster: Cluster, settings: Settings) -> dict[Key, float]:
    """The times that the cost model gives the held-out programs."""
    axis = cluster.default_mesh().axes
    count, size = cluster.num_devices, settings.check_matmul_size
    flops, nbytes = 2.0 * size**3, 3.0 * 4 * size**2
    device = cluster.device
    product_s = roofline_s(flops, nbytes, "float32", device, is_matrix=True)
    matmul_s = device.kernel_latency_s + float(product_s)
    found: dict[Key, float] = {("matmul", "float32", size): matmul_s}
    if count > 1:
        for kind, n in itertools.product(KINDS, settings.check_bytes):
            found[kind, count, n] = collective_s(kind, n, axis)
        reduce_s = collective_s("all_reduce", 4.0 * size**2, axis)
        found["both", size] = matmul_s + reduce_s
    return found


def _known(devices: Sequence[Any]) -> tuple[int, LinkSpec]:
    """Memory of a device, and the link that no measurement replaces."""
    if local.preset_name(devices[0].device_kind) is not None:
        device, levels = local.from_preset(devices)
        return device.memory_bytes, levels[-1].link
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ClusterError(
            f"the device {devices[0].device_kind!r} does not say how much memory it "
            "has: describe it in a TOML file (docs/cost-model.md has an example)."
        )
    # PCIe 4.0 x16, for lack of knowledge.
    link = LinkSpec(latency_s=PCIE_LATENCY_S, bandwidth_bytes_per_s=25e9)
    return int(stats["bytes_limit"]), link


def run(
    devices: int | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> Profile:
    """Measures the devices of this process, and checks the result on new programs.

    Args:
      devices: measure the first so many devices; all of them by default.
      progress: is given a line of text for each step.
      settings: sizes and rounds; those of the backend by default.

    Raises:
      ClusterError: if the devices span several processes.
    """
    start = time.perf_counter()
    taken: Sequence[Any] = local.take_devices(devices)
    if len({device.process_index for device in taken}) > 1:
        raise ClusterError(
            "profile: the devices span several processes. Profile one process, and "
            "describe the network between hosts in the saved TOML file."
        )
    default = CPU_SETTINGS if taken[0].platform == "cpu" else ACCELERATOR_SETTINGS
    chosen, say = settings or default, progress or (lambda _: None)
    memory_bytes, kept = _known(taken)
    programs = _programs(taken, chosen, say)
    say(f"timing {len(programs)} programs in {chosen.rounds} rounds")
    times_s = kernels.trip_times_s(list(programs.values()), chosen.rounds)
    seconds = dict(zip(programs, times_s, strict=True))
    times = _Times(devices=taken, settings=chosen, seconds=seconds)
    level = Level(name="device", size=len(taken), link=_link(times, kept))
    cluster = Cluster(device=_device(times, memory_bytes), levels=(level,))
    checks = [
        Check(name=programs[key].name, predicted_s=value, measured_s=seconds[key])
        for key, value in _predictions(cluster, chosen).items()
    ]
    elapsed_s = time.perf_counter() - start
    return Profile(cluster=cluster, checks=tuple(checks), elapsed_s=elapsed_s)


def measure(devices: int | None = None, progress: Progress | None = None) -> Cluster:
    """The devices of this process as measured; `run` also says how well it fits."""
    return run(devices, progress).cluster


def save(cluster: Cluster, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Writes a measured cluster where `Cluster.local` finds it, or to `path`."""
    if path is None:
        kind = local.take_devices(None)[0].device_kind
        path = local.profile_path(kind, cluster.num_devices)
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(cluster.to_toml(), encoding="utf-8")
    return target
