"""Tests `autopar.train` in several processes that neither leave nor join."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from following_cases import BASE
from processes import run_processes

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("together") / "out"
    run_processes("train_worker.py", 2, [str(out)])
    return [json.loads(pathlib.Path(f"{out}_{k}.json").read_text()) for k in range(2)]


def test_another_way_is_prepared_beside_the_steps_of_all(found: Any) -> None:
    """All change at one step, and none waits for the program before it."""
    one, other = found
    assert [x["rows"] for x in one] == [x["rows"] for x in other]
    sizes = [x["rows"][1] for x in one]
    changed = sizes.index(4 * BASE)
    assert set(sizes[:changed]) == {BASE}
    assert set(sizes[changed:]) == {4 * BASE}
    # A decision is made in each tenth step: it began in one, and ended in another.
    for mine in found:
        assert [x["busy"] for x in mine].index(True) < changed - 1


def test_each_process_asks_for_its_part_of_every_batch(found: Any) -> None:
    one, other = found
    for mine, its in zip(one, other, strict=True):
        position, size = mine["rows"]
        half = size // 2
        assert sorted([mine["asked"], its["asked"]]) == [
            [position, half],
            [position + half, half],
        ]
    for before, after in itertools.pairwise(one):
        assert sum(before["rows"]) == after["rows"][0]


def test_losses_are_those_of_one_process(found: Any) -> None:
    for mine in found:
        losses, alone = ([x[name] for x in mine] for name in ("loss", "alone"))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
