"""The sums of the gradients of all stages of a pipeline, and their codecs' state.

The state is that of one stage (`autopar.runtime.gradients.sums`), with the gradients of
all stages. What is kept of a gradient lies on the devices of its stage; the counters
lie on one device of each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.compression.fallback import Fallback
from autopar.compression.signal import COLUMNS
from autopar.compression.synchronise import NON_FINITE
from autopar.runtime import placement
from autopar.runtime.gradients.sums import GradientSums, Member, State


@dataclasses.dataclass(frozen=True, eq=False)
class StagedSums:
    """The sums of the gradients of one step of several stages.

    Attributes:
      stages: number of a stage -> its sums; stages without codecs have none.
      device: where the counters lie: a device of this process.
      fallback: the codecs of a bucket whose own send too little.
    """

    stages: Mapping[int, GradientSums]
    device: Any
    fallback: Fallback | None = None

    @property
    def members(self) -> dict[int, Member]:
        """The gradients of all stages, by value."""
        return {v: m for sums in self.stages.values() for v, m in sums.members.items()}

    @property
    def parts(self) -> tuple[GradientSums, ...]:
        """The sums of each stage that has any."""
        return tuple(self.stages.values())

    @property
    def every(self) -> int:
        """The telemetry of one step in so many is measured: of all."""
        return 1

    @property
    def num_levels(self) -> int:
        """Number of ways to send a gradient, of which each step takes one."""
        return self.parts[0].num_levels

    @property
    def columns(self) -> int:
        """Numbers of telemetry of each gradient."""
        return NON_FINITE + 1 + (COLUMNS if self.parts[0].signals else 0)

    @property
    def counter(self) -> NamedSharding:
        """Where a counter lies."""
        return NamedSharding(Mesh(np.array([self.device]), ("one",)), PartitionSpec())

    def shardings(self) -> State:
        """Shardings of the whole state."""
        every: dict[str, Any] = {}
        for part in self.parts:
            every |= part.shardings()["gradients"]
        return {"step": self.counter, "skipped": self.counter, "gradients": every}

    def structs(self) -> State:
        """Shapes of the whole state."""
        every: dict[str, Any] = {}
        for part in self.parts:
            every |= part.structs()["gradients"]
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return {"step": count, "skipped": count, "gradients": every}

    def init(self) -> State:
        """The state before the first step; of other processes' stages its absence."""
        gradients: dict[str, Any] = {}
        for part in self.parts:
            gradients |= _made(part)
        zero = jax.device_put(np.int32(0), self.counter)
        return {"step": zero, "skipped": zero, "gradients": gradients}


def _made(part: GradientSums) -> dict[str, Any]:
    """The state of one stage's gradients."""
    where = part.shardings()["gradients"]
    if part.mesh.local_devices:
        return part.init()["gradients"]
    return jax.tree.map(placement.absent, part.structs()["gradients"], where)


# The sums of a step of one stage, or of several.
AnySums = GradientSums | StagedSums
