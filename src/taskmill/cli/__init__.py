"""The command line: one module a command, loaded when it is called."""

from __future__ import annotations

import sys

from taskmill._version import __version__
from taskmill.errors import ConfigurationError, RunChangedError, RunNotFoundError, TaskmillError

EXIT_OK, EXIT_INCOMPLETE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

COMMANDS = {
    "batch": ("taskmill.cli.batch:batch", "Run a file of prompts into trajectories."),
    "status": ("taskmill.cli.status:status", "What a run has done, what failed and why, what was in flight."),
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


TYPE_CHECKING = False  # for type checkers alone: `taskmill --help` imports nothing it can do without

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from cyclopts import App

    app = App(
        name="taskmill",
        help=PURPOSE,
        version=__version__,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, (target, text) in COMMANDS.items():
        app.command(target, name=name, help=text)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: all that was asked was done. 1: some of it was not, or taskmill is at fault. 2: it could not be started as
    asked. 130: interrupted.
    """
    _survive_narrow_consoles()
    _words[:] = sys.argv[1:] if arguments is None else arguments
    if _words in ([], ["--help"], ["-h"]):
        print(overview())
        return EXIT_OK
    try:
        result = build_app()(_words, exit_on_error=True, result_action="return_value")
    except BrokenPipeError:
        from taskmill.cli.display import mute

        mute(sys.stdout)
        return EXIT_OK
    except (TaskmillError, OSError) as problem:
        print(f"taskmill: {problem}", file=sys.stderr)
        unusable = isinstance(problem, (ConfigurationError, RunChangedError, RunNotFoundError, OSError))
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


def _survive_narrow_consoles() -> None:
    # A console that can't show a character shows an escape instead of ending the run.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
