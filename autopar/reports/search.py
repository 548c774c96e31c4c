"""The proposals of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.proposals import Proposal
from autopar.terminal import columns
from autopar.units import bytes_text, seconds_text

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
    judged = [p for p in proposals if p.step_s is not None]
    fastest = min(judged, key=lambda p: p.step_s or 0.0, default=None)
    rows = [_HEADING]
    for one in proposals:
        step, memory = "", ""
        if one.step_s is not None:
            step, memory = seconds_text(one.step_s), bytes_text(one.peak_bytes)
        rows.append(
            (
                "*" if one is fastest else "",
                one.proposer,
                one.mesh,
                one.program or "as written",
                step,
                memory,
                seconds_text(one.cpu_s),
                one.note,
            )
        )
    return columns(rows, right=(4, 5, 6))
