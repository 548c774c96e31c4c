"""What was said about codecs, read once."""

from __future__ import annotations

import dataclasses

from autopar.compression.codecs.codec import Codec
from autopar.planner.codecs.choose import Errors
from autopar.planner.codecs.options import budget_of, parsed
from autopar.planner.options import PlanOptions
from autopar.plans import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class CodecRequest:
    """What was said about codecs.

    Attributes:
      mode: as of `PlanOptions.compression`.
      codec: that it names.
      budget: of error.
      sent: a plan whose codecs hold gradient by gradient.
      errors: measured relative errors, by gradient and codec.
    """

    mode: str
    codec: Codec | None
    budget: float
    sent: Plan | None
    errors: Errors


def requested(
    options: PlanOptions, sent: Plan | None = None, errors: Errors | None = None
) -> CodecRequest:
    """Reads the options.

    Args:
      options: hints and limits of planning.
      sent: a plan whose codecs hold gradient by gradient.
      errors: measured relative errors, by gradient and codec.

    Raises:
      PlanError: there is no such codec, or the budget bounds nothing.
    """
    mode = options.compression
    budget = budget_of(options.error_budget, mode)
    return CodecRequest(mode, parsed(mode), budget, sent, errors or {})
