"""Golden estimates of random layouts of many steps, on clusters of every kind.

The golden files have five digits. They show every unintended change of a price, even if
no optimal plan has this price.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import golden_steps
import pytest
from checkout import GOLDEN
from estimate_figures import estimate_lines, problem_lines, text
from golden import assert_golden
from planner_harness import Case, all_waiting, random_plan

from autopar.cluster import Cluster, MeshShape
from autopar.cost.pricer import Pricer

CLUSTERS = (
    "2x4:cpu",
    "1x4:a100",
    "4x4:v5e",
    "2x8:h100,network=25Gb/s",
    "8:b200",
    "2x2x2:v100",
    "2x4:v5p",
    "8:t4",
)


def mesh_of(cluster: Cluster, number: int) -> MeshShape:
    """A mesh of the cluster with at most three axes."""
    meshes = [m for m in cluster.mesh_shapes(3) if len(m.axes) <= 3]
    return meshes[number % len(meshes)]


def lines_of(name: str, turn: int) -> Iterator[str]:
    """The lines of three clusters, for a plan that splits most arrays and one that
    defers sums.
    """
    analysis = golden_steps.analysis_of(name)
    case = Case(lambda: None, (), analysis)
    for number in range(3):
        cluster_text = CLUSTERS[(turn + 3 * number) % len(CLUSTERS)]
        cluster = Cluster.parse(cluster_text)
        pricer = Pricer(cluster, mesh_of(cluster, number + turn))
        yield f"\n{cluster_text} {pricer.mesh.label}"
        yield from problem_lines(analysis, pricer, coded=not number)
        for plan, (density, waits) in enumerate(((1.0, False), (0.7, True))):
            draw = random.Random(f"{name} {cluster_text} {plan}")
            own = all_waiting(case) if waits else case
            yield f"plan {plan}"
            yield from estimate_lines(
                random_plan(own, pricer.sizes, draw, density=density), pricer
            )


@pytest.mark.parametrize("name", golden_steps.names())
def test_estimates(name: str) -> None:
    turn = golden_steps.names().index(name)

    assert_golden(text(lines_of(name, turn)).strip(), f"estimates/{name}.txt")


def test_every_step_has_its_file_and_no_others() -> None:
    kept = {path.stem for path in (GOLDEN / "estimates").iterdir()}
    assert kept == set(golden_steps.names())
