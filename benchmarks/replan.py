"""Re-plans in a running loop: 8 -> 4 -> 6 -> 8 simulated devices.

    python benchmarks/replan.py [example ...]

The losses are compared with those of an uninterrupted run on one device. The table has
the seconds of planning for each new cluster, without compiling and moving the state,
and the seconds of the first plan. When the cluster returns, its earlier plan is used
again.
"""

from __future__ import annotations

import itertools
import sys

import jax
import numpy as np
import workloads

PHASES = (8, 4, 6, 8)
STEPS = 5


def main(names: list[str]) -> int:
    """Prints the table; returns 1 if a loss differs by more than 1e-5."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import autopar

    sys.path.insert(0, str(workloads.EXAMPLES_DIR))
    from example_training import plain_step, take_step

    workloads.row(
        "example", "largest relative difference", "one device, nudged",
        "first plan s", "plans for 4 and 6 devices s",
    )  # fmt: skip
    workloads.row(*["---"] * 5)
    worst = 0.0
    for name in names or ("gpt", "gpt-scan", "llama"):
        run = workloads.training(name, batch=24)
        batches = list(itertools.islice(run.batches(), STEPS * len(PHASES)))
        cluster = autopar.Cluster.parse
        step = autopar.parallelize(run.step, cluster=cluster("8:cpu"), seconds=5)
        state = step.init(run.create_state, jax.random.key(0))
        ours: list[float] = []
        totals: list[float] = []
        for phase, devices in enumerate(PHASES):
            if phase:
                state = step.replan(cluster(f"{devices}:cpu"), state)
                if devices != PHASES[0]:
                    totals.append(step.plan.seconds.total)
            for batch in batches[phase * STEPS : (phase + 1) * STEPS]:
                state, loss = take_step(step, state, batch)
                ours.append(float(loss))
            if not phase:
                first = step.plan.seconds.total
        reference = plain_step(run)
        plain: list[float] = []
        nudged: list[float] = []
        for losses in (plain, nudged):
            state = run.create_state(jax.random.key(0))
            state = workloads.nudged(state) if losses is nudged else state
            for batch in batches:
                state, loss = take_step(reference, state, batch)
                losses.append(float(loss))
        sensitivity = float(np.max(np.abs(np.array(nudged) / np.array(plain) - 1)))
        difference = float(np.max(np.abs(np.array(ours) / np.array(plain) - 1)))
        worst = max(worst, difference)
        workloads.row(
            name, f"{difference:.1e}", f"{sensitivity:.1e}", f"{first:.2f}",
            ", ".join(f"{t:.2f}" for t in totals),
        )  # fmt: skip
    return int(worst > 1e-5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
