"""What processes say to each other when a loop decides."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from autopar.goodput.choice import Decision, Judged
from autopar.goodput.ways import Key
from autopar.runtime.exchange import exchange_data
from autopar.runtime.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """How a loop is to go on.

    Attributes:
      busy: whether another way is still being prepared.
      studies: whether other codecs are to be chosen first, as they may save more than
        that takes.
      layouts: whether other layouts are looked for with them, for the same reason.
      key: the way to go on by; None: as it is.
      decision: what this process has compared; None: nothing, or the noise is not known
        yet.
    """

    busy: bool = False
    studies: bool = False
    layouts: bool = False
    key: Key | None = None
    decision: Decision | None = None


def agree(world: World, own: Said) -> Said:
    """What the first process says; it is busy as long as any is.

    Measured seconds differ between processes, so only one can decide.

    Args:
      world: the processes, which all call this.
      own: what this process would say.
    """
    if world.process_count == 1:
        return own
    key = None if own.key is None else dataclasses.asdict(own.key)
    data = json.dumps([own.busy, own.studies, own.layouts, key]).encode()
    every: list[Any] = [
        json.loads(x) for x in exchange_data(world, "choosing the batch", data)
    ]
    _, studies, layouts, key = every[0]
    found = None if key is None else Key(**key)
    return Said(any(x[0] for x in every), studies, layouts, found, own.decision)


def key_of(decision: Decision) -> Key | None:
    """The way that was chosen; None: the one that runs."""
    return _key(decision.chosen) if decision.changes else None


def with_key(decision: Decision, key: Key) -> Decision:
    """The comparison with the way that the first process has chosen."""
    found = next((x for x in decision.compared if _key(x) == key), decision.chosen)
    return dataclasses.replace(decision, chosen=found)


def _key(judged: Judged) -> Key:
    way = judged.way
    return Key(way.rows, way.microbatches, way.codecs)
