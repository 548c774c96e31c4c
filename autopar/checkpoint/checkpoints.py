"""Saves checkpoints under any plan, and restores them under any plan."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import pathlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from autopar.checkpoint import folders, manifest, restoring, store, trees
from autopar.checkpoint.manifest import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    NewerSchema,
    PlanEntry,
)
from autopar.checkpoint.states import TrainStep, saved
from autopar.checkpoint.store import Digest, copy_arrays, digest_of, num_bytes
from autopar.errors import CheckpointError
from autopar.plans import Plan
from autopar.runtime import agreement, creation
from autopar.version import __version__
from autopar_errors import check_path
from autopar_passes import jax_compat

# Writes a checkpoint in the background, by all processes together.
#
# Each process writes its own blocks of the arrays, and a part file with their
# checksums. Process 0 waits for the part files of all processes and then completes
# the checkpoint. The processes communicate only through files in the folder, to which
# all must have access. The processes use no collectives for a save, so steps can run
# at the same time.


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
            coded = manifest.in_planes(entries)
            some = {path: x for path, x in self.arrays.items() if x.size}
            write = store.write if self.processes == 1 else store.write_blocks
            place = self.folder / folders.ARRAYS
            write(
                place, {entries[p].file: x for p, x in some.items() if p not in coded}
            )
            in_planes = {entries[p].file: x for p, x in some.items() if p in coded}
            store.write_planes(place, in_planes)
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
    for other threads, such as the thread of a save. So the wait must come earlier. The
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

    def wait(self, check: Callable[[], None] | None = None) -> None:
        """Waits until the checkpoint is written.

        Args:
          check: called repeatedly during the wait; raises an error to end the wait.

        Raises:
          CheckpointError: the checkpoint could not be written.
        """
        while check is not None and self._thread.is_alive():
            check()
            self._thread.join(_POLL_S)
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Stops the save's waits for other processes, because one of them is lost."""
        self._stopped.set()
        self._thread.join()


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A restored training state, and the values that were saved with it.

    Attributes:
      state: the training state, in the layouts of the step's plan.
      step: number of completed steps.
      position: number of samples consumed.
      folder: folder of the checkpoint.
      damaged: for each newer checkpoint that was skipped, what is wrong with it.
      notes: plain data that was saved with the state; None: there was none.
    """

    state: Any
    step: int
    position: int
    folder: pathlib.Path
    damaged: tuple[str, ...] = ()
    notes: Any = None


class Checkpoints:
    """The checkpoints of a directory."""

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int = 3,
        coding: Literal["planes"] | None = None,
    ) -> None:
        """Makes the object without reading or writing files.

        Args:
          directory: directory with a folder for each checkpoint. Only autopar may write
            into it, and all processes must have access to it.
          keep: number of checkpoints to keep; 0: all.
          coding: how floating-point arrays are stored. ``"planes"`` stores the bytes of
            their exponents side by side, which needs less room and restores the same
            bits. Orbax cannot read such arrays, so None (the default) stores them as
            they are. A restore reads both.

        Raises:
          CheckpointError: ``keep`` is negative, or ``coding`` is unknown.
        """
        check_path("Checkpoints", directory)
        if coding not in (None, "planes"):
            raise CheckpointError(
                f"Checkpoints: coding={coding!r}: expected 'planes' or None."
            )
        if keep < 0:
            raise CheckpointError(f"Checkpoints: keep must be 0 or more, not {keep}.")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self.coding: Literal["planes"] | None = coding
        self._running: Background | None = None
        self._waits_at_end = False

    def __enter__(self) -> Checkpoints:
        """Returns the checkpoints; the end of the block waits for saves in progress."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for saves in progress, and releases the lock, so that other runs may
        save into the directory.
        """
        try:
            self.wait()
        finally:
            self.release()

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in the order of saving."""
        return [folders.step_of(x) for x in folders.complete(self.directory)]

    def latest(self) -> int | None:
        """The step of the last complete checkpoint; None if there is none."""
        return steps[-1] if (steps := self.steps()) else None

    def notes(self) -> Any:
        """The plain data saved with the last readable checkpoint; None if there was
        none.

        Raises:
          CheckpointError: a newer version of autopar wrote the checkpoint.
        """
        for folder in folders.complete(self.directory)[::-1]:
            try:
                return manifest.read(folder).notes
            except NewerSchema:
                raise
            except CheckpointError:
                continue
        return None

    def incomplete(self) -> list[pathlib.Path]:
        """The folders of unfinished saves; the next save removes these folders."""
        return folders.incomplete(self.directory)

    def save(
        self,
        train_step: TrainStep,
        state: Any,
        *,
        step: int,
        position: int = 0,
        notes: Any = None,
    ) -> None:
        """Saves a training state in the background, with the codecs' state and the
        averages of the noise scale.

        `save` copies the state before it returns, so the next step may donate the
        state's arrays. If another save is in progress, `save` first waits for it.

        Args:
          train_step: the step, which must have been planned.
          state: the state that the step returned last: one pytree, or a tuple with
            several leading arguments of the step. Of local steps, the `LocalState`:
            anchors, momenta and residuals are saved with all replicas.
          step: number of completed steps.
          position: number of samples consumed.
          notes: plain data that JSON can hold, saved with the state.

        Raises:
          CheckpointError: the directory cannot be written, another run saves there, or
            the previous save failed.
          PlanError: the step has not been planned, or the state belongs to another
            step.
        """
        world = train_step.world
        with agreement.tell_errors(world, "saving a checkpoint"):
            self.wait()
            if step < 0 or position < 0:
                raise CheckpointError(
                    f"save: step={step}, position={position}: both count from 0."
                )
            arrays, made = _arrays_to_save(train_step, state, step, position, notes)
            made = manifest.with_coding(made, self.coding)
            alone = world.process_count == 1
            copies = copy_arrays(arrays, alone=alone)
            folder = self.directory / folders.folder_name(step, time.time_ns())
            if world.process_index == 0:
                with folders.telling(self.directory, "written"):
                    folders.claim(self.directory)
                folders.begin(folder)
        if not self._waits_at_end:
            wait_at_end(self.wait)
            self._waits_at_end = True
        name = folder.name.encode()
        told = agreement.exchange_data(world, "saving a checkpoint", name)
        self._running = Background(
            Save(
                folder=self.directory / told[0].decode(),
                manifest=made,
                plan=train_step.plan,
                arrays=copies,
                process=world.process_index,
                processes=world.process_count,
                keep=self.keep,
            )
        )

    def claim(self, train_step: TrainStep) -> None:
        """Locks the directory for this run already before the first `save`.

        A directory that cannot be written raises no error here; `save` raises it later.

        Args:
          train_step: the step; all of its processes must call this method.

        Raises:
          CheckpointError: another run saves there.
        """
        world = train_step.world
        with (
            agreement.tell_errors(world, "opening the checkpoints"),
            contextlib.suppress(OSError),
        ):
            if world.process_index == 0:
                folders.claim(self.directory)
        agreement.exchange_data(world, "opening the checkpoints")

    def wait_for_other_world(self, train_step: TrainStep, patience_s: float) -> None:
        """Waits while processes that left this run save their last state here.

        Args:
          train_step: the step; all of its processes must call this method.
          patience_s: a save counts as aborted if nothing has been written for this many
            seconds.
        """
        world = train_step.world
        with agreement.tell_errors(world, "waiting for a checkpoint"):
            if world.process_index == 0:
                last, since = None, time.monotonic()
                while found := folders.progress_of_save(self.directory):
                    if found != last:
                        last, since = found, time.monotonic()
                    elif time.monotonic() - since > patience_s:
                        break
                    time.sleep(0.1)
        agreement.exchange_data(world, "waiting for a checkpoint")

    def release(self) -> None:
        """Releases the lock, so that other runs may save into the directory."""
        folders.release(self.directory)

    def wait(self, check: Callable[[], None] | None = None) -> None:
        """Waits until the last save is complete.

        Args:
          check: called repeatedly during the wait; raises an error to end the wait. The
            save goes on then, until `abandon` or another `wait`.

        Raises:
          CheckpointError: the save failed; earlier checkpoints are unchanged.
        """
        if (running := self._running) is None:
            return
        try:
            running.wait(check)
        finally:
            if running.is_over:
                self._running = None

    def abandon(self) -> None:
        """Stops a save that waits for a process that is lost."""
        running, self._running = self._running, None
        if running is not None:
            running.abandon()

    def restore(
        self,
        train_step: TrainStep,
        create_state: Callable[..., Any],
        *args: Any,
        batch: Any = None,
        others: Sequence[Any] | Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> Restored:
        """Restores a state in the layouts of a step's plan.

        The method creates no initial state, and loads only its shards to each device.
        The method takes the same arguments as `ParallelStep.init`.

        Args:
          train_step: the step. If ``batch`` or ``others`` is given, this method plans
            it.
          create_state: function that makes the state. JAX only traces this function, to
            get the shapes of the state.
          args: arguments of ``create_state``.
          batch: an example batch, arrays or ``ShapeDtypeStruct``s.
          others: all arguments of the step after the state, if ``batch`` is not given.
          step: number of completed steps of the checkpoint to restore. None: the last
            undamaged checkpoint; damaged ones are skipped with a warning. If a save is
            in progress, this method waits for it.

        Raises:
          CheckpointError: there is no checkpoint, or the checkpoint is damaged or
            belongs to another model.
          PlanError: the step has not been planned.
        """
        creation.check_creation(train_step.__name__, create_state, batch, others)
        wanted = saved(train_step).created(create_state, args, batch, others)
        return self._restore_first(train_step, *wanted, step)

    def restore_into(
        self,
        train_step: TrainStep,
        state: Any,
        *,
        step: int | None = None,
    ) -> Restored:
        """Restores a state with the structure of an existing state; see `restore`.

        Args:
          train_step: the step, which must have been planned.
          state: the existing state, of arrays or `jax.ShapeDtypeStruct`. Flax NNX
            objects are updated in place.
          step: step of the checkpoint, as for `restore`.
        """
        return self._restore_first(train_step, *saved(train_step).like(state), step)

    def _restore_first(
        self,
        train_step: TrainStep,
        wanted: dict[str, Any],
        made: Callable[[list[Any]], Any],
        step: int | None,
    ) -> Restored:
        """Restores the first checkpoint in `_candidates` that is not damaged."""
        damaged: list[str] = []
        try:
            self.wait()
        except CheckpointError as error:  # earlier checkpoints stay as they are
            damaged.append(str(error))
        for folder in self._candidates(step):
            try:
                held, arrays, codecs, noise = _read(folder, train_step, wanted)
            except _Damaged as error:
                if step is not None:
                    raise CheckpointError(self._advice(str(error), folder)) from error
                damaged.append(str(error))
                continue
            saved(train_step).hold(codecs, noise)
            for text in damaged:
                warnings.warn(f"{text} Restored {folder} instead.", stacklevel=3)
            return Restored(
                made(arrays),
                held.step,
                held.position,
                folder,
                tuple(damaged),
                held.notes,
            )
        raise CheckpointError(" ".join(damaged) or self._none())

    def _candidates(self, step: int | None) -> list[pathlib.Path]:
        """The checkpoints that may be restored, in the order to try them."""
        found = folders.complete(self.directory)[::-1]
        if step is None:
            return found
        chosen = [x for x in found if folders.step_of(x) == step]
        if not chosen:
            raise CheckpointError(f"{self._none(f' of step {step}')}")
        return chosen[:1]

    def _none(self, what: str = "") -> str:
        found, begun = self.steps(), self.incomplete()
        have = f"; there are those of steps {', '.join(map(str, found))}"
        unfinished = ", ".join(x.name for x in begun)
        ended = f"; these saves did not end: {unfinished}" if begun else ""
        return f"{self.directory}: no checkpoint{what}{have if found else ''}{ended}."

    def _advice(self, text: str, folder: pathlib.Path) -> str:
        others = [x.name for x in folders.complete(self.directory) if x != folder]
        if not others:
            return f"{text} There is no other."
        return f"{text} There are others: {', '.join(others)}."


class _Damaged(Exception):
    """A checkpoint cannot be read, but an earlier one may be readable."""


def _arrays_to_save(
    train_step: TrainStep,
    state: Any,
    step: int,
    position: int,
    notes: Any,
) -> tuple[dict[str, Any], Manifest]:
    """The arrays to save, and the manifest to which checksums will be added."""
    own = saved(train_step)
    arrays, beside = own.arrays(state), own.beside()
    if train_step.world.process_count > 1:
        beside = jax.tree.map(_without_own_device, beside)
    codecs, tree = beside[0], None
    named_codecs: dict[str, Any] = {}
    if codecs is not None:
        named_codecs, tree = trees.split(codecs, "codecs")
    noise, noise_tree = beside[1], None
    named_noise: dict[str, Any] = {}
    if noise is not None:
        named_noise, noise_tree = trees.split(noise, "noise")
    files = store.file_names([*arrays, *named_codecs, *named_noise])
    plan = train_step.plan
    made = Manifest(
        schema=manifest.PLAIN_SCHEMA,
        version=__version__,
        step=step,
        position=position,
        created=time.time(),
        name=train_step.__name__,
        state={path: _entry(x, files[path]) for path, x in arrays.items()},
        codecs={path: _entry(x, files[path]) for path, x in named_codecs.items()},
        codec_tree=tree,
        noise={path: _entry(x, files[path]) for path, x in named_noise.items()},
        noise_tree=noise_tree,
        notes=notes,
        plan=PlanEntry(
            digest=plan.digest,
            fingerprint=plan.fingerprint,
            structure=plan.structure,
            text=repr(plan),
        ),
    )
    return {**arrays, **named_codecs, **named_noise}, made


def _without_own_device(value: Any) -> Any:
    """A counter or average of which each process has a copy, as a NumPy array.

    With several pipeline stages, each process has a copy of these values on its own
    device. If the copies were saved as shards, the checksum would count each of them.
    As plain data, only process 0 writes the value.
    """
    own = isinstance(value, jax.Array) and len(value.sharding.device_set) == 1
    return np.asarray(value) if own else value


def _entry(array: Any, file: str) -> ArrayEntry:
    kind = jax.typeof(array)
    bits = jax.ShapeDtypeStruct(*jax_compat.bits_struct(tuple(kind.shape), kind.dtype))
    size = num_bytes(bits)
    return ArrayEntry(
        shape=tuple(kind.shape),
        dtype=str(kind.dtype),
        file=file if size else "",
        digest="",
        num_bytes=size,
    )


def _read(
    folder: pathlib.Path,
    train_step: TrainStep,
    wanted: dict[str, Any],
) -> tuple[Manifest, list[Any], Any, Any]:
    """Reads from a checkpoint the manifest, the arrays of the state, the codecs' state
    and the noise averages.

    Raises:
      _Damaged: the checkpoint cannot be read.
      CheckpointError: the checkpoint belongs to another model.
    """
    world = train_step.world
    try:
        held = manifest.read(folder)
    except NewerSchema:
        raise  # to restore an older one would silently lose steps
    except CheckpointError as error:
        raise _Damaged(str(error)) from error
    own = saved(train_step)
    reading = own.read(wanted, {p: x.shape for p, x in held.state.items()})
    read = reading.wanted
    kept = {p: x for p, x in held.state.items() if p not in reading.left}
    restoring.check_model(folder, msgspec.structs.replace(held, state=kept), read)
    shardings = {path: struct.sharding for path, struct in read.items()}
    dtypes = {path: struct.dtype for path, struct in read.items()}
    entries = {path: held.state[path] for path in read}
    mesh = own.mesh()
    try:
        arrays = restoring.read_arrays(folder, entries, shardings, dtypes, world)
        codecs = restoring.codec_state(folder, held, mesh, world)
        noise = restoring.noise_state(folder, held, mesh, world)
    except CheckpointError as error:
        raise _Damaged(str(error)) from error
    return held, list(reading.made(arrays).values()), codecs, noise
