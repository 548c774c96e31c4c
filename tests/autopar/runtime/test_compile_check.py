"""Tests plans near the memory limit, which are compiled to check that they fit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from planner_steps import mlp_batch, mlp_loss, mlp_params, training

import autopar
from autopar.compilers.compiled import CompiledProgram, Memory
from autopar.planner.options import PlanOptions
from autopar.runtime import compile_check
from autopar.steps.analysis import analyse


@functools.cache
def step() -> Any:
    return training(
        mlp_loss, mlp_params(width=64, hidden=256, layers=3), mlp_batch(4096, 64)
    )


def plan(memory: float, **options: Any) -> autopar.Plan:
    made, args = step()
    cluster = f"4:cpu,memory={int(memory)}B"
    return autopar.plan(made, *args, cluster=cluster, seconds=2, **options)


@functools.cache
def free() -> autopar.Plan:
    return plan(1e9)


def test_a_plan_near_the_limit_is_compiled_as_it_runs() -> None:
    """The child process finds the bytes of the program that runs here."""
    made, args = step()
    found = plan(1.25 * free().predicted.peak_memory_bytes)
    run = autopar.parallelize(made, plan=found)
    memory = run.lower(*args).compile().memory_analysis()
    assert memory is not None
    expected = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )

    assert found.compiled_memory_bytes == expected
    assert found.seconds.compile > 0
    assert "on each device at the peak (compiled: " in str(found)
    assert not found.changed_parts


@pytest.mark.parametrize(
    ("part", "options", "text"),
    [
        (10.0, {}, "at the peak\n"),
        (1.25, {"compile_check": False}, "at the peak (not compiled: such programs"),
    ],
)
def test_nothing_is_compiled_far_from_the_limit(
    part: float, options: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise AssertionError(args)

    monkeypatch.setattr(compile_check, "compile_for", fails)
    found = plan(part * free().predicted.peak_memory_bytes, **options)

    assert found.compiled_memory_bytes == 0.0
    assert text in f"{found}\n"


def test_what_the_compiler_makes_too_large_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next plan takes less, by as much as the compiler took more."""
    asked: list[float] = []

    def large(memory: float, lowered: Any, *given: Any) -> list[CompiledProgram]:
        del lowered, given
        asked.append(memory)
        nbytes = int(memory * (1.2 if len(asked) == 1 else 0.9))
        held = Memory(
            argument_bytes=nbytes, output_bytes=0, alias_bytes=0, temp_bytes=0
        )
        return [CompiledProgram("", held)]

    memory = int(1.1 * free().predicted.peak_memory_bytes)
    monkeypatch.setattr(compile_check, "compile_for", functools.partial(large, memory))
    first = plan(memory, compile_check=False, microbatches="auto")
    found = plan(memory, microbatches="auto")

    assert found.predicted.peak_memory_bytes < first.predicted.peak_memory_bytes / 1.2
    spent = found.seconds
    parts = spent.trace, spent.graph, spent.solve, spent.compile
    assert spent.total == pytest.approx(sum(parts))
    assert str(found.cluster) == str(first.cluster)
    assert not found.changed_parts
    # The second is compiled, too, if it is near the limit.
    assert found.compiled_memory_bytes in (0.0, int(0.9 * memory))


def test_where_nothing_fits_the_compiler_is_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = int(1.1 * free().predicted.peak_memory_bytes)
    held = Memory(
        argument_bytes=90 * memory, output_bytes=0, alias_bytes=0, temp_bytes=0
    )
    monkeypatch.setattr(
        compile_check, "compile_for", lambda *_: [CompiledProgram("", held)]
    )
    with pytest.raises(
        autopar.InfeasibleError, match=r"compiler for cpu needs .*B on each"
    ):
        plan(memory, microbatches=1, remat=0, stages=1)


@pytest.mark.parametrize("part", [0.98, 1.1])
def test_a_plan_that_needs_room_is_kept_where_it_compiles(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's compilers make results again where memory is short; not always enough."""
    made, args = step()
    options: Any = {"microbatches": 1, "remat": 0, "stages": 1, "seconds": 2}
    cluster = autopar.Cluster.parse("1:h100,memory=1GB")
    small = dataclasses.replace(cluster.device, workspace_bytes=0)
    cluster = dataclasses.replace(cluster, device=small)
    roomy = autopar.plan(made, *args, cluster=cluster, **options)
    memory = int(0.9 * roomy.predicted.peak_memory_bytes)
    tight = dataclasses.replace(small, memory_bytes=memory)
    cluster = dataclasses.replace(cluster, device=tight)
    held = Memory(
        argument_bytes=int(part * memory), output_bytes=0, alias_bytes=0, temp_bytes=0
    )
    monkeypatch.setattr(compile_check, "check_target", lambda *_: None)
    monkeypatch.setattr(
        compile_check, "compile_for", lambda *_: [CompiledProgram("", held)]
    )
    if part > 1:
        with pytest.raises(autopar.InfeasibleError, match="no plan fits on"):
            autopar.plan(made, *args, cluster=cluster, **options)
        return
    found = autopar.plan(made, *args, cluster=cluster, **options)

    assert found.compiled_memory_bytes == held.argument_bytes
    assert found.cluster.read() == cluster
    assert not found.changed_parts


@pytest.mark.parametrize("lacking", [1.4, 1.6, None])
def test_room_is_made_with_all_options_open_where_little_is_lacking(
    lacking: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that has tried all options says how much memory would be enough."""
    made, args = step()
    fits = autopar.plan(made, *args, cluster="1:h100", seconds=2, compile_check=False)
    cluster = autopar.Cluster.parse("1:h100")

    def find(on: autopar.Cluster, unfit: object) -> autopar.Plan:
        del unfit
        if on.device.corrections.makes_room:
            return fits
        error = autopar.InfeasibleError("nothing fits")
        if lacking is not None:
            error.enough_bytes = int(lacking * on.memory_bytes)
        raise error

    held = Memory(
        argument_bytes=cluster.memory_bytes, output_bytes=0, alias_bytes=0, temp_bytes=0
    )
    monkeypatch.setattr(compile_check, "check_target", lambda *_: None)
    monkeypatch.setattr(
        compile_check, "compile_for", lambda *_: [CompiledProgram("", held)]
    )
    analysis, options = analyse(made, args), PlanOptions()
    if lacking != 1.4:
        with pytest.raises(autopar.InfeasibleError, match="nothing fits"):
            compile_check.plan_that_fits(analysis, cluster, options, find)
        return
    found = compile_check.plan_that_fits(analysis, cluster, options, find)

    assert found.compiled_memory_bytes == cluster.memory_bytes
