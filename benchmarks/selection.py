"""Time to select the sent elements: exact top-k, block top-k, and a threshold.

python benchmarks/selection.py

Selection is everything that a worker does before it sends: it finds the elements, their
indices, and the part of the gradient that was sent. The three codecs are timed in turns
in one process; the table has medians. For the threshold, the table has the time of a
step between two refreshes, that of a refresh, and the mean over all steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import workloads

from autopar.compression.codecs.codec import Codec, CodecContext, chunk_elements
from autopar.compression.codecs.sparse import BlockTopK, TopK
from autopar.compression.codecs.threshold import Threshold

RATIO = 0.01
EVERY = 1000
WORKERS = 4

Encode = Callable[[jax.Array, jax.Array, jax.Array], object]


def encoder(codec: Codec, size: int) -> Encode:
    """Compiles a function (gradient, state, step) -> the first message of a worker.

    The answer to the message is a dummy. Only this worker's contribution and its state
    are used, so the compiler drops the other computations.
    """
    shape = (size,)
    chunk = chunk_elements(codec, size, WORKERS, scatter=False)

    def run(flat: jax.Array, state: jax.Array, step: jax.Array) -> object:
        chunks = flat.reshape(WORKERS, chunk)
        context = CodecContext(WORKERS, jnp.int32(0), step, 1, shape, size, False)
        rounds = codec.reduce(chunks, state, context)
        request = next(rounds)
        answer = jnp.zeros((WORKERS, request.payload.size), jnp.uint8)
        try:
            rounds.send(answer)
        except StopIteration as stop:
            reduced = stop.value
        return request.payload, reduced.sent, reduced.state

    return jax.jit(run)


def medians_s(
    calls: dict[str, tuple[Encode, tuple[jax.Array, ...]]], repeats: int
) -> dict[str, float]:
    """Median seconds of each call; the calls run in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for function, arguments in calls.values():
        jax.block_until_ready(function(*arguments))
    for _ in range(repeats):
        for name, (function, arguments) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(size: int, repeats: int) -> None:
    """Prints the rows for gradients of one size."""
    codecs: dict[str, Codec] = {
        "exact top-k": TopK(ratio=RATIO),
        "block top-k": BlockTopK(k=1, block=round(1 / RATIO)),
        "threshold": Threshold(ratio=RATIO, every=EVERY),
        "threshold, exact": Threshold(ratio=RATIO, every=EVERY, exact=True),
    }
    calls: dict[str, tuple[Encode, tuple[jax.Array, ...]]] = {}
    for name, codec in codecs.items():
        chunk = chunk_elements(codec, size, WORKERS, scatter=False)
        flat = jax.random.t(jax.random.key(0), 4.0, (size,))
        flat = jnp.pad(flat, (0, WORKERS * chunk - size))
        encode = encoder(codec, size)
        state = codec.init((size,), WORKERS * chunk, WORKERS)
        if isinstance(codec, Threshold):
            *_, state = encode(flat, state, jnp.int32(0))
            calls[f"{name}, refresh"] = (encode, (flat, state, jnp.int32(0)))
        calls[name] = (encode, (flat, state, jnp.int32(1)))
    medians = medians_s(calls, repeats)
    for name in codecs:
        mean_s = medians[name]
        if f"{name}, refresh" in medians:
            refresh_s = medians[f"{name}, refresh"]
            mean_s = (refresh_s + (EVERY - 1) * mean_s) / EVERY
            refresh = f"{refresh_s * 1e3:.2f}"
        else:
            refresh = ""
        workloads.row(
            f"{size / 1e6:g} M",
            name,
            f"{medians[name] * 1e3:.2f}",
            refresh,
            f"{mean_s * 1e3:.2f}",
            f"{mean_s / medians['exact top-k']:.3f}",
        )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 4_000_000])
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    workloads.row(
        "elements", "selection", "step, ms", "refresh, ms", "mean, ms", "of exact"
    )
    workloads.row(*["---"] * 6)
    for size in arguments.sizes:
        measure(size, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
