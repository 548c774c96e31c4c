"""Three kinds of simulated jobs, which differ in where their step times come from.

`EpochJob` reads tables by batch size and epoch, as published with Pollux. `StepJob`
reads tables by plan, as published with Rubick. `CurveJob` uses a goodput curve and
changes devices like an elastic run of autopar. Its start takes long. A change of
devices is only a short pause, because the job trains on its old devices while the
processes on the new devices start.
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
        """Seconds of a microbatch with ``local`` samples per device."""
        ...

    def step_s(
        self, nodes: np.ndarray, devices: np.ndarray, local: np.ndarray
    ) -> np.ndarray:
        """Seconds of the last microbatch of a step, with its synchronisation."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The batch sizes that a program allows.

    Attributes:
      base: the batch size for which the program was written. Progress is counted in
        samples of batches of this size.
      largest: the largest batch.
      least_local: the fewest samples per device in a microbatch.
      most_local: the most samples per device in a microbatch.
    """

    base: int
    largest: int
    least_local: int
    most_local: int


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The best batch size on each configuration, as arrays of equal shape.

    Attributes:
      goodput: samples of the base batch per second; 0 where no batch fits.
      local: samples per device in a microbatch.
      more: number of microbatches of a step before the last one.
    """

    goodput: np.ndarray
    local: np.ndarray
    more: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class GoodputCurve:
    """A job's goodput by nodes and devices, each with its best batch size.

    Attributes:
      times: predicts the seconds of the job's steps.
      sqr: squared norm of the job's gradient.
      var: variance of the gradient at the base batch.
      limits: the batch sizes that the job allows.
    """

    times: StepModel
    sqr: float
    var: float
    limits: Limits

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Progress per second, in samples of the base batch."""
        return self.best(nodes, devices).goodput

    def efficiency(self, batch: np.ndarray) -> np.ndarray:
        """Progress per sample, relative to a sample of the base batch.

        The result is (phi + base) / (phi + batch), where the noise scale is phi = base
        x var / sqr.
        """
        scale = batch / self.limits.base
        below = self.var / scale + self.sqr
        gain = np.where(below > 0, (self.var + self.sqr) / below, 1.0)
        return gain / scale

    def best(self, nodes: np.ndarray, devices: np.ndarray) -> Best:
        """Tries 50 batch sizes on each configuration and returns the best one.

        Args:
          nodes: number of nodes of each configuration, shape (n,).
          devices: number of devices of each configuration, shape (n,).
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
        """Splits candidate batches (array rows) on each configuration (array columns).

        Returns the samples per device in a microbatch, and the number of microbatches
        before the last one.
        """
        limits = self.limits
        least = np.maximum(limits.base, limits.least_local * devices)
        batches = np.geomspace(
            least, np.maximum(limits.largest, least), num=_CANDIDATES
        )
        # If even the smallest possible batch is too large, no batch is tried.
        batches = np.where(least <= limits.largest, batches, 0.0)
        share = batches / devices
        more = np.ceil(share / limits.most_local - 1e-8) - 1
        alone = (devices == 1) & (share > limits.base + 1e-8)
        more = np.maximum(np.where(alone, np.maximum(more, 1), more), 0).astype(int)
        local = np.ceil(share / (more + 1) - 1e-8).astype(int)
        return local, more


Fit = Callable[[StepSamples], StepModel]
"""Fits a model of a step's seconds to measured steps."""


class MeasuredSteps:
    """Step times and gradient noise that jobs measured, with a model of step times."""

    def __init__(self, fit: Fit) -> None:
        """Starts without measurements.

        Args:
          fit: fits a model of a step's seconds.
        """
        self._fit = fit
        self._steps: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._noise: dict[int, tuple[float, float]] = {}
        self._model: StepModel | None = None

    @property
    def has_begun(self) -> bool:
        """Whether at least one step was measured."""
        return bool(self._steps)

    @property
    def most_devices(self) -> int:
        """The largest number of devices with a measured step; 0 before the first."""
        return max((devices for _, devices, _ in self._steps), default=0)

    @property
    def first_noise(self) -> tuple[float, float]:
        """The norm and the variance of the gradient in the earliest measured epoch.

        A job that has not begun is assumed to have the same norm and variance.
        """
        return self._noise[min(self._noise)]

    def see_step(
        self, nodes: int, devices: int, local: int, step_s: float, sync_s: float
    ) -> None:
        """Records a measured step; keeps only the first of each configuration.

        Args:
          nodes: number of nodes.
          devices: number of devices on all nodes.
          local: samples per device in a microbatch.
          step_s: seconds of the microbatch that synchronises.
          sync_s: seconds of the synchronisation within ``step_s``.
        """
        if (key := (nodes, devices, local)) not in self._steps:
            self._steps[key] = step_s, sync_s
            self._model = None

    def see_noise(self, epoch: int, sqr: float, var: float) -> None:
        """Records measured gradient noise; keeps only the first of each epoch.

        Args:
          epoch: number of the epoch, from 0.
          sqr: squared norm of the gradient.
          var: variance of the gradient at the base batch.
        """
        self._noise.setdefault(epoch, (sqr, var))

    def model(self) -> StepModel:
        """The model, fitted to all measurements so far."""
        if self._model is None:
            nodes, devices, local = np.array(list(self._steps), float).T
            step_s, sync_s = np.array(list(self._steps.values())).T
            samples = StepSamples(nodes, devices, local, step_s - sync_s, step_s)
            self._model = self._fit(samples)
        return self._model


_MOST_DEVICES = 64  # the largest number of devices in the published tables


class EpochJob:
    """A job whose true speed comes from Pollux's tables by batch size and epoch.

    The job measures its speed on each configuration on which it runs. The curve that a
    policy sees is fitted only to such measurements: the job's own, or those of all jobs
    that share one `MeasuredSteps`.
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
        """Starts as a waiting job.

        Args:
          job: the submitted job.
          application: the job's program.
          adapts: which part of the job's request the policy may change.
          restart_s: seconds for which the job stops when its devices change.
          nodes: the cluster.
          measured: measurements of the program's steps, which jobs may share; None: the
            job collects its own.
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
        """Samples per step; 0 while the job waits."""
        return sum(self.placement) * self._local * (self._more + 1)

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for ``seconds``.

        Each epoch ends at a whole second, as in the published simulator.
        """
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
        """True progress per second; also records it as a measurement."""
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
        """Moves the job to a placement, with a restart; () stops the job."""
        del plan, kinds  # the tables have one plan and one kind of devices
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
        """What a policy can see of the job."""
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
        """The most devices that the job can use."""
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
    """Seconds of a step on 1, 2, ... devices, up to the most that the job can use."""
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
    """The true step times of a program."""

    @property
    def curve(self) -> Curve:
        """Steps per second for each number of nodes and devices."""
        ...

    @property
    def most(self) -> int:
        """The most devices that the program can use."""
        ...

    def seconds(self, plan: str, placement: tuple[int, ...]) -> float:
        """Seconds of a step."""
        ...

    def asked_s(self, job: Job) -> float:
        """Seconds of a step on the devices and the plan that a job's owner asks for."""
        ...


class StepJob:
    """A job whose true speed comes from Rubick's tables of plans."""

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
        """Starts as a waiting job.

        Args:
          job: the submitted job, which runs ``steps`` steps.
          times: true seconds of the job's steps.
          restart_s: seconds for which the job stops when its devices change.
          ghosts: whether to repeat an error of the published simulator: a job that
            loses its devices continues to run on them.
          one_more: whether the job runs one step more than it should, as in the
            published simulator.
          by_kind: kind of devices -> seconds of steps; other kinds use ``times``.
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
        """The batch size, which never changes in jobs of this class."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for ``seconds``."""
        if not self.placement or self.completed_s is not None:
            return
        delay = min(self._waiting_s, seconds)
        self._waiting_s -= delay
        self._served += delay * sum(self.placement)
        now_s, seconds = now_s + delay, seconds - delay
        if seconds <= 0:
            return
        # If the job has devices of several kinds, a step takes as long as on the
        # slowest kind.
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
        """Moves the job to a placement, with a restart; () stops the job.

        In the published simulator, it takes no time to move to other nodes with the
        same plan and the same numbers of devices. Here such a move needs a restart,
        too, unless ``ghosts`` is set.
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
        """What a policy can see of the job."""
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
    """Seconds of a step on 1 to ``most`` devices, on the best numbers of nodes.

    If the job cannot run on some number of devices, the result ends before it.
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
    """A curve that also gives the seconds of a step."""

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds of a step; infinite where the job cannot run."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Seconds of moves.

    Attributes:
      start_s: seconds from the start of the job to its first step.
      join_s: seconds until the processes of added devices are ready. The job trains
        meanwhile.
      change_s: seconds for which a job pauses when its devices change.
      by_pair: seconds of the pause between an old and a new number of nodes and
        devices; None: always `change_s`.
      told_s: seconds of every move as the policy sees them; None: the policy sees the
        true seconds.
      fence_s: seconds for which a job that has lost all its nodes waits before it
        starts again, because processes that nobody can reach might still train.
      save_every: steps between saves. A job that has lost all its nodes goes back to
        its last save. None: it loses no steps.
    """

    start_s: float
    join_s: float
    change_s: float
    by_pair: MoveSeconds | None = None
    told_s: float | None = None
    fence_s: float = 0.0
    save_every: int | None = None

    def move_s(self, old: Shape, new: Shape) -> float:
        """Seconds to move from ``old`` to ``new`` (nodes, devices).

        An ``old`` of (0, 0) means that the job starts.
        """
        if old == (0, 0):
            return self.start_s
        return self.change_s if self.by_pair is None else self.by_pair(old, new)

    def seconds_told(self, old: Shape, new: Shape) -> float:
        """Seconds of a move as the policy sees them."""
        if old == (0, 0) or self.told_s is None:
            return self.move_s(old, new)
        return self.told_s


class CurveJob:
    """A job with a goodput curve that changes devices like an elastic run."""

    goes_on = True  # the job continues after it loses some of its nodes

    def __init__(
        self,
        job: Job,
        curve: StepCurve,
        most: int,
        moves: Moves,
        by_kind: Mapping[str, StepCurve] | None = None,
        *,
        states_steps: bool = False,
    ) -> None:
        """Starts as a waiting job.

        Args:
          job: the submitted job, which runs ``steps`` steps of ``batch`` samples.
          curve: the job's step times and goodput by nodes and devices.
          most: the most devices that the job can use.
          moves: seconds of moves.
          by_kind: kind of devices -> curve; other kinds use ``curve``.
          states_steps: whether the owner states the number of steps.
        """
        self._states_steps = states_steps
        self.job, self._curve, self._most, self._moves = job, curve, most, moves
        self._by_kind = dict(by_kind or {})
        self._kinds: tuple[str, ...] = ()
        self._pause_s = 0.0
        self.completed_s: float | None = None
        self.placement: tuple[int, ...] = ()
        self.plan = self.failed = ""
        self.restarts = -1
        # The placement on which the job still trains while new devices join.
        self._trains: tuple[int, ...] = ()
        self._joins_s = self._waits_s = self._served = self._steps = 0.0

    @property
    def batch(self) -> int:
        """The batch size, which never changes in jobs of this class."""
        return self.job.batch or 0

    def advance(self, now_s: float, seconds: float, slowdown: float) -> None:
        """Runs for ``seconds``."""
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
        """Seconds until a pause ends or new devices are ready, at most ``left_s``."""
        if self._waits_s > 0:
            return min(left_s, self._waits_s)
        return min(left_s, self._joins_s) if self._joins_s > 0 else left_s

    def _train(self, now_s: float, seconds: float, slowdown: float) -> float:
        """Trains; returns the seconds used, fewer than ``seconds`` if it completes."""
        # If the job has devices of several kinds, a step takes as long as on the
        # slowest kind.
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
        """Moves to a placement; () stops the job and saves its state."""
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

    def lose_state(self) -> float:
        """Goes back to the last save, because all of the job's nodes have died.

        Returns:
          Seconds for which the job must not start again.
        """
        if not self._steps:
            return 0.0
        if every := self._moves.save_every:
            self._steps = float(self._steps // every * every)
        self._trains = ()
        return self._moves.fence_s

    def view(self, now_s: float, oracle: bool) -> JobView:
        """What a policy can see of the job."""
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
            left=(self.job.steps - self._steps) * self.batch
            if self._states_steps
            else None,
        )


def _shape(placement: tuple[int, ...]) -> Shape:
    return len(placement), sum(placement)
