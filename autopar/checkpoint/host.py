"""Arrays of a checkpoint on the host, one at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.checkpoint import folders, names, restoring, store
from autopar.checkpoint.digests import digest_of
from autopar.checkpoint.manifest import Manifest
from autopar.errors import CheckpointError
from autopar_passes.jax_compat import dtype_of


def read(folder: pathlib.Path, held: Manifest, path: str) -> jax.Array:
    """The numbers of one array; those of keys are whole numbers.

    Raises:
      CheckpointError: it is damaged.
    """
    entry = held.arrays[path]
    sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    struct = store.struct_of(entry.shape, dtype_of(entry.dtype), sharding)
    arrays = folder / folders.ARRAYS
    found = store.read(arrays, {path: struct}, {path: entry.file})[path]
    restoring.check_digests(folder, {path: entry}, {path: digest_of(found)})
    return found


def values(
    folder: pathlib.Path, held: Manifest, paths: Iterable[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Path and numbers of arrays, each read when it is asked for."""
    for path in paths:
        yield path, np.asarray(read(folder, held, path))


def problems(folder: pathlib.Path, held: Manifest) -> list[str]:
    """What is wrong with a checkpoint: every array is read; nothing: it is whole."""
    found: list[str] = []
    try:
        names.plan_of(folder, held)
    except CheckpointError as error:
        found.append(str(error))
    for path in held.arrays:
        try:
            read(folder, held, path)
        except CheckpointError as error:
            found.append(str(error))
    return found
