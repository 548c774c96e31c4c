"""Predicted and actual number of rows until a character model reaches a loss."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from jax.sharding import PartitionSpec

import autopar
from autopar.goodput import (
    CodecError,
    NoiseOptions,
    codec_error,
    following,
    gain,
    scale_updates,
    set_batch,
)

sys.path.insert(0, str(workloads.EXAMPLES_DIR))
example_data: Any = importlib.import_module("example_data")

BASE, WORKERS, CONTEXT, WIDTH, VOCAB = 32, 4, 8, 96, 128
# Number of steps of the base training, whose last loss is the level; the most steps of
# a training; and steps between two evaluations.
STEPS, MOST, EVERY = 400, 4000, 5
RATES = {"sgd": 0.2, "adam": 1e-3}
CODECS = (
    "dense",
    "int8:rounding=stochastic",
    "randk:unbiased=true,ratio=0.25",
    "int4",
    "topk:ratio=0.05",
)
UNBIASED = ("dense", "int8:rounding=stochastic", "randk:unbiased=true,ratio=0.25")
CLUSTER = f"{WORKERS}x1:cpu,network=100Gb/s"
PINS = {"batch/*": PartitionSpec("data"), "state/*": PartitionSpec()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this row."""
    parser.add_argument("--optimizer", choices=tuple(RATES), default="sgd")
    parser.add_argument("--rate", type=float, help="the learning rate of M0 rows")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.99, help="of the noise")
    parser.add_argument("--batches", default="32,64,128,256")
    parser.add_argument("--codecs", default=";".join(CODECS), help="with ; between")


def loss_of(w: Any, batch: Any) -> Any:
    """The loss of the next character, predicted from some previous characters."""
    x = w["embed"][batch["x"]].reshape(len(batch["x"]), -1)
    logits = jnp.tanh(x @ w["hidden"]) @ w["out"]
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return found.mean()


def rows(count: int, seed: int, number: int) -> dict[str, np.ndarray]:
    """A batch of the text; another seed draws other positions."""
    tokens = example_data.text_tokens()
    draw = np.random.default_rng((seed, number))
    starts = draw.integers(0, len(tokens) - CONTEXT, size=(count, 1))
    windows = tokens[starts + np.arange(CONTEXT + 1)]
    return {"x": windows[:, :-1], "y": windows[:, -1]}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One training.

    Attributes:
      batch: rows of a batch.
      steps: number of steps at each evaluation.
      losses: held-out loss at each evaluation.
      phis: noise scale at each evaluation.
      error: error of the codecs after the last step.
    """

    batch: int
    steps: list[int]
    losses: list[float]
    phis: list[float]
    error: CodecError

    def steps_to(self, level: float) -> float:
        """Steps until the held-out loss reaches a level, interpolated linearly."""
        for k in range(1, len(self.losses)):
            before, after = self.losses[k - 1], self.losses[k]
            if after <= level:
                part = (before - level) / max(before - after, 1e-12)
                wide = self.steps[k] - self.steps[k - 1]
                return self.steps[k - 1] + min(max(part, 0.0), 1.0) * wide
        return math.inf

    def rows_to(self, level: float) -> float:
        """Rows until the held-out loss reaches a level."""
        return self.batch * self.steps_to(level)


class Trainer:
    """Trains with any batch size and codec; programs are compiled once."""

    def __init__(
        self, optimizer: str, rate: float | None = None, decay: float = 0.99
    ) -> None:
        """Plans data-parallel layouts for all trainings."""
        rule = "adascale" if optimizer == "sgd" else "adascale-root"
        base = getattr(optax, optimizer)(rate or RATES[optimizer])
        self.tx = scale_updates(base, rule, base_batch=BASE)
        self.adam, self.decay = optimizer != "sgd", decay
        self.evaluate = jax.jit(loss_of)
        self.held_out = rows(4096, 10**6, 0)
        self._runs: dict[str, Any] = {}
        self.layouts = autopar.plan(
            self.step,
            self.state(0),
            rows(4096, 0, 0),
            cluster=CLUSTER,
            axis_names=("data",),
            pins=PINS,
        )

    def step(self, state: Any, batch: Any) -> Any:
        """One step."""
        w, opt = state
        loss, grads = jax.value_and_grad(loss_of)(w, batch)
        updates, opt = self.tx.update(grads, opt, w)
        return (optax.apply_updates(w, updates), opt), loss

    def state(self, seed: int) -> Any:
        """The initial state of a seed."""
        keys = jax.random.split(jax.random.key(seed), 3)
        w = {
            "embed": 0.3 * jax.random.normal(keys[0], (VOCAB, 16)),
            "hidden": jax.random.normal(keys[1], (16 * CONTEXT, WIDTH)) / 11.0,
            "out": jax.random.normal(keys[2], (WIDTH, VOCAB)) / 10.0,
        }
        return w, self.tx.init(w)

    def run_of(self, codec: str) -> Any:
        """The planned step with a codec."""
        if codec not in self._runs:
            self._runs[codec] = self._made(codec)
        return self._runs[codec]

    def _made(self, codec: str) -> Any:
        def train(state: Any, batch: Any) -> Any:
            return self.step(state, batch)

        noise = NoiseOptions(
            base_batch=BASE, decay=self.decay, every=1, preconditioned=self.adam
        )
        return autopar.parallelize(
            train,
            cluster=CLUSTER,
            layouts=self.layouts,
            noise_scale=noise,
            compression="none" if codec == "dense" else codec,
            programs=16,
        )

    def train(
        self,
        codec: str,
        batch: int,
        seed: int,
        error: CodecError,
        level: float,
        most: int = MOST,
    ) -> Curve:
        """Trains until the held-out loss reaches a level."""
        run = self.run_of(codec)
        run.noise_state, state, curve = None, self.state(seed), ([0], [9.0], [math.nan])
        if codec != "dense":
            run.compression_state = None
        for k in range(most):
            if k % EVERY == 0 and k:
                phi = run.noise_scale.phi
                state = set_batch(state, batch=batch, phi=phi, error=error)
                curve[0].append(k)
                curve[1].append(float(self.evaluate(_local(state[0]), self.held_out)))
                curve[2].append(phi)
                if curve[1][-1] <= level:
                    break
            elif k == 0:
                state = set_batch(state, batch=batch, phi=0.0, error=CodecError())
            state, loss = run(state, rows(batch, seed, k))
            jax.block_until_ready(loss)
        if run.noise_scale.groups != WORKERS:
            raise RuntimeError("the plan is not data parallel")
        reports = {} if codec == "dense" else run.telemetry
        return Curve(batch, *curve, codec_error(run.noise_scale, reports, WORKERS))


def _local(w: Any) -> Any:
    return jax.tree.map(np.asarray, w)


def predicted(base: Curve, level: float, batch: int, error: CodecError) -> float:
    """Predicts the rows to a level, from the base training and each step's gain."""
    total, end = 0.0, base.steps_to(level)
    for k in range(1, len(base.steps)):
        done = min(base.steps[k], end) - base.steps[k - 1]
        if done <= 0:
            break
        phi = next(p for p in (*base.phis[k:], 0.0) if not math.isnan(p))
        total += done * batch / gain(phi, batch, BASE, error)
    return total


def table(given: argparse.Namespace) -> None:
    """Prints the ratio of predicted to actual rows, by batch size and codec."""
    trainer = Trainer(given.optimizer, given.rate, given.decay)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    exact = CodecError()
    bases = [trainer.train("dense", BASE, s, exact, -1.0, STEPS + 1) for s in seeds]
    level = statistics.fmean(c.losses[-1] for c in bases)
    longer = [trainer.train("dense", BASE, s, exact, level - 0.02) for s in seeds]
    print(f"{given.optimizer}, level {level:.3f}, phi {longer[0].phis[-1]:.0f} rows")
    workloads.row("codec", "batch", "own", "shared", "ratio", "predicted / realised",
                  "95 %", "naive / realised")  # fmt: skip
    workloads.row(*["---"] * 8)
    for codec in given.codecs.split(";"):
        error, ratio = _known(trainer, codec, level)
        for batch in map(int, given.batches.split(",")):
            if (codec, batch) == ("dense", BASE):
                continue
            made = [trainer.train(codec, batch, s, error, level) for s in seeds]
            _row(codec, batch, error, ratio, level, longer, made)


def _known(trainer: Trainer, codec: str, level: float) -> tuple[CodecError, float]:
    """The error and progress ratio of a codec, measured with other seeds."""
    if codec == "dense":
        return CodecError(), 1.0
    if codec in UNBIASED:
        pilot = trainer.train(codec, BASE, 900, CodecError(), -1.0, 120)
        return pilot.error, 1.0
    exact, pilots = CodecError(), (901, 902, 903)
    one = [trainer.train("dense", BASE, s, exact, level).losses for s in pilots]
    other = [trainer.train(codec, BASE, s, exact, level).losses for s in pilots]
    found = following(one, other)
    return CodecError(), found.value


def _row(
    codec: str,
    batch: int,
    error: CodecError,
    ratio: float,
    level: float,
    bases: Sequence[Curve],
    made: Sequence[Curve],
) -> None:
    quotients, naive = [], []
    for base, curve in zip(bases, made, strict=True):
        real = curve.rows_to(level)
        quotients.append(predicted(base, level, batch, error) / ratio / real)
        naive.append(predicted(base, level, batch, CodecError()) / real)
    mean, half = _interval(quotients)
    workloads.row(
        codec, batch, f"{error.own:.3g}", f"{error.shared:.3g}", f"{ratio:.3f}",
        f"{mean:.3f}", f"{mean - half:.3f} to {mean + half:.3f}",
        f"{statistics.fmean(naive):.3f}",
    )  # fmt: skip
    sys.stdout.flush()


# Student's t at 97.5 % for 1, 2 ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _interval(found: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of the width of its 95 % interval."""
    if len(found) < 2:
        return found[0], math.inf
    sd = statistics.stdev(found) / math.sqrt(len(found))
    return statistics.fmean(found), _T95[len(found) - 2] * sd
