"""Reads events from the text of a message."""

from __future__ import annotations

import json
from typing import Any, cast

from autopar.elastic.events import Event
from autopar.errors import EventError

# Largest message, in bytes, and most events in one.
LARGEST_BYTES, MOST_EVENTS = 1 << 20, 100


def read_events(data: bytes, source: str) -> list[Event]:
    """The events of a message: one, a list of them, or the text of a cluster.

    Args:
      data: JSON in UTF-8, or a cluster's text, such as ``6:cpu``.
      source: who says so.

    Raises:
      EventError: it is none of these.

    >>> [event.kind for event in read_events(b'["4:cpu", {"cluster": "2:cpu"}]', "")]
    ['cluster', 'cluster']
    """
    if len(data) > LARGEST_BYTES:
        raise EventError(f"a message has at most {LARGEST_BYTES} bytes: {len(data)}.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise EventError(f"a message is text in UTF-8: {error}.") from error
    found = _parse(text)
    items = cast(list[Any], found) if isinstance(found, list) else [found]
    if len(items) > MOST_EVENTS:
        raise EventError(f"a message has at most {MOST_EVENTS} events: {len(items)}.")
    return [Event.from_data(item, source) for item in items]


def _parse(text: str) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse)
        # Half of a pair of surrogates can be escaped, and is no text.
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError as error:
        raise EventError(f"a text of the message is not UTF-8: {error}.") from error
    except RecursionError as error:
        raise EventError("the JSON is nested too deeply.") from error
    except ValueError as error:
        bare = text.strip()
        if bare and bare[0] not in '{["' and "\n" not in bare:
            return bare  # a cluster's text, without quotes
        raise EventError(f"not JSON: {str(error).rstrip('.')}.") from error


def _refuse(name: str) -> Any:
    raise EventError(f"{name} is no number of JSON.")
