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

SHOWN = 5
"""How many rows of a kind are named before the rest is a count."""


def status(run: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """What a run has done, what failed and why, and what was in flight when it stopped.

    Reads beside a process that writes. Exit code 0 when every planned row is done, else 1.

    Parameters
    ----------
    run
        The run's folder, such as data/my-run.
    json
        Write JSON.
    """
    from taskmill.batch.status import status_of

    found = asyncio.run(status_of(run))
    print(json_module.dumps(msgspec.to_builtins(found)) if json else harmless(as_text(found)))
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
        f"{found.sessions} sessions",
    ]
    if found.note:
        lines.append(f"note       {found.note}")
    for failure in found.failures:
        lines.append(f"failed     {failure.count:,} × {failure.type}: {' '.join(failure.message.split())}")
        lines.append(f"           rows {_some(failure.rows, failure.count)}")
    if found.in_flight:
        flights = [f"{flight.row} ({flight.calls} calls kept)" for flight in found.in_flight[:SHOWN]]
        lines.append(f"in flight  {len(found.in_flight):,}: rows {_some(flights, len(found.in_flight))}")
    return "\n".join(lines)


def _some(items: list[Any], count: int) -> str:
    shown = ", ".join(str(item) for item in items[:SHOWN])
    return shown if count <= SHOWN else f"{shown} and {count - min(SHOWN, len(items)):,} more"
