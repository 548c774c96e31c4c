"""Time to a loss over slow links, with local steps and without.

    python benchmarks/network/local_steps.py --rates 20 100 --steps 768 --seeds 0 1 2

Four hosts, which are network namespaces, train a language model in several ways until
the loss that dense, synchronous training has at its end. The number of steps to this
loss is counted on simulated devices of one process (``--seeds``). The seconds of a step
are measured over whole periods of a few steps with links of each rate (``--rates``).
The time to the loss is their product. A host has one device. A way is

- ``dense``, or a codec such as ``int4``: data parallelism, synchronous;
- ``local:H:CODEC``: H local steps between outer steps by the outer optimizer of DiLoCo,
  with differences sent by a codec; ``mean:H:CODEC``: replicas take the mean;
- ``selsync:DELTA:CODEC``: the mean where gradients change by the fraction DELTA.

``muon/`` before a way trains with Muon inside (MuLoCo).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
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

import autopar
from autopar.runtime.local.outer import MEAN, Outer
from autopar.runtime.local.rules import RelativeChange

ROOT = pathlib.Path(__file__).resolve().parents[2]
DENSE = time_to_loss.DENSE
WAYS = (
    DENSE, "int8", "int4", "powersgd:rank=4", "local:16:int8", "local:64:int8",
    "local:64:int4", "mean:16:int8", "selsync:0.05:int8", "muon/dense",
    "muon/local:64:int4",
)  # fmt: skip
LEAST_STEPS = 6


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
        optimizer, _, method = name.rpartition("/")
        sizes = sizes._replace(optimizer=optimizer or "adamw")
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
        number, _, codec = rest.partition(":")
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
            codec=codec or "dense",
            cluster=cluster,
        )

    def begin(self) -> None:
        """Makes the state of step 0."""
        example = jax.eval_shape(lambda: self.workload.batch(0))
        self.state = self.step.init(self.workload.create, batch=example)
        self.done = 0

    def advance(self, steps: int) -> list[float]:
        """Runs steps; returns the seconds of each."""
        found, count = [], jax.process_count()
        for _ in range(steps):
            data = self.workload.batch(self.done, jax.process_index(), count)
            if count > 1:
                worker.barrier()
            begin = time.perf_counter()
            self.state, metrics = self.step(self.state, data)
            jax.block_until_ready((self.state, metrics))
            found.append(time.perf_counter() - begin)
            self.done += 1
        return found

    @property
    def params(self) -> Any:
        """The parameters as NumPy arrays; with local steps the mean over replicas."""
        if not self.local:  # all state is whole on every host
            params = self.state.params
            return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
        each = [state.params for state in self.state.replicas]
        return jax.tree.map(lambda *x: np.mean([np.asarray(v) for v in x], 0), *each)

    @property
    def rounds(self) -> float:
        """Outer steps for each step so far."""
        if not self.local:
            return 1.0
        return float(np.mean(self.state.rounds)) / max(1, self.done)


def count_steps(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Counts the steps of each way to the loss of dense training."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    loss = jax.jit(language_model.build(seed, sizes).eval_loss)
    held_out = language_model.evaluation_batch(sizes)
    target, found = None, []
    for name in options.ways:
        way = Way(name, sizes, seed, 100.0, options.hosts)
        way.begin()
        points: list[tuple[int, float]] = []
        most = options.steps * (1 if target is None else options.patience)
        while way.done < most:
            way.advance(min(options.turn, int(most) - way.done))
            points.append((way.done, float(loss(way.params, held_out))))
            if target is not None and summaries.reached(points, target) is not None:
                break
        if name == DENSE:
            target = points[-1][1]
        steps = summaries.reached(points, target or 0.0)
        print(f"seed {seed}: {name} {points[-1]}, {steps} to {target}", flush=True)
        found.append(
            {
                "kind": "steps",
                "way": name,
                "seed": seed,
                "target": target,
                "steps": steps,
                "rounds": way.rounds,
                "points": points,
            }
        )
    return found


def pace(options: argparse.Namespace, rate_mbit: float) -> None:
    """Measures the seconds and bytes of a step of each way at a rate."""
    sizes = language_model.Sizes(batch=options.batch, decay_steps=options.steps)
    idle = worker.background()
    for name in options.ways:
        if name.startswith("selsync"):
            continue
        way = Way(name, sizes, 0, rate_mbit, options.hosts)
        way.begin()
        way.advance(max(2, way.period))
        worker.set_rate(rate_mbit or None)
        steps = max(way.period, -(-LEAST_STEPS // way.period) * way.period)
        found: list[float] = []
        run = functools.partial(way.advance, steps)
        sent, _ = worker.measure(lambda f=found, r=run: f.extend(r()), idle)
        worker.set_rate(None)
        worker.say(f"{rate_mbit:g} Mbit/s: {name} {1e3 * sum(found) / steps:.0f} ms")
        predicted = getattr(way.step, "step_s", None) or way.step.plan.predicted.step_s
        worker.report(
            {
                "kind": "seconds",
                "way": name,
                "rate": rate_mbit,
                "step_s": sum(found) / steps,
                "plain_s": statistics.median(found),
                "bytes": sent.scaled(1 / steps).data_bytes,
                "predicted_s": predicted,
            }
        )


def inside(options: argparse.Namespace) -> None:
    """The work of every worker."""
    worker.start()
    worker.set_rate(None)
    for rate in options.rates:
        pace(options, rate)


def rows_of(results: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each way: steps to the loss, and by rate seconds and bytes."""
    first = results[0]
    slowest = {
        (x["way"], x["rate"]): max(same[k]["step_s"] for same in results)
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
            "steps": known,
            "seeds that do not reach it": len(counted) - len(known),
            "outer steps a step": counted[0]["rounds"] if counted else None,
        }
        for x in own:
            if x["kind"] == "seconds":
                step_s = slowest[way, x["rate"]]
                row[f"{x['rate']:g}"] = {
                    "step ms": round(1e3 * step_s, 1),
                    "predicted ms": round(1e3 * x["predicted_s"], 1),
                    "MB a step": round(x["bytes"] / 1e6, 4),
                    "seconds to the loss": [round(s * step_s, 1) for s in known],
                }
        rows.append(row)
    return rows


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[20.0, 100.0])
    parser.add_argument("--steps", type=int, default=768, help="of the dense training")
    parser.add_argument("--patience", type=float, default=2.0, help="times --steps")
    parser.add_argument("--turn", type=int, default=64, help="steps between losses")
    parser.add_argument("--batch", type=int, default=language_model.Sizes().batch)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=7200.0)
    data = ROOT / "docs" / "data" / "local_steps.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    parser.add_argument("--add", action="store_true", help="to the data of --out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return 0
    code, records = 0, [[] for _ in range(options.hosts)]
    if options.rates:
        records, code = bed.run_inside(__file__, options.hosts, options.timeout)
    if options.seeds:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.hosts)
        os.environ[launch.COUNT] = str(options.hosts)
        counted = [x for seed in options.seeds for x in count_steps(options, seed)]
        records = [[*own, *counted] for own in records]
    commands = [" ".join(["python benchmarks/network/local_steps.py", *sys.argv[1:]])]
    if options.add and options.out.exists():
        old = json.loads(options.out.read_text())
        commands = [*old["commands"], *commands]
        pairs = zip(old["records"], records, strict=True)
        records = [[*before, *now] for before, now in pairs]
    rows = rows_of(records)
    for row in rows:
        print(json.dumps(row))
    made = {"commands": commands, "rows": rows, "records": records}
    options.out.write_text(json.dumps(made) + "\n")
    return code


if __name__ == "__main__":
    bed.exit_with(main)
