"""Tests ``autopar goodput``: its table, its files and its errors."""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec
import pytest
from command_line import SMALL, TARGET, Run, assert_fails

from autopar.cli import curving
from autopar.cli.commands.plans import GoodputCommand
from autopar.cluster import Cluster
from autopar.goodput.curves import CurveTable
from autopar.planner.options import DEFAULTS

FUSED = """
import jax
import jax.numpy as jnp


def step(weights, batch):
    def loss(weights):
        x = (batch @ weights).reshape(*batch.shape[:2], 2, 64)
        out = jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
        return (out.astype(jnp.float32) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - gradient, value


def workload(batch=32):
    rows = jax.ShapeDtypeStruct((batch, 256, 128), jnp.bfloat16)
    return step, jax.ShapeDtypeStruct((128, 128), jnp.bfloat16), rows
"""
GIVEN = (TARGET, *SMALL, "--seconds", 2)


def test_a_row_for_each_cluster(run: Run) -> None:
    words = (*GIVEN, "--clusters", "1:cpu", "2:cpu", "2x2:cpu", "5:cpu,memory=1kB")
    result = run("goodput", *words)
    assert result.code == 0
    table, follows = result.out.rstrip().split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0][:4] == ["cluster", "nodes", "devices", "batch"]
    assert [row[:4] for row in rows[1:4]] == [
        ["1:cpu", "1", "1", "64"],
        ["2:cpu", "1", "2", "64"],
        ["2x2:cpu", "2", "4", "64"],
    ]
    assert "the batch is kept" in follows
    assert "5:cpu cannot run: " in follows.replace(",memory=1kB", "")


def test_the_json_is_a_curve(run: Run, tmp_path: pathlib.Path) -> None:
    path, page = tmp_path / "curve.json", tmp_path / "curve.html"
    given = (TARGET, "width=1024", "layers=3", "batch=4096", "--seconds", 2)
    given = (*given, "--noise-scale", 20000, "--max-batch", 65536)
    words = (*given, "--clusters", "1..2x1:h100", "--compression", "int8")
    found = run("goodput", *words, "--json", "--out", path, "--html", page)
    table = CurveTable.load(path)
    assert msgspec.convert(found.json, CurveTable) == table
    one, two = table.points
    assert (one.codecs, two.codecs) == ((), ("int8",))
    assert two.batch > table.base_batch
    assert (table.base_batch, table.max_batch, table.noise_scale) == (
        4096,
        65536,
        20000,
    )
    assert table.options == {"width": "1024", "batch": "4096", "layers": "3"}
    assert page.read_text().count("<circle") == 2


def test_a_kernel_of_attention_has_a_curve(run: Run, tmp_path: pathlib.Path) -> None:
    """Where larger batches are looked at, too: they take longer, and no less a row."""
    target = tmp_path / "fused.py"
    target.write_text(FUSED)
    words = (f"{target}:workload", "--clusters", "1:h100", "2:h100", "--seconds", 2)
    found = run("goodput", *words, "--noise-scale", 10**6, "--max-batch", 512, "--json")
    table = msgspec.convert(found.json, CurveTable)

    assert [point.devices for point in table.points] == [1, 2]
    for point in table.points:
        assert point.batch > table.base_batch
        assert not point.reason


@pytest.mark.cluster
@pytest.mark.cluster
def test_several_processes_find_the_same(tmp_path: pathlib.Path) -> None:
    asked = GoodputCommand(
        target=TARGET,
        words=list(SMALL),
        noise_scale=300.0,
        max_batch=512,
        anew=True,
        limits=DEFAULTS,
    )
    clusters = [Cluster.parse("2:h100"), Cluster.parse("1:h100")]
    each = (dataclasses.replace(asked, processes=count) for count in (1, 2))
    both = [curving.curve_of(one, clusters) for one in each]
    assert both[0] == both[1]
    assert [p.devices for p in both[0].points] == [2, 1]


def test_what_makes_no_sense_is_refused(run: Run) -> None:
    one = ("--clusters", "1:h100")
    assert_fails(run("goodput", *GIVEN), "--clusters 1:h100")
    assert_fails(run("goodput", *GIVEN, *one, "--noise-scale", 3), "--max-batch")
    twice = ("--clusters", "8:h100", "1x8:h100")
    assert_fails(run("goodput", *GIVEN, *twice), "same nodes and devices")
    small = ("--max-batch", 8, "--noise-scale", 3)
    assert_fails(run("goodput", *GIVEN, *one, *small), "largest batch, 8 rows")
    assert_fails(
        run("goodput", *GIVEN, "--clusters", "1:h100,memory=1kB"),
        "nothing runs on any of the clusters",
    )
