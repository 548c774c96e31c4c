"""Runs small steps, each with one feature of JAX or its libraries, under many plans.

    python benchmarks/feature_steps.py [--only TEXT] [--modes stages,mesh] [--list]

Each step runs twice under ``jax.jit``. It also runs planned for 4 simulated devices in
three modes: as one program, in 2 microbatches, and in 2 pipeline stages. All three
modes run again under an explicit mesh, with a batch that is split over it. Losses,
metrics and final states are compared.

``equal``: Outcomes: ``equal``: all results are equal up to rounding. ``own numbers``:
  random numbers or batch statistics are those of each microbatch alone, as the plan
  says. ``refused``: autopar raises an error, which is printed in the next line. ``as
  jit``: ``jax.jit`` also refuses the step under the mesh, and the results are equal if
  the batch is not split over it. ``WRONG`` and ``CRASH`` give exit code 1. The figures
  are written as JSON (``--json FILE``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent
DATA = FOLDER.parent / "docs" / "data" / "feature_steps.json"
MODULES = (
    "losses",
    "updates",
    "batches",
    "modules",
    "roles",
    "kernels",
    "control_flow",
    "randomness",
    "optimizers",
)
MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "microbatches": {"microbatches": 2},
    "stages": {"stages": 2, "microbatches": 2},
}
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
DEVICES, STEPS = 4, 2
BAD = ("WRONG", "CRASH")


def features(only: str = "") -> list[Any]:
    """The features whose names contain a text."""
    if str(FOLDER / "features") not in sys.path:
        sys.path.insert(0, str(FOLDER / "features"))
    found = [f for m in MODULES for f in importlib.import_module(m).features()]
    return [f for f in found if only.lower() in f.name.lower()]


def train(feature: Any, step: Any, batch: Sequence[Any]) -> list[Any]:
    """The arrays that a feature's steps return, and those that they change in place."""
    import jax
    import numpy as np
    from flax import nnx

    state, seen = feature.state(), list[Any]()
    for _ in range(STEPS):
        if feature.objects:
            seen.append(step(*state, *batch))
        else:
            state, metrics = step(state, *batch)
            seen.append(metrics)
    last = [nnx.state(x) for x in state] if feature.objects else state
    jax.effects_barrier()

    def read(x: Any) -> Any:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.extended):
            x = jax.random.key_data(x)
        return np.asarray(x)

    arrays = [x for x in jax.tree.leaves((seen, last)) if hasattr(x, "dtype")]
    return [read(x) for x in arrays]


def difference(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference of two runs, relative to each array's largest element."""
    import numpy as np

    if len(found) != len(wanted):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if a.dtype.kind not in "fcV":
            worst = max(worst, 0.0 if np.array_equal(a, b) else float("inf"))
            continue
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        x, y = a.astype(kind), b.astype(kind)
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return float("inf")
        x, y = x[np.isfinite(x)], y[np.isfinite(y)]
        if x.size:
            scale = max(1e-3, float(np.max(np.abs(y))))
            worst = max(worst, float(np.max(np.abs(x - y))) / scale)
    return worst


def plain(feature: Any) -> Any:
    """The step under ``jax.jit``, or NNX's form of it."""
    import jax
    from flax import nnx

    if feature.objects:
        return nnx.jit(feature.step)
    if any(callable(x) for x in jax.tree.leaves(feature.state())):
        import equinox

        return equinox.filter_jit(feature.step)
    return jax.jit(feature.step, static_argnames=feature.static or None)


def tried(
    feature: Any, wanted: Sequence[Any], mode: str, *, mesh: bool, limit: float
) -> dict[str, Any]:
    """Runs a feature under a plan, and compares it with the plain results."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import autopar

    context, batch = contextlib.nullcontext(), feature.batch
    if mesh:
        made = jax.make_mesh((DEVICES,), ("data",))
        context = jax.set_mesh(made)
        rows = NamedSharding(made, PartitionSpec("data"))
        batch = tuple(
            jax.device_put(x, rows)
            if hasattr(x, "shape") and x.shape and x.shape[0] % DEVICES == 0
            else x
            for x in batch
        )

    def run(batch: Sequence[Any]) -> dict[str, Any]:
        planned = autopar.parallelize(
            feature.step,
            cluster=f"{DEVICES}:cpu",
            seconds=0.3,
            static_argnames=feature.static,
            **MODES[mode],
        )
        worst = difference(train(feature, planned, batch), wanted)
        said = [x for x in planned.plan.local if worst > limit]
        how = "equal" if worst <= limit else "own numbers" if said else "WRONG"
        return {"outcome": how, "difference": worst, "line": "; ".join(said)}

    def refused(error: Exception) -> dict[str, Any]:
        return {"outcome": "refused", "line": str(error).splitlines()[0]}

    with context:
        try:
            return run(batch)
        except autopar.TraceError as error:
            if not mesh or _runs(feature, batch):
                return refused(error)
            said = error
        except autopar.StageError:
            raise  # see the error of the task in a stage
        except autopar.AutoparError as error:
            return refused(error)
        # If the batch is split, JAX may require the step to state the sharding of its
        # results.
        try:
            found = run(feature.batch)
        except autopar.AutoparError as error:
            return refused(error)
        as_jit = {"outcome": "as jit", "line": str(said).splitlines()[0]}
        return found | as_jit if found["outcome"] == "equal" else found


def _runs(feature: Any, batch: Sequence[Any]) -> bool:
    """Whether ``jax.jit`` accepts these arguments."""
    with contextlib.suppress(Exception):
        train(feature, plain(feature), batch)
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="features whose name has this text")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="of " + ", ".join(MODES)
    )
    parser.add_argument("--meshes", default="plain,mesh", help="plain, mesh or both")
    parser.add_argument("--json", type=pathlib.Path, default=DATA, help="data file")
    parser.add_argument("--limit", type=float, default=2e-3, help="of a difference")
    parser.add_argument("--list", action="store_true", help="names, and nothing else")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if asked.jobs > 1:
        return _shared(given, asked.json, asked.jobs)
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", DEVICES)
    share, shares = map(int, asked.share.split("/"))
    chosen = features(asked.only)[share::shares]
    if asked.list:
        print("\n".join(f.name for f in chosen))
        return 0
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    start = time.process_time()
    for feature in chosen:
        wanted = train(feature, plain(feature), feature.batch)
        for mesh in asked.meshes.split(","):
            for mode in asked.modes.split(","):
                try:
                    row = tried(
                        feature, wanted, mode, mesh=mesh == "mesh", limit=asked.limit
                    )
                except Exception as error:  # whatever a step or JAX may raise
                    text = f"{type(error).__name__}: {str(error).strip()}"
                    row = {"outcome": "CRASH", "line": text.splitlines()[0][:300]}
                row = {"feature": feature.name, "mesh": mesh, "mode": mode, **row}
                rows.append(row)
                line = row.get("line") or ""
                print(
                    f"{feature.name:38} {mesh:6} {mode:13} {row['outcome']:12} {line}",
                    flush=True,
                )
        jax.clear_caches()
        _write(asked.json, given, rows)
    spent = time.process_time() - start
    print(f"\n{len(chosen)} features, {len(rows)} runs, {spent:.0f} s of the CPU")
    return _told(rows)


def _told(rows: Sequence[dict[str, Any]]) -> int:
    """Prints the number of rows of each outcome; returns the exit code."""
    counts = Counter(row["outcome"] for row in rows)
    print(", ".join(f"{n} {name}" for name, n in counts.most_common()))
    return int(any(counts[name] for name in BAD))


def _shared(given: Sequence[str], path: pathlib.Path, jobs: int) -> int:
    """Runs the command in several processes, each with a share of the features."""
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, f"{k}.json") for k in range(jobs)]
        children = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, *given, "--jobs=1"),
                    *(f"--share={k}/{jobs}", f"--json={file}"),
                ]
            )
            for k, file in enumerate(files)
        ]
        died = [c for c in children if c.wait() not in (0, 1)]
        rows = [row for f in files for row in json.loads(f.read_text())["runs"]]
    _write(path, given, rows)
    return _told(rows) or int(bool(died))


def _write(
    path: pathlib.Path, given: Sequence[str], rows: Sequence[dict[str, Any]]
) -> None:
    """Writes the results so far, so that an interrupted run leaves them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "command": " ".join(["python benchmarks/feature_steps.py", *given]),
        "devices": DEVICES,
        "features": len({r["feature"] for r in rows}),
        "counts": dict(Counter(r["outcome"] for r in rows)),
        "refused": dict(Counter(r["line"] for r in rows if r["outcome"] == "refused")),
        "runs": rows,
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
