"""Events from a file that somebody else writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from autopar.elastic.sources.messages import LARGEST_BYTES, read_events
from autopar.elastic.sources.source import Sink
from autopar.errors import EventError

# What says that a file has changed: time, size and number of the inode.
_Stamp = tuple[int, int, int]


class File:
    """Watches a file; each new content is a message.

    What the file holds at the start counts where it is a whole cluster; other events
    are of the past then. Write a new file and rename it over the old one: a file that
    is read half written is a message that is no event, and is noted.
    """

    def __init__(self, path: str | os.PathLike[str], every_s: float = 0.25) -> None:
        """Watches nothing yet.

        Args:
          path: of the file; it need not be there yet.
          every_s: seconds between two looks.
        """
        self.path = Path(path)
        self._every_s = every_s
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._stamp: _Stamp | None = None

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        self._look(sink, first=True)
        self._thread = threading.Thread(
            target=self._watch, args=(sink,), name="autopar-file", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """See `Source`."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, sink: Sink) -> None:
        while not self._end.wait(self._every_s):
            self._look(sink)

    def _look(self, sink: Sink, *, first: bool = False) -> None:
        name = f"file:{self.path}"
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            with self.path.open("rb") as file:
                events = read_events(file.read(LARGEST_BYTES + 1), name)
        except FileNotFoundError:
            return
        except (OSError, EventError) as error:
            sink.wrong(name, str(error))
            return
        except Exception as error:  # the next content is looked at as ever
            sink.wrong(name, f"a bug in autopar: {type(error).__name__}: {error}"[:500])
            return
        for event in events:
            if event.kind == "cluster" or not first:
                sink.put(event)
