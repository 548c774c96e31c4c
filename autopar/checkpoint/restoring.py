"""Reads the arrays of a checkpoint in the layouts of any plan, and checks them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
from jax.sharding import SingleDeviceSharding

from autopar.checkpoint import folders, store, trees
from autopar.checkpoint.manifest import ArrayEntry, Manifest, in_planes
from autopar.checkpoint.store import Digest, digest_of
from autopar.errors import CheckpointError
from autopar.runtime import placement
from autopar.runtime.agreement import exchange_data
from autopar.runtime.local.whole import is_codec_state
from autopar.runtime.world import World
from autopar_passes import jax_compat
from autopar_passes.jax_compat import dtype_of

# An error message lists at most this many differences.
_MOST = 4


def check_model(folder: pathlib.Path, manifest: Manifest, wanted: Any) -> None:
    """Checks that a checkpoint belongs to the trained model.

    Args:
      folder: folder of the checkpoint.
      manifest: manifest of the checkpoint.
      wanted: path -> `jax.ShapeDtypeStruct` of each array of the training state.

    Raises:
      CheckpointError: paths, shapes or dtypes differ.
    """
    have = manifest.state
    other = [
        path
        for path in sorted(have.keys() & wanted.keys())
        if have[path].text != _text(wanted[path])
    ]
    alone = (
        ("checkpoint", have.keys() - wanted),
        ("step", wanted.keys() - have.keys()),
    )
    told = [
        f"'{path}' is {have[path].text}, and the step has {_text(wanted[path])}"
        for path in other
    ]
    told = [first_items("; ".join, told)] if told else []
    for who, paths in alone:
        if names := [f"'{path}'" for path in sorted(paths)]:
            told.append(f"only the {who} has {first_items(', '.join, names)}")
    if not told:
        return
    if all(map(is_codec_state, (*other, *alone[0][1], *alone[1][1]))):
        raise CheckpointError(
            f"{folder}: a checkpoint of other layouts of the replicas: "
            f"{'; '.join(told)}. This state of a codec restores into equal layouts "
            "only. Plan the replicas as before, or train from the start with a codec "
            "without it: int4:server_feedback=false has none, and int4 has."
        )
    raise CheckpointError(
        f"{folder}: a checkpoint of another model ('{manifest.name}', step "
        f"{manifest.step}): {'; '.join(told)}."
    )


def first_items(join: Callable[[Sequence[str]], str], items: Sequence[str]) -> str:
    """A text with the first items and the number of the others."""
    more = f" and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return join(items[:_MOST]) + more


def _text(struct: Any) -> str:
    return f"{struct.dtype}[{','.join(map(str, struct.shape))}]"


def read_arrays(
    folder: pathlib.Path,
    entries: Mapping[str, ArrayEntry],
    shardings: Mapping[str, Any],
    dtypes: Mapping[str, Any],
    world: World,
    *,
    copies: bool = False,
) -> dict[str, Any]:
    """Reads arrays into their shards, and checks their checksums over all processes.

    Args:
      folder: folder of the checkpoint.
      entries: path -> entry of the array in the manifest.
      shardings: path -> sharding of the array.
      dtypes: path -> dtype of the array.
      world: the processes.
      copies: whether each process reads the whole arrays.

    Raises:
      CheckpointError: a file is missing or damaged, on any process.
    """
    bits, digests, said = _bits(folder, entries, shardings, dtypes)
    total = {path: Digest() for path in entries}
    data = msgspec.msgpack.encode((said, digests))
    for other in exchange_data(world, "reading a checkpoint", data):
        what, parts = msgspec.msgpack.decode(other)
        if what:
            raise CheckpointError(what)
        for path, text in parts.items():
            own = Digest.parse(text)
            total[path] = own if copies else total[path] + own
        if copies:
            check_digests(folder, entries, total)
    check_digests(folder, entries, total)
    return {
        path: _place(bits.pop(path), shardings[path], dtypes[path]) for path in entries
    }


def _bits(
    folder: pathlib.Path,
    entries: Mapping[str, ArrayEntry],
    shardings: Mapping[str, Any],
    dtypes: Mapping[str, Any],
) -> tuple[dict[str, jax.Array], dict[str, str], str]:
    """The elements of the arrays as numbers, this process's checksums of them, and
    errors as a text.
    """
    structs = {
        path: store.struct_of(entry.shape, dtypes[path], shardings[path])
        for path, entry in entries.items()
    }
    files = {path: entry.file for path, entry in entries.items()}
    try:
        bits = store.read(folder / folders.ARRAYS, structs, files, in_planes(entries))
    except CheckpointError as error:
        return {}, {}, str(error)
    return bits, {path: str(digest_of(x)) for path, x in bits.items()}, ""


def check_digests(
    folder: pathlib.Path, entries: Mapping[str, ArrayEntry], found: Mapping[str, Digest]
) -> None:
    """Compares the checksums of arrays with the saved checksums.

    Raises:
      CheckpointError: a checksum differs.
    """
    bad = [path for path, entry in entries.items() if str(found[path]) != entry.digest]
    if bad:
        names = first_items(", ".join, [f"'{path}'" for path in bad])
        raise CheckpointError(
            f"{folder}: damaged: the content of {names} is not what was saved."
        )


def _place(bits: jax.Array, sharding: Any, dtype: Any) -> Any:
    """Copies each shard from the first device that needs it to the others."""
    if not sharding.addressable_devices:
        return jax_compat.with_dtype(bits, dtype)
    return placement.place(jax_compat.with_dtype(bits, dtype), sharding)


def codec_state(
    folder: pathlib.Path, manifest: Manifest, mesh: Any, world: World
) -> Any:
    """Reads the codecs' state; None if the checkpoint has none.

    The next step reshards it for its plan (`autopar.runtime.gradients.codec_state`).

    Args:
      folder: folder of the checkpoint.
      manifest: its manifest.
      mesh: the mesh to shard the state over; None: every process reads the whole state.
      world: the processes.
    """
    return _beside(folder, manifest.codecs, manifest.codec_tree, mesh, world)


def noise_state(
    folder: pathlib.Path, manifest: Manifest, mesh: Any, world: World
) -> Any:
    """Reads the averages for the noise scale; None if the checkpoint has none.

    The arguments are those of `codec_state`.
    """
    return _beside(folder, manifest.noise, manifest.noise_tree, mesh, world)


def _beside(
    folder: pathlib.Path,
    entries: Mapping[str, ArrayEntry],
    tree: Any,
    mesh: Any,
    world: World,
) -> Any:
    """Reads a tree of arrays that is not a part of the training state; None if there is
    none.
    """
    if tree is None:
        return None
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    shardings = {
        path: here if mesh is None else placement.even_sharding(entry.shape, mesh)
        for path, entry in entries.items()
    }
    dtypes = {p: jax_compat.dtype_of(entry.dtype) for p, entry in entries.items()}
    arrays = read_arrays(folder, entries, shardings, dtypes, world, copies=mesh is None)
    return trees.join(tree, arrays)


def read_array(folder: pathlib.Path, held: Manifest, path: str) -> jax.Array:
    """Reads one array; random keys are read as integers.

    Raises:
      CheckpointError: the array is damaged.
    """
    entry = held.arrays[path]
    sharding = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    struct = store.struct_of(entry.shape, dtype_of(entry.dtype), sharding)
    arrays = folder / folders.ARRAYS
    coded = in_planes({path: entry})
    found = store.read(arrays, {path: struct}, {path: entry.file}, coded)[path]
    check_digests(folder, {path: entry}, {path: digest_of(found)})
    return found


def find_problems(folder: pathlib.Path, held: Manifest) -> list[str]:
    """Reads every array of a checkpoint, and returns a list of what is damaged."""
    found: list[str] = []
    try:
        folders.plan_of(folder, held)
    except CheckpointError as error:
        found.append(str(error))
    for path in held.arrays:
        try:
            read_array(folder, held, path)
        except CheckpointError as error:
            found.append(str(error))
    return found
