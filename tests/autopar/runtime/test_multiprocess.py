"""Tests a program in two processes, each with a part of the devices and the batch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import multiprocess_worker
import numpy as np
import pytest
from processes import TIMEOUT_S, run_processes, start_processes

pytestmark = pytest.mark.cluster


def run(count: int, folder: pathlib.Path) -> list[Any]:
    """Runs the worker script in several processes; returns their results."""
    outs = [folder / f"{count}_{k}.json" for k in range(count)]
    run_processes("multiprocess_worker.py", count, [str(folder / f"{count}")])
    return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("processes")
    first, second = run(2, folder)
    one = json.loads(json.dumps(multiprocess_worker.results(0)))
    return {"one": one, "first": first, "second": second}


@pytest.mark.parametrize("form", ["linen", "plain", "nnx"])
def test_losses_equal_those_of_one_process(found: Any, form: str) -> None:
    for process in ("first", "second"):
        np.testing.assert_allclose(found[process][form], found["one"][form], rtol=1e-5)


@pytest.mark.parametrize("form", ["linen", "plain", "nnx"])
def test_every_process_holds_the_plan_of_the_first(found: Any, form: str) -> None:
    """The seconds too: it is planned once."""
    plan = found["first"][f"{form} plan"]
    assert found["second"][f"{form} plan"] == plan
    alone = found["one"][f"{form} plan"]["stages"]
    assert [s["nodes"] for s in plan["stages"]] == [s["nodes"] for s in alone]
    assert plan["shapes"]["batch/x"] == [24, 16]


def test_keys_and_scalars_are_the_same_everywhere(found: Any) -> None:
    want = found["one"]["keyed"]
    assert found["first"]["keyed"] == pytest.approx(want, rel=1e-5)
    assert found["second"]["keyed"] == pytest.approx(want, rel=1e-5)


def test_rows_are_in_the_dim_that_the_caller_stated(found: Any) -> None:
    """The program treats two dims alike, and the caller's is the second."""
    for process in ("first", "second"):
        assert found[process]["time major"] == pytest.approx(
            found["one"]["time major"], rel=1e-5
        )


def test_each_process_passes_the_whole_batch(found: Any) -> None:
    """Nine rows of the last batch are cut to eight, as four devices share them."""
    want = found["one"]["whole"]
    for process in ("first", "second"):
        own = found[process]["whole"]
        np.testing.assert_allclose(own["losses"], want["losses"], rtol=1e-5)
        assert own["evaluated"] == pytest.approx(want["evaluated"], rel=1e-5)
        assert own["shapes"] == want["shapes"]
        assert own["repeats"] == [False, True, True]


def test_rows_are_exchanged_for_every_sharding(found: Any) -> None:
    assert found["first"]["rows"] == found["second"]["rows"] == []


def test_replicas_send_by_codecs_between_processes(found: Any) -> None:
    want = found["one"]["replicated"]
    assert "int8" in want["codecs"]
    for process in ("first", "second"):
        own = found[process]["replicated"]
        assert own["codecs"] == want["codecs"]
        np.testing.assert_allclose(own["losses"], want["losses"], rtol=1e-5)
        assert own["phi"] == pytest.approx(want["phi"], rel=1e-4)
        assert own["exact"] == pytest.approx(want["exact"], rel=1e-5)
        assert own["withdrawn"] == want["withdrawn"] == ""


def test_codecs_are_chosen_alike_everywhere(found: Any) -> None:
    """By errors that are measured on the devices of all processes."""
    want = found["one"]["adapted"]
    assert want["codecs"]
    assert want["adopted"] == [True]
    assert {level for levels in want["levels"] for level in levels} == {0, 1}
    for process in ("first", "second"):
        adapted = found[process]["adapted"]
        assert adapted["codecs"] == want["codecs"]
        assert adapted["levels"] == want["levels"]
        assert adapted["adopted"] == want["adopted"]
        np.testing.assert_allclose(adapted["losses"], want["losses"], rtol=1e-5)


def test_a_failure_to_plan_reaches_every_process(found: Any) -> None:
    """Otherwise the others would wait for a plan for ever."""
    for process in ("first", "second"):
        assert "no plan fits" in found[process]["errors"]["infeasible"]


def test_different_plans_are_found_out(found: Any) -> None:
    for process in ("first", "second"):
        assert "different plans" in found[process]["errors"]["different"]


FAILED = "process 1 has failed while"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tracing", f"{FAILED} tracing the step: ZeroDivisionError: by nothing ("),
        ("creating", f"{FAILED} creating the state: ZeroDivisionError"),
        ("compiling", f"{FAILED} compiling: ZeroDivisionError"),
    ],
)
def test_a_failure_of_one_process_reaches_all(found: Any, name: str, told: str) -> None:
    """At once: none waits for a deadline, of which the shortest is a minute."""
    text, seconds = found["first"]["failures"][name]
    assert text.startswith(f"PlanError: {told}")
    assert seconds < 45
    assert found["second"]["failures"][name][0] == "ZeroDivisionError: by nothing"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("versions", ["different versions: jax ", "0.9.9 on process 1"]),
        ("rows", ["'batch/x' is [12, 16] on process 0, [11, 16] on process 1"]),
        ("code", ["process 1 differs", "with 1.0 ->", "with 1.5 ->"]),
        ("values", ["'w': different values"]),
        ("whole", ["'batch/x', 'batch/y': different values", "whole_argnames="]),
        ("replan", ["'batch/x', 'batch/y': different", "one step before the last"]),
        ("end", ["'batch/x', 'batch/y': different", "one step before the last"]),
    ],
)
def test_what_differs_is_named(found: Any, name: str, parts: list[str]) -> None:
    for process in ("first", "second"):
        text, _ = found[process]["failures"][name]
        for part in parts:
            assert part in text


@pytest.mark.parametrize("when", ["before the first step", "between steps"])
def test_a_process_that_ends_is_named_by_the_others(
    when: str, tmp_path: pathlib.Path
) -> None:
    """And nobody waits: `jax.distributed` by itself keeps all for five minutes."""
    words = ["2" if when == "between steps" else "0"]
    processes = start_processes("ending_worker.py", 2, words)
    try:
        logs = [p.communicate(timeout=TIMEOUT_S)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert [p.returncode for p in processes] == [1, 1]
    assert "process 1: ZeroDivisionError: no more data (" in logs[0]
    assert "ending_worker.py:" in logs[0]
    assert "first failure" not in logs[1]
