"""What was said about codecs, read once."""

from __future__ import annotations

import dataclasses

from autopar.compression.codecs.codec import Codec
from autopar.planner.codecs.choose import Errors
from autopar.planner.options import PlanOptions, parsed_codec
from autopar.plans import Plan

# Effective relative error of the whole gradient that ``auto`` allows. Of the codecs
# that were tried alone on three seeds, those below it (int8; int4 with rotation, .032)
# end within about one deviation of dense gradients' loss, those above it do not
# (docs/record): int4 in blocks of 256 without rotation, .061, takes a seventh
# more steps.
DEFAULT_BUDGET = 0.05
# Mode of a plan whose codecs were given gradient by gradient.
EDITED = "edited"


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
    """
    mode, given = options.compression, options.error_budget
    budget = DEFAULT_BUDGET if given is None else float(given)
    return CodecRequest(mode, parsed_codec(mode), budget, sent, errors or {})
