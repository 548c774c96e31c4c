"""The part of `autopar.elastic` for a process that `autopar run` started."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autopar.checkpoint.checkpoints import Checkpoints
from autopar.cluster import Cluster
from autopar.elastic.events import Event, Resolved
from autopar.elastic.ledger import Ledger
from autopar.elastic.nans import OnNan
from autopar.elastic.processes.beside import rest_structs
from autopar.elastic.processes.following import TeamFollowing
from autopar.elastic.processes.link import AHEAD_VARIABLE, VARIABLE
from autopar.elastic.processes.programs import StoredPrograms
from autopar.elastic.processes.sizing import cluster_of
from autopar.elastic.processes.team import Team, local_devices, run_folder
from autopar.elastic.processes.training import TeamRun
from autopar.elastic.samples import Samples
from autopar.elastic.saves import Saves
from autopar.elastic.sources.file import File
from autopar.elastic.sources.named import Signals, sources_of
from autopar.elastic.sources.source import Source
from autopar.errors import AutoparError, PlanError
from autopar.goodput.loop import Record
from autopar.planner.cache import PlanCache
from autopar.runtime import changing_batches
from autopar.runtime.creation import state_shapes
from autopar.runtime.parallel_step import ParallelStep
from autopar.runtime.world import LoneChannel, World
from autopar.steps.spares import Spares
from autopar.whole_files import append_lines
from autopar_passes import jax_processes

# Plans and compiles for likely next worlds, in its own process of low priority.
#
# XLA cannot compile for processes that do not exist. So this process imitates a world
# of any size. It registers as each process of the world, compiles the program of the
# first process, and stores the plan and the program in the folder of the run.

_POLL_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """The channel of an imitated world: each process sends the same data.

    Attributes:
      count: number of processes.
    """

    count: int

    def broadcast(self, data: bytes) -> bytes:
        """See `Channel`."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """See `Channel`."""
        return [data] * self.count

    def exchange(self, data: bytes, what: str) -> dict[int, bytes]:
        """See `Channel`."""
        del what
        return dict.fromkeys(range(self.count), data)

    def tell(self, data: bytes) -> None:
        """See `Channel`; there is no receiver."""


def imitated_world(processes: int, local_devices: int) -> World:
    """A world in which nothing runs; programs can be compiled for it."""
    address, service = jax_processes.open_service(processes)
    backend = jax_processes.imitated_backend(address, processes, local_devices)
    service.shutdown()
    channel = Echo(processes) if processes > 1 else LoneChannel()
    return World(tuple(backend.devices()), 0, processes, channel)


def likely(processes: int, least: int, most: int) -> list[int]:
    """Sizes of the worlds that may come next, the most likely size first.

    >>> likely(4, 1, 6)
    [3, 5, 2]
    """
    sizes = [processes - 1, processes + 1, processes // 2, 2 * processes]
    return [n for n in dict.fromkeys(sizes) if least <= n <= most and n != processes]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJoin:
    """The inputs for preparing programs of other worlds.

    Attributes:
      step: the train step; this process does not run it.
      base: the cluster that the step was given; None: no cluster.
      structs: shapes of the step's arguments, over all processes.
      local_devices: number of devices of each process.
      donate: whether steps consume (donate) the training state.
      folder: folder of the run.
    """

    step: ParallelStep[..., Any]
    base: Cluster | None
    structs: Sequence[Any]
    local_devices: int
    donate: bool
    folder: pathlib.Path

    def prepare(self, processes: int) -> dict[str, Any]:
        """Plans and compiles for a world of this many processes; returns the times."""
        begin = time.perf_counter()
        world = imitated_world(processes, self.local_devices)
        cluster = cluster_of(
            self.base, processes, self.local_devices, found=world.devices
        )
        cache = PlanCache(self.folder / "plans")
        changing_batches.enter_world(
            self.step, world, cluster, donate=self.donate, cache=cache
        )
        self.step.prepare(*self.structs)
        planned_s = time.perf_counter() - begin
        programs = StoredPrograms(self.folder / "programs")
        made = programs.prepare(self.step.running.planned, donate=self.donate)
        return {
            "processes": processes,
            "plan_s": round(planned_s, 3),
            "compile_s": round(time.perf_counter() - begin - planned_s, 3),
            "compiled": made,
        }

    def follow(self, least: int, most: int) -> None:
        """Prepares the likely next worlds, until the run has ended."""
        done: set[int] = set()
        while (size := _running(self.folder)) is not None:
            done.add(size)  # the processes of the current world compile for themselves
            todo = [n for n in likely(size, least, most) if n not in done]
            if not todo or not size:
                time.sleep(_POLL_S)
                continue
            done.add(todo[0])
            _write(self.folder, self._try(todo[0]))

    def _try(self, processes: int) -> dict[str, Any]:
        try:
            return self.prepare(processes)
        except AutoparError as error:  # for example, the batch cannot be split
            return {"processes": processes, "error": str(error)}


def _running(folder: pathlib.Path) -> int | None:
    """Number of processes in the run's world; None: the run has ended."""
    try:
        return len(json.loads((folder / "run.json").read_text())["world"])
    except (OSError, ValueError):
        return None


def _write(folder: pathlib.Path, line: dict[str, Any]) -> None:
    text = json.dumps({"time_s": time.time(), **line})
    with contextlib.suppress(OSError):  # the supervisor reports a full disk
        append_lines(folder / "ahead.jsonl", text.encode() + b"\n")


def prepare_and_exit(ahead: PreparedJoin, text: str) -> NoReturn:
    """The main function of the process that prepares programs instead of training."""
    least, most = map(int, text.split(":"))
    ahead.follow(least, most)
    sys.exit(0)


def join_run(
    step: ParallelStep[..., Any],
    create_state: Callable[..., Any],
    args: Sequence[Any],
    samples: Samples,
    *,
    steps: float,
    events: Sequence[str | Source],
    ledger: str | os.PathLike[str] | None,
    checkpoints: Checkpoints | None,
    every: int | None,
    survive: int,
    shows: bool | None,
    on_nan: OnNan = "stop",
    following: Callable[[Record], TeamFollowing] | None = None,
) -> TeamRun | None:
    """Joins the run of several processes for which this process was started.

    Args:
      step: the train step.
      create_state: makes the state of a run that begins.
      args: arguments of ``create_state``.
      samples: the training samples.
      steps: number of steps.
      events: sources of events; only the supervisor listens to them, for all processes.
      ledger: path of the ledger.
      checkpoints: where the run is saved.
      every: number of steps between saves; None: only at the end.
      survive: how many processes may die at once without loss of state.
      shows: whether progress is shown; None: only on a terminal.
      on_nan: reaction to a step that is not finite.
      following: makes the object that adapts the batch size; None: the size stays.

    Returns:
      The run; None: `autopar run` did not start this process.

    Raises:
      PlanError: an argument is wrong, or the supervisor is gone.
    """
    if not _is_count(survive):
        raise PlanError(
            f"elastic: survive={survive!r} must be a whole number, at least 0."
        )
    donate = survive == 0
    if survive:
        # While a step runs, memory holds the state before the step, the two states
        # before that, and copies for neighbours (`Team.keep_state`). An array that
        # other processes also have is kept only once.
        step.preparation.planner.hold(Spares(always=1, split=2 + survive))
    if text := os.environ.get(AHEAD_VARIABLE):
        shapes = state_shapes(create_state, args)
        structs = (*shapes.arguments(), *rest_structs(step, samples, shapes, 0))
        prepare_and_exit(_ahead(step, structs, donate=donate), text)
    splits = step.preparation.planner.options.split_batch
    if VARIABLE not in os.environ:
        return None
    texts, signals = _heard_by(events)
    rows = samples.batch if splits else 0
    saves = checkpoints is not None
    team = Team.of_environment(survive, rows, texts, saves=saves)
    assert team is not None
    for source in signals:
        source.start(Resigning(team))
    written = Ledger(ledger)
    return TeamRun(
        step,
        create_state,
        args,
        samples,
        steps=steps,
        ledger=written,
        saves=Saves(checkpoints, every, step, written),
        team=team,
        donate=donate,
        shows=shows,
        following=following,
        on_nan=on_nan,
    )


class Resigning:
    """Receives signals: on a signal, this process asks to leave the run."""

    def __init__(self, team: Team) -> None:
        """Takes this process's connection to the run."""
        self._team = team

    def put(self, event: Event) -> Resolved:
        """See `autopar.elastic.sources.source.Sink`."""
        self._team.resign()
        reason = "this process asks the supervisor to leave."
        return Resolved(event=event, status="accepted", cluster=None, reason=reason)

    def wrong(self, source: str, reason: str) -> None:
        """Does nothing, because a signal is always a valid event."""


def _heard_by(events: Sequence[str | Source]) -> tuple[list[str], list[Source]]:
    """The source texts for the supervisor, and the sources of this process only.

    Raises:
      PlanError: a source is not a text, or the text names no source.
    """
    texts: list[str] = []
    signals: list[Source] = []
    for given, source in zip(events, sources_of(events), strict=True):
        if isinstance(source, Signals):
            signals.append(source)
        elif isinstance(source, File):
            texts.append(f"file:{source.path.absolute()}")
        elif isinstance(given, str):
            texts.append(given)
        else:
            raise PlanError(
                f"events: under `autopar run` the supervisor listens, and cannot have "
                f"{given!r}; name it, such as 'http:8765', or use run.change(...)."
            )
    return texts, signals


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _ahead(
    step: ParallelStep[..., Any], structs: Sequence[Any], *, donate: bool
) -> PreparedJoin:
    """The inputs of the process that prepares programs for other worlds."""
    return PreparedJoin(
        step=step,
        base=step.setting.cluster,
        structs=structs,
        local_devices=local_devices(),
        donate=donate,
        folder=run_folder(),
    )
