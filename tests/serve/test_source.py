"""Tasks by number, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskmill.errors import TaskIndexError, TasksetError
from taskmill.serve.source import TaskSource
from taskmill.tasks import Taskset
from tests.serve import tasksets


@asynccontextmanager
async def source(taskset: Taskset[Any], **options: Any) -> AsyncIterator[TaskSource]:
    made = TaskSource(taskset, **options)
    await made.open()
    running = asyncio.ensure_future(made.run())
    try:
        yield made
    finally:
        running.cancel()


async def test_a_finite_taskset_is_there_from_the_start() -> None:
    async with source(tasksets.SumsTaskset()) as tasks:
        assert tasks.num_tasks == 10
        assert (await tasks.task(9)).data.idx == 9
        with pytest.raises(TaskIndexError, match="past the end: taskset 'sums' has 10 tasks, 0 to 9"):
            await tasks.task(10)


async def test_an_infinite_one_is_made_as_numbers_are_asked_for_and_no_further() -> None:
    async with source(tasksets.EndlessTaskset()) as tasks:
        assert tasks.num_tasks is None
        found = await asyncio.gather(tasks.task(3000), tasks.task(5), tasks.task(20))
        assert [task.data.idx for task in found] == [3000, 5, 20]
        assert len(tasks._tasks) == 3001
        assert await tasks.task(3000) is found[0], "kept"


async def test_past_the_cap_nothing_is_made() -> None:
    async with source(tasksets.EndlessTaskset()) as tasks:
        with pytest.raises(TaskIndexError) as caught:
            await tasks.task(1_000_007)
        assert str(caught.value) == "task_idx 1000007 exceeds the lazy-generation cap (1000000)"
        assert len(tasks._tasks) == 8
    async with source(tasksets.EndlessTaskset(), cap=30) as tasks:
        assert (await tasks.task(29)).data.idx == 29
        with pytest.raises(TaskIndexError, match=r"task_idx 30 exceeds the lazy-generation cap \(30\)"):
            await tasks.task(30)


async def test_a_finite_taskset_larger_than_the_cap_still_serves() -> None:
    async with source(tasksets.SumsTaskset(size=50), cap=30) as tasks:
        assert (await tasks.task(49)).data.idx == 49


async def test_near_numbers_do_not_wait_for_far_ones() -> None:
    async with source(tasksets.SlowTaskset()) as tasks:
        far = asyncio.ensure_future(tasks.task(100_000))
        async with asyncio.timeout(60):
            near = await asyncio.gather(*(tasks.task(idx) for idx in (0, 7, 30, 12)))
        assert [task.data.idx for task in near] == [0, 7, 30, 12]
        assert not far.done()
        far.cancel()


async def test_what_nobody_waits_for_any_more_is_not_made() -> None:
    async with source(tasksets.SlowTaskset()) as tasks:
        far = asyncio.ensure_future(tasks.task(100_000))
        await tasks.task(20)
        far.cancel()
        before = (await tasks.task(21)).data.idx
        while tasks._waiting:
            await asyncio.sleep(0)
        assert before <= len(tasks._tasks) < 10_000


@pytest.mark.parametrize(
    ("taskset", "good", "why"),
    [
        (tasksets.RaisesAtFifthTaskset, 5, "failed at its task 5: ValueError: row 5 is damaged"),
        (tasksets.RaisesLaterTaskset, 20, "failed at its task 20: ValueError: row 20 is damaged"),
        (tasksets.GarbageTaskset, 2, "gave a dict as its task 2, not a Task"),
        (tasksets.ShortInfiniteTaskset, 12, "is INFINITE, but its load ended after 12 tasks"),
    ],
)
async def test_a_failure_is_told_again_and_again_and_the_tasks_before_it_serve(
    taskset: type[Taskset[Any]], good: int, why: str
) -> None:
    async with source(taskset()) as tasks:
        for _ in range(2):
            assert (await tasks.task(good - 1)).data.idx == good - 1
            for idx in (good, good + 100):
                with pytest.raises(TasksetError, match=why):
                    await tasks.task(idx)


async def test_a_taskset_without_a_first_task_cannot_be_opened() -> None:
    with pytest.raises(
        TasksetError, match="failed at its task 0: ValueError: the file of questions is empty"
    ):
        async with source(tasksets.RaisesAtOnceTaskset()):
            pass


async def test_two_of_one_taskset_have_the_same_first_hashes() -> None:
    async with source(tasksets.EndlessTaskset()) as one, source(tasksets.EndlessTaskset()) as two:
        assert one.first_hashes == two.first_hashes
        assert len(set(one.first_hashes)) == 8


async def test_a_listing_ends_where_the_taskset_ends() -> None:
    async with source(tasksets.SumsTaskset()) as tasks:
        assert [entry.task_idx for entry in await tasks.listing(8, 5)] == [8, 9]
        assert await tasks.listing(10, 5) == []
    async with source(tasksets.RaisesAtFifthTaskset()) as tasks:
        assert [entry.task_idx for entry in await tasks.listing(3, 5)] == [3, 4]
        with pytest.raises(TasksetError, match="row 5 is damaged"):
            await tasks.listing(5, 5)
