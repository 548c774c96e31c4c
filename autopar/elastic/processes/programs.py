"""Compiled programs of worlds, kept in the folder of a run.

The program that the first process of a world compiles runs in all of them: only one
compiles, and a world that was there before, or that was prepared, compiles nothing.
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
    """A compiled program in the place of the jitted function it was made of."""

    def __init__(self, compiled: Any, jitted: Any) -> None:
        """Takes both; the function is still there to lower."""
        self._compiled, self._jitted = compiled, jitted

    def __call__(self, *arguments: Any) -> Any:
        """Runs it on arguments in their places."""
        return self._compiled(*arguments)

    def trace(self, *arguments: Any) -> Any:
        """Traces the function."""
        return self._jitted.trace(*arguments)

    def clear_cache(self) -> None:
        """Frees compiled code."""
        self._compiled = self._jitted
        self._jitted.clear_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyProgram:
    """A program that is ready.

    Attributes:
      function: to call; None: compiled when it is called.
      how: ``loaded`` from the folder, or ``compiled``.
      seconds: that took.
    """

    function: LoadedProgram | None
    how: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPrograms:
    """The programs in a folder.

    Attributes:
      folder: what is read from it is run, so its files are sealed.
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
          world: its processes; all call this.
          donate: whether the program consumes the carried state.

        Raises:
          PlanError: another process cannot compile it.
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
        """Compiles a program for a world that is not there; False: it was kept."""
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
        """A program as it is kept, for other hosts; None: there is none."""
        known = re.fullmatch(r"[0-9a-f]{32}", name)
        return self._files.read(name) if known else None

    def _fetch_program(self, name: str, planned: PlannedStep) -> Any:
        """The program of the first process, kept from now on; None: it has none."""
        data = self.fetch(name)
        if data is None:
            return None
        self._files.write(name, data)
        return self._read(name, planned)

    def _read(self, name: str, planned: PlannedStep) -> Any:
        """The program of a file; None where there is none that can be used."""
        data = self._files.read(name)
        if data is None:
            return None
        devices = planned.mesh.devices.flat[0].client.devices()
        try:
            blob = pickle.loads(data)  # sealed by this user
            return serialize_executable.deserialize_and_load(
                *blob, backend=devices[0].client, execution_devices=devices
            )
        except (ValueError, RuntimeError, pickle.UnpicklingError) as error:
            self._files.reject(name, str(error).partition("\n")[0])
            return None

    def _write(self, name: str, compiled: Any) -> None:
        """Writes a program whole, or nothing where JAX cannot save it."""
        try:
            data = pickle.dumps(serialize_executable.serialize(compiled))
        except (ValueError, RuntimeError):  # it has what cannot be saved
            return
        self._files.write(name, data)


def _name(planned: PlannedStep, donate: bool) -> str:
    """A name made of all that a program depends on."""
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
    """A tree with numpy arrays in the place of JAX's; keys stay keys."""
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
    """A key whose words are on the host."""

    def __init__(self, words: np.ndarray, kind: str) -> None:
        self.words, self.kind = words, kind


def from_host(tree: Any) -> Any:
    """The tree that `hosted` was given, with keys on the backend there is now."""
    return jax.tree.map(
        lambda x: (
            jax.random.wrap_key_data(jnp.asarray(x.words), impl=x.kind)
            if isinstance(x, _Key)
            else x
        ),
        tree,
        is_leaf=lambda x: isinstance(x, _Key),
    )
