"""Metrics that `autopar run --metrics` serves to Prometheus, as OpenMetrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from autopar.elastic.processes.members import describe
from autopar.elastic.processes.network import join_address, split_address
from autopar.elastic.processes.supervisor import Supervisor
from autopar.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class MetricSpec:
    """The description of a metric.

    Attributes:
      kind: ``counter``, whose samples end in ``_total``, or ``gauge``.
      text: explanation of the metric.
      labels: labels that distinguish its samples.
    """

    kind: str
    text: str
    labels: tuple[str, ...] = ()

    def sample(self, name: str) -> str:
        """The name of the metric's samples."""
        return f"{name}_total" if self.kind == "counter" else name


_WORKER = ("worker", "host")
# Name of a metric, which ends in its unit if it has a unit -> description.
METRICS = {
    "autopar_steps": MetricSpec("counter", "Steps done."),
    "autopar_samples": MetricSpec("counter", "Samples consumed."),
    "autopar_loss": MetricSpec(
        "gauge", "First number that a step returned, at most about a second old."
    ),
    "autopar_step_seconds": MetricSpec("gauge", "Median time of the last 20 steps."),
    "autopar_samples_per_second": MetricSpec(
        "gauge", "Samples of a step over that time."
    ),
    "autopar_step_sent_bytes": MetricSpec(
        "gauge", "Bytes that one device sends in a step, as the plan predicts."
    ),
    "autopar_worlds": MetricSpec("counter", "Worlds formed by this supervisor."),
    "autopar_pauses": MetricSpec(
        "counter", "Worlds of them before which a worker had trained."
    ),
    "autopar_pause_seconds": MetricSpec(
        "counter", "Time from the last step to the state in the next world."
    ),
    "autopar_world_workers": MetricSpec("gauge", "Workers of the world."),
    "autopar_workers": MetricSpec(
        "gauge", "Workers that are starting, ready for a world, or in one.", ("phase",)
    ),
    "autopar_worker_step": MetricSpec(
        "gauge", "Number of the last step that a worker has started.", _WORKER
    ),
    "autopar_worker_own_seconds": MetricSpec(
        "gauge", "Median time of a step in the script and the source.", _WORKER
    ),
    "autopar_worker_silence_seconds": MetricSpec(
        "gauge", "Time since a worker was last heard of.", _WORKER
    ),
    "autopar_worker_hanging": MetricSpec(
        "gauge", "1 where a worker is named as one that hangs, otherwise 0.", _WORKER
    ),
    "autopar_worker_hang_seconds": MetricSpec(
        "counter", "Time for which a worker was named so.", _WORKER
    ),
}
_PHASES = ("starting", "ready", "joined")
# Name of a metric -> pairs of label values and the metric's value.
Samples = Mapping[str, list[tuple[tuple[str, ...], float]]]


def read_address(text: str) -> tuple[str, int]:
    """Host and port to serve at; the host is loopback if only a port is given.

    Raises:
      InputError: the text is neither a port nor ``HOST:PORT``.

    >>> read_address("9100"), read_address("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))
    """
    return split_address(text if ":" in text else f"127.0.0.1:{text}")


class RunMetrics(Collector):
    """The metrics of a run, served over HTTP.

    One thread updates the metrics, and the threads of the server read them.
    """

    def __init__(self, host: str, port: int) -> None:
        """Starts to serve at an address; there are no values yet.

        Args:
          host: address to listen on.
          port: port to listen on; 0: any free port.

        Raises:
          PlanError: the address cannot be used.
        """
        self._samples: Samples = {}
        self._worlds = self._pauses = 0
        self._pause_s = 0.0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PlanError(
                f"--metrics: port {port} of {host} cannot be had: {reason}. Name an "
                "address of this host and a port that is free, as --metrics 9100."
            ) from error

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = self._server.server_address[:2]
        return f"http://{join_address(str(host), port)}/metrics"

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()

    def note(self, event: str, data: Mapping[str, Any]) -> None:
        """Takes an event of the log."""
        if event == "formed":
            self._worlds += 1
            if (pause_s := data.get("pause_s")) is not None:
                self._pauses += 1
                self._pause_s += pause_s

    def update(self, supervisor: Supervisor, now: float) -> None:
        """Sets the metrics to the supervisor's current values.

        Args:
          supervisor: supervisor of the run.
          now: seconds on the supervisor's clock.
        """
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {}

        def put(name: str, value: float | None, *labels: str) -> None:
            if value is not None:
                found.setdefault(name, []).append((labels, float(value)))

        watch, world = supervisor.watch, supervisor.world
        first = watch.seen.get(world[0]) if world else None
        doing = {} if first is None else first.doing
        step_s, batch = doing.get("step_s"), doing.get("batch")
        put("autopar_steps", max(0, supervisor.reached))
        put("autopar_samples", doing.get("position"))
        put("autopar_loss", doing.get("loss"))
        put("autopar_step_seconds", step_s)
        if step_s and batch:
            put("autopar_samples_per_second", batch / step_s)
        put("autopar_step_sent_bytes", doing.get("sent_bytes"))
        put("autopar_worlds", self._worlds)
        put("autopar_pauses", self._pauses)
        put("autopar_pause_seconds", self._pause_s)
        put("autopar_world_workers", len(world))
        members = describe(supervisor.members)
        for phase in _PHASES:
            count = sum(m.phase == phase for m in supervisor.members.values())
            put("autopar_workers", count, phase)
        named = watch.named_workers()
        for name, member in members.items():
            labels, worker = (name, member["host"] or ""), int(name)
            seen = watch.seen.get(worker)
            own = {} if seen is None else seen.doing
            put("autopar_worker_step", max(-1, member["step"]), *labels)
            if "samples_s" in own:
                own_s = own["samples_s"] + own["script_s"]
                put("autopar_worker_own_seconds", own_s, *labels)
            if supervisor.members[worker].connected:
                silent_s = max(0.0, now - supervisor.members[worker].heard_s)
                put("autopar_worker_silence_seconds", silent_s, *labels)
            put("autopar_worker_hanging", worker in named, *labels)
            hang_s = watch.hang_s.get(worker, 0.0)
            put("autopar_worker_hang_seconds", hang_s, *labels)
        self._samples = found  # replaced as a whole, because another thread reads it

    def collect(self) -> Iterator[Metric]:
        """The metrics with their values (see `prometheus_client`)."""
        samples = self._samples
        for name, spec in METRICS.items():
            made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            metric = made(name, spec.text, labels=spec.labels)
            for labels, value in samples.get(name, ()):
                metric.add_metric(labels, value)
            yield metric

    def describe(self) -> Iterator[Metric]:
        """The metrics that may be served (see `prometheus_client`)."""
        return iter(())
