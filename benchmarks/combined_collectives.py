"""Number of messages in a plan, compared with the collectives that XLA compiles.

    python benchmarks/combined_collectives.py [example ...]

The first table shows how the CPU compiler joins all-reduces, for the gradients of a
chain of layers, by number and size of the gradients. The second table is for plans of
the examples on 8 simulated devices. It has the plan's all-reduces and all-gathers, the
number of messages that the plan predicts for them (`autopar.cost.combining`), and the
collectives of the compiled program.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import workloads
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.cluster import Cluster
from autopar.cost.traffic import messages
from autopar.planner.candidate import Candidate, SearchResult
from autopar.planner.experts import expert_plans
from autopar.planner.record import make_plan
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse

DEVICES = 8
# Number of layers and width of each chain.
CHAINS = ((4, 64), (12, 8192), (200, 16))
_OPERATION = re.compile(r" = (.*?) (all-reduce|all-gather)(?:-start)?\(")
_ARRAY = re.compile(r"\w+\[")


def operations(program: Any) -> list[tuple[str, int]]:
    """Kind and number of arrays of each collective of a compiled program."""
    found = _OPERATION.findall(program.as_text())
    return [(kind, len(_ARRAY.findall(shape))) for shape, kind in found]


def chain(layers: int, width: int) -> list[tuple[str, int]]:
    """The collectives of data-parallel gradients of a chain of layers."""

    def loss(params: Any, x: Any) -> Any:
        for weight, bias in params:
            x = jnp.tanh(x @ weight + bias)
        return (x**2).mean()

    def step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    mesh = Mesh(jax.devices(), ("data",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*n)) for n in ((), ("data",)))
    shapes = ((width, width), (width,))
    params = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes)] * layers
    x = jax.ShapeDtypeStruct((32, width), "float32")
    jitted = jax.jit(step, in_shardings=(whole, split), out_shardings=whole)
    return operations(jitted.lower(params, x).compile())


def counts(found: Candidate, kind: str) -> tuple[int, float]:
    """Number of collectives of a kind (a loop's collectives count once), and of
    messages.
    """
    same = [c for c in found.collectives if found.pricer.runs_as(c.step.kind) == kind]
    sent = messages(found.pricer, found.collectives, found.assignment)
    return len(same), sent.get(kind, 0.0)


def example(name: str, seconds: float) -> None:
    """Prints the rows of one example."""
    step, args = workloads.arguments(name)
    analysis = analyse(step, args)
    cluster = Cluster.parse(f"{DEVICES}:cpu")
    for expert in expert_plans(analysis, cluster, seconds=seconds):
        found = expert.candidate
        if found is None or len(found.pricer.sizes) > 1:
            continue
        plan = make_plan(
            analysis, SearchResult(found, ((found.pricer.mesh, found),), 0)
        )
        program = planned_step(analysis, plan, device_mesh(plan)).lower().compile()
        compiled = collections.Counter(kind for kind, _ in operations(program))
        for kind in ("all_reduce", "all_gather"):
            collectives, sent = counts(found, kind)
            operation = kind.replace("_", "-")
            workloads.row(
                name, expert.name, operation, collectives, f"{sent:.0f}",
                compiled[operation],
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    workloads.row("layers", "width", "arrays of each all-reduce")
    workloads.row(*["---"] * 3)
    for layers, width in CHAINS:
        workloads.row(layers, width, [n for _, n in chain(layers, width)])
    workloads.row("example", "plan", "kind", "of the plan", "messages", "compiled")
    workloads.row(*["---"] * 6)
    for name in options.examples or ("gpt", "resnet", "lstm"):
        example(name, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
