"""Golden reports of some steps: codecs, errors, noise, programs and shardings.

Numbers have four digits, which do not depend on the order of sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import noise_cases
import numpy as np
import pytest
from compressed_cases import case_of, spoilt
from figures import row
from golden import assert_golden

import autopar
from autopar.compression.policies.policy import Observation
from autopar.runtime import codec_run

# Name of the file: case, codec, options.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "int4": ("data_parallel", "int4", {"telemetry_every": 2}),
    "powersgd_levels": ("split_over_levels", "powersgd:rank=2", {"noise_scale": True}),
    "topk_scanned": ("scanned_layers", "topk:ratio=0.1", {"fallback": "int8"}),
}


def rounded(value: Any) -> Any:
    """A number at three digits; the fourth depends on how a processor rounds."""
    if isinstance(value, (float, np.floating)):
        return f"{float(value):.3g}"
    if isinstance(value, (tuple, list)):
        return [rounded(x) for x in value]
    return value


def fields_of(record: Any) -> dict[str, str]:
    """The fields of a record, with numbers at three digits."""
    named = (f.name for f in dataclasses.fields(record))
    return {name: str(rounded(getattr(record, name))) for name in named}


def state_lines(state: Mapping[str, Any]) -> Iterator[str]:
    """The norm and the shape of each array of the codecs' state."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if hasattr(leaf, "dtype"):
            array = np.asarray(leaf, np.float64) if _is_number(leaf) else np.zeros(0)
            norm = float(np.sqrt((array**2).sum()))
            yield row(
                "state",
                path=jax.tree_util.keystr(path),
                shape=str(tuple(leaf.shape)),
                norm=rounded(norm),
            )


def _is_number(leaf: Any) -> bool:
    return not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def report_lines(step: Any) -> Iterator[str]:
    for name, report in sorted(step.telemetry.items()):
        yield row(name, fields_of(report))
    for name, errors in sorted(step._codecs.errors.items()):
        yield row(name, {codec: rounded(x) for codec, x in errors.items()})


def lines_of(name: str) -> Iterator[str]:
    case_name, codec, options = RUNS[name]
    case = case_of(case_name)
    step = case.parallel(codec, **options)
    state = case.state()
    for number in range(4):
        batch = case.batch(number)
        state, (loss,) = case.train(
            step, state, [spoilt(batch) if number == 2 else batch]
        )
        said = pytest.warns(UserWarning, match="step 3: .* not finite")
        with said if number == 2 else contextlib.nullcontext():
            saved = step.compression_state
        yield row("step", number=number, loss=rounded(loss))
        yield from report_lines(step)
    yield from state_lines(saved)
    if options.get("noise_scale"):
        yield row("noise", fields_of(step.noise_scale))
    yield row("programs", count=len(step._store))


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str) -> None:
    assert_golden("\n".join(lines_of(name)), f"runs/{name}.txt")


class Noting:
    """A policy that requests another codec once, and records its observations."""

    every = 3

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def observe(self, seen: Observation) -> Mapping[str, str] | None:
        self.seen.append(seen)
        return dict.fromkeys(seen.gradients, "int4") if len(self.seen) == 2 else None


def test_a_policy_is_told_the_seconds_of_steps_that_did_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by two seconds from step to step."""
    now = [0.0]
    monkeypatch.setattr(codec_run.time, "perf_counter", lambda: now[0])
    case, policy = case_of("data_parallel"), Noting()
    step = case.parallel("int8", policy=policy)
    state = case.state()
    for number in range(10):
        now[0] += 2.0
        state, _ = case.train(step, state, [case.batch(number)])

    assert [s.step for s in policy.seen] == [3, 6, 9]
    assert [s.seconds for s in policy.seen] == [2.0, 2.0, 2.0]
    assert all(s.finite for s in policy.seen)
    codecs = [{r.codec for r in s.gradients.values()} - {"dense"} for s in policy.seen]
    assert codecs == [{"int8"}, {"int8"}, {"int4"}]
    assert len(step._store) == 2


@pytest.mark.parametrize("every", [1, 3])
def test_noise_of_accumulated_gradients(every: int) -> None:
    """A step that is not measured leaves the averages, and counts."""
    run = noise_cases.parallel(
        axis_names=("data",),
        pins=noise_cases.REPLICATED,
        microbatches=4,
        noise_scale=autopar.goodput.NoiseOptions(every=every, decay=0.9),
    )
    w = noise_cases.state()
    found = []
    for seed in range(5):
        w, _ = run(w, noise_cases.batch(seed=seed))
        found.append(run.noise_scale)

    assert [f.steps for f in found] == [1 + k // every for k in range(5)]
    measured = [f.total for f in found]
    assert len(set(measured)) == found[-1].steps
    assert found[-1].rows == noise_cases.ROWS
