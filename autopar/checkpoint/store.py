"""Writes and reads the arrays of a checkpoint with Orbax, a folder for each.

Orbax writes each block once, by the process that has it, and reads the blocks that a
device needs. Nothing here waits for other processes: what they agree on is in
`autopar.checkpoint.saving`.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from autopar.checkpoint.snapshot import without_replicas
from autopar.errors import CheckpointError
from autopar.runtime import placement
from autopar_passes import jax_compat

# Names that Orbax writes beside the arrays.
_TAKEN = ("_METADATA", "_sharding", "array_metadatas")
# Longer names are cut: a file system allows 255 bytes.
_LONGEST = 120


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


def _handler() -> ocp.PyTreeCheckpointHandler:
    """One folder an array: damage to a file then has the array's name on it."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)


def write(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes arrays by name; those without elements are left out.

    Raises:
      CheckpointError: they cannot be written, as on a full disk.
    """
    some = {name: x for name, x in arrays.items() if x.size}
    folder.mkdir(exist_ok=True)
    if not some:
        return
    handler = _handler()
    try:
        handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(some))
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the arrays cannot be written: {_reason(error)}"
        ) from error
    finally:
        handler.close()


def read(folder: pathlib.Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays by name into their shards.

    Args:
      folder: where they were written.
      wanted: name -> ``ShapeDtypeStruct`` with a sharding. What lies on devices of
        other processes alone is not read here.

    Raises:
      CheckpointError: a file is missing, cut or changed.
    """
    out: dict[str, jax.Array] = {}
    args: dict[str, Any] = {}
    for name, struct in wanted.items():
        if not struct.sharding.addressable_devices:
            out[name] = placement.absent(struct, struct.sharding)
        elif not struct.size:
            out[name] = _empty(struct)
        else:
            args[name] = ocp.ArrayRestoreArgs(
                sharding=_read_into(struct.sharding),
                global_shape=struct.shape,
                dtype=struct.dtype,
            )
    out.update(_read(folder, args))
    return {name: out[name] for name in wanted}


def _read(folder: pathlib.Path, args: Mapping[str, Any]) -> dict[str, jax.Array]:
    if not args:
        return {}
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: the arrays are missing.")
    handler = _handler()
    try:
        return handler.restore(
            epath.Path(folder),
            args=ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=dict(args)
            ),
        )
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the arrays cannot be read: {_reason(error)}"
        ) from error
    finally:
        handler.close()


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
    text = re.sub(r"\[(source locations|tensorstore_spec)=.*", "", text).strip()
    return text[:300].rstrip(".: ") + "."
