"""Tests manifests, folders, trees and file names of checkpoints."""

from __future__ import annotations

import collections
import hashlib
import pathlib

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from autopar import CheckpointError
from autopar.checkpoint import folders, manifest, store, trees
from autopar.checkpoint.manifest import ArrayEntry, Manifest, PlanEntry

ENTRY = ArrayEntry(
    shape=(4, 2), dtype="bfloat16", file="w", digest="0" * 32, num_bytes=16
)


def made(**changes: object) -> Manifest:
    whole = Manifest(
        schema=manifest.SCHEMA,
        version="1",
        step=3,
        position=96,
        created=1.5,
        name="step",
        state={"w": ENTRY},
        codecs={},
        codec_tree=None,
        plan=PlanEntry(digest="d", fingerprint="f", structure="s", text="t"),
    )
    return msgspec.structs.replace(whole, **changes)


class TestManifests:
    def test_round_trip(self) -> None:
        found = manifest.decode(made().encode(), "m")
        assert msgspec.structs.replace(found, checksum="") == made()
        assert found.arrays["w"].text == "bfloat16[4,2]"
        assert found.num_bytes == 16

    @pytest.mark.parametrize(
        ("old", "new"), [(b'"step": 3', b'"step": 4'), (b"16", b"18")]
    )
    def test_a_changed_field_is_seen(self, old: bytes, new: bytes) -> None:
        data = made().encode()
        assert old in data
        with pytest.raises(CheckpointError, match=r"m: damaged: its checksum"):
            manifest.decode(data.replace(old, new), "m")

    def test_a_newer_schema(self) -> None:
        data = made(schema=manifest.SCHEMA + 1).encode()
        with pytest.raises(CheckpointError, match=r"schema 3, .* up to 2.*newer one"):
            manifest.decode(data, "m")

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 1}'])
    def test_no_manifest(self, data: bytes) -> None:
        with pytest.raises(CheckpointError, match="m: not the manifest"):
            manifest.decode(data, "m")


class TestFolders:
    def whole(self, directory: pathlib.Path, step: int, time: int) -> pathlib.Path:
        folder = directory / folders.folder_name(step, time)
        folders.begin(folder)
        (folder / "part").write_text("x")
        folders.commit(folder, made(step=step).encode())
        return folder

    def test_complete_ones_by_time(self, tmp_path: pathlib.Path) -> None:
        late, early = self.whole(tmp_path, 5, 900), self.whole(tmp_path, 9, 100)
        torn = tmp_path / folders.folder_name(7, 500)
        folders.begin(torn)
        (tmp_path / "notes").mkdir()
        assert folders.complete(tmp_path) == [early, late]
        assert folders.incomplete(tmp_path) == [torn]
        assert folders.complete(tmp_path / "missing") == []

    @pytest.mark.parametrize(("keep", "left"), [(1, [8]), (2, [6, 8]), (0, [4, 6, 8])])
    def test_pruning(self, tmp_path: pathlib.Path, keep: int, left: list[int]) -> None:
        for k, step in enumerate((4, 6, 8)):
            self.whole(tmp_path, step, k)
        folders.begin(tmp_path / folders.folder_name(7, 5))
        newest = self.whole(tmp_path, 8, 9)
        folders.prune(tmp_path, keep, newest)
        assert [folders.step_of(x) for x in folders.complete(tmp_path)] == left
        assert folders.complete(tmp_path)[-1] == newest
        assert folders.incomplete(tmp_path) == []

    def test_a_foreign_name(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(CheckpointError, match="not the folder of a checkpoint"):
            folders.step_of(tmp_path / "other")

    def test_a_folder_that_cannot_be_made(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
            folders.begin(tmp_path / "file" / "x")


Point = collections.namedtuple("Point", "x y")


def test_trees() -> None:
    tree = {
        "a": (jnp.ones(2), [None, 3, "t"]),
        "b": Point(jnp.zeros(1), ()),
        "c": np.arange(3, dtype=np.uint8),
    }
    arrays, plain = trees.split(tree, "codecs")
    assert sorted(arrays) == ["codecs/a/0", "codecs/b/0"]
    again = trees.join(msgspec.json.decode(msgspec.json.encode(plain)), arrays)
    assert again["a"][1] == [None, 3, "t"]
    assert again["a"][0] is tree["a"][0]
    assert again["b"] == (tree["b"].x, ())
    np.testing.assert_array_equal(again["c"], tree["c"])


_DTYPES = [{"numpy": [text, [1], "00"]} for text in ("9" * 5000, "(1", "O", [], 3)]


@pytest.mark.parametrize(
    "plain", [3, {}, {"array": "x"}, {"list": 3}, {"new": 1}, *_DTYPES]
)
def test_what_is_no_tree(plain: object) -> None:
    with pytest.raises(CheckpointError, match="not the structure"):
        trees.join(plain, {})


def test_file_names() -> None:
    paths = ["a/b", "a.b", "A/b", "_METADATA", "/", "x" * 300, "ü['k']"]
    names = store.file_names(paths)
    assert len({x.lower() for x in names.values()}) == len(paths)
    assert all(len(x) < 130 and "/" not in x for x in names.values())
    assert "_metadata" not in {x.lower() for x in names.values()}


def test_manifests_without_noise_and_notes_are_those_of_before() -> None:
    """Fields that an earlier version did not know leave its checksums as they were."""
    plain = msgspec.to_builtins(made())
    for name in ("noise", "noise_tree", "notes"):
        del plain[name]
    plain["checksum"] = ""
    digest = hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:32]
    old = msgspec.json.encode({**plain, "checksum": digest})
    assert manifest.decode(old, "m").notes is None
    new = made(notes={"rows": 3}).encode()
    assert manifest.decode(new, "m").notes == {"rows": 3}
    with pytest.raises(CheckpointError, match="its checksum"):
        manifest.decode(new.replace(b'"rows": 3', b'"rows": 4'), "m")
