"""Runs of tasksets: memory and time per rollout as a run grows, and CPU time per model call against a batch's."""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import overhead
from taskmill.testing.endpoint import EndpointProcess

SMALL, LARGE = 1_000, 100_000
GROWTH_GOAL, MEMORY_GOAL, OVERHEAD_GOAL = 1.2, 1.3, 1.2


def endless() -> Any:
    """An infinite taskset of one-turn tasks."""
    from taskmill.tasks import Task, TaskData, Taskset, reward

    class Echo(Task[TaskData]):
        @reward
        def said(self, messages: Any) -> float:
            return float(messages[-1].content == "yes")

    class EchoTaskset(Taskset[Echo]):
        INFINITE = True

        def load(self) -> Iterator[Echo]:
            return (Echo(TaskData(idx=idx, prompt=f"Say {idx}.")) for idx in itertools.count())

    return EchoTaskset()


async def grow(rollouts: int) -> None:
    """Print the CPU microseconds a rollout takes, and the peak memory in KiB."""
    from taskmill.evaluation import evaluate
    from taskmill.testing import ScriptedModel

    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        result = await evaluate(
            endless(), model=ScriptedModel(lambda request: "yes"), num_tasks=rollouts, output_dir=folder
        )
        taken = time.process_time() - before
        assert result.summary["outcomes"]["completed"] == rollouts
        assert result.reward == 1.0
    print(taken / rollouts * 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


async def mill(url: str, prompts: list[str]) -> float:
    """CPU seconds of the rollouts of `benchmarks.overhead`, as a taskset with one reward."""
    from taskmill import tool
    from taskmill.evaluation import evaluate
    from taskmill.tasks import Task, TaskData, Taskset, reward

    @tool
    def add(a: int, b: int) -> dict[str, int]:
        """Add two numbers."""
        return {"sum": a + b}

    class Sum(Task[TaskData]):
        def tools(self) -> list[Any]:
            return [add]

        @reward
        def answered(self, messages: Any) -> float:
            return float(messages[-1].role == "assistant")

    class SumTaskset(Taskset[Sum]):
        def load(self) -> Iterator[Sum]:
            return (Sum(TaskData(idx=idx, prompt=prompt)) for idx, prompt in enumerate(prompts))

    with tempfile.TemporaryDirectory() as folder:
        before = time.process_time()
        result = await evaluate(
            SumTaskset(),
            model="scripted",
            base_url=url,
            api_key="none",
            concurrency=overhead.WIDTH,
            output_dir=Path(folder),
        )
        taken = time.process_time() - before
        assert result.summary["outcomes"]["completed"] == len(prompts)
        assert result.summary["calls"] == 2 * len(prompts)
    return taken


def child(*arguments: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.tasksets", *arguments]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [float(number) for number in said.split()]


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    small = [child("grow", str(SMALL)) for _ in range(3)]
    large = child("grow", str(LARGE))
    options = ("--script", "tool_then_answer", "--tool", "add", "--arguments", '{"a": 1, "b": 2}')
    with EndpointProcess(*options) as endpoint:
        pairs = [
            (overhead.measure(endpoint.url, "mill"), child("mill", endpoint.url)[0])
            for _ in range(overhead.ROUNDS)
        ]
    batch, taskset = (min(taken) for taken in zip(*pairs, strict=True))
    return [
        (
            f"CPU per rollout at n = {LARGE:,} / at n = {SMALL:,}",
            large[0] / statistics.median(taken for taken, _ in small),
            GROWTH_GOAL,
        ),
        (
            f"peak memory at n = {LARGE:,} / at n = {SMALL:,}",
            large[1] / statistics.median(peak for _, peak in small),
            MEMORY_GOAL,
        ),
        (
            f"CPU per model call, taskset / batch, least of {overhead.ROUNDS}",
            taskset / batch,
            OVERHEAD_GOAL,
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["grow"]:
        asyncio.run(grow(int(sys.argv[2])))
    elif sys.argv[1:2] == ["mill"]:
        wanted = [f"Add {i} and {i + 1} with the tool, then say it." for i in range(overhead.ROLLOUTS)]
        asyncio.run(mill(sys.argv[2], wanted[:100]))
        print(asyncio.run(mill(sys.argv[2], wanted)))
    else:
        for row in run():
            print(row)
