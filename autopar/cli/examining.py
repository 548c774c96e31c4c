"""The work of ``autopar doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import socket
import sys
from collections.abc import Callable, Iterator

import jax

from autopar.cli import common
from autopar.cli.commands.runs import DoctorCommand, ProfileCommand
from autopar.cli.failures import DIFFERENT
from autopar.cli.output import Result
from autopar.cluster import Cluster, ClusterError, local
from autopar.profiling import profile as profiling
from autopar.runtime.world import number_of_threads, threads_of_collectives
from autopar.terminal import columns

_OK, _NOTE, _WRONG = "ok", "note", "wrong"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "highspy", "pulp")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
      what: what was checked, such as the number of threads.
      state: ``ok``, ``note`` if something could be better, or ``wrong``.
      found: the value or state that was found.
      remedy: what to do; '' if the state is ``ok``.
    """

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(asked: DoctorCommand) -> Result:
    """Runs all checks; starts the backend of JAX."""
    if asked.devices is not None:
        common.simulate_devices(asked.devices)
    findings = [finding for look in _LOOKS for finding in look()]
    code = DIFFERENT if any(f.state == _WRONG for f in findings) else 0
    if asked.as_json:
        found = [dataclasses.asdict(f) for f in findings]
        return Result.of({"ok": not code, "findings": found}, code)
    rows = [("", "state", "found"), *((f.what, f.state, f.found) for f in findings)]
    remedies = [f"{f.what}: {f.remedy}" for f in findings if f.remedy]
    lines = [*columns(rows), *([""] if remedies else []), *remedies]
    return Result("\n".join(lines), code)


def profile(asked: ProfileCommand) -> Result:
    """Measures the devices and their links, and saves the numbers for planning."""
    devices = asked.devices
    if asked.distributed:
        common.join_processes(devices)
    elif devices is not None:
        common.simulate_devices(devices)
    common.check_folder(asked.out)
    with common.progress() as say:
        found = profiling.run(None if asked.distributed else devices, say)
        path = profiling.save(found.cluster, asked.out)
    return Result(f"{found}\n\nsaved to {path}")


def _versions() -> Iterator[Finding]:
    yield Finding("python", _OK, sys.version.split()[0])
    needed = _requirements()
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, _WRONG, "not installed", f"pip install {name}")
            continue
        least = needed.get(name, "0")
        if _numbers(version) < _numbers(least):
            remedy = f"pip install '{name}>={least}'"
            yield Finding(name, _WRONG, f"{version}, needed {least}", remedy)
        else:
            yield Finding(name, _OK, version)


def _requirements() -> dict[str, str]:
    """Package -> the least version that autopar requires, from autopar's metadata.

    The result is empty in a checkout that is not installed.
    """
    try:
        lines = importlib.metadata.requires("autopar") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+).*?>=\s*([0-9.]+)", line) for line in lines)
    return {m[1].lower(): m[2] for m in found if m}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version)[:3])


def _devices() -> Iterator[Finding]:
    try:
        found = jax.local_devices()
    except RuntimeError as error:
        remedy = "check JAX_PLATFORMS and the driver of the accelerator"
        yield Finding("devices", _WRONG, " ".join(str(error).split()), remedy)
        return
    kind = f"{len(found)} x {found[0].device_kind} ({found[0].platform})"
    yield Finding("devices", _OK, kind)
    if found[0].platform == "cpu":
        yield _threads(len(found))


def _threads(count: int) -> Finding:
    """Checks the number of threads that collectives between processes need."""
    threads, needed = number_of_threads(), threads_of_collectives(count)
    found = f"{threads} for {count} devices"
    if count == 1 or threads >= needed:
        return Finding("threads", _OK, found)
    remedy = f"for several processes set NPROC={needed}, or collectives may hang"
    return Finding("threads", _NOTE, found, remedy)


def _hostname() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = f"add a line '127.0.0.1 {name}' to /etc/hosts"
        yield Finding("host name", _WRONG, f"{name}: {error}", remedy)
        return
    found = f"{name} is {address}"
    if address.startswith("127."):
        remedy = "for processes on several hosts it must be an address others can reach"
        yield Finding("host name", _NOTE, found, remedy)
    else:
        yield Finding("host name", _OK, found)


def _cache() -> Iterator[Finding]:
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        remedy = "set JAX_COMPILATION_CACHE_DIR to keep compiled programs"
        yield Finding("compilation cache", _NOTE, "none", remedy)
        return
    path = pathlib.Path(folder)
    there = next(p for p in (path, *path.parents) if p.exists())
    if os.access(there, os.W_OK):
        yield Finding("compilation cache", _OK, folder)
    else:
        remedy = "choose a folder that can be written"
        yield Finding("compilation cache", _WRONG, f"{folder}: not writable", remedy)


def _profile() -> Iterator[Finding]:
    try:
        found = jax.local_devices()
    except RuntimeError:
        return
    path = local.profile_path(found[0].device_kind, len(found))
    if not path.is_file():
        remedy = "autopar profile measures this machine for --cluster local"
        yield Finding("profile", _NOTE, f"none at {path}", remedy)
        return
    try:
        Cluster.from_toml(path.read_text(encoding="utf-8"))
    except (ClusterError, OSError) as error:
        text = " ".join(str(error).split())
        yield Finding("profile", _WRONG, f"{path}: {text}", "autopar profile")
    else:
        yield Finding("profile", _OK, str(path))


_LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    _hostname,
    _cache,
    _profile,
)
