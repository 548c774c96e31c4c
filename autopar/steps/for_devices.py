"""The analysis of a step that is rewritten for a number of devices.

The update computes equal matrices in batches, of which each device takes a part
(`autopar_passes.program.update_batches`). Rows that are sorted only to group them, such
as tokens by their experts, are sorted in blocks, so that each device sorts its own rows
(`autopar_passes.graph.row_blocks`). Attention with many scores is computed in blocks of
scores, so that devices may share a sequence (`autopar_passes.graph.attention_blocks`).
A loss with large logits is computed in blocks of tokens, with the last product of the
model (`autopar_passes.microbatches.loss_blocks`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

from autopar.cluster import DeviceSpec
from autopar.errors import PlanError
from autopar.steps.analysis import Analysis, analyse_again, with_program
from autopar_passes.graph.attention_blocks import FoundAttention, attend_in_blocks
from autopar_passes.graph.operators import RAGGED_PRODUCTS, update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.graph.row_blocks import sort_in_blocks
from autopar_passes.graph.row_orders import NO_ORDERS, RowOrders, find_row_orders
from autopar_passes.graph.row_slots import EXPECTED_RUNS, RowSlots, give_slots
from autopar_passes.microbatches.facts import place_of
from autopar_passes.microbatches.loss_blocks import loss_in_blocks
from autopar_passes.microbatches.losses import FoundLosses, find_losses
from autopar_passes.program.equations import Program
from autopar_passes.program.update_batches import batch_updates
from autopar_passes.remat.kernels import keep_kernels
from autopar_passes.rules.factor_rule import FactorRule

# How a plan computes attention that a step writes out: all scores at once, in blocks of
# scores, or by cuDNN where it can and in blocks where not.
AS_WRITTEN, IN_BLOCKS, CUDNN = "", "blocks", "cudnn"
# Attention is also planned in blocks if the scores of one product, split over all
# devices, need more than this share of a device's memory.
_SCORES = 1 / 16
# The loss is also planned in blocks of tokens if the logits, split over all devices,
# need more than the first share of a device's memory. The logits of a block need at
# most the second share, if each device then has enough tokens in a block for fast
# products.
_LOGITS, _BLOCK = 1 / 16, 1 / 32
_BLOCK_TOKENS = 1024
# A softmax is computed in float32.
_SCORE_BYTES = 4


def for_devices(
    analysis: Analysis,
    devices: int,
    row_blocks: int | None = None,
    row_capacity: float = 0.0,
    *,
    attention_kernel: str = AS_WRITTEN,
    loss_blocks: int = 1,
) -> Analysis:
    """Returns the analysis of a step that suits a number of devices.

    Args:
      analysis: the analysis of the step after the split into microbatches and
        rematerialisation.
      devices: the number of devices of the plan, which has one stage.
      row_blocks: the number of blocks in which rows are sorted that are sorted only to
        group them; None: the largest number that divides the devices and the rows.
      row_capacity: the slots that a group has in a block of rows, divided by its mean
        number of rows; 0: rows have no slots.
      attention_kernel: how attention that the step writes out is computed:
        `AS_WRITTEN`, `IN_BLOCKS` or `CUDNN`.
      loss_blocks: the number of blocks of tokens in which the loss is computed; 1: for
        all tokens at once.

    Returns:
      ``analysis`` itself if there is nothing to rewrite.

    Raises:
      PlanError: the rows of this step cannot have slots, it writes out no attention
        that can be computed in blocks, or its loss cannot be computed in so many.
    """
    alone = analysis.alone or analysis
    if devices == 1 or alone.traced is None:
        return alone
    how = devices, row_blocks, row_capacity, attention_kernel, loss_blocks
    make = functools.partial(_rewritten, alone, *how)
    return alone.remember(("for devices", *how), make)


def alternatives(
    analysis: Analysis,
    devices: int,
    device: DeviceSpec,
    *,
    names_codecs: bool = False,
) -> list[Analysis]:
    """Returns the rewrites of a step that a plan may choose from.

    Rows that are sorted in blocks may also be sorted together, or have slots. A step
    whose rows cannot have slots says why among its assumptions. Rewrites with slots
    come first, because they are most often the fastest: the search of the others then
    ends as soon as their lower bounds are above its step. Attention with many scores
    may be computed in blocks of scores, and a loss with large logits in blocks of
    tokens. If rows are sorted, too, these are combined with the first of the other
    rewrites only.

    Args:
      analysis: the result of `for_devices`.
      devices: the number of devices of the plan, which has one stage.
      device: the kind of the devices.
      names_codecs: whether every gradient that can be sent by a named codec has to be.
        The gradients of products of rows with slots are added up in a loop, and cannot
        be, so rows have no slots then.
    """
    made = _without_loss_blocks(analysis, devices, device, names_codecs)
    blocks, reason = _blocks_of_loss(analysis, devices, device)
    if reason:
        return [_with_note(x, reason) for x in made]
    if blocks == 1:
        return made
    chosen = made if analysis.row_blocks == 1 else made[:1]
    return [*made, *(_with_loss_blocks(x, devices, blocks) for x in chosen)]


def _with_loss_blocks(analysis: Analysis, devices: int, blocks: int) -> Analysis:
    """A rewritten step whose loss is computed in blocks of tokens, too."""
    notes = analysis.graph.assumed_trips
    made = for_devices(
        analysis,
        devices,
        analysis.row_blocks,
        analysis.row_capacity,
        attention_kernel=analysis.attention_kernel,
        loss_blocks=blocks,
    )
    missing = [note for note in notes if note not in made.graph.assumed_trips]
    return functools.reduce(_with_note, missing, made)


def _without_loss_blocks(
    analysis: Analysis, devices: int, device: DeviceSpec, names_codecs: bool
) -> list[Analysis]:
    """The rewrites of a step whose loss is computed for all tokens at once."""
    if analysis.row_blocks == 1:
        return _with_attention([analysis], devices, device)
    made = _with_sorted_rows(analysis, devices, names_codecs)
    found = _with_attention(made, devices, device)
    return [*found[len(made) :], *found[: len(made)]]


def _with_sorted_rows(
    analysis: Analysis, devices: int, names_codecs: bool
) -> list[Analysis]:
    """A step whose rows are sorted in blocks, together, or with slots."""
    base = analysis.alone or analysis
    together = for_devices(base, devices, row_blocks=1)
    if names_codecs:
        note = (
            "rows of groups stay on their device, so that the codec that was asked for "
            "can send the gradients of their products"
        )
        return [_with_note(analysis, note), together]

    def slots() -> tuple[Analysis | None, str]:
        start = time.perf_counter()
        program, found = _slots(base, analysis.row_blocks)
        if not found.slots:
            return None, found.refused
        return _with_slots(
            base, program, found, devices, analysis.row_blocks, start
        ), ""

    made, reason = base.remember(("slots", devices), slots)
    if made is not None:
        return [made, analysis, together]
    note = f"rows of groups stay on their device, because {reason}"
    return [_with_note(analysis, note), together]


def _with_attention(
    made: list[Analysis], devices: int, device: DeviceSpec
) -> list[Analysis]:
    """Rewrites of a step, and the first of them with attention in blocks of scores.

    The attention is in blocks only if it has many scores. A step of which some
    attention cannot be computed in blocks says why.
    """
    first = made[0]
    if not _has_many_scores(first, devices, device):
        return made
    blocks = first.row_blocks if first.row_blocks > 1 else None
    reason = why_scores_are_kept(first, devices, device)
    try:
        both = for_devices(
            first.alone or first,
            devices,
            blocks,
            first.row_capacity,
            attention_kernel=_kernel_for(device),
        )
    except PlanError as error:
        reason = reason or f"attention that is written out keeps all scores: {error}"
    else:
        made = [*made, both]
    return [_with_note(x, reason) for x in made] if reason else made


def why_scores_are_kept(analysis: Analysis, devices: int, device: DeviceSpec) -> str:
    """Why no plan computes attention with many scores in blocks of scores.

    Args:
      analysis: the result of `for_devices`.
      devices: the number of devices of the plan, which has one stage.
      device: the kind of the devices.

    Returns:
      A sentence; '' if the step has few scores, or may compute all of them in blocks.
    """
    if not _has_many_scores(analysis, devices, device):
        return ""
    _, found = _in_blocks(analysis.alone or analysis, _kernel_for(device))
    if not found.refused:
        return ""
    reasons = "; ".join(found.refused)
    return f"attention that is written out keeps all scores, because {reasons}"


def _kernel_for(device: DeviceSpec) -> str:
    return CUDNN if device.kind == "gpu" else IN_BLOCKS


def _has_many_scores(analysis: Analysis, devices: int, device: DeviceSpec) -> bool:
    """Whether the scores of written attention need a large part of the memory."""
    base = analysis.alone or analysis
    if devices == 1 or base.traced is None:
        return False
    operators, values = base.graph.operators, base.graph.values
    products = [k for found in base.attention for k in found.products]
    scores = [values[v].size for k in products for v in operators[k].outputs]
    nbytes = _SCORE_BYTES * max(scores, default=0)
    return nbytes > _SCORES * devices * device.memory_bytes


def _in_blocks(analysis: Analysis, kernel: str) -> tuple[Program, FoundAttention]:
    """The program with its attention in blocks, and what was found."""

    def make() -> tuple[Program, FoundAttention]:
        rules = _rules(analysis)
        program, found = attend_in_blocks(
            analysis.program, rules, cudnn=kernel == CUDNN
        )
        return keep_kernels(program), found

    return analysis.remember(("attention", kernel), make)


def _blocks_of_loss(
    analysis: Analysis, devices: int, device: DeviceSpec
) -> tuple[int, str]:
    """The number of blocks of tokens in which a plan may compute the loss.

    Returns:
      The number, which is 1 for a step with small logits; and the reason why it is 1
      for a step with large ones.
    """
    base = analysis.alone or analysis
    least = _LOGITS * devices * device.memory_bytes
    if devices == 1 or base.traced is None or _largest_product_bytes(base) <= least:
        return 1, ""
    found = _losses(base, least / _SCORE_BYTES)
    kept = "the loss is computed for all tokens at once, because "
    if not found.tokens:
        return 1, kept + "; ".join(found.refused) if found.refused else ""
    nbytes = _SCORE_BYTES * found.elements
    if nbytes <= least:
        return 1, ""
    tokens = found.elements // found.words
    each = math.gcd(found.tokens, devices)
    numbers = [
        n
        for n in range(2, found.tokens // 2 + 1)
        if found.tokens % n == 0
        and found.tokens // n % each == 0
        and tokens >= n * devices * _BLOCK_TOKENS
    ]
    if not numbers:
        few = "a block would have too few tokens for each device"
        return 1, kept + "; ".join([*found.refused, few])
    most = _BLOCK * devices * device.memory_bytes
    return next((n for n in numbers if nbytes <= n * most), numbers[-1]), ""


def why_logits_are_kept(analysis: Analysis, devices: int, device: DeviceSpec) -> str:
    """Why no plan computes a loss with large logits in blocks of tokens.

    Args:
      analysis: the result of `for_devices`.
      devices: the number of devices of the plan, which has one stage.
      device: the kind of the devices.

    Returns:
      A sentence; '' if the logits are small, or the loss may be computed in blocks.
    """
    return _blocks_of_loss(analysis, devices, device)[1]


def _losses(analysis: Analysis, least: float = 0.0) -> FoundLosses:
    """The losses that can be computed in blocks, with logits of at least a size."""
    return analysis.remember(
        ("losses", least),
        lambda: find_losses(analysis.program, _rules(analysis), least),
    )


def _largest_product_bytes(analysis: Analysis) -> int:
    """The bytes of the largest result of a product, in float32."""
    values = analysis.graph.values
    sizes = (
        values[v].size
        for op in analysis.graph.operators
        if op.kind == "dot_general"
        for v in op.outputs
    )
    return _SCORE_BYTES * max(sizes, default=0)


def stages_for_devices(micro: Analysis, devices: int) -> Analysis:
    """Returns the analysis of one microbatch, with rows sorted in blocks for devices.

    Args:
      micro: the analysis of one microbatch (`autopar.steps.microbatches`).
      devices: the number of devices of a stage.
    """

    def make() -> Analysis:
        start = time.perf_counter()
        program, orders, _ = _sorted_in_blocks(micro, devices, None)
        if not (orders or orders.refused):
            return micro
        found = micro.split
        assert found is not None
        traced = dataclasses.replace(found.traced, program=program)
        split = dataclasses.replace(found, traced=traced)
        made = analyse_again(micro, traced, start, split=split, whole=micro.whole)
        return _with_reasons(made, micro, orders)

    return micro.remember(("for devices", devices), make)


def notes_of_stages(micro: Analysis) -> tuple[str, ...]:
    """What a plan of several stages does not do, for a step that groups rows."""
    if all(op.kind not in RAGGED_PRODUCTS for op in micro.graph.operators):
        return ()
    return (
        "rows of groups stay on their device, because only plans of one stage give "
        "them slots",
    )


def _rewritten(
    analysis: Analysis,
    devices: int,
    row_blocks: int | None,
    row_capacity: float,
    attention_kernel: str,
    loss_blocks: int,
) -> Analysis:
    start = time.perf_counter()
    changed: dict[str, Any] = {
        "alone": analysis,
        "attention_kernel": attention_kernel,
        "loss_blocks": loss_blocks,
    }
    # Each rewrite reads the program that the rewrites before it made.
    source = analysis
    if loss_blocks > 1:
        source = analysis.remember(
            ("loss in blocks", loss_blocks),
            lambda: _with_loss(analysis, loss_blocks, start),
        )
    if attention_kernel:
        if all(op.kind not in RAGGED_PRODUCTS for op in analysis.graph.operators):
            made = _with_kernel(source, devices, attention_kernel, start)
            return dataclasses.replace(made, **changed)
        before = source
        source = before.remember(
            ("attended", attention_kernel),
            lambda: with_program(
                before, _attended(before, attention_kernel), start, alone=analysis
            ),
        )
    if row_capacity:
        blocks = row_blocks or devices
        program, found = _slots(source, blocks, row_capacity)
        if not found.slots:
            raise PlanError(
                f"row_capacity={row_capacity:g} in {blocks} blocks: the rows of this "
                f"step cannot have slots, because {found.refused}."
            )
        made = _with_slots(source, program, found, devices, blocks, start)
    else:
        own = equations_of_update(source)
        program, orders, blocks = _sorted_in_blocks(source, devices, row_blocks)
        program, batches = batch_updates(program, own, devices)
        rewritten = attention_kernel or loss_blocks > 1
        if not (rewritten or batches or orders or orders.refused):
            return analysis
        made = source
        if program is not source.program:
            how: dict[str, Any] = {"batches": batches, "row_blocks": blocks}
            made = with_program(source, program, start, **how)
        made = _with_reasons(made, source, orders)
    return dataclasses.replace(made, **changed)


def _with_loss(analysis: Analysis, blocks: int, start: float) -> Analysis:
    """The analysis of a step whose loss is computed in blocks of tokens.

    Raises:
      PlanError: the loss of the step cannot be computed in so many blocks.
    """
    program = loss_in_blocks(analysis.program, _rules(analysis), blocks)
    if program is analysis.program:
        found = _losses(analysis)
        reasons = "".join(f"\n  {why}" for why in found.refused)
        tokens = f" of {found.tokens} tokens" if found.tokens else ""
        raise PlanError(
            f"loss_blocks={blocks}: the loss of {analysis.pytrees.name}{tokens} cannot "
            f"be computed in so many blocks.{reasons}"
        )
    return with_program(analysis, program, start, alone=analysis)


def _attended(analysis: Analysis, kernel: str) -> Program:
    """The program of a step whose attention is computed in blocks, or by cuDNN.

    Raises:
      PlanError: the step has no such attention.
    """
    program, found = _in_blocks(analysis, kernel)
    if program is analysis.program:
        raise PlanError(
            f"attention_kernel='{kernel}': {analysis.pytrees.name} writes out no "
            "attention that can be computed in blocks"
            f"{': '.join(('', *found.refused))}."
        )
    return program


def _with_kernel(
    analysis: Analysis, devices: int, kernel: str, start: float
) -> Analysis:
    """The analysis of a step whose attention is computed in blocks, or by cuDNN."""
    program = _attended(analysis, kernel)
    program, batches = batch_updates(program, equations_of_update(analysis), devices)
    return with_program(
        analysis,
        program,
        start,
        alone=analysis,
        batches=batches,
        attention_kernel=kernel,
    )


def _rules(analysis: Analysis) -> dict[int, FactorRule]:
    return {op.equation: op.rule for op in analysis.graph.operators}


def _orders(analysis: Analysis, blocks: int) -> RowOrders:
    """The orders of rows of a step, which several rewrites read."""
    return analysis.remember(
        ("row orders", blocks),
        lambda: find_row_orders(analysis.program, _rules(analysis), blocks),
    )


def _slots(
    analysis: Analysis, blocks: int, capacity: float | None = None
) -> tuple[Program, RowSlots]:
    """The program that gives rows slots, and what the rewrite found."""
    orders = _orders(analysis, blocks)
    return give_slots(analysis.program, _rules(analysis), orders, blocks, capacity)


def _with_slots(
    analysis: Analysis,
    program: Program,
    found: RowSlots,
    devices: int,
    blocks: int,
    start: float,
) -> Analysis:
    """The analysis of a step whose rows have slots."""
    program, batches = batch_updates(program, equations_of_update(analysis), devices)
    made = with_program(
        analysis,
        program,
        start,
        alone=analysis,
        batches=batches,
        row_blocks=blocks,
        row_capacity=found.capacity,
    )
    note = (
        f"rows beyond {found.capacity:g} times the mean of a group take further rounds "
        f"in {EXPECTED_RUNS:.0%} of all runs"
    )
    return _with_note(made, note)


def _with_note(analysis: Analysis, note: str) -> Analysis:
    """Adds a note to the assumptions of an analysis."""
    graph = analysis.graph
    notes = (*graph.assumed_trips, note)
    return dataclasses.replace(
        analysis, graph=dataclasses.replace(graph, assumed_trips=notes)
    )


def _sorted_in_blocks(
    analysis: Analysis, devices: int, row_blocks: int | None
) -> tuple[Program, RowOrders, int]:
    """The program that sorts rows in blocks, the orders, and the number of blocks."""
    every = [n for n in range(devices, 1, -1) if devices % n == 0]
    first = NO_ORDERS
    for blocks in every if row_blocks is None else [row_blocks]:
        if blocks == 1:
            break
        orders = _orders(analysis, blocks)
        if orders:
            return sort_in_blocks(analysis.program, orders, blocks), orders, blocks
        if not orders.refused:
            break
        first = first if first.refused else orders
    return analysis.program, first, 1


def _with_reasons(made: Analysis, of: Analysis, orders: RowOrders) -> Analysis:
    """Adds the reasons why rows stay together to what is planned replicated."""
    if not orders.refused:
        return made
    equations = of.program.by_index()
    reasons = {f"{place_of(equations[k])}: {why}" for k, why in orders.refused.items()}
    unsupported = tuple(sorted({*made.graph.unsupported, *reasons}))
    graph = dataclasses.replace(made.graph, unsupported=unsupported)
    return dataclasses.replace(made, graph=graph)


def equations_of_update(analysis: Analysis) -> frozenset[int]:
    """Returns the equations of the update, without the loop over microbatches."""
    operators = analysis.graph.operators
    others = {op.equation for op in operators if op.role is Role.BACKWARD}
    whole = analysis.program.by_index()
    return frozenset(
        index
        for index in update_equations(analysis.program, analysis.graph)
        if others.isdisjoint(e.index for e in whole[index].inner)
    )
