"""Who belongs to the next world, and with which state it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.elastic.processes import tiles
from autopar.elastic.processes.identity import ProcessId
from autopar.elastic.processes.messages import Message

# Port of a worker's offers -> version -> what it holds, as `Offers.listed` says.
Held = Mapping[int, Mapping[str, Mapping[str, Any]]]


def latest_state(held: Held) -> dict[str, Any] | None:
    """The latest state of which all is held by someone, for the message to workers.

    Returns:
      Version, step, shapes, what goes with it, and holders; None: there is none.
    """
    versions = {name for mine in held.values() for name in mine}
    for name in sorted(versions, key=_order, reverse=True):
        mine = {port: x[name] for port, x in held.items() if name in x}
        shapes = {p: s for x in mine.values() for p, s in x["shapes"].items()}
        plain = {path: shape for path, (shape, _) in shapes.items()}
        if tiles.complete(plain, [x["tiles"] for x in mine.values()]):
            some = next(iter(mine.values()))
            return {
                "version": name,
                "step": some["step"],
                "shapes": shapes,
                "extra": some["extra"],
                "holders": {port: x["tiles"] for port, x in mine.items()},
            }
    return None


def described(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> list[dict[str, Any]]:
    """The workers of a world by rank, for the message to them.

    Args:
      ready: what each worker said as it became ready.
      workers: of the world.
    """
    keys = ("port", "pid", "devices")
    return [{k: ready[w][k] for k in keys} | {"worker": w} for w in workers]


def processes_of(
    ready: Mapping[int, Message], workers: Sequence[int]
) -> list[ProcessId | None]:
    """The processes of workers, as they said."""
    return [ProcessId.from_data(ready[w].get("process")) for w in workers]


def _order(version: str) -> tuple[int, int]:
    step, generation = version.split(".")
    return int(step), int(generation)


def chosen(
    ready: Sequence[int], wanted: int, leaving: frozenset[int], rows: float
) -> list[int]:
    """The workers of the next world, by rank; the oldest first.

    As many as divide the batch; the others are spares, which take the place of those
    that die.

    Args:
      ready: numbers of the workers that wait for a world.
      wanted: how many a world should have.
      leaving: those that were asked to go.
      rows: of a batch, for each device of a process; 0: any number of processes can
        share it.

    >>> chosen([0, 1, 2, 3, 4], 5, frozenset({1}), 24)
    [0, 2, 3, 4]
    >>> chosen([0, 1, 2, 3, 4], 5, frozenset(), 24)
    [0, 1, 2, 3]
    """
    left = sorted(set(ready) - leaving)[:wanted]
    sizes = [n for n in range(len(left), 0, -1) if rows % n == 0]
    return left[: sizes[0]] if sizes else left
