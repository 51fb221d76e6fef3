"""The endpoint client against a real server on this machine, with every fault that server can be told to have."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import resource
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from random import Random
from typing import Any

import pytest

from taskmill.errors import (
    AuthenticationError,
    BadRequestError,
    ConfigurationError,
    ContextWindowError,
    MalformedAnswerError,
    ModelError,
    ModelNotFoundError,
    ModelTimeoutError,
    RateLimitedError,
    TransientModelError,
)
from taskmill.models import Request, Sampling
from taskmill.models import endpoint as endpoint_module
from taskmill.models.endpoint import EndpointModel, Timeouts
from taskmill.models.refusals import retry_after_seconds
from taskmill.models.retry import Retrying, RetryPolicy
from taskmill.records import Message, ToolCall
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import (
    EndpointProcess,
    Script,
    Step,
    answer,
    error_in_200,
    garbage,
    half_answer,
    hang_up,
    rate_limited,
    refusal,
    reply,
    silence,
)

REQUEST = Request((Message("user", "hello"),))
SHORT = Timeouts(attempt=0.3, connect=1.0)
KEY = "sk-" + "a-key-of-a-test"


@asynccontextmanager
async def serving(
    script: Script = "hello", *, timeout: Timeouts | None = None, key: str | None = None, **options: Any
) -> AsyncIterator[tuple[FakeEndpoint, EndpointModel]]:
    async with FakeEndpoint(script, key=key, **options) as endpoint:
        model = EndpointModel("m", base_url=endpoint.url, api_key=KEY, timeout=timeout)
        try:
            yield endpoint, model
        finally:
            await model.close()


async def failing(script: Script, *, timeout: Timeouts | None = None) -> tuple[ModelError, int]:
    """The error of one call, and how many requests it took."""
    async with serving(script, timeout=timeout) as (endpoint, model):
        with pytest.raises(ModelError) as caught:
            await model.complete(REQUEST)
        return caught.value, endpoint.calls


async def test_an_answer_and_what_was_sent_for_it() -> None:
    async with serving(answer("hi", reasoning="hm"), key=KEY) as (endpoint, model):
        completion = await model.complete(REQUEST)
        assert completion.message == Message("assistant", "hi", reasoning="hm")
        assert completion.seconds > 0
        received = endpoint.requests[0]
        assert received.body == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        assert received.headers["Content-Type"] == "application/json"


async def test_without_a_key_no_key_is_sent() -> None:
    async with FakeEndpoint("hi") as endpoint:
        model = EndpointModel("m", base_url=endpoint.url)
        await model.complete(REQUEST)
        await model.close()
        assert "Authorization" not in endpoint.requests[0].headers


@pytest.mark.parametrize(
    ("step", "kind", "status"),
    [
        (refusal(400, "bad"), BadRequestError, 400),
        (refusal(401, "wrong"), AuthenticationError, 401),
        (refusal(402, "no money"), AuthenticationError, 402),
        (refusal(403, "not yours"), AuthenticationError, 403),
        (refusal(403, "flagged by moderation"), BadRequestError, 403),
        (refusal(404, "no such model"), ModelNotFoundError, 404),
        (refusal(405, "not here"), BadRequestError, 405),
        (refusal(408, "late"), ModelTimeoutError, 408),
        (refusal(409, "conflict"), TransientModelError, 409),
        (refusal(413, "prompt is too long: 300000 tokens"), ContextWindowError, 413),
        (refusal(400, "This model's maximum context length is 8192 tokens."), ContextWindowError, 400),
        (refusal(400, "too long", code="context_length_exceeded"), ContextWindowError, 400),
        (
            refusal(400, "request (9000 tokens) exceeds the available context size (4096)"),
            ContextWindowError,
            400,
        ),
        (refusal(400, "max_tokens must be at most 8192"), BadRequestError, 400),
        (refusal(422, "bad"), BadRequestError, 422),
        (refusal(429, "slow down"), RateLimitedError, 429),
        (
            refusal(429, "You exceeded your current quota", code="insufficient_quota"),
            AuthenticationError,
            429,
        ),
        (refusal(500, "oops"), TransientModelError, 500),
        (refusal(503, "busy", headers={"Retry-After": "2"}), RateLimitedError, 503),
        (refusal(504, "late"), ModelTimeoutError, 504),
        (refusal(529, "overloaded"), RateLimitedError, 529),
        (reply(b"<html>nginx</html>", status=502), TransientModelError, 502),
        (reply({"detail": [{"loc": ["body"], "msg": "wrong"}]}, status=422), BadRequestError, 422),
        (reply({"object": "error", "message": "gone", "code": 404}, status=404), ModelNotFoundError, 404),
        (reply(b"", status=500), TransientModelError, 500),
        (error_in_200("away", 502), TransientModelError, 502),
        (garbage(), MalformedAnswerError, None),
        (reply({"choices": []}), MalformedAnswerError, None),
        (reply(b"", status=204), MalformedAnswerError, 204),
    ],
)
async def test_each_refusal_is_one_kind_of_error(
    step: Step, kind: type[ModelError], status: int | None
) -> None:
    error, calls = await failing(step)
    assert type(error) is kind
    assert (error.status, calls) == (status, 1)


@pytest.mark.parametrize("step", [half_answer(), hang_up()])
async def test_a_broken_connection_is_transient_and_one_request(step: Step) -> None:
    error, calls = await failing(step)
    assert type(error) is TransientModelError
    assert calls == 1


async def test_silence_ends_with_the_attempt_timeout() -> None:
    error, calls = await failing(silence(), timeout=SHORT)
    assert type(error) is ModelTimeoutError
    assert "0.3 s" in str(error)
    assert calls == 1


async def test_nobody_there_is_transient() -> None:
    async with FakeEndpoint() as endpoint:
        gone = endpoint.url
    model = EndpointModel("m", base_url=gone, timeout=SHORT)
    with pytest.raises(TransientModelError, match="no connection"):
        await model.complete(REQUEST)
    await model.close()


async def test_a_half_answer_once_is_mended_by_one_retry() -> None:
    async with serving([half_answer(), hang_up(), garbage(), error_in_200(), answer("hi")]) as (
        endpoint,
        model,
    ):
        service = Retrying(model, policy=RetryPolicy(base=0.0))
        completion = await service.complete(REQUEST)
        assert (completion.attempts, endpoint.calls) == (5, 5)


async def test_a_silent_request_is_tried_again_on_another_connection() -> None:
    async with serving([silence(), answer("hi")], timeout=SHORT) as (endpoint, model):
        completion = await Retrying(model, policy=RetryPolicy(base=0.0)).complete(REQUEST)
        assert (completion.attempts, endpoint.connections) == (2, 2)


async def test_a_storm_of_429_is_ridden_out() -> None:
    async with serving([rate_limited(0.05)] * 3 + [answer("hi")]) as (_, model):
        service = Retrying(model, policy=RetryPolicy(base=0.01, longest=0.1))
        completion = await service.complete(REQUEST)
        assert completion.attempts == 4
        assert completion.waiting >= 0.15
        assert service.limit.snapshot().refusals == 3


async def test_amid_all_faults_at_once_every_call_is_answered_and_no_place_leaks() -> None:
    random = Random(5)
    faults = [
        rate_limited(0.02),
        refusal(500),
        half_answer(),
        hang_up(),
        garbage(),
        error_in_200(),
        silence(),
    ]

    def script(body: dict[str, Any]) -> Step:
        return random.choice([answer("ok")] * 6 + faults)

    async with serving(script, timeout=SHORT, keep_alive=0.05, drop_kept=10) as (_, model):
        service = Retrying(model, policy=RetryPolicy(attempts=60, base=0.01, longest=0.05), random=random)
        answers = await asyncio.gather(*[service.complete(REQUEST) for _ in range(100)])
        assert [completion.message.content for completion in answers] == ["ok"] * 100
        now = service.limit.snapshot()
        assert (now.in_flight, now.waiting) == (0, 0)


# -- connections ----------------------------------------------------------------------------------------------


async def test_a_connection_is_used_again() -> None:
    async with serving() as (endpoint, model):
        for _ in range(5):
            await model.complete(REQUEST)
        assert endpoint.connections == 1


async def test_a_kept_connection_that_went_stale_is_replaced_once_and_silently() -> None:
    async with serving(drop_kept=1) as (endpoint, model):
        await model.complete(REQUEST)
        completion = await model.complete(REQUEST)
        assert completion.message.content == "hello"
        assert completion.attempts == 1
        assert (endpoint.answered, endpoint.connections) == (2, 2)


async def test_connections_closed_while_idle_are_not_noticed() -> None:
    async with serving(keep_alive=0.01) as (endpoint, model):
        for _ in range(5):
            await model.complete(REQUEST)
            await asyncio.sleep(0.02)
        assert endpoint.answered == 5


async def test_a_fresh_connection_that_is_dropped_is_not_asked_again_in_secret() -> None:
    async with serving([answer("hi"), hang_up(), hang_up()]) as (endpoint, model):
        await model.complete(REQUEST)
        with pytest.raises(TransientModelError):
            await model.complete(REQUEST)
        # One on the kept connection, one on a fresh one, and then the caller is told.
        assert endpoint.calls == 3


async def test_a_cancelled_call_leaves_a_client_that_works() -> None:
    async with serving([silence(), answer("hi")]) as (endpoint, model):
        task = asyncio.create_task(model.complete(REQUEST))
        await endpoint.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await model.complete(REQUEST)).message.content == "hi"


async def test_a_redirect_is_not_followed_with_the_key() -> None:
    async with FakeEndpoint() as elsewhere:
        moved = refusal(307, "moved", headers={"Location": f"{elsewhere.url}/chat/completions"})
        error, _ = await failing(moved)
        assert type(error) is BadRequestError
        assert elsewhere.url in str(error)
        assert elsewhere.calls == 0


async def test_where_a_redirect_leads_is_said_without_what_may_be_secret() -> None:
    def script(body: dict[str, Any]) -> Step:
        return refusal(308, headers={"Location": f"/{KEY}/v2{secret_url.removeprefix(endpoint.url)}"})

    async with FakeEndpoint(script) as endpoint:
        secret_url = f"{endpoint.url}/chat/completions?api_key=SECRET"
        model = EndpointModel("m", base_url=secret_url, api_key=KEY)
        with pytest.raises(BadRequestError, match=r"redirects to '/.*/v2/chat/completions'") as caught:
            await model.complete(REQUEST)
        await model.close()
    assert "SECRET" not in f"{caught.value!r} {caught.value.body}"
    assert KEY not in str(caught.value)


async def test_a_compressed_answer_is_read() -> None:
    body = gzip.compress(answer("hi").body)
    async with serving(reply(body, headers={"Content-Encoding": "gzip"})) as (_, model):
        assert (await model.complete(REQUEST)).message.content == "hi"


@asynccontextmanager
async def raw_server(*parts: bytes) -> AsyncIterator[str]:
    """An address where each request is answered with these bytes, whatever they are."""

    async def answer_raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        for part in parts:
            writer.write(part)
        writer.close()

    async with await asyncio.start_server(answer_raw, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"


async def test_a_secret_is_not_in_the_error_s_causes_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 not for hush-hush\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://me:hush-hush@127.0.0.1:{port}")
        model = EndpointModel("m", base_url="https://endpoint.invalid/v1")
        with pytest.raises(ModelError, match="407") as caught:
            await model.complete(REQUEST)
        await model.close()
    assert "hush" not in "".join(traceback.format_exception(caught.value))


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_an_answer_that_comes_in_chunks_is_read() -> None:
    body = answer("hi").body
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:20], body[20:])]
    async with raw_server(CHUNKED, *chunks, b"0\r\n\r\n") as url:
        model = EndpointModel("m", base_url=url)
        assert (await model.complete(REQUEST)).message.content == "hi"
        await model.close()


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x" * 5000),
        (CHUNKED, b"bb8\r\n" + b"x" * 3000 + b"\r\n", b"7d0\r\n" + b"x" * 2000 + b"\r\n"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
            % len(gzip.compress(b"x" * 5000)),
            gzip.compress(b"x" * 5000),
        ),
    ],
    ids=["announced", "in chunks", "compressed"],
)
async def test_an_answer_without_end_is_not_read_to_its_end(
    parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "LARGEST_ANSWER", 4000)
    async with raw_server(*parts) as url:
        model = EndpointModel("m", base_url=url)
        with pytest.raises(MalformedAnswerError, match=r"(5,000|4,001) bytes or more; at most 4,000"):
            await model.complete(REQUEST)
        await model.close()


async def test_tokens_that_the_endpoint_does_not_count_have_no_cost() -> None:
    uncounted = reply({"choices": [{"message": {"content": "hi"}}]})
    async with serving([answer("hi"), uncounted]) as (_, model):
        service = Retrying(model, price=lambda model, usage: float(usage.input_tokens))
        assert [(await service.complete(REQUEST)).cost for _ in range(2)] == [10.0, None]


async def test_it_works_again_after_closing_and_closing_twice_is_fine() -> None:
    async with serving() as (endpoint, model):
        await model.complete(REQUEST)
        await model.close()
        await model.close()
        await model.complete(REQUEST)
        assert endpoint.connections == 2


def test_one_model_serves_one_loop_after_another() -> None:
    with EndpointProcess() as endpoint:
        model = EndpointModel("m", base_url=endpoint.url)

        async def once() -> None:
            await model.complete(REQUEST)
            await model.close()

        asyncio.run(once())
        asyncio.run(once())
        assert endpoint.counts()["answered"] == 2


def test_the_connections_of_a_loop_that_is_over_are_let_go(caplog: pytest.LogCaptureFixture) -> None:
    with EndpointProcess() as endpoint:
        model = EndpointModel("m", base_url=endpoint.url)
        for _ in range(2):
            asyncio.run(model.complete(REQUEST))  # type: ignore[arg-type]
            gc.collect()
        asyncio.run(model.close())  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("before", [0, 1], ids=["a fresh connection", "a kept connection"])
async def test_closing_during_a_call_ends_it_with_an_error(before: int) -> None:
    async with serving([answer("hi")] * before + [silence()]) as (endpoint, model):
        for _ in range(before):
            await model.complete(REQUEST)
        endpoint.arrived.clear()
        call = asyncio.create_task(model.complete(REQUEST))
        await endpoint.arrived.wait()
        await model.close()
        with pytest.raises(TransientModelError):
            await call
        assert endpoint.calls == before + 1


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16_384
    if hard not in (resource.RLIM_INFINITY, -1) and hard < wanted:
        pytest.skip(f"this machine allows a process {hard} open files; 5,000 connections need more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_5000_calls_at_once_need_no_place_in_a_pool() -> None:
    # Slow enough that all of them are under way together; a busy machine may take its time to connect them.
    with EndpointProcess("--latency", "0.2") as endpoint:
        model = EndpointModel("m", base_url=endpoint.url, timeout=Timeouts(connect=300, attempt=300))
        try:
            completions = await asyncio.gather(*[model.complete(REQUEST) for _ in range(5000)])
        finally:
            await model.close()
        assert all(completion.message.content for completion in completions)
        counts = await asyncio.to_thread(endpoint.counts)
        assert counts["answered"] == 5000
        assert counts["connections"] >= 4000


# -- what an endpoint does not take ---------------------------------------------------------------------------


async def test_a_seed_that_is_refused_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def script(body: dict[str, Any]) -> Step | str:
        return refusal(422, "Extra inputs are not permitted: seed") if "seed" in body else "hi"

    async with serving(script) as (endpoint, model):
        seeded = Request(REQUEST.messages, sampling=Sampling(seed=7))
        await asyncio.gather(*[model.complete(seeded) for _ in range(5)])
        before = endpoint.calls
        await model.complete(seeded)
        assert endpoint.calls == before + 1
        assert "seed" not in endpoint.requests[-1].body
    assert [record.levelname for record in caplog.records if "seed" in record.getMessage()] == ["WARNING"]


async def test_a_seed_that_was_not_the_trouble_is_kept() -> None:
    async with serving(refusal(422, "temperature is out of range, got {'seed': 7, 'temperature': 9}")) as (
        _,
        model,
    ):
        seeded = Request(REQUEST.messages, sampling=Sampling(seed=7))
        for _n in range(2):
            with pytest.raises(BadRequestError):
                await model.complete(seeded)
    async with serving([refusal(422, "'seed': 7"), refusal(422, "no"), answer("hi")]) as (endpoint, model):
        with pytest.raises(BadRequestError):
            await model.complete(seeded)
        await model.complete(seeded)
        assert endpoint.requests[-1].body["seed"] == 7


async def test_a_length_limit_of_the_other_name_is_tried() -> None:
    def script(body: dict[str, Any]) -> Step | str:
        if "max_tokens" in body:
            return refusal(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return str(body["max_completion_tokens"])

    async with serving(script) as (_, model):
        completion = await model.complete(Request(REQUEST.messages, sampling=Sampling(max_tokens=9)))
        assert completion.message.content == "9"


async def test_a_length_limit_of_the_wrong_size_is_an_error() -> None:
    async with serving(refusal(400, "max_tokens must be less than 4096")) as (endpoint, model):
        with pytest.raises(BadRequestError, match="4096"):
            await model.complete(Request(REQUEST.messages, sampling=Sampling(max_tokens=9000)))
        assert endpoint.calls == 1


async def test_reasoning_that_may_not_be_sent_back_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def script(body: dict[str, Any]) -> Step | str:
        if any("reasoning_content" in message for message in body["messages"]):
            return refusal(400, "property 'reasoning_content' is unsupported")
        return "hi"

    turn = Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c", "ls"),))
    async with serving(script) as (_, model):
        request = Request((*REQUEST.messages, turn, Message("tool", "x", tool_call_id="c")))
        assert (await model.complete(request)).message.content == "hi"
    assert len(caplog.records) == 1


async def test_reasoning_that_must_be_sent_back_is_no_reason_to_leave_it_out() -> None:
    turn = Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c", "ls"),))
    async with serving(refusal(400, "The reasoning_content must be passed back to the API.")) as (
        endpoint,
        model,
    ):
        with pytest.raises(BadRequestError):
            await model.complete(Request((*REQUEST.messages, turn)))
        assert endpoint.calls == 1


# -- secrets, timeouts, addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize("filling", [0, 1990, 5000])
async def test_no_error_shows_the_key(filling: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    words = "x" * filling + f" wrong key {KEY} of header Bearer {KEY}"
    for step in (
        refusal(401, words),
        reply(words.encode(), status=500),
        error_in_200(words),
        garbage(words.encode()),
    ):
        error, _ = await failing(step)
        assert KEY not in f"{error!r} {error} {error.body} {error.args}"
        assert len(error.body or "") <= 2000
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "secret_url",
    [
        "http://user:SEC%2BRET%3D@{}/v1",
        "http://SEC%2BRET%3D@{}/v1",
        "http://{}/v1?api_key=SEC%2BRET%3D",
        "http://{}/v1?api_key=SEC%2bRET%3d&x=y",
        "http://{}/v1?SEC%2BRET%3D",
    ],
)
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 nonsense\r\n\r\n",
        b"HTTP/1.1 400 No\r\n\r\nfor SEC+RET= SEC%2BRET%3D SEC%2bRET= SEC\\u002BRET\\u003d",
        b"HTTP/1.1 302 No\r\nLocation: /v2/SEC%2BRET%3D/x?k=SEC%2BRET%3D\r\n\r\n",
    ],
    ids=["no HTTP", "a refusal", "a redirect"],
)
async def test_no_error_shows_a_secret_of_the_address_in_any_spelling(secret_url: str, raw: bytes) -> None:
    async with raw_server(raw) as url:
        model = EndpointModel("m", base_url=secret_url.format(url.split("/")[2]))
        with pytest.raises(ModelError) as caught:
            await model.complete(REQUEST)
        await model.close()
    said = f"{caught.value!r} {caught.value} {caught.value.body}"
    assert "SEC" not in said
    assert "RET" not in said


async def test_the_start_of_the_raw_body_stands_in_the_error() -> None:
    error, _ = await failing(reply(b"<html>" + b"y" * 9000, status=500))
    assert error.body is not None
    assert error.body.startswith("<html>yyy")
    assert len(error.body) == 2000


@pytest.mark.parametrize("field", ["attempt", "connect", "total"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5"])
def test_a_timeout_that_never_ends_or_never_starts_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}="):
        Timeouts(**{field: value})


@pytest.mark.parametrize(
    "base_url",
    ["", "localhost:8000/v1", "ftp://host/v1", "http://", "/v1", "http://[::1", "http://h:port/v1"],
)
def test_an_address_that_is_none_is_refused(base_url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        EndpointModel("m", base_url=base_url)


def test_two_ways_to_log_in_are_one_too_many() -> None:
    with pytest.raises(ConfigurationError) as caught:
        EndpointModel("m", base_url="http://user:word@h/v1", api_key="k")
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("key", ["a b", "a\nb", "é", "“quoted”"])
def test_a_key_that_can_t_be_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EndpointModel("m", base_url="http://h/v1", api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("ending", ["", "/", "/chat/completions", "/chat/completions/"])
async def test_the_base_url_may_end_either_way(ending: str) -> None:
    async with FakeEndpoint("hi") as endpoint:
        model = EndpointModel("m", base_url=endpoint.url + ending)
        assert (await model.complete(REQUEST)).message.content == "hi"
        await model.close()


async def test_a_proxy_of_the_environment_is_not_used_towards_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with serving() as (_, model):
        assert (await model.complete(REQUEST)).message.content == "hello"


async def test_a_proxy_of_the_environment_is_used_towards_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEndpoint("through the proxy") as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        model = EndpointModel("m", base_url="http://endpoint.invalid/v1")
        completion = await model.complete(REQUEST)
        await model.close()
        assert completion.message.content == "through the proxy"


# -- Retry-After ----------------------------------------------------------------------------------------------


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": formatdate(NOW + 30, usegmt=True)}, 30.0),
        ({"Retry-After": formatdate(NOW - 30, usegmt=True)}, 0.0),
        # The endpoint's clock is an hour ahead of ours; its own Date says so.
        (
            {"Retry-After": formatdate(NOW + 3630, usegmt=True), "Date": formatdate(NOW + 3600, usegmt=True)},
            30.0,
        ),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
    ],
)
def test_what_retry_after_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, NOW) == seconds


async def test_retry_after_travels_with_the_error() -> None:
    error, _ = await failing(rate_limited(12))
    assert error.retry_after == 12


# -- the other server -----------------------------------------------------------------------------------------


async def test_the_server_of_its_own_process_follows_its_options() -> None:
    options = [
        "--script",
        "tool_then_answer",
        "--key",
        "k",
        "--tool",
        "ls",
        "--arguments",
        "{}",
        "--count-prompts",
    ]
    with EndpointProcess(*options, "--fault-every", "3", "--fault-status", "500") as endpoint:
        model = EndpointModel("m", base_url=endpoint.url, api_key="k")
        stranger = EndpointModel("m", base_url=endpoint.url, api_key="other")
        first = (await model.complete(REQUEST)).message
        assert first.tool_calls == (ToolCall("call_0", "ls", "{}"),)
        assert first.reasoning
        after = Request((*REQUEST.messages, first, Message("tool", "x", tool_call_id="call_0")))
        assert (await model.complete(after)).message.content == "All done."
        with pytest.raises(TransientModelError):
            await model.complete(after)
        with pytest.raises(AuthenticationError):
            await stranger.complete(after)
        await model.close()
        await stranger.close()
        counts = await asyncio.to_thread(endpoint.counts)
        assert (counts["calls"], counts["answered"], counts["refused"]) == (4, 2, 2)
        assert counts["prompts"] == {"hello": 2}


async def test_the_fake_endpoint_counts_and_lets_in_one_key_only() -> None:
    async with FakeEndpoint(
        lambda body: body["messages"][-1]["content"].upper(), key=KEY, latency=0.01
    ) as endpoint:
        model = EndpointModel("m", base_url=endpoint.url, api_key=KEY)
        stranger = EndpointModel("m", base_url=endpoint.url, api_key="other")
        said = await asyncio.gather(*[model.complete(REQUEST) for _ in range(8)])
        assert {completion.message.content for completion in said} == {"HELLO"}
        with pytest.raises(AuthenticationError):
            await stranger.complete(REQUEST)
        await model.close()
        await stranger.close()
        assert (endpoint.calls, endpoint.answered) == (9, 8)
        assert 1 < endpoint.peak <= 8
        assert json.dumps([received.body for received in endpoint.requests])
