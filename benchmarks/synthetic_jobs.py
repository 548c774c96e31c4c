"""Synthetic programs and jobs, drawn by seed, for `scheduling_more.py`.

A program has seconds per sample for each kind of device, a number of parameters, a
noise scale and batch sizes. Its step on n nodes of d devices computes, and sums its
gradients in a ring between nodes; two thirds of the computation overlap with the ring.
As a pipeline over the nodes, it sends activations instead, and its devices wait for
(stages - 1) / (microbatches + stages - 1) of the time. A codec sends fewer bytes, takes
time to encode, and adds noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from autopar.goodput.choice import CodecError, efficiency
from autopar.goodput.curves import CurvePoint, CurveTable
from autopar.scheduler.jobs import Job, Shape
from autopar.scheduler.nodes import sizes_of
from autopar.scheduler.simulator.jobs import CurveJob, Moves

# Bytes per second between nodes, and inside one.
FAR, NEAR = 1.25e9, 1.0e10
MICROBATCHES = 8
# Bytes of state per parameter: the parameter and two moments.
STATE = 12
START_S, REFORM_S, COMPILE_S = 45.0, 2.0, 20.0
# Codec -> fraction of dense bytes, noise relative to the gradient's norm, and seconds
# per byte to encode.
CODECS = {
    "dense": (1.0, 0.0, 0.0),
    "int8": (0.26, 0.0005, 2e-11),
    "int4": (0.135, 0.1, 2e-11),
    "randk": (0.07, 3.0, 4e-11),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A synthetic program.

    Attributes:
      name: of it.
      sample_s: kind of device -> seconds of a sample on one device.
      parameters: how many.
      activations: bytes of a sample between two stages.
      base: batch size for which the program was written.
      largest: largest batch size.
      local: samples that fit on a device.
      phi: noise scale in samples.
      hours: typical hours of work on one device of the first kind, with the base batch.
    """

    name: str
    sample_s: Mapping[str, float]
    parameters: float
    activations: float
    base: int
    largest: int
    local: int
    phi: float
    hours: float


@dataclasses.dataclass(frozen=True)
class Abilities:
    """The decisions that a policy may make: plans, batches, codecs, and costs of moves
    per pair.
    """

    plan: bool = True
    batch: bool = True
    compression: bool = True
    pairs: bool = True


ALL = Abilities()
# Speeds relative to the first kind of device. Each program has other ratios.
_SPEEDS = {
    "small": {"t4": 1.0, "rtx": 1.4, "a100": 1.9},
    "image": {"t4": 1.0, "rtx": 1.9, "a100": 4.2},
    "speech": {"t4": 1.0, "rtx": 2.3, "a100": 5.0},
    "text": {"t4": 1.0, "rtx": 1.7, "a100": 7.5},
    "large": {"t4": 1.0, "rtx": 1.6, "a100": 9.0},
}
_SIZES = {
    # seconds, parameters, activations, base, largest, local, phi, hours
    "small": (0.002, 11e6, 1e5, 128, 4096, 1024, 2000.0, 0.15),
    "image": (0.012, 25e6, 8e5, 256, 12800, 256, 8000.0, 3.0),
    "speech": (0.05, 60e6, 4e5, 32, 640, 32, 300.0, 1.0),
    "text": (0.06, 340e6, 5e5, 32, 1024, 16, 600.0, 2.0),
    "large": (0.25, 1.2e9, 1e6, 16, 512, 8, 900.0, 6.0),
}
PROGRAMS = tuple(
    Program(
        name, {k: sizes[0] / by for k, by in _SPEEDS[name].items()}, *sizes[1:]
    )
    for name, sizes in _SIZES.items()
)  # fmt: skip


@functools.cache
def curve(
    program: Program,
    kinds: tuple[tuple[str, int, int], ...],
    far: float,
    can: Abilities,
) -> CurveTable:
    """The best plan, batch and codec on each configuration.

    Args:
      program: the program.
      kinds: each kind of device, with its nodes and devices per node.
      far: bytes per second between nodes.
      can: the decisions that may be made.
    """
    points = [
        _best(program, kind, -(-n // per), n, far, can)
        for kind, nodes, per in kinds
        for n in sizes_of(per, nodes * per)
    ]
    return CurveTable(points=tuple(points), base_batch=program.base)


def _best(
    program: Program, kind: str, nodes: int, devices: int, far: float, can: Abilities
) -> CurvePoint:
    found: list[tuple[float, float, int, str, str]] = []
    most = program.largest if can.batch else program.base
    batches = np.unique(np.geomspace(program.base, most, 25).astype(int))
    plans = ("data", "pipeline") if can.plan and nodes > 1 else ("data",)
    codecs = CODECS if can.compression else ("dense",)
    for batch, plan, codec in itertools.product(batches.tolist(), plans, codecs):
        step_s = _step_s(program, kind, nodes, devices, far, batch, plan, codec)
        w = CODECS[codec][1]
        replicas = devices // nodes if plan == "pipeline" else devices
        worth = efficiency(
            program.phi, batch, program.base, CodecError(own=w, workers=replicas)
        )
        found.append((batch / step_s * worth, step_s, batch, plan, codec))
    goodput, step_s, batch, plan, codec = max(found)
    return CurvePoint(
        cluster=f"{nodes}x{devices // nodes}:{kind}", kind=kind, nodes=nodes,
        devices=devices, batch=batch, step_s=step_s, goodput=goodput,
        plan=f"{plan} {codec}",
    )  # fmt: skip


def _step_s(
    program: Program, kind: str, nodes: int, devices: int, far: float,
    batch: int, plan: str, codec: str,
) -> float:  # fmt: skip
    """Seconds of a step."""
    ratio, _, encode = CODECS[codec]
    dense = 4.0 * program.parameters
    compute_s = program.sample_s[kind] * max(batch / devices, 1.0)
    near = dense * 2 * (devices // nodes - 1) / (devices // nodes) / NEAR
    if plan == "pipeline":
        sent = program.activations * batch * 2 / far
        compute_s *= (MICROBATCHES + nodes - 1) / MICROBATCHES
        return compute_s + near / nodes + sent
    sync_s = near
    if nodes > 1:
        sync_s += ratio * dense * 2 * (nodes - 1) / nodes / far + encode * dense
    hidden = compute_s * 2 / 3
    return compute_s - hidden + max(hidden, sync_s) + 0.01


def jobs(
    seed: int,
    kinds: tuple[tuple[str, int, int], ...],
    *,
    far: float = FAR,
    can: Abilities = ALL,
    count: int = 120,
    hours: float = 8.0,
) -> list[CurveJob]:
    """Jobs of the programs, with a Poisson process of arrivals and random amounts of
    work.
    """
    generator = np.random.default_rng(seed)
    times = np.sort(generator.uniform(0.0, hours * 3600.0, count))
    shares = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    made: list[CurveJob] = []
    for number, at_s in enumerate(times):
        program = PROGRAMS[generator.choice(len(PROGRAMS), p=shares)]
        spread = float(generator.lognormal(0.0, 0.8))
        first = next(iter(program.sample_s))
        work = program.hours * 3600 * spread / program.sample_s[first]
        job = Job(
            name=f"{program.name}-{number}", application=program.name,
            submitted_s=float(at_s), batch=program.base,
            devices=int(2 ** generator.integers(0, 4)),
            steps=max(round(work / program.base), 1),
        )  # fmt: skip
        table = curve(program, kinds, far, can)
        rates = {k: Rate(table, k) for k, _, _ in kinds}
        most = max(per * nodes for _, nodes, per in kinds)
        moves = _moves(program, table, far, can)
        made.append(CurveJob(job, next(iter(rates.values())), most, moves, rates))
    return made


@dataclasses.dataclass(frozen=True)
class Rate:
    """A curve whose steps each make the progress of a base batch, at the table's
    goodput.
    """

    table: CurveTable
    kind: str

    @functools.cached_property
    def _speeds(self) -> dict[Shape, float]:
        return {}

    def _speed(self, nodes: int, devices: int) -> float:
        key = nodes, devices
        if key not in self._speeds:
            point = self.table.on(self.kind).point_of(nodes, devices)
            self._speeds[key] = 0.0 if point is None else point.goodput
        return self._speeds[key]

    def goodput(self, nodes: np.ndarray, devices: np.ndarray) -> np.ndarray:
        """Samples of the base batch per second."""
        pairs = np.broadcast(nodes, devices)
        return np.array([self._speed(int(n), int(d)) for n, d in pairs]).reshape(
            pairs.shape
        )

    def step_s(self, nodes: int, devices: int) -> float:
        """Seconds to make the progress of a base batch."""
        speed = self._speed(nodes, devices)
        return self.table.base_batch / speed if speed else float("inf")


def _moves(program: Program, table: CurveTable, far: float, can: Abilities) -> Moves:
    """Seconds of moves for each pair of placements."""
    first = table.on(table.kinds[0])

    def pair_s(old: Shape, new: Shape) -> float:
        state = STATE * program.parameters
        plans = [first.plan(*shape).split(" ")[0] for shape in (old, new)]
        # Joining nodes need the whole state. If the layouts change, all nodes need it.
        moved = max(new[0] - old[0], 0) if plans[0] == plans[1] else new[0]
        sent = state * moved / max(new[0], 1) if plans[1] == "pipeline" else state
        sent_s = sent / far if moved else 0.0
        return REFORM_S + (COMPILE_S if plans[0] != plans[1] else 0.0) + sent_s

    told = None if can.pairs else START_S
    return Moves(
        start_s=START_S, join_s=0.0, change_s=START_S, by_pair=pair_s, told_s=told
    )
