"""Compiled programs of worlds, kept in the folder of a run.

The first process of a world compiles a program, and all processes of the world run it.
A world that existed before, or that was prepared, compiles nothing.
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
    """A compiled program that replaces its jitted function."""

    def __init__(self, compiled: Any, jitted: Any) -> None:
        """Takes the compiled program and its function, which can still be lowered."""
        self._compiled, self._jitted = compiled, jitted

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on arguments with the right shardings."""
        return self._compiled(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Traces the function."""
        return self._jitted.trace(*arguments)

    def clear_cache(self) -> None:
        """Frees the compiled program; later calls compile the function again."""
        self._compiled = self._jitted
        self._jitted.clear_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that is ready to run.

    Attributes:
      function: the program; None: the step is compiled when it is called.
      how: ``loaded`` from the folder, or ``compiled``.
      seconds: time of loading or compiling.
    """

    function: LoadedProgram | None
    how: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPrograms:
    """The compiled programs in a folder.

    Attributes:
      folder: path of the folder. Its files are sealed, because their contents are
        executed.
      fetch: asks the first process of the world for a program that this host lacks.
    """

    folder: pathlib.Path
    fetch: Callable[[str], bytes | None] = lambda _: None

    @property
    def _files(self) -> SealedFolder:
        return SealedFolder(self.folder, "program")

    def ready(
        self, planned: PlannedStep, world: World, *, donate: bool
    ) -> ReadyProgram:
        """The compiled program of a planned step, in every process of a world.

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
        """Compiles for a world that does not exist; False: the program was stored."""
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
        """A stored program as bytes, for other hosts; None: it is not stored."""
        known = re.fullmatch(r"[0-9a-f]{32}", name)
        return self._files.read(name) if known else None

    def _fetch_program(self, name: str, planned: PlannedStep) -> Any:
        """Fetches and stores the program of the first process; None: it has none."""
        data = self.fetch(name)
        if data is None:
            return None
        self._files.write(name, data)
        return self._read(name, planned)

    def _read(self, name: str, planned: PlannedStep) -> Any:
        """The program of a file; None: there is no usable file."""
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
        """Writes a whole program, or nothing if JAX cannot serialize it."""
        try:
            data = pickle.dumps(serialize_executable.serialize(compiled))
        except (ValueError, RuntimeError):  # a part of it cannot be serialized
            return
        self._files.write(name, data)


def _name(planned: PlannedStep, donate: bool) -> str:
    """A name that depends on everything that a program depends on."""
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
    """A random key whose words are on the host."""

    def __init__(self, words: np.ndarray, kind: str) -> None:
        self.words, self.kind = words, kind


def from_host(tree: Any) -> Any:
    """The tree that `on_host` was given, with random keys on the current backend."""
    return jax.tree.map(
        lambda x: (
            jax.random.wrap_key_data(jnp.asarray(x.words), impl=x.kind)
            if isinstance(x, _Key)
            else x
        ),
        tree,
        is_leaf=lambda x: isinstance(x, _Key),
    )
