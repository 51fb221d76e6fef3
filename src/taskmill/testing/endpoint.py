"""A real HTTP endpoint on this machine that answers as told, faults included.

    async with FakeEndpoint([rate_limited(retry_after=1), answer("hello")], key="k") as endpoint:
        model = open_model("any", base_url=endpoint.url, api_key="k")

A script is one step, a list of steps (the last one repeats), or a function of the request's body. For
benchmarks and for tests that kill processes, `EndpointProcess` runs a leaner server in a process of its own,
also from the command line: `python -m taskmill.testing.endpoint --script tool_then_answer`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self
from urllib.request import urlopen

from aiohttp import web

Fault = Literal["silence", "half", "hang_up"]


@dataclass(frozen=True)
class Step:
    """What the endpoint does with one request. `fault` instead of a clean answer; `latency` in seconds."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    latency: float | None = None
    fault: Fault | None = None


Script = Step | str | Sequence[Step | str] | Callable[[dict[str, Any]], Step | str | Awaitable[Step | str]]


@dataclass(frozen=True)
class Received:
    """One request as it came in."""

    headers: Mapping[str, str]
    body: dict[str, Any]
    at: float


def call(name: str, arguments: Any = None, *, id: str | None = None) -> dict[str, Any]:
    """A tool call as it stands in an answer; `arguments` that are not text are encoded."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": id or f"call_{name}", "type": "function", "function": {"name": name, "arguments": text}}


def answer(
    text: str | None = "",
    *,
    calls: Sequence[Any] = (),
    reasoning: str | None = None,
    reasoning_field: str = "reasoning_content",
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    latency: float | None = None,
    **fields: Any,
) -> Step:
    """A good answer. `fields` are put into the assistant message as they are."""
    message: dict[str, Any] = {"role": "assistant", "content": text, **fields}
    if reasoning is not None:
        message[reasoning_field] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason or ("tool_calls" if calls else "stop"),
    }
    counts = usage or {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    body = {"id": "fake", "object": "chat.completion", "model": "fake", "choices": [choice], "usage": counts}
    return reply(body, latency=latency)


def reply(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None, latency: float | None = None
) -> Step:
    """Any body under any status; bytes are sent as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Step(status, raw, dict(headers or {}), latency)


def refusal(
    status: int, message: str = "no", *, code: Any = None, headers: Mapping[str, str] | None = None
) -> Step:
    """An error in the shape most endpoints use."""
    return reply({"error": {"message": message, "code": code}}, status=status, headers=headers)


def rate_limited(retry_after: float | str | None = None) -> Step:
    """A 429, with Retry-After in seconds or as the text given."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return refusal(429, "slow down", headers=headers)


def silence() -> Step:
    """Take the request and never say a word."""
    return Step(fault="silence")


def half_answer(text: str = "half of this will arrive") -> Step:
    """Announce an answer, send half of it, close the connection."""
    return replace(answer(text), fault="half")


def hang_up() -> Step:
    """Close the connection without a byte."""
    return Step(fault="hang_up")


def garbage(body: bytes = b'{"choices": [{"mess') -> Step:
    """Status 200 and a body that is no JSON."""
    return Step(body=body)


def error_in_200(message: str = "upstream is away", code: Any = 502) -> Step:
    """Status 200 and an error where the answer should be."""
    return reply({"error": {"message": message, "code": code}})


class FakeEndpoint:
    """An OpenAI-style endpoint on 127.0.0.1, as an async context manager.

    `key`: any other bearer gets 401. `latency`: seconds before each answer. `keep_alive`: seconds an idle
    connection lives. `drop_kept`: so many times, a request that comes over a connection used before is
    dropped unread, which is what a client sees when the endpoint closes an idle connection at that moment.
    `calls`, `answered`, `peak` (most requests at once), `connections` count; `requests` keeps what came in.
    """

    def __init__(
        self,
        script: Script = "hello",
        *,
        key: str | None = None,
        latency: float = 0.0,
        keep_alive: float = 75.0,
        drop_kept: int = 0,
        keep: int = 100_000,
    ) -> None:
        self._script = script
        self._key = key
        self._latency = latency
        self._keep_alive = keep_alive
        self._drop_kept = drop_kept
        self._seen: set[Any] = set()
        self._busy = 0
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.arrived = asyncio.Event()
        """Set when the first request is in: something to await before cancelling or killing."""
        self.requests: deque[Received] = deque(maxlen=keep)
        self.calls = 0
        self.answered = 0
        self.peak = 0
        self.connections = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            keepalive_timeout=self._keep_alive,
            handler_cancellation=True,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=8192)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        kept = request.protocol in self._seen
        if not kept:
            self._seen.add(request.protocol)
            self.connections += 1
        elif self._drop_kept:
            self._drop_kept -= 1
            return self._drop(request)
        self.calls += 1
        number = self.calls
        self._busy += 1
        self.peak = max(self.peak, self._busy)
        try:
            body = json.loads(await request.read())
            now = asyncio.get_running_loop().time()
            self.requests.append(Received(dict(request.headers), body, now))
            self.arrived.set()
            if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
                return _respond(refusal(401, "Incorrect API key provided", code="invalid_api_key"))
            step = await self._step(number, body)
            latency = self._latency if step.latency is None else step.latency
            if latency:
                await asyncio.sleep(latency)
            if step.fault is not None:
                return await self._fail(request, step)
            self.answered += 1
            return _respond(step)
        finally:
            self._busy -= 1

    async def _step(self, number: int, body: dict[str, Any]) -> Step:
        script = self._script
        chosen: Any
        if callable(script):
            chosen = script(body)
            if inspect.isawaitable(chosen):
                chosen = await chosen
        elif isinstance(script, (Step, str)):
            chosen = script
        else:
            chosen = script[min(number, len(script)) - 1]
        return answer(chosen) if isinstance(chosen, str) else chosen

    async def _fail(self, request: web.Request, step: Step) -> web.StreamResponse:
        if step.fault == "silence":
            await self._closing.wait()
        elif step.fault == "half":
            response = web.StreamResponse(headers={"Content-Length": str(len(step.body))})
            response.content_type = "application/json"
            await response.prepare(request)
            await response.write(step.body[: len(step.body) // 2])
            self._drop(request)
            return response
        return self._drop(request)

    @staticmethod
    def _drop(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.close()
        return web.Response()


def _respond(step: Step) -> web.Response:
    return web.Response(
        status=step.status, body=step.body, headers=dict(step.headers), content_type="application/json"
    )


class EndpointProcess:
    """The lean server in a process of its own, as a context manager.

        with EndpointProcess("--script", "tool_then_answer", "--latency", "0.1") as endpoint:
            endpoint.url, endpoint.counts()

    The arguments are those of `python -m taskmill.testing.endpoint`. It ends with the block, and by itself
    when the process that started it is gone.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.pid = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "taskmill.testing.endpoint", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the endpoint process did not start: {' '.join(command)}")
        said = json.loads(line)
        self.url, self.pid = said["url"], said["pid"]
        return self

    def counts(self) -> dict[str, Any]:
        """What it has counted so far: `calls`, `answered`, `refused`, `connections`, `prompts`."""
        with urlopen(self.url.removesuffix("/v1") + "/counts", timeout=10) as answered:
            counted: dict[str, Any] = json.load(answered)
        return counted

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
            if self._process.stdout is not None:
                self._process.stdout.close()


if __name__ == "__main__":
    from taskmill.testing.leanserver import main

    main()
