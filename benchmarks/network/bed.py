"""Makes hosts on one machine: network namespaces joined by links of a chosen rate.

    python benchmarks/network/bed.py check          # can this machine do it?
    python benchmarks/network/bed.py run --rate 100 -- ip addr show eth0
    python benchmarks/network/bed.py clean          # what dead runs left behind

Every namespace has one interface, ``eth0``, which a veth pair connects to a bridge.
``tc tbf`` limits the rate at both ends of a pair: the inner end limits what the host
sends, and the end at the bridge what it receives. Only bandwidth is limited; no delay
is added.

All names begin with a prefix that contains the number of this process. So several sets
of hosts can exist at the same time, and `clean` can find those whose process has ended.
Addresses may repeat, because the bridges are not connected.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import launch
import netns
from netns import BedUnavailable

INTERFACE = "eth0"
LOOPBACK_MTU_BYTES = 16384
"""Over a loopback with the usual 65536, large all-reduces of gloo stall."""

CONGESTION = "reno"
_MIN_BURST_BYTES = 32_768
# The most bytes that TCP passes to the interface at once, by default 64 KiB. The kernel
# splits what is larger than the token bucket. At 500 Mbit/s with a bucket of 62 KiB,
# collectives of four hosts then used 25 to 35 % of the link; with this limit they use
# 86 to 95 %.
_SEGMENTS = ("gso_max_size", "16384")
_BURST_S = 1e-3
_QUEUE = "100ms"


def burst_bytes(rate_mbit: float) -> int:
    """Size of the token bucket for a rate: the bytes that the link carries in 1 ms.

    With a bucket of 32 KiB, one TCP stream reached 3.3 of 10 Gbit/s, and with this size
    9.6 (and 0.96 of 1 Gbit/s, 95.6 of 100 Mbit/s). The bucket must hold the bytes sent
    between two reads of the clock. But bytes that fit into the bucket pass at once, so
    the bucket is not larger than needed, and at least 32 KiB.

    >>> burst_bytes(1000)
    125000
    """
    return max(_MIN_BURST_BYTES, round(rate_mbit * 1e6 / 8 * _BURST_S))


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One namespace: its rank, name, interface at the bridge, and address."""

    rank: int
    namespace: str
    outer: str
    address: str


class Bed:
    """The network namespaces of a ``with`` block.

    At the end of the block, the namespaces are removed with all processes in them, also
    after an exception, Ctrl-C, SIGTERM or SIGHUP. If SIGHUP was ignored before, as with
    nohup, it stays ignored.
    """

    def __init__(
        self,
        count: int = 4,
        rate_mbit: float | None = None,
        *,
        congestion: str = CONGESTION,
        prefix: str | None = None,
    ) -> None:
        """Stores the settings; the ``with`` block makes the namespaces.

        Args:
          count: number of hosts.
          rate_mbit: rate of each link in each direction, in Mbit/s; None: no limit.
          congestion: TCP's congestion control, one of
            /proc/sys/net/ipv4/tcp_available_congestion_control.
          prefix: prefix of all names, at most 11 letters; default: from the process
            number.
        """
        if not 1 <= count <= 200:
            raise ValueError(f"Bed: count must be 1 to 200, got {count}.")
        self.prefix = prefix or f"{netns.PREFIX}{os.getpid()}"
        if len(self.prefix) > 11:
            raise ValueError(f"Bed: the prefix {self.prefix!r} is over 11 letters.")
        self.hosts = tuple(
            Host(k, f"{self.prefix}w{k}", f"{self.prefix}v{k}", f"10.77.0.{k + 1}")
            for k in range(count)
        )
        self.rate_mbit: float | None = None
        self._first_rate = rate_mbit
        self._congestion = congestion
        self._running: list[launch.Running] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Makes the namespaces and links."""
        netns.require_tools()
        self._catch_signals()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes everything."""
        self._remove()

    def _make(self) -> None:
        bridge = f"{self.prefix}br"
        netns.command(["ip", "link", "add", bridge, "type", "bridge"], "add a bridge")
        netns.command(["ip", "link", "set", bridge, "up"], "start the bridge")
        for host in self.hosts:
            _add_host(host, bridge, self._congestion)
        if self._first_rate is not None:
            self.set_rate(self._first_rate)

    def set_rate(self, rate_mbit: float | None) -> None:
        """Changes the rate of all links, even while they are in use.

        Args:
          rate_mbit: rate in Mbit/s; None: no limit.
        """
        if rate_mbit is not None and rate_mbit <= 0:
            raise ValueError(f"set_rate: the rate must be positive, got {rate_mbit}.")
        if rate_mbit is None and self.rate_mbit is None:
            return
        for host in self.hosts:
            inside = ["ip", "netns", "exec", host.namespace, "tc"]
            for tc, device in ((inside, INTERFACE), (["tc"], host.outer)):
                netns.command(
                    [*tc, *_shape(device, rate_mbit)], "set the rate of a link"
                )
        self.rate_mbit = rate_mbit

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> launch.Running:
        """Starts a command in every namespace; see `launch.Running`.

        Args:
          command: the program and its arguments.
          env: further environment variables of the command.
        """
        running = launch.Running(self.hosts, command, env or {}, self.set_rate)
        self._running.append(running)
        return running

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> list[list[Any]]:
        """Starts a command in every namespace, and returns the results that each
        reported.
        """
        return self.start(command, env).wait(timeout_s)

    def _catch_signals(self) -> None:
        """Makes SIGTERM and SIGINT leave the ``with`` block by an exception.

        A shell starts background commands of a script with SIGINT ignored, and Python
        then installs no handler for SIGINT.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _leave}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            wanted[signal.SIGHUP] = _leave
        for number, handler in wanted.items():
            self._handlers[number] = signal.signal(number, handler)

    def _remove(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:  # nothing may interrupt this
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                old = signal.signal(number, signal.SIG_IGN)
                self._handlers.setdefault(number, old)
        try:
            for running in self._running:
                running.stop()
            netns.remove(self.prefix)
        finally:
            self.rate_mbit = None
            if in_main:
                for number, old in self._handlers.items():
                    signal.signal(number, old)
                self._handlers.clear()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _add_host(host: Host, bridge: str, congestion: str) -> None:
    folder = netns.HOSTS_ROOT / host.namespace
    folder.mkdir(parents=True, exist_ok=True)
    # gloo listens at the address of the machine's name.
    names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
    (folder / "hosts").write_text(names, encoding="utf-8")
    inside = ["ip", "-n", host.namespace]
    pair = ["type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
    netns.command(["ip", "netns", "add", host.namespace], "add a network namespace")
    netns.command(["ip", "link", "add", host.outer, *pair], "add a pair of interfaces")
    for words in (
        ["ip", "link", "set", host.outer, "master", bridge, "up"],
        [*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE],
        [*inside, "link", "set", INTERFACE, *_SEGMENTS, "up"],
        [*inside, "link", "set", "lo", "mtu", str(LOOPBACK_MTU_BYTES), "up"],
    ):
        netns.command(words, "set up an interface")
    control = "/proc/sys/net/ipv4/tcp_congestion_control"
    setting = ["sh", "-c", f"echo {congestion} > {control}"]
    inside = ["ip", "netns", "exec", host.namespace]
    netns.command([*inside, *setting], f"set the congestion control to {congestion!r}")


def _shape(device: str, rate_mbit: float | None) -> list[str]:
    if rate_mbit is None:
        return ["qdisc", "del", "dev", device, "root"]
    bucket = ["burst", f"{burst_bytes(rate_mbit)}b", "latency", _QUEUE]
    rate = ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit"]
    return ["qdisc", "replace", "dev", device, "root", *rate, *bucket]


def run_inside(
    script: str, hosts: int, timeout_s: float, more: Sequence[str] = ()
) -> tuple[list[list[Any]], int]:
    """Runs a script with ``--inside`` and this program's arguments on all hosts.

    Args:
      script: the script.
      hosts: number of hosts.
      timeout_s: the longest run.
      more: further arguments.

    Returns:
      The results that each process reported, and an exit code. If the run fails, its
      error is printed, the code is 1, and results from before are kept.
    """
    command = [sys.executable, script, "--inside", *sys.argv[1:], *more]
    with Bed(hosts) as bed:
        running = bed.start(command)
        try:
            running.wait(timeout_s)
        except launch.RunFailed as error:
            print(f"RunFailed: {error}", file=sys.stderr)
            return running.results, 1
    return running.results, 0


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs a program, and exits with its code, or saying why there is no bed."""
    try:
        sys.exit(main())
    except BedUnavailable as error:
        sys.exit(f"BedUnavailable: {error}")


def main() -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("check", help="say whether this machine can make a bed")
    cleaning = commands.add_parser("clean", help="remove what dead runs left behind")
    cleaning.add_argument("--all", action="store_true", help="of living runs as well")
    running = commands.add_parser("run", help="run a command in every namespace")
    running.add_argument("--count", type=int, default=4)
    running.add_argument("--rate", type=float, help="Mbit/s; default: unshaped")
    running.add_argument("--timeout", type=float, default=600.0, help="seconds")
    running.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        if options.what == "clean":
            print("removed:", " ".join(netns.clean(options.all)) or "nothing")
        elif options.what == "check":
            with Bed(count=1, rate_mbit=100):
                print("namespaces, bridge, veth and tbf work.")
        else:
            with Bed(options.count, options.rate) as bed:
                running = bed.start(options.command)
                running.wait(options.timeout)
                for rank in range(options.count):
                    print(running.log(rank), end="")
    except (BedUnavailable, launch.RunFailed) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
