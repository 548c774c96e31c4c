"""Tests the time of codecs on a device with and without a profile."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.cluster import Cluster
from autopar.cluster.specs import DeviceSpec
from autopar.compression.codecs.registry import parse_codec
from autopar.cost.codecs import local_s

PLAIN = Cluster.parse("4:cpu").device


def measured(**seconds: float) -> DeviceSpec:
    names = {name.replace("_", ":"): s for name, s in seconds.items()}
    return dataclasses.replace(PLAIN, codec_s_per_element=tuple(names.items()))


def test_a_measured_codec_takes_what_was_measured() -> None:
    device = measured(int8=3e-9, bf16=1e-9)
    assert local_s(parse_codec("int8"), (1000, 1000), device) == pytest.approx(3e-3)
    assert local_s(parse_codec("bf16"), (2000, 1000), device) == pytest.approx(2e-3)


@pytest.mark.parametrize(("rank", "nearest", "seconds"), [(30, 32, 7e-9), (3, 2, 1e-9)])
def test_other_parameters_are_taken_in_proportion(
    rank: int, nearest: int, seconds: float
) -> None:
    """To the passes of the one that is nearest."""
    near, own = (parse_codec(f"powersgd:rank={r}") for r in (nearest, rank))
    pairs = (("powersgd:rank=2", 1e-9), ("powersgd:rank=32", 7e-9))
    device = dataclasses.replace(PLAIN, codec_s_per_element=pairs)
    passes = {c: local_s(c, (1, 1), PLAIN) for c in (near, own)}
    expected = seconds * passes[own] / passes[near]
    assert local_s(own, (1, 1), device) == pytest.approx(expected)


def test_a_codec_of_another_name_is_in_passes() -> None:
    codec = parse_codec("sign")
    assert local_s(codec, (1000, 1000), measured(int8=3e-9)) == local_s(
        codec, (1000, 1000), PLAIN
    )


def test_files_hold_the_seconds(tmp_path) -> None:
    device = measured(int8=3e-9, powersgd_rank=1e-9)
    cluster = dataclasses.replace(Cluster.parse("4:cpu"), device=device)
    path = tmp_path / "made.toml"
    path.write_text(cluster.to_toml())
    assert Cluster.from_toml(path) == cluster
