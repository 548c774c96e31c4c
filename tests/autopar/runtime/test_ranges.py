"""Tests blocks of arrays that are moved, and the memory that is freed."""

from __future__ import annotations

import mmap

import pytest

from autopar.runtime import state_mover


@pytest.mark.parametrize(("held", "returned"), [(99, 0), (100, 0), (101, 1), (0, 1)])
def test_memory_is_given_back_where_much_is_held(
    held: int, returned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody tells how much is held, it always is."""
    trims: list[int] = []

    class Library:
        malloc_trim = trims.append

    monkeypatch.setattr(state_mover, "resident_bytes", lambda: held)
    monkeypatch.setattr(state_mover.ctypes, "CDLL", lambda _: Library)
    state_mover.return_memory(but=100)
    assert len(trims) == returned


def test_resident_bytes_grow_with_what_is_written() -> None:
    size = 2**26
    before = state_mover.resident_bytes()
    with mmap.mmap(-1, size) as fresh:  # no memory that was freed
        fresh.write(b"1" * size)
        assert state_mover.resident_bytes() >= before + size // 2
