"""Checks what a user says about codecs."""

from __future__ import annotations

import numbers

from autopar.compression.codecs.codec import Codec
from autopar.compression.codecs.registry import parse_codec
from autopar.errors import PlanError

# Effective relative error of the whole gradient that ``auto`` allows. Of the codecs
# that were tried alone on three seeds, those below it (int8; int4 with rotation, .032)
# end within about one deviation of dense gradients' loss, those above it do not
# (docs/record): int4 in blocks of 256 without rotation, .061, takes a seventh
# more steps.
DEFAULT_BUDGET = 0.05
# Mode of a plan whose codecs were given gradient by gradient.
EDITED = "edited"


def parsed(text: str) -> Codec | None:
    """The codec that a mode names; None for ``none`` and ``auto``.

    Raises:
      PlanError: there is no such codec.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"compression={text!r}: expected 'none', 'auto' or the text of a codec, "
            "such as 'int8'."
        )
    if text in ("none", "auto"):
        return None
    try:
        return parse_codec(text)
    except ValueError as error:
        raise PlanError(f"compression={text!r}: {error}") from error


def budget_of(error_budget: float | None, mode: str) -> float:
    """The budget that an option gives, `DEFAULT_BUDGET` for None.

    Raises:
      PlanError: it is no number of at least 0, or codecs are not chosen by it.
    """
    if error_budget is None:
        return DEFAULT_BUDGET
    if mode != "auto":
        raise PlanError(
            f"error_budget={error_budget!r} bounds what compression='auto' chooses; "
            f"leave it out with compression={mode!r}."
        )
    if not (isinstance(error_budget, numbers.Real) and error_budget >= 0):
        raise PlanError(
            f"error_budget={error_budget!r}: expected a number of at least 0, such as "
            f"{DEFAULT_BUDGET}."
        )
    return float(error_budget)
