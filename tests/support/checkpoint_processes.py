"""A process that saves and restores with others; test_checkpoint_processes.py runs it.

Usage: python checkpoint_processes.py PROCESS COUNT PORT DIRECTORY

Saves a sharded state and a state in pipeline stages, and restores each under other
plans. No step runs, so JAX compiles only the creation of the state. Then the script
saves codec states and the state of the noise scale in pipeline stages, after a step.
All processes read the plans from DIRECTORY. If each process planned for itself, a
search that ends by time could give different plans.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import checkpoint_plans as plans
import jax
import numpy as np

import autopar
from autopar import Checkpoints, Plan


def main(process: int, count: int, port: str, directory: pathlib.Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)
    rows = plans.ROWS // count
    batch = {
        k: x[process * rows : (process + 1) * rows] for k, x in plans.batch().items()
    }
    made = {x.stem: Plan.load(x) for x in directory.glob("*.json")}
    for name in ("fsdp-4", "pipeline"):
        step = autopar.parallelize(plans.step, plan=made[name])
        state = step.init(plans.create, others=(batch,))
        with Checkpoints(directory / name) as saved:
            saved.save(step, state, step=3, position=7)
        assert saved.steps() == [3]
        for other in ("tensor", "pipeline"):
            again = autopar.parallelize(plans.step, plan=made[other])
            found = saved.restore(again, plans.create, others=(batch,))
            assert (found.step, found.position) == (3, 7)
            wanted = jax.tree.leaves(again.shardings(found.state))
            assert [x.sharding for x in jax.tree.leaves(found.state)] == wanted
    beside_the_state(directory / "beside", batch, made["pipeline+codecs"])
    print("done")


def beside_the_state(
    directory: pathlib.Path, batch: dict[str, Any], plan: Plan
) -> None:
    """Restores the states of codecs and noise scale of two stages, and trains on."""

    def step() -> Any:
        return autopar.parallelize(plans.step, plan=plan, noise_scale=True)

    before, after = step(), step()
    *state, _ = before(*before.init(plans.create, others=(batch,)), batch)
    state = tuple(state)
    with Checkpoints(directory) as made:
        made.save(before, state, step=1)
    restored = made.restore(after, plans.create, others=(batch,)).state
    assert shards(restored) == shards(state)
    kept, found = before.compression_state, after.compression_state
    assert (found["step"], found["skipped"]) == (1, 0)
    names = jax.tree.leaves(kept["gradients"])
    assert any(np.any(x.data) for leaf in names for x in leaf.addressable_shards)
    wanted = shards(kept["gradients"])
    whole = [np.asarray(x) for x in jax.tree.leaves(found["gradients"])]
    assert [
        [x[i].tobytes() for i, _ in own] for x, own in zip(whole, wanted, strict=True)
    ] == [[data for _, data in own] for own in wanted]
    assert int(after.noise_state["steps"]) == int(before.noise_state["steps"])
    losses = [float(run(*held, batch)[-1]) for run, held in
              ((before, state), (after, restored))]  # fmt: skip
    assert losses[0] == losses[1]


def shards(tree: Any) -> list[list[tuple[Any, bytes]]]:
    """For each array, the index and the bytes of each of its shards in this process."""
    return [
        [(x.index, np.asarray(x.data).tobytes()) for x in leaf.addressable_shards]
        for leaf in jax.tree.leaves(tree)
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))
