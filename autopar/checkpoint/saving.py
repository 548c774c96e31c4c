"""Writes one checkpoint, in the background and with all processes.

Each process writes its own blocks, and their checksums into a separate part file.
Process 0 waits for all part files and then completes the checkpoint. The processes
communicate only through the folder, to which all of them must have access. No process
calls another process while steps run.
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

# Seconds for which a process waits for the part files of the others, and seconds
# between two checks.
PARTS_S, _POLL_S = 600.0, 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The part of a checkpoint that one process writes.

    Attributes:
      folder: folder of the checkpoint, which must exist.
      manifest: manifest without checksums.
      plan: the plan in use.
      arrays: path -> copy of the array, which nothing else changes.
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
          CheckpointError: the part cannot be written, or another process wrote no part.
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
        """Completes the checkpoint once all parts exist."""
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
    """The manifest with the checksums of its arrays."""

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
      CheckpointError: the file does not appear in time, or the save is aborted.
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
    """Makes a program wait at its end for saves in progress.

    Orbax writes in a thread pool, and Python closes thread pools before it ends the
    threads that use them. The hook that Python runs before closing the pools has no
    public name (3.11).
    """

    def end() -> None:
        try:
            wait()
        except CheckpointError as error:
            print(f"autopar: {error}", file=sys.stderr)

    register = getattr(threading, "_register_atexit", atexit.register)
    register(end)


class Background:
    """A thread that writes one checkpoint; `wait` raises the error of the thread."""

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
        except BaseException as error:  # raised where the program waits for it
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
        """Stops waiting for other processes, because a process is lost."""
        self._stopped.set()
        self._thread.join()
