"""Converts checkpoints to formats of other libraries, and DeepSpeed's atoms back."""

from __future__ import annotations

import json
import pathlib
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from autopar.checkpoint import atoms, folders, manifest, restoring
from autopar.checkpoint.checkpoints import Save
from autopar.checkpoint.manifest import Manifest
from autopar.errors import CheckpointError

# Functions that write parameters as a safetensors file, which other libraries can read.
#
# The file consists of the length of a header, the header as JSON, and the elements of
# all arrays [1]. `export` writes the file array by array, so that only one array is in
# memory at a time.
#
# [1] https://github.com/huggingface/safetensors, "Format".

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
    """Writes the parameters of a checkpoint to a safetensors file.

    Args:
      folder: folder of the checkpoint.
      held: manifest of the checkpoint.
      target: the file.

    Returns:
      The names of the parameters.

    Raises:
      CheckpointError: the checkpoint is damaged, safetensors lacks the dtype of a
        parameter, or the file already exists or cannot be written.
    """
    found = folders.parameter_paths(folder, held)
    header = _header(held, found)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8 bytes
    part = target.with_name(target.name + ".part")
    with folders.telling(target, "written"):
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for one in found:
                file.write(
                    np.asarray(restoring.read_array(folder, held, one.path)).tobytes()
                )
        part.replace(target)
    return [one.name for one in found]


def _header(held: Manifest, found: list[folders.Parameter]) -> dict[str, Any]:
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


FORMATS = ("safetensors", "atoms", "checkpoint")


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    to: str,
    *,
    step: int | None = None,
    like: pathlib.Path | None = None,
    called: Mapping[str, str] | None = None,
    position: int | None = None,
) -> list[str]:
    """Converts a checkpoint to another format, or atoms to a checkpoint.

    Args:
      source: a checkpoint or a directory of checkpoints; with ``to="checkpoint"``, a
        directory of atoms.
      target: file or directory to write, which must not exist yet.
      to: ``safetensors`` (parameters), ``atoms`` (of DeepSpeed's universal
        checkpoint) or ``checkpoint``.
      step: if ``source`` is a directory of checkpoints, which one to convert; None: the
        last.
      like: with ``to="checkpoint"``, a checkpoint of the same model. Everything except
        parameters, moments and numbers of steps is taken from it.
      called: name of a parameter -> name of its atom, for names that differ.
      position: number of samples that the steps of the atoms consumed; None: as many
        per step as in ``like``.

    Returns:
      The names of the parameters that were written.

    Raises:
      CheckpointError: an argument is wrong, or a file cannot be read or written.
    """
    if to not in FORMATS:
        raise CheckpointError(f"to='{to}': expected one of {', '.join(FORMATS)}.")
    if to == "checkpoint":
        return _import(source, target, like, called, position)
    if target.exists():
        raise CheckpointError(f"{target}: is there already; say another place.")
    folder = folders.find_checkpoint(source, step)
    held = manifest.read(folder)
    write = export if to == "safetensors" else atoms.export
    return write(folder, held, target)


def _import(
    source: pathlib.Path,
    target: pathlib.Path,
    like: pathlib.Path | None,
    called: Mapping[str, str] | None,
    position: int | None,
) -> list[str]:
    """Makes a checkpoint from atoms, in a directory of checkpoints."""
    if like is None:
        raise CheckpointError(
            "converting atoms needs a checkpoint of the model: give it with --like. It "
            "says what the state holds besides parameters and moments."
        )
    folder = folders.find_checkpoint(like)
    held = manifest.read(folder)
    new, step = atoms.read(source, folder, held, called)
    state = {
        path: jax.numpy.asarray(new[path])
        if path in new
        else restoring.read_array(folder, held, path)
        for path in held.state
    }
    plan = folders.plan_of(folder, held)
    made = _with_step(held, step, position)
    place = target / folders.folder_name(step, time.time_ns())
    folders.begin(place)
    save = Save(folder=place, manifest=made, plan=plan, arrays=state)
    save.write(threading.Event())
    return [one.name for one in folders.parameter_paths(folder, held)]


def _with_step(held: Manifest, step: int, position: int | None) -> Manifest:
    """A copy of a manifest for another step. The copy lacks the codecs' state, which
    belongs to the old step.
    """
    if position is None:
        per_step = held.position / held.step if held.step else 0
        position = held.position if step == held.step else round(step * per_step)
    return msgspec.structs.replace(
        held,
        step=step,
        position=position,
        created=time.time(),
        codecs={},
        codec_tree=None,
    )
