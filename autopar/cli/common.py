"""Shows progress, and reads clusters and saved plans, for all commands."""

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Generator, Sequence

import jax
import msgspec

from autopar.cli.target import Workload, load, parse_words
from autopar.cluster import Cluster, ClusterError
from autopar.cluster.text import parse_quantity
from autopar.errors import PlanError, TargetError
from autopar.planner.codecs.options import parsed
from autopar.planner.edited import carried_out
from autopar.planner.hints import Pins
from autopar.planner.limits import SOLVER_SECONDS
from autopar.planner.options import PlanOptions, as_cluster
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.progress import say, shown
from autopar.steps.analysis import Analysis

Say = Callable[[str], None]


@contextlib.contextmanager
def progress() -> Generator[Say]:
    """Shows what is being done, on stderr; see `autopar.progress`."""
    with shown("starting"):
        yield say


def read_cluster(text: str | None, memory: str | None = None) -> Cluster:
    """The cluster that ``--cluster`` and ``--memory`` say.

    Raises:
      ClusterError: the text is wrong or absent.
    """
    if text is None:
        raise ClusterError("say for which devices: --cluster 8x8:h100, or local.")
    cluster = as_cluster(text)
    if memory is None:
        return cluster
    nbytes = round(parse_quantity(memory, "bytes"))
    device = dataclasses.replace(cluster.device, memory_bytes=nbytes)
    return dataclasses.replace(cluster, device=device)


def plan_options(
    *,
    seconds: float = SOLVER_SECONDS,
    max_axes: int | None = None,
    compression: str = "none",
    error_budget: float | None = None,
    layouts: Plan | None = None,
    microbatches: int | str | Sequence[int] | None = None,
    coupled: str = "refuse",
    pins: Pins | None = None,
    axis_names: Sequence[str] | None = None,
    split_batch: bool = True,
    stages: int | str | None = None,
    schedule: str | None = None,
    remat: str | None = None,
) -> PlanOptions:
    """Returns the options of a command that are about the search for a plan.

    Without options they are those of `autopar.plan`; infinite seconds are no limit.

    Raises:
      PlanError: there is no such codec, or a budget for other than ``auto``.
    """
    if error_budget is not None and compression != "auto":
        parsed(compression)
        raise PlanError(
            f"--error-budget {error_budget:g} bounds what --compression auto "
            f"chooses, and --compression is {compression}."
        )
    return PlanOptions(
        seconds=None if math.isinf(seconds) else seconds,
        max_axes=max_axes,
        compression=compression,
        error_budget=error_budget,
        layouts=layouts,
        microbatches=microbatches,
        coupled=coupled,
        pins=pins,
        axis_names=axis_names,
        split_batch=split_batch,
        stages=stages,
        schedule=schedule,
        remat=remat,
    )


def count_of(text: str | None, option: str) -> int | str | None:
    """A number, or ``auto``.

    Args:
      text: what the option was given; None: nothing.
      option: its name, for the error.

    Raises:
      PlanError: it is neither.
    """
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{option} {text}: expected a whole number such as 4, or auto.")
    return int(text)


def microbatches_of(text: str | None) -> int | str | Sequence[int] | None:
    """A number, ``auto``, or the numbers of replicas, such as ``8+4``.

    Args:
      text: what ``--microbatches`` was given; None: nothing.

    Raises:
      PlanError: it is none of them.
    """
    parts = (text or "").split("+")
    if len(parts) == 1:
        return count_of(text, "--microbatches")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise PlanError(
            f"--microbatches {text}: expected a whole number such as 4, auto, or how "
            "many each replica runs, such as 8+4."
        )
    return [int(part) for part in parts]


def plan_workload(
    workload: Workload, cluster: Cluster, limits: PlanOptions, say: Say
) -> tuple[Analysis, Plan]:
    """Traces a target's step and plans it; the plan remembers its target."""
    say(f"tracing {workload.target}")
    analysis = workload.analysed()
    count = len(analysis.contraction.nodes)
    say(f"planning for {cluster}: {count} decisions")
    plan = plan_analysis(analysis, cluster, limits)
    return analysis, msgspec.structs.replace(
        plan, target=workload.target, options=workload.options
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A plan, the step that it is for and the cluster."""

    plan: Plan
    analysis: Analysis
    cluster: Cluster


def subject(
    source: str,
    words: list[str] | None,
    cluster: str | None,
    limits: PlanOptions,
    say: Say,
) -> Subject:
    """A saved plan with its step made again, or a plan made now for a target.

    Args:
      source: a plan's JSON file, or a target.
      words: ``key=value`` options; after a plan, a target may come before them.
      cluster: the cluster's text; a saved plan knows its own.
      limits: for a plan that is made now.
      say: shows progress.
    """
    given = list(words or [])
    if not is_plan_file(source):
        workload = load(source, parse_words(given))
        made_for = read_cluster(cluster)
        analysis, plan = plan_workload(workload, made_for, limits, say)
        return Subject(plan, analysis, made_for)
    if limits.compression != "none":
        raise PlanError(
            f"{source} is a plan already, so --compression has no effect; for other "
            "codecs make a plan with autopar plan --layouts."
        )
    if limits.max_axes is not None:
        raise PlanError(
            f"{source} is a plan already, so --max-axes has no effect; plan again for "
            "another mesh."
        )
    plan = Plan.load(source)
    target = given.pop(0) if given and "=" not in given[0] else plan.target
    if not target:
        raise TargetError(
            f"{source} does not say which step it is for: add the target, as in "
            f"{source} train.py:workload."
        )
    options = plan.options | parse_words(given)
    workload = load(target, options)
    say(f"tracing {target}")
    analysis = workload.analysed()
    made_for = _cluster_of(plan, cluster)
    if plan.edited:
        say(f"carrying out what was edited: {', '.join(plan.edited)}")
        plan = carried_out(analysis, plan, made_for, seconds=limits.seconds)
    return Subject(plan, analysis, made_for)


def is_plan_file(source: str) -> bool:
    """Whether a command's first word names a saved plan, not a target."""
    return ":" not in pathlib.PurePath(source).name or source.endswith(".json")


def _cluster_of(plan: Plan, text: str | None) -> Cluster:
    """The cluster that a saved plan holds; ``--cluster`` may only repeat it."""
    cluster = plan.cluster.read()
    if text is None:
        return cluster
    said = read_cluster(text)
    if said != cluster:
        raise PlanError(f"the plan is for {cluster}, and --cluster says {said}.")
    return cluster


def check_folder(path: pathlib.Path | None) -> None:
    """Checks that a file can be made, before the work and not after it.

    Raises:
      PlanError: its folder is missing, or it is a folder.
    """
    if path is not None and not path.parent.is_dir():
        raise PlanError(f"{path}: there is no folder {path.parent}.")
    if path is not None and path.is_dir():
        raise PlanError(f"{path} is a folder; name a file in it.")


def simulate_devices(count: int) -> None:
    """Makes this process see at least so many CPU devices.

    Raises:
      PlanError: JAX has already started with fewer.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started; it may have enough
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.device_count()
    if found < count:
        raise PlanError(
            f"{count} simulated devices are needed, and JAX has already started with "
            f"{found}. Set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )


def join_processes(devices: int | None) -> None:
    """Makes this process one of a `jax.distributed` program, as its environment says.

    Args:
      devices: CPU devices that this process simulates; None: the real ones.

    Raises:
      PlanError: the environment does not say which processes there are.
    """
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    try:
        jax.distributed.initialize(
            num_processes=_environment_int("JAX_NUM_PROCESSES"),
            process_id=_environment_int("JAX_PROCESS_ID"),
        )
    except (ValueError, RuntimeError) as error:
        raise PlanError(
            f"--distributed: jax.distributed could not start: {error} Set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID on every "
            "host; on TPUs, Slurm and Kubernetes JAX finds them itself."
        ) from error


def _environment_int(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text else None
