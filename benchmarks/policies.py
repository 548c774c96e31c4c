"""Compares policies with static codecs, by real training and modelled time.

    python benchmarks/policies.py                 # all three tables
    python benchmarks/policies.py --only accordion

Two models read Python's own documentation and library, character by character, with the
batches of `benchmarks/network/language_model.py`. One is a small GPT. The other has a
table of hashed n-grams, of which a batch touches few rows, as in recommender models.
Four workers are simulated in one process by `jax.vmap`, and sum their gradients by
`autopar.compression.synchronise`. So losses, bytes and everything that a policy sees
are real. There is no network. The time of a step is taken as

    seconds of a dense step / 2 + bytes that one worker sends / bandwidth

The seconds of the dense step are measured for four workers on this machine's two cores;
a worker with a machine of its own would need half. Encoding is assumed to take no time.
`benchmarks/codec_cost.py` and `benchmarks/selection.py` measure this time, and
`benchmarks/network` uses real links.

A run reaches a target at the first evaluation at which the evaluation loss, averaged
over the last three evaluations, is not above the target. There are two targets: 1 %
above the loss after ``--steps`` steps of the best static level, and 1 % above that of
the worst. All runs go on for ``--most-steps``, so that a level with cheap steps may
take more steps. For each target and bandwidth, another level is the best one.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from flax import linen as nn
from flax.training.train_state import TrainState
from policy_curves import EVAL_EVERY, Curve, Tally, mix, seconds, timed

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "network"))
import language_model

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.exchange import MeshLinks
from autopar.compression.gradient import Feedback, Gradient, init_state
from autopar.compression.policies import Accordion, GraVAC, topk_levels
from autopar.compression.policies.gravac import GainOf
from autopar.compression.policies.policy import (
    GradientReport,
    Observation,
    Policy,
    Signal,
)
from autopar.compression.synchronise import (
    ERROR,
    GRADIENT,
    NON_FINITE,
    RESIDUAL,
    SENT,
    WANTED,
    WIDTH,
    synchronise,
)

WORKERS = 4
AXIS = "workers"
MBIT = 1e6 / 8
BANDWIDTHS_MBIT = (10, 100)
# Factor by which the final loss of a run may exceed that of a level.
SLACK = 1.01
# Gains, each with its epsilon: those of the published code; those of the paper's text;
# the same gain with an epsilon that only excludes levels that send almost nothing; the
# gain in Adam's metric; and two gains without noise, which need no epsilon.
GAINS: tuple[tuple[GainOf, float], ...] = (
    ("norms", 0.75), ("energy", 0.75), ("energy", 0.2), ("updates", 0.5),
    ("signal", 0.0), ("signal-updates", 0.0),
)  # fmt: skip
# Options for gains that are measured by signals. They were chosen on other models than
# those of this study.
BY_SIGNALS: dict[str, Any] = {"window": 2, "explore": 0.02}
# Options for a falling learning rate, chosen on other models, too.
BY_RATE: dict[str, Any] = {**BY_SIGNALS, "omega": 0.3}
# The paper's window has 25 steps, in runs of tens of thousands of steps. These runs
# have some hundred steps.
WINDOW = 1
# Gradients with fewer elements, and vectors, are always sent dense.
SMALL = 1024
GPT = language_model.Sizes(
    layers=2, d_model=128, heads=4, seq=32, batch=16, learning_rate=2e-3,
    warmup_steps=20, decay_steps=400,
)  # fmt: skip
# Rows and columns of the table of n-grams, and the length of the longest n-gram.
ROWS, COLUMNS, ORDER = 1 << 12, 32, 4


# The models whose learning rate falls with the steps.
RATES = {"gpt": language_model.schedule(GPT)}


class Ngrams(nn.Module):
    """Predicts the next character from the table's rows of the preceding n-grams."""

    rows: int = ROWS

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 (rows, seq) -> (rows, seq, `language_model.VOCAB`)."""
        table = nn.Embed(ORDER * self.rows, COLUMNS)
        hashes, parts = jnp.zeros_like(tokens, jnp.uint32), list[jax.Array]()
        for back in range(ORDER):
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
            hashes = (hashes + shifted.astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
            row = (hashes >> 16) % self.rows + back * self.rows
            parts.append(table(row.astype(jnp.int32)))
        hidden = nn.relu(nn.Dense(128)(jnp.concatenate(parts, axis=-1)))
        return nn.Dense(language_model.VOCAB)(hidden)


def ngrams(seed: int, rows: int = ROWS) -> language_model.Workload:
    """The workload of the n-gram model for one seed."""
    sizes, model = GPT._replace(batch=32), Ngrams(rows)
    optimizer = optax.sgd(0.5, momentum=0.9)

    def create() -> Any:
        tokens = jnp.zeros((1, sizes.seq), jnp.int32)
        params = model.init(jax.random.key(seed), tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return language_model.Workload(
        sizes=sizes,
        step=language_model.train_step,
        create=create,
        batch=lambda step: language_model.batch(sizes, seed, step),
        eval_loss=lambda params, data: language_model.loss_of(
            model.apply, params, data
        ),
    )


Codecs = tuple[str, ...]
"""Of each gradient, in the order of the parameters."""


class Trainer:
    """A model and its compiled steps, one for each set of codecs."""

    def __init__(self, build: Callable[[int], language_model.Workload]) -> None:
        """Builds the model; steps are compiled at their first use."""
        self.build = build
        self.first = build(0)
        shapes = jax.eval_shape(self.first.create).params
        flat, self.tree = jax.tree_util.tree_flatten_with_path(shapes)
        self.shapes = {jax.tree_util.keystr(p): leaf.shape for p, leaf in flat}
        self.large = [k for k, n in enumerate(self.shapes) if self.fits(n, "int8")]
        self.evaluate = jax.jit(self.first.eval_loss)
        self.held_out = language_model.evaluation_batch(self.first.sizes)
        self.signals = False
        self._programs: dict[tuple[Codecs, bool], Callable[..., Any]] = {}

    def fits(self, name: str, text: str) -> bool:
        """Whether a gradient is large enough for a codec, and the codec can send it."""
        shape = self.shapes[name]
        large = math.prod(shape) >= SMALL and len(shape) > 1
        return large and not parse_codec(text).check(shape, scatter=False)

    def codecs(self, wish: dict[str, str], otherwise: Codecs) -> Codecs:
        """The requested codecs, for the gradients that they can send."""
        return tuple(
            wish[name] if name in wish and self.fits(name, wish[name]) else old
            for name, old in zip(self.shapes, otherwise, strict=True)
        )

    def gradients(self, codecs: Codecs) -> tuple[Gradient, ...]:
        """Settings of the gradients. Each has a residual, so that codecs can change."""
        return tuple(
            Gradient(name, shape, parse_codec(text), Feedback("residual"), seed=k)
            for k, ((name, shape), text) in enumerate(
                zip(self.shapes.items(), codecs, strict=True)
            )
        )

    def states(self, codecs: Codecs) -> list[Any]:
        """States of all workers before the first step."""
        fresh = [init_state(g, WORKERS) for g in self.gradients(codecs)]
        return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), fresh)

    def recoded(self, old: list[Any], before: Codecs, after: Codecs) -> list[Any]:
        """States for other codecs: residuals are kept, and codecs' states are reset."""
        fresh = self.states(after)
        return [
            {
                "residual": mine["residual"],
                "codec": mine["codec"] if a == b else new["codec"],
            }
            for mine, new, a, b in zip(old, fresh, before, after, strict=True)
        ]

    def nbytes(self, codecs: Codecs) -> list[float]:
        """Bytes that one worker sends for each gradient."""
        found = self.gradients(codecs)
        return [g.codec.wire_bytes(g.shape, WORKERS) for g in found]

    def program(self, codecs: Codecs) -> Callable[..., Any]:
        """``(state, states, batch, step) -> (state, states, sums)``, compiled."""
        key = codecs, self.signals
        if key in self._programs:
            return self._programs[key]
        gradients, links = self.gradients(codecs), MeshLinks((AXIS,), WORKERS)

        def one(params: Any, states: Any, data: Any, step: Any) -> Any:
            grads = jax.grad(self.first.eval_loss)(params, data)
            worker = jax.lax.axis_index(AXIS)
            leaves = jax.tree.leaves(grads)
            signals = self.signals
            return synchronise(
                gradients, leaves, states, links, worker, step, signals=signals
            )

        def step_of(state: Any, states: Any, data: Any, step: Any) -> Any:
            split = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), data)
            workers = jax.vmap(one, in_axes=(None, 0, 0, None), axis_name=AXIS)
            totals, states, sums = workers(state.params, states, split, step)
            means = [total[0] / WORKERS for total in totals]
            grads = jax.tree.unflatten(self.tree, means)
            return state.apply_gradients(grads=grads), states, jnp.sum(sums, axis=0)

        self._programs[key] = jax.jit(step_of, donate_argnums=(0, 1))
        return self._programs[key]

    def begin(self, seed: int) -> Any:
        """The initial train state, with the functions of the compiled step."""
        params = self.build(seed).create().params
        return self.first.create().replace(params=params)

    def run(
        self,
        text: str,
        steps: int,
        *,
        seed: int = 0,
        compute_s: float = 0.0,
        bandwidth: float = math.inf,
        policy: Policy | None = None,
    ) -> Curve:
        """Trains, beginning with one codec, with or without a policy.

        Args:
          text: the codec; with a policy, the codec of the first step.
          steps: number of steps.
          seed: seed of the model and the batches.
          compute_s: seconds of a step without communication.
          bandwidth: bytes per second that one worker can send.
          policy: changes codecs.
        """
        data, state = self.build(seed), self.begin(seed)
        dense = ("dense",) * len(self.shapes)
        codecs = self.codecs(dict.fromkeys(self.shapes, text), dense)
        states, tally = self.states(codecs), Tally(compute_s, bandwidth)
        losses, carried = list[float](), 0.0
        self.signals = bool(getattr(policy, "signals", False))
        beside = self.sketch_bytes() if self.signals else 0.0
        for k in range(steps):
            function = self.program(codecs)
            state, states, sums = function(state, states, data.batch(k), jnp.int32(k))
            nbytes = sum(self.nbytes(codecs)) + beside
            carried = carried + sums[:, NON_FINITE + 1 :]
            tally.add([codecs[i] for i in self.large], nbytes)
            if (k + 1) % EVAL_EVERY == 0:
                losses.append(float(self.evaluate(state.params, self.held_out)))
                tally.mark()
            if policy is not None and (k + 1) % policy.every == 0:
                reports = self.reports(codecs, np.asarray(sums), np.asarray(carried))
                carried = 0.0
                seconds = tally.lap_s() / policy.every
                wish = policy.observe(Observation(k + 1, seconds, reports, True))
                after = self.codecs(dict(wish or {}), codecs)
                states = self.recoded(states, codecs, after)
                codecs = after
        return tally.curve(losses)

    def sketch_bytes(self) -> float:
        """Bytes that one worker sends for the sketches, in a ring."""
        return 8 * (WORKERS - 1) / WORKERS * WIDTH * len(self.large)

    def reports(
        self, codecs: Codecs, sums: np.ndarray, carried: np.ndarray
    ) -> dict[str, GradientReport]:
        """The reports that a step of `autopar.parallelize` would make."""
        dense = self.nbytes(("dense",) * len(codecs))
        rows = zip(
            self.shapes, codecs, self.nbytes(codecs), dense, sums, carried, strict=True
        )
        return {
            name: GradientReport(
                codec=text,
                elements=math.prod(self.shapes[name]),
                wire_bytes=nbytes,
                dense_bytes=of_dense,
                norm=math.sqrt(row[WANTED]),
                relative_error=math.sqrt(row[ERROR] / (row[WANTED] or 1.0)),
                gain=float(row[SENT] / row[WANTED]) if row[WANTED] else 1.0,
                residual_norm=math.sqrt(row[RESIDUAL]),
                gradient_norm=math.sqrt(row[GRADIENT]),
                signal=Signal.of(signal),
            )
            for name, text, nbytes, of_dense, row, signal in rows
        }

    def compute_s(self, steps: int = 15) -> float:
        """Seconds of a dense step of one worker; see the module."""
        codecs = ("dense",) * len(self.shapes)
        state, states = self.begin(0), self.states(codecs)
        times: list[float] = []
        for k in range(steps + 1):
            data, start = self.first.batch(k), time.perf_counter()
            state, states, sums = self.program(codecs)(
                state, states, data, jnp.int32(k)
            )
            jax.block_until_ready((state, sums))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / 2


def gravac_study(
    name: str,
    trainer: Trainer,
    steps: int,
    most_steps: int,
    links_mbit: Sequence[float],
    compute_s: float | None = None,
    gains: Sequence[str] = tuple(dict(GAINS)),
    rate: Callable[[int], Any] | None = None,
) -> None:
    """Compares GraVAC with the static levels that it can choose.

    If ``rate`` falls, the gain of Adam's signals is tried without and with ``rate``.
    """
    levels = topk_levels(10, 1000)
    compute_s = trainer.compute_s() if compute_s is None else compute_s
    static = {text: trainer.run(text, most_steps) for text in ("dense", *levels)}
    finals = sorted(static[text].after(steps) for text in levels)
    targets = (SLACK * finals[0], SLACK * finals[-1])
    print(
        f"\n{name}: {most_steps} steps, {1e3 * compute_s:.0f} ms of compute a step; "
        f"targets {targets[0]:.3f} and {targets[1]:.3f}.\n"
    )
    workloads.row(
        "Mbit/s", "codec", "final loss", "MB sent", "s to target 1", "to target 2",
        "best static / it, 1", "2",
    )  # fmt: skip
    workloads.row(*["---"] * 8)
    for mbit in links_mbit:
        link = mbit * MBIT
        runs = {t: timed(c, compute_s, link) for t, c in static.items()}
        best = [min(runs[t].reach_s(x) for t in levels) for x in targets]
        for label, options in variants(gains, rate, most_steps).items():
            runs[f"GraVAC, {label}"] = trainer.run(
                levels[0],
                most_steps,
                compute_s=compute_s,
                bandwidth=link,
                policy=GraVAC(levels=levels, **options),
            )
        for text, curve in runs.items():
            reached = [curve.reach_s(target) for target in targets]
            ratios = [f"{b / r:.2f}" for b, r in zip(best, reached, strict=True)]
            label = f"{text} ({mix(curve)})" if text.startswith("GraVAC") else text
            workloads.row(
                mbit, label, f"{curve.final:.3f}", f"{curve.nbytes[-1] / 1e6:.1f}",
                *map(seconds, reached), *ratios,
            )  # fmt: skip


def variants(
    gains: Sequence[str], rate: Callable[[int], Any] | None, steps: int
) -> dict[str, dict[str, Any]]:
    """Name -> options of a policy to try."""
    found: dict[str, dict[str, Any]] = {}
    for gain_of, epsilon in (x for x in GAINS if x[0] in gains):
        options = BY_SIGNALS if "signal" in gain_of else {"window": WINDOW}
        options = {**options, "gain_of": gain_of, "epsilon": epsilon}
        if gain_of == "signal-updates":
            options["b2"] = language_model.B2
        found[f"{gain_of}, epsilon {epsilon}"] = options
        if gain_of == "signal-updates" and rate is not None:
            by_rate = {**options, **BY_RATE, "rate": rate, "steps": steps}
            found[f"{gain_of}, epsilon {epsilon}, rate"] = by_rate
    return found


def accordion_study(trainer: Trainer, steps: int, seeds: int) -> None:
    """Compares Accordion with its two levels."""
    low, high = "bf16", "powersgd"
    runs: dict[str, list[Curve]] = {low: [], high: [], "Accordion": []}
    for seed in range(seeds):
        for text in (low, high):
            runs[text].append(trainer.run(text, steps, seed=seed))
        # A window has 10 of 300 steps. The paper's windows have 10 of 300 epochs.
        policy = Accordion(low=low, high=high, every=2, window=5, together=True)
        curve = trainer.run(low, steps, seed=seed, policy=policy)
        runs["Accordion"].append(curve)
    finals = {text: [c.final for c in curves] for text, curves in runs.items()}
    nbytes = {
        text: statistics.fmean(c.nbytes[-1] for c in curves)
        for text, curves in runs.items()
    }
    print(f"\nAccordion on the GPT, {steps} steps, {seeds} seeds.\n")
    workloads.row(
        "codec", "final loss", "one sigma", "worse than low", "MB sent",
        "low's bytes / its", "used",
    )  # fmt: skip
    workloads.row(*["---"] * 7)
    for text, curves in runs.items():
        mean = statistics.fmean(finals[text])
        worse = mean - statistics.fmean(finals[low])
        workloads.row(
            text, f"{mean:.3f}", f"{statistics.stdev(finals[text]):.3f}",
            f"{worse:+.3f}", f"{nbytes[text] / 1e6:.1f}",
            f"{nbytes[low] / nbytes[text]:.1f}", mix(curves[0]),
        )  # fmt: skip


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("gpt", "n-grams", "accordion"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most-steps", type=int, default=700)
    parser.add_argument("--accordion-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--mbit", type=float, nargs="+", default=BANDWIDTHS_MBIT)
    parser.add_argument("--compute-ms", type=float, help="of a step; else measured")
    parser.add_argument("--gains", nargs="+", default=tuple(dict(GAINS)),
                        choices=tuple(dict(GAINS)))  # fmt: skip
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    gpt = Trainer(lambda seed: language_model.build(seed, GPT))
    models = {"gpt": gpt, "n-grams": Trainer(ngrams)}
    compute_s = None if given.compute_ms is None else 1e-3 * given.compute_ms
    for name, model in models.items():
        if given.only in (None, name):
            gravac_study(
                name, model, given.steps, given.most_steps, given.mbit, compute_s,
                given.gains, RATES.get(name),
            )  # fmt: skip
    if given.only in (None, "accordion"):
        accordion_study(gpt, given.accordion_steps, given.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
