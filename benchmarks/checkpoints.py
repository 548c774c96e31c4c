"""Time and memory to save, restore and move a state of 256 MiB.

    python benchmarks/checkpoints.py move|save|kill|disk|plans [--folder FOLDER]

``move``: moves a state in memory between layouts of eight simulated devices, compared
  with saving and restoring it by Orbax: seconds, and the most additional memory.
``save``: compares 50 steps with one save in the background with 50 steps without.
``kill``: kills 50 processes while they save; the remaining checkpoints must be whole.
``disk``: saves to a full file system, and again after it has free space.
``plans``: restores checkpoints of pipelines under other stages and processes, and
  compares bits (`checkpoint_worlds.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from typing import Any

import checkpoint_worlds
import jax
import jax.numpy as jnp
import numpy as np
import workloads

from autopar.runtime import state_mover

MIB = 1 << 20
COUNT, SIDE = 64, 1024  # arrays of 4 MiB
TURNS, STEPS, KILLS = 3, 50, 50
WORKER = pathlib.Path(__file__).parents[1] / "tests/support/checkpoint_worker.py"


def main() -> int:
    """Runs one of the parts; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("move", "save", "kill", "disk", "plans"))
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    try:
        part = {"move": _moves, "save": _saves, "kill": _kills, "disk": _disk}
        return (part | {"plans": checkpoint_worlds.run})[options.part](folder)
    finally:
        shutil.rmtree(folder)


class Peak:
    """Measures the most memory of this process in a block, minus that at its start."""

    def __enter__(self) -> Peak:
        """Starts to read the memory every millisecond, after freeing cached memory."""
        state_mover.return_memory(0)
        self.begin = self.most = state_mover.resident_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ends.wait(0.001):
            self.most = max(self.most, state_mover.resident_bytes())

    def __exit__(self, *_: object) -> None:
        """Stops reading the memory."""
        self._ends.set()
        self._thread.join()
        self.most = max(self.most, state_mover.resident_bytes())

    @property
    def more(self) -> str:
        """In MiB."""
        return f"{(self.most - self.begin) / MIB:.0f} MiB"


def _layouts() -> dict[str, Any]:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    eight, four = Mesh(devices, ("a",)), Mesh(devices[:4], ("a",))
    grid = Mesh(devices.reshape(2, 4), ("a", "b"))
    return {
        "8 rows": NamedSharding(eight, PartitionSpec("a")),
        "8 columns": NamedSharding(eight, PartitionSpec(None, "a")),
        "4 rows": NamedSharding(four, PartitionSpec("a")),
        "2 x 4": NamedSharding(grid, PartitionSpec("b", "a")),
    }


@functools.cache
def _numbers() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((SIDE, SIDE), np.float32) for _ in range(COUNT)]


def _state(sharding: Any) -> dict[str, jax.Array]:
    arrays = _numbers()
    made = {f"w{k}": jax.device_put(x, sharding) for k, x in enumerate(arrays)}
    # The copies are in the devices' own memory, not in that of NumPy arrays.
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), made)


def _moved(state: dict[str, jax.Array], target: Any) -> dict[str, jax.Array]:
    from autopar.runtime.state_mover import DevicePut, layout_of, move

    mesh, spec = target.mesh, tuple(target.spec)
    plain = layout_of(state)
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    full = tuple((x,) if x else () for x in (*spec, *[None] * (2 - len(spec))))
    leaves = {
        k: dataclasses.replace(leaf, spec=full) for k, leaf in plain.leaves.items()
    }
    wanted = dataclasses.replace(plain, leaves=leaves, meshes=(axes,))
    moved = move(state, None, wanted, DevicePut((mesh,)), consume=True)
    return jax.block_until_ready(moved)


def _moves(folder: pathlib.Path) -> int:
    workloads.row(
        "from 8 rows to", "in memory s", "peak", "Orbax save + restore s", "times"
    )
    workloads.row(*["---"] * 5)
    layouts, missed = _layouts(), 0
    for name in ("8 columns", "2 x 4", "4 rows"):
        ours: list[float] = []
        theirs: list[float] = []
        peaks: list[Peak] = []
        for turn in range(TURNS):
            state = _state(layouts["8 rows"])
            theirs.append(_by_orbax(state, layouts[name], folder / f"{name}{turn}"))
            with Peak() as peak:
                begin = time.perf_counter()
                moved = _moved(state, layouts[name])
                ours.append(time.perf_counter() - begin)
            peaks.append(peak)
            del state, moved
        times = statistics.median(theirs) / statistics.median(ours)
        missed += times < 5
        most = max(peaks, key=lambda x: x.most - x.begin)
        first, second = (f"{statistics.median(x):.3f}" for x in (ours, theirs))
        workloads.row(name, first, most.more, second, f"{times:.1f}")
    return int(missed > 0)


def _by_orbax(state: Any, sharding: Any, folder: pathlib.Path) -> float:
    """Seconds of saving and restoring with Orbax."""
    import orbax.checkpoint as ocp

    structs = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for k, x in state.items()
    }
    begin = time.perf_counter()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
        jax.block_until_ready(checkpointer.restore(folder, structs))
    seconds = time.perf_counter() - begin
    shutil.rmtree(folder)
    return seconds


def _saves(folder: pathlib.Path) -> int:
    """Times the steps of an MLP with 256 MiB of parameters and Adam's moments."""
    import optax

    import autopar

    side, tx = 2340, optax.adam(1e-3)

    def create() -> Any:
        params = [jnp.full((side, side), 1e-3) for _ in range(4)]
        return params, tx.init(params)

    def step(params: Any, moments: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments)
        return optax.apply_updates(params, updates), moments, value

    batch = np.random.default_rng(0).standard_normal((64, side)).astype(np.float32)
    planned = autopar.parallelize(step, cluster="2:cpu")
    state = planned.init(create, batch=batch)
    size = sum(x.nbytes for x in jax.tree.leaves(state)) / MIB
    made = autopar.Checkpoints(folder)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    held: list[float] = []
    for turn in range(2 * TURNS + 1):
        saves, begin = turn % 2 == 0, time.perf_counter()
        for k in range(STEPS):
            *state, value = planned(*state, batch)
            if saves and k == STEPS // 5:
                jax.block_until_ready(value)
                at = time.perf_counter()
                made.save(planned, tuple(state), step=turn)
                held.append(time.perf_counter() - at)
        jax.block_until_ready(value)
        if turn:  # the first compiles
            seconds[saves].append(time.perf_counter() - begin)
        made.wait()
    plain, saved = (statistics.median(seconds[x]) for x in (False, True))
    workloads.row("state MiB", "50 steps s", "with a save s", "ratio", "step held s")
    workloads.row(*["---"] * 5)
    workloads.row(
        f"{size:.0f}", f"{plain:.2f}", f"{saved:.2f}", f"{saved / plain:.3f}",
        f"{statistics.median(held):.3f}",
    )  # fmt: skip
    return int(saved / plain > 1.1)


def _kills(folder: pathlib.Path) -> int:
    draw = random.Random(0)
    waits = [f"{draw.uniform(0, 0.06):.4f}" for _ in range(KILLS)]
    subprocess.run([sys.executable, WORKER, folder, *waits], check=True)
    from autopar.checkpoint import folders, manifest

    torn = damaged = whole = lost = 0
    for k in range(KILLS):
        complete = folders.complete(folder / str(k))
        torn += len(folders.incomplete(folder / str(k)))
        whole += len(complete)
        damaged += sum(bool(_array_problems(manifest.read(x), x)) for x in complete)
        lost += not complete
    workloads.row("kills", "complete", "of them damaged", "torn and named", "lost")
    workloads.row(*["---"] * 5)
    workloads.row(KILLS, whole, damaged, torn, lost)
    return int(damaged + lost > 0)


def _array_problems(held: Any, folder: pathlib.Path) -> list[str]:
    """The damaged arrays of a checkpoint. The worker has no real plan, so it is not
    read.
    """
    from autopar.checkpoint import restoring

    return [x for x in restoring.find_problems(folder, held) if "plan" not in x]


@contextlib.contextmanager
def _small_disk(folder: pathlib.Path) -> Generator[None]:
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    subprocess.run(words, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _fill(path: pathlib.Path) -> None:
    """Fills the disk except for half a MiB."""
    left = shutil.disk_usage(path.parent).free - MIB // 2
    path.write_bytes(b"x" * max(0, left))


def _disk(folder: pathlib.Path) -> int:
    """Saves to a disk of 4 MiB; needs the permission to mount a file system."""
    import autopar

    place = folder / "small"
    step = autopar.parallelize(lambda w, batch: (w * 0.5, batch.sum()), cluster="2:cpu")
    rows = np.ones((8, 4), np.float32)
    state = step.init(lambda: jnp.ones((512, 512)), batch=rows)
    draw = jax.random.normal(jax.random.key(0), (512, 512))
    with _small_disk(place), autopar.Checkpoints(place / "checkpoints") as made:
        for k in range(12):
            try:
                made.save(step, draw * k, step=k)
                made.wait()
            except autopar.CheckpointError as error:
                print(f"step {k}: {str(error)[:150]}")
                break
            if k == 2:
                _fill(place / "other")
        found = made.restore_into(step, state)
        same = bool(jnp.all(found.state == draw * found.step))
        print(f"restored step {found.step}, same bits: {same}")
        (place / "other").unlink()
        made.save(step, draw * 99, step=99)
        made.wait()
        print(f"with room again: {made.steps()}, incomplete: {made.incomplete()}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
