"""Runs commands through the first process of a sandbox (`init.py`), from the event loop and without threads.

The output of a command comes here by a pipe of its own; the word that it ended comes by the control socket. So
nothing waits for a pipe to close that a forgotten child still holds.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import marshal
import os
import socket
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from taskmill.errors import SandboxError, ToolArgumentsError, ToolError, ToolRefusedError
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.output import Output
from taskmill.sandbox.threads import in_thread

_LOADER = (
    "import marshal, os, sys\n"
    "code, length = b'', int(sys.argv[2])\n"
    "while len(code) < length: code += os.read(int(sys.argv[1]), length - len(code)) or sys.exit()\n"
    "exec(marshal.loads(code))"
)
MARK = "TASKMILL_CALL"
"""The variable by which a process says whose it is."""

KILL_GRACE = 5.0
"""Seconds a killed command may take to be gone before the whole sandbox is ended."""

BURIAL = 30.0
"""Seconds the search for what a lost first process left may take before its commands are answered for."""

_LONGEST_COMMAND = 8 * 1024 * 1024
_LONGEST_ANSWER = 256 * 1024
_PIPE = getattr(fcntl, "F_GETPIPE_SZ", None)


class Ended(NamedTuple):
    """How a command ended. `exit_code` is negative for a signal; `note` says which limit of the rollout it met."""

    exit_code: int
    cwd: str | None
    note: str = ""


class Call:
    """A command under way: its output so far, and a future that ends when it does."""

    __slots__ = ("cwd", "done", "id", "output", "program", "reader", "stdin", "timed_out")

    def __init__(self, id: str, program: str, cwd: str, output: Output, done: asyncio.Future[Ended]) -> None:
        self.id = id
        self.program = program
        self.cwd = cwd
        self.output = output
        self.reader = -1
        self.stdin = -1
        self.done = done
        self.timed_out = False


@cache
def program() -> bytes:
    """The first process's program, compiled for the interpreter that runs it."""
    path = Path(__file__).with_name("init.py")
    return marshal.dumps(compile(path.read_bytes(), "<taskmill>", "exec"))


def interpreter() -> str:
    """The Python that runs the first process: the one taskmill runs on, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


class ProcessHost:
    """The first process of one sandbox, and the commands it was asked to run. Belongs to one event loop.

    `argv` is what goes before the interpreter (the confinement). `namespace` says that it is process 1 of a
    namespace of its own. `mark` stands in the environment of every process, so that leftovers are known by it;
    `on_lost`, called in a thread, is to kill those that outlived the first process. Raises `SandboxError` when the
    first process does not start.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        namespace: bool,
        environment: Mapping[str, str],
        limits: SandboxLimits,
        mark: str,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.mark = mark
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._on_lost = on_lost
        self._calls: dict[str, Call] = {}
        self._serial = 0
        self._stalled = False
        self._closing = False
        self._end_reason = "the sandbox ended"
        self._incoming = bytearray()
        self._outbox: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._burial: asyncio.Task[None] | None = None
        self._buried = False
        self._control, theirs = socket.socketpair()
        numbers = (limits.memory, limits.file_size, limits.processes)
        settings = [str(-1 if number is None else number) for number in (int(namespace), *numbers)]
        code = program()
        first = [interpreter(), "-I", "-S", "-c", _LOADER, str(theirs.fileno()), str(len(code)), *settings]
        complaints, complaints_in = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*argv, *first],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints_in,
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            os.close(complaints)
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(complaints_in)
        self._complaints = complaints
        os.set_blocking(complaints, False)
        self._control.setblocking(False)
        self._loop.add_reader(self._control.fileno(), self._receive)
        self._send(code, ())

    @property
    def alive(self) -> bool:
        """Whether commands can still be run here."""
        return not self._gone.done()

    async def up(self) -> None:
        """Raise `SandboxError` with the reason if the first process is known to be gone already."""
        if self._burial is not None:
            await asyncio.wait([self._burial])
            raise SandboxError(self._end_reason)

    # -- commands ---------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        timeout: float,
        output: Output,
        environment: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> tuple[Ended, bool]:
        """Run a command to its end or its deadline; what it left behind is dead by then.

        Gives how it ended and whether that was the deadline. Cancelling kills it too.
        """
        call = self.launch(command, cwd=cwd, output=output, environment=environment, stdin=stdin)
        timer = self._loop.call_later(timeout, self._expire, call)
        try:
            try:
                ended = await call.done
            except asyncio.CancelledError:
                # The word that it is gone is awaited, so that whoever cancels finds nothing left. It was given
                # already if the first process was lost between the cancelling and this step.
                if call.done.cancelled() and not self._buried:
                    call.done = self._loop.create_future()
                    self.kill(call)
                    with suppress(SandboxError, ToolError):
                        await call.done
                raise
            self.drain(call)
            return ended, call.timed_out
        finally:
            timer.cancel()
            self.release(call)

    def launch(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        output: Output,
        environment: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        foreground: bool = True,
        keep_stdin: bool = False,
    ) -> Call:
        """Ask for a command to be started. The caller must `release` the call."""
        if not self.alive:
            raise SandboxError(self._end_reason)
        shell = isinstance(command, str)
        arguments = [command] if isinstance(command, str) else list(command)
        if not arguments or (not shell and not arguments[0]):
            raise ToolArgumentsError("the command is empty")
        self._serial += 1
        id = f"{self.mark}.{self._serial}"
        fields = [
            "run",
            id,
            "shell" if shell else "program",
            "1" if foreground else "0",
            cwd,
            str(len(arguments)),
            *arguments,
        ]
        if environment:
            fields += [f"{name}={value}" for name, value in environment.items()]
        fields.append(f"{MARK}={id}")
        message = _encode(fields)
        call = Call(id, arguments[0], cwd, output, self._loop.create_future())
        given = writer = -1
        try:
            if stdin is None and not keep_stdin:
                given = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            else:
                given, call.stdin = os.pipe()
                os.set_blocking(call.stdin, False)
            call.reader, writer = os.pipe()
            os.set_blocking(call.reader, False)
        except OSError as error:
            for fd in (given, writer, call.reader, call.stdin):
                if fd >= 0:
                    os.close(fd)
            raise SandboxError(f"a command could not be started: {error.strerror}") from error
        self._calls[id] = call
        self._loop.add_reader(call.reader, self._read, call)
        self._send(message, (given, writer))
        if stdin is not None:
            self._feed(call, memoryview(stdin))
        return call

    def kill(self, call: Call) -> None:
        """Kill a command and what it started, also what is left of one that ended."""
        if not self.alive:
            return
        self._send(_encode(["kill", call.id]), ())
        if not call.done.done():
            self._loop.call_later(KILL_GRACE, self._give_up, call)

    def release(self, call: Call) -> None:
        """Let go of the pipes of a call."""
        self._calls.pop(call.id, None)
        self._close_reader(call)
        self.close_stdin(call)

    def close_stdin(self, call: Call) -> None:
        """Let the command see the end of its input."""
        if call.stdin >= 0:
            self._loop.remove_writer(call.stdin)
            os.close(call.stdin)
            call.stdin = -1

    async def write(self, call: Call, data: bytes, timeout: float) -> None:
        """Write to the input of a command that kept it open."""
        view = memoryview(data)
        async with asyncio.timeout(timeout):
            while view:
                if call.stdin < 0:
                    raise ToolError("the process takes no input any more")
                try:
                    view = view[os.write(call.stdin, view) :]
                except BlockingIOError:
                    await self._writable(call.stdin)
                except OSError as error:
                    self.close_stdin(call)
                    raise ToolError("the process takes no input any more") from error

    async def _writable(self, fd: int) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(fd, _settle, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(fd)

    # -- the pipes --------------------------------------------------------------------------------------------

    def _read(self, call: Call) -> None:
        try:
            data = os.read(call.reader, 1 << 16)
        except BlockingIOError:
            return
        if data:
            call.output.add(data)
        else:
            self._close_reader(call)

    def drain(self, call: Call) -> None:
        """Take what the pipe holds now; no more, as something may still write to it."""
        if call.reader < 0:
            return
        room = fcntl.fcntl(call.reader, _PIPE) if _PIPE is not None else 1 << 16
        while room > 0:
            try:
                data = os.read(call.reader, room)
            except BlockingIOError:
                return
            if not data:
                return
            call.output.add(data)
            room -= len(data)

    def _close_reader(self, call: Call) -> None:
        if call.reader >= 0:
            self._loop.remove_reader(call.reader)
            os.close(call.reader)
            call.reader = -1

    def _feed(self, call: Call, rest: memoryview) -> None:
        """Write the input of a command as it takes it, then close it."""
        try:
            while rest:
                rest = rest[os.write(call.stdin, rest) :]
        except BlockingIOError:
            self._loop.add_writer(call.stdin, self._feed, call, rest)
            return
        except OSError:  # it ended, or closed its input
            pass
        self.close_stdin(call)

    # -- the control socket -----------------------------------------------------------------------------------

    def _send(self, message: bytes, descriptors: tuple[int, ...]) -> None:
        """Send now what the socket takes, the rest when it takes more. The descriptors are ours to close."""
        self._outbox.append((message, descriptors))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            message, descriptors = self._outbox[0]
            try:
                if descriptors:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
                    sent = self._control.sendmsg([message], rights)
                else:
                    sent = self._control.send(message)
            except BlockingIOError:
                self._stalled = True
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                self._lose()
                return
            for fd in descriptors:
                os.close(fd)
            if sent < len(message):
                self._outbox[0] = (memoryview(message)[sent:], ())
            else:
                self._outbox.popleft()
        if self._stalled:
            self._stalled = False
            self._loop.remove_writer(self._control.fileno())

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        while len(self._incoming) >= 4:
            end = 4 + int.from_bytes(self._incoming[:4], "big")
            if end > _LONGEST_ANSWER:
                data = b""
                break
            if len(self._incoming) < end:
                break
            fields = bytes(self._incoming[4:end]).split(b"\0")
            del self._incoming[:end]
            if len(fields) == 5:
                self._end(*fields[:4])
        if not data:
            self._lose()

    def _end(self, id: bytes, code: bytes, cwd: bytes, note: bytes) -> None:
        """A command ended. What is said here comes out of the sandbox and is believed in nothing else."""
        call = self._calls.get(id.decode("ascii", "replace"))
        if call is None or call.done.done():
            return
        if code:
            directory = cwd.decode("utf-8", "replace") or None
            call.done.set_result(Ended(_number(code), directory, note.decode("ascii", "replace")))
            return
        number, _, what = note.partition(b" ")
        reason = os.strerror(_number(number))
        if what == b"directory":
            call.done.set_exception(ToolError(f"no command can be started in {call.cwd!r}: {reason}"))
            return
        # As a shell says it: the model reads what went wrong, and the exit code is the usual one.
        call.output.add(f"{call.program[:200]}: {reason}\n".encode("utf-8", "replace"))
        call.done.set_result(Ended(127 if _number(number) == errno.ENOENT else 126, None))

    def _expire(self, call: Call) -> None:
        if not call.done.done():
            call.timed_out = True
            self.kill(call)

    def _give_up(self, call: Call) -> None:
        """A killed command that does not end: the first process is stopped, starved or broken."""
        if not call.done.done() and self.alive:
            self._closing = False
            self._lose()

    def _lose(self) -> None:
        """The first process is gone, and in a namespace everything with it."""
        if self._gone.done():
            return
        self._gone.set_result(None)
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
        for _, descriptors in self._outbox:
            for fd in descriptors:
                os.close(fd)
        self._outbox.clear()
        with suppress(ProcessLookupError):
            self._process.kill()
        on_lost = None if self._closing and sys.platform == "linux" else self._on_lost
        self._burial = self._loop.create_task(self._bury(on_lost))

    async def _bury(self, on_lost: Callable[[], None] | None) -> None:
        """Wait until what the first process leaves is dead too, then answer for its commands."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(BURIAL):
                    await in_thread(_end_rest, self._process, on_lost)
        finally:
            self._buried = True
            self._answer_all()

    def _answer_all(self) -> None:
        said = b""
        with suppress(BlockingIOError):
            said = os.read(self._complaints, 1 << 16)
        os.close(self._complaints)
        reason = said.decode("utf-8", "replace").strip()[-1000:]
        self._end_reason = (
            f"the sandbox ended: {reason or 'its first process was killed, or ran out of memory'}"
        )
        for call in list(self._calls.values()):
            if call.done.done():
                continue
            if call.timed_out:
                call.done.set_result(Ended(-9, None))
            else:
                call.done.set_exception(SandboxError(self._end_reason))

    async def close(self) -> None:
        """End everything that runs here, and wait until it is gone. May be called twice."""
        if not self._gone.done():
            self._closing = True
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(KILL_GRACE):
                    await asyncio.shield(self._gone)
            except TimeoutError:
                self._closing = False
            finally:
                self._lose()
        try:
            if self._burial is not None:
                await asyncio.wait([self._burial])
        finally:
            for call in list(self._calls.values()):
                self.release(call)


def _end_rest(process: subprocess.Popen[bytes], on_lost: Callable[[], None] | None) -> None:
    with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it is reaped some time later
        process.wait(1.0)
    if on_lost is not None:
        on_lost()


def _number(text: bytes) -> int:
    """A small number; -1 for whatever else stands there."""
    digits = text.removeprefix(b"-")
    return int(text) if digits.isdigit() and len(digits) < 6 else -1


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _encode(fields: Sequence[str]) -> bytes:
    body = "\0".join(fields).encode("utf-8", "replace") + b"\0"
    if body.count(b"\0") != len(fields):
        raise ToolArgumentsError("a command, a directory or a variable can't hold a NUL character")
    if len(body) > _LONGEST_COMMAND:
        raise ToolRefusedError(
            f"the command has {len(body):,} bytes, at most {_LONGEST_COMMAND:,} are taken; write a file first"
        )
    return len(body).to_bytes(4, "big") + body


__all__ = ["MARK", "Call", "Ended", "ProcessHost", "interpreter"]
