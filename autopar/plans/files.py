"""Plan files: read strictly, and those of schema 1 made into the present one."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from autopar.cluster import Cluster, ClusterError
from autopar.errors import PlanError
from autopar.plans.cluster_data import ClusterData
from autopar.plans.stage import StagePlan
from autopar_errors import check_path, check_type

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
