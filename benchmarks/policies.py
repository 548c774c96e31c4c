"""Policies against the static codecs that they choose from: real training, modelled time.

    python benchmarks/policies.py                 # both tables
    python benchmarks/policies.py --only gravac

A small GPT reads Python's own documentation and library, as in the network benchmark
(`benchmarks/network/language_model.py`). Four workers are simulated in one process by
`jax.vmap` and sum their gradients through `autopar.compression.synchronise`, so that
losses, bytes and all that a policy sees are real. There is no network here: a step is
taken to last

    seconds of a dense step / 2 + bytes that one worker sends / bandwidth

with the measured seconds of the four workers on this machine's two cores, of which
one worker alone on a machine would take half. Encoding is counted as nothing: see
`benchmarks/codec_cost.py` and `benchmarks/selection.py` for that, and
`benchmarks/network` for real links.

A run's time to the target is that of the first evaluation at which the evaluation
loss, averaged over three, is not above the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
import workloads

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "network"))
import language_model

from autopar.compression.exchange import MeshLinks, wire_bytes
from autopar.compression.feedback import Feedback
from autopar.compression.policies import Accordion, GraVAC, topk_levels
from autopar.compression.policy import GradientReport, Observation, Policy
from autopar.compression.registry import parse_codec
from autopar.compression.synchronise import (
    ERROR,
    RESIDUAL,
    SENT,
    WANTED,
    Gradient,
    init_state,
    synchronise,
)

WORKERS = 4
AXIS = "workers"
EVAL_EVERY = 10
# A gradient with fewer elements, or a vector, is dense whatever the codec.
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
      losses: evaluation losses, after every `EVAL_EVERY` steps.
      nbytes: that one worker has sent by then.
      time_s: modelled, by then.
      codecs: the share of the steps that each codec was used, by text.
    """

    losses: tuple[float, ...]
    nbytes: tuple[float, ...]
    time_s: tuple[float, ...]
    codecs: dict[str, float]

    @property
    def final(self) -> float:
        """Mean of the last three evaluation losses."""
        return statistics.fmean(self.losses[-3:])

    def reach_s(self, target: float) -> float:
        """Modelled time to a loss, infinite if it was not reached."""
        for k in range(2, len(self.losses)):
            if statistics.fmean(self.losses[k - 2 : k + 1]) <= target:
                return self.time_s[k]
        return math.inf


class Trainer:
    """The model and its compiled steps, one for each set of codecs."""

    def __init__(self, sizes: language_model.Sizes) -> None:
        """Builds the model; steps are compiled when they are needed."""
        self.sizes = sizes
        self.built = language_model.build(0, sizes)
        shapes = jax.eval_shape(self.built.create).params
        flat, self.tree = jax.tree_util.tree_flatten_with_path(shapes)
        self.shapes = {jax.tree_util.keystr(p): leaf.shape for p, leaf in flat}
        self.evaluate = jax.jit(self.built.eval_loss)
        self.held_out = language_model.evaluation_batch(sizes)

    def codecs(self, text: str) -> dict[str, str]:
        """One codec for all that are worth one."""
        return {
            name: text if self._fits(name, text) else "dense" for name in self.shapes
        }

    def _fits(self, name: str, text: str) -> bool:
        shape = self.shapes[name]
        if math.prod(shape) < SMALL or len(shape) < 2:
            return False
        return not parse_codec(text).check(shape, scatter=False)

    @functools.cache
    def _gradients(self, codecs: tuple[str, ...]) -> tuple[Gradient, ...]:
        return tuple(
            Gradient(name, shape, parse_codec(text), _feedback(text), seed=k)
            for k, ((name, shape), text) in enumerate(
                zip(self.shapes.items(), codecs, strict=True)
            )
        )

    def states(self, codecs: tuple[str, ...]) -> list[Any]:
        """States of all workers before the first step."""
        fresh = [init_state(g, WORKERS) for g in self._gradients(codecs)]
        return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), fresh)

    def recoded(
        self, old: list[Any], before: tuple[str, ...], after: tuple[str, ...]
    ) -> list[Any]:
        """States for other codecs: residuals stay, those of other codecs start."""
        fresh = self.states(after)
        return [
            {
                "residual": mine["residual"],
                "codec": mine["codec"] if a == b else new["codec"],
            }
            for mine, new, a, b in zip(old, fresh, before, after, strict=True)
        ]

    @functools.cache
    def nbytes(self, codecs: tuple[str, ...]) -> tuple[float, ...]:
        """That one worker sends of each gradient."""
        return tuple(
            wire_bytes(g.codec, g.shape, WORKERS) for g in self._gradients(codecs)
        )

    @functools.cache
    def program(self, codecs: tuple[str, ...]) -> Callable[..., Any]:
        """``(state, states, batch, step) -> (state, states, sums)``, compiled."""
        gradients = self._gradients(codecs)
        links = MeshLinks((AXIS,), WORKERS)

        def one(params: Any, states: Any, data: Any, step: Any) -> Any:
            grads = jax.grad(functools.partial(self.built.eval_loss))(params, data)
            leaves = jax.tree.leaves(grads)
            worker = jax.lax.axis_index(AXIS)
            return synchronise(gradients, leaves, states, links, worker, step)

        def step_of(state: Any, states: Any, data: Any, step: Any) -> Any:
            split = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), data)
            totals, states, sums = jax.vmap(
                one, in_axes=(None, 0, 0, None), axis_name=AXIS
            )(state.params, states, split, step)
            means = [total[0] / WORKERS for total in totals]
            grads = jax.tree.unflatten(jax.tree.structure(state.params), means)
            return state.apply_gradients(grads=grads), states, jnp.sum(sums, axis=0)

        return jax.jit(step_of, donate_argnums=(0, 1))

    def run(
        self,
        text: str,
        seed: int,
        steps: int,
        *,
        compute_s: float = 0.0,
        bandwidth: float = math.inf,
        policy: Policy | None = None,
    ) -> Curve:
        """Trains from one codec on, with a policy or without.

        Args:
          text: the codec, of the first step if there is a policy.
          seed: of the model and of the batches.
          steps: number of steps.
          compute_s: of a step, without communication.
          bandwidth: bytes per second that one worker can send.
          policy: changes codecs.
        """
        workload = language_model.build(seed, self.sizes)
        # One that was built before: it holds the functions that are compiled.
        state = self.built.create().replace(params=workload.create().params)
        codecs = tuple(self.codecs(text).values())
        states = self.states(codecs)
        sent, clock, since, losses = 0.0, 0.0, 0.0, list[float]()
        marks: list[tuple[float, float]] = []
        used: dict[str, float] = {}
        for k in range(steps):
            data = workload.batch(k)
            state, states, sums = self.program(codecs)(
                state, states, data, jnp.int32(k)
            )
            nbytes = self.nbytes(codecs)
            sent += sum(nbytes)
            clock += compute_s + sum(nbytes) / bandwidth
            _count(used, codecs, nbytes, steps)
            if (k + 1) % EVAL_EVERY == 0:
                losses.append(float(self.evaluate(state.params, self.held_out)))
                marks.append((sent, clock))
            if policy is not None and (k + 1) % policy.every == 0:
                seconds, since = (clock - since) / policy.every, clock
                seen = Observation(
                    k + 1, seconds, self._reports(codecs, np.asarray(sums)), True
                )
                wish = policy.observe(seen) or {}
                after = tuple(
                    wish.get(name, text) if self._fits(name, wish.get(name, text)) else text
                    for name, text in zip(self.shapes, codecs, strict=True)
                )
                if after != codecs:
                    states = self.recoded(states, codecs, after)
                    codecs = after
        return Curve(
            tuple(losses),
            tuple(m[0] for m in marks),
            tuple(m[1] for m in marks),
            used,
        )

    def _reports(
        self, codecs: tuple[str, ...], sums: np.ndarray
    ) -> dict[str, GradientReport]:
        """What `autopar.parallelize` reports of a step."""
        dense = self.nbytes(("dense",) * len(codecs))
        out: dict[str, GradientReport] = {}
        rows = zip(self.shapes, codecs, self.nbytes(codecs), dense, sums, strict=True)
        for name, text, nbytes, of_dense, row in rows:
            wanted = float(row[WANTED])
            out[name] = GradientReport(
                codec=text,
                elements=math.prod(self.shapes[name]),
                wire_bytes=nbytes,
                dense_bytes=of_dense,
                norm=math.sqrt(wanted),
                relative_error=math.sqrt(row[ERROR] / wanted) if wanted else 0.0,
                gain=float(row[SENT]) / wanted if wanted else 1.0,
                residual_norm=math.sqrt(row[RESIDUAL]),
            )
        return out

    def compute_s(self, steps: int = 10) -> float:
        """Median seconds of a dense step of one worker; see the module."""
        codecs = ("dense",) * len(self.shapes)
        state, states = self.built.create(), self.states(codecs)
        times: list[float] = []
        for k in range(steps + 1):
            data = self.built.batch(k)
            start = time.perf_counter()
            state, states, sums = self.program(codecs)(
                state, states, data, jnp.int32(k)
            )
            jax.block_until_ready((state, sums))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:]) / 2


def _feedback(text: str) -> Feedback:
    """All but dense gradients keep a residual, so that codecs can take turns."""
    del text
    return Feedback("residual")


def _count(
    used: dict[str, float], codecs: Sequence[str], nbytes: Sequence[float], steps: int
) -> None:
    """Adds a step to the shares of the steps, over the gradients that are not dense."""
    large = [text for text in codecs]
    for text in large:
        used[text] = used.get(text, 0.0) + 1.0 / (steps * len(large))
