"""A codec turns a partial gradient into messages, and messages into a sum.

A codec describes the communication of one gradient as a generator. It yields a
request for each round of communication and is sent the answer, so that the
rounds of many gradients can be fused: `autopar.compression.exchange` runs all
generators of a bucket in step and makes one collective of what they ask for in
the same round. What a codec sends is therefore exactly what it yields, and
`exchange.wire_bytes` counts it by running the generator on abstract values.

Legend of shapes: n workers, c elements of one chunk, b bytes of one message.
A partial gradient comes as *chunks* ``(n, c)`` in float32, zero-padded; chunk
``i`` is the part that worker ``i`` owns when the sum is scattered.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

# A codec's state: a pytree of arrays local to one device.
State = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """How much of a request counts, where an input of the program says so.

    What counts comes first; behind it the answer holds zeros. Such requests travel
    without the rest (`autopar.compression.packing`).

    Attributes:
      used: elements of the last dim that count, an int32 scalar, the same on all
        workers.
      room: for what part of the last dim the message has room, if the requests that
        travel with it share theirs.
    """

    used: jax.Array
    room: float


@dataclasses.dataclass(frozen=True, slots=True)
class AllToAll:
    """Row i of ``payload``, uint8 (n, b), goes to worker i; answer: (n, b)."""

    payload: jax.Array
    part: Part | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllGather:
    """``payload``, uint8 (b,), goes to all; answer: (n, b)."""

    payload: jax.Array
    part: Part | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllReduce:
    """``values``, float32 (k,), are summed over the workers; answer: (k,)."""

    values: jax.Array
    part: Part | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReduceScatter:
    """``values``, float32 (n, c), are summed; answer: this worker's row, (c,)."""

    values: jax.Array
    part: Part | None = None


Request = AllToAll | AllGather | AllReduce | ReduceScatter


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a codec for one gradient.

    Attributes:
      total: the sum over all workers, (n, c), or this worker's row (c,) when
        scattered. Bit-identical on all workers.
      sent: what the others understood of this worker's own contribution,
        (n, c): the error is ``chunks - sent``. Or a function that makes it, from
        what is in memory anyway: a step that needs no error does not call it.
      state: the codec's new state.
      again: makes the total anew, from what is in memory anyway, for a branch that is
        seldom taken; None: such a branch reads the total.
    """

    total: jax.Array
    sent: jax.Array | Callable[[], jax.Array]
    state: State
    again: Callable[[], jax.Array] | None = None

    @property
    def understood(self) -> jax.Array:
        """What was ``sent``, as an array."""
        return self.sent() if callable(self.sent) else self.sent


Rounds = Generator[Request, jax.Array, Reduced]


@dataclasses.dataclass(frozen=True, slots=True)
class CodecContext:
    """The facts of the step that a codec knows.

    Attributes:
      workers: number of workers, n.
      worker: this worker's number, an int32 scalar.
      step: number of the step, an int32 scalar, the same on all workers.
      seed: a number of its own for each gradient of a step.
      shape: shape of the gradient on this device, before chunking.
      size: its number of elements; chunks hold zeros behind it when it is not
        scattered.
      scatter: whether each worker needs only its own chunk of the sum.
      inputs: `Codec.amounts` that are inputs of the program, int32 scalars by name;
        None: they are constants.
      room: see `Part`.
    """

    workers: int
    worker: jax.Array
    step: jax.Array
    seed: int
    shape: tuple[int, ...]
    size: int
    scatter: bool
    inputs: Mapping[str, jax.Array] | None = None
    room: float = 1.0

    def amount(self, name: str, constant: int) -> int | jax.Array:
        """An amount by name: the input of the program, or else the constant."""
        return constant if self.inputs is None else self.inputs[name]

    def part(self, used: int | jax.Array) -> Part | None:
        """The part of a request that counts; None where amounts are constants."""
        if self.inputs is None:
            return None
        return Part(jnp.asarray(used, jnp.int32), self.room)


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """A way to send gradients; its fields are its parameters.

    Class attributes:
      name: the word it is written with, as in ``int4:block=64``.
      feedback: whether its error must be fed back for training to converge.
      linear: whether the sum of what is sent is what the sum would send.
      sound: whether elements whose squares have a finite sum give a finite sum over
        the workers, whatever they are. Of other codecs every sum is looked at.
      sized: the field that decides how much is sent, where it can be an input of the
        program (`autopar.compression.adjusting`); '' where it cannot.
      free: other fields that can be inputs.
      restarts: names of `amounts` on whose change the state starts anew.
    """

    name: ClassVar[str]
    feedback: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    sound: ClassVar[bool] = False
    sized: ClassVar[str] = ""
    free: ClassVar[tuple[str, ...]] = ()
    restarts: ClassVar[tuple[str, ...]] = ()

    @property
    def adjustable(self) -> bool:
        """Whether ``sized`` and ``free`` can be inputs of the program."""
        return bool(self.sized)

    def amounts(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool
    ) -> dict[str, int]:
        """What ``sized`` and ``free`` are for a gradient, in whole numbers.

        `reduce` asks for them by `CodecContext.amount`.

        Args:
          shape: of the gradient on one device.
          workers: number of workers.
          scatter: whether each worker needs only its part of the sum.
        """
        del shape, workers, scatter
        return {}

    @property
    def unit(self) -> int:
        """Elements of a chunk that are sent by themselves, whatever is beside them.

        Gradients of whole units are encoded side by side
        (`autopar.compression.joining`); the state of such a codec is one array of a
        chunk's elements, or nothing. Default: 0, the gradient is one whole.
        """
        return 0

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """The state before the first step, of one device; default: none.

        Args:
          shape: shape of the gradient on one device.
          size: elements of all chunks together, padding included.
          workers: number of workers.
        """
        del shape, size, workers
        return ()

    def check(self, shape: tuple[int, ...], *, scatter: bool) -> str:
        """Says why the codec cannot be used for such a gradient, or ''."""
        del shape, scatter
        return ""

    def chunk(self, elements: int) -> int:
        """The smallest chunk of at least ``elements`` that it can work on.

        Only where the sum is not scattered; a scattered gradient has the chunks
        that its layout gives.
        """
        return elements

    def extent(self, shape: tuple[int, ...]) -> float:
        """The size to which the sent bytes are proportional, without padding.

        It is used to estimate the bytes of many shapes from those of one; default:
        the number of elements.

        Args:
          shape: shape of the gradient on one device.
        """
        return float(math.prod(shape))

    @abc.abstractmethod
    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """Sums a gradient over the workers, round by round.

        Args:
          chunks: this worker's partial gradient, float32 (n, c).
          state: of `init` or of the step before.
          context: the step.
        """
