"""The interface of codecs: how a gradient is encoded, sent and summed over workers.

A codec describes the communication of one gradient as a generator (`Codec.reduce`) that
yields requests (`autopar.compression.exchange`), one in each round. So the same rounds
of many gradients can be sent together. A codec sends exactly the messages that it
yields. `Codec.wire_bytes` counts their bytes by running the generator on abstract
values. The class of a codec also tells the planner what it needs to know: the codec's
error (`Codec.error`), its computing time (`Codec.cost`), and the parameters to choose
from (`Codec.choices`).

In shapes: n workers, c elements of one chunk, b bytes of one message. A partial
gradient comes as *chunks* ``(n, c)`` in float32, zero-padded; chunk ``i`` is the part
that worker ``i`` owns when the sum is scattered.
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

# For each kind of request: its name, and the dtype and dims of the array that is sent.
# The dim n is the number of workers; other dims may have any size.
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
    """Runs `Codec.reduce`, and checks each request that it yields.

    Args:
      make: calls `Codec.reduce`.
      chunks: the chunks passed to `Codec.reduce`, (n, c).
      state: the state passed to `Codec.reduce`.
      scatter: whether a worker needs only its chunk of the sum.
      where: names of codec and gradient, for error messages.

    Raises:
      InputError: a request or the result of the codec has a wrong form.
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
    """The generator's next request, or its result; and whether it is the result."""
    try:
        return (next(rounds) if answer is None else rounds.send(answer)), False
    except StopIteration as stop:
        return stop.value, True


def _call(function: Callable[[], Any], where: str, method: str = "reduce") -> Any:
    """Calls a function of the codec; errors name the codec.

    Raises:
      InputError: the function fails.
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
    """The shape of an array; None if the value is not an array."""
    return tuple(given.shape) if hasattr(given, "shape") else None


def _kind(given: Any) -> str:
    """Describes the type of a value, for an error."""
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
    """The facts about the step and the gradient that a codec gets.

    Attributes:
      workers: number of workers, n.
      worker: this worker's number, an int32 scalar.
      step: number of the step, an int32 scalar, the same on all workers.
      seed: a number that is different for each gradient of a step.
      shape: shape of the gradient on this device, before chunking.
      size: number of elements of the gradient; unless the sum is scattered, the chunks
        hold zeros after these elements.
      scatter: whether each worker needs only its own chunk of the sum.
      inputs: name -> int32 scalar, for those amounts (`Codec.amounts`) that are inputs
        of the program; None: all amounts are constants.
      room: the fraction of messages for which the send buffer has space, if not all of
        them is sent; see `UsedPart`.
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
        """An amount by name: an input of the program if there is one, otherwise
        ``constant``.
        """
        return constant if self.inputs is None else self.inputs[name]

    def part(self, used: int | jax.Array) -> UsedPart | None:
        """Describes which part of a message is used; None if amounts are constants."""
        if self.inputs is None:
            return None
        return UsedPart(jnp.asarray(used, jnp.int32), self.room)


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """Encodes, sends and sums gradients; the fields of a codec are its parameters.

    Class attributes: name: the name of the codec in text, as in ``int4:block=64``.
      feedback: whether the codec needs error feedback for training to converge. linear:
      whether the sum of the workers' encoded gradients equals the encoded sum. sound:
      whether a finite squared norm of the gradients implies that the sum over the
      workers is finite. If not, every sum is checked. lossless: whether the sum has no
      error other than float32 rounding. sized: name of the field that decides the
      message size, if this field can be an input of the program
      (`autopar.compression.adjusting`); '' if not. free: names of other fields that can
      be inputs of the program. restarts: names of `amounts`; if one of them changes,
      the codec's state is reset.
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
        """Makes a subclass measure its own error and cost if it sends other messages
        than its base class.
        """
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
        """Whether the class belongs to autopar, so that autopar's tests cover it."""
        return cls.__module__.startswith("autopar.")

    @classmethod
    def choices(cls) -> tuple[Self, ...]:
        """The codecs, with parameters, from which ``compression="auto"`` chooses.

        By default only one: the codec with the default values of its fields.
        """
        return (cls(),)

    def error(self, shape: tuple[int, ...]) -> float:
        """Expected relative error of one worker's gradient, in the L2 norm.

        By default it is measured on heavy-tailed random numbers (Student's t with four
          degrees of freedom). Most of autopar's own codecs state their error for such
          numbers, too.

        Args:
          shape: shape of the gradient on one device.
        """
        return _measured_error(self, _example(self, shape))

    def cost(self, shape: tuple[int, ...]) -> float:
        """Computing time of the codec, as a number of passes over the gradient.

        One pass is the time to read and write each float32 element once, on one core of
        a CPU. The cost includes all work of one worker for a step: encoding, decoding,
        error feedback and the measurements for reports. By default it is estimated from
        the traced program.

        Args:
          shape: shape of the gradient on one device.
        """
        return _counted_passes(self, _example(self, shape))

    def messages(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool = False
    ) -> tuple[Message, ...]:
        """The messages that one worker sends for a gradient, one in each round.

        The method runs `reduce` on abstract values to find them. So the result is
        exactly what a run sends.

        Args:
          shape: shape of the gradient on one device.
          workers: number of workers, n.
          scatter: whether each worker needs only its own part of the sum.
        """
        return _messages(self, shape, workers, scatter)

    def wire_bytes(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool = False
    ) -> float:
        """Bytes that one worker sends for a gradient; see `messages`."""
        found = self.messages(shape, workers, scatter=scatter)
        return sum(message.sent for message in found)

    def for_scattered_sum(self) -> Codec:
        """The codec to use if the sum stays scattered over the workers, so that no
        second shot is needed.
        """
        return self

    @property
    def adjustable(self) -> bool:
        """Whether the fields ``sized`` and ``free`` can be inputs of the program."""
        return bool(self.sized)

    def amounts(
        self, shape: tuple[int, ...], workers: int, *, scatter: bool
    ) -> dict[str, int]:
        """Whole numbers that follow from the fields ``sized`` and ``free`` for a
        gradient.

        `reduce` must read them with `CodecContext.amount`.

        Args:
          shape: shape of the gradient on one device.
          workers: number of workers.
          scatter: whether each worker needs only its own part of the sum.
        """
        del shape, workers, scatter
        return {}

    @property
    def unit(self) -> int:
        """The number of successive elements that a codec encodes on their own.

        Gradients that consist of whole units can be encoded together as one array
        (`autopar.compression.encoding`). The state of a codec with units must be one
        array with as many elements as a chunk, or (). Default: 0, which means that the
        gradient cannot be divided.
        """
        return 0

    def init(self, shape: tuple[int, ...], size: int, workers: int) -> State:
        """The state of one device before the first step; default: no state.

        Args:
          shape: shape of the gradient on one device.
          size: elements of all chunks together, padding included.
          workers: number of workers.
        """
        del shape, size, workers
        return ()

    def check(self, shape: tuple[int, ...], *, scatter: bool) -> str:
        """Why the codec cannot be used for a gradient of this shape; '' if it can."""
        del shape, scatter
        return ""

    def chunk(self, elements: int) -> int:
        """The smallest number of elements of a chunk, at least ``elements``, that the
        codec supports.

        Callers use this method only if the sum is not scattered. If the sum is
        scattered, the layout of the gradient decides the chunks.
        """
        return elements

    def extent(self, shape: tuple[int, ...]) -> float:
        """A number to which the sent bytes are proportional, apart from padding.

        From this number, the planner estimates the bytes for many shapes from the bytes
        for one shape. Default: the number of elements.

        Args:
          shape: shape of the gradient on one device.
        """
        return float(math.prod(shape))

    @abc.abstractmethod
    def reduce(self, chunks: jax.Array, state: State, context: CodecContext) -> Rounds:
        """Sums a gradient over the workers: yields a request in each round, returns the
        sum.

        Args:
          chunks: this worker's partial gradient, float32 (n, c).
          state: the state from `init` or from the previous step.
          context: facts of the step and the gradient.
        """


# A subclass that defines only these attributes sends the same messages as its base
# class.
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
    """Begins to sum a gradient; each request is checked when the codec yields it.

    Args:
      codec: the codec.
      chunks: this worker's partial gradient, float32 (n, c).
      state: the state from `Codec.init` or from the previous step.
      context: facts of the step and the gradient.
      name: name of the gradient, for error messages; '' for a sample of random numbers.
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
    """Checks a codec by running it on abstract values, once for each shape.

    Args:
      codec: the codec.
      shape: shape of the gradient on one device.
      workers: number of workers.
      scatter: whether each worker needs only its own part of the sum.
      name: name of the gradient.

    Raises:
      InputError: a request or the result of the codec has a wrong form.
    """
    try:
        codec.messages(shape, workers, scatter=scatter)
    except InputError:
        _worker_jaxpr(codec, shape, RecordingLinks(workers), scatter=scatter, name=name)
        raise


def chunk_elements(codec: Codec, size: int, workers: int, *, scatter: bool) -> int:
    """Number of elements in each chunk of a gradient.

    Raises:
      InputError: `Codec.chunk` fails, or its result is not a number of at least the
        elements of a chunk.
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
    """The jaxpr by which one worker computes a gradient's total, error and state."""
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


# Shape of the example gradient from which the bytes of other gradients are estimated:
# rows per worker, and columns. It is so large that block sizes and padding matter as
# little as in most gradients.
_ROWS, _COLUMNS = 64, 1024


def example_messages(
    codec: Codec, workers: int, *, scatter: bool = False
) -> tuple[tuple[Message, ...], float]:
    """The messages of an example gradient with 1024 columns, and its `Codec.extent`.

    The bytes of any other gradient are nearly proportional to its extent. So the
    planner need not run the codec on every shape.

    Args:
      codec: the codec.
      workers: number of workers, n.
      scatter: whether each worker needs only its own part of the sum.
    """
    shape = (_ROWS * workers, _COLUMNS)
    return codec.messages(shape, workers, scatter=scatter), codec.extent(shape)


# Shapes with which the error and the cost of a codec are measured. The first shape that
# the codec can send is used.
_EXAMPLES = ((256, 256), (1024, 1024), (1 << 16,))


def _example(codec: Codec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with which the error and the cost of a codec are measured."""
    alike = (s for s in _EXAMPLES if not codec.check(s, scatter=False))
    return next(alike, shape)


# To measure an error, a codec runs `_WARM_UP` steps that are not measured, and then
# `_COUNTED` steps that are. Steps are numbered from `_LATE`, because a codec may work
# differently in the first steps of a training.
_WARM_UP, _COUNTED, _LATE = 5, 4, 1_000_000


@functools.lru_cache(maxsize=1 << 10)
def _measured_error(codec: Codec, shape: tuple[int, ...]) -> float:
    """The error of a codec on random samples, as a root mean square over steps.

    The samples are in another order in each step, so that a codec cannot learn from
    earlier steps. If the codec makes no residual, the error of the sum is measured
    instead.
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
    # The error is rounded to six digits, so that it is the same on processors that
    # round differently.
    return float(f"{error:.6g}")


# Compiler options of programs that measure errors. Without them, the compiler removes
# conversions such as from float32 to bfloat16 and back, so that an error would seem to
# be zero.
KEEP_ROUNDINGS = {"xla_allow_excess_precision": False}


@functools.lru_cache(maxsize=1024)
def sample_encoder(codec: Codec, shape: tuple[int, ...], seed: int) -> tuple[Any, Any]:
    """Makes functions that run a codec on samples as the only worker.

    Args:
      codec: the codec.
      shape: shape of the samples.
      seed: a number that is different for each gradient.

    Returns:
      Two functions. The first makes the state before the first step. The second is a
      compiled step, which returns the L2 norm of the residual, the L2 norm of the sum's
      error, and the new state.
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


# The cost of a codec is estimated from a program for this number of workers.
_WORKERS = 4
# Passes over the gradient for error feedback; for one operation per element in a matrix
# product; and for one level of a sort. The second comes from autopar's low-rank codec,
# whose products take 0.33 passes for 8 operations.
_FEEDBACK, _PRODUCT, _SORT = 3.0, 0.04, 1.0
# Primitives that count as no passes: the compiler fuses them with others, or they move
# no data.
_FREE = {
    "bitcast_convert_type", "broadcast_in_dim", "iota", "optimization_barrier",
    "reshape", "slice", "squeeze",
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 10)
def _counted_passes(codec: Codec, shape: tuple[int, ...]) -> float:
    """Estimates the cost in passes from the arrays that one worker's program writes.

    For most of autopar's own codecs the estimate is 0.5 to 2.5 times the measured cost.
    """
    work = _work(_worker_jaxpr(codec, shape, RecordingLinks(_WORKERS)).jaxpr)
    return work / math.prod(shape) + _FEEDBACK * codec.feedback


def _work(jaxpr: Any) -> float:
    """The cost of a jaxpr: the sum of elements times passes for each.

    A loop of unknown length counts as one iteration. A conditional counts as the mean
    of its branches.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [_work(body) for body in subjaxprs(eqn)]
        kind, out = eqn.primitive.name, eqn.outvars
        if inner and not kind.startswith(("scatter", "reduce", "sort")):
            many = eqn.params["length"] if kind == "scan" else 1
            total += many * sum(inner) / (len(inner) if kind == "cond" else 1)
        elif kind not in _FREE:
            # Writing four bytes is half of a pass for one element.
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
