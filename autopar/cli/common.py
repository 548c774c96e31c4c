"""Functions for all commands: progress, clusters, saved plans and devices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import msgspec

from autopar.cli.target import Workload, find, load, parse_words
from autopar.cluster import Cluster, ClusterError
from autopar.cluster.text import parse_quantity
from autopar.errors import PlanError, TargetError
from autopar.planner.edited import carried_out
from autopar.planner.option_texts import OPTIONS
from autopar.planner.options import (
    PlanOptions,
    as_cluster,
    changed_options,
    read_options,
)
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.progress import say, show_progress
from autopar.runtime.compile_check import plan_that_fits
from autopar.steps.analysis import Analysis
from autopar.units import rounded_cluster

Say = Callable[[str], None]


@contextlib.contextmanager
def progress() -> Generator[Say]:
    """Shows progress on stderr; see `autopar.progress`."""
    with show_progress("starting"):
        yield say


def read_planning(
    given: Mapping[str, Any], source: str | None, devices: int | None
) -> PlanOptions:
    """Reads the planning options of a command line.

    The file of the target is imported first. It may register codecs that an option
    names, and may set the number of devices.

    Args:
      given: name of an option -> its value on the command line.
      source: a target, or the file of a plan; None if the command has neither.
      devices: the number of simulated devices. None: the file of the target may set the
        number; if it sets none, the real devices are used.

    Raises:
      PlanError: an option is wrong, or JAX has already started with fewer devices.
      TargetError: the file cannot be imported, or does not have the function.
    """
    if source is not None and devices is not None:
        simulate_devices(devices)
    if source is not None and not is_plan_file(source):
        find(source)
    return read_options(given)


def read_cluster(text: str | None, memory: str | None = None) -> Cluster:
    """Returns the cluster that ``--cluster`` and ``--memory`` describe.

    Raises:
      ClusterError: the text of ``--cluster`` is wrong or missing.
    """
    if text is None:
        raise ClusterError("say for which devices: --cluster 8x8:h100, or local.")
    cluster = as_cluster(text)
    if memory is None:
        return cluster
    nbytes = round(parse_quantity(memory, "bytes"))
    device = dataclasses.replace(cluster.device, memory_bytes=nbytes)
    return dataclasses.replace(cluster, device=device)


def plan_workload(
    workload: Workload, cluster: Cluster, limits: PlanOptions, say: Say
) -> tuple[Analysis, Plan]:
    """Traces the step of a target and plans it; the plan stores the target."""
    say(f"tracing {workload.target}")
    analysis = workload.analyse_step()
    count = len(analysis.contraction.nodes)
    say(f"planning for {rounded_cluster(cluster)}: {count} decisions")
    plan = plan_that_fits(
        analysis,
        cluster,
        limits,
        lambda on, unfit: plan_analysis(analysis, on, limits, unfit=unfit),
    )
    return analysis, msgspec.structs.replace(
        plan, target=workload.target, options=workload.options
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A plan, the analysis of its step, and its cluster."""

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
    """Loads a saved plan and traces its step, or makes a plan for a target.

    Args:
      source: a plan's JSON file, or a target.
      words: ``key=value`` options of the target. If ``source`` is a plan, the first
        word may name a target to use in place of the plan's own.
      cluster: the text of the cluster; not needed with a saved plan, which has a
        cluster.
      limits: planning options for a new plan.
      say: a function that shows progress.
    """
    given = list(words or [])
    if not is_plan_file(source):
        workload = load(source, parse_words(given))
        made_for = read_cluster(cluster)
        analysis, plan = plan_workload(workload, made_for, limits, say)
        return Subject(plan, analysis, made_for)
    if ignored := [name for name in changed_options(limits) if name != "seconds"]:
        raise PlanError(
            f"{source} is a plan already, so {OPTIONS[ignored[0]].flag} has no effect: "
            "plan again with it, and with autopar plan --layouts where only codecs are "
            "to differ."
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
    analysis = workload.analyse_step()
    made_for = _cluster_of(plan, cluster)
    if plan.changed_parts:
        say(f"carrying out what was edited: {', '.join(plan.changed_parts)}")
        plan = carried_out(analysis, plan, made_for, seconds=limits.seconds)
    return Subject(plan, analysis, made_for)


def is_plan_file(source: str) -> bool:
    """Whether the first word of a command names a saved plan, not a target."""
    return ":" not in pathlib.PurePath(source).name or source.endswith(".json")


def _cluster_of(plan: Plan, text: str | None) -> Cluster:
    """Returns the cluster of a saved plan; ``--cluster`` must be absent or equal."""
    cluster = plan.cluster.read()
    if text is None:
        return cluster
    said = read_cluster(text)
    if said != cluster:
        raise PlanError(f"the plan is for {cluster}, and --cluster says {said}.")
    return cluster


def check_folder(path: pathlib.Path | None) -> None:
    """Checks before the work starts that a result file can be written.

    Raises:
      PlanError: the folder of the file is missing, or the path is a folder.
    """
    if path is not None and not path.parent.is_dir():
        raise PlanError(f"{path}: there is no folder {path.parent}.")
    if path is not None and path.is_dir():
        raise PlanError(f"{path} is a folder; name a file in it.")


def simulate_devices(count: int) -> None:
    """Makes this process simulate at least ``count`` CPU devices.

    Raises:
      PlanError: JAX has already started with fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started, perhaps with enough
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.device_count()
    if found < count:
        raise PlanError(
            f"{count} simulated devices are needed, and JAX has already started with "
            f"{found}. Set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )


def join_processes(devices: int | None) -> None:
    """Joins the `jax.distributed` program that the environment variables describe.

    Args:
      devices: the number of CPU devices that this process simulates; None for real
        devices.

    Raises:
      PlanError: the environment variables do not describe the processes of the program.
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


# Ranges on the command line, such as ``batch=8..64`` and ``--cluster 1..8x8:h100``.


_EXAMPLE = "Examples: 8,16,32; 8..64 doubles; 8..32+8 goes on in steps of 8."
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")


def range_values(text: str) -> list[str]:
    """Returns the values of a range; a text without a range is a single value.

    >>> range_values("8..64"), range_values("8..32+8"), range_values("bf16,f32")
    (['8', '16', '32', '64'], ['8', '16', '24', '32'], ['bf16', 'f32'])

    Raises:
      TargetError: a range is empty, or a value is given twice.
    """
    found = [value for part in text.split(",") for value in _part(part, text)]
    if len(set(found)) < len(found) or (len(found) > 1 and "" in found):
        raise TargetError(f"{text!r} has a value twice, or an empty one. {_EXAMPLE}")
    return found


def _part(part: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    first, last, step = (int(group or 0) for group in match.groups())
    if not 0 < first <= last or (match[3] and not step):
        raise TargetError(f"{text!r} is an empty range, or one without end. {_EXAMPLE}")
    if step:
        return [str(n) for n in range(first, last + 1, step)]
    doubled = itertools.takewhile(
        lambda n: n <= last, (first << k for k in itertools.count())
    )
    return [str(n) for n in doubled]


def range_combinations(words: dict[str, str]) -> list[dict[str, str]]:
    """Returns all combinations of values of options; the last option varies fastest.

    >>> range_combinations({"layers": "2", "batch": "8,16"})
    [{'layers': '2', 'batch': '8'}, {'layers': '2', 'batch': '16'}]
    """
    products = itertools.product(*map(range_values, words.values()))
    return [dict(zip(words, found, strict=True)) for found in products]


def cluster_texts(texts: Sequence[str]) -> list[str]:
    """Expands texts of clusters, in which numbers of devices may be ranges.

    >>> cluster_texts(["1..4x8:h100", "local"])
    ['1x8:h100', '2x8:h100', '4x8:h100', 'local']
    """
    out: list[str] = []
    for text in texts:
        counts, colon, rest = text.partition(":")
        if not colon or not re.fullmatch(r"[\dx.,+]+", counts):
            out.append(text)
            continue
        for found in itertools.product(*map(range_values, counts.split("x"))):
            out.append(f"{'x'.join(found)}:{rest}")
    return list(dict.fromkeys(out))
