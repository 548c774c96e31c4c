"""The cost of a step as a value: its seconds and bytes, by purpose."""

from __future__ import annotations

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Seconds and bytes of one training step on one device, by purpose.

    Every field is additive over operators, layers, stages and steps. Exposed
    communication, during which a device does nothing else, is not additive. `exposed_s`
    computes it from the totals of a program or a stage.

    Attributes:
      matrix_s: seconds of matrix products and convolutions.
      vector_s: seconds of all other operators.
      kernel_s: seconds of kernel launches.
      waiting_s: seconds of communication that an operator waits for, without latency.
      hideable_s: seconds of communication that may overlap with work, without latency.
        It is that of sums of gradients, which only the update needs, and of gathers of
        parameters, which may start early.
      waiting_latency_s: latency of the messages of ``waiting_s``.
      hideable_latency_s: latency of the messages of ``hideable_s``.
      codec_s: seconds to encode and decode gradients.
      cover_s: seconds for which hideable communication overlaps with work
        (`autopar.cost.overlap`).
      contention_s: seconds by which overlapping communication makes the work longer.
      all_reduce_bytes: bytes that one device sends in all-reduces.
      all_gather_bytes: bytes that one device sends in all-gathers.
      reduce_scatter_bytes: bytes that one device sends in reduce-scatters.
      all_to_all_bytes: bytes that one device sends in all-to-alls.
      collective_permute_bytes: bytes that one device sends in permutations, such as
        exchanges around a ring.
      codec_bytes: bytes that one device sends for gradients with codecs.
      parameter_bytes: bytes of parameters that one device holds between steps.
      optimizer_bytes: bytes of optimizer state that one device holds between steps.
      other_bytes: bytes of other carried state, and of inputs other than the batch.
      batch_bytes: bytes of the batch on one device.
    """

    matrix_s: float = 0.0
    vector_s: float = 0.0
    kernel_s: float = 0.0
    waiting_s: float = 0.0
    hideable_s: float = 0.0
    waiting_latency_s: float = 0.0
    hideable_latency_s: float = 0.0
    codec_s: float = 0.0
    cover_s: float = 0.0
    contention_s: float = 0.0
    all_reduce_bytes: float = 0.0
    all_gather_bytes: float = 0.0
    reduce_scatter_bytes: float = 0.0
    all_to_all_bytes: float = 0.0
    collective_permute_bytes: float = 0.0
    codec_bytes: float = 0.0
    parameter_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    other_bytes: float = 0.0
    batch_bytes: float = 0.0

    def __add__(self, other: Self) -> Self:
        """The total cost of two parts of a step, or of two steps."""
        return type(self)(**{n: getattr(self, n) + getattr(other, n) for n in FIELDS})

    def __mul__(self, times: float) -> Self:
        """The cost of ``times`` repetitions."""
        return type(self)(**{n: getattr(self, n) * times for n in FIELDS})

    __rmul__ = __mul__

    @property
    def work_s(self) -> float:
        """Seconds of work, without the slowdown by overlapping communication."""
        return self.matrix_s + self.vector_s + self.kernel_s

    @property
    def hideable_total_s(self) -> float:
        """Seconds of hideable communication, including latency."""
        return self.hideable_s + self.hideable_latency_s

    @property
    def communication_s(self) -> float:
        """Seconds of all communication, hidden or not.

        Encoding and decoding are not included.
        """
        return self.waiting_s + self.waiting_latency_s + self.hideable_total_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in all collectives of a step."""
        return (
            self.all_reduce_bytes
            + self.all_gather_bytes
            + self.reduce_scatter_bytes
            + self.all_to_all_bytes
            + self.collective_permute_bytes
            + self.codec_bytes
        )

    @property
    def held_bytes(self) -> float:
        """Bytes of the inputs that one device holds."""
        state = self.parameter_bytes + self.optimizer_bytes + self.other_bytes
        return state + self.batch_bytes


FIELDS = tuple(f.name for f in dataclasses.fields(CostBreakdown))


def exposed_s(cost: CostBreakdown) -> float:
    """Seconds of communication during which a device does nothing else.

    Communication that an operator waits for is fully exposed. Of hideable
    communication, ``cover_s`` seconds are hidden. ``cost`` must be the total of a
    program or a stage, because exposed times of parts of a program do not add up.

    >>> exposed_s(CostBreakdown(waiting_s=1.0, hideable_s=5.0, cover_s=3.0))
    3.0
    """
    waiting_s = cost.waiting_s + cost.waiting_latency_s
    return waiting_s + max(0.0, cost.hideable_total_s - cost.cover_s)


def step_s(cost: CostBreakdown) -> float:
    """Seconds of a step: work, codecs and exposed communication."""
    return cost.work_s + cost.contention_s + cost.codec_s + exposed_s(cost)


def added_s(cost: CostBreakdown) -> float:
    """Seconds of a step in which work and communication do not overlap."""
    return cost.work_s + cost.codec_s + cost.communication_s
