"""Tests that links, commands and names in the README and the other pages exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import checkout
import pytest
from command_line import Run

import autopar
from autopar.cluster import Cluster

README = (checkout.ROOT / "README.md").read_text()
PAGES = [*checkout.ROOT.glob("*.md"), *(checkout.ROOT / "docs").rglob("*.md")]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands() -> set[str]:
    """The subcommands of autopar that the README shows."""
    shown = "\n".join([*blocks("sh"), *re.findall(r"`([^`\n]+)`", README)])
    return set(re.findall(r"^autopar ([a-z]+)", shown, re.M))


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())

    assert [x for x in targets if not (page.parent / x).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
def test_make_targets_exist(page: Path) -> None:
    makefile = (checkout.ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))

    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M)) <= targets


def test_python_examples_use_what_exists() -> None:
    nodes = [n for source in blocks("python") for n in ast.walk(ast.parse(source))]
    used = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "autopar"
    }

    assert used <= set(autopar.__all__)


@pytest.mark.parametrize("command", sorted(commands()))
def test_commands_exist(command: str, run: Run) -> None:
    assert run(command, "--help").code == 0


def test_clusters_and_targets_exist() -> None:
    for cluster in re.findall(r"--cluster (\S+)", README):
        assert Cluster.parse(cluster).num_devices > 0
    for file, function in re.findall(r"autopar \w+ (\S+\.py):(\w+)", README):
        source = (checkout.ROOT / file).read_text()
        assert re.search(rf"^(def )?{function}\b", source, re.M)


def test_options_of_targets_exist() -> None:
    shown = re.findall(r"autopar \w+ (\S+\.py):\w+((?:[^\n]|\\\n)*)", README)
    assert any(options for _, options in shown)
    for file, options in shown:
        source = (checkout.ROOT / file).read_text()
        for name in re.findall(r" (\w+)=", options):
            assert re.search(rf"^    {name}: \w+ = ", source, re.M), name


def test_the_readme_shows_commands() -> None:
    assert commands() >= {"plan", "explain", "audit", "compare", "profile"}


@pytest.mark.parametrize("page", PAGES, ids=checkout.relative)
def test_modules_that_pages_name_are_there(page: Path) -> None:
    """A path is relative to the root of the checkout, or to a package."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    roots = [checkout.ROOT, *checkout.SOURCES.values()]
    roots += [checkout.SOURCES["autopar_solver"] / "sharding"]

    assert [p for p in named if not any((r / p).is_file() for r in roots)] == []
