"""Tests the errors of codecs that a step measures on the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import compressed_cases as cases
import jax
import numpy as np
import pytest
from compressed_cases import WORKERS, case_of
from planner_steps import mlp_loss

from autopar.compression.codecs.registry import parse_codec
from autopar.compression.policies import AcrossFamilies, LGreCo, Probe
from autopar.compression.policies.policy import Observation
from autopar_passes.audit.compiled import hlo_collectives

NAME = "data_parallel"


class Asking:
    """A policy that requests errors, and changes only what a test sets."""

    def __init__(self, probes: tuple[str, ...], every: int = 1) -> None:
        self.probes = probes
        self.every = every
        self.seen: list[Observation] = []
        self.wishes: list[Mapping[str, str]] = []

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        self.seen.append(seen)
        return self.wishes.pop(0) if self.wishes else None


def run(name: str, codec: str, policy: Any, steps: int) -> tuple[Any, list[float]]:
    case = case_of(name)
    step = case.parallel(codec, policy=policy)
    _, losses = case.train(step, case.state(), case.batches(steps))
    return step, losses


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("sharded_state", "int4:hadamard=false"),
        ("tensor_parallel", "blocktopk"),
        ("scanned_layers", "sign"),
        ("two_levels", "powersgd:rank=2"),
    ],
)
def test_the_codec_in_use_loses_what_the_step_reports(name: str, codec: str) -> None:
    """With the residuals of two steps, over all workers and however it is split."""
    policy = Asking(("int8", codec), every=3)
    step, _ = run(name, codec, policy, 3)

    (seen,) = policy.seen
    decisions = {g.name: g for g in step.plan.gradients if g.codec == codec}
    assert decisions
    assert set(seen.measured) == set(decisions)
    devices = math.prod(step.plan.axis_sizes)
    for path, found in seen.measured.items():
        report, decision = seen.gradients[path], decisions[path]
        assert report.residual_norm > 0
        _, used = found.choices
        assert used.text == codec
        if codec != "powersgd:rank=2":
            # It has learnt from other gradients, and only from three of them.
            assert used.error == pytest.approx(report.relative_error, rel=1e-4)
        assert used.wire_bytes == decision.wire_bytes
        # Each worker's gradient is on as many devices as its parts fill.
        copies = devices / found.elements * found.local_elements
        assert found.norm == pytest.approx(report.norm / math.sqrt(copies), rel=1e-5)
        assert found.elements == report.elements
        assert found.local_elements == math.prod(decision.local_shape)


def test_errors_are_those_of_samples() -> None:
    """Of the gradients of the workers' rows, taken apart and encoded one by one."""
    texts = ("powersgd:rank=2", "powersgd:rank=8", "topk", "int8", "dense")
    policy = Asking(texts)
    run(NAME, "int8", policy, 1)
    case = case_of(NAME)
    params, _ = case.state()
    rows = cases.ROWS // WORKERS
    samples: list[dict[str, np.ndarray]] = []
    for k in range(WORKERS):
        part = {n: x[k * rows : (k + 1) * rows] for n, x in case.batch(0).items()}
        grads = jax.grad(mlp_loss)(params, part)
        samples.append(
            {
                f"params/0/{n}": np.asarray(g) / WORKERS
                for n, g in grads[0].items()
                if g.ndim > 1
            }
        )
    each = [Probe(WORKERS).measure(sample, texts) for sample in samples]

    measured = policy.seen[0].measured
    assert set(measured) == {"params/0/up", "params/0/down"}
    for path, found in measured.items():
        squares = np.array([one[path].norm ** 2 for one in each])
        assert found.norm == pytest.approx(math.sqrt(squares.mean()), rel=1e-5)
        for number, choice in enumerate(found.choices):
            errors = np.array([one[path].choices[number].error for one in each])
            expected = math.sqrt((errors**2 * squares).sum() / squares.sum())
            # Blocks and chunks are cut for one worker there, for four here.
            assert choice.error == pytest.approx(expected, rel=0.05, abs=1e-6)
            shape = samples[0][path].shape
            codec = parse_codec(choice.text)
            assert choice.wire_bytes == codec.wire_bytes(shape, WORKERS)


def test_probing_leaves_training_as_it_is() -> None:
    policy = Asking(("powersgd", "topk"), every=2)
    _, probed = run(NAME, "int4", policy, 4)
    _, plain = run(NAME, "int4", None, 4)

    assert probed == plain
    assert [bool(seen.measured) for seen in policy.seen] == [True, True]


def test_other_codecs_compile_no_other_probes() -> None:
    """One program of the gradients, whatever is in use; one of each shape."""
    policy = Asking(("int8", "topk"))
    policy.wishes = [{"params/0/up": "int4"}, {"params/0/up": "sign"}]
    case = case_of(NAME)
    step = case.parallel("int8", policy=policy)
    state, _ = case.train(step, case.state(), case.batches(1))
    gradients = step.prepare(*state, case.batch(0)).gradients
    case.train(step, state, case.batches(3, start=1))

    planned = step.prepare(*case.state(), case.batch(0))
    assert planned.plan.gradients[0].codec or planned.plan.gradients[1].codec
    assert {g.name: g.codec for g in step.plan.gradients}["params/0/up"] == "sign"
    assert planned.gradients is gradients
    assert gradients._cache_size() == 1


def test_gradients_are_not_sent() -> None:
    """The program that ends with them communicates less than the smallest of them."""
    case = case_of(NAME)
    step = case.parallel("int8")
    planned = step.prepare(*case.state(), case.batch(0))
    structs = [
        jax.ShapeDtypeStruct(
            planned.analysis.graph.values[i.value].shape,
            planned.analysis.graph.values[i.value].dtype,
        )
        for i in planned.analysis.graph.inputs
    ]
    text = planned.gradients.lower(*structs).compile().as_text()

    mesh = list(zip(step.plan.axis_names, step.plan.axis_sizes, strict=True))
    found = hlo_collectives(text, mesh)
    least = min(4 * math.prod(g.shape) for g in step.plan.gradients if g.codec)
    assert sum(c.nbytes for c in found) < least


def test_nothing_is_measured_where_gradients_are_not_finite() -> None:
    policy = Asking(("topk",))
    case = case_of(NAME)
    step = case.parallel("int8", policy=policy)
    batch = case.batch(0)
    batch["x"][3, 5] = np.nan
    with pytest.warns(UserWarning, match="not finite"):
        case.train(step, case.state(), [batch])

    assert [(seen.finite, dict(seen.measured)) for seen in policy.seen] == [(False, {})]


def test_lgreco_chooses_by_itself() -> None:
    """Ranks within the error of the reference, and fewer bytes than before."""
    policy = LGreCo(every=2, horizon=10**9)
    step, losses = run(NAME, "powersgd:rank=8", policy, 5)

    chosen = policy.state.codecs
    codecs = {g.name: g.codec for g in step.plan.gradients}
    assert set(chosen) == {"params/0/up", "params/0/down"}
    assert {name: codecs[name] for name in chosen} == chosen
    assert {parse_codec(text).name for text in chosen.values()} == {"powersgd"}
    assert losses[-1] < losses[0]
    assert step.codec_changes[0].adopted


def test_lgreco_waits_where_its_choice_saves_too_little() -> None:
    policy = LGreCo(every=2)
    step, _ = run(NAME, "powersgd:rank=8", policy, 3)

    (change,) = step.codec_changes
    assert dict(change.codecs) == policy.state.codecs
    assert not change.adopted
    assert {r.codec for n, r in step.telemetry.items() if n in change.codecs} == {
        "powersgd:rank=8"
    }


def test_across_families_chooses_by_itself() -> None:
    options = ("int8", "int4", "sign", "powersgd:rank=4", "topk:ratio=0.1")
    policy = AcrossFamilies(
        bandwidth_bytes_per_s=1e6, every=1, budget=0.02, options=options
    )
    step, _ = run(NAME, "sign", policy, 2)

    codecs = {g.name: g.codec for g in step.plan.gradients}
    # The only quantiser that loses less than that; the gradients have full rank.
    assert policy.state.codecs == {"params/0/up": "int8", "params/0/down": "int8"}
    assert codecs["params/0/up"] == "int8"
