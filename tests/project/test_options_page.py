"""Tests that all texts about an option equal the text of the option in `OPTIONS`."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import typer
from checkout import ROOT

import autopar
from autopar.cli.app import commands
from autopar.cli.output import Stdout
from autopar.planner.option_texts import (
    ARGUMENTS,
    OPTIONS,
    PLANNING,
    RUNNING,
    reference_lines,
)
from autopar.planner.options import PlanOptions

PAGE = ROOT / "docs" / "options.md"
FUNCTIONS = [
    (autopar.plan, (PLANNING, ARGUMENTS)),
    (autopar.parallelize, (PLANNING, RUNNING, ARGUMENTS)),
]


@pytest.mark.parametrize(("function", "groups"), FUNCTIONS)
def test_functions_spell_every_option_out(
    function: Callable[..., Any], groups: tuple[str, ...]
) -> None:
    """The parameters have the names, defaults, types and texts of `OPTIONS`."""
    signature = inspect.signature(function).parameters
    text = " ".join((function.__doc__ or "").split())
    for name, option in OPTIONS.items():
        if option.group not in groups:
            assert name not in signature
            continue
        kind = option.takes or PlanOptions.__annotations__[name]
        assert signature[name].annotation == kind
        assert signature[name].default == option.default
        assert f" {name}: {option.text}. " in f"{text} ", name
        assert "docs/" not in option.text, "users of the wheel do not have the files"


def test_overloads_take_the_same_options() -> None:
    """Type checkers read the overloads of the decorator."""
    text = (ROOT / "autopar" / "runtime" / "parallelize.py").read_text("utf-8")
    overloads = re.findall(r"@overload\ndef parallelize\((.*?)\) ->", text, re.S)
    signature = inspect.signature(autopar.parallelize).parameters
    for overload in overloads:
        found = dict(re.findall(r"^    (\w+): (.*?) = \.\.\.,$", overload, re.M))
        said = {n: p.annotation for n, p in signature.items() if n != "step"}
        assert found == said
    assert len(overloads) == 2


@pytest.mark.parametrize("group", [PLANNING, RUNNING, ARGUMENTS])
def test_the_page_has_every_option(group: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(reference_lines(group))
    head = f"<!-- options of {group} -->\n\n"
    old = re.search(rf"{re.escape(head)}((?:\|.*\n)*)", text)
    assert old is not None
    if os.environ.get("AUTOPAR_UPDATE_GOLDEN"):
        PAGE.write_text(text.replace(old[0], f"{head}{table}\n"), encoding="utf-8")
        return
    assert old[1] == f"{table}\n"


def test_help_says_what_the_record_says() -> None:
    made: Any = typer.main.get_command(commands(Stdout()))
    shown = {p.opts[0]: p for p in made.commands["plan"].params}
    for option in OPTIONS.values():
        if option.flag:
            plain = option.text.replace("``", "").replace("`", "")
            assert plain[1:] in shown[option.flag].help
    for name in ("compare", "sweep", "audit"):
        flags = {flag for p in made.commands[name].params for flag in p.opts}
        assert flags >= {option.flag for option in OPTIONS.values() if option.flag}


def test_the_record_holds_every_option() -> None:
    names = [field.name for field in dataclasses.fields(PlanOptions)]
    assert names == [*OPTIONS, "spares", "one_stage", "may_idle", "may_pad"]
