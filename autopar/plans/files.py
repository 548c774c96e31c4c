"""Plan files: read strictly, and those of schema 1 made into the present one.

Sums that tell whether a plan's content, or a part of it, was changed.

A plan remembers a sum of each of its parts from when it was made. So a plan that was
edited, in a file or in a program, says itself which of its parts were.
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
    """A cluster in a plan; `read` gives it back.

    Attributes:
      text: ``str`` of the cluster, for people; nothing reads it.
      data: every number of the cluster.
    """

    text: str
    data: dict[str, Any]

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterData:
        """The cluster as data."""
        return cls(text=str(cluster), data=cluster.to_data())

    def read(self) -> Cluster:
        """The cluster that the data describes.

        Raises:
          PlanError: it describes none.
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


# Raised by one whenever a field changes its meaning.
SCHEMA = 2
# Fields of schema 1 that a stage has now.
_OF_STAGE = ("mesh", "inputs", "outputs", "nodes", "copies", "gradients")


class _Header(msgspec.Struct):
    schema: int


# Made at import: msgspec crashes where two threads find out about one type at once.
_HEADER = msgspec.json.Decoder(_Header)


def read_bytes(path: str | pathlib.Path) -> bytes:
    """The content of a file.

    Raises:
      PlanError: it cannot be read.
    """
    check_path("Plan.load", path)
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}.") from error


def decode(data: bytes | str, name: str) -> dict[str, Any]:
    """Returns the fields of a plan of the present schema, their types unchecked.

    Args:
      data: JSON text.
      name: what errors call it.

    Raises:
      PlanError: the text is no plan, or of a schema that cannot be read.
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
    """The error for a text that is no plan."""
    return PlanError(
        f"{name}: not a plan: {error}. Plans are written by Plan.save or 'autopar plan "
        "--out plan.json'."
    )


def _from_schema_1(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One stage over all devices; the fingerprint of the structure is unknown.

    Schema 1 held the cluster's text alone, from which a custom one cannot be read.
    """
    out = {k: v for k, v in fields.items() if k not in _OF_STAGE}
    text = fields.get("cluster")
    if not isinstance(text, str):
        return out  # the check of types says what is wrong
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
    """Raises `PlanError` where a stage has a device that its cluster lacks."""
    for stage in stages:
        if max(stage.devices) >= cluster.num_devices:
            raise PlanError(
                f"{name}: stage '{stage.name}' has device {max(stage.devices)}, and "
                f"{cluster} has devices 0 to {cluster.num_devices - 1}."
            )


# Parts that may be set at any time: who made the plan when, how, what for, and what
# follows from the rest.
ABOUT = frozenset(
    {
        "schema", "version", "seconds", "solver", "target", "options", "checks",
        "stages", "worth", "compiled_memory_bytes", "decided",
    }
)  # fmt: skip
_DIGITS = 16
_PART_DIGITS = 8


def digest_of(content: Any, digits: int = _DIGITS) -> str:
    """Hexadecimal digits that change with anything in a value."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:digits]


def checks_of(plan: msgspec.Struct, stages: Sequence[msgspec.Struct]) -> dict[str, str]:
    """Returns a sum of each part; that of a stage's field is of all stages."""
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
    """Names of the parts that differ; none of those that were not known before."""
    return tuple(name for name in now if name in before and before[name] != now[name])
