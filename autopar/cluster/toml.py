"""Clusters as TOML files: the data of `autopar.cluster.data`, as text."""

import pathlib
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from autopar.cluster import data
from autopar.cluster.specs import ClusterError

_HELP = "docs/cost-model.md has a complete example."
# The keys of these tables are names of dtypes and codecs, which are quoted like
# strings.
_QUOTED = ("peak_flops_per_s.", "codec_s_per_element.")

T = TypeVar("T")


def read(path: pathlib.Path, convert: Callable[[data.Data], T]) -> T:
    """Reads a file and converts its tables with `convert`.

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
    except ValueError as error:  # of TOML, of msgspec, and our own ClusterError
        raise ClusterError(f"{path}: {error} {_HELP}") from error


def _value(value: object) -> str:
    if isinstance(value, str | list):
        # A JSON string is also a TOML basic string, except for one control character
        # that JSON does not escape. Lists hold strings or integers.
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)


def _tables(name: str, value: Any) -> list[str]:
    """The lines of one table, or of an array of tables."""
    if isinstance(value, dict):
        return ["", f"[{name}]", *_lines(f"{name}.", value)]
    lines: list[str] = []
    for item in value:
        lines += ["", f"[[{name}]]", *_lines(f"{name}.", item)]
    return lines


def _lines(prefix: str, values: data.Data) -> list[str]:
    """The lines of a table's values: plain values first, then nested tables."""
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
    """The text of a file with these data."""
    return "\n".join(_lines("", values)).removeprefix("\n") + "\n"
