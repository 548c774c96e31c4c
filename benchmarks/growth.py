"""Growth of the step time with the number of devices, predicted and published.

    python benchmarks/growth.py [--only TEXT] [--rows FILE] [--limit 20]

The figures come from two sources. Each strategy of a source is priced on its own mesh:

* InternLM-7B on A100s at 50 Gb/s a device, 8 sequences per device: ZeRO-1 within a host
  or over all devices, with and without tensor parallelism (InternLM,
  doc/en/train_performance.md);
* Llama 3 8B on H100s by torchtitan: FSDP, and FSDP with tensor parallelism of 8
  (pytorch/torchtitan, benchmarks). The cards are limited to 500 W and have a memory
  bandwidth of 2.4 TB/s (`TITAN`), as in `benchmarks/published.py`.

InternLM's ZeRO-1 does not gather parameters during the forward pass. After the update,
each device broadcasts its part of the parameters, one device after the other, when no
work is left to overlap (internlm/solver/optimizer/hybrid_zero_optim.py). Therefore
these rows are priced without the plan's gathers, but with `broadcasts_s`, by NCCL's own
model.

FILE is a JSON list of more rows in the form of `ROWS`. The command prints a JSON line
for each row. Then it prints a line for each pair of sizes of a strategy, with the
measured and the predicted increase of the step's seconds, and whether rows with equally
many devices are in the measured order. A pair is right if the increases differ by less
than 0.1 s, or by less than a fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import decoder

import autopar
from autopar.cluster.presets import STREAM_EFFICIENCY
from autopar.cost.breakdown import step_s
from autopar.cost.combining import GATHERS
from autopar.cost.estimate import messages_of
from autopar.cost.pricer import Pricer
from autopar.cost.traffic import Collective
from autopar.errors import InfeasibleError
from autopar.planner.candidate import Candidate
from autopar.planner.recipes import Recipe, restriction_of
from autopar.planner.search import candidate_meshes
from autopar.planner.solving import solve_mesh
from autopar.steps.analysis import Analysis, analyse

# Rows whose seconds differ by less than this fraction have no order.
ALIKE = 0.01
# NCCL's model of a ring broadcast with the Simple protocol (src/graph/tuning.cc,
# version 2.29): seconds to start, and seconds of each step between hosts and within a
# host.
START_S, NETWORK_STEP_S, NVLINK_STEP_S = 8.4e-6, 14.0e-6, 4.0e-6
# torchtitan's cards: H100s limited to 500 of 700 W. Their memory bandwidth is 2.4 TB/s,
# of which a large copy reaches a fraction.
TITAN = {
    "memory_bandwidth_bytes_per_s": 2.4e12 * STREAM_EFFICIENCY,
    "power_part": 500 / 700,
}
INTERNLM = {
    "family": "llama", "layers": 32, "d_model": 4096, "heads": 32, "kv_heads": 32,
    "head_dim": 128, "ffn": 11008, "vocab": 103168,
}  # fmt: skip
LLAMA = INTERNLM | {"kv_heads": 8, "ffn": 14336, "vocab": 128256}


def row(
    source: str, hosts: int, tensor: int, strategy: str, measured: float | None
) -> dict[str, Any]:
    """One measured configuration; ``measured`` is seconds a step."""
    internlm = source == "internlm-7b"
    device = "a100,network=50Gb/s" if internlm else "h100"
    return {
        "id": f"{source}/{8 * hosts}/tensor{tensor}/{strategy}",
        "series": f"{source}/tensor{tensor}/{strategy}",
        "cluster": f"{hosts}x8:{device}",
        "model": INTERNLM if internlm else LLAMA,
        "sequence": 2048 if internlm else 8192,
        "rows": 8 if internlm else 2,
        "remat": "none" if internlm else "dots",
        "tensor": tensor,
        "strategy": strategy,
        "broadcasts": internlm,
        "device_overrides": {} if internlm else TITAN,
        "step_s": measured,
    }


# On one host, ZeRO-1 within a host and over all devices are the same. torchtitan's
# steps take 2.458 s on 8 devices, and 0.058 s more on 128 devices. With tensor
# parallelism of 8, a token takes 1.49 times as long.
ROWS = [
    row("internlm-7b", 1, 1, "zero-1 within", 4.018),
    row("internlm-7b", 8, 1, "zero-1 within", 4.154),
    row("internlm-7b", 32, 1, "zero-1 within", 4.180),
    row("internlm-7b", 1, 1, "zero-1 over all", 4.033),
    row("internlm-7b", 8, 1, "zero-1 over all", 4.440),
    row("internlm-7b", 32, 1, "zero-1 over all", 5.106),
    row("internlm-7b", 8, 2, "zero-1 within", 4.489),
    row("internlm-7b", 32, 2, "zero-1 within", 4.485),
    row("internlm-7b", 8, 2, "zero-1 over all", 4.766),
    row("internlm-7b", 32, 2, "zero-1 over all", 5.295),
    row("titan-8b", 1, 1, "fsdp", 2.458),
    row("titan-8b", 16, 1, "fsdp", 2.516),
    row("titan-8b", 16, 8, "fsdp", 1.49 * 2.516),
]


def recipe_of(given: dict[str, Any], axes: int) -> Recipe:
    """The expert rule of a row's strategy, on a mesh whose last axis may be tensor
    parallel.
    """
    every = tuple(range(axes))
    data, tensor = (every, ()) if given["tensor"] == 1 else (every[:-1], every[-1:])
    return Recipe(
        given["id"],
        data,
        tensor,
        shard_parameters=given["strategy"] == "fsdp",
        shard_optimizer=True,
        within=data[-1:] if given["strategy"].endswith("within") else None,
    )


def analysed(given: dict[str, Any], cluster: autopar.Cluster) -> Analysis:
    """The step of a row."""
    run = decoder.Run(
        sequence=given["sequence"],
        batch=given["rows"] * cluster.num_devices,
        dtype="bfloat16",
        remat=given["remat"],
        attention="cudnn",
    )
    return analyse(*decoder.train_step(decoder.Decoder(**given["model"]), run))


def priced(
    given: dict[str, Any], analysis: Analysis, cluster: autopar.Cluster, seconds: float
) -> Candidate:
    """The best plan within a row's strategy; if no plan seems to fit, any plan."""
    tensor = given["tensor"]
    for memory in (cluster.device.memory_bytes, 10**15):
        device = dataclasses.replace(cluster.device, memory_bytes=memory)
        roomy = dataclasses.replace(cluster, device=device)
        levels = sum(level.size > 1 for level in cluster.levels)
        wanted = levels + (1 < tensor < 8)
        for mesh in candidate_meshes(roomy, max(wanted, 2)):
            sizes = [size for size in mesh.sizes if size > 1]
            if len(sizes) != wanted or (tensor > 1 and sizes[-1] != tensor):
                continue
            pricer = Pricer(roomy, mesh)
            rule = recipe_of(given, len(mesh.axes))
            limit = restriction_of(analysis, rule, pricer)
            with contextlib.suppress(InfeasibleError):
                return solve_mesh(analysis, pricer, limit, seconds)
    raise SystemExit(f"{given['id']}: no plan of this strategy.")


def own_seconds(given: dict[str, Any], found: Candidate) -> float:
    """Seconds of a step, with the broadcasts of the published run if it has them."""
    if not given.get("broadcasts"):
        return found.step_s
    sent, kept = 0.0, list[Collective]()
    for c in found.collectives:
        if c.place is not None and c.step.kind in GATHERS:
            sent += c.trips * c.size
        else:
            kept.append(c)
    messages = messages_of(found.assignment, found.pricer, kept)
    cost = dataclasses.replace(found.estimate, messages=messages).cost
    hosts = 1 if given["strategy"].endswith("within") else None
    return step_s(cost) + broadcasts_s(
        sent, found.pricer.cluster, given["tensor"], hosts
    )


def broadcasts_s(
    nbytes: float, cluster: autopar.Cluster, tensor: int, hosts: int | None
) -> float:
    """Seconds in which each device of a group broadcasts its part, one after the other.

    A broadcast takes one step for each device of the group, and the bytes of a part
    pass once through the slowest link. Over hosts, the devices of a host share its
    links.

    Args:
      nbytes: bytes of all parts together.
      cluster: the hosts and devices.
      tensor: number of groups that broadcast at the same time.
      hosts: number of hosts of the group; None: all hosts.
    """
    outer, inner = cluster.levels[0], cluster.levels[-1]
    hosts, local = hosts or outer.size * (len(cluster.levels) > 1) or 1, inner.size
    local //= tensor
    if hosts == 1:
        step, per_byte = NVLINK_STEP_S, 1 / inner.link.bandwidth_bytes_per_s
    else:
        step, per_byte = NETWORK_STEP_S, 1 / outer.link.bandwidth_bytes_per_s / local
    devices = hosts * local
    return devices * (START_S + devices * step) + nbytes * per_byte


def compared(done: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The growth of each strategy, and the order of rows with equally many devices."""
    out: list[dict[str, Any]] = []
    for one, other in itertools.combinations(done, 2):
        real = other["step_s"] - one["step_s"]
        said = other["predicted_s"] - one["predicted_s"]
        if one["series"] == other["series"]:
            right = abs(said - real) <= max(0.1, 0.2 * abs(real))
            what = {"growth": one["series"], "from": one["devices"]}
            what |= {"to": other["devices"], "right": right}
        elif (one["cluster"], one["sequence"]) == (other["cluster"], other["sequence"]):
            if abs(real) < ALIKE * one["step_s"]:
                continue
            right = (said > 0) == (real > 0)
            what = {"order": [one["id"], other["id"]], "right": right}
        else:
            continue
        out.append(what | {"measured_s": real, "predicted_s": said})
    return out


def main() -> None:
    """Prices every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=pathlib.Path, help="more rows")
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    parser.add_argument("--limit", type=float, default=20.0, help="solver seconds")
    chosen = parser.parse_args()
    rows = ROWS + (json.loads(chosen.rows.read_text()) if chosen.rows else [])
    done: list[dict[str, Any]] = []
    known: dict[str, Analysis] = {}
    rows = [r for r in rows if chosen.only in r["id"]]
    for given in sorted(
        rows, key=lambda r: (r["sequence"], len(r["cluster"]), r["cluster"])
    ):
        cluster = autopar.Cluster.parse(given["cluster"])
        changed = given.get("device_overrides", {})
        device = dataclasses.replace(cluster.device, **changed)
        cluster = dataclasses.replace(cluster, device=device)
        key = json.dumps([given["model"], given["sequence"], given["cluster"]])
        if key not in known:
            known = {key: analysed(given, cluster)}
        found = priced(given, known[key], cluster, chosen.limit)
        cost = found.cost
        seconds = own_seconds(given, found)
        line = given | {
            "devices": cluster.num_devices,
            "planned_s": found.step_s,
            "predicted_s": seconds,
            "ratio": seconds / given["step_s"],
            "work_s": cost.work_s,
            "waiting_s": cost.waiting_s + cost.waiting_latency_s,
            "hideable_s": cost.hideable_total_s,
            "hidden_s": cost.cover_s,
        }
        done.append(line)
        print(json.dumps(line), flush=True)
    for line in compared(done):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
