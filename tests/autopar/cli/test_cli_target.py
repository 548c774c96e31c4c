import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from autopar.cli.target import convert, find, guess, load, parse_words
from autopar.errors import TargetError, TraceError

Write = Callable[[str, str], pathlib.Path]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Iterator[Write]:
    """Writes a module; unloads the modules that it imports after the test."""
    path, modules = list(sys.path), set(sys.modules)

    def write_file(name: str, text: str) -> pathlib.Path:
        file = tmp_path / name
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return file

    yield write_file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def typed(
    layers: int = 1,
    rate: float = 0.1,
    scan: bool = False,
    name: str = "adam",
    depth: int | None = None,
    kind: Literal["a", "b"] = "a",
    free=None,
) -> dict[str, Any]:
    return locals()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["layers=12"], {"layers": 12}),
        (["rate=1e-3"], {"rate": 1e-3}),
        (["rate=2"], {"rate": 2.0}),
        (["scan=true"], {"scan": True}),
        (["scan=False"], {"scan": False}),
        (["name=12"], {"name": "12"}),
        (["name=a=b"], {"name": "a=b"}),
        (["name="], {"name": ""}),
        (["depth=none"], {"depth": None}),
        (["depth=3"], {"depth": 3}),
        (["kind=b"], {"kind": "b"}),
        (["free=3"], {"free": 3}),
        (["free=x"], {"free": "x"}),
    ],
)
def test_words_become_what_the_annotations_say(
    words: list[str], expected: dict[str, Any]
) -> None:
    found = convert("t", typed, parse_words(words))
    assert found == expected
    assert [type(v) for v in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("layers=two", "layers=two is not a whole number"),
        ("layers=1.5", "layers=1.5 is not a whole number"),
        ("rate=fast", "rate=fast is not a number"),
        ("scan=maybe", "scan=maybe is not true or false"),
        ("depth=deep", "depth=deep is none of int, NoneType"),
        ("kind=c", "kind=c is not one of a, b"),
        ("layer=2", "no option 'layer'; it has layers=1, rate=0.1, scan=False"),
    ],
)
def test_wrong_words_are_explained(word: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        convert("t", typed, parse_words([word]))


@pytest.mark.parametrize("word", ["layers", "=3", "a b=3", "--layers=3"])
def test_what_is_not_key_value_is_an_error(word: str) -> None:
    with pytest.raises(TargetError, match=r"is not key=value"):
        parse_words([word])


def test_a_key_is_given_once() -> None:
    with pytest.raises(TargetError, match="'a' is given twice: '1' and '2'"):
        parse_words(["a=1", "a=2"])


def test_an_open_function_takes_every_key() -> None:
    def workload(layers: int = 1, **rest: Any) -> None: ...

    words = parse_words(["layers=2", "width=3", "name=x"])
    assert convert("t", workload, words) == {"layers": 2, "width": 3, "name": "x"}


def test_missing_arguments_are_named() -> None:
    def workload(layers: int, width: int) -> None: ...

    with pytest.raises(TargetError, match=r"t needs layers=\.\.\., width=\.\.\."):
        convert("t", workload, {})


def test_annotations_may_be_text() -> None:
    def workload(layers: "int" = 1, unknown: "Nowhere" = 2) -> None: ...  # noqa: F821

    assert convert("t", workload, {"layers": "3", "unknown": "4"}) == {
        "layers": 3,
        "unknown": 4,
    }


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("1.0", 1.0), ("TRUE", True), ("no", "no"), ("", "")]
)
def test_guesses(text: str, value: Any) -> None:
    found = guess(text)
    assert found == value
    assert type(found) is type(value)


WORKLOAD = """
    import jax

    import helper

    def step(params, batch):
        return params, batch.sum()

    def workload(size: int = helper.SIZE):
        x = jax.ShapeDtypeStruct((size,), "float32")
        return step, x, x

    def tupled():
        step, state, batch = workload()
        return step, (state, state), batch

    def broken():
        return 1 / 0

    def wrong():
        return 1, 2

    number = 3
"""


def test_a_file_imports_what_lies_beside_it(write: Write) -> None:
    write("helper.py", "SIZE = 8")
    file = write("train_target.py", WORKLOAD)
    found = load(f"{file}:workload", {"size": "4"})
    assert found.args[0].shape == (4,)
    assert len(found.args) == 2
    assert (found.target, found.options) == (f"{file}:workload", {"size": "4"})


def test_a_tuple_holds_the_leading_arguments(write: Write) -> None:
    write("helper.py", "SIZE = 8")
    file = write("train_target.py", WORKLOAD)
    assert len(load(f"{file}:tupled", {}).args) == 3


def test_modules_are_targets_too() -> None:
    assert find("autopar.cli.target:guess") is guess


def test_a_file_does_not_replace_a_module_of_its_name(write: Write) -> None:
    import json

    file = write("json.py", "def workload(): pass")
    assert find(f"{file}:workload").__module__ == "json"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "raised ZeroDivisionError: division by zero"),
        ("wrong", r"must return \(train_step, state, batch\), .* a tuple of 2"),
        ("number", "'number' is a value of type int, not a function"),
        ("nothing", "has no function 'nothing'; it has broken, step, tupled, workload"),
    ],
)
def test_functions_that_are_no_targets(
    write: Write, function: str, message: str
) -> None:
    write("helper.py", "SIZE = 8")
    file = write("train_target.py", WORKLOAD)
    with pytest.raises(TargetError, match=message):
        load(f"{file}:{function}", {})


def test_errors_while_importing_are_passed_on(write: Write) -> None:
    file = write("broken_target.py", "import surely_not_installed")
    with pytest.raises(TargetError, match="No module named 'surely_not_installed'"):
        find(f"{file}:workload")
    assert "broken_target" not in sys.modules


def test_trace_errors_are_passed_on(write: Write) -> None:
    file = write(
        "trace_target.py",
        """
        from autopar.errors import TraceError

        def workload():
            raise TraceError("no")
        """,
    )
    with pytest.raises(TraceError, match="no"):
        load(f"{file}:workload", {})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train", "'train' is no target: write file.py:function"),
        (":f", "is no target"),
        ("train.py:", "is no target"),
        ("nowhere.py:f", "nowhere.py: there is no such file"),
        ("no.such.module:f", "No module named 'no'"),
        ("a/b:f", r"For a file, write file\.py:function"),
    ],
)
def test_targets_that_cannot_be_found(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find(target)


def test_a_target_may_say_how_many_devices_there_are(write: Write) -> None:
    """Before ``--cluster local`` counts them; in a process that has not begun JAX."""
    text = """
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_num_cpu_devices", 3)

        def workload():
            return lambda w, x: w - x.sum(0), jnp.ones(4), jnp.ones((6, 4))
    """
    target = f"{write('devices.py', text)}:workload"
    words = [sys.executable, "-m", "autopar", "plan", target, "--cluster", "local"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.stdout.startswith("plan     3:cpu"), found.stderr
