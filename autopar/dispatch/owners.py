"""Lets owners hold, cancel or release their jobs.

A wish is what the owner of a job has requested; it is kept in the scheduler's store. A
running scheduler carries a wish out when it next reads the store. If no scheduler is
running, `carry_out` does this as far as possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from autopar.dispatch import store as states
from autopar.dispatch.backend import Runs
from autopar.dispatch.store import JobRecord, Store
from autopar.errors import ScheduleError


def record_wish(store: Store, names: Sequence[str], wish: str) -> tuple[JobRecord, ...]:
    """Stores a wish for some jobs; returns the changed jobs.

    Raises:
      ScheduleError: a job does not exist, has ended, or is being cancelled. In this
        case nothing is stored.
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
    """Stops jobs whose owner holds or cancels them, if no scheduler is running.

    Args:
      store: the scheduler's store, which no scheduler may be using.
      runs: the processes of jobs.
      names: names of the jobs.
      wait_s: seconds to wait for the end of the jobs' processes at most.
      clock: returns seconds since the epoch.
      sleep: waits for a number of seconds.

    Returns:
      Name of a job -> its state, as text for people.
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
    """Stores which jobs have ended; returns how many have not ended yet."""
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
                continue  # it had finished; the next scheduler stores this
            store.span(job.name, now_s, {})
            job = store.update(job, state=states.WAITING, places={}, reason="")
        if job.wish == states.CANCEL:
            store.update(job, state=states.CANCELLED, reason="", ended_s=now_s)
    return left
