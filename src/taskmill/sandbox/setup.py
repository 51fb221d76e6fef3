"""What is done once before a sandbox is used: folders made, a directory copied, a container started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from taskmill.errors import SandboxError


class SetUp:
    """Runs `make` once, when first waited for, whoever waits and however often.

    A tool call that is given up while it waits leaves it running for the next one. Its own deadline is `seconds`,
    and how it failed it fails for all who wait later.
    """

    def __init__(self, make: Callable[[], Awaitable[None]], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether there may be something to remove."""
        return self._task is not None

    @property
    def going_on(self) -> bool:
        """Whether it was begun and has not ended."""
        return self._task is not None and not self._task.done()

    async def done(self) -> None:
        """Wait for its end. Raises `SandboxError` when it failed, was late, or was stopped."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        if not self._task.done():
            await asyncio.wait([self._task])
        if self._task.cancelled():
            raise SandboxError("the sandbox is closed")
        self._task.result()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                await self._make()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SandboxError(f"the sandbox could not be set up within {self._seconds:g} seconds") from error

    async def stop(self) -> None:
        """End it, if it goes on, and wait until nothing of it does."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._task is not None and not self._task.cancelled():
            self._task.exception()  # looked at: whoever waited for it may have given up before


__all__ = ["SetUp"]
