"""`taskmill replay`: score the traces of a run again, with today's rewards and no model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from taskmill.cli import EXIT_OK
from taskmill.cli.eval import carry_out, listener, wants_help
from taskmill.cli.options import Grammar, parse, resolve
from taskmill.cli.places import place_of
from taskmill.cli.running import Job
from taskmill.cli.validate import refuse_model, without_command
from taskmill.errors import ConfigurationError, TasksetError
from taskmill.evaluation.replaying import COMMAND, Replay, ReplaySettings
from taskmill.evaluation.runner import EvalResult, stored_config
from taskmill.evaluation.summary import summary_table
from taskmill.evaluation.told import event_line

GRAMMAR = Grammar(
    "replay",
    ReplaySettings,
    options=(),
    flags=("json", "verbose"),
    short={"c": "concurrency", "v": "verbose"},
)

HELP = """\
Usage: taskmill replay DIR [OPTIONS]

Score the traces of the run in DIR again, with the rewards, metrics and group rewards of today, into a new directory
beside it. No model is asked: judges keep the grades they gave. Rollouts whose model failed stay as they are.

  -c, --concurrency C        Traces scored at once. [default: 16]
      --taskset.NAME VALUE   A field of the taskset, other than the run had it.
      --task.NAME VALUE      A field of its tasks.
      --json                 Write events as JSON lines instead of a display.
  -v, --verbose              A line for each rollout.

Exit code 0 when every rollout has a score, 1 when some have none, 2 when it could not be started as asked, 130 when
it was interrupted.
"""


def replay(*words: str) -> int:
    """Score the traces of a run again, with today's rewards and no model."""
    if wants_help(words):
        print(HELP, end="")
        return EXIT_OK
    parsed = parse(words, GRAMMAR)
    refuse_model(parsed, "replay")
    if len(parsed.positional) != 1 or parsed.files:
        raise ConfigurationError("name the directory of one run: taskmill replay DIR")
    path = place_of(parsed.positional[0])
    stored = stored_config(path, "eval", COMMAND)
    of_taskset = without_command({"taskset": stored["taskset"]})
    resolved = resolve(parsed._replace(positional=()), GRAMMAR, stored=of_taskset)
    options = resolved.options
    quiet = options.get("json", False)
    again = Replay(
        path,
        taskset=resolved.taskset,
        on_event=listener(event_line, quiet=quiet, verbose=options.get("verbose", False)),
        **resolved.settings,
    )
    # A replay can't be resumed: what its tasks became is rolled out by a run of their own.
    is_replay = stored.get("command") == COMMAND
    target = [str(stored["taskset"]["name"])] if is_replay else ["--resume", str(path)]
    job = ReplayJob(again, ["taskmill", "replay", *words], ["taskmill", "eval", *target])
    return carry_out(job, model=None, quiet=quiet)


class ReplayJob(Job):
    """A run of `Replay`. It is not resumed: scoring again costs nothing."""

    noun = "rollouts"

    def __init__(self, again: Replay, words: list[str], for_gone: list[str]) -> None:
        self._for_gone = for_gone
        self._again = again
        self._words = words
        self._result: EvalResult | None = None
        self.progress = again.progress

    async def run(self) -> None:
        """Score the traces."""
        self._result = await self._again.run()

    def is_done(self) -> bool:
        """Whether every rollout has a score."""
        return self._result is not None and self._result.complete

    def results(self, *, done: bool) -> list[str]:
        """The summary, and where the new run is."""
        if self._result is None:
            return []
        return [*summary_table(self._result.summary).split("\n"), f"run: {self._result.path}"]

    def ended(self) -> Mapping[str, Any]:
        """The summary, and where the new run is."""
        path = self._again.path
        return {
            "path": None if path is None else str(path),
            "summary": None if self._result is None else self._result.summary,
        }

    def go_on(self) -> tuple[str, list[str]]:
        """The same command, which makes another run; where tasks are gone, one that rolls out those there are."""
        gone = self._result is not None and TasksetError.__name__ in self._result.summary["errors"]
        return shlex.join(self._for_gone if gone else self._words), []
