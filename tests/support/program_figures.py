"""Counts and checksums of programs as lines of golden files."""

from __future__ import annotations

import collections
import re
import zlib
from collections.abc import Iterator
from typing import Any

from figures import row

from autopar_passes.microbatches.facts import Microbatched
from autopar_passes.program.equations import Atom, Program, Region, Scalar, walk

# Addresses of functions differ from run to run.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def check_sum(text: str) -> str:
    return f"{zlib.crc32(_ADDRESS.sub('', text).encode()):08x}"


def program_row(title: str, program: Program) -> str:
    equations = walk(program.body)
    kinds = collections.Counter(e.primitive for e in equations)
    return row(
        title,
        equations=len(equations),
        kinds=",".join(f"{k}:{n}" for k, n in sorted(kinds.items()) if n > 2),
        text=check_sum("\n".join(_lines(program, program.body))),
    )


def _lines(program: Program, region: Region) -> Iterator[str]:
    yield f"({' '.join(map(str, region.inputs))})"
    for e in region.equations:
        made = [f"{k}:{_type(program, k)}" for k in e.outputs]
        read = [_atom(a) for a in e.inputs]
        yield f"{' '.join(made)} = {e.primitive} {' '.join(read)} {e.name_stack}"
        for inner in e.regions:
            yield from _lines(program, inner)
    yield f"return {' '.join(map(_atom, region.outputs))}"


def _type(program: Program, value: int) -> str:
    known = program.values[value]
    return f"{known.dtype}{list(known.shape)}"


def _atom(atom: Atom) -> str:
    return f"{atom.value}" if isinstance(atom, Scalar) else f"%{atom}"


def microbatch_lines(found: Microbatched) -> Iterator[str]:
    yield program_row("micro", found.traced.program)
    crossings = collections.Counter(
        f"{c.combine.name}{_rows(c.rows)}" for c in found.crossings
    )
    yield row(
        "split",
        once=len(found.once),
        first=min(found.once, default=-1),
        crossings=" ".join(f"{k}:{n}" for k, n in sorted(crossings.items())),
        values=sum(c.value for c in found.crossings),
        batch=" ".join(f"{k}:{_rows(r)}" for k, r in sorted(found.batch.items())),
        number=found.number,
        given=list(found.given),
        gathered=[x for pair in sorted(found.gathered.items()) for x in pair],
        local=" ".join(found.local),
    )
    if found.ahead is not None:
        yield program_row("ahead", found.ahead)


def _rows(rows: Any) -> str:
    return "" if rows is None else f"[{rows.dim},{rows.inner}]"
