"""Log lines for programs: one JSON object a line, on standard error."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections import deque
from datetime import UTC, datetime
from typing import Any, TextIO

from taskmill.store.jsonl import encode_row

HELD = 10_000
"""Lines that wait to be written. When nobody reads them, further ones are dropped and counted: no rollout waits."""


def line(event: str, **fields: Any) -> str:
    """One log line, its end included."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return encode_row({"at": now, "event": event, **fields}).decode()


GATHERING = 0.05
"""Seconds for which lines are gathered, to be written together."""


class LineWriter:
    """Writes lines in a thread of its own, so that a pipe that is full holds up nobody."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._some = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write, name="log lines", daemon=True)
        self._thread.start()

    def __call__(self, event: str, **fields: Any) -> None:
        """Say that something happened."""
        if len(self._lines) >= HELD:
            self._dropped += 1
            return
        if self._dropped:
            self._lines.append(line("log_lines_dropped", count=self._dropped))
            self._dropped = 0
        self._lines.append(line(event, **fields))
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """Write what waits, for a second at most."""
        self._closed.set()
        self._some.set()
        self._thread.join(1.0)

    def _write(self) -> None:
        while not self._closed.is_set() or self._lines:
            self._some.wait()
            self._closed.wait(GATHERING)
            self._some.clear()
            try:
                while self._lines:
                    self._stream.write(self._lines.popleft())
                self._stream.flush()
            except (OSError, ValueError):
                return


class LogLines(logging.Handler):
    """What libraries and tasks log in a worker, as lines of the same kind."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        fields: dict[str, Any] = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": os.getpid(),
        }
        if record.exc_info is not None and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        try:
            sys.stderr.write(line("log", **fields))
            sys.stderr.flush()
        except (OSError, ValueError):
            pass
