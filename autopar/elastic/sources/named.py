"""Sources by their text: ``file:cluster.json``, ``http:8765``, ``signal``."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.elastic.sources.file import File
from autopar.elastic.sources.http import Http
from autopar.elastic.sources.signals import GRACE_S, Signals
from autopar.elastic.sources.source import Source
from autopar.errors import PlanError

_KNOWN = "file:PATH, http:PORT, https:PORT, http:HOST:PORT, signal, signal:SECONDS"


def sources_of(given: Sequence[str | Source]) -> tuple[Source, ...]:
    """The sources that are asked for.

    Args:
      given: texts, or sources themselves.

    Raises:
      PlanError: a text names no source.
    """
    if isinstance(given, str):
        raise PlanError(f"events={given!r}: give a list, such as events=[{given!r}].")
    return tuple(source_of(x) if isinstance(x, str) else x for x in given)


def source_of(text: str) -> Source:
    """The source that a text names.

    Raises:
      PlanError: it names none.

    >>> source_of("file:cluster.json").path.name
    'cluster.json'
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return File(rest)
    try:
        if kind in ("http", "https"):
            host, _, port = rest.rpartition(":")
            return Http(int(port), host or "127.0.0.1", tls=kind == "https")
        if kind == "signal":
            return Signals(float(rest) if rest else GRACE_S)
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
    raise PlanError(f"events: {text!r} names no source; known are {_KNOWN}.")
