"""What processes do together: each learns what the others pass, and who has failed."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import flax
import jax
import jaxlib
import msgspec

from autopar import errors
from autopar.errors import PlanError, user_line
from autopar.runtime.world import World
from autopar.version import __version__

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


def versions() -> dict[str, str]:
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
    sent = msgspec.msgpack.encode(_Message(what, versions(), data=data))
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
    return msgspec.msgpack.encode(_Message(what, versions(), failed, kind, where))


def _failure(what: str, error: BaseException) -> bytes:
    """What a process tells that has failed.

    An error of autopar says all in its message, but for the line of its cause.
    """
    kind = type(error).__name__
    text = " ".join(str(error).split()) or kind
    cause = error.__cause__ if hasattr(errors, kind) else error
    where = "" if cause is None else user_line(cause)
    return msgspec.msgpack.encode(_Message(what, versions(), text, kind, where))


def together(world: World, what: str, work: Callable[[], T]) -> T:
    """Does something on every process; fails on all where it fails on one.

    Raises:
      PlanError: another process has failed.
    """
    with tell_errors(world, what):
        done = work()
    if world.process_count > 1:
        exchange_data(world, what)
    return done


def differing(
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
        f"{value} on {_name_processes(who)}" for value, who in groups.items()
    )


def _name_processes(processes: Sequence[int]) -> str:
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = [str(p) for p in processes[:4]]
    if len(processes) > 4:
        return f"processes {', '.join(shown)} and {len(processes) - 4} more"
    return f"processes {', '.join(shown[:-1])} and {shown[-1]}"


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
