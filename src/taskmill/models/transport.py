"""aiohttp as it is used here: one POST after another over kept connections to one address, each with a deadline.

A request object, a response object, a writing task and a timer for each request, as aiohttp's session makes them, cost
more processor time than all else that is done for a model call. Here the first bytes of a request are made once, and
one timer watches over all that is under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from aiohttp import hdrs
from multidict import CIMultiDictProxy
from yarl import URL

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage

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

_STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError)
_ACCEPTED: dict[str, str] = {hdrs.ACCEPT: "application/json", hdrs.ACCEPT_ENCODING: "gzip, deflate"}


class Answer(NamedTuple):
    """What came back: the status, the headers, and the body, decompressed."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class AnswerTooLargeError(Exception):
    """An answer has this many bytes or more: it was not read to its end."""

    def __init__(self, status: int, size: int) -> None:
        super().__init__(status, size)
        self.status = status
        self.size = size


class Connections:
    """Connections of one event loop to the address `url`, as many as calls are under way, kept for the next ones.

    aiohttp looks up the name, goes by way of `proxy`, secures the connection within `patience` seconds, and reads what
    comes. The environment is not looked at, and redirects are not followed. Raises `ValueError` for a header of two
    lines.
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
        self._idle: deque[tuple[Connection, float]] = deque()
        self._closed = False

    async def post(self, body: bytes, *, largest: int) -> Answer:
        """Send a JSON body and read the answer, whatever its status.

        Raises `AnswerTooLargeError` for more than `largest` bytes, `aiohttp.ConnectionTimeoutError`, and what aiohttp
        raises for a connection that fails (`aiohttp.ClientError`) or does not speak HTTP (`HttpProcessingError`).
        """
        connection = self._take()
        if connection is not None:
            try:
                begun = await self._ask(connection, body)
            except _STALE:
                if self._closed:
                    raise
                # The other side closed a kept connection just as it was used again. Nothing of an answer had come, so
                # nothing is answered twice.
                connection = None
        if connection is None:
            connection = await self._connect()
            begun = await self._ask(connection, body)
        return await self._read(connection, *begun, largest)

    async def close(self) -> None:
        """Close all connections; what is under way ends with an error."""
        self._closed = True
        await self._connector.close()
        while self._idle:
            self._idle.pop()[0].close()

    async def _ask(
        self, connection: Connection, body: bytes
    ) -> tuple[RawResponseMessage, aiohttp.StreamReader]:
        """Send a request; the head of its answer, and where the rest of it comes."""
        protocol = connection.protocol
        assert protocol is not None
        try:
            protocol.set_response_params(read_until_eof=True)
            transport = protocol.transport
            if transport is not None:  # else reading says why
                transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
            message, payload = await protocol.read()
            while 100 <= message.code < 200 and message.code != 101:
                message, payload = await protocol.read()
        except BaseException:
            connection.close()
            raise
        return message, payload

    async def _read(
        self,
        connection: Connection,
        message: RawResponseMessage,
        payload: aiohttp.StreamReader,
        largest: int,
    ) -> Answer:
        """The whole answer; the connection is kept for the next request if it can be."""
        try:
            announced = int(message.headers.get(hdrs.CONTENT_LENGTH, largest + 1))
            if announced <= largest and message.compression is None:
                raw = await payload.read()
            else:
                raw = await _read_guarded(payload, largest, message.code)
        except BaseException:
            connection.close()
            raise
        protocol = connection.protocol
        if protocol is None or protocol.should_close or not self._keep_alive or self._closed:
            connection.close()
        else:
            self._idle.append((connection, self._loop.time()))
        return Answer(message.code, message.headers, raw)

    def _take(self) -> Connection | None:
        """The connection that was used last; those that were not used for long are closed."""
        idle = self._idle
        oldest = self._loop.time() - KEPT_SECONDS
        while idle and idle[0][1] < oldest:
            idle.popleft()[0].close()
        while idle:
            connection, _ = idle.pop()
            if not connection.closed:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        request = aiohttp.ClientRequest(
            "POST", self._url, headers=self._headers, loop=self._loop, proxy=self._proxy
        )
        try:
            connection = await self._connector.connect(request, [], self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError from error
        if not self._head:
            self._head = self._head_of(request)
        return connection

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


async def _read_guarded(payload: aiohttp.StreamReader, largest: int, status: int) -> bytes:
    """What is compressed, or comes in chunks, shows its size only as it is read."""
    size = 0
    parts: list[bytes] = []
    async for part in payload.iter_any():
        parts.append(part)
        size += len(part)
        if size > largest:
            raise AnswerTooLargeError(status, size)
    return b"".join(parts)
