"""A language model with small batches and 3.6 M parameters, so gradients matter.

The GPT of the examples is trained on Python's own standard library and language
reference, character by character. Nothing is downloaded. The same seed gives the same
batches on every machine with the same Python.

    python benchmarks/network/language_model.py    # losses on one device, and seconds
"""

from __future__ import annotations

import argparse
import ast
import functools
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import gpt

VOCAB = 128
EVAL_PART = 0.05
B2 = 0.98
"""Of Adam's second moments."""
BLOCK = 1 << 15
"""Characters in a row that go to training or to evaluation."""


class Sizes(NamedTuple):
    """Sizes of the model, and of a batch over all processes."""

    layers: int = 2
    d_model: int = 384
    heads: int = 6
    seq: int = 32
    batch: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int = 400
    optimizer: str = "adamw"


class Text(NamedTuple):
    """Characters as numbers below `VOCAB`, uint8 (length,)."""

    train: np.ndarray
    evaluation: np.ndarray


@functools.cache
def text() -> Text:
    """Python's language reference, and the docstrings and code of its modules.

    Every 20th block of `BLOCK` characters is for evaluation.
    """
    reference = [body for _, body in sorted(topics.topics.items())]
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    modules = [p.read_text("utf-8", "ignore") for p in sorted(folder.glob("*.py"))]
    whole = "\n".join([*reference, *modules])
    codes = np.frombuffer(whole.encode("ascii", "ignore"), np.uint8)
    blocks = codes[: len(codes) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % round(1 / EVAL_PART) == 0
    return Text(blocks[~held_out].reshape(-1), blocks[held_out].reshape(-1))


def windows(tokens: np.ndarray, starts: np.ndarray, seq: int) -> dict[str, Any]:
    """Inputs and targets (rows, seq), int32, from the given positions."""
    found = tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return {"inputs": found[:, :-1], "targets": found[:, 1:]}


def batch(
    sizes: Sizes, seed: int, step: int, rank: int = 0, count: int = 1
) -> dict[str, Any]:
    """A process's rows of the batch of a step: the same for any number of processes.

    Args:
      sizes: sizes of the batch.
      seed: seed of the run.
      step: number of the step.
      rank: number of the process.
      count: number of processes; must divide the batch.
    """
    if sizes.batch % count:
        raise ValueError(f"{count} processes do not divide a batch of {sizes.batch}.")
    tokens = text().train
    random = np.random.default_rng((seed, step))
    starts = random.integers(0, len(tokens) - sizes.seq - 1, size=sizes.batch)
    rows = sizes.batch // count
    return windows(tokens, starts[rank * rows : (rank + 1) * rows], sizes.seq)


def evaluation_batch(sizes: Sizes, rows: int = 256) -> dict[str, Any]:
    """Evenly spaced windows of the held-out text; the same in every call."""
    tokens = text().evaluation
    starts = np.linspace(0, len(tokens) - sizes.seq - 2, rows).astype(np.int64)
    return windows(tokens, starts, sizes.seq)


def loss_of(apply_fn: Callable[..., Any], params: Any, data: Any) -> Any:
    """Mean cross entropy of a character, in nats."""
    logits = apply_fn({"params": params}, data["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data["targets"])
    return losses.mean()


def train_step(state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """One step, as a plain function that `autopar.parallelize` can wrap."""
    loss_fn = functools.partial(loss_of, state.apply_fn)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, data)
    return state.apply_gradients(grads=grads), {"loss": loss}


class Workload(NamedTuple):
    """The model, data and functions that a benchmark needs.

    Attributes:
      sizes: sizes of the model.
      step: ``step(state, batch) -> (state, {"loss": loss})``.
      create: ``create()``: the state of step 0, a Flax ``TrainState``.
      batch: ``batch(step, rank, count)``: a process's rows.
      eval_loss: ``eval_loss(params, data)``, to be jitted.
    """

    sizes: Sizes
    step: Callable[..., Any]
    create: Callable[[], Any]
    batch: Callable[..., Any]
    eval_loss: Callable[..., Any]


def schedule(sizes: Sizes) -> Callable[[Any], Any]:
    """The learning rate of a step by its number."""
    return optax.warmup_cosine_decay_schedule(
        0.0,
        sizes.learning_rate,
        sizes.warmup_steps,
        sizes.decay_steps,
        end_value=sizes.learning_rate / 10,
    )


def build(seed: int, sizes: Sizes | None = None) -> Workload:
    """The model, its optimizer and its data for one seed."""
    sizes = sizes or Sizes()
    model = gpt.GPT(
        layers=sizes.layers,
        d_model=sizes.d_model,
        heads=sizes.heads,
        vocab=VOCAB,
        max_seq=sizes.seq,
        dropout=0.0,
        scan=False,
        remat=False,
        dtype="float32",
        attention="plain",
    )
    if sizes.optimizer == "muon":
        optimizer = optax.contrib.muon(schedule(sizes), adam_b2=B2, weight_decay=0.01)
    else:
        optimizer = optax.adamw(schedule(sizes), b2=B2, weight_decay=0.01)

    def create() -> Any:
        return gpt.create_state(jax.random.key(seed), model, optimizer)

    return Workload(
        sizes=sizes,
        step=train_step,
        create=create,
        batch=functools.partial(batch, sizes, seed),
        eval_loss=functools.partial(loss_of, model.apply),
    )


def parameters(workload: Workload) -> int:
    """Number of parameters."""
    shapes = jax.eval_shape(workload.create).params
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "options", nargs="*", help="sizes, such as batch=32", metavar="name=value"
    )
    given = parser.parse_args()
    options = {k: ast.literal_eval(v) for k, v in (o.split("=") for o in given.options)}
    sizes = Sizes(**options)
    workload = build(given.seed, sizes)
    print(f"{parameters(workload):,} parameters, {len(text().train):,} characters")
    step = jax.jit(workload.step, donate_argnums=0)
    evaluate = jax.jit(workload.eval_loss)
    held_out, state = evaluation_batch(sizes), jax.jit(workload.create)()
    times: list[float] = []
    for k in range(given.steps + 1):
        if k % 50 == 0:
            loss = float(evaluate(state.params, held_out))
            typical = 1e3 * float(np.median(times or [0.0]))
            print(f"step {k}: evaluation loss {loss:.4f}, {typical:.0f} ms a step")
        started_s = time.perf_counter()
        state, metrics = step(state, workload.batch(k))
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - started_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
