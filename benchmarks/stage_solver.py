"""Cuts chains of layers into pipeline stages: times, sizes and gaps of the solver.

python benchmarks/stage_solver.py
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np

from autopar_solver.stages.completion import check_stages
from autopar_solver.stages.problem import (
    DeviceGroup,
    LayerCosts,
    StageProblem,
    SubmeshOption,
)
from autopar_solver.stages.schedules.play import Schedule, ScheduleKind
from autopar_solver.stages.solve import solve_stages

SCHEDULES = (
    Schedule(ScheduleKind.ONE_F_ONE_B),
    Schedule(ScheduleKind.GPIPE),
    Schedule(ScheduleKind.INTERLEAVED, 2),
    Schedule(ScheduleKind.ZERO_BUBBLE),
)
HOST = 8
# Bytes per second of each device's share: within a host, and between hosts.
INSIDE, BETWEEN = 250e9, 20e9
LATENCY_S = 2e-5
STATE_BYTES = 16.0


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh: tensor parallel within a host, data parallel otherwise."""

    devices: int
    tensor: int
    sharded: bool

    @property
    def data(self) -> int:
        """The number of replicas."""
        return self.devices // self.tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """A random chain on hosts of eight devices.

    ``kinds`` is the number of different layers; with 0 all layers are different.
    """

    name: str
    layers: int
    hosts: int
    width: int
    batch: int
    seed: int = 0
    kinds: int = 1
    slower: float = 1.0
    memory_bytes: float = 72e9


CASES = (
    Case("GPT 16 layers, 8x8", 16, 8, 2048, 512),
    Case("irregular 16 layers, 8x8, 2 GB", 16, 8, 2048, 512, kinds=0, memory_bytes=2e9),
    Case("4x8 and 4x8 half as fast", 16, 8, 2048, 512, slower=0.5),
    Case("GPT 48 layers, 64x8", 48, 64, 8192, 1024),
    Case("GPT 96 layers, 128x8", 96, 128, 12288, 1536),
    Case("4 kinds of 96 layers, 128x8", 96, 128, 12288, 1536, kinds=4),
    Case("irregular 96 layers, 128x8", 96, 128, 12288, 1536, kinds=0),
)


def meshes(hosts: int) -> list[Mesh]:
    """Meshes whose sizes are powers of two, within a host and then of hosts; at most
    six for each size.
    """
    sizes = [1, 2, 4] + [
        HOST * 2**k for k in range(hosts.bit_length()) if 2**k <= hosts
    ]
    return [
        Mesh(size, tensor, sharded)
        for size in sizes
        for tensor in (1, 4, 8)
        for sharded in (False, True)
        if tensor <= size and not (sharded and size == tensor)
    ]


def layer_sizes(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Parameters, and activation bytes per sample, of each layer."""
    random = np.random.default_rng(case.seed)
    scale = np.ones(case.layers)
    if case.kinds != 1:
        kinds = case.kinds or case.layers
        own = np.sort(random.uniform(0.5, 1.5, kinds))
        scale = own[np.arange(case.layers) % kinds]
        random.shuffle(scale)
    return 12 * case.width**2 * scale, 34 * 1024 * case.width * scale


def costs_of(case: Case, options: list[Mesh], speeds: list[float], count: int):
    """A roofline model of transformer layers under data and tensor parallelism."""
    parameters, activations = (x[:, None] for x in layer_sizes(case))
    data = np.array([mesh.data for mesh in options])
    tensor = np.array([mesh.tensor for mesh in options])
    samples = case.batch / count / data
    possible = samples >= 1
    work = 2 * parameters * 1024 * samples / tensor
    rate = 150e12 * np.array(speeds) * samples * 1024 / (samples * 1024 + 256)
    sent = 4 * 1024 * case.width * samples * (tensor - 1) / tensor
    link = np.where(data * tensor > HOST, BETWEEN, INSIDE)
    sharded = np.array([mesh.sharded for mesh in options])
    gathered = np.where(sharded, 2 * parameters / tensor * (data - 1) / data, 0.0)
    forward = work / rate + sent / INSIDE + gathered / link
    reduced = 4 * parameters / tensor * (data - 1) / data
    own = np.array([mesh.data if mesh.sharded else 1 for mesh in options])
    resident = parameters / tensor * (4 + (STATE_BYTES - 4) / own)
    kept = activations * samples / tensor
    boundary = np.broadcast_to(2 * 1024 * case.width * samples, kept.shape)
    crossing = 2 * 1024 * case.width * case.batch / count
    links = np.full((case.layers - 1, 1, 1), crossing / HOST / BETWEEN)
    return LayerCosts(
        microbatches=count,
        forward_s=np.where(possible, forward, np.inf),
        backward_input_s=forward,
        backward_weight_s=work / rate,
        step_s=0.5 * reduced / link + resident / 1e12,
        resident_bytes=resident,
        activation_bytes=kept,
        boundary_bytes=boundary,
        recompute_s=forward,
        transient_bytes=0.2 * kept,
        forward_link_s=links,
        backward_link_s=links,
        latency_s=np.full((1, 1), LATENCY_S),
    )


def problem_of(case: Case) -> StageProblem:
    """The stage problem of a case; numbers of microbatches are powers of two."""
    mixed = case.slower != 1
    hosts = case.hosts // 2 if mixed else case.hosts
    each = meshes(hosts)
    groups = (DeviceGroup(hosts * HOST, case.memory_bytes),) * (2 if mixed else 1)
    options = [
        SubmeshOption(group, mesh.devices, name=f"{mesh}")
        for group in range(len(groups))
        for mesh in each
    ]
    speeds = [case.slower if option.group else 1.0 for option in options]
    counts = [2**k for k in range(10)]
    return StageProblem(
        name=case.name,
        groups=groups,
        options=tuple(options),
        costs=tuple(
            costs_of(case, each * len(groups), speeds, count) for count in counts
        ),
        schedules=SCHEDULES,
    )


def main() -> None:
    """Solves the cases and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--gap", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, help="wall-clock limit of each case")
    parser.add_argument("--without", default="", help="a kind of schedule to leave out")
    arguments = parser.parse_args()
    print("| chain | options | CPU s | step s | gap | M | schedule | stages |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        problem = problem_of(case)
        left = [s for s in SCHEDULES if s.kind.value != arguments.without]
        problem = dataclasses.replace(problem, schedules=tuple(left))
        begin = time.process_time()
        solution = solve_stages(problem, gap=arguments.gap, seconds=arguments.seconds)
        used = time.process_time() - begin
        check_stages(problem, solution)
        found = solution.pipeline
        shown = (
            "none"
            if found is None
            else (
                f"{solution.step_s:.4f} | {solution.gap:.1e} | {found.microbatches} | "
                f"{found.schedule.name} | {found.stages}"
            )
        )
        print(f"| {case.name} | {len(problem.options)} | {used:.2f} | {shown} |")


if __name__ == "__main__":
    main()
