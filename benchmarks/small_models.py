"""Small models whose cuts are known, and their training on one device.

``digits`` are scikit-learn's digits, and ``characters`` the next character of Python's
own sources from the last 8. Both are chains of six dense layers with skip connections,
64 wide. Behind each layer is a cut, at which a code of activations and cotangents may
stand. The program of one device then has the losses and gradients of a pipeline whose
stages send each other these codes: ``tests/autopar/runtime/stages/test_cut_codecs.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "network"))

Params = dict[str, Any]
# Steps that a program runs in one call.
TURN = 100
# Steps at the end of a training of which the mean loss is recorded.
LAST = 200


class Family(NamedTuple):
    """A code of rows.

    Attributes:
      init: random numbers, width -> the parameters of a cut.
      send: parameters, array (rows, width) -> the array on the other side. Its
        transposition is what happens to cotangents.
      nbytes: bytes of activations and cotangents of an array of this shape.
    """

    init: Callable[[np.random.Generator, int], Params]
    send: Callable[[Params, Any], Any]
    nbytes: Callable[[tuple[int, int]], int]


EXACTLY = Family(
    lambda random, width: {}, lambda _, x: x, lambda shape: 2 * 4 * math.prod(shape)
)
"""Sends all values as they are."""


class Cuts:
    """Sends arrays at the chosen cuts of a model, and counts their bytes."""

    def __init__(self, family: Family, places: Sequence[str], params: Params) -> None:
        """Sends by a family; missing parameters of cuts are made."""
        self.family, self.places, self.params = family, places, params
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, place: str, name: str, array: Any) -> Any:
        """The array behind a cut.

        Args:
          place: name of the cut.
          name: name of the array among those of all cuts.
          array: the array, (rows, width).
        """
        if place not in self.places:
            return array
        self.shapes.append(array.shape)
        if name not in self.params:
            random = np.random.default_rng(len(self.params))
            self.params[name] = self.family.init(random, array.shape[1])
        return self.family.send(self.params[name], array)


class Model(NamedTuple):
    """A model and its data.

    Attributes:
      init: seed -> parameters.
      logits: parameters, batch, cuts -> logits.
      loss: logits, batch -> mean loss.
      batches: seed -> the batches of all steps.
      held_out: data that no training sees.
      rows: rows of a batch.
      learning_rate: the largest learning rate; unused with ``optimizer``.
      places: name of a place -> the cuts that it stands for.
      optimizer: number of steps -> the optimizer; None: Adam.
    """

    init: Callable[[int], Params]
    logits: Callable[[Params, Any, Cuts], Any]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[int], Iterator[Any]]
    held_out: Any
    rows: int
    learning_rate: float
    places: dict[str, tuple[str, ...]]
    optimizer: Callable[[int], optax.GradientTransformation] | None = None


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers, float32."""
    return random.standard_normal(shape, np.float32)


def dense(random: np.random.Generator, inputs: int, outputs: int) -> Params:
    """A dense layer, as LeCun initialises it."""
    weights = normal(random, inputs, outputs) * np.float32(inputs**-0.5)
    return {"w": weights, "b": np.zeros(outputs, np.float32)}


def apply(layer: Params, x: Any) -> Any:
    """A dense layer of a batch."""
    return x @ layer["w"] + layer["b"]


WIDTH, LAYERS = 64, 6
CHAIN_PLACES = {"first": ("1", "2"), "last": ("4", "5")}


def chain(inputs: int, outputs: int, seed: int) -> Params:
    """Parameters of dense layers with skip connections."""
    random = np.random.default_rng((seed, 1))
    layers = {f"layer_{k}": dense(random, WIDTH, WIDTH) for k in range(LAYERS)}
    ends = dense(random, inputs, WIDTH), dense(random, WIDTH, outputs)
    return {**layers, "in": ends[0], "out": ends[1]}


def chain_logits(params: Params, x: Any, cuts: Cuts) -> Any:
    """Logits of dense layers with skip connections."""
    x = apply(params["in"], x)
    for k in range(LAYERS):
        x = x + jax.nn.relu(apply(params[f"layer_{k}"], x))
        x = cuts(str(k + 1), f"x{k + 1}", x)
    return apply(params["out"], x)


def class_loss(logits: Any, batch: Any) -> Any:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def digits() -> Model:
    """scikit-learn's digits; every fourth is held out."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("digits needs scikit-learn's data: pip install scikit-learn")
    # The file alone: an import of scikit-learn takes seconds.
    folder = pathlib.Path(found.submodule_search_locations[0])
    data = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = (data[:, :-1] / 8.0 - 1.0).astype(np.float32), data[:, -1].astype(np.int32)
    held = np.arange(len(x)) % 4 == 0
    rows = 64

    def batches(seed: int) -> Iterator[Any]:
        random = np.random.default_rng(seed)
        train_x, train_y = x[~held], y[~held]
        while True:
            own = random.integers(0, len(train_x), rows)
            yield {"x": train_x[own], "y": train_y[own]}

    return Model(
        init=lambda seed: chain(64, 10, seed),
        logits=lambda params, batch, cuts: chain_logits(params, batch["x"], cuts),
        loss=class_loss,
        batches=batches,
        held_out={"x": x[held], "y": y[held]},
        rows=rows,
        learning_rate=2e-3,
        places=CHAIN_PLACES,
    )


CONTEXT, EMBEDDED = 8, 16


def characters() -> Model:
    """The next character of Python's sources from the last `CONTEXT`."""
    # Its import of Flax takes seconds, which the other models do not need.
    import language_model

    rows = 64

    def examples(tokens: np.ndarray, starts: np.ndarray) -> Any:
        found = tokens[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
        return {"x": found[:, :-1], "y": found[:, -1]}

    def batches(seed: int) -> Iterator[Any]:
        random, tokens = np.random.default_rng(seed), language_model.text().train
        while True:
            starts = random.integers(0, len(tokens) - CONTEXT - 1, rows)
            yield examples(tokens, starts)

    def init(seed: int) -> Params:
        made = chain(CONTEXT * EMBEDDED, language_model.VOCAB, seed)
        random = np.random.default_rng((seed, 2))
        return {**made, "embedding": normal(random, language_model.VOCAB, EMBEDDED)}

    def logits(params: Params, batch: Any, cuts: Cuts) -> Any:
        x = params["embedding"][batch["x"]]
        return chain_logits(params, x.reshape(len(x), -1), cuts)

    text = language_model.text().evaluation
    starts = np.linspace(0, len(text) - CONTEXT - 2, 8192).astype(np.int64)
    return Model(
        init=init,
        logits=logits,
        loss=class_loss,
        batches=batches,
        held_out=examples(text, starts),
        rows=rows,
        learning_rate=2e-3,
        places=CHAIN_PLACES,
    )


MODELS = {"digits": digits, "characters": characters}


class Trainer:
    """Trains a model with codes at its cuts; compiled once for all seeds."""

    def __init__(
        self,
        model: Model,
        family: Family,
        cuts: Sequence[str],
        steps: int,
        gather: Callable[[Params, Params], Params] = lambda exact, last: exact,
    ) -> None:
        """Makes the programs of a training of so many steps.

        Args:
          model: the model.
          family: the code of the arrays at its cuts.
          cuts: the cuts.
          steps: the number of steps.
          gather: exact parameters, parameters that the last step computed with -> the
            parameters to compute with.
        """
        self.model, self.family, self.cuts, self.steps = model, family, cuts, steps
        self._gather = gather
        rate = model.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, 20, max(steps, 400), rate / 10
        )
        make = model.optimizer
        self.optimizer = make(steps) if make else optax.adam(schedule)
        self._run = jax.jit(
            functools.partial(jax.lax.scan, self._step), donate_argnums=0
        )
        self._evaluate = jax.jit(self._loss)

    def _loss(self, params: Params, batch: Any) -> tuple[Any, Any]:
        cuts = Cuts(self.family, self.cuts, params["codes"])
        logits = self.model.logits(params, batch, cuts)
        return self.model.loss(logits, batch), logits

    def _step(self, carry: Any, batch: Any) -> Any:
        params, last, state = carry
        used = self._gather(params, last)
        loss_and_grads = jax.value_and_grad(self._loss, has_aux=True)
        (loss, _), grads = loss_and_grads(used, batch)
        changes, state = self.optimizer.update(grads, state, params)
        return (optax.apply_updates(params, changes), used, state), loss

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each array that is sent, by its name."""
        counting = Cuts(self.family, self.cuts, {})
        logits = functools.partial(self.model.logits, cuts=counting)
        jax.eval_shape(logits, self.model.init(0), next(self.model.batches(0)))
        return dict(zip(counting.params, counting.shapes, strict=True))

    def start(self, seed: int) -> Params:
        """The parameters of step 0."""
        random = np.random.default_rng((seed, 3))
        shapes = self.shapes.items()
        codes = {name: self.family.init(random, width) for name, (_, width) in shapes}
        return {**self.model.init(seed), "codes": codes}

    def train(self, seed: int) -> tuple[Params, list[float]]:
        """Trains once; returns the parameters, and the loss of each step."""
        params, losses = jax.device_put(self.start(seed)), list[float]()
        # Adam's state begins as zeros.
        state = jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype),
            jax.eval_shape(self.optimizer.init, params),
        )
        carry = params, jax.device_put(self.start(seed)), jax.device_put(state)
        batches = self.model.batches(seed)
        for first in range(0, self.steps, TURN):
            own = itertools.islice(batches, min(TURN, self.steps - first))
            carry, found = self._run(carry, jax.tree.map(lambda *x: np.stack(x), *own))
            losses += np.asarray(found).tolist()
        return carry[0], losses

    def row(self, seed: int) -> dict[str, Any]:
        """Trains once; returns the losses and the bytes of a step at the cuts."""
        params, losses = self.train(seed)
        held_out, logits = self._evaluate(params, self.model.held_out)
        shapes = self.shapes.values()
        row = {
            "last": float(np.mean(losses[-LAST:])),
            "held_out": float(held_out),
            "bytes": sum(self.family.nbytes(shape) for shape in shapes),
            "dense_bytes": sum(2 * 4 * math.prod(shape) for shape in shapes),
        }
        if "y" in self.model.held_out:
            right = np.asarray(logits).argmax(-1) == self.model.held_out["y"]
            row["accuracy"] = float(right.mean())
        return row
