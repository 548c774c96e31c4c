"""Seconds until an adaptive training reaches a loss over real links.

    python benchmarks/network/adaptive.py --rates 100 1000 --seeds 0 1 2 --out runs.json

The ways of `benchmarks/adaptive.py` train the character model of that benchmark on four
hosts. Each host calls `autopar.train` like a user, so the clock includes the seconds to
plan and compile other programs. The clock does not include evaluations, nor the time
before the second step: the choice of the first codec and the first program.
evaluations: "first step" is the number of seconds of this time. The loss to reach is
  the loss of ``fixed`` after ``--steps`` steps with the base batch, which one device
  computes before. ``fixed`` itself runs ``--fixed-steps`` steps over the links, and the
  seconds of all its steps are projected from these. A way is given up after
  ``--patience`` times the seconds of the fastest earlier way with this rate and seed,
  so name fast ways first. ``--profile`` measures hosts and links at each rate, as
  ``autopar profile --distributed`` does, and plans with the result. Finished records
  are kept in the file ``--out``, and are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any
from unittest import mock

import bed
import clusters
import jax
import numpy as np
import worker

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import adaptive_ways
import workloads
from goodput_samples import BASE, rows
from time_to_loss import measured

import autopar
from autopar.elastic import train
from autopar.goodput import NoiseOptions
from autopar.runtime.agreement import shared_array

# Steps between two evaluations: for the base batch, and for larger batches.
EVERY = (50, 10)
# Length of the job in rows of the base batch, as a multiple of the rows of `fixed`.
SLACK = 1.5
HOSTS = 4
TIMEOUT_S = 7200.0


def levels(rate: float, seeds: list[int], steps: int) -> dict[int, float]:
    """Seed -> the held-out loss that one device reaches with the base batch."""
    tx = adaptive_ways.optimizer(rate)
    step = jax.jit(adaptive_ways.step_of(tx))
    evaluate = jax.jit(adaptive_ways.loss_of)
    found: dict[int, float] = {}
    for seed in seeds:
        state = adaptive_ways.model(seed, tx)
        for k in range(steps):
            state, _ = step(state, rows(BASE, seed, k * BASE))
        found[seed] = float(evaluate(state["w"], rows(2048, 10**6, 0)))
    return found


class Training:
    """One training: a way, a link rate and a seed."""

    def __init__(
        self, way: str, seed: int, cluster: autopar.Cluster, given: argparse.Namespace
    ) -> None:
        """Plans, and runs the first step."""
        begin = time.perf_counter()
        self.way, self.given = way, given
        kept = adaptive_ways.layouts()
        self.codec = adaptive_ways.first_codec(way, cluster, kept)
        tx = adaptive_ways.optimizer(given.lr)
        self.step = autopar.parallelize(
            adaptive_ways.step_of(tx),
            cluster=cluster,
            layouts=kept,
            compression=self.codec,
            noise_scale=NoiseOptions(base_batch=BASE, decay=0.99),
            programs=16,
        )
        self.evaluate = jax.jit(adaptive_ways.loss_of)
        self.held_out = rows(2048, 10**6, 0)
        job = BASE * given.steps
        with mock.patch.object(train, "Loop", adaptive_ways.loop_of(way)):
            run = autopar.train(
                self.step,
                lambda: adaptive_ways.model(seed, tx),
                lambda position, count: rows(count, seed, position),
                samples=SLACK * job,
                steps=given.fixed_steps if way == "fixed" else None,
                progress=False,
                **adaptive_ways.options_of(way, self.codec, job),
            )
        assert isinstance(run, train.TrainRun)  # nobody supervises the processes
        self.run = run
        next(run)
        self.begun_s = time.perf_counter() - begin

    def to(self, level: float, most_s: float, rate_mbit: float) -> dict[str, Any]:
        """Trains until a held-out loss or a time is reached.

        Args:
          level: the loss.
          most_s: seconds after which the training is given up.
          rate_mbit: rate of the links in Mbit/s, which applies only while steps run.
        """
        clock, curve, seconds = 0.0, [(0.0, math.inf)], list[float]()
        began_s = time.process_time()
        worker.set_rate(rate_mbit)
        while curve[-1][1] > level and clock < most_s:
            worker.barrier()
            begin = time.perf_counter()
            before = len(seconds)
            for done in itertools.islice(
                self.run, EVERY[self.run.batch_size > 4 * BASE]
            ):
                seconds.append(done.seconds)
            ended = time.perf_counter() - begin
            # All processes use the numbers of the first process.
            found = shared_array(self.step.world, np.asarray([ended, self._loss()]))
            clock += float(found[0])
            curve.append((clock, float(found[1])))
            lost = not found[1] < 2 * curve[1][1]
            if lost or before == len(seconds):
                break
        worker.set_rate(None)
        self.run.close()
        return self._record(curve, level, seconds, time.process_time() - began_s)

    def _loss(self) -> float:
        w = jax.tree.map(lambda x: x.addressable_data(0), self.run.state["w"])
        return float(self.evaluate(w, self.held_out))

    def _record(
        self, curve: Any, level: float, seconds: list[float], cpu_s: float
    ) -> dict[str, Any]:
        lines = self.run.ledger.lines
        made = [x for x in lines if x["kind"] == "batch"]
        changes = [
            {"step": x["step"], "to": [x["new"]["rows"], x["new"]["codecs"]],
             "phi": x["phi"] and x["phi"]["phi"], "goodput": x["predicted"]["goodput"],
             "before": x["predicted"]["goodput_before"]} for x in made
        ]  # fmt: skip
        return {
            "way": self.way,
            "codec": self.codec,
            "level": level,
            "curve": curve,
            "seconds": adaptive_ways.seconds_to(curve, level),
            "begun_s": self.begun_s,
            "clock": curve[-1][0],
            "steps": len(seconds),
            "all_s": seconds,
            "step_s": float(np.median(seconds[2:12])),
            "mean_s": curve[-1][0] / max(1, len(seconds)),
            "last_step_s": float(np.median(seconds[-10:])),
            "cpu_s": cpu_s,
            "batch": self.run.batch_size,
            "codecs": self.run.loop.way.codecs,
            "changes": changes,
            "refused": [x for x in lines if x["kind"] == "batch refused"],
            "capped": sum(x["kind"] == "gain capped" for x in lines),
        }


def known(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """Reads the records of trainings that an earlier run has finished."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def inside(given: argparse.Namespace) -> None:
    """The work of every process."""
    worker.start()
    found = known(given.out)
    done = {(x["rate"], x["seed"], x["way"]) for x in found}
    described: dict[float, autopar.Cluster] = {}
    level = {int(k): x for k, x in json.loads(given.levels).items()}
    for seed, rate in itertools.product(given.seeds, given.rates):
        todo = [way for way in given.ways if (rate, seed, way) not in done]
        if todo and rate not in described:
            described[rate] = _cluster(rate, profiled=given.profile)
        for way in todo:
            worker.set_rate(None)
            same = [x for x in found if (x["rate"], x["seed"]) == (rate, seed)]
            fixed = way == "fixed"
            made = Training(way, seed, described[rate], given)
            most_s = math.inf if fixed else _most_s(same, given.patience)
            record = made.to(-math.inf if fixed else level[seed], most_s, rate)
            if fixed:
                record["seconds"] = record["mean_s"] * given.steps
            found.append({"rate": rate, "seed": seed, **record})
            worker.say(_line(found[-1]))
            if worker.rank() == 0 and given.out:
                given.out.write_text(json.dumps(found))
    worker.report(found)


def _cluster(rate: float, *, profiled: bool) -> autopar.Cluster:
    if profiled:
        found = measured(rate)
        worker.set_rate(None)
        return found
    return clusters.described(rate, worker.count())


def _most_s(same: list[dict[str, Any]], patience: float) -> float:
    """Seconds after which a way is given up."""
    reached = [x["seconds"] for x in same if x["seconds"] is not None]
    return patience * min(reached, default=math.inf)


def _line(x: dict[str, Any]) -> str:
    reached = x["seconds"] is not None
    time = f"{x['seconds']:.1f} s" if reached else f"not in {x['clock']:.1f} s"
    return (
        f"{x['rate']:g} Mbit/s, seed {x['seed']}, {x['way']}: {time}, "
        f"{x['steps']} steps, {x['batch']} rows, {x['codecs']}"
    )


def table(found: list[dict[str, Any]]) -> None:
    """Prints a row for each training."""
    workloads.row(
        "Mbit/s", "seed", "way", "first step", "seconds", "over the best other",
        "steps", "last batch", "last codecs", "ms a step, first", "last", "promised",
        "given",
    )  # fmt: skip
    workloads.row(*["---"] * 13)
    for x in found:
        same = [y for y in found if (y["rate"], y["seed"]) == (x["rate"], x["seed"])]
        fixed = next((y for y in same if y["way"] == "fixed"), None)
        others = [y["seconds"] for y in same if y["way"] != x["way"] and y["seconds"]]
        base_s = fixed["step_s"] if fixed else None
        promised = BASE / x["step_s"] if x["codec"] != "none" else None
        promised = x["changes"][-1]["goodput"] if x["changes"] else promised
        reached = x["seconds"] is not None
        workloads.row(
            f"{x['rate']:g}", x["seed"], x["way"], f"{x['begun_s']:.1f}",
            f"{x['seconds']:.1f}" if reached else f"over {x['clock']:.1f}",
            f"{x['seconds'] / min(others):.3f}" if reached and others else "",
            x["steps"], x["batch"], x["codecs"], f"{1e3 * x['step_s']:.1f}",
            f"{1e3 * x['last_step_s']:.1f}",
            f"{promised * base_s / BASE:.1f}" if promised and base_s else "",
            f"{fixed['seconds'] / x['seconds']:.1f}" if reached and fixed else "",
        )  # fmt: skip


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0],
                        help="Mbit/s")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+",
                        choices=(*adaptive_ways.WAYS, *adaptive_ways.MORE),
                        default=["fixed", "ours", "mild", "naive", "batch", "codecs"],
                        )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20000, help="of fixed")
    parser.add_argument("--fixed-steps", type=int, default=200,
                        help="of them over the links")  # fmt: skip
    parser.add_argument("--lr", type=float, default=0.2, help="of the base batch")
    parser.add_argument("--patience", type=float, default=2.0)
    parser.add_argument("--profile", action="store_true",
                        help="measure hosts and links, and plan with them")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds")
    parser.add_argument("--out", type=pathlib.Path, help="everything, as JSON")
    parser.add_argument("--levels", default="", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    given = parse()
    if given.inside:
        inside(given)
        return 0
    if given.out:
        given.out = given.out.resolve()
    found = levels(given.lr, given.seeds, given.steps)
    print(f"losses to reach: {found}", file=sys.stderr, flush=True)
    more = ["--levels", json.dumps(found)]
    results, code = bed.run_inside(__file__, HOSTS, given.timeout, more)
    # If the run fails, the records of finished trainings are kept in the file.
    table(known(given.out) if code else results[0][0])
    return code


if __name__ == "__main__":
    bed.exit_with(main)
