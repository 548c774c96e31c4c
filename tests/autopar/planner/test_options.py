"""Tests that planning options are read and checked in one place."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest
import small_step

import autopar
from autopar import Cluster, ClusterError, PlanError
from autopar.planner.options import PlanOptions, as_cluster, as_plan
from autopar.planner.plan import plan_analysis
from autopar.plans import Compression, GradientDecision
from autopar.runtime.preparation import sent_by_hand, with_codecs_of
from autopar.steps.analysis import analyse


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int9"}, "unknown codec 'int9'"),
        ({"compression": 8}, "compression=8"),
        ({"error_budget": 0.1}, "leave it out with compression='none'"),
        ({"compression": "auto", "error_budget": -1}, "at least 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanOptions(**options)


def test_rules_must_be_pins_by_now() -> None:
    analysis = analyse(small_step.step, small_step.structs())
    options = PlanOptions(logical_axis_rules=(("embed", "x"),))
    with pytest.raises(PlanError, match="with_logical_pins"):
        plan_analysis(analysis, Cluster.parse("4:cpu"), options)


class TestReading:
    def test_clusters(self) -> None:
        cluster = Cluster.parse("2x4:h100")
        assert as_cluster(cluster) is cluster
        assert as_cluster("2x4:h100") == cluster
        assert as_cluster("local").num_devices == 8
        for wrong in (None, 4, ["4:cpu"]):
            with pytest.raises(ClusterError, match=r"expected an autopar\.Cluster"):
                as_cluster(wrong)  # pyright: ignore[reportArgumentType]

    def test_plans(self, tmp_path: pathlib.Path) -> None:
        plan, path = small_step.plan("4:cpu"), tmp_path / "plan.json"
        plan.save(path)
        assert as_plan(plan) is plan
        assert as_plan(path) == as_plan(str(path)) == plan
        for wrong in (None, 4, {}):
            with pytest.raises(PlanError, match=r"layouts=.*expected an autopar\.Plan"):
                as_plan(wrong, "layouts")  # pyright: ignore[reportArgumentType]


class TestCodecsOfAPlan:
    def of(self, codecs: tuple[str, ...], **compression: Any) -> PlanOptions:
        """The options that follow from a plan with these codecs."""
        plan = self.plan_of(codecs, **compression)
        return with_codecs_of(PlanOptions(max_axes=1), plan)

    def plan_of(self, codecs: tuple[str, ...], **compression: Any) -> autopar.Plan:
        one = GradientDecision(
            name="w", value=0, shape=(4,), local_shape=(4,), axes=("x",), workers=4
        )
        gradients = tuple(
            msgspec.structs.replace(one, codec=c, dense_bytes=4.0) for c in codecs
        )
        return msgspec.structs.replace(
            small_step.plan("4:cpu").with_stage(gradients=gradients),
            compression=Compression(**compression),
        ).with_checks()

    def test_as_the_plan_says(self) -> None:
        assert self.of(()) == PlanOptions(max_axes=1)
        assert self.of(("int8", ""), mode="int8").compression == "int8"
        found = self.of(("int8", "int4"), mode="auto", error_budget=0.02)
        assert found == PlanOptions(max_axes=1, compression="auto", error_budget=0.02)

    def test_as_its_gradients_say(self) -> None:
        assert self.of(("int8", "dense", "")).compression == "int8"
        assert self.of(("dense",)).compression == "dense"
        several = ("int8", "int4", "int4")
        assert self.of(several).compression == "int4"
        assert self.of(several, mode="edited").compression == "int4"
        assert self.of(("", ""), mode="edited").compression == "none"

    def test_by_hand(self) -> None:
        plan = self.plan_of(("int8", "int4"))
        assert sent_by_hand(plan) is plan
        assert sent_by_hand(self.plan_of(("int8", "int4"), mode="auto")) is None
        assert sent_by_hand(self.plan_of(("int8", "dense"), mode="int8")) is None
        assert sent_by_hand(self.plan_of(("int4",), mode="edited")) is not None
        changed = self.plan_of(("int8",), mode="int8")
        one = msgspec.structs.replace(changed.gradients[0], codec="int4")
        assert sent_by_hand(changed.with_stage(gradients=(one,))) is not None
