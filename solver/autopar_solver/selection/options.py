"""The options of a codec selection that are worth a choice, in one row.

Gradients are numbered in the link's order. Options that no choice within the budgets
uses are gone, and so are those that another option of the same gradient replaces at no
loss.
"""

import dataclasses
import math

import numpy as np

from autopar_solver.selection.problem import BUDGET_TOLERANCE, CodecSelection


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OptionTable:
    """What can be chosen: options in one row, by gradient in the link's order.

    Attributes:
        starts: gradient ``l`` has ``starts[l]:starts[l + 1]``.
        gradient: the place in the link's order of each option's gradient.
        codec: the option's number in the problem.
        wire, local, error, memory: as in the problem.
    """

    starts: np.ndarray
    gradient: np.ndarray
    codec: np.ndarray
    wire: np.ndarray
    local: np.ndarray
    error: np.ndarray
    memory: np.ndarray

    @property
    def num_gradients(self) -> int:
        """The number of gradients."""
        return len(self.starts) - 1

    def least(self, values: np.ndarray) -> np.ndarray:
        """The least of each gradient's values."""
        return np.minimum.reduceat(values, self.starts[:-1])

    def most(self, values: np.ndarray) -> np.ndarray:
        """The greatest of each gradient's values."""
        return np.maximum.reduceat(values, self.starts[:-1])

    def above(self, values: np.ndarray) -> np.ndarray:
        """What each option has above its gradient's least."""
        return values - self.least(values)[self.gradient]

    def first(self, marked: np.ndarray) -> np.ndarray:
        """The first marked option of each gradient, as an index into the row."""
        at = np.where(marked, np.arange(len(marked)), len(marked))
        return self.least(at)

    def prices_at(
        self, weights: np.ndarray, error_price: float, memory_price: float
    ) -> np.ndarray:
        """What each option costs at these prices; ``weights`` are by gradient."""
        priced = weights[self.gradient] * self.wire + self.local
        return priced + error_price * self.error + memory_price * self.memory

    def keep(self, kept: np.ndarray) -> "OptionTable":
        """The options that are marked."""
        counts = np.bincount(self.gradient[kept], minlength=self.num_gradients)
        return OptionTable(
            starts=np.concatenate([[0], np.cumsum(counts)]),
            gradient=self.gradient[kept],
            codec=self.codec[kept],
            wire=self.wire[kept],
            local=self.local[kept],
            error=self.error[kept],
            memory=self.memory[kept],
        )


def options_of(problem: CodecSelection) -> OptionTable | None:
    """All options worth a choice, or None if no choice is within the budgets."""
    order = problem.order
    sizes = [problem.num_options[index] for index in order]
    columns = {
        "wire": problem.wire_s,
        "local": problem.local_s,
        "error": problem.error,
        "memory": problem.memory,
    }
    flat = {name: np.concatenate([c[i] for i in order]) for name, c in columns.items()}
    options = OptionTable(
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        gradient=np.repeat(np.arange(len(order)), sizes),
        codec=np.concatenate([np.arange(size) for size in sizes]),
        **flat,
    )
    options = options.keep(np.isfinite(sum(flat.values())))
    for name, budget in (
        ("error", problem.error_budget),
        ("memory", problem.memory_limit),
    ):
        possible = _affordable(options, getattr(options, name), budget)
        if (np.bincount(options.gradient[possible], minlength=len(order)) == 0).any():
            return None
        options = options.keep(possible)
    return options.keep(_drop_dominated(problem, options))


def _affordable(options: OptionTable, values: np.ndarray, budget: float) -> np.ndarray:
    """Options that fit if all other gradients take their least."""
    if budget == math.inf:
        return np.ones(len(values), bool)
    room = budget - math.fsum(options.least(values))
    return options.above(values) <= room + BUDGET_TOLERANCE * budget


def _drop_dominated(problem: CodecSelection, options: OptionTable) -> np.ndarray:
    """Options that no other of the same gradient replaces at no loss.

    A second more on the link is at most a second more of exposed time, so ``a``
    replaces ``b`` if neither its error nor its memory is larger and::

        local[a] + max(0, wire[a] - wire[b]) <= local[b]

    Of equal options the first stays. Sums without a budget do not count.
    """
    limited = [
        values
        for values, budget in (
            (options.error, problem.error_budget),
            (options.memory, problem.memory_limit),
        )
        if budget < math.inf
    ]
    kept = np.ones(len(options.gradient), bool)
    for start, end in zip(options.starts[:-1], options.starts[1:], strict=True):
        own = slice(start, end)
        wire, local = options.wire[own], options.local[own]
        extra = np.maximum(wire[:, None] - wire[None, :], 0.0)
        better = local[:, None] + extra <= local[None, :]
        for values in limited:
            better &= values[own, None] <= values[None, own]
        index = np.arange(end - start)
        replaces = better & (~better.T | (index[:, None] < index[None, :]))
        for k in index:
            # Only one that is still there may replace another: rounding could
            # otherwise close a circle.
            kept[start + k] = not (replaces[:, k] & kept[own]).any()
    return kept
