"""The analysis of a step that is rewritten for a number of devices.

The update computes equal matrices in batches, of which each device takes a part
(`autopar_passes.program.update_batches`). Rows that are sorted only to group them, such
as tokens by their experts, are sorted in blocks, so that each device sorts its own rows
(`autopar_passes.graph.row_blocks`).
"""

from __future__ import annotations

import dataclasses
import functools
import time

from autopar.steps.analysis import Analysis, analyse_again, with_program
from autopar_passes.graph.operators import update_equations
from autopar_passes.graph.roles import Role
from autopar_passes.graph.row_blocks import sort_in_blocks
from autopar_passes.graph.row_orders import NO_ORDERS, RowOrders
from autopar_passes.microbatches.facts import place_of
from autopar_passes.program.equations import Program
from autopar_passes.program.update_batches import batch_updates


def for_devices(
    analysis: Analysis, devices: int, row_blocks: int | None = None
) -> Analysis:
    """Returns the analysis of a step that suits a number of devices.

    Args:
      analysis: the analysis of the step after the split into microbatches and
        rematerialisation.
      devices: the number of devices of the plan, which has one stage.
      row_blocks: the number of blocks in which rows are sorted that are sorted only to
        group them; None: the largest number that divides the devices and the rows.

    Returns:
      ``analysis`` itself if there is nothing to rewrite.
    """
    alone = analysis.alone or analysis
    if devices == 1 or alone.traced is None:
        return alone
    make = functools.partial(_rewritten, alone, devices, row_blocks)
    return alone.remember(("for devices", devices, row_blocks), make)


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


def _rewritten(analysis: Analysis, devices: int, row_blocks: int | None) -> Analysis:
    start = time.perf_counter()
    own = equations_of_update(analysis)
    program, orders, blocks = _sorted_in_blocks(analysis, devices, row_blocks)
    program, batches = batch_updates(program, own, devices)
    if not (batches or orders or orders.refused):
        return analysis
    made = with_program(
        analysis, program, start, alone=analysis, batches=batches, row_blocks=blocks
    )
    return _with_reasons(made, analysis, orders)


def _sorted_in_blocks(
    analysis: Analysis, devices: int, row_blocks: int | None
) -> tuple[Program, RowOrders, int]:
    """The program that sorts rows in blocks, the orders, and the number of blocks."""
    rules = {op.equation: op.rule for op in analysis.graph.operators}
    every = [n for n in range(devices, 1, -1) if devices % n == 0]
    first = NO_ORDERS
    for blocks in every if row_blocks is None else [row_blocks]:
        if blocks == 1:
            break
        program, orders = sort_in_blocks(analysis.program, rules, blocks)
        if orders:
            return program, orders, blocks
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
