"""aiohttp as it is used here: one POST after another over kept connections, each with a deadline.

A timer for each request, as aiohttp or `asyncio.timeout` sets it, costs more processor time than encoding the
request and decoding the answer together. Here one timer watches over all requests of a session.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
from multidict import CIMultiDict

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler

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
        trust_env=False,
    )
