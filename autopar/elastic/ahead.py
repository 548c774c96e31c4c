"""Prepares likely next clusters while the run goes on.

A thread of low priority plans for one cluster after the other. Programs for CPUs are
compiled by another process (`autopar.runtime.compiler`) that leaves most of the time to
the run, others by the thread. Plans go to the cache on disk too (``cache=`` of
`autopar.parallelize`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from autopar.cluster import Cluster
from autopar.elastic.beside import Beside, switching_often
from autopar.elastic.options import dividing_part
from autopar.errors import AutoparError
from autopar.plans import Plan
from autopar.progress import LOGGER
from autopar.runtime.compiler import Compiler, CompilerClosedError, compiled_by
from autopar.runtime.parallel_step import ParallelStep

# Most clusters that are prepared at a time: more programs would drive others out.
MOST = 3
# Least priority of a thread on Linux.
_NICE = 19


class Ahead:
    """Prepares clusters in the background; see `prepare`.

    Attributes:
      rows: samples of a step.
      beside: does what is known to pay.
    """

    def __init__(self, step: ParallelStep[..., Any], rows: int) -> None:
        """Has prepared nothing yet.

        Args:
          step: a step that has a plan.
          rows: samples of a step.
        """
        self._step, self.rows = step, rows
        self.beside = Beside()
        self._compiler = Compiler()
        self._wanted: tuple[Cluster, ...] = ()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = self._closed = False

    def prepare(self, clusters: Sequence[Cluster]) -> None:
        """Prepares these clusters next, and forgets those that still waited."""
        with self._changed:
            self._wanted = tuple(clusters)[:MOST]
            if self._thread is None and self._wanted and not self._closed:
                # No daemon: Python waits at its end for a plan under way.
                self._thread = threading.Thread(target=self._work, name="autopar-ahead")
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Prepares nothing more; a program under way is given up."""
        with self._changed:
            self._wanted, self._closed = (), True
            self._changed.notify_all()
        self.beside.close()
        self._compiler.close()

    def awaited(self) -> contextlib.AbstractContextManager[None]:
        """Within it, what is prepared comes first: the run waits for a new plan."""
        return self._compiler.awaited()

    def wait(self) -> None:
        """Waits until all that was wanted is prepared."""
        with self.awaited(), self._changed:
            self._changed.wait_for(lambda: not (self._wanted or self._busy))
            self.beside.wait()

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if not self._wanted:
                    return
                cluster, *rest = self._wanted
                self._wanted, self._busy = tuple(rest), True
            with switching_often(), compiled_by(self._compiler):
                self._prepare_one(cluster)

    def _prepare_one(self, cluster: Cluster) -> None:
        """Plans for a cluster, and compiles the plan that a change would take."""
        step, preparation = self._step, self._step.preparation
        # The batch of the step may change while this works.
        analysed = step.running.analysed
        found: list[tuple[Plan, Cluster]] = []
        for part in (cluster, dividing_part(cluster, self.rows)):
            if part is None:
                continue
            try:
                setting = preparation.moved(step.setting, part)
                plan = preparation.plan(analysed, setting)
                preparation.remember(analysed, setting, plan)
                found.append((plan, part))
            except AutoparError as error:
                LOGGER.info("nothing is prepared for %s: %s", part, error)
        if not found:
            return
        plan, part = min(found, key=lambda pair: pair[0].predicted.step_s)
        try:
            preparation.made_for(analysed, step.setting, part, plan=plan)
        except CompilerClosedError:
            return
        except Exception as error:  # the run goes on without it
            LOGGER.warning("cannot prepare %s: %s", part, error)


def likely_next(
    cluster: Cluster, visited: Sequence[Cluster], check: Callable[[Cluster], None]
) -> list[Cluster]:
    """Clusters that may follow, the most likely first.

    Those that the run came from; one host less (one device less, where there is one
    host); half of the devices; twice as many.

    Args:
      cluster: now.
      visited: clusters before it, the latest last.
      check: raises an error where there are no such devices.

    >>> [str(c) for c in likely_next(Cluster.parse("4x2:h100"), (), lambda found: None)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['3x2:h100 (devices 0-5 of 4x2)', '2x2:h100 (devices 0-3 of 4x2)', '8x2:h100']
    """
    hosts = cluster.hosts
    makers: list[Callable[[], Cluster]] = [
        *(lambda found=found: found for found in reversed(visited)),
        lambda: (
            cluster.without(hosts[-1])
            if len(hosts) > 1
            else cluster.without(devices=cluster.ids[-1:])
        ),
        lambda: cluster.without(devices=cluster.ids[cluster.num_devices // 2 :]),
        lambda: _doubled(cluster),
    ]
    found: list[Cluster] = []
    for make in makers:
        with contextlib.suppress(AutoparError):
            other = make()
            check(other)
            if other != cluster and other not in found:
                found.append(other)
    return found


def _doubled(cluster: Cluster) -> Cluster:
    """Twice as many devices: of the same whole, or in a whole of twice the size.

    Raises:
      ClusterError: groups have no such size.
    """
    if cluster.members is None:
        outer, *rest = cluster.levels
        larger = dataclasses.replace(outer, size=2 * outer.size)
        return dataclasses.replace(cluster, levels=(larger, *rest))
    of = cluster.members
    free = [of.start + p for p in range(_size(of.whole)) if p not in of.positions]
    return cluster.with_devices(free[: cluster.num_devices])


def _size(levels: Sequence[Any]) -> int:
    count = 1
    for level in levels:
        count *= level.size
    return count


def _lower_priority() -> None:
    """Gives this thread the least priority, where the system has one for threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
