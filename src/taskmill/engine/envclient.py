"""The client of an environment server: rollouts by number, with their errors as exceptions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from pydantic import ValidationError

from taskmill._version import __version__
from taskmill.engine.environment import (
    EndpointChoice,
    GroupRequest,
    Info,
    Refusal,
    RolloutRequest,
    SamplingChoice,
    TaskListing,
    faults,
)
from taskmill.engine.frames import error_of
from taskmill.errors import ConfigurationError, ServerBusyError, ServerError, TaskmillError
from taskmill.models.families import public_url
from taskmill.records import Trace
from taskmill.tasks.limits import Limits

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
RequestT = TypeVar("RequestT", RolloutRequest, GroupRequest)

POLL = 0.2
"""Seconds between two looks for a server that is not there yet."""

LARGEST_WAIT = 30.0
"""Seconds between two tries at a busy server, at most."""


class EnvClient:
    """Asks an environment server at `url` for rollouts. Use it as an async context manager, or `close` it.

        async with EnvClient("http://127.0.0.1:8400") as client:
            trace = await client.rollout(3, model={"name": "m", "base_url": "http://127.0.0.1:8000/v1"})

    A server that is starting, or as busy as it takes, is asked again for `patience` seconds. `timeout` is how long one
    request may take, in seconds. Cancelling a request ends its rollouts on the server.

    Requests raise the errors of `taskmill.errors` by their class: `ConfigurationError` for what the server can't mean,
    `TaskIndexError` for a task there is not, `TasksetError` for one that can't be made, `WorkerDied`,
    `ServerBusyError` and `ServerTokenError`; other `ServerError` for a server that is away. What goes wrong inside a
    rollout is no exception: it stands in the trace.
    """

    def __init__(
        self, url: str, *, token: str | None = None, patience: float = 60.0, timeout: float = 21_600.0
    ) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"url={public_url(url)!r} is no address: give one such as 'http://127.0.0.1:8400'"
            )
        self._place = public_url(self.url)
        self._headers = {"User-Agent": f"taskmill/{__version__}"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._patience = patience
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def health(self) -> bool:
        """Whether the server is there and takes requests. Does not wait for one that is starting."""
        try:
            await self._once("GET", "/health", None)
        except ServerError:
            return False
        return True

    async def wait(self) -> None:
        """Wait for a server that is starting. Raises `ServerError` when `patience` is over."""
        await self._ask("GET", "/health", None)

    async def info(self) -> Info:
        """What is served, and how much of it."""
        return self._read(await self._ask("GET", "/info", None), Info)

    async def tasks(self, start: int = 0, count: int = 64) -> list[TaskListing]:
        """What the tasks from `start` on are, `count` of them at most; fewer, or none, at the end."""
        return self._read(
            await self._ask("GET", f"/tasks?start={start}&count={count}", None), list[TaskListing]
        )

    async def rollout(
        self,
        task_idx: int,
        *,
        model: EndpointChoice | Mapping[str, Any],
        sampling: SamplingChoice | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        number: int = 0,
        **options: Any,
    ) -> Trace:
        """One rollout of the task with that number, counted from 0.

        `number` says which of the task's rollouts it is: with a seed in `sampling`, each number has one of its own.
        `options` are the other fields of `RolloutRequest`.
        """
        fields = _fields(task_idx, model, sampling, limits, options)
        body = _encode(RolloutRequest, fields | {"number": number})
        return self._read(await self._ask("POST", "/rollout", body), Trace)

    async def group(
        self,
        task_idx: int,
        n: int,
        *,
        model: EndpointChoice | Mapping[str, Any],
        sampling: SamplingChoice | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Trace]:
        """`n` rollouts of one task, with group rewards where the task has some, in order of their number."""
        fields = _fields(task_idx, model, sampling, limits, options)
        body = _encode(GroupRequest, fields | {"n": n})
        return self._read(await self._ask("POST", "/group", body), list[Trace])

    # -- exchanges --------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        """Ask, and ask again while the server is starting or busy."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            try:
                return await self._once(method, path, body)
            except ServerBusyError as error:
                pause = min(error.retry_after, LARGEST_WAIT) * random.uniform(0.5, 1.5)
                if loop.time() + pause > until:
                    raise
            except _AwayError as error:
                pause = POLL
                if loop.time() + pause > until:
                    raise ServerError(str(error)) from error.__cause__
            await asyncio.sleep(pause)

    async def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        import aiohttp

        session = self._session
        if session is None:
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=30.0),
            )
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with session.request(
                method, self.url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                raw = await response.read()
                if response.status == 200:
                    return raw
                raise self._refusal(response.status, response.headers, raw)
        except aiohttp.ClientConnectorError as error:
            raise _AwayError(f"no environment server answers at {self._place}: {error.os_error}") from error
        except aiohttp.ClientError as error:
            raise ServerError(
                f"the environment server at {self._place} broke off without an answer: {type(error).__name__}"
            ) from error
        except TimeoutError as error:
            raise ServerError(
                f"the environment server at {self._place} gave no answer within {self._timeout:g} s"
            ) from error

    def _refusal(self, status: int, headers: Mapping[str, str], raw: bytes) -> TaskmillError:
        try:
            told = msgspec.json.decode(raw, type=Refusal).error
        except msgspec.DecodeError:
            return ServerError(f"{self._place} answered {status}, and is no environment server of taskmill")
        error = error_of(told.type, told.message)
        if isinstance(error, ServerBusyError):
            try:
                error.retry_after = max(0.05, float(headers.get("Retry-After", "1")))
            except ValueError:
                error.retry_after = 1.0
        return error

    def _read(self, raw: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ServerError(
                f"{self._place} answered with something else than was asked for: {error}"
            ) from error


class _AwayError(ServerError):
    """No connection: nothing was sent."""


def _fields(
    task_idx: int,
    model: EndpointChoice | Mapping[str, Any],
    sampling: SamplingChoice | Mapping[str, Any] | None,
    limits: Limits | Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    fields: dict[str, Any] = {"task_idx": task_idx, "model": model, **options}
    if sampling is not None:
        fields["sampling"] = sampling
    if limits is not None:
        fields["limits"] = limits
    return fields


def _encode(kind: type[RequestT], fields: Mapping[str, Any]) -> bytes:
    """The body of a request. Raises `ConfigurationError` here for what the server would refuse."""
    try:
        request = kind.model_validate(fields)
    except ValidationError as problem:
        raise ConfigurationError(faults(problem, kind)) from None
    return request.model_dump_json(exclude_defaults=True).encode()


__all__ = ["EnvClient"]
