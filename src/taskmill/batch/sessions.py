"""The processes that worked on a run: when each began, how it ended, and the time they worked together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec
from msgspec import Struct

from taskmill.store.run import RunDirectory

logger = logging.getLogger(__name__)


class Session(Struct, frozen=True):
    """One line of `sessions.jsonl`: the start of a process, or its end.

    A start tells who works, and when the run was last written to before; an end tells the outcome.
    """

    event: Literal["start", "end"]
    at: datetime
    pid: int | None = None
    host: str = ""
    last_write: datetime | None = None
    outcome: str = ""

    @property
    def moment(self) -> str:
        """When it was, as records write it."""
        return self.at.isoformat(timespec="milliseconds")


_decode = msgspec.json.Decoder(Session).decode


def read_sessions(directory: RunDirectory) -> list[Session]:
    """What is recorded of the processes, in order. Damaged lines are passed over with a warning that counts them."""
    sessions: list[Session] = []
    damaged = 0
    for _, line in directory.read_sessions():
        try:
            sessions.append(_decode(line))
        except msgspec.DecodeError:
            damaged += 1
    if damaged:
        logger.warning("%d lines of sessions.jsonl can't be read and are passed over", damaged)
    return sessions


def session_seconds(sessions: Iterable[Session], last_write: datetime | None = None) -> float:
    """Seconds the run was worked on, all sessions together.

    A session that was killed has no end of its own; the next one's start says when its last byte was written,
    and of the last one `last_write` does.
    """
    total = 0.0
    started: datetime | None = None
    for session in sessions:
        if session.event == "start":
            if started is not None and session.last_write is not None:
                total += max(0.0, (session.last_write - started).total_seconds())
            started = session.at
        elif started is not None:
            total += max(0.0, (session.at - started).total_seconds())
            started = None
    if started is not None and last_write is not None:
        total += max(0.0, (last_write - started).total_seconds())
    return total
