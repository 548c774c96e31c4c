"""The options that commands share.

Nothing here imports JAX: help and completion must answer at once.
"""

from typing import Annotated

import typer

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
Seconds = Annotated[
    float,
    typer.Option(min=0.1, help="Time limit of the solver for each mesh; inf: none."),
]
MaxAxes = Annotated[
    int | None, typer.Option(min=1, max=4, help="The most mesh axes to try.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of a device to use, such as 40GB."),
]
Compression = Annotated[
    str,
    typer.Option(
        metavar="{auto,none,CODEC}",
        help="How gradients are sent: none as they are; auto by the codecs that are "
        "fastest within the error budget; or all by one, such as int8.",
    ),
]
ErrorBudget = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="With auto: the largest relative error of the gradients."
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        metavar="{auto,N,N+M}",
        help="Into how many microbatches the batch is split; auto: as is fastest of "
        "what fits; 8+4: how many each replica of unequal devices runs.",
    ),
]
Coupled = Annotated[
    str,
    typer.Option(
        metavar="{refuse,microbatch}",
        help="Where the loss of a row depends on the others: refuse to split the "
        "batch, or take each microbatch for it.",
    ),
]
Devices = Annotated[
    int | None, typer.Option(min=1, help="Simulate this many CPU devices.")
]
PinOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATH=SPEC",
        help="Keep the layout of the inputs that match, such as "
        "'params/*/kernel=None,tensor'. Repeatable.",
    ),
]
SplitBatch = Annotated[
    bool,
    typer.Option(
        help="Whether it is an error if no mesh axis divides the rows of the batch; "
        "else the plan does without data parallelism."
    ),
]
AxisNames = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Names of the mesh axes, outermost first."),
]
Stages = Annotated[
    str | None,
    typer.Option(metavar="{N,auto}", help="Cut the step into so many pipeline stages."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Order of microbatches in stages: gpipe, 1f1b, interleaved, zero-bubble.",
    ),
]
Remat = Annotated[
    str | None,
    typer.Option(
        metavar="{auto,none,N,all}[:dots|:names=A,B]",
        help="How many layers compute their activations again in the backward pass; "
        "dots: their matrix products are kept; names: what checkpoint_name calls A or "
        "B is kept; auto: as is fastest of what fits; none: not even those of "
        "jax.checkpoint.",
    ),
]
Traceback = Annotated[
    bool,
    typer.Option("--traceback", help="On an error, print where it was raised."),
]

# Each command's help ends with its example.
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
    "demo": "autopar demo --devices 8 --steps 20",
    "run": "autopar run --processes 4 train.py --rate 0.1",
    "workers": "autopar workers runs/gpt --processes 3",
}
