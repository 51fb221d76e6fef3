"""A sandbox on this machine: a folder of its own, and a first process that runs the rollout's commands."""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from taskmill.errors import SandboxError, ToolArgumentsError, ToolError, ToolRefusedError, ToolTimeoutError
from taskmill.sandbox.base import CommandResult, SandboxLimits
from taskmill.sandbox.host import KILL_GRACE, Call, Ended, ProcessHost
from taskmill.sandbox.leftovers import kill_marked
from taskmill.sandbox.output import Output
from taskmill.sandbox.setup import SetUp
from taskmill.sandbox.threads import in_thread
from taskmill.store import beneath, files

logger = logging.getLogger(__name__)

COPY_BYTES = 1024**3
"""Bytes of a row's own directory (`cwd`) that are copied into its workspace at most."""

COPY_FILES = 100_000
"""Files of a row's own directory that are copied into its workspace at most."""

COPY_TIMEOUT = 900.0
"""Seconds the copy of a row's own directory may take."""

WRITE_TIMEOUT = 30.0
"""Seconds a background process may take to read what is written to it."""

LONGEST_TIMEOUT = 24 * 3600.0


class Place(NamedTuple):
    """The folders of one rollout on this machine."""

    base: Path
    workspace: Path
    temporary: Path
    shared_memory: Path


class Confinement(Struct, frozen=True):
    """How the first process is started, and what it sees.

    `root` gives the workspace's path as commands see it, `argv` what goes before the interpreter,
    `environment` every variable a command has. With a `namespace`, it is process 1 of its own.
    """

    kind: str
    namespace: bool
    root: Callable[[Place], str]
    argv: Callable[[Place], list[str]]
    environment: Callable[[Place], dict[str, str]]


def place_for(directory: Path, rollout_id: str) -> Place:
    """A folder no other rollout, and no other attempt of this one, ever has."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", rollout_id)[:40].strip("-") or "rollout"
    base = directory / f"{name}-{os.urandom(6).hex()}"
    return Place(base, base / "workspace", base / "tmp", base / "shm")


class LocalSandbox:
    """See `taskmill.sandbox.base.Sandbox`. Nothing is made before the first use."""

    def __init__(
        self,
        confinement: Confinement,
        place: Place,
        limits: SandboxLimits,
        *,
        mark: str,
        cwd: str | None = None,
    ) -> None:
        self._confinement = confinement
        self._place = place
        self._limits = limits
        self._mark = mark
        self._root = confinement.root(place)
        self._source = Path(cwd) if cwd is not None and cwd.startswith("/") else None
        self._start = self._root if cwd is None or self._source else self._within(cwd)
        self._host: ProcessHost | None = None
        self._lock = asyncio.Lock()
        self._set_up = SetUp(self._make, COPY_TIMEOUT)
        self._closed = False
        self._background: dict[str, LocalProcess] = {}

    @property
    def kind(self) -> str:
        """`bubblewrap` or `plain`."""
        return self._confinement.kind

    @property
    def root(self) -> str:
        """Where the workspace stands for the task's own commands."""
        return self._root

    @property
    def cwd(self) -> str:
        """The directory commands start in."""
        return self._start

    @property
    def setting_up(self) -> bool:
        """Whether a row's directory is being copied."""
        return self._set_up.going_on

    # -- commands ---------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """Run a shell line (a string) or a program (a sequence) to its end or its deadline."""
        check_timeout(timeout)
        host = await self._ready()
        output = Output(self._limits.output)
        started = time.monotonic()
        ended, timed_out = await host.run(
            command, cwd=self._directory(cwd), timeout=timeout, output=output, environment=env, stdin=stdin
        )
        text, dropped = output.text()
        return CommandResult(
            output=text + explain(ended.note, self._limits),
            exit_code=ended.exit_code,
            timed_out=timed_out,
            dropped=dropped,
            cwd=ended.cwd,
            seconds=time.monotonic() - started,
        )

    async def start(self, command: str | Sequence[str], *, cwd: str | None = None) -> LocalProcess:
        """Start a process in the background; it is killed with the sandbox."""
        host = await self._ready()
        call = host.launch(
            command,
            cwd=self._directory(cwd),
            output=Output(self._limits.output),
            foreground=False,
            keep_stdin=True,
        )
        process = LocalProcess(f"p{len(self._background) + 1}", host, call, self._limits)
        self._background[process.id] = process
        return process

    def _directory(self, cwd: str | None) -> str:
        if cwd is None:
            return self._start
        return cwd if cwd.startswith("/") else posixpath.join(self._root, cwd)

    # -- files ------------------------------------------------------------------------------------------------

    async def read_bytes(self, path: str, *, limit: int | None = None) -> bytes:
        """The bytes of a regular file of the workspace."""
        await self._made()
        return beneath.read_beneath(self._place.workspace, self._relative(path), limit, alias=self._root)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file of the workspace, making its folders."""
        await self._made()
        beneath.write_beneath(self._place.workspace, self._relative(path), data, alias=self._root)

    async def remove(self, path: str) -> None:
        """Remove a file or a folder of the workspace."""
        await self._made()
        place = self._place.workspace
        await in_thread(beneath.remove_beneath, place, self._relative(path), alias=self._root)

    async def list_files(self, path: str = ".", *, limit: int = 10_000) -> list[str]:
        """Files under `path`, relative to it, sorted."""
        await self._made()
        place = self._place.workspace
        return await in_thread(beneath.list_beneath, place, self._relative(path), limit, alias=self._root)

    def _relative(self, path: str) -> str:
        """A path as the task says it, from the workspace on. What leads out by `..` or a link is found later."""
        if not path.startswith("/"):
            return path
        if path == self._root or path.startswith(self._root + "/"):
            return path[len(self._root) :].lstrip("/") or "."
        raise ToolRefusedError(f"{path!r} is outside the workspace {self._root!r}")

    def _within(self, cwd: str) -> str:
        normal = posixpath.normpath(cwd)
        if "\0" in cwd or normal == ".." or normal.startswith("../"):
            raise SandboxError(
                f"the row's working directory {cwd!r} leaves the workspace; name a folder in it"
            )
        return posixpath.normpath(posixpath.join(self._root, normal))

    # -- coming and going -------------------------------------------------------------------------------------

    async def _ready(self) -> ProcessHost:
        host = self._host
        if host is not None and host.alive:
            return host
        await self._made()
        async with self._lock:
            if self._host is not None and not self._host.alive:
                # What the last one left is found by its mark, and must be gone before another uses the mark.
                await self._host.close()
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._host is None or not self._host.alive:
                confinement = self._confinement
                self._host = ProcessHost(
                    confinement.argv(self._place),
                    namespace=confinement.namespace,
                    environment=confinement.environment(self._place),
                    limits=self._limits,
                    mark=self._mark,
                    on_lost=self._sweep,
                )
                await self._host.up()
            return self._host

    async def _made(self) -> None:
        """Wait until the folders are made and filled."""
        if not self._closed:
            await self._set_up.done()
        if self._closed:
            raise SandboxError("the sandbox is closed")

    async def _make(self) -> None:
        """Make the folders, and fill the workspace where the row names a directory of this machine."""
        place = self._place
        try:
            for folder in place:
                folder.mkdir(parents=True, exist_ok=True)
            place.base.chmod(0o700)
            place.temporary.chmod(0o1777)
            place.shared_memory.chmod(0o1777)
            if self._start != self._root:
                below = posixpath.relpath(self._start, self._root)
                (place.workspace / below).mkdir(parents=True, exist_ok=True)
            if self._source is not None:
                await self._copy(self._source)
        except (OSError, RecursionError) as error:
            raise SandboxError(
                f"the workspace {str(place.workspace)!r} could not be made: {error}"
            ) from error

    async def _copy(self, source: Path) -> None:
        if not source.is_dir():
            raise SandboxError(f"the row's working directory {str(source)!r} is no directory of this machine")
        given_up = threading.Event()
        copying = in_thread(
            files.copy_tree_into, source, self._place.workspace, COPY_BYTES, COPY_FILES, given_up.is_set
        )
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The workspace is deleted next, and nothing should be put into it meanwhile.
            given_up.set()
            await asyncio.wait([copying], timeout=KILL_GRACE)
            raise

    def _sweep(self) -> None:
        """The first process is gone; where no namespace took the others with it, find them by their mark."""
        if not self._confinement.namespace:
            kill_marked(self._mark + ".")

    async def close(self) -> None:
        """Kill all that runs here and delete the workspace. May be called twice."""
        if self._closed and self._host is None:
            return
        self._closed = True
        try:
            await self._set_up.stop()
            if self._host is not None:
                await self._host.close()
                for process in self._background.values():
                    process.closed()
                self._host = None
        finally:
            if self._set_up.begun:
                # A thread goes on when its waiter is cancelled, so the folder goes in any case but a quick exit.
                await in_thread(clear, self._place)


def clear(place: Place) -> None:
    """Delete a rollout's folders. What can't be deleted is said and left: the rollout itself is done."""
    for again in range(5):
        try:
            files.remove_tree(place.base)
            return
        except Exception as error:  # most likely the last writes of something that was just killed
            if again == 4:
                logger.warning("the workspace %r could not be deleted: %s", str(place.base), error)
            time.sleep(0.02 * 2**again)


def check_timeout(timeout: float) -> None:
    """Raise `ToolArgumentsError` unless `timeout` is a number of seconds that ends."""
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise ToolArgumentsError(
            f"timeout {timeout!r}: must be over 0 and at most {LONGEST_TIMEOUT:g} seconds"
        )


def explain(note: str, limits: SandboxLimits) -> str:
    """What stands under the output of a command that met a limit of the rollout as a whole."""
    if note == "processes":
        return f"\n[killed: more than {limits.processes} processes ran]\n"
    if note == "memory":
        return f"\n[killed: the processes together used more than {limits.memory:,} bytes of memory]\n"
    return ""


class LocalProcess:
    """A background process of a sandbox on this machine."""

    def __init__(
        self,
        id: str,
        host: ProcessHost,
        call: Call,
        limits: SandboxLimits,
        *,
        on_kill: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._id = id
        self._host = host
        self._call = call
        self._limits = limits
        self._on_kill = on_kill
        self._ended: Ended | None = None
        call.done.add_done_callback(self._on_end)

    @property
    def id(self) -> str:
        """Its name in this sandbox."""
        return self._id

    @property
    def exit_code(self) -> int | None:
        """`None` while it runs; negative for a signal."""
        return None if self._ended is None else self._ended.exit_code

    def read(self) -> str:
        """Output since the last read, at most the sandbox's limit."""
        return self._call.output.pull()

    async def write(self, data: str) -> None:
        """Write to its standard input. Raises `ToolError` when it takes none."""
        if self._ended is not None:
            raise ToolError(f"process {self._id!r} has ended and takes no input")
        try:
            await self._host.write(self._call, data.encode("utf-8", "replace"), WRITE_TIMEOUT)
        except TimeoutError:
            raise ToolTimeoutError(
                f"process {self._id!r} did not read its input for {WRITE_TIMEOUT:g} s"
            ) from None

    async def wait(self, timeout: float) -> int | None:
        """Its exit code, or `None` when it still runs after `timeout` seconds."""
        await asyncio.wait([self._call.done], timeout=timeout)
        return self.exit_code

    async def kill(self) -> None:
        """Kill it and all it started."""
        self._host.kill(self._call)
        if self._on_kill is not None:
            await self._on_kill()
        await asyncio.wait([self._call.done], timeout=KILL_GRACE + 1)

    def closed(self) -> None:
        """The sandbox is gone, and the process with it."""
        if self._ended is None:
            self._ended = Ended(-9, None)

    def _on_end(self, done: asyncio.Future[Ended]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._ended = done.result()
            note = explain(self._ended.note, self._limits)
        else:
            self._ended = Ended(-9, None)
            note = f"\n[{error}]\n"
        self._host.close_stdin(self._call)
        self._host.drain(self._call)
        self._call.output.add(note.encode("utf-8", "replace"))
