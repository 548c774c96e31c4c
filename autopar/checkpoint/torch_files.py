"""Writes and reads files of ``torch.save`` without PyTorch: plain tensors in a zip.

A file is a zip with a pickle in ``archive/data.pkl`` and the numbers of each storage in
``archive/data/<key>``. The pickle calls ``torch._utils._rebuild_tensor_v2`` with a
storage, an offset, a shape and strides [1]. Reading calls no function that a file
names: the few names that tensors need stand for functions of this module, and any other
name is an error.

[1] PyTorch, ``torch/serialization.py`` and ``torch/_utils.py`` (2.x).
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from autopar.errors import CheckpointError

# Name of a class of storages -> dtype of its elements.
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
    """Writes what ``torch.load`` reads.

    Args:
      path: of the file.
      value: arrays, which become tensors, in dictionaries with names as keys; numbers
        and texts.

    Raises:
      CheckpointError: PyTorch has no such tensor.
    """
    writer = _Writer()
    data = b"\x80\x02" + writer.encoded(value) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        for key, array in enumerate(writer.storages):
            file.writestr(f"archive/data/{key}", array.tobytes())
        file.writestr("archive/version", "3\n")


class _Writer:
    """Encodes values as a pickle of protocol 2, without importing what it names."""

    def __init__(self) -> None:
        self.storages: list[np.ndarray] = []

    def encoded(self, value: Any) -> bytes:
        if isinstance(value, Mapping):
            items = [self.encoded(x) for pair in value.items() for x in pair]
            return b"}(" + b"".join(items) + b"u"
        if isinstance(value, np.ndarray):
            return self._tensor(value)
        if isinstance(value, (str, bool, int, float)) or value is None:
            # Without the two bytes of the protocol and the one that ends it.
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
            self.encoded("storage"),
            _global("torch", names[array.dtype]),
            *(self.encoded(x) for x in (key, "cpu", array.size)),
        )
        arguments = self._tuple(
            storage + b"Q",  # the unpickler makes a storage of the tuple
            self.encoded(0),
            self._tuple(*map(self.encoded, array.shape)),
            self._tuple(*map(self.encoded, strides)),
            self.encoded(False),
            _global("collections", "OrderedDict") + b")R",
        )
        return _global(*_REBUILD) + arguments + b"R"

    def _tuple(self, *items: bytes) -> bytes:
        return b"(" + b"".join(items) + b"t"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def load(path: pathlib.Path) -> Any:
    """Reads what ``torch.save`` wrote: tensors become arrays.

    Raises:
      CheckpointError: the file cannot be read, or holds more than tensors, numbers,
        texts and collections of them.
    """
    try:
        with zipfile.ZipFile(path) as file:
            top = file.namelist()[0].partition("/")[0]
            order = f"{top}/byteorder"
            if order in file.namelist() and file.read(order) != b"little":
                raise CheckpointError(f"{path}: its numbers are not little-endian.")
            return _Reader(file, top).load()
    except CheckpointError:
        raise
    except (OSError, zipfile.BadZipFile, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a file of torch.save: {error}.") from error
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError) as error:
        raise CheckpointError(f"{path}: damaged, or no tensors: {error}.") from error
    except struct.error as error:
        raise CheckpointError(f"{path}: damaged: {error}.") from error


class _Reader(pickle.Unpickler):
    """Reads a pickle of tensors, and knows no other names."""

    def __init__(self, file: zipfile.ZipFile, top: str) -> None:
        super().__init__(io.BytesIO(file.read(f"{top}/data.pkl")))
        self._file, self._top = file, top

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == _REBUILD:
            return _rebuilt
        if (module, name) == _PARAMETER:
            return _parameter
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise CheckpointError(
            f"{self._file.filename}: holds '{module}.{name}', which is no plain tensor."
        )

    def persistent_load(self, pid: Any, /) -> np.ndarray:
        kind, dtype, key, _, _ = pid
        if kind != "storage":
            raise CheckpointError(f"{self._file.filename}: holds a '{kind}'.")
        data = self._file.read(f"{self._top}/data/{key}")
        return np.frombuffer(data, dtype)


def _rebuilt(
    storage: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int],
    *_: Any,
) -> np.ndarray:  # fmt: skip
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if 0 not in shape and not 0 <= last < storage.size:
        raise CheckpointError("a tensor lies outside of its storage.")
    steps = [s * storage.itemsize for s in strides]
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)
    return view.copy()


def _parameter(data: np.ndarray, *_: Any) -> np.ndarray:
    return data
