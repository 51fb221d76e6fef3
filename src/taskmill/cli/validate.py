"""`taskmill validate`: does each task's reference solution pass, and does doing nothing not?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from taskmill.cli import EXIT_OK
from taskmill.cli.eval import begin, carry_out, listener, resumed_place, wants_help
from taskmill.cli.options import Grammar, Parsed, parse, resolve
from taskmill.cli.running import Job
from taskmill.errors import ConfigurationError
from taskmill.evaluation.checks import TaskCheck
from taskmill.evaluation.runner import stored_config
from taskmill.evaluation.validation import COMMAND, Validation, ValidationResult, ValidationSettings
from taskmill.tasks.words import counted

GRAMMAR = Grammar(
    "validate",
    ValidationSettings,
    flags=("json", "verbose"),
    short={"n": "num_tasks", "c": "concurrency", "v": "verbose"},
)

SHOWN = 50
"""How many failures the table has before the rest is a count."""

HELP = """\
Usage: taskmill validate TASKSET [OPTIONS] [@ FILE.toml]

Check the tasks of a taskset, without a model: the reference solution of each must pass, an untouched rollout must
not, and a task's own 'validate' must agree.

  -n, --num-tasks N          Only the first N tasks; needed where the taskset is infinite.
  -c, --concurrency C        Tasks under way at once. [default: 16]
      --shuffle              Draw the tasks from the whole taskset instead of taking the first.
      --seed S               Decides the shuffle. [default: 0]
      --pass-reward REWARD   What the reference solution must reach, and nothing else may. [default: 1]
      --limits.NAME VALUE    What one rollout may spend: max_turns [default: 100], max_seconds, …
      --sandbox KIND         What confines commands: auto, bubblewrap, plain or docker. [default: auto]
      --sync WHEN            Force stored rows to the disk: each, group or none. [default: group]
      --taskset.NAME VALUE   The taskset's own fields ('taskmill tasksets NAME' shows them).
      --task.NAME VALUE      The fields of its tasks.
  @ FILE.toml                Settings from a file, several if need be; the command line wins.

      --output-dir DIR       Where the directories of runs stand. [default: runs]
      --run-name NAME        What the directory is called, with the time. [default: the taskset]
      --resume DIR           Go on with a validation, by its own configuration: tasks that were found valid are not
                             looked at again, the others are. A larger -n extends it.
      --json                 Write events as JSON lines instead of a display.
  -v, --verbose              A line for each task.

Judges are models, so none is asked: each counts as if it gave the reference solution its best grade, and an untouched
rollout none. Group rewards must work for the two rollouts, and count only where a task has no other reward.

Exit code 0 when every task is valid, 1 when some are not or were not looked at, 2 when it could not be started as
asked, 130 when it was interrupted.
"""


def validate(*words: str) -> int:
    """Check each task of a taskset: its reference solution passes, and doing nothing does not."""
    if wants_help(words):
        print(HELP, end="")
        return EXIT_OK
    parsed = parse(words, GRAMMAR)
    refuse_model(parsed, "validate")
    resumed = resumed_place(parsed)
    stored = None if resumed is None else stored_config(resumed, COMMAND)
    resolved = resolve(parsed, GRAMMAR, stored=without_command(stored))
    options = resolved.options
    quiet = options.get("json", False)
    validation = Validation(
        resolved.taskset,
        **{name: options[name] for name in ("output_dir", "run_name", "resume") if name in options},
        reference=resolved.reference,
        on_event=listener(event_line, quiet=quiet, verbose=options.get("verbose", False)),
        **resolved.settings,
    )
    return carry_out(ValidateJob(validation), model=None, quiet=quiet)


class ValidateJob(Job):
    """A run of `Validation`."""

    noun = "tasks"

    def __init__(self, validation: Validation) -> None:
        self._validation = validation
        self._result: ValidationResult | None = None
        self.progress = validation.progress

    async def run(self) -> None:
        """Look at the tasks."""
        begin(self._validation)
        self._result = await self._validation.run()

    def unfinished(self) -> int:
        """How many were not found valid."""
        progress = self.progress
        return progress.total - progress.reused - progress.states["valid"]

    def is_done(self) -> bool:
        """Whether every task is valid."""
        return self._result is not None and self._result.valid

    def results(self, *, done: bool) -> list[str]:
        """A table of what is not valid, the counts, and where it is written."""
        if self._result is None:
            return [] if self._validation.path is None else [f"run: {self._validation.path}"]
        summary = self._result.summary
        told = failure_table(self._result.failures(), summary["outcomes"]["invalid"])
        counts = ", ".join(f"{count:,} {state}" for state, count in summary["outcomes"].items())
        surplus = f" ({summary['surplus']:,} of tasks that are gone)" if summary["surplus"] else ""
        return [
            *told,
            f"{counted(summary['planned'], 'task')}: {counts}{surplus}",
            f"run: {self._result.path}",
        ]

    def ended(self) -> Mapping[str, Any]:
        """The summary, and where the run is."""
        path = self._validation.path
        return {
            "path": None if path is None else str(path),
            "summary": None if self._result is None else self._result.summary,
        }

    def go_on(self) -> tuple[str, list[str]]:
        """The command that looks again at what was not found valid."""
        return shlex.join(["taskmill", "validate", "--resume", str(self._validation.path)]), []


def failure_table(failures: Iterator[TaskCheck], count: int) -> list[str]:
    """What is wrong with which task, a line for each reason."""
    shown = sorted(islice(failures, SHOWN), key=lambda check: check.idx)
    rows = [
        (str(check.idx), check.name or "", " ".join(reason.message.split()))
        for check in shown
        for reason in check.reasons
    ]
    if not rows:
        return []
    names = ("task", "name" if any(name for _, name, _ in rows) else "", "what is wrong")
    widths = [max(len(row[place]) for row in (names, *rows)) for place in range(2)]
    lines = [
        "  ".join(
            part for part in (idx.ljust(widths[0]), name.ljust(widths[1]) if widths[1] else "", told) if part
        )
        for idx, name, told in (names, *rows)
    ]
    return (
        lines if count <= len(shown) else [*lines, f"… and {count - len(shown):,} more, in validation.jsonl"]
    )


def event_line(event: Mapping[str, Any], *, verbose: bool) -> str | None:
    """What to say of an event, `None` where it is not worth a line."""
    match event["event"]:
        case "warning" | "note":
            return f"{event['event']}: {event['message']}"
        case "recorded" if verbose:
            reasons = "; ".join(event["reasons"])
            return f"task {event['idx']}: {event['state']}" + (f" ({reasons})" if reasons else "")
    return None


def refuse_model(parsed: Parsed, command: str) -> None:
    """Raise `ConfigurationError` where a model is named for a command that asks none."""
    for name in ("model", "base_url", "api_key", "api_key_env"):
        if name in parsed.given:
            raise ConfigurationError(f"--{name.replace('_', '-')}: 'taskmill {command}' asks no model")


def without_command(stored: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A stored configuration as settings: without the words that only say which command made it."""
    if stored is None:
        return None
    return {name: value for name, value in stored.items() if name not in ("command", "replay_of")}
