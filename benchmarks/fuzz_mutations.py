"""The interface of a format of `fuzz.py`, and mutations of bytes, words and JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Format:
    """A file format, with functions to read and repair its files.

    Attributes:
      seeds: valid files.
      read: reads a file; may raise only the package's errors.
      mended: repairs the checksum of a mutant, so that it is read further; None: no
        repair is needed.
      parts: splits a file into parts; returns them and a function that joins them.
      close: ends threads and servers that reading has started.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    mended: Callable[[bytes], bytes] | None = None
    parts: Callable[[bytes], tuple[dict[str, bytes], Callable[..., bytes]]] | None = (
        None
    )
    close: Callable[[], None] = lambda: None


def zip_parts(data: bytes) -> tuple[dict[str, bytes], Callable[..., bytes]]:
    """The files in a ZIP archive, and a function that packs them again."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    return parts, zip_of


def zip_of(parts: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of files by name."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, part in parts.items():
            file.writestr(name, part)
    return out.getvalue()


_WORDS = [
    b"0", b"-1", b"1e308", b"1e400", b"-1e-320", b"nan", b"NaN", b"inf", b"Infinity",
    b"9" * 25, b"1" + b"0" * 400, b"9" * 5000, b"null", b"true", b"[]", b"{}", b'""',
    b"\x00", b"\xff\xfe", b"\\ud800", b"[" * 2000, b'{"a":' * 2000, b"4294967296",
    b"18446744073709551616", b".5", b"..", b"/", b"../../x", b"\n", b",", b"x" * 3000,
    b"[[", b"]]", b"=", b"'''", b"0x7f", b"1_000", b"2024-01-01T00:00:00Z",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5,
    1e308, 1e-320, "", "x", "x" * 3000, "\ud800", "\x00", "..", [], {}, [[]], [0] * 50,
    ["x"], {"a": 1}, [None],
]  # fmt: skip


def mutated(
    draw: random.Random, data: bytes, corpus: Sequence[bytes], of: Format
) -> bytes:
    """A file with one to four changes."""
    if of.parts is not None and draw.random() < 0.85:
        try:
            parts, joined = of.parts(data)
        except Exception:  # The mutant may no longer be an archive.
            parts = {}
        if parts:
            name = draw.choice(list(parts))
            parts[name] = _changed(draw, parts[name], [*parts.values()])
            if draw.random() < 0.05:
                parts.pop(draw.choice(list(parts)))
            return joined(parts)
    found = _changed(draw, data, corpus)
    if of.mended is not None and draw.random() < 0.7:
        found = of.mended(found)
    return found


def _changed(draw: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        tree = _tree(data) if draw.random() < 0.6 else None
        data = _bytes(draw, data, corpus) if tree is None else _json(draw, tree)
    return data[: 1 << 20]


def _tree(data: bytes) -> Any:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) and found else None


def _json(draw: random.Random, tree: Any) -> bytes:
    """Changes one node of a tree."""
    places: list[tuple[Any, Any]] = []
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                left.append(node[key])
    node, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, name = draw.choice(places)
        node[key] = other[name] if name in other or isinstance(other, list) else None
    elif kind == 2 and isinstance(node[key], (int, float)):
        # A number may be too large for a float.
        with contextlib.suppress(OverflowError):
            node[key] *= draw.choice((-1, 2, 1000, 1e20, 0.5))
    elif kind == 3 and isinstance(node, dict):
        node[draw.choice(("", "x", "kind", "schema"))] = draw.choice(_VALUES)
    else:
        node[key] = draw.choice(_VALUES)
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # it holds itself
        return b"[]"


def _bytes(draw: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Changes some bytes."""
    if not data:
        return draw.choice(_WORDS)
    at = draw.randrange(len(data))
    until = min(len(data), at + draw.choice((1, 1, 2, 4, 8, 40)))
    kind = draw.randrange(6)
    if kind == 0:
        flipped = data[at] ^ (1 << draw.randrange(8))
        return data[:at] + bytes([flipped]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + draw.randbytes(until - at) + data[until:]
    if kind == 2:
        return data[:at] + data[until:]
    if kind == 3:
        return data[:at] + draw.choice(_WORDS) + data[until:]
    if kind == 4:
        other = draw.choice(corpus) or b"0"
        begin = draw.randrange(len(other))
        return data[:at] + other[begin : begin + draw.randrange(1, 80)] + data[until:]
    return data[:at] + data[at:until] * draw.choice((2, 3, 50)) + data[until:]
