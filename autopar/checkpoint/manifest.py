"""The manifest of a checkpoint: what is in it, and whether it is whole."""

from __future__ import annotations

import hashlib
import math
import pathlib
import re
from typing import Any

import msgspec

from autopar.errors import CheckpointError

# Raised by one whenever a field changes its meaning.
SCHEMA = 1
MANIFEST = "manifest.json"


class NewerSchema(CheckpointError):
    """A newer version of autopar wrote a checkpoint: it is whole, and stays unread."""


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One array of a checkpoint.

    Attributes:
      shape: of the whole array.
      dtype: its name, such as ``bfloat16`` or ``key<fry>``.
      file: name of its folder of ``arrays``; '' for an array without elements.
      digest: its checksum (`autopar.checkpoint.store`).
      num_bytes: of its elements, before compression.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    digest: str
    num_bytes: int

    @property
    def text(self) -> str:
        """Dtype and shape in a word: ``float32[64,32]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class PlanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that a checkpoint was saved under.

    Attributes:
      digest: `Plan.digest`.
      fingerprint: of the step that the plan is for, with its shapes.
      structure: of the step without its batch.
      text: the plan in one line.
    """

    digest: str
    fingerprint: str
    structure: str
    text: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds. Nothing in it depends on the plan but ``plan`` itself.

    Attributes:
      schema: version of this format.
      version: of autopar that wrote it.
      step: number of steps done.
      position: number of samples consumed.
      created: when, in seconds since 1970.
      name: of the step function.
      state: path -> array of the train state.
      codecs: name -> array of the codecs' state.
      codec_tree: the structure of the codecs' state; None: no gradient was compressed.
      noise: name -> array of the averages of the noise scale.
      noise_tree: their structure; None: noise was not measured.
      notes: plain data of the loop; None: there is none.
      plan: the plan that was in use; the whole of it is in ``plan.json``.
      checksum: of all other fields.
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
        """All arrays: those of the state, of the codecs and of the noise scale."""
        return {**self.state, **self.codecs, **self.noise}

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, before compression."""
        return sum(entry.num_bytes for entry in self.arrays.values())

    def encode(self) -> bytes:
        """Returns the manifest as JSON text with its checksum."""
        stamped = msgspec.structs.replace(self, checksum=_checksum(self))
        return msgspec.json.format(msgspec.json.encode(stamped), indent=1) + b"\n"


class _ManifestHeader(msgspec.Struct):
    schema: int


# Made at import: msgspec crashes where two threads find out about one type at once.
_HEADER = msgspec.json.Decoder(_ManifestHeader)
_MANIFEST = msgspec.json.Decoder(Manifest)


def read(folder: pathlib.Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
      CheckpointError: it cannot be read, was changed, or is of a newer schema.
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
    """Reads what `Manifest.encode` wrote.

    Args:
      data: JSON text.
      name: what errors call it.

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
    """Checks what is used as a size or as a path of files."""
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
