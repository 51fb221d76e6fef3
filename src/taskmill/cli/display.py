"""What people and programs see of a run: a live display, plain lines, or JSON events."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TextIO

from taskmill.engine.progress import Progress

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

REFRESH_SECONDS = 0.25
LINE_SECONDS = 10.0
QUIET_SECONDS = 60.0
"""A run that gets nothing done says so once a minute."""


def duration(seconds: float | None) -> str:
    """Seconds as people say them: `42s`, `3m10s`, `2h05m`."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def money(cost: float | None) -> str:
    """US dollars, or that a price is unknown."""
    return "cost unknown" if cost is None else f"${cost:.4f}" if cost < 1 else f"${cost:,.2f}"


def pace(rate: float) -> str:
    """Rollouts a second, a minute or an hour, whichever gives a number that can be read."""
    for unit, seconds in (("s", 1), ("min", 60)):
        if rate * seconds >= 0.95:
            return f"{rate * seconds:,.1f}/{unit}"
    return f"{rate * 3600:,.1f}/h"


def progress_line(progress: Progress) -> str:
    """One line that says where a run that goes on stands."""
    if not progress.begun:
        return f"starting  {duration(progress.elapsed)}"
    parts = [_done(progress)]
    time = duration(progress.elapsed)
    if progress.total:
        time += f", {duration(progress.seconds_left)} left"
    parts += [time, f"{progress.in_flight:,} under way"]
    if progress.rows is not None:
        parts.append(f"{progress.rows:,} in the batch")
    parts += _came_of_it(progress)
    if progress.rate > 0:
        parts.append(pace(progress.rate))
    return "  ".join([*parts, *_spent(progress)])


def final_line(progress: Progress, *, interrupted: bool) -> str:
    """One line that says what a session came to. An interrupted one was not at work for all of its time."""
    parts = [_done(progress), *_came_of_it(progress)]
    if (left := progress.total - progress.done) > 0:
        parts.append(f"{left:,} left")
    parts += _spent(progress)
    if not interrupted and progress.mean_rate > 0:
        parts.append(pace(progress.mean_rate))
    return ", ".join([*parts, f"in {duration(progress.elapsed)}"])


def _done(progress: Progress) -> str:
    return f"{progress.done:,}/{progress.total:,} done" if progress.total else f"{progress.done:,} done"


def _came_of_it(progress: Progress) -> list[str]:
    parts = [f"{progress.reused:,} reused"] if progress.reused else []
    parts += [f"{count:,} {state}" for state, count in sorted(progress.states.items())]
    if progress.reward is not None:
        parts.append(f"reward {progress.reward:.3f} of {progress.scored:,}")
    return parts


def _spent(progress: Progress) -> list[str]:
    """What was asked of models; nothing where none was."""
    calls, tokens, cost = progress.spent
    if progress.turns is not None:
        return [f"{progress.turns:,} turns", f"{progress.token_rate:,.0f} tokens/s", money(cost)]
    return [f"{calls:,} call{'' if calls == 1 else 's'}", f"{tokens:,} tokens", money(cost)] if calls else []


def say(line: str) -> None:
    """A line for people, on standard error; what models and endpoints said can't steer their terminal."""
    _write(sys.stderr, harmless(line))


def say_result(line: str) -> None:
    """A line that a command is called for, on standard output."""
    _write(sys.stdout, harmless(line))


def harmless(text: str) -> str:
    """`text` with control characters, which a terminal would obey, written out; those that turn its direction too."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def json_events(event: Mapping[str, Any]) -> None:
    """Write an event as one JSON line."""
    _write(sys.stdout, json.dumps(event, ensure_ascii=True, default=str))


def _write(stream: TextIO | None, line: str) -> None:
    """Write a line at once, if there is somewhere to write to.

    A reader that has gone away is no reason to end a run: nothing more is written then.
    """
    if stream is None:
        return
    try:
        stream.write(line + "\n")
        stream.flush()
    except BrokenPipeError:
        mute(stream)
    except OSError:
        pass  # a full or closed screen loses a line, not the run


def mute(stream: TextIO) -> None:
    """Let what is written to a stream from now on, and what it still holds back, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@asynccontextmanager
async def shown(progress: Progress, *, quiet: bool) -> AsyncIterator[None]:
    """Keep the display up to date while the block runs: live on a terminal, a line now and then elsewhere."""
    if quiet:
        yield
        return
    painter = _paint_live if sys.stderr.isatty() else _print_lines
    painting = asyncio.ensure_future(painter(progress))
    try:
        yield
    finally:
        painting.cancel()
        await asyncio.wait([painting])


async def _paint_live(progress: Progress) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def frame() -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_row(
            ProgressBar(total=max(progress.total, 1), completed=progress.done, width=24),
            Text(progress_line(progress), no_wrap=True, overflow="ellipsis"),
        )
        return table

    with Live(frame(), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            live.update(frame(), refresh=True)


async def _print_lines(progress: Progress) -> None:
    told, silent = (-1, -1, -1), 0.0
    while True:
        await asyncio.sleep(LINE_SECONDS)
        silent += LINE_SECONDS
        now = (progress.finished, progress.calls_made, progress.turns or 0)
        if progress.begun and (now != told or silent >= QUIET_SECONDS):
            told, silent = now, 0.0
            say(progress_line(progress))
