"""A run whose rollouts an environment server makes: the same files, the same results for the same seeds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from taskmill.engine.envclient import EnvClient
from taskmill.engine.environment import TASKS_A_PAGE, EndpointChoice, Info, TaskListing
from taskmill.engine.progress import Progress
from taskmill.engine.scheduler import run_lanes
from taskmill.errors import (
    ConfigurationError,
    ServerError,
    TaskmillError,
    TasksetError,
)
from taskmill.evaluation.begun import Begun
from taskmill.evaluation.run import EvalRun
from taskmill.evaluation.settings import EvalSettings
from taskmill.evaluation.stored import rollout_id
from taskmill.models.base import Model
from taskmill.programs.agent import error_record
from taskmill.records import State, Trace
from taskmill.store.run import RunDirectory
from taskmill.tasks.taskset import Draw, Taskset


class Serving(Protocol):
    """A server of the caller's own, which lives as long as the run: an async context manager that knows its `url`."""

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any: ...


class ServedLane(NamedTuple):
    """What is asked for at once: rollouts of one task, one of them, or all where they are scored as a group."""

    task: TaskListing
    numbers: Sequence[int]


class ServedRun(EvalRun):
    """One execution by way of a server. The server says what the tasks are; nothing of them is loaded here."""

    def __init__(
        self,
        taskset: Taskset[Any],
        settings: EvalSettings,
        *,
        client: EnvClient,
        info: Info,
        endpoint: EndpointChoice,
        directory: RunDirectory,
        progress: Progress,
        model: Model,
    ) -> None:
        super().__init__(
            taskset,
            settings,
            directory=directory,
            progress=progress,
            model=model,
            judges={},
            begun=Begun(Draw(iter(()), 0), None),
        )
        self._client = client
        self._info = info
        self._asked: dict[str, Any] = {
            "model": endpoint,
            "sampling": settings.sampling,
            "reasoning": settings.reasoning,
            "provider": settings.provider,
            "limits": settings.limits,
            "tool_result_limit": settings.tool_result_limit,
        }
        self._turn = asyncio.Lock()

    def _draw(self) -> Draw[Any]:
        """Nothing is drawn here but numbers: see `_numbers`."""
        settings, size = self._settings, self._info.num_tasks
        if size is None and settings.shuffle:
            self._tell(
                "warning",
                f"shuffle is a no-op on an infinite taskset: the server gives its first {settings.num_tasks} tasks",
            )
        if self._info.problem is not None and settings.shuffle:
            raise TasksetError(self._info.problem)
        counts = [count for count in (size, settings.num_tasks) if count is not None]
        return Draw(iter(()), min(counts))

    async def _run(self, tasks: Draw[Any]) -> None:
        self._spent.begin()
        await run_lanes(
            self._served_lanes(tasks.total or 0),
            self._run_served_lane,
            window=self._settings.concurrency,
            stop=lambda: self._gate.closed or self._spent.reached() is not None,
        )

    async def _served_lanes(self, count: int) -> AsyncIterator[ServedLane]:
        """What is not done, task by task, as there is a place for it."""
        rollouts = self._settings.num_rollouts
        try:
            async for task in self._listed(count):
                missing = self._missing(task.hash)
                if missing and task.scored_in_groups:
                    yield ServedLane(task, range(rollouts))
                elif missing:
                    for number in missing:
                        yield ServedLane(task, (number,))
        except TasksetError as problem:  # raised when what is under way has ended: it was paid for
            self._spoilt = problem
            return
        wanted = self._settings.num_tasks
        if self._info.problem is not None and (wanted is None or wanted > count):
            self._spoilt = TasksetError(self._info.problem)
            return
        self._all_drawn()

    async def _listed(self, count: int) -> AsyncIterator[TaskListing]:
        """The first `count` tasks of the server, or so many of all of them in the order of the shuffle."""
        settings, size = self._settings, self._info.num_tasks
        if settings.shuffle and size is not None:
            numbers = list(range(size))
            random.Random(settings.seed).shuffle(numbers)
            for number in numbers[:count]:
                yield (await self._client.tasks(number, 1))[0]
            return
        start = 0
        while start < count:
            page = await self._client.tasks(start, min(TASKS_A_PAGE, settings.concurrency, count - start))
            for task in page:
                yield task
            start += len(page)

    async def _run_served_lane(self, lane: ServedLane) -> None:
        self._raise_problem()
        self._progress.in_flight += len(lane.numbers)
        try:
            traces = await (self._group(lane) if lane.task.scored_in_groups else self._single(lane))
        except asyncio.CancelledError:
            for number in lane.numbers:
                self._record(self._without_answer(lane, number, "cancelled", None))
            raise
        finally:
            self._progress.in_flight -= len(lane.numbers)
        for trace in traces:
            self._spent.add(trace.billed, tool_seconds=trace.timing.tools)
            self._record(trace)

    async def _single(self, lane: ServedLane) -> Sequence[Trace]:
        (number,) = lane.numbers

        async def ask() -> Sequence[Trace]:
            attempt = self._attempt(lane, number)
            idx = lane.task.task_idx
            return [await self._client.rollout(idx, number=number, attempt=attempt, **self._asked)]

        return await self._answered(lane, ask)

    async def _group(self, lane: ServedLane) -> Sequence[Trace]:
        """A whole group, which takes as many of the places as it has rollouts under way at once."""
        size = len(lane.numbers)
        places = min(size, self._settings.concurrency)

        async def ask() -> Sequence[Trace]:
            attempt = max(self._attempt(lane, number) for number in lane.numbers)
            idx = lane.task.task_idx
            return await self._client.group(idx, size, attempt=attempt, concurrency=places, **self._asked)

        taken = 0
        try:
            async with self._turn:  # or two groups could each have half of what they need, and wait for ever
                for _ in range(places):
                    await self._places.acquire()
                    taken += 1
            return await self._answered(lane, ask)
        finally:
            for _ in range(taken):
                self._places.release()

    async def _answered(
        self, lane: ServedLane, ask: Callable[[], Awaitable[Sequence[Trace]]]
    ) -> Sequence[Trace]:
        """The traces, or failed ones where the server could not make them. A server that is away ends the run."""
        try:
            traces = await ask()
        except (ServerError, ConfigurationError):
            raise
        except TaskmillError as error:
            return [self._without_answer(lane, number, "failed", error) for number in lane.numbers]
        wanted = [rollout_id(lane.task.hash, number) for number in lane.numbers]
        if [trace.id for trace in traces] != wanted:
            raise ServerError(
                f"the server's task {lane.task.task_idx} is not the one it listed: did it change?"
            )
        return traces

    def _attempt(self, lane: ServedLane, number: int) -> int:
        return self._stored.attempt(rollout_id(lane.task.hash, number))

    def _without_answer(
        self, lane: ServedLane, number: int, state: State, error: TaskmillError | None
    ) -> Trace:
        """The record of a rollout whose trace never came."""
        return Trace(
            id=rollout_id(lane.task.hash, number),
            state=state,
            task=lane.task.task,
            model=self._model.name,
            sampling=msgspec.to_builtins(self._told.sampling),
            stop_reason="error" if error is not None else "cancelled",
            errors=() if error is None else (error_record(error),),
            number=number,
            attempt=self._attempt(lane, number),
            group_size=len(lane.numbers) if lane.task.scored_in_groups else 0,
        )


def check_info(info: Info, taskset: Taskset[Any], num_tasks: int | None) -> None:
    """Raise `ConfigurationError` where a run of `taskset` can't be had of that server."""
    if info.taskset != taskset.name:
        raise ConfigurationError(f"the server serves {info.taskset!r}, not {taskset.name!r}")
    if info.num_tasks is None and num_tasks is None:
        raise ConfigurationError(infinite_message(info.taskset))


def infinite_message(name: str) -> str:
    """What is said where a run by way of a server would never end."""
    return f"{name} is infinite - bound the run with -n/--num-tasks"
