"""Tests atoms, safetensors and torch files, and the commands that write them."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
import struct
import zipfile
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import step_forms as forms
from command_line import Run, assert_fails

import autopar
from autopar import CheckpointError, Checkpoints
from autopar.checkpoint import folders, manifest, restoring, torch_files
from autopar.checkpoint.converting import convert

VALUE: dict[str, Any] = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bf": np.arange(3).astype(ml_dtypes.bfloat16),
    "none": np.zeros((0, 2), np.int64),
    "scalar": np.array(2.5),
    "text": "t",
    "flag": True,
    "nested": {"n": 3, "x": None},
}


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _numbers(*values: int) -> bytes:
    return _tuple(*(b"J" + struct.pack("<i", x) for x in values))


def _tensor(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], count: int = 12
) -> bytes:
    """A PyTorch tensor, as the bytes of a pickle."""
    number = b"J" + struct.pack("<i", count)
    words = [b"U" + bytes([len(x)]) + x for x in (b"storage", b"0", b"cpu")]
    kind, key, place = words
    storage = _tuple(kind, _name("torch", "FloatStorage"), key, place, number) + b"Q"
    start = b"J" + struct.pack("<i", offset)
    arguments = _tuple(storage, start, _numbers(*shape), _numbers(*strides), b"\x89")
    return _name("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


_REBUILT = _name("torch._utils", "_rebuild_tensor_v2")
_HOSTILE = {
    "before": (_tensor(-5, (9,), (1,)), "no number"),
    "behind": (_tensor(5, (9,), (1,)), "outside of its storage"),
    "far and back": (_tensor(0, (10, 10), (10**9, -(10**9))), "no number"),
    "backwards": (_tensor(11, (12,), (-1,)), "no number"),
    "far": (_tensor(0, (2,), (2**31 - 1,)), "outside of its storage"),
    "too large": (_tensor(0, (2,), (1,), 2**31 - 1), "storage '0' has 48 bytes"),
    "too many dims": (_tensor(0, (1,) * 40, (1,) * 40), "do not fit"),
    "unlike": (_tensor(0, (1, 1), (1,)), "do not fit"),
    "repeated": (_tensor(0, (2**31 - 1,), (0,)), "repeat numbers"),
    "no storage": (_REBUILT + _tuple(*[b"K\x01"] * 4) + b"R", "without a storage"),
    "no arguments": (_REBUILT + b")R", "damaged"),
    "another id": (b"K\x01Q", "damaged"),
    "changed function": (_REBUILT + b"}b", "changes a function"),
    "far memo": (b"]r\xff\xff\xff\x7f", "keeps more values"),
    "in itself": (b"]q\x00h\x00a", "hold each other"),
    "doubled": (b"]q\x00" + b"]h\x00ah\x00aq\x00" * 60, "hold each other"),
    "deep": (b"]" * 10**5 + b"a" * (10**5 - 1), "hold each other"),
    "long": (b"X\xff\xff\xff\x7fx", "damaged"),
    "nothing": (b"", "damaged"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> dict[str, tuple[pathlib.Path, Any, Any]]:
    """The directory, step and state after two steps of each form of step."""
    out: dict[str, tuple[pathlib.Path, Any, Any]] = {}
    for name, form in forms.FORMS.items():
        step = autopar.parallelize(form.step, cluster="2:cpu")
        state = form.create(jax.random.key(0))
        for batch in forms.batches(2):
            state, _ = form.advance(step, state, batch)
        out[name] = tmp_path_factory.mktemp(name), step, state
        with Checkpoints(out[name][0]) as made:
            made.save(step, state, step=2, position=2 * forms.BATCH)
    return out


def held_of(directory: pathlib.Path) -> tuple[pathlib.Path, manifest.Manifest]:
    folder = folders.find_checkpoint(directory)
    return folder, manifest.read(folder)


def test_parameters_and_their_moments(trained: Any) -> None:
    found = {
        name: folders.parameter_paths(*held_of(x[0])) for name, x in trained.items()
    }
    assert [x.name for x in found["plain"]] == ["bias", "down", "up"]
    assert [x.name for x in found["nnx"]][:2] == ["down.bias", "down.kernel"]
    assert found["linen"][1] == folders.Parameter(
        "Dense_0.kernel",
        "state/params/Dense_0/kernel",
        "state/opt_state/0/mu/Dense_0/kernel",
        "state/opt_state/0/nu/Dense_0/kernel",
    )
    assert found["nnx"][1].second == "optimizer/opt_state/0/nu/down/kernel/value"


def parsed(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, parsed by the definition of the format."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "jax", "step": "2"}
    out: dict[str, np.ndarray] = {}
    for name, said in header.items():
        begin, end = (8 + size + x for x in said["data_offsets"])
        assert said["dtype"] == "F32"
        out[name] = np.frombuffer(data[begin:end], np.float32).reshape(said["shape"])
    return out


@pytest.mark.parametrize("name", sorted(forms.FORMS))
def test_safetensors(name: str, trained: Any, tmp_path: pathlib.Path) -> None:
    folder, held = held_of(trained[name][0])
    target = tmp_path / "model.safetensors"
    wrote = convert(trained[name][0], target, "safetensors")
    found = parsed(target)
    assert list(found) == wrote
    for one in folders.parameter_paths(folder, held):
        np.testing.assert_array_equal(
            found[one.name], restoring.read_array(folder, held, one.path)
        )
    assert [x.name for x in tmp_path.iterdir()] == [target.name]


def test_the_library_reads_safetensors(trained: Any, tmp_path: pathlib.Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    target = tmp_path / "model.safetensors"
    convert(trained["linen"][0], target, "safetensors")
    ours, theirs = parsed(target), library.load_file(target)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(theirs[name], array)


@pytest.mark.parametrize("name", sorted(forms.FORMS))
def test_atoms_come_back(name: str, trained: Any, tmp_path: pathlib.Path) -> None:
    """Exported and imported again, training goes on as it would have."""
    directory, step, state = trained[name]
    form = forms.FORMS[name]
    wrote = convert(directory, tmp_path / "atoms", "atoms")
    files = {"exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt"}
    for one in wrote:
        assert {x.name for x in (tmp_path / "atoms/zero" / one).iterdir()} == files
    again = convert(tmp_path / "atoms", tmp_path / "back", "checkpoint", like=directory)
    assert again == wrote
    found = Checkpoints(tmp_path / "back").restore(step, form.create, jax.random.key(5))
    assert (found.step, found.position) == (2, 2 * forms.BATCH)
    given = list(forms.batches(4))[2:]
    expected = form.losses(step, copied(state), given)
    assert form.losses(step, found.state, given) == expected


def copied(state: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)


def test_atoms_of_another_library(trained: Any, tmp_path: pathlib.Path) -> None:
    """Other names, and a later step: its weights, moments and count are taken."""
    directory = trained["plain"][0]
    folder, held = held_of(directory)
    convert(directory, tmp_path / "atoms", "atoms")
    zero = tmp_path / "atoms" / "zero"
    (zero / "layers").mkdir()
    (zero / "up").rename(zero / "layers" / "w.1")
    up = held.state["params/up"].shape
    new = np.full(up, 3.0, np.float32)
    torch_files.save(zero / "layers/w.1/fp32.pt", {"cat_dim": 0, "param": new})
    for file in zero.rglob("step.pt"):
        torch_files.save(file, 7)
    with pytest.raises(CheckpointError, match=r"no atoms of up; not used: layers/w\.1"):
        convert(tmp_path / "atoms", tmp_path / "back", "checkpoint", like=directory)
    convert(
        tmp_path / "atoms",
        tmp_path / "back",
        "checkpoint",
        like=folder,
        called={"up": "layers/w.1"},
    )
    found, read = held_of(tmp_path / "back")
    assert (read.step, read.position) == (7, 7 * forms.BATCH)
    np.testing.assert_array_equal(restoring.read_array(found, read, "params/up"), new)
    assert int(restoring.read_array(found, read, "opt_state/0/count")) == 7


class TestTorchFiles:
    def test_round_trip(self, tmp_path: pathlib.Path) -> None:
        torch_files.save(tmp_path / "x.pt", VALUE)
        self.check(torch_files.load(tmp_path / "x.pt"))

    def check(self, found: Any) -> None:
        assert found.keys() == VALUE.keys()
        for name, value in VALUE.items():
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype
                assert found[name].shape == value.shape
                assert found[name].tobytes() == value.tobytes()
            else:
                assert found[name] == value

    def test_torch_reads_and_writes_them(self, tmp_path: pathlib.Path) -> None:
        torch = pytest.importorskip("torch")
        torch_files.save(tmp_path / "x.pt", VALUE)
        read = torch.load(tmp_path / "x.pt", weights_only=True)
        assert read["bf"].dtype == torch.bfloat16
        assert torch.equal(read["f"], torch.arange(6.0).reshape(2, 3))
        torch.save(read, tmp_path / "y.pt")
        self.check(torch_files.load(tmp_path / "y.pt"))
        views = {
            "t": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T),
            "v": torch.arange(9)[2:8:2],
        }
        torch.save(views, tmp_path / "z.pt")
        found = torch_files.load(tmp_path / "z.pt")
        np.testing.assert_array_equal(found["t"], views["t"].detach().numpy())
        np.testing.assert_array_equal(found["v"], [2, 4, 6])

    def test_other_names_are_refused(self, tmp_path: pathlib.Path) -> None:
        """No function that a file names is called."""

        class Evil:
            def __reduce__(self) -> Any:
                return pathlib.Path.touch, (tmp_path / "touched",)

        with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps({"x": Evil()}))
        with pytest.raises(CheckpointError, match=r"holds '.*', which is no plain"):
            torch_files.load(tmp_path / "x.pt")
        assert not (tmp_path / "touched").exists()

    @pytest.mark.parametrize("data", [b"", b"no zip", b"PK\x03\x04"])
    def test_no_torch_file(self, tmp_path: pathlib.Path, data: bytes) -> None:
        (tmp_path / "x.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"not a file of torch\.save"):
            torch_files.load(tmp_path / "x.pt")

    def test_a_cut_file(self, tmp_path: pathlib.Path) -> None:
        torch_files.save(tmp_path / "x.pt", VALUE)
        data = (tmp_path / "x.pt").read_bytes()
        (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match="not a file"):
            torch_files.load(tmp_path / "x.pt")

    @pytest.mark.parametrize(("value", "says"), _HOSTILE.values(), ids=_HOSTILE)
    def test_hostile_files(
        self, tmp_path: pathlib.Path, value: bytes, says: str
    ) -> None:
        """Sizes are compared before memory is touched; nothing loops or grows."""
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
            file.writestr("archive/data.pkl", b"\x80\x02" + value + b".")
            file.writestr("archive/data/0", struct.pack("<12f", *range(12)))
        with pytest.raises(CheckpointError, match=says):
            torch_files.load(tmp_path / "x.pt")

    def test_compressed_files(self, tmp_path: pathlib.Path) -> None:
        with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", pickle.dumps(bytes(1 << 20), 2))
        with pytest.raises(CheckpointError, match="compressed"):
            torch_files.load(tmp_path / "x.pt")

    def test_steps_that_are_none(self, trained: Any, tmp_path: pathlib.Path) -> None:
        convert(trained["plain"][0], tmp_path / "out", "atoms")
        torch_files.save(tmp_path / "out/zero/up/step.pt", "many")
        with pytest.raises(CheckpointError, match="not a number of steps"):
            convert(
                tmp_path / "out",
                tmp_path / "in",
                "checkpoint",
                like=trained["plain"][0],
            )

    def test_what_torch_has_not(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(CheckpointError, match="no tensors of uint32"):
            torch_files.save(tmp_path / "x.pt", np.zeros(2, np.uint32))
        with pytest.raises(CheckpointError, match="hold no object"):
            torch_files.save(tmp_path / "x.pt", object())


class TestCommand:
    def test_show(self, run: Run, trained: Any) -> None:
        directory = trained["plain"][0]
        result = run("checkpoint", "show", directory)
        assert result.code == 0
        assert "params/up" in result.out
        assert "step function 'plain_step'" in result.out
        found = run("checkpoint", "show", directory, "--step", 2, "--json").json
        assert [x["step"] for x in found["checkpoints"]] == [2]
        assert found["shown"]["position"] == 2 * forms.BATCH

    def test_verify(self, run: Run, trained: Any, tmp_path: pathlib.Path) -> None:
        directory = tmp_path / "copy"
        shutil.copytree(trained["plain"][0], directory)
        whole = run("checkpoint", "verify", directory)
        assert whole.code == 0
        assert "every array is as it was saved" in whole.out
        (folder,) = directory.glob("0*")
        begun = directory / "00000009-0000000000000000"
        begun.mkdir()
        block = next((folder / "arrays" / "params.up").glob("[0-9]*"))
        data = bytearray(block.read_bytes())
        data[-20] ^= 1
        block.write_bytes(data)
        (folder / "plan.json").write_text("{}")
        result = run("checkpoint", "verify", directory)
        assert result.code == 1
        assert "'params/up'" in result.out
        assert "plan.json: not a plan" in result.out
        assert f"{begun.name}: this save did not end" in result.out
        found = run("checkpoint", "verify", directory, "--json")
        assert (found.code, len(found.json["checkpoints"][0]["problems"])) == (1, 2)

    def test_convert(self, run: Run, trained: Any, tmp_path: pathlib.Path) -> None:
        directory = trained["plain"][0]
        words = ("checkpoint", "convert", directory)
        target = tmp_path / "model.safetensors"
        result = run(*words, target, "--to", "safetensors")
        assert (result.code, result.out) == (0, f"wrote 3 parameters to {target}\n")
        again = run(*words, target, "--to", "safetensors")
        assert_fails(again, "is there already")
        assert run(*words, tmp_path / "a", "--to", "atoms", "--json").json == {
            "target": str(tmp_path / "a"),
            "format": "atoms",
            "parameters": ["bias", "down", "up"],
        }
        back = ("checkpoint", "convert", tmp_path / "a", tmp_path / "b")
        assert_fails(run(*back, "--to", "checkpoint"), "--like")
        named = tmp_path / "names.json"
        named.write_text("[]")
        options = ("--to", "checkpoint", "--like", directory)
        assert_fails(run(*back, *options, "--names", named), "JSON object of names")
        named.write_text('{"up": "up"}')
        done = run(*back, *options, "--names", named, "--position", 5)
        assert done.code == 0
        assert held_of(tmp_path / "b")[1].position == 5

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (("show", "missing"), "missing: no checkpoint"),
            (("verify", "missing", "--step", "3"), "no checkpoint of step 3"),
            (("convert", "missing", "x", "--to", "atoms"), "missing: no checkpoint"),
            (
                ("convert", "missing", "x", "--to", "gguf"),
                "expected one of safetensors",
            ),
        ],
    )
    def test_errors(self, run: Run, words: tuple[str, ...], text: str) -> None:
        assert_fails(run("checkpoint", *words), text)
