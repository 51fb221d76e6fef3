"""The tasks of one worker, by number: a finite taskset built at the start, an infinite one as numbers are asked for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterator
from typing import Any

from taskmill.engine.environment import MAX_LAZY_TASKS, TaskListing, cap_message
from taskmill.errors import TaskIndexError, TasksetError
from taskmill.store.jsonl import content_hash
from taskmill.tasks.groups import has_group_rewards
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Taskset
from taskmill.tools.threads import THREADS

FIRST = 8
"""Tasks whose hashes are compared between workers."""

SLICE = 0.05
"""Seconds that tasks are made for, between two looks at who still waits for one."""

PATIENCE = 600.0
"""Seconds after which a request for a task that is not made yet fails."""


class TaskSource:
    """Tasks of `taskset` by number. Making them holds up nobody: it happens in a thread, in slices.

    An infinite taskset is kept up to the highest number that was asked for; `cap` is the first number that is not
    made. What `load` raised at some task is raised again for that number and all later ones.
    """

    def __init__(self, taskset: Taskset[Any], cap: int = MAX_LAZY_TASKS) -> None:
        self._taskset = taskset
        self._cap = cap
        self._tasks: list[Task[Any]] = []
        self._hashes: dict[int, str] = {}
        self._coming: Iterator[Task[Any]] = iter(())
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._wanted = asyncio.Event()
        self.infinite = taskset.INFINITE
        self.problem: TasksetError | None = None

    async def open(self) -> None:
        """Build what is built at the start. Raises `TasksetError` where not even a first task can be made."""
        await THREADS.run(self._begin)
        if self.problem is not None and not self._tasks:
            raise self.problem

    def _begin(self) -> None:
        try:
            self._coming = iter(self._taskset.checked())
            if self.infinite:
                self._tasks.extend(itertools.islice(self._coming, FIRST))
                if len(self._tasks) < FIRST:
                    self._end_of_load()
            else:
                for task in self._coming:
                    self._tasks.append(task)
        except TasksetError as problem:
            self.problem = problem

    def _end_of_load(self) -> None:
        self.problem = TasksetError(
            f"taskset {self._taskset.name!r} is INFINITE, but its load ended after {len(self._tasks)} tasks"
        )

    @property
    def first_hashes(self) -> list[str]:
        """Hashes of the first tasks: two workers of one taskset must have the same."""
        return [self.hash(idx) for idx in range(min(FIRST, len(self._tasks)))]

    @property
    def num_tasks(self) -> int | None:
        """How many there are; `None` for an infinite taskset."""
        return None if self.infinite else len(self._tasks)

    @property
    def scored_in_groups(self) -> bool:
        """Whether any task, as far as they are made, has group rewards."""
        kinds = {type(task): task for task in self._tasks}
        return any(has_group_rewards(task) for task in kinds.values())

    def hash(self, idx: int) -> str:
        """The hash of a task that is made: what its rollouts' ids begin with."""
        known = self._hashes.get(idx)
        if known is None:
            known = self._hashes[idx] = content_hash(self._tasks[idx].data.fields()).hex()
        return known

    async def task(self, idx: int) -> Task[Any]:
        """The task of that number, made if need be.

        Raises `TaskIndexError` for a number there is not, and `TasksetError` where `load` failed before it.
        """
        if idx < len(self._tasks):
            return self._tasks[idx]
        if self.problem is not None:
            raise self._failed()
        if not self.infinite:
            size = len(self._tasks)
            raise TaskIndexError(
                f"task_idx {idx} is past the end: taskset {self._taskset.name!r} has {size} tasks"
                + (f", 0 to {size - 1}" if size else "")
            )
        if idx >= self._cap:
            raise TaskIndexError(cap_message(idx, self._cap))
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (idx, next(self._order), made))
        self._wanted.set()
        try:
            async with asyncio.timeout(PATIENCE):
                await made
        except TimeoutError:
            raise TasksetError(
                f"taskset {self._taskset.name!r} did not come to its task {idx} within {PATIENCE:g} s; "
                f"{len(self._tasks):,} tasks are made so far"
            ) from None
        if idx >= len(self._tasks):
            raise self._failed()
        return self._tasks[idx]

    async def listing(self, start: int, count: int) -> list[TaskListing]:
        """What the tasks from `start` on are. Short, or empty, at the end of a finite taskset."""
        found: list[TaskListing] = []
        for idx in range(start, start + count):
            if found and self.problem is not None and idx >= len(self._tasks):
                break
            if not self.infinite and self.problem is None and idx >= len(self._tasks):
                break
            task = await self.task(idx)
            found.append(TaskListing(idx, self.hash(idx), has_group_rewards(task), task.data.fields()))
        return found

    def _failed(self) -> TasksetError:
        return TasksetError(str(self.problem))

    async def run(self) -> None:
        """Make tasks while somebody waits for some. Runs as long as the worker."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._waiting:
                highest = (
                    max(idx for idx, _, made in self._waiting if not made.done()) if self._live() else -1
                )
                if highest >= len(self._tasks) and self.problem is None:
                    await THREADS.run(self._make, upto=highest)
                self._serve()

    def _live(self) -> bool:
        """Forget those who went away; true where somebody is left."""
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        heapq.heapify(self._waiting)
        return bool(self._waiting)

    def _serve(self) -> None:
        while self._waiting and (self.problem is not None or self._waiting[0][0] < len(self._tasks)):
            _, _, made = heapq.heappop(self._waiting)
            if not made.done():
                made.set_result(None)

    def _make(self, upto: int) -> None:
        until = time.monotonic() + SLICE
        try:
            while len(self._tasks) <= upto and time.monotonic() < until:
                self._tasks.append(next(self._coming))
                time.sleep(0)  # gives the event loop its turn at the interpreter
        except StopIteration:
            self._end_of_load()
        except TasksetError as problem:
            self.problem = problem
