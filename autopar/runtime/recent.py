"""A bounded cache that drops the least recently used entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from autopar_errors import InputError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping of at most ``capacity`` entries, the most recently used ones.

    Threads may share it.

    >>> recent = Recent[str, int](2)
    >>> for name, number in (("a", 1), ("b", 2), ("c", 3)):
    ...     _ = recent.put(name, number)
    >>> recent.get("a"), list(recent)
    (None, ['b', 'c'])
    """

    def __init__(
        self, capacity: int, dropped: Callable[[V], None] | None = None
    ) -> None:
        """Creates an empty cache.

        Args:
          capacity: the largest number of entries.
          dropped: a function that is called with each dropped value.

        Raises:
          InputError: the capacity is below 1.
        """
        if capacity < 1:
            raise InputError(f"Recent: capacity must be at least 1, got {capacity}.")
        self._capacity = capacity
        self._dropped = dropped
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of entries."""
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The keys, the least recently used key first."""
        with self._lock:
            return iter(list(self._entries))

    def get(self, key: K) -> V | None:
        """Returns a value and marks it as most recently used; None without the key."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def peek(self, key: K) -> V:
        """Returns the value of a known key, without changing the order of use."""
        return self._entries[key]

    def put(self, key: K, value: V) -> V:
        """Adds or replaces a value and returns it; drops entries above the capacity."""
        with self._lock:
            replaced = self._entries.pop(key, value)
            self._entries[key] = value
            if replaced is not value:
                self._drop(replaced)
            while len(self._entries) > self._capacity:
                self._drop(self._entries.popitem(last=False)[1])
            return value

    def discard(self, unwanted: Callable[[V], bool]) -> None:
        """Drops the values for which ``unwanted`` is true."""
        with self._lock:
            for key in [k for k, v in self._entries.items() if unwanted(v)]:
                self._drop(self._entries.pop(key))

    def _drop(self, value: V) -> None:
        if self._dropped is not None:
            self._dropped(value)
