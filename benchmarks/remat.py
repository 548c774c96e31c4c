"""Memory and seconds of a model with an increasing number of rematerialised layers.

    python benchmarks/remat.py [--share 0.6] [--level dots] [layers=6 d_model=128 ...]
    python benchmarks/remat.py --target h100 --example gpt-scan layers=6 ...

An example is planned for 8 devices with each number of rematerialised layers. Then it
is planned with ``remat="auto"``, in a fraction of the memory of the plan without
rematerialisation. For each plan, a row has the predictions, and the memory of a device
according to the compiler. Without ``--target`` the devices are simulated CPUs. With it,
the compiler of that accelerator compiles the plan, which needs no accelerator
(docs/howto/compile-without-devices.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import workloads

import autopar
from autopar.cluster import Cluster
from autopar.runtime.placement import device_mesh
from autopar.runtime.planned import planned_step
from autopar.steps.analysis import analyse

_OPTIONS = {"layers": 4, "d_model": 64, "seq": 64, "batch": 64}


def main() -> None:
    """Plans, compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--example", default="gpt")
    parser.add_argument("--level", default="full")
    parser.add_argument("--target", help="an accelerator, such as h100; default: CPUs")
    parser.add_argument("--counts", help="numbers of layers, such as 0,4; default: all")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    given = dict(word.split("=") for word in args.words)
    options = {k: int(v) if v.isdecimal() else v for k, v in given.items()}
    step, call = workloads.arguments(args.example, **{**_OPTIONS, **options})
    local = Cluster.parse(f"8:{args.target or 'cpu'}")
    plain = row("nothing", step, call, local, args.target)
    layers = len(planned(step, call, local, "all").remat.starts)
    wanted = range(1, layers + 1)
    if args.counts:
        wanted = [int(n) for n in args.counts.split(",")]
    for count in wanted:
        row(f"{count}:{args.level}", step, call, local, args.target)
    if not args.share:
        return
    limit = int(args.share * plain.predicted.peak_memory_bytes)
    print(f"limit {limit / 1e6:.2f} MB")
    device = dataclasses.replace(local.device, memory_bytes=limit)
    row("auto", step, call, dataclasses.replace(local, device=device), args.target)


def planned(step, call, cluster, remat) -> autopar.Plan:
    """A plan on one data-parallel axis."""
    return autopar.plan(step, *call, cluster=cluster, remat=remat, axis_names=("data",))


def compiled_bytes(step, call, plan, target) -> int:
    """Memory of a device, according to the compiler."""
    if target is not None:
        audit = autopar.audit(step, *call, plan=plan, target=target)
        return audit.target.memory.peak_bytes
    made = planned_step(analyse(step, call), plan, device_mesh(plan, jax.devices()))
    found = made.lower().compile().memory_analysis()
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )


def row(remat, step, call, cluster, target) -> autopar.Plan:
    """Makes a plan, and prints its row."""
    start = time.process_time()
    plan = planned(step, call, cluster, None if remat == "nothing" else remat)
    spent_s = time.process_time() - start
    held = compiled_bytes(step, call, plan, target)
    done = plan.predicted
    cells = (
        f"{remat}: {len(plan.remat.layers)} layers, {plan.remat.level}",
        f"predicted {done.peak_memory_bytes / 1e6:.2f} MB",
        f"compiled {held / 1e6:.2f} MB",
        f"predicted {done.step_s * 1e3:.2f} ms",
        f"planned in {spent_s:.1f} CPU s",
    )
    print(", ".join(cells), flush=True)
    return plan


if __name__ == "__main__":
    main()
