"""Daemon threads for plain functions, so that a tool that never returns costs one thread and nothing else.

`asyncio.to_thread` is not used: its pool has a fixed size, which four stuck tools of a pool of four use up,
and its threads are joined at exit, which a stuck tool makes last for ever. These threads are reused while they
return, abandoned when their caller gives up, and never joined.

Waking a thread and being woken by it costs more than most tools take, so the calls of one turn of the event
loop are handed over together: one thread takes them up, and more are woken when it does not get through them.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from taskmill.errors import ToolError

T = TypeVar("T")

_KEPT_IDLE = 64

_PATIENCE = 0.002
"""Seconds after which calls that no thread has taken up get more threads, twice as many each time."""


class _Job:
    __slots__ = ("abandoned", "context", "desk", "function", "future", "kwargs", "started")

    def __init__(
        self,
        desk: _Desk,
        future: asyncio.Future[Any],
        context: Context,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.desk = desk
        self.future = future
        self.context = context
        self.function = function
        self.kwargs = kwargs
        self.started = False
        self.abandoned = False


class _Desk:
    """What one event loop has handed over and not yet got back."""

    __slots__ = ("called", "done", "loop", "signalled", "waiting", "watched")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: deque[_Job] = deque()
        self.done: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self.called = False
        self.watched = False
        self.signalled = False

    def collect(self) -> None:
        """Settle every call that is done; runs on the loop."""
        self.signalled = False
        while self.done:
            job, value, error = self.done.popleft()
            _settle(job.future, value, error)


class DaemonThreads:
    """Threads that run one plain function at a time for callers on event loops.

    A call that takes its time keeps its thread to itself; others get threads of their own. Idle threads wait
    for the next call.
    """

    def __init__(self, name: str = "taskmill-tool") -> None:
        self._name = name
        self._forget()
        # A forked child has the lists of its parent but none of its threads.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Desk]] = []
        self._desks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Desk] = WeakKeyDictionary()
        self._started = 0
        self._abandoned = 0

    @property
    def abandoned(self) -> int:
        """How many threads are still inside a function whose caller has given up."""
        return self._abandoned

    @property
    def idle(self) -> int:
        """How many threads wait for work."""
        return len(self._idle)

    async def run(self, function: Callable[..., T], /, **kwargs: Any) -> T:
        """Call `function` in a thread and await its answer.

        Cancelling the wait abandons the thread: the function can't be stopped, but nothing waits for it any
        more. What it raises is raised here; `SystemExit` and its like come as `ToolError`, because a tool has
        no say over the process.
        """
        loop = asyncio.get_running_loop()
        desk = self._desks.get(loop)
        if desk is None:
            desk = self._desks[loop] = _Desk(loop)
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(desk, future, copy_context(), function, kwargs)
        desk.waiting.append(job)
        if not desk.called:
            desk.called = True
            loop.call_soon(self._hand_over, desk)
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                # The thread clears `function` under this lock once it is out of it.
                job.abandoned = True
                if job.started and job.function is not None:
                    self._abandoned += 1
            raise

    def _hand_over(self, desk: _Desk) -> None:
        """Wake a thread for the calls of this turn of the loop, and look after them in a moment."""
        desk.called = False
        self._wake(desk, 1)
        if not desk.watched:
            desk.watched = True
            desk.loop.call_later(_PATIENCE, self._look_again, desk, 2)

    def _look_again(self, desk: _Desk, threads: int) -> None:
        """As long as calls wait, whatever the threads woken so far are stuck in, wake more."""
        desk.watched = bool(desk.waiting)
        if desk.watched:
            self._wake(desk, threads)
            desk.loop.call_later(_PATIENCE, self._look_again, desk, threads * 2)

    def _wake(self, desk: _Desk, threads: int) -> None:
        for _ in range(min(threads, len(desk.waiting))):
            with self._lock:
                inbox = self._idle.pop() if self._idle else None
            (inbox or self._start()).put(desk)

    def _start(self) -> queue.SimpleQueue[_Desk]:
        inbox: queue.SimpleQueue[_Desk] = queue.SimpleQueue()
        with self._lock:
            self._started += 1
            name = f"{self._name}-{self._started}"
        threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[_Desk]) -> None:
        stays = True
        while stays:
            desk = inbox.get()
            job = self._take(desk)
            answer = None
            while job is not None:
                answer, job = self._carry_out(job), self._take(desk)
                if job is not None:
                    _deliver(*answer)
            with self._lock:
                # Idle before the last answer is handed over, so that the caller's next call finds this thread.
                stays = len(self._idle) < _KEPT_IDLE
                if stays:
                    self._idle.append(inbox)
            if answer is not None:
                _deliver(*answer)
            del desk, answer

    def _take(self, desk: _Desk) -> _Job | None:
        with self._lock:
            while desk.waiting:
                job = desk.waiting.popleft()
                if not job.abandoned:
                    job.started = True
                    return job
        return None

    def _carry_out(self, job: _Job) -> tuple[_Job, Any, BaseException | None]:
        value: Any = None
        error: BaseException | None = None
        try:
            value = job.context.run(job.function, **job.kwargs)
        except BaseException as caught:
            error = caught
        with self._lock:
            job.function = None  # type: ignore[assignment]
            if job.abandoned:
                self._abandoned -= 1
        return job, value, error


def _deliver(job: _Job, value: Any, error: BaseException | None) -> None:
    if job.abandoned:
        return
    if isinstance(error, StopIteration) or (error is not None and not isinstance(error, Exception)):
        # Neither can travel through a future: one is a TypeError there, the others would end the event loop.
        wrapped = ToolError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        wrapped.__cause__ = error
        error = wrapped
    desk = job.desk
    desk.done.append((job, value, error))
    if desk.signalled:
        return
    desk.signalled = True
    try:
        desk.loop.call_soon_threadsafe(desk.collect)
    except RuntimeError:
        # The loop is closed: nobody waits for this answer.
        pass


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


THREADS = DaemonThreads()
"""The threads of this process, shared by all rollouts."""
