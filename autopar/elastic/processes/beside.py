"""What a run of several processes keeps and takes up beside the state of its model."""

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

# Name, with which the paths of its arrays begin -> where a step has it.
_STATES = {"codecs": "compression_state", "noise": "noise_state"}


def state_beside(step: ParallelStep[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step carries beside the state of its model.

    Args:
      step: the step.

    Returns:
      Arrays of the codecs' state and of the averages of the noise scale by path; and
      the trees that they belong to, as plain data by name.
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
    """Gives a step what `kept` returned, wherever its arrays lie.

    Args:
      step: the step.
      fetch: reads arrays by path.
      plain: the trees, as `kept` returned them; other names are passed over.
    """
    for name, attribute in _STATES.items():
        if (tree := plain.get(name)) is not None:
            paths = [p for p in fetch.paths if f"{p}/".startswith(f"{name}/")]
            arrays = {path: fetch.whole(path) for path in paths}
            setattr(step, attribute, trees.join(tree, arrays))


def rest_structs(
    train_step: ParallelStep[..., Any], samples: Samples, shapes: StateShapes, step: int
) -> list[Any]:
    """Structs of what a step takes after the state, over all processes.

    Args:
      train_step: the step.
      samples: what it is trained on.
      shapes: of the state.
      step: its number.
    """
    rest, named = samples.arguments(step, train_step.world)
    if named:
        names = list(inspect.signature(train_step).parameters)
        count = len(shapes.arguments()) + len(rest)
        rest = (*rest, *(named[n] for n in names[count:] if n in named))
    return [jax.tree.map(struct_of, x) for x in rest]
