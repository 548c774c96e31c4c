"""Step-ahead error feedback against plain error feedback, on equal and unequal shards.

    python benchmarks/network/step_ahead.py [--seeds 0 1 2] [--tune] [--table]

A GPT of 0.4 M parameters is trained by `WORKERS` replicas that synchronise after every
step (`autopar.local_steps`). *Alike*: every worker draws from the whole text. *Apart*:
each has a quarter of its own. The loss is that of held-out text of all quarters, at the
parameters that the workers have in common. The learning rate is the best of `RATES` for
dense updates with seed 9, on alike shards. `--tune` prints these losses.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import language_model
import numpy as np
import optax
import workloads
from language_model import Sizes

import autopar
from autopar.runtime.local.outer import MEAN
from autopar.runtime.local.rules import StepAhead

DATA = pathlib.Path(__file__).resolve().parents[2] / "docs/data/step_ahead.json"
WORKERS, STEPS, ROWS = 4, 400, 16
RATES = {"momentum": (0.1, 0.03, 0.01, 0.003), "adam": (1e-2, 3e-3, 1e-3)}
BEST = {"momentum": 0.01, "adam": 1e-3}
SIZES = Sizes(layers=2, d_model=128, heads=4, seq=32, batch=ROWS)
DENSE = "dense"
FEEDBACKS: dict[str, StepAhead | None] = {
    "plain": None,
    "ahead": StepAhead(average=0),
    "ahead, averaged": StepAhead(),
    "half ahead": StepAhead(part=0.5, average=0),
}
CODECS = {
    "momentum": ("topk:ratio=0.01",),
    "adam": ("topk:ratio=0.01",),
}


def rows_of(seed: int, step: int, *, apart: bool) -> dict[str, Any]:
    """The batch of a step; the rows of a worker follow each other."""
    tokens = language_model.text().train
    random = np.random.default_rng((seed, step))
    part = len(tokens) // WORKERS
    if apart:
        own = random.integers(0, part - SIZES.seq - 1, (WORKERS, ROWS // WORKERS))
        starts = (own + part * np.arange(WORKERS)[:, None]).reshape(-1)
    else:
        starts = random.integers(0, len(tokens) - SIZES.seq - 1, ROWS)
    return language_model.windows(tokens, starts, SIZES.seq)


def optimizer_of(name: str, rate: float) -> optax.GradientTransformation:
    """An optimizer whose rate falls to a tenth."""
    falling = optax.warmup_cosine_decay_schedule(0.0, rate, 20, STEPS, rate / 10)
    if name == "adam":
        return optax.adam(falling, b2=language_model.B2)
    return optax.sgd(falling, momentum=0.9)


def trained(
    optimizer: str, rate: float, codec: str, feedback: str, seed: int, *, apart: bool
) -> float:
    """The held-out loss at the end."""
    built = language_model.build(seed, SIZES)

    def create() -> Any:
        state = built.create()
        tx = optimizer_of(optimizer, rate)
        return state.replace(tx=tx, opt_state=tx.init(state.params))

    made = autopar.local_steps(
        built.step,
        every=1,
        outer=MEAN,
        codec=codec,
        feedback=FEEDBACKS[feedback],
        cluster=f"{WORKERS}x1:cpu",
    )
    state = made.init(create, batch=rows_of(seed, 0, apart=apart))
    for k in range(STEPS):
        state, _ = made(state, rows_of(seed, k, apart=apart))
    params = jax.device_get(made.agreed(state).params)
    held_out = language_model.evaluation_batch(SIZES)
    return float(jax.jit(built.eval_loss)(params, held_out))


def arms() -> list[tuple[str, str, str]]:
    """Optimizer, codec and feedback of every arm."""
    found = [(optimizer, DENSE, "plain") for optimizer in CODECS]
    return found + [
        (optimizer, codec, feedback)
        for optimizer, codecs in CODECS.items()
        for codec in codecs
        for feedback in FEEDBACKS
    ]


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the mean losses over seeds."""
    workloads.row("optimizer", "codec", "feedback", "alike", "apart", "seeds")
    workloads.row(*["---"] * 6)
    for arm in arms():
        cells: list[str] = []
        count = 0
        for apart in (False, True):
            losses = [
                r["loss"] for r in rows
                if (r["optimizer"], r["codec"], r["feedback"]) == arm
                and r["apart"] is apart
            ]  # fmt: skip
            count = len(losses)
            sd = f" +- {statistics.stdev(losses):.3f}" if count > 1 else ""
            cells.append(f"{statistics.fmean(losses):.3f}{sd}" if losses else "")
        workloads.row(*arm, *cells, count)


def main() -> None:
    """Trains what is not in the file, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tune", action="store_true", help="losses of all rates")
    parser.add_argument("--table", action="store_true", help="only prints the file")
    parser.add_argument("--out", type=pathlib.Path, default=DATA)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", WORKERS)
    if given.tune:
        for name, rates in RATES.items():
            run = functools.partial(trained, name, codec=DENSE, feedback="plain")
            for rate in rates:
                print(name, rate, run(rate=rate, seed=9, apart=False), flush=True)
        return
    held: list[dict[str, Any]] = []
    if given.out.exists():
        held = json.loads(given.out.read_text(encoding="utf-8"))["rows"]
    names = ("optimizer", "codec", "feedback", "seed", "apart")
    there = {tuple(row[name] for name in names) for row in held}
    for seed in given.seeds if not given.table else ():
        for arm in arms():
            for apart in (False, True):
                if (*arm, seed, apart) in there:
                    continue
                optimizer, codec, feedback = arm
                rate = BEST[optimizer]
                loss = trained(optimizer, rate, codec, feedback, seed, apart=apart)
                held.append(
                    dict(zip(names, (*arm, seed, apart), strict=True)) | {"loss": loss}
                )
                data = {
                    "command": "python benchmarks/network/step_ahead.py",
                    "steps": STEPS, "rates": BEST,
                    "rows": held,
                }  # fmt: skip
                given.out.write_text(json.dumps(data), encoding="utf-8")
    report(held)


if __name__ == "__main__":
    main()
