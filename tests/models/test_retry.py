from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from taskmill.errors import (
    AuthenticationError,
    BadRequestError,
    ConfigurationError,
    ModelError,
    ModelTimeoutError,
    RateLimitedError,
    TransientModelError,
)
from taskmill.models import Completion, Request, ScriptedModel, retry
from taskmill.models.limits import AdaptiveLimit
from taskmill.models.retry import Retrying, RetryPolicy
from taskmill.records import Message, Usage
from tests.models.virtual import elapsed, run_virtually

REQUEST = Request((Message("user", "hello"),))


class Longest(Random):
    """Draws the longest pause there can be."""

    def uniform(self, a: float, b: float) -> float:
        return b


def retrying(model: ScriptedModel, **options: Any) -> Retrying:
    return Retrying(model, random=options.pop("random", Longest()), **options)


def test_a_transient_failure_is_tried_again_and_stamped() -> None:
    async def main() -> None:
        model = ScriptedModel(
            [TransientModelError("away"), TransientModelError("away"), "hello"], latency=2.0
        )
        completion = await retrying(model, policy=RetryPolicy(base=1.0)).complete(REQUEST)
        assert completion.message.content == "hello"
        assert completion.attempts == 3
        assert completion.seconds == pytest.approx(2.0)
        assert completion.waiting == pytest.approx(2.0 + 1.0 + 2.0 + 2.0)

    run_virtually(main())


@pytest.mark.parametrize("error", [AuthenticationError, BadRequestError])
def test_what_can_t_be_mended_by_waiting_is_not_tried_again(error: type[ModelError]) -> None:
    async def main() -> None:
        model = ScriptedModel([error("no"), "never said"])
        with pytest.raises(error) as caught:
            await retrying(model).complete(REQUEST)
        assert (model.calls, caught.value.attempts) == (1, 1)

    run_virtually(main())


def test_attempts_end_and_the_error_says_how_many_there_were() -> None:
    async def main() -> None:
        model = ScriptedModel(lambda request: TransientModelError("away"), latency=1.0)
        with pytest.raises(TransientModelError) as caught:
            await retrying(model, policy=RetryPolicy(attempts=4, base=1.0)).complete(REQUEST)
        assert model.calls == caught.value.attempts == 4
        assert caught.value.waiting == pytest.approx(1 + 2 + 4)

    run_virtually(main())


def test_pauses_grow_exponentially_up_to_the_longest_and_are_spread() -> None:
    policy = RetryPolicy(base=1.0, longest=8.0)
    assert [policy.pause(n, None, Longest()) for n in range(1, 7)] == [1, 2, 4, 8, 8, 8]
    random = Random(1)
    drawn = [policy.pause(4, None, random) for _ in range(300)]
    assert min(drawn) < 1 < 7 < max(drawn) <= 8
    assert policy.pause(10_000, None, Longest()) == 8


def test_retry_after_is_waited_for_but_not_longer_than_the_longest_pause() -> None:
    policy = RetryPolicy(base=1.0, longest=60.0)
    assert policy.pause(1, 20.0, Longest()) == 21.0
    assert policy.pause(1, 20.0, Random(0)) >= 20.0
    assert policy.pause(1, 86_400.0, Longest()) == 61.0


def test_being_told_to_slow_down_for_long_is_survived() -> None:
    async def main() -> None:
        def script(request: Request) -> str | RateLimitedError:
            return "at last" if elapsed() > 600 else RateLimitedError("slow down", retry_after=5)

        model = ScriptedModel(script)
        completion = await retrying(model, policy=RetryPolicy(attempts=3)).complete(REQUEST)
        assert completion.message.content == "at last"
        assert completion.waiting == pytest.approx(600, abs=10)

    run_virtually(main())


def test_a_storm_of_30_seconds_loses_no_call() -> None:
    async def main() -> None:
        def script(request: Request) -> str | RateLimitedError:
            return "ok" if elapsed() > 30 else RateLimitedError("slow down")

        model = ScriptedModel(script, latency=0.1)
        service = Retrying(model, random=Random(3))
        answers = await asyncio.gather(*[service.complete(REQUEST) for _ in range(200)])
        assert len(answers) == 200
        assert model.calls < 200 * 4
        assert service.limit.snapshot().in_flight == 0

    run_virtually(main())


def test_the_total_deadline_ends_it() -> None:
    async def main() -> None:
        model = ScriptedModel(lambda request: RateLimitedError("slow down", retry_after=50))
        with pytest.raises(RateLimitedError) as caught:
            await retrying(model, total=300.0).complete(REQUEST)
        assert elapsed() < 300
        assert caught.value.attempts == model.calls > 3

    run_virtually(main())


def test_an_attempt_does_not_run_past_the_deadline() -> None:
    async def main() -> None:
        async def script(request: Request) -> str | TransientModelError:
            if model.calls == 1:
                return TransientModelError("away")
            await asyncio.sleep(10_000)
            return "too late"

        model = ScriptedModel(script)
        with pytest.raises(ModelTimeoutError, match="100 s in all") as caught:
            await retrying(model, total=100.0).complete(REQUEST)
        assert elapsed() == pytest.approx(100)
        assert caught.value.attempts == 2

    run_virtually(main())


@pytest.mark.parametrize("during", ["back-off", "call", "line"])
def test_cancelling_stops_at_once_and_leaks_no_place(during: str) -> None:
    async def main() -> None:
        async def hang(request: Request) -> str | TransientModelError:
            if during == "back-off":
                return TransientModelError("away", retry_after=50)
            await asyncio.sleep(10_000)
            return "too late"

        limit = AdaptiveLimit(start=1)
        limit.release(await limit.acquire(), refused=True)
        service = retrying(ScriptedModel(hang), limit=limit)
        holding = await limit.acquire() if during == "line" else None
        task = asyncio.create_task(service.complete(REQUEST))
        await asyncio.sleep(5)
        before = elapsed()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert elapsed() == before
        if holding is not None:
            limit.release(holding)
        now = limit.snapshot()
        assert (now.in_flight, now.waiting) == (0, 0)

    run_virtually(main())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_never_retried(stop: type[BaseException]) -> None:
    async def main() -> None:
        model = ScriptedModel([stop(), "never said"])
        service = retrying(model)
        call = service.complete(REQUEST)
        # Driven by hand: a task would pass the interrupt to the loop itself.
        with pytest.raises(stop):
            call.send(None)
        assert model.calls == 1
        assert service.limit.snapshot().in_flight == 0

    run_virtually(main())


def test_an_unexpected_exception_goes_through_and_leaks_no_place() -> None:
    async def main() -> None:
        service = retrying(ScriptedModel([ZeroDivisionError()]))
        with pytest.raises(ZeroDivisionError):
            await service.complete(REQUEST)
        assert service.limit.snapshot().in_flight == 0

    run_virtually(main())


def test_waiting_in_line_counts_as_waiting() -> None:
    async def main() -> None:
        limit = AdaptiveLimit(start=1)
        limit.release(await limit.acquire(), refused=True)
        service = retrying(ScriptedModel(lambda request: "ok", latency=3.0), limit=limit)
        first, second = await asyncio.gather(service.complete(REQUEST), service.complete(REQUEST))
        assert first.waiting == 0
        assert second.waiting == pytest.approx(3.0)
        assert second.seconds == pytest.approx(3.0)

    run_virtually(main())


def test_the_cost_is_filled_in_where_the_endpoint_named_none() -> None:
    async def main() -> None:
        free = Completion(Message("assistant", "a"), usage=Usage(10, 5))
        named = Completion(Message("assistant", "b"), usage=Usage(10, 5), cost=0.25)
        service = retrying(ScriptedModel([free, named]), price=lambda model, usage: usage.input_tokens * 0.1)
        assert (await service.complete(REQUEST)).cost == 1.0
        assert (await service.complete(REQUEST)).cost == 0.25

    run_virtually(main())


def test_tokens_that_nobody_counted_have_no_price_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        uncounted = Completion(Message("assistant", "a"), counted=False)
        named = Completion(Message("assistant", "b"), counted=False, cost=0.25)
        service = retrying(ScriptedModel([uncounted, uncounted, named]), price=lambda model, usage: 0.0)
        assert [(await service.complete(REQUEST)).cost for _ in range(3)] == [None, None, 0.25]

    run_virtually(main())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("make", [lambda: RetryPolicy(attempts=0), lambda: RetryPolicy(base=float("nan"))])
def test_a_policy_that_can_t_be_is_refused(make: Callable[[], RetryPolicy]) -> None:
    with pytest.raises(ConfigurationError, match=r"attempts=0|base=nan"):
        make()


async def test_closing_closes_the_model() -> None:
    model = ScriptedModel(["x"])
    service = Retrying(model)
    closing: Awaitable[None] = service.close()
    await closing
    assert model.closed


def test_a_long_wait_that_the_endpoint_asks_for_is_said_once_while_it_lasts() -> None:
    async def main() -> None:
        said: list[tuple[float, str]] = []
        answers: list[Any] = [
            RateLimitedError("slow down", retry_after=float(3000 - 60 * n)) for n in range(4)
        ]
        answers += [RateLimitedError("again", retry_after=30.0), "hello", "hello"]
        model = retrying(
            ScriptedModel(answers, latency=0.5),
            tell=lambda line: said.append((elapsed(), line)),
            policy=RetryPolicy(base=1.0),
            total=7200.0,
        )
        await asyncio.gather(model.complete(REQUEST), model.complete(REQUEST))
        assert said == [
            (
                0.5,
                "the endpoint of model 'scripted' asks to wait 3,000 s (slow down). It is asked again every 60 s; "
                "a call without an answer after 7,200 s in all fails",
            )
        ]

    run_virtually(main())


def test_the_next_long_wait_is_said_again_and_a_short_one_never() -> None:
    async def main() -> None:
        said: list[str] = []
        steps = [RateLimitedError("x", retry_after=60.0), RateLimitedError("y", retry_after=59.0)]
        model = retrying(
            ScriptedModel([*steps, *steps, "hello"]), tell=said.append, policy=RetryPolicy(base=1.0)
        )
        await model.complete(REQUEST)
        assert ["asked again then" in line for line in said] == [True, True]
        assert all("(x)" in line for line in said)

    run_virtually(main())


async def test_the_price_is_asked_for_by_a_thread_while_the_first_call_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PRICED_AFTER", 0.0)
    asked: list[tuple[str, threading.Thread]] = []
    priced, answered = threading.Event(), asyncio.Event()

    def price(model: str, usage: Usage) -> float:
        asked.append((model, threading.current_thread()))
        priced.set()
        return 1.0

    async def late(request: Request) -> str:
        await answered.wait()
        return "yes"

    service = Retrying(ScriptedModel(late), price=price)
    assert asked == []
    calls = [asyncio.create_task(service.complete(REQUEST)) for _ in range(2)]
    assert await asyncio.to_thread(priced.wait, 30)
    assert [(model, thread is threading.main_thread()) for model, thread in asked] == [(service.name, False)]
    answered.set()
    assert [(await call).cost for call in calls] == [1.0, 1.0]
