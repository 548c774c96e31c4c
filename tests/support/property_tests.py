"""Sets the number of examples of property-based tests."""

from __future__ import annotations

import os

from hypothesis import settings

Mesh = tuple[int, ...]
# Continuous integration runs all examples, and other runs this share.
SHARE = 1.0 if os.environ.get("CI") else 0.2
LEAST = 5


def examples(count: int) -> int:
    """The number of examples here of a property with `count` examples in CI."""
    return max(min(count, LEAST), round(count * SHARE))


def meshes_of(meshes: tuple[Mesh, ...], case: int) -> tuple[Mesh, ...]:
    """Two of some meshes, which change from case to case; in CI all meshes."""
    count = len(meshes) if SHARE == 1.0 else min(2, len(meshes))
    return tuple(meshes[(case + k) % len(meshes)] for k in range(count))


def take_profile() -> None:
    """Applies `examples` to properties that set no number of examples."""
    settings.register_profile("autopar", max_examples=examples(100), deadline=None)
    settings.load_profile("autopar")
