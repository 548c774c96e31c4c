"""Tests the supervisor's decisions, with imitated workers."""

from __future__ import annotations

from typing import Any

import pytest
from supervised import LEFT, RIGHT, WHOLE, Fake, holding, running

from autopar.elastic.processes.members import SUSPENDED, MemberLimits, side_by_side
from autopar.elastic.processes.supervisor import Supervisor


def test_a_run_begins_with_all() -> None:
    fake = Fake(processes=2)
    fake.ready(1)
    assert not fake.of("form")
    fake.ready(0)
    assert [(w, d["rank"]) for w, d in fake.of("form")] == [(0, 0), (1, 1)]
    assert fake.of("form")[0][1]["state"] is None


def test_processes_of_a_host_are_neighbours() -> None:
    ready = {w: {"address": f"{host}:{w}"} for w, host in enumerate("abacb")}
    assert side_by_side(ready, [0, 1, 2, 3, 4]) == (0, 2, 1, 4, 3)
    assert side_by_side(ready, [1, 2, 4]) == (1, 4, 2)


def test_survivors_go_on_without_the_dead() -> None:
    fake = running(3)
    fake.supervisor.on_end(0, -9)
    assert [w for w, _ in fake.of("abort")] == [1, 2]
    assert fake.filled == [(1, [0])]
    fake.ready(1, holds=holding(5, 1, WHOLE))
    assert len(fake.of("form")) == 3
    fake.ready(2, holds=holding(6, 1, WHOLE))
    assert fake.world() == [1, 2]
    state = fake.of("form")[-1][1]["state"]
    assert (state["step"], list(state["holders"])) == (6, ["127.0.0.1:9002"])


def test_the_latest_step_of_which_all_is_held() -> None:
    fake = running(2)
    fake.tell(0, "broken", generation=1, error="JaxRuntimeError: gloo")
    own = holding(6, 1, LEFT) | holding(5, 1, LEFT)
    fake.ready(0, holds=own)
    fake.ready(1, holds=holding(5, 1, RIGHT))
    state = fake.of("form")[-1][1]["state"]
    assert (state["step"], sorted(state["holders"])) == (
        5,
        ["127.0.0.1:9000", "127.0.0.1:9001"],
    )


def test_tiles_of_two_worlds_are_not_mixed() -> None:
    """Both hold half of step 5, but as different worlds split it."""
    fake = running(2)
    fake.tell(0, "broken", generation=1, error="JaxRuntimeError: gloo")
    fake.ready(0, holds=holding(5, 1, LEFT))
    fake.ready(1, holds=holding(5, 2, RIGHT))
    assert fake.of("form")[-1][1]["state"] is None


def test_a_lost_state_is_said_to_be_lost() -> None:
    fake = running(2)
    fake.formed(0, 1, step=3)
    fake.supervisor.on_end(1, -9)
    fake.ready(0, holds=holding(3, 1, LEFT))
    assert fake.of("form")[-1][1]["lost"] == 3


def test_a_state_that_had_made_no_step_is_lost_too() -> None:
    """All that formed its world die; a run that never formed one may begin."""
    fake = running(2, restarts=2)
    fake.supervisor.on_end(0, -9)
    fake.supervisor.on_end(1, -9)
    fake.ready(2, 3)
    assert fake.of("form")[-1][1]["lost"] == 0
    assert fake.of("form")[0][1]["lost"] is None


def test_a_world_has_as_many_as_divide_the_batch() -> None:
    """A fifth worker waits, and takes the place of one that dies."""
    fake = Fake(processes=4)
    fake.rows = 24
    fake.ready(0, 1, 2, 3)
    fake.formed(0, 1, 2, 3)
    fake.supervisor.resize(5)
    fake.ready(4)
    assert not fake.of("pause")
    assert not fake.of("end")
    fake.supervisor.on_end(2, -9)
    fake.ready(0, 1, 3, holds=holding(1, 1, WHOLE))
    assert fake.world() == [0, 1, 3, 4]


class TestChangesAtAStep:
    def test_a_worker_joins(self) -> None:
        fake = running(2)
        assert fake.supervisor.resize(3) == ""
        assert fake.started == [0, 1, 2]
        assert not fake.of("pause")
        fake.ready(2)
        assert [w for w, _ in fake.of("pause")] == [0, 1]
        fake.tell(0, "started", generation=1, step=7)
        assert not fake.of("limit")
        fake.tell(1, "started", generation=1, step=8)
        assert [(w, d["step"]) for w, d in fake.of("limit")] == [(0, 8), (1, 8)]
        fake.ready(0, 1, holds=holding(9, 1, WHOLE))
        assert fake.world() == [0, 1, 2]

    def test_one_leaves_once_the_others_have_its_state(self) -> None:
        fake = running(3)
        assert fake.supervisor.remove(0) == ""
        for worker in range(3):
            fake.tell(worker, "started", generation=1, step=2)
        fake.ready(0, 1, 2, holds=holding(3, 1, WHOLE))
        assert fake.world() == [1, 2]
        assert not fake.of("end")
        fake.formed(1, 2, step=3)
        assert [w for w, _ in fake.of("end")] == [0]
        fake.supervisor.on_end(0, 0)
        assert fake.supervisor.wanted == 2
        assert len(fake.of("form")) == 3 + 2

    def test_a_death_while_all_pause(self) -> None:
        fake = running(3)
        fake.supervisor.resize(2)
        fake.tell(0, "started", generation=1, step=4)
        fake.supervisor.on_end(1, -9)
        assert sorted(w for w, _ in fake.of("abort")) == [0, 2]
        fake.ready(0, 2, holds=holding(4, 1, WHOLE))
        assert fake.world() == [0, 2]

    @pytest.mark.parametrize("count", [0, 9])
    def test_a_size_that_may_not_be(self, count: int) -> None:
        fake = running(2, most=8)
        assert "--min, --max" in fake.supervisor.resize(count)
        assert not fake.of("pause")

    def test_too_few_would_stay(self) -> None:
        fake = running(2, least=2)
        assert "--min" in fake.supervisor.remove(1)

    def test_the_last_one_leaves_once_another_has_its_state(self) -> None:
        """Its host goes, and another one has room: nobody waits meanwhile."""
        fake = running(1)
        fake.tell(0, "leave", spare=False)
        fake.tell(0, "leave", spare=False)
        said = "refused: worker 0 cannot leave: at least 1 process must stay (--min)."
        assert fake.printed.count(said) == 1
        fake.tell(0, "leave", spare=True)
        fake.tell(0, "leave", spare=True)
        assert fake.started == [0, 1]
        assert not fake.of("pause")
        fake.ready(1)
        fake.tell(0, "started", generation=1, step=7)
        fake.ready(0, holds=holding(8, 1, WHOLE))
        assert fake.world() == [1]
        fake.formed(1, step=8)
        assert [w for w, _ in fake.of("end")] == [0]
        assert fake.supervisor.wanted == 1


class TestEvents:
    def test_those_that_an_event_names_go(self) -> None:
        fake = running(3)
        fake.supervisor.follow(2, [1])
        for worker in range(3):
            fake.tell(worker, "started", generation=1, step=4)
        fake.ready(0, 1, 2)
        assert fake.world() == [0, 2]
        fake.formed(0, 2, step=5)
        assert [w for w, _ in fake.of("end")] == [1]

    def test_another_cluster_is_planned_for(self) -> None:
        """With the same workers, which form a world anew."""
        fake = running(2, prepares=False)
        fake.supervisor.follow(2, [], {"links": "slow"})
        assert len(fake.of("pause")) == 2
        assert not fake.of("prepare")
        for worker in range(2):
            fake.tell(worker, "started", generation=1, step=4)
        fake.ready(0, 1)
        assert fake.of("form")[-1][1]["cluster"] == {"links": "slow"}
        fake.formed(0, 1, step=5)
        assert len(fake.of("pause")) == 2  # it has what was asked for

    def test_a_worker_that_will_be_killed_leaves_before(self) -> None:
        fake = running(2)
        fake.tell(1, "leave", generation=1)
        assert len(fake.of("pause")) == 2

    def test_the_last_one_stays(self) -> None:
        fake = running(1)
        fake.tell(0, "leave", generation=1)
        assert not fake.of("pause")

    def test_what_a_script_sends_is_heard(self) -> None:
        fake = running(1)
        fake.tell(0, "event", generation=1, event="4:cpu")
        assert fake.said[-1] == "4:cpu"


class TestNewcomersThatDoNotFit:
    def test_its_script_fails_before_it_joins(self) -> None:
        fake = running(2)
        fake.supervisor.resize(3)
        fake.supervisor.on_end(2, 1)
        assert fake.supervisor.result is None
        assert fake.supervisor.wanted == 2

    def test_it_trains_another_model(self) -> None:
        """Everybody says so while the world forms; the two go on without it."""
        fake = running(2)
        fake.supervisor.resize(3)
        fake.ready(2)
        for worker in (0, 1):
            fake.tell(worker, "started", generation=1, step=2)
        fake.ready(0, 1, holds=holding(3, 1, WHOLE))
        assert fake.world() == [0, 1, 2]
        fake.tell(1, "broken", generation=2, error="PlanError: different steps")
        assert sorted(w for w, _ in fake.of("abort")) == [0, 1, 2]
        fake.ready(0, 1, 2, holds=holding(3, 1, WHOLE))
        assert fake.world() == [0, 1]
        assert [w for w, _ in fake.of("end")] == [2]


class TestNoHang:
    def test_a_silent_worker_is_killed(self) -> None:
        fake = running(2, silent_s=10)
        fake.now = 9.0
        fake.tell(1, "beat", generation=1, step=3, phase="step")
        fake.now = 11.0
        fake.supervisor.tick()
        assert fake.killed == [0]

    def test_a_finished_worker_has_longer_to_end(self) -> None:
        fake = running(2, silent_s=10, leave_s=30)
        for worker in (0, 1):
            fake.tell(worker, "finished", generation=1, step=3)
        fake.supervisor.on_end(0, 0)
        fake.now = 39.0
        fake.supervisor.tick()
        assert fake.killed == []
        fake.now = 41.0
        fake.supervisor.tick()
        assert fake.killed == [1]

    def test_one_that_does_not_leave_is_killed(self) -> None:
        fake = running(2, leave_s=30)
        fake.supervisor.on_end(0, -9)
        for now in (10.0, 20.0, 31.0):
            fake.now = now
            fake.tell(1, "beat", generation=1, step=3, phase="step")
            fake.supervisor.tick()
        assert fake.killed == [1]

    def test_a_world_without_progress_is_formed_again(self) -> None:
        fake = running(2, stuck_s=100)
        fake.now = 101.0
        fake.tell(0, "beat", generation=1, step=-1, phase="step")
        fake.tell(1, "beat", generation=1, step=-1, phase="step")
        fake.supervisor.tick()
        assert sorted(w for w, _ in fake.of("abort")) == [0, 1]

    def test_a_death_while_a_world_forms(self) -> None:
        fake = Fake(processes=3)
        fake.ready(0, 1, 2)
        fake.supervisor.on_end(1, -9)
        assert sorted(w for w, _ in fake.of("abort")) == [0, 2]
        fake.ready(0, 2)
        assert fake.world() == [0, 2]

    def test_an_error_that_comes_again_and_again_ends_the_run(self) -> None:
        fake = running(1)
        for _ in range(4):
            generation = fake.supervisor.generation
            fake.tell(0, "broken", generation=generation, error="JaxRuntimeError: oom")
            if fake.supervisor.result is None:
                fake.ready(0, holds=holding(1, generation, WHOLE))
        assert fake.supervisor.result == 1
        assert "oom" in fake.supervisor.reason


class TestEnds:
    def test_all_have_finished(self) -> None:
        fake = running(2)
        fake.tell(0, "finished", generation=1, step=9)
        assert not fake.of("end")
        fake.tell(1, "finished", generation=1, step=9)
        assert sorted(w for w, _ in fake.of("end")) == [0, 1]
        fake.supervisor.on_end(0, 0)
        fake.supervisor.on_end(1, 0)
        assert (fake.supervisor.result, fake.supervisor.reason) == (0, "")

    @pytest.mark.parametrize("asked", [False, True])
    def test_nobody_takes_the_place_of_who_has_finished(self, asked: bool) -> None:
        """A supervisor that took over cannot know the code of a worker's end."""
        fake = running(2, restarts=2)
        if asked:
            fake.formed(0, 1, step=1)
            fake.supervisor.end_training()
            for worker in (0, 1):
                fake.tell(worker, "started", generation=1, step=2)
        for worker in (0, 1):
            fake.tell(worker, "finished", generation=1, step=3)
        for worker in (0, 1):
            fake.supervisor.on_end(worker, None)
        assert fake.started == [0, 1]
        assert fake.supervisor.result == 0

    @pytest.mark.parametrize(
        ("code", "told", "says"),
        [(-9, 1, "died by signal 9"), (3, 3, "ended with code 3")],
    )
    def test_a_failure_behind_the_last_step_is_told(
        self, code: int, told: int, says: str
    ) -> None:
        fake = running(2, restarts=2)
        for worker in (0, 1):
            fake.tell(worker, "finished", generation=1, step=9)
        fake.supervisor.on_end(0, 0)
        fake.supervisor.on_end(1, code)
        assert fake.started == [0, 1]
        assert fake.supervisor.result == told
        assert f"worker 1 {says} after training" in fake.supervisor.reason

    def test_a_death_before_all_have_finished(self) -> None:
        fake = running(2)
        fake.tell(0, "finished", generation=1, step=9)
        fake.supervisor.on_end(1, -9)
        assert [w for w, _ in fake.of("abort")] == [0]
        fake.ready(0, holds=holding(9, 1, WHOLE))
        assert fake.world() == [0]

    def test_a_script_that_exits_at_once(self) -> None:
        fake = Fake(processes=2)
        fake.supervisor.on_end(1, 3)
        assert fake.supervisor.result == 3
        assert "before it joined the run: its script must" in fake.supervisor.reason

    def test_a_script_that_ends_before_it_is_ready(self) -> None:
        fake = Fake(processes=2)
        fake.tell(1, "hello", generation=-1, process=None)
        fake.supervisor.on_end(1, 3)
        assert "in its call of autopar.elastic(...)" in fake.supervisor.reason

    def test_a_script_that_fails(self) -> None:
        fake = running(2)
        fake.supervisor.on_end(1, 1)
        assert fake.supervisor.result == 1
        assert "worker 1 ended with code 1" in fake.supervisor.reason

    def test_scripts_that_leave_their_loop(self) -> None:
        fake = running(2)
        fake.supervisor.on_end(1, 0)
        assert not fake.of("abort")
        fake.supervisor.on_end(0, 0)
        assert fake.supervisor.result == 0

    def test_one_alone_that_leaves_its_loop(self) -> None:
        """The other would wait for it in a collective."""
        fake = running(2)
        fake.supervisor.on_end(1, 0)
        fake.now = 6.0
        fake.tell(0, "beat", generation=1, step=3, phase="step")
        fake.supervisor.tick()
        assert [w for w, _ in fake.of("abort")] == [0]

    def test_too_few_are_left(self) -> None:
        fake = running(2, least=2)
        fake.supervisor.on_end(1, -9)
        fake.ready(0, holds=holding(1, 1, WHOLE))
        assert fake.supervisor.result == 1
        assert "1 of at least 2" in fake.supervisor.reason

    def test_the_dead_are_replaced(self) -> None:
        fake = running(2, restarts=1)
        fake.supervisor.on_end(1, -9)
        assert fake.started == [0, 1, 2]
        fake.ready(0, holds=holding(1, 1, WHOLE))
        assert fake.world() == [0]
        fake.formed(0, step=1)
        fake.ready(2)
        assert [w for w, _ in fake.of("pause")] == [0, 1, 0][2:]

    def test_as_many_as_are_wanted(self) -> None:
        """Where enough others wait for a host, no dead worker is replaced."""
        fake = running(2, restarts=3)
        assert not fake.supervisor.resize(3)
        assert not fake.supervisor.resize(2)
        fake.supervisor.on_wait(2)
        fake.supervisor.on_end(1, -9)
        assert fake.started == [0, 1, 2]
        fake.supervisor.on_end(2, None)
        assert fake.started == [0, 1, 2, 3]


def test_workers_of_a_supervisor_that_died() -> None:
    first = running(2)
    known = {
        "generation": first.supervisor.generation,
        "numbers": 2,
        "wanted": 2,
        "world": [0, 1],
        "workers": {"0": 100, "1": 101},
    }
    fake = Fake(processes=0)
    fake.supervisor.adopt(known)
    fake.tell(0, "hello", generation=1, pid=100)
    fake.tell(1, "hello", generation=1, pid=101)
    assert not fake.of("pause")
    fake.supervisor.on_end(1, None)
    assert [w for w, _ in fake.of("abort")] == [0]
    fake.ready(0, holds=holding(4, 1, WHOLE))
    assert fake.world() == [0]


def test_a_worker_that_starts_as_the_supervisor_dies_may_go_on() -> None:
    fake = Fake(processes=0, silent_s=5)
    known = {"generation": 0, "numbers": 1, "wanted": 1, "world": [], "reached": -1}
    fake.supervisor.adopt({**known, "workers": {"0": None}})
    fake.now = 60.0
    fake.supervisor.tick()
    assert fake.killed == []
    fake.ready(0)
    assert fake.world() == [0]


def test_a_world_is_named_that_formed_as_the_supervisor_was_away() -> None:
    fake = Fake(processes=0)
    known = {"generation": 3, "numbers": 6, "wanted": 2, "world": [4, 5]}
    workers = {"4": None, "5": None}
    fake.supervisor.adopt({**known, "workers": workers, "reached": 20, "formed": False})
    fake.formed(4, 5, step=21)
    (line,) = fake.printed
    assert line.startswith(
        "a world of 2 processes (workers 4 and 5) trains from step 21"
    )


def test_worlds_and_workers_are_counted_on_after_all_workers_are_gone() -> None:
    fake = Fake(processes=0)
    fake.supervisor.continue_from(7, 5, 40)
    fake.supervisor.begin()
    fake.supervisor.resize(1)
    fake.ready(5)
    assert fake.world() == [5]
    assert fake.supervisor.generation == 8


def test_a_worker_that_is_killed_as_it_starts_is_replaced() -> None:
    fake = Fake(processes=2, restarts=1)
    fake.supervisor.on_end(1, -9)
    fake.ready(0, 2)
    assert fake.world() == [0, 2]


def test_a_world_is_formed_again_for_another_service() -> None:
    """Those who train leave together; where it forms, it is left at once."""
    fake = running(2)
    fake.supervisor.renew()
    assert [w for w, _ in fake.of("pause")] == [0, 1]
    for worker in range(2):
        fake.tell(worker, "started", generation=1, step=4)
    fake.ready(0, 1, holds=holding(5, 1, WHOLE))
    assert fake.supervisor.generation == 2
    assert not fake.of("abort")
    fake.supervisor.renew()
    assert [w for w, _ in fake.of("abort")] == [0, 1]


class TestWorkersThatConnectAgain:
    """The supervisor was started again; orders found no connection."""

    def adopted(self) -> Fake:
        fake = Fake(processes=2)
        fake.supervisor = Supervisor(MemberLimits(processes=2), fake, lambda: fake.now)
        known = {"generation": 1, "numbers": 2, "wanted": 2, "world": [0, 1]}
        fake.supervisor.adopt({**known, "workers": {"0": 100, "1": 101}})
        return fake

    def kinds(self, fake: Fake) -> list[str]:
        fake.sent.clear()
        fake.tell(1, "hello", generation=1, pid=101)
        return [kind for worker, kind, _ in fake.sent if worker == 1]

    def test_they_learn_that_there_is_a_supervisor(self) -> None:
        assert self.kinds(self.adopted()) == ["welcome"]

    def test_they_pause(self) -> None:
        fake = self.adopted()
        assert fake.supervisor.remove(0) == ""
        assert self.kinds(fake) == ["welcome", "pause"]

    def test_they_leave_a_world_that_is_broken(self) -> None:
        fake = self.adopted()
        fake.supervisor.on_end(0, None)
        assert self.kinds(fake) == ["welcome", "abort"]


class TestPlaces:
    def test_a_worker_goes_and_another_takes_its_place(self) -> None:
        fake = running(2)
        assert fake.supervisor.place(2, frozenset({0})) == ""
        assert fake.started == [0, 1, 2]
        fake.ready(2)
        for worker in (0, 1):
            fake.tell(worker, "started", generation=1, step=2)
        fake.ready(0, 1, holds=holding(3, 1, WHOLE))
        assert fake.world() == [1, 2]
        fake.formed(1, 2, step=3)
        assert [w for w, _ in fake.of("end")] == [0]

    def test_more_than_there_may_be_are_refused(self) -> None:
        fake = running(2, most=3)
        assert "expected 1 to 3" in fake.supervisor.place(4, frozenset())
        assert fake.supervisor.wanted == 2

    def test_workers_that_are_gone_do_not_leave_again(self) -> None:
        fake = running(2)
        assert fake.supervisor.place(2, frozenset({7})) == ""
        assert fake.started == [0, 1]


class TestStopping:
    def test_a_worker_that_does_not_answer_is_killed(self) -> None:
        """The others do not wait for it, and the run says that it was not whole."""
        fake = running(2)
        fake.supervisor.end_training()
        for worker in (0, 1):
            fake.tell(worker, "started", generation=1, step=7)
        fake.now = 59.0
        fake.tell(0, "saving", generation=1)
        fake.tell(0, "finished", generation=1, step=8)
        fake.now = 61.0
        for worker in (0, 1):
            fake.tell(worker, "beat", generation=1, step=7)
        fake.supervisor.tick()
        assert fake.killed == [1]
        fake.supervisor.on_end(1, -9)
        assert [w for w, _ in fake.of("abort")] == [0]
        fake.ready(0, holds=holding(8, 1, WHOLE))
        assert [w for w, _ in fake.of("end")] == [0]
        fake.supervisor.on_end(0, 0)
        assert fake.supervisor.result == 1
        assert "after 8 steps; worker 1 died by signal 9" in fake.supervisor.reason

    def test_a_run_that_never_trained_ends_at_once(self) -> None:
        fake = Fake(processes=2)
        fake.supervisor.end_training()
        assert fake.supervisor.result == 0


class TestSuspending:
    def suspended(self, count: int = 2, **limits: Any) -> Fake:
        fake = running(count, **limits)
        fake.supervisor.suspend()
        return fake

    def test_all_save_after_the_same_step_and_end(self) -> None:
        fake = self.suspended()
        assert [w for w, _ in fake.of("pause")] == [0, 1]
        fake.tell(0, "started", generation=1, step=7)
        fake.tell(1, "started", generation=1, step=8)
        limits = [(d["step"], d["ending"]) for _, d in fake.of("limit")]
        assert limits == [(8, "suspend")] * 2
        fake.supervisor.on_end(0, SUSPENDED)
        assert fake.supervisor.result is None
        fake.supervisor.on_end(1, SUSPENDED)
        assert fake.supervisor.result == SUSPENDED

    def test_a_change_does_not_save(self) -> None:
        fake = running(2)
        fake.supervisor.resize(1)
        for worker in (0, 1):
            fake.tell(worker, "started", generation=1, step=2)
        assert not any(d["ending"] for _, d in fake.of("limit"))

    def test_a_death_before_saving_forms_a_world_that_saves(self) -> None:
        fake = self.suspended(3)
        fake.supervisor.on_end(1, -9)
        fake.ready(0, 2, holds=holding(4, 1, WHOLE))
        fake.sent.clear()
        fake.formed(*fake.supervisor.world, step=4)
        assert sorted(w for w, _ in fake.of("pause")) == [0, 2]

    def test_a_run_that_never_trained_ends_at_once(self) -> None:
        fake = Fake(processes=2)
        fake.supervisor.suspend()
        assert fake.supervisor.result == SUSPENDED

    def test_who_has_no_part_in_the_world_ends_too(self) -> None:
        fake = running(2)
        fake.supervisor.resize(3)
        fake.supervisor.suspend()
        for worker in (0, 1):
            fake.tell(worker, "started", generation=1, step=2)
        assert fake.killed == [2]

    def test_a_worker_that_does_not_end_its_save_is_killed(self) -> None:
        fake = self.suspended(1)
        fake.tell(0, "started", generation=1, step=2)
        fake.now = 290.0
        fake.tell(0, "beat", generation=1, step=2)
        fake.supervisor.tick()
        assert fake.killed == []
        fake.now = 301.0
        fake.tell(0, "beat", generation=1, step=2)
        fake.supervisor.tick()
        assert fake.killed == [0]

    @pytest.mark.parametrize("ends", ["finished", "suspended"])
    def test_a_run_that_ends_takes_no_more_workers(self, ends: str) -> None:
        """Who starts then would wait for a world for ever."""
        fake = running(2)
        if ends == "suspended":
            fake.supervisor.suspend()
        for worker in (0, 1):
            if ends == "suspended":
                fake.tell(worker, "started", generation=1, step=2)
            else:
                fake.tell(worker, "finished", generation=1, step=9)
        assert fake.supervisor.resize(4) == "the run is ending."
        assert fake.started == [0, 1]


class TestUnreached:
    """Workers of other hosts that cannot be reached may train on."""

    def test_nothing_waits_where_one_has_left_their_world(self) -> None:
        fake = running(2, fence_s=30.0)
        fake.supervisor.on_unreached(1, spare=False)
        fake.ready(0, holds=holding(5, 1, WHOLE))
        assert fake.world() == [0]

    def test_one_that_is_back_after_another_world_formed_changes_nothing(self) -> None:
        fake = running(3)
        fake.supervisor.on_unreached(1, spare=False)
        fake.ready(0, 2, holds=holding(5, 1, WHOLE))
        fake.formed(0, 2, step=5)
        assert not fake.supervisor.meet(1)
        assert fake.supervisor.meet(7)  # one of an earlier supervisor
        assert fake.supervisor.world == (0, 2)

    def test_another_world_waits_where_all_are_out_of_reach(self) -> None:
        fake = running(2, fence_s=30.0)
        for worker in range(2):
            fake.supervisor.on_unreached(worker, spare=True)
        new = fake.started[2:]
        fake.ready(*new)
        assert len(fake.of("form")) == 2
        assert any("may train on" in line for line in fake.printed)
        fake.now = 31.0
        fake.supervisor.tick()
        assert fake.world() == new

    def test_workers_that_are_back_before_another_world_bring_their_state(self) -> None:
        fake = running(2, fence_s=30.0)
        for worker in range(2):
            fake.supervisor.on_unreached(worker, spare=False)
        for worker in range(2):
            assert fake.supervisor.may_return(worker)
            fake.supervisor.meet(worker)
            fake.tell(worker, "hello", generation=1, phase="step")
        assert [w for w, _ in fake.of("abort")][-2:] == [0, 1]
        fake.ready(0, 1, holds=holding(5, 1, WHOLE))
        assert fake.world() == [0, 1]
        assert fake.of("form")[-1][1]["state"]["step"] == 5
        fake.formed(0, 1, step=5)
        assert not fake.supervisor.may_return(0)


class TestPreparation:
    """A changed cluster is planned for while the world trains on."""

    def changed(self, **limits: Any) -> Fake:
        fake = running(2, **limits)
        fake.supervisor.follow(2, [], {"links": "slow"})
        return fake

    def prepared(self, fake: Fake, **answer: Any) -> None:
        order = fake.of("prepare")[-1][1]
        known = {"generation": 1, "number": order["number"], "processes": 2}
        fake.tell(0, "prepared", **known, **answer)

    def reformed(self, fake: Fake) -> Any:
        """The cluster of the next world of the same workers."""
        for worker in range(2):
            fake.tell(worker, "started", generation=1, step=3)
        fake.ready(0, 1, holds=holding(3, 1, WHOLE))
        return fake.of("form")[-1][1]["cluster"]

    def test_the_world_trains_until_the_plan_is_prepared(self) -> None:
        fake = self.changed()
        worker, order = fake.of("prepare")[-1]
        assert (worker, order["processes"]) == (0, 2)
        assert order["cluster"] == {"links": "slow"}
        fake.now = 100.0
        fake.supervisor.tick()
        assert not fake.of("pause")
        self.prepared(fake, plan_s=1.0)
        assert [w for w, _ in fake.of("pause")] == [0, 1]
        assert self.reformed(fake) == {"links": "slow"}

    def test_the_answer_to_an_earlier_order_does_not_count(self) -> None:
        fake = self.changed()
        known = {"generation": 1, "number": fake.of("prepare")[-1][1]["number"]}
        fake.supervisor.follow(2, [], {"links": "slower"})
        fake.tell(0, "prepared", **known, processes=2)
        assert not fake.of("pause")
        self.prepared(fake)
        assert self.reformed(fake) == {"links": "slower"}

    @pytest.mark.parametrize("late", [True, False], ids=["late", "impossible"])
    def test_without_a_prepared_plan_the_next_world_plans(self, late: bool) -> None:
        fake = self.changed(prepare_s=30.0)
        if late:
            fake.now = 30.5
            fake.supervisor.tick()
        else:
            self.prepared(fake, error="not on this backend")
        assert fake.of("pause")
        assert self.reformed(fake) == {"links": "slow"}

    def test_a_cluster_without_a_plan_is_dropped(self) -> None:
        """The world trains on, and the next change is planned for."""
        fake = self.changed()
        self.prepared(fake, error="no plan fits", refused=True)
        assert not fake.of("pause")
        assert fake.said[-1] == "no plan fits"
        fake.now = 1000.0
        fake.supervisor.take(0, {"kind": "beat", "worker": 0, "step": 9})
        fake.supervisor.take(1, {"kind": "beat", "worker": 1, "step": 9})
        fake.supervisor.tick()
        assert not fake.of("pause")
        fake.supervisor.follow(2, [], {"links": "slower"})
        self.prepared(fake)
        assert self.reformed(fake) == {"links": "slower"}

    def test_a_world_that_breaks_meanwhile_is_followed_by_the_changed_one(self) -> None:
        fake = self.changed()
        fake.supervisor.on_end(1, -9)
        fake.ready(0, holds=holding(3, 1, WHOLE))
        assert fake.of("form")[-1][1]["cluster"] == {"links": "slow"}

    def test_a_later_supervisor_knows_what_was_being_prepared(self) -> None:
        fake = self.changed()
        after = Supervisor(MemberLimits(processes=2), fake, lambda: fake.now)
        workers = {"0": None, "1": None}
        after.adopt({**fake.supervisor.notes(), "workers": workers})
        for worker in range(2):
            hello = {"kind": "hello", "generation": 1, "phase": "step"}
            after.take(worker, {**hello, "worker": worker})
        fake.now = 1.0
        after.tick()
        assert [w for w, _ in fake.of("pause")] == [0, 1]

    def test_likely_sizes_are_prepared_without_a_pause(self) -> None:
        fake = running(2, most=3)
        sizes = [x["processes"] for _, x in fake.of("prepare")]
        assert sizes == [1, 3]
        fake.tell(0, "prepared", generation=1, number=-1, processes=1, plan_s=1.0)
        assert not fake.of("pause")


def test_workers_that_ended_as_their_supervisor_was_away_are_no_failure() -> None:
    """They have saved, and the run goes on from there."""
    fake = running(2)
    fake.formed(0, 1, step=3)
    after = Supervisor(MemberLimits(processes=2), fake, lambda: fake.now)
    after.adopt({**fake.supervisor.notes(), "workers": {"0": None, "1": None}})
    for worker in range(2):
        after.on_end(worker, 1)
    assert after.lost
