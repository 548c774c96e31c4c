"""Compares the order of measured arms of expert parallelism with the cost model.

    python benchmarks/expert_arms.py [--only TEXT] [--layers 2] [--json FILE]

An arm is a way to train a mixture of experts on a cluster. Its experts are gathered
like other parameters (``fsdp``), or an axis of the mesh splits them. Tokens then reach
their experts by all-gathers and reduce-scatters of all tokens (``ring``), by an
all-to-all (``all-to-all``), or by XLA's ragged all-to-all, one block of threads for
each peer (``one-shot``). The arms were measured by others: the public issues of
github.com/marin-community/marin that the table names.

A few layers of each model are planned for the arm's cluster. The axis of the arm splits
the experts in their products, and all other axes split rows. From the predicted step,
the seconds in which devices of this axis exchange tokens are taken off, and those of
the arm's own exchange are added. There are six exchanges in a
layer: to the experts and back in the forward pass, once more where the layer is
computed again, and in the backward pass. No constant was fitted to these arms, so all
of them are held out.

Kendall's tau counts the pairs of arms of one source whose measured steps differ by over
5 %. Writes ``docs/data/expert_arms.json`` and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import decoder
import large
import mixture
import workloads
from jax.sharding import PartitionSpec as P

from autopar.cluster import Cluster, MeshShape
from autopar.cost.collectives import collective_s
from autopar.cost.pricer import Pricer
from autopar.layouts.strategies import Strategy
from autopar.planner.candidate import Candidate
from autopar.planner.hints import pin_restriction, pinned_layouts
from autopar.planner.problem import Restriction
from autopar.planner.search import candidate_meshes, search
from autopar.steps.analysis import Analysis, analyse
from autopar.steps.for_devices import alternatives, for_devices
from autopar.steps.nodes import Node

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "expert_arms.json"
# Bytes per second that one block of threads of XLA's one-shot ragged all-to-all copies:
# 16.42 GiB/s from each of 8 B200, one block for each of 8 devices (openxla/xla#33386).
# That each peer has one block says marin-community/marin#8077.
BLOCK_BYTES_PER_S = 16.42 * 2**30 / 8
# Exchanges of tokens in a layer that is computed again.
EXCHANGES = 6
# Measured steps that differ by a smaller fraction count as equal.
EQUAL = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A model and a cluster, and the measured seconds of a step of each arm.

    Attributes:
      issue: the public issue.
      cluster: the cluster.
      layers: the layers of the measured model.
      width: the width of the model.
      inner: the inner width of an expert.
      experts: the experts of a layer; each token has 4 of them.
      rows: rows of 4,096 tokens of the batch.
      arms: (exchange, devices that share the experts) -> seconds.
    """

    issue: str
    cluster: str
    layers: int
    width: int
    inner: int
    experts: int
    rows: int
    arms: dict[tuple[str, int], float]


def _seconds(rows: int, tokens_per_s: float) -> float:
    return rows * TOKENS / tokens_per_s


TOKENS, CHOSEN = 4096, 4
SOURCES = {
    "8 B200": Source(
        *("marin#7012", "8:b200", 26, 2560, 1280, 64, 128),
        {
            ("fsdp", 1): 3.28,
            ("ring", 2): 3.73,
            ("ring", 4): 3.69,
            ("ring", 8): 3.85,
            ("one-shot", 2): 51.0,
            ("one-shot", 4): 27.3,
            ("one-shot", 8): 15.6,
        },
    ),
    # Four copies of the model on 32 devices each; one copy is planned. ``ring`` over 4
    # devices was measured twice: 16.32 and 14.76 s.
    "128 B200": Source(
        *("marin#7279", "4x8:b200", 48, 5120, 2560, 64, 512),
        {
            ("fsdp", 1): 14.57,
            ("ring", 4): (16.32 + 14.76) / 2,
            ("ring", 8): 14.63,
            ("one-shot", 4): 86.0,
        },
    ),
    "8 H100": Source(
        *("marin#6979", "8:h100", 26, 2560, 1280, 64, 128),
        {
            ("ring", 2): _seconds(128, 148.9e3),
            ("ring", 4): _seconds(128, 136.4e3),
            ("ring", 8): _seconds(128, 122.7e3),
            ("one-shot", 8): _seconds(128, 41.8e3),
        },
    ),
    "4 GB200": Source(
        *("marin#7279", "4:gb200", 8, 3072, 1536, 128, 64),
        {("ring", 4): 2.0574, ("all-to-all", 4): 2.2287},
    ),
    "64 GB200": Source(
        *("marin#7981", "64:gb200", 48, 6144, 3072, 128, 1024),
        {
            ("fsdp", 1): _seconds(1024, 235_125),
            ("all-to-all", 64): _seconds(1024, 316_473),
        },
    ),
}


def analysed(source: Source, layers: int) -> Analysis:
    """The step of some layers of a source's model, with slots for sorted rows."""
    cluster = Cluster.parse(source.cluster)
    heads = source.width // 128
    model = decoder.Decoder(
        family="llama",
        layers=layers,
        d_model=source.width,
        heads=heads,
        kv_heads=heads // 4,
        head_dim=128,
        ffn=source.inner,
        vocab=128256,
    )
    shared = source.width // source.inner
    experts = mixture.Experts(source.experts, CHOSEN, shared, dropless=True)
    rows = source.rows // cluster.num_devices
    case = large.Language(model, TOKENS, rows, "full", experts)
    step, args = case.build(cluster)
    blocks = for_devices(analyse(step, args), cluster.num_devices)
    program, *_ = alternatives(blocks, cluster.num_devices, cluster.device)
    if not program.row_capacity:
        raise ValueError(f"{source.issue}: {program.graph.assumed_trips[-1]}.")
    return program


def roomy(text: str) -> Cluster:
    """A cluster whose memory is no limit: all arms ran, with other programs."""
    cluster = Cluster.parse(text)
    device = dataclasses.replace(cluster.device, memory_bytes=1 << 42)
    return dataclasses.replace(cluster, device=device)


def mesh_and_layouts(
    cluster: Cluster, shared_by: int
) -> tuple[MeshShape, dict[str, P], tuple[int, ...]]:
    """The mesh, the layouts of experts on it, and the axes that split experts."""
    for mesh in candidate_meshes(cluster, max_axes=3):
        inner = [k for k, a in enumerate(mesh.axes) if a.level == mesh.axes[-1].level]
        axis = next((k for k in inner if mesh.axes[k].size == shared_by), None)
        if shared_by == 1:
            own: tuple[int, ...] = ()
        elif axis is not None:
            own = (axis,)
        else:
            continue
        first = tuple(mesh.names[k] for k in own)
        rest = tuple(n for n in mesh.names if n not in first)
        up, down = P(first, rest), P(first, None, rest)
        return mesh, {"*/gate": up, "*/up": up, "*/down": down}, own
    raise ValueError(f"{cluster} has no mesh axis of {shared_by} devices.")


def expert_factors(program: Analysis, experts: int) -> dict[int, tuple[int, int]]:
    """Node of a product of all experts -> its factors: experts, and blocks of rows.

    In a product with slots, both operands and the result have the experts.
    """
    found: dict[int, tuple[int, int]] = {}
    for op in program.graph.operators:
        rule, number = op.rule, program.contraction.node_of.get(op.class_index)
        if op.kind != "dot_general" or number is None:
            continue
        arrays = (*rule.operands, rule.results[0])
        shared = frozenset.intersection(*map(rule.factors_of, arrays))
        node = program.contraction.nodes[number]
        mapping = node.members[op.class_index]
        sizes = [size for size, _ in node.factors]
        own = [mapping[f] for f in shared if rule.sizes[f] == experts]
        if own and program.row_blocks in sizes:
            found[number] = own[0], sizes.index(program.row_blocks)
    return found


def planned(
    program: Analysis, cluster: Cluster, shared_by: int, experts: int
) -> tuple[Any, ...]:
    """The plan with experts that some devices share, and the axes that split them.

    In products of the experts, all other axes split the rows.
    """
    mesh, pins, own = mesh_and_layouts(cluster, shared_by)

    factors = expert_factors(program, experts)
    others = set(range(len(mesh.axes))) - set(own)

    def restriction(pricer: Pricer) -> Restriction:
        pinned = pin_restriction(program, pinned_layouts(program, pins, pricer.mesh))

        def is_allowed(node: Node, strategy: Strategy) -> bool:
            if node.index in factors:
                first, rows = (set(strategy[f]) for f in factors[node.index])
                if first != set(own) or rows != others:
                    return False
            return pinned(node, strategy)

        return is_allowed

    found = search(
        program,
        cluster,
        meshes=[mesh],
        seconds=5.0,
        restriction=restriction,
        untried=None,
        experts=False,
    )
    return found.best, own


def exchanged_s(best: Candidate, own: tuple[int, ...]) -> float:
    """Seconds in which a plan's devices send each other tokens, in all layers."""
    labels = best.assignment.analysis.dim_labels
    return sum(
        c.seconds(best.pricer)
        for c in best.collectives
        if c.step.axes == own and labels.degree(c.value)
    )


def transfer_s(
    exchange: str, source: Source, pricer: Pricer, own: tuple[int, ...]
) -> float:
    """Seconds in which one layer's tokens reach their experts, or come back."""
    axes = tuple(pricer.mesh.axes[k] for k in own)
    count = pricer.group(own)
    tokens = source.rows * TOKENS // pricer.cluster.num_devices
    nbytes = 2.0 * tokens * source.width
    match exchange:
        case "fsdp":
            return 0.0
        case "ring":
            kinds = "all_gather", "reduce_scatter"
            return sum(collective_s(k, count * nbytes, axes) for k in kinds) / 2
        case "all-to-all":
            return collective_s("all_to_all", CHOSEN * nbytes, axes)
        case _:
            return CHOSEN * nbytes / count / BLOCK_BYTES_PER_S


def figures(name: str, layers: int) -> dict[str, Any]:
    """Measured and predicted seconds of each arm of a source."""
    source = SOURCES[name]
    program, cluster = analysed(source, layers), roomy(source.cluster)
    plans = {
        n: planned(program, cluster, n, source.experts)
        for n in {n for _, n in source.arms}
    }
    rows: list[dict[str, Any]] = []
    for (exchange, count), measured in source.arms.items():
        best, own = plans[count]
        sent = exchanged_s(best, own) if own else 0.0
        moved = EXCHANGES * layers * transfer_s(exchange, source, best.pricer, own)
        rows.append(
            {
                "exchange": exchange,
                "devices": count,
                "measured_s": round(measured, 3),
                "predicted_s": best.step_s - sent + moved,
                "exchange_s": moved,
                "planned_exchange_s": sent,
            }
        )
    return {
        "source": name,
        "issue": source.issue,
        "layers": source.layers,
        "planned_layers": layers,
        "arms": rows,
    }


def pairs(found: list[dict[str, Any]]) -> list[bool]:
    """For each pair of arms of a source, whether its order is predicted right."""
    out: list[bool] = []
    for source in found:
        for one, other in itertools.combinations(source["arms"], 2):
            slow, fast = sorted((one, other), key=lambda a: -a["measured_s"])
            if slow["measured_s"] > (1 + EQUAL) * fast["measured_s"]:
                out.append(slow["predicted_s"] > fast["predicted_s"])
    return out


def without(source: dict[str, Any], exchange: str) -> dict[str, Any]:
    """A source without the arms of an exchange."""
    arms = [arm for arm in source["arms"] if arm["exchange"] != exchange]
    return source | {"arms": arms}


def tau(found: list[dict[str, Any]]) -> float:
    """Kendall's tau over the pairs whose measured steps differ."""
    right = pairs(found)
    return (2 * sum(right) - len(right)) / len(right)


def main() -> None:
    """Prints the table and writes the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="how sources' names begin")
    parser.add_argument("--layers", type=int, default=2, help="layers to plan")
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    asked = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if asked.json.exists():
        known = {s["source"]: s for s in json.loads(asked.json.read_text())["sources"]}
    workloads.row("source", "exchange", "devices", "measured s", "predicted s")
    workloads.row(*["---"] * 5)
    for name in (name for name in SOURCES if name.startswith(asked.only)):
        known[name] = figures(name, asked.layers)
        for arm in known[name]["arms"]:
            seconds = f"{arm['measured_s']:.3g}", f"{arm['predicted_s']:.3g}"
            workloads.row(name, arm["exchange"], arm["devices"], *seconds)
    found = [known[name] for name in SOURCES if name in known]
    few = [without(one, "one-shot") for one in found]
    data = {
        "command": "python benchmarks/expert_arms.py",
        "tau": tau(found),
        "pairs": len(pairs(found)),
        "tau_without_one_shot": tau(few),
        "pairs_without_one_shot": len(pairs(few)),
        "sources": found,
    }
    asked.json.write_text(json.dumps(data, indent=1) + "\n")
    for which, own in (("all arms", found), ("without one-shot", few)):
        print(f"Kendall's tau, {which}: {tau(own):.2f} over {len(pairs(own))} pairs")


if __name__ == "__main__":
    main()
