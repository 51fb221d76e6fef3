"""What a rollout's tools run in: a workspace of its own, and processes that die with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class SandboxLimits(Struct, frozen=True, omit_defaults=True):
    """What one rollout's processes may use. Sizes in bytes, times in seconds; `None` is no limit."""

    memory: int | None = 4 * 1024**3
    file_size: int | None = 1024**3
    processes: int | None = 512
    output: int = 64 * 1024
    network: bool = False


class CommandResult(Struct, frozen=True, omit_defaults=True):
    """A command that ended, or was ended.

    `output` holds stdout and stderr as they came, head and tail kept when it was longer than the limit
    (`dropped` bytes between). `exit_code` is negative for a signal. `cwd` is where the shell stood at the end.
    """

    output: str
    exit_code: int
    timed_out: bool = False
    dropped: int = 0
    cwd: str | None = None
    seconds: float = 0.0


class BackgroundProcess(Protocol):
    """A process that goes on while the rollout does other things."""

    @property
    def id(self) -> str: ...
    @property
    def exit_code(self) -> int | None: ...
    def read(self) -> str:
        """Output since the last read, at most the sandbox's limit."""
        ...

    async def write(self, data: str) -> None: ...
    async def wait(self, timeout: float) -> int | None: ...
    async def kill(self) -> None: ...


class Sandbox(Protocol):
    """A workspace and the processes in it. Set up when first used, gone after `close` (may be called twice).

    Paths are as the task sees them: relative ones start at `root`, absolute ones must lie under it. A path
    that leaves the workspace, by `..` or by a link, raises `ToolRefusedError`.
    """

    @property
    def kind(self) -> str:
        """`bubblewrap`, `plain` or `docker`."""
        ...

    @property
    def root(self) -> str:
        """Where the workspace stands for the task's own commands."""
        ...

    @property
    def cwd(self) -> str:
        """The directory commands start in."""
        ...

    @property
    def setting_up(self) -> bool:
        """Whether the first use has begun what must be done before (a copy, a container), and it goes on.

        That has a deadline of its own. Who gives up a use meanwhile neither stops nor repeats it.
        """
        ...

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> CommandResult:
        """Run a shell line (a string) or a program (a sequence) to its end or its deadline, and clean up after it."""
        ...

    async def start(self, command: str | Sequence[str], *, cwd: str | None = None) -> BackgroundProcess:
        """Start a process in the background; it is killed with the sandbox."""
        ...

    async def read_bytes(self, path: str, *, limit: int | None = None) -> bytes: ...
    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, making its folders."""
        ...

    async def remove(self, path: str) -> None: ...
    async def list_files(self, path: str = ".", *, limit: int = 10_000) -> list[str]:
        """Files under `path`, relative to it, sorted."""
        ...

    async def close(self) -> None: ...


class SandboxFactory(Protocol):
    """Makes the sandbox of one rollout. No I/O until the sandbox is used."""

    def create(self, rollout_id: str, *, image: str | None = None, cwd: str | None = None) -> Sandbox: ...


__all__ = [
    "BackgroundProcess",
    "CommandResult",
    "Sandbox",
    "SandboxFactory",
    "SandboxLimits",
]
