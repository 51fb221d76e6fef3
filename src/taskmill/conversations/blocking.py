"""Blocking forms of what is done on an event loop: they also work where one is running, as in a notebook.

All of them share one loop in a thread of its own, so that models stay open from one call to the next.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, TypeVar

from taskmill.errors import ConfigurationError

T = TypeVar("T")

LAST_SECONDS = 10.0
"""Seconds that letting go of models may take when the process ends."""


class Portal:
    """An event loop in a thread. `closing` are called on it, last first, when the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.closing: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="taskmill-conversations", daemon=True
        )
        self.thread.start()
        atexit.register(self._close)

    def _close(self) -> None:
        if self.pid != os.getpid():
            return
        for close in reversed(self.closing):
            with suppress(Exception):
                asyncio.run_coroutine_threadsafe(close(), self.loop).result(LAST_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LAST_SECONDS)


_portal: Portal | None = None
_lock = threading.Lock()


def portal() -> Portal:
    """The loop of this process."""
    global _portal
    with _lock:
        if _portal is None or _portal.pid != os.getpid():
            _portal = Portal()
        return _portal


def wait_for(
    work: Callable[[], Coroutine[Any, Any, T]], *, loop: asyncio.AbstractEventLoop | None = None
) -> T:
    """Do `work` on the shared loop (or on `loop`) and give what it returns.

    Ctrl-C cancels it and waits until it has ended; pressed again, it leaves at once. Raises `ConfigurationError` where
    the caller is on that loop itself and would wait for ever.
    """
    loop = loop or portal().loop
    with suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            raise ConfigurationError(
                "a blocking call can't be made from within a conversation's own event loop: await the form that begins "
                "with 'a' (arun, astep, asample, arollout)"
            )
    context = contextvars.copy_context()
    done: Future[T] = Future()
    running: list[asyncio.Task[T]] = []

    def begin() -> None:
        task = loop.create_task(work(), context=context)
        running.append(task)
        task.add_done_callback(lambda task: _pass_on(task, done))

    loop.call_soon_threadsafe(begin)
    try:
        return _result(done)
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in running])
        with suppress(Exception, asyncio.CancelledError):
            _result(done)
        raise


def _result(done: Future[T]) -> T:
    # In steps: a thread that waits without an end is not reached by Ctrl-C on every system.
    while True:
        try:
            return done.result(timeout=0.5)
        except NotYet:
            if done.done():
                raise


def _pass_on(task: asyncio.Task[T], done: Future[T]) -> None:
    if task.cancelled():
        done.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
