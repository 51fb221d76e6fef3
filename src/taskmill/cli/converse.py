"""`taskmill converse`: many conversations between the participants of a lineup."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from taskmill.cli import EXIT_OK, command_words
from taskmill.cli.display import json_events, say
from taskmill.cli.eval import carry_out
from taskmill.cli.running import Job, people_events, resume_command
from taskmill.engine.progress import Progress

FLAG = Parameter(negative="")
OUTPUT_DIR = Path("runs")


def converse(
    lineup: Path,
    /,
    *,
    copies: Annotated[int | None, Parameter(alias="-n")] = None,
    limit: int | None = None,
    seed: int | None = None,
    devices: Annotated[list[str] | None, FLAG] = None,
    out_dir: Path | None = None,
    max_batch_size: int | None = None,
    one_by_one: Annotated[bool, FLAG] = False,
    resume: Annotated[bool, FLAG] = False,
    dry_run: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
    verbose: Annotated[bool, Parameter(alias="-v", negative="")] = False,
) -> int:
    """Hold many conversations between the participants of a lineup.

    LINEUP is a TOML file: participants, what they are told, when a conversation is over, a file of data, an analyzer.
    Every conversation is stored as soon as it has ended.

    Parameters
    ----------
    lineup
        The TOML file.
    copies
        Conversations, or with data conversations for each row. [default: 1]
    limit
        Only the first so many rows of the data.
    seed
        What the randomness is worked out from. [default: the lineup's, or 0]
    devices
        Where local models run (cuda:0,cuda:1); several mean a process each. [default: every GPU, or else the CPU]
    out_dir
        Folder of the run. [default: runs/NAME, by the name of the lineup]
    max_batch_size
        Rows of one forward pass of a local model.
    one_by_one
        Hold one conversation after another.
    resume
        Go on with the run: hold what is missing or failed. A larger -n extends it.
    dry_run
        Show the lineup and the plan, and do nothing.
    json
        Write events as JSON lines instead of a display.
    verbose
        A line for each conversation as it ends.
    """
    from taskmill.conversations.lineup_file import read_lineup
    from taskmill.conversations.told import event_line

    conversation = read_lineup(lineup)
    if seed is not None:
        conversation = conversation.seed(seed)
    place = out_dir or OUTPUT_DIR / str(conversation._name)
    chosen = (
        None if devices is None else [part for given in devices for part in given.split(",") if part.strip()]
    )
    if dry_run:
        return _tell_plan(conversation, copies, limit, place, as_json=json)
    progress = Progress(json_events if json else people_events(event_line, verbose))
    job = ConverseJob(
        conversation,
        progress,
        {
            "n": copies,
            "limit": limit,
            "devices": chosen,
            "out_dir": place,
            "max_batch_size": max_batch_size,
            "batched": not one_by_one,
            "resume": resume,
        },
    )
    names = ", ".join(f"{one.name} ({one.model_name})" for one in conversation.participants)
    if not json:
        say(f"participants: {names}")
    return carry_out(job, model=None, quiet=json)


class ConverseJob(Job):
    """A run of conversations."""

    noun = "conversations"

    def __init__(self, conversation: Any, progress: Progress, options: Mapping[str, Any]) -> None:
        self._conversation = conversation
        self._options = dict(options)
        self._report: Any = None
        self.progress = progress

    async def run(self) -> None:
        """Hold them."""
        self._report = await self._conversation.arollout(progress=self.progress, **self._options)

    def is_done(self) -> bool:
        """Whether every conversation is complete."""
        return self._report is not None and not self._report.failed

    def results(self, *, done: bool) -> list[str]:
        """What came of it, and what was odd, also when all is well."""
        if self._report is None:
            self._report = _stored(self._options["out_dir"])
        if self._report is None:
            return []
        return [*str(self._report).split("\n"), f"run: {self._options['out_dir']}"]

    def ended(self) -> Mapping[str, Any]:
        """Where the run is, and its health."""
        report = self._report
        return {
            "path": str(self._options["out_dir"]),
            "conversations": None if report is None else len(report.results),
            "failed": None if report is None else len(report.failed),
            "health": None if report is None else report.health,
        }

    def go_on(self) -> tuple[str, list[str]]:
        """The same command, resumed."""
        return resume_command(command_words())


def _stored(path: Path) -> Any:
    """What a run that was broken off has recorded, if it has."""
    from taskmill.conversations.report import RunReport
    from taskmill.errors import StoreError

    try:
        return RunReport.read(path)
    except (StoreError, OSError):
        return None


def _tell_plan(
    conversation: Any, copies: int | None, limit: int | None, place: Path, *, as_json: bool
) -> int:
    from taskmill.conversations.jobs import plan_of
    from taskmill.store.index import JobIndex

    plan = plan_of([(str(conversation._name), conversation)], copies, limit, JobIndex(), alone=True)
    told = {
        "conversations": plan.total,
        "participants": {one.name: one.model_name for one in conversation.participants},
        "directory": str(place),
        "recipe": conversation.recipe(),
    }
    if as_json:
        print(json_module.dumps(told))
        return EXIT_OK
    print(json_module.dumps(told["recipe"]["lineup"], indent=2, ensure_ascii=False))
    print(f"\n# {plan.total} conversations, stored in {place}")
    return EXIT_OK
