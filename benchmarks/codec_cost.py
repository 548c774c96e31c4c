"""Time of codecs on one device, in passes over the gradient.

    python benchmarks/codec_cost.py [--elements 1000000] [codec ...]

A pass reads and writes every element once. Each codec does all work of one of four
workers for one gradient: it encodes, decodes the other workers' messages, applies error
feedback and computes the report. Nothing is sent. The program is compiled like a
planned step. Codec and pass run in turns; the figures are medians.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import workloads

WORKERS = 4
CODECS = (
    "dense", "bf16", "fp8", "int8", "int4", "int4:hadamard=false", "sign",
    "topk:ratio=0.01", "randk:ratio=0.01", "blocktopk", "threshold:ratio=0.01",
    "powersgd:rank=1", "powersgd:rank=4", "powersgd:rank=8",
    "powersgd:rank=16", "powersgd:rank=32",
    "sketch", "predicted:ratio=0.01", "predicted:ratio=0.05", "predicted:ratio=0.1",
)  # fmt: skip


class Loopback:
    """Links on which all workers send the same messages as this worker."""

    workers = WORKERS

    def all_to_all(self, payload):
        """Returns each row to this worker."""
        return payload

    def all_gather(self, payload):
        """Returns the message once for each worker."""
        return jnp.broadcast_to(payload, (WORKERS, *payload.shape))

    def all_reduce(self, values):
        """Returns the sum over workers with equal values."""
        return WORKERS * values

    def reduce_scatter(self, values):
        """Returns this worker's row of the sum."""
        return WORKERS * values[0]


def main() -> None:
    """Prints the table."""
    from autopar.compression.codecs.registry import parse_codec
    from autopar.compression.gradient import Feedback, Gradient, init_state
    from autopar.compression.synchronise import (
        NON_FINITE,
        restore_unless_finite,
        synchronise,
    )
    from autopar.runtime.planned import WITH_BARRIERS

    parser = argparse.ArgumentParser()
    parser.add_argument("codecs", nargs="*", default=CODECS)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--telemetry", action="store_true", help="of every step")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    side = math.isqrt(options.elements)
    gradient = jax.random.t(jax.random.key(0), 4.0, (side, side))
    one_pass = jax.jit(lambda x: x * 1.5)
    workloads.row("codec", "ms", "passes")
    workloads.row(*["---"] * 3)
    for text in options.codecs:
        codec = parse_codec(text)
        kind = "residual" if codec.feedback else "none"
        how = Gradient("g", (side, side), codec, Feedback(kind=kind))

        @functools.partial(jax.jit, donate_argnums=1, compiler_options=WITH_BARRIERS)
        def run(x, state, step, how=how):
            # The condition is never true, as in most steps, but the compiler does not
            # know this.
            measured = None if options.telemetry else step < 0
            totals, after, sums = synchronise(
                [how], [x], [state], Loopback(), jnp.int32(0), step, measured=measured
            )
            finite = jnp.all(sums[:, NON_FINITE] == 0)
            return totals[0], restore_unless_finite([state], after, finite), sums

        state = init_state(how, WORKERS)
        times: dict[str, list[float]] = {"codec": [], "pass": []}
        for step in range(options.rounds + 2):
            start = time.perf_counter()
            done = jax.block_until_ready(run(gradient, state, jnp.int32(step + 1)))
            (state,) = done[1]
            middle = time.perf_counter()
            jax.block_until_ready(one_pass(gradient))
            if step > 1:
                times["codec"].append(middle - start)
                times["pass"].append(time.perf_counter() - middle)
        spent = statistics.median(times["codec"])
        unit = statistics.median(times["pass"])
        workloads.row(text, f"{1e3 * spent:.2f}", f"{spent / unit:.1f}")


if __name__ == "__main__":
    main()
