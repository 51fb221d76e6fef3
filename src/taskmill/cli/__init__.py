"""The command line: one module a command, loaded when it is called."""

from __future__ import annotations

import os
import sys
import warnings

from taskmill._version import __version__
from taskmill.errors import ConfigurationError, RunChangedError, RunNotFoundError, TaskmillError, TasksetError

UNUSABLE = (ConfigurationError, RunChangedError, RunNotFoundError, TasksetError, OSError)
"""What a command raises where it could not be started as asked."""

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

SIGNALLED = 128
"""Exit codes from here on are those of commands that a signal ended."""

PATIENCE_SECONDS = 1.0
"""What takes longer after an interrupt is told."""

COMMANDS = {
    "batch": ("taskmill.cli.batch:batch", "Run a file of prompts into trajectories."),
    "eval": ("taskmill.cli.eval:evaluate", "Roll out a taskset, score every rollout, and sum up."),
    "validate": (
        "taskmill.cli.validate:validate",
        "Check a taskset without a model: solutions pass, doing nothing does not.",
    ),
    "debug": ("taskmill.cli.debug:debug", "One task, step by step: what is said, asked and rewarded."),
    "replay": ("taskmill.cli.replay:replay", "Score the traces of a run again, with today's rewards."),
    "init": ("taskmill.cli.init:init", "Write a small taskset that runs, with its test."),
    "converse": (
        "taskmill.cli.converse:converse",
        "Many conversations between the participants of a lineup.",
    ),
    "compare": ("taskmill.cli.compare:compare", "Two runs of a taskset, task by task."),
    "tasksets": (
        "taskmill.cli.tasksets:tasksets",
        "The tasksets there are, and what is missing for the others.",
    ),
    "status": ("taskmill.cli.status:status", "What a run has done, what failed and why, what was in flight."),
    "serve": ("taskmill.cli.serve:serve", "Serve the rollouts of a taskset by number, over HTTP."),
    "export": ("taskmill.cli.export:export", "Turn a run into ShareGPT, chat messages or Parquet."),
    "distributions": ("taskmill.cli.catalog:distributions", "The toolset distributions, with their chances."),
    "tools": (
        "taskmill.cli.catalog:tools",
        "The tools an agent can be offered, and what is missing for the others.",
    ),
    "models": (
        "taskmill.cli.catalog:models",
        "The models there are without an endpoint; 'fetch' gets the embedded one.",
    ),
}

OWN_PARSER = frozenset({"debug", "eval", "replay", "validate", "serve"})
"""Commands whose options reach any field by a dotted name: their functions take the words as they are."""

TYPE_CHECKING = False  # for type checkers alone: `taskmill --help` imports nothing it can do without

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from cyclopts import App

PURPOSE = "Tasks in, trajectories out: rollouts of language models and agents, losing nothing."

_words: list[str] = []


def command_words() -> Sequence[str]:
    """What the command under way was called with, for messages that repeat it."""
    return tuple(_words)


def overview() -> str:
    """What `taskmill --help` shows: the commands, a line each."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"Usage: taskmill COMMAND\n\n{PURPOSE}\n\n{listed}\n\n"
        "  --version  Show the version.\n\nEach command tells its options: taskmill COMMAND --help"
    )


def build_app() -> App:
    """The application with its commands named but not yet imported."""
    from cyclopts import App, Parameter

    from taskmill.cli.helptext import Columns

    app = App(
        name="taskmill",
        help=PURPOSE,
        version=__version__,
        help_format="plaintext",
        help_formatter=Columns(),
        error_formatter=lambda problem: f"taskmill: {problem}",
        default_parameter=Parameter(show_default=False),  # the texts of the options tell those worth telling
        suppress_keyboard_interrupt=False,
    )
    for name, (target, text) in COMMANDS.items():
        app.command(target, name=name, help=text)
    return app


def _say_warning(message: Warning | str, *where: object, **more: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _function_of(command: str) -> Callable[..., int]:
    from importlib import import_module

    module, _, name = COMMANDS[command][0].partition(":")
    function: Callable[..., int] = getattr(import_module(module), name)
    return function


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: all that was asked was done. 1: some of it was not, or taskmill is at fault. 2: it could not be started as
    asked. 130: interrupted; where the command is that of the process itself, it ends here then.
    """
    _open_closed_streams()
    _survive_narrow_consoles()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            code = _run_command(arguments)
    finally:
        written = _flush_streams()
    if arguments is None and code > SIGNALLED:
        _leave(code)
    return code if written else code or EXIT_INCOMPLETE


def _run_command(arguments: Sequence[str] | None) -> int:
    _words[:] = sys.argv[1:] if arguments is None else arguments
    if _words in ([], ["--help"], ["-h"], ["help"]):
        print(overview())
        return EXIT_OK
    try:
        if _words[0] in OWN_PARSER:
            result = _function_of(_words[0])(*_words[1:])
        else:
            result = build_app()(_words, exit_on_error=True, result_action="return_value")
    except BrokenPipeError:
        from taskmill.cli.display import mute

        mute(sys.stdout)
        return EXIT_OK
    except (TaskmillError, OSError) as problem:
        print(f"taskmill: {problem}", file=sys.stderr)
        unusable = isinstance(problem, UNUSABLE)
        return EXIT_USAGE if unusable else EXIT_INCOMPLETE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        import traceback

        traceback.print_exc()
        print(
            "taskmill: this is a fault in taskmill, not in what you asked for. Please report it, with the lines above.",
            file=sys.stderr,
        )
        return EXIT_INCOMPLETE
    return result if isinstance(result, int) else EXIT_OK


def _leave(code: int) -> NoReturn:
    """End the process of an interrupted command, whose files are complete.

    The interpreter would first wait for a model in this process to finish the answers that nobody waits for.
    """
    import atexit
    import signal
    from threading import Timer

    from taskmill.cli.display import say

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(code))
    patience = Timer(PATIENCE_SECONDS, say, ["waiting for the model to stop; press again to leave at once"])
    patience.daemon = True
    patience.start()
    atexit._run_exitfuncs()
    _flush_streams()
    os._exit(code)


def _open_closed_streams() -> None:
    # The first file opened would get the number of a stream that was closed, and what is printed into it.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None or sys.stderr is None:
        from taskmill.store.files import text_stream

        sys.stdout = sys.stdout or text_stream(1)
        sys.stderr = sys.stderr or text_stream(2)


def _flush_streams() -> bool:
    """Whether standard output took all that was written; what a stream holds back would else spoil the exit code."""
    written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as problem:
            from taskmill.cli.display import mute

            mute(stream)
            if stream is sys.stdout and not isinstance(problem, BrokenPipeError):
                written = False
    return written


def _survive_narrow_consoles() -> None:
    # A console that can't show a character shows an escape instead of ending the run.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
