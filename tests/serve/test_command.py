"""`taskmill serve`, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from taskmill.engine.envclient import EnvClient
from taskmill.errors import ServerBusyError, ServerError
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer, call, silence
from tests.cli.conftest import Place, ended, place, taskmill
from tests.serve.waiting import LONGEST, all_gone, appeared, family, until

__all__ = ["place", "taskmill"]

TASKSETS = Path(__file__).with_name("tasksets.py")
PROGRAM = "import sys; from taskmill.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"


class Server(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    processes: set[int]


@contextmanager
def serving(place: Place, taskset: str, *options: str) -> Iterator[Server]:
    process = place.start(f"{TASKSETS}:{taskset}", "--address", ":0", *options, program=PROGRAM)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise AssertionError(ended(process).err)
        yield Server(process, line.split()[-1], family(process.pid))
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def held(url: str, endpoint: FakeEndpoint, count: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """So many rollouts under way, each of them with the model."""
    model = {"name": "m", "base_url": endpoint.url}
    async with EnvClient(url, patience=0.0) as client, asyncio.TaskGroup() as group:

        async def ask(number: int) -> Any:
            try:
                return await client.rollout(number, model=model)
            except ServerError as error:
                return error

        tasks = [group.create_task(ask(number)) for number in range(count)]
        await until(lambda: endpoint.calls == count)
        yield tasks


async def test_it_says_where_it_is_and_serves(place: Place) -> None:
    with serving(place, "SumsTaskset", "--taskset.size", "3", "--workers", "2") as server:
        async with FakeEndpoint("1") as endpoint, EnvClient(server.url) as client:
            assert (await client.info()).num_tasks == 3
            trace = await client.rollout(0, model={"name": "m", "base_url": endpoint.url})
            assert trace.state == "completed"
        server.process.send_signal(signal.SIGTERM)
        said = ended(server.process)
    assert said.code == 0
    lines = [json.loads(line) for line in said.err.splitlines()]
    assert [line["event"] for line in lines if line["event"] != "log"] == [
        "worker_ready",
        "worker_ready",
        "serving",
        "request",
        "request",
        "stopping",
        "stopped",
    ]
    await all_gone(server.processes)


async def test_sigterm_lets_what_runs_finish_and_leaves_no_process(place: Place) -> None:
    with serving(place, "SumsTaskset", "--workers", "2") as server:
        async with FakeEndpoint("1", latency=1.0) as endpoint, held(server.url, endpoint, 8) as tasks:
            server.process.send_signal(signal.SIGTERM)
            traces = await asyncio.gather(*tasks)
            assert [trace.state for trace in traces] == ["completed"] * 8
        assert (await asyncio.to_thread(ended, server.process)).code == 0
    await all_gone(server.processes)


@pytest.mark.parametrize("signals", [["--drain", "0"], []])
async def test_what_does_not_end_in_time_is_cancelled(place: Place, signals: list[str]) -> None:
    with serving(place, "SumsTaskset", *signals) as server:
        async with FakeEndpoint(silence()) as endpoint, held(server.url, endpoint, 3) as tasks:
            server.process.send_signal(signal.SIGINT)
            if not signals:
                async with EnvClient(server.url) as client:
                    while await client.health():
                        await asyncio.sleep(0.02)
                assert not any(task.done() for task in tasks), "they have time until the second signal"
                server.process.send_signal(signal.SIGINT)
            errors = await asyncio.gather(*tasks)
            assert all(isinstance(error, ServerBusyError) for error in errors), errors
        assert (await asyncio.to_thread(ended, server.process)).code == 130
    await all_gone(server.processes)


async def test_kill_9_of_the_server_is_an_error_for_its_clients_and_leaves_no_process(place: Place) -> None:
    with serving(place, "SumsTaskset", "--workers", "2") as server:
        async with FakeEndpoint(silence()) as endpoint, held(server.url, endpoint, 4) as tasks:
            server.process.kill()
            errors = await asyncio.gather(*tasks)
            assert all("broke off without an answer" in str(error) for error in errors)
    assert len(server.processes) == 4
    await all_gone(server.processes)


async def test_kill_9_of_a_client_ends_its_rollouts(place: Place) -> None:
    client = (
        "import asyncio, sys\n"
        "from taskmill.engine.envclient import EnvClient\n"
        "async def main(url, endpoint):\n"
        "    async with EnvClient(url) as client:\n"
        "        model = {'name': 'm', 'base_url': endpoint}\n"
        "        await asyncio.gather(*(client.rollout(n, model=model) for n in range(3)))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    script = answer("", calls=[call("linger")])
    folder = place.folder / "lingering"
    folder.mkdir()
    with serving(place, "BusyTaskset", "--taskset.folder", str(folder)) as server:
        async with FakeEndpoint(script) as endpoint:
            process = subprocess.Popen([sys.executable, "-c", client, server.url, endpoint.url])
            names = await appeared(folder, 3)
            process.kill()
            process.wait(LONGEST)
            await all_gone({int(name) for name in names})
            async with EnvClient(server.url) as watcher:
                assert (await watcher.info()).num_tasks == 5


async def test_a_log_that_nobody_reads_holds_up_nobody(place: Place) -> None:
    with serving(place, "SumsTaskset") as server:
        async with EnvClient(server.url) as client:
            for _ in range(600):
                with pytest.raises(ServerError, match="there is no GET"):
                    await client._ask("GET", "/" + "x" * 180, None)
            assert (await client.info()).num_tasks == 10


async def test_the_module_is_the_command(place: Place) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "taskmill.serve", f"{TASKSETS}:SumsTaskset", "--address", ":0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving 'sums' (10 tasks) at http://127.0.0.1:")
    process.terminate()
    assert process.wait(LONGEST) == 0
    process.stdout.close()


def test_a_worker_that_cannot_start_is_said_and_the_command_fails(place: Place) -> None:
    said = place.finish("serve", f"{TASKSETS}:RaisesAtOnceTaskset", "--address", ":0")
    assert said.code == 1
    assert said.err.splitlines()[-1] == (
        "taskmill: taskset 'raises_at_once' failed at its task 0: ValueError: the file of questions is empty"
    )
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--model", "m"], "each request names its own model"),
        (["--address", "0.0.0.0:0"], "a token is needed (--token-file FILE)"),
        (["--address", "here"], "give HOST:PORT"),
        (["--worker", "2"], "did you mean --workers?"),
        (["--workers", "0"], "workers=0"),
        (["--workers", "2", "--min-workers", "3"], "min_workers=3 is more than workers=2"),
        (["--token-file", "nowhere"], "there is no file 'nowhere'"),
        (["--taskset.sise", "3"], "did you mean 'size'?"),
        (["--sandbox", "box"], "sandbox='box'"),
    ],
)
def test_what_cannot_be_meant_is_refused(place: Place, taskmill: Any, options: list[str], why: str) -> None:
    said = taskmill("serve", f"{TASKSETS}:SumsTaskset", *options)
    assert said.code == 2
    assert why in said.err


def test_a_token_comes_from_a_file_and_is_not_repeated(place: Place, taskmill: Any) -> None:
    (place.folder / "token").write_text("short\n")
    said = taskmill("serve", f"{TASKSETS}:SumsTaskset", "--address", "0.0.0.0:0", "--token-file", "token")
    assert said.code == 2
    assert "16 or more" in said.err
    assert "short\n" not in said.err


async def test_an_address_that_others_reach_wants_the_token(place: Place) -> None:
    token = "0123456789abcdef0123"
    (place.folder / "token").write_text(f"{token}\n")
    with serving(place, "SumsTaskset", "--address", "0.0.0.0:0", "--token-file", "token") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        async with EnvClient(url) as client:
            with pytest.raises(ServerError, match="token"):
                await client.info()
        async with EnvClient(url, token=token) as client:
            assert (await client.info()).num_tasks == 10
