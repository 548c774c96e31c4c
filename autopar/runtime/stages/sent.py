"""What goes from one stage to another, and how it is copied between their devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar_passes.jax_compat import copier, is_extended

# In place of a stage: values that leave the step.
RESULT = -1


@dataclasses.dataclass(frozen=True)
class Sent:
    """Values that go to another stage, and where they lie on both.

    Attributes:
      stage: the other stage, or `RESULT`.
      values: what goes there.
      source: where each value lies before.
      target: where it lies there.
    """

    stage: int
    values: tuple[int, ...]
    source: tuple[NamedSharding, ...]
    target: tuple[NamedSharding, ...]

    @functools.cached_property
    def moves(self) -> tuple[int, ...]:
        """The positions of the values that lie elsewhere afterwards."""
        pairs = enumerate(zip(self.source, self.target, strict=True))
        return tuple(k for k, (source, target) in pairs if source != target)

    @functools.cached_property
    def _copies(self) -> dict[tuple[Any, ...], Callable[[list[Any]], list[Any]]]:
        """Shapes and dtypes of what moves -> copies it."""
        return {}

    def land_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """The values, which lie as they are sent, on the other stage."""
        out = list(arrays)
        given = [out[k] for k in self.moves]
        if given:
            kinds = tuple((x.shape, x.dtype) for x in given)
            copy = self._copies.get(kinds)
            if copy is None:
                copy = self._copies[kinds] = self._copy(given)
            for k, array in zip(self.moves, copy(given), strict=True):
                out[k] = array
        return out

    def _copy(self, arrays: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """A function that copies arrays of these shapes to the other devices."""
        source = [self.source[k] for k in self.moves]
        target = [self.target[k] for k in self.moves]
        alike = (
            not is_extended(x.dtype) and same_parts(x.shape, old, new)
            for x, old, new in zip(arrays, source, target, strict=True)
        )
        if all(alike):
            return copier(source, target)
        return lambda arrays: jax.device_put(arrays, target)


def same_parts(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> bool:
    """Whether two shardings give their devices, in order, the same parts of an array.

    Args:
      shape: of the array.
      source: one sharding.
      target: another one, of other devices or the same.
    """
    old, new = (s.devices_indices_map(shape).values() for s in (source, target))
    return source.memory_kind == target.memory_kind and list(old) == list(new)
