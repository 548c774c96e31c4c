"""A process of a pipeline over several processes; test_processes.py runs it.

Usage: python stages_worker.py PROCESS COUNT PORT OUT CASE
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
import unittest.mock
import warnings
from typing import Any

import jax
from checkout import ROOT
from jax.sharding import PartitionSpec

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.runtime.comparing import Comparison
from autopar.runtime.stages import run, transport

sys.path.append(str(ROOT / "tests" / "autopar" / "runtime" / "stages"))

ASKED: dict[str, Any] = {"stages": 2, "microbatches": 4, "cluster": "4:cpu"}


def rows(seed: int) -> dict[str, Any]:
    """This process's rows of a batch."""
    from stage_cases import ROWS, batch

    count, process = ROWS // jax.process_count(), jax.process_index()
    mine = slice(process * count, (process + 1) * count)
    return {name: array[mine] for name, array in batch(seed=seed).items()}


def train(name: str) -> list[float]:
    """The losses of some steps, from a state that is created on its stages' devices."""
    from stage_cases import LOSSES, adam, batch

    made, state, _ = adam(LOSSES[name])
    step, losses = autopar.parallelize(made, **ASKED), list[float]()
    state = step.init(lambda: state, batch=batch())
    for seed in range(3):
        state, loss = step(state, rows(seed))
        losses.append(float(loss))
    return losses


def mixed() -> float:
    """The largest difference between this process's results and those of one device."""
    from stage_cases import mixed_distance, mixed_step

    return mixed_distance(autopar.parallelize(mixed_step, **ASKED), rows)


def moved() -> tuple[list[float], list[int]]:
    """Losses under plans of 1, 2 and 1 stages, and this process's shards under each."""
    from stage_cases import adam, batch, mean_loss

    made, state, _ = adam(mean_loss)
    whole = batch()
    plans = [
        autopar.plan(made, state, whole, **asked)
        for asked in (ASKED, {"cluster": ASKED["cluster"]})
    ]
    step = autopar.parallelize(made, cluster=ASKED["cluster"])
    losses, held = list[float](), list[int]()
    for seed, plan in enumerate([None, *plans]):
        if plan is not None:
            state = step.replan(ASKED["cluster"], state, plan=plan)
        state, loss = step(state, rows(seed))
        losses.append(float(loss))
        held.append(len(state["params"][0]["w"].addressable_shards))
    return losses, held


def coded() -> dict[str, Any]:
    """Losses and telemetry of stages that each sum their gradients by a codec."""
    from stage_cases import adam, batch, mean_loss

    made, state, _ = adam(mean_loss)
    pins = {"batch/*": PartitionSpec("data")}
    asked = {**ASKED, "axis_names": ("data",), "pins": pins, "compression": "dense"}
    step, losses = autopar.parallelize(made, **asked), list[float]()
    state = step.init(lambda: state, batch=batch())
    for seed in range(3):
        state, loss = step(state, rows(seed))
        losses.append(float(loss))
    bad = {name: array * float("nan") for name, array in rows(3).items()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state, _ = step(state, bad)
        reports = step.telemetry
    _, loss = step(state, rows(0))
    return {
        "losses": [*losses, float(loss)],
        "names": sorted(reports),
        "skipped": [report.skipped for report in reports.values()],
        "warned": len(said),
    }


def cut_codecs() -> dict[str, Any]:
    """Losses of stages that send each other encoded values, and the bytes of a step.

    The bytes are those of the activations and cotangents that this process sends.
    """
    from cut_codec_cases import (
        ASKED,
        CODECS,
        ROWS,
        batch,
        chain_loss,
        descended,
        weights,
    )

    out: dict[str, Any] = {}
    count = ROWS // jax.process_count()
    mine = slice(jax.process_index() * count, (jax.process_index() + 1) * count)
    offer = transport.Links.offer
    for codecs in ("none", CODECS):
        sent: list[int] = []
        comparison = None if codecs == "none" else Comparison(every=3, steps=2)

        def offered(self: Any, tag: Any, arrays: Any, routes: Any, sent: Any = sent):
            if tag[0] in ("forward", "backward") and arrays is not None:
                sent += [x.nbytes for x in arrays]
            return offer(self, tag, arrays, routes)

        step = autopar.parallelize(
            descended(chain_loss), **ASKED, stages=2, cut_codecs=codecs,
            comparison=comparison,
        )  # fmt: skip
        own = jax.tree.map(lambda x: x[mine], batch())
        params, losses = step.init(weights, batch=own), list[float]()
        for seed in range(3):
            rows = jax.tree.map(lambda x: x[mine], batch(seed))
            with unittest.mock.patch.object(transport.Links, "offer", offered):
                params, loss = step(params, rows)
            losses.append(float(loss))
        out[codecs] = {"losses": losses, "bytes": sum(sent) / 3}
    for seed in range(3, 6):
        params, _ = step(params, jax.tree.map(lambda x: x[mine], batch(seed)))
    (compared,) = step.comparisons
    out[CODECS]["compared"] = compared.loss, compared.exact_loss
    return out


def stopped_at(number: int, work: Any) -> Any:
    """Calls `work` before the tasks of a microbatch."""
    task = run._Run.task

    def stopping(self: Any, call: Any, microbatch: int) -> None:
        if microbatch == number:
            work()
        task(self, call, microbatch)

    return unittest.mock.patch.object(run._Run, "task", stopping)


def refused() -> dict[str, Any]:
    """A process's errors, and after how long, if process 1 fails; then a step works."""
    from stage_cases import adam, mean_loss

    made, state, _ = adam(mean_loss)
    step = autopar.parallelize(made, **ASKED)
    other = jax.tree.map(lambda x: x + jax.process_index(), state)
    said: list[str] = []
    with contextlib.suppress(PlanError):
        step(other, rows(0))
        said.append("not refused")
    state, _ = step(state, rows(0))
    failing = jax.process_index() == 1
    begin = time.monotonic()
    with stopped_at(2, lambda: 1 / 0) if failing else contextlib.nullcontext():
        try:
            step(state, rows(1))
        except (AutoparError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - begin
    state, loss = step(state, rows(1))
    return {"said": said, "seconds": seconds, "loss": float(loss)}


def late() -> dict[str, Any]:
    """The error of a process, and after how long, if an update fails on process 1."""
    from stage_cases import adam, mean_loss

    made, state, _ = adam(mean_loss)
    step = autopar.parallelize(made, **ASKED)
    state, _ = step(state, rows(0))
    begin, said = time.monotonic(), "nothing"
    fails = jax.process_index() == 1
    broken = unittest.mock.patch.object(
        run._Run, "finite", side_effect=ZeroDivisionError("division by zero")
    )
    with broken if fails else contextlib.nullcontext():
        try:
            step(state, rows(1))
        except (AutoparError, ZeroDivisionError) as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said, "seconds": time.monotonic() - begin}


# Placements by number of processes: the number of stages, and the devices of the first
# stage, the second stage and so on.
LAID: dict[int, dict[str, tuple[int, list[int]]]] = {
    2: {"each over both": (2, [0, 2, 1, 3]), "two in one": (4, [3, 1, 0, 2])},
    4: {"unevenly over three": (2, [0, 1, 2, 4, 3, 5, 6, 7])},
}
# The devices of two stages for `beside`: one process per stage, or two.
BESIDE = {2: [0, 1, 2, 3], 4: [0, 3, 4, 7]}


def joint(name: str) -> dict[str, Any]:
    """Losses and results of stages that span processes, or share a process."""
    from stage_cases import LOSSES, adam, batch, mixed_distance, mixed_step

    stages, order = LAID[jax.process_count()][name]
    asked = {**ASKED, "stages": stages, "devices": [jax.devices()[k] for k in order]}
    asked["cluster"] = f"{len(order)}:cpu"
    made, state, _ = adam(LOSSES["masked"])
    step, losses = autopar.parallelize(made, **asked), list[float]()
    state = step.init(lambda: state, batch=batch())
    for seed in range(3):
        state, loss = step(state, rows(seed))
        losses.append(float(loss))
    joint = stages == 2
    step = autopar.parallelize(mixed_step, **asked)
    return {"losses": losses, "far": mixed_distance(step, rows) if joint else 0.0}


def beside(order: list[int]) -> dict[str, Any]:
    """Results of all features around a step of two stages, on devices in some order."""
    from stage_cases import all_beside_the_step

    def mine(rows: int) -> slice:
        count, process = rows // jax.process_count(), jax.process_index()
        return slice(process * count, (process + 1) * count)

    return all_beside_the_step([jax.devices()[k] for k in order], mine)


def broken() -> dict[str, Any]:
    """The errors of a stage on both processes if process 1 fails."""
    from stage_cases import adam, mean_loss

    made, state, _ = adam(mean_loss)
    devices = [jax.devices()[k] for k in (0, 2, 1, 3)]
    step = autopar.parallelize(made, devices=devices, **ASKED)
    state, _ = step(state, rows(0))
    failing, begin, said = jax.process_index() == 1, time.monotonic(), list[str]()
    with stopped_at(2, lambda: 1 / 0) if failing else contextlib.nullcontext():
        for _ in range(2):
            try:
                step(state, rows(1))
            except (AutoparError, ZeroDivisionError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "seconds": time.monotonic() - begin}


def killed(how: int = signal.SIGKILL) -> dict[str, Any]:
    """The error of a process, and after how long, if process 1 is killed in a step.

    Args:
      how: the signal. After SIGSTOP, process 1 hangs.
    """
    from stage_cases import adam, mean_loss

    made, state, _ = adam(mean_loss)
    step = autopar.parallelize(made, **ASKED)
    state, loss = step(state, rows(0))
    float(loss)
    begin = time.monotonic()
    dies = jax.process_index() == 1
    kill = lambda: os.kill(os.getpid(), how)  # noqa: E731
    with stopped_at(2, kill) if dies else contextlib.nullcontext():
        try:
            step(state, rows(1))
        except AutoparError as error:
            seconds = time.monotonic() - begin
            return {"said": str(error), "seconds": seconds}
    return {"said": "nothing"}


def results(case: str) -> Any:
    """The results of a process in a case."""
    if case == "killed":
        return killed()
    if case == "laid":
        count = jax.process_count()
        lies = {name: joint(name) for name in LAID[count]}
        return {"lies": lies, "beside": beside(BESIDE[count])}
    if case == "broken":
        return broken()
    if case == "hangs":
        return killed(signal.SIGSTOP)
    return {
        "masked": train("masked"),
        "coded": coded(),
        "cut_codecs": cut_codecs(),
        "mixed": mixed(),
        "moved": moved(),
        "refused": refused(),
        "late": late(),
    }


def main() -> None:
    process, count, port = map(int, sys.argv[1:4])
    out, case = sys.argv[4:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(
        f"localhost:{port}", count, process, initialization_timeout=240
    )
    pathlib.Path(f"{out}_{process}.json").write_text(json.dumps(results(case)))


if __name__ == "__main__":
    main()
