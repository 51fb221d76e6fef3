from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from taskmill.engine.gate import FailureGate
from taskmill.engine.scheduler import run_lanes
from taskmill.records import ErrorRecord


async def test_an_endless_source_is_drawn_from_only_as_places_free_up() -> None:
    drawn: list[int] = []
    done: list[int] = []

    def source() -> Iterator[int]:
        for number in itertools.count():
            drawn.append(number)
            yield number

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)
        assert len(drawn) - len(done) <= 4

    await run_lanes(source(), work, window=3, stop=lambda: len(done) >= 50)

    assert len(drawn) <= 55
    assert sorted(done) == list(range(len(done)))


async def test_no_more_lanes_run_at_once_than_the_window_has_places() -> None:
    running = peak = 0

    async def work(_: int) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1

    await run_lanes(range(100), work, window=7)

    assert peak == 7


async def test_an_error_surfaces_at_once_and_the_others_are_cancelled_and_awaited() -> None:
    cleaned: list[int] = []
    all_started = asyncio.Event()

    async def work(number: int) -> None:
        if number == 3:
            all_started.set()
            raise RuntimeError("lane 3 broke")
        try:
            await all_started.wait()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    with pytest.raises(RuntimeError, match="lane 3 broke"):
        await run_lanes(range(4), work, window=4)

    assert sorted(cleaned) == [0, 1, 2]


async def test_cancelling_the_caller_cancels_and_awaits_every_lane() -> None:
    cleaned: list[int] = []
    started = asyncio.Event()

    async def work(number: int) -> None:
        if number == 4:
            started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    task = asyncio.ensure_future(run_lanes(range(100), work, window=5))
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cleaned) == [0, 1, 2, 3, 4]


def test_the_gate_closes_on_too_many_failures_but_not_on_a_few() -> None:
    gate = FailureGate(0.5)
    error = ErrorRecord("TransientModelError", "away")
    for _ in range(10):
        gate.succeeded()
    for _ in range(10):
        gate.fail(error)
    assert not gate.closed
    gate.fail(error)
    assert gate.closed
    assert "11 of 21" in gate.reason()
    assert "TransientModelError: away" in gate.reason()


def test_the_gate_closes_early_when_every_call_meets_the_same_wall() -> None:
    gate = FailureGate(0.5)
    told = [gate.fail(ErrorRecord("AuthenticationError", "wrong key")) for _ in range(4)]

    assert told == [True, False, False, False]
    assert gate.closed


def test_a_gate_of_one_never_closes() -> None:
    gate = FailureGate(1.0)
    for _ in range(100):
        gate.fail(ErrorRecord("AuthenticationError", "wrong key"))
    assert not gate.closed


async def test_lanes_may_come_one_by_one_from_elsewhere() -> None:
    async def lanes() -> AsyncIterator[int]:
        for number in range(7):
            await asyncio.sleep(0)
            yield number

    done: list[int] = []

    async def work(lane: int) -> None:
        done.append(lane)

    await run_lanes(lanes(), work, window=2)
    assert sorted(done) == list(range(7))
