"""Parameters as a safetensors file, which other libraries read.

A file is the length of a header, the header as JSON, and the numbers [1]. It is written
here array by array: no more than one is in memory.

[1] https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import numpy as np

from autopar.checkpoint import folders, host, names
from autopar.checkpoint.manifest import Manifest
from autopar.errors import CheckpointError

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def export(folder: pathlib.Path, held: Manifest, target: pathlib.Path) -> list[str]:
    """Writes the parameters of a checkpoint.

    Args:
      folder: of the checkpoint.
      held: its manifest.
      target: the file.

    Returns:
      The names of the parameters.

    Raises:
      CheckpointError: the checkpoint is damaged, the format has no such dtype, or the
        file is there already or cannot be written.
    """
    found = names.parameters(folder, held)
    header = _header(held, found)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    part = target.with_name(target.name + ".part")
    with folders.telling(target, "written"):
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for one in found:
                file.write(np.asarray(host.read(folder, held, one.path)).tobytes())
        part.replace(target)
    return [one.name for one in found]


def _header(held: Manifest, found: list[names.Parameter]) -> dict[str, Any]:
    metadata = {"format": "jax", "step": str(held.step)}
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for one in found:
        entry = held.state[one.path]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"safetensors has no {entry.dtype}: '{one.path}'.")
        header[one.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.num_bytes],
        }
        begin += entry.num_bytes
    return header
