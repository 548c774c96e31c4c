"""What the arms of `co_adaptation.py` can gain, by plans and the simulator alone.

    python benchmarks/network/co_adaptation_plans.py --rates 100 1000 --seeds 3 4 5 6

For each model, rate, number of devices and arm, the planner and the noise scale give
the most goodput over the batches, layouts and codecs that the arm allows. The simulator
then runs the jobs of `co_adaptation.py` with these curves, as if every job knew its
best way from its first step. The table has the average completion time of each arm over
that of `all`: no measured run can gain more by adapting. The goodputs are kept in the
file ``--out``, and planned only once.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import co_adaptation as benchmark
import co_adaptation_script as script
import jax
import workloads
from co_adaptation_script import ARMS, MODELS

from autopar.errors import AutoparError
from autopar.goodput.configurations import (
    Batches,
    ProgramAtBatches,
    WantedCurve,
    configuration,
)
from autopar.goodput.curves import CurveTable
from autopar.planner.options import PlanOptions
from autopar.scheduler.simulator.jobs import Moves
from autopar.steps.analysis import analyse

NOISE_SCALE = {"gpt": 68.0, "resnet": 300.0, "recommendation": 500.0}
"""Rows: the GPT's by 48 batches after 320 steps, the others' as jobs measured them."""

TRIED = ("none", *script.CODECS[1:])
"""Codecs. Int8 is left out: a GPT on two devices gains 1.1 % by it beside int4."""

MOVES = Moves(start_s=12.0, join_s=5.0, change_s=2.0)
"""Costs of moves; all arms have the same."""


def goodputs(name: str, rate: float, devices: int) -> dict[str, float]:
    """The most goodput of a model in each arm, in rows of the base batch a second."""
    model = MODELS[name]
    step, create_state = script.step_of(model)
    state = jax.eval_shape(create_state, jax.random.key(0))
    program = ProgramAtBatches(analyse(step, (state, next(model.data(0, model.base)))))
    found: dict[tuple[str, str, bool], float] = {}
    for layouts in ("all", "plan") if devices > 1 else ("all",):
        running = None
        for codecs in TRIED if devices > 1 else ("none",):
            for grows in (True, False):
                most = model.base * (script.MOST if grows else 1)
                wanted = WantedCurve(
                    program=program,
                    batches=Batches(
                        base=model.base, most=most, noise_scale=NOISE_SCALE[name]
                    ),
                    options=PlanOptions(
                        compression=codecs, **script.plan_options(layouts)
                    ),
                )
                cluster = script.cluster_of(rate, devices)
                try:
                    made = configuration(wanted, cluster, running)
                except AutoparError as error:
                    print(f"{name}, {devices} devices: {error}", file=sys.stderr)
                    continue
                running = made.plan or running
                found[layouts, codecs, grows] = made.point.goodput
    kept = {
        "all": found,
        "batch": {k: x for k, x in found.items() if not k[2]},
        "plan": {k: x for k, x in found.items() if k[0] == "plan" or devices == 1},
        "codecs": {k: x for k, x in found.items() if k[1] == "none"},
    }
    return {arm: max(x.values(), default=0.0) for arm, x in kept.items()}


def average_s(found: Mapping[str, Mapping[str, float]], arm: str, rate: float,
              seed: int) -> float:  # fmt: skip
    """The average completion time of the jobs of a seed in an arm."""
    curves = {
        name: CurveTable(
            points=tuple(
                benchmark.point(
                    n, model.base, model.base / found[f"{name} {rate:g} {n}"][arm]
                )
                for n in benchmark.SIZES
            ),
            base_batch=model.base,
        )
        for name, model in MODELS.items()
    }
    jobs = benchmark.arrivals(seed)
    work = {
        x.name: float(benchmark.DESIGN_STEPS[x.model] * MODELS[x.model].base)
        for x in jobs
    }
    moves = dict.fromkeys(work, MOVES)
    return benchmark.simulated(jobs, curves, work, moves)


def main() -> None:
    """Plans what is not yet known, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6])
    parser.add_argument("--out", type=pathlib.Path, default=benchmark.DATA)
    given = parser.parse_args()
    known: dict[str, Any] = json.loads(given.out.read_text())
    found = known.setdefault("by_plans", {}).setdefault("goodput", {})
    for rate in given.rates:
        for name in MODELS:
            for devices in benchmark.SIZES:
                key = f"{name} {rate:g} {devices}"
                if key not in found:
                    found[key] = goodputs(name, rate, devices)
                    given.out.write_text(json.dumps(known, indent=1) + "\n")
    workloads.row("Mbit/s", "average completion s", *ARMS[1:])
    workloads.row(*["---"] * (1 + len(ARMS)))
    known["by_plans"]["over_all"] = {}
    for rate in given.rates:
        seconds = {
            arm: [average_s(found, arm, rate, seed) for seed in given.seeds]
            for arm in ARMS
        }
        over = {
            arm: statistics.geometric_mean(
                frozen / ours
                for frozen, ours in zip(seconds[arm], seconds["all"], strict=True)
            )
            for arm in ARMS[1:]
        }
        known["by_plans"]["over_all"][f"{rate:g}"] = over
        mean = statistics.mean(seconds["all"])
        cells = [f"{x:.3f}" for x in over.values()]
        workloads.row(f"{rate:g}", f"{mean:.1f}", *cells)
    given.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
