"""Clusters as TOML files: strict to read, exact to write."""

import dataclasses
import pathlib
import tomllib
from collections.abc import Sequence
from typing import Any

import msgspec

from autopar.cluster.errors import ClusterError
from autopar.cluster.presets import preset
from autopar.cluster.specs import CollectiveFit, DeviceSpec, Level, LinkSpec

_HELP = "docs/cost-model.md has a complete example."


class _Device(msgspec.Struct, forbid_unknown_fields=True):
    """The table [device]; what is left out comes from `preset`."""

    preset: str | None = None
    name: str | None = None
    kind: str | None = None
    peak_flops_per_s: dict[str, float] | None = None
    memory_bytes: int | float | None = None  # so that 80e9 will do
    memory_bandwidth_bytes_per_s: float | None = None
    matmul_efficiency: float | None = None
    kernel_latency_s: float | None = None
    vector_flops_per_s: float | None = None


class _Measured(msgspec.Struct, forbid_unknown_fields=True):
    """One of [[level.measured]]."""

    kind: str
    group_size: int
    latency_s: float
    s_per_byte: float
    large_s_per_byte: float = 0.0
    relative_error: float = 0.0


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    """One of [[level]], outermost first."""

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    topology: str = "switch"
    measured: list[_Measured] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    device: _Device
    level: list[_Level]


def _device(given: _Device) -> DeviceSpec:
    values: dict[str, Any] = {}
    if given.preset is not None:
        base = preset(given.preset).device
        values = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    own = msgspec.structs.asdict(given)
    del own["preset"]
    values.update({key: value for key, value in own.items() if value is not None})
    if given.memory_bytes is not None:
        values["memory_bytes"] = round(given.memory_bytes)
    if given.peak_flops_per_s is not None:
        values["peak_flops_per_s"] = tuple(given.peak_flops_per_s.items())
    required = [
        f.name
        for f in dataclasses.fields(DeviceSpec)
        if f.default is dataclasses.MISSING and f.name not in values
    ]
    if required:
        raise ClusterError(
            f"[device] lacks {', '.join(required)}: give them, or preset = 'h100'."
        )
    return DeviceSpec(**values)


def _level(given: _Level) -> Level:
    measured = [CollectiveFit(**msgspec.structs.asdict(fit)) for fit in given.measured]
    link = LinkSpec(
        latency_s=given.latency_s,
        bandwidth_bytes_per_s=given.bandwidth_bytes_per_s,
        topology=given.topology,
        measured=tuple(measured),
    )
    return Level(name=given.name, size=given.size, link=link)


def read(path: pathlib.Path) -> tuple[DeviceSpec, tuple[Level, ...]]:
    """The device and the levels of a file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        file = msgspec.convert(tables, _File)
        return _device(file.device), tuple(_level(level) for level in file.level)
    except OSError as error:
        raise ClusterError(
            f"cannot read the cluster file {str(path)!r}: {error.strerror}. {_HELP}"
        ) from error
    except ValueError as error:  # of TOML, of msgspec, and our own ClusterError
        raise ClusterError(f"{path}: {error} {_HELP}") from error


def _value(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is also a TOML basic string.
        return msgspec.json.encode(value).decode()
    return repr(value)


def _lines(values: Any, *leave_out: str) -> list[str]:
    names = [f.name for f in dataclasses.fields(values) if f.name not in leave_out]
    return [f"{name} = {_value(getattr(values, name))}" for name in names]


def _level_lines(level: Level) -> list[str]:
    lines = ["", "[[level]]", *_lines(level, "link"), *_lines(level.link, "measured")]
    for fit in level.link.measured:
        lines += ["", "[[level.measured]]", *_lines(fit)]
    return lines


def write(device: DeviceSpec, levels: Sequence[Level]) -> str:
    """The text of a file that `read` reads back to equal values."""
    lines = ["[device]", *_lines(device, "peak_flops_per_s", "calibration")]
    peaks = [f"{_value(k)} = {_value(v)}" for k, v in device.peak_flops_per_s]
    lines += ["", "[device.peak_flops_per_s]", *peaks]
    for level in levels:
        lines += _level_lines(level)
    return "\n".join(lines) + "\n"
