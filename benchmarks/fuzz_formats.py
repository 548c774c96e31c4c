"""The formats that `fuzz.py` fuzzes: valid files, and functions that read them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import socket
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import fuzz_traces
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from fuzz_mutations import Format, zip_parts

import autopar
from autopar.checkpoint import folders, manifest, torch_files, trees
from autopar.cli import owning
from autopar.cli.commands.runs import LedgerCommand
from autopar.cli.ledgering import ledger
from autopar.dispatch import specs
from autopar.dispatch.store import Store
from autopar.elastic.events import Event, Inbox, Resolved
from autopar.elastic.ledger import Ledger
from autopar.elastic.sources.http import Http
from autopar.elastic.sources.source import read_events
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.planner.cache import PlanCache
from autopar.planner.options import PlanOptions
from autopar.steps.analysis import analyse


def _step(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ w) - batch) ** 2)

    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value


def _plans(place: pathlib.Path) -> Format:
    """Plan files, and the sealed files of the plan cache."""
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (32, 64)))
    whole = autopar.Cluster.parse("1x2:h100")
    made = PlanOptions(compression="int8", max_axes=1, seconds=1)
    cache, analysis = PlanCache(place / "kept"), analyse(_step, (w, x))
    options: dict[str, Any] = {"compression": "int8", "max_axes": 1, "seconds": 1}
    plan = autopar.plan(_step, w, x, cluster=whole, **options)
    kept = cache.plan(analysis, whole, made, lambda: plan)
    (file,) = cache.folder.iterdir()
    sealed = file.read_bytes()
    assert cache.find(analysis, whole, made) == kept

    def find() -> None:
        with warnings.catch_warnings(record=True) as refused:
            warnings.simplefilter("always")
            found = cache.find(analysis, whole, made)
        if found is None and refused:
            raise autopar.PlanError(str(refused[0].message))

    def read(data: bytes) -> None:
        if sealed[:8] in data[:16]:
            file.write_bytes(data)
            find()
            return
        path = place / "plan.json"
        path.write_bytes(data)
        cache._files.write(file.name, data)
        try:
            found = autopar.Plan.load(path)
        finally:
            with contextlib.suppress(autopar.PlanError):
                find()
        repr(found)
        found.digest  # noqa: B018 (worked out when it is asked for)

    return Format([msgspec.json.encode(plan), sealed], read)


def _events(place: pathlib.Path) -> Format:
    """Events as text, and as requests to the server of `autopar.elastic`."""
    del place
    whole = autopar.Cluster.parse("4x2:h100")
    bodies: list[Any] = [
        {"kind": "gone", "hosts": ["host1"], "deadline_s": 30.0, "id": "a"},
        {"kind": "added", "devices": [3, "host0/device1"], "time_s": 1.0},
        {"kind": "link", "level": "host", "bandwidth_bytes_per_s": 1e9},
        {"kind": "link", "level": "between", "latency_s": 1e-3, "source": "x"},
        {"kind": "cluster", "cluster": whole.without("host1").to_data()},
        ["4x2:h100,memory=40GB,network=100Gb/s", {"cluster": "2x2:h100"}],
    ]
    sink = _Sink(whole)
    source = Http(token=_TOKEN)
    source.start(sink)
    assert source._server is not None
    source._server.allowance.take = lambda: (True, False)
    host, _, port = source.url.split("/")[2].partition(":")

    def read(data: bytes) -> None:
        sink.begin()
        if b"HTTP/1." in data[:300]:
            _post(data, (host, int(port)))
        else:
            for event in read_events(data, "fuzz"):
                sink.put(event)
                json.dumps(event.to_data())
        if sink.bugs:
            raise RuntimeError(sink.bugs[0])

    texts = [json.dumps(x).encode() for x in bodies]
    seeds = [_REQUEST % (len(x), x) for x in texts]
    return Format([*texts, *seeds], read, _whole_request, close=source.stop)


_TOKEN = "a-token-of-the-fuzzer"
_REQUEST = (
    b"POST /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    + _TOKEN.encode()
    + b"\r\nContent-Length: %d\r\n\r\n%s"
)


class _Sink:
    """Receives events like a run, and records messages about bugs."""

    def __init__(self, whole: autopar.Cluster) -> None:
        self._whole = whole
        self.begin()

    def begin(self) -> None:
        self.bugs: list[str] = []
        self._inbox = Inbox(
            self._whole, (0, 1), lambda cluster: None, Ledger(None), most=8
        )

    def put(self, event: Event) -> Resolved:
        found = self._inbox.put(event)
        self.wrong("", found.reason)
        return found

    def wrong(self, source: str, reason: str) -> None:
        # The source "http" reports when its thread has ended by an error.
        bug = "a bug in autopar" in reason or source == "http"
        self.bugs += [reason] if bug else []


def _post(data: bytes, address: tuple[str, int]) -> None:
    """Sends a request; raises `EventError` for an answer other than 200 and 409."""
    answer = b""
    try:
        with socket.create_connection(address, timeout=0.1) as connection:
            connection.sendall(data)
            try:
                answer = connection.recv(1 << 16)
            # The server waits for the rest of an incomplete request.
            except TimeoutError:
                connection.settimeout(20)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 16)
    except TimeoutError as error:
        raise RuntimeError("the server does not answer") from error
    except OSError as error:
        raise autopar.EventError(f"cut off: {error}.") from error
    status = answer[9:12]
    if status not in (b"200", b"409"):
        if status[:1] == b"5":
            raise RuntimeError(answer.decode(errors="replace"))
        raise autopar.EventError(answer.decode(errors="replace") or "cut off.")


def _whole_request(data: bytes) -> bytes:
    """A request completed by its token and the length of its body; other data
    unchanged.
    """
    head, blank, body = data.partition(b"\r\n\r\n")
    return _REQUEST % (len(body), body) if blank and b"HTTP/1." in head else data


def _manifests(place: pathlib.Path) -> Format:
    step = autopar.parallelize(_step, cluster="1:cpu", seconds=2)
    state, _ = step(jnp.ones((8, 8)), jnp.ones((4, 8)))
    notes = {"a": [1, 2.5, None, "x"]}
    with autopar.Checkpoints(place / "saved") as made:
        made.save(step, state, step=1, position=4, notes=notes)
    folder = folders.find_checkpoint(place / "saved")
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
        folders.parameter_paths(path, found)
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

    return Format(seeds, read, None, zip_parts)


_JOBS = b"""[[job]]
name = "a"
script = "train.py"
args = ["1", "x"]
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
    return Format([*seeds, _JOBS], read)


def _curves(place: pathlib.Path) -> Format:
    points = [
        CurvePoint(cluster="1x1:h100", kind="h100", nodes=1, devices=1, batch=8,
                   step_s=0.1, goodput=80.0, plan="ab", codecs=("int8",)),
        CurvePoint(cluster="2x2:h100", kind="h100", nodes=2, devices=4, batch=32,
                   step_s=0.2, goodput=70.0, measured=3),
        CurvePoint(cluster="1x1:v5e", kind="v5e", nodes=1, devices=1, reason="no"),
    ]  # fmt: skip
    table = CurveTable(points=tuple(points), base_batch=8, max_batch=64)
    (place / "train.py").write_text("")
    jobs = place / "jobs.toml"
    jobs.write_bytes(_JOBS + b'curve = "curve.json"\n')

    def read(data: bytes) -> None:
        (place / "curve.json").write_bytes(data)
        for job in specs.read_jobs(jobs):
            assert job.curve is not None
            found = job.curve
            job.most(found.kinds)
            str(found.dips)
            found.goodput(np.array([1, 2]), np.array([1, 4]))
            found.save(place / "again.json")
            CurveTable.load(place / "again.json")

    return Format([msgspec.json.encode(table)], read)


def _stores(place: pathlib.Path) -> Format:
    """The state of a scheduler, as read by ``autopar jobs list DIR``."""
    (place / "train.py").write_text("")
    (place / "jobs.toml").write_bytes(_JOBS)
    path = place / owning.STATE_FILE
    store = Store(path)
    store.add_jobs(specs.read_jobs(place / "jobs.toml"))
    store.set_facts({"policy": "fifo", "begin_s": "1.5", "looked_s": "2.5"})
    store.span("a", 1.0, {"n1": 2})
    store.number("n1", 2, "h100")
    store.close()

    def read(data: bytes) -> None:
        for file in place.glob(f"{owning.STATE_FILE}-*"):
            file.unlink()
        path.write_bytes(data)
        owning.jobs(place, decisions=True, as_json=True)
        owning.jobs(place, decisions=True, as_json=False)

    return Format([path.read_bytes()], read)


def _ledgers(place: pathlib.Path) -> Format:
    path = place / "ledger.jsonl"
    plan = {"cluster": "4:cpu", "meshes": [{"data": 4}], "step_s": 0.1}
    event = {"what": "gone 1", "source": "call", "id": "a", "sent_s": 1.0,
             "deadline_s": None, "status": "accepted", "reason": ""}  # fmt: skip
    rows = {"rows": 32, "microbatches": 2, "codecs": "int8", "meshes": [{"data": 4}]}
    near = {"least": 1.2, "cost_s": 12.0}
    lines: list[dict[str, Any]] = [
        {"kind": "replan", "number": 1, "step": 3, "position": 48, "events": [event],
         "old": plan, "new": plan, "compared": [{"name": "new"}], "chosen": "new",
         "predicted": {"move_bytes": 1e6}, "measured": {"pause_s": 1.0, "plan_s": 0.5}},
        {"kind": "measured", "number": 1, "step_before_s": 0.1, "step_after_s": 0.2},
        {"kind": "batch", "number": 2, "step": 9, "old": rows, "new": rows,
         "phi": {"phi": 1.5}, "compared": [{}], "predicted": {"goodput": 1.0,
         "goodput_before": 2.0, "least": 1.1}, "measured": {"pause_s": 1.0}},
        {"kind": "batch measured", "number": 2, "step_after_s": 1.0},
        {"kind": "batch refused", "way": rows, "reason": "no"},
        {"kind": "batch kept", "way": rows, "nearest_name": "x", "nearest": near,
         "horizon_s": 40.0},
        {"kind": "gain capped", "step": 7, "loss": 1.0, "limit": 2.0, "gain": 3.0},
        {"kind": "event", "event": event},
        {"kind": "wrong", "source": "http", "reason": "401"},
        {"kind": "refused", "events": [event], "reason": "no plan fits"},
        {"kind": "stop", "events": [event]},
        {"kind": "progress", "batch": 8, "devices": 4, "steps": 3, "step_s": 0.1},
    ]  # fmt: skip

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for as_json in (True, False):
            ledger(LedgerCommand(file=path, as_json=as_json))

    seeds = [b"\n".join(json.dumps(x).encode() for x in lines)]
    return Format([*seeds, *(json.dumps(x).encode() + b"\n{}" for x in lines)], read)


FORMATS: Mapping[str, Callable[[pathlib.Path], Format]] = {
    "curves": _curves,
    "ledgers": _ledgers,
    "stores": _stores,
    "plans": _plans,
    "events": _events,
    "manifests": _manifests,
    "pt": _pt,
    "toml": _toml,
    "traces": fuzz_traces.traces,
    "tables": fuzz_traces.tables,
}
