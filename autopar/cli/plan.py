"""``autopar plan``: finds the plan of a step on a cluster."""

import pathlib
from typing import Annotated

import typer

from autopar.cli import common
from autopar.cli.pins import AxisNames, PinOptions, parse_axis_names, parse_pins
from autopar.cli.target import load, parse_words
from autopar.plans import Plan
from autopar.reports.explain import bind_plan, group_collectives
from autopar.reports.gradients import codec_rows
from autopar.reports.html import render_html
from autopar.reports.table import planning_times, render
from autopar.steps.analysis import Analysis


def plan(
    target: Annotated[str, typer.Argument(help="file.py:function or module:function.")],
    words: common.Words = None,
    cluster: common.ClusterSpec = None,
    out: Annotated[
        pathlib.Path | None, typer.Option(help="Where to save the plan as JSON.")
    ] = None,
    as_json: common.Json = False,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Where to write a page about the plan.")
    ] = None,
    seconds: common.Seconds = None,
    max_axes: common.MaxAxes = None,
    memory: common.Memory = None,
    compression: common.Compression = "none",
    error_budget: common.ErrorBudget = None,
    layouts: Annotated[
        pathlib.Path | None,
        typer.Option(help="A plan whose layouts are kept; only codecs are chosen."),
    ] = None,
    pin: PinOptions = None,
    axis_names: AxisNames = None,
) -> None:
    """Finds the fastest plan of a train step on a cluster, and prints it.

    The target's function returns (train_step, state, batch); arrays may be
    jax.ShapeDtypeStruct, so nothing of the model's size is allocated.
    """
    for path in (out, html):
        common.check_folder(path)
    made_for = common.read_cluster(cluster, memory)
    kept = None if layouts is None else Plan.load(layouts)
    limits = common.plan_options(
        seconds=seconds,
        compression=compression,
        error_budget=error_budget,
        max_axes=max_axes,
        layouts=kept,
        pins=parse_pins(pin or []),
        axis_names=parse_axis_names(axis_names),
    )
    with common.progress() as say:
        workload = load(target, parse_words(words or []))
        analysis, found = common.plan_workload(workload, made_for, limits, say)
        if out is not None:
            found.save(out)
        if html is not None:
            say(f"writing {html}")
            html.write_text(_page(analysis, found, made_for), encoding="utf-8")
    if as_json:
        common.print_json(found.to_json())
        return
    typer.echo(f"{render(found)}\n\n{planning_times(found)}")


def _page(analysis: Analysis, found: Plan, cluster: common.Cluster) -> str:
    bound = bind_plan(analysis, found, cluster)
    rows = group_collectives(bound, bound.collectives)
    rows += codec_rows(found, bound.pricer)
    return render_html(found, sorted(rows, key=lambda row: -row.seconds))
