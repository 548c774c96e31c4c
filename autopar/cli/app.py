"""Builds the command line, and prints the results and errors of commands.

Only results go to stdout; progress and errors go to stderr. This module does not import
JAX, so that help and completion answer at once.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autopar.cli import failures, options
from autopar.cli.commands import clusters, plans, runs
from autopar.cli.failures import STOPPED, stoppable
from autopar.cli.options import Command
from autopar.cli.output import Result, Stdout
from autopar.terminal import fold_text, follow_width
from autopar.version import __version__

# The modules of commands, in the order of the help.
_MODULES = [module.__name__ for module in (plans, clusters, runs)]
# Groups of commands, such as ``autopar checkpoint show``.
_GROUPS = {
    "checkpoint": "Shows, verifies and converts checkpoints.",
    "jobs": "Lists, shows, submits, holds and cancels the jobs of `autopar schedule`; "
    "`autopar jobs DIR` lists them.",
    "launch": "Starts elastic runs on clusters that other programs manage.",
}
# Group of commands -> the command that runs if none is named.
_DEFAULTS = {"jobs": "list"}
_CODES = "; ".join(f"{code} {meaning}" for code, meaning in failures.EXIT_CODES)


def commands(stdout: Stdout) -> typer.Typer:
    """Returns the command line, which prints results to ``stdout``."""
    app = typer.Typer(
        name="autopar",
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=f"Exit codes: {_CODES}.",
        rich_markup_mode=None,  # help is plain text on terminals, too
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    groups = dict[str, typer.Typer]()
    order = sorted(options.COMMANDS, key=lambda c: _MODULES.index(c.record.__module__))
    for command in order:
        if " " not in command.words:
            _add(app, stdout, command)
    for name, text in _GROUPS.items():
        groups[name] = typer.Typer(
            help=text, rich_markup_mode=None, cls=_group(_DEFAULTS.get(name))
        )
        app.add_typer(groups[name], name=name)
    for command in order:
        if " " in command.words:
            _add(groups[command.words.split()[0]], stdout, command)
    return app


def _group(default: str | None) -> type[TyperGroup]:
    """Returns a class of command groups with a default command, if any."""

    class DefaultGroup(TyperGroup):
        """Inserts the default command if the first word is not a command."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            known = *self.commands, "-h", "--help"
            if default is not None and (not args or args[0] not in known):
                args = [default, *args]
            return super().parse_args(ctx, args)

    return DefaultGroup


def _add(app: typer.Typer, stdout: Stdout, command: Command) -> None:
    """Adds a command; its help ends with its example."""
    settings = {"allow_interspersed_args": False} if command.script else None
    epilog = f"Example: {command.example}"
    made = _reporting(stdout, command)
    app.command(command.name, epilog=epilog, context_settings=settings)(made)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Finds the execution plan that trains a JAX/Flax step fastest, and runs it."""
    del version


def _reporting(stdout: Stdout, command: Command) -> Callable[..., int]:
    """Makes a function that runs a command, with the option ``--traceback``."""

    def reporting(*, traceback: bool = False, **given: Any) -> int:
        del traceback  # `main` reads it, also if parsing fails
        shown = (
            contextlib.nullcontext() if command.prints else stdout.redirect_to_stderr()
        )
        try:
            with follow_width():
                with shown:
                    result = _last(stdout, command.run(given))
                text = "" if result is None else fold_text(result.text)
        except KeyboardInterrupt:
            raise typer.Abort from None
        except SystemExit as error:
            raise _exit_error(error) from error
        if result is None:
            return 0
        typer.echo(text, err=result.failed)
        return result.code

    parameters = [*command.parameters(), options.TRACEBACK]
    reporting.__dict__["__signature__"] = inspect.Signature(parameters)
    reporting.__annotations__ = {p.name: p.annotation for p in parameters}
    reporting.__doc__, _ = options.help_texts(command.record)
    return reporting


def _last(stdout: Stdout, returned: Result | Iterator[Result] | None) -> Result | None:
    """Returns the last result of a command.

    Each partial result is stored before, and is printed if the user interrupts.
    """
    if not isinstance(returned, Iterator):
        return returned
    for result in returned:
        stdout.unfinished = result.text
    last, stdout.unfinished = stdout.unfinished, ""
    return Result(last)


def _exit_error(error: SystemExit) -> Exception:
    # This module imports NumPy, which `--help` must not import.
    from autopar.errors import TargetError

    return TargetError(
        f"the target's code called sys.exit({error.code!r}) while its step was traced; "
        "a step must return."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line, as the console script ``autopar``.

    Args:
      arguments: the command line after the name of the program; by default the command
        line of the process.
    """
    stdout = Stdout()
    own = arguments is None
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in words

    def report_interrupt() -> None:
        typer.echo(failures.INTERRUPTED.line, err=True)
        if stdout.unfinished:
            stdout.write_at_once(stdout.unfinished + "\n")
        elif as_json:
            stdout.write_at_once(json.dumps(failures.INTERRUPTED.data) + "\n")

    if own and isinstance(sys.stdout, io.TextIOWrapper):
        # Names in files may have characters that this terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    with (
        stoppable(report_interrupt)
        if own
        else contextlib.nullcontext(_not_raised) as hear
    ):
        try:
            code = _run(words, stdout, as_json, hear)
        except KeyboardInterrupt:  # a second Ctrl-C, before `hear` was called
            hear()
            code = _tell(failures.INTERRUPTED, stdout, as_json)
    if own:
        stdout.end()
    sys.exit(code)


def _not_raised() -> None:
    """Does nothing.

    `failures.stoppable` starts a thread that raises interrupts, and yields a function
    that stops this thread. If a program calls `main`, there is no such thread, and this
    function is used in place of the yielded one.
    """


def _called_command(command: Any, words: Sequence[str]) -> tuple[str, set[str]]:
    """Returns the words of the called command, and the names of its options."""
    name = "autopar"
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command, name = inner, f"{name} {word}"
    options = {flag for option in command.params for flag in option.opts}
    return name, options


def _run(
    words: list[str], stdout: Stdout, as_json: bool, hear: Callable[[], None]
) -> int:
    command = typer.main.get_command(commands(stdout))
    try:
        code = command.main(words, prog_name="autopar", standalone_mode=False)
        if code != STOPPED:
            return code or 0
        failure = failures.INTERRUPTED
    except Exception as error:  # printed in one line; a bug also with its traceback
        failure = failures.failure_of(error, *_called_command(command, words))
        if failure.code == STOPPED:
            hear()
        if failure.code == failures.BUG or (
            "--traceback" in words and failure.code != STOPPED
        ):
            failures.print_traceback(error)
    else:
        hear()
    return _tell(failure, stdout, as_json)


def _tell(failure: failures.Failure, stdout: Stdout, as_json: bool) -> int:
    """Prints a failure, and returns the exit code."""
    typer.echo(failure.line, err=True)
    if failure.code == STOPPED and stdout.unfinished:
        typer.echo(stdout.unfinished)
        stdout.unfinished = ""
    elif as_json:
        typer.echo(json.dumps(failure.data, indent=1))
    return failure.code
