"""Reads and writes clusters as short texts, such as ``8x8:h100,network=100Gb/s``."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from autopar.cluster.presets import DEFAULT_PRESET, Preset, preset
from autopar.cluster.specs import ClusterError, DeviceSpec, Level, show

EXAMPLE = "Example: Cluster.parse('8x8:h100,memory=40GB')."

# A finite value that is larger than any field allows. It stands for larger values,
# which could not be rounded.
_MOST = 1e99
_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{k}B": v for k, v in (_SCALE | _BINARY).items()}
_UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes per second": {
        **{f"{k}/s": v for k, v in _BYTES.items()},
        **{f"{k}b/s": v / 8 for k, v in _SCALE.items()},
    },
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "a part of 1": {"": 1.0},
    "watts": {"W": 1.0, "kW": 1e3},
}
_EXAMPLES = {
    "bytes": "40GB",
    "bytes per second": "100Gb/s",
    "seconds": "10us",
    "a part of 1": "0.5",
    "watts": "500W",
}


def parse_quantity(text: str, unit: str) -> float:
    """The number in ``text`` in SI units; a lower-case b stands for bits.

    >>> parse_quantity("100Gb/s", "bytes per second")
    12500000000.0
    """
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]*)", text.strip())
    scales = _UNITS[unit]
    if match and match[2] in scales and match[1].count(".") <= 1 and match[1] != ".":
        # If a value is not a number or has too many digits, the later check of the
        # field refuses it.
        return min(float(match[1]) * scales[match[2]], _MOST)
    known = ", ".join(name for name in scales if name)
    raise ClusterError(
        f"{show(text)} is not a number of {unit}: write one such as "
        f"{_EXAMPLES[unit]!r}" + (f" (units: {known})." if known else ".")
    )


def format_quantity(value: float, unit: str) -> str:
    """The shortest text from which `parse_quantity` reads exactly this value.

    Speeds of networks are in bits per second, as is usual.

    >>> format_quantity(40_000_000_000, "bytes")
    '40GB'
    >>> format_quantity(10_000_000_000, "bytes per second")
    '80Gb/s'
    """
    written = [
        f"{value / scale:.17g}".removesuffix(".0") + name
        for name, scale in _UNITS[unit].items()
    ]
    short = [f"{value / scale:g}{name}" for name, scale in _UNITS[unit].items()]
    exact = [text for text in short + written if parse_quantity(text, unit) == value]
    # For a whole number with more digits than a float, no text is exact.
    return min(exact or written, key=lambda text: (not text.endswith("b/s"), len(text)))


@dataclasses.dataclass(frozen=True, slots=True)
class _DeviceOption:
    """An option ``key=value`` of a cluster's text: its unit, and functions that read it
    from a cluster and apply it.
    """

    unit: str
    read: Callable[[Preset], float]
    apply: Callable[[Preset, float], Preset]


def _on_device(
    name: str, make: Callable[[float], float] = float
) -> tuple[Callable[[Preset], float], Callable[[Preset, float], Preset]]:
    def read(of: Preset) -> float:
        return getattr(of.device, name)

    def apply(of: Preset, value: float) -> Preset:
        device = dataclasses.replace(of.device, **{name: make(value)})
        return dataclasses.replace(of, device=device)

    return read, apply


def _watts(of: Preset) -> float:
    # The value is rounded, so that 450 W is written as 450 W again.
    return round(of.device.power_part * of.power_w, 6)


def _limit_power(of: Preset, watts: float) -> Preset:
    if not of.power_w:
        raise ClusterError(
            f"power={watts:g}W: the power of a {of.device.name} is not known. Say what "
            "it attains with efficiency=, or give power_part in a TOML file."
        )
    if not 0 < watts <= of.power_w:
        raise ClusterError(
            f"power={watts:g}W: a {of.device.name} draws up to {of.power_w:g} W. Give "
            "a limit above 0 and up to that."
        )
    device = dataclasses.replace(of.device, power_part=watts / of.power_w)
    return dataclasses.replace(of, device=device)


def _on_network(
    name: str,
) -> tuple[Callable[[Preset], float], Callable[[Preset, float], Preset]]:
    def read(of: Preset) -> float:
        return getattr(of.outer, name)

    def apply(of: Preset, value: float) -> Preset:
        return dataclasses.replace(
            of, outer=dataclasses.replace(of.outer, **{name: value})
        )

    return read, apply


_OPTIONS: dict[str, _DeviceOption] = {
    "memory": _DeviceOption("bytes", *_on_device("memory_bytes", round)),
    "efficiency": _DeviceOption("a part of 1", *_on_device("matmul_efficiency")),
    "sustained": _DeviceOption("a part of 1", *_on_device("sustained")),
    "power": _DeviceOption("watts", _watts, _limit_power),
    "network": _DeviceOption("bytes per second", *_on_network("bandwidth_bytes_per_s")),
    "network_latency": _DeviceOption("seconds", *_on_network("latency_s")),
}


def _parse_sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", part) for part in parts):
        raise ClusterError(
            f"{show(text)} is not a shape: write positive sizes joined by 'x', hosts "
            f"before devices of a host. {EXAMPLE}"
        )
    if len(parts) > 3:
        raise ClusterError(
            f"{show(text)} has {len(parts)} levels; the short form has at most 3 "
            "(pods x hosts x devices). Describe deeper clusters in a TOML file. "
            f"{EXAMPLE}"
        )
    return tuple(int(part) for part in parts)


def _apply_option(base: Preset, sizes: tuple[int, ...], text: str) -> Preset:
    key, equals, value = text.partition("=")
    option = _OPTIONS.get(key.strip())
    if option is None or not equals:
        known = ", ".join(_OPTIONS)
        raise ClusterError(
            f"unknown option {show(text)}: an option is key=value with a key of "
            f"{known}. {EXAMPLE}"
        )
    if key.startswith("network") and (len(sizes) == 1 or base.is_torus):
        raise ClusterError(
            f"{text!r} sets the links between hosts, and this cluster has none. "
            "Example: Cluster.parse('2x4:h100,network=100Gb/s')."
        )
    return option.apply(base, parse_quantity(value, option.unit))


def parse_text(text: str) -> tuple[DeviceSpec, tuple[Level, ...]]:
    """Reads the device and the levels from a short text."""
    head, *options = text.strip().split(",")
    shape, colon, name = head.partition(":")
    sizes = _parse_sizes(shape.strip())
    if colon and not name.strip():
        raise ClusterError(f"{show(text)} names no device after the colon. {EXAMPLE}")
    base = preset(name.strip() or DEFAULT_PRESET)
    for option in options:
        base = _apply_option(base, sizes, option)
    return base.device, base.levels(sizes)


def _options_of(device: DeviceSpec, levels: Sequence[Level], base: Preset) -> list[str]:
    here = dataclasses.replace(base, device=device, outer=levels[0].link)
    keys = [
        key
        for key in _OPTIONS
        if not key.startswith("network") or (len(levels) > 1 and not base.is_torus)
    ]
    return [
        f"{key}={format_quantity(option.read(here), option.unit)}"
        for key in keys
        if (option := _OPTIONS[key]).read(here) != option.read(base)
    ]


def format_text(device: DeviceSpec, levels: Sequence[Level]) -> str | None:
    """The short text from which `parse_text` reads this device and these levels; None
    if there is none.
    """
    try:
        base = preset(device.name)
        shape = "x".join(str(level.size) for level in levels)
        options = _options_of(device, levels, base)
        text = ",".join([f"{shape}:{device.name}", *options])
        return text if parse_text(text) == (device, tuple(levels)) else None
    except ClusterError:
        return None
