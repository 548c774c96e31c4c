"""What is said of a loop whose batch follows, and what its state must be like."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.goodput.choice import Ratio
from autopar.goodput.critical import CriticalRegimes
from autopar.goodput.progress_ratio import ProgressRatio
from autopar.goodput.rates import Rule, rule_of
from autopar.planner.options import parsed_codec
from autopar_errors import check_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a loop's batch follows.

    Attributes:
      base_batch: rows that the learning rate was chosen for, M0.
      max_batch: most rows.
      codecs: what gradients may be sent by, as ``compression=`` says it, with what was
        measured of a row's worth where they are biased (`progress_ratio`).
      rule: ``goodput``, or Accordion's rule (`CriticalRegimes`).
      every: steps between two decisions.
      sigmas: standard deviations within which a gain counts for none.
    """

    base_batch: int
    max_batch: int
    codecs: Mapping[str, Ratio | None] = dataclasses.field(
        default_factory=lambda: {"none": None}
    )
    rule: CriticalRegimes | None = None
    every: int = 10
    sigmas: float = 1.0

    def __post_init__(self) -> None:
        """Checks ranges and codecs.

        Raises:
          PlanError: a number is out of its range, or there is no such codec.
        """
        for name in ("base_batch", "max_batch", "every"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise PlanError(f"{name}={given!r} must be a whole number, at least 1.")
        for text in self.codecs:
            check_type("codecs=", text, str, "texts of codecs, such as ['int8']")
            parsed_codec(text)
        if self.max_batch < self.base_batch:
            raise PlanError(
                f"max_batch={self.max_batch} is smaller than "
                f"base_batch={self.base_batch}. The batch grows from the base batch."
            )
        if not self.codecs or not self.sigmas >= 0:
            raise PlanError(
                "expected at least one codec, such as 'none', and sigmas of at least "
                f"0, got codecs={self.codecs!r}, sigmas={self.sigmas!r}."
            )


def codecs_of(
    given: Sequence[str] | Mapping[str, ProgressRatio | float | None], own: str
) -> dict[str, Ratio | None]:
    """The codecs that may be used, with what is known of biased ones.

    Args:
      given: texts as of ``compression=``; or with each the ratio of rows that
        `progress_ratio` has measured, or None.
      own: what the step was made with, which may be used in any case.
    """
    check_type("codecs=", given, Iterable, "texts of codecs, such as ['int8']")
    asked = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
    return {own: None, **{k: _ratio(x) for k, x in asked.items()}}


def _ratio(given: ProgressRatio | float | None) -> Ratio | None:
    if given is None:
        return None
    if isinstance(given, ProgressRatio):
        low, high = given.interval()
        low = max(low, 0.0) if math.isfinite(low) else 0.0
        return Ratio(given.value, low, high)
    if not 0 < given < math.inf:
        raise PlanError(f"codecs: a ratio of rows must be positive, got {given!r}.")
    return Ratio(given, given, given)


def check_data(data: Any, following: Following) -> None:
    """Checks what a loop is to go on with.

    Raises:
      PlanError: it is of a loop with another base batch, or of none.
    """
    try:
        base, rows = int(data["base_batch"]), int(data["way"]["rows"])
    except (TypeError, KeyError, ValueError) as error:
        raise PlanError(
            f"expected what Loop.to_data() returned, got {data!r}."
        ) from error
    if base != following.base_batch or rows < 1:
        raise PlanError(
            f"base_batch={following.base_batch}, but the run that is gone on with had "
            f"{base}. Give the same, or begin a new run."
        )


def check_rule(state: Any, base_batch: int, rule: Rule | None = None) -> None:
    """Checks that a state's optimizer follows the batch as is said.

    Args:
      state: the train state.
      base_batch: rows of the base batch.
      rule: of the learning rate; None: any.

    Raises:
      PlanError: it does not.
    """
    found, base = rule_of(state)
    if base != base_batch:
        raise PlanError(
            f"base_batch={base_batch}, but the state's optimizer was wrapped by "
            f"scaled(..., base_batch={base}). Give both the same."
        )
    if rule is not None and found != rule:
        raise PlanError(
            f"lr_rule={rule!r}, but the state's optimizer was wrapped by "
            f"scaled(..., {found!r}). Give both the same."
        )
