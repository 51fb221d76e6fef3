"""Workers under a supervisor: what dies, what is run again, what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskmill.engine import supervisor
from taskmill.engine.supervisor import WorkerPlan, Workers
from taskmill.errors import ServerBusyError, TasksetError, WorkerDied, WorkerError, WorkerStartError
from tests.serve.waiting import LONGEST, all_gone, appeared, family, until

ROOT = Path(__file__).resolve().parents[2]


def workers(target: str = "echo", **plan: Any) -> Workers:
    return Workers(WorkerPlan(f"tests.serve.echo:{target}", **plan))


async def test_requests_are_answered_and_nothing_is_left_at_the_end() -> None:
    async with workers(least=2, most=2) as pool:
        processes = family()
        assert set(pool.pids) <= processes
        bodies = [str(number).encode() for number in range(300)]
        assert await asyncio.gather(*(pool.call("echo", body) for body in bodies)) == bodies
    await all_gone(processes)


async def test_a_long_message_arrives_whole() -> None:
    body = os.urandom(3_000_000)
    async with workers() as pool:
        assert await pool.call("echo", body) == body


async def test_the_least_busy_worker_is_asked() -> None:
    async with workers(least=2, most=2) as pool, asyncio.TaskGroup() as group:
        waits = [group.create_task(pool.call("wait", b"3600")) for _ in range(4)]
        await until(lambda: pool.running == 4)
        assert {len(worker.jobs) for worker in pool._ready} == {2}
        for wait in waits:
            wait.cancel()


async def test_an_error_fails_its_own_request_only() -> None:
    async with workers() as pool:
        other = asyncio.ensure_future(pool.call("wait", b"0.2"))
        with pytest.raises(WorkerError, match="ValueError: no such luck"):
            await pool.call("raise", b"")
        with pytest.raises(WorkerError, match="SystemExit: enough"):
            await pool.call("exit", b"")
        assert await other == b"0.2"
        assert pool.deaths == 0


async def test_what_a_dead_worker_was_at_runs_again(tmp_path: Path) -> None:
    async with workers(least=2, most=2) as pool:
        once = pool.call("die once", str(tmp_path / "mark").encode())
        assert await once == b"lived"
        assert (pool.deaths, pool.reruns) == (1, 1)
        await until(lambda: len(pool.pids) == 2, "a replacement")


async def test_a_request_that_kills_each_worker_fails_with_worker_died() -> None:
    async with workers(least=2, most=2) as pool:
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await pool.call("die", b"")
        assert pool.deaths == 3
        assert await pool.call("echo", b"x") == b"x", "others go on"


async def test_kill_9_of_a_worker_with_requests_in_flight_answers_them_all() -> None:
    async with workers(least=2, most=2) as pool, asyncio.TaskGroup() as group:
        waits = [group.create_task(pool.call("wait", b"1")) for _ in range(6)]
        await until(lambda: pool.running == 6)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert await asyncio.gather(*waits) == [b"1"] * 6
        assert pool.reruns == 3


async def test_what_a_task_started_dies_with_its_worker() -> None:
    async with workers() as pool:
        children = {int(await pool.call(kind, b"")) for kind in ("child", "detached child")}
        assert children <= family()
        os.kill(pool.pids[0], signal.SIGKILL)
        await all_gone(children if sys.platform == "linux" else {min(children)})
        await until(lambda: len(pool.pids) == 1)


async def test_kill_9_of_the_guard_takes_its_worker_along() -> None:
    async with workers() as pool:
        worker = pool.pids[0]
        guard = next(pid for pid in family() - {worker} if worker in family(pid))
        os.kill(guard, signal.SIGKILL)
        await all_gone({worker})
        assert await pool.call("echo", b"again") == b"again"


async def test_kill_9_of_the_supervisor_leaves_no_process() -> None:
    script = (
        "import asyncio\n"
        "from taskmill.engine.supervisor import WorkerPlan, Workers\n"
        "async def main():\n"
        "    async with Workers(WorkerPlan('tests.serve.echo:echo', least=2, most=2)) as pool:\n"
        "        child = await pool.call('child', b'')\n"
        "        stuck = asyncio.ensure_future(pool.call('tight loop', b''))\n"
        "        await asyncio.sleep(0.2)\n"
        "        print(child.decode(), flush=True)\n"
        "        await stuck\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    child = await asyncio.to_thread(process.stdout.readline)
    processes = family(process.pid) | {int(child)}
    assert len(processes) == 5, "two guards, two workers, a child"
    process.kill()
    process.wait(LONGEST)
    process.stdout.close()
    await all_gone(processes)


async def test_cancelling_a_request_cancels_it_in_the_worker_and_no_other(tmp_path: Path) -> None:
    async with workers() as pool:
        other = asyncio.ensure_future(pool.call("wait", b"0.5"))
        request = asyncio.ensure_future(pool.call("until cancelled", str(tmp_path / "mark").encode()))
        await until(lambda: pool.running == 2)
        request.cancel()
        assert await appeared(tmp_path) == ["mark"]
        assert await other == b"0.5"
        await until(lambda: pool.running == 0)


async def test_a_full_queue_turns_requests_away_and_takes_some_later() -> None:
    async with workers(places=1, queue=2) as pool, asyncio.TaskGroup() as group:
        running = group.create_task(pool.call("wait", b"3600"))
        waiting = [group.create_task(pool.call("echo", b"x")) for _ in range(2)]
        await until(lambda: pool.queued == 2)
        with pytest.raises(ServerBusyError, match="2 requests are waiting already"):
            await pool.call("echo", b"y")
        running.cancel()
        assert await asyncio.gather(*waiting) == [b"x", b"x"]
        assert await pool.call("echo", b"z") == b"z"


async def test_there_are_more_workers_under_load() -> None:
    async with workers(least=1, most=3) as pool, asyncio.TaskGroup() as group:
        assert len(pool.pids) == 1
        waits = [group.create_task(pool.call("wait", b"3600")) for _ in range(40)]
        await until(lambda: len(pool.pids) >= 2, "growth")
        waits += [group.create_task(pool.call("wait", b"3600")) for _ in range(40)]
        await until(lambda: len(pool.pids) == 3, "more growth")
        for wait in waits:
            wait.cancel()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("unwilling", "RuntimeError: the disk is missing"),
        ("nowhere", "has no attribute 'nowhere'"),
        ("mute", r"ended before it was ready \(exit code 7\)"),
    ],
)
async def test_a_worker_that_cannot_start_says_why_and_is_not_started_for_ever(target: str, why: str) -> None:
    heard: list[str] = []
    pool = Workers(
        WorkerPlan(f"tests.serve.echo:{target}", least=2, most=2),
        tell=lambda event, **fields: heard.append(event),
    )
    with pytest.raises(WorkerStartError, match=why):
        async with pool:
            pass
    assert 1 <= heard.count("worker_not_started") <= 2 * supervisor.START_TRIES
    await all_gone(family())


async def test_a_worker_that_does_not_come_up_in_time_is_ended() -> None:
    with pytest.raises(WorkerStartError, match=r"not ready within 0\.5 s"):
        async with workers("slow", start_timeout=0.5):
            pass
    await all_gone(family())


async def test_a_worker_that_is_not_accepted_is_refused_with_the_reason() -> None:
    def refuse(told: bytes) -> None:
        raise TasksetError(f"{told.decode()} won't do")

    with pytest.raises(WorkerStartError, match="here won't do"):
        async with Workers(WorkerPlan("tests.serve.echo:echo"), accept=refuse):
            pass


async def test_when_no_worker_can_be_had_any_more_requests_fail_with_the_cause() -> None:
    seen: list[bytes] = []

    def only_the_first(told: bytes) -> None:
        seen.append(told)
        if len(seen) > 1:
            raise TasksetError("it makes other tasks")

    async with Workers(WorkerPlan("tests.serve.echo:echo"), accept=only_the_first) as pool:
        with pytest.raises(WorkerStartError, match="it makes other tasks"):
            await pool.call("die", b"")
        with pytest.raises(WorkerStartError, match="it makes other tasks"):
            await pool.call("echo", b"")
        assert pool.problem is not None


async def test_closing_waits_for_what_runs_and_refuses_what_comes() -> None:
    async with workers() as pool:
        running = asyncio.ensure_future(pool.call("wait", b"0.3"))
        await until(lambda: pool.running == 1)
        closing = asyncio.ensure_future(pool.close(LONGEST))
        await until(lambda: pool.stopping)
        with pytest.raises(ServerBusyError, match="stopping"):
            await pool.call("echo", b"")
        await closing
        assert running.done()
        assert await running == b"0.3"


async def test_closing_without_patience_cancels_what_runs(tmp_path: Path) -> None:
    async with workers() as pool:
        running = asyncio.ensure_future(pool.call("until cancelled", str(tmp_path / "mark").encode()))
        await until(lambda: pool.running == 1)
        await pool.close(0.0)
        with pytest.raises(ServerBusyError, match="stopped before"):
            await running
    assert await appeared(tmp_path) == ["mark"]


async def test_a_stuck_worker_is_replaced_and_its_requests_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "SILENCE", 3.0)
    heard: list[dict[str, Any]] = []
    tell: Callable[..., None] = lambda event, **fields: heard.append({"event": event, **fields})  # noqa: E731
    async with Workers(WorkerPlan("tests.serve.echo:echo", reruns=0), tell=tell) as pool:
        with pytest.raises(WorkerDied, match="no sign of life"):
            await pool.call("tight loop", b"")
        assert await pool.call("echo", b"x") == b"x"
    assert [said["how"] for said in heard if said["event"] == "worker_died"] == [
        "it gave no sign of life for 3 s"
    ]
