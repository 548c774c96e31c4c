"""Compares a predicted split with a count sketch, on gradients of a small model.

python benchmarks/sketch_split.py

The benchmark trains a character model with Adam on the text of the standard library. It
takes the gradients of four workers' batches and Adam's second moments, and sends the
gradients once with each codec. For every budget, the count sketch gets its best number
of rows and its best fraction of recovered elements. Times are those of one worker for
encoding and decoding, without the network; the two codecs run in turns, and the figures
are medians. The time on a network is bytes divided by bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from jax.flatten_util import ravel_pytree

from autopar.compression.codecs.codec import Codec, CodecContext, chunk_elements
from autopar.compression.codecs.predicted import PredictedTopK
from autopar.compression.codecs.sketch import Sketch
from autopar.compression.exchange import MeshLinks, exchange

WORKERS = 4
SEQUENCE = 64
BATCH = 4
WIDTH = 160
HEADS = 4
LAYERS = 2
BUDGETS = (0.20, 0.10, 0.05)
ROWS = (1, 3, 5)
# Fractions of recovered elements to try, relative to the numbers in the sketch.
HEAVY = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3)
MBIT_PER_S = (100, 1000)

Params = dict[str, jax.Array]


def text_ids(limit: int = 2_000_000) -> tuple[np.ndarray, int]:
    """Characters of the standard library's modules as numbers, and how many different
    ones.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(
        path.read_text(errors="ignore") for path in sorted(folder.glob("*.py"))
    )[:limit]
    codes = np.clip(np.frombuffer(text.encode("ascii", "ignore"), np.uint8), 9, 126)
    return codes.astype(np.int32) - 9, 118


def initial(key: jax.Array, kinds: int) -> Params:
    """Parameters of a transformer with `LAYERS` layers."""
    shapes = {"embedding": (kinds, WIDTH), "position": (SEQUENCE, WIDTH)}
    for i in range(LAYERS):
        shapes |= {
            f"attention_{i}": (WIDTH, 3 * WIDTH),
            f"output_{i}": (WIDTH, WIDTH),
            f"up_{i}": (WIDTH, 4 * WIDTH),
            f"down_{i}": (4 * WIDTH, WIDTH),
        }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss(params: Params, ids: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next character; ids (batch, SEQUENCE + 1)."""

    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    x = params["embedding"][ids[:, :-1]] + params["position"]
    causal = jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))
    for i in range(LAYERS):
        qkv = (normed(x) @ params[f"attention_{i}"]).reshape(
            *x.shape[:2], 3, HEADS, WIDTH // HEADS
        )
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        weights = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, weights, -1e9), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ params[f"output_{i}"]
        x = x + jax.nn.gelu(normed(x) @ params[f"up_{i}"]) @ (params[f"down_{i}"])
    logits = normed(x) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def trained(steps: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Gradients (n, D) of the next batch, Adam's second moments (D,), and the loss."""
    ids, kinds = text_ids()
    rng = np.random.default_rng(0)
    optimizer = optax.adam(2e-3)
    params = initial(jax.random.key(0), kinds)
    state = optimizer.init(params)

    def batch() -> jax.Array:
        starts = rng.integers(0, ids.size - SEQUENCE - 1, (WORKERS, BATCH))
        return jnp.asarray(ids[starts[..., None] + np.arange(SEQUENCE + 1)])

    per_worker = jax.vmap(jax.value_and_grad(loss), (None, 0))

    @jax.jit
    def step(params: Params, state: Any, ids: jax.Array) -> Any:
        losses, grads = per_worker(params, ids)
        grads = jax.tree.map(lambda g: g.mean(0), grads)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, losses.mean()

    value = jnp.inf
    for _ in range(steps):
        params, state, value = step(params, state, batch())
    _, grads = jax.jit(per_worker)(params, batch())
    flat = np.stack(
        [
            ravel_pytree(jax.tree.map(lambda g, i=i: g[i], grads))[0]
            for i in range(WORKERS)
        ]
    )
    return flat, np.asarray(ravel_pytree(state[0].nu)[0]), float(value)


@dataclasses.dataclass(frozen=True)
class LocalLinks:
    """Collectives that answer as if all workers had this worker's data."""

    workers: int

    def all_to_all(self, payload: jax.Array) -> jax.Array:
        """See `autopar.compression.exchange.WorkerLinks`."""
        return jax.lax.optimization_barrier(payload)

    def all_gather(self, payload: jax.Array) -> jax.Array:
        """See `autopar.compression.exchange.WorkerLinks`."""
        whole = jnp.broadcast_to(payload, (self.workers, *payload.shape))
        return jax.lax.optimization_barrier(whole)

    def all_reduce(self, values: jax.Array) -> jax.Array:
        """See `autopar.compression.exchange.WorkerLinks`."""
        return jax.lax.optimization_barrier(values)

    def reduce_scatter(self, values: jax.Array) -> jax.Array:
        """See `autopar.compression.exchange.WorkerLinks`."""
        return jax.lax.optimization_barrier(values)[0]


def step_function(codec: Codec, size: int, links: Any) -> Callable[..., Any]:
    """Compiles one worker's step: (chunks, state, worker) -> total, sent, state."""

    def run(chunks: jax.Array, state: Any, worker: jax.Array) -> Any:
        context = CodecContext(WORKERS, worker, jnp.int32(150), 1, (size,), size, False)
        (out,) = exchange([codec.reduce(chunks, state, context)], links)
        return out.total, out.sent, out.state

    return run


def state_of(codec: Codec, size: int, moments: np.ndarray) -> Any:
    """The codec's state after training, with scores from Adam's moments."""
    padded = WORKERS * chunk_elements(codec, size, WORKERS, scatter=False)
    state = codec.init((size,), padded, WORKERS)
    if isinstance(codec, PredictedTopK):
        score = jnp.pad(jnp.asarray(moments), (0, padded - size))
        turns = -(-padded // state.indices.size)
        state = state._replace(score=score, seen=jnp.int32(turns))
    return state


def chunks_of(codec: Codec, gradients: np.ndarray) -> jax.Array:
    """Arranges gradients (n, D) as chunks (n, n, c)."""
    chunk = chunk_elements(codec, gradients.shape[1], WORKERS, scatter=False)
    padding = WORKERS * chunk - gradients.shape[1]
    padded = np.pad(gradients, ((0, 0), (0, padding)))
    return jnp.asarray(padded.reshape(WORKERS, WORKERS, chunk))


def relative_error(codec: Codec, gradients: np.ndarray, moments: np.ndarray) -> float:
    """Relative L2 error of the sum over the workers."""
    size = gradients.shape[1]
    run = step_function(codec, size, MeshLinks(("workers",), WORKERS))
    mapped = jax.vmap(run, in_axes=(0, None, 0), axis_name="workers")
    total = jax.jit(mapped)(
        chunks_of(codec, gradients), state_of(codec, size, moments), jnp.arange(WORKERS)
    )[0]
    exact = gradients.sum(axis=0)
    got = np.asarray(total[0]).reshape(-1)[:size]
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def predicted(budget: float) -> PredictedTopK:
    """The split whose int8 blocks have the size of a budget, a fraction of float32's
    bytes.
    """
    explore = 0.005
    bytes_an_element = 1 + 2 / 256
    ratio = 4 * budget / bytes_an_element - explore
    # Chunks consist of whole blocks, so padding is at most 4 * 256 elements.
    return PredictedTopK(ratio=ratio * 0.99, explore=explore)


def best_sketch(
    budget: float, gradients: np.ndarray, moments: np.ndarray
) -> dict[int, tuple[Sketch, float]]:
    """Number of rows -> the best sketch, and its error."""
    best: dict[int, tuple[Sketch, float]] = {}
    for rows in ROWS:
        tried: list[tuple[Sketch, float]] = []
        for part in HEAVY:
            codec = Sketch(ratio=budget, rows=rows, heavy=part * budget)
            tried.append((codec, relative_error(codec, gradients, moments)))
        best[rows] = min(tried, key=lambda item: item[1])
    return best


def smallest_split(
    error: float, budget: float, gradients: np.ndarray, moments: np.ndarray
) -> tuple[PredictedTopK, float]:
    """Halves the bytes of a split as long as its error is not larger than ``error``."""
    codec = predicted(budget)
    found = codec, relative_error(codec, gradients, moments)
    while True:
        budget /= 2
        if 4 * budget < 0.02:
            return found
        codec = predicted(budget)
        now = relative_error(codec, gradients, moments)
        if now > error:
            return found
        found = codec, now


def times_s(
    codecs: list[Codec], gradients: np.ndarray, moments: np.ndarray, repeats: int
) -> list[float]:
    """Median seconds to encode and decode; the codecs run in turns.

    A split predicts only once in `PredictedTopK.every` steps; its time is a mean over
    steps.
    """
    size = gradients.shape[1]
    calls: list[list[Callable[[], Any]]] = []
    for codec in codecs:
        run = jax.jit(step_function(codec, size, LocalLinks(WORKERS)))
        chunks = chunks_of(codec, gradients)[0]
        state = state_of(codec, size, moments)
        later = run(chunks, state, jnp.int32(0))[2]
        calls.append(
            [lambda s=s, r=run, c=chunks: r(c, s, jnp.int32(0)) for s in (state, later)]
        )
    times: list[list[list[float]]] = [[[], []] for _ in codecs]
    for _ in range(repeats + 1):
        for call, kept in zip(calls, times, strict=True):
            for function, record in zip(call, kept, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(function())
                record.append(time.perf_counter() - start)
    out: list[float] = []
    for codec, (first, later) in zip(codecs, times, strict=True):
        a, b = statistics.median(first[1:]), statistics.median(later[1:])
        every = codec.every if isinstance(codec, PredictedTopK) else 2
        out.append((a + (every - 1) * b) / every)
    return out


def report(
    budget: float, gradients: np.ndarray, moments: np.ndarray, repeats: int
) -> None:
    """Prints the rows of one budget."""
    size = gradients.shape[1]
    sketches = best_sketch(budget, gradients, moments)
    best = min(sketches.values(), key=lambda item: item[1])
    split = predicted(budget)
    rows: list[tuple[str, Codec, float]] = [
        (f"count sketch, {r} rows, heavy {c.heavy:.4f}", c, error)
        for r, (c, error) in sketches.items()
    ]
    rows.append(("split", split, relative_error(split, gradients, moments)))
    smaller, error = smallest_split(best[1], budget, gradients, moments)
    rows.append(("split, error still no larger", smaller, error))
    seconds = times_s([c for _, c, _ in rows], gradients, moments, repeats)
    sync: list[list[float]] = []
    for (_, codec, _), work_s in zip(rows, seconds, strict=True):
        nbytes = codec.wire_bytes((size,), WORKERS)
        sync.append([work_s + 8 * nbytes / (rate * 1e6) for rate in MBIT_PER_S])
    of = next(i for i, row in enumerate(rows) if row[1] is best[0])
    for (name, codec, error), work_s, total_s in zip(rows, seconds, sync, strict=True):
        cells = [
            f"{t * 1e3:.1f} ({b / t:.2f}x)"
            for t, b in zip(total_s, sync[of], strict=True)
        ]
        nbytes = codec.wire_bytes((size,), WORKERS)
        workloads.row(
            f"{budget:.0%}",
            name,
            f"{nbytes / 1e3:.0f}",
            f"{error:.3f}",
            f"{work_s * 1e3:.2f}",
            *cells,
        )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    gradients, moments, value = trained(arguments.steps)
    print(f"{gradients.shape[1]} parameters, loss {value:.2f}\n")
    workloads.row(
        "budget",
        "codec",
        "kB sent",
        "error",
        "encode + decode, ms",
        *[f"synchronise at {rate} Mbit/s, ms (speed-up)" for rate in MBIT_PER_S],
    )
    workloads.row(*["---"] * (5 + len(MBIT_PER_S)))
    for budget in BUDGETS:
        report(budget, gradients, moments, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
