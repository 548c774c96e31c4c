"""A cost as a value: what the seconds and bytes of a step are spent on."""

from __future__ import annotations

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Seconds and bytes of one training step on one device, by what they are spent on.

    Every field adds, over operators, layers, stages and steps. What communication
    leaves exposed does not: `exposed_s` computes it, once, from the sums of a
    program or a stage.

    Attributes:
      matrix_s: seconds of matrix products and convolutions.
      vector_s: seconds of all other operators.
      kernel_s: seconds of starting kernels.
      waiting_s: seconds of communication that something waits for, without latency.
      hideable_s: seconds of communication that nothing waits for before the update or
        since the step's start (sums of gradients, gathers of parameters), without
        latency.
      waiting_latency_s: latency of the messages of ``waiting_s``.
      hideable_latency_s: latency of the messages of ``hideable_s``.
      codec_s: seconds of encoding and decoding gradients.
      cover_s: seconds of hideable communication that run beside work
        (`autopar.cost.overlap`).
      contention_s: seconds by which that slows the work.
      all_reduce_bytes: bytes that one device sends in all-reduces.
      all_gather_bytes: the same in all-gathers.
      reduce_scatter_bytes: the same in reduce-scatters.
      all_to_all_bytes: the same in all-to-alls.
      collective_permute_bytes: the same in what goes around rings.
      codec_bytes: the same of gradients with codecs.
      parameter_bytes: bytes of parameters that one device holds between steps.
      optimizer_bytes: the same of optimizer state.
      other_bytes: the same of other carried state, and of inputs that are no batch.
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
        """The cost of two things that both happen."""
        return type(self)(**{n: getattr(self, n) + getattr(other, n) for n in FIELDS})

    def __mul__(self, times: float) -> Self:
        """The cost of one thing that happens several times."""
        return type(self)(**{n: getattr(self, n) * times for n in FIELDS})

    __rmul__ = __mul__

    @property
    def work_s(self) -> float:
        """Seconds of work on arrays, with nothing beside it."""
        return self.matrix_s + self.vector_s + self.kernel_s

    @property
    def hideable_total_s(self) -> float:
        """Seconds of communication that may be hidden, with its latency."""
        return self.hideable_s + self.hideable_latency_s

    @property
    def communication_s(self) -> float:
        """Seconds of communication, hidden or not, without codecs' work."""
        return self.waiting_s + self.waiting_latency_s + self.hideable_total_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends."""
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

    What something waits for is exposed as a whole. The rest is hidden as far as
    ``cover_s`` reaches. The sums of a whole program or stage go in: parts of one
    cannot be hidden on their own, so exposed times of parts do not add.

    >>> exposed_s(CostBreakdown(waiting_s=1.0, hideable_s=5.0, cover_s=3.0))
    3.0
    """
    waiting_s = cost.waiting_s + cost.waiting_latency_s
    return waiting_s + max(0.0, cost.hideable_total_s - cost.cover_s)


def step_s(cost: CostBreakdown) -> float:
    """Seconds of a step: work, codecs, and the communication left exposed."""
    return cost.work_s + cost.contention_s + cost.codec_s + exposed_s(cost)


def added_s(cost: CostBreakdown) -> float:
    """Seconds of a step in which nothing runs beside anything else."""
    return cost.work_s + cost.codec_s + cost.communication_s
