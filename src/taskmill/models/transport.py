"""aiohttp as it is used here: one POST after another over kept connections, each with a deadline.

A timer for each request, as aiohttp or `asyncio.timeout` sets it, costs more processor time than encoding the
request and decoding the answer together. Here one timer watches over all requests of a session.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import ref

import aiohttp
from aiohttp import hdrs
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


# -- connections ----------------------------------------------------------------------------------------------

_kept: ContextVar[bool] = ContextVar("kept", default=False)


class _Connector(aiohttp.TCPConnector):
    """A connector that says when it gave out a connection that it had given out before: only those can be stale.

    A connection it knows nothing of counts as a fresh one, so that nothing is sent twice by mistake.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._given_out: dict[int, ref[ResponseHandler]] = {}

    async def connect(self, *arguments: Any, **named: Any) -> Connection:
        connection = await super().connect(*arguments, **named)
        protocol = connection.protocol
        number = id(protocol)
        known = self._given_out.get(number)
        if known is not None and known() is protocol:
            _kept.set(True)
        elif protocol is not None:
            forget = self._given_out.pop
            self._given_out[number] = ref(protocol, lambda _: forget(number, None))
        return connection


class _Request(aiohttp.ClientRequest):
    """A request with defaults of its own: headers of the session would be copied into each request one by one."""

    DEFAULT_HEADERS = {hdrs.ACCEPT: "application/json", hdrs.ACCEPT_ENCODING: "gzip, deflate"}  # noqa: RUF012


def forget_connection() -> None:
    """To be called before a request of which `used_kept_connection` is to be asked."""
    _kept.set(False)


def used_kept_connection() -> bool:
    """Whether the current task's request is known to have gone over a connection that had carried another one."""
    return _kept.get()


def open_session(headers: CIMultiDict[str], *, keep_alive: bool = True) -> aiohttp.ClientSession:
    """A session that makes as many connections as it is asked for, and never reads the environment.

    It keeps its connections, or with `keep_alive` false makes one for each request.
    """
    keeping: dict[str, Any] = {"keepalive_timeout": 30.0} if keep_alive else {"force_close": True}
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, limit_per_host=0, ttl_dns_cache=300, **keeping),
        request_class=_Request,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        trust_env=False,
    )
