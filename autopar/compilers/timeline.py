"""Computes the time of a compiled program from its schedule, by the cost model.

`timeline` simulates two queues that run in parallel: kernels in program order, and
messages in the order in which the program starts them. A ``-done`` operation of the
program waits for a message. Kernels after it wait, too. The time for which kernels wait
is exposed communication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Self

import numpy as np

from autopar.cluster.specs import DeviceSpec
from autopar.cost.collectives import collective_s
from autopar.cost.compute import in_table_s, rates_of, roofline_s
from autopar.cost.pricer import Pricer
from autopar_passes.audit.compiled import Done, Event, EventLoop, Start
from autopar_passes.audit.kernels import Kernel, Product
from autopar_passes.audit.partitioned import AuditedCollective


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    """How long a step takes on one device.

    Attributes:
      kernel_s: seconds of kernels.
      communication_s: seconds of all messages, whether kernels run meanwhile or not.
      exposed_s: seconds for which kernels wait for messages.
      messages: number of messages.
      hidden: number of messages that have kernels between their start and their
        ``-done``.
      cycles: sum of the compiler's own estimates for kernels, in clock cycles.
    """

    kernel_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    messages: float = 0.0
    hidden: float = 0.0
    cycles: float = 0.0

    def __add__(self, other: Self) -> Self:
        """The timeline of two parts of a step that run one after the other."""
        names = [f.name for f in dataclasses.fields(self)]
        return type(self)(**{n: getattr(self, n) + getattr(other, n) for n in names})

    def __mul__(self, times: float) -> Self:
        """The timeline of a part that runs several times."""
        names = [f.name for f in dataclasses.fields(self)]
        return type(self)(**{n: getattr(self, n) * times for n in names})

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.kernel_s + self.exposed_s


def timeline(events: Iterable[Event], pricer: Pricer) -> DeviceTimeline:
    """Simulates the events of a program. At the start and the end of a loop both queues
    are empty.
    """
    total = DeviceTimeline()
    free_s = 0.0
    ends: dict[str, tuple[float, float]] = {}
    for event in events:
        now_s = total.step_s
        match event:
            case Kernel():
                total += _kernel(event, pricer.cluster.device)
            case Start():
                seconds = message_s(event.collectives, pricer)
                free_s = max(now_s, free_s) + seconds
                ends[event.name] = free_s, total.kernel_s
                wait_s = free_s - now_s if event.waits else 0.0
                total += DeviceTimeline(
                    communication_s=seconds, exposed_s=wait_s, messages=1.0
                )
            case Done() if event.name in ends:
                end_s, before_s = ends[event.name]
                hidden = float(total.kernel_s > before_s)
                total += DeviceTimeline(
                    exposed_s=max(0.0, end_s - now_s), hidden=hidden
                )
            case Done():
                pass
            case EventLoop():
                total += timeline(event.body, pricer) * event.trips
    return total


def message_s(collectives: Iterable[AuditedCollective], pricer: Pricer) -> float:
    """Seconds of a message with all its arrays, by the cost model."""
    found = tuple(collectives)
    names = pricer.mesh.names
    axes = tuple(pricer.mesh.axes[names.index(n)] for n in found[0].axes)
    whole = math.prod(axis.size for axis in axes)
    if not axes or found[0].group > whole:
        return 0.0
    if found[0].group < whole:
        # If the group is only a part of a mesh axis, the last axis that is long enough
        # is assumed, because it has the fastest links.
        axes = tuple(a for a in axes if a.size >= found[0].group)[-1:] or axes[-1:]
    nbytes = sum(c.nbytes for c in found)
    return pricer.skew(axes) * collective_s(found[0].kind, nbytes, axes)


def _kernel(kernel: Kernel, device: DeviceSpec) -> DeviceTimeline:
    return DeviceTimeline(
        kernel_s=kernel_s(kernel, device) + device.kernel_latency_s,
        cycles=kernel.cycles,
    )


def kernel_s(kernel: Kernel, device: DeviceSpec) -> float:
    """Seconds of a kernel without its launch, by the same formulas as for the operators
    of a plan.

    For matrix products, the device's table of measurements is used if there is one. No
    kernel takes less than the time to move its bytes.
    """
    memory_s = roofline_s(0.0, kernel.nbytes, kernel.dtype, device, is_matrix=False)
    if not kernel.products:
        return float(memory_s)
    products = sum(_product_s(p, device) for p in kernel.products)
    return max(products, kernel.nbytes / device.memory_bandwidth_bytes_per_s)


def _product_s(product: Product, device: DeviceSpec) -> float:
    if rates_of(device, product.itemsize) is None:
        return float(
            roofline_s(product.flops, 0.0, product.dtype, device, is_matrix=True)
        )
    batch = np.array([product.batch])
    sides = np.array([[product.rows, product.columns, product.depth]])
    found = in_table_s(product.dtype, product.itemsize, batch, sides, 0.0, device)
    return float(found[0])
