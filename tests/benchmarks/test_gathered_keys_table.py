"""Tests the table of seconds for which attention waits for keys."""

from __future__ import annotations

import importlib

import checkout
import pytest


def test_gathers_are_faster_for_short_sequences_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(checkout.ROOT / "benchmarks"))
    waits = importlib.import_module("gathered_keys").waits
    short, long = (waits("8:h100", 0, tokens) for tokens in (16384, 131072))

    assert 0 < short[2] < short[1]
    assert long[1] == 0 < long[2] < long[0]
