"""The demonstration: plans a GPT, trains it, and compares predictions with timings.

The model comes from ``examples/gpt.py``, so the demonstration needs a checkout of the
project.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import typer

from autopar.audits import audit_analysis
from autopar.cli import common
from autopar.cli.commands.runs import DemoCommand
from autopar.cluster import Cluster, local
from autopar.errors import TargetError
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.plans import Plan
from autopar.profiling import profile
from autopar.reports.audit import Audit
from autopar.reports.table import bytes_text, planning_times, render, seconds_text
from autopar.runtime.parallelize import parallelize
from autopar.steps.analysis import analyse
from autopar.terminal import columns

Show = Callable[[str], None]

OPTIONS: dict[str, Any] = {"layers": 4, "d_model": 128, "seq": 64, "batch": 16}
# The number of steps to run before the timed steps, to compile and to fill caches.
_WARM_UP = 3
# A quick profile: fewer sizes and rounds than `autopar profile`, and one dtype.
QUICK = dataclasses.replace(
    profile.CPU_SETTINGS,
    dtypes=("float32",),
    matmul_sizes=(96, 256, 512),
    collective_bytes=(1 << 12, 1 << 17, 1 << 21),
    check_matmul_size=384,
    check_bytes=(1 << 19,),
    codec_elements=0,
    rounds=3,
)


@dataclasses.dataclass(frozen=True, slots=True)
class DemoResult:
    """The results of training under the plan.

    Attributes:
      audit: the predictions of the plan, and the results of the compiler.
      losses: the loss of each step.
      step_s: median time of a step in seconds, without the first steps.
    """

    audit: Audit
    losses: tuple[float, ...]
    step_s: float


def demo(asked: DemoCommand) -> None:
    """Runs the demonstration on simulated devices."""
    common.simulate_devices(asked.devices)
    with common.progress() as say:
        run(
            devices=asked.devices,
            steps=asked.steps,
            options=asked.limits,
            show=typer.echo,
            say=say,
        )


def run(
    *, devices: int, steps: int, options: PlanOptions, show: Show, say: Show
) -> DemoResult:
    """Runs the demonstration.

    Args:
      devices: the number of devices to plan for.
      steps: the number of training steps.
      options: the planning options.
      show: a function that prints a result.
      say: a function that shows progress.

    Raises:
      TargetError: the package is installed without the examples.
    """
    with example("gpt") as gpt:
        training, workload = gpt.training(**OPTIONS), gpt.workload(**OPTIONS)
        cluster = measured_cluster(devices, show, say)
        say("tracing the train step")
        analysis = analyse(workload[0], workload[1:])
        say(f"planning {len(analysis.contraction.nodes)} decisions")
        plan = plan_analysis(analysis, cluster, options)
        show(f"{render(plan)}\n\n{planning_times(plan)}\n")
        say("partitioning and compiling")
        audit = audit_analysis(analysis, plan, cluster, compiled=True)
        losses, step_s = train(training, plan, steps, show, say)
    outcome = DemoResult(audit, losses, step_s)
    show("\n".join(["", *comparison(outcome)]))
    return outcome


@contextlib.contextmanager
def example(name: str) -> Generator[Any]:
    """Imports an example from the checkout that contains this package.

    Raises:
      TargetError: the package is installed without the examples.
    """
    folder = pathlib.Path(__file__).resolve().parents[2] / "examples"
    if not (folder / f"{name}.py").is_file():
        raise TargetError(
            "the demo trains examples/gpt.py, which an installed package lacks: run it "
            "in a checkout of the project, with `make demo`."
        )
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def measured_cluster(devices: int, show: Show, say: Show) -> Cluster:
    """Returns the devices of this process as a cluster with measured speeds.

    The speeds come from a saved profile. If there is none, they are measured here.
    """
    kind = local.take_devices(devices)[0].device_kind
    path = local.profile_path(kind, devices)
    if path.is_file():
        show(f"devices as measured in {path}\n")
        return Cluster.local(devices)
    show(
        f"no profile of these {devices} devices is saved, so a quick one is measured "
        "(`autopar profile` makes one that stays)"
    )
    found = profile.run(devices, say, QUICK if jax.default_backend() == "cpu" else None)
    show(f"measured in {found.elapsed_s:.0f} s\n")
    return found.cluster


def train(
    training: Any, plan: Plan, steps: int, show: Show, say: Show
) -> tuple[tuple[float, ...], float]:
    """Trains, prints the loss, and returns the losses and the time of a step."""
    say("creating the state in its shards")
    planned = parallelize(plan=plan)(training.step)
    state = planned.init(training.create_state, jax.random.key(0))
    losses: list[float] = []
    took_s: list[float] = []
    every = max(1, steps // 10)
    for i, batch in enumerate(itertools.islice(training.batches(0), steps)):
        say(f"training: step {i} of {steps}")
        start = time.perf_counter()
        state, loss = planned(state, batch)
        losses.append(float(loss))  # waits for the step to end
        took_s.append(time.perf_counter() - start)
        if i % every == 0 or i == steps - 1:
            show(f"step {i:4d}  loss {losses[-1]:7.4f}")
    return tuple(losses), statistics.median(took_s[min(_WARM_UP, steps - 1) :])


def comparison(outcome: DemoResult) -> list[str]:
    """Returns a table of predicted and measured values."""
    expected, compiled = outcome.audit.plan.predicted, outcome.audit.first_compiled
    assert compiled is not None
    shardy_bytes = sum(outcome.audit.shardy.values())
    times = (expected.step_s, outcome.step_s)
    sent = expected.communication_bytes
    held = (expected.peak_memory_bytes, float(compiled.peak_memory_bytes))
    rows = [
        ("", "predicted", "actual", "predicted / actual", "actual is"),
        (
            "step",
            *map(seconds_text, times),
            _ratio(*times),
            "median of the trained steps",
        ),
        _bytes_row("sent by a device", (sent, shardy_bytes), "the partitioned step"),
        _bytes_row("", (sent, compiled.communication_bytes), "the compiled step"),
        _bytes_row("held by a device", held, "the compiled step"),
    ]
    lines = columns(rows, right=(1, 2, 3))
    first, last = outcome.losses[0], outcome.losses[-1]
    notes = [f"note: {name}" for name in compiled.exceptions]
    return [*lines, *notes, "", f"loss {first:.3f} -> {last:.3f}"]


def _bytes_row(name: str, pair: tuple[float, float], source: str) -> tuple[str, ...]:
    return (name, *map(bytes_text, pair), _ratio(*pair), source)


def _ratio(predicted: float, actual: float) -> str:
    if actual:
        return f"{predicted / actual:.3f}"
    return "1.000" if predicted == actual else "-"
