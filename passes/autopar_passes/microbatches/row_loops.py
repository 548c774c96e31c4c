"""Loops that go through the rows of a batch: each turn takes a row of its own."""

from __future__ import annotations

from autopar_passes.program.equations import Equation, Region
from autopar_passes.sums.linear import ADDITIONS


def added_up(eqn: Equation) -> list[bool] | None:
    """How a scan carries what it does; None: one row depends on those before it.

    The transpose of a map over rows adds up gradients, each turn those of its row.

    Returns:
      For each carried value, whether turns add to it; others stay as they begin, and
      may be read.
    """
    (body,) = eqn.regions
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    reads: dict[int, list[Equation]] = {}
    for inner in body.equations:
        for atom in inner.inputs:
            if isinstance(atom, int):
                reads.setdefault(atom, []).append(inner)
    found: list[bool] = []
    for start, end in zip(
        body.inputs[first : first + count], body.outputs[:count], strict=True
    ):
        adds = isinstance(end, int) and _adds(body, reads, start, end)
        if end != start and not adds:
            return None
        found.append(end != start)
    return found


def _adds(body: Region, reads: dict[int, list[Equation]], value: int, end: int) -> bool:
    """Whether a region makes ``end`` of a value by adding to it, and nothing else."""
    while value != end:
        following = reads.get(value, [])
        if len(following) != 1 or value in body.outputs:
            return False
        (eqn,) = following
        adds = eqn.primitive in ADDITIONS and eqn.inputs.count(value) == 1
        if not adds and not _hands_on(eqn):
            return False
        (value,) = eqn.outputs
    return not reads.get(end) and body.outputs.count(end) == 1


def _hands_on(eqn: Equation) -> bool:
    """Whether an equation converts a value to the dtype that it has."""
    (given,) = eqn.source.invars[:1]
    kind = eqn.primitive == "convert_element_type"
    return kind and given.aval.dtype == eqn.params["new_dtype"]
