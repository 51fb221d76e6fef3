"""Several devices: a worker process on each, which holds whole conversations.

Jobs are handed out as workers have places for them. What a dead worker had in hand is suspect: it is tried again apart
from everything else, a few together first and then alone, so that a job that kills its worker takes no other with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from taskmill.conversations.conversation import Conversation
from taskmill.conversations.devices import check_crossing, initializer_path
from taskmill.conversations.jobs import Job
from taskmill.conversations.orders import KeptCall, Order, Settings, decode_heard, encode_order
from taskmill.conversations.record import Held, Journal, decode_held, storable, unheld
from taskmill.engine.progress import Progress
from taskmill.engine.scheduler import first_of
from taskmill.engine.supervisor import WorkerPlan, Workers
from taskmill.errors import ConfigurationError, TaskmillError, WorkerDied, WorkerStartError
from taskmill.programs.agent import error_record
from taskmill.programs.conversation.transcript import Message
from taskmill.records import ErrorRecord

TRIES = 3
"""Workers that may die with a job in hand before the job fails."""

TOGETHER = 8
"""Suspects that are tried together the first time."""

BARREN = 24
"""Deaths in a row, with no job brought to its end between them, after which a device is given up."""

START_SECONDS = 600.0
"""Seconds a worker may take to import what it needs and run its initializer."""

TARGET = "taskmill.conversations.worker:make"


class _Trial:
    """A job in hand or waiting, from its being given to its end."""

    def __init__(self, job: Job, order: Order, done: asyncio.Future[Held]) -> None:
        self.job = job
        self.order = order
        self.done = done
        self.deaths = 0
        self.heard: list[Message] = []
        self.calls: dict[tuple[str, int], KeptCall] = {
            call_key(call): call for call in order.calls if not call.void
        }
        self.how = ""


def call_key(call: KeptCall) -> tuple[str, int]:
    """What tells the calls of a job apart."""
    return call.rollout, call.number


class WorkerHands:
    """Jobs are held by worker processes, one on each device. An async context manager: they are up in its block.

    Entering raises `WorkerStartError` with the cause where a worker can't be started.
    """

    def __init__(
        self,
        devices: Sequence[str],
        known: Sequence[Conversation],
        *,
        folder: Path,
        batched: bool,
        max_batch_size: int | None,
        places: int,
        initializer: Any,
        journal: Journal | None,
        progress: Progress,
    ) -> None:
        self._devices = list(devices)
        self._places = places
        self._journal: Any = journal
        self._progress = progress
        modules: set[str] = set()
        for conversation in known:
            modules |= check_crossing(conversation)
        started = initializer_path(initializer)
        self._settings = [
            Settings(
                device, str(folder / f"worker{number}"), batched, max_batch_size, sorted(modules), started
            )
            for number, device in enumerate(self._devices)
        ]
        # A window's worth waits here, so that a worker that has a place free finds a job.
        self.window = places * len(self._devices) + len(self._devices)
        self._fresh: deque[_Trial] = deque()
        self._suspects: deque[_Trial] = deque()
        self._news = asyncio.Condition()
        self._serving = 0
        self._problem: Exception | None = None
        self._trials: dict[str, _Trial] = {}
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way: list[set[asyncio.Task[bool]]] = []
        self._up: list[asyncio.Future[None]] = []

    @property
    def exhausted(self) -> Exception | None:
        """Why no device is left; `None` while there is one."""
        return None if self._serving else self._problem

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._up = [loop.create_future() for _ in self._devices]
        self._serving = len(self._devices)
        try:
            self._tasks = [
                self._group.create_task(self._serve(number, up)) for number, up in enumerate(self._up)
            ]
            await asyncio.wait(self._up)
            failed = next((up.exception() for up in self._up if up.exception() is not None), None)
            if failed is not None:
                raise failed
        except BaseException as error:
            await self._leave(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(kind, error, trace)

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None

    # -- what the run sees ------------------------------------------------------------------------------------

    async def hold(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held:
        """See `Hands`."""
        if self.exhausted is not None:
            return unheld(job, attempt, recipe, "cancelled", None)
        try:
            order = self._order(job, attempt, recipe)
        except ConfigurationError as error:  # one job among many that can't cross to a worker
            return unheld(job, attempt, recipe, "failed", error_record(error))
        trial = _Trial(job, order, asyncio.get_running_loop().create_future())
        self._trials[job.key] = trial
        self._fresh.append(trial)
        await self._tell_news()
        held = await trial.done
        del self._trials[job.key]
        return held

    def cut(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held | None:
        """See `Hands`."""
        trial = self._trials.pop(job.key, None)
        return None if trial is None else unheld(job, attempt, recipe, "cancelled", None, trial.heard)

    def _order(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Order:
        conversation = job.conversation
        if job.recipe is None:
            check_crossing(conversation)
        calls: list[KeptCall] = []
        if self._journal is not None:
            for name in conversation.names:
                id = f"{job.key}#{name}"
                for void, entries in ((False, self._journal.recall(id)), (True, self._journal.void(id))):
                    calls += [
                        KeptCall(id, entry.number, entry.digest, entry.completion, entry.attempt, void)
                        for entry in entries
                    ]
        return Order(
            key=job.key,
            job_id=job.id,
            name=job.recipe,
            attempt=attempt,
            recipe=conversation.recipe(),
            keep_recipe=recipe is not None,
            row=storable(conversation.row),
            place=conversation._place,
            seed=conversation._seed,
            stream=conversation._stream,
            calls=calls,
        )

    # -- devices ----------------------------------------------------------------------------------------------

    async def _serve(self, number: int, up: asyncio.Future[None]) -> None:
        """Keep a worker on one device, and hand it jobs, until the end or until it is given up."""
        settings = self._settings[number]
        plan = WorkerPlan(
            TARGET,
            msgspec.msgpack.encode(settings),
            places=self._places,
            reruns=0,
            start_timeout=START_SECONDS,
        )
        try:
            async with Workers(plan) as workers:
                up.set_result(None)
                await self._hand_out(settings.device, workers)
        except TaskmillError as error:
            if not up.done():
                up.set_exception(_named(error, settings.device))
                up.exception()
            self._problem = error
        finally:
            if not up.done():
                up.set_exception(
                    WorkerStartError(f"the worker of {settings.device} was ended while it started")
                )
                up.exception()
            self._serving -= 1
            if self.exhausted is not None:
                self._fail_waiting()

    async def _hand_out(self, device: str, workers: Workers) -> None:
        """Give a worker jobs for as long as it is any good. Raises why it is not."""
        barren = 0
        problem: TaskmillError | None = None
        under_way: set[asyncio.Task[bool]] = set()
        self._under_way.append(under_way)

        async def settle(when: str) -> None:
            nonlocal barren
            done, _ = await asyncio.wait(under_way, return_when=when)
            under_way.difference_update(done)
            for task in done:
                barren = 0 if task.result() else barren + 1

        try:
            async with asyncio.TaskGroup() as group:

                def begin(trial: _Trial) -> None:
                    under_way.add(group.create_task(self._try(trial, device, workers)))

                # Raised when the group is over: within it, it would be one error of several.
                while problem is None:
                    if barren >= BARREN:
                        problem = WorkerDied(
                            f"the worker of {device} died {barren} times without finishing a job"
                        )
                    elif workers.problem is not None:
                        problem = workers.problem
                    elif self._suspects:
                        while under_way:
                            await settle(asyncio.ALL_COMPLETED)
                        for trial in self._next_suspects():
                            begin(trial)
                        while under_way:
                            await settle(asyncio.ALL_COMPLETED)
                    elif self._has_place(under_way):
                        begin(self._fresh.popleft())
                    else:
                        await self._wait_for_change(under_way)
                        if any(task.done() for task in under_way):
                            await settle(asyncio.FIRST_COMPLETED)
                for task in under_way:
                    task.cancel()
        finally:
            self._under_way.remove(under_way)
            await self._tell_news()
        raise problem

    def _has_place(self, under_way: set[asyncio.Task[bool]]) -> bool:
        """Whether a worker may take a new job: it has no more than its share of those there are."""
        if not self._fresh or len(under_way) >= self._places:
            return False
        total = len(self._fresh) + sum(map(len, self._under_way))
        return len(under_way) < -(-total // max(1, self._serving))

    async def _wait_for_change(self, under_way: set[asyncio.Task[bool]]) -> None:
        """Wait until a job of this worker ends, or another one can be begun on it."""

        async def news() -> None:
            async with self._news:
                await self._news.wait_for(lambda: bool(self._suspects) or self._has_place(under_way))

        waiting = asyncio.ensure_future(news())
        try:
            await asyncio.wait([*under_way, waiting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])

    def _next_suspects(self) -> list[_Trial]:
        if not self._suspects:  # another worker was quicker
            return []
        first = self._suspects.popleft()
        chosen = [first]
        while (
            first.deaths == 1 and self._suspects and self._suspects[0].deaths == 1 and len(chosen) < TOGETHER
        ):
            chosen.append(self._suspects.popleft())
        return chosen

    async def _try(self, trial: _Trial, device: str, workers: Workers) -> bool:
        """Have a job held; false where the worker died with it."""
        if trial.done.done():
            return True
        order = msgspec.structs.replace(
            trial.order,
            calls=[*trial.calls.values(), *(call for call in trial.order.calls if call.void)],
        )
        trial.heard.clear()
        try:
            answer = await workers.call(
                "hold", encode_order(order), lambda body: self._hear(trial, body, id(workers))
            )
        except asyncio.CancelledError:
            self._suspects.append(trial)  # where it is this device that is given up, another one takes it
            raise
        except WorkerDied as error:
            await self._died(trial, device, str(error))
            return False
        except TaskmillError as error:
            if workers.problem is not None or workers.stopping:
                self._suspects.append(trial)
                await self._tell_news()
                return False
            problem = ErrorRecord(type(error).__name__, str(error))
            self._finish(
                trial, unheld(trial.job, order.attempt, _recipe(order), "failed", problem, trial.heard)
            )
            return True
        self._finish(trial, decode_held(answer))
        return True

    async def _died(self, trial: _Trial, device: str, how: str) -> None:
        trial.deaths += 1
        trial.how = how
        self._progress.tell("worker_died", device=device, how=how, jobs=1, job_id=trial.job.id)
        if trial.deaths >= TRIES:
            problem = ErrorRecord(
                WorkerDied.__name__,
                f"{trial.deaths} workers died with this job in hand, the last time alone: {how}",
                attempts=trial.deaths,
            )
            order = trial.order
            self._finish(
                trial, unheld(trial.job, order.attempt, _recipe(order), "failed", problem, trial.heard)
            )
            return
        self._suspects.append(trial)
        await self._tell_news()

    def _hear(self, trial: _Trial, body: bytes, worker: int) -> None:
        heard = decode_heard(body)
        if heard.message is not None:
            trial.heard.append(heard.message)
            self._progress.heard(heard.message.n_tokens, rows=heard.rows, worker=worker)
        call = heard.call
        if call is not None:
            trial.calls[call_key(call)] = call
            if self._journal is not None:
                self._journal.record(call.rollout, call.number, call.digest, call.completion, call.attempt)

    def _finish(self, trial: _Trial, held: Held) -> None:
        if not trial.done.done():
            trial.done.set_result(held)

    def _fail_waiting(self) -> None:
        for trial in (*self._fresh, *self._suspects):
            self._finish(trial, unheld(trial.job, trial.order.attempt, None, "cancelled", None))
        self._fresh.clear()
        self._suspects.clear()

    async def _tell_news(self) -> None:
        async with self._news:
            self._news.notify_all()


def _recipe(order: Order) -> Any:
    return order.recipe if order.keep_recipe else None


def _named(error: TaskmillError, device: str) -> TaskmillError:
    return WorkerStartError(f"the worker of {device!r} can't be started: {error}")
