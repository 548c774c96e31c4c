"""Tests the network namespaces of `bed.py`: the arithmetic, and as root the links."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "network"


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name: str) -> Any:
    return importlib.import_module(name)


def unavailable() -> str:
    """Why this machine cannot make network namespaces; '' if it can."""
    sys.path.insert(0, str(FOLDER))
    bed = load("bed")
    try:
        with bed.Bed(count=1, rate_mbit=100):
            return ""
    except bed.BedUnavailable as error:
        return str(error)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture
def needs_bed() -> None:
    if why := unavailable():
        pytest.skip(why)


# Without privileges.


def test_the_model_of_the_bed_can_be_made() -> None:
    """It is that of an example, whose fields may change."""
    model = load("language_model")
    sizes = model.Sizes(layers=1, d_model=16, heads=2, seq=8)
    state = jax.eval_shape(model.build(0, sizes).create)
    assert jax.tree.leaves(state)


@pytest.mark.parametrize("rate_mbit", [1, 100, 500, 1000, 10000])
def test_a_bucket_holds_a_millisecond_but_two_packets_at_least(rate_mbit: int) -> None:
    bed = load("bed")
    packet = 16384

    size = bed.burst_bytes(rate_mbit)

    assert size == max(2 * packet, rate_mbit * 1e6 / 8 / 1000)


def test_data_and_wire_bytes_of_large_packets() -> None:
    """Ten packets of 14480 bytes of data are a hundred segments on a real link."""
    worker = load("worker")
    data = 10 * 14480

    sent = worker.Traffic(data + 10 * 66, 10)

    assert sent.data_bytes == data
    assert sent.wire_bytes == data + 100 * 66


def test_small_packets_are_not_joined() -> None:
    worker = load("worker")

    sent = worker.Traffic(5 * (100 + 66), 5)

    assert sent.wire_bytes == sent.sent_bytes


def test_names_of_beds_tell_their_makers() -> None:
    bed, netns = load("bed"), load("netns")
    made = bed.Bed(count=2)

    names = [n for h in made.hosts for n in (h.namespace, h.outer)]

    for name in [*names, f"{made.prefix}br"]:
        assert len(name) <= 15  # the most of an interface
        match = netns.NAME.fullmatch(name)
        assert match is not None
        assert int(match[2]) == os.getpid()


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("root", "need root"), ("ip", "install iproute2"), ("tc", "install iproute2")],
)
def test_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str, expected: str
) -> None:
    bed, netns = load("bed"), load("netns")
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr(
        netns.shutil, "which", lambda tool: None if tool == missing else f"/{tool}"
    )

    with pytest.raises(bed.BedUnavailable, match=expected), bed.Bed():
        raise AssertionError("it was made")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("RTNETLINK answers: Operation not permitted", "CAP_NET_ADMIN"),
        ("Error: Unknown device type.", "bridge"),
        ("Error: Specified qdisc kind is unknown.", "sch_tbf"),
    ],
)
def test_explains_what_a_tool_said(said: str, expected: str) -> None:
    why = load("netns").why("add a bridge", said)

    assert said in why
    assert expected in why


def test_processes_share_out_the_batch_of_one() -> None:
    model = load("language_model")
    sizes = model.Sizes()
    whole = model.batch(sizes, seed=3, step=7)

    parts = [model.batch(sizes, 3, 7, rank, 4) for rank in range(4)]

    for name, array in whole.items():
        joined = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(joined, array)
        assert array.shape == (sizes.batch, sizes.seq)
        assert array.max() < model.VOCAB
    np.testing.assert_array_equal(whole["inputs"][:, 1:], whole["targets"][:, :-1])


def test_batches_differ_by_step_and_seed() -> None:
    model = load("language_model")
    sizes = model.Sizes()

    found = [model.batch(sizes, s, k)["inputs"] for s, k in ((0, 0), (0, 1), (1, 0))]

    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (found[i] != found[j]).any()


def test_the_text_is_split_and_its_parts_share_no_line() -> None:
    model = load("language_model")
    text = model.text()
    part = len(text.evaluation) / (len(text.evaluation) + len(text.train))
    start = text.evaluation[:500].tobytes()

    assert part == pytest.approx(model.EVAL_PART, abs=0.01)
    assert start not in text.train.tobytes()


def test_time_to_the_dense_loss() -> None:
    """Dense: 1 s a step to loss 2; the other 0.5 s a step, there after 3/4."""
    summaries = load("summaries")
    dense: dict[str, Any] = {
        "evaluations": [(2, 3.0), (4, 2.0)],
        "step_s": [1.0] * 4,
    }
    other = {"evaluations": [(2, 3.0), (4, 1.0)], "step_s": [0.5] * 4}
    worse = {"evaluations": [(2, 3.0), (4, 2.5)], "step_s": [0.5] * 4}

    assert summaries.time_to(dense, dense) == 4.0
    assert summaries.time_to(other, dense) == 1.5
    assert summaries.time_to(worse, dense) is None


def test_a_step_takes_as_long_as_the_slowest_process() -> None:
    summaries = load("summaries")
    counts = {"sent_bytes": 1, "data_bytes": 1, "wire_bytes": 1}
    first = {"step_s": [1.0, 4.0], "cpu_s": [0.5, 0.5], **counts}
    second = {**first, "step_s": [2.0, 3.0], "data_bytes": 5}

    (merged,) = summaries.merged([[first], [second]])

    assert merged["step_s"] == [2.0, 4.0]
    assert merged["cpu_s"] == [1.0, 1.0]
    assert merged["data_bytes"] == 5


def test_alpha_and_beta_reach_the_planner() -> None:
    """Times on a line: the fit is the line, and the cluster's link holds it."""
    clusters = load("clusters")
    alpha_s, beta = 2e-3, 1.2e-7
    records = [
        {"rate_mbit": 100.0, "name": "psum f32", "group_size": 4, "nbytes": n,
         "seconds": alpha_s + beta * n}
        for n in (1 << 12, 1 << 18, 1 << 21)
    ]  # fmt: skip

    fits = clusters.fit(records, {"psum f32": "all_reduce"})
    cluster = clusters.described(100.0, 4, fits)
    other = clusters.described(500.0, 4, fits)

    (line,) = cluster.levels[0].link.measured
    assert line.latency_s == pytest.approx(alpha_s, rel=1e-4)
    assert line.s_per_byte == pytest.approx(beta, rel=1e-4)
    assert cluster.levels[0].link.bandwidth_bytes_per_s == 12.5e6
    assert other.levels[0].link.measured == ()


# As root.

PROGRAM = """
import json, os, pathlib, socket, sys, time
rank = int(os.environ["BED_RANK"])
address = socket.gethostbyname(socket.gethostname())
total = 400_000
def ask(rate):
    print("@bed", json.dumps({"rate_mbit": rate}), flush=True)
    sys.stdin.readline()
if rank == 0:
    server = socket.create_server((address, 5001))
    connection, _ = server.accept()
    times = []
    for rate in (None, 40, 10):
        if rate:
            ask(rate)
        connection.sendall(b"g")
        received, started = 0, time.perf_counter()
        while received < total:
            received += len(connection.recv(1 << 16))
        times.append(time.perf_counter() - started)
    print("@bed", json.dumps({"result": [address, times]}), flush=True)
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection(("10.77.0.1", 5001))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
    for _ in range(3):
        connection.recv(1)
        connection.sendall(bytes(total))
    print("@bed", json.dumps({"result": [address, []]}), flush=True)
"""


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
def test_hosts_have_names_and_links_of_the_rate_they_were_given() -> None:
    """400 kB at 40 and 10 Mbit/s, less two buckets of 32 KiB that pass at once."""
    bed, netns = load("bed"), load("netns")

    with bed.Bed(count=2) as hosts:
        command = [sys.executable, "-c", PROGRAM]
        ((first,), (second,)) = hosts.run(command, timeout_s=120)
        made = netns.names_with(hosts.prefix)

    (address, times) = first
    assert (address, second[0]) == ("10.77.0.1", "10.77.0.2")
    assert [len(names) for names in made] == [2, 3]
    bits = 8 * (400_000 - 2 * 32_768)
    for rate_mbit, seconds in zip((40, 10), times[1:], strict=True):
        assert seconds > bits / (rate_mbit * 1e6)
    assert netns.names_with(hosts.prefix) == ([], [])


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
def test_a_failed_process_ends_the_others_and_says_why() -> None:
    bed, launch, netns = load("bed"), load("launch"), load("netns")
    program = (
        "import os, sys, time\n"
        "if os.environ['BED_RANK'] == '1': sys.exit('out of cheese')\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()

    with (
        pytest.raises(launch.RunFailed, match="process 1 ended with 1:\nout of cheese"),
        bed.Bed(count=2) as hosts,
    ):
        hosts.run([sys.executable, "-c", program], timeout_s=120)

    assert time.monotonic() - started < 50
    assert netns.names_with(hosts.prefix) == ([], [])


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
def test_a_run_that_takes_too_long_is_ended() -> None:
    bed, launch = load("bed"), load("launch")

    with (
        pytest.raises(launch.RunFailed, match=r"\[0\] had not ended after 0.3 s"),
        bed.Bed(count=1) as hosts,
    ):
        hosts.run(["sleep", "60"], timeout_s=0.3)


@contextlib.contextmanager
def started(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that makes namespaces; checks that nothing is left after the
    block.
    """
    netns = load("netns")
    with subprocess.Popen(
        command, text=True, start_new_session=True, **options
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            netns.remove(f"{netns.PREFIX}{process.pid}")


def wait_for_processes(namespace: str) -> None:
    netns = load("netns")
    deadline = time.monotonic() + 20
    while not netns.output("ip", "netns", "pids", namespace).strip():
        assert time.monotonic() < deadline


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
@pytest.mark.parametrize("before", ["default", "ignore"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, before: str) -> None:
    """Also of a program that was started with the signal ignored."""
    netns = load("netns")
    setting = ["env", f"--{before}-signal={number.name.removeprefix('SIG')}"]
    program = [sys.executable, str(FOLDER / "bed.py"), "run", "--count", "1"]
    command = [*setting, *program, "--", "sleep", "60"]
    with started(*command, stderr=subprocess.DEVNULL) as process:
        prefix = f"{netns.PREFIX}{process.pid}"
        wait_for_processes(f"{prefix}w0")

        process.send_signal(number)

        assert process.wait(20) != 0
        assert netns.names_with(prefix) == ([], [])


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
def test_a_hangup_that_nohup_ignores_ends_nothing() -> None:
    netns = load("netns")
    program = [sys.executable, str(FOLDER / "bed.py"), "run", "--count", "1"]
    command = ["env", "--ignore-signal=HUP", *program, "--", "sleep", "60"]
    with started(*command, stderr=subprocess.DEVNULL) as process:
        prefix = f"{netns.PREFIX}{process.pid}"
        wait_for_processes(f"{prefix}w0")

        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)

        assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.cluster
@pytest.mark.usefixtures("needs_bed")
def test_clean_takes_what_the_dead_left_and_nothing_else() -> None:
    """A maker that is killed cannot clean up; this test's own bed stays."""
    bed, netns = load("bed"), load("netns")
    program = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import bed
bed.Bed(count=1, rate_mbit=100).__enter__()
print("made", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with (
        started(*command, stdout=subprocess.PIPE) as process,
        bed.Bed(count=1) as own,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.kill()
        process.wait()

        removed = netns.clean()

        prefix = f"{netns.PREFIX}{process.pid}"
        assert {f"{prefix}w0", f"{prefix}br"} <= set(removed)
        assert netns.names_with(prefix) == ([], [])
        assert netns.names_with(own.prefix)[0] == [own.hosts[0].namespace]
