"""Writes and reads the arrays of a checkpoint with Orbax, each in a folder of its own.

Each block of an array is written once, by a process that has it. When arrays are read,
each device gets the blocks that it needs. This module never waits for other processes;
`autopar.checkpoint.checkpoints` does. With several processes, each process writes its
blocks by TensorStore, in Orbax's format. Orbax itself is not used then, for two
reasons. Orbax does not accept arrays that exist only on one process, such as those of a
pipeline stage. Orbax also synchronises processes by counters, which are lost when a
process is replaced.

The checksum of an array does not depend on its sharding.

The checksum consists of two sums over the words ``w_i`` of the array, with one word for
each element::

    total    = sum_i w_i        mod 2^64
    weighted = sum_i i * w_i    mod 2^64

where ``i`` is the index of the element in the whole array, in row-major order. These
are Fletcher's two sums [1], for words of 8 to 64 bits. The sums of an array are the
sums of its blocks added up. So each block can be summed on its own device, and no array
has to be gathered. If a word changes, so does ``total``. If two words are swapped,
``weighted`` changes.

[1] J. Fletcher, "An arithmetic checksum for serial transmissions", IEEE Transactions on
Communications 30 (1982).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import pathlib
import re
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from autopar.checkpoint import planes
from autopar.errors import CheckpointError
from autopar.runtime import placement
from autopar_errors import InputError
from autopar_passes import jax_compat

# If the accelerator has this JAX memory kind, copies are put into host memory.
_HOST_MEMORY = "pinned_host"


def copy_arrays(
    arrays: Mapping[str, Any], *, alone: bool = True
) -> dict[str, jax.Array]:
    """Copies arrays; of replicated elements only one copy is made.

    The copies run asynchronously. Work that is started later on the same devices, such
    as a step that donates the arrays, runs after the copies.

    Args:
      arrays: path -> array. Random keys are copied as integers.
      alone: whether there is only one process.

    Raises:
      CheckpointError: a step has donated an array; or there are several processes, and
        an array exists only on one of them.
    """
    return {path: _copy(path, array, alone) for path, array in arrays.items()}


def _copy(path: str, array: Any, alone: bool) -> jax.Array:
    if not isinstance(array, jax.Array):
        return jax.device_put(np.asarray(array, jax.typeof(array).dtype))
    if array.is_deleted():
        raise CheckpointError(
            f"'{path}' was consumed by a step. Save the state that the last step "
            "returned."
        )
    bits = jax_compat.key_bits(array)
    if not isinstance(bits.sharding, NamedSharding):
        if alone:
            return jax.device_put(bits, bits.sharding, may_alias=False)
        raise CheckpointError(
            f"'{path}' lies on one process alone. Save the state that a step or init "
            "returned."
        )
    return _copied_once(bits)


def _copied_once(bits: jax.Array) -> jax.Array:
    """Copies each shard once, on the first of the devices that have it."""
    target = host_memory(without_replicas(bits.sharding))
    chosen = target.addressable_devices
    parts = [
        jax.device_put(
            shard.data,
            SingleDeviceSharding(shard.device, memory_kind=target.memory_kind),
            may_alias=False,
        )
        for shard in bits.addressable_shards
        if shard.device in chosen
    ]
    return jax.make_array_from_single_device_arrays(
        bits.shape, target, parts, dtype=bits.dtype
    )


def without_replicas(sharding: Any) -> NamedSharding:
    """The same sharding without replicas: only on the first devices along mesh axes
    that split no dim.
    """
    mesh, spec = sharding.mesh, sharding.spec
    used = {a for axes in spec if axes is not None for a in _names(axes)}
    keep = [name for name in mesh.axis_names if name in used]
    where = tuple(slice(None) if n in used else 0 for n in mesh.axis_names)
    devices = np.asarray(mesh.devices[where], dtype=object)
    if not keep:
        keep, devices = list(mesh.axis_names[:1]), devices.reshape(1)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    smaller = Mesh(devices, tuple(keep), axis_types=tuple(types[n] for n in keep))
    return NamedSharding(smaller, spec)


def _names(axes: Any) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in host memory, if the devices have memory of their own."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu":
        return sharding
    kinds = {memory.kind for memory in device.addressable_memories()}
    return (
        sharding.with_memory_kind(_HOST_MEMORY) if _HOST_MEMORY in kinds else sharding
    )


def num_bytes(array: Any) -> int:
    """Bytes of all elements of an array."""
    return math.prod(array.shape) * array.dtype.itemsize


# Names of files that Orbax writes beside the folders of arrays.
_TAKEN = ("_METADATA", "_sharding", "array_metadatas")
# Longer names of folders are cut, because a file system allows only 255 bytes.
_LONGEST = 120
# Number of arrays that are read at the same time.
_AT_A_TIME = 8
# After a read has failed, other reads of the array get this many seconds to end.
_SETTLE_S = 0.2


def file_names(paths: Iterable[str]) -> dict[str, str]:
    """Path of an array -> name of its folder, different for each array.

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
    """Writes each array in a folder of its own; does not write arrays without elements.

    With a folder for each array, the path of a damaged file names the array that is
    damaged.

    Raises:
      CheckpointError: the arrays cannot be written, for example on a full disk.
    """
    some = {name: x for name, x in arrays.items() if x.size}
    folder.mkdir(exist_ok=True)
    if not some:
        return
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    try:
        with _telling_writes(folder), _quiet():
            handler.save(epath.Path(folder), args=ocp.args.PyTreeSave(some))
    finally:
        handler.close()


@contextlib.contextmanager
def _telling_writes(folder: pathlib.Path) -> Generator[None]:
    """Raises errors of writing arrays as `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{folder}: the arrays cannot be written: {_reason(error)}"
        ) from error


def write_blocks(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes this process's blocks of arrays that are sharded over several processes.

    Args:
      folder: folder of the checkpoint, to which all processes write.
      arrays: name -> array without replicas (`copy_arrays`).

    Raises:
      CheckpointError: the blocks cannot be written.
    """
    folder.mkdir(exist_ok=True)
    with _telling_writes(folder):
        for name, array in arrays.items():
            if array.size and array.sharding.addressable_devices:
                _write_blocks(folder / name, array)


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
    # The first process to get here creates the array; the others open it.
    opened = tensorstore.open(spec, create=True, open=True).result()
    writes = [
        opened[shard.index].write(np.asarray(shard.data))
        for shard in array.addressable_shards
    ]
    for written in writes:
        written.result()


def write_planes(folder: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes this process's blocks of arrays as planes of bytes
    (`autopar.checkpoint.planes`). Arguments and errors are those of `write_blocks`.
    """
    if not arrays:
        return
    folder.mkdir(exist_ok=True)
    with _telling_writes(folder):
        planes.write(folder, arrays)


def read(
    folder: pathlib.Path,
    wanted: Mapping[str, Any],
    files: Mapping[str, str],
    in_planes: Container[str] = (),
) -> dict[str, jax.Array]:
    """Reads arrays into their shards.

    Args:
      folder: folder to which the arrays were written.
      wanted: path -> ``ShapeDtypeStruct`` with a sharding. Arrays of which this
        process's devices need nothing are not read.
      files: path -> name of the array's folder.
      in_planes: paths of the arrays that `write_planes` wrote.

    Raises:
      CheckpointError: a file is missing, truncated or changed.
    """
    out: dict[str, jax.Array] = {}
    args: dict[str, Any] = {}
    structs: dict[str, Any] = {}
    for path, struct in wanted.items():
        if not struct.sharding.addressable_devices:
            out[path] = placement.absent(struct, struct.sharding)
        elif not struct.size:
            out[path] = _empty(struct)
        elif path in in_planes:
            structs[path] = struct_of(
                struct.shape, struct.dtype, _read_into(struct.sharding)
            )
        else:
            args[path] = ocp.ArrayRestoreArgs(
                sharding=_read_into(struct.sharding),
                global_shape=struct.shape,
                dtype=struct.dtype,
            )
    out.update(_read(folder, args, structs, files))
    return {path: out[path] for path in wanted}


def _read(
    folder: pathlib.Path,
    args: Mapping[str, Any],
    structs: Mapping[str, Any],
    files: Mapping[str, str],
) -> dict[str, jax.Array]:
    """Reads arrays in parallel; if one cannot be read, the others are read
    nevertheless.

    The reads run in a separate thread with its own event loop, because the caller may
    already be inside an event loop.
    """
    if not args and not structs:
        return {}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, _quiet():
        found = pool.submit(asyncio.run, _every(folder, args, structs, files)).result()
    bad = {path: x for path, x in found.items() if isinstance(x, BaseException)}
    if bad:
        path, error = next(iter(bad.items()))
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{folder.parent}: damaged: '{path}'{more} cannot be read: {_reason(error)}"
        ) from error
    return found


async def _every(
    folder: pathlib.Path,
    args: Mapping[str, Any],
    structs: Mapping[str, Any],
    files: Mapping[str, str],
) -> dict[str, Any]:
    """Path -> the array, or the error of reading it."""
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

    async def one_in_planes(path: str) -> Any:
        async with turn:
            return await planes.read(folder / files[path], structs[path])

    work = [one(path, arg) for path, arg in args.items()]
    work += [one_in_planes(path) for path in structs]
    found = await asyncio.gather(*work, return_exceptions=True)
    if any(isinstance(x, BaseException) for x in found):
        # Reads of other blocks of the damaged array may still be running.
        await asyncio.sleep(_SETTLE_S)
    return dict(zip((*args, *structs), found, strict=True))


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keeps Orbax from logging errors, because the caller gets them as exceptions."""

    def tell(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname or record.levelno > logging.ERROR

    logger = logging.getLogger("absl")
    logger.addFilter(tell)
    try:
        yield
    finally:
        logger.removeFilter(tell)


def _read_into(sharding: Any) -> Any:
    """The sharding in which arrays are read. With a single process, this sharding has
    no replicas, so that each block is read only once.
    """
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
    """Shape and dtype of an array as numbers: of its elements or, for random keys, of
    the integers that they consist of.
    """
    shape, dtype = jax_compat.bits_struct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _reason(error: BaseException) -> str:
    """The message of an error, without TensorStore's internal details."""
    text = " ".join(str(error).split())
    text = re.sub(r" ?(See full TensorStore details|\[source locations=).*", "", text)
    return text[:300].rstrip(".: ") + "."


_MASK = (1 << 64) - 1
# A sum goes over this many elements at a time. The code reads these elements twice, and
# they stay in the processor's cache between the two reads.
_CHUNK = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """The checksum of an array, or of a part of it.

    >>> Digest(3, 5) + Digest(1, 1)
    Digest(total=4, weighted=6)
    >>> str(Digest(4, 6))
    '00000000000000040000000000000006'
    """

    total: int = 0
    weighted: int = 0

    def __add__(self, other: Digest) -> Digest:
        """The checksum of two parts of an array together."""
        return Digest(
            (self.total + other.total) & _MASK,
            (self.weighted + other.weighted) & _MASK,
        )

    def __str__(self) -> str:
        """Returns 32 hex digits."""
        return f"{self.total:016x}{self.weighted:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parses the result of ``str``.

        Raises:
          InputError: the text is not a checksum.
        """
        if len(text) != 32:
            raise InputError(f"Digest: expected 32 hex digits, got '{text}'.")
        return cls(int(text[:16], 16), int(text[16:], 16))


def digest_of(array: Any) -> Digest:
    """The checksum of the part of an array that this process has; replicas count once.

    Args:
      array: a ``jax.Array`` that does not hold random keys. The checksums of all
        processes add up to the checksum of the whole array.
    """
    found = Digest()
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begin = [s.start or 0 for s in shard.index]
            found += block_digest(np.asarray(shard.data), begin, array.shape)
    return found


def block_digest(
    block: np.ndarray, begin: Sequence[int], shape: Sequence[int]
) -> Digest:
    """The checksum of a block of an array.

    Args:
      block: the elements.
      begin: for each dim, index of the block's first element in the whole array.
      shape: shape of the whole array.
    """
    if not block.size:
        return Digest()
    words, wide = _words(block)
    columns = words.shape[-1] if words.ndim else 1
    flat = words.reshape(-1, columns)
    rows = _row_places(block.shape, begin, shape, wide)
    first = (begin[-1] if len(begin) else 0) * wide
    places = np.arange(first, first + columns, dtype=np.uint64)
    found = Digest()
    step = max(1, _CHUNK // columns)
    for k in range(0, len(flat), step):
        found += _sum_rows(flat[k : k + step], rows[k : k + step], places)
    return found


def _sum_rows(words: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Digest:
    """The checksum of some rows. The index of a word is ``rows`` at its row plus
    ``columns`` at its column.
    """
    by_row = words.sum(axis=1, dtype=np.uint64)
    by_column = words.sum(axis=0, dtype=np.uint64)
    weighted = int(np.dot(by_row, rows)) + int(np.dot(by_column, columns))
    return Digest(int(by_row.sum(dtype=np.uint64)), weighted & _MASK)


def _row_places(
    block: Sequence[int], begin: Sequence[int], shape: Sequence[int], wide: int
) -> np.ndarray:
    """For each row of a block, the index of its first element in the whole array."""
    places = np.zeros((), np.uint64)
    for k in range(len(block) - 1):
        stride = math.prod(shape[k + 1 :]) * wide
        along = np.arange(begin[k], begin[k] + block[k], dtype=np.uint64)
        places = places[..., None] + along * np.uint64(stride)
    return places.reshape(-1)


def _words(block: np.ndarray) -> tuple[np.ndarray, int]:
    """The elements as unsigned integers (words), and the number of words of each
    element.
    """
    block = np.ascontiguousarray(block)
    size = block.dtype.itemsize
    if size <= 8:
        words = block.view(f"u{size}")
        bits = _bits(block.dtype)
        return (words & np.uint8((1 << bits) - 1) if bits < 8 else words), 1
    wide = size // 8
    pairs = block.reshape(-1).view("u8")
    return pairs.reshape(*block.shape[:-1], -1), wide


def _bits(dtype: np.dtype) -> int:
    """Number of bits of an element. If it is less than 8, the other bits of the
    element's byte are undefined.
    """
    if dtype == np.bool_ or dtype.itemsize > 1:
        return 8 * dtype.itemsize
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(kind(dtype).bits)
