"""Tests the metrics that a run serves to Prometheus, and the dashboard."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import urllib.request
from collections.abc import Iterator

import checkout
import pytest
from command_line import Run, assert_fails
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from supervised import Fake, running

from autopar.elastic.processes.metrics import METRICS, RunMetrics, read_address
from autopar.errors import PlanError

DOING = {
    "place": "samples", "step": 12, "for_s": 0.0, "steps": 50, "position": 288,
    "batch": 24, "loss": 0.5, "step_s": 0.2, "longest_s": 0.3, "samples_s": 0.1,
    "script_s": 0.05, "measured": 20, "program": "train", "sent_bytes": 1540.0,
}  # fmt: skip


@pytest.fixture
def metrics() -> Iterator[RunMetrics]:
    made = RunMetrics("127.0.0.1", 0)
    yield made
    made.close()


def scrape(metrics: RunMetrics) -> dict[tuple[str, ...], float]:
    """(name, label values) -> value of each served metric."""
    asked = urllib.request.Request(
        metrics.url, headers={"Accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(asked) as answer:
        text = answer.read().decode()
    return {
        (s.name, *map(s.labels.__getitem__, sorted(s.labels, reverse=True))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def trained() -> Fake:
    fake = running(2)
    for worker in range(2):
        known = {"step": 12, "phase": "step", "doing": DOING}
        fake.tell(worker, "beat", generation=1, **known)
    return fake


def test_what_is_known_of_a_run(metrics: RunMetrics) -> None:
    assert scrape(metrics) == {}
    fake = trained()
    for pause_s in (None, 2.0, 0.5):
        metrics.note("formed", {"pause_s": pause_s})
    fake.supervisor.watch.hang_s = {1: 3.0}
    metrics.update(fake.supervisor, fake.now + 1.0)
    found = scrape(metrics)
    host = "127.0.0.1"
    assert found["autopar_steps_total",] == 12
    assert found["autopar_samples_total",] == 288
    assert found["autopar_samples_per_second",] == pytest.approx(24 / 0.2)
    assert found["autopar_loss",] == 0.5
    assert found["autopar_step_sent_bytes",] == 1540
    assert found["autopar_worlds_total",] == 3
    assert found["autopar_pauses_total",] == 2
    assert found["autopar_pause_seconds_total",] == 2.5
    assert found["autopar_workers", "joined"] == 2
    assert found["autopar_worker_own_seconds", "1", host] == pytest.approx(0.15)
    assert found["autopar_worker_silence_seconds", "1", host] == 1.0
    assert found["autopar_worker_hang_seconds_total", "1", host] == 3.0
    assert found["autopar_worker_hang_seconds_total", "0", host] == 0.0
    names = {key[0] for key in found}
    assert names == {spec.sample(name) for name, spec in METRICS.items()}


def test_the_board_and_the_page_name_what_is_served() -> None:
    """Each metric, and no other."""
    known = {spec.sample(name) for name, spec in METRICS.items()}
    board = json.loads((checkout.ROOT / "docs" / "data" / "grafana.json").read_text())
    asked = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    asked += [x["query"] for x in board["templating"]["list"]]
    used = {name for text in asked for name in re.findall(r"autopar_\w+", text)}
    assert used == known
    page = (checkout.ROOT / "docs" / "watching.md").read_text()
    rows = re.findall(r"^\| `(autopar_\w+)` \| (\w+) \|", page, re.M)
    kinds = {spec.sample(name): spec.kind for name, spec in METRICS.items()}
    assert dict(rows) == kinds
    assert "(data/grafana.json)" in page


def test_an_address_that_cannot_be_had() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=rf"--metrics: port {port} of 127.0.0.1"):
            RunMetrics("127.0.0.1", port)


def test_a_bad_address_ends_the_command_before_all_else(
    run: Run, tmp_path: pathlib.Path
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text("")
    words = ("run", "--folder", folder, "--metrics")
    assert_fails(run(*words, "here:there", script), "'here:there' is no HOST:PORT")
    assert_fails(run(*words, "1.2.3.4:9100", script), "port 9100 of 1.2.3.4 cannot be")
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "nine", "host:", ":", "99999", "a:b"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="no HOST:PORT"):
        read_address(text)
