"""Formats seconds, bytes and other numbers with suitable units, and reads values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
# A number of bytes with at least five digits, such as "=11374425907B".
_EXACT_BYTES = re.compile(r"(?<==)(\d{5,}(?:\.\d+)?)B\b")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def seconds_text(seconds: float) -> str:
    """Returns a time as text with a suitable unit.

    >>> seconds_text(0.01406)
    '14.1 ms'
    """
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for scale, unit in _SECONDS:
        if abs(seconds) >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-9)} ns"


def bytes_text(nbytes: float) -> str:
    """Returns a number of bytes as text with a suitable decimal unit.

    >>> bytes_text(4_968_455)
    '4.97 MB'
    """
    value = float(nbytes)
    if value.is_integer() and abs(value) < 1000:
        return f"{value:.0f} B"
    for unit in _BYTES[:-1]:
        if abs(value) < 999.5:
            return f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} {_BYTES[-1]}"


def three_digits(value: float) -> str:
    """Returns a number with three significant digits, not in scientific notation."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(abs(value)))
    text = f"{value:.{max(digits, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and digits > 2 else text


def rounded_cluster(cluster: object) -> str:
    """Returns a cluster's text with rounded bytes, for people and not for parsing.

    >>> rounded_cluster("2:cpu,memory=11374425907B")
    '2:cpu,memory=11.4GB'
    """
    return _EXACT_BYTES.sub(
        lambda m: bytes_text(float(m[1])).replace(" ", ""), str(cluster)
    )


def count_text(number: float) -> str:
    """Returns a number as text, in thousands, millions or billions if it is large.

    >>> count_text(151_234), count_text(12.3)
    ('151 k', '12.3')
    """
    value = float(number)
    for prefix in ("", " k", " M", " G", " T"):
        if abs(value) < 999.5:
            return f"{three_digits(value)}{prefix}"
        value /= 1000
    return f"{three_digits(value)} P"


def number_of(count: int, noun: str) -> str:
    """Returns a number with its noun in the singular or plural.

    >>> number_of(1, "process"), number_of(2, "process"), number_of(3, "step")
    ('1 process', '2 processes', '3 steps')
    """
    return f"{count} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def name_numbers(noun: str, numbers: Sequence[int], most: int | None = None) -> str:
    """Returns a text that names things by their numbers.

    Args:
      noun: the noun for one thing.
      numbers: the numbers of the things.
      most: the largest number of things to name; None for all.

    >>> name_numbers("worker", [2]), name_numbers("process", [0, 1, 3])
    ('worker 2', 'processes 0, 1 and 3')
    >>> name_numbers("process", range(6), 4)
    'processes 0, 1, 2, 3 and 2 more'
    """
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown, last = list(map(str, numbers[:-1])), f"{numbers[-1]}"
    if most is not None and len(numbers) > most:
        shown, last = list(map(str, numbers[:most])), f"{len(numbers) - most} more"
    return f"{_plural(noun)} {', '.join(shown)} and {last}"


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Groups numbers into runs of consecutive numbers.

    >>> runs_of([0, 1, 2, 5])
    [[0, 1, 2], [5]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def share_text(part: float) -> str:
    """Returns a part of 1 in percent, with enough digits to differ from 0 and 100.

    >>> share_text(0.123), share_text(0.0042), share_text(0.9996)
    ('12 %', '0.42 %', '99.96 %')
    """
    percent = 100.0 * part
    if 1.0 <= percent <= 99.0 or percent in (0.0, 100.0):
        return f"{percent:.0f} %"
    if percent < 1.0:
        return f"{three_digits(float(f'{percent:.2g}'))} %"
    return f"{min(percent, 99.99):.4g} %"


def guess(text: str) -> int | float | bool | str:
    """Converts a text to the type that it looks like.

    >>> [guess(text) for text in ("3", "1e-3", "true", "adamw")]
    [3, 0.001, True, 'adamw']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
