"""Tests events of a run of several processes, in which each process is a host."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest

from autopar import Cluster
from autopar.elastic.events import Event
from autopar.elastic.processes.links import SentBytes
from autopar.elastic.processes.listening import Listening, WantedAction
from autopar.elastic.processes.members import MemberLimits
from autopar.elastic.processes.speeds import CpuUse


class Notes:
    def __init__(self) -> None:
        self.notes: list[Any] = []

    def note(self, found: Any) -> None:
        self.notes.append(found.status)

    def wrong(self, source: str, reason: str) -> None:
        self.notes.append(reason)


class Heard:
    """A run of four processes with two devices each."""

    def __init__(self, cluster: str = "4x2:h100", events: Any = ()) -> None:
        self.wanted: list[WantedAction] = []
        self.notes = Notes()
        limits = MemberLimits(processes=4, least=1, most=6)
        self.listening = Listening(
            limits, self.notes, self.wanted.append, pathlib.Path("my runs")
        )
        self.form(cluster, events)

    def form(self, cluster: str, events: Any = ()) -> None:
        self.take(Cluster.parse(cluster), events)

    def take(self, cluster: Cluster, events: Any = ()) -> None:
        """A world that has planned for a cluster."""
        hosts = {w: f"10.0.0.{w}" for w in range(cluster.num_devices // 2)}
        said = {"cluster": cluster.to_data(), "devices": 2, "events": events}
        self.listening.on_world(said, hosts)

    def put(self, data: Any) -> Any:
        return self.listening.put(Event.from_data(data))


@pytest.mark.parametrize(
    ("data", "processes", "gone"),
    [
        ({"kind": "gone", "hosts": [1]}, 3, (1,)),
        ({"kind": "gone", "hosts": ["host0", "host3"]}, 2, (0, 3)),
        ({"kind": "gone", "devices": [4, 5]}, 3, (2,)),
        ({"kind": "added", "hosts": ["host4", "host5"]}, 6, ()),
        ("2x2:h100", 2, ()),
    ],
)
def test_what_comes_of_an_event(data: Any, processes: int, gone: Any) -> None:
    heard = Heard()
    assert heard.put(data).status == "accepted"
    assert heard.wanted == [WantedAction(processes, gone, None)]


def test_a_flat_cluster() -> None:
    heard = Heard("8:cpu")
    assert heard.put("4:cpu").status == "accepted"
    assert heard.put({"kind": "gone", "devices": [2, 3]}).status == "accepted"
    assert [(x.processes, x.gone) for x in heard.wanted] == [(2, ()), (1, (1, 2, 3))]


def test_what_goes_and_comes_back_before_a_world_has_formed() -> None:
    heard = Heard()
    heard.put({"kind": "gone", "hosts": [1]})
    assert heard.put({"kind": "added", "hosts": [1]}).status == "accepted"
    assert (heard.wanted[-1].processes, heard.wanted[-1].gone) == (4, ())


def test_worlds_that_form_are_what_later_events_mean() -> None:
    heard = Heard()
    heard.put({"kind": "gone", "hosts": [0]})
    heard.form("3x2:h100")
    assert heard.put({"kind": "gone", "hosts": [0]}).status == "accepted"
    assert (heard.wanted[-1].processes, heard.wanted[-1].gone) == (2, (0,))


def test_a_link_that_was_measured() -> None:
    heard = Heard()
    level = Cluster.parse("4x2:h100").levels[0].name
    found = heard.put({"kind": "link", "level": level, "bandwidth_bytes_per_s": 1e6})
    assert found.status == "accepted"
    (wanted,) = heard.wanted
    assert (wanted.processes, wanted.gone) == (4, ())
    assert wanted.cluster is not None
    assert wanted.cluster.levels[0].link.bandwidth_bytes_per_s == 1e6
    assert heard.put("4x2:a100").cluster.device.name == "a100"


def test_a_link_that_is_as_before_is_planned_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A measured rate is never exactly the one for which a plan is stored."""
    heard = Heard("4x2:cpu,network=1Gb/s")
    factors = iter([0.05, 18.5])
    monkeypatch.setattr(heard.listening._links, "take", lambda *_: next(factors))
    monkeypatch.setattr(heard.listening._links, "expect", lambda: None)
    heard.listening.on_sent(0, SentBytes(1, 1.0))
    slow = heard.wanted[-1].cluster
    assert slow is not None
    assert slow.levels[0].link.bandwidth_bytes_per_s == 6.2e6  # two digits of 6.25e6
    heard.form(str(slow))
    heard.listening.on_sent(0, SentBytes(1, 1.0))
    assert heard.wanted[-1].cluster == Cluster.parse("4x2:cpu,network=1Gb/s")


def limited(cores: float) -> CpuUse:
    return CpuUse(
        seconds=1.0, used_s=cores, cores=cores, group="/", periods=10, waited=9
    )


class Clock:
    """Time that passes as workers report what they compute."""

    def __init__(self, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard, self.now = heard, 0.0
        monkeypatch.setattr(
            "autopar.elastic.processes.listening.time.monotonic", lambda: self.now
        )

    def run(self, *cores: float) -> dict[int, float]:
        """The speeds that are found in a minute."""
        found: dict[int, float] = {}
        for _ in range(60):
            self.now += 1.0
            for worker, x in enumerate(cores):
                found |= self.heard.listening.on_computed(worker, limited(x))
        return found


def test_a_throttled_host_gets_slower_devices_and_equal_ones_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard("4x2:cpu")
    clock = Clock(heard, monkeypatch)
    heard.form("4x2:cpu")
    assert clock.run(0.4, 0.4, 0.2, 0.4) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}
    expected, wanted = heard.wanted
    uneven = Cluster.parse("4x2:cpu").with_speeds([1, 1, 0.5, 1])
    assert expected == WantedAction(4, (), uneven, expected=True)
    assert wanted == WantedAction(4, (), uneven)
    heard.take(uneven)
    assert clock.run(0.4, 0.4, 0.2, 0.4) == {}
    assert clock.run(0.4, 0.4, 0.4, 0.4) == dict.fromkeys(range(4), 1.0)
    assert heard.wanted[-1] == WantedAction(4, (), Cluster.parse("4x2:cpu"))


def test_speeds_without_a_plan_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world trains on as planned, and another host may become slow, too."""
    heard = Heard("4x2:cpu")
    clock = Clock(heard, monkeypatch)
    heard.form("4x2:cpu")
    assert clock.run(0.2, 0.4, 0.4, 0.4)
    heard.listening.on_dropped()
    assert clock.run(0.2, 0.4, 0.4, 0.4) == {}
    assert [x.expected for x in heard.wanted] == [True, False]
    assert clock.run(0.4, 0.4, 0.4, 0.4) == dict.fromkeys(range(4), 1.0)
    assert [x.expected for x in heard.wanted[2:]] == [True]
    assert clock.run(0.4, 0.2, 0.4, 0.4)[1] == 0.5
    uneven = Cluster.parse("4x2:cpu").with_speeds([1, 0.5, 1, 1])
    assert heard.wanted[-1].cluster == uneven


def test_speeds_of_accelerators_are_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard("4x2:h100")
    clock = Clock(heard, monkeypatch)
    heard.form("4x2:h100")
    assert clock.run(0.2, 0.4, 0.4, 0.4) == {}


def test_a_link_is_planned_for_as_it_was_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rate that lasts is measured anew, and differs a little."""
    heard = Heard("4x2:cpu,network=1Gb/s")
    factors = iter([None, 0.051])
    monkeypatch.setattr(heard.listening._links, "take", lambda *_: next(factors))
    monkeypatch.setattr(heard.listening._links, "expect", lambda: 0.05)
    heard.listening.on_sent(0, SentBytes(1, 1.0))
    heard.listening.on_sent(0, SentBytes(1, 1.0))
    expected, lasts = heard.wanted
    assert (expected.expected, lasts.expected) == (True, False)
    assert expected.cluster == lasts.cluster


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"kind": "gone", "devices": [1]}, "which come and go together"),
        ("7:h100", "which come and go together"),
        ("8x2:h100", "16 devices, and this world at most 12"),
        (
            {"kind": "gone", "hosts": [0, 1, 2, 3]},
            "--folder 'my runs' --stop` ends",
        ),
    ],
)
def test_what_cannot_be_is_refused(data: Any, says: str) -> None:
    heard = Heard()
    found = heard.put(data)
    assert found.status == "refused"
    assert says in found.reason
    assert not heard.wanted
    assert heard.notes.notes == ["refused"]
    assert heard.put({"kind": "gone", "hosts": [3]}).status == "accepted"


def test_files_are_watched(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.txt"
    heard = Heard(events=[f"file:{path}"])
    path.write_text("2x2:h100")
    end = time.monotonic() + 60
    while not heard.wanted and time.monotonic() < end:
        time.sleep(0.02)
    heard.listening.stop()
    assert heard.wanted == [WantedAction(2, (), None)]


def test_an_address_that_cannot_be_had_is_noted() -> None:
    heard = Heard(events=["http:256.0.0.1:1"])
    assert len(heard.notes.notes) == 1
    heard.listening.stop()


def test_what_a_script_sends() -> None:
    heard = Heard()
    heard.listening.heard("2x2:h100")
    heard.listening.heard({"kind": "gone", "hosts": ["nobody"]})
    heard.listening.heard({"kind": "none"})
    assert heard.wanted == [WantedAction(2, (), None)]
    assert heard.notes.notes[0] == "refused"
    assert "'none' is not known" in heard.notes.notes[1]
