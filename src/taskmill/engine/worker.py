"""A worker process from the inside: it answers what its supervisor asks, side by side, until it is told to end."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Protocol

from taskmill.engine.collector import patient_collector
from taskmill.engine.frames import (
    Answer,
    Ask,
    Beat,
    Cancel,
    Channel,
    End,
    Failed,
    Note,
    Open,
    Ready,
    Unready,
    to_worker,
)
from taskmill.errors import TaskmillError, WorkerError

BEAT = 1.0
"""Seconds between two signs of life."""


note: ContextVar[Callable[[bytes], None]] = ContextVar("taskmill_note")
"""Within `Worker.answer`: tells whoever asked something of the request before it is answered."""


LAST_WORDS = 5.0
"""Seconds that what was still to be sent may take at the end."""


class Worker(Protocol):
    """What a worker's maker gives. `told` is what the supervisor hears of it before the first request."""

    told: bytes

    async def answer(self, kind: str, body: bytes) -> bytes:
        """Answer one request; many are under way at once. Cancelling ends what it started."""
        ...


MakeWorker = Callable[[bytes], AbstractAsyncContextManager[Worker]]
"""What a plan's target names. It is given the plan's settings; leaving its block ends the worker."""


def main(channel: int) -> None:
    """Be a worker, with that socket to the supervisor. Does not return."""
    guard = os.getppid()
    threading.Thread(target=_die_with, args=(guard,), name="orphan watch", daemon=True).start()
    asyncio.run(_work_and_exit(socket.socket(fileno=channel)))


async def _work_and_exit(connection: socket.socket) -> None:
    code = 1
    try:
        await _work(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not by the ways out of asyncio and the interpreter, which wait for threads that may never return.
        os._exit(code)


def _die_with(parent: int) -> None:
    """End when the parent did. On Linux the kernel sees to it first; this is for where it does not."""
    while os.getppid() == parent:
        time.sleep(BEAT)
    os._exit(1)


async def _work(connection: socket.socket) -> None:
    desk = Desk()
    await asyncio.get_running_loop().create_connection(lambda: desk.channel, sock=connection)
    await desk.opened.wait()
    if desk.to_open is None:
        return
    async with AsyncExitStack() as stack:
        try:
            made = await stack.enter_async_context(_maker(desk.to_open.target)(desk.to_open.settings))
        except Exception as error:
            desk.channel.send(Unready(type(error).__name__, _words(error)))
        else:
            desk.channel.send(Ready(os.getpid(), made.told))
            with patient_collector():
                await desk.serve(made)
    desk.channel.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS):
            await desk.lost.wait()


def _maker(target: str) -> MakeWorker:
    module, _, name = target.partition(":")
    found: MakeWorker = getattr(import_module(module), name)
    return found


class Desk:
    """The requests of one worker process."""

    def __init__(self) -> None:
        self.channel = Channel(self._heard, self._forsaken)
        self.to_open: Open | None = None
        self.opened = asyncio.Event()
        self.lost = asyncio.Event()
        self._ended = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._worker: Worker | None = None
        self._under_way: dict[int, asyncio.Task[None]] = {}

    async def serve(self, worker: Worker) -> None:
        """Answer until told to end; what runs then is cancelled and awaited."""
        self._worker = worker
        async with asyncio.TaskGroup() as group:
            self._group = group
            while not self._ended.is_set():
                self.channel.send(Beat())
                try:
                    async with asyncio.timeout(BEAT):
                        await self._ended.wait()
                except TimeoutError:
                    pass
            for task in self._under_way.values():
                task.cancel()

    def _heard(self, encoded: bytes) -> None:
        message = to_worker(encoded)
        match message:
            case Ask():
                if self._group is not None and not self._ended.is_set():
                    self._begin(self._group, message)
            case Cancel():
                task = self._under_way.get(message.id)
                if task is not None:
                    task.cancel()
            case Open():
                self.to_open = message
                self.opened.set()
            case End():
                self._ended.set()

    def _forsaken(self) -> None:
        self.opened.set()
        self._ended.set()
        self.lost.set()

    def _begin(self, group: asyncio.TaskGroup, asked: Ask) -> None:
        task = group.create_task(self._answer(asked))
        self._under_way[asked.id] = task

        def over(task: asyncio.Task[None]) -> None:
            # Here, as a task that is cancelled before its first step runs none of its own code.
            del self._under_way[asked.id]
            if task.cancelled():
                self.channel.send(Failed(asked.id, "", ""))

        task.add_done_callback(over)

    async def _answer(self, asked: Ask) -> None:
        assert self._worker is not None
        reply: Answer | Failed
        note.set(lambda body: self.channel.send(Note(asked.id, body)))
        try:
            reply = Answer(asked.id, await self._worker.answer(asked.kind, asked.body))
            self.channel.send(reply)
        except asyncio.CancelledError:
            raise
        except TaskmillError as error:
            self.channel.send(Failed(asked.id, type(error).__name__, str(error)))
        except BaseException as error:
            # SystemExit as well: code of a task that calls it ends its own request, not the worker.
            said = _words(error)
            self.channel.send(Failed(asked.id, WorkerError.__name__, said))


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, TaskmillError) else f"{type(error).__name__}: {error}"
