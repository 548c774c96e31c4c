"""The function `autopar.local_steps`."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any

from autopar.cluster import Cluster
from autopar.compression.codecs.registry import parse_codec
from autopar.errors import PlanError
from autopar.planner.options import as_cluster
from autopar.runtime.local.outer import Outer
from autopar.runtime.local.rules import Auto, Overlap, RelativeChange, StepAhead
from autopar.runtime.local.steps import LocalSteps
from autopar.runtime.parallelize import parallelize
from autopar.runtime.world import World
from autopar_errors import check_type


def local_steps(
    step: Callable[..., Any],
    *,
    every: int | str | Auto | RelativeChange,
    replicas: int | None = None,
    outer: Outer | None = None,
    codec: str = "dense",
    fragments: int = 1,
    overlap: Overlap | None = None,
    feedback: StepAhead | None = None,
    cluster: Cluster | str | None = None,
    world: World | None = None,
    **options: Any,
) -> LocalSteps:
    """Makes a train step whose replicas synchronise once in several steps.

    >>> train_step = autopar.local_steps(  # doctest: +SKIP
    ...     step, every=32, codec="int8", cluster="4x8:h100,network=1Gb/s"
    ... )
    >>> state = train_step.init(create_state, key, batch=batch)  # doctest: +SKIP
    >>> state, loss = train_step(state, batch)  # doctest: +SKIP

    Args:
      step: the train step, which takes its state first and returns it first.
      every: number of steps of a replica between two outer steps, H; "auto"
        or an `Auto`: the least with which outer steps cost few seconds; or a
        `RelativeChange`, which synchronises where gradients change (SelSync).
      replicas: number of replicas; None: the parts of the cluster's outermost level,
        such as its hosts.
      outer: the outer optimizer; None: that of DiLoCo (arXiv 2311.08105), Nesterov's
        momentum of 0.9 with a rate of 0.7. ``MEAN`` is that of local SGD.
      codec: the codec of the differences that replicas send, as text, with error
        feedback if the codec has it. A codec that cannot send an array, such as one of
        matrices a vector, leaves this array dense.
      fragments: into how many parts the arrays are divided, which are synchronised at
        different steps (as in Streaming DiLoCo, arXiv 2501.18512). Each is still
        synchronised once in ``every`` steps.
      overlap: beside how many steps outer steps run, and how they are merged then;
        None: replicas wait for outer steps.
      feedback: a `StepAhead`, with which replicas go on from where the codec's residual
        is applied already (SAEF, arXiv 2008.05823); None: the residual is added to the
        next difference.
      cluster: the devices of all replicas, or their text; None: those of the world.
      world: the processes and devices; None: all of JAX's. Each replica lies in one
        process.
      options: options of `autopar.parallelize` for the plan of a replica.

    Raises:
      ClusterError: the text describes no cluster.
      InputError: there is no such codec.
      PlanError: a value is out of range, or an option belongs to the cluster.
      TraceError: the step has no argument of a name that is given as static.
    """
    if not callable(step):
        raise PlanError(f"local_steps: expected a train step, got {step!r}.")
    rule = _as_rule(every)
    _check_count("fragments", fragments)
    if replicas is not None:
        _check_count("replicas", replicas)
    if isinstance(rule, RelativeChange) and fragments > 1:
        raise PlanError(
            f"local_steps: fragments={fragments} needs a fixed number of steps; a "
            "RelativeChange synchronises all arrays at once."
        )
    if not isinstance(rule, Auto | RelativeChange) and fragments > rule:
        raise PlanError(
            f"local_steps: fragments={fragments} is more than every={rule}: each "
            "fragment needs a step of its own."
        )
    if overlap is not None:
        _check_overlap(overlap, rule)
    if wrong := [name for name in ("plan", "devices", "layouts") if name in options]:
        raise PlanError(
            f"local_steps: {wrong[0]}= is of one step; each replica plans for its own "
            "devices. Leave it out."
        )
    known = inspect.signature(parallelize).parameters
    if unknown := [name for name in options if name not in known]:
        raise PlanError(
            f"local_steps: there is no option {unknown[0]!r}; options besides its own "
            "are those of autopar.parallelize, such as microbatches=2."
        )
    if world is not None:
        check_type(
            "local_steps: world=", world, World, "an autopar.runtime.world.World"
        )
    if outer is not None:
        check_type("local_steps: outer=", outer, Outer, "an Outer")
    made = parse_codec(codec)
    if feedback is not None:
        check_type("local_steps: feedback=", feedback, StepAhead, "a StepAhead")
        if not made.feedback:
            raise PlanError(
                f"local_steps: codec={codec!r} has no residual that feedback= could "
                "apply ahead. Leave feedback= out, or choose a codec with error "
                "feedback, such as 'int4' or 'topk:ratio=0.01'."
            )
        if overlap is not None:
            raise PlanError(
                "local_steps: feedback= is for outer steps that replicas wait for; "
                "leave overlap= out."
            )
    parallelize(step, **options)  # Checks the options before anything is planned.
    return LocalSteps(
        step,
        every=rule,
        replicas=replicas,
        outer=outer or Outer(),
        codec=codec,
        fragments=int(fragments),
        overlap=overlap,
        feedback=feedback,
        cluster=None if cluster is None else as_cluster(cluster),
        world=world,
        options=options,
    )


def _as_rule(every: Any) -> int | Auto | RelativeChange:
    if every == "auto":
        return Auto()
    if isinstance(every, Auto | RelativeChange):
        return every
    _check_count("every", every)
    return int(every)


def _check_overlap(overlap: Any, rule: int | Auto | RelativeChange) -> None:
    check_type("local_steps: overlap=", overlap, Overlap, "an Overlap")
    if isinstance(rule, RelativeChange):
        raise PlanError(
            "local_steps: overlap= needs a fixed number of steps; the differences of a "
            "RelativeChange are sent at once."
        )
    if not isinstance(rule, Auto) and overlap.steps > rule:
        raise PlanError(
            f"local_steps: an outer step runs beside {overlap.steps} steps, but the "
            f"next one begins after every={rule}; choose at most as many."
        )


def _check_count(name: str, value: Any) -> None:
    check_type(f"local_steps: {name}=", value, numbers.Integral, "a whole number")
    if value < 1:
        raise PlanError(f"local_steps: {name}={value} must be at least 1.")
