"""Tests clocks that read the time, and clocks that count work to be reproducible."""

import math
import time

import pytest

from autopar_solver.clock import Clock


@pytest.fixture
def at(monkeypatch):
    """Sets the time that ``time.monotonic`` returns."""
    told = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: told[0])

    def move(seconds):
        told[0] = seconds

    return move


def test_reads_the_time(at):
    clock = Clock(100.0, 10.0)
    at(104.0)
    assert (clock.now, clock.left_s, clock.spent_s) == (104.0, 6.0, 4.0)
    assert not clock.counted
    assert not clock.out
    clock.tick(5.0)
    assert clock.left_s == 6.0


def test_counts_work_without_a_limit(at):
    clock = Clock(100.0, None)
    at(1e6)
    assert clock.counted
    assert (clock.now, clock.left_s) == (0.0, math.inf)
    clock.tick(3.0)
    assert not clock.out
    assert clock.now == 3.0
    assert clock.spent_s == 1e6 - 100.0


def test_within_ends_no_later_than_the_whole(at):
    clock = Clock(100.0, 10.0)
    at(104.0)
    short, long = clock.within(2.0), clock.within(60.0)
    assert (short.left_s, short.end, short.length) == (2.0, 106.0, 2.0)
    assert (long.left_s, long.end, long.length) == (6.0, 110.0, 6.0)
    at(107.0)
    assert short.left_s == -1.0
    assert short.out
    assert not long.out
    assert clock.left_s == 3.0


def test_clocks_within_one_count_the_same_work():
    clock = Clock(0.0, None)
    inner = clock.within(2.0)
    inner.tick(1.5)
    assert clock.now == 1.5
    assert inner.left_s == 0.5
    assert inner.within(9.0).left_s == 0.5
    clock.tick(1.0)
    assert inner.left_s == -0.5


def test_another_timer_tells_the_time(at):
    told = [5.0]
    clock = Clock(5.0, 2.0, lambda: told[0])
    at(1e9)
    assert clock.left_s == 2.0
    told[0] = 8.0
    assert clock.out
    assert clock.spent_s == 3.0
