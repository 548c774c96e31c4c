"""Writes and reads files of ``torch.save`` without PyTorch.

A file of ``torch.save`` is a zip archive. ``archive/data.pkl`` is a pickle, and
``archive/data/<key>`` has the elements of a storage, which tensors can share. For each
tensor, the pickle calls ``torch._utils._rebuild_tensor_v2`` with a storage, an offset,
a shape and strides [1]. When this module reads a file, it never calls a function that
the file names. The module maps the few names that tensors need to functions of its own.
Any other name is an error.

[1] PyTorch, ``torch/serialization.py`` and ``torch/_utils.py`` (2.x).
"""

from __future__ import annotations

import io
import itertools
import math
import pathlib
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from autopar.errors import CheckpointError

# Name of PyTorch's class of storages -> dtype of the elements.
_STORAGES: dict[str, Any] = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")


def save(path: pathlib.Path, value: Any) -> None:
    """Writes a file that ``torch.load`` can read.

    Args:
      path: path of the file.
      value: dictionaries with names as keys that hold arrays, numbers and texts; arrays
        become tensors.

    Raises:
      CheckpointError: PyTorch has no tensors of an array's dtype.
    """
    writer = _PickleWriter()
    data = b"\x80\x02" + writer.encode(value) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        for key, array in enumerate(writer.storages):
            file.writestr(f"archive/data/{key}", array.tobytes())
        file.writestr("archive/version", "3\n")


class _PickleWriter:
    """Writes a pickle of protocol 2 that names PyTorch's functions, without importing
    them.
    """

    def __init__(self) -> None:
        self.storages: list[np.ndarray] = []

    def encode(self, value: Any) -> bytes:
        if isinstance(value, Mapping):
            items = [self.encode(x) for pair in value.items() for x in pair]
            return b"}(" + b"".join(items) + b"u"
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, (str, bool, int, float)) or value is None:
            # The slice removes the two bytes at the start that name the protocol, and
            # the byte at the end that stops a pickle.
            return pickle.dumps(value, protocol=2)[2:-1]
        raise CheckpointError(f"torch files hold no {type(value).__name__}.")

    def _tensor(self, array: np.ndarray) -> bytes:
        names = {dtype: name for name, dtype in _STORAGES.items()}
        if array.dtype not in names:
            raise CheckpointError(f"PyTorch has no tensors of {array.dtype}.")
        array = np.ascontiguousarray(array).reshape(array.shape)
        key = str(len(self.storages))
        self.storages.append(array)
        strides = [x // array.itemsize for x in array.strides]
        storage = self._tuple(
            self.encode("storage"),
            _global("torch", names[array.dtype]),
            *(self.encode(x) for x in (key, "cpu", array.size)),
        )
        arguments = self._tuple(
            storage + b"Q",  # makes the unpickler load a storage
            self.encode(0),
            self._tuple(*map(self.encode, array.shape)),
            self._tuple(*map(self.encode, strides)),
            self.encode(False),
            _global("collections", "OrderedDict") + b")R",
        )
        return _global(*_REBUILD) + arguments + b"R"

    def _tuple(self, *items: bytes) -> bytes:
        return b"(" + b"".join(items) + b"t"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def load(path: pathlib.Path) -> Any:
    """Reads a file of ``torch.save``; makes NumPy arrays of tensors.

    The function does not trust the content of the file. Before it makes an array, it
    checks that size, offset and strides lie within the storage.

    Raises:
      CheckpointError: the file cannot be read, or contains anything but tensors,
        numbers, texts and collections of them.
    """
    try:
        file = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a file of torch.save: {error}.") from error
    with file:
        try:
            return _read(file, path)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}.") from error
        # If a file is damaged or malicious, zipfile, zlib and pickle may raise any
        # exception.
        except Exception as error:
            raise CheckpointError(
                f"{path}: damaged, or no tensors: {_reason(error)}."
            ) from error


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _read(file: zipfile.ZipFile, path: pathlib.Path) -> Any:
    names = file.namelist()
    top = names[0].partition("/")[0] if names else ""
    order, data = f"{top}/byteorder", f"{top}/data.pkl"
    if data not in names:
        raise CheckpointError("not a file of torch.save: it has no data.pkl.")
    if any(x.compress_type != zipfile.ZIP_STORED for x in file.infolist()):
        raise CheckpointError("it is compressed, which torch.save never does.")
    size = path.stat().st_size
    if sum(x.file_size for x in file.infolist()) > size:
        raise CheckpointError("damaged: its parts overlap.")
    if order in names and file.read(order) != b"little":
        raise CheckpointError("its numbers are not little-endian.")
    program = file.read(data)
    count = _check(program)
    reader = _Reader(program, file, top, size)
    found = reader.load()
    _check_tree(found, [_DEEPEST, _REPEATS * count])
    return found


# Tensors may share the elements of a storage. The bytes of all tensors together may be
# at most this many times the bytes of the file.
_SHARED = 16
# How deep collections may be nested, and how often on average a collection may occur
# inside others.
_DEEPEST, _REPEATS = 100, 10
_STORES = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})


def _check(program: bytes) -> int:
    """Counts the operations of a pickle.

    Raises:
      CheckpointError: an operation would allocate more memory than a file of tensors
        needs.
    """
    count = 0
    for operation, argument, _ in pickletools.genops(program):
        count += 1
        if operation.name in _STORES and int(argument or 0) > len(program):
            raise CheckpointError("damaged: it keeps more values than it has.")
    return count


def _check_tree(value: Any, left: list[int]) -> None:
    """Checks that a value is not nested too deep and has not too many parts. ``left``
    holds how many levels and values are still allowed.
    """
    left[1] -= 1
    if min(left) < 0:
        raise CheckpointError("damaged: its collections hold each other, or too much.")
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = itertools.chain(value.keys(), value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif not isinstance(value, (np.ndarray, str, bytes, bool, int, float, type(None))):
        raise CheckpointError("holds more than tensors, numbers and texts.")
    left[0] -= 1
    for item in items:
        _check_tree(item, left)
    left[0] += 1


class _Name:
    """Stands for a name in a pickle; the pickle cannot change this object."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("damaged: it changes a function.")


class _StorageClass:
    """Stands for one of PyTorch's classes of storages; knows the dtype of the
    elements.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        raise CheckpointError("damaged: it changes a class of storages.")


class _Dictionary(dict[Any, Any]):
    """An ``OrderedDict`` that ignores attributes, such as those that PyTorch sets on
    dictionaries of models.
    """

    def __setstate__(self, state: Any) -> None:
        del state


class _Reader(pickle.Unpickler):
    """Reads a pickle in which only the names that tensors need may occur."""

    def __init__(
        self, program: bytes, file: zipfile.ZipFile, top: str, size: int
    ) -> None:
        super().__init__(io.BytesIO(program))
        self._file, self._top = file, top
        self._storages: dict[str, bytes] = {}
        self._left = _SHARED * size

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == _REBUILD:
            return _Name(self._rebuilt)
        if (module, name) == _PARAMETER:
            return _Name(lambda data, *_: data)
        if (module, name) == ("collections", "OrderedDict"):
            return _Name(_Dictionary)
        if module == "torch" and name in _STORAGES:
            return _StorageClass(_STORAGES[name])
        raise CheckpointError(f"holds '{module}.{name}', which is no plain tensor.")

    def persistent_load(self, pid: Any, /) -> np.ndarray:
        kind, held, key, _, count = pid
        if kind != "storage" or not isinstance(held, _StorageClass):
            raise CheckpointError(f"holds a '{str(kind)[:40]}'.")
        name = f"{self._top}/data/{key}"
        if name not in self._storages:
            self._storages[name] = self._file.read(name)
        data = self._storages[name]
        if _whole_number(count) * held.dtype.itemsize != len(data):
            raise CheckpointError(f"damaged: storage '{key}' has {len(data)} bytes.")
        return np.frombuffer(data, held.dtype)

    def _rebuilt(
        self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any
    ) -> np.ndarray:
        if not isinstance(storage, np.ndarray) or storage.ndim != 1:
            raise CheckpointError("damaged: a tensor without a storage.")
        shape = tuple(map(_whole_number, shape))
        strides = tuple(map(_whole_number, strides))
        if len(shape) != len(strides) or len(shape) > _MOST_DIMS:
            raise CheckpointError("damaged: a tensor's strides do not fit its shape.")
        if 0 in shape:
            return np.empty(shape, storage.dtype)
        last = _whole_number(offset) + sum(
            (n - 1) * s for n, s in zip(shape, strides, strict=True)
        )
        if last >= storage.size:
            raise CheckpointError("a tensor lies outside of its storage.")
        self._left -= math.prod(shape) * storage.itemsize
        if self._left < 0:
            raise CheckpointError(
                f"its tensors have more than {_SHARED} times the bytes of the file: "
                "they repeat numbers. Save copies of them (tensor.contiguous())."
            )
        steps = [s * storage.itemsize for s in strides]
        view = np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)
        return view.copy()


# The most dimensions of a tensor; NumPy allows 64.
_MOST_DIMS = 32


def _whole_number(value: Any) -> int:
    """Checks that a size, an offset or a stride is a valid whole number.

    Raises:
      CheckpointError: the value is not a valid whole number.
    """
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(
            "damaged: a size, an offset or a stride is negative or no number."
        )
    return value
