"""Tests of the options of XLA's compiler that a user gives to a plan."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
import small_step

import autopar
from autopar.compilers.compiled import _environment
from autopar.compilers.options import read_options
from autopar.compilers.targets import room_options, target_of
from autopar.planner.options import read_options as read_words
from autopar.plans import Plan


def test_a_plan_records_and_prints_the_options(tmp_path: pathlib.Path) -> None:
    plan = autopar.plan(
        small_step.step,
        *small_step.structs(),
        cluster="8:h100,memory=40GB",
        compiler_options={"xla_gpu_enable_pipelined_collectives": True},
    )
    assert plan.compiler_options == {"xla_gpu_enable_pipelined_collectives": True}
    line = next(x for x in str(plan).splitlines() if x.startswith("compiler"))
    assert line == (
        "compiler xla_gpu_memory_limit_slop_factor=49, to stay within 40.0 GB; "
        "xla_gpu_enable_pipelined_collectives=true, as given"
    )
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    again = autopar.plan(
        small_step.step, *small_step.structs(), cluster="8:h100", layouts=read
    )
    assert again.compiler_options == plan.compiler_options
    without = autopar.plan(
        small_step.step,
        *small_step.structs(),
        cluster="8:h100",
        layouts=read,
        compiler_options={},
    )
    assert without.compiler_options == {}


@pytest.mark.parametrize("stages", [1, 2])
def test_programs_are_compiled_with_the_options(
    stages: int, tmp_path: pathlib.Path
) -> None:
    """The compiler writes its files where the option says, after a re-plan, too."""
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    step = autopar.parallelize(
        small_step.step, cluster="4:cpu", stages=stages, compiler_options=options
    )
    small_step.trained(step, small_step.state(), 1)
    assert any("lambda" not in file.name for file in tmp_path.iterdir())
    for file in tmp_path.iterdir():
        file.unlink()
    step.replan("2:cpu", small_step.state())
    small_step.trained(step, small_step.state(), 1)
    assert step.plan.compiler_options == options
    assert any("lambda" not in file.name for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_foo": 1}, "XLA refuses xla_foo=1: No such compile option"),
        ({"--xla_foo": 1}, "leave out the dashes"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "is not a valid bool value"),
        ({"xla_cpu_enable_fast_math": None}, "expected names of options of XLA"),
        (["xla_foo"], "expected names of options of XLA"),
    ],
)
def test_what_xla_does_not_know_is_refused(options: object, message: str) -> None:
    with pytest.raises(autopar.PlanError, match=message):
        autopar.plan(
            small_step.step,
            *small_step.structs(),
            cluster="2:cpu",
            compiler_options=options,  # pyright: ignore[reportArgumentType]
        )


def test_an_edited_option_that_xla_does_not_know_is_refused() -> None:
    plan = msgspec.structs.replace(
        small_step.plan("2:cpu"), compiler_options={"xla_foo": 1}
    )
    with pytest.raises(autopar.PlanError, match="compiler_options: XLA refuses"):
        autopar.parallelize(small_step.step, plan=plan)


def test_words_of_a_command_line() -> None:
    words = ["xla_a=true", "--xla_b=3", "xla_c=0.5", "xla_d=x=y"]
    assert read_options(words) == {
        "xla_a": True, "xla_b": 3, "xla_c": 0.5, "xla_d": "x=y",
    }  # fmt: skip
    message = r"^--compiler-option xla_a: expected name=value"
    with pytest.raises(autopar.PlanError, match=message):
        read_options(["xla_a"])
    with pytest.raises(autopar.PlanError, match=message):
        read_words({"compiler_options": ["xla_a"]})


def test_groups_of_unequal_devices_have_no_common_limit() -> None:
    assert room_options(autopar.Cluster.parse("8:h100,memory=40GB+8:a100")) == {}


def test_compilers_without_devices_get_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    given = {"xla_tpu_x": 1, "xla_gpu_enable_pipelined_collectives": True}
    tpu = _environment(target_of("v5p"), autopar.Cluster.parse("4:v5p"), given)
    gpu = _environment(target_of("h100"), autopar.Cluster.parse("8:h100"), given)
    assert tpu["LIBTPU_INIT_ARGS"] == "--xla_tpu_x=1"
    assert "xla_tpu_x" not in gpu["XLA_FLAGS"]
    assert "LIBTPU_INIT_ARGS" not in gpu
    words = gpu["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_pipelined_collectives=true" in words
    assert "--xla_gpu_autotune_level=2" in words


@pytest.mark.parametrize("stages", [1, 2])
def test_a_smaller_batch_is_compiled_with_the_options(stages: int) -> None:
    options = {"xla_cpu_enable_fast_math": False}
    step = autopar.parallelize(
        small_step.step, cluster="2:cpu", stages=stages, compiler_options=options
    )
    for rows in (24, 8):
        step(small_step.state(), small_step.batch(rows))
        assert step.plan.compiler_options == options
