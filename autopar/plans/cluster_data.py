"""A plan's cluster as data: what it is, and its text for people."""

from __future__ import annotations

from typing import Any

import msgspec

from autopar.cluster import Cluster
from autopar.errors import PlanError


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
        return cls(text=str(cluster), data=_to_data(cluster))

    def read(self) -> Cluster:
        """The cluster that the data describes.

        Raises:
          PlanError: it describes none.
        """
        try:
            cluster = _from_data(self.data)
        except ValueError as error:  # of msgspec, and the cluster's own
            raise PlanError(
                f"the plan's cluster.data is no cluster: {error}"
            ) from error
        if _to_data(cluster) != self.data:
            raise PlanError(
                f"the plan's cluster.data has fields that a cluster lacks: {self.data}."
            )
        return cluster

    def __str__(self) -> str:
        """The text."""
        return self.text


def _to_data(cluster: Cluster) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(cluster))


def _from_data(data: dict[str, Any]) -> Cluster:
    return msgspec.convert(data, Cluster)
