"""Runs policies on the published traces, for the tables in docs/scheduling.md.

    python benchmarks/scheduling.py [--only faithful] [--shared ../shared]

Rows: ``faithful`` (repeats published figures), ``ours`` (our policy on Pollux's
  workloads, compared with the figures of Pollux's artifact), ``bound`` (as ``ours``,
  with a bound in which no job waits), ``rubick`` (our policy on Rubick's workloads),
  ``model`` (errors of step-time models), ``pollux`` (the genetic search, which takes
  some minutes).
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Annotated

# SciPy's fits have seven parameters, so threads of linear algebra mostly wait for each
# other: for 7 of 8 CPU seconds of Pollux's search.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import typer

from autopar.scheduler.models import corrected_form, pollux_form
from autopar.scheduler.models.corrected_form import CorrectedTimes
from autopar.scheduler.models.pollux_form import StepSamples
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import Options, simulate
from autopar.scheduler.simulator.jobs import StepModel
from autopar.scheduler.simulator.metrics import Metrics, metrics
from autopar.scheduler.simulator.tables import PlacementTimes, read_rows
from autopar.scheduler.simulator.traces.recorded import jobs_of

ROOT = pathlib.Path(__file__).resolve().parent
DEFAULT = pathlib.Path(os.environ.get("AUTOPAR_SHARED", ROOT.parent.parent / "shared"))
# The constants of our policy were chosen on workloads 4, 5 and 8.
WORKLOADS = ("workload-1", "workload-2", "workload-3", "workload-6")
LOADS = {
    "0.5": "workloads-0.5",
    "1.0": "workloads",
    "1.5": "workloads-1.5",
    "2.0": "workloads-2.0",
}
# Decisions as in Pollux, only every 60 s; and decisions also when a job comes or ends.
ROUNDS, EVENTS = Options(), Options(react_s=5.0)
# The policies under which a job runs alone.
_ALONE = ("goodput", "sia", "fair")
# The form of our model was chosen on these three applications.
CHOSEN_ON = ("cifar10", "imagenet", "ncf")
KEPT_OUT = ("bert", "deepspeech2", "yolov3")


def run(
    only: Annotated[str | None, typer.Option(help="One row.")] = None,
    shared: Annotated[pathlib.Path, typer.Option(help="Public traces.")] = DEFAULT,
) -> None:
    """Prints a table for each row."""
    folder = shared / "scheduling"
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not there; name the folder of traces")
    rows = {
        "faithful": faithful,
        "ours": ours,
        "bound": beside_bound,
        "rubick": with_plans,
        "model": models,
        "pollux": genetic,
    }
    for name, row in rows.items():
        if only in (None, name):
            row(folder)


def simulated(
    trace: pathlib.Path, cluster: str, policy: str, options: Options = ROUNDS
) -> tuple[Metrics, float]:
    """The metrics of a simulation, and its CPU seconds."""
    begin = time.process_time()
    nodes, made = Nodes.parse(cluster), policy_of(policy)
    history = simulate(jobs_of(trace, None, nodes, made), nodes, made, options)
    return metrics(history), time.process_time() - begin


def _line(name: str, trace: pathlib.Path, cluster: str, published: float) -> None:
    figures, seconds = simulated(trace, cluster, name)
    print(
        f"| {name} | {trace.stem} | {figures.average_s:.5f} | {published} | "
        f"{seconds:.1f} |",
        flush=True,
    )


def faithful(folder: pathlib.Path) -> None:
    """Published figures that are deterministic."""
    print(
        "| policy | workload | average s | published s | CPU s |\n" + "| --- " * 5 + "|"
    )
    six = folder / "pollux" / "workloads" / "workload-6.csv"
    _line("tiresias", six, "16x4", 3469.69375)
    _line("optimus", six, "16x4", 5301.875)
    plans = folder / "rubick" / "workloads"
    _line("rubick", plans / "workload-base.csv", "8x8", 3638.3)
    _line("rubick", plans / "naive.csv", "8x8", 895.6)


def genetic(folder: pathlib.Path) -> None:
    """Pollux's search."""
    print(
        "| policy | workload | average s | published s | CPU s |\n" + "| --- " * 5 + "|"
    )
    six = folder / "pollux" / "workloads" / "workload-6.csv"
    _line("pollux", six, "16x4", 2446.13)


def ours(folder: pathlib.Path) -> None:
    """Our policy, compared with the figures of Pollux's artifact.

    Decisions are made in rounds, as by Pollux, and then also at events.
    """
    published = json.loads((folder / "pollux" / "baselines.json").read_text())["pollux"]
    print(
        "| load | workload | Pollux s | ours, rounds s | ratio | slowest | CPU s | "
        "ours, events s | ratio | slowest | CPU s |\n" + "| --- " * 11 + "|"
    )
    for load, where in LOADS.items():
        for workload in WORKLOADS:
            trace = folder / "pollux" / where / f"{workload}.csv"
            other = published[load][workload]
            cells = [load, workload, f"{other:.1f}"]
            for options in (ROUNDS, EVENTS):
                figures, seconds = simulated(trace, "16x4", "goodput", options)
                cells += [
                    f"{figures.average_s:.1f}",
                    f"{figures.average_s / other:.3f}",
                    f"{figures.slowest_share:.2f}",
                    f"{seconds:.1f}",
                ]
            print(f"| {' | '.join(cells)} |", flush=True)


def beside_bound(folder: pathlib.Path) -> None:
    """Compares our policy with a cluster in which no job waits.

    The bound of a job is its completion time if it has the whole cluster, under the
    best of three policies for it. These policies decide in rounds, too.
    """
    published = json.loads((folder / "pollux" / "baselines.json").read_text())["pollux"]
    print(
        "| load | workload | Pollux s | no job waits s | ours, rounds s | of the way | "
        "ours, events s | of the way |\n" + "| --- " * 8 + "|"
    )
    alone: dict[tuple[object, ...], float] = {}
    for load, where in LOADS.items():
        for workload in WORKLOADS:
            trace = folder / "pollux" / where / f"{workload}.csv"
            other, bound_s = published[load][workload], _bound_s(trace, alone)
            cells = [load, workload, f"{other:.1f}", f"{bound_s:.1f}"]
            for options in (ROUNDS, EVENTS):
                average_s = simulated(trace, "16x4", "goodput", options)[0].average_s
                share = (other - average_s) / (other - bound_s)
                cells += [f"{average_s:.1f}", f"{share:.0%}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def _bound_s(trace: pathlib.Path, alone: dict[tuple[object, ...], float]) -> float:
    """Mean completion time of a trace's jobs, each alone on the cluster."""
    nodes = Nodes.parse("16x4")
    seconds: list[float] = []
    columns = ("name", "application", "num_replicas", "batch_size")
    for row in read_rows(trace, columns):
        name, *kind = (row.text(c) for c in columns)
        key = tuple(kind)
        if key not in alone:
            alone[key] = min(_alone_s(trace, nodes, name, p) for p in _ALONE)
        seconds.append(alone[key])
    return float(np.mean(seconds))


def _alone_s(trace: pathlib.Path, nodes: Nodes, name: str, policy: str) -> float:
    made = policy_of(policy)
    jobs = jobs_of(trace, None, nodes, made)
    own = [job for job in jobs if job.job.name == name]
    return metrics(simulate(own, nodes, made)).average_s


def with_plans(folder: pathlib.Path) -> None:
    """Our policy and Rubick's, with Rubick's tables of plans."""
    print(
        "| workload | Rubick s | ours, rounds s | ratio | ours, events s | ratio |\n"
        + "| --- " * 6
        + "|"
    )
    for workload, other in (("workload-base", 3638.3), ("naive", 895.6)):
        trace = folder / "rubick" / "workloads" / f"{workload}.csv"
        cells = [workload, f"{other}"]
        for options in (ROUNDS, EVENTS):
            average_s = simulated(trace, "8x8", "goodput", options)[0].average_s
            cells += [f"{average_s:.1f}", f"{average_s / other:.3f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def models(folder: pathlib.Path) -> None:
    """Mean relative errors of step times.

    The errors are those on all rows; on rows that are left out, one by one and with all
    rows of equally many nodes and devices; and on more than two nodes, predicted from
    at most two.
    """
    print(
        "| application | kept out | model | in sample | row left out "
        "| devices left out | from 2 nodes |\n" + "| --- " * 7 + "|"
    )
    fits = {
        "ours": corrected_form.fit,
        "form alone": corrected_form.fit_power_form,
        "Pollux": pollux_form.fit,
    }
    for application in (*CHOSEN_ON, *KEPT_OUT):
        rows = measured(folder / "pollux" / "traces" / application)
        few = rows[:, 0] <= 2
        kept = "yes" if application in KEPT_OUT else "no"
        for name, fit in fits.items():
            model = fit(_samples(rows))
            out = _left_out(model, rows)
            beyond = _error(fit(_samples(rows[few])), rows[~few])
            print(
                f"| {application} | {kept} | {name} | {_error(model, rows):.1%} | "
                f"{out} | {beyond:.1%} |",
                flush=True,
            )


def _left_out(model: StepModel, rows: np.ndarray) -> str:
    """Errors of predictions without each row, and without all rows of its devices."""
    if not isinstance(model, CorrectedTimes):
        return "- | -"
    places = rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1]
    logs = (model.missed.without(groups) for groups in (np.arange(len(rows)), places))
    return " | ".join(f"{np.mean(np.abs(np.expm1(-log))):.1%}" for log in logs)


def measured(folder: pathlib.Path) -> np.ndarray:
    """Rows of nodes, devices, local batch, seconds of a microbatch, and of a step."""
    found: list[tuple[float, ...]] = [
        (len(placement), sum(placement), local, step - sync, step)
        for placement, local, step, sync in PlacementTimes(folder).rows()
    ]
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    for row in read_rows(folder / "scalability.csv", columns):
        *sizes, step, sync = (row.number(name) for name in columns)
        found.append((*map(int, sizes), step - sync, step))
    return np.array(found)


def _samples(rows: np.ndarray) -> StepSamples:
    return StepSamples(*rows.T)


def _error(model: StepModel, rows: np.ndarray) -> float:
    predicted = model.step_s(rows[:, 0], rows[:, 1], rows[:, 2])
    return float(np.mean(np.abs(predicted / rows[:, 4] - 1)))


if __name__ == "__main__":
    typer.run(run)
