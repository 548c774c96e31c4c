"""Tests a cache of the most recently used values."""

from __future__ import annotations

import pytest

from autopar.runtime.recent import Recent


def test_the_one_used_longest_ago_goes() -> None:
    gone: list[str] = []
    recent = Recent[int, str](2, gone.append)
    recent.put(1, "one")
    recent.put(2, "two")
    assert recent.get(1) == "one"
    recent.put(3, "three")

    assert gone == ["two"]
    assert list(recent) == [1, 3]
    assert len(recent) == 2
    assert recent.get(2) is None


def test_peek_changes_no_order() -> None:
    recent = Recent[int, str](2)
    recent.put(1, "one")
    recent.put(2, "two")
    assert recent.peek(1) == "one"
    assert list(recent) == [1, 2]


def test_a_value_that_is_replaced_is_dropped() -> None:
    gone: list[str] = []
    recent = Recent[int, str](2, gone.append)
    first, second = "first", "second"
    recent.put(1, first)
    recent.put(1, first)
    assert gone == []
    assert recent.put(1, second) == "second"
    assert gone == ["first"]


def test_discard() -> None:
    gone: list[str] = []
    recent = Recent[int, str](4, gone.append)
    for k, text in enumerate(("a", "bb", "cc")):
        recent.put(k, text)
    recent.discard(lambda text: len(text) == 2)
    assert gone == ["bb", "cc"]
    assert list(recent) == [0]


def test_room_for_none() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Recent[int, int](0)
