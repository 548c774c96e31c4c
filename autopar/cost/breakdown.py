"""The cost of a step as a value: its seconds and bytes, by purpose."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Self

from autopar.cluster import DeviceSpec


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
      waiting_s: seconds of communication that an operator waits for, without latency,
        and of the exchange of rows before the step (`autopar.cost.rows`).
      hideable_s: seconds of communication that may overlap with work, without latency:
        sums of gradients, which only the update needs, and gathers of parameters, which
        may start early.
      waiting_latency_s: latency of the messages of ``waiting_s``.
      hideable_latency_s: latency of the messages of ``hideable_s``.
      codec_s: seconds to encode and decode gradients and gathered parameters.
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


# The uncertainty of a predicted step time, from the uncertainty of its terms.
#
# Each term of a `CostBreakdown` has a relative error: in 90 % of the measured cases
# that were not used to choose constants, the measured seconds differed by at most this
# fraction. Errors of different terms are assumed to be independent, so their squares
# add. The relative error of a term is assumed to be the same for all operators or
# messages, so their errors do not cancel. Communication that is predicted to be hidden
# may be partly exposed, which makes a step longer but never shorter.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Relative errors of the seconds of a step's terms; 90 % of cases lie within them.

    Attributes:
      matrix: error of the seconds of matrix products.
      vector: error of the seconds of other operators.
      kernel: error of the seconds of kernel launches.
      transfer: error of the seconds of communication, without latency.
      latency: error of latencies.
      codec: error of the seconds of codecs.
      step: error of the whole step from causes that no term covers: how the software
        around a program schedules it, waits between its parts, and feeds data.
      bare: the fraction of communication predicted to be hidden that may be exposed.
    """

    matrix: float
    vector: float
    kernel: float
    transfer: float
    latency: float
    codec: float
    step: float
    bare: float


# Sources of the errors. Matrix products and communication: the errors on rows of XLA's
# tables that were left out of the fit (docs/record, "Rates against XLA's
# measurements"). They are 12 % for products, 29 % for collectives from 1 MiB on and 30
# % for smaller collectives. In a step, a card's power limit lowers the rate of
# products. In published measurements it multiplies the rate by .61 to .68 on a card of
# 700 W, which adds an error of 6 %. Other operators: on models that were not used to
# choose constants, the compiled work is .76 to 1.2 times the predicted work. Kernels:
# where XLA's fusion differs from the prediction, the number of launches is half to
# twice the predicted number. Codecs: a codec lengthens a step by between one third and
# all of the seconds that encoding and decoding take outside of a step. Overlap: in
# published runs, half to all of the hideable communication is hidden. Step: a
# sequential execution takes 10 % longer on average than an overlapped one (arXiv
# 2507.03114). The software around the program decides whether communication overlaps.
_TABLED = Certainty(
    matrix=math.hypot(0.12, 0.06),
    vector=0.24,
    kernel=0.5,
    transfer=0.29,
    latency=0.30,
    codec=0.6,
    step=0.10,
    bare=0.5,
)
# For devices without a table of rates, an error of 20 % for products is an assumption.
# Presets assume .8 of a datasheet's peak. One measured step on v5e attained .86 of the
# peak. Published steps on TPUs lie within 3 % of the prediction.
_DATASHEET = dataclasses.replace(_TABLED, matrix=0.20)
# Simulated devices and hosts share CPU cores. Measured steps of the examples took .42
# to 1.5 times the predicted seconds. Collectives of 256 KiB differed from a measured
# profile by up to 70 % (docs/record).
_SHARED_CORES = dataclasses.replace(
    _TABLED, matrix=0.35, vector=0.5, transfer=0.5, latency=0.7
)


# The largest excess of compiled memory over predicted memory, as a fraction, by kind of
# device. The programs are those of docs/data/memory.json; on GPUs also plans for little
# memory, and on CPUs also the programs of docs/record.
MEMORY_MORE: Final = {"gpu": 0.28, "tpu": 1.31, "cpu": 0.08}
# A plan that needs more than this fraction of the memory is near the limit, and may not
# fit.
NEAR_LIMIT: Final = 0.75


def certainty_of(device: DeviceSpec) -> Certainty:
    """The relative errors of predictions for a device."""
    if device.kind == "cpu":
        return _SHARED_CORES
    return _TABLED if device.rates else _DATASHEET


def interval_s(cost: CostBreakdown, device: DeviceSpec) -> tuple[float, float]:
    """The interval of seconds in which 90 % of steps should lie.

    >>> from autopar.cluster import Cluster
    >>> device = Cluster.parse("8:v5e").device
    >>> interval_s(CostBreakdown(matrix_s=1.0), device)  # doctest: +ELLIPSIS
    (0.776..., 1.223...)

    Args:
      cost: the predicted cost of a step.
      device: the device that runs the step.

    Returns:
      The shortest and the longest seconds, around `step_s` of the cost.
    """
    sure, hideable_s = certainty_of(device), cost.hideable_total_s
    bare = max(0.0, 1.0 - cost.cover_s / hideable_s) if hideable_s else 0.0
    middle = step_s(cost)
    terms = (
        sure.matrix * cost.matrix_s,
        sure.vector * cost.vector_s,
        sure.kernel * cost.kernel_s,
        sure.transfer * (cost.waiting_s + bare * cost.hideable_s),
        sure.latency * (cost.waiting_latency_s + bare * cost.hideable_latency_s),
        sure.codec * cost.codec_s,
        sure.step * middle,
    )
    around = math.hypot(*terms)
    above = math.hypot(around, sure.bare * cost.cover_s)
    return max(0.0, middle - around), middle + above
