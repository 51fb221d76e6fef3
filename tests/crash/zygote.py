"""Forks children that run a real batch, so that a kill costs milliseconds and not an interpreter's start.

Reads one JSON job a line from stdin, forks, and says `{"pid": …}`. The child runs the batch and tells, on the
pipe it was given, what was acknowledged: `row` for a stored row, `call` for a journalled model call. Where the
job names a `die_at`, the child kills itself in the middle of that write, sync or rename.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import taskmill.models.endpoint  # noqa: F401  imported before the fork, for all children
from taskmill import BatchRunner, Trace, tool
from taskmill.evaluation import Evaluation
from taskmill.store import files
from taskmill.store.journal import CallJournal
from taskmill.tasks import Task, TaskData, Taskset, group_reward, reward


@tool
def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return {"sum": a + b}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int, torn: float) -> None:
    """Kill this process at its `step`-th store operation; a write is cut at the fraction `torn` first."""
    count = 0

    def due() -> bool:
        nonlocal count
        count += 1
        return count >= step

    real_write, real_sync, real_replace = os.write, os.fdatasync, os.replace

    def write(handle: int, data: Any) -> int:
        if due():
            real_write(handle, bytes(data)[: int(len(data) * torn)])
            die()
        return real_write(handle, data)

    def sync(handle: int) -> None:
        if due():
            die()
        real_sync(handle)

    def replace(*args: Any, **kwargs: Any) -> None:
        if due():
            die()
        real_replace(*args, **kwargs)
        if due():
            die()

    files.os = _Patched(os, write=write, fdatasync=sync, replace=replace, rename=replace)  # type: ignore[attr-defined]


class _Patched:
    def __init__(self, module: Any, **patches: Any) -> None:
        self._module = module
        self.__dict__.update(patches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def child(job: dict[str, Any], report: int) -> None:
    def say(*what: Any) -> None:
        os.write(report, (json.dumps(what) + "\n").encode())

    real_record = CallJournal.record

    def record(
        self: CallJournal, rollout_id: str, number: int, digest: str, completion: bytes, attempt: int
    ) -> Any:
        acknowledged = real_record(self, rollout_id, number, digest, completion, attempt)
        answer = json.loads(completion)["message"]
        mark = answer.get("content") or answer["tool_calls"][0]["id"]
        acknowledged.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else say("call", mark)
        )
        return acknowledged

    CallJournal.record = record  # type: ignore[method-assign]
    if job.get("die_at"):
        die_at(job["die_at"], job["torn"])
    if job["kind"] == "batch":
        asyncio.run(run_batch(job, say))
    else:
        asyncio.run(run_taskset(job, say))
    say("finished")


async def run_batch(job: dict[str, Any], say: Callable[..., None]) -> None:
    runner = BatchRunner(
        dataset_file=job["dataset"],
        batch_size=job["batch_size"],
        run_name="crash",
        num_workers=job["workers"],
        base_url=job["base_url"],
        api_key="none",
        model="scripted",
        output_dir=Path(job["directory"]),
        tools=[add],
        distribution=job["distribution"],
        sync=job["sync"],
        on_event=lambda event: (
            say("row", event["prompt_index"], event["state"]) if event["event"] == "recorded" else None
        ),
    )
    await runner.run(resume=True)


class Prompt(Task[TaskData]):
    def tools(self) -> list[Any]:
        return [add]

    @reward
    def answered(self, trace: Trace) -> float:
        return 1.0


class Ranked(Prompt):
    @group_reward
    def rank(self, traces: list[Trace]) -> list[float]:
        return [float(place) for place, _ in enumerate(traces)]


class Prompts(Taskset[Prompt]):
    """Tasks of a file's prompts, as often as each stands there one task."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        lines = Path(job["dataset"]).read_text().splitlines()
        self.prompts = [json.loads(line)["prompt"] for line in lines[:: job["rollouts"]]]
        self.task = Ranked if job["kind"] == "grouped" else Prompt

    def load(self) -> Iterable[Prompt]:
        tasks = (
            self.task(TaskData(idx=idx, prompt=text))
            for idx, text in enumerate(itertools.cycle(self.prompts))
        )
        return tasks if self.INFINITE else list(itertools.islice(tasks, len(self.prompts)))


class Endless(Prompts):
    INFINITE = True


async def run_taskset(job: dict[str, Any], say: Callable[..., None]) -> None:
    taskset = (Endless if job["kind"] == "endless" else Prompts)(job)
    directory = Path(job["directory"])
    begun = next((path.parent for path in directory.glob("crash--*/run.json")), None)
    options: dict[str, Any] = {
        "model": "scripted",
        "base_url": job["base_url"],
        "api_key": "none",
        "concurrency": job["workers"],
        "sync": job["sync"],
        "max_failures": 1.0,
        "on_event": lambda event: (
            say("row", event["idx"] * job["rollouts"] + event["number"], event["state"])
            if event["event"] == "recorded"
            else None
        ),
    }
    if begun is None:
        evaluation = Evaluation(
            taskset,
            num_tasks=len(taskset.prompts),
            num_rollouts=job["rollouts"],
            shuffle=job["kind"] == "shuffled",
            sampling={"seed": 1},
            output_dir=directory,
            run_name="crash",
            **options,
        )
    else:
        evaluation = Evaluation.resume(begun, taskset=taskset, **options)
    await evaluation.run()


def main() -> None:
    report = int(sys.argv[1])
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                child(json.loads(line), report)
            except BaseException as problem:
                os.write(report, (json.dumps(["error", repr(problem)]) + "\n").encode())
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
