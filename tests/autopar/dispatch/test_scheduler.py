"""Tests rounds of a scheduler over imitated jobs: moves, deaths and restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sqlite3

import msgspec
import numpy as np
import pytest
from dispatching import BATCH, HALVES, World, curve, handed

from autopar.dispatch.backend import ClusterNode, Ending
from autopar.dispatch.scheduler import SchedulerSettings
from autopar.dispatch.store import Store
from autopar.dispatch.views import MOVES, view_of
from autopar.errors import ScheduleError
from autopar.goodput.choice import efficiency
from autopar.goodput.curves import CurveTable
from autopar.scheduler.jobs import Rounds
from autopar.scheduler.users import UserLimits


def two(folder: pathlib.Path, **fields: object) -> World:
    """A long job, and a job that is submitted 15 s later."""
    jobs = [handed("one", max=4), handed("two", max=4, submitted_s=15.0)]
    return World(folder, jobs, {"one": 300, "two": 60}, **fields)  # pyright: ignore


def test_a_job_takes_all_shrinks_for_another_and_grows_again(
    tmp_path: pathlib.Path,
) -> None:
    world = two(tmp_path)
    world.rounds(2)
    assert world.given() == {"one": 4}
    assert world.states()["two"] == "pending"
    world.rounds(1)
    assert world.given() == {"one": 2, "two": 2}
    assert world.trainings.started == [("one", 1), ("two", 1)]
    world.scheduler.run()
    assert set(world.states().values()) == {"done"}
    moves = [sum(places.values()) for name, places in world.trainings.moved]
    assert moves[0] == 2
    assert moves[-1] == 4


def test_a_job_that_ends_gives_its_devices_away_at_once(tmp_path: pathlib.Path) -> None:
    """Looks are 2 s apart, decisions without an event 10 s."""
    world = two(tmp_path)
    world.scheduler.run()
    store = Store(world.path, reads=True)
    begun = {line["job"]: line["at_s"] for line in reversed(store.decisions())}
    # Handed in at 15 s: the look after it is at 16 s, the next interval ends at 20 s.
    assert begun == {"one": 0.0, "two": 16.0}
    two_ended = world.scheduler.jobs["two"].ended_s
    assert two_ended is not None
    grown = [
        line["at_s"]
        for line in store.decisions()
        if line["job"] == "one" and line["at_s"] > two_ended - 2.0
    ]
    assert grown[0] - two_ended < 2.0
    assert all(line["at_s"] % 2 == 0 for line in store.decisions())


def test_a_node_that_leaves_between_two_intervals_calls_for_a_decision(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 4000})
    times = Rounds(10.0, 2.0, first_s=0.0)
    for _ in range(3):
        world.scheduler.round(times)
        world.clock.sleep(2.0)
    gone = world.cluster.found.pop()
    world.scheduler.round(times)
    assert gone.name not in world.scheduler.jobs["one"].places
    world.cluster.found.append(ClusterNode("n9", 1))
    world.clock.sleep(2.0)
    world.scheduler.round(times)
    assert "n9" in world.scheduler.jobs["one"].places


def test_a_job_that_lost_its_workers_waits_for_the_interval(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 4000})
    times = Rounds(10.0, 2.0, first_s=0.0)
    for at_s in range(0, 12, 2):
        if at_s == 4:
            world.trainings.lose("one")
        world.scheduler.round(times)
        waits = 4 <= at_s < 10
        assert world.states() == {"one": "waiting" if waits else "running"}
        world.clock.sleep(2.0)
    assert world.trainings.started == [("one", 1), ("one", 2)]


def test_no_device_is_given_out_twice(tmp_path: pathlib.Path) -> None:
    world = two(tmp_path)
    for _ in range(12):
        world.rounds(1)
        used = [p for job in world.scheduler.jobs.values() for p in job.places]
        assert len(used) == len(set(used))


def test_a_preempted_job_goes_on_later(tmp_path: pathlib.Path) -> None:
    """The one that was served least runs; the other saves, and waits."""
    jobs = [handed("one", devices=4), handed("two", devices=4, submitted_s=15.0)]
    world = World(tmp_path, jobs, {"one": 2000, "two": 30}, policy="gavel")
    world.rounds(45)
    assert world.states()["two"] == "done"
    assert world.trainings.started == [("one", 1), ("two", 1), ("one", 2)]
    assert world.scheduler.jobs["one"].moves == 1
    before = world.scheduler.jobs["one"].step
    assert before > 360 * 26 / BATCH * 0.9
    world.scheduler.run()
    assert world.scheduler.jobs["one"].step == 2000


@pytest.mark.parametrize("rounds", range(1, 12))
def test_a_scheduler_that_is_killed_loses_no_job(
    rounds: int, tmp_path: pathlib.Path
) -> None:
    """Jobs that run are found again, ended ones stay ended; no job starts twice."""
    world = two(tmp_path)
    world.rounds(rounds)
    before = world.states()
    world.clock.sleep(4.0)
    again = world.again()
    assert world.states() == before
    again.run()
    assert set(world.states().values()) == {"done"}
    assert world.trainings.started == [("one", 1), ("two", 1)]
    spans = again._store.spans()  # pyright: ignore[reportPrivateUsage]
    assert all(span["end_s"] is not None for span in spans)


def test_a_start_that_was_decided_and_not_done_is_done(tmp_path: pathlib.Path) -> None:
    """The scheduler died between the store and the start of the job's process."""
    world = two(tmp_path)
    world.rounds(1)
    world.trainings.of.clear()
    world.trainings.started.clear()
    world.again()
    assert world.trainings.started == [("one", 1)]


def test_a_move_that_was_not_told_is_told_again(tmp_path: pathlib.Path) -> None:
    world = two(tmp_path)
    world.rounds(2)
    world.trainings.deaf.add("one")
    world.rounds(1)
    assert world.trainings.moved == []
    world.trainings.deaf.clear()
    world.rounds(1)
    (name, places) = world.trainings.moved[0]
    assert (name, places) == ("one", world.scheduler.jobs["one"].places)


def test_a_job_that_dies_at_its_start_fails_alone(tmp_path: pathlib.Path) -> None:
    world = two(tmp_path)
    why = "worker 0 ended with code 3 before it joined the run"
    world.trainings.fails["two"] = Ending(code=3, reason=why)
    world.scheduler.run()
    assert world.states() == {"one": "done", "two": "failed"}
    assert world.scheduler.jobs["two"].reason == why
    assert any("job two is failed" in text for text in world.said)


def test_a_job_whose_loss_is_nan_fails_at_once(tmp_path: pathlib.Path) -> None:
    """It gives its devices back long before its steps are done."""
    world = two(tmp_path)
    world.trainings.losses["two"] = float("nan")
    world.scheduler.run()
    assert world.states() == {"one": "done", "two": "failed"}
    failed, done = (world.scheduler.jobs[name] for name in ("two", "one"))
    assert failed.reason == f"its loss is not finite after {failed.step} steps"
    assert 0 < failed.step < 60
    assert failed.ended_s is not None
    assert done.ended_s is not None
    assert failed.ended_s < done.ended_s
    assert not failed.places


def test_a_job_that_loses_its_workers_starts_again(tmp_path: pathlib.Path) -> None:
    """Three losses in a row without a step are too many; a step begins anew."""
    world = two(tmp_path)
    world.rounds(3)
    for attempt in (2, 3, 4):
        world.trainings.lose("one")
        world.rounds(2)
        assert world.scheduler.jobs["one"].attempt == attempt
    for _ in range(3):
        world.scheduler.round()
        world.trainings.lose("one")
    world.scheduler.round()
    assert world.states()["one"] == "failed"
    assert "workers are left" in world.scheduler.jobs["one"].reason
    world.scheduler.run()
    assert world.states()["two"] == "done"


class TestNodes:
    def test_a_job_goes_on_without_a_node_that_leaves(
        self, tmp_path: pathlib.Path
    ) -> None:
        world = World(tmp_path, [handed("one", max=4)], {"one": 400})
        world.rounds(2)
        gone = world.cluster.found.pop(1)
        world.rounds(1)
        assert gone.name not in world.scheduler.jobs["one"].places
        assert world.given() == {"one": 3}
        assert world.trainings.started == [("one", 1)]
        world.cluster.found.append(ClusterNode("n9", 1))
        world.rounds(1)
        assert world.given() == {"one": 4}

    def test_a_policy_that_changes_nothing_gives_what_was_asked_for(
        self, tmp_path: pathlib.Path
    ) -> None:
        """On fewer devices it waits until there are enough again."""
        world = World(tmp_path, [handed("one", devices=4)], {"one": 400}, policy="fifo")
        world.rounds(2)
        gone = world.cluster.found.pop()
        world.rounds(1)
        assert world.states() == {"one": "waiting"}
        world.cluster.found.append(gone)
        world.rounds(1)
        assert world.given() == {"one": 4}
        assert world.trainings.started == [("one", 1), ("one", 2)]

    def test_no_node_at_all(self, tmp_path: pathlib.Path) -> None:
        world = World(tmp_path, [handed("one", max=4)], {"one": 100})
        world.rounds(2)
        found, world.cluster.found = world.cluster.found, []
        world.trainings.lose("one")
        world.rounds(2)
        assert world.states() == {"one": "waiting"}
        world.cluster.found = found
        world.scheduler.run()
        assert world.states() == {"one": "done"}


def test_a_job_that_does_not_give_its_devices_back_is_killed(
    tmp_path: pathlib.Path,
) -> None:
    jobs = [handed("one", devices=4), handed("two", devices=4, submitted_s=15.0)]
    world = World(tmp_path, jobs, {"one": 5000, "two": 30}, policy="gavel")
    world.rounds(30)
    world.trainings.deaf.add("one")
    world.rounds(12)
    assert any("is killed" in text for text in world.said)
    assert world.trainings.started == [("one", 1), ("two", 1), ("one", 2)]
    assert world.states() == {"one": "running", "two": "done"}


def test_decisions_are_kept_with_their_reasons(tmp_path: pathlib.Path) -> None:
    world = two(tmp_path)
    world.scheduler.run()
    store = Store(world.path, reads=True)
    decisions = store.decisions()
    assert {line["job"] for line in decisions} == {"one", "two"}
    assert all("configurations" in line["compared"] for line in decisions)
    starts = [x["cost_s"] for x in decisions if not x["kept"]]
    moves = [x["cost_s"] for x in decisions if x["kept"] and x["devices"]]
    assert set(starts) == {5.0}
    # A move counts as no cheaper than a start.
    assert set(moves) <= {5.0}


def test_progress_and_service_are_counted(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one", max=2)], {"one": 60})
    world.rounds(3)
    job = world.scheduler.jobs["one"]
    assert job.served_device_s == pytest.approx(40.0)
    assert (job.step, job.position) == (37, 37 * BATCH)
    assert job.tried == 2


def test_a_store_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "state.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as file:
        file.execute("update facts set value = '9' where key = 'schema'")
    with pytest.raises(ScheduleError, match=r"schema 9.*another --state"):
        Store(path)
    with pytest.raises(ScheduleError, match="no scheduler's state"):
        Store(tmp_path / "other.sqlite", reads=True)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_an_interval_that_cannot_be(seconds: float) -> None:
    with pytest.raises(ScheduleError, match="the interval is"):
        SchedulerSettings(interval_s=seconds)


def test_a_job_waits_rather_than_run_on_too_few(tmp_path: pathlib.Path) -> None:
    """An equal share is below what it can use, until the other has ended."""
    jobs = [handed("one", devices=3, min=3), handed("two", devices=3, max=4)]
    world = World(tmp_path, jobs, {"one": 60, "two": 60}, policy="fair")
    world.rounds(1)
    assert world.given() == {"two": 2}
    assert any("below min = 3" in text for text in world.said)
    world.scheduler.run()
    assert set(world.states().values()) == {"done"}


@pytest.mark.parametrize(
    ("policy", "fields", "needs"),
    [
        ("fifo", {"devices": 6, "max": 6}, 6),
        ("goodput", {"devices": 8, "min": 6, "max": 8}, 6),
    ],
)
def test_a_job_larger_than_the_cluster_waits_for_nodes(
    policy: str, fields: dict[str, int], needs: int, tmp_path: pathlib.Path
) -> None:
    """It says why, and holds up none of those behind it."""
    jobs = [handed("wide", table=curve(*range(1, 9)), **fields), handed("small")]
    world = World(tmp_path, jobs, {"wide": 20, "small": 30}, policy=policy)
    world.rounds(6)
    assert world.states() == {"wide": "waiting", "small": "done"}
    reason = world.scheduler.jobs["wide"].reason
    assert reason.startswith(f"it needs {needs} devices and the cluster has 4")
    assert sum(reason in line for line in world.said) == 1
    world.cluster.found += [ClusterNode(f"new{k}", 1) for k in range(4)]
    world.scheduler.run()
    assert world.states()["wide"] == "done"
    assert world.scheduler.jobs["wide"].reason == ""


def test_a_job_that_runs_on_other_kinds_waits(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one")], {"one": 5})
    world.cluster.found = [ClusterNode("a", 2, kind="h100")]
    world.rounds(2)
    assert world.states() == {"one": "waiting"}
    assert "it runs on cpu and the cluster has h100" in world.said[0]


def test_owners_hold_release_and_cancel_their_jobs(tmp_path: pathlib.Path) -> None:
    """The scheduler heeds what stands in the store, and a cancelled job is not done."""
    names = ["held", "runs", "waits", "other"]
    world = World(tmp_path, [handed(name) for name in names], dict.fromkeys(names, 90))
    store = Store(world.path)
    world.rounds(2)
    store.wish(["held"], "hold")
    store.wish(["runs", "waits"], "cancel")
    world.rounds(1)
    assert "held" not in world.given()
    shown = {name: job.shown_state for name, job in world.scheduler.jobs.items()}
    assert shown["held"] == "held"
    assert shown["runs"] == shown["waits"] == "cancelled"
    at = world.trainings.done["held"]
    world.rounds(4)
    assert world.trainings.done["held"] == at > 0
    store.wish(["held", "runs"], "")
    world.scheduler.run()
    assert world.states() == {
        "held": "done", "runs": "cancelled", "waits": "cancelled", "other": "done"
    }  # fmt: skip
    assert world.trainings.done["runs"] < 90


def test_a_cancelled_job_without_a_process_is_not_started(tmp_path: pathlib.Path):
    world = World(tmp_path, [handed("one"), handed("two")], {"one": 90, "two": 9})
    world.rounds(1)
    Store(world.path).wish(["one"], "cancel")
    del world.trainings.of["one"]
    begun = list(world.trainings.started)
    world.again().run()
    assert world.states() == {"one": "cancelled", "two": "done"}
    assert [name for name, _ in world.trainings.started[len(begun) :]] in ([], ["two"])


def test_a_job_that_comes_later_counts_from_then(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one")], {"one": 60, "late": 6})
    world.rounds(3)
    Store(world.path).add_jobs([handed("late", submitted_s=5.0)], world.scheduler.now_s)
    world.rounds(1)
    assert world.states()["late"] == "pending"
    world.scheduler.run()
    late = world.scheduler.jobs["late"]
    assert late.submitted_s == 35.0
    assert late.state == "done"
    assert late.data["submitted_s"] == 35.0


NEW = {
    2: ("handed_s", "wish"),
    3: ("batch", "noise_scale", "microbatches", "scheme", "codecs", "worth",
        "submission"),
}  # fmt: skip


def as_schema(path: pathlib.Path, schema: int) -> None:
    """Removes the columns that later schemas have added."""
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        for column in (c for k, new in NEW.items() if k > schema for c in new):
            file.execute(f"alter table jobs drop column {column}")
        file.execute("update facts set value = ? where key = 'schema'", (str(schema),))


def test_a_state_of_the_second_schema_is_taken_up(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one")], {"one": 90})
    world.rounds(2)
    as_schema(world.path, 2)
    job = Store(world.path, reads=True).job("one")
    assert (job.batch, job.noise_scale, job.worth) == (0, None, None)
    world.again().run()
    assert world.states() == {"one": "done"}


def test_what_a_job_measures_is_what_its_policy_is_told(
    tmp_path: pathlib.Path,
) -> None:
    """Noise scale, batch and seconds; it outlives the scheduler's lines."""
    table = msgspec.structs.replace(HALVES, max_batch=64)
    world = World(tmp_path, [handed("one", table=table, max=4)], {"one": 400})
    told = {
        "batch": 4 * BATCH, "step_s": 0.5, "steps": 5, "noise_scale": 300.0,
        "progress": 40.0, "codecs": ["int8"], "microbatches": 2,
    }  # fmt: skip
    world.trainings.tells["one"] = told
    world.rounds(4)
    job = world.scheduler.jobs["one"]
    assert (job.batch, job.noise_scale, job.worth) == (4 * BATCH, 300.0, 40.0)
    assert (job.microbatches, job.codecs) == (2, "int8")
    lines = world.scheduler._lines["one"]  # pyright: ignore[reportPrivateUsage]
    view = view_of(job, 60.0, ("cpu",), MOVES, lines)
    assert (view.progress, view.left) == (40.0, None)
    spec = msgspec.structs.replace(job.handed.spec, steps=100)
    stated = dataclasses.replace(
        job, handed=msgspec.structs.replace(job.handed, spec=spec)
    )
    assert view_of(stated, 60.0, ("cpu",), MOVES, lines).left == 100 * BATCH - 40.0
    worth = efficiency(300.0, 4 * BATCH, BATCH)
    four = np.array([4])
    assert view.curve.goodput(four, four) == pytest.approx(4 * BATCH / 0.5 * worth)
    world.trainings.tells["one"] = {**told, "noise_scale": None, "progress": None}
    world.rounds(1)
    assert world.scheduler.jobs["one"].noise_scale == 300.0


def test_devices_go_where_the_noise_makes_them_worth_something(
    tmp_path: pathlib.Path,
) -> None:
    """Both were planned alike; without noise a larger batch does no more."""
    points = [
        msgspec.structs.replace(point, batch=k * BATCH, step_s=1.0, goodput=8.0 * k)
        for k, point in enumerate(HALVES.points, 1)
    ]
    table = CurveTable(points=tuple(points), base_batch=BATCH, max_batch=64)
    jobs = [handed(name, table=table, max=4) for name in ("quiet", "noisy")]
    world = World(tmp_path, jobs, {"quiet": 4000, "noisy": 4000})
    world.rounds(1)
    assert world.given() == {"quiet": 2, "noisy": 2}
    world.trainings.tells = {
        "quiet": {"noise_scale": 0.0},
        "noisy": {"noise_scale": 9e4},
    }
    world.rounds(2)
    assert world.given() == {"quiet": 1, "noisy": 3}
    # Another scheduler has the noise scales of the state alone.
    world.trainings.tells = {}
    world.again()
    world.rounds(1)
    assert world.given() == {"quiet": 1, "noisy": 3}


def test_a_state_of_the_first_schema_is_taken_up(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one", submitted_s=3.0)], {"one": 5})
    as_schema(world.path, 1)
    world.again().run()
    assert world.states() == {"one": "done"}
    assert world.scheduler.jobs["one"].submitted_s == 3.0


@pytest.mark.parametrize("policy", ["fifo", "tiresias", "fair", "goodput"])
def test_a_user_has_no_more_than_its_quota(policy: str, tmp_path: pathlib.Path) -> None:
    """Who waits for it says so once; all jobs are done in the end."""
    jobs = [handed(f"a{k}", user="anna", devices=1, max=4) for k in range(3)]
    names = [job.spec.name for job in jobs] + ["b"]
    world = World(
        tmp_path, [*jobs, handed("b", max=4)], dict.fromkeys(names, 60), policy=policy,
        users={"anna": UserLimits(devices=2)},
    )  # fmt: skip
    world.rounds(2)
    given = world.given()
    assert sum(n for name, n in given.items() if name != "b") == 2
    assert given["b"] >= 1
    (waits,) = [n for n, state in world.states().items() if state == "waiting"]
    why = "waits: user anna has its 2 devices"
    assert world.scheduler.jobs[waits].reason == why
    store = Store(world.path, reads=True)
    logged = [x["compared"] for x in store.decisions() if x["job"] == waits]
    assert logged == [why]
    world.again()
    world.scheduler.run()
    assert set(world.states().values()) == {"done"}
    assert world.scheduler.jobs[waits].reason == ""


def test_a_quota_that_is_lowered_takes_devices_back(tmp_path: pathlib.Path) -> None:
    world = World(tmp_path, [handed("one", max=4)], {"one": 4000})
    world.rounds(3)
    assert world.given() == {"one": 4}
    world.users = {"owner": UserLimits(devices=2)}
    world.again()
    world.rounds(1)
    assert world.given() == {"one": 2}
    world.users = {"owner": UserLimits(devices=0)}
    world.again()
    world.rounds(2)
    assert world.states() == {"one": "waiting"}
    assert world.scheduler.jobs["one"].reason.endswith("user owner may have 0")
