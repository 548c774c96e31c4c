"""The analysis of a step whose rows are padded, so that the devices divide them.

A mesh axis splits rows only if it divides their number. With padding, five devices
split 32 rows as 35: four of them work on seven rows each and the last on four rows and
padding. The results stay the same (`autopar_passes.microbatches.padding`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from fractions import Fraction

from autopar.errors import PlanError
from autopar.plans.records import Rematerialisation
from autopar.progress import say
from autopar.steps.analysis import Analysis, analyse_again
from autopar.steps.batch import batch_dims, batch_rows, fails_with
from autopar_passes.layer_loops.split import in_pieces
from autopar_passes.microbatches.facts import MicrobatchError
from autopar_passes.microbatches.padding import pad_rows
from autopar_passes.program.calls import StepCall
from autopar_passes.program.trace import TracedStep, trace_call
from autopar_passes.remat.copies import (
    KERNELS,
    RematError,
    trace_without_checkpoints,
)
from autopar_passes.remat.kernels import trace_keeping_kernels


def with_row_multiple(analysis: Analysis, multiple: int) -> Analysis:
    """Returns a step whose programs pad the rows of each microbatch to a multiple.

    The result has the program of the step itself. Programs that are derived from it,
    such as those of `autopar.steps.microbatches.in_microbatches`, are padded.

    Args:
      analysis: the analysis of the step.
      multiple: the number that has to divide the rows; 1: rows are not padded.
    """
    whole = analysis.whole or analysis
    if multiple == whole.row_multiple:
        return whole
    return whole.remember(
        ("row multiple", multiple),
        lambda: dataclasses.replace(whole, row_multiple=multiple),
    )


def padded_rows(rows: int, multiple: int, count: int = 1) -> int:
    """The number of rows of a batch after padding.

    Args:
      rows: the number of rows of the batch.
      multiple: the number that has to divide the rows of each microbatch.
      count: the number of microbatches, which divides ``rows``.

    >>> padded_rows(32, 5), padded_rows(32, 5, 2), padded_rows(32, 8)
    (35, 40, 32)
    """
    return -(-rows // (multiple * count)) * multiple * count


def padded_whole(analysis: Analysis, count: int = 1) -> Analysis:
    """Returns the analysis of the whole step with padded rows.

    Args:
      analysis: the analysis of the step, as the user wrote it.
      count: the number of microbatches into which the padded batch can be split.

    Returns:
      ``analysis`` itself if its rows are not padded.

    Raises:
      PlanError: padding would change the results of the step, with the reason.
    """
    rows = batch_rows(analysis.graph)
    padded = padded_rows(rows, analysis.row_multiple, count)
    if padded == rows:
        return analysis

    def make() -> Analysis:
        start = time.perf_counter()
        say(f"padding {rows} rows to {padded}")
        try:
            traced = padded_step(analysis, rows, padded)
        except MicrobatchError as error:
            raise PlanError(
                f"{analysis.pytrees.name}: {rows} rows cannot be padded to {padded} "
                f"with the meaning of the step kept: {error}"
            ) from error
        return analyse_again(analysis, traced, start, whole=analysis)

    return analysis.remember(("padded", padded), make)


def padded_step(
    analysis: Analysis, rows: int | Fraction, padded: int | Fraction
) -> TracedStep:
    """Traces a step on some rows, and pads these rows.

    Args:
      analysis: the analysis of the step on the whole batch.
      rows: the number of rows.
      padded: the number of rows with padding; ``rows`` for no padding.

    Raises:
      MicrobatchError: the step cannot be traced on so many rows, or padding would
        change its results.
    """
    whole = rows == batch_rows(analysis.graph)
    step = analysis.pytrees if whole else trace_rows(analysis, rows)
    if padded == rows:
        return step
    wide = trace_rows(analysis, padded)
    return pad_rows(step, wide, analysis.graph, int(rows), int(padded))


def _trace_of(remat: Rematerialisation) -> Callable[..., TracedStep]:
    """Returns the function that traces a step with a plan's rematerialisation."""
    if not remat.checkpoints:
        return trace_without_checkpoints
    return trace_keeping_kernels if remat.level == KERNELS else trace_call


def trace_rows(analysis: Analysis, count: int | Fraction) -> TracedStep:
    """Traces the step on another number of rows.

    Args:
      analysis: the analysis of the step on the whole batch.
      count: the number of rows.

    Raises:
      MicrobatchError: the number is not whole, the step was not traced from a
        function, or the function fails on so many rows.
    """
    origin, dims = analysis.origin, batch_dims(analysis.graph, 1)
    if origin is None:
        raise MicrobatchError("it was not traced from a step.")
    times = Fraction(count) / max(1, batch_rows(analysis.graph))
    arrays = list(origin.call.arrays)
    for k, dim in dims.items():
        shape = list(arrays[k].shape)
        rows = shape[dim] * times
        if rows.denominator > 1:
            raise MicrobatchError(
                f"'{analysis.graph.inputs[k].path}' has {shape[dim]} rows, which "
                f"{1 / times} does not divide."
            )
        shape[dim] = int(rows)
        arrays[k] = arrays[k].update(shape=tuple(shape))
    call: StepCall = dataclasses.replace(origin.call, arrays=arrays)
    try:
        trace = _trace_of(analysis.remat)
        return in_pieces(trace(origin.step, call), analysis.pieces)
    except Exception as error:
        # The code of the step ran on the whole batch. On other rows, it may raise any
        # exception.
        what = f"{'a microbatch' if times < 1 else 'a padded batch'} of {count} rows"
        if isinstance(error, RematError):
            raise MicrobatchError(f"on {what} {str(error).splitlines()[0]}") from error
        said = fails_with(what, error)
        if times < 1 and any(arrays[k].dtype.kind in "iu" for k in dims):
            said += (
                " Numbers of rows in the batch, such as a graph's edges, point into "
                "rows of other microbatches: with them, plan with microbatches=1."
            )
        raise MicrobatchError(said) from error
