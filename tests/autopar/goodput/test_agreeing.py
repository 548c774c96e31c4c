"""Tests that processes follow the first one's decision, once none is busy."""

from __future__ import annotations

from typing import Any

import memory_channel

from autopar.goodput.choice import Decision, Judged, Way
from autopar.goodput.studies import Said, agree_on_first, key_of, with_key
from autopar.goodput.throughput import Terms
from autopar.goodput.ways import Key
from autopar.runtime.world import LoneChannel, World

ONE, OTHER = Key(64, 1, "int8"), Key(32, 2, "none")


def told(*own: Said) -> list[Any]:
    def run(world: World) -> Said:
        return agree_on_first(world, own[world.process_index])

    return memory_channel.everywhere(run, range(len(own)), len(own))


def test_the_first_decides() -> None:
    found = told(Said(key=ONE), Said(studies=True, key=OTHER), Said())
    assert found == [Said(key=ONE)] * 3


def test_all_wait_for_one_that_is_busy() -> None:
    found = told(Said(studies=True), Said(busy=True))
    assert [x.busy for x in found] == [True, True]


def test_one_process_says_all_itself() -> None:
    own = Said(busy=False, studies=True, key=ONE)
    assert agree_on_first(World((0,), channel=LoneChannel()), own) is own


def judged(key: Key) -> Judged:
    terms = Terms(devices=2, hosts=2, rows=key.rows, work_s=1.0)
    way = Way(
        rows=key.rows, microbatches=key.microbatches, codecs=key.codecs, terms=terms
    )
    numbers = dict.fromkeys(("step_s", "efficiency", "goodput", "least", "pays"), 1.0)
    return Judged(way=way, **numbers)


def test_another_process_writes_down_what_the_first_has_chosen() -> None:
    current, one, other = map(judged, (Key(32, 1, "none"), ONE, OTHER))
    own = Decision(current, current, (current, one, other), 60.0)
    assert key_of(own) is None
    found = with_key(own, OTHER)
    assert found.chosen is other
    assert key_of(found) == OTHER
    assert with_key(own, Key(8, 1, "none")) == own  # it has not compared that
