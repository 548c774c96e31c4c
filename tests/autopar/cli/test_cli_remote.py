"""Tests ``autopar jobs ... --at`` with a scheduler over TLS on loopback."""

from __future__ import annotations

import pathlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import Run, assert_fails
from dispatching import World, handed

from autopar.cli import remote
from autopar.dispatch import endpoint as endpoints
from autopar.dispatch.endpoint import Endpoint, ask
from autopar.dispatch.store import Store
from autopar.elastic.processes.certificates import create_secret
from autopar.elastic.processes.members import Connection
from autopar.elastic.processes.network import Network
from autopar.errors import ScheduleError


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("secret") / "secret.pem"
    create_secret(path)
    return path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of the jobs, on a file system that both sides share."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "jobs.toml").write_text(
        '[[job]]\nname = "one"\nscript = "train.py"\n'
        '[[job]]\nname = "two"\nscript = "train.py"\nuser = "ben"\n'
    )
    return tmp_path


@pytest.fixture
def endpoint(folder: pathlib.Path, secret: pathlib.Path) -> Iterator[Endpoint]:
    made = remote.listen(folder / "state", "127.0.0.1:0", secret.read_text())
    yield made
    made.close()


@pytest.fixture
def there(endpoint: Endpoint, secret: pathlib.Path) -> tuple[Any, ...]:
    return "--at", endpoint.address, "--secret", secret


def test_jobs_are_submitted_listed_held_and_cancelled(
    run: Run, folder: pathlib.Path, there: tuple[Any, ...], monkeypatch: Any
) -> None:
    """As they are beside the scheduler; users are those of the callers."""
    monkeypatch.setenv("LOGNAME", "anna")
    assert run("jobs", "submit", folder / "jobs.toml", *there).code == 0
    script = ("jobs", "submit", folder / "train.py", "--name", "three", *there)
    assert "job three is submitted" in run(*script, "--", "--rate", "1").out
    listed = run("jobs", "list", *there, "--json").json
    found = [(job["name"], job["user"]) for job in listed["jobs"]]
    assert found == [("one", "anna"), ("two", "ben"), ("three", "anna")]
    assert run("jobs", "hold", "one", *there).out.startswith("job one is held")
    assert run("jobs", "release", "one", *there).out.startswith("job one is pending")
    assert run("jobs", "cancel", "two", *there).out.startswith("job two is cancelled")
    shown = run("jobs", "show", "three", *there).out
    assert f"script      {folder}/train.py --rate 1" in shown
    assert_fails(run("jobs", "logs", "one", *there), "'one' is pending and has printed")
    assert_fails(run("jobs", "show", "four", *there), "refuses: job 'four': there is")
    assert_fails(run("jobs", "logs", "one", "-f", *there), "leave out --at")


def test_a_job_that_the_scheduler_cannot_run_is_refused(
    run: Run, folder: pathlib.Path, there: tuple[Any, ...]
) -> None:
    """The script has to be on the scheduler's side; none of the jobs is added."""
    more = '[[job]]\nname = "three"\nscript = "none.py"\n'
    with (folder / "jobs.toml").open("a") as file:
        file.write(more)
    told = run("jobs", "submit", folder / "jobs.toml", *there)
    assert_fails(told, "refuses: ", "job 'three': script 'none.py'", str(folder))
    elsewhere = run("jobs", "submit", "/no/such/train.py", *there)
    assert_fails(elsewhere, "script 'train.py': there is no such file in /no/such")
    assert not Store(folder / "state" / "state.sqlite").jobs()


def test_a_submission_is_taken_once(
    run: Run, folder: pathlib.Path, there: tuple[Any, ...]
) -> None:
    words = ("jobs", "submit", folder / "jobs.toml", "--id", "mine", *there)
    assert "already" not in run(*words).out
    assert "job one is submitted already" in run(*words).out
    other = ("jobs", "submit", folder / "train.py", "--id", "mine", *there)
    assert_fails(run(*other), "submission 'mine' was of one, two")
    again = run("jobs", "submit", folder / "jobs.toml", *there)
    assert_fails(again, "job 'one' is there already")
    assert len(Store(folder / "state" / "state.sqlite").jobs()) == 2


@pytest.mark.parametrize("breaks", ["question", "answer"])
def test_a_line_that_breaks_loses_nothing(
    breaks: str,
    run: Run,
    folder: pathlib.Path,
    there: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the question has arrived, or behind what it does: it is asked again."""
    sent: list[str] = []
    send = Connection.send

    def broken(self: Connection, kind: str, **data: Any) -> bool:
        sent.append(kind)
        if kind == breaks and sent.count(kind) == 1:
            self.close()
            return False
        return send(self, kind, **data)

    monkeypatch.setattr(Connection, "send", broken)
    monkeypatch.setattr(endpoints, "_PAUSE_S", 0.0)
    told = run("jobs", "submit", folder / "jobs.toml", *there)
    assert told.code == 0
    assert sent.count("question") == 2
    assert ("already" in told.out) == (breaks == "answer")
    assert list(Store(folder / "state" / "state.sqlite").jobs()) == ["one", "two"]


def test_who_gets_no_answer_is_told_how_to_ask_again(
    run: Run, folder: pathlib.Path, secret: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(endpoints, "_TRIES_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = ("--at", f"127.0.0.1:{port}", "--secret", secret)
    told = run("jobs", "submit", folder / "jobs.toml", *there)
    assert_fails(told, "does not answer", "the same command again with --id")
    assert re.search(r"--id [0-9a-f]{32}", told.err.replace("\n", " "))
    assert_fails(run("jobs", "list", *there), "does not answer", "--listen")


class TestSecrets:
    def test_who_has_another_one_is_refused(
        self, endpoint: Endpoint, tmp_path: pathlib.Path, run: Run
    ) -> None:
        create_secret(tmp_path / "other.pem")
        words = ("--at", endpoint.address, "--secret", tmp_path / "other.pem")
        assert_fails(run("jobs", "list", *words), "has another secret, or none")

    def test_who_has_none_reads_nothing(self, endpoint: Endpoint) -> None:
        host, _, port = endpoint.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            plain.sendall(b'{"kind": "question", "protocol": 1, "command": "jobs"}\n')
            assert b"answer" not in plain.recv(1000)

    def test_an_endpoint_without_one_is_none(self) -> None:
        with pytest.raises(ScheduleError, match="needs a secret"):
            Endpoint(Network(), 0, lambda _: {})


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({"protocol": 9, "command": "jobs"}, "speaks 1; use one release"),
        ({"command": "stop"}, "the question is wrong: Invalid enum value 'stop'"),
        ({"command": "show", "names": [1]}, "the question is wrong: .*names"),
        ({"command": "logs", "names": ["a", "b"]}, "name one job, and not 2"),
        ({"command": "submit", "submission": "x"}, "folder '' is no absolute path"),
        ({"command": "submit", "folder": "/"}, "a name of 1 to 100 letters"),
        ({"command": "submit", "jobs": [{"name": "x"}]}, "the question is wrong"),
        ({"command": "jobs"}, "there is no scheduler's state"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_wrong(
    words: dict[str, Any], part: str, endpoint: Endpoint, secret: pathlib.Path
) -> None:
    network = Network(secret=secret.read_text())
    connection = Connection(network.connect(endpoint.address, 10.0))
    connection.patience(10.0)
    connection.send("question", **{"protocol": 1, **words})
    answer = connection.receive()
    connection.close()
    assert answer is not None
    assert re.search(part, answer["wrong"])


def test_a_scheduler_without_hosts_refuses_agents(
    run: Run, there: tuple[Any, ...], tmp_path: pathlib.Path
) -> None:
    words = ("--supervisor", there[1], *there[2:], "--folder", tmp_path / "host")
    assert_fails(run("worker", *words), "start it with --backend hosts")


def test_a_fault_of_the_scheduler_ends_no_line(secret: pathlib.Path) -> None:
    """It is said to who asks, and the next question is answered."""

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        return {"text": str(1 / message["by"])}

    network = Network(secret=secret.read_text())
    made = Endpoint(network, 0, answer)
    with pytest.raises(ScheduleError, match="it failed: ZeroDivisionError"):
        ask(network, made.address, by=0)
    assert ask(network, made.address, by=2)["text"] == "0.5"
    made.close()


def test_a_scheduler_is_asked_where_it_is_now(secret: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    network = Network(secret=secret.read_text())
    made = Endpoint(network, 0, lambda message: {"text": message["by"]})
    both, slept = f"127.0.0.1:{port},{made.address}", list[float]()
    assert ask(network, both, sleep=slept.append, by="x")["text"] == "x"
    assert len(slept) == 1
    made.close()


def test_what_is_submitted_elsewhere_runs(
    folder: pathlib.Path, secret: pathlib.Path, run: Run
) -> None:
    """The scheduler takes it up at its next look."""
    state = folder / "state"
    state.mkdir()
    world = World(state, [handed("first")], {"first": 30, "one": 5, "two": 5})
    made = remote.listen(state, "127.0.0.1:0", secret.read_text())
    there = ("--at", made.address, "--secret", secret)
    world.rounds(1)
    assert run("jobs", "submit", folder / "jobs.toml", *there).code == 0
    world.clock.now = 2e9  # those of the command line are by the clock of the machine
    world.scheduler.run()
    assert set(world.states().values()) == {"done"}
    assert "3 of 3 jobs are done" in run("jobs", "list", *there).out
    made.close()
