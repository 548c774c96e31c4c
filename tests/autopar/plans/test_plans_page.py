"""Tests the statements of docs/plans.md."""

from __future__ import annotations

import re

import checkout
import pytest

from autopar.planner.edited import EDITABLE
from autopar.plans import SCHEDULES, Plan, StagePlan
from autopar.plans.files import ABOUT

FIELDS = {*Plan.__struct_fields__, *StagePlan.__struct_fields__}
PAGE = (checkout.ROOT / "docs" / "plans.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.M)
    return [line.split(" | ") for line in lines[1:]]


def parts(heading: str) -> dict[str, str]:
    """Each name in the first column of a table -> its second column."""
    return {
        name: outcome
        for cell, outcome in rows(heading)
        for name in re.findall(r"`([a-z_]+)`", cell)
    }


def test_every_field_is_described() -> None:
    assert set(Plan.__struct_fields__) == set(parts("What a file holds"))
    text = PAGE.split("A stage has")[1].split("\n\n")[0]
    assert set(StagePlan.__struct_fields__) <= set(re.findall(r"`([a-z_]+)`", text))
    assert all(name in PAGE for name in SCHEDULES)


def test_every_part_has_an_outcome() -> None:
    assert FIELDS - {"schema", "stages", "checks"} <= set(parts("Edits"))


@pytest.mark.parametrize("part", sorted(parts("Edits").keys() & FIELDS))
def test_outcomes_are_as_the_table_says(part: str) -> None:
    """What is an error in the table is one, and the rest is not."""
    outcomes = [o for cell, o in rows("Edits") if f"`{part}`" in cell]
    refused = all(outcome.startswith("an error") for outcome in outcomes)
    assert refused == (part not in EDITABLE and part not in ABOUT)
