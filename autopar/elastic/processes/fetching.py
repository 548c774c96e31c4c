"""Brings the tiles that a process needs from where they are held."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from autopar.elastic.processes import tiles
from autopar.elastic.processes.holding import Tiles, numpy_dtype
from autopar.elastic.processes.offers import Offers, Peer
from autopar.elastic.processes.tiles import Tile
from autopar.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """One state that processes hold together.

    Attributes:
      version: names it.
      shapes: path -> shape and dtype of each array.
      holders: port of a process's offers -> path -> its tiles.
    """

    version: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    holders: Mapping[int, Mapping[str, frozenset[Tile]]]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StateSource:
        """Reads the supervisor's message."""
        holders = {
            int(port): {
                path: frozenset(map(tiles.from_data, some))
                for path, some in held.items()
            }
            for port, held in data["holders"].items()
        }
        shapes = {p: (tuple(s), d) for p, (s, d) in data["shapes"].items()}
        return cls(version=data["version"], shapes=shapes, holders=holders)


class Fetcher:
    """Reads tiles of one state: those held here at once, the rest from their holders.

    Attributes:
      local_bytes: that were held here.
      remote_bytes: that came from other processes.
    """

    def __init__(self, source: StateSource, offers: Offers, token: str) -> None:
        """Connects to nobody yet."""
        self.local_bytes = self.remote_bytes = 0
        self._source, self._token = source, token
        self._own: Tiles = offers.tiles(source.version)
        self._own_port = offers.port
        self._peers: dict[int, Peer] = {}
        self._turn = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the arrays."""
        return tuple(self._source.shapes)

    def __call__(self, path: str, wanted: Tile) -> np.ndarray:
        """The elements of a tile.

        Raises:
          OSError: a holder is gone.
          PlanError: nobody holds some of it.
        """
        if path not in self._source.shapes:
            raise PlanError(
                f"the state has no '{path}': a process trains another model. Run the "
                "same script in every process."
            )
        own = self._own.get(path, {})
        if wanted in own:
            self.local_bytes += own[wanted].nbytes
            return own[wanted]
        out = np.empty(tiles.extent(wanted), numpy_dtype(self._source.shapes[path][1]))
        filled = 0
        for tile in self._tiles(path):
            part = tiles.common(tile, wanted)
            if part is None:
                continue
            self._read(path, tile, part, out[tiles.within(part, wanted)])
            filled += tiles.size(part)
        if filled < tiles.size(wanted):
            raise PlanError(f"nobody holds all of '{path}' after the last step.")
        return out

    def whole(self, path: str) -> np.ndarray:
        """All of an array."""
        return self(path, tiles.whole(self._source.shapes[path][0]))

    def _tiles(self, path: str) -> list[Tile]:
        held = [x.get(path, frozenset()) for x in self._source.holders.values()]
        return sorted(frozenset().union(*held, self._own.get(path, {})))

    def _read(self, path: str, tile: Tile, part: Tile, into: np.ndarray) -> None:
        own = self._own.get(path, {})
        if tile in own:
            into[...] = own[tile][tiles.within(part, tile)]
            self.local_bytes += into.nbytes
            return
        holders = [
            p for p, x in self._source.holders.items() if tile in x.get(path, ())
        ]
        # In turn, so that one holder does not serve everybody.
        self._turn += 1
        port = holders[self._turn % len(holders)]
        if port not in self._peers:
            self._peers[port] = Peer(port, self._token)
        self._peers[port].fetch(self._source.version, path, tile, part, into)
        self.remote_bytes += into.nbytes

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.close()
        self._peers.clear()
