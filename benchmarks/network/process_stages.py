"""Trains pipelines over several processes; checks losses and bytes between processes.

    python benchmarks/network/process_stages.py --rows rows.jsonl
    python benchmarks/network/process_stages.py --rows rows.jsonl --show \\
        --out docs/data/process_stages.json --page docs/pipelines.md

The benchmark trains the examples of `stage_cases.py` with pipeline stages placed on
processes in many ways (`LAYOUTS`). Processes of one machine communicate over loopback.
A layout "of hosts" has four network namespaces (`bed.py`) with two processes each.

A row has the largest relative difference between the losses and those of one device
with the same microbatches. It also has the bytes that processes send each other in a
step, as the plan predicts them and as the kernel counts them for each socket
(`socket_bytes.py`). The counted bytes are the difference between the counts after 5 and
after 25 steps, so set-up does not count. Headers of gloo and of JAX's transfer servers
count, and headers of TCP and IP do not. Bytes of the coordination service, recognised
by its port, are left out, because they do not grow with the model. For hosts there are
also the bytes counted at the interfaces, without headers (`worker.traffic`).

Rows "float64", with one process, run one step of gradient descent. They have the
largest difference of the gradients (`stage_cases.Case.gradient_difference`). Some
models compute parts of a step in float32 even then.

Rows are appended to the file of ``--rows``. Rows that are already in it are skipped, so
that a run can be stopped and continued. The losses of one device are stored in a folder
next to the file. The order of rows is drawn by a seed, such that the first rows cover
most pairs of values: of examples, layouts, schedules and further options. ``--only``
takes the rows whose text contains all of its words.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import bed
import launch
import netns
import socket_bytes
import stage_cases
import worker

WARM = 5
LOSS_BAR, BYTES_BAR = 1e-5, 0.02
TIMEOUT_S, SILENCE_S = 900.0, 120.0
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
# With these flags, compilation takes a third of the time; the programs are small.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
_MARK, _ROW = "@count", "@row "


@dataclasses.dataclass(frozen=True, slots=True)
class Laid:
    """A placement of pipeline stages.

    Attributes:
      stages: how many.
      processes: number of processes on all hosts.
      devices: of each process.
      order: numbers of the devices of the first stage, of the second stage and so on.
      hosts: number of hosts; 0: the processes use this machine's loopback.
    """

    stages: int
    processes: int
    devices: int
    order: tuple[int, ...]
    hosts: int = 0


def _laid(stages: int, processes: int, devices: int, *order: int, hosts: int = 0):
    every = order or tuple(range(processes * devices))
    return Laid(stages, processes, devices, every, hosts)


_UNEVEN = (0, 1, 2, 4, 3, 5, 6, 7)
_EVENS, _ODDS = (0, 2, 4, 6), (1, 3, 5, 7)
_UPPER = tuple(8 + k for k in (*_EVENS, *_ODDS))
LAYOUTS: dict[str, Laid] = {
    "2 stages in one process": _laid(2, 1, 8),
    "4 stages in one process": _laid(4, 1, 8),
    "1 stage over 2 processes": _laid(1, 2, 2),
    "1 stage over 4 processes": _laid(1, 4, 1),
    "2 stages, a process each": _laid(2, 2, 2),
    "2 stages, each over both processes": _laid(2, 2, 2, 0, 2, 1, 3),
    "2 stages, each over 2 of 4 processes": _laid(2, 4, 1),
    "2 stages, each over 3 of 4 processes": _laid(2, 4, 2, *_UNEVEN),
    "4 stages, two in each process": _laid(4, 2, 2),
    "4 stages, two in each process, crossed": _laid(4, 2, 2, 3, 1, 0, 2),
    "4 stages, a process each": _laid(4, 4, 1),
    "4 stages unevenly over 4 processes": _laid(4, 4, 2, *_UNEVEN),
    "hosts: 1 stage over 4": _laid(1, 8, 1, hosts=4),
    "hosts: 2 stages, each over 2": _laid(2, 8, 1, hosts=4),
    "hosts: 2 stages, each over 4": _laid(2, 8, 1, *_EVENS, *_ODDS, hosts=4),
    "hosts: 4 stages, a host each": _laid(4, 8, 1, hosts=4),
    "hosts: 4 stages, each over 2": _laid(4, 8, 1, 0, 2, 1, 3, 4, 6, 5, 7, hosts=4),
    "hosts: 4 stages over 2, two in each process": _laid(
        4, 8, 2, *_EVENS, *_ODDS, *_UPPER, hosts=4
    ),
}
HOST_EXAMPLES = ("gpt", "moe", "lstm")
CODECS = {"int8": "int8", "powersgd": "powersgd:rank=4"}
BESIDE = ("nothing", *CODECS, "noise")
FLOAT64 = "float64"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """An example and the options with which it is trained."""

    example: str
    layout: str
    schedule: str
    beside: str = "nothing"

    @property
    def laid(self) -> Laid:
        """The placement of the stages."""
        return LAYOUTS[self.layout]

    @property
    def deep(self) -> bool:
        """Whether the model needs more layers, for two parts on each of four stages."""
        return self.laid.stages > 2 and self.schedule == "interleaved"

    def case(self) -> stage_cases.Case:
        """The example."""
        is_float64 = self.beside == FLOAT64
        return stage_cases.Case(self.example, deep=self.deep, float64=is_float64)

    @property
    def key(self) -> tuple[str, ...]:
        """The key by which the row is found in the file."""
        return astuple(self)


def drawn_rows(seed: int) -> list[Row]:
    """All rows. The first rows cover most pairs of values that earlier rows lack."""
    every: list[Row] = []
    for name, laid in LAYOUTS.items():
        schedules = SCHEDULES if laid.stages > 1 else ("none",)
        examples = HOST_EXAMPLES if laid.hosts else stage_cases.CASES
        besides = BESIDE if laid.hosts else ("nothing",)
        besides = (*besides, FLOAT64) if laid.processes == 1 else besides
        for example, schedule, beside in itertools.product(
            examples, schedules, besides
        ):
            every.append(Row(example, name, schedule, beside))
    random.Random(seed).shuffle(every)
    out, covered = list[Row](), set[Any]()
    while every:
        best = max(every, key=lambda row: len(_pairs(row) - covered))
        covered |= _pairs(best)
        every.remove(best)
        out.append(best)
    return out


def _pairs(row: Row) -> set[Any]:
    hosts = bool(row.laid.hosts)
    return {(hosts, *pair) for pair in itertools.combinations(row.key, 2)}


# The processes of one world.


class World:
    """Processes that run rows one after another, until one of the processes fails."""

    def __init__(self, laid: Laid, hosts: Sequence[bed.Host]) -> None:
        """Starts them.

        Args:
          laid: the number of processes and of their devices.
          hosts: the hosts; empty: this machine's loopback.
        """
        self.laid, self.hosts = laid, hosts
        address, port = "127.0.0.1", free_port()
        if hosts:
            address, port = hosts[0].address, launch.COORDINATOR_PORT
        self.port = port
        words = [sys.executable, __file__, "--inside"]
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: queue.Queue[tuple[int, str]] = queue.Queue()
        for number in range(laid.processes):
            env = launch.environment(number, laid.processes, address, {})
            env |= {launch.COORDINATOR: f"{address}:{port}", "XLA_FLAGS": FLAGS}
            env["STAGES_DEVICES"] = str(laid.devices)
            # Processes of a row compile on few cores, and then answer late.
            env["AUTOPAR_STAGES_SILENCE"] = str(SILENCE_S)
            inside = [] if not hosts else self._space(number)
            process = subprocess.Popen(
                [*inside, *words],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Which rows these processes can run: processes, devices of each, whether on
        hosts.
        """
        return self.laid.processes, self.laid.devices, bool(self.hosts)

    def _space(self, number: int) -> list[str]:
        host = self.hosts[number * len(self.hosts) // self.laid.processes]
        return ["ip", "netns", "exec", host.namespace]

    def _read(self, number: int) -> None:
        stdout = self.processes[number].stdout
        assert stdout is not None
        for line in stdout:
            self.lines.put((number, line.rstrip()))
        self.lines.put((number, "@ended"))

    def say(self, number: int, text: str) -> None:
        """Sends a line to a process."""
        stdin = self.processes[number].stdin
        assert stdin is not None
        stdin.write(text + "\n")
        stdin.flush()

    def count(self) -> tuple[socket_bytes.Counts, list[float]]:
        """The bytes that the sockets and the hosts' interfaces have sent so far."""
        spaces = [host.namespace for host in self.hosts] or [None]
        pids = {p.pid: k for k, p in enumerate(self.processes)}
        counts = socket_bytes.count(spaces, pids)
        return counts, [_interface_bytes(host.namespace) for host in self.hosts]

    def take(self, row: Row) -> dict[str, Any]:
        """Runs a row; returns the results of the processes and the counts.

        Raises:
          RuntimeError: a process ended, or the processes took too long.
        """
        for number in range(self.laid.processes):
            self.say(number, json.dumps(asdict(row)))
        counts, times = list[Any](), list[float]()
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < self.laid.processes:
            try:
                number, line = self.lines.get(timeout=deadline - time.monotonic())
            except (queue.Empty, ValueError):
                raise RuntimeError(f"took more than {TIMEOUT_S:g} s") from None
            if line == "@ended":
                raise RuntimeError(f"process {number} ended")
            if line == _MARK:
                counts.append(self.count())
                times.append(time.monotonic())
                self.say(number, "go on")
            elif line.startswith(_ROW):
                found[number] = json.loads(line.removeprefix(_ROW))
            else:
                print(f"[{number}] {line}", file=sys.stderr)
        made = found[0]
        if len(counts) == 3:
            made |= self._sent(counts)
            made["idle_s"] = times[1] - times[0]
        return made

    def _sent(self, counts: Sequence[Any]) -> dict[str, Any]:
        """Bytes of a step between processes and hosts, and bytes of an idle second."""
        (idle, _), (first, first_out), (last, last_out) = counts
        steps, out = stage_cases.STEPS - WARM, dict[str, Any]()
        quiet = socket_bytes.between(idle, first)
        sent = socket_bytes.between(first, last)
        data = {c: n for c, n in sent.items() if not self._is_control(c)}
        rest = {c: n for c, n in sent.items() if self._is_control(c)}
        out["sent"] = _as_list(socket_bytes.matrix(data), steps)
        out["control"] = _as_list(socket_bytes.matrix(rest), steps)
        out["idle_bytes"] = sum(socket_bytes.matrix(quiet).values())
        pairs = zip(first_out, last_out, strict=True)
        out["interfaces"] = [(b - a) / steps for a, b in pairs]
        return out

    def _is_control(self, connection: socket_bytes.Connection) -> bool:
        return self.port in (connection.here[1], connection.there[1])

    def end(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        for process in self.processes:
            process.wait()


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interface_bytes(space: str) -> float:
    """The bytes that a host has sent so far, without headers
    (`worker.Traffic.data_bytes`).
    """
    words = ["ip", "-n", space, "-s", "-j", "link", "show", bed.INTERFACE]
    (found,) = json.loads(netns.command(words, "read an interface"))
    sent = found["stats64"]["tx"]
    return worker.Traffic(sent["bytes"], sent["packets"]).data_bytes


def _as_list(found: Mapping[tuple[int, int], float], steps: int) -> list[list[float]]:
    return [[a, b, n / steps] for (a, b), n in sorted(found.items())]


# Inside a process.


def serve() -> None:
    """Runs the rows that arrive on standard input."""
    import jax

    count, number = worker.count(), worker.rank()
    devices = int(os.environ["STAGES_DEVICES"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    at = os.environ[launch.COORDINATOR]
    jax.distributed.initialize(at, count, number, initialization_timeout=120)
    for line in sys.stdin:
        row = Row(**json.loads(line))
        print(_ROW + json.dumps(_take(row)), flush=True)
        jax.clear_caches()


def _take(row: Row) -> dict[str, Any]:
    """Trains a row; returns the losses, and the bytes that the plan predicts."""
    import jax
    from example_training import take_step

    import autopar

    jax.config.update("jax_enable_x64", row.beside == FLOAT64)
    case = row.case()
    state = case.state()
    asked = options(row, case, [jax.devices()[k] for k in row.laid.order])
    try:
        step = autopar.parallelize(case.run.step, **asked)
        if row.beside == FLOAT64:
            state, _ = take_step(step, state, case.batches[0])
            moved = case.gradient_difference(state)
            return {"difference": moved, "plan": plan_text(step.plan)}
        losses = list(_losses(step, state, case.batches))
    except autopar.PlanError as error:
        return {"refused": str(error).splitlines()[0]}
    made = {"losses": losses, "plan": plan_text(step.plan)}
    if not worker.rank():
        made["predicted"] = predicted(row, step)
    return made


def options(row: Row, case: stage_cases.Case, devices: Sequence[Any]) -> dict[str, Any]:
    """The options of a row for `autopar.parallelize`."""
    from jax.sharding import PartitionSpec

    laid = row.laid
    out: dict[str, Any] = {
        "cluster": f"{len(devices)}:cpu",
        "devices": devices,
        "stages": laid.stages,
        "microbatches": stage_cases.MICROBATCHES,
        "coupled": "microbatch" if case.couples else "refuse",
        "max_axes": 1,
        "seconds": 1.0,
    }
    if laid.stages > 1:
        out["schedule"] = row.schedule
    if codec := CODECS.get(row.beside):
        out |= {"compression": codec, "axis_names": ("data",)}
        out["pins"] = {"batch/*": PartitionSpec("data")}
    if row.beside == "noise":
        out["noise_scale"] = True
    return out


def _losses(step: Any, state: Any, batches: Sequence[Any]) -> Iterator[float]:
    """Yields the losses; has bytes counted while idle, and before and after steps."""
    import jax
    from example_training import take_step

    number, count = worker.rank(), worker.count()
    for taken, batch in enumerate(batches):
        if taken == WARM:
            _count("idle")
            time.sleep(2.0)
            _count("first")
        rows = {k: len(x) // count for k, x in batch.items()}
        own = {k: x[number * rows[k] :][: rows[k]] for k, x in batch.items()}
        state, loss = take_step(step, state, own)
        yield float(loss)
    jax.block_until_ready(jax.tree.leaves(state))
    _count("last")


_counted: Iterator[int] = itertools.count()


def _count(name: str) -> None:
    """Lets the parent count bytes while no process sends anything."""
    from autopar_passes import jax_compat

    found = jax_compat.coordination()
    assert found is not None
    tag = f"{name}{next(_counted)}"
    found.client.wait_at_barrier(f"{tag}/before", 120_000)
    if not worker.rank():
        time.sleep(0.3)  # the last acknowledgements
        print(_MARK, flush=True)
        sys.stdin.readline()
    found.client.wait_at_barrier(f"{tag}/after", 120_000)


def plan_text(plan: Any) -> str:
    """The meshes of a plan's stages."""
    found = [stage.mesh["axes"] for stage in plan.stages]
    return f"{plan.schedule} {plan.microbatches} {found}"


def predicted(row: Row, step: Any) -> list[list[float]]:
    """Bytes of a step between processes, as the plan predicts them."""
    from autopar.reports.between import bytes_between

    plan, analysis = step.plan, step._current.analysed.analysis
    laid = row.laid
    process_of = [device // laid.devices for device in laid.order]
    found = bytes_between(analysis, plan, plan.cluster.read(), process_of)
    return [[a, b, nbytes] for (a, b), nbytes in sorted(found.items())]


# One device.


def reference(row: Row, cache: pathlib.Path) -> dict[str, Any]:
    """The results of one device for a row's example (`stage_cases.Case.reference`)."""
    asked = stage_cases.case_options(row.example, deep=row.deep, float64=False)
    words = json.dumps(asked, sort_keys=True).encode()
    path = cache / f"{row.example}-{zlib.crc32(words):x}.json"
    # The reference is computed once for all rows with these options.
    if not path.exists():
        words = [sys.executable, __file__, "--reference", json.dumps(asdict(row))]
        env = launch.environment(0, 1, "127.0.0.1", {"XLA_FLAGS": FLAGS})
        made = subprocess.run(words, env=env, check=True, capture_output=True)
        path.write_bytes(made.stdout)
    return json.loads(path.read_text())


# Rows and tables.


def record(row: Row, made: dict[str, Any], cache: pathlib.Path) -> dict[str, Any]:
    """A row of the file."""
    if "losses" in made:
        one = reference(row, cache)
        moved = stage_cases.difference(made.pop("losses"), one["losses"])
        made = {"difference": moved, "sensitivity": one["sensitivity"], **made}
    return asdict(row) | made


def read(path: pathlib.Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Key -> row of the file; the last one if a key occurs twice."""
    lines = path.read_text().splitlines() if path.exists() else []
    names = [field.name for field in dataclasses.fields(Row)]
    found = [json.loads(line) for line in lines]
    return {tuple(row[name] for name in names): row for row in found}


def run(options: argparse.Namespace) -> None:
    """Runs the rows that are not in the file, as long as time is left."""
    have, end = read(options.rows), time.monotonic() + options.seconds
    cache = options.rows.parent / "one_device"
    cache.mkdir(exist_ok=True)
    todo = [
        row
        for row in drawn_rows(options.seed)
        if row.key not in have and all(w in " ".join(row.key) for w in options.only)
    ][: options.count]
    # Rows of the same processes are run one after another, so that the processes are
    # started once.
    todo.sort(key=lambda row: (row.laid.hosts, row.laid.processes, row.laid.devices))
    world: World | None = None
    with contextlib.ExitStack() as stack:
        hosts: Sequence[bed.Host] = ()
        if any(row.laid.hosts for row in todo):
            hosts = stack.enter_context(bed.Bed(4)).hosts
        try:
            for row in todo:
                if time.monotonic() > end:
                    break
                wanted = row.laid.processes, row.laid.devices, bool(row.laid.hosts)
                if world is None or world.kind != wanted:
                    if world is not None:
                        world.end()
                    world = World(row.laid, hosts if row.laid.hosts else ())
                begin = time.monotonic()
                try:
                    made = world.take(row)
                except RuntimeError as error:
                    world.end()
                    world, made = None, {"failed": str(error)}
                line = record(row, made, cache)
                line["seconds"] = round(time.monotonic() - begin, 1)
                with options.rows.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                print(row.key, summary(line), flush=True)
        finally:
            if world is not None:
                world.end()


def summary(row: Mapping[str, Any]) -> str:
    """A row in a few words."""
    if why := row.get("refused") or row.get("failed"):
        return f"{'refused' if 'refused' in row else 'FAILED'}: {why}"
    sent, predicted, control = (
        sum(nbytes for _, _, nbytes in row.get(name, ()))
        for name in ("sent", "predicted", "control")
    )
    return (
        f"difference {row['difference']:.1e}, sent {sent:.0f}, predicted "
        f"{predicted:.0f}, control {control:.0f}, {row['seconds']} s"
    )


_BEGIN, _END = "<!-- process_stages -->", "<!-- /process_stages -->"
HEADING = (
    "example", "stages over processes", "schedule", "beside", "losses",
    "predicted kB", "counted kB", "more", "worst pair", "interfaces",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of a step, predicted and counted.

    Attributes:
      predicted: bytes between processes, or between hosts.
      counted: by sockets.
      worst: largest relative difference of a pair that is predicted at least a tenth of
        all bytes.
      interfaces: bytes at the hosts' interfaces, without those of the coordination
        service;
        0: there are no hosts.
    """

    predicted: float
    counted: float
    worst: float
    interfaces: float

    @property
    def more(self) -> float:
        """The ratio of counted to predicted bytes, minus 1."""
        return self.counted / self.predicted - 1 if self.predicted else 0.0


def compare(row: Mapping[str, Any]) -> Compared:
    """The bytes of a row: between hosts if it has hosts, else between processes."""
    laid = LAYOUTS[row["layout"]]

    def place(process: int) -> int:
        return process * laid.hosts // laid.processes if laid.hosts else process

    found: list[dict[tuple[int, int], float]] = []
    for name in ("predicted", "sent", "control"):
        pairs: dict[tuple[int, int], float] = {}
        for a, b, nbytes in row.get(name, ()):
            way = place(int(a)), place(int(b))
            if way[0] != way[1]:
                pairs[way] = pairs.get(way, 0.0) + nbytes
        found.append(pairs)
    predicted, sent, control = found
    told = sum(predicted.values())
    worst = max(
        (abs(sent.get(k, 0.0) / n - 1) for k, n in predicted.items() if 10 * n > told),
        default=0.0,
    )
    interfaces = sum(row.get("interfaces", ()))
    if interfaces:
        interfaces -= sum(control.values())
    return Compared(told, sum(sent.values()), worst, interfaces)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown; figures that miss a bar are bold."""
    lines = [f"| {' | '.join(HEADING)} |", "|" + "---|" * len(HEADING)]
    for row in rows:
        cells = [row["example"], row["layout"], row["schedule"], row["beside"]]
        if why := row.get("refused") or row.get("failed"):
            kind = "refused" if "refused" in row else "**failed**"
            cells += [f"{kind}: {why}", "", "", "", "", ""]
        else:
            found, loss = compare(row), row["difference"]
            exact = row["beside"] not in CODECS
            missed = exact and loss > LOSS_BAR
            more = f"{found.more:+.1%}"
            cells += [
                f"**{loss:.1e}**" if missed else f"{loss:.1e}",
                f"{found.predicted / 1e3:.1f}",
                f"{found.counted / 1e3:.1f}",
                f"**{more}**" if abs(found.more) > BYTES_BAR else more,
                f"{found.worst:.1%}",
                f"{found.interfaces / 1e3:.1f}" if found.interfaces else "",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(options: argparse.Namespace) -> None:
    """Prints the table of a file, and writes its content as JSON."""
    rows = sorted(read(options.rows).values(), key=lambda r: (r["layout"], str(r)))
    print(table(rows))
    if options.page:
        text = options.page.read_text()
        before, _, rest = text.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        options.page.write_text(f"{before}{_BEGIN}\n{table(rows)}\n{_END}{after}")
    if options.out:
        done = [row for row in rows if "difference" in row]
        plain = [row for row in done if row["beside"] not in CODECS]
        found = {
            "command": "python benchmarks/network/process_stages.py --rows rows.jsonl",
            "summary": {
                "rows": len(rows),
                "trained": len(done),
                "losses_within_1e-5": sum(r["difference"] <= LOSS_BAR for r in plain),
                "of": len(plain),
                "bytes_within_2_percent": sum(
                    abs(compare(row).more) <= BYTES_BAR for row in done
                ),
            },
            "rows": rows,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rows", type=pathlib.Path, help="append rows to this file")
    add("--only", nargs="*", default=[], help="rows that hold all of these words")
    add("--count", type=int, help="no more rows than these")
    add("--seconds", type=float, default=1e9, help="begin no row after so many")
    add("--seed", type=int, default=1)
    add("--show", action="store_true", help="run nothing, print the table")
    add("--out", type=pathlib.Path, help="with --show: all of it, as JSON")
    add("--page", type=pathlib.Path, help="with --show: put the table into this page")
    add("--reference", help=argparse.SUPPRESS)
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs the command; see the module."""
    options = parse()
    if options.inside:
        serve()
        return 0
    if options.reference:
        print(json.dumps(Row(**json.loads(options.reference)).case().reference()))
    elif options.rows is None:
        raise SystemExit("process_stages: give a file with --rows.")
    elif options.show:
        show(options)
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
