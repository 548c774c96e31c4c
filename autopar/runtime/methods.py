"""A planned step as a method."""

from __future__ import annotations

import functools
from typing import Any

import jax

from autopar.errors import PlanError
from autopar_passes.program.calls import Parameters
from autopar_passes.program.nnx_objects import is_object


def method_of(step: Any, instance: Any) -> Any:
    """Returns a step as a method of an object.

    A module or another tree of arrays is the step's first argument, and its state if it
    comes back. Any other object is part of the step, as a static argument is: what the
    step reads of it is fixed by the first call, and each object has plans of its own.

    Args:
      step: the `ParallelStep` of the class.
      instance: the object.

    Raises:
      PlanError: there is no place in the object to keep its step.
    """
    if is_object(instance) or jax.tree.leaves(instance) != [instance]:
        return functools.partial(step, instance)
    name, made = step.__name__, _bind_step(step, instance)
    try:
        # A descriptor without __set__ gives way to what the object itself holds.
        vars(instance)[name] = made
    except TypeError as error:
        kind = type(instance).__name__
        raise PlanError(
            f"{name}: its object, a {kind}, has no __dict__ to keep the planned step "
            "in. Plan a function instead: autopar.parallelize(functools.partial("
            f"{kind}.{name}, obj)), with the undecorated method."
        ) from error
    return made


def _bind_step(step: Any, instance: Any) -> Any:
    """The step of one object, with plans of its own."""
    bound, known = functools.partial(step._step, instance), step._parameters
    return type(step)(
        bound,
        setting=step._setting,
        options=step.preparation.planner.options,
        store=step._store.empty(),
        codecs=type(step._codecs)(step._codecs.policy),
        world=step._world,
        parameters=Parameters.of(bound, known.static, known.roles),
        fewer=step._last_batch,
        cache=step._cache,
    )
