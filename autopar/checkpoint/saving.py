"""Writes a checkpoint in the background, by all processes together.

Each process writes its own blocks of the arrays, and a part file with their checksums.
Process 0 waits for the part files of all processes and then completes the checkpoint.
The processes communicate only through files in the folder, to which all must have
access. The processes use no collectives for a save, so steps can run at the same time.
"""

from __future__ import annotations

import atexit
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import msgspec

from autopar.checkpoint import folders, store
from autopar.checkpoint.manifest import MANIFEST, Manifest
from autopar.checkpoint.store import Digest, digest_of
from autopar.errors import CheckpointError
from autopar.plans import Plan

# Seconds for which a process waits for files of other processes, and seconds between
# two checks whether they are there.
PARTS_S, _POLL_S = 600.0, 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one process needs to write its part of a checkpoint.

    Attributes:
      folder: folder of the checkpoint, which must exist.
      manifest: the manifest, without checksums.
      plan: the plan in use.
      arrays: path of an array in the state -> a copy of the array, which nothing but
        the checkpoint uses.
      process: number of this process.
      processes: number of processes.
      keep: number of checkpoints to keep; 0: all.
    """

    folder: pathlib.Path
    manifest: Manifest
    plan: Plan
    arrays: Mapping[str, jax.Array]
    process: int = 0
    processes: int = 1
    keep: int = 0

    def write(self, stopped: threading.Event) -> None:
        """Writes this process's part; returns when the checkpoint is complete.

        Raises:
          CheckpointError: the part cannot be written, or another process did not write
            its part in time.
        """
        entries = self.manifest.arrays
        with folders.telling(self.folder, "written"):
            write = store.write if self.processes == 1 else store.write_blocks
            write(
                self.folder / folders.ARRAYS,
                {entries[path].file: x for path, x in self.arrays.items() if x.size},
            )
            digests = {path: str(digest_of(x)) for path, x in self.arrays.items()}
            if self.processes > 1:
                self._put_part(digests)
            if self.process == 0:
                self._commit(digests, stopped)
                folders.prune(self.folder.parent, self.keep, self.folder)
        if self.process:
            _await(self.folder / MANIFEST, stopped)

    def _put_part(self, digests: Mapping[str, str]) -> None:
        folders.put(self._part(self.process), msgspec.json.encode(digests))

    def _part(self, process: int) -> pathlib.Path:
        return self.folder / f"part-{process}.json"

    def _commit(self, digests: Mapping[str, str], stopped: threading.Event) -> None:
        """Waits for the parts of all processes, and completes the checkpoint."""
        if self.processes > 1:
            digests = self._added_up(stopped)
        self.plan.save(self.folder / folders.PLAN)
        folders.commit(self.folder, with_digests(self.manifest, digests).encode())

    def _added_up(self, stopped: threading.Event) -> dict[str, str]:
        total = {path: Digest() for path in self.arrays}
        for process in range(self.processes):
            part = self._part(process)
            _await(part, stopped)
            for path, text in msgspec.json.decode(part.read_bytes()).items():
                total[path] += Digest.parse(text)
        for process in range(self.processes):
            self._part(process).unlink()
        return {path: str(digest) for path, digest in total.items()}


def with_digests(manifest: Manifest, digests: Mapping[str, str]) -> Manifest:
    """A copy of the manifest with the checksums of its arrays."""

    def fill(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {
            path: msgspec.structs.replace(entry, digest=digests[path])
            for path, entry in entries.items()
        }

    return msgspec.structs.replace(
        manifest,
        state=fill(manifest.state),
        codecs=fill(manifest.codecs),
        noise=fill(manifest.noise),
    )


def _await(path: pathlib.Path, stopped: threading.Event) -> None:
    """Waits for a file that another process writes.

    Raises:
      CheckpointError: the file did not appear in time, or the save was aborted.
    """
    end = time.monotonic() + PARTS_S
    while not path.exists():
        if stopped.wait(_POLL_S):
            raise CheckpointError(f"{path.parent}: the save was given up.")
        if time.monotonic() > end:
            raise CheckpointError(
                f"{path}: another process did not write it within {PARTS_S:.0f} s. All "
                "processes must see the same directory, and save the same steps."
            )


def wait_at_end(wait: Callable[[], None]) -> None:
    """Registers a function that waits for saves in progress when Python exits.

    Orbax writes in a thread pool. At exit Python closes thread pools before it waits
    for other threads, such as the one of a save. So the wait must come earlier. The
    hook for this, which Python runs before it closes the pools, has no public name
    (Python 3.11).
    """

    def end() -> None:
        try:
            wait()
        except CheckpointError as error:
            print(f"autopar: {error}", file=sys.stderr)

    register = getattr(threading, "_register_atexit", atexit.register)
    register(end)


class Background:
    """Writes a checkpoint in a thread; `wait` raises the thread's error."""

    def __init__(self, save: Save) -> None:
        """Starts the thread."""
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(save,), name="autopar-checkpoint"
        )
        self._thread.start()

    def _run(self, save: Save) -> None:
        try:
            save.write(self._stopped)
        except BaseException as error:  # `wait` raises it
            self._error = error

    def wait(self) -> None:
        """Waits until the checkpoint is written.

        Raises:
          CheckpointError: the checkpoint could not be written.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Stops the save's waits for other processes, because one of them is lost."""
        self._stopped.set()
        self._thread.join()
