"""Tests the price of rows that hosts exchange before a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planner_steps import training

from autopar import Cluster
from autopar.cost.breakdown import step_s
from autopar.cost.estimate import estimate
from autopar.cost.rows import exchange_s, exchange_seconds, exchanges
from autopar.layouts.strategies import strategy_space
from autopar.planner.options import PlanOptions
from autopar.planner.plan import plan_analysis
from autopar.reports.explain import BoundPlan, bind_plan
from autopar.steps.analysis import analyse
from autopar_passes.program.calls import NamedRoles

ROWS, WIDTH, HOSTS = 64, 8, 4
BATCH_BYTES = 4 * ROWS * (WIDTH + 1)
TEXT = f"{HOSTS}x2:cpu,network=100Mb/s,network_latency=1ms"


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]).sum(1) - batch["y"]) ** 2)


def planned(spec: P, text: str = TEXT, whole: str = "") -> BoundPlan:
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    batch = {"x": jnp.ones((ROWS, WIDTH)), "y": jnp.ones(ROWS)}
    roles = NamedRoles.of(whole=whole or ())
    analysis = analyse(*training(loss, params, batch), roles=roles)
    cluster = Cluster.parse(text)
    pins = {"params/*": P(), "batch/*": spec}
    options = PlanOptions(axis_names=("host", "local"), pins=pins)
    return bind_plan(analysis, plan_analysis(analysis, cluster, options), cluster)


@pytest.mark.parametrize("spec", [P("host"), P(("host", "local"))], ids=str)
def test_rows_that_are_split_over_hosts_stay(spec: P) -> None:
    bound = planned(spec)
    assert exchange_s(bound.assignment, bound.pricer) == 0.0


@pytest.mark.parametrize("spec", [P(), P("local")], ids=str)
def test_rows_that_all_hosts_need_are_gathered_in_one_message(spec: P) -> None:
    """Each device gets the rows of three hosts; two devices share a link."""
    bound = planned(spec)
    link = bound.pricer.cluster.levels[0].link
    sent_s = 2 * BATCH_BYTES * (HOSTS - 1) / HOSTS / link.bandwidth_bytes_per_s
    found = exchange_s(bound.assignment, bound.pricer)
    latency_s = found - sent_s
    assert link.latency_s <= latency_s <= HOSTS * link.latency_s
    twice = exchange_s(bound.assignment, bound.pricer, 2.0)
    assert twice - found == pytest.approx(sent_s, rel=0.01)


def test_the_step_waits_for_the_exchange() -> None:
    bound = planned(P())
    found = estimate(bound.assignment, bound.pricer)
    exchanged_s = exchange_s(bound.assignment, bound.pricer)
    sent = found.messages
    waiting_s = sent.planned_s[~(sent.hideable | sent.beside)].sum()
    cost = found.cost
    assert cost.waiting_s + cost.waiting_latency_s == pytest.approx(
        waiting_s + exchanged_s
    )
    assert found.seconds() == pytest.approx(step_s(cost))


def test_strategies_of_the_batch_pay_what_the_step_pays() -> None:
    bound = planned(P())
    analysis, pricer = bound.assignment.analysis, bound.pricer
    total, contraction = 0.0, analysis.contraction
    spaces = [
        strategy_space(analysis.graph, contraction, node, pricer.sizes)
        for node in contraction.nodes
    ]
    for node, paid in exchange_seconds(analysis, spaces, pricer).items():
        own = bound.assignment.strategies[node]
        total += paid[spaces[node].strategies.index(own)]
        assert np.all(paid >= 0.0)
    assert total == pytest.approx(exchange_s(bound.assignment, pricer))


def test_nothing_is_exchanged_of_an_array_that_each_host_passes_whole() -> None:
    """The vector is still exchanged, in a message of its own."""
    bound = planned(P(), whole="batch/x")
    (message,) = exchanges(bound.assignment, bound.pricer)
    assert message.paths == ("batch/y",)
    assert message.nbytes == 4 * ROWS
    assert exchange_s(planned(P(), whole="batch").assignment, bound.pricer) == 0.0


def test_one_host_exchanges_nothing() -> None:
    bound = planned(P(), "8:cpu")
    assert exchange_s(bound.assignment, bound.pricer) == 0.0
