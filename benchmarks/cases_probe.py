"""Runs one step program of `cases.py`, and compares its results with `jax.jit`.

Usage: python benchmarks/cases_probe.py plans|roles|mesh|effects|files PROGRAM

For each comparison, the probe prints a line `RECORD {...}`. The record has the
difference between planned and plain steps; or else the error, whether autopar raised
it, and whether the option that its message names helps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import re
import runpy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from feature_steps import difference

import autopar

DEVICES, STEPS = 8, 3
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"microbatches": 4},
    {"stages": 2, "microbatches": 4},
)


def cheap() -> autopar.Cluster:
    """A cluster with very fast links, on which plans split even small arrays."""
    found = autopar.Cluster.parse(f"{DEVICES}:cpu")
    free = {"latency_s": 1e-12, "bandwidth_bytes_per_s": 1e15}
    levels = tuple(
        dataclasses.replace(x, link=dataclasses.replace(x.link, **free))
        for x in found.levels
    )
    return dataclasses.replace(found, levels=levels)


def record(**facts: Any) -> None:
    """Prints the record of one form of a step."""
    print("RECORD", json.dumps(facts), flush=True)


def failed(error: Exception) -> dict[str, Any]:
    """The fields of a record that describe an error."""
    return {
        "error": type(error).__name__,
        "own": isinstance(error, autopar.AutoparError),
        "line": " ".join(str(error).split()),
    }


def arrays(tree: Any) -> list[Any]:
    """All arrays of a tree; random keys as integers."""

    def words(x: Any) -> Any:
        key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return np.asarray(jax.random.key_data(x) if key else x)

    return [words(x) for x in jax.tree.leaves(tree)]


def made(shape: Any) -> Any:
    """An array of a shape; an array of integers holds row numbers."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.extended):
        return jax.random.key(0)
    draw = np.random.default_rng(0)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.asarray(0.1 * draw.standard_normal(shape.shape), shape.dtype)
    if not shape.shape:
        return jnp.zeros((), shape.dtype)
    return jnp.asarray(draw.permutation(shape.shape[0]), shape.dtype)


def plans(path: str) -> None:
    """Makes each call of `autopar.plan` in a program also run its plan."""
    plan = autopar.plan

    def run(step: Any, *shapes: Any, cluster: Any, **options: Any) -> Any:
        cluster = cheap() if cluster == f"{DEVICES}:cpu" else cluster
        facts: dict[str, Any] = {
            "options": {k: v for k, v in options.items() if k != "seconds"}
        }
        try:
            found = plan(step, *shapes, cluster=cluster, **options)
        except Exception as error:
            facts |= failed(error)
            named = re.search(r'(\w+)="(\w+)"', facts["line"])
            if facts["own"] and named:
                options[named[1]] = named[2]
                plan(step, *shapes, cluster=cluster, **options)
                facts["remedy"] = f"{named[1]}={named[2]}"
            record(**facts)
            raise
        given = jax.tree.map(made, shapes)
        try:
            wanted = jax.jit(step)(*given)
        except jax.errors.JaxRuntimeError as error:
            record(**facts, difference=0.0, planned_alone=str(error).splitlines()[0])
            return found
        planned = autopar.parallelize(step, layouts=found, donate=False)
        try:
            worst = difference(arrays(planned(*given)), arrays(wanted))
        except Exception as error:
            record(**facts, **failed(error))
            raise
        record(**facts, difference=worst)
        return found

    autopar.plan = run
    update = jax.config.update

    def set_once(name: str, val: Any) -> None:
        if name != "jax_num_cpu_devices":  # it is set here, before the first operator
            update(name, val)

    jax.config.update = set_once
    runpy.run_path(path, run_name="__main__")


def effects(path: str) -> None:
    """Compares the values that ordered host callbacks get with those on one device."""
    from jax.experimental import io_callback

    with contextlib.redirect_stdout(sys.stderr):
        make = runpy.run_path(path)["mk"]
    heard: list[float] = []

    def hear(loss: Any, grad: Any) -> Any:
        del grad
        return io_callback(lambda x: heard.append(float(x)), None, loss, ordered=True)

    step, (w, x) = make(hear), (jnp.eye(64), jnp.ones((64, 64)))
    seen: list[list[float]] = []
    planned = autopar.parallelize(step, cluster=cheap(), donate=False)
    for run in (jax.jit(step), planned):
        heard.clear()
        v = w
        for _ in range(STEPS):
            v = run(v, x)[0]
        jax.effects_barrier()
        seen.append(list(heard))
    worst = difference([np.array(seen[1])], [np.array(seen[0])])
    record(options={"calls": len(seen[1])}, difference=worst)


def mesh(path: str) -> None:
    """Compares a step that a program plans under its own mesh with the plain step."""
    step = runpy.run_path(path)["step"]
    given = (0.3 * jnp.eye(64), jnp.full((64, 64), 0.5))
    found = arrays(step(*given))
    jax.sharding.set_mesh(None)
    wanted = arrays(jax.jit(step.__wrapped__)(*given))
    record(options={}, difference=difference(found, wanted))


def files(path: str) -> None:
    """Records the error for each file that a program reads."""
    from autopar.checkpoint import torch_files

    load = torch_files.load

    def read(name: str) -> Any:
        try:
            found = load(pathlib.Path(name))
        except Exception as error:
            record(options={"file": name}, **failed(error))
            return None
        record(options={"file": name}, error="read", own=False, line=str(found))
        return found

    torch_files.load = read
    runpy.run_path(path)


def roles(path: str) -> None:
    """Plans a program at its real size, and runs a small version in all modes."""

    def load() -> Any:
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found

    def others(program: Any, i: int, *, threefry: bool = False) -> Any:
        given = program.others(i) if hasattr(program, "others") else ()
        return jax.tree.map(
            lambda x: (
                jax.random.key(i)
                if threefry and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                else x
            ),
            given,
        )

    big = load()
    big.BIG()
    state = jax.eval_shape(lambda: big.create(jax.random.key(0)))
    state = state if isinstance(state, tuple) else (state,)
    batch = jax.eval_shape(lambda: big.batches(0))
    plan = autopar.plan(
        big.step, *state, batch, *others(big, 0), cluster="2x4:a100", seconds=4
    )
    rows = plan.worth.rows if plan.worth is not None else 0
    record(options={"rows": rows}, difference=abs(rows - big.B))

    small = load()

    def train(step: Any, threefry: bool) -> list[Any]:
        state, seen = small.create(jax.random.key(0)), list[Any]()
        for i in range(STEPS):
            rest = others(small, i, threefry=threefry)
            *state, metrics = step(*state, small.batches(i), *rest)
            seen.append(metrics)
        return arrays((seen, state))

    def worst(options: dict[str, Any], threefry: bool) -> tuple[float, Any]:
        step = autopar.parallelize(
            small.step, cluster=cheap(), seconds=3, donate=False, **options
        )
        found = train(step, threefry)
        return difference(found, train(jax.jit(small.step), threefry)), step.plan

    for options in MODES:
        try:
            found, plan = worst(options, False)
            local = [x for x in plan.local if "random" in x]
            if found > 2e-3 and local:  # keys of another kind than Threefry
                record(
                    options=options,
                    difference=worst(options, True)[0],
                    own_numbers=local,
                )
            else:
                record(options=options, difference=found)
        except autopar.AutoparError as error:
            record(options=options, **failed(error))


if __name__ == "__main__":
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", DEVICES)
    {"plans": plans, "roles": roles, "mesh": mesh, "effects": effects, "files": files}[
        sys.argv[1]
    ](sys.argv[2])
