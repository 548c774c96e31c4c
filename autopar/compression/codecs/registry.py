"""Converts codecs to texts such as ``int4:block=64,hadamard=false``, and back.

The text of a codec is its name, followed by a colon and those fields that do not have
their default values. The decorator `register_codec` makes the name of a codec class
known. Importing `autopar.compression.codecs` registers autopar's own codecs. The module
of a user's own codec must be imported before the name of that codec is used, or be
named as an entry point of the group `autopar.plugins.CODECS`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Literal, TypeVar

from autopar.compression.codecs.codec import Codec
from autopar.plugins import CODECS, load_plugin
from autopar_errors import InputError, InputTypeError, check_type

_CODECS: dict[str, type[Codec]] = {}

_SCALARS = (bool, int, float, str)
_UNIONS = (types.UnionType, typing.Union)
_WORDS = {"true": True, "false": False}

C = TypeVar("C", bound=Codec)


def register_codec(cls: type[C]) -> type[C]:
    """A class decorator that makes a codec known under its ``name``.

    Write `register_codec` above the dataclass decorator. All fields must have defaults.
    The types of the fields must be ``int``, ``float``, ``bool``, ``str``, a ``Literal``
    of strings, or one of these types ``| None``.

    Raises:
      InputTypeError: the class or one of its fields cannot be written as text.
      InputError: another codec has this name.
    """
    check_type("register_codec", cls, type, "a class")
    name = getattr(cls, "name", "")
    if not (name and name.isidentifier() and name.islower()):
        raise InputTypeError(
            f"{cls.__qualname__}: name must be a word in lower case, got {name!r}."
        )
    if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        raise InputTypeError(
            f"{cls.__qualname__} must be a dataclass: write @register_codec above "
            "@dataclasses.dataclass(frozen=True)."
        )
    _check_fields(cls)
    old = _CODECS.get(name)
    if old is not None and _identity(old) != _identity(cls):
        raise InputError(
            f"the codec name {name!r} is taken by {old.__module__}.{old.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another."
        )
    _CODECS[name] = cls
    parse_codec.cache_clear()
    return cls


def codec_names() -> tuple[str, ...]:
    """The names of all known codecs, sorted."""
    return tuple(sorted(_CODECS))


def offered_codecs() -> tuple[str, ...]:
    """The codecs from which ``compression="auto"`` chooses (`Codec.choices`),
    sorted.
    """
    every = (codec for cls in _CODECS.values() for codec in cls.choices())
    return tuple(sorted(map(format_codec, every)))


def codec_class(name: str) -> type[Codec]:
    """The codec class with this name.

    Raises:
      InputError: no codec has that name.
    """
    if name not in _CODECS:
        load_plugin(CODECS, name)  # importing its module registers it
    if name not in _CODECS:
        known = ", ".join(codec_names())
        raise InputError(
            f"unknown codec {name!r}; known: {known}. A codec of your own is known "
            "once the module that registers it is imported, or is an entry point of "
            f"the group {CODECS}; on the command line, the target's file may import it."
        )
    return _CODECS[name]


@functools.lru_cache(maxsize=1 << 12)
def parse_codec(text: str) -> Codec:
    """Parses a text such as ``int4:block=64,hadamard=false`` to a codec.

    Raises:
      InputError: the name, a field or a value is unknown.
    """
    check_type("parse_codec", text, str, "a text such as 'int8'")
    name, colon, rest = text.strip().partition(":")
    cls = codec_class(name.strip())
    kinds = _field_kinds(cls)
    values: dict[str, Any] = {}
    parts = [part.strip() for part in rest.split(",")] if colon else []
    for part in parts:
        field, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not field:
            raise InputError(
                f"codec {text!r}: {part!r} is not field=value; {_usage(cls)}"
            )
        if field not in kinds:
            raise InputError(
                f"codec {text!r}: {name} has no field {field!r}; {_usage(cls)}"
            )
        if field in values:
            raise InputError(f"codec {text!r}: field {field!r} is given twice.")
        try:
            values[field] = _parse(value, kinds[field])
        except ValueError as error:
            raise InputError(f"codec {text!r}: {field} {error}.") from None
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"codec {text!r}: {error}") from error


def format_codec(codec: Codec) -> str:
    """The text that `parse_codec` reads as this codec.

    Raises:
      InputError: the codec is not registered, or a value cannot be written.
    """
    cls = codec_class(codec.name)
    if type(codec) is not cls:
        raise InputError(
            f"the codec name {codec.name!r} means {cls.__qualname__}, not "
            f"{type(codec).__qualname__}; register it under a name of its own."
        )
    parts: list[str] = []
    for field in dataclasses.fields(codec):
        value = getattr(codec, field.name)
        if field.init and value != _default(field):
            parts.append(f"{field.name}={_format(value)}")
    text = codec.name + (":" + ",".join(parts) if parts else "")
    if parse_codec(text) != codec:
        raise InputError(f"{codec!r} cannot be written as text: got {text!r}.")
    return text


def _check_fields(cls: type[Codec]) -> None:
    """Raises `InputTypeError` for a field without a default, or whose type cannot be
    parsed from text.
    """
    kinds = _field_kinds(cls)
    for field in dataclasses.fields(cls):
        where = f"{cls.__qualname__}.{field.name}"
        if not field.init:
            continue
        if (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise InputTypeError(f"{where} needs a default.")
        if not _readable(kinds[field.name]):
            raise InputTypeError(
                f"{where} is annotated {field.type}; it must be int, float, bool, str, "
                "a Literal of strings, or one of these | None."
            )


def _readable(kind: Any) -> bool:
    """Whether `_parse` supports a type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        rest = [part for part in parts if part is not types.NoneType]
        return len(rest) == 1 and len(parts) == 2 and _readable(rest[0])
    if origin is Literal:
        return all(isinstance(part, str) for part in parts)
    return kind in _SCALARS


def _identity(cls: type[Codec]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _field_kinds(cls: type[Codec]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _usage(cls: type[Codec]) -> str:
    fields = [
        f"{f.name}={_format(_default(f))}" for f in dataclasses.fields(cls) if f.init
    ]
    if not fields:
        return f"{cls.name} has no fields."
    return f"its fields and their defaults: {', '.join(fields)}."


def _format(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _parse(text: str, kind: Any) -> Any:
    """Parses the value of a field; the error message says which type is expected."""
    origin = typing.get_origin(kind)
    if origin in _UNIONS:
        kinds = typing.get_args(kind)
        if types.NoneType in kinds and text.lower() == "none":
            return None
        return _parse(text, next(k for k in kinds if k is not types.NoneType))
    if origin is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise InputError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text
    if kind is bool:
        if text.lower() not in _WORDS:
            raise InputError(f"must be true or false, got {text!r}")
        return _WORDS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"must be of type {kind.__name__}, got {text!r}") from None
