"""How many examples a property is tried with."""

from __future__ import annotations

import os

from hypothesis import settings

Mesh = tuple[int, ...]
# Continuous integration tries all of them, and others this part.
SHARE = 1.0 if os.environ.get("CI") else 0.2
LEAST = 5


def examples(count: int) -> int:
    """The examples of a property that continuous integration tries so often."""
    return max(min(count, LEAST), round(count * SHARE))


def meshes_of(meshes: tuple[Mesh, ...], case: int) -> tuple[Mesh, ...]:
    """Two of some meshes, other ones for the next case; all in CI."""
    count = len(meshes) if SHARE == 1.0 else min(2, len(meshes))
    return tuple(meshes[(case + k) % len(meshes)] for k in range(count))


def take_profile() -> None:
    """Lets properties that say no number be tried as often."""
    settings.register_profile("autopar", max_examples=examples(100), deadline=None)
    settings.load_profile("autopar")
