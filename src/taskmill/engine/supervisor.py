"""Worker processes under one supervisor: each request goes to the least busy, and none is lost with a worker.

The supervisor runs no code of others, so it goes on whatever a worker does. How processes are kept from outliving
it stands in `guard.py`, what one process is to the supervisor in `workerprocess.py`, what a worker does in `worker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from msgspec import Struct

from taskmill.engine.frames import Answer, Ask, Cancel, Failed, error_of
from taskmill.engine.workerprocess import GRACE, Heard, Job, WorkerProcess
from taskmill.errors import (
    ServerBusyError,
    TaskmillError,
    WorkerDied,
    WorkerError,
    WorkerStartError,
)

SILENCE = 60.0
"""Seconds without a sign of life after which a worker is taken for stuck, and killed."""

START_TRIES = 3
"""Starts in a row that may end without a word before a worker is given up. One that says why has only one."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a dead worker is replaced: twice as many after each that did not live for `LONGEST_PAUSE`."""

GROW_AT = 4
"""Requests that the least busy worker has when another one is started, where there may be more."""

Tell = Callable[..., None]
"""Hears of events: a name, then fields by keyword."""


def _tell_nobody(event: str, **fields: Any) -> None:
    pass


class WorkerPlan(Struct, frozen=True):
    """What the workers are and how many. `target` (`module:function`) makes one in its process: see `MakeWorker`.

    `least` are started at once, up to `most` as there is work. A worker has `places` requests under way at most;
    `queue` more wait here, and others are refused. A request whose worker died is run again up to `reruns` times.
    `start_timeout` is in seconds.
    """

    target: str
    settings: bytes = b""
    least: int = 1
    most: int = 1
    places: int = 256
    queue: int = 10_000
    reruns: int = 2
    start_timeout: float = 600.0


class Workers:
    """The workers of a plan, as an async context manager: they are up when its block begins, and gone after it.

    `accept` is given what a worker tells of itself, and raises where it won't do; `buried` is given the pid of one that
    is gone with all its processes, to clear away what else it left. Entering raises
    `WorkerStartError` with the cause where a worker can't be started.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        accept: Callable[[bytes], None] = lambda told: None,
        buried: Callable[[int], Awaitable[None]] | None = None,
        tell: Tell = _tell_nobody,
    ) -> None:
        self._plan = plan
        self._accept = accept
        self._buried = buried
        self._tell = tell
        self._serial = 0
        self._started = 0
        self._queue: dict[int, Job] = {}
        self._ready: list[WorkerProcess] = []
        self._not_ready: set[WorkerProcess] = set()
        self._starting = 0
        self._slots = 0
        self._given_up: list[TaskmillError] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._first_round = asyncio.Event()
        self._stop = asyncio.Event()
        self._ending = False
        self._group: asyncio.TaskGroup | None = None
        self.deaths = 0
        self.reruns = 0

    # -- what others see --------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that are with a worker."""
        return sum(len(worker.jobs) for worker in self._ready)

    @property
    def pids(self) -> list[int]:
        """The processes of the workers that are up."""
        return [worker.pid for worker in self._ready]

    @property
    def stopping(self) -> bool:
        """Whether no new request is taken any more."""
        return self._ending

    @property
    def problem(self) -> TaskmillError | None:
        """Why no request can be answered at all any more, where that is so."""
        return self._given_up[-1] if self._slots == 0 and self._given_up else None

    async def call(self, kind: str, body: bytes, heard: Heard | None = None) -> bytes:
        """Have a worker answer a request. Cancelling cancels it there too. `heard` gets what it notes on the way.

        Raises `WorkerDied`, the worker's own error by its class, and `ServerBusyError` where the queue is full.
        """
        if self._ending:
            raise ServerBusyError("the server is stopping")
        if self.problem is not None:
            raise WorkerStartError(f"there is no worker: {self.problem}")
        if len(self._queue) >= self._plan.queue:
            raise ServerBusyError(f"{len(self._queue):,} requests are waiting already, and no more are taken")
        self._serial += 1
        job = Job(self._serial, kind, body, asyncio.get_running_loop().create_future(), heard)
        self._queue[job.id] = job
        self._idle.clear()
        self._hand_out()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._drop(job)
            raise

    # -- handing out ------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give what waits to the least busy, as far as there are places."""
        while self._queue and self._ready:
            worker = min(self._ready, key=lambda worker: len(worker.jobs))
            busy = len(worker.jobs)
            if busy >= GROW_AT:
                self._grow()
            if busy >= self._plan.places:
                return
            job = self._queue.pop(next(iter(self._queue)))
            job.worker = worker
            worker.jobs[job.id] = job
            worker.channel.send(Ask(job.id, job.kind, job.body))

    def _grow(self) -> None:
        if self._slots < self._plan.most and not self._starting and not self._ending and not self._given_up:
            self._open_slot()

    def _drop(self, job: Job) -> None:
        """Nobody waits for that request any more. Its place is free when the worker says so."""
        self._queue.pop(job.id, None)
        if job.worker is not None and job.id in job.worker.jobs:
            job.worker.channel.send(Cancel(job.id))
        self._settle()

    def _settle(self) -> None:
        if not self._queue and not self.running:
            self._idle.set()

    def _done(self, worker: WorkerProcess, message: Answer | Failed) -> None:
        job = worker.jobs.pop(message.id, None)
        if job is not None and not job.future.done():
            if isinstance(message, Answer):
                job.future.set_result(message.body)
            elif message.error:
                job.future.set_exception(error_of(message.error, message.message))
            else:
                job.future.set_exception(WorkerError("the worker is ending, and did not finish this request"))
        self._hand_out()
        self._settle()

    # -- slots ------------------------------------------------------------------------------------------------

    def _open_slot(self) -> None:
        assert self._group is not None
        self._slots += 1
        self._starting += 1
        self._group.create_task(self._keep())

    async def _keep(self) -> None:
        """Keep one worker alive, until the end or until it is given up."""
        silent = short = 0
        first = True
        while not self._ending:
            loop = asyncio.get_running_loop()
            if not first:
                self._starting += 1
            first = False
            self._started += 1
            worker = WorkerProcess(self._started, self._plan.target, self._plan.settings, self._done)
            try:
                await self._start(worker)
            except WorkerStartError as error:
                silent += 1
                self._tell("worker_not_started", worker=worker.number, message=str(error))
                if worker.spoke or silent >= START_TRIES:
                    self._give_up(error)
                    return
            else:
                silent = 0
                began = loop.time()
                await self._until_dead(worker)
                if loop.time() - began > LONGEST_PAUSE:
                    short = 0
            if not self._ending:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(FIRST_PAUSE * 2.0**short, LONGEST_PAUSE)):
                        await self._stop.wait()
                short += 1

    async def _start(self, worker: WorkerProcess) -> None:
        """Bring a worker up. Raises `WorkerStartError`; nothing is left of it then."""
        self._not_ready.add(worker)
        try:
            try:
                async with asyncio.timeout(self._plan.start_timeout):
                    told = await worker.start()
            except TimeoutError:
                raise WorkerStartError(f"it was not ready within {self._plan.start_timeout:g} s") from None
            try:
                self._accept(told)
            except TaskmillError as error:
                worker.spoke = True
                raise WorkerStartError(str(error)) from error
        except BaseException:
            await worker.end(0.0)
            raise
        finally:
            self._starting -= 1
            self._not_ready.discard(worker)
        self._ready.append(worker)
        self._tell("worker_ready", worker=worker.number, pid=worker.pid)
        self._look_at_first_round()
        self._hand_out()

    async def _until_dead(self, worker: WorkerProcess) -> None:
        try:
            await self._watch(worker)
        finally:
            self._ready.remove(worker)
            await self._bury(worker)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Wait for a worker's end, or bring it about where it gives no sign of life."""
        loop = asyncio.get_running_loop()
        suspected = False
        while not worker.dead.done():
            await asyncio.wait([worker.dead], timeout=SILENCE / 10)
            silent = loop.time() - worker.heard > SILENCE
            if silent and suspected:
                # Suspected first: were it this process that stood still, the signs would be here by now.
                worker.kill(f"it gave no sign of life for {SILENCE:g} s")
            suspected = silent

    async def _bury(self, worker: WorkerProcess) -> None:
        """Have what a dead worker was at run again, or say that it died."""
        jobs, worker.jobs = list(worker.jobs.values()), {}
        if not self._ending:
            self.deaths += 1
            self._tell(
                "worker_died", worker=worker.number, pid=worker.pid, how=worker.how, requests=len(jobs)
            )
        again: dict[int, Job] = {}
        for job in jobs:
            job.worker = None
            job.deaths += 1
            if job.future.done():
                continue
            if self._ending:
                job.future.set_exception(ServerBusyError("the server stopped before this request was done"))
            elif job.deaths > self._plan.reruns:
                job.future.set_exception(
                    WorkerDied(
                        f"the worker process died ({worker.how}) at this request, "
                        f"as did {job.deaths - 1} others that ran it before"
                        if job.deaths > 1
                        else f"the worker process died ({worker.how}) at this request"
                    )
                )
            else:
                again[job.id] = job
        self.reruns += len(again)
        self._queue = again | self._queue
        self._hand_out()
        self._settle()
        await worker.end(0.0)
        if self._buried is not None and worker.pid:
            await self._buried(worker.pid)

    def _give_up(self, error: TaskmillError) -> None:
        """Do without that worker. Where it was the last one, all that waits fails with the cause."""
        self._slots -= 1
        self._given_up.append(error)
        self._tell("worker_given_up", message=str(error), left=self._slots)
        self._look_at_first_round()
        if self._slots == 0:
            waiting, self._queue = list(self._queue.values()), {}
            for job in waiting:
                if not job.future.done():
                    job.future.set_exception(WorkerStartError(f"there is no worker: {error}"))
            self._settle()

    def _look_at_first_round(self) -> None:
        if self._given_up or len(self._ready) >= self._plan.least:
            self._first_round.set()

    # -- beginning and end ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        try:
            for _ in range(self._plan.least):
                self._open_slot()
            await self._first_round.wait()
            if self._given_up:
                raise self._given_up[0]
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
        try:
            await self.close(0.0)
        finally:
            try:
                # What ended the block is its own matter; only what the slots raised is added to it.
                await self._group.__aexit__(None, None, None)
            finally:
                for worker in (*self._ready, *self._not_ready):
                    worker.kill("the server ended")

    async def close(self, patience: float = 0.0) -> None:
        """Take no more requests, give those there are `patience` seconds to be done, then end the workers.

        What is not done by then is cancelled, and fails with `ServerBusyError`. May be called twice, the second time
        with less patience.
        """
        self._ending = True
        if patience > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._idle.wait()
        self._stop.set()
        waiting, self._queue = list(self._queue.values()), {}
        for job in [*waiting, *(job for worker in self._ready for job in worker.jobs.values())]:
            if not job.future.done():
                job.future.set_exception(ServerBusyError("the server stopped before this request was done"))
        for worker in list(self._not_ready):
            worker.kill("the server is stopping")
        await asyncio.gather(*(worker.end(GRACE) for worker in list(self._ready)))
