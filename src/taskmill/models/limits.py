"""How many calls may be under way at one endpoint, found out by asking it.

No endpoint says how much it takes, and what it takes changes by the hour. So the limit starts low, grows
while it is what holds calls back, and is cut when the endpoint refuses (429). See `docs/design/model-service.md`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Literal

from msgspec import Struct

START = 16
"""Calls at once before anything is known."""

RAMP_SECONDS = 0.05
RAMP_FACTOR = 2.0
"""While nothing was refused and calls wait, the limit grows by this factor each so many seconds. By time, not
by answers: a refusal comes in milliseconds, an answer may take a minute, and waiting for answers would leave a
large pool of workers idle for as many minutes as it takes doublings."""

CUT = 0.5
GENTLE_CUT = 0.75
"""For a refusal near the remembered ceiling, where it was to be expected and the truth is close by."""

APPROACH = 0.25
"""After a cut, each round trip moves the limit by this part of its distance to the remembered ceiling, and at
least by one call: fast far below it, slowly near it, faster again once the ceiling turns out to have moved."""

NOTED_CHANGE = 1.25
"""Growth is written into the history when it has come to this factor; cuts always are."""

Why = Literal["start", "growth", "refused"]


class LimitChange(Struct, frozen=True):
    """The limit at one moment, in seconds since the first call."""

    at: float
    limit: int
    why: Why


class LimitSnapshot(Struct, frozen=True):
    """What a limit looks like now, for statistics and displays. `ceiling` is where it was last refused."""

    limit: int
    in_flight: int
    waiting: int
    ceiling: int | None
    refusals: int
    cuts: int
    history: tuple[LimitChange, ...]


class AdaptiveLimit:
    """A limit on calls at once, first come first served.

    `ticket = await limit.acquire()` before a call and `limit.release(ticket, …)` after it, whatever its end.
    Time is the running loop's. Not for use by several threads.
    """

    def __init__(self, *, start: int = START) -> None:
        self._limit = float(max(1, start))
        self._ceiling: float | None = None
        self._in_flight = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._ticket = 0
        self._cut_at = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused_until = -math.inf
        self._ramp: asyncio.TimerHandle | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._noted = self._limit
        self._refusals = 0
        self._cuts = 0
        self._history: deque[LimitChange] = deque(maxlen=256)

    # -- for those who call -----------------------------------------------------------------------------------

    def take(self) -> int | None:
        """A place without waiting, as `acquire` gives it; `None` where one has to be waited for."""
        if self._began is None:
            self._note("start")
        if self._waiters or self._in_flight >= int(self._limit) or self._resume is not None:
            return None
        self._in_flight += 1
        self._ticket += 1
        return self._ticket

    async def acquire(self) -> int:
        """Wait for a place. The ticket tells `release` whether the call began before or after a cut."""
        ticket = self.take()
        if ticket is None:
            await self._wait()
            self._ticket += 1
            ticket = self._ticket
        return ticket

    def release(
        self, ticket: int, *, answered: bool = False, refused: bool = False, retry_after: float | None = None
    ) -> None:
        """Give the place back. `answered`: the endpoint took the call. `refused`: it said slow down."""
        held_back = bool(self._waiters) or self._in_flight >= int(self._limit)
        self._in_flight -= 1
        if refused:
            self._refusals += 1
            self._refuse(ticket, retry_after)
        elif answered and held_back and ticket > self._cut_at:
            self._grow()
        if self._waiters:
            self._wake()

    def snapshot(self) -> LimitSnapshot:
        """The state of things, with the last changes of the limit."""
        return LimitSnapshot(
            limit=int(self._limit),
            in_flight=self._in_flight,
            waiting=sum(not waiter.done() for waiter in self._waiters),
            ceiling=None if self._ceiling is None else int(self._ceiling),
            refusals=self._refusals,
            cuts=self._cuts,
            history=tuple(self._history),
        )

    # -- waiting ----------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Timers of a loop that is gone never fire.
            self._loop, self._ramp, self._resume, self._paused_until = loop, None, None, -math.inf
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        self._wake()
        self._start_ramp(loop)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                # The place had been given already: it goes to the next in line.
                self._in_flight -= 1
                self._wake()
            else:
                waiter.cancel()
                self._drop_cancelled()
            raise

    def _drop_cancelled(self) -> None:
        # Cancelled waiters inside the line are passed over when their turn comes; those at its ends go at once.
        while self._waiters and self._waiters[0].cancelled():
            self._waiters.popleft()
        while self._waiters and self._waiters[-1].cancelled():
            self._waiters.pop()

    def _wake(self) -> None:
        if self._resume is not None:
            return
        while self._waiters and self._in_flight < int(self._limit):
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._in_flight += 1
                waiter.set_result(None)

    # -- finding the limit ------------------------------------------------------------------------------------

    def _start_ramp(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ramp is None and self._ceiling is None and self._waiters:
            self._ramp = loop.call_later(RAMP_SECONDS, self._climb)

    def _climb(self) -> None:
        self._ramp = None
        if self._ceiling is not None or not self._waiters:
            return
        self._limit = self._limit * RAMP_FACTOR
        self._note("growth")
        self._wake()
        self._start_ramp(asyncio.get_running_loop())

    def _grow(self) -> None:
        """One answered call's share of what a round trip adds."""
        if self._ceiling is None:
            self._limit += 1
        else:
            self._limit += max(1.0, APPROACH * abs(self._ceiling - self._limit)) / self._limit
        if self._limit >= self._noted * NOTED_CHANGE:
            self._note("growth")

    def _refuse(self, ticket: int, retry_after: float | None) -> None:
        loop = asyncio.get_running_loop()
        if retry_after:
            self._pause(loop, loop.time() + retry_after)
        if ticket <= self._cut_at:
            # It began before the last cut: part of the same storm, about which it tells nothing new.
            return
        self._cut_at = self._ticket
        self._cuts += 1
        used = min(self._limit, self._in_flight + 1.0)
        expected = self._ceiling is not None and used >= self._ceiling * 0.8
        self._ceiling = max(1.0, used)
        self._limit = max(1.0, used * (GENTLE_CUT if expected else CUT))
        self._note("refused")

    def _pause(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if until <= self._paused_until:
            return
        self._paused_until = until
        if self._resume is not None:
            self._resume.cancel()
        self._loop = loop
        self._resume = loop.call_at(until, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        self._wake()

    def _note(self, why: Why) -> None:
        now = asyncio.get_running_loop().time()
        self._noted = self._limit
        if self._began is None:
            self._began = now
        self._history.append(LimitChange(round(now - self._began, 3), int(self._limit), why))
