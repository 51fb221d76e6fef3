"""The environment server against rollouts in one process, and its health under load.

Both make the same rollouts at zero latency against the same endpoint process. Throughput is by the clock on the wall,
on the same cores: in process one core works, behind the server as many as there are.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from taskmill.engine.envclient import EnvClient
from taskmill.evaluation import evaluate
from taskmill.models.choose import open_model
from taskmill.tasks import find_taskset
from taskmill.tasks.rollout import TaskRollout
from taskmill.testing.endpoint import EndpointProcess

ROLLOUTS = 3000
WIDTH = 64
AT_ONCE = 1000
GOAL = 0.7
HEALTH_GOAL = 100.0
TASKSET = f"{Path(__file__).with_name('sums.py')}:SumsTaskset"


async def many(count: int, width: int, work: Callable[[int], Awaitable[Any]]) -> float:
    """Rollouts a second, `width` of them at once."""
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await work(number)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(lane())
    return count / (time.perf_counter() - began)


async def in_process(url: str) -> tuple[float, float]:
    """Rollouts a second in this process, and microseconds of processor time for each."""
    tasks = find_taskset(TASKSET)().select()
    model = open_model("lean", base_url=url)

    def no_sandbox(id: str, data: Any) -> Any:
        raise AssertionError("no tool is offered")

    async def work(number: int) -> None:
        task = tasks[number % len(tasks)]
        rollout = TaskRollout(task, rollout_id=f"r-{number}", model=model, make_sandbox=no_sandbox)
        await rollout.run()
        assert rollout.trace().state == "completed"

    await many(200, WIDTH, work)
    before = time.process_time()
    rate = await many(ROLLOUTS, WIDTH, work)
    spent = (time.process_time() - before) / ROLLOUTS * 1e6
    await model.close()
    return rate, spent


async def evaluated(url: str) -> float:
    """Rollouts a second of an evaluation in this process, its store and journal among them."""
    with tempfile.TemporaryDirectory() as folder:

        async def rate(rollouts: int) -> float:
            started = time.perf_counter()
            result = await evaluate(
                TASKSET,
                model="lean",
                base_url=url,
                num_rollouts=rollouts,
                concurrency=WIDTH,
                output_dir=folder,
            )
            assert result.complete
            return result.summary["outcomes"]["completed"] / (time.perf_counter() - started)

        tasks = len(find_taskset(TASKSET)().select())
        await rate(max(1, 200 // tasks))
        return await rate(max(1, ROLLOUTS // tasks))


class Serving:
    """`taskmill serve` in a process of its own, as a context manager."""

    def __init__(self, workers: int) -> None:
        self._command = [
            sys.executable,
            "-m",
            "taskmill.serve",
            TASKSET,
            "--address",
            ":0",
            "--workers",
            str(workers),
        ]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def processor_seconds(self) -> dict[str, float]:
        """What the supervisor and its workers have worked so far."""
        supervisor = psutil.Process(self.process.pid)
        spent = {"supervisor": sum(supervisor.cpu_times()[:2]), "workers": 0.0}
        for child in supervisor.children(recursive=True):
            spent["workers"] += sum(child.cpu_times()[:2])
        return spent


async def served(url: str, server: Serving) -> tuple[float, dict[str, float]]:
    """Rollouts a second through a server, and the microseconds of processor time that each one takes where."""
    model = {"name": "lean", "base_url": url}
    async with EnvClient(server.url) as client:

        async def work(number: int) -> None:
            trace = await client.rollout(number % 100, number=number, model=model)
            assert trace.state == "completed"

        await many(200, WIDTH, work)
        before = server.processor_seconds() | {"client": time.process_time()}
        rate = await many(ROLLOUTS, WIDTH, work)
        after = server.processor_seconds() | {"client": time.process_time()}
        return rate, {name: (after[name] - before[name]) / ROLLOUTS * 1e6 for name in after}


async def all_at_once(url: str, server: Serving) -> None:
    """1,000 requests, none of which waits for another."""
    model = {"name": "lean", "base_url": url}
    async with EnvClient(server.url) as client, asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(client.rollout(number % 100, number=number, model=model))


def health(server: Serving, until: threading.Event, times: list[float]) -> None:
    """Ask for the health again and again; milliseconds go into `times`."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    while not until.wait(0.01):
        began = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        times.append((time.perf_counter() - began) * 1000)


def health_under(server: Serving, load: Callable[[], None]) -> float:
    """The median of /health in milliseconds while `load` runs."""
    times: list[float] = []
    until = threading.Event()
    thread = threading.Thread(target=health, args=(server, until, times))
    thread.start()
    load()
    until.set()
    thread.join()
    return statistics.median(times)


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, value, goal."""
    workers = min(4, os.cpu_count() or 1)
    with EndpointProcess() as endpoint, Serving(workers) as server:
        evaluation = asyncio.run(evaluated(endpoint.url))
        plain, own = asyncio.run(in_process(endpoint.url))
        rate, spent = asyncio.run(served(endpoint.url, server))
        rest = health_under(server, lambda: time.sleep(1.0))
        busy = health_under(server, lambda: asyncio.run(all_at_once(endpoint.url, server)))
    return [
        (f"rollouts a second, {workers} workers / evaluation in process (at least)", rate / evaluation, GOAL),
        (f"rollouts a second, {workers} workers / bare rollouts, nothing stored", rate / plain, None),
        ("rollouts a second in process (no ratio)", plain, None),
        ("in process: processor microseconds a rollout (no ratio)", own, None),
        *((f"{name}: processor microseconds a rollout (no ratio)", spent[name], None) for name in spent),
        ("/health at rest, median ms (no ratio)", rest, None),
        (f"/health during {AT_ONCE} requests, median ms", busy, HEALTH_GOAL),
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
