"""Daemon threads for plain functions, so that a tool that never returns costs one thread and nothing else.

`asyncio.to_thread` is not used: its pool has a fixed size, which four stuck tools of a pool of four use up,
and its threads are joined at exit, which a stuck tool makes last for ever. These threads are reused while they
return, abandoned when their caller gives up, and never joined.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

from taskmill.errors import ToolError

T = TypeVar("T")

_KEPT_IDLE = 64


class _Job:
    __slots__ = ("abandoned", "context", "function", "future", "kwargs", "loop")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
        context: Context,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.loop = loop
        self.future = future
        self.context = context
        self.function = function
        self.kwargs = kwargs
        self.abandoned = False


class DaemonThreads:
    """Threads that run one plain function at a time for a caller on an event loop.

    There are as many as calls under way, plus those that were abandoned; idle ones wait for the next call.
    """

    def __init__(self, name: str = "taskmill-tool") -> None:
        self._name = name
        self._forget()
        # A forked child has the lists of its parent but none of its threads.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job | None]] = []
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
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(loop, future, copy_context(), function, kwargs)
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = self._start()
        inbox.put(job)
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                # The thread clears `function` under this lock once it is out of it.
                if job.function is not None and not job.abandoned:
                    job.abandoned = True
                    self._abandoned += 1
            raise

    def _start(self) -> queue.SimpleQueue[_Job | None]:
        inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        with self._lock:
            self._started += 1
            name = f"{self._name}-{self._started}"
        threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[_Job | None]) -> None:
        while True:
            job = inbox.get()
            if job is None:
                return
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
                # Idle before the answer is handed over, so that the caller's next call finds this thread.
                stays = len(self._idle) < _KEPT_IDLE
                if stays:
                    self._idle.append(inbox)
            if not job.abandoned:
                _deliver(job, value, error)
            del job, value, error
            if not stays:
                return


def _deliver(job: _Job, value: Any, error: BaseException | None) -> None:
    if isinstance(error, StopIteration) or (error is not None and not isinstance(error, Exception)):
        # Neither can travel through a future: one is a TypeError there, the others would end the event loop.
        wrapped = ToolError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        wrapped.__cause__ = error
        error = wrapped
    try:
        job.loop.call_soon_threadsafe(_settle, job.future, value, error)
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
