"""How a stored run stands, worked out from its files: needs no lock, changes nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from taskmill.engine.dataset import index_rows
from taskmill.engine.recall import recall
from taskmill.engine.sessions import activity, last_write, read_sessions, session_seconds
from taskmill.engine.summary import Totals, outcome_samples, shard_samples
from taskmill.records import DONE_STATES, Usage
from taskmill.store.ledger import Ledger
from taskmill.store.run import RunDirectory

NAMED = 20
"""Rows that are named for each class of failure."""


class Failure(Struct):
    """Rows whose latest attempt failed, by class of error: the first message, and the first rows."""

    type: str
    message: str
    count: int
    rows: list[int]


class Flight(Struct, frozen=True):
    """A row that has finished calls in the journal and no recorded end."""

    row: int
    calls: int


class RunStatus(Struct, frozen=True):
    """How a run stands. `outcomes` has the states that occur and adds up to the plan; `seconds` is time worked.

    `kept_calls` are finished calls of all rows that are not done: a resume does not pay for them again.
    """

    path: str
    model: str
    activity: str
    outcomes: dict[str, int]
    calls: int
    usage: Usage
    cost: float | None
    seconds: float
    sessions: int
    failures: list[Failure]
    in_flight: list[Flight]
    kept_calls: int
    note: str = ""


class _Outcome(Struct):
    rollout_id: str = ""
    state: str = ""
    error: dict[str, object] | None = None


_decode_outcome = msgspec.json.Decoder(_Outcome).decode


async def status_of(path: Path) -> RunStatus:
    """Read the run in `path`.

    Raises:
        RunNotFoundError: there is no run there.
    """
    directory = RunDirectory(path)
    directory.require()
    config = directory.read_config() or {}
    ledger = Ledger()
    try:
        note = _plan(ledger, config)
        await recall(directory, ledger)
        totals = _totals(directory)
        sessions = read_sessions(directory)
        flights, kept = _in_flight(directory, ledger)
        counts = {state: count for state, count in ledger.counts().items() if count}
        return RunStatus(
            path=str(path),
            model=str(config.get("model", "")),
            activity=activity(directory, sessions),
            outcomes=counts,
            calls=totals.calls,
            usage=totals.usage,
            cost=None if totals.calls and totals.unpriced_calls == totals.calls else totals.cost,
            seconds=session_seconds(sessions, _last_write(path)),
            sessions=sum(session.event == "start" for session in sessions),
            failures=_failures(directory, ledger),
            in_flight=flights,
            kept_calls=kept,
            note=note,
        )
    finally:
        ledger.close()


def _plan(ledger: Ledger, config: dict[str, object]) -> str:
    """Plan the stored run's dataset anew; says so where it is gone."""
    dataset = Path(str(config.get("dataset_file", "")))
    if not dataset.is_file():
        return f"the dataset {str(dataset)!r} is not there, so what is left to do is not known"
    limit = config.get("max_samples")
    rows = index_rows(dataset, limit=limit if isinstance(limit, int) else None)
    ledger.plan(row for row in rows if row is not None)
    return ""


def _last_write(path: Path) -> datetime | None:
    moment = last_write(path)
    return None if moment is None else datetime.fromisoformat(moment)


def _totals(directory: RunDirectory) -> Totals:
    totals = Totals()
    for sample in itertools.chain(shard_samples(directory), outcome_samples(directory)):
        if sample is not None:
            totals.add(sample)
    return totals


def _failures(directory: RunDirectory, ledger: Ledger) -> list[Failure]:
    latest: dict[str, dict[str, object]] = {}
    for _, line in directory.read_outcomes():
        try:
            outcome = _decode_outcome(line)
        except msgspec.DecodeError:
            continue
        if outcome.state == "failed" and outcome.error is not None:
            latest[outcome.rollout_id] = outcome.error
    kinds: dict[str, Failure] = {}
    for rollout_id, error in latest.items():
        found = ledger.find(rollout_id)
        if found is None or found.state != "failed":
            continue
        kind = str(error.get("type", ""))
        failure = kinds.setdefault(kind, Failure(kind, str(error.get("message", "")), 0, []))
        failure.count += 1
        if len(failure.rows) < NAMED:
            failure.rows.append(found.row)
    for failure in kinds.values():
        failure.rows.sort()
    return sorted(kinds.values(), key=lambda failure: -failure.count)


def _in_flight(directory: RunDirectory, ledger: Ledger) -> tuple[list[Flight], int]:
    """The rows under way, or that were when the run was killed, and the kept calls of all that are not done."""
    calls: Counter[str] = Counter()
    for rollout_id, number in directory.journal.calls():
        calls[rollout_id] = max(calls[rollout_id], number + 1)
    flights, kept = [], 0
    for rollout_id, count in calls.items():
        found = ledger.find(rollout_id)
        if found is None or found.state in DONE_STATES:
            continue
        kept += count
        if found.state == "pending":
            flights.append(Flight(found.row, count))
    return sorted(flights, key=lambda flight: flight.row), kept
