"""What owners want of their jobs, also where no scheduler runs.

A wish is written into the store. A scheduler heeds it at its next look; where none
runs, it is carried out here as far as it can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from autopar.dispatch import store as states
from autopar.dispatch.backend import Runs
from autopar.dispatch.store import JobRecord, Store
from autopar.errors import ScheduleError


def record_wish(store: Store, names: Sequence[str], wish: str) -> tuple[JobRecord, ...]:
    """Writes down what the owner of some jobs wants; returns the jobs as they are then.

    Raises:
      ScheduleError: there is no such job, or it has ended; nothing is written then.
    """
    for name in names:
        job = store.job(name)
        if job.state in states.ENDED:
            raise ScheduleError(
                f"job {name!r} is {job.state} already; submit it again under another "
                "name."
            )
        if job.wish == states.CANCEL and wish != states.CANCEL:
            raise ScheduleError(
                f"job {name!r} is being cancelled; submit it again under another name."
            )
    store.wish(names, wish)
    return tuple(map(store.job, names))


def carry_out(
    store: Store,
    runs: Runs,
    names: Collection[str],
    *,
    wait_s: float = 60.0,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Has jobs that are held or cancelled give their devices back, with no scheduler.

    Args:
      store: the state; no scheduler uses it.
      runs: the processes of jobs.
      names: the jobs.
      wait_s: longest wait for their processes.
      clock: seconds since the epoch.
      sleep: waits.

    Returns:
      The state of each job, as it is shown.
    """
    now_s = clock() - store.begin_s(clock())
    for name in names:
        job = store.job(name)
        if job.state in (states.RUNNING, states.STOPPING) and job.wish:
            store.update(job, state=states.STOPPING)
            (runs.kill if job.wish == states.CANCEL else runs.suspend)(job)
    end = clock() + wait_s
    while _count_left(store, runs, names, now_s) and clock() < end:
        sleep(0.1)
    return {name: store.job(name).shown_state for name in names}


def _count_left(store: Store, runs: Runs, names: Collection[str], now_s: float) -> int:
    """Takes the ends of jobs; returns how many are still to end."""
    left = 0
    for job in [job for name, job in store.jobs().items() if name in names]:
        if not job.wish or job.state in states.ENDED:
            continue
        if job.state == states.STOPPING:
            look = runs.look(job)
            if look.ending is None and look.alive:
                left += 1
                continue
            if look.ending is not None and not look.ending.code:
                continue  # it was done before; the next scheduler says so
            store.span(job.name, now_s, {})
            job = store.update(job, state=states.WAITING, places={}, reason="")
        if job.wish == states.CANCEL:
            store.update(job, state=states.CANCELLED, reason="", ended_s=now_s)
    return left
