"""The compiler's combiners: they join collectives into one message.

XLA joins collectives of one kind over the same groups of devices, of one element
type and in one computation, where none needs the result of another
(``xla/service/collective_combiner_utils.h``, ``all_reduce_combiner.cc``,
``all_gather_combiner.cc`` and ``reduce_scatter_combiner.cc`` in openxla/xla). Then a
message pays the latency of its link once, however many arrays it carries.

`autopar.steps.independence` finds the collectives that need no other's result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

SUMS = frozenset({"all_reduce", "reduce_scatter"})
GATHERS = frozenset({"all_gather"})
ALONE = frozenset[str]()

# Kind and mesh axes: collectives of one group may share a message.
Group = tuple[str, tuple[int, ...]]
# Computation (the last operator of the innermost loop or branch) and element type.
Place = tuple[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Combiner:
    """What one compiler joins.

    Attributes:
      kinds: of collectives.
      most_bytes: of the results of one message; a larger array travels alone.
      most_arrays: in one message.
    """

    kinds: frozenset[str]
    most_bytes: float
    most_arrays: int

    def packed(self, sizes: Iterable[float]) -> list[float]:
        """The bytes of the message that each array travels in.

        Arrays are taken in order; one that would make a message too large begins
        the next (``CombineInstructionsByKey`` in the first of the files above).

        >>> COMBINERS["gpu"].packed([10e6, 20e6, 10e6, 40e6, 5e6])
        [30000000.0, 30000000.0, 15000000.0, 40000000.0, 15000000.0]
        """
        messages: list[list[tuple[int, float]]] = [[]]
        alone: list[list[tuple[int, float]]] = []
        for place, size in enumerate(sizes):
            if size > self.most_bytes:
                alone.append([(place, size)])
                continue
            total = sum(s for _, s in messages[-1]) + size
            if total > self.most_bytes or len(messages[-1]) == self.most_arrays:
                messages.append([])
            messages[-1].append((place, size))
        out: dict[int, float] = {}
        for message in (*messages, *alone):
            nbytes = sum(s for _, s in message)
            out.update((place, nbytes) for place, _ in message)
        return [out[place] for place in sorted(out)]


# The GPU's thresholds: 30 MiB + 7 bytes (openxla/xla, xla/service/collective_utils.h,
# defaults of xla_gpu_{all_reduce,all_gather,reduce_scatter}_combine_threshold_bytes)
# and 256 arrays (xla/service/gpu/gpu_compiler.cc). The TPU's compiler is closed; the
# same is assumed for it. On CPUs (jaxlib 0.10.2) 3.2 GB of gradients in 25 arrays
# became one all-reduce and 401 arrays two, of 256 and 145, while no all-gathers were
# joined: benchmarks/combined_collectives.py.
_EVERY = Combiner(SUMS | GATHERS, 30 * 1024 * 1024 + 7, 256)
COMBINERS = {
    "cpu": Combiner(frozenset({"all_reduce"}), math.inf, 256),
    "gpu": _EVERY,
    "tpu": _EVERY,
}
