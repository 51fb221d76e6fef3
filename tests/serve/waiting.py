"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

LONGEST = 60.0


async def until(condition: Callable[[], bool], what: str = "it") -> None:
    """Wait for something no event tells of, such as the end of a process that is nobody's child here."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def family(pid: int | None = None) -> set[int]:
    """All living processes under that one, or under this one."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)}


async def all_gone(pids: set[int]) -> None:
    await until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


async def appeared(folder: Path, count: int = 1) -> list[str]:
    """The names in a folder, as soon as there are `count`."""
    await until(lambda: len(list(folder.iterdir())) >= count, f"{count} files in {folder}")
    return sorted(entry.name for entry in folder.iterdir())
