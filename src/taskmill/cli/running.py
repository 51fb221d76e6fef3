"""A run under the command line: interrupts, exit codes, and what is said when it ends."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from taskmill.cli import EXIT_INCOMPLETE, EXIT_OK, EXIT_USAGE, command_words
from taskmill.cli.display import duration, json_events, money, progress_line, say, say_result, shown
from taskmill.errors import RunAbortedError, RunChangedError, RunExistsError, RunLockedError, StoreError
from taskmill.records import DONE_STATES

REFUSALS = (RunExistsError, RunChangedError, RunLockedError)
"""The run was not started: the same command will be refused again."""

SECRET_OPTIONS = ("--api-key", "--base-url")


async def run_to_the_end(runner: Any, *, model: str, resume: bool, quiet: bool) -> int:
    """Run to the end, a failure or an interrupt, say how it ended, and return the exit code.

    The first SIGINT or SIGTERM is answered at once and cancels; the second leaves at once. `quiet` has JSON
    events instead of a display, which begins with which `model` answers.
    """
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(runner.run(resume=resume))
    interrupted: list[int] = []

    def on_signal(number: int) -> None:
        if interrupted:
            os._exit(128 + number)
        interrupted.append(number)
        say("\ninterrupted: taking no more rows, keeping what is recorded; press again to leave at once")
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    problem: Exception | None = None
    try:
        if not quiet:
            say(f"model: {model}")
        async with shown(runner.progress, quiet=quiet):
            await work
    except asyncio.CancelledError:
        if not interrupted:
            raise
    except (RunAbortedError, StoreError) as error:
        problem = error
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return _report(runner, problem, interrupted, quiet)


def _report(runner: Any, problem: Exception | None, interrupted: list[int], quiet: bool) -> int:
    progress = runner.progress
    states = dict(progress.states)
    unfinished = progress.total - progress.reused - sum(states.get(state, 0) for state in DONE_STATES)
    code = EXIT_OK
    if interrupted:
        code = 128 + interrupted[0]
    elif isinstance(problem, REFUSALS):
        code = EXIT_USAGE
    elif problem is not None or unfinished:
        code = EXIT_INCOMPLETE
    command, removed = resume_command(command_words())
    if quiet:
        json_events(
            {
                "event": "ended",
                "exit": code,
                "total": progress.total,
                "reused": progress.reused,
                "states": states,
                "error": None
                if problem is None
                else {"type": type(problem).__name__, "message": str(problem)},
                "path": str(runner.path),
                "resume": None if code == EXIT_OK else command,
            }
        )
        return code
    if problem is not None:
        say(f"taskmill: {problem}")
    if progress.total:
        say(f"{progress_line(progress)}  in {duration(progress.elapsed)}, {money(progress.cost)}")
    if code == EXIT_OK:
        say_result(f"trajectories: {runner.path / 'trajectories.jsonl'}")
    elif interrupted or not isinstance(problem, REFUSALS):
        left = f"{unfinished:,} rows are left. " if progress.total else ""
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


def people_events(verbose: bool) -> Any:
    """A listener that says what happens on standard error; `verbose` has a line for each row."""
    from taskmill.batch.told import event_line

    def tell(event: Mapping[str, Any]) -> None:
        line = event_line(event, verbose=verbose)
        if line is not None:
            say(line)

    return tell
