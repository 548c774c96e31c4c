"""Repairs choices that exceed a memory row, and improves choices node by node."""

import numpy as np

from autopar_solver.sharding.field import Field, Links

MOVES_AT_ONCE = 8
"""Number of moves between two evaluations of all moves."""


class Position:
    """Choices of a field's nodes, and the cost of each change of one choice.

    Attributes:
        choices: int64 ``[N]``.
        local: for each flat strategy, the cost of its node and the node's edges with
            this strategy and the neighbours' current choices.
        used: ``[R]``, the memory that the choices use at each row.
    """

    def __init__(self, field: Field, choices: np.ndarray, links: Links) -> None:
        """Copies the choices."""
        self.field = field
        self.links = links
        self.choices = choices.copy()
        self.local = _local_costs(field, choices, links)
        self.used = field.memory.usage_of(choices)

    def move(self, node: int, strategy: int) -> None:
        """Changes the strategy of one node."""
        old = int(self.choices[node])
        for other, table in self.links[node]:
            start, end = self.field.offsets[other], self.field.offsets[other + 1]
            self.local[start:end] += table[strategy] - table[old]
        self.used += self.change(node, strategy)
        self.choices[node] = strategy

    def change(self, node: int, strategy: int) -> np.ndarray:
        """The memory that a change of one strategy would add at each row."""
        memory = self.field.memory
        first, last = np.searchsorted(memory.node, [node, node + 1])
        at = memory.first[first:last]
        amounts = memory.usage[at + strategy] - memory.usage[at + self.choices[node]]
        change = np.zeros(len(self.used) + 1)
        np.add.at(change, memory.starts[first:last], amounts)
        np.subtract.at(change, memory.ends[first:last], amounts)
        return np.cumsum(change)[:-1]

    def losses(self) -> np.ndarray:
        """For each flat strategy, the cost that a change to it would add."""
        present = self.local[self.field.offsets[:-1] + self.choices]
        return self.local - np.repeat(present, self.field.sizes)

    @property
    def over(self) -> float:
        """The excess of the worst row over its room; negative if all rows fit."""
        room = self.field.memory.room
        return float(np.max(self.used - room, initial=-np.inf))

    @property
    def fits(self) -> bool:
        """Whether the memory of every row is within its room."""
        return self.over <= self.field.memory.slack


def mend(position: Position, costs: np.ndarray, max_moves: int) -> bool:
    """Changes single nodes' strategies until the choices fit; False on failure.

    Each change lowers the memory of the row with the largest excess, at the least cost
    per unit of memory. ``costs`` has a cost for each flat strategy: the field's cost,
    perhaps with a price of memory added.
    """
    moves = 0
    while not position.fits and moves < max_moves:
        row = int(np.argmax(position.used - position.field.memory.room))
        made = _lower(position, costs, row)
        if not made:
            return False
        moves += made
    return position.fits


def _lower(position: Position, costs: np.ndarray, row: int) -> int:
    """Changes up to ``MOVES_AT_ONCE`` nodes until a row fits; returns the number."""
    field = position.field
    present = field.offsets[:-1] + position.choices
    use = field.memory.at(row, field.num_strategies)
    saved = np.repeat(use[present], field.sizes) - use
    extra = costs - field.costs
    loss = position.losses() + extra - np.repeat(extra[present], field.sizes)
    needed = float(position.used[row] - field.memory.room[row])
    helpful = np.flatnonzero((saved > 0) & (loss < np.inf))
    # Memory saved beyond the row's excess has no value.
    rate = np.maximum(loss[helpful], 0.0) / np.minimum(saved[helpful], needed)
    nodes = np.searchsorted(field.offsets, helpful, side="right") - 1
    moved: set[int] = set()
    for at in np.argsort(rate, kind="stable").tolist():
        node, flat = int(nodes[at]), int(helpful[at])
        if node in moved:
            continue
        position.move(node, flat - int(field.offsets[node]))
        moved.add(node)
        needed -= float(saved[flat])
        # A change alters the losses of neighbours, so only a few changes are made
        # before all losses are computed again.
        if needed <= 0 or len(moved) >= MOVES_AT_ONCE:
            break
    return len(moved)


def polish(position: Position, passes: int = 10) -> None:
    """Gives single nodes cheaper strategies, as long as the memory of all rows fits."""
    field = position.field
    for _ in range(passes):
        losses = position.losses()
        tolerance = 1e-12 * max(1.0, float(np.abs(losses[losses < np.inf]).max()))
        fitting = _fitting(position)
        better = np.flatnonzero((losses < -tolerance) & fitting)
        moved = False
        for flat in better[np.argsort(losses[better], kind="stable")].tolist():
            moved |= _try_move(position, field, flat, tolerance)
        if not moved:
            return


def _try_move(position: Position, field: Field, flat: int, tolerance: float) -> bool:
    node = int(np.searchsorted(field.offsets, flat, side="right")) - 1
    strategy = flat - int(field.offsets[node])
    present = int(field.offsets[node] + position.choices[node])
    if not position.local[flat] < position.local[present] - tolerance:
        return False
    used = position.used + position.change(node, strategy)
    if (used > field.memory.room + field.memory.slack).any():
        return False
    position.move(node, strategy)
    return True


def _fitting(position: Position) -> np.ndarray:
    """Marks flat strategies of which no memory term alone exceeds a row's memory."""
    field, memory = position.field, position.field.memory
    fitting = np.ones(field.num_strategies, bool)
    if not len(memory.node):
        return fitting
    left = memory.room - position.used + memory.slack
    # A term uses the same memory in all its rows, and their room differs little: the
    # first and the last row reveal most excesses.
    least = np.minimum(left[memory.starts], left[memory.ends - 1])
    present = memory.usage[memory.first + position.choices[memory.node]]
    misfit = memory.usage - present[memory.term] > least[memory.term]
    fitting[memory.strategy[misfit]] = False
    return fitting


def _local_costs(field: Field, choices: np.ndarray, links: Links) -> np.ndarray:
    local = field.costs.copy()
    offsets, chosen = field.offsets.tolist(), choices.tolist()
    for k, neighbours in enumerate(links):
        own = local[offsets[k] : offsets[k + 1]]
        for m, table in neighbours:
            own += table[:, chosen[m]]
    return local
