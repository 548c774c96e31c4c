"""Tests event sources with files, signals and HTTP, and with invalid messages."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from autopar import Cluster, PlanError
from autopar.elastic.events import Inbox, Resolved
from autopar.elastic.ledger import Ledger
from autopar.elastic.sources.file import File
from autopar.elastic.sources.http import TOKEN_VARIABLE, Http
from autopar.elastic.sources.named import Signals, source_of, sources_of
from autopar.elastic.sources.source import Source

TOKEN = "a token of sixteen letters"
PATIENCE_S = 60.0


class Heard:
    """A sink with an inbox, on which tests can wait for events."""

    def __init__(self) -> None:
        self.ledger = Ledger(None)
        cluster = Cluster.parse("4x2:h100")
        self.inbox = Inbox(cluster, tuple(range(8)), lambda found: None, self.ledger)
        self._some = threading.Condition()
        self._count = 0

    def put(self, event: Any) -> Resolved:
        found = self.inbox.put(event)
        self._tell()
        return found

    def wrong(self, source: str, reason: str) -> None:
        self.inbox.wrong(source, reason)
        self._tell()

    def _tell(self) -> None:
        with self._some:
            self._count += 1
            self._some.notify_all()

    def wait(self, count: int = 1) -> None:
        with self._some:
            assert self._some.wait_for(lambda: self._count >= count, PATIENCE_S)

    @property
    def cluster(self) -> Cluster | None:
        return self.inbox.take()[-1].cluster

    @property
    def reasons(self) -> list[str]:
        return [x["reason"] for x in self.ledger.lines if x["kind"] == "wrong"]


@contextlib.contextmanager
def listening(source: Source, heard: Heard | None = None) -> Generator[Heard]:
    heard = heard or Heard()
    source.start(heard)
    try:
        yield heard
    finally:
        source.stop()
        source.stop()


class TestFile:
    def test_new_contents_are_events(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.json"
        with listening(File(path, every_s=0.01)) as heard:
            replace(path, '{"kind": "gone", "hosts": ["host1"]}')
            heard.wait()
            found = heard.cluster
            assert found is not None
            assert found.ids == (0, 1, 4, 5, 6, 7)
            replace(path, "2x2:h100")
            heard.wait(2)
            assert str(heard.cluster) == "2x2:h100"

    def test_what_is_no_event_is_noted(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.json"
        with listening(File(path, every_s=0.01)) as heard:
            replace(path, '{"kind": "go')
            heard.wait()
            replace(path, '"2x2:h100"')
            heard.wait(2)
            assert str(heard.cluster) == "2x2:h100"
        assert "not JSON" in heard.reasons[0]

    def test_at_the_start_only_a_whole_cluster_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.json"
        replace(path, '[{"kind": "gone"}, "2x2:h100"]')
        with listening(File(path)) as heard:
            heard.wait()
            assert str(heard.cluster) == "2x2:h100"

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        with listening(File(tmp_path)) as heard:
            heard.wait()
        assert "directory" in heard.reasons[0]


class Dying(Heard):
    """A sink that ends the thread that puts the first event."""

    died = False

    def put(self, event: Any) -> Resolved:
        if not self.died:
            self.died = True
            raise SystemExit("the first event ends the thread")
        return super().put(event)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("kind", ["file", "http", "signal"])
def test_a_thread_that_dies_begins_again(tmp_path: Path, kind: str) -> None:
    """It is reported, and the event of a file or a signal is not lost."""
    path, http_source = tmp_path / "cluster.json", Http(token=TOKEN)
    file = File(path, every_s=0.01)
    source = {"file": file, "http": http_source, "signal": Signals()}[kind]
    with listening(source, Dying()) as heard:
        if kind == "file":
            replace(path, '["2x2:h100"]')
        elif kind == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            with contextlib.suppress(OSError, http.client.HTTPException):
                post(http_source, '"2x2:h100"')  # its sender hears nothing
            assert post(http_source, '"2x2:h100"')[0] == 200
        heard.wait(2)
        assert "ends the thread; it begins again" in heard.reasons[0]
        found = heard.inbox.take()
        assert [x.event.kind for x in found] == [
            "gone" if kind == "signal" else "cluster"
        ]


def replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


class TestSignals:
    def test_sigterm_takes_this_process(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with listening(Signals(grace_s=5)) as heard:
            os.kill(os.getpid(), signal.SIGTERM)
            heard.wait()
            (found,) = heard.inbox.take()
            assert found.cluster is None
            assert found.event.deadline_s == 5
        assert signal.getsignal(signal.SIGTERM) is before

    def test_the_main_thread_alone(self) -> None:
        errors: list[str] = []

        def start() -> None:
            try:
                Signals().start(Heard())
            except PlanError as error:
                errors.append(str(error))

        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        assert "main thread" in errors[0]


def post(
    source: Http, body: bytes | str, *, token: str = TOKEN, path: str = "/events"
) -> tuple[int, Any]:
    return request(source, "POST", path, {"Authorization": f"Bearer {token}"}, body)


def request(
    source: Http, method: str, path: str, headers: dict[str, str], body: Any = None
) -> tuple[int, Any]:
    address = source.url.split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None
    finally:
        connection.close()


def connected(source: Http) -> socket.socket:
    host, port = source.url.split("/")[2].split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


_CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out cert.pem "
    "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
)


class TestHttp:
    @pytest.fixture
    def source(self) -> Http:
        return Http(token=TOKEN)

    def test_events_and_answers(self, source: Http) -> None:
        with listening(source) as heard:
            event = json.dumps({"kind": "gone", "hosts": ["host1"], "id": "7"})
            status, answer = post(source, event)
            assert (status, answer["events"][0]["status"]) == (200, "accepted")
            status, answer = post(source, event)
            assert (status, answer["events"][0]["status"]) == (200, "repeated")
            status, answer = post(source, '{"kind": "gone", "hosts": ["other"]}')
            assert (status, answer["events"][0]["status"]) == (409, "refused")
            assert "'other' is not in the cluster" in answer["events"][0]["reason"]
            found = heard.cluster
            assert found is not None
            assert found.ids == (0, 1, 4, 5, 6, 7)

    @pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "ü" * 20])
    def test_without_the_token(self, source: Http, token: str) -> None:
        with listening(source) as heard:
            body = '{"kind": "gone"}'
            assert post(source, body, token=token)[0] == 401
            assert request(source, "POST", "/events", {}, body)[0] == 401
            assert heard.inbox.take() == ()
        assert "lacks the token" in heard.reasons[0]

    def test_malformed(self, source: Http) -> None:
        with listening(source) as heard:
            for body, text in (
                ('{"kind":', "not JSON"),
                ('{"kind": "gone", "what": 1}', "no field 'what'"),
                (b"\xff", "UTF-8"),
                ('["4x2:h100", {"kind": "lost"}]', "kind='lost'"),
            ):
                status, answer = post(source, body)
                assert status == 400
                assert text in answer["error"]
            assert heard.inbox.take() == ()

    def test_other_requests(self, source: Http) -> None:
        with listening(source):
            right = {"Authorization": f"Bearer {TOKEN}"}
            assert request(source, "GET", "/events", right)[0] == 405
            assert post(source, "{}", path="/")[0] == 404
            chunks = iter([b"{}"])
            assert request(source, "POST", "/events", right, chunks)[0] == 411

    def test_who_still_sends_is_not_cut_off(self, source: Http) -> None:
        """A refusal comes before the message does."""
        with listening(source), connected(source) as client:
            client.sendall(
                b"POST /other HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
            )
            assert client.recv(1000).split()[1] == b"401"
            for _ in range(100):
                client.sendall(b"{")

    def test_oversized(self, source: Http) -> None:
        """It is refused by its length; nothing of it is read."""
        with listening(source) as heard:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Length": "9" * 9}
            assert request(source, "POST", "/events", headers)[0] == 413
            headers["Content-Length"] = "-1"
            assert request(source, "POST", "/events", headers)[0] == 411
        assert "at most 1048576 bytes" in heard.reasons[0]

    def test_a_flood(self, source: Http) -> None:
        """Most of a flood is refused, which is noted once; then it is over."""
        with listening(source) as heard:
            found = [post(source, '"2x2:h100"')[0] for _ in range(120)]
            assert found[0] == 200
            assert found.count(429) > 20
            assert 1 <= len(heard.reasons) < 20
            assert set(found) == {200, 429}

    def test_strangers_count_for_nothing(self, source: Http) -> None:
        """A flood without the token takes no request of who knows it, and no ledger."""
        with listening(source) as heard:
            found = {post(source, "{}", token="x" * 20)[0] for _ in range(120)}
            assert found == {401}
            assert post(source, '"2x2:h100"')[0] == 200
            assert len(heard.reasons) < 5

    def test_slow_clients_hold_nobody_up(self, source: Http) -> None:
        """More of them than connections: the oldest go, and nobody waits."""
        with listening(source), contextlib.ExitStack() as stack:
            for k in range(400):
                held = stack.enter_context(connected(source))
                if k % 2:
                    held.sendall(b"POST /events HTTP/1.1\r\nX-A: ")
            begin = time.monotonic()
            assert post(source, '"2x2:h100"')[0] == 200
            assert time.monotonic() - begin < 1

    @pytest.mark.parametrize("part", ["head", "body"])
    def test_a_whole_request_has_one_limit(
        self, source: Http, part: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who sends a byte now and then is cut off, wherever it is in the request."""
        monkeypatch.setattr("autopar.elastic.sources.http._PATIENCE_S", 0.3)
        with listening(source), connected(source) as client:
            begin = time.monotonic()
            client.sendall(b"POST /events HTTP/1.1\r\nHost: a\r\n")
            if part == "body":
                client.sendall(f"Authorization: Bearer {TOKEN}\r\n".encode())
                client.sendall(b"Content-Length: 100000\r\n\r\n")
            client.settimeout(0.02)
            data = None
            while data is None:
                with contextlib.suppress(TimeoutError, BrokenPipeError):
                    client.sendall(b"a")
                    data = client.recv(1000)
                assert time.monotonic() - begin < 20
            assert data == b""

    def test_tls(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Http
    ) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        monkeypatch.delenv("AUTOPAR_EVENTS_CERT", raising=False)
        with pytest.raises(PlanError, match="https needs a certificate"):
            source_of("https:0").start(Heard())
        subprocess.run(
            _CERTIFICATE.split(), cwd=tmp_path, check=True, capture_output=True
        )
        for name, file in (("CERT", "cert.pem"), ("KEY", "key.pem")):
            monkeypatch.setenv(f"AUTOPAR_EVENTS_{name}", str(tmp_path / file))
        secure = source_of("https:0")
        assert isinstance(secure, Http)
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with listening(secure), connected(secure):  # one that does not say a word
            assert secure.url.startswith("https://127.0.0.1:")
            headers = {"Authorization": f"Bearer {TOKEN}"}
            wanted = urllib.request.Request(secure.url, b'"2x2:h100"', headers)
            with urllib.request.urlopen(wanted, context=context) as answer:
                assert answer.status == 200

    def test_it_listens_on_this_machine_only(self, source: Http) -> None:
        with listening(source):
            assert source.url.startswith("http://127.0.0.1:")

    def test_a_port_that_is_taken(self, source: Http) -> None:
        with listening(source):
            port = int(source.url.split(":")[2].split("/")[0])
            with pytest.raises(PlanError, match=r"cannot listen on 127\.0\.0\.1"):
                Http(port, token=TOKEN).start(Heard())

    def test_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
        assert Http().token != Http().token
        monkeypatch.setenv(TOKEN_VARIABLE, "x" * 16)
        assert Http().token == "x" * 16
        monkeypatch.setenv(TOKEN_VARIABLE, "short")
        with pytest.raises(PlanError, match="16 ASCII letters"):
            Http()


class TestNames:
    def test_each_source(self) -> None:
        found = sources_of(["file:a.json", "http:0", "signal", "signal:5"])
        kinds = [type(x).__name__ for x in found]
        assert kinds == ["File", "Http", "Signals", "Signals"]

    @pytest.mark.parametrize(
        "text", ["", "file:", "http", "http:x", "signals", "ray", "signal:soon"]
    )
    def test_unknown(self, text: str) -> None:
        with pytest.raises(PlanError, match="names no source"):
            source_of(text)

    def test_a_list_is_needed(self) -> None:
        with pytest.raises(PlanError, match="give a list"):
            sources_of("signal")
