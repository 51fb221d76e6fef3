"""Tasksets that workers can import, well made and not."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from taskmill.records import Trace
from taskmill.tasks import Task, TaskData, Taskset, TasksetConfig, group_reward, metric, reward
from taskmill.tools import tool


class Sum(TaskData):
    answer: int


class SumTask(Task[Sum]):
    @reward
    def right(self, trace: Trace) -> float:
        return float(trace.messages[-1].content.strip() == str(self.data.answer))

    @metric
    def words(self, trace: Trace) -> int:
        return len(trace.messages[-1].content.split())


def sums(count: int | None = None) -> Iterator[SumTask]:
    draw = random.Random(7)
    for idx in itertools.count() if count is None else range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        yield SumTask(Sum(idx=idx, prompt=f"{a} + {b}?", answer=a + b))


class SumsConfig(TasksetConfig):
    size: int = 10


class SumsTaskset(Taskset[SumTask]):
    """Finite."""

    Config = SumsConfig

    def load(self) -> Iterable[SumTask]:
        return list(sums(self.config.size))


class EndlessTaskset(Taskset[SumTask]):
    """Infinite."""

    INFINITE = True

    def load(self) -> Iterable[SumTask]:
        return sums()


class GroupTask(SumTask):
    @group_reward(weight=2.0)
    def rank(self, traces: list[Trace]) -> list[float]:
        return [float(trace.number) for trace in traces]


class GroupsTaskset(Taskset[GroupTask]):
    def load(self) -> Iterable[GroupTask]:
        return [GroupTask(task.data) for task in sums(3)]


class Placed(TaskData):
    folder: str


class DeadlyTask(Task[Placed]):
    """Kills its worker, each time or only the first time."""

    @reward
    def deadly(self) -> float:
        number = len(os.listdir(self.data.folder))
        if self.data.name != "once" or number == 0:
            Path(self.data.folder, f"{os.getpid()}-{number}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0


class PlacedConfig(TasksetConfig):
    folder: str


class DeadlyTaskset(Taskset[Any]):
    """Task 0 kills each worker that tries it, task 1 only the first one, task 2 none."""

    Config = PlacedConfig

    def load(self) -> Iterable[Any]:
        return [
            DeadlyTask(Placed(idx=0, prompt="0", folder=self.config.folder)),
            DeadlyTask(Placed(idx=1, prompt="1", name="once", folder=self.config.folder)),
            SumTask(Sum(idx=2, prompt="2", answer=2)),
        ]


class BusyTask(Task[Placed]):
    """Runs a command that does not end, by a tool."""

    def tools(self) -> list[Any]:
        folder = self.data.folder

        @tool
        async def linger() -> str:
            """Wait for long."""
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            Path(folder, f"{process.pid}").touch()
            try:
                await process.wait()
            finally:
                process.kill()
                Path(folder, "cancelled").touch()
            return "done"

        return [linger, *self.more_tools()]

    def more_tools(self) -> list[Any]:
        return []


class TerminalTask(BusyTask):
    def more_tools(self) -> list[Any]:
        return ["terminal"]


class BusyTaskset(Taskset[Any]):
    Config = PlacedConfig

    def load(self) -> Iterable[Any]:
        return [TerminalTask(Placed(idx=idx, prompt=str(idx), folder=self.config.folder)) for idx in range(5)]


class RaisesAtOnceTaskset(Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        raise ValueError("the file of questions is empty")


class RaisesAtFifthTaskset(Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        yield from sums(5)
        raise ValueError("row 5 is damaged")


class RaisesLaterTaskset(Taskset[SumTask]):
    INFINITE = True

    def load(self) -> Iterable[SumTask]:
        yield from sums(20)
        raise ValueError("row 20 is damaged")


class GarbageTaskset(Taskset[Any]):
    def load(self) -> Iterable[Any]:
        yield from sums(2)
        yield {"prompt": "no task at all"}


class ShortInfiniteTaskset(Taskset[SumTask]):
    INFINITE = True

    def load(self) -> Iterable[SumTask]:
        return sums(12)


class UnlikeTaskset(Taskset[SumTask]):
    """Another sequence in each process, from task 3 on."""

    def load(self) -> Iterable[SumTask]:
        for task in sums(6):
            yield (
                task
                if task.data.idx < 3
                else SumTask(Sum(idx=task.data.idx, prompt=str(os.getpid()), answer=0))
            )


class SlowTaskset(Taskset[SumTask]):
    """Infinite; each task takes a while of pure computing."""

    INFINITE = True

    def load(self) -> Iterable[SumTask]:
        for task in sums():
            if task.data.idx >= 8:
                until = time.perf_counter() + 0.002
                while time.perf_counter() < until:
                    pass
            yield task
