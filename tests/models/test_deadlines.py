"""One timer for all that is under way: what is late ends, whoever else cancels is obeyed, nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from taskmill.models.transport import Deadlines
from tests.models.virtual import elapsed, run_virtually


async def lasting(deadlines: Deadlines, seconds: float) -> float:
    """Work that long, and give the moment it ended, in time or not."""
    try:
        with deadlines.attempt():
            await asyncio.sleep(seconds)
    except TimeoutError:
        return -elapsed()
    return elapsed()


def test_each_of_several_attempts_ends_at_its_own_deadline() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)
        tasks = []
        # The first is answered in time, so the timer that was set for it finds nobody and is set anew.
        for seconds in (1, 99, 99, 5, 99):
            tasks.append(asyncio.create_task(lasting(deadlines, seconds)))
            await asyncio.sleep(2)
        assert await asyncio.gather(*tasks) == [1, -12, -14, 11, -18]

    run_virtually(main())


def test_after_a_pause_the_next_attempt_has_its_whole_time() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)
        assert await lasting(deadlines, 1) == 1
        await asyncio.sleep(8)
        assert await lasting(deadlines, 99) == -19
        await asyncio.sleep(50)
        assert await lasting(deadlines, 99) == -79

    run_virtually(main())


@pytest.mark.parametrize("first", ["deadline", "caller"])
def test_a_cancellation_in_the_instant_of_the_deadline_stays_one(first: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines(loop, 10)
        due = loop.time() + 10
        if first == "caller":
            loop.call_at(due, lambda: task.cancel("the caller's"))
        task = asyncio.create_task(lasting(deadlines, 99))
        await asyncio.sleep(0)
        if first == "deadline":
            loop.call_at(due, lambda: task.cancel("the caller's"))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert elapsed() == 10
        assert task.cancelling() == 1

    run_virtually(main())


def test_a_task_that_was_late_can_be_cancelled_and_timed_again() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)

        async def late_and_on() -> None:
            assert await lasting(deadlines, 99) == -10
            current = asyncio.current_task()
            assert current is not None
            assert current.cancelling() == 0
            async with asyncio.timeout(5):
                await asyncio.sleep(99)

        with pytest.raises(TimeoutError):
            await asyncio.create_task(late_and_on())
        assert elapsed() == 15

    run_virtually(main())


def test_after_closing_what_is_under_way_still_ends_in_time() -> None:
    async def main() -> None:
        deadlines = Deadlines(asyncio.get_running_loop(), 10)
        task = asyncio.create_task(lasting(deadlines, 99))
        await asyncio.sleep(1)
        deadlines.close()
        assert await task == -10

    run_virtually(main())
