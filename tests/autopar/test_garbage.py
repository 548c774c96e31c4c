"""Tests that the garbage collector is paused only during analysis and planning."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from autopar.garbage import collector_paused
from autopar.steps.analysis import analyse


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Turns the collector on before each test, and restores it afterwards."""
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_goes_on_after_it() -> None:
    with collector_paused():
        assert not gc.isenabled()

    assert gc.isenabled()


def test_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")

    assert gc.isenabled()


def test_the_outer_pause_holds() -> None:
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()

    assert gc.isenabled()


def test_stays_off_where_it_was_off() -> None:
    gc.disable()

    with collector_paused():
        pass

    assert not gc.isenabled()


def test_rests_while_a_step_is_traced() -> None:
    seen: list[bool] = []

    def step(x):  # type: ignore[no-untyped-def]
        seen.append(gc.isenabled())
        return x + 1.0

    analyse(step, (jnp.ones((8, 8)),))

    assert seen
    assert not any(seen)
    assert gc.isenabled()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Unfreezes all objects, and freezes them again afterwards."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    (gc.freeze if frozen else gc.unfreeze)()


@pytest.mark.usefixtures("thawed")
def test_what_stays_is_not_visited_again_at_once() -> None:
    with collector_paused():
        made: list[list[int]] = [[] for _ in range(10_000)]

    young = sum(len(gc.get_objects(generation=k)) for k in (0, 1))

    assert young < len(made)


@pytest.mark.usefixtures("thawed")
def test_cycles_are_freed_by_a_full_collection() -> None:
    class Node:
        me: Node

    with collector_paused():
        node = Node()
        node.me = node
        kept = weakref.ref(node)
        del node
    assert kept() is not None

    gc.collect()

    assert kept() is None


@pytest.mark.usefixtures("thawed")
def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()

    with collector_paused():
        pass

    # Some of them may have been freed meanwhile.
    assert gc.get_freeze_count() > before // 2 > 0
