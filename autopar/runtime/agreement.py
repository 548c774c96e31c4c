"""One process plans; all processes check that they hold the same plan.

Tells the other processes when this one ends, so that none waits for it.

At the end of a program `jax.distributed` waits minutes for all processes. One that has
failed would keep the others in a collective as long.
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
from autopar.runtime.key_values import KeyValueExchange
from autopar.runtime.world import World
from autopar.steps.program_text import first_difference
from autopar.units import name_numbers
from autopar.version import __version__
from autopar_errors import warn_user
from autopar_passes import jax_compat

T = TypeVar("T")


class _Message(msgspec.Struct, omit_defaults=True):
    """What a process passes.

    Attributes:
      what: is being done.
      versions: of the packages that decide what a step is traced to.
      failed: the error of a process that has failed; '' otherwise.
      kind: the class of that error.
      where: the user's line that raised it.
      data: what is exchanged.
    """

    what: str
    versions: dict[str, str] = {}
    failed: str = ""
    kind: str = ""
    where: str = ""
    data: bytes = b""


# Made at import: msgspec crashes where two threads find out about one type at once.
_MESSAGE = msgspec.msgpack.Decoder(_Message)


def package_versions() -> dict[str, str]:
    """The versions of the packages that decide what a step is traced to."""
    packages = {"jax": jax, "jaxlib": jaxlib, "flax": flax}
    return {name: p.__version__ for name, p in packages.items()} | {
        "autopar": __version__
    }


def exchange_data(world: World, what: str, data: bytes = b"") -> list[bytes]:
    """Returns what each process passes, by process.

    Args:
      world: the processes.
      what: is being done, such as "planning".
      data: what this process passes.

    Raises:
      PlanError: a process has failed, does something else, or has other versions of
        JAX, Flax or autopar. Every process raises it.
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
    """Tells the other processes what is raised inside, at their next exchange."""
    try:
        yield
    except BaseException as error:
        if world.process_count > 1:
            world.channel.tell(_failure(what, error))
        raise


def message_of_end(failed: str, kind: str, where: str) -> bytes:
    """What a process tells that ends: the error that nobody caught, or that it ends."""
    what = "running" if kind else ""
    return msgspec.msgpack.encode(
        _Message(what, package_versions(), failed, kind, where)
    )


def _failure(what: str, error: BaseException) -> bytes:
    """What a process tells that has failed.

    An error of autopar says all in its message, but for the line of its cause.
    """
    kind = type(error).__name__
    text = " ".join(str(error).split()) or kind
    cause = error.__cause__ if hasattr(errors, kind) else error
    where = "" if cause is None else user_line(cause)
    return msgspec.msgpack.encode(_Message(what, package_versions(), text, kind, where))


def run_together(world: World, what: str, work: Callable[[], T]) -> T:
    """Does something on every process; fails on all where it fails on one.

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
    """Compares something between processes.

    Args:
      world: the processes.
      what: is compared.
      key: what must be equal.
      detail: what is exchanged where it is not: plain data.

    Returns:
      The detail of each process where keys differ, or None.
    """
    digest = hashlib.sha256(key).digest()
    if len(set(exchange_data(world, what, digest))) == 1:
        return None
    data = zlib.compress(msgspec.msgpack.encode(detail()))
    found = exchange_data(world, f"{what}: what differs", data)
    return [msgspec.msgpack.decode(zlib.decompress(x)) for x in found]


def by_process(values: Mapping[int, Any] | Sequence[Any]) -> str:
    """Values and who has them: ``'a' on processes 0 and 2, 'b' on process 1``."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    groups: dict[str, list[int]] = defaultdict(list)
    for process, value in pairs:
        groups[str(value)].append(process)
    return ", ".join(
        f"{value} on {name_numbers('process', who, 4)}" for value, who in groups.items()
    )


def _check_failures(found: Mapping[int, _Message]) -> None:
    """Raises what a process has failed with, as the same class where it is ours."""
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


# Differences that an error names.
_MOST = 4


def agree(world: World, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that process 0 makes, on every process.

    Raises:
      PlanError: process 0 found none; the other processes raise what it raised.
    """
    if world.process_count == 1:
        return make()
    with tell_errors(world, "planning"):
        data = msgspec.json.encode(make()) if world.process_index == 0 else b""
    return Plan.from_json(exchange_data(world, "planning", data)[0])


def content_digest(plan: Plan) -> str:
    """32 hex digits of what a plan decides; how long planning took is left out.

    A plan keeps them when it is saved and read, which turns whole numbers into
    floats where these are declared.
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

    How long planning took may differ.

    Args:
      world: the processes.
      plan: this process's plan.
      step: identity of the step that this process traced.
      lines: the text of that step, for an error.

    Raises:
      PlanError: they do not.
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
    """Checks that all processes hold the same plan, but for its times.

    Raises:
      PlanError: they do not.
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
    """The process that differs from most others; of two, the second."""
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
    """Checks that every process passes as many rows of the batch.

    Args:
      world: the processes.
      shapes: path -> shape of the arrays that this process passes.

    Raises:
      PlanError: they do not.
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


def check_equal(
    world: World, leaves: Mapping[str, Any], *, first: bool = False
) -> None:
    """Checks that arrays that each process holds alone are equal in all processes.

    Only a digest is sent, by the devices: this is done in every step.

    Args:
      world: the processes.
      leaves: path -> array.
      first: whether a process may fail in place of this, as in a first step.

    Raises:
      PlanError: they do not.
    """
    if world.process_count == 1 or not leaves:
        return
    digests = digests_of(leaves)
    key = hashlib.sha256(repr(digests).encode()).digest()
    gather = (
        (lambda: exchange_data(world, "comparing values", key))
        if first
        else (lambda: world.channel.gather(key))
    )
    if len(set(gather())) > 1:
        refuse_different(world, digests)


def check_same_creation(
    world: World, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Checks that all processes make the same state, before it is made.

    Copies of what is not split lie on all of them, and nothing would find out later
    that they differ.

    Args:
      world: the processes.
      function: makes the state.
      args: its arguments.

    Raises:
      PlanError: arguments, arrays that the function holds, or what it does differ.
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
    """Warns where all processes pass the same rows of a batch; all must call it.

    Each passes its own part of the batch; one that passes all of it trains on each
    row several times.

    Args:
      world: the processes.
      rows: path -> rows of this process.
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
    """Whether rows are not all alike, as those of zeros are."""
    array = np.asarray(rows)
    return bool((array != array[:1]).any())


def digests_of(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Path -> digest of an array that this process has all of."""
    return {path: _digest(leaf) for path, leaf in leaves.items()}


def refuse_different(world: World, digests: Mapping[str, str]) -> None:
    """Says which arrays differ between processes; all must call it.

    Args:
      world: the processes.
      digests: path -> digest of this process's array.

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
        "processes. State, keys and scalars, which are not split over processes, must "
        "be the same on each. Create them from the same seed, or with init(...)."
    )


# Where an object lies in memory, as a program's text may say.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _digest(leaf: Any) -> str:
    keyed = jax_compat.is_extended(jax.typeof(leaf).dtype)
    array = np.asarray(jax.random.key_data(leaf) if keyed else leaf)
    digest = hashlib.sha256(f"{array.shape} {array.dtype}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def shared_number(world: World, value: float) -> float:
    """The first process's number, on every process."""
    return float(shared_array(world, np.asarray(value)))


def shared_array(world: World, values: np.ndarray) -> np.ndarray:
    """The first process's numbers, on every process."""
    if world.process_count == 1:
        return values
    data = world.channel.broadcast(np.ascontiguousarray(values).tobytes())
    return np.frombuffer(data, dtype=values.dtype).reshape(values.shape)


# Where the store keeps the first process that failed and why, and who has ended.
_FAILED, _ENDED = "autopar/failed", "autopar/ended"
# How long the process that hosts the store stays for the others to read it.
_STAY_S, _POLL_S = 3.0, 0.05
# How long the others take to end once they have read it.
_LEAVE_S = 0.5


def announce_end() -> None:
    """From now on the end of this process is told; no effect without others."""
    if jax_compat.coordination() is not None:
        atexit.unregister(_end)  # one call is enough
        atexit.register(_end)


def leave_at_end() -> None:
    """From now on this process ends without waiting for the others: one is lost."""
    atexit.unregister(jax_compat.leave_coordination)
    atexit.register(jax_compat.leave_coordination)


def _end() -> None:
    """Runs at exit, before `jax.distributed` does: the last one registered is first."""
    found = jax_compat.coordination()
    if found is None or found.count == 1:
        return
    error = getattr(sys, "last_value", None)  # what nobody caught
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
    """Waits a little for the others, who cannot read a store that is gone."""
    end = time.monotonic() + _STAY_S
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        while time.monotonic() < end:
            if len(found.client.key_value_dir_get(_ENDED)) == found.count:
                time.sleep(_LEAVE_S)
                return
            time.sleep(_POLL_S)


def _report(found: jax_compat.Coordination, text: str) -> None:
    """Says which process failed first, where that is another one."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found.client.key_value_set(_FAILED, f"process {found.index}: {text}")
            return
        first = found.client.key_value_try_get(_FAILED)
        print(f"autopar: the first failure was that of {first}", file=sys.stderr)
