"""What a worker process of the environment server does: it has the taskset, and makes its rollouts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from taskmill.engine.environment import (
    TASKS_A_PAGE,
    GroupRequest,
    RolloutRequest,
    read_request,
)
from taskmill.engine.sandboxes import SandboxSource
from taskmill.errors import ConfigurationError, StoreError, TaskError
from taskmill.models.base import Model
from taskmill.models.choose import open_model
from taskmill.programs.agent import error_record
from taskmill.records import Trace
from taskmill.sandbox.choose import Kind
from taskmill.serve.logs import LogLines
from taskmill.serve.places import worker_place
from taskmill.serve.pool import ModelPool
from taskmill.serve.source import TaskSource
from taskmill.store.jsonl import encode_row
from taskmill.tasks.groups import score_group
from taskmill.tasks.registry import find_taskset
from taskmill.tasks.rollout import TaskRollout
from taskmill.tasks.task import Task


class WorkerSettings(Struct, frozen=True):
    """What a worker is told: the taskset by name, its configuration, and where its sandboxes stand."""

    taskset: str
    config: Mapping[str, Any]
    workspaces: str
    sandbox: Kind = "auto"


class Told(Struct, frozen=True):
    """What a worker says of itself before its first request."""

    num_tasks: int | None
    requires_group_scoring: bool
    taskset: str
    first_hashes: list[str]
    problem: str | None = None


class Outcome(Struct, frozen=True, array_like=True):
    """What comes of a request: how each rollout ended, and the body of the answer as JSON."""

    states: list[str]
    body: bytes


@asynccontextmanager
async def open_worker(settings: bytes) -> AsyncIterator[RolloutWorker]:
    """Make the worker of an environment server: load the taskset, open its judges."""
    told = msgspec.msgpack.decode(settings, type=WorkerSettings)
    logging.basicConfig(handlers=[LogLines()], level=logging.WARNING, force=True)
    taskset = find_taskset(told.taskset)(told.config)
    source = TaskSource(taskset)
    await source.open()
    async with AsyncExitStack() as stack:
        judges: dict[str, Model] = {}
        for name, judge in taskset.config.task.judges.items():
            if judge.model is None:
                raise ConfigurationError(f"judge {name!r} has no model: set task.judges.{name}.model")
            key = os.environ.get(judge.api_key_env)
            judges[name] = open_model(judge.model, base_url=judge.base_url, api_key=key)
            stack.push_async_callback(judges[name].close)
        directory = worker_place(Path(told.workspaces), os.getpid())
        sandboxes = SandboxSource(told.sandbox, directory, _note)
        stack.callback(sandboxes.close)
        pool = ModelPool()
        stack.push_async_callback(pool.close)
        worker = RolloutWorker(source, judges, sandboxes, pool, taskset.name)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(source.run()), group.create_task(pool.run())]
            try:
                yield worker
            finally:
                for task in running:
                    task.cancel()


class RolloutWorker:
    """Answers requests for rollouts, many at once."""

    def __init__(
        self,
        source: TaskSource,
        judges: Mapping[str, Model],
        sandboxes: SandboxSource,
        pool: ModelPool,
        name: str,
    ) -> None:
        self._source = source
        self._judges = judges
        self._sandboxes = sandboxes
        self._pool = pool
        self.told = msgspec.msgpack.encode(
            Told(
                source.num_tasks,
                source.scored_in_groups,
                name,
                source.first_hashes,
                None if source.problem is None else str(source.problem),
            )
        )

    async def answer(self, kind: str, body: bytes) -> bytes:
        """Answer one request: `rollout`, `group` or `tasks`. Gives an encoded `Outcome`."""
        if kind == "rollout":
            outcome = await self._one(read_request(RolloutRequest, body))
        elif kind == "group":
            outcome = await self._group(read_request(GroupRequest, body))
        else:
            start, count = msgspec.msgpack.decode(body, type=tuple[int, int])
            listed = await self._source.listing(start, min(count, TASKS_A_PAGE))
            outcome = Outcome([], encode_row(listed).rstrip(b"\n"))
        return msgspec.msgpack.encode(outcome)

    async def _one(self, asked: RolloutRequest) -> Outcome:
        task = await self._source.task(asked.task_idx)
        async with self._pool.lease(asked.model) as model:
            trace = await self._rollout(task, asked, asked.number, model)
        return Outcome([trace.state], _json(trace))

    async def _group(self, asked: GroupRequest) -> Outcome:
        task = await self._source.task(asked.task_idx)
        places = asyncio.Semaphore(asked.concurrency or asked.n)

        async def in_place(number: int) -> Trace:
            async with places:
                return await self._rollout(task, asked, number, model)

        try:
            async with self._pool.lease(asked.model) as model, asyncio.TaskGroup() as group:
                made = [group.create_task(in_place(number)) for number in range(asked.n)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        traces: Sequence[Trace] = [task.result() for task in made]
        traces = await score_group(task, traces)
        return Outcome([trace.state for trace in traces], b"[" + b",".join(map(_json, traces)) + b"]")

    async def _rollout(
        self, task: Task[Any], asked: RolloutRequest | GroupRequest, number: int, model: Model
    ) -> Trace:
        try:
            rollout = TaskRollout(
                task,
                rollout_id=f"{self._source.hash(asked.task_idx)}-{number}",
                number=number,
                attempt=asked.attempt,
                model=model,
                judges=self._judges,
                make_sandbox=self._sandboxes.make,
                settings=asked.settings(),
            )
        except ConfigurationError as error:  # of the task, not of the request
            raise TaskError(f"task_idx {asked.task_idx} can't be rolled out: {error}") from error
        try:
            await rollout.run()
        except StoreError:
            raise
        except Exception as error:
            trace = rollout.trace()
            errors = (*trace.errors, error_record(error))
            return replace(trace, state="failed", stop_reason="error", reward=None, errors=errors)
        return rollout.trace()


def _json(trace: Trace) -> bytes:
    return encode_row(trace).rstrip(b"\n")


def _note(event: str, message: str) -> None:
    logging.getLogger(__name__).info("%s: %s", event, message)


__all__ = ["Outcome", "Told", "WorkerSettings", "open_worker"]
