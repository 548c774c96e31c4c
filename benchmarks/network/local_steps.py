"""Time to a loss over slow links, with local steps and without.

    python benchmarks/network/local_steps.py --rates 20 100 --seeds 0 1 2
    python benchmarks/network/local_steps.py --rates --seeds --whole 20 --add

Four hosts, which are network namespaces, train a language model in several ways until
the loss that dense, synchronous training has at its end. The number of steps to this
loss is counted on simulated devices of one process (``--seeds``). The seconds of a step
are measured over whole periods of a few steps with links of each rate (``--rates``),
or only predicted (``--predict``).
The time to the loss is their product. With ``--whole``, trainings run from end to end
over links of a rate. A host has one device. A way is

- ``dense``, or a codec such as ``int4``: data parallelism, synchronous;
- ``local:H:CODEC``: H local steps between outer steps by the outer optimizer of DiLoCo,
  with differences sent by a codec; ``mean:H:CODEC``: replicas take the mean;
  ``mean:H:CODEC:F:S``: in F fragments, each sent beside S steps;
- ``selsync:DELTA:CODEC``: the mean where gradients change by the fraction DELTA.

``muon/`` before a way trains with Muon inside (MuLoCo). ``@N@RATE`` after a way sets
the steps of its schedule, after which the learning rate stays at a tenth, and the
highest learning rate; else they are ``--steps`` and those of the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import bed
import clusters
import jax
import language_model
import launch
import numpy as np
import optax
import summaries
import time_to_loss
import worker
from jax.experimental import multihost_utils

import autopar
from autopar.runtime.local.outer import MEAN, Outer
from autopar.runtime.local.rules import Overlap, RelativeChange

ROOT = pathlib.Path(__file__).resolve().parents[2]
DENSE = time_to_loss.DENSE
WAYS = (
    "dense@384@7e-4", "powersgd:rank=4@512@7e-4", "mean:64:int4@640@7e-4",
    "mean:16:int4:6:1@640@7e-4", "local:64:int4@640@7e-4", "selsync:0.05:int4@640@7e-4",
    "muon/mean:64:int4@640@7e-4",
)  # fmt: skip
LEAST_STEPS = 6
LEAST_LOCAL_STEPS = 32


def norm_step(state: Any, data: Any) -> tuple[Any, Any]:
    """A step that also returns the squared norm of its gradient."""

    def loss_of(params: Any) -> Any:
        return language_model.loss_of(state.apply_fn, params, data)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    norm = optax.tree.norm(grads, squared=True)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": norm}


class Way:
    """A training in one way."""

    def __init__(
        self, name: str, sizes: Any, seed: int, rate_mbit: float, hosts: int
    ) -> None:
        """Plans for links of a rate; 0: without a limit."""
        self.name = name
        self.state: Any = None
        text, *schedule = name.split("@")
        optimizer, _, method = text.rpartition("/")
        sizes = sizes._replace(optimizer=optimizer or "adamw")
        if schedule:
            steps, rate = schedule
            sizes = sizes._replace(decay_steps=int(steps), learning_rate=float(rate))
        self.workload = language_model.build(seed, sizes)
        cluster = clusters.described(
            rate_mbit or None, worker.count(), clusters.load(None)
        )
        kind, _, rest = method.partition(":")
        self.period = 1
        self.local = kind in ("local", "mean", "selsync")
        if not self.local:
            self.step = time_to_loss.parallel_step(self.workload, method, cluster)
            return
        number, codec, *more = rest.split(":")
        fragments, beside = map(int, more or (1, 0))
        every: Any
        function = self.workload.step
        if kind == "selsync":
            weight = hosts / 100
            every = RelativeChange(float(number), lambda m: m["norm"], weight=weight)
            function = norm_step
        else:
            every = self.period = int(number)
        self.step = autopar.local_steps(
            function,
            every=every,
            outer=Outer() if kind == "local" else MEAN,
            codec=codec,
            fragments=fragments,
            overlap=Overlap(beside) if beside else None,
            cluster=cluster,
        )

    def begin(self) -> None:
        """Makes the state of step 0."""
        example = jax.eval_shape(lambda: self.workload.batch(0))
        self.state = self.step.init(self.workload.create, batch=example)
        self.done = 0

    def advance(self, steps: int) -> float:
        """Runs steps, and waits for all that they have begun; returns the seconds.

        Synchronous steps of several processes begin together.
        """
        seconds, count = 0.0, jax.process_count()
        for _ in range(steps):
            data = self.workload.batch(self.done, jax.process_index(), count)
            if count > 1 and not self.local:
                worker.barrier()
            begin = time.perf_counter()
            self.state, metrics = self.step(self.state, data)
            jax.block_until_ready(metrics)
            seconds += time.perf_counter() - begin
            self.done += 1
        begin = time.perf_counter()
        jax.block_until_ready(self.state)
        return seconds + time.perf_counter() - begin

    @property
    def params(self) -> Any:
        """The parameters as NumPy arrays; with local steps the mean over replicas."""
        if not self.local:  # all state is whole on every host
            params = self.state.params
            return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
        each = [state.params for state in self.state.replicas]
        own = jax.tree.map(lambda *x: np.mean([np.asarray(v) for v in x], 0), *each)
        if jax.process_count() == 1:
            return own
        whole = multihost_utils.process_allgather(own)
        return jax.tree.map(lambda x: np.mean(x, 0), whole)

    @property
    def rounds(self) -> float:
        """Outer steps for each step so far."""
        if not self.local:
            return 1.0
        return float(np.mean(self.state.rounds)) / max(1, self.done)


def count_steps(
    options: argparse.Namespace, name: str, seed: int, target: float | None
) -> dict[str, Any]:
    """Counts the steps of a way to a loss; None: the loss after all steps."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    loss = jax.jit(language_model.build(seed, sizes).eval_loss)
    held_out = language_model.evaluation_batch(sizes)
    way = Way(name, sizes, seed, 100.0, options.hosts)
    way.begin()
    points: list[tuple[int, float]] = []
    most = options.steps * (1 if target is None else options.patience)
    while way.done < most:
        way.advance(min(options.turn, int(most) - way.done))
        points.append((way.done, float(loss(way.params, held_out))))
        if target is not None and summaries.reached(points, target) is not None:
            break
    target = points[-1][1] if target is None else target
    steps = summaries.reached(points, target)
    print(f"seed {seed}: {name} {points[-1]}, {steps} to {target}", flush=True)
    return {
        "kind": "steps",
        "way": name,
        "seed": seed,
        "target": target,
        "steps": steps,
        "rounds": way.rounds,
        "points": points,
    }


def predict(options: argparse.Namespace, name: str, rate_mbit: float) -> dict[str, Any]:
    """The predicted seconds of a step of a way, without measuring any."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    way = Way(name, sizes, 0, rate_mbit, options.hosts)
    way.begin()
    own = way.step.plan.predicted.step_s
    record = {
        "kind": "predicted",
        "way": name,
        "rate": rate_mbit,
        "predicted_s": way.step.step_s if way.local else own,
        "without outer steps s": own if way.local else None,
        "bytes": way.step.sent_bytes / way.period if way.local else None,
    }
    print(json.dumps(record), flush=True)
    return record


def target_of(records: Sequence[dict[str, Any]], seed: int) -> float | None:
    """The least loss of dense trainings at their ends; None: not trained yet."""
    same = [x for x in records if x["kind"] == "steps" and x["seed"] == seed]
    return min((x["target"] for x in same), default=None)


def timed(way: Way, steps: int, idle: worker.Background) -> tuple[float, float]:
    """The bytes that this process sends in some steps, and their seconds."""
    found: list[float] = []
    sent, _ = worker.measure(lambda: found.append(way.advance(steps)), idle)
    return sent.data_bytes, found[0]


def pace(options: argparse.Namespace, rate_mbit: float) -> None:
    """Measures the seconds and bytes of a step of each way at a rate."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    idle = worker.background()
    for name in options.ways:
        if "selsync" in name:
            continue
        way = Way(name, sizes, 0, rate_mbit, options.hosts)
        way.begin()
        way.advance(2 * way.period + 2)
        worker.set_rate(rate_mbit or None)
        least = LEAST_LOCAL_STEPS if way.local else LEAST_STEPS
        steps = -(-least // way.period) * way.period
        nbytes, seconds = timed(way, steps, idle)
        worker.set_rate(None)
        worker.say(f"{rate_mbit:g} Mbit/s: {name} {1e3 * seconds / steps:.0f} ms")
        predicted = getattr(way.step, "step_s", None) or way.step.plan.predicted.step_s
        worker.report(
            {
                "kind": "seconds",
                "way": name,
                "rate": rate_mbit,
                "step_s": seconds / steps,
                "bytes": nbytes / steps,
                "predicted_s": predicted,
            }
        )


def train_whole(options: argparse.Namespace, rate_mbit: float) -> None:
    """Trains each way over links of a rate until a loss; the clock runs in steps."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    loss = jax.jit(language_model.build(0, sizes).eval_loss)
    held_out = language_model.evaluation_batch(sizes)
    idle = worker.background()
    for name in options.ways:
        way = Way(name, sizes, 0, rate_mbit, options.hosts)
        way.begin()
        way.advance(2 * way.period + 2)  # compiled
        way.begin()
        points: list[tuple[int, float]] = []
        seconds: list[float] = []
        sent: list[float] = []
        while way.done < options.steps * options.patience:
            worker.set_rate(rate_mbit or None)
            nbytes, turn_s = timed(way, options.turn, idle)
            sent.append(nbytes)
            seconds.append(turn_s)
            worker.set_rate(None)
            points.append((way.done, float(loss(way.params, held_out))))
            worker.say(f"{name}: {points[-1]} in {sum(seconds):.1f} s")
            if summaries.reached(points, options.target) is not None:
                break
        worker.report(
            {
                "kind": "whole",
                "way": name,
                "rate": rate_mbit,
                "target": options.target,
                "steps": summaries.reached(points, options.target),
                "turn": options.turn,
                "turn_s": seconds,
                "bytes": sum(sent) / way.done,
                "points": points,
            }
        )


def inside(options: argparse.Namespace) -> None:
    """The work of every worker."""
    worker.start()
    worker.set_rate(None)
    for rate in options.rates:
        pace(options, rate)
    for rate in options.whole:
        train_whole(options, rate)


def _method(way: str) -> str:
    """A way without its schedule: its steps take the same seconds."""
    return way.partition("@")[0]


def _turns(
    results: Sequence[Sequence[dict[str, Any]]], record: dict[str, Any]
) -> list[list[float]]:
    """The seconds of each turn in each process, of a training from end to end."""
    names = ("kind", "way", "rate")
    return [
        x["turn_s"]
        for own in results
        for x in own
        if all(x.get(n) == record[n] for n in names)
    ]


def rows_of(results: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way: steps to the loss, and by rate seconds and bytes."""
    first = results[0]
    slowest = {
        (_method(x["way"]), x["rate"]): max(same[k]["step_s"] for same in results)
        for k, x in enumerate(first)
        if x["kind"] == "seconds"
    }
    rows = []
    for way in dict.fromkeys(x["way"] for x in first):
        own = [x for x in first if x["way"] == way]
        counted = [x for x in own if x["kind"] == "steps"]
        known = [x["steps"] for x in counted if x["steps"] is not None]
        row: dict[str, Any] = {
            "way": way,
            "loss": [x["target"] for x in counted],
            "steps": known,
            "seeds that do not reach it": len(counted) - len(known),
            "outer steps a step": counted[0]["rounds"] if counted else None,
        }
        method = _method(way)
        for x in (x for x in first if _method(x["way"]) == method):
            if x["kind"] == "seconds":
                step_s = slowest[method, x["rate"]]
                row[f"{x['rate']:g}"] = {
                    "step ms": round(1e3 * step_s, 1),
                    "predicted ms": round(1e3 * x["predicted_s"], 1),
                    "MB a step": round(x["bytes"] / 1e6, 4),
                    "seconds to the loss": [round(s * step_s, 1) for s in known],
                }
            elif x["kind"] == "predicted":
                row[f"{x['rate']:g} predicted"] = {
                    "step ms": round(1e3 * x["predicted_s"], 1),
                    "MB a step": x["bytes"] and round(x["bytes"] / 1e6, 4),
                    "seconds to the loss": [
                        round(s * x["predicted_s"], 1) for s in known
                    ],
                }
            elif x["kind"] == "whole" and x["way"] == way:
                turns = [max(same) for same in zip(*_turns(results, x), strict=True)]
                reached = x["steps"] and x["steps"] / x["turn"]
                row[f"{x['rate']:g} from end to end"] = {
                    "step ms": round(1e3 * sum(turns) / len(turns) / x["turn"], 1),
                    "MB a step": round(x["bytes"] / 1e6, 4),
                    "seconds to the loss": reached
                    and round(summaries.seconds_at(turns, reached), 1),
                }
        rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[20.0, 100.0])
    parser.add_argument("--steps", type=int, default=384, help="of the dense training")
    parser.add_argument("--patience", type=float, default=2.0, help="times --steps")
    parser.add_argument("--turn", type=int, default=64, help="steps between losses")
    parser.add_argument("--batch", type=int, default=language_model.Sizes().batch)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--predict", type=float, nargs="*", default=[], help="rates")
    parser.add_argument("--whole", type=float, nargs="*", default=[], help="rates")
    parser.add_argument("--target", type=float, help="the loss of --whole; default: "
                        "that of seed 0 in --out")  # fmt: skip
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=7200.0)
    data = ROOT / "docs" / "data" / "local_steps.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    parser.add_argument("--add", action="store_true", help="to the data of --out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole and options.target is None:
        first = json.loads(options.out.read_text())["records"][0]
        options.target = target_of(first, 0)
    return options


def write(out: pathlib.Path, commands: Any, records: Any) -> None:
    """Writes the records of each process, and the rows made of them."""
    rows = rows_of(records)
    made = {"commands": commands, "rows": rows, "records": records}
    out.write_text(json.dumps(made) + "\n")


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        inside(options)
        return 0
    code, records = 0, [[] for _ in range(options.hosts)]
    commands = [" ".join(["python benchmarks/network/local_steps.py", *sys.argv[1:]])]
    if options.add and options.out.exists():
        old = json.loads(options.out.read_text())
        commands, records = [*old["commands"], *commands], old["records"]
    if options.rates or options.whole:
        more, code = bed.run_inside(__file__, options.hosts, options.timeout)
        pairs = zip(records, more, strict=True)
        records = [[*before, *now] for before, now in pairs]
        write(options.out, commands, records)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.hosts)
    os.environ[launch.COUNT] = str(options.hosts)
    for rate, name in itertools.product(options.predict, options.ways):
        predicted = predict(options, name, rate)
        records = [[*own, predicted] for own in records]
        write(options.out, commands, records)
    for seed, name in itertools.product(options.seeds, options.ways):
        target = target_of(records[0], seed)
        if target is None and not name.startswith(DENSE):
            raise SystemExit(f"The first way must be {DENSE}: its loss is the target.")
        counted = count_steps(options, name, seed, target)
        records = [[*own, counted] for own in records]
        write(options.out, commands, records)
    for row in rows_of(records):
        print(json.dumps(row))
    return code


if __name__ == "__main__":
    bed.exit_with(main)
