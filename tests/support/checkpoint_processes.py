"""One process of several that save and restore; run by test_checkpoint_processes.py.

Usage: python checkpoint_processes.py PROCESS COUNT PORT DIRECTORY

Saves a sharded state and one in pipeline stages, and restores each under other plans.
No step runs, so nothing but the creation of the state is compiled.
"""

from __future__ import annotations

import pathlib
import sys

import checkpoint_plans as plans
import jax

import autopar
from autopar import Checkpoints


def main(process: int, count: int, port: str, directory: pathlib.Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)
    rows = plans.ROWS // count
    batch = {
        k: x[process * rows : (process + 1) * rows] for k, x in plans.batch().items()
    }
    for name in ("fsdp-4", "pipeline"):
        step = autopar.parallelize(plans.step, plan=plans.plan(name))
        state = step.init(plans.create, others=(batch,))
        with Checkpoints(directory / name) as made:
            made.save(step, state, step=3, position=7)
        assert made.steps() == [3]
        for other in ("tensor", "pipeline"):
            again = autopar.parallelize(plans.step, plan=plans.plan(other))
            found = made.restore(again, plans.create, others=(batch,))
            assert (found.step, found.position) == (3, 7)
            wanted = jax.tree.leaves(again.shardings(found.state))
            assert [x.sharding for x in jax.tree.leaves(found.state)] == wanted
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))
