"""Eight jobs of three models whose batch, plan and codecs adapt, on eight hosts.

    python benchmarks/network/co_adaptation.py --rates 100 1000 --seeds 1
    python benchmarks/network/co_adaptation.py --targets     # of the models

Small trainings of a GPT, a ResNet and a recommendation model arrive by seed, at the
scheduler of eight hosts with one device each (network namespaces with shaped links).
A job has at least two devices. It trains with `autopar.train` until its smoothed loss
has reached the target of its model. The policy gives devices by goodput. In the arm
`all` a job's batch, plan and codecs adapt; in the other arms one part is frozen:
`batch` (the base batch), `plan` (the state is whole on each host, and the batch is
split), or `codecs` (gradients are dense). All else is equal. All hosts share this
machine's cores, so devices are said to compute at 1 GFLOP/s, and steps are paced by the
seconds of work that the plan predicts then (`co_adaptation_script.py`). Bytes, codecs,
decisions and losses are real. The
hosts share a cache of compiled programs, which ``--keep`` keeps for the next arm.

A row compares the average completion time with that of the simulator: the same policy
and arrivals. "as reported": each model has the goodput that the jobs of the arm had on
each number of devices, and each job has its own work, seconds to the first step, and
pause at a change of devices. "as submitted": the curves at submission, the work of the
target with the base batch, and the costs of moves that a separate job measures once at
each rate, alone. Jobs that start at the same time share this machine's cores, so a
start then takes several times as long. What is finished is kept in the file ``--out``.
An arm whose files are in ``--keep`` is not run again: its figures are computed from
them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import co_adaptation_script as script
import jax
import numpy as np
import scheduled_jobs
import workloads
from co_adaptation_script import ARMS, MODELS

import autopar
from autopar.dispatch.specs import JobSpec
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.scheduler.jobs import Job
from autopar.scheduler.nodes import Nodes
from autopar.scheduler.policies.baselines import policy_of
from autopar.scheduler.simulator.engine import Options, simulate
from autopar.scheduler.simulator.jobs import CurveJob, Moves
from autopar.scheduler.simulator.metrics import metrics

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "co_adaptation_script.py"
DATA = HERE.parents[1] / "docs" / "data" / "co_adaptation.json"
POLICY, HOSTS, JOBS = "goodput", 8, 8
RAN = "ran.json"
BETWEEN_S = 30.0
"""Mean seconds between two arrivals."""

SIZES = (2, 4, 8)
"""Numbers of devices of the curves: those that divide the base batches."""

DESIGN_SEED, DESIGN_STEPS = 1000, {"gpt": 250, "resnet": 150, "recommendation": 500}
"""The training that sets a model's target: its seed, and its number of steps."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A job: its name, its model, when it arrives, and its requested devices."""

    name: str
    model: str
    at_s: float
    asks: int
    seed: int


def arrivals(seed: int, count: int = JOBS) -> list[Arrival]:
    """The jobs of a seed; each model has nearly as many."""
    random = np.random.default_rng(seed)
    models = list(itertools.islice(itertools.cycle(sorted(MODELS)), count))
    random.shuffle(models)
    times = np.cumsum([0.0, *random.exponential(BETWEEN_S, count - 1)])
    asks = random.choice([2, 4], count)
    return [
        Arrival(f"{model}{k}", model, float(at_s), int(n), 100 * seed + k)
        for k, (model, at_s, n) in enumerate(zip(models, times, asks, strict=True))
    ]


def words(out: pathlib.Path, job: Arrival, arm: str, rate: float) -> list[str]:
    """Arguments of the training script."""
    return [str(out / f"losses-{job.name}.steps"), job.model, str(job.seed), arm,
            f"{rate:g}", str(MODELS[job.model].target)]  # fmt: skip


def submitted_curve(name: str, rate: float, arm: str) -> CurveTable:
    """The curve of a model at its submission: plans for its base batch.

    A job runs on `SIZES` of devices only.
    """
    model = MODELS[name]
    step, create_state = script.step_of(model)
    state = jax.eval_shape(create_state, jax.random.key(0))
    batch = next(model.data(0, model.base))
    points: list[CurvePoint] = []
    for n in SIZES:
        cluster = script.cluster_of(rate, n)
        options = script.plan_options(arm)
        plan = autopar.plan(step, state, batch, cluster=cluster, **options)
        points.append(point(n, model.base, plan.predicted.step_s))
    most = script.train_options(arm, model)["max_batch"]
    return CurveTable(points=tuple(points), base_batch=model.base, max_batch=most)


def submitted_curves(
    folder: pathlib.Path, rate: float, arm: str
) -> dict[str, CurveTable]:
    """The curve of each model at its submission; reads those that are known."""
    found: dict[str, CurveTable] = {}
    for name in MODELS:
        path = folder / f"{name}.json"
        if not path.exists():
            submitted_curve(name, rate, arm).save(path)
        found[name] = CurveTable.load(path)
    return found


def point(devices: int, batch: int, step_s: float) -> CurvePoint:
    """A point of a curve: hosts with one device each."""
    return CurvePoint(
        cluster=f"{devices}x1:cpu", kind="cpu", nodes=devices, devices=devices,
        batch=batch, step_s=step_s, goodput=batch / step_s,
    )  # fmt: skip


def goodputs(lines: Sequence[Sequence[Any]]) -> dict[int, tuple[float, float]]:
    """Number of devices -> progress in rows of the base batch, and seconds.

    The seconds between two steps on different numbers of devices are those of a move,
    so they do not count. Nor do those of a suspension and a new start.

    Args:
      lines: the lines that the script of one job wrote, in order of time.
    """
    found: dict[int, tuple[float, float]] = collections.defaultdict(lambda: (0.0, 0.0))
    gaps = [b[2] - a[2] for a, b in itertools.pairwise(lines)]
    longest = max(5.0, 20 * statistics.median(gaps)) if gaps else 0.0
    for (a, b), gap in zip(itertools.pairwise(lines), gaps, strict=True):
        if a[3] == b[3] and gap <= longest:
            rows, seconds = found[b[3]]
            found[b[3]] = rows + b[4] - a[4], seconds + gap
    return dict(found)


def reported_curve(
    submitted: CurveTable, found: Sequence[Mapping[int, tuple[float, float]]]
) -> CurveTable:
    """The curve of a model's jobs; what no job ran on is scaled as the rest is.

    Args:
      submitted: the model's curve at submission.
      found: of each job, the result of `goodputs`.
    """
    mean: dict[int, float] = {}
    for n in SIZES:
        rows, seconds = (sum(x[n][k] for x in found if n in x) for k in (0, 1))
        if rows > 0 and seconds > 0:
            mean[n] = rows / seconds
    by_devices = {p.devices: p for p in submitted.points}
    ratios = [mean[n] / by_devices[n].goodput for n in mean]
    scale = statistics.geometric_mean(ratios) if ratios else 1.0
    base = submitted.base_batch
    points = [
        point(n, base, base / mean.get(n, scale * p.goodput))
        for n, p in by_devices.items()
    ]
    return CurveTable(points=tuple(points), base_batch=base)


def reported_moves(
    lines: Sequence[Sequence[Any]], started_s: float, moves: Moves
) -> Moves:
    """The costs of moves that one job had.

    Args:
      lines: the lines that its script wrote, in order of time.
      started_s: when the scheduler started the job.
      moves: the costs measured before; those that the job did not have are kept.
    """
    pauses = [b[2] - a[2] for a, b in itertools.pairwise(lines) if a[3] != b[3]]
    return dataclasses.replace(
        moves,
        start_s=lines[0][2] - started_s,
        change_s=statistics.mean(pauses) if pauses else moves.change_s,
    )


def simulated(
    jobs: Sequence[Arrival],
    curves: Mapping[str, CurveTable],
    work: Mapping[str, float],
    moves: Mapping[str, Moves],
) -> float:
    """The average completion time in the simulator.

    The simulator makes its first decision one interval after its start, so all its
    times are later by one interval.

    Args:
      jobs: the jobs.
      curves: curve of each model.
      work: progress of each job at its end, in rows of the base batch.
      moves: costs of moves of each job.
    """
    wait_s = scheduled_jobs.INTERVAL_S
    options = Options(interval_s=wait_s, react_s=scheduled_jobs.REACT_S)
    made = [
        CurveJob(
            Job(
                name=x.name, application=x.model, submitted_s=wait_s + x.at_s,
                devices=x.asks, batch=MODELS[x.model].base,
                steps=max(1, round(work[x.name] / MODELS[x.model].base)),
            ),
            curves[x.model].on("cpu"), HOSTS, moves[x.name],
        )
        for x in jobs
    ]  # fmt: skip
    history = simulate(made, Nodes.parse(f"{HOSTS}x1:cpu"), policy_of(POLICY), options)
    assert not metrics(history).failed
    return statistics.mean(
        (x.completed_s or 0.0) - x.job.submitted_s for x in history.jobs
    )


def table(
    folder: pathlib.Path,
    jobs: Sequence[Arrival],
    arm: str,
    rate: float,
) -> pathlib.Path:
    """Writes the table of jobs; the curves of their models are in the same folder."""
    lines: list[str] = []
    for x in jobs:
        lines += [
            "[[job]]", f'name = "{x.name}"', f'script = "{SCRIPT}"',
            f'application = "{x.model}"',
            f"args = {json.dumps(words(folder, x, arm, rate))}",
            f"submitted_s = {x.at_s}", f"devices = {x.asks}",
            f"min = {SIZES[0]}", f"max = {HOSTS}",
            f'curve = "{x.model}.json"', "save_every = 100000",
        ]  # fmt: skip
    path = folder / "jobs.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_arm(
    folder: pathlib.Path,
    arm: str,
    rate: float,
    jobs: Sequence[Arrival],
    moves: Moves | None,
) -> None:
    """Runs the jobs of a seed in an arm; all results are files in the folder.

    Args:
      folder: for all files.
      arm: one of `ARMS`.
      rate: rate of the links in Mbit/s.
      jobs: the jobs.
      moves: costs of moves at this rate; None: they are measured first.
    """
    loads = [os.getloadavg()[0]]
    bed = scheduled_jobs.Hosts(folder, rate, HOSTS)
    try:
        if moves is None:
            moves = measured_moves(folder, bed, arm, rate)
        loads.append(os.getloadavg()[0])
        path = table(folder, jobs, arm, rate)
        begin_s, _ = scheduled_jobs.scheduled(
            folder / "schedule", bed, POLICY, moves, path
        )
    finally:
        bed.close()
    loads.append(os.getloadavg()[0])
    ran = {
        "begin_s": begin_s, "moves": dataclasses.asdict(moves), "load_averages": loads,
        "commit": workloads.commit(),
    }  # fmt: skip
    (folder / RAN).write_text(json.dumps(ran))


def figures(
    folder: pathlib.Path,
    arm: str,
    rate: float,
    seed: int,
    jobs: Sequence[Arrival],
    curves: Mapping[str, CurveTable],
) -> dict[str, Any]:
    """The figures of an arm, from the files of its run.

    Args:
      folder: the folder of the run (`run_arm`).
      arm: one of `ARMS`.
      rate: rate of the links in Mbit/s.
      seed: of the arrivals.
      jobs: the jobs.
      curves: each model's curve at submission.
    """
    ran = json.loads((folder / RAN).read_text())
    begin_s, moves = ran["begin_s"], Moves(**ran["moves"])
    records = scheduled_jobs.records(folder / "schedule")
    lines = {x.name: scheduled_jobs.written(folder, x.name) for x in jobs}
    spent = {x.name: lines[x.name][-1][2] - begin_s - x.at_s for x in jobs}
    done = {
        x.name: records[x.name].state == "done"
        and lines[x.name][-1][1] <= MODELS[x.model].target
        for x in jobs
    }
    seen = {x.name: goodputs(lines[x.name]) for x in jobs}
    reported = {
        name: reported_curve(curve, [seen[x.name] for x in jobs if x.model == name])
        for name, curve in curves.items()
    }
    work = {x.name: lines[x.name][-1][4] for x in jobs}
    base = {x.name: float(DESIGN_STEPS[x.model] * MODELS[x.model].base) for x in jobs}
    mean = statistics.mean(spent.values())
    own = {
        x.name: reported_moves(
            lines[x.name], begin_s + (records[x.name].started_s or 0.0), moves
        )
        for x in jobs
    }
    as_reported = simulated(jobs, reported, work, own)
    as_submitted = simulated(jobs, curves, base, {x.name: moves for x in jobs})
    return {
        "rate_mbit": rate, "arm": arm, "seed": seed, "jobs": len(jobs),
        "done": all(done.values()),
        "average_completion_s": mean,
        "simulated_as_reported_s": as_reported,
        "error_as_reported": as_reported / mean - 1,
        "simulated_as_submitted_s": as_submitted,
        "error_as_submitted": as_submitted / mean - 1,
        "moves": ran["moves"],
        "load_averages": ran["load_averages"],
        "commit": ran["commit"],
        "goodput_at_submission": _goodput(curves),
        "goodput_reported": _goodput(reported),
        "each": {
            x.name: {
                "at_s": x.at_s, "start_s": own[x.name].start_s,
                "change_s": own[x.name].change_s,
                "completion_s": spent[x.name], "done": done[x.name],
                "moves": records[x.name].moves, "steps": lines[x.name][-1][0] + 1,
                "progress": work[x.name], "last_batch": lines[x.name][-1][5],
                "device_s": records[x.name].served_device_s,
                "codecs": records[x.name].codecs, "scheme": records[x.name].scheme,
                "noise_scale": _number(records[x.name].noise_scale),
            }
            for x in jobs
        },
    }  # fmt: skip


def measured_moves(folder: pathlib.Path, bed: Any, arm: str, rate: float) -> Moves:
    """The costs of moves of a GPT that does not end by itself."""
    given = words(folder, Arrival("moves", "gpt", 0.0, 1, 0), arm, rate)
    given[-1] = "-1"
    spec = JobSpec(name="moves", script=str(SCRIPT), args=tuple(given), max=HOSTS)
    return scheduled_jobs.measured(folder, bed, spec, turns=1)


def _number(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _goodput(curves: Mapping[str, CurveTable]) -> dict[str, list[float]]:
    return {name: [p.goodput for p in curve.points] for name, curve in curves.items()}


def targets() -> dict[str, float]:
    """The smoothed loss of each model after the design's steps: dense, base batch."""
    found: dict[str, float] = {}
    for name, model in MODELS.items():
        step, create_state = script.step_of(model)
        state, run = create_state(jax.random.key(DESIGN_SEED)), jax.jit(step)
        for k in range(DESIGN_STEPS[name]):
            rows = model.data((DESIGN_SEED, k * model.base), model.base)
            state, _ = run(state, next(rows))
        found[name] = float(state["mean"])
    return found


def report(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prints a row for each arm; returns the ratios to `all` by rate and seed."""
    workloads.row(
        "Mbit/s", "seed", "arm", "average completion s", "over all", "simulated s",
        "error", "as submitted s", "moves", "load",
    )  # fmt: skip
    workloads.row(*["---"] * 10)
    ratios: list[dict[str, Any]] = []
    for rate, seed in sorted({(x["rate_mbit"], x["seed"]) for x in found}):
        same = {
            x["arm"]: x for x in found if (x["rate_mbit"], x["seed"]) == (rate, seed)
        }
        ours = same.get("all")
        over = {
            arm: x["average_completion_s"] / ours["average_completion_s"]
            for arm, x in same.items() if ours is not None
        }  # fmt: skip
        for arm, x in same.items():
            workloads.row(
                f"{rate:g}", seed, arm if x["done"] else f"{arm} (not all done)",
                f"{x['average_completion_s']:.1f}", f"{over.get(arm, 0):.2f}",
                f"{x['simulated_as_reported_s']:.1f}",
                f"{100 * x['error_as_reported']:+.1f}%",
                f"{x['simulated_as_submitted_s']:.1f}",
                sum(each["moves"] for each in x["each"].values()),
                f"{max(x['load_averages']):.0f}",
            )  # fmt: skip
        frozen = {arm: over[arm] for arm in over if arm != "all"}
        if frozen:
            ratios.append({"rate_mbit": rate, "seed": seed, "over_all": frozen})
    return ratios


def main() -> None:
    """Runs the arms, and reports the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--targets", action="store_true", help="prints the targets")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for all files")
    parser.add_argument(
        "--moves", type=pathlib.Path, help="figures with costs of moves"
    )
    parser.add_argument("--lock", type=pathlib.Path, help="held while an arm runs")
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    given = parser.parse_args()
    if given.targets:
        print(json.dumps(targets()))
        return
    paths = [os.path.abspath(x) for x in sys.path]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    known = json.loads(given.out.read_text()) if given.out.exists() else {}
    found: list[dict[str, Any]] = known.get("arms", [])
    costs = json.loads(given.moves.read_text())["arms"] if given.moves else []
    with tempfile.TemporaryDirectory() as temporary:
        place = (given.keep or pathlib.Path(temporary)).absolute()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(place / "compiled")
        for seed, rate, arm in itertools.product(given.seeds, given.rates, given.arms):
            if any((x["seed"], x["rate_mbit"], x["arm"]) == (seed, rate, arm)
                   for x in found):  # fmt: skip
                continue
            folder = place / f"{seed}-{rate:g}-{arm}"
            folder.mkdir(parents=True, exist_ok=True)
            curves = submitted_curves(folder, rate, arm)
            with contextlib.ExitStack() as stack:
                if given.lock is not None:
                    file = stack.enter_context(open(given.lock, "a"))
                    fcntl.flock(file, fcntl.LOCK_EX)
                known_moves = [
                    x["moves"] for x in (*costs, *found) if x["rate_mbit"] == rate
                ]
                moves = Moves(**known_moves[0]) if known_moves else None
                jobs = arrivals(seed, given.jobs)
                if not (folder / RAN).exists():
                    run_arm(folder, arm, rate, jobs, moves)
                found.append(figures(folder, arm, rate, seed, jobs, curves))
            asked = [f"{x:g}" for x in (*given.rates, *given.seeds)]
            rates, seeds = asked[: len(given.rates)], asked[len(given.rates) :]
            command = ["python benchmarks/network/co_adaptation.py --rates", *rates]
            command += ["--seeds", *seeds, "--jobs", str(given.jobs)]
            whole = {**known, "command": " ".join(command), "arms": found}
            given.out.write_text(json.dumps(whole, indent=1) + "\n")
            print(json.dumps(found[-1]["each"]), file=sys.stderr, flush=True)
    ratios = report(found)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
