"""The state of a training by local steps, and changes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.runtime import creation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalState:
    """The state of a training by local steps.

    Attributes:
      replicas: the state of each replica of this process, as the step returns it.
      anchors: for each fragment, the arrays at the last outer step, float32.
      momenta: for each fragment, the momenta of the outer optimizer, float32.
      codecs: for each fragment, the states of the codecs, such as residuals.
      step: number of steps done.
      rounds: for each fragment, the number of outer steps done, int64 (fragments,).
      averages: for each replica of this process, the average that a `RelativeChange`
        keeps; NaN without one.
      moves: for each fragment, what the outer step under way adds to the parameters of
        each replica, float32; without meaning if none is under way. Empty without an
        `Overlap`, or if it mixes.
      merge_at: for each fragment, the number of the step after which an outer step
        under way is merged, or -1, int64 (fragments,).
    """

    replicas: tuple[Any, ...]
    anchors: tuple[list[Any], ...]
    momenta: tuple[list[Any], ...]
    codecs: tuple[list[Any], ...]
    step: Any
    rounds: Any
    averages: Any
    moves: tuple[list[Any], ...]
    merge_at: Any

    @property
    def state(self) -> Any:
        """The state of this process's first replica.

        Its parameters are those of all replicas right after an outer step, except with
        `StepAhead` (`LocalSteps.agreed`).
        """
        return self.replicas[0]


def with_arrays(state: LocalState, arrays: Sequence[Mapping[str, Any]]) -> LocalState:
    """A state whose replicas have other arrays."""
    states = [
        creation.replace_leaves(own, list(mine.values()))
        for own, mine in zip(state.replicas, arrays, strict=True)
    ]
    return dataclasses.replace(state, replicas=tuple(states))


def merging_at(state: LocalState, number: int, step: int) -> LocalState:
    """A state with an outer step of a fragment under way; -1: without."""
    merge_at = np.array(state.merge_at)
    merge_at[number] = step
    return dataclasses.replace(state, merge_at=merge_at)


def with_part(values: tuple[Any, ...], number: int, value: Any) -> tuple[Any, ...]:
    """A tuple with another value at a position."""
    return (*values[:number], value, *values[number + 1 :])
