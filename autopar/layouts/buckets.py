"""Which messages of gradients travel together in one collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from autopar.compression.exchange import Message

# A mesh axis, by number or by name.
A = TypeVar("A", int, str)

# The round of what a bucket sums and gathers over its fast links.
WITHIN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket(Generic[A]):
    """Gradients that are sent together have equal buckets.

    Attributes:
      number: of the plan's bucket.
      axes: mesh axes over which the codecs sum, all by number or all by
        name.
      within: mesh axes over which the gradients are summed before.
    """

    number: int
    axes: tuple[A, ...]
    within: tuple[A, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BucketCollective(Generic[A]):
    """Messages of one bucket that have the same round and kind are one collective.

    Attributes:
      bucket: the bucket.
      round: number of the codecs' round, or `WITHIN`.
      kind: as of `autopar.compression.exchange.Message`.
    """

    bucket: Bucket[A]
    round: int
    kind: str

    @property
    def axes(self) -> tuple[A, ...]:
        """The mesh axes over which it runs."""
        return self.bucket.within if self.round == WITHIN else self.bucket.axes


def bucket_messages(
    bucket: Bucket[A], rounds: Sequence[Message], within: Sequence[Message]
) -> Iterator[tuple[BucketCollective[A], Message]]:
    """Yields each message of one gradient with the collective that carries it.

    Args:
      bucket: the gradient's.
      rounds: what its codec sends, a message a round.
      within: what is sent over the fast links.
    """
    for number, message in enumerate(rounds):
        yield BucketCollective(bucket, number, message.kind), message
    for message in within:
        yield BucketCollective(bucket, WITHIN, message.kind), message
