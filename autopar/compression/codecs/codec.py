"""A codec turns a partial gradient into messages, and messages into a sum.

A codec describes the communication of one gradient as a generator of requests
(`autopar.compression.exchange`), so that the rounds of many gradients can be fused.
What it sends is exactly what it yields, and `Codec.wire_bytes` counts it by running the
generator on abstract values. All that a planner asks of a codec stands in its class:
what it sends, loses (`Codec.error`) and costs (`Codec.cost`), and which of its
parameters there are to choose from (`Codec.choices`).

Legend of shapes: n workers, c elements of one chunk, b bytes of one message.
A partial gradient comes as *chunks* ``(n, c)`` in float32, zero-padded; chunk
``i`` is the part that worker ``i`` owns when the sum is scattered.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar.compression.exchange import (
    AllGather,
    AllReduce,
    AllToAll,
    Message,
    RecordingLinks,
    Reduced,
    ReduceScatter,
    Request,
    Rounds,
    State,
    UsedPart,
    exchange,
)
from autopar_errors import AutoparError, InputError, user_line
from autopar_passes.jax_compat import subjaxprs

# Of each request: the name and type of what is sent, and its dims; n is the number of
# workers, and letters are free.
_REQUESTS: dict[type[Any], tuple[str, str, tuple[str, ...]]] = {
    AllReduce: ("values", "float32", ("k",)),
    ReduceScatter: ("values", "float32", ("n", "k")),
    AllToAll: ("payload", "uint8", ("n", "b")),
    AllGather: ("payload", "uint8", ("b",)),
}
_EXAMPLE = (
    "reduce yields what it sends and returns what came of it: `total = yield "
    "AllReduce(...)`, then `return Reduced(total, sent, state)`"
)


def checked_rounds(
    make: Callable[[], Rounds],
    chunks: jax.Array,
    state: State,
    *,
    scatter: bool,
    where: str,
) -> Rounds:
    """The rounds of a codec, each checked as it is asked for.

    Args:
      make: calls `Codec.reduce`.
      chunks: that it is given, (n, c).
      state: that it is given.
      scatter: whether a worker needs only its chunk of the sum.
      where: names the codec and the gradient in errors.

    Raises:
      InputError: what it asks for, or returns, does not fit.
    """
    made: Any = _call(make, where)
    if not inspect.isgenerator(made):
        raise InputError(
            f"{where}: reduce has no `yield`, and returns {_kind(made)}. {_EXAMPLE}."
        )
    rounds: Rounds = cast("Rounds", made)
    answer: jax.Array | None = None
    while True:
        asked, ended = _call(lambda given=answer: _next(rounds, given), where)
        if ended:
            return _checked_result(asked, chunks, state, scatter=scatter, where=where)
        _check_request(asked, len(chunks), where)
        answer = yield asked


def _next(rounds: Rounds, answer: jax.Array | None) -> tuple[Any, bool]:
    """The next request, or what is returned, and whether it is that."""
    try:
        return (next(rounds) if answer is None else rounds.send(answer)), False
    except StopIteration as stop:
        return stop.value, True


def _call(function: Callable[[], Any], where: str, method: str = "reduce") -> Any:
    """What a function of the codec returns; its errors name the codec.

    Raises:
      InputError: it fails.
    """
    try:
        return function()
    except AutoparError:
        raise
    except Exception as error:
        line = user_line(error)
        text = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{where}: {method} fails{f' at {line}' if line else ''}: "
            f"{type(error).__name__}: {text}"
        ) from error


def _check_request(asked: Request, workers: int, where: str) -> None:
    known = _REQUESTS.get(type(asked))
    if known is None:
        raise InputError(f"{where}: reduce yields {_kind(asked)}. {_EXAMPLE}.")
    name, dtype, dims = known
    given: Any = getattr(asked, name)
    shape = _shape(given)
    fits = shape is not None and len(shape) == len(dims)
    if dims[0] == "n" and fits and shape is not None:
        fits = shape[0] == workers
    if not fits or jnp.result_type(given).name != dtype:
        wanted = ", ".join(str(workers) if d == "n" else d for d in dims)
        comma = "," if len(dims) == 1 else ""
        raise InputError(
            f"{where}: {type(asked).__name__}({name}) takes {dtype} of shape "
            f"({wanted}{comma}), got {_kind(given)}."
        )


def _checked_result(
    made: Reduced, chunks: jax.Array, state: State, *, scatter: bool, where: str
) -> Reduced:
    if type(made) is not Reduced:
        raise InputError(f"{where}: reduce returns {_kind(made)}. {_EXAMPLE}.")
    expected = {"total": chunks.shape[1:] if scatter else chunks.shape}
    if not callable(made.sent):
        expected["sent"] = chunks.shape
    for name, shape in expected.items():
        given = getattr(made, name)
        if _shape(given) != shape:
            when = " where the sum is scattered" if scatter and name == "total" else ""
            raise InputError(
                f"{where}: Reduced.{name} must have the shape {shape}{when}, got "
                f"{_kind(given)}."
            )
    before, after = _describe_state(state), _describe_state(made.state)
    if before != after:
        raise InputError(
            f"{where}: Reduced.state is {after}, and init or the step before gave "
            f"{before}; both must be alike."
        )
    return made


def _describe_state(state: State) -> str:
    return str(jax.tree.map(_kind, state))


def _shape(given: Any) -> tuple[int, ...] | None:
    """The shape of an array; None: it is none."""
    return tuple(given.shape) if hasattr(given, "shape") else None


def _kind(given: Any) -> str:
    """What something is, for an error."""
    shape = _shape(given)
    if shape is None:
        return "None" if given is None else f"a {type(given).__name__}"
    return f"{jnp.result_type(given).name} of shape {shape}"


__all__ = [
    "KEEP_ROUNDINGS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Codec",
    "CodecContext",
    "ReduceScatter",
    "Reduced",
    "Request",
    "Rounds",
    "State",
    "UsedPart",
    "begin_rounds",
    "check_codec",
    "chunk_elements",
    "example_messages",
    "sample_encoder",
]


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
      room: see `UsedPart`.
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

    def part(self, used: int | jax.Array) -> UsedPart | None:
        """The part of a request that counts; None where amounts are constants."""
        if self.inputs is None:
            return None
        return UsedPart(jnp.asarray(used, jnp.int32), self.room)


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """A way to send gradients; its fields are its parameters.

    Class attributes:
      name: the word it is written with, as in ``int4:block=64``.
      feedback: whether its error must be fed back for training to converge.
      linear: whether the sum of what is sent is what the sum would send.
      sound: whether elements whose squares have a finite sum give a finite sum over
        the workers, whatever they are. Of other codecs every sum is looked at.
      lossless: whether the sum is the exact one, in float32.
      sized: the field that decides how much is sent, where it can be an input of the
        program (`autopar.compression.adjusting`); '' where it cannot.
      free: other fields that can be inputs.
      restarts: names of `amounts` on whose change the state starts anew.
    """

    name: ClassVar[str]
    feedback: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    sound: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    sized: ClassVar[str] = ""
    free: ClassVar[tuple[str, ...]] = ()
    restarts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Has figures measured anew of a class that sends something else."""
        super().__init_subclass__(**kwargs)
        for figure in ("error", "cost"):
            for base in cls.__mro__:
                if figure in vars(base):
                    break
                fields = vars(base).get("__annotations__", ())
                if set(vars(base)) - set(fields) - _SENDS_AS_BEFORE:
                    setattr(cls, figure, vars(Codec)[figure])
                    break

    @classmethod
    def is_of_package(cls) -> bool:
        """Whether autopar has the class, which is tested with it."""
        return cls.__module__.startswith("autopar.")

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """The parameters that ``compression="auto"`` chooses from.

        Default: those that the class has by default.
        """
        return (cls(),)

    def error(self, shape: tuple[int, ...]) -> float:
        """Expected relative error of one worker's gradient, in the L2 norm.

        Default: measured on heavy-tailed samples (Student's t with four degrees of
        freedom), as most of the package's own codecs state it.

        Args:
          shape: of the gradient on one device.
        """
        return _measured_error(self, _example(self, shape))

    def cost(self, shape: tuple[int, ...]) -> float:
        """Work of encoding and decoding, in passes over the gradient.

        A pass reads and writes each float32 element once, on one core of a CPU. It
        holds all that one worker does: feedback, and what a step reports. Default:
        counted in the traced program.

        Args:
          shape: of the gradient on one device.
        """
        return _counted_passes(self, _example(self, shape))

    def messages(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool = False
    ) -> tuple[Message, ...]:
        """The messages for one gradient, one a round.

        The generator is run on abstract values, so this is what is sent.

        Args:
          shape: of the gradient on one device.
          workers: number of workers, n.
          scatter: whether each worker needs only its part of the sum.
        """
        return _messages(self, shape, workers, scatter)

    def wire_bytes(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool = False
    ) -> float:
        """Bytes that one worker sends for a gradient; see `messages`."""
        found = self.messages(shape, workers, scatter=scatter)
        return sum(message.sent for message in found)

    def for_scattered_sum(self) -> Codec:
        """The codec for a sum that stays scattered, which has no second shot."""
        return self

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
        (`autopar.compression.encoding`); the state of such a codec is one array of a
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


# What a class may say for itself and still send what its base sends.
_SENDS_AS_BEFORE = frozenset(
    ("__annotate__", "__annotate_func__", "__annotations__", "__doc__",
     "__firstlineno__", "__module__", "__post_init__", "__qualname__",
     "__static_attributes__", "check", "choices", "cost", "error", "extent", "feedback",
     "free", "linear", "lossless", "name", "restarts", "sized", "sound"),
)  # fmt: skip


def begin_rounds(
    codec: Codec,
    chunks: jax.Array,
    state: State,
    context: CodecContext,
    name: str = "",
) -> Rounds:
    """Begins to sum a gradient; what does not fit is refused as it comes.

    Args:
      codec: the codec.
      chunks: this worker's partial gradient, float32 (n, c).
      state: of `Codec.init` or of the step before.
      context: the step.
      name: of the gradient, for errors; '': it is a sample.
    """
    which = f"gradient {name!r}" if name else "a sample"
    return checked_rounds(
        lambda: codec.reduce(chunks, state, context),
        chunks,
        state,
        scatter=context.scatter,
        where=f"codec {codec.name!r}, {which} of shape {context.shape}",
    )


def check_codec(
    codec: Codec, shape: tuple[int, ...], workers: int, *, scatter: bool, name: str
) -> None:
    """Checks a codec on abstract values, once for each shape.

    Args:
      codec: the codec.
      shape: of the gradient on one device.
      workers: number of workers.
      scatter: whether each worker needs only its part of the sum.
      name: of the gradient.

    Raises:
      InputError: what it asks for, or returns, does not fit.
    """
    try:
        codec.messages(shape, workers, scatter=scatter)
    except InputError:
        _worker_jaxpr(codec, shape, RecordingLinks(workers), scatter=scatter, name=name)
        raise


def chunk_elements(codec: Codec, size: int, workers: int, *, scatter: bool) -> int:
    """Elements of one of the chunks that a gradient is cut into.

    Raises:
      InputError: `Codec.chunk` fails, or returns no number that is large enough.
    """
    if scatter:
        return size // workers
    least = max(1, -(-size // workers))
    where = f"codec {codec.name!r}, a chunk of {least} elements"
    found = _call(lambda: codec.chunk(least), where, "chunk")
    if not isinstance(found, int) or found < least:
        raise InputError(f"{where}: chunk returns {found!r}; return {least} or more.")
    return found


@functools.lru_cache(maxsize=1 << 14)
def _messages(
    codec: Codec, shape: tuple[int, ...], workers: int, scatter: bool
) -> tuple[Message, ...]:
    """See `Codec.messages`."""
    if not math.prod(shape):
        return ()
    links = RecordingLinks(workers)
    _worker_jaxpr(codec, shape, links, scatter=scatter)
    return tuple(links.messages)


def _worker_jaxpr(
    codec: Codec,
    shape: tuple[int, ...],
    links: RecordingLinks,
    *,
    scatter: bool = False,
    name: str = "",
) -> Any:
    """The jaxpr of what one worker does for a gradient: total, error and state."""
    size, n = math.prod(shape), links.workers
    chunk = chunk_elements(codec, size, n, scatter=scatter)

    def run(chunks: jax.Array, state: State, number: jax.Array) -> Any:
        context = CodecContext(n, number, number, 0, shape, size, scatter)
        made = exchange([begin_rounds(codec, chunks, state, context, name)], links)[0]
        return made.total, chunks - made.sent_array, made.state

    return jax.make_jaxpr(run)(
        jax.ShapeDtypeStruct((n, chunk), jnp.float32),
        jax.eval_shape(lambda: codec.init(shape, n * chunk, n)),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


# Rows for each worker and columns of the gradient that estimates start from: wide
# enough that blocks and padding weigh as little as in most gradients.
_ROWS, _COLUMNS = 64, 1024


def example_messages(
    codec: Codec, workers: int, *, scatter: bool = False
) -> tuple[tuple[Message, ...], float]:
    """The messages of a gradient of 1024 columns, and its `Codec.extent`.

    Those of any other are nearly in proportion to its extent, which spares running
    the codec on every shape.

    Args:
      codec: the codec.
      workers: number of workers, n.
      scatter: whether each worker needs only its part of the sum.
    """
    shape = (_ROWS * workers, _COLUMNS)
    return codec.messages(shape, workers, scatter=scatter), codec.extent(shape)


# Gradients of which figures are measured; the first that the codec can send is taken.
_EXAMPLES = ((256, 256), (1024, 1024), (1 << 16,))


def _example(codec: Codec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of which the codec's figures are measured."""
    alike = (s for s in _EXAMPLES if not codec.check(s, scatter=False))
    return next(alike, shape)


# Encodings of a sample by a codec before its error counts, and those that count. Their
# numbers are those of steps late in training: a codec may do something else at first.
_WARM_UP, _COUNTED, _LATE = 5, 4, 1_000_000


@functools.lru_cache(maxsize=1 << 10)
def _measured_error(codec: Codec, shape: tuple[int, ...]) -> float:
    """The error of samples, a root mean square over some steps.

    Each step has them in another order: nothing is to be learned from those before.
    Where nothing is left to be sent later, what the sum lost.
    """
    random = np.random.default_rng(0)
    sample = random.standard_t(4.0, shape).astype(np.float32)
    with jax.ensure_compile_time_eval():
        begin, encode = sample_encoder(codec, shape, 0)
        state = begin()
        found: list[tuple[float, float]] = []
        for step in range(_WARM_UP + _COUNTED):
            values = jnp.asarray(random.permutation(sample.ravel()).reshape(shape))
            left, lost, state = encode(values, state, jnp.int32(_LATE + step))
            found.append((float(left), float(lost)))
    left, lost = np.sqrt(np.mean(np.square(found[_WARM_UP:]), axis=0))
    error = float((left or lost) / np.linalg.norm(sample))
    if not math.isfinite(error):
        raise InputError(
            f"{type(codec).__qualname__}: what it makes of a finite gradient of shape "
            f"{shape} is not finite; state its error(shape), or mend reduce."
        )
    # Processors that round differently agree.
    return float(f"{error:.6g}")


# Options of programs that measure errors: the compiler otherwise leaves out a rounding
# that is undone at once, such as one to bfloat16 and back, and nothing seems lost.
KEEP_ROUNDINGS = {"xla_allow_excess_precision": False}


@functools.lru_cache(maxsize=1024)
def sample_encoder(codec: Codec, shape: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    """Encodes samples of a gradient as the only worker.

    Args:
      codec: the codec.
      shape: of the samples.
      seed: a number of its own for each gradient.

    Returns:
      A function that makes the state before the first step, and a compiled step: the
      L2 norms of what is left to be sent and of what the sum lost, and the new state.
    """
    size = math.prod(shape)
    chunk = chunk_elements(codec, size, 1, scatter=False)

    def encode(values: jax.Array, state: State, step: jax.Array) -> Any:
        chunks = jnp.pad(values.reshape(-1), (0, chunk - size)).reshape(1, chunk)
        context = CodecContext(1, jnp.int32(0), step, seed, shape, size, False)
        rounds = [begin_rounds(codec, chunks, state, context)]
        made = exchange(rounds, RecordingLinks(1))[0]
        left = jnp.linalg.norm(chunks - made.sent_array)
        return left, jnp.linalg.norm(chunks - made.total), made.state

    exact = jax.jit(encode, compiler_options=KEEP_ROUNDINGS)
    return lambda: codec.init(shape, chunk, 1), exact


# Workers of the program in which passes are counted.
_WORKERS = 4
# Passes of feedback; of an operation of a product, which the package's low-rank codec
# takes 0.33 for each 8 of; and of a level of a sort.
_FEEDBACK, _PRODUCT, _SORT = 3.0, 0.04, 1.0
# Operators that a compiler merges with others, or that move nothing.
_FREE = {
    "bitcast_convert_type", "broadcast_in_dim", "iota", "optimization_barrier",
    "reshape", "slice", "squeeze",
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 10)
def _counted_passes(codec: Codec, shape: tuple[int, ...]) -> float:
    """Passes by the arrays that the program of one worker writes.

    Of most of the package's codecs this gives 0.5 to 2.5 times what was measured.
    """
    work = _work(_worker_jaxpr(codec, shape, RecordingLinks(_WORKERS)).jaxpr)
    return work / math.prod(shape) + _FEEDBACK * codec.feedback


def _work(jaxpr: Any) -> float:
    """Work of a jaxpr, in passes of an element.

    A loop of unknown length counts once, of branches the mean.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [_work(body) for body in subjaxprs(eqn)]
        kind, out = eqn.primitive.name, eqn.outvars
        if inner and not kind.startswith(("scatter", "reduce", "sort")):
            many = eqn.params["length"] if kind == "scan" else 1
            total += many * sum(inner) / (len(inner) if kind == "cond" else 1)
        elif kind not in _FREE:
            # Half of a pass is its writing of four bytes.
            total += sum(v.aval.size * v.aval.dtype.itemsize for v in out) / 8
        if kind == "dot_general":
            ((left, _), _) = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = math.prod(shape[d] for d in left)
            total += _PRODUCT * 2 * depth * out[0].aval.size
        if kind in ("sort", "top_k"):
            size = eqn.invars[0].aval.size
            total += _SORT * size * math.log2(max(2, size))
    return total
