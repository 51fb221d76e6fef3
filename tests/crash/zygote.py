"""Forks children that run a real batch, so that a kill costs milliseconds and not an interpreter's start.

Reads one JSON job a line from stdin, forks, and says `{"pid": …}`. The child runs the batch and tells, on the
pipe it was given, what was acknowledged: `row` for a stored row, `call` for a journalled model call. Where the
job names a `die_at`, the child kills itself in the middle of that write, sync or rename.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import taskmill.models.endpoint  # noqa: F401  imported before the fork, for all children
from taskmill import BatchRunner, tool
from taskmill.store import files
from taskmill.store.journal import CallJournal


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
    asyncio.run(runner.run(resume=True))
    say("finished")


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
