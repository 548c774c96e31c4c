"""Tests saving and restoring, for every kind of array and for every failure."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import resource
import shutil
import threading
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small_step
import step_forms as forms
from flax import nnx

import autopar
from autopar import CheckpointError, Checkpoints, PlanError
from autopar.checkpoint import checkpoints, folders, manifest, store


def kinds() -> dict[str, Any]:
    """A state with every kind of array."""
    return {
        "w": jnp.ones((16, 16)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1), 4),
        "raw": jax.random.PRNGKey(1),
        "bf16": jnp.arange(32, dtype=jnp.bfloat16).reshape(16, 2),
        "fp8": jnp.arange(8).astype(jnp.float8_e4m3fn),
        "int4": jnp.arange(-8, 8, dtype=jnp.int4),
        "complex": jnp.arange(4).astype(jnp.complex64),
        "bool": jnp.array([True, False]),
        "count": jnp.int32(7),
        "weak": jnp.asarray(2.0),
        "python": 3,
        "empty": jnp.zeros((0, 3)),
        "tuple": (),
        "none": None,
    }


def kinds_step(state: Any, batch: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {**state, "w": state["w"] - grad, "count": state["count"] + 1}, loss


def bits(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def test_every_kind_of_array(tmp_path: pathlib.Path) -> None:
    step = autopar.parallelize(kinds_step, cluster="2:cpu")
    state = kinds()
    for _ in range(2):
        state, _ = step(state, small_step.batch())
    with Checkpoints(tmp_path) as made:
        made.save(step, state, step=2)
    other = autopar.parallelize(kinds_step, cluster="8:cpu")
    found = made.restore(other, kinds, batch=small_step.batch()).state
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
        assert not jax.typeof(a).weak_type


@pytest.mark.parametrize("name", sorted(forms.FORMS))
def test_every_form_of_step_goes_on_as_it_would(
    name: str, tmp_path: pathlib.Path
) -> None:
    form = forms.FORMS[name]
    step = autopar.parallelize(form.step, cluster="2:cpu")
    given = list(forms.batches(4))
    state = step.init(form.create, jax.random.key(0), batch=given[0])
    for batch in given[:2]:
        state, _ = form.advance(step, state, batch)
    with Checkpoints(tmp_path) as made:
        made.save(step, state, step=2, position=2 * forms.BATCH)
        losses = form.losses(step, state, given[2:])
    again = made.restore(step, form.create, jax.random.key(9), batch=given[0])
    assert (again.step, again.position) == (2, 2 * forms.BATCH)
    assert form.losses(step, again.state, given[2:]) == losses


def test_nnx_objects_are_restored_in_place(tmp_path: pathlib.Path) -> None:
    form = forms.FORMS["nnx"]
    step = autopar.parallelize(form.step, cluster="2:cpu")
    batch = next(iter(forms.batches(1)))
    state = step.init(form.create, jax.random.key(0), batch=batch)
    first = [bits(x) for x in jax.tree.leaves(nnx.state(state[0]))]
    with Checkpoints(tmp_path) as made:
        made.save(step, state, step=0)
    step(*state, batch)
    found = made.restore_into(step, state)
    assert found.state[0] is state[0]
    assert [bits(x) for x in jax.tree.leaves(nnx.state(state[0]))] == first


@functools.cache
def small() -> Any:
    made = autopar.parallelize(small_step.step, cluster="4:cpu")
    made.prepare(*small_step.structs())
    return made


def numbers(seed: int = 0, width: int = small_step.WIDTH) -> Any:
    return jax.random.normal(jax.random.key(seed), (width, width))


def saved(directory: pathlib.Path, *steps: int) -> Checkpoints:
    made = Checkpoints(directory)
    for k in steps:
        made.save(small(), numbers(k), step=k, position=k * small_step.ROWS)
    made.wait()
    return made


def restored(made: Checkpoints, step: int | None = None) -> Any:
    return made.restore(small(), small_step.state, step=step)


def test_the_last_ones_stay(tmp_path: pathlib.Path) -> None:
    made = saved(tmp_path, 1, 2, 3, 4)
    assert (made.steps(), made.latest(), made.incomplete()) == ([2, 3, 4], 4, [])
    assert restored(made).step == 4
    found = restored(made, 2)
    assert (found.step, found.position) == (2, 2 * small_step.ROWS)
    assert bits(found.state) == bits(numbers(2))


def test_going_back_makes_a_new_last_one(tmp_path: pathlib.Path) -> None:
    made = saved(tmp_path, 1, 9)
    made.save(small(), numbers(5), step=5)
    made.wait()
    assert made.latest() == 5
    assert bits(restored(made).state) == bits(numbers(5))


def test_the_same_step_again(tmp_path: pathlib.Path) -> None:
    made = saved(tmp_path, 1, 2)
    made.save(small(), numbers(7), step=2)
    made.wait()
    assert made.steps() == [1, 2]
    assert bits(restored(made).state) == bits(numbers(7))


def test_a_save_under_way_is_restored(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, awaited = saved(tmp_path, 1), threading.Event()
    commit, wait = folders.commit, made.wait

    def commit_late(*arguments: Any) -> None:
        awaited.wait(60.0)
        commit(*arguments)

    def wait_now() -> None:
        awaited.set()
        wait()

    monkeypatch.setattr(folders, "commit", commit_late)
    made.save(small(), numbers(2), step=2)
    monkeypatch.setattr(made, "wait", wait_now)
    found = restored(made)
    awaited.set()
    assert found.step == 2
    assert bits(found.state) == bits(numbers(2))


def test_orbax_reads_it(tmp_path: pathlib.Path) -> None:
    made = saved(tmp_path, 1)
    found = ocp.StandardCheckpointer().restore(restored(made).folder / "arrays")
    np.testing.assert_array_equal(found["w"], numbers(1))


def test_the_state_may_be_consumed_at_once(tmp_path: pathlib.Path) -> None:
    """What is saved is the state as it was, though steps change its memory."""
    step = autopar.parallelize(small_step.step, cluster="4:cpu")
    state = step.init(small_step.state, batch=small_step.batch())
    made = Checkpoints(tmp_path, keep=0)
    expected: list[bytes] = []
    for k in range(6):
        expected.append(bits(jnp.copy(state)))
        made.save(step, state, step=k)
        for _ in range(3):
            state, _ = step(state, small_step.batch())
    made.wait()
    found = [bits(made.restore(step, small_step.state, step=k).state) for k in range(6)]
    assert found == expected


class TestDamage:
    @pytest.mark.parametrize("how", ["flipped", "cut", "gone", "empty"])
    @pytest.mark.parametrize("file", ["block", ".zarray", "manifest.json"])
    def test_the_one_before_is_restored(
        self, tmp_path: pathlib.Path, file: str, how: str
    ) -> None:
        made = saved(tmp_path, 1, 2)
        last = restored(made).folder
        self.damage(self.found(last, file), how)
        if (file, how) == ("manifest.json", "gone"):
            assert made.incomplete() == [last]
            found = restored(made)
        else:
            with pytest.warns(UserWarning, match=r"damaged.*Restored .* instead"):
                found = restored(made)
            with pytest.raises(CheckpointError, match=r"damaged.*others: 00000001-"):
                restored(made, 2)
        assert bits(found.state) == bits(numbers(1))
        if file != "manifest.json":
            assert "'w'" in found.damaged[0]

    def found(self, folder: pathlib.Path, file: str) -> pathlib.Path:
        w = folder / "arrays" / "w"
        blocks = sorted(x for x in w.iterdir() if x.name != ".zarray")
        places = {"block": blocks[-1], ".zarray": w / ".zarray"}
        return places.get(file, folder / file)

    def damage(self, path: pathlib.Path, how: str) -> None:
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[len(data) // 2] ^= 0x10
            path.write_bytes(data)
        if how == "cut":
            path.write_bytes(data[: len(data) // 2])
        if how == "empty":
            path.write_bytes(b"")
        if how == "gone":
            path.unlink()

    def test_all_are_damaged(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1, 2)
        for folder in tmp_path.glob("0*"):
            shutil.rmtree(folder / "arrays" / "w")
        with pytest.raises(CheckpointError, match=r"00000002.*'w'.*00000001.*'w'"):
            restored(made)

    def test_there_is_none(self, tmp_path: pathlib.Path) -> None:
        made = Checkpoints(tmp_path / "none")
        assert made.latest() is None
        with pytest.raises(CheckpointError, match="none: no checkpoint"):
            restored(made)
        with pytest.raises(CheckpointError, match=r"of step 3; there are .* 1, 2"):
            restored(saved(tmp_path, 1, 2), 3)


class TestForeign:
    def test_another_model(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1)
        other = autopar.parallelize(kinds_step, cluster="2:cpu")
        with pytest.raises(CheckpointError) as caught:
            made.restore(other, kinds, batch=small_step.batch())
        text = str(caught.value)
        assert "another model ('step', step 1)" in text
        assert "only the checkpoint has 'w'; only the step has 'state/bf16'" in text
        assert "and 9 more." in text

    def test_another_shape(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1)
        wide = autopar.parallelize(small_step.step, cluster="2:cpu")
        batch = np.ones((8, 32), np.float32)
        text = r"'w' is float32\[16,16\], and the step has float32\[32,32\]"
        with pytest.raises(CheckpointError, match=text):
            made.restore(wide, lambda: numbers(0, 32), batch=batch)

    def test_another_dtype(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1)
        half = autopar.parallelize(small_step.step, cluster="2:cpu")
        with pytest.raises(CheckpointError, match=r"the step has bfloat16\[16,16\]"):
            made.restore(
                half,
                lambda: numbers().astype(jnp.bfloat16),
                batch=small_step.batch().astype(jnp.bfloat16),
            )

    def test_nothing_is_planned(self, tmp_path: pathlib.Path) -> None:
        made = saved(tmp_path, 1)
        step = autopar.parallelize(small_step.step, cluster="2:cpu")
        with pytest.raises(PlanError, match="no plan yet"):
            made.restore(step, small_step.state)
        with pytest.raises(PlanError, match="no plan yet"):
            made.save(step, numbers(), step=1)


class TestWriting:
    def test_wrong_arguments(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(CheckpointError, match="keep must be 0 or more, not -1"):
            Checkpoints(tmp_path, keep=-1)
        made = Checkpoints(tmp_path)
        with pytest.raises(CheckpointError, match="step=-1, position=0"):
            made.save(small(), numbers(), step=-1)
        with pytest.raises(PlanError, match="the state is not what"):
            made.save(small(), (numbers(), numbers()), step=1)
        assert list(tmp_path.iterdir()) == []

    def test_a_consumed_state(self, tmp_path: pathlib.Path) -> None:
        state = jax.device_put(numbers())
        state.delete()
        with pytest.raises(CheckpointError, match="'w' was consumed by a step"):
            Checkpoints(tmp_path).save(small(), state, step=1)

    def test_a_directory_that_cannot_be_written(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may write everywhere, so the file system's answer is played."""
        made = saved(tmp_path, 1)

        def refused(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "mkdir", refused)
            with pytest.raises(CheckpointError, match="Read-only file system"):
                made.save(small(), numbers(), step=2)
        assert restored(made).step == 1

    def test_a_full_disk(self, tmp_path: pathlib.Path) -> None:
        """A limit on the size of a file refuses a write as a full disk does."""
        made = saved(tmp_path, 1)
        wide = autopar.parallelize(small_step.step, cluster="2:cpu")
        wide.prepare(
            jax.ShapeDtypeStruct((512, 512), jnp.float32),
            jax.ShapeDtypeStruct((8, 512), jnp.float32),
        )
        with file_limit(1 << 16):
            made.save(wide, numbers(0, 512), step=2)
            with pytest.raises(
                CheckpointError,
                match=r"(?s)cannot be written: .*(File too|OUT_OF)",
            ):
                made.wait()
        assert made.steps() == [1]
        assert len(made.incomplete()) == 1
        assert restored(made).step == 1
        made.save(small(), numbers(3), step=3)
        made.wait()
        assert (made.steps(), made.incomplete()) == ([1, 3], [])

    def test_a_lost_process_is_not_waited_for(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its part never comes: the wait ends if the world is left, and the save is
        given up and not complete.
        """
        made = saved(tmp_path, 1)
        folder = tmp_path / "00000002-0000000000000000"
        folder.mkdir()
        old = checkpoints.Save(
            folder=folder,
            manifest=manifest_of(made),
            plan=small().plan,
            arrays={"w": numbers()},
            process=0,
            processes=2,
        )
        running = checkpoints.Background(old)
        monkeypatch.setattr(made, "_running", running)

        def check() -> None:
            raise KeyError("the world is left")

        with pytest.raises(KeyError, match="the world is left"):
            made.wait(check)
        made.abandon()
        with pytest.raises(CheckpointError, match="the save was given up"):
            running.wait()
        assert made.incomplete() == [folder]

    def test_two_processes_write_their_parts(self, tmp_path: pathlib.Path) -> None:
        """Checksums of parts add up; who is not first waits for the manifest."""
        made = saved(tmp_path, 1)
        folder = tmp_path / "00000002-ffffffffffffffff"
        folder.mkdir()
        own = manifest_of(made)
        both = [
            checkpoints.Save(
                folder=folder,
                manifest=own,
                plan=small().plan,
                arrays={"w": numbers(1)} if k == 0 else {"w": jnp.zeros((0,))},
                process=k,
                processes=2,
            )
            for k in range(2)
        ]
        stopped = threading.Event()
        threads = [threading.Thread(target=x.write, args=(stopped,)) for x in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not list(folder.glob("part-*"))
        assert bits(restored(made).state) == bits(numbers(1))
        assert restored(made).folder == folder


def manifest_of(made: Checkpoints) -> Any:
    return manifest.read(restored(made).folder)


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_read_names_the_array(tmp_path: pathlib.Path) -> None:
    store.write(tmp_path / "arrays", {"a": numbers(), "b": numbers()})
    (tmp_path / "arrays" / "b" / ".zarray").unlink()
    sharding = numbers().sharding
    structs = {
        name: store.struct_of((16, 16), jnp.dtype("float32"), sharding)
        for name in ("x/a", "x/b")
    }
    with pytest.raises(CheckpointError, match="'x/b' cannot be read"):
        store.read(tmp_path / "arrays", structs, {"x/a": "a", "x/b": "b"})


def test_the_noise_scale_and_notes_are_kept(tmp_path: pathlib.Path) -> None:
    """Another plan goes on with the averages, and with what the loop wrote down."""
    import following_cases as cases

    batch = cases.source(0, cases.BASE)
    step, state = cases.parallel(), cases.create()
    for _ in range(3):
        state, _ = step(state, batch)
    saved = Checkpoints(tmp_path)
    saved.save(step, state, step=3, notes={"rows": [1, 2]})
    saved.wait()
    assert saved.notes() == {"rows": [1, 2]}
    other = cases.parallel(cluster="2:cpu")
    found = saved.restore(other, cases.create, batch=batch)
    assert found.notes == {"rows": [1, 2]}
    one, again = step.noise_state, other.noise_state
    for name in ("weight", "sqr", "var", "steps"):
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(one[name]))
    state, _ = other(found.state, batch)
    assert int(other.noise_state["steps"]) == 4
