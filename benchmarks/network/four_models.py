"""Time to the dense loss for four models on four hosts, and against one host.

    python benchmarks/network/four_models.py time --rates 20 100 1000 10000
    python benchmarks/network/four_models.py train --seeds 0 1 2
    python benchmarks/network/four_models.py whole --rates 100 --models clip

``time`` measures steps over links of each rate, in turns: `dense` is data parallelism,
`codecs` has the same layouts with ``compression="auto"``, `joint` also has layouts of
the planner, `whole` is the same where each host makes the whole batch
(``whole_argnames=``), and `one host` computes the whole batch alone. Every host, also
the one, may use `CORES` of a core. Four hosts share the two cores' caches here; in `one
busy`, the other hosts compute steps of their own beside the one host. In `local steps`,
each host trains alone on its rows, and takes the mean of all hosts in every `PERIOD`
steps.
Hosts and links are measured first, as ``autopar profile --distributed`` does. Rates
above `MOST_MBIT` are not run: their seconds are those of the plans. ``train`` counts
the steps until the smoothed loss is that of the last dense step, on simulated devices,
under the plans of `joint` that ``time`` made. The time to the loss is the product.
``whole`` trains from end to end over shaped links.

Nothing of this benchmark was used to choose a constant of the planner. The rules of
compression were found with the GPT at 100 to 10,000 Mbit/s, and the recommendation
model; the CLIP-like model, the ResNet and 20 Mbit/s are new to them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import bed
import clusters
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import summaries
import worker
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import autopar
from autopar.profiling import profile
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.rules import Overlap

example_data: Any = importlib.import_module("example_data")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data" / "four_models.json"
HOSTS = 4
CORES = 0.4
"""Of a core: what a host may use. The four hosts share two cores."""
MOST_MBIT = 2000.0
WARM_STEPS = 2
DENSE, CODECS, JOINT, WHOLE, ONE, BUSY, LOCAL = ARMS = (
    "dense", "codecs", "joint", "whole", "one host", "one busy", "local steps"
)  # fmt: skip
WHOLE_BATCH: dict[str, Any] = {"whole_argnames": "batch"}
PERIOD = 16
LOCAL_STEPS: dict[str, Any] = {
    "every": PERIOD, "outer": MEAN, "codec": "int4", "fragments": 6,
    "overlap": Overlap(1),
}  # fmt: skip
"""The setting that ``local_steps.py`` found best for a GPT at 20 Mbit/s."""
LOSS_EVERY = 5
"""Steps between two losses of the mean of all replicas."""
BARS = {20.0: 8.0, 100.0: 4.5, 1000.0: 1.5, 10000.0: 1.0}
"""Mbit/s -> how many times sooner than dense."""
BARS_OF_ONE = {1000.0: 2.0}
"""Mbit/s -> how many times sooner than one host, where it is not 1."""

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its training.

    Attributes:
      make: ``make(optimizer)`` returns the step and ``create_state(key)``.
      optimizer: the optimizer.
      data: ``data(rows, seed)`` yields batches.
      rows: of a small batch over all hosts.
      steps: of the dense training.
    """

    make: Callable[[Any], tuple[Callable[..., Any], Callable[..., Any]]]
    optimizer: Callable[[], Any]
    data: Callable[..., Iterator[Batch]]
    rows: int
    steps: int

    def built(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The step and the function that creates its state."""
        return self.make(self.optimizer())

    def batch(self, seed: int, step: int, part: int = 0, parts: int = 1) -> Batch:
        """A part of the rows of the batch of a step."""
        whole = next(self.data(self.rows, (seed, step)))
        rows = self.rows // parts
        return {k: v[part * rows : (part + 1) * rows] for k, v in whole.items()}


def _example(name: str, **options: Any) -> Callable[[Any], Any]:
    """Makes a model of the examples."""

    def make(optimizer: Any) -> Any:
        module: Any = importlib.import_module(name)
        made = module.training(**options)
        return made.step, functools.partial(made.create_state, optimizer=optimizer)

    return make


# A model like CLIP: two towers, and a loss over all pairs of a batch.


WIDTH, WORDS, LETTERS = 192, 16, 128


class _Towers(nn.Module):
    """Embeddings of images and captions, each of length 1."""

    @nn.compact
    def __call__(self, images: jax.Array, captions: jax.Array) -> tuple[jax.Array, ...]:
        """Embeds the pairs of a batch."""
        x = nn.Conv(WIDTH, (4, 4), (4, 4), name="patches")(images)
        x = x.reshape(len(x), -1, WIDTH)
        x += self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        y = nn.Embed(LETTERS, WIDTH, name="letters")(captions)
        y += self.param("order", nn.initializers.normal(0.02), y.shape[1:])
        for layer in range(2):
            x, y = (
                _block(tower, f"{name}{layer}")
                for tower, name in ((x, "image"), (y, "text"))
            )
        scale = self.param("scale", lambda _: jnp.asarray(2.0))
        a, b = (
            nn.Dense(WIDTH, name=name)(nn.LayerNorm(name=f"{name}_norm")(z).mean(1))
            for z, name in ((x, "image_head"), (y, "text_head"))
        )
        a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (a, b))
        return a, b, scale


def _block(x: jax.Array, name: str) -> jax.Array:
    own = nn.LayerNorm(name=f"{name}_ln1")(x)
    x += nn.MultiHeadDotProductAttention(4, name=f"{name}_attention")(own, own)
    own = nn.Dense(4 * WIDTH, name=f"{name}_up")(nn.LayerNorm(name=f"{name}_ln2")(x))
    return x + nn.Dense(WIDTH, name=f"{name}_down")(nn.gelu(own))


def _clip(optimizer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    model = _Towers()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        a, b, scale = cast(Any, model.apply({"params": params}, **batch))
        scores = jnp.exp(scale) * a @ b.T
        own = jnp.arange(len(scores))
        cross = optax.softmax_cross_entropy_with_integer_labels
        return (cross(scores, own).mean() + cross(scores.T, own).mean()) / 2

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    def create_state(key: jax.Array) -> TrainState:
        sample = jax.tree.map(lambda x: x[:1], next(pair_batches(1, 0)))
        params = model.init(key, **sample)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return step, create_state


def pair_batches(rows: int, seed: Any) -> Iterator[Batch]:
    """Gratings of 64 orientations, with captions that spell the orientation.

    The caption has the number of the orientation in two digits at a random place
    between random letters.
    """
    random = np.random.default_rng((7, *np.atleast_1d(seed)))
    images = example_data.image_batches(rows, 16, 64, (8, *np.atleast_1d(seed)))
    while True:
        made = next(images)
        captions = random.integers(97, 123, (rows, WORDS))
        places = random.integers(0, WORDS - 1, rows)
        for k, (place, label) in enumerate(zip(places, made["labels"], strict=True)):
            captions[k, place : place + 2] = [48 + label // 10, 48 + label % 10]
        yield {"images": made["images"], "captions": captions.astype(np.int32)}


_TABLES = tuple(max(32768 >> t, 64) for t in range(6))
MODELS = {
    "gpt": Model(
        _example("gpt", layers=2, d_model=384, heads=6, seq=32, vocab=128),
        lambda: optax.adamw(5e-4, b2=0.98, weight_decay=0.01),
        lambda rows, seed: example_data.text_batches(rows, 32, seed), 8, 300,
    ),
    "clip": Model(_clip, lambda: optax.adam(3e-4), pair_batches, 16, 300),
    "recommendation": Model(
        _example("recommendation", tables=6, rows=32768, width=16, hidden=512),
        lambda: optax.adam(1e-3),
        lambda rows, seed: example_data.click_batches(rows, _TABLES, 13, seed), 128,
        300,
    ),
    "resnet": Model(
        _example("resnet", stages=3, blocks=1, width=32, size=16, classes=8),
        lambda: optax.sgd(0.02, momentum=0.9),
        lambda rows, seed: example_data.image_batches(rows, 16, 8, seed), 32, 120,
    ),
}  # fmt: skip


# Plans of the arms.


def plan_of(model: Model, arm: str, cluster: autopar.Cluster) -> autopar.Plan:
    """The plan of an arm on a cluster."""
    step, create_state = model.built()
    state = jax.eval_shape(create_state, jax.random.key(0))
    batch = jax.eval_shape(lambda: model.batch(0, 0))
    make = functools.partial(autopar.plan, step, state, batch)
    shared: dict[str, Any] = {"stages": 1, "microbatches": 1, "remat": 0}
    if arm in (JOINT, WHOLE):
        given = WHOLE_BATCH if arm == WHOLE else {}
        return make(cluster=cluster, compression="auto", **given, **shared)
    if arm in (ONE, BUSY):
        own = autopar.Cluster.parse("1:cpu")
        return make(cluster=dataclasses.replace(own, device=cluster.device), **shared)
    # Without pins, the planner may leave hosts idle on slow links.
    fast = autopar.Cluster.parse(f"{HOSTS}x1:cpu,network=1000Gb/s,network_latency=1us")
    pins = {"state/*": PartitionSpec(), "batch/*": PartitionSpec("data")}
    layouts = make(cluster=fast, pins=pins, **shared)
    mode = "none" if arm == DENSE else "auto"
    return make(cluster=cluster, compression=mode, layouts=layouts)


def model_of(name: str, times: int) -> Model:
    """A model whose batch is some times the small one."""
    return dataclasses.replace(MODELS[name], rows=times * MODELS[name].rows)


def codecs_of(plan: autopar.Plan) -> dict[str, int]:
    """How many gradients have each codec."""
    return dict(collections.Counter(g.codec for g in plan.gradients if g.codec))


# Seconds of a step.


def time_inside(given: argparse.Namespace) -> None:
    """Times all arms of all models, in every process."""
    worker.start()
    for rate in given.rates:
        cluster = _profiled(rate, given.folder)
        for name in given.models:
            _time_model(given, name, rate, cluster)


def _profiled(rate: float, folder: pathlib.Path) -> autopar.Cluster:
    """Hosts and links as measured; links faster than `MOST_MBIT` by their rate."""
    run = rate <= MOST_MBIT
    kept = folder / f"cluster-{rate:g}.toml"
    if not kept.exists():
        worker.set_rate(rate if run else None)
        worker.set_cores(CORES)
        found = profile.run(
            settings=dataclasses.replace(
                profile.CPU_SETTINGS, dtypes=("float32",), rounds=3
            )
        ).cluster
        worker.set_cores(None)
        if not run:
            levels = clusters.described(rate, HOSTS).levels
            found = dataclasses.replace(found, levels=levels)
        if worker.rank() == 0:
            kept.write_text(found.to_toml(), encoding="utf-8")
        worker.say(f"profiled at {rate:g} Mbit/s")
        worker.barrier()
    return autopar.Cluster.from_toml(kept)


def _time_model(
    given: argparse.Namespace, name: str, rate: float, cluster: autopar.Cluster
) -> None:
    model = model_of(name, given.times)
    worker.set_rate(None)  # nothing that is not timed waits for the links
    runs: dict[str, Running] = {}
    rows: dict[str, dict[str, Any]] = {}
    for arm in ARMS[:-1]:
        file = f"{name}-{given.times}-{rate:g}-{arm.replace(' ', '-')}.json"
        plan = _shared_plan(model, arm, cluster, given.folder / file)
        rows[arm] = {
            "model": name, "times": given.times, "rate_mbit": rate, "arm": arm,
            "plan": file,
            "codecs": codecs_of(plan), "predicted_s": plan.predicted.step_s,
            "predicted_bytes": plan.predicted.communication_bytes,
            "scheme": plan.worth.scheme if plan.worth else "", "step_s": [],
        }  # fmt: skip
        if rate <= MOST_MBIT:
            runs[arm] = Running(model, arm, plan)
    if runs:
        runs[LOCAL] = Running(model, LOCAL, cluster=cluster)
        rows[LOCAL] = {
            "model": name, "times": given.times, "rate_mbit": rate, "arm": LOCAL,
            "codecs": {LOCAL: PERIOD}, "predicted_s": runs[LOCAL].predicted_s,
            "scheme": "", "step_s": [],
        }  # fmt: skip
    for turn in range(given.turns if runs else 0):
        worker.set_rate(rate)
        worker.set_cores(CORES)
        order = ARMS[turn % len(ARMS) :] + ARMS[: turn % len(ARMS)]
        for arm in order:
            if arm == LOCAL:
                worker.barrier()
                rows[LOCAL]["step_s"].append(runs[LOCAL].period() / PERIOD)
            for k in range(given.steps if arm != LOCAL else 0):
                # Batches are made before the clock runs.
                data = runs[arm].batch(turn * given.steps + k)
                worker.barrier()
                before_s = time.perf_counter()
                runs[arm].take(data)
                own_s = time.perf_counter() - before_s
                counts = arm != BUSY or worker.rank() == 0
                rows[arm]["step_s"].append(own_s if counts else 0.0)
        worker.set_cores(None)
        worker.set_rate(None)
    for row in rows.values():
        worker.report(row)
    worker.say(f"{name} at {rate:g} Mbit/s: " + ", ".join(
        f"{arm} {1e3 * statistics.median(row['step_s'] or [row['predicted_s']]):.0f} ms"
        for arm, row in rows.items()
    ))  # fmt: skip


def _shared_plan(
    model: Model, arm: str, cluster: autopar.Cluster, path: pathlib.Path
) -> autopar.Plan:
    """The plan that process 0 makes: time limits could make those of others differ."""
    if worker.rank() == 0:
        plan_of(model, arm, cluster).save(path)
    worker.barrier()
    return autopar.Plan.load(path)


class Running:
    """A training of an arm in this process."""

    def __init__(
        self,
        model: Model,
        arm: str,
        plan: autopar.Plan | None = None,
        cluster: autopar.Cluster | None = None,
    ) -> None:
        """Compiles the step, and takes `WARM_STEPS`.

        Args:
          model: the model.
          arm: the arm.
          plan: the arm's plan; None: local steps, which plan themselves.
          cluster: the cluster for local steps.
        """
        step, create_state = model.built()
        self._model, self._idle = model, arm == ONE and worker.rank() > 0
        self._part, self._parts = worker.rank(), worker.count()
        if arm in (ONE, BUSY, WHOLE):
            self._part, self._parts = 0, 1
        if arm in (ONE, BUSY):
            self._run: Any = jax.jit(step, donate_argnums=0)
            self._state = jax.jit(create_state)(jax.random.key(0))
        else:
            if arm == LOCAL:
                self._run = autopar.local_steps(step, cluster=cluster, **LOCAL_STEPS)
            else:
                given = WHOLE_BATCH if arm == WHOLE else {}
                self._run = autopar.parallelize(step, plan=plan, **given)
            batch = jax.eval_shape(lambda: model.batch(0, 0))
            key = jax.random.key(0)
            self._state = self._run.init(create_state, key, batch=batch)
        # The programs of all fragments are compiled after two periods.
        for k in range(WARM_STEPS if arm != LOCAL else 2 * PERIOD + 2):
            self.take(self.batch(k))

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a local step, with its part of the outer steps."""
        return self._run.step_s

    def period(self) -> float:
        """Takes `PERIOD` local steps, and waits for what they sent; the seconds."""
        data = [self.batch(k) for k in range(PERIOD)]
        before_s = time.perf_counter()
        for batch in data:
            self._state, loss = self._run(self._state, batch)
            jax.block_until_ready(loss)
        jax.block_until_ready(self._state)
        return time.perf_counter() - before_s

    def batch(self, step: int) -> Batch | None:
        """This process's rows; None if it takes no part."""
        if self._idle:
            return None
        return self._model.batch(0, step, self._part, self._parts)

    def take(self, batch: Batch | None) -> None:
        """Takes a step, and waits for it."""
        if batch is not None:
            self._state, loss = self._run(self._state, batch)
            jax.block_until_ready((self._state, loss))


def slowest(results: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows, with the seconds of the slowest process in each step."""
    found: list[dict[str, Any]] = []
    for same in zip(*results, strict=True):
        times = [max(t) for t in zip(*(row["step_s"] for row in same), strict=True)]
        found.append({**same[0], "step_s": times})
    return found


# Steps to the loss of the dense training.


def trained(
    model: Model, plan: autopar.Plan | None, seed: int, target: float | None
) -> tuple[float | None, float]:
    """Trains under a plan, or on one device for None.

    Returns:
      The number of steps until the smoothed loss is ``target`` (None: not within twice
      the model's steps), and the last smoothed loss. Without a target, all of the
      model's steps are taken.
    """
    step, create_state = model.built()
    key = jax.random.key(seed)
    if plan is None:
        run: Any = jax.jit(step, donate_argnums=0)
        state = jax.jit(create_state)(key)
    else:
        run = autopar.parallelize(step, plan=plan)
        batch = jax.eval_shape(lambda: model.batch(0, 0))
        state = run.init(create_state, key, batch=batch)
    window, losses = summaries.SMOOTH_STEPS, list[float]()
    for k in range(model.steps * (1 if target is None else 2)):
        state, loss = run(state, model.batch(seed, k))
        losses.append(float(loss))
        mean = statistics.fmean(losses[-window:])
        if target is not None and k >= window and mean <= target:
            return k + 1.0, mean
    return None, statistics.fmean(losses[-window:])


def trained_locally(model: Model, seed: int, target: float) -> float | None:
    """The number of local steps to a loss, as `trained`.

    The loss is that of the mean of all replicas' states, on the whole batch of the next
    step. That of a replica on its own rows may differ: it has fewer pairs, for example.
    """
    step, create_state = model.built()
    cluster = autopar.Cluster.parse(f"{HOSTS}x1:cpu")
    run: Any = autopar.local_steps(step, cluster=cluster, **LOCAL_STEPS)
    batch = jax.eval_shape(lambda: model.batch(0, 0))
    state = run.init(create_state, jax.random.key(seed), batch=batch)
    whole_step = jax.jit(step)
    window, losses = summaries.SMOOTH_STEPS // LOSS_EVERY, list[float]()
    for k in range(2 * model.steps):
        data = model.batch(seed, k)
        if k % LOSS_EVERY == 0:
            replicas = [jax.device_get(own) for own in state.replicas]
            mean = jax.tree.map(_mean, *replicas)
            losses.append(float(whole_step(mean, data)[1]))
            if k >= window and statistics.fmean(losses[-window:]) <= target:
                return k + 1.0
        state, _ = run(state, data)
    return None


def _mean(*values: Any) -> Any:
    """The mean of floating-point arrays; the first of others."""
    first = values[0]
    floating = jnp.issubdtype(jnp.result_type(first), jnp.floating)
    return np.mean(values, 0).astype(first.dtype) if floating else first


def train(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Counts the steps of each distinct choice of codecs."""
    found = [
        r for r in _held(given.out, "trained")
        if r["model"] not in given.models or r["times"] != given.times
    ]  # fmt: skip
    rows = [r for r in _held(given.out, "timed") if r["times"] == given.times]
    for name in given.models:
        model = model_of(name, given.times)
        plans = {
            json.dumps(r["codecs"], sort_keys=True): r["plan"]
            for r in rows
            if r["model"] == name and r["codecs"] and r["arm"] in (JOINT, WHOLE)
        }  # fmt: skip
        for seed in given.seeds:
            _, target = trained(model, None, seed, None)
            for codecs, file in plans.items():
                if not (given.folder / file).exists():
                    print(f"{name}: no {given.folder / file}: run `time` first")
                    continue
                plan = autopar.Plan.load(given.folder / file)
                steps, _ = trained(model, plan, seed, target)
                found.append({
                    "model": name, "times": given.times, "seed": seed,
                    "codecs": json.loads(codecs), "dense_steps": model.steps,
                    "steps": steps, "loss": target,
                })  # fmt: skip
                print(f"{name}, seed {seed}: {steps} steps of {codecs}", flush=True)
            steps = trained_locally(model, seed, target)
            print(f"{name}, seed {seed}: {steps} local steps", flush=True)
            found.append({
                "model": name, "times": given.times, "seed": seed,
                "codecs": {LOCAL: PERIOD}, "dense_steps": model.steps,
                "steps": steps, "loss": target,
            })  # fmt: skip
            _keep(given.out, trained=found)
    return found


# From end to end.


def whole_inside(given: argparse.Namespace) -> None:
    """Trains dense and as planned over shaped links, until the dense loss."""
    worker.start()
    for rate in given.rates:
        cluster = _profiled(rate, given.folder)
        for name in given.models:
            target = None
            for arm in (DENSE, JOINT):
                worker.set_rate(None)
                path = given.folder / f"whole-{name}-{rate:g}-{arm}.json"
                model = model_of(name, given.times)
                plan = _shared_plan(model, arm, cluster, path)
                row = _whole(model, plan, rate, target)
                target = row["loss"] if target is None else target
                own = {"model": name, "times": given.times, "rate_mbit": rate}
                worker.report({**own, "arm": arm, **row})
                worker.say(f"{name} at {rate:g} Mbit/s, {arm}: {row}")


def _whole(
    model: Model, plan: autopar.Plan, rate: float, target: float | None
) -> dict[str, Any]:
    step, create_state = model.built()
    run = autopar.parallelize(step, plan=plan)
    batch = jax.eval_shape(lambda: model.batch(0, 0))
    state = run.init(create_state, jax.random.key(0), batch=batch)
    part = functools.partial(model.batch, 0, part=worker.rank(), parts=worker.count())
    jax.block_until_ready(run(state, part(0)))
    state = run.init(create_state, jax.random.key(0), batch=batch)
    window, losses = summaries.SMOOTH_STEPS, list[float]()
    worker.set_rate(rate)
    worker.set_cores(CORES)
    before_s = time.perf_counter()
    for k in range(model.steps * (1 if target is None else 2)):
        state, loss = run(state, part(k))
        losses.append(float(loss))
        mean = statistics.fmean(losses[-window:])
        if target is not None and k >= window and mean <= target:
            break
    seconds = time.perf_counter() - before_s
    worker.set_cores(None)
    mean = statistics.fmean(losses[-window:])
    reached = target is None or mean <= target
    return {"steps": len(losses), "s": seconds, "loss": mean, "reached": reached}


# Files and tables.


def _held(path: pathlib.Path, part: str) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8")).get(part, [])


def _keep(path: pathlib.Path, **parts: list[dict[str, Any]]) -> None:
    """Replaces parts of the file; the others stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    command = f"python benchmarks/network/four_models.py {sys.argv[1]}"
    commands = {**known.get("commands", {}), **dict.fromkeys(parts, command)}
    data = {**known, "commands": commands, "cores": CORES, **parts}
    path.write_text(json.dumps(data), encoding="utf-8")


def _trained(
    row: Mapping[str, Any], trainings: Sequence[Mapping[str, Any]]
) -> list[float | None]:
    """The steps of each training with the row's codecs; None: not reached."""
    return [
        t["steps"] for t in trainings
        if (t["model"], t["times"]) == (row["model"], row["times"])
        and t["codecs"] == row["codecs"]
    ]  # fmt: skip


def steps_of(
    row: Mapping[str, Any], trainings: Sequence[Mapping[str, Any]]
) -> float | None:
    """The median over seeds of the steps to the dense loss; None: not reached."""
    if not row["codecs"]:
        return float(MODELS[row["model"]].steps)
    own = _trained(row, trainings)
    reached = [steps for steps in own if steps is not None]
    return statistics.median(reached) if own and len(reached) == len(own) else None


def report(
    timed: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]]
) -> None:
    """Prints how much sooner each arm reaches the loss than dense and one host."""

    head = (
        "model", "Mbit/s", "dense ms", "one host ms (busy)", "joint ms (predicted)",
        "layouts and codecs of joint", "steps, dense and joint",
        "times sooner than dense (bar)", "than one host (bar)",
        "whole batches: ms (predicted)", "layouts and codecs", "than one host (bar)",
    )  # fmt: skip
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for (name, _, rate), rows in _grouped(timed).items():
        arms = {row["arm"]: row for row in rows}
        joint, whole = arms[JOINT], arms.get(WHOLE)
        dense = float(MODELS[name].steps)
        dense_s, one_s = (dense * _step_s(arms[arm]) for arm in (DENSE, ONE))
        own_s, told = _to_loss(joint, trainings)
        bar = BARS_OF_ONE.get(rate, 1.0)
        more = ["", "", ""]
        if whole is not None:
            predicted = f"{_ms(whole)} ({1e3 * whole['predicted_s']:.0f})"
            ratio = _sooner(one_s, _to_loss(whole, trainings)[0], bar)
            more = [predicted, _layouts(whole), ratio]
        cells = [
            name, f"{rate:g}", _ms(arms[DENSE]),
            f"{_ms(arms[ONE])} ({_ms(arms.get(BUSY))})",
            f"{_ms(joint)} ({1e3 * joint['predicted_s']:.0f})",
            _layouts(joint), f"{dense:g}, {told}",
            _sooner(dense_s, own_s, BARS.get(rate, 0.0)),
            _sooner(one_s, own_s, bar), *more,
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def _to_loss(
    row: Mapping[str, Any], trainings: Sequence[Mapping[str, Any]]
) -> tuple[float | None, str]:
    """The seconds to the dense loss (None: not reached), and the steps as text.

    Where the steps were not counted, those of dense are taken, with a question mark.
    """
    steps, counted = steps_of(row, trainings), True
    if steps is None and not _trained(row, trainings):
        steps, counted = float(MODELS[row["model"]].steps), False
    if steps is None:
        return None, "not reached"
    return steps * _step_s(row), f"{steps:g}{'' if counted else '?'}"


def _layouts(row: Mapping[str, Any]) -> str:
    """Layouts and codecs of a row."""
    codecs = [f"{n} {c}" for c, n in row["codecs"].items() if c != "dense"]
    return "; ".join([row["scheme"], *filter(None, [", ".join(codecs)])])


def report_local(
    timed: Sequence[Mapping[str, Any]], trainings: Sequence[Mapping[str, Any]]
) -> None:
    """Prints how much sooner local steps reach the loss."""
    head = ("model", "Mbit/s", "ms (predicted)", "steps, dense and local",
            "times sooner than dense", "than joint", "than one busy host")  # fmt: skip
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for (name, _, rate), rows in _grouped(timed).items():
        arms = {row["arm"]: row for row in rows}
        if LOCAL not in arms:
            continue
        local, dense = arms[LOCAL], float(MODELS[name].steps)
        steps = steps_of(local, trainings)
        told = "not reached" if _trained(local, trainings) else "not counted"
        own_s = None if steps is None else steps * _step_s(local)
        joint_s = (steps_of(arms[JOINT], trainings) or dense) * _step_s(arms[JOINT])
        cells = (
            name, f"{rate:g}", f"{_ms(local)} ({1e3 * local['predicted_s']:.0f})",
            f"{dense:g}, {told if steps is None else f'{steps:g}'}",
            _sooner(dense * _step_s(arms[DENSE]), own_s), _sooner(joint_s, own_s),
            _sooner(dense * _step_s(arms[BUSY]), own_s),
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def _ms(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"{1e3 * _step_s(row):.0f}"


def _sooner(other_s: float | None, own_s: float | None, bar: float = 0.0) -> str:
    """How many times sooner the loss is reached, with the bar; in bold if below it."""
    if other_s is None or own_s is None:
        return ""
    times = other_s / own_s
    said = f"{times:.2f}" if times >= bar else f"**{times:.2f}**"
    return f"{said} ({bar:g})" if bar else said


def _step_s(row: Mapping[str, Any]) -> float:
    """The median of the measured seconds; the predicted ones if it never ran."""
    return statistics.median(row["step_s"] or [row["predicted_s"]])


def _grouped(rows: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = row["model"], row["times"], row["rate_mbit"]
        found.setdefault(key, []).append(row)
    return found


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("time", "train", "whole", "table"))
    parser.add_argument("--rates", type=float, nargs="+", default=list(BARS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--times", type=int, default=4, help="the rows of small batches"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=5, help="of an arm in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("plans"))
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    given = parse()
    if given.inside:
        (whole_inside if given.what == "whole" else time_inside)(given)
        return 0
    code = 0
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what in ("time", "whole"):
        results, code = bed.run_inside(__file__, HOSTS, given.timeout)
        part = {"time": "timed", "whole": "whole"}[given.what]
        merged = slowest(results) if part == "timed" else list(results[0])
        new = _grouped(merged)
        kept = [
            r for r in _held(given.out, part)
            if (r["model"], r["times"], r["rate_mbit"]) not in new
        ]  # fmt: skip
        _keep(given.out, **{part: kept + merged})
    elif given.what == "train":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={HOSTS}"
        train(given)
    for table in (report, report_local):
        table(_held(given.out, "timed"), _held(given.out, "trained"))
        print()
    return code


if __name__ == "__main__":
    bed.exit_with(main)
