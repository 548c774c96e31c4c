"""A plan's cluster as data: what it is, and its text for people."""

from __future__ import annotations

from typing import Any

import msgspec

from autopar.cluster import Cluster, ClusterError
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
