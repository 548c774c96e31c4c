"""A job that ends after its epochs: its batch sets how fast they pass."""

from __future__ import annotations

import functools

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import Job, JobView, Linear, Oracle
from autopar.scheduler.models import pollux_form
from autopar.scheduler.models.goodput import GoodputCurve, Limits, StepModel
from autopar.scheduler.nodes import Nodes, spread_nodes
from autopar.scheduler.policies.base import Adapts
from autopar.scheduler.simulator.application import Application
from autopar.scheduler.simulator.measured import MeasuredSteps

_MOST_DEVICES = 64  # the published tables end there


class EpochJob:
    """One job over the tables of its program.

    It measures each configuration it runs on. What was measured is all that its curve
    knows: by it alone, or by all jobs that have the same `Measured`.
    """

    def __init__(
        self,
        job: Job,
        application: Application,
        adapts: Adapts,
        restart_s: float,
        nodes: Nodes,
        measured: MeasuredSteps | None = None,
    ) -> None:
        """Nothing has run.

        Args:
          job: as it was handed in.
          application: its program.
          adapts: what may be changed of it.
          restart_s: seconds of a move.
          nodes: the cluster.
          measured: what is known of the program's steps; None: nothing yet, and only
            the job itself adds to it.
        """
        self._measured = measured or MeasuredSteps(pollux_form.fit)
        self.job, self.application = job, application
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan, self.failed = "", ""
        self.restarts = -1
        self._adapts: Adapts = adapts
        self._restart_s, self._nodes = restart_s, nodes
        self._waiting_s = self._served = self._progress = 0.0
        self._epoch = self._local = self._more = 0
        self._curve_now: GoodputCurve | None = None
        self._times: StepModel | None = None
        self._noise: tuple[float, float] | None = None
        self._chosen: dict[tuple[int, int], tuple[int, int]] = {}
        self._batch = application.fixed_batch if adapts == "batch" else job.batch

    @property
    def batch(self) -> int:
        """Samples of a step; 0 while it waits."""
        return sum(self.placement) * self._local * (self._more + 1)

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for some seconds; an epoch ends on a whole second."""
        if not self.placement or self.completed_s is not None:
            return
        devices = sum(self.placement)
        delay = min(self._waiting_s, seconds)
        self._waiting_s -= delay
        self._served += delay * devices
        now_s, seconds = now_s + delay, seconds - delay
        while seconds > 0 and self.completed_s is None:
            speed = self._speed() * (1.0 - slowdown)
            until = self.application.progress_after(self._epoch + 1)
            if self._progress + speed * seconds < until:
                self._progress += speed * seconds
                spent = seconds
            else:
                spent = min(round((until - self._progress) / speed), seconds)
                self._progress = until
                self._epoch += 1
                if self._epoch > self.application.completion_epoch(self.batch):
                    self.completed_s = now_s + spent
            now_s, seconds = now_s + spent, seconds - spent
            self._served += spent * devices
            self._choose_batch()

    def _speed(self) -> float:
        """True progress per second; what is measured on the way is kept."""
        nodes, devices = len(self.placement), sum(self.placement)
        step_s, sync_s = self.application.times.seconds(self.placement, self._local)
        sqr, var = self.application.grad_stats(self.batch, self._epoch)
        if (sqr, var) != self._noise:
            self._noise = sqr, var
            self._measured.see_noise(self._epoch, sqr, var)
            self._forget_curve()
        self._measured.see_step(nodes, devices, self._local, step_s, sync_s)
        scale = self.batch / self.application.base_batch
        gain = (var + sqr) / (var / scale + sqr)
        return gain / (step_s + (step_s - sync_s) * self._more)

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement, which takes the restart's seconds; () stops it."""
        del plan, kinds  # the tables are of one kind
        self.placement = placement
        if placement:
            self._choose_batch()
            self._waiting_s = self._restart_s
            self.restarts += 1

    def _choose_batch(self) -> None:
        nodes, devices = len(self.placement), sum(self.placement)
        app, batch = self.application, self._batch
        if batch is None and not self._measured.has_begun:
            batch = max(app.base_batch, app.least_local * devices)
        if batch is not None:
            local, more = app.split(batch, devices)
        else:
            key = nodes, devices
            curve = self._curve()
            if key not in self._chosen:
                best = curve.best(np.array([nodes]), np.array([devices]))
                self._chosen[key] = int(best.local[0]), int(best.more[0])
            local, more = self._chosen[key]
        self._local = min(local, app.largest_batch // (devices * (more + 1)))
        self._more = more

    def _forget_curve(self) -> None:
        self._curve_now = None
        self._chosen.clear()

    def _curve(self) -> GoodputCurve:
        if self._times is not (times := self._measured.model()):
            self._times = times
            self._forget_curve()
        if self._curve_now is None:
            noise = self._noise or self._measured.first_noise
            app = self.application
            limits = Limits(
                app.base_batch, app.largest_batch, app.least_local, app.most_local
            )
            self._curve_now = GoodputCurve(times, *noise, limits)
        return self._curve_now

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        adaptive = self._adapts == "batch"
        return JobView(
            name=self.job.name,
            application=self.job.application,
            submitted_s=self.job.submitted_s,
            age_s=now_s - self.job.submitted_s,
            served_device_s=self._served,
            progress=self._progress * self.application.base_batch,
            restarts=max(self.restarts, 0),
            asked=self.job.devices,
            most=self._most(),
            tried=self._measured.most_devices,
            curve=self._curve() if adaptive and self._measured.has_begun else Linear(),
            measured=self._measured.has_begun,
            restart_s=self._restart_s,
            guaranteed=self.job.guaranteed,
            oracle=self._oracle() if oracle else None,
        )

    def _most(self) -> int:
        """More devices are of no use."""
        app = self.application
        if self._adapts == "nothing":
            return self.job.devices
        if self._adapts == "devices" and self._batch is not None:
            return 1 if app.single else max(1, self._batch // app.least_local)
        return min(_MOST_DEVICES, app.most_devices)

    def _oracle(self) -> Oracle:
        batch = self._batch
        if batch is None:
            raise ScheduleError(
                f"job {self.job.name!r}: an oracle needs the batch it asks for; give "
                "batch_size in the trace."
            )
        app = self.application
        last = app.completion_epoch(batch)
        left = 1.0
        if last > self._epoch:
            left = app.steps_after(batch, last) - app.steps_after(batch, self._epoch)
        return Oracle(left, _step_seconds(app, batch, self._nodes))


@functools.cache
def _step_seconds(app: Application, batch: int, nodes: Nodes) -> tuple[float, ...]:
    """True seconds of a step at a batch, from one device to as many as are of use."""
    found: list[float] = []
    most = 1 if app.single else max(1, batch // app.least_local)
    for devices in range(1, min(most, _MOST_DEVICES, nodes.total) + 1):
        placement = spread_nodes(devices, nodes.widest)
        share = -(-batch // devices)
        more = max(-(-share // app.most_local) - 1, 1 if devices == 1 else 0)
        local = min(
            -(-share // (more + 1)), app.largest_batch // (devices * (more + 1))
        )
        step_s, sync_s = app.times.seconds(placement, local)
        found.append(step_s + (step_s - sync_s) * more)
    return tuple(found)
