"""A process of a training program; test_multiprocess.py runs it.

Usage: python multiprocess_worker.py PROCESS COUNT PORT OUT
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
import unittest.mock
import warnings
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import step_forms as forms
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.compression.policies import LGreCo
from autopar.runtime.batch_rows import Rows, place_rows
from autopar.runtime.comparing import Comparison


def rows() -> int:
    """The number of rows of this process."""
    return forms.BATCH // jax.process_count()


def local_batches(count: int, process: int) -> list[Any]:
    """This process's rows of the global batches."""
    mine = slice(process * rows(), (process + 1) * rows())
    return [{k: v[mine] for k, v in b.items()} for b in forms.batches(count)]


def train(form: forms.Form, create_outside: bool) -> tuple[list[float], Any]:
    step = autopar.parallelize(form.step, cluster=forms.cheap("2x2:cpu"), seconds=None)
    given = local_batches(4, jax.process_index())
    if create_outside:
        state = form.create(jax.random.key(0))
    else:
        example = forms.batch_structs()
        state = step.init(form.create, jax.random.key(0), batch=example)
    return form.losses(step, state, given), step.plan


def errors(process: int) -> dict[str, str]:
    """The errors of each process if no plan fits, or if the processes' plans differ."""
    out: dict[str, str] = {}
    form = forms.FORMS["plain"]
    small = forms.with_memory(forms.cheap("2x2:cpu"), 1_000)
    state = form.create(jax.random.key(0))
    batch = local_batches(1, process)[0]
    try:
        autopar.parallelize(form.step, cluster=small)(*state, batch)
    except autopar.PlanError as error:
        out["infeasible"] = str(error)
    width = (2, 4)[process]
    args = (*state, forms.batch_structs(forms.BATCH * width))
    plan = autopar.plan(form.step, *args, cluster=forms.cheap("2x2:cpu"))
    try:
        autopar.parallelize(form.step, plan=plan)(*state, batch)
    except autopar.PlanError as error:
        out["different"] = str(error)
    return out


def _fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("by nothing")


def _step(w: Any, batch: Any) -> Any:
    return w - 0.1 * batch["x"].mean(), (batch["x"] @ w).sum()


def _failing(w: Any, batch: Any) -> Any:
    return _fail() if jax.process_index() == 1 else _step(w, batch)


def _other(w: Any, batch: Any) -> Any:
    return _step(w * (1.0 + 0.5 * jax.process_index()), batch)


def failures(process: int) -> dict[str, tuple[str, float]]:
    """Each process's errors, and after how many seconds, if only process 1 fails."""
    batch = local_batches(1, process)[0]
    fewer = {k: v[: len(v) - process] for k, v in batch.items()}
    w = np.eye(forms.WIDTH, dtype=np.float32)

    def call(step: Any = _step, batch: Any = batch, w: Any = w, **options: Any) -> Any:
        made = autopar.parallelize(step, cluster=forms.cheap("2x2:cpu"), **options)
        return made(w, batch)

    def create() -> Any:
        step = autopar.parallelize(_step, cluster=forms.cheap("2x2:cpu"))
        return step(step.init(_fail if process == 1 else lambda: w), batch)

    def call_often(after: Any) -> None:
        """Passes other arrays in each process to one of the calls, and goes on."""
        step = autopar.parallelize(
            _step, cluster=forms.cheap("2x2:cpu"), whole_argnames="batch"
        )
        batch, new = local_batches(1, 0)[0], w
        for k in range(6):
            more = process if k == 4 else 0
            new, _ = step(new, {k: v + more for k, v in batch.items()})
        after(step, new, batch)

    def patched(what: str, by: Any) -> Any:
        with unittest.mock.patch(what, by) if process == 1 else nullcontext():
            return call()

    cases = {
        "tracing": lambda: call(_failing),
        "creating": create,
        "compiling": lambda: patched(
            "autopar.runtime.planned.PlannedStep.compile", _fail
        ),
        "versions": lambda: patched("jax.__version__", "0.9.9"),
        "rows": lambda: call(batch=fewer),
        "code": lambda: call(_other),
        "values": lambda: call(w=w + process),
        "whole": lambda: call(
            batch={k: v + process for k, v in batch.items()}, whole_argnames="batch"
        ),
        "replan": lambda: call_often(
            lambda step, w, batch: step.replan(forms.cheap("2x2:cpu"), w)
        ),
        "end": lambda: call_often(lambda step, w, batch: step.finish_comparison()),
    }
    found: dict[str, tuple[str, float]] = {}
    for name, run in cases.items():
        multihost_utils.sync_global_devices(name)
        began = time.monotonic()
        try:
            run()
        except (autopar.PlanError, ZeroDivisionError) as error:
            text = f"{type(error).__name__}: {error}"
            found[name] = (text, time.monotonic() - began)
    call()  # After all failures, the processes still run the same collectives.
    return found


def keyed(process: int) -> float:
    """Runs steps whose key and scalar are equal on all processes, and not sharded.

    In one of the steps the key is part of the state, which exists before the plan.
    """

    def create() -> Any:
        return np.eye(forms.WIDTH, dtype=np.float32), jax.random.key(5)

    def with_key(state: Any, batch: Any) -> Any:
        w, key = state
        out = ((batch["x"] @ w) ** 2).mean()
        key, own = jax.random.split(key)
        return (w - 0.1 * jax.random.normal(own, w.shape), key), out

    def step(w: Any, batch: Any, key: Any, scale: Any) -> Any:
        noise = jax.random.normal(key, w.shape)
        out = ((batch["x"] @ w - batch["y"]) ** 2).mean()
        return w - 0.1 * scale * noise, out + (scale * noise).sum()

    run = autopar.parallelize(step, cluster=forms.cheap("2x2:cpu"), seconds=5)
    w = np.eye(forms.WIDTH, dtype=np.float32)
    batch = local_batches(1, process)[0]
    new, first = run(w, batch, jax.random.key(3), np.float32(0.5))
    _, second = run(new, batch, jax.random.PRNGKey(3), np.float32(0.5))
    held = autopar.parallelize(with_key, cluster=forms.cheap("2x2:cpu"), seconds=5)
    state = held.init(create)
    for batch in local_batches(2, process):
        state, third = held(state, batch)
    return float(first) + float(second) + float(third)


def adapted(process: int) -> dict[str, Any]:
    """Runs a step with codecs by error, and with a fallback to another codec."""
    # The import creates arrays, so JAX must be initialised before.
    import compressed_cases

    case = compressed_cases.data_parallel()
    policy = LGreCo(
        every=4,
        reference="powersgd:rank=2",
        options=("powersgd:rank=1", "powersgd:rank=3"),
        horizon=10**9,
    )
    step = case.parallel(
        "powersgd:rank=3", policy=policy, fallback="bf16", least_gain=0.5
    )
    state, losses, levels = case.state(), [], []
    for whole in case.batches(5):
        state, (loss,) = case.train(step, state, [_own_rows(whole, process)])
        losses.append(loss)
        levels.append([report.level for report in step.telemetry.values()])
    return {
        "losses": losses,
        "codecs": policy.state.codecs,
        "levels": levels,
        "adopted": [change.adopted for change in step.codec_changes],
    }


def _own_rows(batch: Any, process: int) -> Any:
    count = len(batch["x"]) // jax.process_count()
    return {k: v[process * count : (process + 1) * count] for k, v in batch.items()}


def replicated(process: int) -> dict[str, Any]:
    """Runs replicas of unequal shares, with codecs and measured gradient noise."""
    import compressed_cases

    case = dataclasses.replace(
        compressed_cases.data_parallel(), cluster="1x2:cpu+1x2:cpu,efficiency=0.2"
    )
    step = case.parallel(
        "int8", microbatches=[3, 1], noise_scale=True,
        comparison=Comparison(every=0, steps=2),
    )  # fmt: skip
    mine = [_own_rows(whole, process) for whole in case.batches(3)]
    _, losses = case.train(step, case.state(), mine)
    (compared,) = step.comparisons
    return {
        "losses": losses,
        "codecs": [g.codec for g in step.plan.gradients],
        "phi": step.noise_scale.phi,
        "exact": compared.exact_loss,
        "withdrawn": compared.withdrawn,
    }


def time_major(process: int) -> dict[str, float]:
    """Losses of a step that treats steps of time and rows alike, and of evaluations.

    The rows are in dim 1, and the random numbers of an element depend on its place.
    """
    draw = np.random.default_rng(0)
    x = draw.standard_normal((6, 16, 4)).astype(np.float32)
    batch = {"x": x, "mask": draw.random((6, 16)) < 0.7}
    mine = np.array_split(np.arange(16), jax.process_count())[process]
    own = {k: v[:, mine] for k, v in batch.items()}

    def loss_of(w: Any, batch: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.key(1), 0.8, batch["x"].shape)
        y = jnp.tanh(jnp.where(kept, batch["x"], 0.0) @ w) ** 2
        return jnp.mean(jnp.where(batch["mask"], y.sum(-1), 0.0))

    def step(w: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_of)(w, batch)
        return w - 0.1 * grad, loss

    structs = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), batch)
    run = autopar.parallelize(step, cluster=forms.cheap("2x2:cpu"), seconds=None)
    w = run.init(lambda: 0.3 * jnp.ones((4, 4)), batch=structs)
    found: dict[str, float] = {}
    for k in range(2):
        w, loss = run(w, own)
        found[f"loss {k}"] = float(loss)
    found["evaluated"] = float(run.jit(loss_of)(w, own))
    half = slice(None, 4) if jax.process_count() > 1 else [*range(4), *range(8, 12)]
    found["fewer"] = float(run(w, {k: v[:, half] for k, v in own.items()})[1])
    return found


def whole(process: int) -> dict[str, Any]:
    """Losses and an evaluation where each process passes the whole batch."""
    del process
    form = forms.FORMS["plain"]
    step = autopar.parallelize(
        form.step, cluster=forms.cheap("2x2:cpu"), last_batch="drop",
        whole_argnames="batch",
    )  # fmt: skip
    batches = list(forms.batches(3))
    state = step.init(form.create, jax.random.key(0), batch=batches[0])
    batches[2] = {k: v[:9] for k, v in batches[2].items()}
    repeats: list[bool] = []
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a row is dropped
        for batch in batches:
            # A call after the first is like the one before it, until rows are dropped.
            repeats.append(step._repeated is not None)
            *state, loss = step(*state, batch)
            losses.append(float(loss))

    def evaluate(params: Any, batch: Any, weights: Any) -> Any:
        total = sum(jnp.sum(x) for x in jax.tree.leaves(params))
        return total + jnp.sum(batch["x"]) + jnp.sum(weights)

    run = step.jit(evaluate, whole_argnames="weights")
    found = run(state[0], batches[1], np.arange(4, dtype=np.float32))
    shapes = [list(shape) for shape in step.plan.written_shapes.values()]
    return {
        "losses": losses, "evaluated": float(found), "shapes": shapes,
        "repeats": repeats,
    }  # fmt: skip


def placed_wrong(process: int) -> list[str]:
    """Specs and types of batch arrays that were placed wrong in this process."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    specs = [P(), P("x"), P(("x", "y")), P("y"), P(None, "x"), P(("y", "x"))]
    wholes: list[np.ndarray] = []
    wanted: list[Rows] = []
    for spec in specs:
        for dtype in ("float32", "bool", "int8", "complex64", "bfloat16"):
            whole = np.arange(32).reshape(8, 4).astype(jnp.dtype(dtype))
            own = np.split(whole, 2)[process]
            wholes.append(whole)
            wanted.append(Rows(own, whole.shape, NamedSharding(mesh, spec)))
    placed = place_rows(dict(enumerate(wanted)))
    return [
        f"{wanted[k].sharding.spec} {whole.dtype}"
        for k, whole in enumerate(wholes)
        if placed[k].sharding != wanted[k].sharding
        or not all(
            np.array_equal(np.asarray(shard.data), whole[shard.index])
            for shard in placed[k].addressable_shards
        )
    ]


def results(process: int) -> dict[str, Any]:
    """The losses and plans of the three forms of a step on four devices."""
    found: dict[str, Any] = {}
    for name, outside in (("linen", False), ("plain", True), ("nnx", False)):
        losses, plan = train(forms.FORMS[name], outside)
        found[name] = losses
        found[f"{name} plan"] = msgspec.to_builtins(plan)
    more = {
        "keyed": keyed, "adapted": adapted, "replicated": replicated,
        "time major": time_major, "whole": whole,
    }  # fmt: skip
    return {**found, **{name: run(process) for name, run in more.items()}}


def main() -> None:
    process, count, port, out = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(process), initialization_timeout=240
    )
    found = {**results(int(process)), "errors": errors(int(process))}
    found["rows"] = placed_wrong(int(process))
    found["failures"] = failures(int(process))
    multihost_utils.sync_global_devices("done")
    pathlib.Path(f"{out}_{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
