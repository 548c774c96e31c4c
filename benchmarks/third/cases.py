"""A train step that somebody else wrote, and how it is called.

A case says how its state is made, how the step is called, and what the caller does
with the result. The arguments for planning are those of the call itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Size:
    """Whether a case is small enough to run, or as large as its authors made it.

    Attributes:
      full: as large; then nothing is allocated, and arrays are structs.
      devices: for which the batch is made, where it is so much for each device.
    """

    full: bool = False
    devices: int = 8

    def of(self, small: Any, full: Any) -> Any:
        """One of the two."""
        return full if self.full else small

    def normal(self, seed: int, *shape: int) -> Any:
        """Normal float32 numbers."""
        if self.full:
            return jax.ShapeDtypeStruct(shape, np.float32)
        draws = np.random.default_rng(seed).standard_normal(shape)
        return draws.astype(np.float32)

    def uniform(self, seed: int, *shape: int) -> Any:
        """Float32 numbers between 0 and 1."""
        if self.full:
            return jax.ShapeDtypeStruct(shape, np.float32)
        return np.random.default_rng(seed).random(shape, dtype=np.float32)

    def flags(self, seed: int, *shape: int) -> Any:
        """Float32 numbers that are 0 or 1."""
        drawn = self.uniform(seed, *shape)
        return drawn if self.full else np.round(drawn)

    def integers(self, seed: int, low: int, high: int, *shape: int) -> Any:
        """Int32 numbers from ``low`` to ``high - 1``."""
        if self.full:
            return jax.ShapeDtypeStruct(shape, np.int32)
        draws = np.random.default_rng(seed).integers(low, high, shape)
        return draws.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
      step: what is given to `autopar.parallelize`.
      plain: the same step on one device, compiled.
      state: makes what the caller keeps between steps.
      call: ``(step, state, number) -> (next state, what the step returned)``, as the
        authors call it.
      changed: what the user changed beside the decorator.
      options: of `autopar.parallelize` and `autopar.plan`.
    """

    step: Callable[..., Any]
    plain: Callable[..., Any]
    state: Callable[[], Any]
    call: Callable[[Any, Any, int], tuple[Any, Any]]
    changed: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self, size: Size) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first call; structs for the full size."""
        state = abstract(self.state) if size.full else self.state()
        found: list[Any] = []
        with contextlib.suppress(_RecordedError):
            self.call(_recorder(found), state, 0)
        return found[0]


class _RecordedError(Exception):
    """Ends a call whose arguments are known."""


def _recorder(found: list[Any]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _RecordedError

    return record


def abstract(make: Callable[[], Any]) -> Any:
    """What a function makes, with structs in the place of arrays."""
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        # Its modules hold functions and texts beside arrays.
        return equinox.filter_eval_shape(make)
    return nnx.eval_shape(make)
