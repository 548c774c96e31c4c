"""Tests the times of compiled schedules against sums by hand."""

import dataclasses
import math

import pytest

from autopar.cluster import Cluster
from autopar.compilers.compiled import kernel_s, message_s, timeline
from autopar.cost.compute import product_s
from autopar.cost.pricer import Pricer
from autopar_passes.audit.compiled import Done, EventLoop, Kernel, Start
from autopar_passes.audit.kernels import Product
from autopar_passes.audit.partitioned import AuditedCollective

CLUSTER = Cluster.parse("2x4:h100")
PRICER = Pricer(CLUSTER, CLUSTER.default_mesh(("data", "tensor")))
GATHER = AuditedCollective("all_gather", ("tensor",), 4, 1e9, 1.0, "")
WIRE_S = message_s((GATHER,), PRICER)


def kernel(seconds: float) -> Kernel:
    """A kernel that only moves bytes, for a given number of seconds."""
    device = CLUSTER.device
    moved_s = (seconds - device.kernel_latency_s) / device.corrections.vector_slowdown
    return Kernel("k", 0.0, moved_s * device.memory_bandwidth_bytes_per_s, "float32")


def start(name: str = "a", *, waits: bool = False) -> Start:
    return Start(name, (GATHER,), waits)


@pytest.mark.parametrize("part", [0.5, 1.0, 2.0])
def test_kernels_between_start_and_done_hide_a_message(part: float) -> None:
    found = timeline([start(), kernel(part * WIRE_S), Done("a")], PRICER)

    assert math.isclose(found.exposed_s, max(0.0, 1 - part) * WIRE_S, abs_tol=1e-12)
    assert math.isclose(found.kernel_s, part * WIRE_S)
    assert math.isclose(found.communication_s, WIRE_S)
    assert (found.messages, found.hidden) == (1, 1)


def test_without_kernels_between_nothing_is_hidden() -> None:
    found = timeline([kernel(WIRE_S), start(), Done("a"), kernel(WIRE_S)], PRICER)

    assert math.isclose(found.exposed_s, WIRE_S)
    assert found.hidden == 0


def test_a_synchronous_message_is_exposed_at_once() -> None:
    found = timeline([start(waits=True), kernel(2 * WIRE_S), Done("a")], PRICER)

    assert math.isclose(found.exposed_s, WIRE_S)


def test_messages_wait_for_each_other() -> None:
    """Two messages begin at once: the second ends after both."""
    both = [start("a"), start("b"), kernel(1.5 * WIRE_S), Done("a"), Done("b")]

    assert math.isclose(timeline(both, PRICER).exposed_s, 0.5 * WIRE_S)


def test_a_loop_multiplies() -> None:
    body = (start(), kernel(0.5 * WIRE_S), Done("a"))
    once, found = timeline(body, PRICER), timeline([EventLoop(3.0, body)], PRICER)

    assert math.isclose(found.exposed_s, 3 * once.exposed_s)
    assert found.messages == 3


def test_arrays_of_one_message_pay_one_latency() -> None:
    half = dataclasses.replace(GATHER, nbytes=GATHER.nbytes / 2)

    assert math.isclose(message_s((half, half), PRICER), WIRE_S)


def test_products_take_what_the_table_of_the_device_says() -> None:
    device = CLUSTER.device
    product = Product(4, 1024, 512, 2048, "bfloat16", 2)
    table_s = product_s("bfloat16", 2, device, 4, 1024, 512, 2048) / device.sustained
    one = Kernel("k", product.flops, 1.0, "bfloat16", products=(product,))
    two = dataclasses.replace(one, products=(product, product))

    assert math.isclose(kernel_s(one, device), table_s)
    assert math.isclose(kernel_s(two, device), 2 * table_s)


def test_a_kernel_takes_no_less_than_what_it_moves() -> None:
    device = CLUSTER.device
    product = Product(1, 64, 64, 64, "bfloat16", 2)
    found = Kernel("k", product.flops, 1e9, "bfloat16", products=(product,))

    assert kernel_s(found, device) == 1e9 / device.memory_bandwidth_bytes_per_s


def test_products_without_a_table_run_at_the_attained_rate() -> None:
    device = dataclasses.replace(CLUSTER.device, rates="")
    product = Product(1, 4096, 4096, 4096, "bfloat16", 2)
    found = Kernel("k", product.flops, 1.0, "bfloat16", products=(product,))
    rate = device.peak("bfloat16") * device.matmul_efficiency * device.sustained

    assert math.isclose(kernel_s(found, device), 2 * 4096**3 / rate)
