"""The proposals of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.proposals import Proposal
from autopar.reports.units import bytes_text, seconds_text
from autopar.terminal import columns

_HEADING: tuple[str, ...] = (
    "",
    "proposed by",
    "mesh",
    "program",
    "step",
    "memory",
    "CPU",
    "",
)


def proposal_lines(proposals: Sequence[Proposal]) -> list[str]:
    """The proposals in the order in which they were made; the fastest has a star."""
    judged = [p.step_s for p in proposals if p.step_s is not None]
    least_s = min(judged, default=None)
    starred = False
    rows = [_HEADING]
    for one in proposals:
        best = one.step_s is not None and one.step_s == least_s and not starred
        starred |= best
        made = one.step_s is not None
        rows.append(
            (
                "*" if best else "",
                one.proposer,
                one.mesh,
                one.program or "as written",
                seconds_text(one.step_s) if one.step_s is not None else "",
                bytes_text(one.peak_bytes) if made else "",
                seconds_text(one.cpu_s),
                one.note,
            )
        )
    return columns(rows, right=(4, 5, 6))
