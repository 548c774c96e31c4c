"""Checks what a user says about planning before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.plans import NO_SCHEDULE, SCHEDULES
from autopar_passes.remat.levels import FULL, is_level

# What is done where the loss of a row depends on the others of its batch.
COUPLED = ("refuse", "microbatch")


def check_limits(max_axes: Any, seconds: Any) -> None:
    """Checks the limits of the search.

    Raises:
      PlanError: one is of another kind, or below what can be meant.
    """
    if max_axes is not None and (
        isinstance(max_axes, bool) or not isinstance(max_axes, int)
    ):
        raise PlanError(
            f"max_axes={max_axes!r}: expected the most mesh axes to try, a whole "
            "number such as 2."
        )
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise PlanError(
            f"seconds={seconds!r}: expected the time limit of the solver in seconds, "
            "such as 10.0, or None for none."
        )
    if not seconds > 0 or math.isnan(seconds):
        raise PlanError(
            f"seconds={seconds!r}: expected more than 0, or None for no limit."
        )


def check_microbatches(microbatches: Any, coupled: Any) -> None:
    """Checks into how many microbatches a batch is split, and how.

    Raises:
      PlanError: it is no number of at least 1 and no several, or there is no such way.
    """
    each: Sequence[Any] = (microbatches,)
    if isinstance(microbatches, tuple) and len(cast(Sequence[Any], microbatches)) > 1:
        each = cast(Sequence[Any], microbatches)
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in each)
    if not (microbatches in (None, "auto") or (whole and min(each) >= 1)):
        raise PlanError(
            f"microbatches={microbatches!r}: expected into how many microbatches the "
            "batch is split, a whole number such as 4, or 'auto'; for replicas of "
            "unequal devices, how many each runs, such as [8, 4]."
        )
    if coupled not in COUPLED:
        raise PlanError(
            f"coupled={coupled!r}: expected 'refuse', or 'microbatch' to compute what "
            "couples the rows of a batch from those of each microbatch alone."
        )


def check_stages(stages: Any, schedule: Any) -> None:
    """Checks into how many stages a step is cut, and their schedule.

    Raises:
      PlanError: it is no number of at least 1, or there is no such schedule.
    """
    whole = isinstance(stages, int) and not isinstance(stages, bool)
    known = stages is None or stages == "auto" or (whole and stages >= 1)
    if not known:
        raise PlanError(
            f"stages={stages!r}: expected into how many pipeline stages the step is "
            "cut, a whole number such as 4, or 'auto'."
        )
    names = [name for name in SCHEDULES if name != NO_SCHEDULE]
    if schedule is not None and schedule not in names:
        raise PlanError(f"schedule={schedule!r}: there are {', '.join(names)}.")
    if schedule is not None and stages in (None, 1):
        raise PlanError(
            f"schedule={schedule!r} is for a pipeline: say stages=, too, a number or "
            "'auto'."
        )


def check_remat(remat: Any, stages: Any) -> None:
    """Checks what is to be computed again.

    Raises:
      PlanError: it is none of the forms, or is said of a number of stages.
    """
    if remat in (None, "auto", "none"):
        pass
    else:
        layers_asked(remat)
    if remat is not None and stages not in (None, 1, "auto"):
        raise PlanError(
            f"remat={remat!r} is for plans of one stage, and stages={stages!r}. Leave "
            "remat out; with stages='auto' layers are chosen that compute again."
        )
    if remat not in (None, "auto") and stages == "auto":
        raise PlanError(
            f"remat={remat!r}: stages='auto' chooses itself which layers compute "
            "again. Leave remat out, or say stages=1."
        )


def layers_asked(remat: Any) -> tuple[int | None, str]:
    """How many layers are computed again, and what is kept of them.

    >>> layers_asked("4:dots")
    (4, 'dots')
    >>> layers_asked("all:names=attn_out,mlp_in")
    (None, 'names=attn_out,mlp_in')

    Returns:
      The number of layers, None for all, and the level.

    Raises:
      PlanError: it is neither a number, ``all``, nor one of them with a level.
    """
    whole = isinstance(remat, int) and not isinstance(remat, bool)
    text = str(remat) if whole or isinstance(remat, str) else ""
    layers, _, level = text.partition(":")
    if is_level(text):
        layers, level = "all", text
    known = layers == "all" or layers.isdecimal()
    if not known or not is_level(level or FULL) or text.endswith(":"):
        raise PlanError(
            f"remat={remat!r}: expected how many layers compute their activations "
            "again, a whole number such as 4, 'all', '4:dots' or 'all:dots' to keep "
            "their matrix products, '4:names=a,b' to keep what checkpoint_name calls "
            "so, 'auto', or 'none' to drop the step's own jax.checkpoint."
        )
    return (None if layers == "all" else int(layers)), level or FULL


def check_hints(pins: Any, rules: Any, axis_names: Any) -> None:
    """Checks the kinds of hints.

    Raises:
      PlanError: one is of another kind than expected.
    """
    if pins is not None and not isinstance(pins, Mapping):
        raise PlanError(
            f"pins={_short(pins)}: expected a dictionary, such as "
            "{'params/*': PartitionSpec('data')}."
        )
    for pattern, spec in cast(Mapping[str, Any], pins or {}).items():
        if not isinstance(spec, PartitionSpec):
            raise PlanError(
                f"pin {pattern!r}: expected a jax.sharding.PartitionSpec, got "
                f"{_short(spec)}."
            )
    pairs = rules or ()
    if (
        isinstance(pairs, (str, bytes, Mapping))
        or not isinstance(pairs, Sequence)
        or not all(isinstance(x, Sequence) and len(x) == 2 for x in pairs)
    ):
        raise PlanError(
            f"logical_axis_rules={_short(rules)}: expected pairs of a logical name and "
            "mesh axes, such as [('embed', 'data'), ('mlp', 'tensor')]."
        )
    _check_names(axis_names)


def _check_names(axis_names: Any) -> None:
    if axis_names is None:
        return
    several = isinstance(axis_names, Sequence) and not isinstance(axis_names, str)
    names = cast(Sequence[Any], axis_names) if several else ()
    texts = all(isinstance(name, str) and name for name in names)
    if not names or not texts or len(set(names)) < len(names):
        raise PlanError(
            f"axis_names={_short(axis_names)}: expected different names, outermost "
            "first, such as ('data', 'tensor')."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
