"""Reads plan files strictly, and converts files of schema 1 to the current schema.

The module also computes checksums, which show whether a plan or a part of it was
changed.

A plan stores a checksum of each of its parts, computed when the plan was made. So a
plan that was edited, in a file or in a program, can list its edited parts.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from autopar.cluster import Cluster, ClusterError
from autopar.errors import PlanError
from autopar.plans.records import StagePlan
from autopar_errors import check_path, check_type


class ClusterData(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A cluster in a plan; `read` converts it back to a `Cluster`.

    Attributes:
      text: ``str`` of the cluster, for human readers; no code reads this field.
      data: all values of the cluster.
    """

    text: str
    data: dict[str, Any]

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterData:
        """Returns the cluster as data."""
        return cls(text=str(cluster), data=cluster.to_data())

    def read(self) -> Cluster:
        """Returns the cluster that the data describes.

        Raises:
          PlanError: the data describes no cluster.
        """
        try:
            return Cluster.from_data(self.data)
        except ClusterError as error:
            raise PlanError(
                f"the plan's cluster.data is no cluster: {error}"
            ) from error

    def __str__(self) -> str:
        """The text."""
        return self.text


# The schema number increases by one whenever the meaning of a field changes.
SCHEMA = 2
# Fields of a plan in schema 1 that are now fields of a stage.
_OF_STAGE = ("mesh", "inputs", "outputs", "nodes", "copies", "gradients")


class _Header(msgspec.Struct):
    schema: int


# The decoder is created at import, because msgspec crashes if two threads analyse one
# type at the same time.
_HEADER = msgspec.json.Decoder(_Header)


def read_bytes(path: str | pathlib.Path) -> bytes:
    """Returns the content of a file.

    Raises:
      PlanError: the file cannot be read.
    """
    check_path("Plan.load", path)
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}.") from error


def decode(data: bytes | str, name: str) -> dict[str, Any]:
    """Returns the fields of a plan in the current schema, without checking their types.

    Args:
      data: JSON text.
      name: name of the plan in errors.

    Raises:
      PlanError: the text is not a plan, or has a schema that cannot be read.
    """
    check_type("Plan.from_json", data, (str, bytes), "the text that Plan.save wrote")
    try:
        found = _HEADER.decode(data).schema
        fields: dict[str, Any] = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise not_a_plan(name, error) from error
    if found == SCHEMA:
        return fields
    if found == 1:
        return _from_schema_1(fields, name)
    raise PlanError(
        f"{name}: has schema {found}, this autopar reads schemas 1 and {SCHEMA}. "
        "Make the plan again with this version."
    )


def not_a_plan(name: str, error: Exception) -> PlanError:
    """Returns the error for a text that is not a plan."""
    return PlanError(
        f"{name}: not a plan: {error}. Plans are written by Plan.save or 'autopar plan "
        "--out plan.json'."
    )


def _from_schema_1(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Converts a plan of schema 1: one stage over all devices, without the structure's
    fingerprint.

    Schema 1 contained only the text of the cluster, from which a custom cluster cannot
    be restored.
    """
    out = {k: v for k, v in fields.items() if k not in _OF_STAGE}
    text = fields.get("cluster")
    if not isinstance(text, str):
        return out  # The later check of types reports what is wrong.
    try:
        cluster = Cluster.parse(text)
    except ClusterError as error:
        raise PlanError(
            f"{name}: has schema 1, which did not hold the numbers of its cluster, "
            f"'{text}'. Make the plan again with this version."
        ) from error
    stage = {field: fields[field] for field in _OF_STAGE if field in fields}
    axes = (stage.get("mesh") or {}).get("axes") or {}
    stage |= {"name": "step", "devices": list(range(math.prod(axes.values())))}
    data = msgspec.to_builtins(ClusterData.of(cluster))
    return out | {"schema": SCHEMA, "cluster": data, "stages": [stage]}


def check_devices(cluster: Cluster, stages: tuple[StagePlan, ...], name: str) -> None:
    """Raises `PlanError` if a stage has a device that its cluster lacks."""
    for stage in stages:
        if max(stage.devices) >= cluster.num_devices:
            raise PlanError(
                f"{name}: stage '{stage.name}' has device {max(stage.devices)}, and "
                f"{cluster} has devices 0 to {cluster.num_devices - 1}."
            )


# Parts of a plan that may be set without counting as edits: its origin and purpose, and
# values that follow from other parts.
ABOUT = frozenset(
    {
        "schema", "version", "seconds", "solver", "target", "options", "checks",
        "stages", "worth", "compiled_memory_bytes", "decided", "compiler_options",
    }
)  # fmt: skip
_DIGITS = 16
_PART_DIGITS = 8


def digest_of(content: Any, digits: int = _DIGITS) -> str:
    """Hexadecimal digits that change if any part of a value changes."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:digits]


def checks_of(plan: msgspec.Struct, stages: Sequence[msgspec.Struct]) -> dict[str, str]:
    """Returns a checksum of each part of a plan, and of each field of its stages."""
    return {
        name: digest_of(part, _PART_DIGITS) for name, part in _parts_of(plan, stages)
    }


def _parts_of(
    plan: msgspec.Struct, stages: Sequence[msgspec.Struct]
) -> Iterator[tuple[str, Any]]:
    for name in plan.__struct_fields__:
        if name not in ABOUT:
            yield name, getattr(plan, name)
    if stages:
        for name in stages[0].__struct_fields__:
            yield name, [getattr(stage, name) for stage in stages]


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the parts whose checksums differ; parts without an old checksum are left
    out.
    """
    return tuple(name for name in now if name in before and before[name] != now[name])
