"""The examples that `network/process_stages.py` trains, and training on one device.

Each example is so wide that its data outweighs control messages, and its optimizer
keeps rounding errors small. A step that enlarges rounding errors proves nothing: a
change of one unit in the last place grows, in 25 steps, to 3e-4 of the loss of the GPT
with AdamW, and to 2.5e-7 with SGD. For 8 layers of gpt-nnx it grows to 5.6e-3, and to
1.5e-7 with clipping. For the recommendation model it grows to 1.2e-2 with Adam and
towers of 256, and to 1.9e-7 with the options used here.
"""

from __future__ import annotations

import functools
import itertools
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unet
import workloads
from flax import nnx

from autopar.steps.analysis import analyse
from autopar.steps.microbatches import in_microbatches
from autopar_passes.program.equations import evaluate
from autopar_passes.program.trace import open_arguments

sys.path.insert(0, str(workloads.EXAMPLES_DIR))

MICROBATCHES, STEPS, NUDGED = 4, 25, 2
_WIDE = {"d_model": 128, "heads": 4, "layers": 4, "batch": 32, "optimizer": "sgd"}
_LONG = {**_WIDE, "seq": 32}
CASES: dict[str, dict[str, Any]] = {
    "gpt": _LONG,
    "gpt-scan": _LONG,
    "gpt-nnx": {**_LONG, "clip": 1.0},
    "llama": {**_LONG, "kv_heads": 2, "ffn": 256},
    "vit": {**_WIDE, "size": 16},
    # Without XLA's optimizations (`process_stages.FLAGS`), convolutions take 20 to 30
    # times as long, but compile in a fifth of the time.
    "resnet-slow": {"width": 8, "size": 16, "batch": 16},
    "moe": {**_LONG, "ffn": 256},
    "lstm": {"d_model": 128, "seq": 32, "batch": 32, "layers": 4},
    "recommendation": {
        "tables": 4,
        "rows": 256,
        "width": 64,
        "hidden": 64,
        "batch": 512,
        "optimizer": "sgd",
    },
    "unet": {"widths": (32, 64), "heads": 2, "size": 4, "batch": 16},
}
# The layers of these examples compute in the dtype of their parameters.
_WITHOUT_DTYPE = {"recommendation"}
_WITHOUT_OPTIMIZER = {"resnet-slow"}  # momentum keeps the gradient


def case_options(name: str, *, deep: bool, float64: bool) -> dict[str, Any]:
    """The options of an example.

    Args:
      name: in `CASES`.
      deep: whether the example has eight layers, as needed by two parts on each of four
        stages; ignored if it has no layers.
      float64: whether the example runs steps of gradient descent in float64.
    """
    options = dict(CASES[name])
    if deep and "layers" in options:
        options["layers"] = 8
    if float64 and name not in _WITHOUT_DTYPE:
        options["dtype"] = "float64"
    if float64 and name not in _WITHOUT_OPTIMIZER:
        options["optimizer"] = optax.sgd(0.1) if name == "unet" else "sgd"
    return options


class UNet:
    """The U-Net of the benchmarks, with the interface of the examples."""

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        """Makes the step; ``dtype`` is the dtype of the state."""
        self.step, (self.structs, self.batch) = unet.train_step(**options, dtype=dtype)

    def create_state(self, key):
        """Random kernels scaled by their fan-in, scales of one, and zeros elsewhere."""

        def made(path, struct):
            name, shape = jax.tree_util.keystr(path), struct.shape
            if "'params'" not in name:
                return jnp.zeros(shape, struct.dtype)
            if "'kernel'" in name:
                drawn = jax.random.fold_in(key, zlib.crc32(name.encode()))
                return jax.random.normal(drawn, shape) / np.sqrt(np.prod(shape[:-1]))
            return jnp.full(shape, float("'scale'" in name), struct.dtype)

        return jax.tree_util.tree_map_with_path(made, self.structs)

    def batches(self, *, seed: int):
        """Random images, noise and times."""
        random = np.random.default_rng(seed)
        while True:
            yield {
                name: abs(random.standard_normal(s.shape)).astype(np.float32)
                for name, s in self.batch.items()
            }


class Case:
    """An example with its state, its batches and its results on one device.

    Attributes:
      run: its training.
      batches: the batch of each step.
      couples: whether the rows of a batch are coupled, so that each microbatch computes
        the coupled values for its own rows.
    """

    def __init__(self, name: str, *, deep: bool = False, float64: bool = False) -> None:
        """Makes the example; the arguments are those of `case_options`."""
        options = case_options(name, deep=deep, float64=float64)
        is_unet = name == "unet"
        self.float64, self.couples = float64, name == "moe"
        self.run = UNet(**options) if is_unet else workloads.training(name, **options)
        created = self.run.create_state
        # XLA needs minutes to compile one program for all random draws of the U-Net.
        self.create = created if is_unet else nnx.jit(created)
        found = itertools.islice(self.run.batches(seed=0), 1 if float64 else STEPS)
        self.batches = [jax.tree.map(self._cast, batch) for batch in found]

    def _cast(self, x):
        if self.float64 and jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return jnp.asarray(x, jnp.float64)
        return x

    def state(self):
        """A new state."""
        state = self.create(jax.random.key(0))
        return jax.tree.map(self._cast, state) if self.float64 else state

    def _arguments(self, state):
        return (*(state if type(state) is tuple else (state,)), self.batches[0])

    @functools.cached_property
    def _analysis(self):
        return analyse(self.run.step, self._arguments(self.state()))

    @functools.cached_property
    def _one(self):
        """The step on one device, with gradient accumulation over microbatches."""
        split = in_microbatches(self._analysis, MICROBATCHES, couple=self.couples)
        return jax.jit(lambda *flat: evaluate(split.program, *flat))

    def _flat(self, state) -> list[np.ndarray]:
        """The arrays of a state."""
        call = open_arguments(self.run.step, self._arguments(state))
        count = len(self._analysis.carried_arguments)
        return [np.asarray(_plain(x)) for x in call.arrays[:count]]

    def on_one_device(self, state) -> tuple[list[np.ndarray], list[float]]:
        """Trains on one device; returns the last state's arrays, and the losses."""
        call = open_arguments(self.run.step, self._arguments(state))
        flat, losses = list(call.arrays), list[float]()
        carried = self._analysis.carried_arguments
        every = range(len(self._analysis.graph.outputs))
        (loss_at,) = [k for k in every if k not in set(carried.values())][-1:]
        for batch in self.batches:
            leaves = jax.tree.leaves(batch)
            flat[len(flat) - len(leaves) :] = [jnp.asarray(x) for x in leaves]
            made = self._one(*flat)
            losses.append(float(made[loss_at]))
            for argument, result in carried.items():
                flat[argument] = made[result]
        return [np.asarray(_plain(x)) for x in flat[: len(carried)]], losses

    def reference(self) -> dict[str, Any]:
        """The losses on one device, and their sensitivity to rounding.

        ``sensitivity`` is the largest difference of the losses of `NUDGED` runs, whose
        initial parameters are changed by one unit in the last place.
        """
        _, losses = self.on_one_device(self.state())
        nudged = [
            self.on_one_device(workloads.nudged(self.state(), seed=k))[1]
            for k in range(NUDGED)
        ]
        moved = max(difference(found, losses) for found in nudged)
        return {"losses": losses, "sensitivity": moved}

    def gradient_difference(self, state) -> float:
        """The difference between a first step to ``state`` and that of one device.

        The result is the largest difference of the arrays' changes, which are the
        gradients. It is relative to the largest change of the array, or to a thousandth
        of the largest change of any array if this is more (the biases of keys have no
        gradient).
        """
        before = self._flat(self.state())
        after, _ = self.on_one_device(self.state())
        found = [
            (
                np.abs(b.astype(float) - a).max(initial=0.0),
                np.abs(ours.astype(float) - b).max(initial=0.0),
            )
            for a, b, ours in zip(before, after, self._flat(state), strict=True)
            if np.issubdtype(b.dtype, np.floating)
        ]
        least = max(change for change, _ in found) / 1000
        return max(off / max(change, least) for change, off in found)


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of losses, relative to the other losses."""
    a, b = np.array(losses), np.array(others)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def _plain(x):
    keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if keys else x
