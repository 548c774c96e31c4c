"""The commands put together, and what becomes of errors.

Results go to stdout, progress and errors to stderr. What the user can mend is one
line on stderr and exit code 2; anything else is a bug and shows its traceback.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from autopar.cli import audit, compare, demo, explain, plan, profile
from autopar.errors import AutoparError, ClusterError, TraceError
from autopar.version import __version__

# click's UsageError, which some versions of typer carry inside and do not export.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])

app = typer.Typer(
    name="autopar",
    help="Finds the execution plan that trains a JAX/Flax step fastest, and runs it.",
    add_completion=False,
    rich_markup_mode=None,  # so that help is plain text in a pipe too
    pretty_exceptions_enable=False,
)
app.command("plan")(plan.plan)
app.command("explain")(explain.explain)
app.command("audit")(audit.audit)
app.command("compare")(compare.compare)
app.command("profile")(profile.profile)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {__version__}")
        raise typer.Exit


@app.callback()
def options(
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


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script.

    Args:
      arguments: the command line after the program's name; that of the process by
        default.
    """
    command = typer.main.get_command(app)
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = command.main(words, prog_name="autopar", standalone_mode=False)
    except _UsageError as error:
        _fail(getattr(error, "format_message", error.__str__)())
    except (AutoparError, ClusterError, TraceError, OSError) as error:
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped.", 130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    typer.echo(f"autopar: {' '.join(message.split())}", err=True)
    sys.exit(code)
