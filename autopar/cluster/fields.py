"""What the modules below `autopar.cluster.cluster` read of a cluster.

They take and give back clusters without knowing the class, which is above them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from autopar.cluster.members import Members
from autopar.cluster.specs import DeviceSpec, Level, LinkSpec


class ClusterFields(Protocol):
    """The fields of `autopar.cluster.Cluster`, and what is derived from them."""

    # What `dataclasses.replace` asks for.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def device(self) -> DeviceSpec:
        """The devices; refused where there are groups."""
        ...

    @property
    def levels(self) -> tuple[Level, ...]:
        """The links; refused where there are groups."""
        ...

    @property
    def members(self) -> Members | None:
        """The places of these devices in a whole cluster; None: all of them."""
        ...

    @property
    def groups(self) -> tuple[Self, ...]:
        """Clusters of equal devices; empty where all devices are equal."""
        ...

    @property
    def between(self) -> LinkSpec | None:
        """The link between groups; None where all devices are equal."""
        ...

    @property
    def num_devices(self) -> int:
        """The number of devices; idle ones do not count."""
        ...

    @property
    def ids(self) -> tuple[int, ...]:
        """Positions of the devices in the whole cluster."""
        ...

    def slice(self, shape: Sequence[int], offset: int = 0) -> Self:
        """The slice of this shape whose first device is the one at `offset`."""
        ...

    def fingerprint(self) -> str:
        """Digits that change when any number of the cluster does."""
        ...


AnyCluster = TypeVar("AnyCluster", bound=ClusterFields)
