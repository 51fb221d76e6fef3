"""One POST after another over kept connections to one address, each with a deadline.

aiohttp makes the connections. A request object, a response object, a writing task and a timer for each request, as its
session makes them, are most of the processor time of an exchange; `python -m benchmarks overhead` prints how much. Here
the first bytes of a request are made once, and one timer watches over all that is under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import hdrs
from yarl import URL

from taskmill.models.answers import Answer, AnswerReader

if TYPE_CHECKING:
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


# -- connections ----------------------------------------------------------------------------------------------

KEPT_SECONDS = 30.0
"""How long a connection is kept without being used."""

_STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_ACCEPTED: dict[str, str] = {hdrs.ACCEPT: "application/json", hdrs.ACCEPT_ENCODING: "gzip, deflate"}


class _Kept(NamedTuple):
    """A connection, as aiohttp's pool knows it, and what reads from it."""

    connection: Connection
    reader: AnswerReader

    def close(self) -> None:
        self.connection.close()


class Connections:
    """Connections of one event loop to the address `url`, as many as calls are under way, kept for the next ones.

    aiohttp looks up the name, goes by way of `proxy`, and secures the connection within `patience` seconds. The
    environment is not looked at, and redirects are not followed. Raises `ValueError` for a header of two lines.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: URL,
        headers: Mapping[str, str],
        *,
        proxy: URL | None,
        patience: float,
        keep_alive: bool,
    ) -> None:
        self._loop = loop
        self._url = url
        self._headers = {**_ACCEPTED, **headers}
        if any("\r" in value or "\n" in value for value in self._headers.values()):
            raise ValueError("a header can't hold a line break")
        self._proxy = proxy
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=patience)
        self._keep_alive = keep_alive
        self._connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, force_close=not keep_alive)
        self._head = b""
        self._idle: deque[tuple[_Kept, float]] = deque()
        self._under_way: set[_Kept] = set()
        self._closed = False

    async def post(self, body: bytes, *, largest: int) -> Answer:
        """Send a JSON body and read the answer, whatever its status.

        Raises `AnswerTooLargeError` for more than `largest` bytes, `NotHttpError`, `aiohttp.ConnectionTimeoutError`,
        and `aiohttp.ClientError` for a connection that can't be made or fails.
        """
        kept = self._take()
        if kept is not None:
            try:
                return await self._ask(kept, body, largest)
            except _STALE:
                # The other side closed a kept connection just as it was used again. Nothing of an answer had come, so
                # nothing is answered twice.
                if self._closed or kept.reader.begun:
                    raise
        return await self._ask(await self._connect(), body, largest)

    async def close(self) -> None:
        """Close all connections; what is under way ends with an error."""
        self._closed = True
        for kept in self._under_way:
            kept.reader.give_up(aiohttp.ServerDisconnectedError("the connections were closed"))
        await self._connector.close()
        while self._idle:
            self._idle.pop()[0].close()

    async def _ask(self, kept: _Kept, body: bytes, largest: int) -> Answer:
        """One exchange; the connection is kept for the next one if it can be."""
        reader = kept.reader
        self._under_way.add(kept)
        try:
            answer = await reader.ask(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), largest)
        except BaseException:
            reader.give_up()
            kept.close()
            raise
        finally:
            self._under_way.discard(kept)
        if not reader.written:  # it was answered before it was read, and perhaps never will be
            reader.give_up()
        if reader.usable and self._keep_alive and not self._closed:
            self._idle.append((kept, self._loop.time()))
        else:
            kept.close()
        return answer

    def _take(self) -> _Kept | None:
        """The connection that was used last; those that were not used for long are closed."""
        idle = self._idle
        oldest = self._loop.time() - KEPT_SECONDS
        while idle and idle[0][1] < oldest:
            idle.popleft()[0].close()
        while idle:
            kept, _ = idle.pop()
            if kept.reader.usable:
                return kept
            kept.close()
        return None

    async def _connect(self) -> _Kept:
        request = aiohttp.ClientRequest(
            "POST", self._url, headers=self._headers, loop=self._loop, proxy=self._proxy
        )
        try:
            connection = await self._connector.connect(request, [], self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error
        if not self._head:
            self._head = self._head_of(request)
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None:
            connection.close()
            raise aiohttp.ServerDisconnectedError
        kept = _Kept(connection, AnswerReader(self._loop, transport, protocol))
        # The other side may have spoken before it could be heard here. (Of a proxy's, older aiohttp always says this.)
        if protocol.should_close and self._proxy is None:
            kept.reader.give_up()
            connection.close()
            raise aiohttp.ServerDisconnectedError("something came before anything was asked")
        return kept

    def _head_of(self, request: aiohttp.ClientRequest) -> bytes:
        """The request's first bytes, up to the number of bytes in its body."""
        forwarded = request.proxy is not None and not request.is_ssl()
        target = str(self._url.with_user(None)) if forwarded else self._url.raw_path_qs
        fields = request.headers.copy()
        for name in (hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING, hdrs.CONNECTION):
            fields.popall(name, None)
        if not self._keep_alive:
            fields[hdrs.CONNECTION] = "close"
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "Content-Length: "]).encode()
