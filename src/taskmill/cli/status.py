"""`taskmill status`: what a run has done, read from its files while anyone may be writing them."""

from __future__ import annotations

import asyncio
import json as json_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from taskmill.cli import EXIT_INCOMPLETE, EXIT_OK
from taskmill.cli.display import duration, harmless, money
from taskmill.records import DONE_STATES
from taskmill.tasks.words import counted

SHOWN = 5
"""How many rows of a kind are named before the rest is a count."""


def status(run: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """What a run has done, what failed and why, and what was in flight when it stopped.

    Reads beside a process that writes. Exit code 0 when every planned row or rollout is done, else 1.

    Parameters
    ----------
    run
        The run's folder or name, such as data/my-run or my-run; of a taskset's run, the name without the time does.
    json
        Write JSON.
    """
    from taskmill.cli.places import place_of
    from taskmill.conversations.status import is_run_of_conversations
    from taskmill.evaluation.status import is_run_of_taskset

    run = place_of(run)
    if is_run_of_conversations(run):
        return _status_of_conversations(run, json)
    return _status_of_taskset(run, json) if is_run_of_taskset(run) else _status_of_batch(run, json)


def _status_of_taskset(run: Path, json: bool) -> int:
    from taskmill.evaluation.status import status_of

    found = status_of(run)
    print(msgspec.json.encode(found).decode() if json else harmless(text_of_taskset(found)))
    return EXIT_OK if found.done else EXIT_INCOMPLETE


def _status_of_conversations(run: Path, json: bool) -> int:
    from taskmill.conversations.status import status_of, text_of

    found = status_of(run)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        summary = found.summary
        calls = f"{summary['calls']:,}, {summary['tokens']:,} tokens, {money(summary['cost'])}"
        worked = f"{duration(found.seconds)} of work in {counted(found.sessions, 'session')}"
        lines = text_of(found)
        print(harmless("\n".join([*lines[:4], f"calls          {calls}, {worked}", *lines[4:]])))
    return EXIT_OK if found.done else EXIT_INCOMPLETE


def text_of_taskset(found: Any) -> str:
    """The status of a taskset's run for people."""
    lines = [
        f"run       {found.path}",
        f"taskset   {found.taskset}" + (f", {found.model}" if found.model else ""),
        f"state     {found.activity}",
        f"worked    {duration(found.seconds)} in {counted(found.sessions, 'session')}",
    ]
    if found.in_flight:
        flights = [
            f"{flight.rollout} ({counted(flight.calls, 'call')} kept)" for flight in found.in_flight[:SHOWN]
        ]
        lines.append(f"in flight {len(found.in_flight):,}: {_some(flights, len(found.in_flight))}")
        lines.append(f"kept      {_kept(sum(flight.calls for flight in found.in_flight))}")
    if found.planned is None:
        lines.append("planned   every task of the taskset; only its end will tell how many there are")
    if found.command == "validate":
        counts = ", ".join(f"{count:,} {state}" for state, count in found.summary["outcomes"].items())
        lines.append(f"tasks     {found.planned or 0:,} planned: {counts}")
    else:
        from taskmill.evaluation.summary import summary_table

        lines += ["", summary_table(found.summary)]
    return "\n".join(lines)


def _status_of_batch(run: Path, json: bool) -> int:
    from taskmill.batch.status import status_of
    from taskmill.programs.row import usage_fields

    found = asyncio.run(status_of(run))
    if json:
        # With every count in it, zero or not: a record leaves those out.
        print(json_module.dumps({**msgspec.to_builtins(found), "usage": usage_fields(found.usage)}))
    else:
        print(harmless(as_text(found)))
    done = bool(found.outcomes) and found.outcomes.keys() <= DONE_STATES
    return EXIT_OK if done else EXIT_INCOMPLETE


def as_text(found: Any) -> str:
    """The status for people."""
    planned = sum(found.outcomes.values())
    told = ", ".join(f"{count:,} {state}" for state, count in found.outcomes.items())
    usage = found.usage
    lines = [
        f"run        {found.path}",
        f"model      {found.model}",
        f"state      {found.activity}",
        f"rows       {planned:,} planned: {told}",
        f"calls      {found.calls:,}, {usage.input_tokens:,} tokens in ({usage.cached_tokens:,} cached), "
        f"{usage.output_tokens:,} out, {money(found.cost)}, {duration(found.seconds)} of work in "
        f"{counted(found.sessions, 'session')}",
    ]
    if found.note:
        lines.append(f"note       {found.note}")
    for failure in found.failures:
        lines.append(f"failed     {failure.count:,} × {failure.type}: {' '.join(failure.message.split())}")
        lines.append(f"           rows {_some(failure.rows, failure.count)}")
    if found.in_flight:
        flights = [
            f"{flight.row} ({counted(flight.calls, 'call')} kept)" for flight in found.in_flight[:SHOWN]
        ]
        lines.append(f"in flight  {len(found.in_flight):,}: rows {_some(flights, len(found.in_flight))}")
    if found.kept_calls:
        lines.append(f"kept       {_kept(found.kept_calls)}")
    return "\n".join(lines)


def _kept(calls: int) -> str:
    told = "finished call is" if calls == 1 else "finished calls are"
    return f"{calls:,} {told} kept and will not be paid for again"


def _some(items: list[Any], count: int) -> str:
    shown = ", ".join(str(item) for item in items[:SHOWN])
    return shown if count <= SHOWN else f"{shown} and {count - min(SHOWN, len(items)):,} more"
