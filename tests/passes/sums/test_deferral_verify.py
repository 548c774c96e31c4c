"""Tests that found deferrals pass verification, and that corrupt ones are named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from deferral_cases import SPLIT, Found, W, X, descent, find, layers, ones, square
from step_cases import NAMES, case

from autopar_passes.graph.roles import Role
from autopar_passes.graph.verify import GraphError
from autopar_passes.sums import find as finding
from autopar_passes.sums.find import find_deferrals, verify_deferrals
from autopar_passes.sums.stacked import CONTRACTIONS, Deferral


def microbatches(params: Any, batches: Any) -> Any:
    def one(total: Any, batch: Any) -> Any:
        return total + jax.grad(square)(params, batch)["w"], None

    total, _ = jax.lax.scan(one, jnp.zeros_like(params["w"]), batches)
    return {"w": params["w"] - total}


def two_ends(params: Any, batch: Any) -> Any:
    """Two weights that are used as one, and a counter, which is not a float."""

    def loss(params: Any) -> jax.Array:
        joined = jnp.concatenate([params["w"], params["v"]], axis=1)
        return jnp.mean((batch @ joined) ** 2)

    grads = jax.grad(loss)({"w": params["w"], "v": params["v"]})
    moved = {k: params[k] - 0.1 * grads[k] for k in ("w", "v")}
    return moved | {"steps": params["steps"] + 1}


@functools.cache
def found(name: str) -> Found:
    match name:
        case "square":
            return find(descent(square), {"w": W}, X)
        case "layers":
            return find(descent(layers), {"w": ones(3, 8, 8)}, X)
        case "two ends":
            return find(two_ends, {"w": W, "v": W, "steps": jnp.int32(0)}, X)
        case _:
            return find(microbatches, {"w": W}, SPLIT)


MODELS = ["square", "layers", "two ends", "microbatches"]
Corrupted = tuple[tuple[Deferral, ...], str]
Corruption = Callable[[Found, Deferral], Iterator[Corrupted]]


def unknown_member(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    members = deferral.members | {len(found.graph.values)}
    yield (dataclasses.replace(deferral, members=members),), "is made by nothing"


def member_of_another_type(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    for op in found.graph.operators:
        for value in op.outputs:
            if not found.graph.values[value].floating:
                members = deferral.members | {value}
                wrong = dataclasses.replace(deferral, members=members)
                yield (wrong,), f"member %{value} is no float"
                return


def member_aside(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    """A value of the graph that no summand leads to."""
    inputs = [given.value for given in found.graph.inputs]
    value = next(v for v in inputs if found.graph.values[v].floating)
    wrong = dataclasses.replace(deferral, members=deferral.members | {value})
    yield (wrong,), f"nothing leads to the members [{value}]"


def missing_member(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    for value in sorted(deferral.members - set(deferral.ends)):
        if found.producer[value].kind == "carry":
            continue
        members = deferral.members - {value}
        wrong = dataclasses.replace(deferral, members=members)
        yield (wrong,), rf"%{value}, no member|members [{value}"


def hoisted(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    wrong = dataclasses.replace(deferral, hoisted=not deferral.hoisted)
    yield (wrong,), f"are hoisted: {deferral.hoisted}"


def no_ends(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    yield (dataclasses.replace(deferral, ends=()),), "of the deferral are no members"


def end_outside(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    value = found.graph.operators[0].outputs[0]
    yield (dataclasses.replace(deferral, ends=(value,)),), "are no members"


def gradient_that_is_no_end(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    value = found.graph.operators[0].outputs[0]
    yield (dataclasses.replace(deferral, gradients=frozenset({value})),), "are no ends"


def end_that_is_not_reached(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    (first, _), *rest = deferral.reach
    if not rest:
        wrong = dataclasses.replace(deferral, reach=((first, ()),))
        yield (wrong,), "no contribution reaches all of the ends"


def order_of_the_ends(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    if len(deferral.ends) > 1:
        wrong = dataclasses.replace(deferral, ends=deferral.ends[::-1])
        yield (wrong,), "are not in program order"


def twice_the_same_end(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    wrong = dataclasses.replace(deferral, ends=deferral.ends * 2)
    yield (wrong,), "are not in program order"


def unknown_contribution(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    (_, ends), *rest = deferral.reach
    position = len(found.graph.operators)
    wrong = dataclasses.replace(deferral, reach=((position, ends), *rest))
    yield (wrong,), f"there is no operator {position}"


def contribution_without_partial_results(
    found: Found, deferral: Deferral
) -> Iterator[Corrupted]:
    (_, ends), *rest = deferral.reach
    for op in found.graph.operators:
        if op.kind not in CONTRACTIONS or op.role is not Role.BACKWARD:
            wrong = dataclasses.replace(deferral, reach=((op.index, ends), *rest))
            yield (wrong,), f"operator {op.index} '{op.kind}': it makes no partial"


def contribution_that_leads_elsewhere(
    found: Found, deferral: Deferral
) -> Iterator[Corrupted]:
    (own, ends), *rest = deferral.reach
    for op in found.graph.operators:
        contracts = op.kind in CONTRACTIONS and op.role is Role.BACKWARD
        if contracts and op.index != own and op.outputs[0] not in deferral.members:
            wrong = dataclasses.replace(deferral, reach=((op.index, ends), *rest))
            yield (wrong,), "no member"


def the_same_values_twice(found: Found, deferral: Deferral) -> Iterator[Corrupted]:
    yield (deferral, deferral), "is in two deferrals"


CORRUPTIONS: tuple[Corruption, ...] = (
    unknown_member,
    member_of_another_type,
    member_aside,
    missing_member,
    hoisted,
    no_ends,
    end_outside,
    gradient_that_is_no_end,
    end_that_is_not_reached,
    order_of_the_ends,
    twice_the_same_end,
    unknown_contribution,
    contribution_without_partial_results,
    contribution_that_leads_elsewhere,
    the_same_values_twice,
)


@pytest.mark.parametrize("name", NAMES)
def test_the_deferrals_of_real_steps_are_valid(name: str) -> None:
    graph = case(name).graph

    verify_deferrals(graph, find_deferrals(case(name).traced.program, graph))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_a_corruption_is_found_and_named(name: str, corrupt: Corruption) -> None:
    for deferral in found(name).deferrals:
        for wrong, said in corrupt(found(name), deferral):
            with pytest.raises(GraphError) as error:
                verify_deferrals(found(name).graph, wrong)
            assert any(part in str(error.value) for part in said.split("|"))


def test_every_corruption_was_tried() -> None:
    tried = {
        corrupt
        for corrupt in CORRUPTIONS
        for name in MODELS
        for deferral in found(name).deferrals
        for _ in corrupt(found(name), deferral)
    }

    assert tried == set(CORRUPTIONS)


def test_a_graph_in_which_a_partial_value_has_a_second_reader() -> None:
    """A deferral that was found in another graph is not valid here."""
    graph, deferral = found("microbatches").graph, found("microbatches").deferrals[0]
    inner = graph.operators[deferral.contributions[0]].outputs[0]
    reader = next(op for op in graph.operators if inner in op.inputs)
    twice = dataclasses.replace(reader, index=len(graph.operators))
    wrong = dataclasses.replace(graph, operators=(*graph.operators, twice))

    with pytest.raises(GraphError, match=f"2 operators read the partial %{inner}"):
        verify_deferrals(wrong, (deferral,))


def test_the_finder_verifies_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(finding, "verify_deferrals", lambda g, d: seen.append(d))
    traced, graph = case("mlp").traced, case("mlp").graph

    monkeypatch.setenv("AUTOPAR_VERIFY", "1")
    asked = find_deferrals(traced.program, graph)
    monkeypatch.setenv("AUTOPAR_VERIFY", "")
    find_deferrals(traced.program, graph)

    assert seen == [asked]
