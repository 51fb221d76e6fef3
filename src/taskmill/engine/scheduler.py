"""Pull work, never pile it up: a window of lanes in flight over an iterator that may be endless.

A lane is whatever runs in order by itself (a batch of rows, one task of an evaluation). Every lane is an
asyncio task of one group, so an error in any surfaces at once, and cancelling the caller cancels and awaits
them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

Lane = TypeVar("Lane")


async def run_lanes(
    lanes: Iterable[Lane] | AsyncIterable[Lane],
    work: Callable[[Lane], Awaitable[None]],
    *,
    window: int,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run `work` on every lane, at most `window` at once, taking no new lane once `stop()` is true.

    The next lane is drawn from `lanes` only when there is a place for it. An exception of `work` cancels the
    other lanes and is raised as it is (the first one, where several came together).
    """
    places = asyncio.Semaphore(window)

    async def run_one(lane: Lane) -> None:
        try:
            await work(lane)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for lane in _each(lanes):
                await places.acquire()
                if stop():
                    break
                group.create_task(run_one(lane))
    except BaseExceptionGroup as failures:
        raise first_of(failures) from None


async def _each(lanes: Iterable[Lane] | AsyncIterable[Lane]) -> AsyncIterator[Lane]:
    if isinstance(lanes, AsyncIterable):
        async for lane in lanes:
            yield lane
    else:
        for lane in lanes:
            yield lane


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of several errors that came together."""
    inner = failures.exceptions[0]
    return first_of(inner) if isinstance(inner, BaseExceptionGroup) else inner
