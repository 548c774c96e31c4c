"""Factors under union and split: composes the rules of several operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(slots=True)
class _FactorNode:
    size: int
    parent: int
    blocked: bool = False
    reduced: str = ""
    children: tuple[int, ...] = ()


class FactorForest:
    """Disjoint sets of factors, where a factor may be split into smaller ones.

    A reshape of ``[32]`` to ``[4, 8]`` splits the factor of size 32 into a
    major one of 4 and a minor one of 8, for every value that carries it.
    """

    def __init__(self) -> None:
        """Starts without factors."""
        self._nodes: list[_FactorNode] = []

    def new(self, size: int) -> int:
        """Adds a factor of ``size`` elements."""
        self._nodes.append(_FactorNode(size, len(self._nodes)))
        return len(self._nodes) - 1

    def find(self, factor: int) -> int:
        """Returns the representative of a factor's set."""
        nodes = self._nodes
        while nodes[factor].parent != factor:
            nodes[factor].parent = nodes[nodes[factor].parent].parent
            factor = nodes[factor].parent
        return factor

    def leaves(self, factor: int) -> tuple[int, ...]:
        """Returns the unsplit factors of a factor, major to minor."""
        root = self.find(factor)
        children = self._nodes[root].children
        if not children:
            return (root,)
        return tuple(leaf for c in children for leaf in self.leaves(c))

    def size(self, factor: int) -> int:
        """Returns the number of elements of a factor."""
        return self._nodes[self.find(factor)].size

    def is_blocked(self, factor: int) -> bool:
        """Says whether a factor must be replicated."""
        return self._nodes[self.find(factor)].blocked

    def reduction(self, factor: int) -> str:
        """Returns how a factor is reduced, '' if it is not."""
        return self._nodes[self.find(factor)].reduced

    def block(self, factor: int) -> None:
        """Marks a factor as one that must be replicated."""
        for leaf in self.leaves(factor):
            self._nodes[leaf].blocked = True

    def reduce(self, factor: int, kind: str) -> None:
        """Marks a factor as reduced by ``kind``; two kinds on one factor block it."""
        for leaf in self.leaves(factor):
            node = self._nodes[leaf]
            node.blocked |= bool(node.reduced) and node.reduced != kind
            node.reduced = kind

    def unite(self, left: Sequence[int], right: Sequence[int]) -> None:
        """Says that two lists of factors, major to minor, are the same dimension."""
        a = [leaf for f in left for leaf in self.leaves(f)]
        b = [leaf for f in right for leaf in self.leaves(f)]
        if [self.size(f) for f in a] == [self.size(f) for f in b]:
            for x, y in zip(a, b, strict=True):
                self._join(x, y)
        elif len(a) == 1 and self._product(b) == self.size(a[0]):
            self._split(a[0], b)
        elif len(b) == 1 and self._product(a) == self.size(b[0]):
            self._split(b[0], a)
        else:
            for leaf in (*a, *b):
                self.block(leaf)

    def _product(self, factors: Sequence[int]) -> int:
        out = 1
        for f in factors:
            out *= self.size(f)
        return out

    def _split(self, whole: int, parts: Sequence[int]) -> None:
        node = self._nodes[whole]
        node.children = tuple(parts)
        for part in parts:
            if node.blocked:
                self.block(part)
            if node.reduced:
                self.reduce(part, node.reduced)

    def _join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        left, right = self._nodes[a], self._nodes[b]
        right.parent = a
        left.blocked |= right.blocked
        left.blocked |= bool(left.reduced and right.reduced) and (
            left.reduced != right.reduced
        )
        left.reduced = left.reduced or right.reduced
