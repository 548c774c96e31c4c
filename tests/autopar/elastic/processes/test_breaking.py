"""Tests which errors the supervisor attributes to the loss of a process."""

from __future__ import annotations

import pytest
from supervised import WHOLE, holding, running


class TestWhoseErrorItIs:
    @pytest.mark.parametrize("killed_s", [None, 1.0, 20.0])
    def test_an_error_is_its_own_where_nobody_is_gone(
        self, killed_s: float | None
    ) -> None:
        fake = running(3)
        if killed_s == 20.0:  # before, and another world has formed since
            fake.supervisor.on_end(2, -9)
            fake.ready(0, 1, holds=holding(1, 1, WHOLE))
            fake.formed(0, 1, step=1)
        generation = fake.supervisor.generation
        count = len(fake.of("abort"))
        fake.now = killed_s if killed_s == 20.0 else 0.0
        fake.tell(0, "broken", generation=generation, error="ValueError: half")
        if killed_s == 1.0:
            fake.now = 1.0
            fake.supervisor.on_end(2, -9)
        fake.now += 4.0
        for worker in range(2):
            fake.tell(worker, "beat", generation=generation, step=1, phase="step")
        fake.supervisor.tick()
        assert [w for w, _ in fake.of("own")] == ([0] if killed_s is None else [])
        assert (len(fake.of("abort")) > count) == (killed_s is not None)

    def test_an_error_of_a_transport_is_of_others(self) -> None:
        """Whatever kind it is: JAX raises ValueError where a gather fails."""
        fake = running(2)
        error = "ValueError: UNKNOWN: Gloo AllGather failed: Connection closed by peer"
        fake.tell(0, "broken", generation=1, error=error)
        assert [w for w, _ in fake.of("abort")] == [0, 1]

    def test_an_error_is_not_its_own_once_the_world_is_left(self) -> None:
        fake = running(3)
        fake.tell(0, "broken", generation=1, error="ValueError: half")
        fake.supervisor.on_end(2, -9)
        fake.ready(0, 1, holds=holding(1, 1, WHOLE))
        fake.now = 4.0
        fake.supervisor.tick()
        assert not fake.of("own")


class TestAfterAKill:
    def test_a_script_that_fails_as_another_one_is_killed(self) -> None:
        """Its error may come from that; the run goes on with those that are left."""
        fake = running(3)
        fake.supervisor.on_end(2, -9)
        fake.supervisor.on_end(1, 1)
        assert fake.supervisor.result is None
        fake.ready(0, holds=holding(1, 1, WHOLE))
        assert fake.world() == [0]

    def test_scripts_that_all_fail_after_a_kill(self) -> None:
        fake = running(3)
        fake.supervisor.on_end(2, -9)
        fake.supervisor.on_end(1, 1)
        fake.supervisor.on_end(0, 1)
        assert fake.supervisor.result == 1
        assert "worker 0 ended with code 1" in fake.supervisor.reason

    def test_a_script_that_fails_long_after_a_kill(self) -> None:
        fake = running(3)
        fake.supervisor.on_end(2, -9)
        fake.ready(0, 1, holds=holding(1, 1, WHOLE))
        fake.formed(0, 1, step=1)
        fake.now = 31.0
        fake.supervisor.on_end(1, 1)
        assert fake.supervisor.result == 1
