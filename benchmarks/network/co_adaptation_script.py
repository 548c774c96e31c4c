"""The training script of `co_adaptation.py`: a small model, trained to a target loss.

Usage: co_adaptation_script.py OUT MODEL SEED ARM RATE_MBIT TARGET
The models are small forms of the examples. The devices are said to compute at
`FLOPS_PER_S`, because all hosts share this machine's cores: before a step, each process
sleeps for the seconds of work that the plan predicts for its device, less the CPU
seconds of its last step. Bytes, codecs, losses, plans and all decisions are real.
The first process of a world appends a line to OUT for every step: the number of the
step, the smoothed loss, when the step had ended, the number of devices, the progress in
rows of the base batch, and the rows of the next batch. It writes the ledger beside OUT.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import autopar
from autopar.goodput import NoiseOptions, scale_updates

example_data: Any = importlib.import_module("example_data")

FLOPS_PER_S = 1e9
"""Of a device: all operators, not only matrix products."""

CODECS = (
    "int8:rounding=stochastic",
    "int4:rounding=stochastic",
    "randk:unbiased=true,ratio=0.1",
)
MOST = 16
"""Rows of the largest batch over those of the base batch."""

WINDOW = 16
"""The loss is smoothed over this many base batches."""

ARMS = ("all", "batch", "plan", "codecs")
"""What is frozen: nothing, or the named part."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: the example's name and options, its base batch, and its learning.

    Attributes:
      example: name of the example's module.
      options: the example's options.
      base: rows of the base batch.
      optimizer: the optimizer of the base batch.
      rule: how its learning rate follows the batch.
      data: ``data(seed, rows)`` yields batches.
      target: the smoothed loss at which a job ends (`co_adaptation.py --targets`).
    """

    example: str
    options: dict[str, Any]
    base: int
    optimizer: Callable[[], Any]
    rule: Any
    data: Callable[..., Any]
    target: float

    def training(self) -> Any:
        """The example's step, state and batches."""
        module: Any = importlib.import_module(self.example)
        return module.training(batch=self.base, **self.options)


_SIZES = tuple(max(32768 >> t, 64) for t in range(6))

MODELS = {
    "gpt": Model(
        "gpt", {"layers": 2, "d_model": 128, "heads": 4, "seq": 32, "vocab": 128}, 16,
        lambda: optax.adam(2e-3), "adascale-root",
        lambda seed, rows: example_data.text_batches(rows, 32, seed), 2.621,
    ),
    "resnet": Model(
        "resnet", {"stages": 3, "blocks": 1, "width": 32, "size": 16, "classes": 8}, 16,
        lambda: optax.sgd(0.05), "adascale",
        lambda seed, rows: example_data.image_batches(rows, 16, 8, seed), 0.526,
    ),
    "recommendation": Model(
        "recommendation", {"tables": 6, "rows": 32768, "width": 16, "hidden": 512}, 128,
        lambda: optax.sgd(0.01), "adascale",
        lambda seed, rows: example_data.click_batches(rows, _SIZES, 13, seed), 0.553,
    ),
}  # fmt: skip


def step_of(model: Model) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The train step and the function that creates its state.

    The state holds the smoothed loss, so that all processes know it wherever the job
    goes on.
    """
    made = model.training()
    tx = scale_updates(model.optimizer(), model.rule, base_batch=model.base)
    create = functools.partial(made.create_state, optimizer=tx)

    def step(state: Any, batch: Any) -> Any:
        inner, loss = made.step(state["train"], batch)
        rows = len(jax.tree.leaves(batch)[0])
        keep = math.exp(-rows / (WINDOW * model.base))
        mean = keep * state["mean"] + (1 - keep) * loss
        return {"train": inner, "mean": mean}, {"loss": loss, "mean": mean}

    def create_state(key: jax.Array) -> Any:
        return {"train": create(key), "mean": jnp.asarray(10.0)}

    return step, create_state


def cluster_of(rate_mbit: float, hosts: int = 1) -> autopar.Cluster:
    """Hosts with one device each, on links of a rate."""
    found = autopar.Cluster.parse(f"{hosts}x1:cpu,network={rate_mbit:g}Mb/s")
    device = dataclasses.replace(
        found.device,
        peak_flops_per_s=(("float32", FLOPS_PER_S),),
        vector_flops_per_s=FLOPS_PER_S,
        matmul_efficiency=1.0,
    )
    return dataclasses.replace(found, device=device)


def plan_options(arm: str) -> dict[str, Any]:
    """The planner's options of an arm: data parallelism where the plan is frozen."""
    pins = {"batch/*": PartitionSpec("data"), "state/*": PartitionSpec()}
    kept = {"axis_names": ("data",), "pins": pins}
    shared = {"stages": 1, "max_axes": 1, "seconds": 1}
    return {**shared, **kept} if arm == "plan" else shared


def train_options(arm: str, model: Model) -> dict[str, Any]:
    """The options of `autopar.train` of an arm."""
    return {
        "base_batch": model.base,
        "max_batch": model.base * (1 if arm == "batch" else MOST),
        "codecs": () if arm == "codecs" else CODECS,
    }


def ledger_of(out: str) -> pathlib.Path:
    """The path of the ledger of a job that writes its steps to ``out``."""
    path = pathlib.Path(out)
    return path.with_name(f"ledger-{path.stem}")


class Source:
    """Batches by their position; the first request of each step is paced.

    Attributes:
      work_s: seconds of a step's work on this process's device; 0 before a step ran.
      step: number of the next step.
    """

    def __init__(self, model: Model, seed: int) -> None:
        """Draws nothing yet."""
        self._model, self._seed = model, seed
        self.work_s, self.step = 0.0, 0
        self._paced, self._cpu_s = -1, time.process_time()

    def __call__(self, position: int, rows: int) -> Any:
        """The rows from a position; sleeps for the work of the step."""
        if self.step != self._paced:
            self._paced = self.step
            before, self._cpu_s = self._cpu_s, time.process_time()
            time.sleep(max(self.work_s - (self._cpu_s - before), 0.0))
        return rows_at(self._model, self._seed, position, rows)


@functools.lru_cache(maxsize=64)
def _block(model: str, seed: int, first: int) -> Any:
    """The base batch that begins with row ``first``."""
    return next(MODELS[model].data((seed, first), MODELS[model].base))


def rows_at(model: Model, seed: int, position: int, rows: int) -> Any:
    """Rows of the data from a position; a row does not depend on how many are read."""
    first = position - position % model.base
    starts = range(first, position + rows, model.base)
    blocks = [_block(model.example, seed, k) for k in starts]
    skip = position - first
    return jax.tree.map(lambda *x: np.concatenate(x)[skip : skip + rows], *blocks)


def main() -> None:
    """Trains to the target loss."""
    out, name, seed, arm, rate, target = sys.argv[1:]
    model = MODELS[name]
    step, create_state = step_of(model)
    source = Source(model, int(seed))
    run = autopar.train(
        autopar.parallelize(
            step,
            cluster=cluster_of(float(rate)),
            noise_scale=NoiseOptions(
                base_batch=model.base,
                decay=0.99,
                preconditioned=model.rule == "adascale-root",
            ),
            programs=16,
            **plan_options(arm),
        ),
        create_state,
        source,
        args=(jax.random.key(int(seed)),),
        until=lambda done: float(done.result["mean"]) <= float(target),
        ledger=ledger_of(out),
        progress=False,
        **train_options(arm, model),
    )
    with open(out, "a") as file:
        for done in run:
            source.work_s, source.step = run.plan.predicted.compute_s, run.step
            if jax.process_index() == 0:
                devices = math.prod(run.plan.axis_sizes)
                mean = float(done.result["mean"])
                line = [done.step, mean, time.time(), devices]
                line += [run.progress, run.batch_size]
                print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
