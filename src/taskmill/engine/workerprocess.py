"""One worker process with its guard, as the supervisor has it: started, heard, killed, buried."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from taskmill.engine.frames import (
    Answer,
    Beat,
    Channel,
    End,
    Failed,
    Note,
    Open,
    Ready,
    Unready,
    to_supervisor,
)
from taskmill.errors import WorkerStartError

GRACE = 10.0
"""Seconds a worker may take to end what it does and go, before it is killed."""

_RUN = (
    "import json, sys\n"
    "told = json.loads(sys.argv[1])\n"
    "sys.path[:] = told['path']\n"
    "from taskmill.engine import guard\n"
    "guard.main(told['channel'], told['life'], told['supervisor'])\n"
    "from taskmill.engine import worker\n"
    "worker.main(told['channel'])\n"
)


Heard = Callable[[bytes], None]
"""Hears what a worker notes of a request while it is at it."""


class Job:
    """One request, from its coming to its answer."""

    __slots__ = ("body", "deaths", "future", "heard", "id", "kind", "worker")

    def __init__(
        self, id: int, kind: str, body: bytes, future: asyncio.Future[bytes], heard: Heard | None
    ) -> None:
        self.id = id
        self.kind = kind
        self.body = body
        self.future = future
        self.heard = heard
        self.deaths = 0
        self.worker: WorkerProcess | None = None


class WorkerProcess:
    """One worker process with its guard, as the supervisor has it."""

    def __init__(
        self,
        number: int,
        target: str,
        settings: bytes,
        done: Callable[[WorkerProcess, Answer | Failed], None],
    ) -> None:
        self.number = number
        self.pid = 0
        self.jobs: dict[int, Job] = {}
        self.how = ""
        self.spoke = False
        """Whether it said itself why it can't be started."""
        self._open = Open(target, settings)
        self._done = done
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        self._up: asyncio.Future[bytes] = self._loop.create_future()
        self.channel = Channel(self._hear, self._lost)
        self._life: socket.socket | None = None
        self._guard: asyncio.subprocess.Process | None = None

    async def start(self) -> bytes:
        """Start it, and give what it tells of itself. Raises `WorkerStartError`."""
        ours, theirs = socket.socketpair()
        life, their_life = socket.socketpair()
        told = {
            "path": sys.path,
            "channel": theirs.fileno(),
            "life": their_life.fileno(),
            "supervisor": os.getpid(),
        }
        try:
            self._life = life
            life.setblocking(False)
            self._loop.add_reader(life.fileno(), self._read_life)
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _RUN,
                json.dumps(told),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what tasks print does not get among what the server says
                pass_fds=(theirs.fileno(), their_life.fileno()),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise WorkerStartError(f"no process can be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            their_life.close()
        await self._loop.create_connection(lambda: self.channel, sock=ours)
        self.channel.send(self._open)
        first: list[asyncio.Future[Any]] = [self._up, self.dead]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not self._up.done():
            raise WorkerStartError(f"its process ended before it was ready ({self.how})")
        return await self._up

    def _hear(self, encoded: bytes) -> None:
        self.heard = self._loop.time()
        match to_supervisor(encoded):
            case Answer() | Failed() as message:
                self._done(self, message)
            case Ready() as message:
                self.pid = message.pid
                if not self._up.done():
                    self._up.set_result(message.told)
            case Unready() as message:
                self.spoke = True
                if not self._up.done():
                    self._up.set_exception(WorkerStartError(message.message))
            case Note() as message:
                job = self.jobs.get(message.id)
                if job is not None and job.heard is not None and not job.future.done():
                    job.heard(message.body)
            case Beat():
                pass

    def _read_life(self) -> None:
        """The guard says how the worker ended, or is gone itself."""
        assert self._life is not None
        try:
            said = self._life.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._loop.remove_reader(self._life.fileno())
        if not said and self.pid:
            # The kernel ended the worker with its guard; nobody but this process ends what it had started.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._die(_how(said))

    def _lost(self) -> None:
        # The guard's word is on its way and says more; this is for a worker whose guard is gone.
        if not self.dead.done():
            self._loop.call_later(1.0, self._die, "its connection was lost")

    def _die(self, how: str) -> None:
        if not self.dead.done():
            self.how = self.how or how
            self.dead.set_result(None)

    def kill(self, why: str) -> None:
        """End it at once, with all it started: that is what the guard does when this socket closes."""
        self.how = self.how or why
        life, self._life = self._life, None
        if life is not None:
            self._loop.remove_reader(life.fileno())
            life.close()
        self.channel.close()
        self._die(why)

    async def end(self, grace: float) -> None:
        """Have it end, kill it when `grace` seconds did not do, and wait until nothing is left of it."""
        if self._guard is None:
            self.kill("it never ran")
            return
        try:
            if grace > 0 and not self.dead.done():
                self.channel.send(End())
                await asyncio.wait([self.dead], timeout=grace)
        finally:
            self.kill("it was ended")
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE * 2):
                await self._guard.wait()


def _how(said: bytes) -> str:
    """How a worker ended, from its guard's word."""
    if not said:
        return "its guard was killed"
    code = int(said.split(b"\n")[0])
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
