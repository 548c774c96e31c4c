"""Tests that arrays stored as planes of bytes keep every bit, and need less room."""

from __future__ import annotations

import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar import CheckpointError, Checkpoints
from autopar.checkpoint import converting, folders, manifest, planes, store

DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDTH, ROWS = 256, 24


def of_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits: also NaNs with payloads, infinities and both zeros."""
    kind = jnp.dtype(dtype)
    data = np.random.default_rng(seed).bytes(math.prod(shape) * kind.itemsize)
    return np.frombuffer(data, kind).reshape(shape)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 9),
)
def test_all_bits_are_kept(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    block = of_bits(dtype, shape, seed)
    found = planes.split(block)
    assert found.shape == (block.dtype.itemsize, *shape)
    assert planes.join(found, block.dtype).tobytes() == block.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_last_plane_is_the_exponent(dtype: str) -> None:
    block = np.array([1.0, -1.75, 2.0, -0.5, 0.0]).astype(jnp.dtype(dtype))
    assert planes.split(block)[-1].tolist() == [127, 127, 128, 126, 0]


SPECS = [("a", "b"), (None, "a"), (("b", "a"), None), (None, None), ("b",)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_any_layout_is_read_into_any_layout(dtype: str, tmp_path: pathlib.Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    whole = of_bits(dtype, (8, 12))
    layouts = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in SPECS]
    for k, layout in enumerate(layouts):
        folder = tmp_path / str(k)
        copied = store.copy_arrays({"w": jax.device_put(whole, layout)})
        store.write_planes(folder, copied)
        for other in layouts:
            struct = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=other)
            read = store.read(folder, {"w": struct}, {"w": "w"}, {"w"})["w"]
            assert np.asarray(read).tobytes() == whole.tobytes()


def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean((batch @ w.astype(jnp.float32)) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    return {**state, "w": state["w"] - grad, "count": state["count"] + 1}, loss


def create() -> Any:
    key = jax.random.key(0)
    return {
        "w": 0.02 * jax.random.normal(key, (WIDTH, WIDTH)),
        "half": jax.random.normal(key, (WIDTH, WIDTH), jnp.bfloat16),
        "codes": jnp.arange(1 << 14, dtype=jnp.int32),
        "count": jnp.int32(0),
        "scale": jnp.float32(2.0),
        "key": key,
    }


BATCH = np.ones((ROWS, WIDTH), np.float32)


@functools.cache
def planned() -> Any:
    made = autopar.parallelize(step, cluster="2:cpu")
    made.prepare(jax.eval_shape(create), BATCH)
    return made


def saved(directory: pathlib.Path, coding: Any) -> pathlib.Path:
    with Checkpoints(directory, coding=coding) as made:
        made.save(planned(), create(), step=1)
    (folder,) = folders.complete(directory)
    return folder


def stored_bytes(folder: pathlib.Path, name: str) -> int:
    return sum(x.stat().st_size for x in (folder / "arrays" / name).iterdir())


def test_a_checkpoint_is_smaller_and_restores_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    plain, coded = saved(tmp_path / "a", None), saved(tmp_path / "b", "planes")
    held = manifest.read(coded)
    assert manifest.in_planes(held.arrays) == {"state/w", "state/half"}
    assert (manifest.read(plain).schema, held.schema) == (1, 2)
    assert stored_bytes(coded, "state.w") < 0.85 * held.arrays["state/w"].num_bytes
    assert stored_bytes(coded, "state.half") < 0.8 * held.arrays["state/half"].num_bytes
    other = autopar.parallelize(step, cluster="4:cpu")
    found = Checkpoints(tmp_path / "b").restore(other, create, batch=BATCH).state
    for name, array in create().items():
        a, b = (
            jax.random.key_data(x) if name == "key" else x for x in (array, found[name])
        )
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("plane", [0, 3])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_found(plane: int, how: str, tmp_path: pathlib.Path) -> None:
    folder = saved(tmp_path, "planes")
    path = next((folder / "arrays" / "state.w").glob(f"{plane}.*"))
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"damaged.*'state/w'"):
        Checkpoints(tmp_path).restore(planned(), create, batch=BATCH, step=1)


def test_planes_of_another_shape_are_damage(tmp_path: pathlib.Path) -> None:
    struct = jax.ShapeDtypeStruct(
        (4, 4),
        jnp.float32,
        sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    store.write_planes(tmp_path, store.copy_arrays({"w": jnp.ones((4, 2))}))
    with pytest.raises(CheckpointError, match=r"damaged: 'w'.*\(4, 4, 2\), and not"):
        store.read(tmp_path, {"w": struct}, {"w": "w"}, {"w"})


def test_coded_parameters_are_converted(tmp_path: pathlib.Path) -> None:
    files = []
    for coding in (None, "planes"):
        saved(tmp_path / str(coding), coding)
        files.append(tmp_path / f"{coding}.safetensors")
        converting.convert(tmp_path / str(coding), files[-1], "safetensors")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_unknown_coding_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        CheckpointError, match="coding='zip': expected 'planes' or None"
    ):
        Checkpoints(tmp_path, coding="zip")  # pyright: ignore[reportArgumentType]
