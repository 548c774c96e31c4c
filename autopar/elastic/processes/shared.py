"""Stores training states in shared memory, where they outlive the writing process.

A tile is a rectangular part of an array of the state. A file holds one state: a header,
the tiles, each at a multiple of 64 bytes, and an index of the tiles. A writer first
clears the header, then writes tiles and index, and writes the header last. So if the
writer is killed, the file is either complete or clearly invalid. A process writes to
two files in turn, so the last complete state is never overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import json
import mmap
import os
import pathlib
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autopar.elastic.processes import tiles
from autopar.elastic.processes.holding import Holding, Tiles, numpy_dtype
from autopar.elastic.processes.members import ProcessId
from autopar.errors import PlanError
from autopar.units import bytes_text

# If an array in host memory has this alignment in bytes, XLA uses it without a copy.
_ALIGN = 64
_HEAD_BYTES = 4096
# The header: a magic number, and the offset, bytes and checksum of the index. A
# checksum of the header follows.
_HEAD = struct.Struct("<8sQQI")
_SEAL = struct.Struct("<I")
_MAGIC = b"autopar1"
# Offset at which the file identifies the process that writes it: process number, start
# time, and identifier of the machine's boot.
_OWNER_AT = 1024
_OWNER = struct.Struct("<QQ64s")
# Number of files to which a process writes in turn.
_SLOTS = 2


class SharedStates:
    """Writes this process's states, and reads the states that dead processes left."""

    def __init__(self, prefix: str, worker: int) -> None:
        """Writes nothing yet.

        Args:
          prefix: common prefix of the paths of files of all the run's workers on this
            host.
          worker: number of this process's worker.
        """
        self._prefix = prefix
        self._own = f"{prefix}{worker}-{os.getpid()}."
        self._slots: list[_StateFile | None] = [None] * _SLOTS
        self._versions: list[str] = [""] * _SLOTS
        self._turn = 0
        self._known: dict[str, str] = {}  # path -> name of the state read from it

    def write(self, holding: Holding, spare: int = 0) -> None:
        """Writes a state to a file, in place of the older of the two states.

        Args:
          holding: the state.
          spare: number of further states of this size for which room must remain.

        Raises:
          PlanError: there is no room for the state.
        """
        layout = _Layout.of(holding)
        slot = self._slots[self._turn]
        if slot is None or slot.size < layout.size:
            known = sum(f.size for f in self._slots if f is not None)
            self._check_room((_SLOTS + spare) * layout.size - known)
        if slot is None:
            slot = self._slots[self._turn] = _StateFile.create(
                f"{self._own}{self._turn}"
            )
        self._versions[self._turn] = ""
        slot.write(holding, layout)
        self._versions[self._turn] = holding.version
        self._turn = (self._turn + 1) % _SLOTS

    def flush(self, holdings: Sequence[Holding]) -> None:
        """Writes states before this process ends, each to its own file.

        If there is no room for a state, a message is printed and the state is not
        written. Another process may hold it.

        Args:
          holdings: the states. Those that were read from a file are not written again.
        """
        for number, held in enumerate(sorted(holdings, key=_newest_first)):
            whole = (
                held.version in self._versions
                or held.version in self._versions_of_files()
            )
            if whole and not _has_more(held, self._of(held.version)):
                continue
            layout = _Layout.of(held)
            try:
                self._check_room(layout.size)
                _StateFile.create(f"{self._own}last{number}").write(held, layout)
            except (PlanError, OSError) as error:
                print(f"autopar: {error}", file=sys.stderr, flush=True)

    def load(self) -> list[Holding]:
        """Reads states that ended processes left, if they are new since the last call.

        The arrays of the result are read-only views of shared memory, which stays
        mapped as long as the arrays exist. The method asks no other process. The method
        skips incomplete and damaged files.
        """
        found: list[Holding] = []
        for path in self._paths():
            if path not in self._known and not _is_written(path):
                held = _read(path)
                if held is not None:
                    found.append(held)
                    self._known[path] = held.version
        return found

    def drop(self, generation: int) -> None:
        """Removes states that dead processes left from worlds before ``generation``."""
        for path in self._paths():
            if path.startswith(self._own) or _is_written(path):
                continue
            held = self._known.get(path) or _version(path)
            if not held or int(held.partition(".")[2]) < generation:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _versions_of_files(self) -> set[str]:
        return set(self._known.values())

    def _of(self, version: str) -> list[Holding]:
        """The parts of a state that files hold."""
        paths = [p for p, v in self._known.items() if v == version]
        paths += [
            slot.path
            for slot, v in zip(self._slots, self._versions, strict=True)
            if slot is not None and v == version
        ]
        return [x for x in map(_read, paths) if x is not None]

    def _paths(self) -> list[str]:
        found = glob.glob(f"{glob.escape(self._prefix)}*-*.*")
        return sorted(p for p in found if not p.endswith(".new"))

    def _check_room(self, needed: int) -> None:
        folder = pathlib.Path(self._prefix).parent
        there = os.statvfs(folder)
        free = there.f_bavail * there.f_frsize
        if needed > free:
            raise PlanError(_no_room(folder, needed, free))


def _no_room(folder: pathlib.Path, needed: int, free: int) -> str:
    return (
        f"states for a respawn need {bytes_text(needed)} more of shared memory, and "
        f"{folder} has {bytes_text(free)} free. Enlarge it (mount -o remount,size=... "
        f"{folder}; of a container --shm-size, of a pod an emptyDir with medium: "
        "Memory), or use --recovery inplace where the platform allows it, or "
        "survive=0 with a checkpoint."
    )


def _newest_first(holding: Holding) -> tuple[int, ...]:
    return tuple(-int(x) for x in holding.version.split("."))


def _has_more(held: Holding, known: Iterable[Holding]) -> bool:
    """Whether a holding has tiles that no holding in ``known`` has."""
    there = {(p, t) for x in known for p, some in x.tiles.items() for t in some}
    return any((p, t) not in there for p, some in held.tiles.items() for t in some)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a state in a file.

    Attributes:
      places: offset of each tile in bytes, in the order of the holding's tiles.
      index: the index as bytes.
      index_at: offset of the index in bytes.
      size: bytes of the file.
    """

    places: tuple[int, ...]
    index: bytes
    index_at: int
    size: int

    @classmethod
    def of(cls, holding: Holding) -> _Layout:
        """Computes the layout for a holding."""
        at, places, listed = _HEAD_BYTES, [], []
        for path, some in holding.tiles.items():
            for tile, array in some.items():
                places.append(at)
                listed.append([path, tiles.to_data(tile), at])
                at += -(-array.nbytes // _ALIGN) * _ALIGN
        index = json.dumps(
            {
                "version": holding.version,
                "step": holding.step,
                "shapes": {k: [list(s), d] for k, (s, d) in holding.shapes.items()},
                "tiles": listed,
                "extra": dict(holding.extra),
            }
        ).encode()
        return cls(tuple(places), index, at, at + len(index))


@dataclasses.dataclass(frozen=True, slots=True)
class _StateFile:
    """A file that this process writes.

    Attributes:
      path: path of the file.
      descriptor: open descriptor of the file, until this process ends.
    """

    path: str
    descriptor: int

    @classmethod
    def create(cls, path: str) -> _StateFile:
        """Makes an empty file that only this user can read."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.new")
        made = cls(path, os.open(f"{path}.new", flags, 0o600))
        own = ProcessId.of(os.getpid())
        assert own is not None
        made.put(_OWNER.pack(own.pid, own.started, own.boot.encode()), _OWNER_AT)
        os.rename(f"{path}.new", path)
        return made

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    def put(self, data: bytes | memoryview, at: int) -> None:
        """Writes all bytes at an offset, by a system call.

        Raises:
          PlanError: there is no room for the bytes. (A write to mapped memory would
            kill the process instead.)
        """
        view = memoryview(data)
        while len(view):
            try:
                count = os.pwrite(self.descriptor, view, at)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                folder = pathlib.Path(self.path).parent
                raise PlanError(_no_room(folder, len(view), 0)) from error
            view, at = view[count:], at + count

    def write(self, holding: Holding, layout: _Layout) -> None:
        """Writes a state; the file is invalid until the write is complete."""
        self.put(bytes(_HEAD.size + _SEAL.size), 0)
        arrays = [x for some in holding.tiles.values() for x in some.values()]
        for at, array in zip(layout.places, arrays, strict=True):
            whole: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.put(memoryview(whole), at)
        self.put(layout.index, layout.index_at)
        head = _HEAD.pack(
            _MAGIC, layout.index_at, len(layout.index), zlib.crc32(layout.index)
        )
        self.put(head, 0)
        self.put(_SEAL.pack(zlib.crc32(head)), _HEAD.size)  # makes the file valid


def _is_written(path: str) -> bool:
    """Whether the process that wrote a file still runs."""
    try:
        with open(path, "rb") as file:
            file.seek(_OWNER_AT)
            pid, started, boot = _OWNER.unpack(file.read(_OWNER.size))
    except (OSError, struct.error):
        return False
    owner = ProcessId(pid, started, boot.rstrip(b"\0").decode(errors="replace"))
    descriptor = owner.open()
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def _read_index(memory: mmap.mmap) -> dict[str, Any] | None:
    """The index of a file; None if the file is not complete."""
    if len(memory) < _HEAD_BYTES:
        return None
    head = memory[: _HEAD.size]
    (seal,) = _SEAL.unpack(memory[_HEAD.size : _HEAD.size + _SEAL.size])
    magic, at, count, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or seal != zlib.crc32(head) or at + count > len(memory):
        return None
    data = memory[at : at + count]
    return json.loads(data) if zlib.crc32(data) == checksum else None


def _map(path: str) -> mmap.mmap | None:
    """Maps a file for reading; None if this user has no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return None
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # the file is empty
        return None
    finally:
        os.close(descriptor)


def _version(path: str) -> str:
    memory = _map(path)
    index = None if memory is None else _read_index(memory)
    return "" if index is None else str(index["version"])


def _read(path: str) -> Holding | None:
    """Maps the state in a file; None if it is incomplete or of another user."""
    memory = _map(path)
    index = None if memory is None else _read_index(memory)
    if memory is None or index is None:
        return None
    shapes = {p: (tuple(s), str(d)) for p, (s, d) in index["shapes"].items()}
    found: Tiles = {}
    for name, data, at in index["tiles"]:
        tile = tiles.from_data(data)
        dtype = numpy_dtype(shapes[name][1])
        if at + tiles.size(tile) * dtype.itemsize > len(memory):
            return None
        array = np.ndarray(tiles.extent(tile), dtype, memory, at)
        found.setdefault(name, {})[tile] = array
    return Holding(
        version=index["version"],
        step=index["step"],
        shapes=shapes,
        tiles=found,
        extra=index["extra"],
    )
