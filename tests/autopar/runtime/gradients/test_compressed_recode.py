"""Tests changes of codecs during training, and runs that continue with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_cases import case_of, fresh, on_host

from autopar import PlanError
from autopar.compression.policies.policy import Observation

NAME = "data_parallel"


class Switching:
    """A policy that sends one gradient by int4 from the first step on."""

    every = 1

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        other = seen.gradients["params/0/up"].codec != "int4"
        return {"params/0/up": "int4"} if other else None


class TestResumedCodecs:
    """A saved state goes on with the codecs that were in use, residuals included."""

    def resumed(self, step: Any, again: Any) -> Any:
        """Continues in ``again`` after two steps; returns the expected and the actual
        losses.
        """
        case = case_of(NAME)
        state, _ = case.train(step, case.state(), case.batches(2))
        saved = on_host((state, step.compression_state))
        want = case.train(step, state, case.batches(2, start=2))[1]

        state, again.compression_state = jax.tree.map(jnp.asarray, saved)
        return want, case.train(again, state, case.batches(2, start=2))[1]

    def test_after_recode(self) -> None:
        case, step = case_of(NAME), fresh("int8")
        step.prepare(*case.state(), case.batch(0))
        step.recode({"params/0/up": "int4", "params/0/down": "sign"})
        step.recode({"params/0/down": "int8"})
        again = fresh("int8")

        want, got = self.resumed(step, again)

        assert got == want
        codecs = {name: r.codec for name, r in again.telemetry.items()}
        assert codecs["params/0/up"] == "int4"
        assert codecs["params/0/down"] == "int8"
        texts = again.compression_state["codecs"]["params/0/up"]
        assert bytes(texts["planned"]) == b"int8"
        assert bytes(texts["sent"]) == b"int4"

    def test_under_a_policy(self) -> None:
        steps = [fresh("int8", policy=Switching()) for _ in range(2)]
        want, got = self.resumed(*steps)
        assert got == want

    @pytest.mark.filterwarnings("ignore:the residual of:UserWarning")
    def test_a_plan_that_says_otherwise_holds(self) -> None:
        step = fresh("int8")
        step.prepare(*case_of(NAME).state(), case_of(NAME).batch(0))
        step.recode({"params/0/up": "int4"})
        again = fresh("bf16")
        self.resumed(step, again)
        assert again.telemetry["params/0/up"].codec == "bf16"

    def test_states_of_earlier_versions(self) -> None:
        step, again = fresh("int4"), fresh("int4")
        case = case_of(NAME)
        state, _ = case.train(step, case.state(), case.batches(2))
        saved = on_host(step.compression_state)
        del saved["codecs"], saved["skipped"]
        again.compression_state = saved
        case.train(again, state, case.batches(1, start=2))
        assert int(again.compression_state["step"]) == 3
        assert int(again.compression_state["skipped"]) == 0


class TestRecode:
    """Other codecs from the next call on."""

    @pytest.mark.parametrize(
        ("codec", "message"),
        [
            ("int9", r"'params/0/up': unknown codec 'int9'; known: .*int8"),
            ("int8:blocks=4", r"'params/0/up': .*no field 'blocks'"),
            (8, r"'params/0/up'"),
        ],
    )
    def test_unknown_codecs(self, codec: Any, message: str) -> None:
        case, step = case_of(NAME), fresh("int8")
        before = step.prepare(*case.state(), case.batch(0))
        with pytest.raises(PlanError, match=message):
            step.recode({"params/0/up": codec})
        assert step.prepare(*case.state(), case.batch(0)) is before

    def test_a_codec_that_cannot_send_it(self) -> None:
        case = case_of("sharded_state")
        step = case.parallel("int8")
        step.prepare(*case.state(), case.batch(0))
        with pytest.raises(PlanError, match=r"params/0/up.*cannot be sent as 'power"):
            step.recode({"params/0/up": "powersgd:rank=2"})

    def test_a_codec_has_one_text(self) -> None:
        """However it is written, its program is compiled once."""
        case, step = case_of(NAME), fresh("int8")
        step.prepare(*case.state(), case.batch(0))
        step.recode({"params/0/up": "int4"})
        before = step.prepare(*case.state(), case.batch(0))
        step.recode({"params/0/up": " int4:block=256 "})
        assert step.prepare(*case.state(), case.batch(0)) is before

    def test_one_gradient(self) -> None:
        case, step = case_of(NAME), fresh("int8")
        state, _ = case.train(step, case.state(), case.batches(1))
        before = {g.name: g for g in step.plan.gradients}

        step.recode({"params/0/up": "int4"})

        after = {g.name: g for g in step.plan.gradients}
        assert after["params/0/up"].codec == "int4"
        assert after["params/0/down"] == before["params/0/down"]
        assert after["params/0/up"].wire_bytes < before["params/0/up"].wire_bytes
        _, (loss,) = case.train(step, state, case.batches(1, start=1))
        assert np.isfinite(loss)
        assert step.telemetry["params/0/up"].codec == "int4"

    def test_chosen_anew_by_what_was_measured(self) -> None:
        """Also those of another cluster: an error is the gradients', not the links'."""
        slow = "network=10Mb/s"
        case = dataclasses.replace(case_of(NAME), cluster=f"4x1:cpu,{slow}")
        step = case.parallel("auto", error_budget=0.02)
        state, _ = case.train(step, case.state(), case.batches(2))
        expected = {g.name: g for g in step.plan.gradients}["params/0/up"]
        assert expected.codec == "int8"

        step.recode("auto")

        chosen = {g.name: g for g in step.plan.gradients}["params/0/up"]
        assert chosen.codec == "int8"
        seen = step.telemetry["params/0/up"].relative_error
        assert chosen.error != expected.error
        assert chosen.error == pytest.approx(seen, rel=0.2)

        step.replan(f"2x1:cpu,{slow}", state)
        moved = {g.name: g for g in step.plan.gradients}["params/0/up"]
        assert (moved.codec, moved.error) == ("int8", chosen.error)

    def test_names_that_are_not_there(self) -> None:
        case, step = case_of(NAME), fresh("int8")
        with pytest.raises(PlanError, match="recode needs a step that was planned"):
            step.recode({"params/0/up": "int4"})
        step.prepare(*case.state(), case.batch(0))
        with pytest.raises(PlanError, match=r"params/9/up.*the plan has .*params/0/up"):
            step.recode({"params/9/up": "int4"})
