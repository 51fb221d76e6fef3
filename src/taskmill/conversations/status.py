"""How a stored run of conversations stands, worked out from its files: needs no lock, changes nothing."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.conversations.execution import summarize
from taskmill.conversations.health import health_lines
from taskmill.conversations.record import decode_head
from taskmill.conversations.report import KIND
from taskmill.engine.sessions import activity, last_write, read_sessions, session_seconds
from taskmill.errors import StoreError
from taskmill.store.run import RunDirectory


class ConversationsStatus(Struct, frozen=True):
    """How a run stands. `seconds` is time worked, in all `sessions`; `summary` is what `summary.json` would say now.

    `in_flight` are conversations that have finished calls in the journal and no recorded end. `planned` is `None` where
    only the end of the data will tell. `done` means that all that was asked for is.
    """

    path: str
    lineups: list[str]
    activity: str
    planned: int | None
    summary: dict[str, Any]
    seconds: float
    sessions: int
    in_flight: int
    done: bool


def is_run_of_conversations(path: Path) -> bool:
    """Whether `path` is the directory of such a run."""
    try:
        stored = RunDirectory(path).read_config()
    except StoreError:
        return False
    return stored is not None and stored.get("kind") == KIND


def status_of(path: Path) -> ConversationsStatus:
    """Read how the run stands."""
    directory = RunDirectory(path)
    sessions = read_sessions(directory)
    starts = [session for session in sessions if session.event == "start"]
    planned = starts[-1].planned if starts else None
    summary = summarize(directory, sessions[-1].outcome if sessions else "", planned)
    stored = directory.read_config() or {}
    outcomes = summary["outcomes"]
    held = outcomes.get("completed", 0)
    total = sum(outcomes.values())
    ended = bool(sessions) and sessions[-1].event == "end" and sessions[-1].outcome == "finished"
    written = last_write(path)
    return ConversationsStatus(
        path=str(path),
        lineups=sorted(stored.get("recipes", {})),
        activity=activity(directory, sessions),
        planned=planned,
        summary=summary,
        seconds=session_seconds(sessions, None if written is None else datetime.fromisoformat(written)),
        sessions=len(starts),
        in_flight=len(_in_flight(directory)),
        done=ended and held == total and (planned is None or held >= planned),
    )


def _in_flight(directory: RunDirectory) -> set[str]:
    """The jobs that the journal still has calls of, and that are not done."""
    found = {rollout.partition("#")[0] for rollout, _ in directory.journal.calls()}
    if found:
        for _, line in directory.read_conversations():
            with suppress(msgspec.DecodeError, RecursionError):
                head = decode_head(line)
                if head.state == "completed":
                    found.discard(head.id)
    return found


def text_of(found: ConversationsStatus) -> list[str]:
    """The status for people, but for numbers that the command line writes in its own way."""
    told = (
        ", ".join(f"{count:,} {state}" for state, count in found.summary["outcomes"].items())
        or "none recorded"
    )
    planned = "as many as the data has" if found.planned is None else f"{found.planned:,} planned"
    lines = [
        f"run            {found.path}",
        f"lineups        {', '.join(found.lineups) or 'given job by job'}",
        f"state          {found.activity}",
        f"conversations  {planned}: {told}",
    ]
    if found.in_flight:
        lines.append(f"in flight      {found.in_flight:,}, whose finished calls are kept")
    lines += [f"failed         {count:,} × {kind}" for kind, count in found.summary["errors"].items()]
    return [*lines, *health_lines(found.summary["health"])]
