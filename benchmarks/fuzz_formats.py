"""The formats that `fuzz.py` damages: valid files, how they are read and mutated."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import autopar
from autopar.checkpoint import folders, manifest, names, torch_files, trees
from autopar.dispatch import specs
from autopar.elastic.inbox import Inbox
from autopar.elastic.ledger import Ledger
from autopar.elastic.sources.messages import read_events
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.simulator.traces import philly, pollux, rubick, spot

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Format:
    """How files of a format are read.

    Attributes:
      seeds: valid files.
      read: reads one; raises the package's errors alone.
      mended: makes a mutant pass checks that keep accidents out; None: there are none.
      parts: takes a file apart and returns its parts, and a function that joins them.
    """

    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    mended: Callable[[bytes], bytes] | None = None
    parts: Callable[[bytes], tuple[dict[str, bytes], Callable[..., bytes]]] | None = (
        None
    )


def _step(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ w) - batch) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def _plans(place: pathlib.Path) -> Format:
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (32, 64)))
    options: dict[str, Any] = {"compression": "int8", "max_axes": 1, "seconds": 1}
    plans = [autopar.plan(_step, w, x, cluster="1x2:h100", **options)]

    def read(data: bytes) -> None:
        path = place / "plan.json"
        path.write_bytes(data)
        found = autopar.Plan.load(path)
        repr(found)
        found.digest  # noqa: B018 (worked out when it is asked for)

    return Format([msgspec.json.encode(x) for x in plans], read)


def _events(place: pathlib.Path) -> Format:
    del place
    whole = autopar.Cluster.parse("4x2:h100")
    seeds = [
        {"kind": "gone", "hosts": ["host1"], "deadline_s": 30.0, "id": "a"},
        {"kind": "added", "devices": [3, "host0/device1"]},
        {"kind": "link", "level": "host", "bandwidth_bytes_per_s": 1e9},
        {"kind": "cluster", "cluster": whole.without("host1").to_data()},
        ["4x2:h100,memory=40GB,network=100Gb/s", {"cluster": "2x2:h100"}],
    ]

    def read(data: bytes) -> None:
        inbox = Inbox(whole, (0, 1), lambda cluster: None, Ledger(None), most=8)
        wrong = ""
        for event in read_events(data, "fuzz"):
            found = inbox.put(event)
            json.dumps(event.to_data())
            wrong = found.reason if "a bug in autopar" in found.reason else wrong
        if wrong:
            raise RuntimeError(wrong)

    return Format([json.dumps(x).encode() for x in seeds], read)


def _manifests(place: pathlib.Path) -> Format:
    step = autopar.parallelize(_step, cluster="1:cpu", seconds=2)
    state, _ = step(jnp.ones((8, 8)), jnp.ones((4, 8)))
    notes = {"a": [1, 2.5, None, "x"]}
    with autopar.Checkpoints(place / "saved") as made:
        made.save(step, state, step=1, position=4, notes=notes)
    folder = names.find(place / "saved")
    held = manifest.read(folder)
    codecs = {"codecs/w": next(iter(held.state.values()))}
    tree = {
        "dict": {"w": {"array": "codecs/w"}, "n": {"numpy": ["int32", [1], "00" * 4]}}
    }
    second = msgspec.structs.replace(held, codecs=codecs, codec_tree=tree)

    path = place / "read"
    path.mkdir()
    (path / folders.PLAN).write_bytes((folder / folders.PLAN).read_bytes())

    def read(data: bytes) -> None:
        (path / manifest.MANIFEST).write_bytes(data)
        found = manifest.read(path)
        names.parameters(path, found)
        if found.codec_tree is not None:
            trees.join(found.codec_tree, dict.fromkeys(found.codecs, 0))

    return Format([held.encode(), second.encode()], read, _with_checksum)


def _with_checksum(data: bytes) -> bytes:
    try:
        found = json.loads(data)
        plain = {k: x for k, x in found.items() if k[:2] != "no" or x}
        plain["checksum"] = ""
        text = msgspec.json.encode(plain)
        digest = hashlib.sha256(text).hexdigest()[:32]
        return json.dumps({**found, "checksum": digest}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return data


def _pt(place: pathlib.Path) -> Format:
    path = place / "x.pt"
    values: list[Any] = [
        {"cat_dim": 0, "param": np.arange(12, dtype=np.float32).reshape(3, 4)},
        {"x": np.zeros((0, 2), np.int64), "n": 3, "t": {"a": None, "b": [True][0]}},
        7,
    ]
    seeds: list[bytes] = []
    for value in values:
        torch_files.save(path, value)
        seeds.append(path.read_bytes())

    def read(data: bytes) -> None:
        path.write_bytes(data)
        torch_files.load(path)

    return Format(seeds, read, None, _zip_parts)


def _zip_parts(data: bytes) -> tuple[dict[str, bytes], Callable[..., bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        parts = {name: file.read(name) for name in file.namelist()}

    def joined(parts: Mapping[str, bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            for name, part in parts.items():
                file.writestr(name, part)
        return out.getvalue()

    return parts, joined


_JOBS = b"""[[job]]
name = "a"
script = "train.py"
arguments = ["1", "x"]
devices = 2
"""


def _toml(place: pathlib.Path) -> Format:
    whole = autopar.Cluster.parse("2x4:h100")
    texts = [whole.to_toml(), whole.without("host1").to_toml()]
    texts += [autopar.Cluster.parse("8:v5e").to_toml()]

    def read(data: bytes) -> None:
        path = place / "x.toml"
        path.write_bytes(data)
        if b"[[job]]" in data:
            specs.read_jobs(path)
            return
        found = autopar.Cluster.from_toml(path)
        str(found)
        found.to_toml()

    (place / "train.py").write_text("")
    seeds = [text.encode() for text in texts]
    try:
        read(_JOBS)
        seeds.append(_JOBS)
    except autopar.AutoparError:
        pass
    return Format(seeds, read)


def _traces(place: pathlib.Path) -> Format:
    readers: list[tuple[tuple[str, ...], Callable[[pathlib.Path], Any]]] = [
        (tuple(philly.COLUMNS), philly.read_jobs),
        (tuple(pollux.COLUMNS), pollux.read_jobs),
        (tuple(rubick.COLUMNS), rubick.read_jobs),
    ]
    nodes = Nodes(4, 8)

    def read(data: bytes) -> None:
        path = place / "trace.csv"
        path.write_bytes(data[1:])
        which = data[:1] or b"0"
        if which == b"3":
            spot.read_events(path, nodes)
            return
        readers[(which[0] - 48) % len(readers)][1](path)

    seeds: list[bytes] = []
    for number, (columns, _) in enumerate(readers):
        for row in _ROWS:
            cells = ",".join(row.get(name, "1") for name in columns)
            text = f"{number}{','.join(columns)}\n{cells}\n{cells}\n".encode()
            try:
                read(text)
            except autopar.AutoparError:
                continue
            seeds.append(text)
    return Format(seeds, read)


_ROWS: list[dict[str, str]] = [
    {},
    {"application": "bert", "name": "a", "num_gpus": "2"},
]

FORMATS: Mapping[str, Callable[[pathlib.Path], Format]] = {
    "plans": _plans,
    "events": _events,
    "manifests": _manifests,
    "pt": _pt,
    "toml": _toml,
    "traces": _traces,
}

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
        except Exception:  # a mutant that is no archive any more
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
