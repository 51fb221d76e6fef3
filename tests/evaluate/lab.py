"""Tasksets and models for the tests of evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.records import Trace
from taskmill.tasks import Task, TaskConfig, TaskData, Taskset, TasksetConfig, group_reward, metric, reward


class SumData(TaskData):
    answer: int


class SumTask(Task[SumData]):
    @reward
    def right(self, trace: Trace) -> float:
        return float(trace.messages[-1].content.strip() == str(self.data.answer))

    @metric
    def length(self, trace: Trace) -> int:
        return len(trace.messages[-1].content)

    def solve(self) -> str:
        return str(self.data.answer)


class SumConfig(TasksetConfig):
    start: int = 0


class SumsTaskset(Taskset[SumTask]):
    """Sums for ever. `built` counts the tasks that were built, in all objects together."""

    INFINITE = True
    Config = SumConfig
    built: ClassVar[int] = 0
    task_class: ClassVar[type[SumTask]] = SumTask

    def load(self) -> Iterator[SumTask]:
        for idx in itertools.count():
            type(self).built += 1
            first = self.config.start + idx  # type: ignore[attr-defined]
            data = SumData(idx=idx, prompt=f"{first}+1=", answer=first + 1)
            yield self.task_class(data, self.config.task)


class TenSumsTaskset(Taskset[SumTask]):
    """Ten of them, as a list."""

    def load(self) -> list[SumTask]:
        return [SumTask(SumData(idx=n, prompt=f"{n}+1=", answer=n + 1)) for n in range(10)]


class RankedTask(SumTask):
    @group_reward(weight=0.5)
    def rank(self, traces: list[Trace]) -> list[float]:
        return [float(place) for place, _ in enumerate(traces)]


class RankedTaskset(SumsTaskset):
    task_class = RankedTask


def adder(request: Request) -> str:
    """Answers a sum."""
    first, _, second = request.messages[-1].content.removesuffix("=").partition("+")
    return str(int(first) + int(second))


class Adder(ScriptedModel):
    """A model that can add; `prompts` is what it was asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self._say, name="adder", **options)
        self.prompts: list[str] = []

    def _say(self, request: Request) -> str:
        self.prompts.append(request.messages[-1].content)
        return adder(request)


def rows(path: Path, name: str = "traces.jsonl") -> list[dict[str, Any]]:
    """The stored rows of a run."""
    return [msgspec.json.decode(line) for line in (path / name).read_bytes().splitlines()]


__all__ = [
    "Adder",
    "RankedTask",
    "RankedTaskset",
    "SumData",
    "SumTask",
    "SumsTaskset",
    "TaskConfig",
    "TenSumsTaskset",
    "adder",
    "rows",
]
