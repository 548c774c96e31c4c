"""Times collectives over real links, and fits alpha and beta to the times.

    python benchmarks/network/collectives.py --rates 100 1000 --out links.json

The table has the median time, the bytes that a worker sent, and the fraction of the
link that was used: the bytes that the best algorithm sends, divided by time and rate.
The
file: output file has, for each collective, group size and rate, the line alpha + beta *
  nbytes. `clusters.described` makes a cluster for the planner from these lines.

Each measurement is one call, and the collectives take turns. ``two_shot`` is an
all-reduce made of an all-to-all, a local sum and an all-gather, in float32 or as bytes.
``psum in parts`` sums equally many bytes in ``--arrays`` arrays, which XLA joins into
one operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import bed
import clusters
import launch
import worker

RATES_MBIT = (100.0, 500.0, 1000.0, 10000.0)
SIZES_BYTES = (4 << 10, 256 << 10, 2 << 20, 8 << 20)
ROUNDS = 5
TIMEOUT_S = 900.0
_KEYS = ("rate_mbit", "name", "group_size", "nbytes")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective to time.

    Attributes:
      name: name in the table.
      kind: kind in the cost model, which defines ``nbytes``
        (`autopar.cluster.specs.Kind`); '' if the cost model has no such kind.
      dtype: dtype of the operand.
      sent: bytes that a worker must send, as a multiple of ``nbytes``, by group size.
    """

    name: str
    kind: str
    dtype: str
    sent: Callable[[int], float]


def _once(k: int) -> float:
    return (k - 1) / k


def _twice(k: int) -> float:
    return 2 * (k - 1) / k


COLLECTIVES = (
    Collective("psum f32", "all_reduce", "float32", _twice),
    Collective("psum in parts", "", "float32", _twice),
    Collective("two_shot f32", "", "float32", _twice),
    Collective("two_shot f32 as u8", "", "float32", _twice),
    Collective("psum_scatter f32", "reduce_scatter", "float32", _once),
    Collective("all_to_all u8", "all_to_all", "uint8", _once),
    Collective("all_gather u8", "all_gather", "uint8", _once),
    Collective("ppermute f32", "collective_permute", "float32", lambda k: 1.0),
)


def two_shot(x: Any, k: int, wire: str) -> Any:
    """An all-reduce of float32 (k * c,), sent as float32 or as bytes."""
    import jax
    import jax.numpy as jnp

    def cast(y: Any, dtype: str) -> Any:
        return y if wire == "float32" else jax.lax.bitcast_convert_type(y, dtype)

    parts = cast(x.reshape(k, -1), wire)
    mine = cast(jax.lax.all_to_all(parts, "member", 0, 0, tiled=True), "float32")
    own = cast(jnp.sum(mine, axis=0), wire)
    return cast(jax.lax.all_gather(own, "member", tiled=True), "float32")


def body(name: str, k: int) -> Callable[[Any], Any]:
    """The collective over the axis "member" of ``k`` devices."""
    import jax

    ring = [(i, (i + 1) % k) for i in range(k)]
    bodies: dict[str, Callable[[Any], Any]] = {
        "psum f32": lambda x: jax.lax.psum(x, "member"),
        "psum in parts": lambda x: jax.lax.psum(x, "member"),
        "two_shot f32": lambda x: two_shot(x, k, "float32"),
        "two_shot f32 as u8": lambda x: two_shot(x, k, "uint8"),
        "psum_scatter f32": lambda x: jax.lax.psum_scatter(x, "member", tiled=True),
        "all_to_all u8": lambda x: jax.lax.all_to_all(x, "member", 0, 0, tiled=True),
        "all_gather u8": lambda x: jax.lax.all_gather(x, "member", tiled=True),
        "ppermute f32": lambda x: jax.lax.ppermute(x, "member", ring),
    }
    return bodies[name]


def program(of: Collective, k: int, nbytes: int, arrays: int) -> Callable[[], None]:
    """Compiles a collective in groups of ``k`` devices; a call waits for its end.

    Args:
      of: the collective.
      k: number of devices of a group.
      nbytes: bytes of all operands.
      arrays: number of arrays, for a collective in parts.
    """
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    shape = (jax.device_count() // k, k)
    mesh = jax.make_mesh(shape, ("group", "member"), (AxisType.Auto,) * 2)
    spec = PartitionSpec(("group", "member"))
    local = nbytes // (k if of.kind == "all_gather" else 1)
    count = arrays if of.name == "psum in parts" else 1
    elements = max(1, local // np.dtype(of.dtype).itemsize // k // count) * k
    one = np.ones((1, elements), of.dtype)
    where = NamedSharding(mesh, spec)
    x = [jax.make_array_from_process_local_data(where, one) for _ in range(count)]
    run = body(of.name, k)
    mapped = jax.shard_map(
        lambda xs: [run(x[0])[None] for x in xs],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(x).compile()

    def call() -> None:
        jax.block_until_ready(compiled(x))

    return call


def inside(options: argparse.Namespace) -> None:
    """The work of every worker: times all programs at all rates."""
    worker.start()
    idle = worker.background()
    worker.report({"background_bytes_per_s": idle.per_s.sent_bytes})
    programs = {
        (of.name, k, n): program(of, k, n, options.arrays)
        for k in options.groups
        for of in COLLECTIVES
        for n in options.sizes
    }
    for call in programs.values():
        call()  # makes the connections
    for rate in options.rates:
        worker.set_rate(rate or None)
        for (name, k, n), found in time_all(programs, options.rounds, idle).items():
            worker.report(
                {"rate_mbit": rate, "name": name, "group_size": k, "nbytes": n, **found}
            )
        worker.say(f"timed at {rate:g} Mbit/s")


def time_all(
    programs: dict[Any, Callable[[], None]], rounds: int, idle: worker.Background
) -> dict[Any, dict[str, float]]:
    """Median seconds of every program, measured in turns, and the bytes of one call."""
    times: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key, call in programs.items():
            worker.barrier()
            started_s = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - started_s)
    found: dict[Any, dict[str, float]] = {}
    for key, call in programs.items():
        sent, _ = worker.measure(call, idle)
        found[key] = {
            "seconds": statistics.median(times[key]),
            "least_s": min(times[key]),
            "sent_bytes": sent.sent_bytes,
            "data_bytes": sent.data_bytes,
            "wire_bytes": sent.wire_bytes,
        }
    return found


def slowest(results: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every measurement, the longest time and most bytes of any worker."""
    kept: dict[Any, dict[str, Any]] = {}
    for record in (r for found in results for r in found if "name" in r):
        key = tuple(record[k] for k in _KEYS)
        known = kept.setdefault(key, record)
        kept[key] = {
            k: v if k in _KEYS else max(v, known[k]) for k, v in record.items()
        }
    return list(kept.values())


def link_part(record: dict[str, Any]) -> float:
    """The fraction of the link that was used; nan without a limit."""
    if not record["rate_mbit"]:
        return float("nan")
    of = next(c for c in COLLECTIVES if c.name == record["name"])
    sent_bits = 8 * record["nbytes"] * of.sent(record["group_size"])
    return sent_bits / (record["seconds"] * record["rate_mbit"] * 1e6)


def table(records: Sequence[dict[str, Any]]) -> str:
    """The measurements in Markdown."""
    lines = [
        "| Mbit/s | collective | group | KiB | ms | link used | data sent / needed |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        of = next(c for c in COLLECTIVES if c.name == r["name"])
        need = of.sent(r["group_size"]) * r["nbytes"]
        used = link_part(r)
        lines.append(
            f"| {r['rate_mbit'] or 'unshaped'} | {r['name']} | {r['group_size']} "
            f"| {r['nbytes'] / 1024:g} | {r['seconds'] * 1e3:.2f} "
            f"| {'' if math.isnan(used) else format(used, '.0%')} "
            f"| {r['data_bytes'] / need:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT,
                        help="Mbit/s; 0: unshaped")  # fmt: skip
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_BYTES)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--arrays", type=int, default=16, help="of a sum in parts")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--congestion", default=bed.CONGESTION)
    parser.add_argument("--out", type=pathlib.Path, help="the fits, as JSON")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return 0
    command = [sys.executable, __file__, "--inside", *sys.argv[1:]]
    try:
        with bed.Bed(options.hosts, congestion=options.congestion) as hosts:
            results = hosts.run(command, timeout_s=TIMEOUT_S)
    except (bed.BedUnavailable, launch.RunFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    records = slowest(results)
    print(table(records))
    if options.out:
        fits = clusters.fit(records, {c.name: c.kind for c in COLLECTIVES})
        found = {"records": records, "fits": fits, "machine": clusters.machine()}
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
