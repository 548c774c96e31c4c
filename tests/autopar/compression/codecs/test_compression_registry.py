"""Codecs as text."""

import dataclasses
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.compression.codecs import registry
from autopar.compression.codecs.codec import Codec, Reduced
from autopar.compression.codecs.quantise import Dense, Fp8, Int4, Int8, Sign
from autopar.compression.codecs.registry import (
    codec_class,
    codec_names,
    format_codec,
    parse_codec,
    register_codec,
)


@pytest.fixture
def own_names(monkeypatch):
    """Removes the codecs that a test has registered."""
    codec_names()
    monkeypatch.setattr(registry, "_CODECS", dict(registry._CODECS))


class Plain(Codec):
    """A codec without fields, for tests to register."""

    name: ClassVar[str] = "plain"

    def reduce(self, chunks, state, context):
        """Sends nothing."""
        return Reduced(chunks, chunks, state)
        yield


def test_lists_the_codecs_of_all_modules():
    names = codec_names()
    assert {"dense", "bf16", "int8", "int4", "sign", "fp8"} < set(names)
    assert {"topk", "powersgd"} < set(names)
    assert list(names) == sorted(names)


def test_every_codec_by_its_name_alone_is_the_default():
    for name in codec_names():
        codec = parse_codec(name)
        assert codec == codec_class(name)()
        assert format_codec(codec) == name


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("dense", Dense()),
        ("int8:block=64", Int8(block=64)),
        ("int4:block=64,hadamard=false", Int4(block=64, hadamard=False)),
        (
            "int4:rounding=stochastic,server_feedback=false",
            Int4(rounding="stochastic", server_feedback=False),
        ),
        ("sign:block=8", Sign(block=8)),
        ("fp8:format=e5m2", Fp8(format="e5m2")),
    ],
)
def test_text_and_codec(text, codec):
    assert parse_codec(text) == codec
    assert format_codec(codec) == text


def test_default_values_are_not_written():
    assert format_codec(parse_codec("int4:hadamard=true,block=256")) == "int4"


def test_spaces_and_case_of_booleans_do_not_matter():
    assert parse_codec(" int4 : block = 32 , hadamard = False ") == Int4(
        block=32, hadamard=False
    )


@given(
    block=st.integers(1, 2**20).map(lambda k: 2 * k),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    server_feedback=st.booleans(),
)
def test_round_trip(block, rounding, server_feedback):
    codec = Int4(
        block=block, hadamard=False, rounding=rounding, server_feedback=server_feedback
    )
    assert parse_codec(format_codec(codec)) == codec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", r"unknown codec 'int9'; known: .*int4, int8"),
        ("", r"unknown codec ''; known: "),
        ("int8:", r"'' is not field=value; its fields.*block=256"),
        ("int8:block", r"'block' is not field=value"),
        ("int8:=4", r"'=4' is not field=value"),
        ("int8:width=4", r"int8 has no field 'width'; its fields.*rounding=nearest"),
        ("dense:block=4", r"dense has no field 'block'; dense has no fields"),
        ("int8:block=4,block=8", r"field 'block' is given twice"),
        ("int8:block=two", r"block must be of type int, got 'two'"),
        ("int8:block=", r"block must be of type int, got ''"),
        ("int4:hadamard=maybe", r"hadamard must be true or false, got 'maybe'"),
        ("fp8:format=e3m4", r"format must be one of e4m3, e5m2, got 'e3m4'"),
        ("int8:block=0", r"'int8:block=0': .*positive multiple of 1, got 0"),
        ("int4:block=96", r"power of two, got 96; use block=64 or hadamard=False"),
        ("sign:block=12", r"multiple of 8, got 12"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_codec(text)


@pytest.mark.usefixtures("own_names")
def test_register_own_codec():
    @register_codec
    @dataclasses.dataclass(frozen=True)
    class Own(Plain):
        name: ClassVar[str] = "own"
        ratio: float = 0.01
        count: int | None = None
        label: str = "a"
        kind: Literal["x", "y"] = "x"
        flag: bool = False

    assert "own" in codec_names()
    codec = Own(ratio=1e-7, count=3, label="b", kind="y", flag=True)
    text = format_codec(codec)
    assert text == "own:ratio=1e-07,count=3,label=b,kind=y,flag=true"
    assert parse_codec(text) == codec
    assert parse_codec("own:count=none") == Own()
    with pytest.raises(ValueError, match="kind must be one of x, y"):
        parse_codec("own:kind=z")


@pytest.mark.usefixtures("own_names")
def test_value_that_text_cannot_hold_is_refused():
    @register_codec
    @dataclasses.dataclass(frozen=True)
    class Own(Plain):
        name: ClassVar[str] = "own"
        label: str = "a"
        other: str = "b"

    with pytest.raises(ValueError, match="field"):
        format_codec(Own(label="x,y"))
    with pytest.raises(ValueError, match="cannot be written"):
        format_codec(Own(label="x,other=c"))


@pytest.mark.usefixtures("own_names")
def test_register_refuses_what_it_cannot_write():
    with pytest.raises(TypeError, match="must be a dataclass"):
        register_codec(Plain)
    with pytest.raises(TypeError, match="lower case, got 'Own'"):

        @register_codec
        @dataclasses.dataclass(frozen=True)
        class Capital(Plain):
            name: ClassVar[str] = "Own"

    with pytest.raises(TypeError, match=r"NoDefault\.block needs a default"):

        @register_codec
        @dataclasses.dataclass(frozen=True)
        class NoDefault(Plain):
            name: ClassVar[str] = "own"
            block: int

    with pytest.raises(TypeError, match=r"WrongType\.blocks is annotated"):

        @register_codec
        @dataclasses.dataclass(frozen=True)
        class WrongType(Plain):
            name: ClassVar[str] = "own"
            blocks: tuple[int, ...] = ()

    with pytest.raises(ValueError, match=r"'int8' is taken by .*quantise\.Int8"):

        @register_codec
        @dataclasses.dataclass(frozen=True)
        class Again(Plain):
            name: ClassVar[str] = "int8"

    assert "own" not in codec_names()
    assert codec_class("int8") is Int8


def test_registering_the_same_class_again_is_harmless():
    assert register_codec(Int8) is Int8
    assert codec_class("int8") is Int8


def test_format_refuses_a_codec_under_a_foreign_name():
    @dataclasses.dataclass(frozen=True)
    class Other(Plain):
        name: ClassVar[str] = "int8"

    with pytest.raises(ValueError, match=r"means Int8, not .*Other"):
        format_codec(Other())
