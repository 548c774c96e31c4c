"""A train step written by somebody else, and the way its authors call it.

A case defines how its state is made, how the step is called, and what the caller does
with the result. Planning uses the arguments of the first call.
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
    """The size of a case: small enough to run, or the size of its authors.

    Attributes:
      full: whether the case has its authors' size. Then nothing is allocated, and
        arrays are structs.
      devices: number of devices, for batches whose size is given per device.
    """

    full: bool = False
    devices: int = 8

    def of(self, small: Any, full: Any) -> Any:
        """Returns one of two values, by the size."""
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
      step: the step as it is given to `autopar.parallelize`.
      plain: the same step on one device, compiled.
      state: makes the state that the caller keeps between steps.
      call: ``(step, state, number) -> (next state, result of the step)``, a call as the
        authors write it.
      changed: what the user must change besides adding the decorator.
      options: options of `autopar.parallelize` and `autopar.plan`.
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
    """Ends a call once its arguments are recorded."""


def _recorder(found: list[Any]) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        found.append((args, kwargs))
        raise _RecordedError

    return record


def abstract(make: Callable[[], Any]) -> Any:
    """The result of a function, with structs in place of arrays."""
    equinox = sys.modules.get("equinox")
    if equinox is not None:
        # Equinox's modules contain functions and texts, too.
        return equinox.filter_eval_shape(make)
    return nnx.eval_shape(make)
