"""A fake endpoint beside a test that has no event loop of its own, or starts other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from taskmill.testing import FakeEndpoint

LONGEST = 30.0
"""Seconds after which a wait that should have ended is an error."""


@contextmanager
def serving(script: Any, **options: Any) -> Iterator[FakeEndpoint]:
    """A `FakeEndpoint` whose loop runs in a thread while the block lasts."""
    endpoint = FakeEndpoint(script, **options)
    ready = threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        done = asyncio.Event()
        stop.extend((asyncio.get_running_loop(), done))
        async with endpoint:
            ready.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="endpoint")
    thread.start()
    assert ready.wait(LONGEST)
    try:
        yield endpoint
    finally:
        loop, done = stop
        loop.call_soon_threadsafe(done.set)
        thread.join(LONGEST)
