"""The processes that worked on a run: when each began, how it ended, and the time they worked together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from taskmill.records import moment
from taskmill.store.run import RunDirectory

logger = logging.getLogger(__name__)


class Session(Struct, frozen=True):
    """One line of `sessions.jsonl`: the start of a process, or its end.

    A start tells who works, when the run was last written to before, and how much is planned, where that is known; an
    end tells the outcome, and how many calls the endpoint was given at once, where the model keeps count.
    """

    event: Literal["start", "end"]
    at: datetime
    pid: int | None = None
    host: str = ""
    last_write: datetime | None = None
    outcome: str = ""
    planned: int | None = None
    endpoint: dict[str, Any] | None = None

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


def endpoint_by_session(sessions: Iterable[Session]) -> list[dict[str, Any]]:
    """What the sessions that came to an end recorded of their endpoint, in order."""
    found: list[dict[str, Any]] = []
    started = ""
    for session in sessions:
        if session.event == "start":
            started = session.moment
        elif session.endpoint:
            found.append({"started": started, "outcome": session.outcome, **session.endpoint})
    return found


def activity(directory: RunDirectory, sessions: Sequence[Session]) -> str:
    """What a run is doing now, or how its last session ended, in words."""
    holder = directory.holder()
    if holder is not None:
        return f"running: pid {holder.pid} on {holder.host} since {holder.since}"
    if not sessions:
        return "not started"
    last = sessions[-1]
    if last.event == "start":
        return f"its last session was killed (pid {last.pid} on {last.host}, started {last.moment})"
    return f"{last.outcome} {last.moment}"


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


def last_write(path: Path) -> str | None:
    """When a run's folder was last written to, before this process touches it."""
    if not path.is_dir():
        return None
    newest = max((entry.stat().st_mtime for entry in path.iterdir() if entry.is_file()), default=None)
    return None if newest is None else datetime.fromtimestamp(newest, UTC).isoformat(timespec="milliseconds")


def now() -> str:
    """This moment in UTC, as records write it."""
    return moment()
