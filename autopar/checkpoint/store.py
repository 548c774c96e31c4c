"""Writes and reads the arrays of a checkpoint with Orbax, a folder for each.

Each block is written once, by the process that has it, and each device reads the blocks
that it needs. Nothing here waits for other processes: what they agree on is in
`autopar.checkpoint.saving`. Of several processes, each writes its blocks with
TensorStore, in the format of Orbax: Orbax itself takes no array that lies in one
process, as the stages of a pipeline do, and lets processes wait for each other by
counters that are lost when one of them is replaced.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import pathlib
import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from autopar.checkpoint.snapshot import without_replicas
from autopar.errors import CheckpointError
from autopar.runtime import placement
from autopar_passes import jax_compat

# Names that Orbax writes beside the arrays.
_TAKEN = ("_METADATA", "_sharding", "array_metadatas")
# Longer names are cut: a file system allows 255 bytes.
_LONGEST = 120
# Arrays that are read at a time.
_AT_A_TIME = 8
# How long reads that were begun may take to end after one has failed.
_SETTLE_S = 0.2


def file_names(paths: Iterable[str]) -> dict[str, str]:
    """Path of an array -> the name of its folder.

    >>> file_names(["state/w/kernel", "state/w.kernel"])
    {'state/w/kernel': 'state.w.kernel', 'state/w.kernel': 'state.w.kernel-2'}
    """
    out: dict[str, str] = {}
    taken = {name.lower() for name in _TAKEN}
    for path in paths:
        plain = re.sub(r"[^A-Za-z0-9_=-]+", ".", path).strip(".")[:_LONGEST] or "array"
        name, k = plain, 1
        while name.lower() in taken:
            k += 1
            name = f"{plain}-{k}"
        taken.add(name.lower())
        out[path] = name
    return out


def write(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes arrays by name, each in a folder; those without elements are left out.

    Damage to a file then has the name of its array on it.

    Raises:
      CheckpointError: they cannot be written, as on a full disk.
    """
    some = {name: x for name, x in arrays.items() if x.size}
    folder.mkdir(exist_ok=True)
    if not some:
        return
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    try:
        with _quiet():
            handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(some))
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the arrays cannot be written: {_reason(error)}"
        ) from error
    finally:
        handler.close()


def write_blocks(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes what this process has of arrays that lie on several processes.

    Args:
      folder: every process writes to the same.
      arrays: by name, without replicas (`autopar.checkpoint.snapshot`).

    Raises:
      CheckpointError: they cannot be written.
    """
    folder.mkdir(exist_ok=True)
    try:
        for name, array in arrays.items():
            if array.size and array.sharding.addressable_devices:
                _write_blocks(folder / name, array)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the arrays cannot be written: {_reason(error)}"
        ) from error


def _write_blocks(place: pathlib.Path, array: jax.Array) -> None:
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(place)},
        "dtype": str(array.dtype),
        "metadata": {
            "shape": list(array.shape),
            "chunks": list(array.sharding.shard_shape(array.shape)),
            "compressor": {"id": "zstd", "level": 1},
        },
    }
    # Whoever comes first creates it; for the others it is there, and the same.
    opened = tensorstore.open(spec, create=True, open=True).result()
    writes = [
        opened[shard.index].write(np.asarray(shard.data))
        for shard in array.addressable_shards
    ]
    for written in writes:
        written.result()


def read(
    folder: pathlib.Path, wanted: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, jax.Array]:
    """Reads arrays into their shards.

    Args:
      folder: where they were written.
      wanted: path -> ``ShapeDtypeStruct`` with a sharding. What lies on devices of
        other processes alone is not read here.
      files: path -> the name that it was written by.

    Raises:
      CheckpointError: a file is missing, cut or changed.
    """
    out: dict[str, jax.Array] = {}
    args: dict[str, Any] = {}
    for path, struct in wanted.items():
        if not struct.sharding.addressable_devices:
            out[path] = placement.absent(struct, struct.sharding)
        elif not struct.size:
            out[path] = _empty(struct)
        else:
            args[path] = ocp.ArrayRestoreArgs(
                sharding=_read_into(struct.sharding),
                global_shape=struct.shape,
                dtype=struct.dtype,
            )
    out.update(_read(folder, args, files))
    return {path: out[path] for path in wanted}


def _read(
    folder: pathlib.Path, args: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, jax.Array]:
    """Reads arrays side by side; those that fail do not stop the others.

    In a thread of its own, because the caller may run in an event loop.
    """
    if not args:
        return {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, _quiet():
        found = pool.submit(asyncio.run, _every(folder, args, files)).result()
    bad = {path: x for path, x in found.items() if isinstance(x, BaseException)}
    if bad:
        path, error = next(iter(bad.items()))
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{folder.parent}: damaged: '{path}'{more} cannot be read: {_reason(error)}"
        ) from error
    return found


async def _every(
    folder: pathlib.Path, args: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Path -> the array, or the error that reading it raised."""
    handler, turn = ocp.type_handlers.ArrayHandler(), asyncio.Semaphore(_AT_A_TIME)

    async def one(path: str, arg: Any) -> Any:
        info = ocp.type_handlers.ParamInfo(
            name=files[path],
            parent_dir=epath.Path(folder),
            is_ocdbt_checkpoint=False,
            use_zarr3=False,
        )
        async with turn:
            (read,) = await handler.deserialize([info], [arg])
        return read

    work = (one(path, arg) for path, arg in args.items())
    found = await asyncio.gather(*work, return_exceptions=True)
    if any(isinstance(x, BaseException) for x in found):
        # The other blocks of a damaged array are still being read.
        await asyncio.sleep(_SETTLE_S)
    return dict(zip(args, found, strict=True))


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keeps Orbax from printing errors that are raised to the caller as well."""

    def tell(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno > logging.ERROR

    logger = logging.getLogger("absl")
    logger.addFilter(tell)
    try:
        yield
    finally:
        logger.removeFilter(tell)


def _read_into(sharding: Any) -> Any:
    """Where blocks are read: in one process each once, whatever its replicas."""
    if sharding.is_fully_addressable and isinstance(
        sharding, jax.sharding.NamedSharding
    ):
        return without_replicas(sharding)
    return sharding


def _empty(struct: Any) -> jax.Array:
    return jax.make_array_from_callback(
        struct.shape,
        struct.sharding,
        lambda index: jax.numpy.zeros(struct.shape, struct.dtype)[index],
        dtype=struct.dtype,
    )


def struct_of(
    shape: tuple[int, ...], dtype: Any, sharding: Any
) -> jax.ShapeDtypeStruct:
    """The struct of the numbers of an array, which are its elements but for keys."""
    shape, dtype = jax_compat.bits_struct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _reason(error: BaseException) -> str:
    """What went wrong, without what tensorstore says of itself."""
    text = " ".join(str(error).split())
    text = re.sub(r" ?(See full TensorStore details|\[source locations=).*", "", text)
    return text[:300].rstrip(".: ") + "."
