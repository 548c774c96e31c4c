"""Tests users of a cluster: quotas, shares and priorities."""

from __future__ import annotations

import collections
import itertools
import pathlib
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import (
    Allocation,
    Decisions,
    JobView,
    Linear,
    Views,
    entitlements,
)
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import POLICIES, policy_of
from autopar.scheduler.simulator.engine import History, Options, simulate
from autopar.scheduler.simulator.jobs import StepJob
from autopar.scheduler.simulator.traces import philly
from autopar.scheduler.simulator.traces.philly import timed_job
from autopar.scheduler.simulator.traces.recorded import read_trace
from autopar.scheduler.users import UserLimits, decide_for_users, parse_users

NODES = Nodes.parse("4x4")


def view(name: str, user: str = "", **fields: object) -> JobView:
    given: dict[str, object] = {
        "submitted_s": 0.0, "age_s": 100.0, "served_device_s": 0.0, "progress": 0.0,
        "restarts": 0, "asked": 1, "most": 64, "tried": 64, "curve": Linear(),
        "measured": True, "restart_s": 1.0,
    }  # fmt: skip
    return JobView(name=name, application=name, user=user, **(given | fields))  # pyright: ignore


def counts(
    policy: str,
    views: Sequence[JobView],
    nodes: Nodes = NODES,
    users: Mapping[str, UserLimits] | None = None,
) -> dict[str, int]:
    """The devices of each job after three decisions."""
    made, jobs = policy_of(policy), {v.name: v for v in views}
    current: Mapping[str, Allocation] = {}
    for k in range(3):
        found = decide_for_users(made, 60.0 * k, jobs, nodes, current, users or {})
        current = {n: a for n, a in found.allocations.items() if a}
    return {name: len(current.get(name, ())) for name in jobs}


def by_user(views: Sequence[JobView], devices: Mapping[str, int]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for v in views:
        found[v.user] += devices[v.name]
    return dict(found)


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, 1 if all are equal (Jain, Chiu and Hawe, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))


@pytest.mark.parametrize("policy", ["fair", "goodput"])
class TestShares:
    @pytest.mark.parametrize("many", [2, 5, 8, 12])
    def test_many_jobs_of_a_user_get_as_much_as_one_of_another(
        self, policy: str, many: int
    ) -> None:
        views = [view(f"a{k}", "anna") for k in range(many)] + [view("b", "ben")]
        found = by_user(views, counts(policy, views))
        assert jain(list(found.values())) > 0.9  # sizes are powers of two

    def test_a_user_with_three_times_the_share_gets_it(self, policy: str) -> None:
        views = [view("a", "anna"), view("b1", "ben"), view("b2", "ben")]
        users = {"anna": UserLimits(share=3.0)}
        assert by_user(views, counts(policy, views, users=users))["anna"] >= 8

    def test_priority_counts_among_the_jobs_of_a_user(self, policy: str) -> None:
        high = view("high", "anna", priority=2.0)
        views = [view("low", "anna"), high, view("b", "ben")]
        found = counts(policy, views, Nodes.parse("12x1"))
        assert found["high"] > found["low"] > 0
        # It takes nothing of another user.
        assert found["b"] >= 4

    def test_a_user_without_another_gets_all(self, policy: str) -> None:
        views = [view("a", "anna"), view("b", "ben", most=1)]
        assert counts(policy, views)["a"] >= 8

    def test_of_more_jobs_than_devices_the_prior_ones_run(self, policy: str) -> None:
        views = [view(f"j{k}", priority=1.0 + (k > 3)) for k in range(8)]
        found = counts(policy, views, Nodes.parse("4x1"))
        assert [found[f"j{k}"] for k in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_jobs_that_are_alike_are_entitled_to_the_same() -> None:
    """To the last digit: nothing changes where nobody has users or priorities."""
    for n in range(1, 50):
        due = entitlements({f"j{k}": view(f"j{k}") for k in range(n)})
        assert set(due.values()) == {1.0}


def trace() -> list[StepJob]:
    drawn = random.Random(3)
    jobs = [
        timed_job(
            f"job{k}", drawn.uniform(0, 200), drawn.choice([1, 1, 2, 4]),
            drawn.uniform(60, 300), user=("anna", "ben", "carla")[k % 3],
            priority=drawn.choice([0.5, 1.0, 3.0]),
        )
        for k in range(15)
    ]  # fmt: skip
    return philly.running([("", job) for job in jobs], NODES.total, 30.0)


def most_at_once(history: History, user: str) -> int:
    """The most devices of a user at any time, by brute force."""
    own = {job.job.name for job in history.jobs if job.job.user == user}
    spans = [span for span in history.spans if span.job in own]
    edges = sorted({e for span in spans for e in (span.start_s, span.end_s)})
    return max(
        sum(len(s.allocation) for s in spans if s.start_s <= a and s.end_s >= b)
        for a, b in itertools.pairwise(edges)
    )


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_exceeds_a_quota_or_starves_a_job(name: str) -> None:
    users = {"anna": UserLimits(devices=4), "ben": UserLimits(devices=5, share=2.0)}
    history = simulate(trace(), NODES, policy_of(name), Options(users=users))
    assert all(job.completed_s is not None for job in history.jobs)
    assert 0 < most_at_once(history, "anna") <= 4
    assert 0 < most_at_once(history, "ben") <= 5
    assert most_at_once(history, "carla") > 5
    said = [r.compared for item in history.rounds for r in item.reasons]
    assert any(text.startswith("waits: user anna has") for text in said)


jobs_drawn = st.lists(
    st.tuples(
        st.sampled_from(["anna", "ben"]),
        st.integers(1, 6),  # asked
        st.integers(0, 8),  # more that it can use
        st.integers(1, 4),  # least
        st.floats(0.001, 1000.0),  # priority
        st.floats(0.0, 1e6),  # age
        st.booleans(),  # runs
    ),
    max_size=12,
)


class Greedy:
    """A user's policy that ignores quotas: each job gets all devices that fit."""

    name, adapts, oracle = "greedy", "devices", False

    def decide(
        self, now_s: float, jobs: Views, nodes: Nodes, current: Mapping[str, Allocation]
    ) -> Decisions:
        chosen: dict[str, Allocation] = {}
        for name in jobs:
            free = nodes.free(chosen)
            chosen[name] = tuple(k for k, n in enumerate(free) for _ in range(n))[:8]
        return Decisions(allocations=chosen)


@given(jobs_drawn, st.integers(0, 12), st.sampled_from(["fifo", "fair", "own"]))
def test_quotas_hold_whatever_there_was_before(
    drawn: list[tuple[str, int, int, int, float, float, bool]], quota: int, name: str
) -> None:
    """Also where jobs run on more than the quota, which is lower than it was."""
    views = {
        f"j{k}": view(
            f"j{k}", user, asked=max(asked, least), most=max(asked, least) + more,
            least=least, priority=priority, age_s=age_s,
        )
        for k, (user, asked, more, least, priority, age_s, _) in enumerate(drawn)
    }  # fmt: skip
    current: dict[str, Allocation] = {}
    for k, job in enumerate(drawn):
        free = NODES.free(current)
        if job[-1] and max(free) >= job[1]:
            current[f"j{k}"] = (free.index(max(free)),) * job[1]
    policy = Greedy() if name == "own" else policy_of(name)
    users = {"anna": UserLimits(devices=quota)}
    found = decide_for_users(policy, 0.0, views, NODES, current, users)  # pyright: ignore
    assert min(NODES.free(found.allocations)) >= 0
    given = {n: len(a) for n, a in found.allocations.items()}
    own = [n for n, v in views.items() if v.user == "anna"]
    assert sum(given.get(n, 0) for n in own) <= quota
    assert not any(given.get(n) for n in found.waits)
    needs = [views[n].asked if name == "fifo" else views[n].least for n in own]
    if any(need <= quota for need in needs):
        assert not set(own) <= found.waits.keys()


def test_a_job_that_waits_longest_is_the_next_whatever_its_priority() -> None:
    """And a large one is not passed by small ones for ever."""
    users = {"anna": UserLimits(devices=4)}
    runs = view("runs", "anna", asked=2)
    wide = view("wide", "anna", asked=4, age_s=900.0)
    small = view("small", "anna", asked=1, age_s=100.0, priority=3.0)
    views = {v.name: v for v in (runs, small, wide)}
    found = decide_for_users(
        policy_of("fifo"), 0.0, views, NODES, {"runs": (0, 0)}, users
    )
    assert found.allocations == {"runs": (0, 0)}
    assert found.waits["wide"].startswith("waits: user anna has 2 of its 4 devices")
    old = view("small", "anna", asked=1, age_s=400.0, priority=3.0)
    found = decide_for_users(
        policy_of("fifo"), 0.0, views | {"small": old}, NODES, {"runs": (0, 0)}, users
    )
    assert set(found.allocations) == {"runs", "small"}


def test_a_job_that_needs_more_than_a_quota_holds_up_nobody() -> None:
    users = {"anna": UserLimits(devices=2)}
    views = {v.name: v for v in (view("wide", "anna", asked=4), view("a", "anna"))}
    found = decide_for_users(policy_of("fifo"), 0.0, views, NODES, {}, users)
    assert set(found.allocations) == {"a"}
    assert found.waits == {"wide": "waits: it needs 4 devices and user anna may have 2"}


@pytest.mark.parametrize(
    ("quotas", "shares", "words"),
    [
        (["anna"], [], "--quota anna: write USER=8"),
        (["anna=x"], [], "--quota anna=x: give a number of devices"),
        ([], ["anna=x"], "a share is nan"),
        ([], ["anna=0"], "a share is 0"),
    ],
)
def test_what_is_wrong_of_a_user_is_named(
    quotas: list[str], shares: list[str], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        parse_users(quotas, shares)


def test_a_trace_may_say_whose_jobs_are(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.csv"
    head = "name,submitted_s,devices,duration_s,user,priority\n"
    path.write_text(head + "one,0,1,60,anna,2\ntwo,0,1,60,ben,1\n")
    jobs = read_trace(path, {}, NODES, policy_of("fair")).jobs
    assert [(j.job.user, j.job.priority) for j in jobs] == [("anna", 2), ("ben", 1)]
    path.write_text(head + "one,0,1,60,anna,0\n")
    with pytest.raises(ScheduleError, match="job 'one': priority is 0"):
        read_trace(path, {}, NODES, policy_of("fair"))


def test_devices_beyond_a_lowered_quota_are_given_to_others_at_once() -> None:
    views = {v.name: v for v in (view("a", "anna", asked=16), view("b", asked=16))}
    current = {"a": tuple(k for k in range(4) for _ in range(4))}
    users = {"anna": UserLimits(devices=0)}
    found = decide_for_users(policy_of("fifo"), 0.0, views, NODES, current, users)
    assert {name: len(a) for name, a in found.allocations.items() if a} == {"b": 16}
    assert [(r.job, r.kept) for r in found.reasons if r.job == "a"] == [("a", 16)]
