"""Tests that the runtime's buckets are the collectives of the cost model."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import Message
from autopar.compression.gradient import Gradient
from autopar.layouts.summation import Bucket, Summation, bucket_messages
from autopar.plans import GradientDecision
from autopar.runtime.gradients.sums import GradientSums, Member

ROUNDS = (Message("all_to_all", 8.0, 4.0), Message("all_gather", 8.0, 4.0))
WITHIN = (Message("reduce_scatter", 8.0, 4.0), Message("all_gather", 8.0, 4.0))

axes = st.permutations([0, 1, 2]).flatmap(
    lambda order: st.integers(1, 2).map(lambda cut: (order[:cut], order[cut:]))
)
gradients = st.lists(st.tuples(st.integers(0, 1), axes, st.booleans()), max_size=8)
Drawn = tuple[int, tuple[list[int], list[int]], bool]


def member(value: int, drawn: Drawn) -> Member:
    number, (slow, fast), layered = drawn
    within = tuple(fast) if layered else ()
    summation = Summation(tuple(slow), 2, (4, 4), None, within, 0 if within else -1)
    made = GradientDecision(
        name=f"w{value}",
        value=value,
        shape=(4, 4),
        local_shape=(4, 4),
        axes=(),
        workers=2,
        codec="dense",
        bucket=number,
    )
    gradient = Gradient(made.name, made.shape, parse_codec("dense"))
    return Member(made, gradient, summation, ((), (), ()), ((), ()), ((), ()))


def sums_of(drawn: list[Drawn]) -> GradientSums:
    return GradientSums(None, {v: member(v, each) for v, each in enumerate(drawn)})


@given(gradients)
def test_travelling_together_is_an_equivalence(drawn: list[Drawn]) -> None:
    sums = sums_of(drawn)
    groups = {value: sums.together(value) for value in sums.members}
    for value, group in groups.items():
        assert value in group
        assert all(groups[other] == group for other in group)
    assert sums.together(len(drawn)) == frozenset()


@given(gradients)
def test_the_runtime_sums_together_what_the_costs_send_together(
    drawn: list[Drawn],
) -> None:
    sums = sums_of(drawn)
    carried = {
        value: {
            shared
            for shared, _ in bucket_messages(
                Bucket(m.decision.bucket, m.summation.axes, m.summation.within),
                ROUNDS,
                WITHIN if m.summation.within else (),
            )
        }
        for value, m in sums.members.items()
    }
    for one, other in itertools.combinations(sums.members, 2):
        together = other in sums.together(one)
        assert together == (carried[one] == carried[other])
        assert together or not carried[one] & carried[other]


def test_rounds_kinds_and_links_are_apart() -> None:
    bucket = Bucket(0, (1, 0), (2,))
    found = [shared for shared, _ in bucket_messages(bucket, ROUNDS, WITHIN)]
    assert len(set(found)) == 4
    assert [shared.axes for shared in found] == [(1, 0), (1, 0), (2,), (2,)]
