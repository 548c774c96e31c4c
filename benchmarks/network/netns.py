"""Runs the commands that make and remove network namespaces."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

PREFIX = "apb"
NAME = re.compile(rf"({PREFIX}(\d+))(w\d+|v\d+|br)")
"""Of what a bed makes: its prefix, in which its maker's number is, and the rest."""

HOSTS_ROOT = pathlib.Path("/etc/netns")


class BedUnavailable(RuntimeError):
    """This machine cannot make network namespaces; the message says what is missing."""


def command(words: Sequence[str], doing: str) -> str:
    """Runs a command and returns its output; raises `BedUnavailable` if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedUnavailable(why(doing, (done.stderr or done.stdout).strip()))
    return done.stdout


def why(doing: str, said: str) -> str:
    """An error message: what failed, what the command printed, and what to do."""
    hints = {
        "Operation not permitted": "run as root, in a container with CAP_NET_ADMIN "
        "and CAP_SYS_ADMIN",
        "Unknown device type": "the kernel lacks this kind of device (modules bridge "
        "and veth)",
        "qdisc kind is unknown": "the kernel lacks the token bucket filter (module "
        "sch_tbf)",
        "File exists": "an earlier run left it: python benchmarks/network/bed.py clean",
    }
    found = [hint for text, hint in hints.items() if text in said]
    return f"cannot {doing}: {said}" + (f"; {found[0]}." if found else "")


def require_tools() -> None:
    """Raises `BedUnavailable` if the system or the user cannot make namespaces."""
    if sys.platform != "linux":
        raise BedUnavailable(f"network namespaces are Linux's; this is {sys.platform}.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise BedUnavailable(
            f"{' and '.join(missing)} not found: install iproute2 "
            "(apt-get install iproute2)."
        )
    if os.geteuid() != 0:
        raise BedUnavailable(
            "network namespaces need root: run with sudo, or in a container with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN."
        )


def output(*words: str) -> str:
    """The output of a command; '' if it fails."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def names_with(prefix: str) -> tuple[list[str], list[str]]:
    """The names of (namespaces, interfaces at the bridge) with a prefix."""
    spaces = [line.split()[0] for line in output("ip", "netns", "list").splitlines()]
    folders = [p.name for p in HOSTS_ROOT.glob(f"{prefix}w*")]
    links = re.findall(r"^\d+: ([^:@\s]+)", output("ip", "-o", "link"), re.MULTILINE)

    def ours(names: Sequence[str]) -> list[str]:
        found = {n for n in names if (m := _parts(n)) and m[0] == prefix}
        return sorted(found)

    return ours(spaces + folders), ours(links)


def _parts(name: str) -> tuple[str, str] | None:
    """The prefix and the rest of a name that `bed.py` made."""
    match = re.fullmatch(r"(.+?)(w\d+|v\d+|br)", name)
    return (match[1], match[2]) if match else None


def remove(prefix: str) -> list[str]:
    """Ends the processes in the namespaces with a prefix, and removes the namespaces.

    Returns the names of what was removed.
    """
    spaces, links = names_with(prefix)
    for space in spaces:
        end_processes(space)
    # Otherwise a namespace that is removed late would keep its end of the link.
    for link in links:
        output("ip", "link", "del", link)
    for space in spaces:
        output("ip", "netns", "del", space)
        shutil.rmtree(HOSTS_ROOT / space, ignore_errors=True)
    return spaces + links


def end_processes(space: str, patience_s: float = 5.0) -> None:
    """Kills all processes in a namespace."""
    deadline = time.monotonic() + patience_s
    while pids := output("ip", "netns", "pids", space).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def clean(everything: bool = False) -> list[str]:
    """Removes namespaces of ended processes, or all of them; returns their names."""
    require_tools()
    spaces = [line.split()[0] for line in output("ip", "netns", "list").splitlines()]
    folders = [p.name for p in HOSTS_ROOT.glob(f"{PREFIX}*")]
    links = re.findall(r"^\d+: ([^:@\s]+)", output("ip", "-o", "link"), re.MULTILINE)
    matches = [m for n in {*spaces, *folders, *links} if (m := NAME.fullmatch(n))]
    owners = {m[1]: int(m[2]) for m in matches}
    dead = [
        prefix
        for prefix, pid in sorted(owners.items())
        if everything or not pathlib.Path(f"/proc/{pid}").exists()
    ]
    return [name for prefix in dead for name in remove(prefix)]


T = TypeVar("T")
_NEW_NET = 0x40000000  # CLONE_NEWNET of <sched.h>


def inside(space: str, function: Callable[[], T]) -> T:
    """Calls a function in a thread inside a namespace; sockets that it opens stay
    there.
    """

    def enter() -> T:
        with open(f"/var/run/netns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
                raise BedUnavailable(os.strerror(ctypes.get_errno()))
        return function()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()
