"""Describes the devices of this process by a saved profile or by a preset."""

import dataclasses
import os
import pathlib
import re
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from autopar.cluster import data, toml
from autopar.cluster.presets import PRESETS, USABLE_MEMORY, Preset
from autopar.cluster.specs import ClusterError, DeviceSpec, Level

PROFILE_VARIABLE = "AUTOPAR_PROFILE"

# Pairs of a lower-case text and a preset. The first text that occurs in
# `jax.Device.device_kind` decides the preset; `$` is the end of `device_kind`.
_KINDS = (
    ("h200", "h200"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("h100", "h100"),
    ("a100-sxm4-40", "a100-40"),
    ("a100", "a100"),
    ("v100", "v100"),
    ("tesla t4", "t4"),
    ("a10g", "a10g"),
    ("l40s", "l40s"),
    ("nvidia l4$", "l4"),
    ("rtx 4090$", "rtx4090"),
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5", "v5p"),
    ("cpu", "cpu"),
)


class Device(Protocol):
    """The attributes of a `jax.Device` that this module reads; type checkers do not
    know that class.
    """

    device_kind: str
    platform: str
    process_index: int

    def memory_stats(self) -> dict[str, Any] | None:
        """Name of a statistic -> bytes; None if the backend has none."""
        ...


def profile_path(device_kind: str, num_devices: int) -> pathlib.Path:
    """The path of the profile with this machine's measurements.

    The path is $AUTOPAR_PROFILE if this variable is set. Otherwise it is a file in the
    user's cache folder, named after the host, the kind of device and the number of
    devices.
    """
    chosen = os.environ.get(PROFILE_VARIABLE)
    if chosen:
        return pathlib.Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    kind = re.sub(r"[^a-z0-9.]+", "_", device_kind.lower())
    name = f"profile-{socket.gethostname()}-{kind}-{num_devices}.toml"
    return pathlib.Path(cache) / "autopar" / name


def take_devices(count: int | Sequence[Device] | None) -> list[Device]:
    """The first ``count`` devices of the JAX backend, all its devices for None, or the
    devices in a list.
    """
    if isinstance(count, Sequence):
        return list(count)
    # JAX is imported here and not at the top, because describing a cluster must not
    # import JAX. So `autopar --help` and planning for another machine are fast and
    # start no backend.
    import jax

    found = jax.devices()
    if count is None:
        return found
    if not 1 <= count <= len(found):
        raise ClusterError(
            f"{count} devices asked for, and JAX has {len(found)} "
            f"({found[0].device_kind}). To simulate more on CPU, call "
            f"jax.config.update('jax_num_cpu_devices', {count}) before JAX starts."
        )
    return found[:count]


def preset_name(device_kind: str) -> str | None:
    """The name of the preset for a `jax.Device.device_kind`; None if there is none."""
    lower = f"{device_kind.lower()}$"
    return next((name for part, name in _KINDS if part in lower), None)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _share_of_cpu(device: DeviceSpec, count: int) -> DeviceSpec:
    """The preset of a CPU core, scaled to the number of this host's cores that each
    simulated device has.
    """
    share = min(1.0, (os.cpu_count() or 1) / count)
    return dataclasses.replace(
        device,
        peak_flops_per_s=tuple((k, v * share) for k, v in device.peak_flops_per_s),
        memory_bytes=round(_host_memory_bytes() * USABLE_MEMORY / count),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * share,
        vector_flops_per_s=device.vector_flops_per_s * share,
    )


def _device(preset: Preset, devices: Sequence[Device]) -> DeviceSpec:
    """The preset's figures of a device, with the memory that the backend reports."""
    if preset.device.kind == "cpu":
        return _share_of_cpu(preset.device, len(devices))
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if not limit:
        return preset.device
    return dataclasses.replace(preset.device, memory_bytes=int(limit))


def level_sizes(devices: Sequence[Device]) -> tuple[int, ...]:
    """(processes, devices per process), or (devices,) if there is only one process."""
    processes = {device.process_index for device in devices}
    if len(processes) == 1 or len(devices) % len(processes):
        return (len(devices),)
    return (len(processes), len(devices) // len(processes))


def from_preset(devices: Sequence[Device]) -> tuple[DeviceSpec, tuple[Level, ...]]:
    """Device and levels for these JAX devices, from the presets."""
    kind = devices[0].device_kind
    name = preset_name(kind)
    if name is None:
        raise ClusterError(
            f"no preset describes the device {kind!r}. Measure it once with "
            "`autopar profile`, or describe it in a TOML file and pass its path."
        )
    preset = PRESETS[name]
    return _device(preset, devices), preset.levels(level_sizes(devices))


def discover(
    count: int | Sequence[Device] | None,
) -> tuple[DeviceSpec, tuple[Level, ...]]:
    """Device and levels for this process's devices, from a profile or else from
    presets.
    """
    devices = take_devices(count)
    path = profile_path(devices[0].device_kind, len(devices))
    if not path.is_file() and not os.environ.get(PROFILE_VARIABLE):
        return from_preset(devices)
    device, levels = toml.read(path, data.read_equal)
    size = 1
    for level in levels:
        size *= level.size
    if size != len(devices):
        raise ClusterError(
            f"the profile {str(path)!r} describes {size} devices, and this process "
            f"uses {len(devices)}. Run `autopar profile` again, or unset "
            f"{PROFILE_VARIABLE}."
        )
    return device, levels
