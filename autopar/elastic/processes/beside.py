"""What a run of several processes keeps and takes up beside the state of its model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax

from autopar.elastic.processes import hosting
from autopar.elastic.processes.fetching import Fetcher
from autopar.elastic.samples import Samples
from autopar.runtime.creation import StateShapes
from autopar.runtime.parallel_step import ParallelStep
from autopar_passes.program.static_leaves import struct_of

# Paths of the arrays of codecs, and of the noise scale, among those of the state.
_PREFIXES = {"codecs": "codecs/", "noise": "noise/"}
_STATES = {"codecs": "compression_state", "noise": "noise_state"}


def kept(step: ParallelStep[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a step carries beside the state of its model.

    Args:
      step: the step.

    Returns:
      Arrays of the codecs' state and of the averages of the noise scale by path; and
      the trees that they belong to, as text by name.
    """
    arrays: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for name, attribute in _STATES.items():
        state = getattr(step, attribute)
        if state is not None:
            trees[name] = hosting.structure_text(state)
            for k, x in enumerate(hosting.arrays_of(state)):
                arrays[f"{_PREFIXES[name]}{k}"] = x
    return arrays, trees


def take_up(
    step: ParallelStep[..., Any], fetch: Fetcher, trees: Mapping[str, Any]
) -> None:
    """Gives a step what `kept` returned, wherever its arrays lie.

    Args:
      step: the step.
      fetch: reads arrays by path.
      trees: the trees, as `kept` returned them; other names are passed over.
    """
    for name, attribute in _STATES.items():
        if (text := trees.get(name)) is not None:
            setattr(step, attribute, _tree(fetch, text, _PREFIXES[name]))


def _tree(fetch: Fetcher, text: str, prefix: str) -> Any:
    """A tree that was kept beside the state, whole."""
    paths = sorted(
        (p for p in fetch.paths if p.startswith(prefix)),
        key=lambda p: int(p.removeprefix(prefix)),
    )
    return hosting.with_structure(text, [fetch.whole(path) for path in paths])


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
