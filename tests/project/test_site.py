"""Tests how the site's builder rewrites pages and docstrings; `make docs` builds it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import checkout
import pytest


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, checkout.ROOT / "scripts" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/cli.md#plan)", "[a](cli.md#plan)"),
        ("[a](CHANGELOG.md)", "[a](changes.md)"),
        ("[a](https://x.org/docs/y)", "[a](https://x.org/docs/y)"),
        ("[all](examples/): each", "all: each"),
        ("[text](LICENSE).", "text."),
        ("[a](#there)", "[a](#there)"),
    ],
)
def test_links_lead_to_pages(text: str, expected: str) -> None:
    hooks = script("docs_hooks")

    assert hooks.on_page_markdown(hooks.moved(text)) == expected


def test_examples_are_fenced() -> None:
    fenced = script("docs_examples").fenced
    text = "Adds.\n\n>>> x = (\n...     1\n... )\n>>> x\n1\n\nArgs:\n  a: one."
    expected = (
        "Adds.\n\n```pycon\n>>> x = (\n...     1\n... )\n>>> x\n1\n```\n\n"
        "Args:\n  a: one."
    )

    assert fenced(text) == expected
    assert fenced("a >>> b") == "a >>> b"
