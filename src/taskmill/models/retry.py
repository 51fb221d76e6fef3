"""Trying again: the one place where a failed model call is repeated.

Wraps any model. Waits for a place under the endpoint's `AdaptiveLimit`, backs off with jitter, honours
`Retry-After`, stops at a deadline, and stamps what it cost in time, attempts and money.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from taskmill.errors import ConfigurationError, ModelError, ModelTimeoutError, RateLimitedError
from taskmill.models.base import Completion, Model, Request
from taskmill.models.limits import AdaptiveLimit
from taskmill.records import Usage

_log = logging.getLogger(__name__)

LONG_WAIT = 60.0
"""Seconds of waiting that people are told of, when the endpoint asks for so many or more."""

PRICED_AFTER = 0.7
"""Seconds after the first call at which a thread asks for the model's price. A list of prices takes a fifth of a second
to load, and all calls would wait for that at the first answer; by then the first of them are out and wait anyway."""

Price = Callable[[str, Usage], float | None]
"""US dollars for the usage of a model, or `None` where no price is known."""


class RetryPolicy(Struct, frozen=True):
    """How often and how far apart. `base` and `longest` are seconds.

    `attempts` counts those that failed by the endpoint's fault. Being told to slow down is no fault: such
    calls go on until the total deadline.
    """

    attempts: int = 6
    base: float = 1.0
    longest: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"attempts={self.attempts!r} can't be: give at least 1")
        for field, value in (("base", self.base), ("longest", self.longest)):
            if not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"{field}={value!r} can't be: give a finite number of seconds")

    def pause(self, failures: int, asked: float | None, random: Random) -> float:
        """Seconds before the next attempt, after so many `failures`, when the endpoint `asked` for some.

        Full jitter: anything between nothing and the exponential bound, so that calls that failed together
        don't come back together. What the endpoint asked for is waited for first, up to `longest`.
        """
        bound = min(self.longest, self.base * 2.0 ** min(failures - 1, 60))
        if asked is None:
            return random.uniform(0, bound)
        return min(asked, self.longest) + random.uniform(0, min(bound, self.base))


class Retrying:
    """`model`, with retries under `policy`, calls at once under `limit`, at most `total` seconds a call.

    `total` counts from the first attempt: waiting in line for a first place is bounded by the calls ahead,
    each of which is bounded itself. The first attempt ends by the model's own timeout, the later ones also
    when `total` is over. `price` fills in the cost where the endpoint named none but counted the tokens. `tell`
    gets a line for people when the endpoint asks for a long wait, once for each such wait; without it, it is logged.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy: RetryPolicy | None = None,
        limit: AdaptiveLimit | None = None,
        price: Price | None = None,
        total: float = 3600.0,
        tell: Callable[[str], None] | None = None,
        random: Random | None = None,
    ) -> None:
        self._model = model
        self._policy = policy or RetryPolicy()
        self.limit = limit or AdaptiveLimit()
        self._price = price
        self._total = total
        self._tell = tell or _log.warning
        self._told_until = -math.inf
        self._random = random or Random()
        self._told_of_no_count = False
        self._called = False

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._model.name

    async def complete(self, request: Request) -> Completion:
        """Answer `request`; what is raised in the end carries `attempts` and `waiting`."""
        loop = asyncio.get_running_loop()
        if not self._called:
            self._called = True
            self._price_soon(loop)
        limit = self.limit
        entered = loop.time()
        deadline = math.inf
        worked = 0.0
        attempts = failures = 0
        last: ModelError | None = None
        while True:
            started = entered
            ticket = limit.take() if last is None else None
            if ticket is None:
                ticket = await (limit.acquire() if last is None else self._place_before(deadline, last))
                started = loop.time()
            if attempts == 0:
                deadline = started + self._total
            attempts += 1
            try:
                if last is None:
                    completion = await self._model.complete(request)
                else:
                    async with asyncio.timeout_at(deadline):
                        completion = await self._model.complete(request)
            except ModelError as error:
                last = error
            except TimeoutError:
                last = ModelTimeoutError(
                    f"no answer from model {self.name!r} within {self._total:g} s in all"
                )
                last.retryable = False
            except BaseException:
                limit.release(ticket)
                raise
            else:
                limit.release(ticket, answered=True)
                seconds = completion.seconds or loop.time() - started
                return self._stamped(completion, started - entered, seconds, attempts)
            now = loop.time()
            worked += now - started
            refused = isinstance(last, RateLimitedError)
            asked = last.retry_after
            limit.release(
                ticket,
                answered=not last.retryable,
                refused=refused,
                retry_after=None if asked is None else min(asked, self._policy.longest),
            )
            last.attempts = attempts
            last.waiting = now - entered - worked
            failures += not refused
            if not last.retryable or failures >= self._policy.attempts:
                raise last
            pause = self._policy.pause(attempts, asked, self._random)
            if asked is not None and asked >= LONG_WAIT:
                self._tell_of_wait(now, asked, last)
            if now + pause >= deadline:
                raise last
            _log.info("attempt %d at model %s failed, next in %.1f s: %s", attempts, self.name, pause, last)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """Close the wrapped model."""
        await self._model.close()

    def _price_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._price is not None:
            ahead = threading.Thread(target=self._price, args=(self.name, Usage()), daemon=True)
            loop.call_later(PRICED_AFTER, ahead.start)

    def _tell_of_wait(self, now: float, asked: float, error: ModelError) -> None:
        """Say that the endpoint wants to be left alone for long. Every call under way hears so; it is said once."""
        if now < self._told_until:
            return
        self._told_until = now + asked
        again = self._policy.longest
        self._tell(
            f"the endpoint of model {self.name!r} asks to wait {asked:,.0f} s ({error}). It is asked again "
            + (f"every {again:g} s" if asked > again else "then")
            + f"; a call without an answer after {self._total:,.0f} s in all fails"
        )

    async def _place_before(self, deadline: float, last: ModelError) -> int:
        try:
            async with asyncio.timeout_at(deadline):
                return await self.limit.acquire()
        except TimeoutError:
            raise last from None

    def _stamped(self, completion: Completion, waiting: float, seconds: float, attempts: int) -> Completion:
        cost = completion.cost
        if cost is None and self._price is not None:
            if completion.counted:
                cost = self._price(self.name, completion.usage)
            elif not self._told_of_no_count:
                self._told_of_no_count = True
                _log.warning(
                    "model %r does not say how many tokens it took: such calls are counted without cost",
                    self.name,
                )
        if attempts == 1 and not waiting and cost == completion.cost and seconds == completion.seconds:
            return completion
        return replace(
            completion, cost=cost, seconds=seconds, waiting=waiting + completion.waiting, attempts=attempts
        )
