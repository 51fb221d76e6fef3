"""Blocking work beside the event loop: a copy, a deletion, a search through all processes.

Each has a daemon thread of its own. The pool behind `asyncio.to_thread` has a few threads for all rollouts, which
as many copies from a file system that hangs would use up, and is waited for when the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> asyncio.Future[T]:
    """Start `function` in a thread; the future has what it gives or raises.

    Cancelling the future ends the wait for it and not the function.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        settle: Callable[[Any], None]
        answer: Any
        try:
            settle, answer = future.set_result, function(*arguments, **keywords)
        except Exception as error:
            settle, answer = future.set_exception, error
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(_settle, future, settle, answer)

    threading.Thread(target=work, name="taskmill-sandbox", daemon=True).start()
    return future


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], answer: Any) -> None:
    if not future.done():
        settle(answer)


__all__ = ["in_thread"]
