"""A run under the command line: interrupts, exit codes, and what is said when it ends."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskmill.cli import EXIT_INCOMPLETE, EXIT_OK, EXIT_USAGE, PATIENCE_SECONDS
from taskmill.cli.display import final_line, json_events, say, say_result, shown
from taskmill.engine.progress import Progress
from taskmill.errors import (
    RunAbortedError,
    RunChangedError,
    RunExistsError,
    RunLockedError,
    StorageFullError,
    StoreError,
    TaskmillError,
    TasksetError,
)
from taskmill.records import DONE_STATES

REFUSALS = (RunExistsError, RunChangedError, RunLockedError)
"""The run was not started: the same command will be refused again."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What interrupts a run."""

Listener = Callable[[Mapping[str, Any]], None]

SECRET_OPTIONS = ("--api-key", "--base-url")


class Job(ABC):
    """A run as the command line carries it out: subclasses say what to do, when it is done, and what came of it."""

    noun = "rows"
    """What its progress counts."""

    progress: Progress

    @abstractmethod
    async def run(self) -> None:
        """Do it. Cancelling keeps what is recorded."""

    def unfinished(self) -> int:
        """How many are left to do."""
        progress = self.progress
        done = sum(progress.states.get(state, 0) for state in DONE_STATES)
        return progress.total - progress.reused - done

    def is_done(self) -> bool:
        """Whether all that was asked for was done, once `run` has come to its end."""
        return not self.unfinished()

    @abstractmethod
    def results(self, *, done: bool) -> Sequence[str]:
        """What the command was called for, as lines for people."""

    @abstractmethod
    def ended(self) -> Mapping[str, Any]:
        """What programs are told of the end, beside counts and errors."""

    @abstractmethod
    def go_on(self) -> tuple[str, list[str]]:
        """The command that goes on with it, and the options left out of that because they hold secrets."""


async def run_to_the_end(job: Job, *, model: str | None, quiet: bool) -> int:
    """Run to the end, a failure or an interrupt, say how it ended, and return the exit code.

    The first SIGINT, SIGTERM or SIGHUP is answered at once and cancels; a second SIGINT or SIGTERM leaves at once.
    (A terminal that is closed sends several SIGHUPs, and `nohup` has them ignored.) `quiet` has JSON events instead
    of a display, which begins with which `model` answers, if one does.
    """
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(job.run())
    interrupted: list[int] = []
    waiting: list[asyncio.TimerHandle] = []

    def on_signal(number: int) -> None:
        if interrupted:
            if number != signal.SIGHUP:
                os._exit(128 + number)
            return
        interrupted.append(number)
        say(
            f"\ninterrupted: taking no more {job.noun}, keeping what is recorded; press again to leave at once"
        )
        work.cancel()
        waiting.append(
            loop.call_later(
                PATIENCE_SECONDS, say, "waiting for what is under way to stop; press again to leave at once"
            )
        )

    listened = [number for number in SIGNALS if not _is_ignored_hangup(number)]
    for number in listened:
        loop.add_signal_handler(number, on_signal, number)
    problem: Exception | None = None
    try:
        if model is not None and not quiet:
            say(f"model: {model}")
        async with shown(job.progress, quiet=quiet):
            await work
    except asyncio.CancelledError:
        if not interrupted:
            raise
    except (RunAbortedError, StoreError, TasksetError) as error:
        problem = error
    except (TaskmillError, OSError) as error:
        if not interrupted:  # else that comes first: it is what ended the run
            raise
        problem = error
    finally:
        for number in listened:
            loop.remove_signal_handler(number)
        for told in waiting:
            told.cancel()
    return _report(job, problem, interrupted, quiet)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _report(job: Job, problem: Exception | None, interrupted: list[int], quiet: bool) -> int:
    progress = job.progress
    unreadable = isinstance(problem, StoreError) and not isinstance(problem, StorageFullError)
    refused = isinstance(problem, REFUSALS) or (unreadable and not progress.total)
    code = EXIT_OK
    if interrupted:
        code = 128 + interrupted[0]
    elif refused:
        code = EXIT_USAGE
    elif problem is not None or not job.is_done():
        code = EXIT_INCOMPLETE
    command, removed = job.go_on()
    if quiet:
        json_events(
            {
                "event": "ended",
                "exit": code,
                "total": progress.total,
                "reused": progress.reused,
                "states": dict(progress.states),
                "error": None
                if problem is None
                else {"type": type(problem).__name__, "message": str(problem)},
                **job.ended(),
                "resume": None if code == EXIT_OK else command,
            }
        )
        return code
    if problem is not None:
        say(f"taskmill: {problem}")
    if progress.total or progress.finished:
        say(final_line(progress, interrupted=bool(interrupted)))
    if refused and not interrupted:
        return code
    for line in job.results(done=code == EXIT_OK):
        say_result(line)
    if code != EXIT_OK:
        left = f"{job.unfinished():,} {job.noun} are left. " if progress.total else ""
        secrets = f", with {' and '.join(removed)} as before" if removed else ""
        say(f"{left}To go on{secrets}:\n  {command}")
    return code


def resume_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that goes on with what `words` began, and the options left out of it because they hold secrets.

    A key always does; an address does where it names a user or has a query.
    """
    kept: list[str] = []
    removed: dict[str, None] = {}
    waiting = iter(words)
    for word in waiting:
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")  # The parser takes either.
        if option not in SECRET_OPTIONS:
            kept.append(word)
            continue
        value = value if equals else next(waiting, "")
        if option == "--api-key" or "@" in value or "?" in value:
            removed[option] = None
        else:
            kept += [word] if equals else [word, value]
    if "--resume" not in kept:
        kept.append("--resume")
    return shlex.join(["taskmill", *kept]), list(removed)


def people_events(event_line: Callable[..., str | None], verbose: bool) -> Listener:
    """A listener that says on standard error what `event_line` says; `verbose` has a line for each row."""

    def tell(event: Mapping[str, Any]) -> None:
        line = event_line(event, verbose=verbose)
        if line is not None:
            say(line)

    return tell
