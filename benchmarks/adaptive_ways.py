"""The ways of training that `adaptive.py` and `network/adaptive.py` compare.

A character model with a table of pairs of characters is trained with data parallelism
over four workers. `adaptive.py` describes the ways of training.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import goodput_samples
import jax
import optax
from goodput_samples import BASE, PINS, VOCAB, WORKERS, rows

import autopar
from autopar.goodput import CriticalRegimes, scale_updates
from autopar.goodput.choice import PhiRange
from autopar.goodput.loop import Loop
from autopar.goodput.ways import expected_error

WAYS = ("fixed", "codecs", "batch", "naive", "mild", "ours")
MORE = ("forced", "accordion")
CODECS = (
    "int8:rounding=stochastic",
    "int4:rounding=stochastic",
    "randk:unbiased=true,ratio=0.25",
    "randk:unbiased=true,ratio=0.1",
)
# A codec counts as a codec with a small error up to this squared error, as a fraction
# of the squared norm.
LITTLE = 0.1
MOST, WIDTH = 2048, 96


def model(seed: int, tx: Any) -> Any:
    """The initial state of a seed."""
    keys = jax.random.split(jax.random.key(seed), 3)
    inputs = 16 * goodput_samples.CONTEXT
    w = {
        "embed": 0.3 * jax.random.normal(keys[0], (VOCAB, 16)),
        "pairs": jax.numpy.zeros((VOCAB * VOCAB, 16)),
        "hidden": jax.random.normal(keys[1], (inputs, WIDTH)) / 11.0,
        "out": jax.random.normal(keys[2], (WIDTH, VOCAB)) / 10.0,
    }
    return {"w": w, "opt": tx.init(w)}


def loss_of(w: Any, batch: Any) -> Any:
    """The loss of the next character, predicted from characters and pairs of
    characters.
    """
    now = batch["x"]
    before = jax.numpy.pad(now, ((0, 0), (1, 0)))[:, :-1]
    x = w["embed"][now] + w["pairs"][before * VOCAB + now]
    logits = jax.numpy.tanh(x.reshape(len(now), -1) @ w["hidden"]) @ w["out"]
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return found.mean()


def optimizer(rate: float) -> Any:
    """Gradient descent whose learning rate follows the batch size."""
    return scale_updates(optax.sgd(rate), "adascale", base_batch=BASE)


def step_of(tx: Any) -> Any:
    """The train step."""

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
        updates, opt = tx.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

    return step


def layouts() -> autopar.Plan:
    """A plan with data parallelism, made without regard to the links."""
    tx = optimizer(0.1)
    return autopar.plan(
        step_of(tx),
        model(0, tx),
        rows(4096, 0, 0),
        cluster=f"{WORKERS}x1:cpu,network=1000Gb/s,network_latency=1us",
        axis_names=("data",),
        pins={"batch/*": PINS["batch/*"], "state/*": PINS["state/*"]},
        seconds=None,
    )


def first_codec(way: str, cluster: autopar.Cluster, kept: autopar.Plan) -> str:
    """The first codec of a way; ``none`` if the way chooses codecs later or never."""
    if way not in ("forced", "naive", "mild"):
        return "none"
    tx, found = optimizer(0.1), dict[str, float]()
    for codec in CODECS:
        plan = autopar.plan(
            step_of(tx), model(0, tx), rows(BASE, 0, 0),
            cluster=cluster, layouts=kept, compression=codec,
        )  # fmt: skip
        error = expected_error(plan)
        if way == "naive" or error.own + error.shared <= LITTLE:
            found[codec] = plan.predicted.step_s
            if way == "forced":
                found[codec] = plan.predicted.communication_bytes
    return min(found, key=lambda x: found[x])


def options_of(way: str, codec: str, job: float) -> dict[str, Any]:
    """The arguments of `autopar.train` for a way.

    Args:
      way: of training.
      codec: of `first_codec`.
      job: length of the job in rows of the base batch.
    """
    naive = way in ("naive", "mild")
    follows = naive or way in ("batch", "ours")
    codecs: Any = CODECS if way in ("codecs", "ours") else ()
    found: dict[str, Any] = {
        "base_batch": BASE,
        "max_batch": MOST if follows else BASE,
        "codecs": {codec: 1.0} if naive else codecs,
    }
    if way == "accordion":
        found["max_batch"] = 8 * BASE
        found["rule"] = CriticalRegimes(window=job / BASE / 30)
    return found


class Naive(Loop):
    """A loop that reads the noise scale of compressed gradients, without correction."""

    def phi(self) -> PhiRange | None:
        """The biased noise scale ``(1 + w) phi + w M / K`` that compressed gradients
        show.
        """
        found = super().phi()
        if found is None:
            return None
        w, part = expected_error(self.step.plan).own, self.batch_size / WORKERS
        # If all workers send the same elements, w multiplies both norms.
        ends = (found.phi, found.low, found.high)
        return PhiRange(*((1 + w) * x + w * part for x in ends))


def loop_of(way: str) -> type[Loop]:
    """The class that chooses the batch size of a way."""
    return Naive if way in ("naive", "mild") else Loop


def seconds_to(curve: Any, level: float) -> float | None:
    """Seconds until a loss is reached, interpolated linearly; None: never reached."""
    for (before_s, before), (after_s, after) in itertools.pairwise(curve):
        if after <= level:
            part = (before - level) / (before - after) if math.isfinite(before) else 1.0
            return before_s + part * (after_s - before_s)
    return None
