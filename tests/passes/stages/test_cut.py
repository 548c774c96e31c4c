"""Tests that the tasks of a cut together compute what the program computes."""

import dataclasses
import functools

import pytest
from cut_cases import CASES, Traced, composed, in_order, same

from autopar_passes.graph.roles import Role
from autopar_passes.graph.verify import GraphError
from autopar_passes.program.equations import reads
from autopar_passes.stages.cut import Phase, TaskKey, cut, stage_program, verify_cut
from autopar_passes.stages.parts import CutError, parts_of


@pytest.fixture(scope="module")
def traced():
    return functools.cache(lambda name: Traced(CASES[name]()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("parts", "stages", "split"),
    [(1, 1, False), (2, 2, False), (4, 4, True), (4, 2, False)],
)
def test_tasks_compose_to_the_program(traced, name, parts, stages, split):
    known = traced(name)
    found = known.cut(parts, stages, split_backward=split)
    verify_cut(found)
    assert same(composed(found, known.inputs()), known.whole())


@pytest.mark.parametrize("name", ["chain", "skip connections", "dropout"])
def test_layers_that_are_computed_again_change_nothing(traced, name):
    known = traced(name)
    plain = known.cut(2, 2)
    flow = plain.parts.flow
    again = [i for i, p in plain.parts.part.items() if p == 0]
    again = [i for i in again if flow.roles[i] is Role.FORWARD]
    found = known.cut(2, 2, recomputed=again)
    verify_cut(found)
    assert same(composed(found, known.inputs()), known.whole())
    backward = TaskKey(Phase.BACKWARD, 0, 0)
    assert kept_bytes(found, backward) < kept_bytes(plain, backward)


def kept_bytes(found, key):
    made = [v for v, m in found.tasks[key].inputs if m and m.phase is Phase.FORWARD]
    return sum(found.program.values[v].nbytes for v in made)


def test_neither_weights_nor_their_casts_are_sent(traced):
    found = traced("cast weights").cut(4, 4)
    weights = {tuple(found.program.values[v].shape) for v in found.parts.flow.state}
    for task in found.tasks.values():
        if task.key.phase is not Phase.UPDATE:
            sent = {v for v, m in task.inputs if m and m.stage != task.key.stage}
            shapes = {tuple(found.program.values[v].shape) for v in sent}
            assert not shapes & {s for s in weights if len(s) > 1}


def test_gradients_are_sent_before_they_expand(traced):
    """The gradient of a slice is a larger array, mostly zeros."""
    found = traced("two columns").cut(4, 4)
    for stage in range(3):
        task = found.tasks[TaskKey(Phase.BACKWARD, stage, stage)]
        sent = [v for v, m in task.inputs if m and m.stage > stage]
        assert [found.program.values[v].shape[1:] for v in sent] == [(2,)]


def test_state_lives_where_its_layer_runs(traced):
    found = traced("chain").cut(4, 4)
    for value, next_one in found.parts.flow.carried_values.items():
        maker = found.parts.flow.maker[next_one]
        if value in found.parts.flow.state:
            assert found.stage_of[found.parts.part[maker]] == found.owners[value]
    owners = [found.owners[v] for v in found.parts.flow.state]
    assert all(owners.count(stage) == 4 for stage in range(4))


def test_a_sum_of_squares_is_sent_and_its_weights_are_not(traced):
    found = traced("regularised").cut(4, 4)
    last = found.tasks[TaskKey(Phase.FORWARD, 3, 3)]
    received = [v for v, m in last.inputs if m and m.stage != 3]
    sizes = sorted(found.program.values[v].size for v in received)
    assert sizes[0] == 1
    large = [v for v, m in last.inputs if m is None and v in found.parts.flow.state]
    assert all(found.owners[v] == 3 for v in large)


def test_gradients_of_weights_wait_behind_those_of_inputs(traced):
    found = traced("chain").cut(4, 4, split_backward=True)
    for part in range(1, 4):
        first = found.tasks[TaskKey(Phase.BACKWARD_INPUT, part, part)]
        late = found.tasks[TaskKey(Phase.BACKWARD_WEIGHT, part, part)]
        before = found.tasks.get(TaskKey(Phase.BACKWARD_INPUT, part - 1, part - 1))
        assert first.equations
        assert late.equations
        if before is not None:
            makers = {m for _, m in before.inputs if m}
            assert late.key not in makers


def test_updates_of_all_stages_wait_for_the_norm(traced):
    found = traced("norm of all gradients").cut(2, 2)
    levels = {k.number for k in found.tasks if k.phase is Phase.UPDATE and k.stage == 1}
    assert levels == {0, 2}


def test_a_stage_program_reads_and_makes_what_its_tasks_do(traced):
    found = traced("skip connections").cut(4, 2)
    programs = [stage_program(found, s) for s in range(2)]
    carried = sum(len(p.carried) for p in programs)
    assert carried == len(found.parts.flow.carried_values)
    for own in programs:
        body = own.program.body
        known = set(body.inputs)
        for eqn in body.equations:
            assert known.issuperset(reads(eqn))
            known.update(eqn.outputs)
        assert known.issuperset(body.outputs)
    made = {v for p in programs for v in p.program.body.outputs}
    assert made.issuperset(v for p in programs for v in p.received)


def test_verify_finds_what_is_missing_or_late(traced):
    found = traced("chain").cut(2, 2)
    first, last = (TaskKey(Phase.FORWARD, k, k) for k in range(2))
    less = dataclasses.replace(found.tasks[first], outputs=())
    with pytest.raises(GraphError, match="does not hand out"):
        verify_cut(dataclasses.replace(found, tasks=found.tasks | {first: less}))
    gone = {k: t for k, t in found.tasks.items() if k != last}
    with pytest.raises(GraphError, match="is in no task"):
        verify_cut(dataclasses.replace(found, tasks=gone))
    task = found.tasks[first]
    value = found.tasks[last].outputs[0]
    late = dataclasses.replace(task, inputs=(*task.inputs, (value, last)))
    with pytest.raises(GraphError, match="comes later"):
        verify_cut(dataclasses.replace(found, tasks=found.tasks | {first: late}))


def test_parts_begin_at_different_known_equations(traced):
    known = traced("chain")
    for starts, message in [
        ([], "different"),
        ([3, 3], "different"),
        ([10**6], "no equation"),
    ]:
        with pytest.raises(CutError, match=message):
            parts_of(known.program, known.graph, starts, batch=known.batch)


def test_stages_are_numbered_from_zero(traced):
    with pytest.raises(CutError, match="cannot be on stages"):
        cut(traced("chain").parts(2), [1, 2], ())


def test_tasks_are_in_an_order_that_runs(traced):
    found = traced("tied weights").cut(4, 2)
    assert set(in_order(found)) == set(found.tasks)
