"""Saves checkpoints of pipelines over processes, and restores them under other plans.

    python benchmarks/checkpoints.py plans

Each layout of `LAYOUTS` trains a small network for some steps in its own processes, and
saves a checkpoint. Each process also writes its shards to NumPy files. Then each layout
restores every checkpoint in its own processes. Each restored shard of the state and of
the codecs' state must be bit-identical to the files. The loss of the next step is
compared with the loss under the layout that saved the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads

# Separates the path of an array from the bounds of a shard.
_AT = " at "
STEPS, ROWS, DEVICES, LIMIT_S = 2, 16, 4, 900.0
LOSS_BAR = 1e-5
WIDTH, LAYERS = 64, 4
TX = optax.adam(1e-2)
# With these flags, compilation takes a third of the time; the programs are small.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The devices of each pipeline stage, over some processes.

    Attributes:
      stages: how many.
      processes: how many.
      order: numbers of the devices of the first stage, of the second stage and so on.
      codec: of gradients.
      noise: whether the noise scale is measured.
    """

    stages: int
    processes: int
    order: tuple[int, ...] = (0, 1, 2, 3)
    codec: str = "none"
    noise: bool = False

    def asked(self) -> dict[str, Any]:
        """The options of `autopar.parallelize` for the layout."""
        from jax.sharding import PartitionSpec

        made: dict[str, Any] = {
            "cluster": f"{len(self.order)}:cpu",
            "devices": [jax.devices()[k] for k in self.order],
            "stages": self.stages,
            "microbatches": 4,
            "max_axes": 1,
            "seconds": 0.5,
        }
        if self.noise:
            made["noise_scale"] = True
        if self.codec != "none":
            made |= {"compression": self.codec, "axis_names": ("data",)}
            made["pins"] = {"batch/*": PartitionSpec("data")}
        return made


LAYOUTS = {
    "1 stage, 1 process": Layout(1, 1),
    "1 stage over 2 processes, top-k": Layout(1, 2, codec="topk:ratio=0.25"),
    "2 stages, a process each, noise": Layout(2, 2, noise=True),
    "2 stages, each over 2 processes": Layout(2, 2, (0, 2, 1, 3)),
    "2 stages, each over 2 of 4 processes, top-k": Layout(
        2, 4, codec="topk:ratio=0.25"
    ),
    "4 stages, a process each": Layout(4, 4),
}


def run(folder: pathlib.Path) -> int:
    """Prints the table; returns 1 if a bit, a sum or a loss differs."""
    for part in ("save", "restore"):
        for k in range(len(LAYOUTS)):
            _start(folder, part, k)
    columns = "arrays", "shards compared", "shards that differ", "next loss differs by"
    workloads.row("saved under", "restored under", *columns)
    workloads.row(*["---"] * 6)
    missed = 0
    for target, name in enumerate(LAYOUTS):
        count = LAYOUTS[name].processes
        paths = [folder / f"{target}" / f"found-{k}.json" for k in range(count)]
        found = [json.loads(path.read_text()) for path in paths]
        for source, saved in enumerate(LAYOUTS):
            rows = [x[source] for x in found]
            arrays, loss = (max(x[key] for x in rows) for key in ("arrays", "loss"))
            shards, differ = (sum(x[key] for x in rows) for key in ("shards", "differ"))
            missed += differ > 0 or loss > LOSS_BAR
            workloads.row(saved, name, arrays, shards, differ, f"{loss:.1e}")
    print(f"pairs that miss: {missed} of {len(LAYOUTS) ** 2}")
    return int(missed > 0)


def _start(folder: pathlib.Path, part: str, number: int) -> None:
    """Runs the processes of a layout, and waits for them.

    Raises:
      RuntimeError: a process fails.
    """
    count = list(LAYOUTS.values())[number].processes
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    words = [str(count), str(port), str(folder), part, str(number)]
    (folder / f"{number}").mkdir(exist_ok=True)
    paths = [folder / f"{number}" / f"{part}-{rank}.log" for rank in range(count)]
    processes: list[subprocess.Popen[bytes]] = []
    for rank, path in enumerate(paths):
        with path.open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(rank), *words],
                    # A collective blocks a thread of XLA's pool. NPROC sets the size of
                    # the pool.
                    env={**os.environ, "NPROC": "4", "XLA_FLAGS": FLAGS},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for code, path in zip(codes, paths, strict=True):
        if code:
            name = list(LAYOUTS)[number]
            raise RuntimeError(f"{name}, {part}:\n{path.read_text()}")


def create_state(key: jax.Array) -> Any:
    """The weights and the optimizer's moments."""
    params = [
        {"w": jax.random.normal(own, (WIDTH, WIDTH)) / 8.0, "b": jnp.zeros(WIDTH)}
        for own in jax.random.split(key, LAYERS)
    ]
    return {"params": params, "opt": TX.init(params)}


def train_step(state: Any, batch: Any) -> Any:
    """One step of Adam on residual layers."""

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


class World:
    """The step of a layout in one of its processes."""

    def __init__(self, number: int) -> None:
        """Selects the devices of the layout; does not plan yet."""
        import autopar

        self.layout = list(LAYOUTS.values())[number]
        self.step = autopar.parallelize(train_step, **self.layout.asked())
        self.create = create_state, jax.random.key(0)

    def rows(self, number: int) -> Any:
        """This process's rows of a batch."""
        draw = np.random.default_rng(number)
        x, y = draw.standard_normal((2, ROWS, WIDTH)).astype(np.float32)
        count = ROWS // jax.process_count()
        first = count * jax.process_index()
        return {"x": x[first : first + count], "y": y[first : first + count]}

    def next_loss(self, state: Any) -> float:
        """The loss of the step after the saved steps."""
        *_, loss = self.step(state, self.rows(STEPS))
        return float(loss)

    def save(self, folder: pathlib.Path) -> None:
        """Trains, saves a checkpoint, and writes the shards that it must contain."""
        import autopar

        state = self.step.init(*self.create, batch=self.rows(0))
        for number in range(STEPS):
            state, _ = self.step(state, self.rows(number))
        with autopar.Checkpoints(folder / "checkpoint") as made:
            made.save(self.step, state, step=STEPS, position=STEPS * ROWS)
        shards = dict(_shards((state, self.codecs())))
        np.savez(folder / f"shards-{jax.process_index()}.npz", **shards)
        loss = self.next_loss(state)
        if not jax.process_index():
            (folder / "loss.json").write_text(json.dumps(loss))

    def restore(self, folder: pathlib.Path) -> dict[str, Any]:
        """Restores a checkpoint, and counts the differences from the saved shards."""
        import autopar

        made = autopar.Checkpoints(folder / "checkpoint")
        found = made.restore(self.step, *self.create, batch=self.rows(0))
        held = found.state, self.codecs()
        wanted = _whole(folder)
        shards = list(_shards(held))
        differ = 0
        for name, data in shards:
            path, where = name.split(_AT)
            part = wanted[path][tuple(slice(*x) for x in json.loads(where))]
            differ += data.tobytes() != part.tobytes()
        wanted_loss = json.loads((folder / "loss.json").read_text())
        loss = self.next_loss(found.state)
        return {
            "arrays": len({name.split(_AT)[0] for name, _ in shards}),
            "shards": len(shards),
            "differ": differ,
            "loss": abs(loss / wanted_loss - 1),
        }

    def codecs(self) -> Any:
        """The residuals and other arrays of codecs; None if there are none."""
        held = self.step.compression_state
        return held and held["gradients"]


def _shards(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and bounds, and the data, of each shard of this process."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        for shard in array.addressable_shards:
            bounds = zip(shard.index, array.shape, strict=True)
            where = [(*x.indices(size)[:2], size) for x, size in bounds]
            cut = json.dumps([x[:2] for x in where])
            shape = "x".join(str(x[2]) for x in where)
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            yield f"{name.replace('/', '.')}:{shape}{_AT}{cut}", np.asarray(shard.data)


def _whole(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Path -> the saved array, assembled from the files of all processes."""
    made: dict[str, np.ndarray] = {}
    held: dict[str, np.ndarray] = {}
    for file in folder.glob("shards-*.npz"):
        for name, data in np.load(file).items():
            path, where = name.split(_AT)
            shape = [int(x) for x in path.rpartition(":")[2].split("x") if x]
            part = tuple(slice(*x) for x in json.loads(where))
            made.setdefault(path, np.zeros(shape, data.dtype))[part] = data
            held.setdefault(path, np.zeros(shape, bool))[part] = True
    assert all(x.all() for x in held.values()), f"{folder}: no process wrote a part"
    return made


def main() -> None:
    """Runs one process of a layout: saves a checkpoint, or restores all checkpoints."""
    rank, count, port, folder, part, number = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // int(count))
    if int(count) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{port}", int(count), int(rank), initialization_timeout=240
        )
    world, own = World(int(number)), pathlib.Path(folder) / number
    if part == "save":
        world.save(own)
        return
    folders = [own.parent / f"{k}" for k in range(len(LAYOUTS))]
    found = [world.restore(x) for x in folders]
    (own / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
