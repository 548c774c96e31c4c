"""Number of programs if changes of codecs are inputs, and the bytes that this costs.

    python benchmarks/codec_inputs.py

The gradients are the matrices of a small GPT, summed over four workers. The changes of
codecs are simulated: `Dct` doubles the fractions of gradients in a random order until
every fraction is at most a quarter, and `LGreCo` draws ranks around four. Nothing runs,
and nothing is compiled: the benchmark counts one program for each limit and room
(`autopar.compression.adjusting`). Bytes are relative to messages without unused room.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import workloads

from autopar.compression import adjusting
from autopar.compression.adjusting import Adjustable, Adjusted, limit_of, room_for
from autopar.compression.codecs.registry import parse_codec

WORKERS = 4
SHAPES = [(256, 1024), (1024, 256), (256, 256), (256, 768)] * 6 + [(96, 256), (256, 96)]
HEADING = ("policy", "rooms apart", "sets", "programs", "mean bytes", "most bytes")


def dct() -> list[list[str]]:
    """The sets of codecs that `Dct` uses, in order of time."""
    shares = [0.01] * len(SHAPES)
    found = [list(shares)]
    while open_ := [k for k, share in enumerate(shares) if share < 0.25]:
        for k in random.sample(open_, min(len(open_), random.choice([1, 1, 2, 5]))):
            shares[k] = min(0.25, shares[k] * 2)
        found.append(list(shares))
    return [[f"threshold:ratio={share}" for share in row] for row in found]


def lgreco() -> list[list[str]]:
    """The sets of codecs that `LGreCo` uses, in order of time."""
    ranks = [[round(random.gauss(4, 1.5)) for _ in SHAPES] for _ in range(30)]
    return [[f"powersgd:rank={max(2, min(8, r))}" for r in row] for row in ranks]


def programs(sets: Sequence[Sequence[str]]) -> tuple[int, int, float, float]:
    """Numbers of different sets and of programs; mean and maximum of bytes over exact
    bytes.
    """
    found: set[object] = set()
    ratios: list[float] = []
    for texts in sets:
        group = [
            Adjusted(parse_codec(text), shape, WORKERS, scatter=False)
            for text, shape in zip(texts, SHAPES, strict=True)
        ]
        limit = limit_of([g.codec for g in group])
        room = room_for(group, limit)
        found.add((limit, room))
        exact = sum(g.codec.wire_bytes(g.shape, WORKERS) for g in group)
        codec = Adjustable(limit, room)
        there = sum(codec.wire_bytes(g.shape, WORKERS) for g in group)
        ratios.append(there / exact)
    different = len({tuple(texts) for texts in sets})
    return different, len(found), sum(ratios) / len(ratios), max(ratios)


def main() -> None:
    """Prints the table."""
    random.seed(1)
    changes = {"Dct": dct(), "LGreCo": lgreco()}
    workloads.row(*HEADING)
    workloads.row(*["---"] * len(HEADING))
    for name, sets in changes.items():
        for steps in (1, 2, 4):
            with mock.patch.object(adjusting, "_STEPS", steps):
                count, made, mean, most = programs(sets)
            apart = f"{2 ** (1 / steps):.2f}"
            workloads.row(name, apart, count, made, f"{mean:.2f}", f"{most:.2f}")


if __name__ == "__main__":
    main()
