"""The examples and clusters that the benchmarks use."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

EXAMPLES_DIR = pathlib.Path(__file__).resolve().parent.parent / "examples"

# Name in the tables -> (module, options).
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {}),
    "gpt-scan": ("gpt", {"scan": True}),
    "gpt-nnx": ("gpt_nnx", {}),
    "llama": ("llama", {}),
    "vit": ("vit", {}),
    "resnet": ("resnet", {}),
    "moe": ("moe", {}),
    "lstm": ("lstm", {}),
    "recommendation": ("recommendation", {}),
}
# The ResNet with a tenth of its learning rate. With its own rate, a change of one unit
# in the last place of the parameters grows to 3e-4 of the loss within 20 steps.
SLOW = {"resnet-slow": ("resnet", {"learning_rate": 0.003})}
CLUSTERS = ("8", "2x4", "4x8", "8x8", "2x4x4", "16x16")


def module(name: str) -> Any:
    """Imports an example by its name in the tables."""
    if str(EXAMPLES_DIR) not in sys.path:
        sys.path.insert(0, str(EXAMPLES_DIR))
    return importlib.import_module({**EXAMPLES, **SLOW}[name][0])


def training(name: str, **options: Any) -> Any:
    """Returns an example's step, state and batches."""
    return module(name).training(**{**{**EXAMPLES, **SLOW}[name][1], **options})


def arguments(name: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns an example's step and its abstract arguments.

    With many devices, pass ``batch=``, so that the batch is large enough to be split.
    """
    step, state, batch = module(name).workload(
        **{**{**EXAMPLES, **SLOW}[name][1], **options}
    )
    leading = state if type(state) is tuple else (state,)
    return step, (*leading, batch)


def batch_for(devices: int) -> int:
    """Batch size for a cluster: at least that of the examples, and at least one row per
    device.
    """
    return max(32, devices)


def commit() -> str:
    """Eight digits of the commit of this checkout; '' outside of git."""
    asked = ["git", "-C", str(EXAMPLES_DIR), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout.strip()


def row(*cells: object) -> None:
    """Prints one row of a Markdown table."""
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def measure_rows(
    doc: str | None,
    rows: Sequence[tuple[Any, ...]],
    figures: Callable[..., dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], None],
    data: pathlib.Path,
) -> None:
    """Runs a benchmark of plans: prints a table, and writes the figures as JSON.

    The command has options for the rows to run, the solver's time limit, and the file.
    Rows of the file that are not run again stay in it. The file is written after each
    row.

    Args:
      doc: docstring of the benchmark.
      rows: the arguments of ``figures`` for each row, without the time limit.
      figures: returns the figures of a row, of which the first ones are its arguments;
        its last argument is the time limit of the solver in seconds.
      table: prints the figures of all rows.
      data: the default file.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="rows whose text has this")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the solver")
    parser.add_argument("--json", type=pathlib.Path, default=data, help="data file")
    asked = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if asked.json.exists():
        for old in json.loads(asked.json.read_text())["rows"]:
            known[json.dumps(list(old.values())[: len(rows[0])])] = old
    command = f"python benchmarks/{pathlib.Path(sys.argv[0]).name}"
    if asked.seconds != parser.get_default("seconds"):
        command += f" --seconds {asked.seconds:g}"
    for given in rows:
        if asked.only in " ".join(map(str, given)):
            known[json.dumps(given)] = figures(*given, asked.seconds)
            found = [known[key] for key in map(json.dumps, rows) if key in known]
            written = {"command": command, "rows": found}
            asked.json.write_text(json.dumps(written, indent=1) + "\n")
    table([known[key] for key in map(json.dumps, rows) if key in known])


def nudged(state: Any, seed: int = 0) -> Any:
    """The state with every float changed by about one unit in the last place.

    The resulting change of the losses on one device is the difference to expect between
    two correct runs of the same step.
    """
    import jax
    import numpy as np
    from flax import nnx

    rng = np.random.default_rng(seed)

    def change(leaf: Any) -> Any:
        if not jax.numpy.issubdtype(jax.numpy.result_type(leaf), jax.numpy.floating):
            return leaf
        signs = rng.choice([-1.0, 1.0], size=leaf.shape)
        return (leaf * (1 + 1e-7 * signs)).astype(leaf.dtype)

    if type(state) is tuple and isinstance(state[0], nnx.Module):
        nnx.update(state[0], jax.tree.map(change, nnx.state(state[0])))
        return state
    return jax.tree.map(change, state)
