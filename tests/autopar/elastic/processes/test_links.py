"""Tests that changes of links are found from the traffic of steps."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import pytest

from autopar.elastic.processes.links import LinkWatch, SentBytes, Traffic

MB = 1e6


def changes(*rates: Sequence[float], tell_s: float = 1.0) -> list[tuple[float, float]]:
    """The times at which a change is reported, and its factor.

    Args:
      rates: bytes per second in each second, for each worker; 0: it sends nothing.
      tell_s: seconds between two messages of a worker.
    """
    watch, found = LinkWatch(), []
    watch.begin(100.0)
    for k in range(0, len(rates[0]), round(tell_s)):
        for worker, mine in enumerate(rates):
            sent = SentBytes(round(mine[k] * 0.2), 0.2 if mine[k] else 0.0)
            if (factor := watch.take(100.0 + k, worker, sent)) is not None:
                found.append((k, factor))
    return found


def test_a_link_that_stays_is_no_event() -> None:
    wobbling = [MB * 10 * (1 + 0.3 * (-1) ** k) for k in range(300)]
    assert changes(wobbling, wobbling[::-1]) == []


def test_a_slower_link_is_told_once() -> None:
    """Of one worker among three: all wait for it."""
    slow = [10 * MB] * 60 + [5 * MB] * 200
    found = changes([10 * MB] * 260, slow, [12 * MB] * 260)
    ((when, factor),) = found
    assert factor == pytest.approx(0.5)
    assert 60 + 25 <= when <= 60 + 40


def test_a_faster_link_is_told_where_all_are_faster() -> None:
    fast = [5 * MB] * 60 + [100 * MB] * 200
    assert changes(fast, [5 * MB] * 260) == []
    ((when, factor),) = changes(fast, [5 * MB] * 60 + [50 * MB] * 200)
    assert factor == pytest.approx(10)
    assert when <= 60 + 40


def test_what_passes_in_less_than_half_a_minute_is_no_event() -> None:
    assert changes([10 * MB] * 60 + [MB] * 20 + [10 * MB] * 100) == []


def test_a_change_is_expected_before_it_counts() -> None:
    """So that a plan is ready when it does."""
    watch, found = LinkWatch(), []
    watch.begin(0.0)
    for k in range(80):
        rate = 10 * MB if k < 60 else MB
        assert watch.take(float(k), 0, SentBytes(round(rate), 1.0)) is None
        if (factor := watch.expect()) is not None:
            found.append((k, factor))
    ((when, factor),) = found
    assert factor < 0.5
    assert 60 + 5 <= when <= 60 + 15


def test_few_bytes_say_nothing() -> None:
    assert changes([10 * MB] * 60 + [1e3] * 100) == []
    assert changes([1e3] * 60 + [10 * MB] * 100) == []


def test_another_world_begins_anew() -> None:
    """What it gets is what was planned for."""
    watch = LinkWatch()
    for begin, rate in ((0.0, 10 * MB), (100.0, MB)):
        watch.begin(begin)
        for k in range(100):
            assert watch.take(begin + k, 0, SentBytes(round(rate), 1.0)) is None


def test_what_a_connection_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays on a host is left out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        traffic = Traffic("10.0.0.1")
        assert traffic.take() == SentBytes(0, 0.0)
        monkeypatch.setattr(traffic, "_is_local", lambda _: False)
        before = traffic.take()
        size = 1 << 22
        reading = threading.Thread(
            target=lambda: [other.recv(1 << 16, socket.MSG_WAITALL) for _ in range(64)]
        )
        reading.start()
        own.sendall(bytes(size))
        reading.join()
        found = traffic.take()
        assert before.nbytes < size
        assert size <= found.nbytes < size + 1000
        assert 0 <= found.busy_s < 60  # the kernel counts in jiffies
        own.close()
        other.close()
