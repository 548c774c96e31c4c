"""Tests that the statements of docs/compression.md are true and its examples run."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import checkout
import jax
import pytest

import autopar.compression.policies as policies
from autopar.compression.codecs.registry import (
    codec_class,
    codec_names,
    format_codec,
    parse_codec,
)
from autopar.compression.gradient import FEEDBACK_DISCOUNT, effective_error
from autopar.cost.codecs import TELEMETRY_BYTES
from autopar.planner.codecs.choose import DEFAULT_BUDGET, WORTHWHILE
from autopar.planner.option_texts import LEAST_GAIN
from autopar.steps.sums import SMALLEST

PAGE = (checkout.ROOT / "docs" / "compression.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    table = PAGE[PAGE.index(heading) :].split("\n\n", 1)[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_all_codecs() -> None:
    names = [row[0].strip("`") for row in rows("| Codec |")]

    assert sorted(names) == list(codec_names())


@pytest.mark.parametrize("row", rows("| Codec |"), ids=lambda row: row[0])
def test_the_table_is_true(row: list[str]) -> None:
    name, feedback, fields = (cell.strip("`") for cell in row[:3])
    codec = codec_class(name)
    written = dict(pair.split("=") for pair in fields.split(",") if pair)

    assert list(written) == [f.name for f in dataclasses.fields(codec) if f.init]
    text = f"{name}:{fields}" if fields else name
    assert parse_codec(text) == codec()
    assert format_codec(parse_codec(text)) == name
    assert feedback == ("yes" if codec.feedback else "no")


def test_the_texts_of_codecs_can_be_read() -> None:
    names = "|".join(codec_names())
    texts = re.findall(rf"[`\"]((?:{names}):[^`\"]+)[`\"]", PAGE)

    assert len(texts) >= 3
    for text in texts:
        assert parse_codec(text).name == text.partition(":")[0]


def test_the_policies_are_those_there_are() -> None:
    names = [row[0].strip("`") for row in rows("| Policy |")]

    assert [name for name in names if not hasattr(policies, name)] == []
    classes = {
        name for name in policies.__all__ if hasattr(getattr(policies, name), "observe")
    }
    assert set(names) == classes


def test_the_numbers_are_those_of_the_program() -> None:
    text = " ".join(PAGE.split())
    error = 0.5

    assert f"`error_budget=` (default {DEFAULT_BUDGET:g})" in text
    assert f"less than {100 * WORTHWHILE:.0f} % of a step" in text
    assert f"fewer than {SMALLEST} elements" in text
    assert f"{TELEMETRY_BYTES} bytes of communication a gradient" in text
    assert f"least_gain={LEAST_GAIN:g}" in text
    assert f"`{FEEDBACK_DISCOUNT:g} r / (1 - r^2)`" in text
    expected = FEEDBACK_DISCOUNT * error / (1 - error**2)
    assert math.isclose(effective_error(error, feedback=True), expected)


def create_state(rng: jax.Array) -> Any:
    import optax
    from flax.training import train_state

    params = {"w": 0.1 * jax.random.normal(rng, (128, 128))}
    return train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(1e-3)
    )


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return ((batch @ params["w"]) ** 2).mean()


def test_the_examples_run() -> None:
    """The examples run in the order of the page, in one namespace."""
    from autopar.cluster import Cluster

    names: dict[str, Any] = {
        "cluster": Cluster.parse("2x4:cpu,network=50Mb/s"),
        "create_state": create_state,
        "loss_fn": loss_fn,
        "rng": jax.random.key(0),
        "batches": [jax.random.normal(jax.random.key(i), (8192, 128)) for i in (0, 1)],
        "jax": jax,
    }
    first, second, rates, falling, third = re.findall(
        r"^```python\n(.*?)^```", PAGE, re.M | re.S
    )
    exec(compile(first, "docs/compression.md", "exec"), names)
    assert math.isfinite(names["loss"])
    assert names["train_step"].plan.compression.mode == "auto"

    exec(compile(second, "docs/compression.md", "exec"), names)
    step = names["train_step"]
    for _ in range(step._codecs.policy.every + 1):
        names["state"], loss = step(names["state"], names["batches"][0])
    assert math.isfinite(loss)

    exec(compile(rates, "docs/compression.md", "exec"), names)
    assert names["policy"].rate(20) == pytest.approx(10 * names["policy"].rate(700))

    exec(compile(falling, "docs/compression.md", "exec"), names)
    step = names["train_step"]
    for batch in names["batches"]:
        names["state"], loss = step(names["state"], batch)
    assert math.isfinite(loss)
    assert {sum(report.taken) for report in step.telemetry.values()} == {2}

    exec(compile(third, "docs/compression.md", "exec"), names)
    assert set(step.telemetry) == {g.name for g in step.plan.gradients}
    step(names["state"], names["batches"][1])
