"""Tests that the Python blocks of README and docs/ run and print what pages show.

The blocks of a page run in order, in one namespace and in an empty folder, as if a
reader pasted them. A block of ``output`` shows what the block before it prints. A
comment ``<!-- not run: reason -->`` before a block excludes the block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkout
import jax
import pytest

from autopar.compression.codecs import registry

# Pages whose blocks need names that the tests of these pages define.
ELSEWHERE = {"docs/compression.md": "tests/project/test_compression_page.py"}
PAGES = [
    page
    for page in (
        checkout.ROOT / "README.md",
        *sorted((checkout.ROOT / "docs").rglob("*.md")),
    )
    if "```python" in page.read_text()
]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n+)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
# Times, sizes and device names differ between machines, and proved gaps between runs.
FIGURE = re.compile(
    r"\b\d[\d.]* (?:s|ms|us|B|kB|MB|GB)\b|\(custom \w+\)|"
    r"(?<=proved )(?:optimal|within [\d.]+% of the optimum)"
    r"|\b\d[\d.]*(?: [kMGTP])? (?:x one device|rows/s|tokens/s|%)"
)
MOST_LEFT_OUT = 5


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python, what it prints, and the reason if it is not run."""

    line: int
    source: str
    output: str | None = None
    reason: str | None = None


def blocks(text: str) -> Iterator[Block]:
    found: list[Block] = []
    for match in FENCE.finditer(text):
        if match["language"] == "python":
            line = text[: match.start("text")].count("\n")
            found.append(Block(line, match["text"], reason=match["reason"]))
        elif match["language"] == "output":
            found[-1] = dataclasses.replace(found[-1], output=match["text"])
    yield from found


def masked(text: str) -> str:
    """The text without alignment, and without figures that depend on the machine."""
    return re.sub(r"[ \t]+", " ", FIGURE.sub("", text)).strip()


def run(text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the blocks of a page and compares what they print with the page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.reason is None:
            source = "\n" * block.line + block.source
            exec(compile(source, name, "exec", dont_inherit=True), names)
            printed = capsys.readouterr().out
            if block.output is not None:
                assert masked(printed) == masked(block.output)


@pytest.fixture
def beginning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, two cores, and a JAX whose number of devices stays as it is.

    The result of `Cluster.local` depends on the number of cores and on a saved profile.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOPAR_PROFILE", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    update = jax.config.update

    def tolerant(name: str, value: Any) -> None:
        if name != "jax_num_cpu_devices" or value != len(jax.devices()):
            update(name, value)

    monkeypatch.setattr(jax.config, "update", tolerant)
    # A codec or policy that one page registers is removed before the next page.
    registry.codec_names()
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
@pytest.mark.usefixtures("beginning")
def test_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (test := ELSEWHERE.get(checkout.relative(page))) is not None:
        assert page.name in (checkout.ROOT / test).read_text()
        return
    run(page.read_text(), checkout.relative(page), capsys)


def test_few_blocks_are_left_out() -> None:
    left_out = [b.reason for page in PAGES for b in blocks(page.read_text())]

    assert sum(reason is not None for reason in left_out) <= MOST_LEFT_OUT


@pytest.mark.parametrize(
    ("printed", "said", "right"),
    [
        ("step 3.46 ms", "step  812 us", True),
        ("solver proved optimal", "solver  proved within 0.01% of the optimum", True),
        (
            "solver proved optimal",
            "solver  best found, proved within 0.7% of the optimum",
            False,
        ),
        ("8:cpu (custom a82f)", "8:cpu (custom 0123)", True),
        ("loss 2.600", "loss 2.601", False),
        ("mesh data=8", "mesh data=4", False),
    ],
)
def test_outputs_are_compared(
    printed: str, said: str, right: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"```python\nx = {printed!r}\n```\n\n```python\nprint(x)\n```\n\n"
    page = f"{text}It prints:\n\n```output\n{said}\n```\n"
    with contextlib.nullcontext() if right else pytest.raises(AssertionError):
        run(page, "page.md", capsys)


def test_a_reason_leaves_a_block_out() -> None:
    text = "<!-- not run: no GPU -->\n```python\n1 / 0\n```\n\n```python\n2\n```\n"

    assert [block.reason for block in blocks(text)] == ["no GPU", None]
