"""Orders to prepare plans and programs, and the processes that get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import msgspec
import pytest

import autopar
from autopar import Cluster
from autopar.elastic.processes import preparing
from autopar.elastic.processes.preparing import Preparer
from autopar.plans import Plan

ERRORS = {"w": {"int8": 0.01}}


class FakeProcess:
    """A preparing process that answers when it is told to."""

    made: list[FakeProcess]

    def __init__(self, answer: Callable[..., Any], *, nice: int) -> None:
        self.answer, self.nice = answer, nice
        self.orders: list[Any] = []
        self.is_open, self.closed = True, False
        self.made.append(self)

    def send(self, order: Any) -> None:
        self.orders.append(order)

    def clusters(self) -> list[Any]:
        return [order["cluster"] for order in self.orders]

    def close(self) -> None:
        self.closed = True

    def finish(self, **more: Any) -> None:
        """Answers the oldest order."""
        order = self.orders.pop(0)
        self.answer(order, {"number": order["number"], "plan_s": 1.0, **more})


class Preparation:
    """A preparer, what it says, and its processes."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.remembered: list[Any] = []
        self.preparer = Preparer(self.say, lambda: 32, lambda: ERRORS, self.remember)

    def remember(self, cluster: Cluster, plan: Plan) -> None:
        self.remembered.append((cluster, plan))

    def say(self, kind: str, **data: Any) -> None:
        assert kind == "prepared"
        self.said.append(data)

    def order(self, number: int, cluster: str, *, expected: bool = False) -> None:
        order = {"number": number, "processes": 4, "cluster": cluster}
        self.preparer.take({**order, "expected": expected})

    @property
    def alive(self) -> FakeProcess:
        (found,) = [x for x in FakeProcess.made if not x.closed]
        return found


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Preparation:
    monkeypatch.setattr(preparing, "PreparingProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "made", [], raising=False)
    return Preparation()


def test_guesses_are_prepared_once_at_the_lowest_priority(there: Preparation) -> None:
    for cluster in ("a", "b", "a"):
        there.order(0, cluster)
    assert there.alive.nice == 19
    assert there.alive.clusters() == ["a", "b"]


def test_an_order_ends_guesses(there: Preparation) -> None:
    there.order(0, "a")
    there.order(1, "b")
    assert (there.alive.nice, there.alive.clusters()) == (0, ["b"])
    there.alive.finish()
    assert there.said[-1]["number"] == 1
    assert all(x.closed for x in FakeProcess.made)


def test_an_order_goes_to_the_process_that_expected_it(there: Preparation) -> None:
    """Whether it still plans for the expected cluster, or has planned for it."""
    there.order(0, "slow", expected=True)
    first = there.alive
    assert first.nice == 0
    there.order(1, "slow")
    assert there.alive is first
    first.finish()
    assert there.said[-1]["number"] < 0
    first.finish()
    assert there.said[-1]["number"] == 1


def test_another_order_than_the_expected_one_is_not_kept_waiting(
    there: Preparation,
) -> None:
    there.order(0, "slow", expected=True)
    there.order(1, "slower")
    assert there.alive.clusters() == ["slower"]


def test_guesses_follow_a_change_that_did_not_last(there: Preparation) -> None:
    there.order(0, "slow", expected=True)
    there.order(0, "a")
    assert there.alive.clusters() == ["slow"]
    there.alive.finish()
    there.order(0, "a")
    assert (there.alive.nice, there.alive.clusters()) == (19, ["a"])


def test_a_process_that_has_ended_gets_no_order(there: Preparation) -> None:
    there.order(0, "slow", expected=True)
    there.alive.finish()
    there.alive.is_open = False
    there.order(1, "slow")
    assert len(FakeProcess.made) == 2
    assert there.alive.clusters() == ["slow"]


def test_a_plan_with_measured_errors_is_remembered_for_the_next_world(
    there: Preparation,
) -> None:
    """Such a plan is not stored, so the next world would make another one."""
    w = jax.ShapeDtypeStruct((8, 8), "float32")
    plan = autopar.plan(lambda w: w + 1.0, w, cluster="2x1:cpu")
    there.order(0, "a")
    assert there.alive.orders[0]["errors"] == {}
    there.order(1, "slow")
    assert there.alive.orders[0]["errors"] == ERRORS
    text = msgspec.json.encode(plan).decode()
    there.alive.finish(plan=text, on=Cluster.parse("2x1:cpu").to_data())
    assert there.remembered == [(Cluster.parse("2x1:cpu"), plan)]
    assert not there.said[-1].keys() & {"plan", "on"}
