"""Tests predictions of a job's remaining work from completed jobs."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.policies.goodput import gittins_left, sureness
from autopar.scheduler.simulator.engine import simulate
from autopar.scheduler.simulator.traces.recorded import jobs_of


@pytest.mark.parametrize("done", [0.0, 3.0, 9.5])
def test_jobs_of_one_length_have_the_rest_of_it_left(done: float) -> None:
    assert gittins_left([10.0] * 5, done) == pytest.approx(10.0 - done)


def test_a_job_that_outlived_the_short_ones_has_more_left() -> None:
    wholes = [10.0, 10.0, 1000.0]
    assert gittins_left(wholes, 0.0) == pytest.approx(15.0)
    assert gittins_left(wholes, 10.0) == pytest.approx(990.0)


def test_a_job_beyond_all_has_as_much_left_as_it_has_done() -> None:
    assert gittins_left([10.0, 20.0], 20.0) == 20.0
    assert gittins_left([10.0, 20.0], 50.0) == 50.0


class TestThePolicy:
    """Short jobs that come later do not wait for one that outlived its program."""

    TRACE = (
        "name,submission_time,duration,application,num_gpus,exec_plan,steps,is_sla\n"
        "a,0,0,tiny,4,ga,100,0\nb,0,0,tiny,4,ga,120,0\nlong,0,0,tiny,4,ga,90000,0\n"
        + "".join(f"late-{k},{3000 + 900 * k},0,tiny,4,ga,200,0\n" for k in range(6))
    )

    def test_short_jobs_pass_it(self, tmp_path: pathlib.Path) -> None:
        folder = tmp_path / "traces" / "tiny"
        folder.mkdir(parents=True)
        rows = ["exec_plan,placement,iter_time", "ga,1,4.0", "ga,2,2.1", "ga,4,1.1"]
        (folder / "placements.csv").write_text("\n".join(rows))
        trace = tmp_path / "jobs.csv"
        trace.write_text(self.TRACE)
        nodes, policy = Nodes.parse("1x4"), policy_of("goodput")
        jobs = jobs_of(trace, tmp_path / "traces", nodes, policy)
        history = simulate(jobs, nodes, policy)
        late = [job for job in history.jobs if job.job.name.startswith("late")]
        spent = [(j.completed_s or 0.0) - j.job.submitted_s for j in late]
        # Alone each takes 260 s to start and 220 s to train.
        assert max(spent) < 1000


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=20), st.floats(0.1, 10.0))
def test_sureness_is_that_of_the_coefficient_of_variation(
    wholes: list[float], times: float
) -> None:
    varies = (np.std(wholes) / np.mean(wholes)) ** 2

    assert sureness(wholes) == pytest.approx(1 / (1 + varies))
    assert sureness([times * w for w in wholes]) == pytest.approx(sureness(wholes))


@pytest.mark.parametrize("wholes", [[], [7.0], [7.0, 7.0]])
def test_nothing_known_speaks_against_a_prediction(wholes: list[float]) -> None:
    assert sureness(wholes) == 1
