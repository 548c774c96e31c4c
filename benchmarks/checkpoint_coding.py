"""Size and seconds of checkpoints whose arrays are stored as planes of bytes.

    python benchmarks/checkpoint_coding.py [--only TEXT] [--steps 60] [--turns 5]

Each row is an example, trained for some steps with float32 or bfloat16 parameters and
moments. Its state is saved and restored as it is and as planes, in turns. The figures
are the bytes of the files over those of the arrays, the medians of the seconds until a
checkpoint is complete and restored, and whether all restored bits are those saved.
Writes the figures to ``docs/data/checkpoint_coding.json`` and prints a table. The codec
was chosen on GPTs; the LSTM, the ViT and the ResNet were used for no choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import workloads

DATA = pathlib.Path(__file__).parent.parent / "docs" / "data" / "checkpoint_coding.json"
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "d_model": 512, "batch": 8},
    "lstm": {"layers": 2, "d_model": 1024, "batch": 8},
    "vit": {"layers": 4, "d_model": 512, "batch": 8},
    "resnet": {"width": 64, "batch": 8},
}
SMALLER = {"float32": 0.85, "bfloat16": 0.70}
SLOWER = 1.2


def main() -> int:
    """Measures all rows; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="rows whose text has this")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    asked = parser.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    pairs = itertools.product(MODELS, SMALLER)
    rows = [
        measured(name, dtype, asked.steps, asked.turns)
        for name, dtype in pairs
        if asked.only in f"{name} {dtype}"
    ]
    show(rows)
    command = f"python benchmarks/checkpoint_coding.py --steps {asked.steps}"
    found = {"command": command, "commit": workloads.commit(), "rows": rows}
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not all(reached(row) for row in rows))


def measured(name: str, dtype: str, steps: int, turns: int) -> dict[str, Any]:
    """The figures of one model."""
    import jax
    import jax.numpy as jnp

    import autopar

    run = workloads.training(name, **MODELS[name])
    import example_training  # the folder of examples is a path of imports now

    def create(key: Any) -> Any:
        return jax.tree.map(
            lambda x: (
                x.astype(dtype)
                if jnp.isdtype(jnp.result_type(x), "real floating")
                else x
            ),
            run.create_state(key),
        )

    batches = run.batches(0)
    first = next(batches)
    step = autopar.parallelize(run.step, cluster="2:cpu")
    state = step.init(create, jax.random.key(0), batch=first)
    for batch in itertools.islice(batches, steps):
        state, _ = example_training.take_step(step, state, batch)
    kept = jax.device_get(state)
    sizes: dict[str, int] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    equal = True
    for _ in range(turns):
        for coding in (None, "planes"):
            with tempfile.TemporaryDirectory() as folder:
                held = autopar.Checkpoints(folder, coding=coding)
                begin = time.perf_counter()
                held.save(step, state, step=steps)
                held.wait()
                saved = time.perf_counter()
                os.sync()
                read = time.perf_counter()
                # A step may have changed dtypes, such as those of a batch norm's means.
                found = held.restore_into(step, state)
                jax.block_until_ready(found.state)
                end = time.perf_counter()
                held.release()
                sizes[str(coding)] = _size(pathlib.Path(folder))
            seconds.setdefault((str(coding), "save"), []).append(saved - begin)
            seconds.setdefault((str(coding), "restore"), []).append(end - read)
            equal &= same(kept, jax.device_get(found.state))
    mid = {key: statistics.median(values) for key, values in seconds.items()}
    whole = sum(np.asarray(x).nbytes for x in jax.tree.leaves(kept))
    return {
        "model": name,
        "dtype": dtype,
        "steps": steps,
        "array_bytes": whole,
        "plain": round(sizes["None"] / whole, 4),
        "planes": round(sizes["planes"] / whole, 4),
        "save_s": [round(mid[c, "save"], 3) for c in ("None", "planes")],
        "restore_s": [round(mid[c, "restore"], 3) for c in ("None", "planes")],
        "bits_equal": equal,
        "load": round(os.getloadavg()[0], 1),
    }


def _size(folder: pathlib.Path) -> int:
    return sum(x.stat().st_size for x in folder.rglob("arrays/**/*") if x.is_file())


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same bits."""
    import jax

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def reached(row: dict[str, Any]) -> bool:
    """Whether a row reaches all bars."""
    plain_s, planes_s = row["save_s"]
    small = row["planes"] <= SMALLER[row["dtype"]]
    return small and planes_s <= SLOWER * plain_s and row["bits_equal"]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    workloads.row(
        "model", "dtype", "MB", "as it is", "planes", "save s", "ratio", "restore s",
        "bits equal",
    )  # fmt: skip
    workloads.row(*["---"] * 9)
    for row in rows:
        plain_s, planes_s = row["save_s"]
        workloads.row(
            row["model"], row["dtype"], f"{row['array_bytes'] / 1e6:.0f}",
            row["plain"], row["planes"], f"{plain_s}, {planes_s}",
            f"{planes_s / plain_s:.2f}", "{}, {}".format(*row["restore_s"]),
            row["bits_equal"],
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
