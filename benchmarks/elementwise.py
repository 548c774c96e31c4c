"""Time of element-wise functions relative to a multiply-add, on simulated devices.

python benchmarks/elementwise.py
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import workloads

ELEMENTS = 1 << 16
TRIPS = 32
FUNCTIONS = {
    "multiply-add": lambda y: y * 1.0001 + 1e-6,
    "div": lambda y: 1.3 / (y + 0.1),
    "exp": lambda y: jnp.exp(-y),
    "log": lambda y: jnp.log(y + 2.0),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.lax.erf,
    "rsqrt": lambda y: jax.lax.rsqrt(y + 0.1),
    "sqrt": lambda y: jnp.sqrt(y + 0.1),
    "pow": lambda y: jnp.power(y + 0.1, 0.7),
    "sin": jnp.sin,
}


def main() -> int:
    """Prints a table: nanoseconds per element, and the ratio to a multiply-add."""
    jax.config.update("jax_platforms", "cpu")
    x = jnp.linspace(0.5, 1.5, ELEMENTS)
    loops = {
        name: jax.jit(lambda x, f=f: jax.lax.fori_loop(0, TRIPS, lambda _, y: f(y), x))
        for name, f in FUNCTIONS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop(x).block_until_ready()
    for _ in range(15):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop(x).block_until_ready()
            times[name].append(time.perf_counter() - start)
    medians = {n: statistics.median(t) / TRIPS / ELEMENTS for n, t in times.items()}
    workloads.row("function", "ns an element", "multiply-adds")
    workloads.row(*["---"] * 3)
    for name, seconds in medians.items():
        ratio = seconds / medians["multiply-add"]
        workloads.row(name, f"{seconds * 1e9:.2f}", f"{ratio:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
