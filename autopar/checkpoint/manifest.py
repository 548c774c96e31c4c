"""The manifest of a checkpoint, which lists its content and marks it as complete."""

from __future__ import annotations

import hashlib
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from autopar.checkpoint import planes
from autopar.errors import CheckpointError
from autopar_passes import jax_compat

# The version of the manifest's format. The version rises by one whenever the meaning of
# a field changes. A manifest is written with the lowest version that describes it, so
# that earlier versions of autopar read what they can.
SCHEMA = 2
PLAIN_SCHEMA = 1  # no array is coded
MANIFEST = "manifest.json"


class NewerSchema(CheckpointError):
    """The checkpoint is complete, but a newer version of autopar wrote it, and this
    version cannot read it.
    """


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One array of a checkpoint.

    Attributes:
      shape: shape of the whole array.
      dtype: name of the dtype, such as ``bfloat16`` or ``key<fry>``.
      file: name of the array's folder within the folder ``arrays``; '' for an array
        without elements.
      digest: checksum of the array (`autopar.checkpoint.store`).
      num_bytes: bytes of the elements, before compression.
      coding: how the elements are stored: '' as they are, ``planes`` as planes of bytes
        (`autopar.checkpoint.planes`).
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    digest: str
    num_bytes: int
    coding: Literal["", "planes"] = ""

    @property
    def text(self) -> str:
        """Dtype and shape as one word: ``float32[64,32]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class PlanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that was in use when a checkpoint was saved.

    Attributes:
      digest: `Plan.digest`.
      fingerprint: fingerprint of the planned step, including its shapes.
      structure: fingerprint of the planned step, independent of the batch size.
      text: the plan in one line.
    """

    digest: str
    fingerprint: str
    structure: str
    text: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint contains. Only the field ``plan`` depends on the plan.

    Attributes:
      schema: version of this format.
      version: version of autopar that wrote the checkpoint.
      step: number of completed steps.
      position: number of samples consumed.
      created: time of the save, in seconds since 1970.
      name: name of the user's step function.
      state: path -> entry of an array of the training state.
      codecs: name -> entry of an array of the codecs' state.
      codec_tree: the structure of the codecs' state; None if no gradient was
        compressed.
      noise: name -> entry of an array of the averages for the noise scale.
      noise_tree: the structure of these averages; None if noise was not measured.
      notes: plain data of the training loop; None if there was none.
      plan: summary of the plan in use. The complete plan is in the file ``plan.json``.
      checksum: checksum of all other fields.
    """

    schema: int
    version: str
    step: int
    position: int
    created: float
    name: str
    state: dict[str, ArrayEntry]
    codecs: dict[str, ArrayEntry]
    codec_tree: Any
    plan: PlanEntry
    noise: dict[str, ArrayEntry] = {}
    noise_tree: Any = None
    notes: Any = None
    checksum: str = ""

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """Entries of all arrays: of the training state, of the codecs and of the noise
        scale.
        """
        return {**self.state, **self.codecs, **self.noise}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, before compression."""
        return sum(entry.num_bytes for entry in self.arrays.values())

    def encode(self) -> bytes:
        """Returns the manifest as JSON text with its checksum."""
        stamped = msgspec.structs.replace(self, checksum=_checksum(self))
        return msgspec.json.format(msgspec.json.encode(stamped), indent=1) + b"\n"


def in_planes(entries: Mapping[str, ArrayEntry]) -> frozenset[str]:
    """The paths of the arrays that are stored as planes of bytes."""
    return frozenset(path for path, x in entries.items() if x.coding == "planes")


def with_coding(manifest: Manifest, coding: Literal["planes"] | None) -> Manifest:
    """A copy of the manifest of arrays that are stored by a coding where it pays."""
    if coding is None:
        return manifest

    def coded(entries: Mapping[str, ArrayEntry]) -> dict[str, ArrayEntry]:
        return {
            path: msgspec.structs.replace(entry, coding=coding)
            if planes.pays(jax_compat.dtype_of(entry.dtype), entry.num_bytes)
            else entry
            for path, entry in entries.items()
        }

    made = msgspec.structs.replace(
        manifest,
        state=coded(manifest.state),
        codecs=coded(manifest.codecs),
        noise=coded(manifest.noise),
    )
    schema = SCHEMA if in_planes(made.arrays) else manifest.schema
    return msgspec.structs.replace(made, schema=schema)


class _ManifestHeader(msgspec.Struct):
    schema: int


# The decoders are made when this module is imported, because msgspec crashes if two
# threads analyse a type at the same time.
_HEADER = msgspec.json.Decoder(_ManifestHeader)
_MANIFEST = msgspec.json.Decoder(Manifest)


def read(folder: pathlib.Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
      CheckpointError: the manifest cannot be read, has changed since it was written, or
        has a newer schema.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no checkpoint, or one whose save did not end: it has no "
            f"{MANIFEST}."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    return decode(data, str(path))


def decode(data: bytes, name: str) -> Manifest:
    """Parses the result of `Manifest.encode`.

    Args:
      data: JSON text.
      name: how error messages name the manifest.

    Raises:
      CheckpointError: see `read`.
    """
    try:
        schema = _HEADER.decode(data).schema
        if schema > SCHEMA:
            raise NewerSchema(
                f"{name}: has schema {schema}, this autopar reads schemas up to "
                f"{SCHEMA}. Restore it with the version of autopar that wrote it, or a "
                "newer one."
            )
        found = _MANIFEST.decode(data)
        checksum = _checksum(found)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CheckpointError(
            f"{name}: not the manifest of a checkpoint, or a damaged one: "
            f"{str(error).rstrip('.')}."
        ) from error
    if found.checksum != checksum:
        raise CheckpointError(
            f"{name}: damaged: its checksum is not that of its content."
        )
    for path, entry in found.arrays.items():
        _check_entry(name, path, entry)
    return found


def _check_entry(name: str, path: str, entry: ArrayEntry) -> None:
    """Checks those values of an entry that are later used as sizes or as file paths."""
    if re.fullmatch(r"[A-Za-z0-9_=.-]*", entry.file) is None or entry.file in (
        ".",
        "..",
    ):
        raise CheckpointError(f"{name}: damaged: '{path}' has a file {entry.file!r}.")
    if any(n < 0 for n in entry.shape) or math.prod(entry.shape) >= 1 << 62:
        raise CheckpointError(f"{name}: damaged: '{path}' has the shape {entry.shape}.")


def _checksum(manifest: Manifest) -> str:
    plain = msgspec.to_builtins(msgspec.structs.replace(manifest, checksum=""))
    for name in ("noise", "noise_tree", "notes"):  # earlier versions had none
        if not plain[name]:
            del plain[name]
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:32]
