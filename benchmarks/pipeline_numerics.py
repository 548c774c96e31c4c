"""Training in pipeline stages against one device with the same microbatches.

    python benchmarks/pipeline_numerics.py --table rows.jsonl
    python benchmarks/pipeline_numerics.py [example ...] [--stages 2 4] [--float64]

Trains each example in float32 in 2 and 4 stages on 8 simulated devices under every
schedule, and on one device by the program that adds up over the same microbatches.
Prints a JSON line each: the largest relative difference of the losses; beside it three
times the largest difference that five runs on one device make whose first parameters
are changed by one unit in the last place. ``--float64`` takes one step of gradient
descent in float64 instead, and prints the largest difference of the parameters' change,
which is the gradient: relative to the largest change of each array, or to a thousandth
of that of any where it is more (the biases of keys have no gradient). Some models
compute parts of a step in float32 even so.

``--table FILE`` does both, each example in a process of its own. It appends the rows to
FILE, leaves out those that FILE has, and prints all as one Markdown table; with
``--show`` it runs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Collection

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unet
import workloads
from flax import nnx

import autopar
from autopar.steps.analysis import analyse
from autopar.steps.microbatches import in_microbatches
from autopar_passes.program.equations import evaluate
from autopar_passes.program.trace import open_arguments

_SMALL = {"d_model": 32, "heads": 4, "seq": 16, "batch": 16}
# Example -> its options, small: two cores run them all.
CASES = {
    "gpt": {**_SMALL, "layers": 4},
    "gpt-scan": {**_SMALL, "layers": 4},
    "gpt-nnx": {**_SMALL, "layers": 4},
    "llama": {**_SMALL, "layers": 4, "kv_heads": 2, "ffn": 64},
    "vit": {"d_model": 32, "heads": 4, "layers": 4, "size": 16, "batch": 16},
    "resnet-slow": {"width": 8, "size": 16, "batch": 16},
    "moe": {**_SMALL, "layers": 4, "ffn": 64},
    "lstm": {"d_model": 32, "seq": 16, "batch": 16, "layers": 2},
    "recommendation": {
        "tables": 4,
        "rows": 256,
        "width": 16,
        "hidden": 32,
        "batch": 64,
    },
    "unet": {"widths": (32, 64), "heads": 2, "size": 8, "batch": 16},
}
# Two parts on each of four stages need eight layers.
_DEEP = {"layers": 8}
_DEEPER = {"gpt", "gpt-scan", "gpt-nnx", "llama", "vit", "moe", "lstm"}
# Its layers compute in what its parameters are in.
_WITHOUT_DTYPE = {"recommendation"}
_WITHOUT_OPTIMIZER = {"resnet", "resnet-slow"}  # momentum keeps the gradient
# What couples the rows of a batch is computed from each microbatch.
_COUPLED = {"moe"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
BAR = 1e-5
_HEADER = ("example", "stages", "schedule", "losses", "allowed", "first step, float64")


def main() -> None:
    """Prints a line for each example, number of stages and schedule."""
    args = _arguments()
    if args.table:
        _fill(pathlib.Path(args.table), args)
        return
    if args.float64:
        jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, str(workloads.EXAMPLES_DIR))
    have = _read(args.rows)
    with tempfile.TemporaryDirectory() as folder:
        # Schedules share most of their programs.
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        _take(args, have)


def _take(args: argparse.Namespace, have: Collection[tuple[object, ...]]) -> None:
    """Prints the rows that are not there yet, and appends them to a file."""
    wanted: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for key in itertools.product(args.examples, args.stages, args.schedules):
        name, stages, schedule = key
        if (*key, args.float64) not in have:
            deep = stages > 2 and schedule == "interleaved" and name in _DEEPER
            wanted.setdefault((name, deep), []).append((stages, schedule))
    for (name, deep), rows in wanted.items():
        case = _Case(name, args, _DEEP if deep else {})
        for stages, schedule in rows:
            line = json.dumps(case.row(stages, schedule) | (_DEEP if deep else {}))
            print(line, flush=True)
            if args.rows:
                with args.rows.open("a") as out:
                    out.write(line + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", nargs="*", default=list(CASES))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nudged", type=int, default=5, help="runs on one device")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--table", type=pathlib.Path, help="see above")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--rows", type=pathlib.Path, help="append rows that it lacks")
    return parser.parse_args()


def _fill(table: pathlib.Path, args: argparse.Namespace) -> None:
    """Runs what the table lacks, each example in a process of its own."""
    options = ["--stages", *map(str, args.stages), "--schedules", *args.schedules]
    options += ["--microbatches", str(args.microbatches), "--steps", str(args.steps)]
    todo = [] if args.show else itertools.product(args.examples, ([], ["--float64"]))
    for name, precision in todo:
        words = [name, *options, *precision, "--rows", str(table)]
        done = subprocess.run([sys.executable, __file__, *words], check=False)
        if done.returncode:
            print(f"{name} {precision} ended with {done.returncode}.", flush=True)
    rows = _read(table)
    workloads.row(*_HEADER)
    workloads.row(*["---"] * len(_HEADER))
    for key in itertools.product(args.examples, args.stages, args.schedules):
        workloads.row(*key, *_cells(rows.get((*key, False)), rows.get((*key, True))))


def _read(path: pathlib.Path | None) -> dict[tuple[object, ...], dict[str, object]]:
    """The rows of a file by example, stages, schedule and whether in float64."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    keys = ("example", "stages", "schedule", "float64")
    return {tuple(row[key] for key in keys): row for row in rows}


def _cells(single: dict | None, double: dict | None) -> tuple[str, str, str]:
    """Losses, what is allowed, and the first step; bold where a bar is missed."""
    if single is None:
        losses, allowed = "**no row**", ""
    elif why := single.get("refused") or single.get("failed"):
        losses, allowed = (
            f"{'refused' if 'refused' in single else '**failed**'}: {why}",
            "",
        )
    else:
        losses, allowed = f"{single['difference']:.1e}", f"{single['allowed']:.1e}"
        losses = losses if single["within"] else f"**{losses}**"
    if double is None:
        return losses, allowed, "**no row**"
    if "gradient_difference" not in double:
        return losses, allowed, "refused" if "refused" in double else "**failed**"
    moved = double["gradient_difference"]
    return losses, allowed, f"{moved:.1e}" if moved <= BAR else f"**{moved:.1e}**"


def _training(name: str, options: dict):
    return workloads.training(name, **options)


class _UNet:
    """The U-Net of the benchmarks, as the examples have their training."""

    def __init__(self, dtype: str = "float32", **options) -> None:
        """Makes its step; ``dtype`` is that of its state."""
        self.step, (self.structs, self.batch) = unet.train_step(**options, dtype=dtype)

    def create_state(self, key):
        """Kernels drawn by their fan-in, scales of one, all else zero."""

        def made(path, struct):
            name, shape = jax.tree_util.keystr(path), struct.shape
            if "'params'" not in name:
                return jnp.zeros(shape, struct.dtype)
            if "'kernel'" in name:
                drawn = jax.random.fold_in(key, zlib.crc32(name.encode()))
                return jax.random.normal(drawn, shape) / np.sqrt(np.prod(shape[:-1]))
            return jnp.full(shape, float("'scale'" in name), struct.dtype)

        return jax.tree_util.tree_map_with_path(made, self.structs)

    def batches(self, *, seed: int):
        """Random images, noise and times."""
        random = np.random.default_rng(seed)
        while True:
            yield {
                name: abs(random.standard_normal(s.shape)).astype(np.float32)
                for name, s in self.batch.items()
            }


class _Case:
    """An example, and what one device makes of it."""

    def __init__(self, name: str, args: argparse.Namespace, more: dict) -> None:
        """Trains the example of this name on one device, with more options."""
        self.name, self.args = name, args
        options = {**CASES.get(name, {}), **more}
        if args.float64 and name not in _WITHOUT_DTYPE:
            options["dtype"] = "float64"
        if args.float64 and name not in _WITHOUT_OPTIMIZER:
            options["optimizer"] = optax.sgd(0.1) if name == "unet" else "sgd"
        self.run = _UNet(**options) if name == "unet" else _training(name, options)
        created = self.run.create_state
        # XLA takes minutes for the one program of all draws of the U-Net.
        self.create = created if name == "unet" else nnx.jit(created)
        steps = 1 if args.float64 else args.steps
        self.batches = list(itertools.islice(self.run.batches(seed=0), steps))
        self.analysis = analyse(self.run.step, self.arguments(self.state()))
        couple = name in _COUPLED
        split = in_microbatches(self.analysis, args.microbatches, couple=couple)
        self.one = jax.jit(lambda *flat: evaluate(split.program, *flat))
        self.before = self.flat(self.state())
        self.after, self.losses = self.on_one_device(self.state())
        self.sensitivity = 0.0
        if not args.float64:
            nudged = [
                self.on_one_device(workloads.nudged(self.state(), seed=k))[1]
                for k in range(args.nudged)
            ]
            self.sensitivity = max(_difference(n, self.losses) for n in nudged)

    def state(self):
        """A new state; in float64 if that is what runs."""
        state = self.create(jax.random.key(0))
        return jax.tree.map(_wide, state) if self.args.float64 else state

    def arguments(self, state):
        """The arguments of the step, with the first batch."""
        leading = state if type(state) is tuple else (state,)
        return (*leading, self.batch(0))

    def batch(self, number: int):
        """A batch; in float64 if that is what runs."""
        found = self.batches[number]
        return jax.tree.map(_wide, found) if self.args.float64 else found

    def flat(self, state) -> list[np.ndarray]:
        """The arrays of a state."""
        call = open_arguments(self.run.step, self.arguments(state))
        count = len(self.analysis.carried_arguments)
        return [np.asarray(_plain(x)) for x in call.arrays[:count]]

    def on_one_device(self, state) -> tuple[list[np.ndarray], list[float]]:
        """Trains on one device; returns the last state and the losses."""
        call = open_arguments(self.run.step, self.arguments(state))
        flat, losses = list(call.arrays), list[float]()
        carried = self.analysis.carried_arguments
        every = range(len(self.analysis.graph.outputs))
        (loss_at,) = [k for k in every if k not in set(carried.values())][-1:]
        for number in range(len(self.batches)):
            leaves = jax.tree.leaves(self.batch(number))
            flat[len(flat) - len(leaves) :] = [jnp.asarray(x) for x in leaves]
            made = self.one(*flat)
            losses.append(float(made[loss_at]))
            for argument, result in carried.items():
                flat[argument] = made[result]
        return [np.asarray(_plain(x)) for x in flat[: len(carried)]], losses

    def row(self, stages: int, schedule: str) -> dict[str, object]:
        """Trains in stages, and compares."""
        from example_training import take_step

        out: dict[str, object] = {
            "example": self.name,
            "stages": stages,
            "schedule": schedule,
            "float64": self.args.float64,
        }
        try:
            step = autopar.parallelize(
                self.run.step,
                cluster=autopar.Cluster.local(8),
                stages=stages,
                schedule=schedule,
                microbatches=self.args.microbatches,
                coupled="microbatch" if self.name in _COUPLED else "refuse",
                max_axes=1,
                seconds=1.0,
            )
            state, losses = self.state(), list[float]()
            for number in range(len(self.batches)):
                state, loss = take_step(step, state, self.batch(number))
                losses.append(float(loss))
        except autopar.PlanError as error:
            return {**out, "refused": str(error).splitlines()[0]}
        except Exception as error:  # a row tells it, and others go on
            traceback.print_exc()
            return {**out, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        if self.args.float64:
            return {**out, "gradient_difference": self.moved(state)}
        difference = _difference(losses, self.losses)
        allowed = max(BAR, 3 * self.sensitivity)
        return {
            **out,
            "loss": round(losses[-1], 4),
            "difference": float(f"{difference:.2e}"),
            "allowed": float(f"{allowed:.2e}"),
            "within": difference <= allowed,
        }

    def moved(self, state) -> float:
        """How far the first steps differ, relative to the largest change of each."""
        rows = zip(self.before, self.after, self.flat(state), strict=True)
        found = [
            (
                np.abs(after.astype(float) - before).max(initial=0.0),
                np.abs(ours.astype(float) - after).max(initial=0.0),
            )
            for before, after, ours in rows
            if np.issubdtype(after.dtype, np.floating)
        ]
        least = max(change for change, _ in found) / 1000
        return float(f"{max(off / max(change, least) for change, off in found):.2e}")


def _plain(x):
    keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if keys else x


def _wide(x):
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(x, jnp.float64)
    return x


def _difference(one: list[float], other: list[float]) -> float:
    a, b = np.array(one), np.array(other)
    return float(np.max(np.abs(a - b) / np.abs(b)))


if __name__ == "__main__":
    main()
