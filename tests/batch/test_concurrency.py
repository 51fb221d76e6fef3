"""Batches side by side, rows of a batch one after another, and what cancelling leaves."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from taskmill.errors import BadRequestError
from taskmill.models.base import Request
from taskmill.store import files
from tests.batch.mill import (
    Mill,
    answering,
    asks,
    cancelled,
    echo,
    prompt_of,
    prompts_of,
    read_lines,
    says,
    turn_of,
    until,
)


def numbered(count: int) -> list[str]:
    return [f"{number:03}" for number in range(count)]


async def test_batch_k_is_the_rows_from_k_times_batch_size_on_in_their_order(mill: Mill) -> None:
    mill.prompts(*numbered(10))

    stored = await mill.run(batch_size=4, num_workers=3)

    assert {k: prompts_of(rows) for k, rows in stored.shards.items()} == {
        0: ["000", "001", "002", "003"],
        1: ["004", "005", "006", "007"],
        2: ["008", "009"],
    }
    assert [row["metadata"]["batch_num"] for row in stored.rows] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [row["prompt_index"] for row in stored.rows] == list(range(10))


async def test_a_batch_runs_its_rows_one_after_another_and_batches_run_side_by_side(mill: Mill) -> None:
    """A row of batch 1 answers only when batch 0 is half done, and the other way round."""
    mill.prompts(*numbered(8))
    running: set[str] = set()
    together: list[set[str]] = []
    order: list[str] = []
    seen = {name: asyncio.Event() for name in numbered(8)}

    async def script(request: Request) -> Any:
        prompt = prompt_of(request)
        running.add(prompt)
        order.append(prompt)
        together.append(set(running))
        seen[prompt].set()
        await seen[f"{(int(prompt) + 4) % 8:03}"].wait()  # its counterpart in the other batch
        running.discard(prompt)
        return says()

    await mill.run(answering(script), batch_size=4, num_workers=2)

    assert max(len(names) for names in together) == 2
    assert all(len({int(name) // 4 for name in names}) == len(names) for names in together)
    assert [name for name in order if int(name) < 4] == numbered(4)


async def test_at_most_num_workers_batches_are_under_way(mill: Mill) -> None:
    mill.prompts(*numbered(40))
    running: set[int] = set()
    peak = 0

    async def script(request: Request) -> Any:
        nonlocal peak
        batch = int(prompt_of(request)) // 2
        running.add(batch)
        peak = max(peak, len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.discard(batch)
        return says()

    await mill.run(answering(script), batch_size=2, num_workers=5)

    assert peak == 5


async def test_batches_are_tasks_of_one_loop_without_a_pool_of_workers(mill: Mill) -> None:
    mill.prompts(*numbered(12))
    loop, thread = asyncio.get_running_loop(), threading.current_thread()
    before = {child.pid for child in psutil.Process().children()}
    tasks: set[Any] = set()

    def script(request: Request) -> Any:
        assert asyncio.get_running_loop() is loop
        assert threading.current_thread() is thread
        assert {child.pid for child in psutil.Process().children()} <= before
        tasks.add(asyncio.current_task())
        return says()

    stored = await mill.run(answering(script), batch_size=4)

    assert stored.outcome_counts() == {"completed": 12}
    assert len(tasks) == 3


async def test_a_failing_row_stops_neither_its_batch_nor_the_others(mill: Mill) -> None:
    mill.prompts(*numbered(6))

    def script(request: Request) -> Any:
        number = int(prompt_of(request))
        if number == 0:
            return BadRequestError("no")
        if number == 3:
            return RuntimeError("a bug of ours, not of the endpoint")
        return says()

    stored = await mill.run(answering(script), batch_size=3, max_failures=1.0)

    assert stored.outcome_counts() == {"completed": 4, "failed": 2}
    assert {k: prompts_of(rows) for k, rows in stored.shards.items()} == {
        0: ["001", "002"],
        1: ["004", "005"],
    }
    bug = stored.outcomes[-1] if "bug" in stored.outcomes[-1]["error"]["message"] else stored.outcomes[0]
    assert bug["error"]["type"] == "RuntimeError"
    assert "Traceback" in bug["error"]["traceback"]


async def test_one_slow_row_keeps_no_other_from_being_stored_and_counted(mill: Mill) -> None:
    mill.prompts(*numbered(20))
    others = asyncio.Event()

    async def script(request: Request) -> Any:
        if prompt_of(request) == "000":
            await others.wait()
        return says()

    runner = mill.runner(answering(script), batch_size=2, num_workers=2, on_event=None)
    run = asyncio.ensure_future(runner.run())
    while runner.progress.finished < 18:
        assert not run.done()
        await asyncio.sleep(0.01)

    assert len(mill.stored.rows) == 18
    others.set()
    await run
    assert len(mill.stored.rows) == 20


async def test_calls_are_counted_as_they_are_answered_not_only_as_rows_end(mill: Mill) -> None:
    mill.prompts("a")
    second, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> Any:
        if turn_of(request) == 0:
            return asks("todo", {})
        second.set()
        await go_on.wait()
        return says()

    runner = mill.runner(answering(script), distribution="balanced")
    run = asyncio.ensure_future(runner.run())
    await second.wait()
    assert (runner.progress.finished, runner.progress.in_flight) == (0, 1)
    assert runner.progress.spent[0] == 1
    go_on.set()
    await run
    assert runner.progress.spent[0] == runner.progress.calls == 2


# -- cancelling -----------------------------------------------------------------------------------------------


async def test_cancelling_cancels_and_awaits_every_batch_and_leaves_a_run_that_resumes(mill: Mill) -> None:
    mill.prompts(*numbered(40))
    waiting = asyncio.Event()
    cleaned: list[str] = []
    started: list[str] = []

    async def script(request: Request) -> Any:
        prompt = prompt_of(request)
        if int(prompt) % 10 < 2:
            return echo(request)
        started.append(prompt)
        if len(started) == 4:
            waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(prompt)

    before = asyncio.all_tasks()
    run = asyncio.ensure_future(mill.run(answering(script), batch_size=10, num_workers=4))
    await until(waiting, run)
    await cancelled(run)

    assert asyncio.all_tasks() == before
    assert sorted(cleaned) == sorted(started) == ["002", "012", "022", "032"]
    assert len(mill.stored.rows) == 8
    assert [row["state"] for row in mill.stored.outcomes] == ["cancelled"] * 4

    model = answering()
    stored = await mill.run(model, resume=True)
    assert stored.outcome_counts() == {"completed": 40}
    assert model.calls == 32
    assert sorted(prompts_of(stored.rows)) == numbered(40)


async def test_a_row_whose_append_has_begun_is_whole_before_the_cancellation_goes_on(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts("a", "b", "c")
    real = files.AppendFile.write
    run: list[Any] = []

    def write(self: Any, data: bytes) -> int:
        if b'"conversations"' in data and b'"b"' in data:
            run[0].cancel()
        return real(self, data)

    monkeypatch.setattr(files.AppendFile, "write", write)
    run.append(asyncio.ensure_future(mill.run(batch_size=3)))
    with pytest.raises(asyncio.CancelledError):
        await run[0]

    assert prompts_of(read_lines(mill.stored.path / "batch_0.jsonl"))[:2] == ["a", "b"]
    told = [event["prompt_index"] for event in mill.told("recorded") if event["state"] == "completed"]
    assert told[:2] == [0, 1]


async def test_a_slow_disk_is_waited_for_before_the_cancellation_goes_on(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts("a", "b")
    real = files.AppendFile.datasync
    syncing, go_on = threading.Event(), threading.Event()

    def datasync(self: Any) -> None:
        syncing.set()
        assert go_on.wait(30)
        real(self)

    monkeypatch.setattr(files.AppendFile, "datasync", datasync)

    async def script(request: Request) -> Any:
        if prompt_of(request) == "b":
            await asyncio.Event().wait()
        return says()

    run = asyncio.ensure_future(mill.run(answering(script), sync="each"))
    await asyncio.to_thread(syncing.wait, 30)
    run.cancel()
    done, _ = await asyncio.wait([run], timeout=0.05)
    assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert {event["state"] for event in mill.told("recorded")} == {"completed", "cancelled"}


async def test_cancelling_leaves_no_process_and_no_workspace(mill: Mill) -> None:
    mill.prompts("a", "b")
    mark = f"3{os.getpid()}{os.urandom(3).hex()}"
    command = f"sleep 1000 {mark} & setsid sleep 1000 {mark} & touch here; wait"

    def script(request: Request) -> Any:
        return asks("terminal", {"command": command.replace(f"1000 {mark}", f"1000.{int(mark, 16)}")})

    needle = f"1000.{int(mark, 16)}"
    run = asyncio.ensure_future(
        mill.run(answering(script), distribution="minimal", batch_size=1, num_workers=2)
    )
    while len(alive(needle)) < 4:
        assert not run.done()
        await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    psutil.wait_procs(alive(needle), timeout=10)
    assert alive(needle) == []
    assert files_under(mill.stored.path / "workspaces") == []
    assert [row["state"] for row in mill.stored.outcomes] == ["cancelled", "cancelled"]
    stats = mill.stored.outcomes[0]["tool_stats"]["terminal"]
    assert stats == {"count": 1, "success": 0, "failure": 1}


async def test_a_run_that_ends_leaves_no_process_no_workspace_and_no_task(mill: Mill) -> None:
    mill.prompts("a", "b")
    number = int(os.urandom(3).hex(), 16)
    before = asyncio.all_tasks()

    def script(request: Request) -> Any:
        if turn_of(request) == 0:
            return asks("terminal", {"command": f"setsid sleep 1000.{number} & touch x; echo started"})
        return says()

    stored = await mill.run(answering(script), distribution="minimal", batch_size=1)

    assert stored.outcome_counts() == {"completed": 2}
    assert asyncio.all_tasks() == before
    psutil.wait_procs(alive(f"1000.{number}"), timeout=10)
    assert alive(f"1000.{number}") == []
    assert files_under(stored.path / "workspaces") == []


async def test_a_merge_that_is_cancelled_is_over_when_the_run_is(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is let go after it; a merge that went on in its thread would write beside the next process."""
    mill.prompts(*numbered(50))
    real = files.replace
    merging, ended = threading.Event(), threading.Event()

    def replace(path: Path, data: Any) -> None:
        if path.name != "trajectories.jsonl":
            return real(path, data)

        def slowly() -> Any:
            for piece in data:
                merging.set()
                threading.Event().wait(0.01)
                yield piece

        try:
            return real(path, slowly())
        finally:
            ended.set()

    monkeypatch.setattr("taskmill.store.run.replace", replace)
    run = asyncio.ensure_future(mill.run())
    await asyncio.to_thread(merging.wait, 30)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert ended.is_set()
    assert not (mill.stored.path / "trajectories.jsonl").exists()
    assert not [path for path in mill.stored.path.iterdir() if path.name.endswith(".tmp")]


def alive(needle: str) -> list[psutil.Process]:
    """Processes that have `needle` in their command line, the shells that were told it not among them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "name"]):
        words = process.info["cmdline"] or []
        if needle in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def files_under(path: Path) -> list[Path]:
    return list(path.rglob("*")) if path.exists() else []


async def test_a_second_cancellation_while_the_first_waits_for_the_disk_loses_nothing_either(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts("a", "b")
    real = files.AppendFile.datasync
    syncing, go_on = threading.Event(), threading.Event()

    def datasync(self: Any) -> None:
        syncing.set()
        assert go_on.wait(30)
        real(self)

    monkeypatch.setattr(files.AppendFile, "datasync", datasync)

    async def script(request: Request) -> Any:
        if prompt_of(request) == "b":
            await asyncio.Event().wait()
        return says()

    before = asyncio.all_tasks()
    run = asyncio.ensure_future(mill.run(answering(script), sync="each"))
    await asyncio.to_thread(syncing.wait, 30)
    run.cancel()
    await asyncio.wait([run], timeout=0.02)
    threading.Timer(0.05, go_on.set).start()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    monkeypatch.undo()

    assert asyncio.all_tasks() == before
    assert prompts_of(mill.stored.rows) == ["a"]
    model = answering()
    stored = await mill.run(model, resume=True)
    assert model.calls == 1
    assert stored.outcome_counts() == {"completed": 2}


async def test_an_error_of_the_mill_itself_surfaces_at_once(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the other batches, and not as a failed row."""
    mill.prompts(*numbered(20))
    waiting = asyncio.Event()

    async def script(request: Request) -> Any:
        if prompt_of(request) == "000":
            await waiting.wait()
            return says()
        waiting.set()
        return await asyncio.Event().wait()

    def broken(*arguments: Any, **named: Any) -> bytes:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("taskmill.batch.rows.trajectory_row", broken)
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        await mill.run(answering(script))
