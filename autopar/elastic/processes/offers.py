"""Sends parts of the state to other processes, and stores copies of theirs, over TCP.

A tile is a rectangular part of an array. A holding is the set of tiles that a process
keeps of one step's state (`autopar.elastic.processes.holding`). A request is a JSON
object on one line; the elements of arrays follow as bytes. Separate threads answer
requests, so a process can answer while its main thread hangs in a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autopar.elastic.processes import tiles
from autopar.elastic.processes.holding import Holding, Tiles, numpy_dtype
from autopar.elastic.processes.members import has_token
from autopar.elastic.processes.network import End, Network
from autopar.elastic.processes.tiles import Tile
from autopar.errors import PlanError

_LONGEST_LINE = 16 << 20


class Offers:
    """Serves this process's parts of states, and the copies that others stored here."""

    def __init__(
        self,
        token: str,
        network: Network,
        obey: Callable[[Mapping[str, Any]], Any] = lambda _: None,
    ) -> None:
        """Starts to listen, without anything to serve.

        Args:
          token: secret text that each request must contain.
          network: how other processes reach this process.
          obey: called with each order of another process; returns the answer.
        """
        self._token, self._obey = token, obey
        # A function that returns the bytes of a compiled program by its name, for
        # processes on other hosts.
        self.program: Callable[[str], bytes | None] = lambda _: None
        self._lock = threading.Lock()
        self._held: dict[str, Holding] = {}
        #: The address to which other processes send requests, as ``HOST:PORT``.
        self.address = network.address(network.listen(self._serve).port)

    def put(self, holding: Holding) -> None:
        """Serves a holding, joined with served tiles of the same state."""
        with self._lock:
            known = self._held.get(holding.version)
            if known is not None:
                merged = {p: dict(x) for p, x in known.tiles.items()}
                for path, more in holding.tiles.items():
                    merged.setdefault(path, {}).update(more)
                holding = Holding(
                    version=holding.version,
                    step=holding.step,
                    shapes={**known.shapes, **holding.shapes},
                    tiles=merged,
                    extra={**known.extra, **holding.extra},
                )
            self._held[holding.version] = holding

    def keep(self, wanted: Callable[[Holding], bool]) -> None:
        """Keeps the holdings of the wanted states, and drops all others."""
        with self._lock:
            self._held = {k: h for k, h in self._held.items() if wanted(h)}

    def describe(self) -> dict[str, Any]:
        """Name of a state -> its tiles in this process, for a message."""
        with self._lock:
            held = dict(self._held)
        return {name: holding.describe() for name, holding in held.items()}

    def holdings(self) -> list[Holding]:
        """All holdings that this process serves."""
        with self._lock:
            return list(self._held.values())

    def tiles(self, name: str) -> Tiles:
        """The tiles that this process has of a state."""
        with self._lock:
            found = self._held.get(name)
        return {} if found is None else found.tiles

    def _serve(self, end: End) -> None:
        """Answers requests of a connection until it closes or sends an invalid one."""
        stream = end.makefile("rb")
        try:
            while line := stream.readline(_LONGEST_LINE):
                request = json.loads(line)
                if not has_token(request, self._token):
                    return
                if "order" in request:
                    answer = json.dumps({"answer": self._obey(request)})
                    end.sendall(answer.encode() + b"\n")
                elif "program" in request:
                    _send_bytes(end, self.program(str(request["program"])))
                elif "copies" in request:
                    self._take(request, stream)
                    end.sendall(b"{}\n")
                else:
                    self._give(request, end)
        except (OSError, ValueError, KeyError, EOFError):
            return
        finally:
            end.close()

    def _give(self, request: Mapping[str, Any], end: End) -> None:
        tile, wanted = (tiles.from_data(request[k]) for k in ("tile", "part"))
        held = self.tiles(request["version"]).get(request["path"], {})
        found = held.get(tile)
        if found is not None:
            found = _raw(np.ascontiguousarray(found[tiles.within(wanted, tile)]))
        _send_bytes(end, found)

    def _take(self, request: Mapping[str, Any], stream: Any) -> None:
        """Stores tiles that another process sends, once all of them have arrived."""
        shapes = {p: (tuple(s), str(d)) for p, (s, d) in request["shapes"].items()}
        found: Tiles = {}
        for path, data in request["copies"]:
            tile = tiles.from_data(data)
            array = np.empty(tiles.extent(tile), numpy_dtype(shapes[path][1]))
            _fill(stream, array)
            found.setdefault(path, {})[tile] = array
        self.put(
            Holding(
                version=request["version"],
                step=request["step"],
                shapes=shapes,
                tiles=found,
                extra=request["extra"],
            )
        )


def _send_bytes(end: End, found: bytes | memoryview | None) -> None:
    """Sends the length and then the bytes; for None it sends the length -1."""
    count = -1 if found is None else len(found)
    end.sendall(json.dumps({"bytes": count}).encode() + b"\n")
    if found is not None:
        end.sendall(found)


def _raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    plain: Any = array.reshape(-1).view(np.uint8)
    return memoryview(plain)


def _fill(stream: Any, array: np.ndarray) -> None:
    """Reads bytes from a stream into a contiguous array."""
    view = _raw(array)
    while len(view):
        count = stream.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]


class Peer:
    """A connection to another process's `Offers`; only one thread may use it.

    Raises:
      OSError: the other process is gone (raised by each method).
    """

    def __init__(
        self, address: str, token: str, network: Network, timeout_s: float = 30.0
    ) -> None:
        """Connects to the other process."""
        self._end = network.connect(address, timeout_s)
        self._end.settimeout(timeout_s)
        self._stream = self._end.makefile("rb")
        self._token = token

    def fetch(
        self, version: str, path: str, tile: Tile, part: Tile, into: np.ndarray
    ) -> None:
        """Reads a part of another process's tile into an array.

        Raises:
          OSError: the other process is gone, or no longer has the tile.
        """
        self._ask(
            version=version,
            path=path,
            tile=tiles.to_data(tile),
            part=tiles.to_data(part),
        )
        count = json.loads(self._stream.readline() or b'{"bytes": -1}')["bytes"]
        buffer = np.empty(tiles.extent(part), into.dtype)
        if count != buffer.nbytes:
            raise ConnectionError(f"{path}: another process holds it no longer")
        try:
            _fill(self._stream, buffer)
        except EOFError as error:
            raise ConnectionError(f"{path}: another process is gone") from error
        into[...] = buffer

    def copy(self, holding: Holding) -> None:
        """Sends a holding to the other process.

        Returns when the other process has stored it.
        """
        listed = [(p, tile) for p, held in holding.tiles.items() for tile in held]
        self._ask(
            version=holding.version,
            step=holding.step,
            shapes={p: [list(s), d] for p, (s, d) in holding.shapes.items()},
            extra=dict(holding.extra),
            copies=[[path, tiles.to_data(tile)] for path, tile in listed],
        )
        for path, tile in listed:
            self._end.sendall(_raw(np.ascontiguousarray(holding.tiles[path][tile])))
        if not self._stream.readline():
            raise ConnectionError("another process is gone")

    def program(self, name: str) -> bytes | None:
        """Reads a compiled program from the other process; None if it has none."""
        self._ask(program=name)
        count = json.loads(self._stream.readline() or b'{"bytes": -1}')["bytes"]
        found = self._stream.read(count) if count >= 0 else b""
        if count >= 0 and len(found) < count:
            raise ConnectionError("another process is gone")
        return found if count >= 0 else None

    def order(self, order: str, **data: Any) -> Any:
        """Sends an order to the other process, and returns the answer."""
        self._ask(order=order, **data)
        line = self._stream.readline()
        if not line:
            raise ConnectionError("another process is gone")
        return json.loads(line)["answer"]

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()
        self._end.close()

    def _ask(self, **request: Any) -> None:
        line = json.dumps({"kind": "ask", "token": self._token, **request})
        self._end.sendall(line.encode() + b"\n")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """Where the parts of a training state are: which process holds which tiles.

    Attributes:
      version: name of the state: its step, and the world that made it.
      shapes: path -> shape and dtype of each array.
      holders: address at which a process serves its tiles -> path of an array -> tiles
        that the process holds.
    """

    version: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    holders: Mapping[str, Mapping[str, frozenset[Tile]]]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StateSource:
        """Reads these fields from the supervisor's message."""
        holders = {
            address: {
                path: frozenset(map(tiles.from_data, some))
                for path, some in held.items()
            }
            for address, held in data["holders"].items()
        }
        shapes = {p: (tuple(s), d) for p, (s, d) in data["shapes"].items()}
        return cls(version=data["version"], shapes=shapes, holders=holders)


def _age(held: Holding) -> tuple[int, int]:
    """The number of the world that made a state, and that of its step."""
    step, generation = held.version.split(".")
    return int(generation), int(step)


class Fetcher:
    """Reads tiles of a state from this process, or from the processes that hold them.

    Attributes:
      local_bytes: bytes that this process already held.
      remote_bytes: bytes that were received from other processes.
    """

    def __init__(
        self, source: StateSource, offers: Offers, token: str, network: Network
    ) -> None:
        """Connects to no process yet."""
        self.local_bytes = self.remote_bytes = 0
        self._source, self._token, self._network = source, token, network
        self._offers, self._own = offers, offers.tiles(source.version)
        self._peers: dict[str, Peer] = {}
        self._turn = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the arrays."""
        return tuple(self._source.shapes)

    def __call__(self, path: str, wanted: Tile) -> np.ndarray:
        """Reads the elements of a tile.

        Raises:
          OSError: a process that holds a part is gone.
          PlanError: no process holds some part of the tile.
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

    def own_state(self, begin: str) -> Holding | None:
        """The last state of which this process has arrays of its own; None: none.

        Args:
          begin: how the paths of these arrays begin.
        """
        found = [
            held
            for held in self._offers.holdings()
            if any(path.startswith(begin) for path in held.tiles)
        ]
        return max(found, key=_age, default=None)

    def whole(self, path: str) -> np.ndarray:
        """Reads the whole array of a path."""
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
            a for a, x in self._source.holders.items() if tile in x.get(path, ())
        ]
        # If several processes hold the same tile, they get requests in turn.
        self._turn += 1
        address = holders[self._turn % len(holders)]
        if address not in self._peers:
            self._peers[address] = Peer(address, self._token, self._network)
        self._peers[address].fetch(self._source.version, path, tile, part, into)
        self.remote_bytes += into.nbytes

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.close()
        self._peers.clear()
