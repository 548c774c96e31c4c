"""Trains a small language model by data parallelism, with gradients sent by codecs.

Four devices are simulated in one process. The model is a smaller version of that of the
network benchmark (`benchmarks/network/language_model.py`). The step is one of
`autopar.parallelize` under a plan that is pinned to data parallelism. Therefore losses
and bytes are those of four machines, but seconds are not.

This module must be imported before JAX looks for devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import autopar

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "network"))
import language_model

DEVICES = 4
# The simulated devices share the cores, so more threads would only wait. JAX reads this
# variable when it first looks for devices.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={DEVICES}",
        "--xla_cpu_multi_thread_eigen=false",
    )
)

SIZES = language_model.Sizes(
    layers=2, d_model=128, heads=4, seq=16, batch=64, learning_rate=3e-3
)
STEPS = 250
EVAL_ROWS = 512
CLUSTER = f"{DEVICES}x1:cpu,network=100Gb/s"

State = Any
Optimizer = Literal["adam", "sgd"]
# Called with the number of the next step, and the state.
Hook = Callable[[int, State], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
      loss: loss on the held-out text after the last step, in nats per character.
      nbytes: bytes that one worker sends in a step, averaged over the steps.
      last_nbytes: bytes that one worker sends in the last step.
    """

    loss: float
    nbytes: float
    last_nbytes: float


class Trainer:
    """The model, its data-parallel plan, and a compiled step for each codec."""

    def __init__(
        self,
        steps: int = STEPS,
        sizes: language_model.Sizes = SIZES,
        optimizer: Optimizer = "adam",
    ) -> None:
        """Plans the step; programs are compiled when they first run.

        Args:
          steps: number of steps of each run, over which the learning rate decays.
          sizes: sizes of the model.
          optimizer: AdamW, or SGD with momentum, which is linear in the gradients.
        """
        self.steps = steps
        self.sizes = sizes._replace(decay_steps=steps)
        self.workload = language_model.build(0, self.sizes)
        if optimizer == "sgd":
            self.workload = with_momentum(self.workload)
        self._evaluate = jax.jit(self.workload.eval_loss)
        self._held_out = language_model.evaluation_batch(self.sizes, EVAL_ROWS)
        self._plans: dict[str, autopar.Plan] = {}
        self._steps: dict[str, Any] = {}
        self.base = autopar.plan(
            *self._arguments(),
            cluster=autopar.Cluster.parse(CLUSTER),
            max_axes=1,
            axis_names=("data",),
            pins={"state/*": PartitionSpec(), "data/*": PartitionSpec("data")},
        )

    def _arguments(self) -> tuple[Any, ...]:
        return self.workload.step, self.create(0), self.workload.batch(0)

    def create(self, seed: int) -> State:
        """The initial state, with the functions of the compiled step."""
        state = self.workload.create()
        params = language_model.build(seed, self.sizes).create().params
        # Flax's step counter is a Python int at first. Without this line, the step
        # would be compiled twice.
        return state.replace(params=params, step=jnp.int32(0))

    def plan(self, codec: str) -> autopar.Plan:
        """The data-parallel plan with a codec.

        Raises:
          RuntimeError: a gradient is not summed over all devices.
        """
        if codec in self._plans:
            return self._plans[codec]
        plan = autopar.plan(
            *self._arguments(),
            cluster=autopar.Cluster.parse(CLUSTER),
            compression=codec,
            layouts=self.base,
        )
        leaves = len(jax.tree.leaves(jax.eval_shape(self.workload.create).params))
        summed = [g for g in plan.gradients if g.codec and g.axes == ("data",)]
        if plan.axis_sizes != (DEVICES,) or len(summed) != leaves:
            raise RuntimeError(
                f"the plan is not data parallel: mesh {plan.axis_sizes}, "
                f"{len(summed)} of {leaves} gradients are summed over it."
            )
        self._plans[codec] = plan
        return plan

    def compiled(self, codec: str) -> Any:
        """The parallel step that starts with a codec; all runs share it."""
        if codec not in self._steps:
            plan = self.plan(codec)
            self._steps[codec] = autopar.parallelize(self.workload.step, plan=plan)
        return self._steps[codec]

    def codecs(self, codec: str) -> dict[str, str]:
        """Gradient -> the codec in the plan of a codec."""
        return {g.name: g.codec for g in self.plan(codec).gradients}

    def run(
        self,
        codec: str,
        seed: int,
        *,
        warm_up: int = 0,
        hook: Hook | None = None,
    ) -> Run:
        """Trains from the start.

        Args:
          codec: codec of all gradients that are large enough, after the warm-up.
          seed: seed of the initialisation and the batches.
          warm_up: number of steps at the start with dense gradients.
          hook: called before each step; may recode ``compiled(codec)``.
        """
        step = self.compiled(codec)
        step.compression_state = None
        start = self.codecs("dense" if warm_up else codec)
        if step_codecs(step) != start:
            self._recode(step, start, seed)
        state, batch = self.create(seed), self._batches(seed)
        sent = 0.0
        for k in range(self.steps):
            if warm_up and k == warm_up:
                step.recode(self.codecs(codec))
            if hook is not None:
                hook(k, state)
            state, metrics = step(state, batch(k))
            # If the programs of many steps run at once, collectives of this process can
            # wait for each other's threads.
            jax.block_until_ready(metrics)
            sent += sent_bytes(step.plan)
        return Run(self.loss(state), sent / self.steps, sent_bytes(step.plan))

    def _recode(self, step: Any, codecs: Mapping[str, str], seed: int) -> None:
        """Changes the codecs of a step, after planning it if needed."""
        step.prepare(self.create(seed), self._batches(seed)(0))
        step.recode(codecs)

    def _batches(self, seed: int) -> Callable[[int], Any]:
        return functools.partial(language_model.batch, self.sizes, seed)

    def batch(self, seed: int, k: int) -> Any:
        """The batch of a step, for all workers together."""
        return self._batches(seed)(k)

    def loss(self, state: State) -> float:
        """The held-out loss, in nats per character."""
        params = jax.tree.map(np.asarray, state.params)
        return float(self._evaluate(params, self._held_out))

    @functools.cached_property
    def partial_gradients(self) -> Callable[[State, Any], dict[str, np.ndarray]]:
        """Returns ``f(state, batch)``: each worker's partial gradients, (n, *shape).

        The partial gradients are those of the mean loss over all rows, as the plan sums
        them.
        """

        def one(params: Any, rows: Any) -> Any:
            grads = jax.grad(self.workload.eval_loss)(params, rows)
            return jax.tree.map(lambda g: g / DEVICES, grads)

        mapped = jax.jit(jax.vmap(one, in_axes=(None, 0)))

        def call(state: State, batch: Any) -> dict[str, np.ndarray]:
            split = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
            grads = mapped(jax.tree.map(np.asarray, state.params), split)
            flat, _ = jax.tree_util.tree_flatten_with_path(grads)
            return {_path(path): np.asarray(leaf) for path, leaf in flat}

        return call


def with_momentum(workload: language_model.Workload) -> language_model.Workload:
    """The same workload with SGD of momentum 0.9 and the same learning rates."""
    sizes = workload.sizes
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        sizes.learning_rate,
        sizes.warmup_steps,
        sizes.decay_steps,
        end_value=sizes.learning_rate / 10,
    )
    optimizer = optax.sgd(rate, momentum=0.9)

    def create() -> State:
        state = workload.create()
        fresh = optimizer.init(state.params)
        return state.replace(tx=optimizer, opt_state=fresh)

    return workload._replace(create=create)


def parameters(trainer: Trainer) -> int:
    """The number of the model's parameters."""
    return language_model.parameters(trainer.workload)


def _path(path: Sequence[Any]) -> str:
    """A parameter's name as plans write it."""
    return "/".join(["state", "params", *(str(key.key) for key in path)])


def step_codecs(step: Any) -> dict[str, str]:
    """The codec of each gradient of a parallel step."""
    return {g.name: g.codec for g in step.plan.gradients}


def sent_bytes(plan: autopar.Plan) -> float:
    """Bytes that one worker sends for all gradients of a step."""
    return math.fsum(g.wire_bytes for g in plan.gradients)


def spread(losses: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation."""
    return statistics.fmean(losses), statistics.stdev(losses)
