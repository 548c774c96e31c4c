"""Stores the compiled programs of a run in the run's folder.

A world is a set of processes that train together. The first process of a world compiles
a program, and all its processes run it. If a world of the same form trained before, or
was prepared for (`autopar.elastic.processes.preparing`), nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import pickle
import re
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

from autopar.planner.codecs.adjusted import program_plan
from autopar.runtime import agreement
from autopar.runtime.agreement import content_digest
from autopar.runtime.planned import PlannedStep
from autopar.runtime.world import World
from autopar.sealed_files import SealedFolder
from autopar.steps import program_text
from autopar.version import __version__
from autopar_passes import jax_compat, jax_processes


class LoadedProgram:
    """A compiled program that can be called like the jitted function it came from."""

    def __init__(self, compiled: Any, jitted: Any) -> None:
        """Stores the compiled program, and the jitted function for `trace`."""
        self._compiled, self._jitted = compiled, jitted

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program; arguments must have the shardings it was compiled for."""
        return self._compiled(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Traces the jitted function."""
        return self._jitted.trace(*arguments)

    def clear_cache(self) -> None:
        """Frees the compiled program; later calls compile the function again."""
        self._compiled = self._jitted
        self._jitted.clear_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that is ready to run.

    Attributes:
      function: the program; None if JAX compiles the step at its first call instead.
      how: ``loaded`` if the program came from the folder, or ``compiled``.
      seconds: time of loading or compiling.
    """

    function: LoadedProgram | None
    how: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPrograms:
    """The compiled programs in a folder.

    Attributes:
      folder: path of the folder. Its files carry an authentication code with this
        user's key (`autopar.sealed_files`), because they are executed.
      fetch: called with the name of a program that this host lacks; gets it from the
        first process of the world.
    """

    folder: pathlib.Path
    fetch: Callable[[str], bytes | None] = lambda _: None

    @property
    def _files(self) -> SealedFolder:
        return SealedFolder(self.folder, "program")

    def ready(
        self, planned: PlannedStep, world: World, *, donate: bool
    ) -> ReadyProgram:
        """Loads or compiles the program of a planned step, in every process of a world.

        Args:
          planned: the step.
          world: the processes of the world; all of them call this method.
          donate: whether the program consumes (donates) the training state.

        Raises:
          PlanError: another process cannot compile the program.
        """
        begin = time.perf_counter()
        if planned.pipeline is not None:
            return ReadyProgram(None, "compiled", 0.0)
        name = _name(planned, donate)
        found, how = None, "loaded"
        with agreement.tell_errors(world, "compiling"):
            if world.process_index == 0:
                found, how = self._first(name, planned)
        if world.process_count > 1:
            agreement.exchange_data(world, "compiling")
            with agreement.tell_errors(world, "loading the program"):
                if world.process_index:
                    found = self._read(name, planned) or self._fetch_program(
                        name, planned
                    )
                    if found is None:
                        found, how = planned.lower().compile(), "compiled"
            agreement.exchange_data(world, "loading the program")
        made = LoadedProgram(found, planned.function)
        return ReadyProgram(made, how, time.perf_counter() - begin)

    def prepare(self, planned: PlannedStep, *, donate: bool) -> bool:
        """Compiles for an imitated world; False if the program was already stored."""
        if planned.pipeline is not None:
            return False
        name = _name(planned, donate)
        if self._files.read(name) is not None:
            return False
        self._write(name, jax_processes.compile_whole(planned.lower()))
        return True

    def _first(self, name: str, planned: PlannedStep) -> tuple[Any, str]:
        found = self._read(name, planned)
        if found is not None:
            return found, "loaded"
        found = jax_processes.compile_whole(planned.lower())
        self._write(name, found)
        return found, "compiled"

    def content(self, name: str) -> bytes | None:
        """The bytes of a stored program, for other hosts; None if it is not stored."""
        known = re.fullmatch(r"[0-9a-f]{32}", name)
        return self._files.read(name) if known else None

    def _fetch_program(self, name: str, planned: PlannedStep) -> Any:
        """Fetches a program from the first process and stores it, or returns None."""
        data = self.fetch(name)
        if data is None:
            return None
        self._files.write(name, data)
        return self._read(name, planned)

    def _read(self, name: str, planned: PlannedStep) -> Any:
        """Loads a program from its file; None if there is no usable file."""
        data = self._files.read(name)
        if data is None:
            return None
        devices = planned.mesh.devices.flat[0].client.devices()
        try:
            blob = pickle.loads(data)  # this user has sealed the data
            return serialize_executable.deserialize_and_load(
                *blob, backend=devices[0].client, execution_devices=devices
            )
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            self._files.reject(name, str(error).partition("\n")[0])
            return None

    def _write(self, name: str, compiled: Any) -> None:
        """Writes a program to a file; does nothing if JAX cannot serialize it."""
        try:
            data = pickle.dumps(serialize_executable.serialize(compiled))
        except (ValueError, RuntimeError):  # a part of it cannot be serialized
            return
        self._files.write(name, data)


def _name(planned: PlannedStep, donate: bool) -> str:
    """The program's name: a digest of everything that the program depends on."""
    sums = planned.sums
    how = None if sums is None else (sums.fallback, sums.signals)
    devices = [(d.id, d.process_index) for d in planned.mesh.devices.flat]
    parts = (
        __version__,
        jax.__version__,
        metadata.version("jaxlib"),
        os.environ.get("XLA_FLAGS", ""),
        program_text.identity(planned.analysis),
        content_digest(program_plan(planned.plan)),
        repr(devices),
        repr(donate),
        repr(planned.guard),
        repr(how),
        repr(None if planned.noise is None else planned.noise.options),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def on_host(tree: Any) -> Any:
    """A tree with numpy arrays instead of JAX arrays; random keys stay keys."""
    return jax.tree.map(_host, tree)


def _host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax_compat.is_extended(leaf.dtype):
        return _Key(
            np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
        )
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_shards[0].data if leaf.ndim else leaf)
    return leaf


class _Key:
    """A JAX random key whose integers are in host memory."""

    def __init__(self, words: np.ndarray, kind: str) -> None:
        self.words, self.kind = words, kind


def from_host(tree: Any) -> Any:
    """Reverses `on_host`: makes JAX random keys again, on the current backend."""
    return jax.tree.map(
        lambda x: (
            jax.random.wrap_key_data(jnp.asarray(x.words), impl=x.kind)
            if isinstance(x, _Key)
            else x
        ),
        tree,
        is_leaf=lambda x: isinstance(x, _Key),
    )
