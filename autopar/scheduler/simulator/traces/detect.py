"""Makes the jobs of a trace, whichever kind of file it is."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.scheduler.models import corrected_form, pollux_form
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.base import Policy
from autopar.scheduler.simulator.running import RunningJob
from autopar.scheduler.simulator.traces import philly, pollux, rubick


def jobs_of(
    trace: pathlib.Path,
    tables: pathlib.Path | None,
    nodes: Nodes,
    policy: Policy,
    restart_s: float | None = None,
) -> Sequence[RunningJob]:
    """The jobs of a trace; its head line tells what it is.

    Args:
      trace: a CSV file.
      tables: the folder with measured tables; ``../traces`` beside the trace's folder
        where None.
      nodes: the cluster.
      policy: what it adapts decides what a job may change.
      restart_s: seconds of a move; those of the published simulator where None.

    Raises:
      ScheduleError: the file is none that is known, or a row is wrong.
    """
    head = _head(trace)
    folder = tables or trace.parent.parent / "traces"
    if set(pollux.COLUMNS) <= head:
        known = pollux.read_applications(folder)
        fit = pollux_form.fit if policy.name == "pollux" else corrected_form.fit
        seconds = pollux.RESTART_S if restart_s is None else restart_s
        rows, pools = pollux.read_jobs(trace), getattr(policy, "pools", False)
        return pollux.running(
            rows, known, nodes, policy.adapts, seconds, fit, pools=pools
        )
    if set(rubick.COLUMNS) <= head:
        rows = rubick.read_jobs(trace)
        times = rubick.read_plan_times(folder, [job.application for _, job in rows])
        seconds = rubick.RESTART_S if restart_s is None else restart_s
        # Only the published policy is repeated with the published slip.
        return rubick.running(rows, times, seconds, ghosts=policy.name == "rubick")
    if set(philly.COLUMNS) <= head:
        seconds = philly.RESTART_S if restart_s is None else restart_s
        return philly.running(philly.read_jobs(trace), seconds)
    raise ScheduleError(
        f"{trace}: its columns are {', '.join(sorted(head)) or 'none'}; known traces "
        f"have {', '.join(pollux.COLUMNS)}; or {', '.join(rubick.COLUMNS)}; or "
        f"{', '.join(philly.COLUMNS)}."
    )


def _head(trace: pathlib.Path) -> set[str]:
    try:
        with trace.open(newline="") as file:
            return {name.strip() for name in next(csv.reader(file), [])}
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{trace}: it cannot be read: {error}.") from error
