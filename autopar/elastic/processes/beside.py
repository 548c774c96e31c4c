"""The state of codecs and noise averages, which a run keeps with its training state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from autopar.checkpoint import trees
from autopar.elastic.processes.offers import Fetcher
from autopar.elastic.samples import Samples
from autopar.runtime.creation import StateShapes
from autopar.runtime.parallel_step import ParallelStep
from autopar_passes.program.static_leaves import struct_of

# Name of a state (a prefix of the paths of its arrays) -> attribute of the step that
# holds it.
_STATES = {"codecs": "compression_state", "noise": "noise_state"}


def state_beside(step: ParallelStep[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a step's codecs and of its noise averages.

    Args:
      step: the train step.

    Returns:
      Two mappings: path -> array, for all arrays of these states; and name of a state
      -> structure of its tree, as plain data.
    """
    arrays: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, attribute in _STATES.items():
        state = getattr(step, attribute)
        if state is not None:
            found, plain[name] = trees.split(state, name, (jax.Array, np.ndarray))
            arrays |= found
    return arrays, plain


def take_up(
    step: ParallelStep[..., Any], fetch: Fetcher, plain: Mapping[str, Any]
) -> None:
    """Restores in a step the states that `state_beside` returned.

    Args:
      step: the train step.
      fetch: reads the arrays of the given paths.
      plain: the structures of trees that `state_beside` returned; unknown names are
        ignored.
    """
    for name, attribute in _STATES.items():
        if (tree := plain.get(name)) is not None:
            paths = [p for p in fetch.paths if f"{p}/".startswith(f"{name}/")]
            arrays = {path: fetch.whole(path) for path in paths}
            setattr(step, attribute, trees.join(tree, arrays))


def rest_structs(
    train_step: ParallelStep[..., Any], samples: Samples, shapes: StateShapes, step: int
) -> list[Any]:
    """Shapes of the step's arguments after the state, as global arrays.

    Args:
      train_step: the train step.
      samples: the training samples.
      shapes: shapes of the state.
      step: number of the step.
    """
    rest, named = samples.arguments(step, train_step.world)
    if named:
        names = list(inspect.signature(train_step).parameters)
        count = len(shapes.arguments()) + len(rest)
        rest = (*rest, *(named[n] for n in names[count:] if n in named))
    return [jax.tree.map(struct_of, x) for x in rest]
