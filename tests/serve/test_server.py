"""The environment server over real HTTP, with real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from taskmill.engine.envclient import EnvClient
from taskmill.errors import (
    ConfigurationError,
    ServerBusyError,
    ServerError,
    ServerTokenError,
    TaskIndexError,
    TasksetError,
    WorkerDied,
    WorkerStartError,
)
from taskmill.serve import EnvServer
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer, call, refusal, silence
from tests.serve import tasksets
from tests.serve.waiting import all_gone, appeared, family, until

KEY = "sk-a-very-secret-key-7351"
TOKEN = "a token of sixteen characters".replace(" ", "-")


def model(endpoint: FakeEndpoint, **fields: Any) -> dict[str, Any]:
    return {"name": "m", "base_url": endpoint.url, "api_key": KEY, **fields}


def solve(body: dict[str, Any]) -> str:
    a, b = body["messages"][0]["content"].rstrip("?").split(" + ")
    return str(int(a) + int(b))


async def raw(
    server: EnvServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """An answer as it comes, of a request as it is given."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if data is not None:
        headers.setdefault("Content-Type", "application/json")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, data=data, headers=headers) as response,
    ):
        return response.status, response.headers, await response.read()


# -- what is asked and answered -------------------------------------------------------------------------------


async def test_a_rollout_comes_back_as_a_trace_with_its_reward() -> None:
    async with (
        FakeEndpoint(solve, key=KEY) as endpoint,
        EnvServer(tasksets.SumsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        trace = await client.rollout(3, model=model(endpoint))
        assert (trace.state, trace.reward, trace.metrics) == ("completed", 1.0, {"words": 1.0})
        assert trace.task["idx"] == 3
        assert trace.model == "m"
        again = await client.rollout(3, model=model(endpoint), number=1)
        assert again.id == trace.id.removesuffix("-0") + "-1"


async def test_info_says_what_is_served() -> None:
    async with EnvServer(tasksets.SumsTaskset, config={"size": 4}) as server:
        status, _, body = await raw(server, "GET", "/info")
        assert status == 200
        said = json.loads(body)
        assert said == {
            "num_tasks": 4,
            "requires_group_scoring": False,
            "taskset": "sums",
            "version": said["version"],
        }
    async with EnvServer(tasksets.EndlessTaskset) as server, EnvClient(server.url) as client:
        assert (await client.info()).num_tasks is None


async def test_a_group_is_scored_together() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.GroupsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        assert (await client.info()).requires_group_scoring
        traces = await client.group(1, 4, model=model(endpoint))
        assert [trace.number for trace in traces] == [0, 1, 2, 3]
        assert [trace.reward for trace in traces] == [1.0, 3.0, 5.0, 7.0]
        assert {trace.group_size for trace in traces} == {4}


async def test_a_group_has_as_many_rollouts_at_once_as_it_is_told() -> None:
    async with (
        FakeEndpoint(solve, latency=0.05) as endpoint,
        EnvServer(tasksets.GroupsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        await client.group(1, 6, model=model(endpoint), concurrency=2)
        assert endpoint.peak == 2


async def test_seeds_are_the_rollouts_own_and_come_again() -> None:
    async with (
        FakeEndpoint("x") as endpoint,
        EnvServer(tasksets.SumsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        for _ in range(2):
            await client.group(0, 3, model=model(endpoint), sampling={"seed": 5})
        seeds = [request.body["seed"] for request in endpoint.requests]
        assert len(set(seeds[:3])) == 3
        assert sorted(seeds[:3]) == sorted(seeds[3:])


async def test_token_ids_and_log_probabilities_are_asked_for_and_kept() -> None:
    def step(body: dict[str, Any]) -> Any:
        assert body["logprobs"] is True
        assert body["return_token_ids"] is True
        said = json.loads(answer("4 2").body)
        said["choices"][0]["logprobs"] = {"content": [{"token": t, "logprob": -0.5} for t in ("4", " 2")]}
        said["choices"][0]["token_ids"] = [19, 220]
        return said

    async with (
        FakeEndpoint(lambda body: _reply(step(body))) as endpoint,
        EnvServer(tasksets.SumsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        trace = await client.rollout(0, model=model(endpoint), sampling={"logprobs": True})
        assert (trace.calls[0].token_ids, trace.calls[0].logprobs) == ((19, 220), (-0.5, -0.5))


def _reply(body: Any) -> Any:
    from taskmill.testing.endpoint import reply

    return reply(body)


async def test_an_endpoint_that_has_no_log_probabilities_is_asked_without() -> None:
    def step(body: dict[str, Any]) -> Any:
        for field in ("return_token_ids", "logprobs"):
            if field in body:
                return refusal(400, f"Unrecognized request argument supplied: {field}")
        return "fine"

    async with (
        FakeEndpoint(step) as endpoint,
        EnvServer(tasksets.SumsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        trace = await client.rollout(0, model=model(endpoint), sampling={"logprobs": True})
        assert trace.state == "completed"
        assert trace.calls[0].logprobs is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"task_idx": -1}, "task_idx=-1: Input should be greater than or equal to 0"),
        ({"task_idx": "3"}, "task_idx='3'"),
        ({"task_idx": 1.5}, "task_idx=1.5"),
        ({}, "'task_idx' is required"),
        ({"task_idx": 0, "sampling": {"temperatur": 1}}, "did you mean 'sampling.temperature'?"),
        ({"task_idx": 0, "limits": {"max_turns": 0}}, "limits.max_turns=0"),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_422(body: dict[str, Any], why: str) -> None:
    async with EnvServer(tasksets.SumsTaskset) as server:
        asked = {"model": {"name": "m", "base_url": "http://localhost:1/v1"}} | body
        status, _, said = await raw(server, "POST", "/rollout", asked)
        assert status == 422
        assert why in json.loads(said)["error"]["message"]


async def test_a_number_past_the_end_is_an_error_that_names_the_size() -> None:
    async with EnvServer(tasksets.SumsTaskset) as server, EnvClient(server.url) as client:
        with pytest.raises(TaskIndexError, match="task_idx 10 is past the end: taskset 'sums' has 10 tasks"):
            await client.rollout(10, model={"name": "m", "base_url": "http://localhost:1/v1"})


async def test_a_far_number_of_an_infinite_taskset_holds_up_nobody() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.SlowTaskset) as server,
        EnvClient(server.url) as client,
    ):
        far = asyncio.ensure_future(client.rollout(500_000, model=model(endpoint)))
        await until(lambda: server._workers is not None and server._workers.running == 1)
        async with asyncio.timeout(60):
            traces = await asyncio.gather(*(client.rollout(idx, model=model(endpoint)) for idx in range(20)))
            assert await client.health()
        assert [trace.reward for trace in traces] == [1.0] * 20
        assert not far.done()
        with pytest.raises(TaskIndexError) as caught:
            await client.rollout(1_000_007, model=model(endpoint))
        assert str(caught.value) == "task_idx 1000007 exceeds the lazy-generation cap (1000000)"
        far.cancel()


async def test_what_goes_wrong_in_a_rollout_stands_in_its_trace() -> None:
    async with (
        FakeEndpoint(refusal(401, "wrong key")) as endpoint,
        EnvServer(tasksets.SumsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        trace = await client.rollout(0, model=model(endpoint))
        assert (trace.state, trace.reward) == ("failed", None)
        assert trace.errors[0].type == "AuthenticationError"


async def test_the_description_names_every_way_in() -> None:
    async with EnvServer(tasksets.SumsTaskset) as server:
        _, _, body = await raw(server, "GET", "/openapi.json")
        said = json.loads(body)
        assert said["openapi"].startswith("3.1")
        assert set(said["paths"]) == {
            "/health",
            "/info",
            "/tasks",
            "/rollout",
            "/group",
            "/metrics",
            "/openapi.json",
        }
        schemas = said["components"]["schemas"]
        assert schemas["RolloutRequest"]["properties"]["task_idx"]["minimum"] == 0
        assert {"Trace", "GroupRequest", "Info", "Refusal", "CallRecord"} <= schemas.keys()
        assert _refs(said) <= {f"#/components/schemas/{name}" for name in schemas}


def _refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_refs, value.values()))
    return set().union(*map(_refs, value)) if isinstance(value, list) else set()


async def test_metrics_count_requests_and_rollouts() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.GroupsTaskset) as server,
        EnvClient(server.url) as client,
    ):
        await client.group(0, 3, model=model(endpoint))
        await client.rollout(0, model=model(endpoint))
        _, headers, body = await raw(server, "GET", "/metrics")
        lines = body.decode().splitlines()
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'taskmill_rollouts_total{state="completed"} 4' in lines
        assert 'taskmill_requests_total{route="/group",status="200"} 1' in lines
        assert 'taskmill_request_seconds_bucket{route="/rollout",le="+Inf"} 1' in lines
        assert "taskmill_workers 1" in lines


async def test_each_request_has_an_id_a_log_line_and_gives_the_id_back() -> None:
    said: list[dict[str, Any]] = []
    async with EnvServer(
        tasksets.SumsTaskset, log=lambda event, **f: said.append({"event": event, **f})
    ) as server:
        _, headers, _ = await raw(server, "GET", "/info", **{"X-Request-Id": "trainer-7"})
        assert headers["X-Request-Id"] == "trainer-7"
        status, headers, body = await raw(server, "GET", "/nowhere", **{"X-Request-Id": 'bad "id"\t'})
        assert status == 404
        assert json.loads(body)["error"]["request_id"] == headers["X-Request-Id"] != 'bad "id"'
        requests = [line for line in said if line["event"] == "request"]
        assert [(line["route"], line["status"]) for line in requests] == [("/info", 200), ("other", 404)]
        assert requests[0]["id"] == "trainer-7"


# -- load -----------------------------------------------------------------------------------------------------


async def test_450_quick_requests_are_450_answers() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.SumsTaskset, workers=2) as server,
        EnvClient(server.url) as client,
    ):
        answered = 0
        for start in range(0, 450, 15):
            numbers = range(start, start + 15)
            asked = (client.rollout(number % 10, number=number, model=model(endpoint)) for number in numbers)
            traces = await asyncio.gather(*asked)
            assert await client.health()
            answered += sum(trace.reward == 1.0 for trace in traces)
        assert answered == 450


async def test_a_thousand_requests_at_once_are_all_answered() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.SumsTaskset, workers=2, places=100) as server,
        EnvClient(server.url) as client,
    ):
        traces = await asyncio.gather(
            *(client.rollout(number % 10, number=number, model=model(endpoint)) for number in range(1000))
        )
        assert [trace.number for trace in traces] == list(range(1000))
        assert {trace.reward for trace in traces} == {1.0}
        assert endpoint.peak <= 200


async def test_a_full_queue_is_a_503_that_says_when_to_come_again() -> None:
    async with (
        FakeEndpoint(silence()) as endpoint,
        EnvServer(tasksets.SumsTaskset, places=1, queue=1) as server,
        EnvClient(server.url, patience=0.0) as client,
        asyncio.TaskGroup() as group,
    ):
        held = [group.create_task(client.rollout(number, model=model(endpoint))) for number in range(2)]
        workers = server._workers
        assert workers is not None
        await until(lambda: (workers.running, workers.queued) == (1, 1))
        asked = {"task_idx": 2, "model": model(endpoint)}
        status, headers, body = await raw(server, "POST", "/rollout", asked)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"]["type"] == "ServerBusyError"
        with pytest.raises(ServerBusyError, match="waiting already"):
            await client.rollout(3, model=model(endpoint))
        assert (await raw(server, "GET", "/health"))[0] == 200
        for task in held:
            task.cancel()


async def test_the_client_comes_again_while_the_server_is_busy() -> None:
    async with (
        FakeEndpoint(solve, latency=0.3) as endpoint,
        EnvServer(tasksets.SumsTaskset, places=1, queue=1) as server,
        EnvClient(server.url) as client,
    ):
        traces = await asyncio.gather(*(client.rollout(number, model=model(endpoint)) for number in range(5)))
        assert [trace.reward for trace in traces] == [1.0] * 5


# -- death ----------------------------------------------------------------------------------------------------


async def test_kill_9_of_a_worker_loses_no_request() -> None:
    async with (
        FakeEndpoint(solve, latency=0.5) as endpoint,
        EnvServer(tasksets.SumsTaskset, workers=2) as server,
        EnvClient(server.url) as client,
        asyncio.TaskGroup() as group,
    ):
        asked = [group.create_task(client.rollout(number, model=model(endpoint))) for number in range(8)]
        await until(lambda: endpoint.calls == 8)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        assert [(await task).reward for task in asked] == [1.0] * 8


async def test_a_task_that_kills_its_worker_each_time_is_worker_died(tmp_path: Path) -> None:
    async with (
        FakeEndpoint("2") as endpoint,
        EnvServer(tasksets.DeadlyTaskset, config={"folder": str(tmp_path)}, workers=2) as server,
        EnvClient(server.url) as client,
    ):
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await client.rollout(0, model=model(endpoint))
        assert len(list(tmp_path.iterdir())) == 3, "once, and twice again"
        assert (await client.rollout(2, model=model(endpoint))).reward == 1.0, "the server goes on"


async def test_a_task_that_kills_its_worker_once_is_run_again(tmp_path: Path) -> None:
    async with (
        FakeEndpoint("2") as endpoint,
        EnvServer(tasksets.DeadlyTaskset, config={"folder": str(tmp_path)}) as server,
        EnvClient(server.url) as client,
    ):
        assert (await client.rollout(1, model=model(endpoint))).reward == 1.0


async def test_a_client_that_goes_away_ends_its_rollout_and_no_other(tmp_path: Path) -> None:
    def step(body: dict[str, Any]) -> Any:
        if body["messages"][0]["content"] == "1":
            return silence()
        return answer("", calls=[call("linger")])

    async with (
        FakeEndpoint(step) as endpoint,
        EnvServer(tasksets.BusyTaskset, config={"folder": str(tmp_path)}) as server,
        EnvClient(server.url) as client,
        EnvClient(server.url) as other,
    ):
        before = family()
        kept = asyncio.ensure_future(other.rollout(1, model=model(endpoint)))
        gone = asyncio.ensure_future(client.rollout(0, model=model(endpoint)))
        (pid,) = await appeared(tmp_path)
        started = family() - before
        assert int(pid) in started
        workers = server._workers
        assert workers is not None
        await until(lambda: workers.running == 2)
        gone.cancel()
        await all_gone({int(pid)})
        assert "cancelled" in await appeared(tmp_path, 2)
        await until(lambda: workers.running == 1)
        assert not kept.done()
        kept.cancel()


async def test_the_commands_of_a_cancelled_rollout_are_ended_too(tmp_path: Path) -> None:
    steps = [answer("", calls=[call("terminal", {"command": f"touch {tmp_path}/up; sleep 1000"})])]
    async with (
        FakeEndpoint(steps) as endpoint,
        EnvServer(tasksets.BusyTaskset, config={"folder": str(tmp_path)}, sandbox="plain") as server,
        EnvClient(server.url) as client,
    ):
        before = family()
        gone = asyncio.ensure_future(client.rollout(0, model=model(endpoint)))
        await appeared(tmp_path)
        started = family() - before
        assert started
        gone.cancel()
        await all_gone(started)


async def test_the_commands_of_a_killed_worker_are_ended_and_its_folder_removed(tmp_path: Path) -> None:
    steps = [answer("", calls=[call("terminal", {"command": f"touch {tmp_path}/up; setsid sleep 1000"})])]
    async with (
        FakeEndpoint(steps) as endpoint,
        EnvServer(tasksets.BusyTaskset, config={"folder": str(tmp_path)}, sandbox="plain") as server,
        EnvClient(server.url) as client,
    ):
        before = family()
        worker = server.worker_pids[0]
        gone = asyncio.ensure_future(client.rollout(0, model=model(endpoint)))
        await appeared(tmp_path)
        started = family() - before
        place = server._place
        assert place is not None
        assert (place / f"worker-{worker}").exists()
        gone.cancel()
        os.kill(worker, signal.SIGKILL)
        await all_gone(started)
        await until(lambda: not (place / f"worker-{worker}").exists())
    assert not place.exists()


# -- tasksets that fail ---------------------------------------------------------------------------------------


async def test_a_taskset_that_cannot_be_loaded_is_said_with_its_cause() -> None:
    with pytest.raises(
        WorkerStartError, match="failed at its task 0: ValueError: the file of questions is empty"
    ):
        async with EnvServer(tasksets.RaisesAtOnceTaskset, workers=2):
            pass
    await all_gone(family())


async def test_a_load_that_fails_at_the_fifth_task_serves_those_before() -> None:
    async with (
        FakeEndpoint(solve) as endpoint,
        EnvServer(tasksets.RaisesAtFifthTaskset) as server,
        EnvClient(server.url) as client,
    ):
        info = await client.info()
        assert info.num_tasks == 5
        assert info.problem is not None
        assert "row 5 is damaged" in info.problem
        for _ in range(2):
            assert (await client.rollout(4, model=model(endpoint))).reward == 1.0
            for idx in (5, 99):
                with pytest.raises(TasksetError, match="failed at its task 5: ValueError: row 5 is damaged"):
                    await client.rollout(idx, model=model(endpoint))


async def test_workers_that_make_other_tasks_are_refused_with_the_first_number_that_differs() -> None:
    with pytest.raises(WorkerStartError, match="do not make the same tasks: task 3 is not the same"):
        async with EnvServer(tasksets.UnlikeTaskset, workers=2):
            pass
    await all_gone(family())


async def test_a_taskset_defined_inside_a_function_is_refused_at_once() -> None:
    class HiddenTaskset(tasksets.SumsTaskset):
        pass

    with pytest.raises(TasksetError, match="defined inside a function"):
        EnvServer(HiddenTaskset)


# -- who may come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_no_other_address_than_this_machine_without_a_token(address: str) -> None:
    with pytest.raises(ConfigurationError, match="a token is needed"):
        EnvServer(tasksets.SumsTaskset, address=address)
    assert EnvServer(tasksets.SumsTaskset, address=address, token=TOKEN)


@pytest.mark.parametrize("address", ["8400", "localhost", "localhost:port", "localhost:70000", "::1:80"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="address="):
        EnvServer(tasksets.SumsTaskset, address=address)


async def test_a_token_is_asked_for_and_a_wrong_one_refused() -> None:
    async with EnvServer(tasksets.SumsTaskset, token=TOKEN) as server:
        for path in ("/info", "/metrics", "/tasks", "/openapi.json"):
            assert (await raw(server, "GET", path))[0] == 401
        assert (await raw(server, "GET", "/health"))[0] == 200
        async with EnvClient(server.url, token=TOKEN[:-1]) as client:
            with pytest.raises(ServerTokenError, match="token is needed"):
                await client.info()
        async with EnvClient(server.url, token=TOKEN) as client:
            assert (await client.info()).num_tasks == 10


async def test_without_a_token_a_page_in_a_browser_gets_nothing() -> None:
    async with EnvServer(tasksets.SumsTaskset) as server:
        assert (await raw(server, "GET", "/info", Host="rebound.example:80"))[0] == 403
        asked = {"task_idx": 0, "model": {"name": "m", "base_url": "http://localhost:1"}}
        assert (await raw(server, "POST", "/rollout", asked, **{"Content-Type": "text/plain"}))[0] == 415


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with EnvServer(tasksets.SumsTaskset, max_body=2000) as server:
        status, _, body = await raw(server, "POST", "/rollout", b'{"task_idx": "' + b"x" * 3000 + b'"}')
        assert status == 413
        assert "larger than the 2,000 bytes" in json.loads(body)["error"]["message"]


async def test_a_key_is_never_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[Any] = []
    steps = [refusal(400, f"your key {KEY} is odd"), answer("fine"), refusal(500, KEY)]
    async with (
        FakeEndpoint(steps) as endpoint,
        EnvServer(tasksets.SumsTaskset, log=lambda event, **f: said.append((event, f))) as server,
    ):
        answers = []
        for body in (
            {"task_idx": 0, "model": model(endpoint)},
            {"task_idx": 1, "model": model(endpoint)},
            {"task_idx": 2, "model": model(endpoint, max_attempts=1)},
            {"task_idx": 2, "model": model(endpoint), "mode": KEY},
            {"task_idx": 2, "model": model(endpoint, base_url=KEY)},
            {"task_idx": 2, "model": model(endpoint, api_key=[KEY])},
            {"task_idx": 2, "model": model(endpoint, call_timeout=KEY)},
            {"task_idx": 2, "model": model(endpoint, api_key=KEY + " ü")},
            {"task_idx": 99, "model": model(endpoint)},
        ):
            answers.append(await raw(server, "POST", "/rollout", body))
        answers.append(
            await raw(server, "POST", "/rollout", b'{"task_idx": 1, "model": {"api_key": "' + KEY.encode())
        )
        answers.append(await raw(server, "GET", "/metrics"))
    assert [status for status, _, _ in answers] == [200, 200, 200, 422, 422, 422, 422, 422, 404, 422, 200]
    out, err = capfd.readouterr()
    for text in (*map(repr, answers), repr(said), out, err):
        assert KEY not in text


# -- the client -----------------------------------------------------------------------------------------------


async def test_the_client_waits_for_a_server_that_is_starting() -> None:
    async with EnvServer(tasksets.SumsTaskset) as first:
        port = first.address.port
    async with EnvClient(f"http://127.0.0.1:{port}") as client:
        assert not await client.health()
        waiting = asyncio.ensure_future(client.info())
        async with EnvServer(tasksets.SumsTaskset, address=f"127.0.0.1:{port}"):
            assert (await waiting).num_tasks == 10


async def test_a_server_that_is_not_there_is_an_error_that_says_where() -> None:
    async with EnvClient("http://127.0.0.1:9", patience=0.1) as client:
        with pytest.raises(ServerError, match=r"no environment server answers at http://127\.0\.0\.1:9"):
            await client.info()


async def test_another_kind_of_server_is_told_apart() -> None:
    async with FakeEndpoint() as endpoint, EnvClient(endpoint.url) as client:
        with pytest.raises(ServerError, match="no environment server of taskmill"):
            await client.info()


async def test_what_the_client_cannot_mean_is_refused_before_it_is_sent() -> None:
    async with EnvClient("http://127.0.0.1:9", patience=0.0) as client:
        with pytest.raises(ConfigurationError, match=r"did you mean 'sampling\.max_tokens'"):
            await client.rollout(0, model={"name": "m", "base_url": "http://x"}, sampling={"max_token": 3})
        with pytest.raises(ConfigurationError, match="task_idx=-1"):
            await client.rollout(-1, model={"name": "m", "base_url": "http://x"})
