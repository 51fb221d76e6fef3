"""An event loop whose clock jumps to the next timer: hours of waiting take no time and end at exact moments."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and nothing is left that could happen")
            self.loop.now += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that starts at `now = 1000` and never sleeps."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def elapsed() -> float:
    """Virtual seconds since the loop began."""
    return asyncio.get_running_loop().time() - 1000.0
