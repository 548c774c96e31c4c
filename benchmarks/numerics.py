"""Compares planned training on 8 simulated devices with training on one device.

    python benchmarks/numerics.py [example ...]

Each example is trained for 20 steps in float32 under the plan for a 2x4 cluster, and on
one device with the same batches. The table has the largest relative difference of the
losses. For scale, it also has that of a second run on one device, whose initial
parameters are changed by one unit in the last place.
"""

from __future__ import annotations

import itertools
import sys

import jax
import numpy as np
import workloads

STEPS = 20


def main(names: list[str]) -> int:
    """Prints the table; returns 1 if a loss differs by more than 1e-5."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import autopar

    sys.path.insert(0, str(workloads.EXAMPLES_DIR))
    from example_training import plain_step, take_step

    workloads.row(
        "example",
        "mesh",
        "first loss",
        "last loss",
        "largest relative difference",
        "one device, nudged",
    )
    workloads.row(*["---"] * 6)
    worst = 0.0
    for name in names or (*workloads.EXAMPLES, "resnet-slow"):
        run = workloads.training(name)
        batches = list(itertools.islice(run.batches(), STEPS))
        planned = autopar.parallelize(
            run.step, cluster=autopar.Cluster.parse("2x4:cpu"), seconds=10
        )
        state = planned.init(run.create_state, jax.random.key(0))
        losses: dict[str, list[float]] = {"planned": [], "plain": [], "nudged": []}
        plain_run = plain_step(run)
        kinds = (("planned", planned), ("plain", plain_run), ("nudged", plain_run))
        for kind, step in kinds:
            if kind != "planned":
                state = run.create_state(jax.random.key(0))
            if kind == "nudged":
                state = workloads.nudged(state)
            for batch in batches:
                state, loss = take_step(step, state, batch)
                losses[kind].append(float(loss))
        ours, plain, nudged = (np.array(found) for found in losses.values())
        sensitivity = float(np.max(np.abs(nudged - plain) / np.abs(plain)))
        difference = float(np.max(np.abs(ours - plain) / np.abs(plain)))
        worst = max(worst, difference)
        axes = " ".join(f"{k}={v}" for k, v in planned.plan.mesh["axes"].items())
        workloads.row(
            name,
            axes,
            f"{ours[0]:.4f}",
            f"{ours[-1]:.4f}",
            f"{difference:.1e}",
            f"{sensitivity:.1e}",
        )
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
