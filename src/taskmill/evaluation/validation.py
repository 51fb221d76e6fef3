"""Checking a taskset without a model: each task's reference solution passes, and doing nothing does not."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taskmill._version import __version__
from taskmill.engine.progress import Progress
from taskmill.engine.sandboxes import SandboxSource
from taskmill.engine.scheduler import run_lanes
from taskmill.engine.sessions import last_write, now
from taskmill.errors import ConfigurationError, RunAbortedError
from taskmill.evaluation.begun import Begun, begin_draw
from taskmill.evaluation.checks import TaskCheck, check_task, is_superseded, read_checks
from taskmill.evaluation.runner import (
    OUTPUT_DIR,
    Listener,
    as_taskset,
    as_toml,
    configured,
    new_directory,
    recorded_name,
    refuse_fewer,
    stored_config,
)
from taskmill.store.jsonl import content_hash, encode_json, encode_row
from taskmill.store.run import RunDirectory
from taskmill.tasks.explain import explain
from taskmill.tasks.limits import Count, Limits
from taskmill.tasks.registry import find_taskset
from taskmill.tasks.rollout import RolloutSettings
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Taskset

COMMAND = "validate"
"""What the configuration of such a run says it is."""

YIELD_EVERY = 1000
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""

POLICY_FIELDS = frozenset({"concurrency", "num_tasks", "sandbox", "sync"})
"""Settings that may differ at a resume. (`num_tasks` may only grow.)"""


class ValidationSettings(BaseModel):
    """The settings of a validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    num_tasks: Count | None = None
    """Only the first so many tasks; needed where the taskset is infinite."""
    concurrency: Count = 16
    """Tasks under way at once."""
    shuffle: bool = False
    """Draw the tasks from the whole taskset instead of taking the first."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Decides the shuffle."""
    pass_reward: float = 1.0
    """The reward that the reference solution must reach, and an untouched rollout must not."""
    limits: Limits = Limits(max_turns=100)
    """What one rollout may spend."""
    sandbox: Literal["auto", "bubblewrap", "plain", "docker"] = "auto"
    """What confines the commands that a solution runs."""
    sync: Literal["each", "group", "none"] = "group"
    """When stored rows are forced to the disk."""


class ValidationResult:
    """A validation that came to its end. The files in `path` hold all of it; `summary` is what `summary.json` says."""

    def __init__(self, path: Path, summary: Mapping[str, Any]) -> None:
        self.path = path
        self.summary = summary

    @property
    def valid(self) -> bool:
        """Whether every task that was asked for was looked at and found valid."""
        outcomes = self.summary["outcomes"]
        return not outcomes["invalid"] and not outcomes["missing"]

    def checks(self) -> Iterator[TaskCheck]:
        """What was found, task by task, in the order in which the checks ended."""
        return read_checks(RunDirectory(self.path))

    def failures(self) -> Iterator[TaskCheck]:
        """The tasks that are not valid."""
        return (check for check in self.checks() if check.state != "valid")


class Validation:
    """A taskset and settings, checked; `run` looks at its tasks.

    Every validation has a directory of its own under `output_dir`. Raises `ConfigurationError` for what can't be meant,
    before anything is written. `settings` are the fields of `ValidationSettings`.
    """

    def __init__(
        self,
        taskset: Taskset[Any] | type[Taskset[Any]] | str,
        *,
        output_dir: Path | str = OUTPUT_DIR,
        run_name: str | None = None,
        on_event: Listener | None = None,
        resume: Path | str | None = None,
        reference: str | None = None,
        **settings: Any,
    ) -> None:
        self.taskset = as_taskset(taskset)
        try:
            self.settings = ValidationSettings.model_validate(settings)
        except ValidationError as problem:
            raise ConfigurationError(explain(problem, ValidationSettings)) from None
        self._reference = reference or (taskset if isinstance(taskset, str) else recorded_name(self.taskset))
        self._output_dir = Path(output_dir)
        self._run_name = run_name
        self._resume = None if resume is None else Path(resume)
        self.progress = Progress(on_event)
        self.path: Path | None = self._resume
        self._begun: Begun | None = None
        if self.taskset.INFINITE and self.settings.num_tasks is None:
            self.taskset.draw(None)  # raises, before a folder is made

    @classmethod
    def resume(
        cls,
        path: Path | str,
        *,
        taskset: Taskset[Any] | type[Taskset[Any]] | str | None = None,
        on_event: Listener | None = None,
        **changes: Any,
    ) -> Validation:
        """Go on with the validation in `path`, by its own configuration: tasks found valid are not looked at again.

        `changes` may name settings that change no result, and a larger number of tasks. Raises `RunNotFoundError`,
        `ConfigurationError` where `path` holds another kind of run.
        """
        stored = stored_config(path, COMMAND)
        fields = dict(stored["taskset"])
        reference = fields.pop("name")
        if taskset is None:
            taskset = configured(find_taskset(reference), fields)
        settings = {name: value for name, value in stored.items() if name not in ("command", "taskset")}
        return cls(taskset, on_event=on_event, resume=path, reference=reference, **(settings | changes))

    def config(self) -> dict[str, Any]:
        """The resolved configuration: what the directory keeps."""
        return {
            "command": COMMAND,
            "taskset": {"name": self._reference, **self.taskset.config.model_dump(mode="json")},
            **self.settings.model_dump(mode="json"),
        }

    def begin(self) -> Begun:
        """Build the first task. `run` does so too where it was not done, before it makes a directory.

        Raises `TasksetError` where that fails, or a package is missing.
        """
        if self._begun is None:
            settings = self.settings
            self._begun = begin_draw(self.taskset, settings.num_tasks, settings.shuffle, settings.seed)
        return self._begun

    async def run(self) -> ValidationResult:
        """Look at every task that was not found valid before. Cancelling leaves a run that can be resumed.

        Raises `RunChangedError`, `RunLockedError`, `TasksetError` and `StorageFullError` as an evaluation does.
        """
        if self.path is not None and self._resume is None:
            raise RunAbortedError("this validation was run already; make another, or resume its directory")
        config = self.config()
        if self._resume is not None:
            refuse_fewer(stored_config(self._resume, COMMAND), config)
        begun = self.begin()
        path = self.path = self._resume or new_directory(
            self._output_dir, self._run_name or f"{self.taskset.name}--{COMMAND}"
        )
        async with AsyncExitStack() as stack:
            directory = RunDirectory(path, sync=self.settings.sync)
            opened = directory.open_for_writing(
                config, resume=self._resume is not None, policy_fields=POLICY_FIELDS
            )
            stack.push_async_callback(directory.close)
            directory.write_file("config.toml", as_toml(config))
            for repair in opened.repairs:
                self.progress.tell("warning", message=str(repair))
            run = _ValidationRun(self.taskset, self.settings, directory, self.progress, begun)
            return ValidationResult(path, await run.carry_out())


async def validate(
    taskset: Taskset[Any] | type[Taskset[Any]] | str, *, num_tasks: int | None = None, **options: Any
) -> ValidationResult:
    """Check the tasks of a taskset, without a model: see `Validation`, whose arguments `options` are."""
    return await Validation(taskset, num_tasks=num_tasks, **options).run()


class _ValidationRun:
    """One execution, on a run's directory. Memory: 16 bytes and a little for each task an earlier session looked at."""

    def __init__(
        self,
        taskset: Taskset[Any],
        settings: ValidationSettings,
        directory: RunDirectory,
        progress: Progress,
        begun: Begun,
    ) -> None:
        self._begun = begun
        self._taskset = taskset
        self._settings = settings
        self._directory = directory
        self._progress = progress
        self._told = RolloutSettings(limits=settings.limits)
        self._sandboxes = SandboxSource(settings.sandbox, directory.path / "workspaces", self._tell)
        self._valid: set[bytes] = set()
        self._attempts: dict[bytes, int] = {}
        self._drawn = self._planned = 0

    async def carry_out(self) -> dict[str, Any]:
        """Look at what is not done; gives the summary, which is on disk by then."""
        directory = self._directory
        await self._read()
        tasks = self._begun.tasks
        for message in self._begun.warnings:
            self._tell("warning", message)
        self._planned = tasks.total or 0
        self._progress.begin(self._planned, len(self._valid))
        self._session(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            last_write=last_write(directory.path),
        )
        outcome, summary = "cancelled", {}
        try:
            await self._sandboxes.sweep()
            await run_lanes(self._lanes(tasks), self._look_at, window=self._settings.concurrency)
            outcome = "finished"
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._sandboxes.close()
            if directory.commit.failed is None:
                await directory.commit.flush()
                self._session("end", outcome=outcome)
                summary = await asyncio.to_thread(self._summary, outcome)
                directory.write_file("summary.json", encode_json(summary))
                await directory.commit.flush()
        return summary

    async def _read(self) -> None:
        """Take note of what earlier sessions found, and move what is looked at again out of the way."""
        for count, check in enumerate(read_checks(self._directory)):
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if check.state == "valid":
                self._valid.add(bytes.fromhex(check.id))
            else:
                self._attempts[bytes.fromhex(check.id)] = check.attempt
        self._directory.set_aside(is_superseded, "validation.jsonl")

    def _lanes(self, tasks: Iterator[Task[Any]]) -> Iterator[tuple[bytes, Task[Any]]]:
        for task in tasks:
            self._drawn += 1
            key = content_hash(task.data.fields())
            if key in self._valid:
                self._valid.remove(key)
            else:
                yield key, task
        self._progress.total = self._drawn
        self._progress.reused -= len(self._valid)  # of tasks that are gone

    async def _look_at(self, lane: tuple[bytes, Task[Any]]) -> None:
        key, task = lane
        self._progress.in_flight += 1
        started = time.monotonic()
        try:
            check = await check_task(
                task,
                id=key.hex(),
                attempt=self._attempts.get(key, 0) + 1,
                pass_reward=self._settings.pass_reward,
                settings=self._told,
                make_sandbox=self._sandboxes.make,
                clock=lambda: time.monotonic() - started,
            )
        finally:
            self._progress.in_flight -= 1
        await self._directory.append_validation(encode_row(check))
        for reason in check.reasons:
            self._directory.note(f"{now()} task {check.idx} is invalid: {reason.message}")
        self._progress.recorded(
            check.state,
            calls=0,
            tool_calls=0,
            tokens=0,
            cost=0.0,
            idx=check.idx,
            name=check.name,
            reasons=[reason.message for reason in check.reasons],
        )

    def _summary(self, outcome: str) -> dict[str, Any]:
        states = {"valid": 0, "invalid": 0}
        reasons: dict[str, int] = {}
        finished = outcome == "finished"
        surplus = 0
        for check in read_checks(self._directory):
            if finished and bytes.fromhex(check.id) in self._valid:  # was valid, and was not drawn any more
                surplus += 1
                continue
            states[check.state] += 1
            for kind in {reason.kind for reason in check.reasons}:
                reasons[kind] = reasons.get(kind, 0) + 1
        planned = self._drawn if finished else max(self._planned, self._drawn)
        return {
            "outcome": outcome,
            "planned": planned,
            "outcomes": {**states, "missing": max(0, planned - sum(states.values()))},
            "pass_reward": self._settings.pass_reward,
            "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])),
            "surplus": surplus,
        }

    def _session(self, event: str, **fields: Any) -> None:
        self._directory.append_session(encode_row({"event": event, "at": now(), **fields}))
        self._directory.note(
            f"{now()} {event} {' '.join(f'{name}={value}' for name, value in fields.items())}"
        )

    def _tell(self, event: str, message: str) -> None:
        self._directory.note(f"{now()} {event}: {message}")
        self._progress.tell(event, message=message)
