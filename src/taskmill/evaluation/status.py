"""How the stored run of a taskset stands, worked out from its files: needs no lock, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.engine.sessions import Session, activity, last_write, read_sessions, session_seconds
from taskmill.errors import RunNotFoundError
from taskmill.evaluation.checks import read_checks
from taskmill.evaluation.summary import summarize
from taskmill.records import DONE_STATES
from taskmill.store.files import read_whole
from taskmill.store.run import RunDirectory

COMMANDS = ("eval", "replay", "validate")


class Flight(Struct, frozen=True):
    """A rollout that has finished calls in the journal and no recorded end."""

    rollout: str
    calls: int


class RunStatus(Struct, frozen=True):
    """How a run stands. `seconds` is time worked, in all `sessions`.

    `summary` is what `summary.json` would say now; for a validation it has the counts of outcomes alone. `planned` is
    `None` where only the end of the taskset will tell. `done` means that all that was asked for is.
    """

    path: str
    command: str
    taskset: str
    model: str
    activity: str
    planned: int | None
    summary: dict[str, Any]
    seconds: float
    sessions: int
    in_flight: list[Flight]
    done: bool


class _Said(Struct):
    """What the last session that came to its end wrote into `summary.json`."""

    outcome: str = ""
    planned: int = 0
    surplus: int = 0


def is_run_of_taskset(path: Path) -> bool:
    """Whether the run in `path` is that of a taskset. Raises `RunNotFoundError`."""
    directory = RunDirectory(path)
    directory.require()
    return isinstance((directory.read_config() or {}).get("taskset"), dict)


def status_of(path: Path) -> RunStatus:
    """Read the run in `path`. Raises `RunNotFoundError` where there is none, or one of another kind."""
    directory = RunDirectory(path)
    directory.require()
    config = directory.read_config() or {}
    command = config.get("command", "eval")
    if not isinstance(config.get("taskset"), dict) or command not in COMMANDS:
        raise RunNotFoundError(f"the run in {str(path)!r} is not one of {', '.join(COMMANDS)}")
    sessions = read_sessions(directory)
    said = _said(directory)
    outcome = sessions[-1].outcome if sessions else said.outcome
    # Of a session that came to its end, the summary it wrote alone knows which tasks the taskset no longer gave.
    surplus = said.surplus if outcome else 0
    planned = said.planned if outcome == "finished" else _planned(sessions, config)
    good = frozenset({"valid"}) if command == "validate" else DONE_STATES
    summary: dict[str, Any]
    if surplus:
        summary = msgspec.json.decode(read_whole(directory.path / "summary.json"))
        planned = said.planned
        if command == "validate":
            summary = {"outcomes": summary["outcomes"]}
    elif command == "validate":
        states = Counter(check.state for check in read_checks(directory))
        missing = max(0, (planned or 0) - sum(states.values()))
        summary = {"outcomes": {**states, "missing": missing}}
    else:
        summary = summarize(
            directory,
            planned=planned or 0,
            num_rollouts=config.get("num_rollouts", 1),
            pass_reward=config.get("pass_reward", 1.0),
            outcome=outcome or "unknown",
        )
    moment = last_write(path)
    left = [state for state, count in summary["outcomes"].items() if count and state not in good]
    return RunStatus(
        path=str(path),
        command=command,
        taskset=str(config["taskset"].get("name", "")),
        model=str(config.get("model", "")),
        activity=activity(directory, sessions) if sessions else outcome or "not started",
        planned=planned,
        summary=summary,
        seconds=session_seconds(sessions, None if moment is None else datetime.fromisoformat(moment)),
        sessions=sum(session.event == "start" for session in sessions),
        in_flight=_in_flight(directory),
        done=planned is not None and not left and directory.holder() is None,
    )


def _said(directory: RunDirectory) -> _Said:
    try:
        return msgspec.json.decode(read_whole(directory.path / "summary.json"), type=_Said)
    except (OSError, msgspec.DecodeError):
        return _Said()


def _planned(sessions: Sequence[Session], config: Mapping[str, Any]) -> int | None:
    """How many rollouts, or tasks of a validation, there are to be, as far as a run that is not finished tells."""
    told = [session.planned for session in sessions if session.planned is not None]
    if told:
        return told[-1]
    tasks = config.get("num_tasks")
    return None if tasks is None else int(tasks) * int(config.get("num_rollouts", 1))


class _Head(Struct):
    id: str
    state: str


_decode_head = msgspec.json.Decoder(_Head).decode


def _in_flight(directory: RunDirectory) -> list[Flight]:
    calls: Counter[str] = Counter()
    for rollout, number in directory.journal.calls():
        if "#" not in rollout:  # else it is that of a judge
            calls[rollout] = max(calls[rollout], number + 1)
    for _, line in directory.read_traces() if calls else ():
        try:
            head = _decode_head(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if head.state in DONE_STATES:
            calls.pop(head.id, None)
    return [Flight(rollout, count) for rollout, count in sorted(calls.items())]
