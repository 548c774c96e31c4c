"""Tests bytes that are estimated from one shape against exact bytes of every shape."""

from __future__ import annotations

import pytest

from autopar.compression.codecs.codec import example_messages
from autopar.compression.codecs.registry import offered_codecs, parse_codec


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("text", offered_codecs())
def test_the_bytes_are_nearly_those_of_the_codec(text: str, scatter: bool) -> None:
    codec = parse_codec(text)
    for workers, shape in ((2, (64, 512)), (4, (1024, 256)), (8, (512, 8, 64))):
        if codec.check(shape, scatter=scatter):
            continue
        exact = codec.messages(shape, workers, scatter=scatter)
        found, extent = example_messages(codec, workers, scatter=scatter)
        assert [m.kind for m in found] == [m.kind for m in exact]
        sent = sum(m.sent for m in exact)
        estimate = sum(m.sent for m in found) * codec.extent(shape) / extent
        assert estimate == pytest.approx(sent, rel=0.05)
