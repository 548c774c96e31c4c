"""Tests layouts of a state, and moves between them over any transport."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_step
import step_forms as forms
from jax.sharding import Mesh

from autopar import PlanError
from autopar.runtime.state_mover import (
    DevicePut,
    LeafLayout,
    StateLayout,
    layout_of,
    move,
    name_arrays,
    sharding,
    state_layout,
)
from autopar.steps.analysis import Analysis, analyse

W = LeafLayout(shape=(8, 4), dtype="float32", spec=(("a", "b"), ()))
B = LeafLayout(shape=(4,), dtype="float32", spec=(("b",),))
KEY = LeafLayout(shape=(), dtype="key<fry>", spec=())
MESH = (("a", 2), ("b", 2))
LAYOUT = StateLayout(leaves={"p/w": W, "p/b": B, "key": KEY}, meshes=(MESH,))


def arrays() -> dict[str, Any]:
    return {
        "p/w": np.arange(32, dtype=np.float32).reshape(8, 4),
        "p/b": jnp.arange(4.0),
        "key": jax.random.key(7),
    }


def mesh(axes: Any = MESH, first: int = 0) -> Mesh:
    sizes = [n for _, n in axes]
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), [name for name, _ in axes])


def whole(layout: StateLayout) -> StateLayout:
    leaves = {
        path: dataclasses.replace(leaf, spec=((),) * len(leaf.shape))
        for path, leaf in layout.leaves.items()
    }
    return dataclasses.replace(layout, leaves=leaves)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for path, array in expected.items():
        if path == "key":
            array, got = map(jax.random.key_data, (array, found[path]))
        else:
            got = found[path]
        np.testing.assert_array_equal(got, array)


class Recorder:
    """A transport that copies every array through the host, and records the stages."""

    def __init__(self, meshes: tuple[Mesh, ...]) -> None:
        self.meshes = meshes
        self.carried: list[tuple[LeafLayout | None, LeafLayout]] = []

    def carry(self, array: Any, source: LeafLayout | None, target: LeafLayout) -> Any:
        self.carried.append((source, target))
        where = sharding(self.meshes[target.stage], target)
        host = array if target.dtype.startswith("key") else np.asarray(array)
        return jax.make_array_from_callback(
            target.shape, where, lambda index: host[index], dtype=host.dtype
        )


class TestLayout:
    def test_json(self) -> None:
        again = StateLayout.from_json(LAYOUT.to_json())
        assert again == LAYOUT
        assert list(again.leaves) == list(LAYOUT.leaves)
        assert again.leaves["p/w"].spec == (("a", "b"), ())

    def test_what_makes_layouts_differ(self) -> None:
        for change in ({"dtype": "bfloat16"}, {"shape": (4, 8)}, {"spec": ((), ())}):
            leaf = dataclasses.replace(W, **change)
            other = dataclasses.replace(LAYOUT, leaves={**LAYOUT.leaves, "p/w": leaf})
            assert other != LAYOUT
        assert dataclasses.replace(LAYOUT, meshes=((("a", 4), ("b", 2)),)) != LAYOUT

    @pytest.mark.parametrize("text", ["", "{}", '{"leaves": 3, "meshes": []}'])
    def test_no_layout(self, text: str) -> None:
        with pytest.raises(ValueError, match="not a layout"):
            StateLayout.from_json(text)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"stage": 1}, "stage 1, and there are 1"),
            ({"spec": (("c",), ())}, "over c"),
        ],
    )
    def test_no_such_place(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            StateLayout(
                leaves={"p/w": dataclasses.replace(W, **change)}, meshes=(MESH,)
            )

    def test_of_arrays_on_a_host(self) -> None:
        found = layout_of(arrays())
        assert found.leaves == whole(LAYOUT).leaves
        assert found.meshes == ((),)


@pytest.mark.parametrize("transport", [DevicePut, Recorder])
class TestMove:
    """Values stay, each array lies as the target says, and the given ones live on."""

    def test_there_and_back(self, transport: Any) -> None:
        first = move(arrays(), None, LAYOUT, transport((mesh(),)))
        assert_equal(first, arrays())
        for path, leaf in LAYOUT.leaves.items():
            where = sharding(mesh(), leaf)
            assert first[path].sharding.is_equivalent_to(where, len(leaf.shape))

        axes = (("b", 4),)
        leaves = {**whole(LAYOUT).leaves, "p/b": B}
        second = StateLayout(leaves=leaves, meshes=(axes,))
        other = mesh(axes, first=4)
        moved = move(first, LAYOUT, second, transport((other,)))
        assert_equal(moved, arrays())
        assert_equal(first, arrays())
        assert moved["p/b"].sharding.device_set == set(jax.devices()[4:])

    def test_stages(self, transport: Any) -> None:
        """Each stage's arrays lie on its own devices."""
        leaves = {**LAYOUT.leaves, "p/b": dataclasses.replace(B, stage=1)}
        target = StateLayout(leaves=leaves, meshes=(MESH, (("b", 4),)))
        stages = (mesh(), mesh((("b", 4),), first=4))
        found = move(arrays(), None, target, transport(stages))
        assert_equal(found, arrays())
        assert found["p/w"].sharding.device_set == set(jax.devices()[:4])
        assert found["p/b"].sharding.device_set == set(jax.devices()[4:])

    @pytest.mark.parametrize(
        ("path", "array", "message"),
        [
            ("p/w", np.zeros((8, 4), np.int32), r"'p/w' is int32\[8, 4\]"),
            ("p/w", np.zeros((8, 5), np.float32), r"float32\[8, 4\] is expected"),
            ("p/more", np.zeros(3), "only one of them has 'p/more'"),
        ],
    )
    def test_another_state(
        self, transport: Any, path: str, array: Any, message: str
    ) -> None:
        with pytest.raises(PlanError, match=message):
            move({**arrays(), path: array}, None, LAYOUT, transport((mesh(),)))
        source = layout_of({**arrays(), path: array})
        with pytest.raises(PlanError, match="another step"):
            move(arrays(), source, LAYOUT, transport((mesh(),)))


def test_a_transport_is_told_both_layouts() -> None:
    transport = Recorder((mesh(),))
    move(arrays(), None, LAYOUT, transport)
    move(arrays(), whole(LAYOUT), LAYOUT, transport)
    targets = list(LAYOUT.leaves.values())
    assert transport.carried[:3] == [(None, t) for t in targets]
    sources = whole(LAYOUT).leaves.values()
    assert transport.carried[3:] == list(zip(sources, targets, strict=True))


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyse(small_step.step, small_step.structs())


class TestOfAStep:
    def test_layout(self, analysis: Analysis) -> None:
        plan = small_step.plan("4:cpu")
        found = state_layout(analysis, plan)
        spec = plan.inputs["w"]
        assert found.leaves == {
            "w": LeafLayout(shape=(16, 16), dtype="float32", spec=spec)
        }
        assert found.meshes == (tuple(plan.mesh["axes"].items()),)
        assert list(state_layout(analysis, plan, 2).leaves) == ["w", "batch"]
        assert StateLayout.from_json(found.to_json()) == found

    def test_named(self, analysis: Analysis) -> None:
        w = small_step.state()
        assert name_arrays("step", analysis, w) == {"w": w}
        assert name_arrays("step", analysis, (w,)) == {"w": w}

    @pytest.mark.parametrize(
        "state",
        [None, (), "w", np.zeros((16, 15)), np.zeros((16, 16), np.int32), [1, 2, 3, 4]],
    )
    def test_of_another_step(self, analysis: Analysis, state: Any) -> None:
        with pytest.raises(PlanError, match="step: the state is not what"):
            name_arrays("step", analysis, state)

    def test_structs_are_no_state_unless_asked(self, analysis: Analysis) -> None:
        struct = small_step.structs()[0]
        found = name_arrays("step", analysis, struct, structs=True)
        assert found == {"w": struct}
        with pytest.raises(PlanError, match="step: the state is not what"):
            name_arrays("step", analysis, struct)

    def test_nnx_objects(self) -> None:
        model, optimizer = forms.create_nnx(jax.random.key(0))
        found = analyse(forms.nnx_step, (model, optimizer, forms.batch_structs()))
        arrays = name_arrays("step", found, (model, optimizer))
        assert arrays["model/up/kernel/value"].shape == (forms.WIDTH, forms.HIDDEN)
