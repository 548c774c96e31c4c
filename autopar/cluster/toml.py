"""Reads and writes clusters as TOML files, with the data of `autopar.cluster.data`."""

import pathlib
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from autopar.cluster import data
from autopar.cluster.specs import ClusterError

_HELP = "docs/cost-model.md has a complete example."
# In these tables the keys are names of dtypes or codecs, which TOML requires to be
# quoted.
_QUOTED = ("peak_flops_per_s.", "codec_s_per_element.")

T = TypeVar("T")


def read(path: pathlib.Path, convert: Callable[[data.Data], T]) -> T:
    """Reads a TOML file; ``convert`` makes the result from its tables.

    Raises:
      ClusterError: the file cannot be read, or its content is wrong.
    """
    try:
        return convert(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ClusterError(
            f"cannot read the cluster file {str(path)!r}: {error.strerror}. {_HELP}"
        ) from error
    except RecursionError as error:
        raise ClusterError(f"{path}: is nested too deeply. {_HELP}") from error
    except ValueError as error:  # of TOML or msgspec, or a ClusterError
        raise ClusterError(f"{path}: {error} {_HELP}") from error


def _value(value: object) -> str:
    if isinstance(value, str | list):
        # A JSON string is also a valid TOML basic string, except for one control
        # character, which JSON does not escape. Lists hold only strings or integers.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)


def _tables(name: str, value: Any) -> list[str]:
    """The lines for one table, or for an array of tables."""
    if isinstance(value, dict):
        return ["", f"[{name}]", *_lines(f"{name}.", value)]
    lines: list[str] = []
    for item in value:
        lines += ["", f"[[{name}]]", *_lines(f"{name}.", item)]
    return lines


def _lines(prefix: str, values: data.Data) -> list[str]:
    """The lines for the values of a table: first plain values, then nested tables."""
    plain: list[str] = []
    tables: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, dict) or nested:
            tables += _tables(prefix + key, value)
        else:
            shown = _value(key) if prefix.endswith(_QUOTED) else key
            plain.append(f"{shown} = {_value(value)}")
    return plain + tables


def write(values: data.Data) -> str:
    """The data as the text of a TOML file."""
    return "\n".join(_lines("", values)).removeprefix("\n") + "\n"
