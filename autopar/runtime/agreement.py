"""Process 0 plans, and all processes check that they hold the same plan.

When a process ends, it tells the other processes through this module. Without the
message, the others would wait for minutes: in the shutdown barrier of `jax.distributed`
if the process ended normally, and in a collective if it failed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import re
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import flax
import jax
import jaxlib
import msgspec
import numpy as np

from autopar import errors
from autopar.errors import PlanError, user_line
from autopar.plans import Plan
from autopar.plans.schema import Seconds, differences
from autopar.runtime.background import AbandonedError
from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.world import World
from autopar.steps.program_text import first_difference
from autopar.units import name_numbers
from autopar.version import __version__
from autopar_errors import warn_user
from autopar_passes import jax_compat

T = TypeVar("T")


class _Message(msgspec.Struct, omit_defaults=True):
    """A message from one process to the others.

    Attributes:
      what: the work that the sending process does, such as "planning".
      versions: versions of the packages on which the trace of a step depends.
      failed: the error text of a failed process; '' for other processes.
      kind: name of the error's class.
      where: the line of the user's code that raised the error.
      data: the bytes that the processes exchange.
    """

    what: str
    versions: dict[str, str] = {}
    failed: str = ""
    kind: str = ""
    where: str = ""
    data: bytes = b""


# The decoder is created at import, because msgspec crashes if two threads inspect the
# same type for the first time at once.
_MESSAGE = msgspec.msgpack.Decoder(_Message)


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages on which the trace of a step depends."""
    packages = {"jax": jax, "jaxlib": jaxlib, "flax": flax}
    return {name: p.__version__ for name, p in packages.items()} | {
        "autopar": __version__
    }


def exchange_data(world: World, what: str, data: bytes = b"") -> list[bytes]:
    """Exchanges data between all processes; returns process number -> its data.

    Args:
      world: the processes.
      what: the work that this process does, such as "planning"; named in errors.
      data: the data of this process.

    Raises:
      PlanError: a process has failed, does other work, or has other versions of JAX,
        Flax or autopar. Every process raises this error.
    """
    sent = msgspec.msgpack.encode(_Message(what, package_versions(), data=data))
    found = {
        process: _MESSAGE.decode(got)
        for process, got in sorted(world.channel.exchange(sent, what).items())
    }
    _check_failures(found)
    _check_versions({k: m.versions for k, m in found.items()})
    doing = {k: m.what for k, m in found.items()}
    if len(set(doing.values())) > 1:
        raise PlanError(
            f"the processes do different things: {by_process(doing)}. Every process "
            "must call the same step, with arguments of the same shapes, in the same "
            "order."
        )
    return [m.data for m in found.values()]


@contextlib.contextmanager
def tell_errors(world: World, what: str) -> Generator[None]:
    """Tells the other processes of an error that the ``with`` block raises.

    The other processes receive the error at their next call of `exchange_data`, and
    raise it there. Abandoned work tells nothing: this process has left the world.
    """
    try:
        yield
    except AbandonedError:
        raise
    except BaseException as error:
        if world.process_count > 1:
            world.channel.tell(_failure(what, error))
        raise


def message_of_end(failed: str, kind: str, where: str) -> bytes:
    """Encodes the message of a process that ends.

    The arguments are the fields of `_Message`. An empty ``kind`` means that the process
    ended without an error.
    """
    what = "running" if kind else ""
    return msgspec.msgpack.encode(
        _Message(what, package_versions(), failed, kind, where)
    )


def _failure(what: str, error: BaseException) -> bytes:
    """Encodes the message of a process that has failed.

    The message holds the error's text and the line of user code that raised it. If an
    error of autopar has a cause, the message holds the line that raised the cause.
    """
    kind = type(error).__name__
    text = " ".join(str(error).split()) or kind
    cause = error.__cause__ if hasattr(errors, kind) else error
    where = "" if cause is None else user_line(cause)
    return msgspec.msgpack.encode(_Message(what, package_versions(), text, kind, where))


def run_together(world: World, what: str, work: Callable[[], T]) -> T:
    """Calls a function on every process; if one call fails, all processes fail.

    Raises:
      PlanError: another process has failed.
    """
    with tell_errors(world, what):
        done = work()
    if world.process_count > 1:
        exchange_data(world, what)
    return done


def compare_between_processes(
    world: World, what: str, key: bytes, detail: Callable[[], Any]
) -> list[Any] | None:
    """Compares a key between processes, such as a digest of a plan.

    Args:
      world: the processes.
      what: the work that the processes do, such as "planning"; named in errors.
      key: bytes that must be equal on all processes.
      detail: returns plain data that the key is a digest of. The processes exchange
        this data only if their keys differ, so that an error can name the differences.

    Returns:
      The data from ``detail`` of each process if keys differ; None if all keys are
      equal.
    """
    digest = hashlib.sha256(key).digest()
    if len(set(exchange_data(world, what, digest))) == 1:
        return None
    data = zlib.compress(msgspec.msgpack.encode(detail()))
    found = exchange_data(world, f"{what}: what differs", data)
    return [msgspec.msgpack.decode(zlib.decompress(x)) for x in found]


def by_process(values: Mapping[int, Any] | Sequence[Any]) -> str:
    """Lists values with their processes: ``a on processes 0 and 2, b on process 1``."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    groups: dict[str, list[int]] = defaultdict(list)
    for process, value in pairs:
        groups[str(value)].append(process)
    return ", ".join(
        f"{value} on {name_numbers('process', who, 4)}" for value, who in groups.items()
    )


def _check_failures(found: Mapping[int, _Message]) -> None:
    """Raises the error of a failed process; errors of autopar keep their class."""
    for process, message in found.items():
        if not message.failed:
            continue
        kind = getattr(errors, message.kind, None)
        where = f" ({message.where})" if message.where else ""
        if not message.kind:
            raise PlanError(
                f"process {process}: {message.failed}, and this one goes on. Every "
                "process must call the same steps, as often."
            )
        if isinstance(kind, type) and issubclass(kind, errors.AutoparError):
            raise kind(f"process {process}: {message.failed}{where}")
        raise PlanError(
            f"process {process} has failed while {message.what}: {message.kind}: "
            f"{message.failed}{where}"
        )


def _check_versions(found: Mapping[int, Mapping[str, str]]) -> None:
    names = sorted({name for had in found.values() for name in had})
    differ = [
        f"{name} {by_process({k: had.get(name, 'none') for k, had in found.items()})}"
        for name in names
        if len({had.get(name) for had in found.values()}) > 1
    ]
    if differ:
        raise PlanError(
            f"the processes have different versions: {'; '.join(differ)}. Install the "
            "same on all."
        )


# The largest number of differing plan fields that an error message names.
_MOST = 4


def agree(world: World, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: process 0 found no plan. The other processes raise the same error.
    """
    if world.process_count == 1:
        return make()
    with tell_errors(world, "planning"):
        data = msgspec.json.encode(make()) if world.process_index == 0 else b""
    return Plan.from_json(exchange_data(world, "planning", data)[0])


def content_digest(plan: Plan) -> str:
    """Returns a digest of a plan's decisions: 32 hex digits.

    The digest ignores the seconds that planning took. It is computed from the plan as
    read back from JSON, which turns whole numbers in float fields into floats. So a
    plan has the same digest before and after it is saved.
    """
    solver = msgspec.structs.replace(plan.solver, seconds=0.0)
    zero = Seconds(trace=0.0, graph=0.0, solve=0.0, total=0.0)
    plain = msgspec.structs.replace(plan, solver=solver, seconds=zero)
    plain = Plan.from_json(msgspec.json.encode(plain))
    return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:32]


def check_same(
    world: World, plan: Plan, step: str, lines: Callable[[], list[str]]
) -> None:
    """Checks that all processes hold the same plan and trace the same step.

    The seconds that planning took may differ between the processes.

    Args:
      world: the processes.
      plan: this process's plan.
      step: a fingerprint of the step that this process traced.
      lines: returns the lines of the traced step, which an error compares.

    Raises:
      PlanError: the plans or the traced steps differ.
    """
    if world.process_count == 1:
        return
    texts = compare_between_processes(
        world, "comparing the traced steps", step.encode(), lines
    )
    if texts is not None:
        raise PlanError(_different_steps(texts))
    check_plans(world, plan)


def check_plans(world: World, plan: Plan) -> None:
    """Checks that all processes hold the same plan; only its planning times may differ.

    Raises:
      PlanError: the plans differ.
    """
    if world.process_count == 1:
        return
    digest = content_digest(plan).encode()
    plans = compare_between_processes(
        world, "comparing the plans", digest, plan.to_json
    )
    if plans is None:
        return
    odd = _odd(plans)
    first = 0 if odd else 1
    found = differences(plans[first], plans[odd])
    shown = [f"{path} is {a!r} and {b!r}" for path, a, b in found[:_MOST]]
    if len(found) > _MOST:
        shown.append(f"and {len(found) - _MOST} fields more")
    raise PlanError(
        f"the processes hold different plans: on process {first} and process {odd} "
        f"{'; '.join(shown)}. Pass the same plan= to every process."
    )


def _odd(values: Sequence[Any]) -> int:
    """Returns the first process whose value differs from the most common value.

    If there are two processes and their values differ, the result is process 1.
    """
    texts = [msgspec.json.encode(value) for value in values]
    common = Counter(texts).most_common(1)[0][0]
    return next(k for k, text in enumerate(texts) if text != common)


def _different_steps(texts: Sequence[list[str]]) -> str:
    odd = _odd(texts)
    first = 0 if odd else 1
    pair = first_difference(texts[first], texts[odd])
    assert pair is not None
    return (
        f"the processes trace different steps: process {odd} differs. The first "
        f"difference is: {pair[0]} on process {first}, {pair[1]} on process {odd}. Run "
        "the same code with the same settings on every process."
    )


def check_rows(world: World, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that every process passes the same number of rows of the batch.

    Args:
      world: the processes.
      shapes: the shape of each batch array that this process passes, by the array's
        path in the arguments.

    Raises:
      PlanError: the shapes differ between processes.
    """
    if world.process_count == 1:
        return
    named = {path: list(shape) for path, shape in shapes.items()}
    key = msgspec.json.encode(named)
    every = compare_between_processes(
        world, "comparing shapes of arguments", key, lambda: named
    )
    if every is None:
        return
    paths = dict.fromkeys(path for had in every for path in had)
    found = {path: [had.get(path, "absent") for had in every] for path in paths}
    differ = [
        f"'{path}' is {by_process(had)}"
        for path, had in found.items()
        if len(set(map(str, had))) > 1
    ]
    more = f"; and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    raise PlanError(
        f"the processes pass arrays of different shapes: {'; '.join(differ[:_MOST])}"
        f"{more}. A batch is split evenly, each process passes as many rows. Pad or "
        "drop the rest of the last batch."
    )


def check_equal(world: World, leaves: Mapping[str, Any], *, first: bool) -> None:
    """Checks that arrays have equal values on all processes.

    Each process holds its own copy of the arrays, and sends a digest of them.

    Args:
      world: the processes.
      leaves: the arrays, by path in the arguments.
      first: whether this is the first step of a program. In a first step, the processes
        exchange digests on the host, so that a process may send a failure instead. Else
        a collective of the devices gathers them, which is faster.

    Raises:
      PlanError: the values differ between processes.
    """
    if world.process_count == 1 or not leaves:
        return
    digests = digests_of(leaves)
    key = hashlib.sha256(repr(digests).encode()).digest()
    if first:
        every = exchange_data(world, "comparing values", key)
    else:
        every = world.channel.gather(key)
    if len(set(every)) > 1:
        refuse_different(world, digests)


# The arrays of at most so many steps are compared together. A comparison of 20 ms then
# adds about a millisecond to a step.
_MOST_STEPS = 16


class StepComparison:
    """Compares the arrays of steps between processes, of several steps at once.

    Each process holds its own copy of the arrays, and sends a digest of them. To
    compare digests in each step would make each step wait for the slowest process, also
    where the step itself sends nothing. The arrays of the first steps are compared
    soon, and later ones of up to `_MOST_STEPS` steps together.
    """

    def __init__(self) -> None:
        """Creates a comparison of nothing."""
        self._world: World | None = None
        self._held: list[dict[str, str]] = []
        self._most = 1

    def add(self, world: World, leaves: Mapping[str, Any]) -> None:
        """Adds the arrays of a step. All processes must add those of the same steps.

        Args:
          world: the processes.
          leaves: the arrays, by path in the arguments.

        Raises:
          PlanError: arrays of this step or of steps before differ between processes.
        """
        if world.process_count == 1 or not leaves:
            return
        if self._world is not world:  # processes may have left, with what they held
            self._world, self._held, self._most = world, [], 1
        self._held.append(digests_of(leaves))
        if len(self._held) >= self._most:
            self._most = min(2 * self._most, _MOST_STEPS)
            self.finish(world)

    def finish(self, world: World) -> None:
        """Compares what is not compared yet. All processes must call it.

        Raises:
          PlanError: arrays of a step differ between processes.
        """
        held, self._held = self._held, []
        if not held or self._world is not world:
            return
        key = hashlib.sha256(repr(held).encode()).digest()
        if len(set(world.channel.gather(key))) == 1:
            return
        for behind, digests in zip(range(len(held) - 1, -1, -1), held, strict=True):
            try:
                refuse_different(world, digests)
            except PlanError as error:
                raise PlanError(f"{error} {_when(behind)}") from None


def _when(behind: int) -> str:
    """Says in which step arrays differed, and what to do."""
    if not behind:
        return "They are those of the last step."
    ago = "one step" if behind == 1 else f"{behind} steps"
    return (
        f"They are those of {ago} before the last: all results since then are wrong, "
        "so go back to a checkpoint."
    )


def check_same_creation(
    world: World, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Checks that all processes will create the same state, before they create it.

    Each process has its own copy of the state's replicated arrays. If the copies
    differed, later steps would not notice it, and would compute wrong results.

    Args:
      world: the processes.
      function: creates the state.
      args: the arguments of the function.

    Raises:
      PlanError: the arguments, the arrays that the function closes over, or the traced
        functions differ.
    """
    if world.process_count == 1:
        return
    closed = jax.make_jaxpr(function)(*args)
    text = _ADDRESS.sub("", str(closed.jaxpr)).encode()
    given = {
        f"args{jax.tree_util.keystr(path)}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(args))
    }
    held = {f"array {k} of create_state": x for k, x in enumerate(closed.consts)}
    found = {
        name: leaf
        for name, leaf in (given | held).items()
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    }
    program = {"program of create_state": np.frombuffer(text, np.uint8)}
    check_equal(world, found | program, first=True)


def warn_of_equal_rows(world: World, rows: Mapping[str, Any]) -> None:
    """Warns if all processes pass the same rows of a batch. All processes must call it.

    Each process must pass its own part of the batch. If every process passes the whole
    batch, the step trains on each row several times.

    Args:
      world: the processes.
      rows: this process's rows of each batch array, by path in the arguments.
    """
    if world.process_count == 1 or not rows:
        return
    digest = (
        repr(digests_of(rows)).encode() if any(map(_varies, rows.values())) else b""
    )
    every = exchange_data(world, "comparing rows", hashlib.sha256(digest).digest())
    if not digest or len(set(every)) > 1:
        return
    count = max(np.shape(x)[0] for x in rows.values())
    warn_user(
        f"all {world.process_count} processes pass the same {count} rows of "
        f"{', '.join(map(repr, list(rows)[:_MOST]))}. Each must pass its own part of "
        f"the batch: process k the rows from k * n to (k + 1) * n, where n is the rows "
        f"of the whole batch divided by {world.process_count}."
    )


def _varies(rows: Any) -> bool:
    """Whether some row differs from the first; False for an array of zeros."""
    array = np.asarray(rows)
    return bool((array != array[:1]).any())


def digests_of(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each array, by path; each array must be whole here."""
    return {path: _digest(leaf) for path, leaf in leaves.items()}


def refuse_different(world: World, digests: Mapping[str, str]) -> None:
    """Raises an error that names the arrays that differ between processes.

    All processes must call this function.

    Args:
      world: the processes.
      digests: the digest of this process's copy of each array, by path.

    Raises:
      PlanError: the digests of some arrays differ.
    """
    data = msgspec.json.encode(digests)
    every = exchange_data(world, "comparing values: what differs", data)
    found = [msgspec.json.decode(had) for had in every]
    paths = dict.fromkeys(path for had in found for path in had)
    differ = [p for p in paths if len({had.get(p, "") for had in found}) > 1]
    if not differ:
        return
    more = f" and {len(differ) - _MOST} more" if len(differ) > _MOST else ""
    raise PlanError(
        f"{', '.join(map(repr, differ[:_MOST]))}{more}: different values on the "
        "processes. State, keys, scalars and arrays of whole_argnames=, which are not "
        "split over processes, must be the same on each. Create them from the same "
        "seed, or state with init(...)."
    )


# The memory address of a Python object in the text of a program; it differs between
# processes.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _digest(leaf: Any) -> str:
    keyed = jax_compat.is_extended(jax.typeof(leaf).dtype)
    array = np.asarray(jax.random.key_data(leaf) if keyed else leaf)
    digest = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def shared_number(world: World, value: float) -> float:
    """Returns on every process the number that process 0 passes."""
    return float(shared_array(world, np.asarray(value)))


def shared_array(world: World, values: np.ndarray) -> np.ndarray:
    """Returns on every process the array that process 0 passes."""
    if world.process_count == 1:
        return values
    data = world.channel.broadcast(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(data, dtype=values.dtype).reshape(values.shape)


# Keys in the key-value store of the coordination service. The first stores the error
# of the process that failed first. The second is a prefix of one key for each process
# that has ended.
_FAILED, _ENDED = "autopar/failed", "autopar/ended"
# Process 0 runs the coordination service. When process 0 fails, it waits at most
# _STAY_S seconds for the other processes to read its error. It checks every _POLL_S
# seconds whether they have ended.
_STAY_S, _POLL_S = 3.0, 0.05
# Seconds that process 0 goes on waiting after all processes have announced their end.
_LEAVE_S = 0.5


def announce_end() -> None:
    """Registers the exit hook by which this process tells the others that it ends.

    Does nothing if the coordination service of `jax.distributed` does not run.
    """
    if jax_compat.coordination() is not None:
        atexit.unregister(_end)  # so that the hook runs only once
        atexit.register(_end)


def leave_at_end() -> None:
    """Makes this process exit without waiting for the others, one of which is lost."""
    atexit.unregister(jax_compat.leave_coordination)
    atexit.register(jax_compat.leave_coordination)


def _end() -> None:
    """Tells the other processes that this process ends, and with which error.

    Python runs exit hooks in reverse order of registration, so this hook runs before
    the hook of `jax.distributed`, which waits for all processes.
    """
    found = jax_compat.coordination()
    if found is None or found.count == 1:
        return
    error = getattr(sys, "last_value", None)  # the uncaught exception
    service = KeyValueExchange(found.client, found.index, found.count)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        found.client.key_value_set(f"{_ENDED}/{found.index}", "")
    if error is None:
        service.tell(message_of_end("its program has come to the end", "", ""))
        return
    text = " ".join(str(error).split())
    line = user_line(error)
    service.tell(message_of_end(text, type(error).__name__, line))
    _report(found, f"{type(error).__name__}: {text}{f' ({line})' if line else ''}")
    if found.index == 0:
        _stay(found)
    jax_compat.leave_coordination()


def _stay(found: jax_compat.Coordination) -> None:
    """Keeps process 0 alive for a few seconds, so that others can read its error.

    The key-value store runs in process 0 and ends with it.
    """
    end = time.monotonic() + _STAY_S
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while time.monotonic() < end:
            if len(found.client.key_value_dir_get(_ENDED)) == found.count:
                time.sleep(_LEAVE_S)
                return
            time.sleep(_POLL_S)


def _report(found: jax_compat.Coordination, text: str) -> None:
    """Prints the error of the process that failed first, unless it is this one."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found.client.key_value_set(_FAILED, f"process {found.index}: {text}")
            return
        first = found.client.key_value_try_get(_FAILED)
        print(f"autopar: the first failure was that of {first}", file=sys.stderr)
