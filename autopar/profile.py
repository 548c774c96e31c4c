"""Measures the devices of this process, and saves what planning needs of them.

The result is a `Cluster` whose numbers are rates attained on this machine with all
devices at work. Simulated CPU devices share the cores, so they are measured as a
training step uses them: together.
"""

import dataclasses
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
    MeshAxis,
    benchmarks,
    fit,
    local,
)
from autopar.cluster.presets import PCIE_LATENCY_S
from autopar.cluster.specs import KINDS
from autopar.cost.collectives import bytes_ratio, collective_s
from autopar.cost.compute import op_s

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured. The sizes in `check_*` are held out from every fit."""

    dtypes: tuple[str, ...]
    matmul_sizes: tuple[int, ...]
    stream_bytes: int
    collective_bytes: tuple[int, ...]
    check_matmul_size: int
    check_bytes: tuple[int, ...]
    rounds: int = 5


CPU_SETTINGS = Settings(
    dtypes=("float32", "bfloat16", "float16"),
    matmul_sizes=(96, 192, 384, 768),
    stream_bytes=1 << 24,
    collective_bytes=(1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23),
    check_matmul_size=512,
    check_bytes=(1 << 18, 1 << 22),
)
ACCELERATOR_SETTINGS = Settings(
    dtypes=("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
    matmul_sizes=(512, 1024, 2048, 4096, 8192),
    stream_bytes=1 << 29,
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """The devices, the settings, and where to say what is going on."""

    devices: Sequence[Any]
    settings: Settings
    progress: Progress

    def times_s(self, programs: Sequence[benchmarks.Program]) -> list[float]:
        return benchmarks.trip_times_s(programs, self.settings.rounds)


def _matmul_rate(bench: _Bench, dtype: str) -> float | None:
    """FLOP/s per device of large products, or None if the backend has none."""
    sizes = bench.settings.matmul_sizes
    try:
        programs = [benchmarks.matmul(bench.devices, dtype, n) for n in sizes]
    except Exception as error:  # whatever a backend says about a dtype it lacks
        if dtype == "float32":
            raise
        bench.progress(f"matmul {dtype}: not supported here ({type(error).__name__})")
        return None
    times_s = bench.times_s(programs)
    latency_s, slope = fit.fit_line([2.0 * n**3 for n in sizes], times_s)
    rate = fit.round_off(1 / slope) if slope else 2.0 * sizes[-1] ** 3 / times_s[-1]
    bench.progress(
        f"matmul {dtype}: {rate / 1e9:.4g} GFLOP/s + {latency_s * 1e6:.3g} us"
    )
    return rate


def _measure_device(bench: _Bench, memory_bytes: int) -> DeviceSpec:
    """All of a device but its links."""
    found = [(dtype, _matmul_rate(bench, dtype)) for dtype in bench.settings.dtypes]
    # The cost model knows all 8-bit floats by one name.
    peaks = [("float8" if "float8" in k else k, v) for k, v in found if v]
    make = (benchmarks.kernels, benchmarks.vector)
    programs = [program(bench.devices) for program in make]
    nbytes = bench.settings.stream_bytes
    programs.append(benchmarks.stream(bench.devices, nbytes))
    kernels_s, vector_s, stream_s = bench.times_s(programs)
    flops = 2.0 * benchmarks.VECTOR_STEPS * benchmarks.VECTOR_SIZE
    bench.progress(f"memory: {2 * nbytes / stream_s / 1e9:.4g} GB/s")
    platform = bench.devices[0].platform
    return DeviceSpec(
        name=f"{_plain(bench.devices[0].device_kind)}-measured",
        kind=platform if platform in ("cpu", "tpu") else "gpu",
        peak_flops_per_s=tuple(peaks),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=fit.round_off(2 * nbytes / stream_s),
        matmul_efficiency=1.0,  # the peaks are attained rates
        kernel_latency_s=fit.round_off(kernels_s / benchmarks.KERNELS),
        vector_flops_per_s=fit.round_off(flops / vector_s),
    )


def _plain(name: str) -> str:
    return "-".join(name.lower().split())


def divisors(number: int) -> tuple[int, ...]:
    """The sizes of groups into which `number` devices divide, without 1."""
    return tuple(k for k in range(2, number + 1) if number % k == 0)


def _fit_kind(bench: _Bench, kind: str, group_size: int) -> CollectiveFit:
    sizes = bench.settings.collective_bytes
    programs = [
        benchmarks.collective(bench.devices, kind, group_size, n) for n in sizes
    ]
    points = list(zip(map(float, sizes), bench.times_s(programs), strict=True))
    found = fit.fit_collective(kind, group_size, points)
    bench.progress(_fit_line(found).strip())
    return found


def _measure_link(bench: _Bench, kept: LinkSpec) -> LinkSpec:
    """Every collective in groups of every size; of one device, the link `kept`."""
    count = len(bench.devices)
    if count == 1:
        return kept
    cases = [(kind, k) for kind in KINDS for k in divisors(count)]
    fits = [_fit_kind(bench, kind, k) for kind, k in cases]
    # The plain numbers serve whoever looks at no kind in particular.
    whole = next(f for f in fits if f.kind == "all_gather" and f.group_size == count)
    slope = max(whole.s_per_byte, whole.large_s_per_byte)
    bandwidth = bytes_ratio("all_gather", count) / slope if slope else 0.0
    return LinkSpec(
        latency_s=fit.round_off(whole.latency_s / (count - 1)),
        bandwidth_bytes_per_s=fit.round_off(bandwidth or kept.bandwidth_bytes_per_s),
        measured=tuple(fits),
    )


def _predictions(
    bench: _Bench, cluster: Cluster
) -> list[tuple[benchmarks.Program, float]]:
    """Held-out programs with the times the cost model gives them."""
    device, link, count = cluster.device, cluster.levels[-1].link, len(bench.devices)
    size = bench.settings.check_matmul_size
    flops, nbytes = 2.0 * size**3, 3.0 * 4 * size**2
    matmul_s = op_s(flops, nbytes, "float32", device, is_matmul=True)
    found = [(benchmarks.matmul(bench.devices, "float32", size), matmul_s)]
    for kind in KINDS if count > 1 else ():
        for n in bench.settings.check_bytes:
            axis = MeshAxis(name="all", size=count, link=link, level=0)
            program = benchmarks.collective(bench.devices, kind, count, n)
            found.append((program, collective_s(kind, n, [axis])))
    if count > 1:
        axis = MeshAxis(name="all", size=count, link=link, level=0)
        both_s = matmul_s + collective_s("all_reduce", 4.0 * size**2, [axis])
        found.append((benchmarks.matmul_then_reduce(bench.devices, size), both_s))
    return found


def _check(bench: _Bench, cluster: Cluster) -> tuple[Check, ...]:
    programs, predicted = zip(*_predictions(bench, cluster), strict=True)
    measured = bench.times_s(programs)
    return tuple(
        Check(name=program.name, predicted_s=p, measured_s=m)
        for program, p, m in zip(programs, predicted, measured, strict=True)
    )


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
      progress: is given a line of text for each thing measured.
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
    bench = _Bench(
        devices=taken,
        settings=settings or default,
        progress=progress or (lambda _: None),
    )
    memory_bytes, kept = _known(taken)
    device = _measure_device(bench, memory_bytes)
    link = _measure_link(bench, kept)
    level = Level(name="device", size=len(taken), link=link)
    cluster = Cluster(device=device, levels=(level,))
    checks = _check(bench, cluster)
    elapsed_s = time.perf_counter() - start
    return Profile(cluster=cluster, checks=checks, elapsed_s=elapsed_s)


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
