"""Tests that events are read, checked and resolved to the next cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Cluster
from autopar.elastic.events import STATUSES, Event, Inbox, resolve_event
from autopar.elastic.ledger import Ledger
from autopar.elastic.sources.source import read_events
from autopar.errors import EventError, PlanError

WHOLE = Cluster.parse("4x2:h100")


def resolved(data: Any, cluster: Cluster | None = WHOLE) -> Any:
    return resolve_event(Event.from_data(data), cluster, own=(0, 1))


def test_what_came_of_an_event_is_one_short_line() -> None:
    found = resolved({"kind": "gone", "hosts": [3]})
    assert repr(found) == "<accepted: 3x2:h100 (devices 0-5 of 4x2)>"
    late = resolved({"kind": "gone", "hosts": [3]}, found.cluster)
    assert str(late).startswith("late: 3x2:h100 (devices 0-5 of 4x2) (")


def inbox(cluster: Cluster = WHOLE) -> tuple[Inbox, Ledger]:
    ledger = Ledger(None)

    def check(found: Cluster) -> None:
        if found.num_devices > 8:
            raise PlanError("too many")

    return Inbox(cluster, (0, 1), check, ledger), ledger


class TestReading:
    @pytest.mark.parametrize(
        "data",
        [
            {"kind": "gone", "hosts": ["host1"], "deadline_s": 30.0, "id": "a"},
            {"kind": "added", "devices": [3, "host0/device1"]},
            {"kind": "link", "level": "host", "bandwidth_bytes_per_s": 1e9},
            {"kind": "cluster", "cluster": "2x4:h100"},
            {"cluster": WHOLE.without("host1").to_data()},
            {"kind": "gone"},
        ],
    )
    def test_data_and_back(self, data: dict[str, Any]) -> None:
        event = Event.from_data(data, "file:x")
        again = Event.from_data(json.loads(json.dumps(event.to_data())))
        assert again == event
        assert event.source == "file:x"

    @pytest.mark.parametrize(
        ("level", "text"), [("host", "8.00 Gb/s"), ("device", "1.00 GB/s")]
    )
    def test_networks_are_told_in_bits(self, level: str, text: str) -> None:
        found = {"kind": "link", "level": level, "bandwidth_bytes_per_s": 1e9}
        event = Event.from_data(found)
        assert str(event) == f"link {level}: {text}"

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (3, "an object with a kind"),
            ({"kind": "lost"}, "kind='lost'"),
            ({"kind": "gone", "host": ["a"]}, "no field 'host'"),
            ({"kind": "gone", "hosts": [1.5]}, "hosts must be"),
            ({"kind": "gone", "hosts": [True]}, "hosts must be"),
            ({"kind": "gone", "level": "host"}, "'gone' event has no level"),
            ({"kind": "added"}, "names hosts or devices"),
            ({"kind": "cluster"}, "needs cluster"),
            ({"cluster": "8:nonsense"}, "cluster: "),
            ({"cluster": "secret.toml"}, "not a file's name"),
            ({"cluster": {"levels": 3}}, "cluster: "),
            ({"kind": "link", "level": "host"}, "bandwidth_bytes_per_s"),
            (
                {"kind": "link", "level": "a", "bandwidth_bytes_per_s": 0},
                "must be above 0",
            ),
            ({"kind": "link", "level": "a", "latency_s": -1}, "negative"),
            ({"kind": "gone", "deadline_s": "soon"}, "deadline_s must be a number"),
            ({"kind": "gone", "deadline_s": float("nan")}, "must be a number"),
            ({"kind": "gone", "deadline_s": -1}, "negative"),
            ({"kind": "gone", "id": "x" * 20_000}, "id must be a text"),
            ({"kind": "gone", "deadline_s": 10**5000}, "a number of at most"),
            ({"kind": "gone", "time_s": -(10**400)}, "a number of at most"),
            ({"kind": "gone", "devices": [10**5000]}, "numbers from 0 to"),
            ({"kind": "gone", "devices": [-1]}, "numbers from 0 to"),
            ({"kind": "gone", "hosts": ["x" * 300]}, "at most 256 letters"),
            (
                {"kind": "link", "level": "a", "bandwidth_bytes_per_s": 1e-300},
                "at least 1",
            ),
            ("9" * 5000 + ":cpu", "is not a shape"),
            ("9" * 8 + ":cpu", "at most 1048576"),
            ("1000x1000x1000:cpu", "at most 1048576 devices"),
            ({"cluster": {"device": {"memory_bytes": 1e400}, "level": []}}, "finite"),
            ("4:cpu,memory=1e400GB", "memory_bytes must be positive and finite"),
            ("4:cpu,memory=" + "9" * 5000 + "GB", "must be positive and finite"),
        ],
    )
    def test_what_is_no_event(self, data: Any, text: str) -> None:
        with pytest.raises(EventError, match=text) as caught:
            Event.from_data(data)
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (b"", "not JSON"),
            (b'{"kind": "gone"', "not JSON"),
            (b"\xff\xfe", "UTF-8"),
            (rb'{"kind": "gone", "hosts": ["\ud800"]}', "UTF-8"),
            (b"[" * 100_000, "nested|not JSON"),
            (b'{"kind": "gone", "deadline_s": NaN}', "NaN"),
            (b"x" * (1 << 20) + b"x", "at most"),
            (b"[" + b",".join([b'"8:cpu"'] * 101) + b"]", "at most 100 events"),
        ],
    )
    def test_what_is_no_message(self, data: bytes, text: str) -> None:
        with pytest.raises(EventError, match=text):
            read_events(data, "")

    @given(st.binary(max_size=60))
    def test_any_bytes_are_events_or_refused(self, data: bytes) -> None:
        try:
            found = read_events(data, "fuzz")
        except EventError:
            return
        assert all(isinstance(x, Event) for x in found)


class TestResolving:
    def test_gone_and_back(self) -> None:
        less = resolved({"kind": "gone", "hosts": ["host1"]})
        assert (less.status, less.cluster.ids) == ("accepted", (0, 1, 4, 5, 6, 7))
        back = resolved({"kind": "added", "hosts": [1]}, less.cluster)
        assert (back.status, back.cluster.ids) == ("accepted", WHOLE.ids)

    def test_devices_come_back_to_where_they_were(self) -> None:
        less = resolved({"kind": "gone", "devices": [5, "host3/device0"]}).cluster
        assert less.num_devices + len(less.idle) == 6
        back = resolved({"kind": "added", "devices": [5, 6]}, less)
        assert sorted(back.cluster.ids) == list(range(8))

    def test_a_new_host(self) -> None:
        found = resolved({"kind": "added", "hosts": ["host4"]})
        assert found.cluster.num_devices == 10

    def test_late_and_repeated(self) -> None:
        less = WHOLE.without("host1")
        again = resolved({"kind": "gone", "hosts": ["host1"]}, less)
        assert (again.status, again.cluster) == ("late", less)
        assert "host1 is gone already" in again.reason
        there = resolved({"kind": "added", "hosts": ["host0"]}, less)
        assert (there.status, there.cluster) == ("repeated", less)
        some = resolved({"kind": "gone", "hosts": ["host1", "host2"]}, less)
        assert (some.status, some.cluster.ids) == ("accepted", (0, 1, 6, 7))
        assert resolved(str(WHOLE)).status == "repeated"

    def test_this_process(self) -> None:
        assert resolved({"kind": "gone"}).cluster.ids == (2, 3, 4, 5, 6, 7)
        alone = resolve_event(Event(kind="gone"), WHOLE, own=range(8))
        assert (alone.status, alone.cluster) == ("accepted", None)
        assert resolved({"kind": "gone", "hosts": [0]}, None).status == "late"

    @pytest.mark.parametrize(
        "data",
        [
            {"kind": "gone", "hosts": ["host9"]},
            {"kind": "gone", "hosts": [9]},
            {"kind": "gone", "devices": [8]},
            {"kind": "added", "devices": ["host0/gpu7"]},
            {"kind": "link", "level": "rack", "latency_s": 1e-6},
        ],
    )
    def test_refused(self, data: Any) -> None:
        found = resolved(data)
        assert found.status == "refused"
        assert found.reason
        assert found.cluster == WHOLE

    def test_a_link(self) -> None:
        level = WHOLE.levels[0].name
        rate = {"kind": "link", "level": level, "bandwidth_bytes_per_s": 1e9}
        slow = resolved(rate).cluster
        assert slow.levels[0].link.bandwidth_bytes_per_s == 1e9
        assert slow.fingerprint() != WHOLE.fingerprint()
        assert resolved(rate, slow).status == "repeated"
        # What leaves and comes back finds the slow link still.
        less = resolved({"kind": "gone", "hosts": ["host1"]}, slow).cluster
        back = resolved({"kind": "added", "hosts": ["host1"]}, less).cluster
        assert back.levels[0].link.bandwidth_bytes_per_s == 1e9

    @given(
        st.lists(
            st.builds(
                dict,
                kind=st.sampled_from(["gone", "added"]),
                devices=st.lists(st.integers(0, 8), max_size=3),
                hosts=st.lists(st.integers(0, 4), max_size=2),
            ),
            max_size=6,
        )
    )
    def test_any_order_ends_with_what_is_there(self, events: list[Any]) -> None:
        """The devices that are there are those of plain sets, whatever comes."""
        cluster: Cluster | None = WHOLE
        there = set(range(8))
        for data in events:
            try:
                event = Event.from_data(data)
            except EventError:
                continue
            found = resolve_event(event, cluster, own=(0, 1))
            assert found.status in STATUSES
            named = {
                *event.devices,
                *(2 * int(h) + k for h in event.hosts for k in (0, 1)),
            }
            if not (event.devices or event.hosts):
                named = {0, 1}
            if found.status == "accepted" and cluster is not None:
                there = there - named if event.kind == "gone" else there | named
            cluster = found.cluster
            if cluster is None:
                assert not there
                return
            idle = len(cluster.idle)
            assert len(there) == cluster.num_devices + idle
            assert set(cluster.ids) <= there


class TestInbox:
    def test_events_add_up(self) -> None:
        box, _ = inbox()
        box.put(Event(kind="gone", hosts=("host1",)))
        box.put(Event(kind="gone", hosts=("host2",)))
        taken = box.take()
        assert [x.status for x in taken] == ["accepted", "accepted"]
        assert taken[-1].cluster is not None
        assert taken[-1].cluster.ids == (0, 1, 6, 7)
        assert box.take() == ()

    def test_the_same_id_counts_once(self) -> None:
        box, ledger = inbox()
        event = Event(kind="gone", hosts=("host1",), id="x")
        assert box.put(event).status == "accepted"
        assert (
            box.put(Event(kind="added", hosts=("host1",), id="x")).status == "repeated"
        )
        assert [x["event"]["reason"] for x in ledger.lines] == [
            "its id has come before."
        ]

    def test_what_is_taken_back_changes_nothing(self) -> None:
        box, ledger = inbox()
        box.put(Event(kind="gone", hosts=("host1",)))
        box.put(Event(kind="added", hosts=("host1",)))
        assert box.take() == ()
        assert len(ledger.lines) == 2
        assert "takes it back" in ledger.lines[0]["event"]["reason"]

    def test_the_later_of_two_that_contradict(self) -> None:
        box, _ = inbox()
        box.put(Event(kind="cluster", cluster=Cluster.parse("2x2:h100")))
        box.put(Event(kind="cluster", cluster=Cluster.parse("1x2:h100")))
        assert str(box.take()[-1].cluster) == "1x2:h100"

    def test_after_a_refused_plan_events_count_from_the_old_cluster(self) -> None:
        box, _ = inbox()
        box.put(Event(kind="cluster", cluster=Cluster.parse("1x2:h100")))
        box.take()
        box.put(Event(kind="gone", hosts=("host0",)))
        box.settle(WHOLE)
        (found,) = box.take()
        assert found.cluster is not None
        assert found.cluster.ids == (2, 3, 4, 5, 6, 7)

    def test_what_the_world_lacks_is_refused(self) -> None:
        box, ledger = inbox()
        assert box.put(Event(kind="added", hosts=("host4",))).status == "refused"
        assert ledger.lines[0]["event"]["reason"] == "too many"
        assert box.take() == ()

    def test_a_flood_waits_in_bounds(self) -> None:
        box, _ = inbox()
        sizes = [Cluster.parse(f"{1 + k % 2}x2:h100") for k in range(400)]
        found = [box.put(Event(kind="cluster", cluster=c)).status for c in sizes]
        assert found.count("accepted") == 256
        assert found[-1] == "refused"
        assert len(box.take()) == 256
