"""A small taskset for benchmarks."""

from __future__ import annotations

from collections.abc import Iterable

from taskmill.records import Trace
from taskmill.tasks import Task, TaskData, Taskset, reward


class Sum(TaskData):
    answer: int


class SumTask(Task[Sum]):
    @reward
    async def right(self, trace: Trace) -> float:
        return float(trace.messages[-1].content == str(self.data.answer))


class SumsTaskset(Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        return [SumTask(Sum(idx=idx, prompt=f"{idx} + {idx}?", answer=2 * idx)) for idx in range(100)]
