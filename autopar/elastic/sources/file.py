"""Takes events from a file that another program writes."""

from __future__ import annotations

import collections
import functools
import os
from pathlib import Path

from autopar.elastic.events import Event
from autopar.elastic.sources.source import LARGEST_BYTES, Sink, Watched, read_events
from autopar.errors import EventError

# Values that change with a file: its time, size and inode number, or the error if it
# cannot be read.
_Stamp = tuple[int, int, int] | str


class File:
    """Watches a file; each new content of the file counts as a message.

    At the start, the file's content counts only if it is a whole cluster; other events
    in it belong to the past. To change the file, write a new file and rename it over
    the old file. If the file is read while it is half written, its content is recorded
    as a message that is not an event.
    """

    def __init__(self, path: str | os.PathLike[str], every_s: float = 0.25) -> None:
        """Does not watch the file yet.

        Args:
          path: path of the file. The file need not exist yet.
          every_s: seconds between two checks of the file.
        """
        self.path = Path(path)
        self._every_s = every_s
        self._watched: Watched | None = None
        self._stamp: _Stamp | None = None
        self._waiting: collections.deque[Event] = collections.deque()

    def start(self, sink: Sink) -> None:
        """See `Source`."""
        self._look(sink)
        while self._waiting:
            event = self._waiting.popleft()
            if event.kind == "cluster":
                sink.put(event)

        def watch(watched: Watched) -> None:
            while True:
                while self._waiting:
                    event = self._waiting.popleft()
                    watched.call(functools.partial(sink.put, event))
                if watched.ending.wait(self._every_s):
                    return
                self._look(sink)

        report = functools.partial(sink.wrong, f"file:{self.path}")
        self._watched = Watched("autopar-file", watch, report)

    def stop(self) -> None:
        """See `Source`."""
        if self._watched is not None:
            self._watched.end()
            self._watched = None

    def _look(self, sink: Sink) -> None:
        """Passes on the events in the file if its content is new."""
        name, stamp = f"file:{self.path}", self._stamp
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                if isinstance(stamp, str):
                    raise EventError(stamp)
                with self.path.open("rb") as file:
                    self._waiting += read_events(file.read(LARGEST_BYTES + 1), name)
        except FileNotFoundError:
            return
        except (OSError, EventError) as error:
            sink.wrong(name, str(error))
        except Exception as error:  # later contents are still read
            sink.wrong(name, f"a bug in autopar: {type(error).__name__}: {error}"[:500])
        self._stamp = stamp

    def _stamp_now(self) -> _Stamp:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            return str(error)  # reported only once
        return found.st_mtime_ns, found.st_size, found.st_ino
