"""A GPT with more and more layers computed again: memory and seconds.

    python benchmarks/remat.py [--share 0.6] [layers=6 d_model=128 ...]

Plans an example for 8 simulated CPU devices, with each number of layers, and then with
``remat="auto"`` in a share of the memory that the plan takes which computes nothing
again. Prints a row for each plan: what is predicted, and the memory of a device by the
compiler (arguments, results and temporaries).
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
from autopar.runtime.planned import device_mesh, planned_step
from autopar.steps.analysis import analyse

_OPTIONS = {"layers": 4, "d_model": 64, "seq": 64, "batch": 64}


def main() -> None:
    """Plans, compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--example", default="gpt")
    parser.add_argument("--level", default="full")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    given = {k: int(v) for k, v in (word.split("=") for word in args.words)}
    training = workloads.training(args.example, **{**_OPTIONS, **given})
    state = training.create_state(jax.random.key(0))
    call = state, next(training.batches(seed=0))
    local = autopar.Cluster.parse("8:cpu")
    plain = row("nothing", training.step, call, local)
    layers = len(planned(training.step, call, local, "all").remat.starts)
    for count in range(1, layers + 1):
        row(f"{count}:{args.level}", training.step, call, local)
    limit = int(args.share * plain.predicted.peak_memory_bytes)
    print(f"limit {limit / 1e6:.2f} MB")
    device = dataclasses.replace(local.device, memory_bytes=limit)
    row("auto", training.step, call, dataclasses.replace(local, device=device))


def planned(step, call, cluster, remat) -> autopar.Plan:
    """A plan over one axis of data."""
    return autopar.plan(step, *call, cluster=cluster, remat=remat, axis_names=("data",))


def row(remat, step, call, cluster) -> autopar.Plan:
    """Plans, and prints a row."""
    start = time.process_time()
    plan = planned(step, call, cluster, None if remat == "nothing" else remat)
    spent_s = time.process_time() - start
    made = planned_step(analyse(step, call), plan, device_mesh(plan, jax.devices()))
    found = made.lower().compile().memory_analysis()
    held = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )
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
