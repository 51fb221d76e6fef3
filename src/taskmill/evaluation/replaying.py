"""Scoring stored traces again, with today's rewards and no model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, ValidationError

from taskmill.engine.progress import Progress
from taskmill.engine.scheduler import run_lanes
from taskmill.engine.traces import trace_of
from taskmill.errors import ConfigurationError, RunAbortedError, StoreError, TasksetError
from taskmill.evaluation.runner import (
    SCORING,
    EvalResult,
    Listener,
    as_taskset,
    as_toml,
    configured,
    new_directory,
    stored_config,
)
from taskmill.evaluation.summary import summarize
from taskmill.programs.agent import error_record
from taskmill.records import Trace
from taskmill.store.jsonl import content_hash, encode_json, encode_row
from taskmill.store.run import RunDirectory
from taskmill.tasks.explain import explain
from taskmill.tasks.groups import has_group_rewards, score_group
from taskmill.tasks.limits import Count
from taskmill.tasks.registry import find_taskset
from taskmill.tasks.scores import score_again
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Taskset

logger = logging.getLogger(__name__)

COMMAND = "replay"
"""What the configuration of such a run says it is."""

YIELD_EVERY = 1000
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""


class _TaskHead(Struct):
    idx: int


class _Head(Struct):
    """The fields of a stored trace that say whose it is."""

    id: str
    task: _TaskHead
    number: int = 0


_decode = msgspec.json.Decoder(_Head).decode


class _Place(NamedTuple):
    """Where a trace stands in the file of the old run."""

    idx: int
    number: int
    offset: int


class _Lane(NamedTuple):
    """Traces of one task, `None` where the taskset has none of that number any more."""

    idx: int
    task: Task[Any] | None
    places: Sequence[_Place]


class ReplaySettings(BaseModel):
    """The settings of a replay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    concurrency: Count = 16
    """Traces scored at once."""


class Replay:
    """The run in `path`, to be scored again into a new directory beside it. The old one is only read.

    Rewards, metrics and group rewards are new, all else of a trace is taken over. The grades of judges are those they
    gave: asking them would be a model call. Traces whose conversation failed stay as they are. `taskset` is for one
    that is no name, or has other settings; otherwise it is found by the name and the settings that the run has.

    `settings` are the fields of `ReplaySettings`. Raises `RunNotFoundError`, or `ConfigurationError` where `path`
    holds another kind of run.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        taskset: Taskset[Any] | type[Taskset[Any]] | str | None = None,
        on_event: Listener | None = None,
        **settings: Any,
    ) -> None:
        self._old = RunDirectory(path)
        stored = stored_config(path, "eval", COMMAND)
        try:
            self._settings = ReplaySettings.model_validate(settings)
        except ValidationError as problem:
            raise ConfigurationError(explain(problem, ReplaySettings)) from None
        fields = dict(stored["taskset"])
        reference = fields.pop("name")
        if taskset is None:
            taskset = configured(find_taskset(reference), fields)
        self.taskset = as_taskset(taskset)
        self.config: dict[str, Any] = {
            **{name: value for name, value in stored.items() if name != SCORING},
            "command": COMMAND,
            "replay_of": self._old.path.resolve().name,
            "taskset": {"name": reference, **self.taskset.config.model_dump(mode="json")},
        }
        self.progress = Progress(on_event)
        self.path: Path | None = None

    async def run(self) -> EvalResult:
        """Score every stored trace; gives the new run, whose `summary` says how it came out.

        Raises `TasksetError` when the taskset can't be loaded, `StorageFullError` when nothing more can be written.
        """
        if self.path is not None:
            raise RunAbortedError("this replay was run already; make another")
        places = await self._index()
        # As it was written, where that says the place: a run that is named by "." stands in "..".
        old = self._old.path
        parent = old.parent if old.name not in ("", "..") and not old.is_symlink() else old.resolve().parent
        path = self.path = new_directory(parent, f"{self.taskset.name}--{COMMAND}")
        async with AsyncExitStack() as stack:
            directory = RunDirectory(path)
            directory.open_for_writing(self.config, resume=False)
            stack.push_async_callback(directory.close)
            directory.write_file("config.toml", as_toml(self.config))
            self.progress.begin(len(places), 0)

            async def work(lane: _Lane) -> None:
                for trace in await self._scored(lane):
                    await directory.append_trace(encode_row(trace))
                    self._tell(trace)

            outcome = "cancelled"
            try:
                await run_lanes(self._lanes(places), work, window=self._settings.concurrency)
                outcome = "finished"
            except Exception:
                outcome = "failed"
                raise
            finally:
                if directory.commit.failed is None:
                    await directory.commit.flush()
                    summary = await asyncio.to_thread(
                        summarize,
                        directory,
                        planned=len(places),
                        num_rollouts=self.config["num_rollouts"],
                        pass_reward=self.config["pass_reward"],
                        outcome=outcome,
                    )
                    directory.write_file("summary.json", encode_json(summary))
            return EvalResult(path, summary)

    async def _index(self) -> list[_Place]:
        """Where each trace stands, by task. Memory: three numbers a trace."""
        places: list[_Place] = []
        damaged = 0
        for count, (offset, line) in enumerate(self._old.read_traces()):
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            try:
                head = _decode(line)
            except (msgspec.DecodeError, RecursionError):
                damaged += 1
                continue
            places.append(_Place(head.task.idx, head.number, offset))
        if damaged:
            logger.warning("%d lines of traces.jsonl can't be read and are passed over", damaged)
        places.sort()
        return places

    def _lanes(self, places: Sequence[_Place]) -> Iterator[_Lane]:
        """The traces with their tasks, which are built no further than the last one that is needed."""
        tasks = self.taskset.checked()
        task: Task[Any] | None = None
        for idx, of_task in groupby(places, lambda place: place.idx):
            while task is None or task.data.idx < idx:
                task = next(tasks, None)
                if task is None:
                    break
            found = task if task is not None and task.data.idx == idx else None
            if found is not None and has_group_rewards(found):
                yield _Lane(idx, found, list(of_task))
                continue
            for place in of_task:
                yield _Lane(idx, found, [place])

    async def _scored(self, lane: _Lane) -> list[Trace]:
        traces = []
        for place in lane.places:
            trace = trace_of(self._old.trace_at(place.offset))
            if trace is None:
                raise StoreError(
                    f"a trace of {str(self._old.path)!r} was changed while it was read: try again"
                )
            traces.append(await self._again(lane, trace))
        if lane.task is None or not has_group_rewards(lane.task):
            return traces
        if any(_is_lost(trace) for trace in traces):
            return traces
        return await score_group(lane.task, traces, of=self.config["num_rollouts"])

    async def _again(self, lane: _Lane, trace: Trace) -> Trace:
        hash = trace.id.rpartition("-")[0]
        if lane.task is None:
            return _lost(trace, f"the taskset has no task {lane.idx} any more")
        if content_hash(lane.task.data.fields()).hex() != hash:
            return _lost(trace, f"task {lane.idx} of the taskset is another one than it was")
        return await score_again(lane.task, trace)

    def _tell(self, trace: Trace) -> None:
        self.progress.recorded(
            trace.state,
            calls=0,
            tool_calls=0,
            tokens=0,
            cost=0.0,
            rollout_id=trace.id,
            idx=trace.task.get("idx"),
            number=trace.number,
            reward=trace.reward,
            reason=trace.stop_reason,
            error=trace.errors[-1].type if trace.errors and trace.state == "failed" else None,
        )


async def replay(path: Path | str, **options: Any) -> EvalResult:
    """Score the traces of the run in `path` again, into a new run beside it. `options` are those of `Replay`."""
    return await Replay(path, **options).run()


def _lost(trace: Trace, message: str) -> Trace:
    if trace.state == "cancelled":
        return trace
    errors = (*trace.errors, error_record(TasksetError(message)))
    return replace(trace, state="failed", reward=None, rewards={}, metrics={}, errors=errors)


def _is_lost(trace: Trace) -> bool:
    return bool(trace.errors) and trace.errors[-1].type == TasksetError.__name__


__all__ = ["Replay", "replay"]
