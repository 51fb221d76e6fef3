from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from taskmill.models.limits import START, AdaptiveLimit
from tests.models.virtual import elapsed, run_virtually


class Endpoint:
    """Answers after `seconds`; refuses at once, after `refusal_seconds`, what exceeds `capacity` calls at a time."""

    def __init__(
        self, *, capacity: float = float("inf"), seconds: float = 1.0, refusal_seconds: float = 0.01
    ):
        self.capacity = capacity
        self.seconds = seconds
        self.refusal_seconds = refusal_seconds
        self.busy = 0
        self.peak = 0
        self.refusals = 0

    async def call(self) -> bool:
        if self.busy >= self.capacity:
            self.refusals += 1
            await asyncio.sleep(self.refusal_seconds)
            return False
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.busy -= 1
        return True


async def work_through(limit: AdaptiveLimit, endpoint: Endpoint, *, calls: int, workers: int) -> None:
    """`calls` calls by `workers` workers, each repeated until it is answered."""
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            answered = False
            while not answered:
                ticket = await limit.acquire()
                answered = await endpoint.call()
                limit.release(ticket, answered=answered, refused=not answered)

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())


def test_500_workers_are_held_back_by_a_few_percent_only() -> None:
    async def main() -> float:
        await work_through(AdaptiveLimit(), Endpoint(), calls=2000, workers=500)
        return elapsed()

    assert run_virtually(main()) < 4.0 * 1.2


def test_the_limit_does_not_grow_beyond_what_is_used() -> None:
    async def main() -> int:
        limit = AdaptiveLimit()
        await work_through(limit, Endpoint(), calls=5000, workers=10)
        return limit.snapshot().limit

    assert run_virtually(main()) == START


def test_it_finds_an_endpoint_s_capacity_and_stays_near_it() -> None:
    async def main() -> tuple[float, AdaptiveLimit, Endpoint]:
        limit, endpoint = AdaptiveLimit(), Endpoint(capacity=40)
        await work_through(limit, endpoint, calls=4000, workers=300)
        return elapsed(), limit, endpoint

    seconds, limit, endpoint = run_virtually(main())
    assert seconds < (4000 / 40) * 1.35
    assert endpoint.refusals < 400
    assert limit.snapshot().ceiling == pytest.approx(40, abs=8)


def test_a_storm_of_refusals_is_one_cut() -> None:
    async def main() -> None:
        limit = AdaptiveLimit(start=64)
        tickets = [await limit.acquire() for _ in range(64)]
        for ticket in tickets:
            limit.release(ticket, refused=True)
        now = limit.snapshot()
        assert (now.limit, now.ceiling, now.cuts, now.refusals) == (32, 64, 1, 64)

        later = await limit.acquire()
        limit.release(later, refused=True)
        assert limit.snapshot().cuts == 2

    run_virtually(main())


def test_it_never_falls_below_one_call() -> None:
    async def main() -> None:
        limit = AdaptiveLimit()
        for _ in range(50):
            limit.release(await limit.acquire(), refused=True)
        assert limit.snapshot().limit == 1
        async with asyncio.timeout(1):
            limit.release(await limit.acquire(), answered=True)

    run_virtually(main())


def test_it_recovers_when_the_endpoint_does() -> None:
    async def main() -> int:
        limit, endpoint = AdaptiveLimit(), Endpoint(capacity=5)
        await work_through(limit, endpoint, calls=200, workers=200)
        endpoint.capacity = float("inf")
        endpoint.peak = 0
        await work_through(limit, endpoint, calls=6000, workers=200)
        return endpoint.peak

    assert run_virtually(main()) == 200


def test_places_are_given_in_the_order_of_asking() -> None:
    async def main() -> list[int]:
        limit = AdaptiveLimit(start=1)
        first = await limit.acquire()
        limit.release(first, refused=True)  # No ramp by time from here on.
        holding = await limit.acquire()
        served: list[int] = []

        async def ask(number: int) -> None:
            ticket = await limit.acquire()
            served.append(number)
            limit.release(ticket)

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(ask(number))
            await asyncio.sleep(0)
            limit.release(holding)
        return served

    assert run_virtually(main()) == list(range(20))


@pytest.mark.parametrize("when", ["waiting", "just served"])
def test_a_cancelled_waiter_leaks_no_place(when: str) -> None:
    async def main() -> None:
        limit = AdaptiveLimit(start=1)
        limit.release(await limit.acquire(), refused=True)
        holding = await limit.acquire()
        waiting = [asyncio.create_task(limit.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        if when == "just served":
            # The place goes to the first in line, which is cancelled before it can run.
            limit.release(holding)
            waiting[0].cancel()
        else:
            waiting[0].cancel()
            await asyncio.sleep(0)
            limit.release(holding)
        async with asyncio.timeout(1):
            limit.release(await waiting[1])
            limit.release(await waiting[2])
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        now = limit.snapshot()
        assert (now.in_flight, now.waiting) == (0, 0)

    run_virtually(main())


def test_retry_after_holds_everybody_back_and_nobody_stampedes() -> None:
    async def main() -> None:
        limit = AdaptiveLimit(start=100)
        tickets = [await limit.acquire() for _ in range(100)]
        for ticket in tickets:
            limit.release(ticket, refused=True, retry_after=30)
        starts: Counter[float] = Counter()

        async def ask() -> None:
            ticket = await limit.acquire()
            starts[round(elapsed(), 3)] += 1
            await asyncio.sleep(1)
            limit.release(ticket, answered=True)

        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(ask())
        assert min(starts) == 30
        assert starts[30] == 50

    run_virtually(main())


def test_a_limit_outlives_the_loop_it_paused_on() -> None:
    limit = AdaptiveLimit()

    async def refused() -> None:
        limit.release(await limit.acquire(), refused=True, retry_after=1e-6)

    async def asked() -> None:
        async with asyncio.timeout(5):
            limit.release(await limit.acquire(), answered=True)

    run_virtually(refused())
    run_virtually(asked())
    assert limit.snapshot().in_flight == 0


def test_its_history_is_bounded_and_says_why() -> None:
    async def main() -> None:
        limit = AdaptiveLimit()
        await work_through(limit, Endpoint(capacity=20, seconds=0.1), calls=30_000, workers=60)
        history = limit.snapshot().history
        assert 10 < len(history) <= 256
        assert {change.why for change in history} <= {"start", "growth", "refused"}
        assert [change.at for change in history] == sorted(change.at for change in history)

    run_virtually(main())
