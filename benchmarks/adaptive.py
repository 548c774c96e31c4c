"""Seconds until a training with adaptive batch, plan and codecs reaches a loss.

    python benchmarks/adaptive.py --rates 100 1000 --seeds 0 1 2 --out adaptive.json
    python benchmarks/adaptive.py --rates 10000 --seconds 20 \\
        --ways fixed forced naive ours --out fast.json

The benchmark trains a character model with a table of pairs of characters on four
simulated devices of one process. Each device stands for a host with one core. The clock
is computed, so other programs on the machine do not change it: a step takes a quarter
of the CPU seconds that all four devices need, plus the seconds that the plan's bytes
need on a link of the given rate (Mbit/s). The ways of training are:

* ``fixed``: the base batch, dense gradients;
* ``codecs``: the base batch, and codecs that follow the gradient noise;
* ``forced``: the base batch, and the codec with the fewest bytes among codecs with a
  small error;
* ``batch``: a batch size that follows the gradient noise, and dense gradients;
* ``naive``: the codec that is fastest for the base batch, and a batch size that follows
  the noise scale of compressed gradients, as Pollux would measure it;
* ``mild``: as ``naive``, with the fastest codec among codecs with a small error;
* ``accordion``: Accordion's rule with dense gradients: the base batch in critical
  regimes, and 8 times the base batch otherwise. A window is a thirtieth of the job;
* ``ours``: batch, plan and codecs all follow the gradient noise.

Planning and compiling another program is done beside the steps, as `autopar.train` does
it: by a host's one core, while steps wait for the link. What is planned is there once
the core has idled for the CPU seconds that it took; steps go on as before until then.
The column "planning" says how many CPU seconds that were. With ``--waiting`` steps wait
for it instead, and it costs all of its CPU seconds. Evaluations cost none. The loss to
reach is that of ``fixed`` after ``--seconds``. The job is said to be as long as it is
for ``fixed``, which is what ``samples=`` says to `autopar.train`. "promised" is the
goodput after the last change over that of ``fixed``, as it was predicted then; "given"
is the seconds of ``fixed`` over those of the way. What is finished is kept in the file
``--out``, and not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import numpy as np
import workloads
from adaptive_ways import (
    MORE,
    WAYS,
    first_codec,
    layouts,
    loop_of,
    loss_of,
    model,
    optimizer,
    options_of,
    seconds_to,
    step_of,
)
from goodput_samples import BASE, WORKERS, rows

import autopar
from autopar.goodput import NoiseOptions, progress
from autopar.goodput.following import Following, codecs_of

LATENCY_S = 1e-4
# Steps between two evaluations: for the base batch, and for larger batches.
EVERY = (50, 10)
# A training is given up after this multiple of the seconds of `fixed`.
PATIENCE = 1.5


def link_s(plan: autopar.Plan, rate_mbit: float) -> float:
    """Seconds that a plan's messages take on the link."""
    sent = [g for g in plan.gradients if g.codec]
    messages = 2 * max(1, len({g.bucket for g in sent})) * (WORKERS - 1)
    nbytes = plan.predicted.communication_bytes
    return messages * LATENCY_S + 8 * nbytes / (rate_mbit * 1e6)


def cluster(rate_mbit: float) -> autopar.Cluster:
    """Four hosts on links of a rate."""
    latency = f"network_latency={LATENCY_S * 1e6:g}us"
    text = f"{WORKERS}x1:cpu,network={rate_mbit:g}Mb/s,{latency}"
    return autopar.Cluster.parse(text)


class Training:
    """One training: a way, a link rate and a seed."""

    def __init__(
        self,
        way: str,
        rate_mbit: float,
        seed: int,
        lr: float,
        job: float,
        *,
        waiting: bool = False,
    ) -> None:
        """Makes the run; nothing has run yet.

        Args:
          way: of training.
          rate_mbit: link rate in Mbit/s.
          seed: seed of the model and the data.
          lr: the learning rate of the base batch.
          job: length of the job in rows of the base batch; infinite if it is unknown.
          waiting: whether steps wait until planning and compiling have ended.
        """
        # CPU seconds of planning that are not done yet, and CPU seconds of planning for
        # which steps do not wait.
        self.left_s, self.beside_s = 0.0, 0.0
        self.waiting = waiting
        self.way, self.rate, self.seed, self.job = way, rate_mbit, seed, job
        self.tx = optimizer(lr)
        self.held_out = rows(2048, 10**6, 0)
        self.evaluate = jax.jit(loss_of)
        self.rest_s = math.inf
        kept = layouts()
        self.codec = first_codec(way, cluster(rate_mbit), kept)
        self.step = autopar.parallelize(
            step_of(self.tx),
            cluster=cluster(rate_mbit),
            layouts=kept,
            compression=self.codec,
            noise_scale=NoiseOptions(base_batch=BASE, decay=0.99),
            programs=16,
        )
        # The clock of the steps also counts the seconds of compiling.
        self.step.preparation._store._clock = time.process_time
        self.lines: list[dict[str, Any]] = []
        self.loop = self._loop()

    def _loop(self) -> Any:
        options = options_of(self.way, self.codec, self.job)
        options["codecs"] = codecs_of(options["codecs"], self.codec)
        following = Following(**options)

        def record(kind: str, **fields: Any) -> None:
            self.lines.append({"kind": kind, **fields})

        return loop_of(self.way)(
            self.step,
            following,
            record=record,
            background=None if self.waiting else self._beside,
            horizon_s=lambda: self.rest_s,
        )

    def _beside(self, work: Any) -> None:
        """Runs work at once; its result may be used only after a core has idled as
        long.
        """
        begin = time.process_time()
        work()
        self.left_s = time.process_time() - begin
        self.beside_s += self.left_s
        self.loop._busy.set()

    def _idle(self, seconds: float) -> None:
        """Subtracts idle seconds of a core from the planning that is not done yet."""
        if self.left_s > 0.0:
            self.left_s -= seconds
            if self.left_s <= 0.0:
                self.loop._busy.clear()

    def to(self, level: float, most_s: float, until_s: float) -> dict[str, Any]:
        """Trains to a held-out loss.

        Args:
          level: the loss.
          most_s: seconds after which the training is given up.
          until_s: seconds after which the training ends, even without the loss.
        """
        first = rows(BASE, self.seed, 0)
        state = self.step.init(lambda: model(self.seed, self.tx), others=(first,))
        state = self.loop.begin(state, first)
        clock, curve, position, k = 0.0, [(0.0, math.inf)], 0, 0
        planning, steps_s = 0.0, []
        while True:
            size = self.loop.batch_size
            batch = rows(size, self.seed, position)
            position += size
            begin = time.process_time()
            state, loss = jax.block_until_ready(self.step(state, batch))
            ended = time.process_time()
            idle_s = link_s(self.step.plan, self.rate)
            seconds = (ended - begin) / WORKERS + idle_s
            self._idle(idle_s)
            hidden = self.beside_s
            self._look_ahead(state, size / seconds)
            state = self.loop.observe(state, batch, seconds=seconds, loss=loss)
            beside = time.process_time() - ended
            waited = beside - (self.beside_s - hidden)
            # In every way of training, the first step compiles, so it is not counted.
            clock += seconds + waited if k else 0.0
            planning += beside if k else 0.0
            steps_s.append(seconds)
            k += 1
            if k % EVERY[size > 4 * BASE] == 0 or clock > until_s:
                w = jax.tree.map(np.asarray, state["w"])
                curve.append((clock, float(self.evaluate(w, self.held_out))))
                lost = not curve[-1][1] < 2 * curve[1][1]
                if curve[-1][1] <= level or lost or clock > min(most_s, until_s):
                    return {
                        "planning_s": planning,
                        "step_s": float(np.median(steps_s[2:10])),
                        "last_step_s": float(np.median(steps_s[-10:])),
                        **self._record(curve, level, k),
                    }

    def _look_ahead(self, state: Any, rows_per_s: float) -> None:
        """Estimates the seconds until the job ends at the present speed."""
        if math.isfinite(self.job):
            opt = state["opt"]
            worth = float(opt.gain) * BASE / self.loop.batch_size
            left = max(0.0, self.job - progress(state))
            self.rest_s = left / (rows_per_s * max(worth, 1e-9))

    def _record(self, curve: Any, level: float, steps: int) -> dict[str, Any]:
        made = [x for x in self.lines if x["kind"] == "batch"]
        changes = [
            {"phi": x["phi"] and x["phi"]["phi"],
             "to": [x["new"]["rows"], x["new"]["codecs"]],
             "goodput": x["predicted"]["goodput"],
             "before": x["predicted"]["goodput_before"]} for x in made
        ]  # fmt: skip
        return {
            "way": self.way,
            "rate": self.rate,
            "seed": self.seed,
            "codec": self.codec,
            "curve": curve,
            "seconds": seconds_to(curve, level),
            "steps": steps,
            "batch": self.loop.batch_size,
            "codecs": self.loop.way.codecs,
            "changes": changes,
            "refused": [x for x in self.lines if x["kind"] == "batch refused"],
        }


def known(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """Reads the records of trainings that an earlier run has finished."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def trained(given: Any, found: list[Any], way: str, rate: float, seed: int) -> Any:
    """A record, from the file or by training."""
    for x in found:
        if (x["way"], x["rate"], x["seed"]) == (way, rate, seed):
            return x
    if way == "fixed":
        made = Training(way, rate, seed, given.lr, math.inf, waiting=given.waiting)
        record = made.to(-math.inf, math.inf, given.seconds)
        record["level"] = record["curve"][-1][1]
        record["seconds"] = record["curve"][-1][0]
    else:
        base = trained(given, found, "fixed", rate, seed)
        job = BASE * base["steps"]
        made = Training(way, rate, seed, given.lr, job, waiting=given.waiting)
        record = made.to(base["level"], PATIENCE * base["seconds"], math.inf)
    found.append(record)
    if given.out:
        given.out.write_text(json.dumps(found))
    return record


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=100.0, help="of fixed")
    parser.add_argument("--lr", type=float, default=0.05, help="of the base batch")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *MORE),
                        default=list(WAYS))  # fmt: skip
    parser.add_argument("--waiting", action="store_true", help="for what is planned")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    found = known(given.out)
    workloads.row(
        "Mbit/s", "seed", "way", "seconds", "planning", "over ours", "steps",
        "last batch", "last codecs", "ms a step, first", "last", "promised", "given",
    )  # fmt: skip
    workloads.row(*["---"] * 13)
    for rate, seed in itertools.product(given.rates, given.seeds):
        records = [trained(given, found, way, rate, seed) for way in given.ways]
        named = {x["way"]: x for x in records}
        for x in records:
            _row(x, trained(given, found, "fixed", rate, seed), named.get("ours"))


def _row(x: dict[str, Any], fixed: dict[str, Any], ours: dict[str, Any] | None) -> None:
    seconds = x["seconds"]
    reached = seconds is not None
    over = ours and ours["seconds"] and reached and seconds / ours["seconds"]
    promised = BASE / x["step_s"] if x["codec"] != "none" else None
    promised = x["changes"][-1]["goodput"] if x["changes"] else promised
    workloads.row(
        f"{x['rate']:g}", x["seed"], x["way"], f"{seconds:.1f}" if reached else "never",
        f"{x['planning_s']:.1f}", f"{over:.2f}" if over else "", x["steps"],
        x["batch"], x["codecs"], f"{1e3 * x['step_s']:.2f}",
        f"{1e3 * x['last_step_s']:.2f}",
        f"{promised * fixed['step_s'] / BASE:.1f}" if promised else "",
        f"{fixed['seconds'] / seconds:.1f}" if reached else "0",
    )  # fmt: skip


if __name__ == "__main__":
    main()
