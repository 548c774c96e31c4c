"""Bits of a value in each step of a ring that sums gradients, with arithmetic coding.

    python benchmarks/ring_coding.py --seeds 0 1 2

Workers train a model of characters. Their gradients become whole numbers of one grid,
which all workers share, so a ring all-reduce adds numbers and rounds nothing. In its
first half, the values of step s are sums of s workers; in its second half, all are sums
of all workers. A range coder (``constriction``) codes the values of a step with a table
of frequencies. The tables come from the training step before, whose values both sides
of a link have, so no table is sent. They count the values of all links here; a link of
a larger gradient has enough values of its own:

- ``own``: a table for each step of the ring (Adaptive Stepwise Coding, the idea of
  OSCAR-HW; nothing of it is public, so this is a construction of its abstract);
- ``pooled``: one table for all steps;
- ``first``: the table of the ring's first step for all steps.

Bits are those of the coder's output. Values outside of a table are coded as an escape
and 16 bits. Seconds of an all-reduce are bytes by the rate of a link, plus the measured
CPU seconds of the coder and of rounding; no link is used. ``float32`` and ``int8`` (a
scale for 256 values) are bytes alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pydoc_data import topics
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]

ESCAPE_BITS = 16
ESCAPED = 3e-4
"""The part of the values, the largest, that a table leaves out."""
FLOOR = 0.5
"""Counts of a value that a table has not seen."""
BLOCK = 256
"""Values to a scale of the int8 codec, which has two bytes."""
TABLES = ("own", "pooled", "first")
ELEMENTS = 25_000_000
"""Of the all-reduce whose seconds are computed."""
RATES = (50, 100, 200)


class CharacterModel:
    """Predicts a character from those before it: an embedding and two layers.

    NumPy computes its gradients, so that measured CPU seconds have no other work.
    """

    CONTEXT, VOCAB, WIDTH = 8, 128, 16

    def __init__(self, seed: int, hidden: int) -> None:
        """Makes random parameters, and Adam's moments."""
        random = np.random.default_rng(seed)
        inner = self.CONTEXT * self.WIDTH

        def normal(*shape: int) -> np.ndarray:
            return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

        self.params = [
            normal(self.VOCAB, self.WIDTH),
            normal(inner, hidden),
            np.zeros(hidden, np.float32),
            normal(hidden, self.VOCAB),
        ]
        self.moments = [(np.zeros_like(x), np.zeros_like(x)) for x in self.params]

    def gradient(self, codes: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The mean loss of windows (rows, CONTEXT + 1), and its gradient."""
        embedding, first, bias, last = self.params
        given, wanted = codes[:, :-1], codes[:, -1]
        rows = np.arange(len(codes))
        inputs = embedding[given].reshape(len(codes), -1)
        hidden = np.tanh(inputs @ first + bias)
        logits = hidden @ last
        logits -= logits.max(axis=1, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -float(np.mean(np.log(chances[rows, wanted])))
        chances[rows, wanted] -= 1.0
        chances /= len(codes)
        back = (chances @ last.T) * (1.0 - np.square(hidden))
        into = np.zeros_like(embedding)
        np.add.at(into, given, (back @ first.T).reshape(*given.shape, -1))
        return loss, [into, inputs.T @ back, back.sum(axis=0), hidden.T @ chances]

    def update(self, gradient: Sequence[np.ndarray], step: int) -> None:
        """A step of Adam."""
        for k, (g, (m, v)) in enumerate(zip(gradient, self.moments, strict=True)):
            m = 0.9 * m + 0.1 * g
            v = 0.98 * v + 0.02 * np.square(g)
            self.moments[k] = m, v
            ahead = m / (1 - 0.9 ** (step + 1))
            scale = np.sqrt(v / (1 - 0.98 ** (step + 1))) + 1e-8
            self.params[k] = self.params[k] - 2e-3 * ahead / scale


def text() -> np.ndarray:
    """Python's language reference as numbers below 128."""
    whole = "\n".join(body for _, body in sorted(topics.topics.items()))
    return np.frombuffer(whole.encode("ascii", "ignore"), np.uint8)


def gradients(
    seed: int, workers: int, steps: Sequence[int], hidden: int, rows: int
) -> Iterator[list[np.ndarray]]:
    """The gradients of all workers in some steps: (workers, ...) for each array."""
    model, codes = CharacterModel(seed, hidden), text()
    reach = np.arange(model.CONTEXT + 1)
    for step in range(max(steps) + 1):
        random = np.random.default_rng((seed, step))
        starts = random.integers(0, len(codes) - len(reach), (workers, rows))
        made = [model.gradient(codes[own[:, None] + reach])[1] for own in starts]
        each = [np.stack(x) for x in zip(*made, strict=True)]
        if step in steps:
            yield each
        model.update([x.mean(axis=0) for x in each], step)


def rounded(
    arrays: Sequence[np.ndarray], before: Sequence[np.ndarray], fineness: float
) -> np.ndarray:
    """Whole numbers of a grid, (workers, values).

    The quantum of an array is the root mean square of its elements in the step before,
    divided by the fineness: a float for each array, which workers can agree on.
    """
    quanta = [float(np.sqrt(np.mean(np.square(x)))) / fineness for x in before]
    parts = [
        np.rint(x / q).astype(np.int32).reshape(len(x), -1)
        for x, q in zip(arrays, quanta, strict=True)
        if q > 0
    ]
    return np.concatenate(parts, axis=1)


def ring_values(numbers: np.ndarray) -> list[np.ndarray]:
    """The values that all workers send in each step of a ring.

    Returns:
      For s = 1 to the number of workers: sums of s workers. The last are the sums that
      the second half of the ring sends.
    """
    workers = len(numbers)
    chunks = np.array_split(numbers, workers, axis=1)
    # Chunk c begins at worker c, and each step adds the next worker's values.
    partial = [
        np.cumsum(np.roll(chunk, -c, axis=0), axis=0) for c, chunk in enumerate(chunks)
    ]
    return [np.concatenate([x[s] for x in partial]) for s in range(workers)]


class Table:
    """Frequencies of values around zero, and an escape for all others."""

    def __init__(self, values: np.ndarray) -> None:
        """Counts values."""
        import constriction

        size = np.abs(values)
        self.most = int(np.quantile(size, 1 - ESCAPED)) + 1
        inside = np.where(size <= self.most, values, self.most + 1) + self.most
        counts = np.bincount(inside, minlength=2 * self.most + 2) + FLOOR
        self.frequencies = counts / counts.sum()
        self.model = constriction.stream.model.Categorical(
            self.frequencies.astype(np.float32), perfect=False
        )

    def symbols(self, values: np.ndarray) -> tuple[np.ndarray, int]:
        """The symbols of values, and how many of them are escapes."""
        inside = np.abs(values) <= self.most
        found = np.where(inside, values + self.most, 2 * self.most + 1)
        return found.astype(np.int32), int(np.sum(~inside))


def coded_bits(values: np.ndarray, table: Table) -> float:
    """Bits of a value in the coder's output, which is decoded and compared."""
    import constriction

    symbols, escapes = table.symbols(values)
    encoder = constriction.stream.queue.RangeEncoder()
    encoder.encode(symbols, table.model)
    words = encoder.get_compressed()
    decoder = constriction.stream.queue.RangeDecoder(words)
    back = decoder.decode(table.model, len(symbols))
    assert np.array_equal(back, symbols), "the coder returned other symbols"
    return (32 * len(words) + ESCAPE_BITS * escapes) / len(values)


def entropy(values: np.ndarray) -> float:
    """Bits of a value by the frequencies of these values."""
    counts = np.unique(values, return_counts=True)[1] / len(values)
    return float(-np.sum(counts * np.log2(counts)))


def cpu_s(function: Callable[[], Any], turns: int = 3) -> float:
    """Median CPU seconds of a call."""
    found = []
    for _ in range(turns):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return statistics.median(found)


def throughput(values: np.ndarray, table: Table) -> dict[str, float]:
    """Values a CPU second of each part of the work."""
    import constriction

    values = np.tile(values, -(-1_000_000 // len(values)))
    symbols, _ = table.symbols(values)

    def encode() -> Any:
        encoder = constriction.stream.queue.RangeEncoder()
        encoder.encode(symbols, table.model)
        return encoder.get_compressed()

    words = encode()

    def decode() -> Any:
        decoder = constriction.stream.queue.RangeDecoder(words)
        return decoder.decode(table.model, len(symbols))

    plain = values.astype(np.float32)
    seconds = {
        "encode": cpu_s(encode),
        "decode": cpu_s(decode),
        "symbols": cpu_s(lambda: table.symbols(values)),
        "table": cpu_s(lambda: Table(values)),
        "round": cpu_s(lambda: np.rint(plain * 4.0).astype(np.int32)),
        "add": cpu_s(lambda: values + values),
    }
    return {name: len(values) / x for name, x in seconds.items()}


def ring_bits(bits: Sequence[float]) -> float:
    """Bits that a worker sends of each value of the gradient, from those of each step.

    >>> ring_bits([32.0, 32.0])  # two workers: half of the values twice
    32.0
    """
    workers = len(bits)
    return (sum(bits[:-1]) + (workers - 1) * bits[-1]) / workers


def all_reduce_s(
    bits: Sequence[float],
    rate_mbit: float,
    each: dict[str, float] | None,
    *,
    beside: bool = False,
) -> float:
    """Seconds of an all-reduce of `ELEMENTS`: bytes by rate, and the coder's work.

    Each step of the first half encodes a chunk, sends it, decodes and adds it. The
    second half encodes once; each of its steps decodes what it passes on.

    Args:
      bits: bits of a value in each step.
      rate_mbit: the rate of a link.
      each: values a second of each part of the work; None: no work.
      beside: whether the work is done while other values are sent, on a core of its
        own; else the link waits.
    """
    workers = len(bits)
    wire = ring_bits(bits) * ELEMENTS / (rate_mbit * 1e6)
    if each is None:
        return wire
    chunk = ELEMENTS / workers
    out = 1 / each["encode"] + 1 / each["symbols"]
    back = 1 / each["decode"] + 1 / each["table"]
    first = (workers - 1) * chunk * (out + back + 1 / each["add"])
    second = chunk * out + (workers - 1) * chunk * back
    work = first + second + 2 * ELEMENTS / each["round"]
    return max(wire, work) if beside else wire + work


def measure(seed: int, fineness: float, options: argparse.Namespace) -> dict[str, Any]:
    """The bits of a seed, by step of the ring and by table."""
    steps = (options.steps - 2, options.steps - 1, options.steps)
    workers = options.workers
    if seed not in options.held:
        made = gradients(seed, workers, steps, options.hidden, options.rows)
        options.held[seed] = list(made)
    earlier, before, now = options.held[seed]
    old = ring_values(rounded(before, earlier, fineness))
    numbers = rounded(now, before, fineness)
    new = ring_values(numbers)
    tables = {
        "own": [Table(x) for x in old],
        "pooled": [Table(np.concatenate(old))] * len(old),
        "first": [Table(old[0])] * len(old),
    }
    bits = {
        name: [coded_bits(x, t) for x, t in zip(new, tables[name], strict=True)]
        for name in TABLES
    }
    exact = np.concatenate([x.reshape(len(x), -1) for x in now], axis=1)
    quanta = [np.sqrt(np.mean(np.square(x))) / fineness for x in before]
    back = np.concatenate(
        [
            np.rint(x / q).reshape(len(x), -1) * q if q > 0 else 0 * x
            for x, q in zip(now, quanta, strict=True)
        ],
        axis=1,
    )
    mean = exact.mean(axis=0)
    error = np.linalg.norm(back.mean(axis=0) - mean) / np.linalg.norm(mean)
    return {
        "seed": seed,
        "fineness": fineness,
        "values": int(numbers.shape[1]),
        "zeros": float(np.mean(numbers == 0)),
        "error of the mean": float(error),
        "entropy": [entropy(x) for x in new],
        "bits": bits,
        "throughput": throughput(new[workers // 2], tables["own"][workers // 2]),
    }


def summary(records: Sequence[dict[str, Any]], fineness: float) -> dict[str, Any]:
    """Means over seeds, and seconds of an all-reduce."""
    own = [x for x in records if x["fineness"] == fineness]
    workers = len(own[0]["entropy"])

    def mean(pick: Callable[[dict[str, Any]], Any]) -> list[float]:
        return np.mean([pick(x) for x in own], axis=0).round(4).tolist()

    bits = {name: mean(lambda x, n=name: x["bits"][n]) for name in TABLES}
    each = {
        part: statistics.median(x["throughput"][part] for x in own)
        for part in own[0]["throughput"]
    }
    plain = {"float32": [32.0] * workers, "int8": [8.0 + 16 / BLOCK] * workers}
    ways = {**bits, **plain}
    whole = {name: ring_bits(x) for name, x in ways.items()}
    exact = mean(lambda x: x["entropy"])
    return {
        "fineness": fineness,
        "workers": workers,
        "entropy by step": exact,
        "bits by step": bits,
        "own over entropy": round(ring_bits(bits["own"]) / ring_bits(exact) - 1, 5),
        "bits of a value": {name: round(x, 3) for name, x in whole.items()},
        "saved against pooled": round(1 - whole["own"] / whole["pooled"], 4),
        "saved against first": round(1 - whole["own"] / whole["first"], 4),
        "error of the mean": float(np.mean([x["error of the mean"] for x in own])),
        "M values a CPU second": {k: round(x / 1e6, 1) for k, x in each.items()},
        **{
            f"all-reduce s{', work beside sending' if beside else ''}": {
                str(rate): {
                    name: round(
                        all_reduce_s(
                            x, rate, None if name in plain else each, beside=beside
                        ),
                        3,
                    )
                    for name, x in ways.items()
                }
                for rate in RATES
            }
            for beside in (False, True)
        },
    }


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100, help="before the measured")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64, help="of a worker")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fineness", type=float, nargs="+", default=[1.0, 4.0, 16.0],
                        help="quanta in the root mean square of an array")  # fmt: skip
    data = ROOT / "docs" / "data" / "ring_coding.json"
    parser.add_argument("--out", type=pathlib.Path, default=data)
    options = parser.parse_args()
    options.held = {}
    records = [
        measure(seed, fineness, options)
        for seed in options.seeds
        for fineness in options.fineness
    ]
    rows = [summary(records, fineness) for fineness in options.fineness]
    for row in rows:
        print(json.dumps(row))
    command = " ".join(["python benchmarks/ring_coding.py", *sys.argv[1:]])
    made = {"commands": [command], "rows": rows, "records": records}
    options.out.write_text(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
