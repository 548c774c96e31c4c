"""The options that several commands share.

This module does not import JAX, because help and completion must answer at once.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from autopar.planner.option_texts import OPTIONS


class BackendName(enum.StrEnum):
    """The backends on which processes or jobs run."""

    LOCAL = "local"
    RAY = "ray"


class RecoveryName(enum.StrEnum):
    """The ways in which processes recover after they lost other processes."""

    AUTO = "auto"
    INPLACE = "inplace"
    RESPAWN = "respawn"


Target = Annotated[str, typer.Argument(help="file.py:function or module:function.")]
PlanOrTarget = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan.json, or a target.")
]
PlanWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET] [KEY=VALUE]...",
        help="Where the plan does not know its target; arguments to change.",
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Arguments of the target's function."
    ),
]
ClusterSpec = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="SPEC",
        help="Such as 8x8:h100 (hosts x devices), a TOML file, or local.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of a device to use, such as 40GB."),
]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Simulate this many CPU devices.")
]
# The planning options, a `PlanOptions`. The module of that class imports JAX, so the
# type here is `Any`.
Asked = Any
Traceback = Annotated[
    bool, typer.Option("--traceback", help="On an error, print where it was raised.")
]

# Command -> the example with which its help ends.
EXAMPLES = {
    "plan": "autopar plan train.py:workload --cluster 8x8:h100 --out plan.json",
    "explain": "autopar explain plan.json --tensor 'state/params/*/kernel'",
    "audit": "autopar audit plan.json --compile",
    "compare": "autopar compare train.py:workload --cluster 8:cpu --measure",
    "sweep": "autopar sweep train.py:workload --cluster 1..8x8:h100 batch=64..1024",
    "goodput": "autopar goodput train.py:workload --clusters 1:h100 8:h100 8x8:h100",
    "simulate": "autopar simulate workload-6.csv --cluster 16x4 --policy tiresias",
    "schedule": "autopar schedule jobs.toml --policy goodput --state runs --nodes 1x4",
    "jobs list": "autopar jobs runs",
    "jobs submit": "autopar jobs submit train.py --devices 2 -- --rate 0.1",
    "jobs cancel": "autopar jobs cancel small late --state runs",
    "jobs hold": "autopar jobs hold small --state runs",
    "jobs release": "autopar jobs release small --state runs",
    "jobs logs": "autopar jobs logs small --state runs --follow",
    "jobs show": "autopar jobs show small --state runs",
    "diff": "autopar diff plan.json other.json",
    "ledger": "autopar ledger ledger.jsonl",
    "profile": "autopar profile --devices 8",
    "doctor": "autopar doctor --json",
    "checkpoint show": "autopar checkpoint show checkpoints",
    "checkpoint verify": "autopar checkpoint verify checkpoints",
    "checkpoint convert": "autopar checkpoint convert checkpoints model.safetensors "
    "--to safetensors",
    "launch kubernetes": "autopar launch kubernetes --name gpt --image "
    "registry.example/gpt:1 --nodes 2-8 --out run.yaml train.py",
    "launch slurm": "autopar launch slurm --nodes 2-8 --time 4:00:00 --submit train.py",
    "demo": "autopar demo --devices 8 --steps 20",
    "run": "autopar run --processes 4 train.py --rate 0.1",
    "worker": "autopar worker --supervisor 10.0.0.1:7000 --secret run.secret",
    "secret": "autopar secret run.secret",
    "workers": "autopar workers --folder runs/gpt --processes 3",
}


def planning(
    *only: str, without: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the planning options of `OPTIONS` to a command.

    The command receives the options as ``asked``, an
    `autopar.planner.options.PlanOptions`. The file of its target is imported first,
    because it may register codecs that an option names.

    Args:
      only: the names of the options to add; all options if no name is given.
      without: the names of options to leave out.
    """
    names = only or tuple(name for name, option in OPTIONS.items() if option.flag)
    names = tuple(name for name in names if name not in without)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call_with_options(*args: Any, **kwargs: Any) -> Any:
            # This module imports JAX, which `--help` must not import.
            from autopar.cli import common

            source = kwargs.get("source", kwargs.get("target"))
            given = {name: kwargs.pop(name) for name in names}
            asked = common.read_planning(given, source, kwargs.get("devices"))
            return command(*args, **kwargs, asked=asked)

        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "asked"]
        given = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=True if OPTIONS[name].default is True else None,
                annotation=_option_type(name),
            )
            for name in names
        ]
        parameters = [*own, *given]
        call_with_options.__dict__["__signature__"] = signature.replace(
            parameters=parameters
        )
        types = {p.name: p.annotation for p in parameters}
        call_with_options.__annotations__ = types | {
            "return": signature.return_annotation
        }
        return call_with_options

    return decorate


def _option_type(name: str) -> Any:
    """Returns the type of a planning option, with its help text."""
    option, default = OPTIONS[name], OPTIONS[name].default
    text = option.text.replace("``", "").replace("`", "")
    text = f"{text[0].upper()}{text[1:]}."
    if isinstance(default, bool):
        return Annotated[bool, typer.Option(help=text)]
    if name == "pins":
        text = f"{text} Repeatable."
        kind: Any = list[str] | None
    else:
        text = text if default is None else f"{text} Default: {default}."
        kind = str | None
    return Annotated[kind, typer.Option(option.flag, metavar=option.metavar, help=text)]
