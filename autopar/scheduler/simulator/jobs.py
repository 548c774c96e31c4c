"""The kinds of jobs that a simulation runs.

A job that trains by its curve, and moves as an elastic run of this project does.

It is what a real scheduler runs: a start takes a while, a change of devices a short
pause. While the processes of new devices start, the job trains on those it has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from autopar.errors import ScheduleError
from autopar.scheduler.jobs import (
    Curve,
    Job,
    JobView,
    Linear,
    MoveSeconds,
    Oracle,
    Shape,
)
from autopar.scheduler.models import pollux_form
from autopar.scheduler.models.pollux_form import StepSamples
from autopar.scheduler.nodes import Nodes, spread_nodes
from autopar.scheduler.policies.base import Adapts
from autopar.scheduler.simulator.tables import Application

_CANDIDATES = 50


class StepModel(Protocol):
    """Predicts seconds of microbatches."""

    def grad_s(self, local: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch of so many samples a device."""
        ...

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the microbatch that synchronises."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What batches a program allows.

    Attributes:
      base: the batch it was written for; progress counts in its samples.
      largest: no larger batch.
      least_local: samples of a device in a microbatch, at least.
      most_local: at most.
    """

    base: int
    largest: int
    least_local: int
    most_local: int


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The best batch of each configuration; arrays of one shape.

    Attributes:
      goodput: samples of the base batch per second; 0 where nothing fits.
      local: samples of a device in a microbatch.
      more: microbatches before the last.
    """

    goodput: np.ndarray
    local: np.ndarray
    more: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class GoodputCurve:
    """The goodput of one job, best batch inside, by nodes and devices.

    Attributes:
      times: seconds of its steps.
      sqr: squared norm of its gradient.
      var: variance of the gradient of the base batch.
      limits: the batches it allows.
    """

    times: StepModel
    sqr: float
    var: float
    limits: Limits

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Samples of the base batch per second."""
        return self.best(nodes, devices).goodput

    def efficiency(self, batch: np.ndarray) -> np.ndarray:
        """What a sample is worth beside one of the base batch.

        With noise scale phi = base x var / sqr it is (phi + base) / (phi + batch).
        """
        scale = batch / self.limits.base
        below = self.var / scale + self.sqr
        gain = np.where(below > 0, (self.var + self.sqr) / below, 1.0)
        return gain / scale

    def best(self, nodes: np.ndarray, devices: np.ndarray) -> Best:
        """Tries 50 batches for each configuration and takes the best.

        Args:
          nodes: of each configuration, shape (n,).
          devices: of each configuration, shape (n,).
        """
        limits = self.limits
        nodes, devices = np.atleast_1d(nodes), np.atleast_1d(devices)
        local, more = self._splits(devices)
        batch = np.maximum(devices * local * (more + 1), 1)
        seconds = more * self.times.grad_s(local)
        seconds = seconds + self.times.step_s(nodes, devices, local)
        value = batch / seconds * self.efficiency(batch)
        fits = (limits.least_local <= local) & (local <= limits.most_local)
        value = np.where(fits, value, 0.0)
        chosen = value.argmax(axis=0), np.arange(len(devices))
        return Best(value[chosen], local[chosen], more[chosen])

    def _splits(self, devices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Microbatches of each candidate batch (rows) on each configuration."""
        limits = self.limits
        least = np.maximum(limits.base, limits.least_local * devices)
        batches = np.geomspace(
            least, np.maximum(limits.largest, least), num=_CANDIDATES
        )
        # Where even the least is too large, no candidate is left.
        batches = np.where(least <= limits.largest, batches, 0.0)
        share = batches / devices
        more = np.ceil(share / limits.most_local - 1e-8) - 1
        alone = (devices == 1) & (share > limits.base + 1e-8)
        more = np.maximum(np.where(alone, np.maximum(more, 1), more), 0).astype(int)
        local = np.ceil(share / (more + 1) - 1e-8).astype(int)
        return local, more


Fit = Callable[[StepSamples], StepModel]
"""Makes a model of a step's seconds from measured steps."""


class MeasuredSteps:
    """Measured steps, the model that is fitted to them, and the gradients' noise."""

    def __init__(self, fit: Fit) -> None:
        """Nothing was measured.

        Args:
          fit: makes a model of a step's seconds.
        """
        self._fit = fit
        self._steps: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._noise: dict[int, tuple[float, float]] = {}
        self._model: StepModel | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was measured."""
        return bool(self._steps)

    @property
    def most_devices(self) -> int:
        """The most devices that a step was measured on; 0 before the first."""
        return max((devices for _, devices, _ in self._steps), default=0)

    @property
    def first_noise(self) -> tuple[float, float]:
        """The noise of the earliest epoch that was measured (`see_noise`).

        A job that has not begun is taken to be as noisy.
        """
        return self._noise[min(self._noise)]

    def see_step(
        self, nodes: int, devices: int, local: int, step_s: float, sync_s: float
    ) -> None:
        """Keeps the first measurement of each configuration.

        Args:
          nodes: that it ran on.
          devices: on all of them.
          local: samples of a device in a microbatch.
          step_s: seconds of a microbatch that synchronises.
          sync_s: seconds of those in which it does.
        """
        if (key := (nodes, devices, local)) not in self._steps:
            self._steps[key] = step_s, sync_s
            self._model = None

    def see_noise(self, epoch: int, sqr: float, var: float) -> None:
        """Keeps the first measurement of each epoch.

        Args:
          epoch: from 0.
          sqr: squared norm of the gradient.
          var: variance of the gradient of the base batch.
        """
        self._noise.setdefault(epoch, (sqr, var))

    def model(self) -> StepModel:
        """The model of all that was measured; the same one until there is more."""
        if self._model is None:
            nodes, devices, local = np.array(list(self._steps), float).T
            step_s, sync_s = np.array(list(self._steps.values())).T
            samples = StepSamples(nodes, devices, local, step_s - sync_s, step_s)
            self._model = self._fit(samples)
        return self._model


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
        return Oracle(left, _epoch_step_seconds(app, batch, self._nodes))


@functools.cache
def _epoch_step_seconds(
    app: Application, batch: int, nodes: Nodes
) -> tuple[float, ...]:
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


class StepTimes(Protocol):
    """Seconds of the steps of a program."""

    @property
    def curve(self) -> Curve:
        """Steps per second by configuration."""
        ...

    @property
    def most(self) -> int:
        """The most devices that are of use."""
        ...

    def seconds(self, plan: str, placement: tuple[int, ...]) -> float:
        """Seconds of a step."""
        ...

    def asked_s(self, job: Job) -> float:
        """Seconds of a step on what a job's owner asks for."""
        ...


class StepJob:
    """One job over the plan tables of its program."""

    def __init__(
        self,
        job: Job,
        times: StepTimes,
        restart_s: float,
        *,
        ghosts: bool = False,
        one_more: bool = True,
        by_kind: Mapping[str, StepTimes] | None = None,
    ) -> None:
        """Nothing has run.

        Args:
          job: it runs ``steps`` steps.
          times: seconds of its steps.
          restart_s: seconds that a move takes.
          ghosts: repeat a slip of the published simulator, in which a job that loses
            its devices runs on where it was.
          one_more: whether it makes one step more, as the published simulator has it.
          by_kind: seconds of its steps on kinds of devices; ``times`` on others.
        """
        self.job, self.times = job, times
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan, self.failed = job.plan, ""
        self.restarts = -1
        self._restart_s, self._ghosts = restart_s, ghosts
        self._waiting_s = self._served = self._part_s = 0.0
        self._steps = 0
        self._whole = job.steps + one_more
        self._by_kind, self._kinds = dict(by_kind or {}), ("",)
        self._floor = 1.0 / times.asked_s(job) if job.guaranteed else 0.0

    @property
    def batch(self) -> int:
        """Batches do not change here."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for some seconds."""
        if not self.placement or self.completed_s is not None:
            return
        delay = min(self._waiting_s, seconds)
        self._waiting_s -= delay
        self._served += delay * sum(self.placement)
        now_s, seconds = now_s + delay, seconds - delay
        if seconds <= 0:
            return
        # On several kinds a step waits for the slowest.
        step_s = max(
            self._by_kind.get(kind, self.times).seconds(self.plan, self.placement)
            for kind in self._kinds
        ) / (1.0 - slowdown)
        left = self._whole - self._steps
        until = left * step_s - self._part_s
        if until <= seconds:
            self.completed_s = now_s + until
            self._served += until * sum(self.placement)
            return
        whole = max(math.floor((self._part_s + seconds) / step_s), 0)
        self._steps += whole
        self._part_s += seconds - whole * step_s
        self._served += seconds * sum(self.placement)

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement, which takes the restart's seconds; () stops it.

        The same placement on other nodes with the same plan costs nothing in the
        published simulator; here it does, unless ``ghosts`` is set.
        """
        if not placement:
            if not self._ghosts:
                self.placement = ()
            return
        if self._ghosts and placement == self.placement:
            return
        self.placement, self.plan, self._kinds = placement, plan, kinds or ("",)
        self._waiting_s = self._restart_s
        self.restarts += 1

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        left = None
        if oracle:
            seconds = _step_seconds(self.times.curve, self.times.most)
            left = Oracle(self._whole - self._steps, seconds)
        return JobView(
            name=self.job.name,
            application=self.job.application,
            submitted_s=self.job.submitted_s,
            age_s=now_s - self.job.submitted_s,
            served_device_s=self._served,
            progress=float(self._steps),
            restarts=max(self.restarts, 0),
            asked=self.job.devices,
            most=self.times.most,
            tried=self.times.most,
            curve=self.times.curve,
            measured=True,
            restart_s=self._restart_s,
            guaranteed=self.job.guaranteed,
            floor=self._floor,
            oracle=left,
            by_kind={kind: times.curve for kind, times in self._by_kind.items()},
        )


def _step_seconds(curve: Curve, most: int) -> tuple[float, ...]:
    """Seconds of a step on one to so many devices, on the best number of nodes.

    Up to the first number of devices on which a step cannot run.
    """
    found: list[float] = []
    for devices in range(1, most + 1):
        nodes = np.arange(1, devices + 1)
        best = float(curve.goodput(nodes, np.full_like(nodes, devices)).max())
        if best <= 0:
            break
        found.append(1.0 / best)
    return tuple(found)


class StepCurve(Curve, Protocol):
    """A curve that knows the seconds of steps."""

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds of a step; infinite where nothing runs."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What moves take, in seconds.

    Attributes:
      start_s: from a start to the first step.
      join_s: until the processes of more devices are there; the job trains meanwhile.
      change_s: the pause of a job whose devices change.
      by_pair: the pause by what it changes from and to; `change_s` where None.
      told_s: what a policy is told that any change takes; the truth where None.
    """

    start_s: float
    join_s: float
    change_s: float
    by_pair: MoveSeconds | None = None
    told_s: float | None = None

    def move_s(self, old: Shape, new: Shape) -> float:
        """What a move takes; from (0, 0) for a start."""
        if old == (0, 0):
            return self.start_s
        return self.change_s if self.by_pair is None else self.by_pair(old, new)

    def seconds_told(self, old: Shape, new: Shape) -> float:
        """What a policy is told that a move takes."""
        if old == (0, 0) or self.told_s is None:
            return self.move_s(old, new)
        return self.told_s


class CurveJob:
    """One job over its curve."""

    goes_on = True  # where it loses some of its nodes

    def __init__(
        self,
        job: Job,
        curve: StepCurve,
        most: int,
        moves: Moves,
        by_kind: Mapping[str, StepCurve] | None = None,
    ) -> None:
        """Nothing has run.

        Args:
          job: it runs ``steps`` steps of ``batch`` samples.
          curve: its steps and goodput by configuration.
          most: no more devices are of use.
          moves: what moves take.
          by_kind: its curve on kinds of devices; ``curve`` on those that are missing.
        """
        self.job, self._curve, self._most, self._moves = job, curve, most, moves
        self._by_kind = dict(by_kind or {})
        self._kinds: tuple[str, ...] = ()
        self._pause_s = 0.0
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan = self.failed = ""
        self.restarts = -1
        self._trains: tuple[int, ...] = ()  # on these, until the others have joined
        self._joins_s = self._waits_s = self._served = self._steps = 0.0

    @property
    def batch(self) -> int:
        """Batches do not change here."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for some seconds."""
        end_s = now_s + seconds
        while now_s < end_s and self.completed_s is None and self.placement:
            part = self._next_part(end_s - now_s)
            if self._waits_s > 0:
                self._waits_s -= part
            else:
                part = self._train(now_s, part, slowdown)
                self._join(part)
            self._served += part * sum(self.placement)
            now_s += part

    def _next_part(self, left_s: float) -> float:
        """Seconds until something changes."""
        if self._waits_s > 0:
            return min(left_s, self._waits_s)
        return min(left_s, self._joins_s) if self._joins_s > 0 else left_s

    def _train(self, now_s: float, seconds: float, slowdown: float) -> float:
        """Does steps; returns the seconds until the last one, if it is among them."""
        # On several kinds a step waits for the slowest.
        step_s = max(
            self._by_kind.get(kind, self._curve).step_s(*_shape(self._trains))
            for kind in self._kinds or ("",)
        )
        if not math.isfinite(step_s):
            raise ScheduleError(
                f"job {self.job.name!r} cannot run on {sum(self._trains)} devices of "
                f"{len(self._trains)} nodes, by its curve."
            )
        step_s /= 1.0 - slowdown
        until = (self.job.steps - self._steps) * step_s
        if until <= seconds:
            self.completed_s, self._steps = now_s + until, float(self.job.steps)
            return until
        self._steps += seconds / step_s
        return seconds

    def _join(self, seconds: float) -> None:
        if self._joins_s > 0:
            self._joins_s -= seconds
            if self._joins_s <= 0:
                self._trains, self._waits_s = self.placement, self._pause_s

    def reallocate(
        self, placement: tuple[int, ...], plan: str, kinds: tuple[str, ...] = ()
    ) -> None:
        """Moves to a placement; () stops it, its state saved."""
        del plan
        larger = bool(self._trains) and sum(placement) > sum(self._trains)
        grows = larger and kinds == self._kinds and self._moves.join_s > 0
        if placement:
            self._pause_s = self._moves.move_s(_shape(self._trains), _shape(placement))
        if grows:
            self._joins_s = self._moves.join_s
        else:
            self._trains, self._waits_s = placement, self._pause_s
            self._joins_s = 0.0
        self._kinds = kinds
        self.restarts += bool(placement)
        self.placement = placement

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy may see."""
        left = Oracle(self.job.steps - self._steps, ()) if oracle else None
        return JobView(
            name=self.job.name,
            application=self.job.application,
            submitted_s=self.job.submitted_s,
            age_s=now_s - self.job.submitted_s,
            served_device_s=self._served,
            progress=self._steps * self.batch,
            restarts=max(self.restarts, 0),
            asked=self.job.devices,
            most=self._most,
            tried=self._most,
            curve=self._curve,
            measured=True,
            restart_s=self._moves.start_s,
            guaranteed=self.job.guaranteed,
            oracle=left,
            by_kind=self._by_kind,
            moves=self._moves.seconds_told,
        )


def _shape(placement: tuple[int, ...]) -> Shape:
    return len(placement), sum(placement)
