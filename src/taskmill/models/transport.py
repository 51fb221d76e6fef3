"""aiohttp as it is used here: one POST of one JSON body, many thousand times, with a deadline each.

What aiohttp does besides for each request (a timer, a task that writes the body, a look-up of how to send
bytes) costs as much processor time as all that happens above it. So it is told, by the classes it offers for
this, to leave that out where it is not needed.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import hdrs
from aiohttp.http import StreamWriter
from multidict import CIMultiDict

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection

# -- deadlines ------------------------------------------------------------------------------------------------


class Deadlines:
    """Ends what takes longer than `patience` seconds, with one timer for all that is under way.

    All have the same patience, so what began first is due first: the timer is set for that one, and set anew
    only when it goes off, which for calls that are answered in time is once in `patience` seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._loop = loop
        self._patience = patience
        self._under_way: dict[Attempt, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def attempt(self) -> Attempt:
        """A context that is left with `TimeoutError` when it takes too long; for the task that enters it."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        attempt = Attempt(self._under_way, task, self._loop.time() + self._patience)
        self._under_way[attempt] = None
        if self._timer is None:
            self._timer = self._loop.call_at(attempt.due, self._end_overdue)
        return attempt

    def close(self) -> None:
        """Stop the timer, unless something is under way: then it stops after that."""
        if self._timer is not None and not self._under_way:
            self._timer.cancel()
            self._timer = None

    def _end_overdue(self) -> None:
        self._timer = None
        now = self._loop.time()
        for attempt in self._under_way:
            if attempt.due > now:
                self._timer = self._loop.call_at(attempt.due, self._end_overdue)
                return
            attempt.end()


class Attempt:
    """One thing under way. Works as `asyncio.timeout` does: a cancellation from elsewhere stays one."""

    __slots__ = ("_cancelling", "_others", "_overdue", "_task", "due")

    def __init__(self, others: dict[Attempt, None], task: asyncio.Task[Any], due: float) -> None:
        self.due = due
        self._others = others
        self._task = task
        self._cancelling = task.cancelling()
        self._overdue = False

    def end(self) -> None:
        """Cancel it, once."""
        if not self._overdue:
            self._overdue = True
            self._task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._others[self]
        if self._overdue and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


# -- requests -------------------------------------------------------------------------------------------------

_AT_ONCE = 1 << 16
"""Bytes of a body that are handed to the socket in one piece: up to here aiohttp doesn't wait for it either."""

_JSON = CIMultiDict({hdrs.CONTENT_TYPE: "application/json"})


class JsonBody(aiohttp.BytesPayload):
    """Bytes that are known to be JSON; the general way makes a header collection of its own for each body."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self._size = len(value)
        self._headers = _JSON
        self._encoding = self._filename = None


class _Request(aiohttp.ClientRequest):
    """A request that is written where it is made, if it is small, instead of by a task of its own."""

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        protocol = conn.protocol
        body = self._body
        if (
            protocol is None
            or protocol.writing_paused
            or self.proxy is not None
            or not isinstance(body, JsonBody)
            or len(body._value) > _AT_ONCE
        ):
            return await super().send(conn)
        writer = StreamWriter(protocol, self.loop)
        await writer.write_headers(f"{self.method} {self.url.raw_path_qs} HTTP/1.1", self.headers)
        await self.write_bytes(writer, conn)
        self.response = self.response_class(
            self.method,
            self.original_url,
            writer=None,
            continue100=None,
            timer=self._timer,
            request_info=self.request_info,
            traces=self._traces,
            loop=self.loop,
            session=self._session,
            stream_writer=writer,
        )
        return self.response


# -- connections ----------------------------------------------------------------------------------------------

_fresh: ContextVar[bool] = ContextVar("fresh", default=False)


class _Connector(aiohttp.TCPConnector):
    """A connector that says when it made a connection: only kept ones can have gone stale."""

    async def _create_connection(self, *arguments: Any, **named: Any) -> ResponseHandler:
        _fresh.set(True)
        return await super()._create_connection(*arguments, **named)


def forget_connection() -> None:
    """To be called before a request of which `used_kept_connection` is to be asked."""
    _fresh.set(False)


def used_kept_connection() -> bool:
    """Whether the current task's request went over a connection that had carried another one before."""
    return not _fresh.get()


def open_session(headers: CIMultiDict[str]) -> aiohttp.ClientSession:
    """A session that keeps its connections, makes as many as it is asked for, and never reads the environment."""
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, limit_per_host=0, keepalive_timeout=30.0, ttl_dns_cache=300),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        request_class=_Request,
        trust_env=False,
    )
