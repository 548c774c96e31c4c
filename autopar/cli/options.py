"""Commands as records: a field of a record is an option or an argument of its command.

The signature, the help and the checks of a command are derived from its record. The
help texts are the record's docstring: the lines before ``Attributes:`` are those of the
command, and each attribute's text is that of its option.

This module does not import JAX, because help and completion must answer at once.
"""

import dataclasses
import enum
import importlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer

from autopar.planner.option_texts import OPTIONS

_T = TypeVar("_T")


class BackendName(enum.StrEnum):
    """The backends on which processes of a run run."""

    LOCAL = "local"
    RAY = "ray"


class ClusterName(enum.StrEnum):
    """The clusters on which jobs run."""

    LOCAL = "local"
    RAY = "ray"
    HOSTS = "hosts"


class RecoveryName(enum.StrEnum):
    """The ways in which processes recover when others were lost."""

    AUTO = "auto"
    INPLACE = "inplace"
    RESPAWN = "respawn"


@dataclasses.dataclass(frozen=True, slots=True)
class CommandField:
    """How a field of a record is given on the command line.

    Attributes:
      default: the default; `dataclasses.MISSING` if the field is required.
      make: `typer.Option` or `typer.Argument`.
      flags: the flags; by default those that follow from the field's name.
      settings: further arguments of ``make``.
      planning: the planning options that the field stands for.
    """

    default: Any = None
    make: Callable[..., Any] = typer.Option
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    planning: tuple[str, ...] = ()


def option(default: Any = dataclasses.MISSING, *flags: str, **settings: Any) -> Any:
    """An option; ``settings`` are those of `typer.Option`."""
    return CommandField(default, typer.Option, flags, settings)


def argument(default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    """An argument; ``settings`` are those of `typer.Argument`."""
    return CommandField(default, typer.Argument, (), settings)


def planning(*only: str, without: Sequence[str] = ()) -> Any:
    """The planning options of `OPTIONS`, read as a `PlanOptions`.

    The file of the command's target is imported first, because it may register codecs
    that an option names.

    Args:
      only: the names of the options; all options if no name is given.
      without: the names of options to leave out.
    """
    names = only or tuple(name for name, option in OPTIONS.items() if option.flag)
    kept = tuple(name for name in names if name not in without)
    return CommandField(planning=kept)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(made: type[_T]) -> type[_T]:
    """Makes a class a record of options, which commands or other records inherit."""
    for name in inspect.get_annotations(made):
        known = vars(made).get(name)
        if isinstance(known, CommandField):
            field: Any = dataclasses.field(
                default=known.default, metadata={"field": known}
            )
            setattr(made, name, field)
    return dataclasses.dataclass(frozen=True, kw_only=True)(made)


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
      words: the words that call it, such as ``checkpoint show``.
      work: the module of `autopar.cli` and the function that do its work.
      example: the example with which its help ends.
      record: the class of its options.
      script: whether it runs a script, to which all words after the script's name
        belong.
      prints: whether it prints to stdout while it runs.
      environment: variables that libraries read when the work imports them.
    """

    words: str
    work: str
    example: str
    record: type[Any]
    script: bool = False
    prints: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The last of the words."""
        return self.words.split()[-1]

    def run(self, given: dict[str, Any]) -> Any:
        """Does the work of the command for values of its options."""
        for field in dataclasses.fields(self.record):
            if names := _field_of(field).planning:
                # This module imports JAX, which `--help` must not import.
                from autopar.cli import common

                words = {name: given.pop(name) for name in names}
                source = given.get("source", given.get("target"))
                read = common.read_planning(words, source, given.get("devices"))
                given[field.name] = read
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        module, function = self.work.split(".")
        # The modules of the work import NumPy or JAX.
        work = importlib.import_module(f"autopar.cli.{module}")
        return getattr(work, function)(self.record(**given))

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yields the parameters of a function that typer reads.

        The fields of the record itself come before those that it inherits.
        """
        owners = self.record.__mro__
        texts = {k: v for c in reversed(owners) for k, v in help_texts(c)[1].items()}
        kinds = get_type_hints(self.record)
        fields = {field.name: field for field in dataclasses.fields(self.record)}
        planned: tuple[str, ...] = ()
        order = (n for owner in owners for n in inspect.get_annotations(owner))
        for name in dict.fromkeys(n for n in order if n in fields):
            known = _field_of(fields[name])
            planned += known.planning
            if known.planning:
                continue
            flags, default = known.flags, fields[name].default
            if kinds[name] is bool and default is False and not flags:
                flags = (f"--{name.replace('_', '-')}",)  # without its negation
            told = known.make(*flags, help=texts.get(name, ""), **known.settings)
            yield _parameter(name, kinds[name], default, told)
        for name in planned:
            yield _planning_parameter(name)


# All commands, in the order in which the help lists them.
COMMANDS: list[Command] = []


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(
    words: str, work: str, example: str, **settings: Any
) -> Callable[[type[_T]], type[_T]]:
    """Makes a class the record of a command; for the arguments see `Command`."""

    def register(made: type[_T]) -> type[_T]:
        found = record(made)
        COMMANDS.append(Command(words, work, f"autopar {example}", found, **settings))
        return found

    return register


def help_texts(made: type[Any]) -> tuple[str, dict[str, str]]:
    """The text of a record's docstring, and the texts of its attributes."""
    doc = inspect.cleandoc(made.__doc__ or "")  # there is none under ``python -OO``
    text, _, listed = doc.partition("\n\nAttributes:\n")
    entries = re.split(r"\n(?=  \w)", listed) if listed else []
    pairs = (entry.strip().partition(": ") for entry in entries)
    return text, {name: " ".join(words.split()) for name, _, words in pairs}


def _field_of(field: dataclasses.Field[Any]) -> CommandField:
    return field.metadata.get("field", CommandField())


def _parameter(name: str, kind: Any, default: Any, told: Any) -> inspect.Parameter:
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    annotation = Annotated[kind, told]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _planning_parameter(name: str) -> inspect.Parameter:
    """A planning option, with its help text."""
    told, default = OPTIONS[name], OPTIONS[name].default
    text = told.text.replace("``", "").replace("`", "")
    text = f"{text[0].upper()}{text[1:]}."
    if isinstance(default, bool):
        return _parameter(name, bool, default or None, typer.Option(help=text))
    if name in ("pins", "compiler_options"):
        text, kind = f"{text} Repeatable.", list[str] | None
    else:
        text = text if default is None else f"{text} Default: {default}."
        kind = str | None
    shown = typer.Option(told.flag, metavar=told.metavar, help=text)
    return _parameter(name, kind, None, shown)


@record
class JsonOptions:
    """The option of commands whose result may be JSON.

    Attributes:
      as_json: Print one JSON object.
    """

    as_json: bool = option(False, "--json")


@record
class DevicesOptions:
    """The number of simulated devices of a command.

    Attributes:
      devices: Simulate this many CPU devices.
    """

    devices: int | None = option(None, min=1)


@record
class SecretOptions:
    """The secret that hosts of a run or a scheduler share.

    Attributes:
      secret: A file made by `autopar secret`; by default the text in AUTOPAR_SECRET.
    """

    secret: pathlib.Path | None = option(None, metavar="FILE")


TRACEBACK = _parameter(
    "traceback",
    bool,
    False,
    typer.Option("--traceback", help="On an error, print where it was raised."),
)
