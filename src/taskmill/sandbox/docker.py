"""A container for a row that names an image, through docker's command line.

The container's own file system is the row's: `root` is the working directory the row names in it, or else
`/workspace`, where the rollout's folder is mounted. Each command is one `docker exec`; the client's end says
nothing about what it started inside, so that is killed by its mark.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from taskmill.errors import SandboxError, ToolRefusedError
from taskmill.sandbox.base import CommandResult, SandboxLimits
from taskmill.sandbox.host import MARK, ProcessHost
from taskmill.sandbox.local import LocalProcess, Place, check_timeout, clear
from taskmill.sandbox.output import Output
from taskmill.sandbox.setup import SetUp
from taskmill.sandbox.threads import in_thread

WORKSPACE = "/workspace"
LABEL = "taskmill"

START_TIMEOUT = 900.0
"""Seconds `docker run` may take; the image may have to be pulled."""

KILL_TIMEOUT = 10.0
"""Seconds the killing of a command in its container may take before the container is killed."""

COMMAND_TIMEOUT = 60.0
"""Seconds one of docker's own commands, or reading and writing a file, may take."""

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}\Z")
_TROUBLE = ("Error response from daemon:", "OCI runtime exec failed:", "Cannot connect to the Docker daemon")

_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
# Descriptor 9 keeps the way out when the command sends its own output elsewhere; sh has one-digit numbers only.
_REPORT = """exec 9>&1; trap 'printf "\\n%s%s\\n" {token} "$(pwd -P)" >&9' EXIT; """

_KILL = """
for again in 1 2 3; do
  found=
  for process in /proc/[0-9]*; do
    if tr '\\0' '\\n' 2>/dev/null <"$process/environ" | grep -qxF "$1"; then
      kill -9 "${process#/proc/}" 2>/dev/null && found=1
    fi
  done
  [ -n "$found" ] || break
done
"""

_EMPTY = 'cd "$1" && rm -rf -- * .[!.]* ..?*'

_RESOLVE = """
root=$(readlink -f -- "$1") || exit 44
file=$(readlink -f -- "$2") || exit 44
case "$file" in "$root" | "${root%/}"/*) ;; *) exit 43 ;; esac
"""
_READ = _RESOLVE + '[ -e "$file" ] || exit 44; [ -d "$file" ] && exit 45; [ -f "$file" ] || exit 46\n'
_WRITE = (
    'mkdir -p -- "$(dirname -- "$2")" || exit 47\n'
    + _RESOLVE
    + '[ -d "$file" ] && exit 45; if [ -e "$file" ] && [ ! -f "$file" ]; then exit 46; fi\n'
    + 'exec cat >"$file"'
)
_REMOVE = """
root=$(readlink -f -- "$1") || exit 44
folder=$(readlink -f -- "$(dirname -- "$2")") || exit 44
case "$folder" in "$root" | "${root%/}"/*) ;; *) exit 43 ;; esac
file="$folder/$(basename -- "$2")"
[ -e "$file" ] || [ -L "$file" ] || exit 44
exec rm -rf -- "$file"
"""
_LIST = (
    _RESOLVE
    + '[ -e "$file" ] || exit 44; [ -d "$file" ] || exit 48; cd "$file" || exit 44\n'
    + 'find . -type f -o -type l 2>/dev/null | sed "s|^\\./||" | sort | head -n "$3"'
)


class DockerSandbox:
    """See `taskmill.sandbox.base.Sandbox`. The container is made when first used, and removed by `close`."""

    def __init__(
        self,
        image: str,
        place: Place,
        limits: SandboxLimits,
        *,
        tag: str,
        mark: str,
        cwd: str | None = None,
    ) -> None:
        # What comes from a row must not be taken for an option of docker's.
        if not _IMAGE.match(image):
            raise SandboxError(f"{image!r} can't be the name of a container image")
        inside = posixpath.normpath(cwd) if cwd else ""
        if inside == ".." or inside.startswith("../") or (cwd and "\0" in cwd):
            raise SandboxError(
                f"the row's working directory {cwd!r} leaves the workspace; name a folder in it"
            )
        self._image = image
        self._place = place
        self._limits = limits
        self._tag = tag
        self._mark = mark
        self._root = inside if inside.startswith("/") else WORKSPACE
        self._start = posixpath.join(WORKSPACE, inside) if inside else WORKSPACE
        self._name = f"taskmill-{mark.replace('.', '-')}"
        self._lock = asyncio.Lock()
        self._host: ProcessHost | None = None
        self._failed: SandboxError | None = None
        self._set_up = SetUp(self._make, START_TIMEOUT + 2 * COMMAND_TIMEOUT)
        self._closed = False
        self._serial = 0
        self._background: list[LocalProcess] = []

    @property
    def kind(self) -> str:
        """`docker`."""
        return "docker"

    @property
    def root(self) -> str:
        """The row's directory in the container."""
        return self._root

    @property
    def cwd(self) -> str:
        """The directory commands start in."""
        return self._start

    @property
    def setting_up(self) -> bool:
        """Whether the image is being pulled or the container started."""
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
        """Run a shell line (a string) or a program (a sequence) in the container."""
        check_timeout(timeout)
        host = await self._ready()
        output = Output(self._limits.output)
        token = secrets.token_hex(12)
        id, line = self._exec_line(command, cwd, env or {}, token=token, input=stdin is not None)
        started = time.monotonic()
        try:
            ended, timed_out = await host.run(
                line, cwd=str(self._place.base), timeout=timeout, output=output, stdin=stdin
            )
        except asyncio.CancelledError:
            await self._kill(host, id)
            raise
        if timed_out:
            await self._kill(host, id)
        where = output.cut(f"\n{token}".encode())
        text, dropped = output.text()
        if where is None and not timed_out and ended.exit_code and text.startswith(_TROUBLE):
            raise SandboxError(f"container {self._name!r}: {text.strip()[:1000]}")
        return CommandResult(
            output=text,
            exit_code=ended.exit_code,
            timed_out=timed_out,
            dropped=dropped,
            cwd=where,
            seconds=time.monotonic() - started,
        )

    async def start(self, command: str | Sequence[str], *, cwd: str | None = None) -> LocalProcess:
        """Start a process in the background; it is killed with the container."""
        host = await self._ready()
        id, line = self._exec_line(command, cwd, {}, token=None, input=True)
        call = host.launch(
            line,
            cwd=str(self._place.base),
            output=Output(self._limits.output),
            foreground=False,
            keep_stdin=True,
        )
        process = LocalProcess(
            f"p{len(self._background) + 1}", host, call, self._limits, on_kill=lambda: self._kill(host, id)
        )
        self._background.append(process)
        return process

    def _exec_line(
        self,
        command: str | Sequence[str],
        cwd: str | None,
        env: Mapping[str, str],
        *,
        token: str | None,
        input: bool,
    ) -> tuple[str, list[str]]:
        self._serial += 1
        id = f"{self._mark}.c{self._serial}"
        line = ["docker", "exec", *(["-i"] if input else []), "-w", self._directory(cwd)]
        for name, value in {"LANG": "C.UTF-8", "TERM": "dumb", **env, MARK: id}.items():
            line += ["-e", f"{name}={value}"]
        line.append(self._name)
        if isinstance(command, str):
            report = _REPORT.format(token=token) if token else ""
            return id, [*line, "sh", "-c", _SHELL, "sh", report + command]
        return id, [*line, *command]

    def _directory(self, cwd: str | None) -> str:
        if cwd is None:
            return self._start
        return cwd if cwd.startswith("/") else posixpath.join(self._root, cwd)

    async def _kill(self, host: ProcessHost, id: str) -> None:
        """Kill what a command started in the container; the container itself when that can't be done."""
        try:
            line = ("exec", self._name, "sh", "-c", _KILL, "sh", f"{MARK}={id}")
            code, _ = await self._docker(host, *line, timeout=KILL_TIMEOUT)
            if code == 0:
                return
        except SandboxError:
            pass
        self._failed = SandboxError(f"container {self._name!r} did not answer and was killed")
        with suppress(SandboxError):
            await self._docker(host, "kill", self._name, timeout=KILL_TIMEOUT)

    # -- files ------------------------------------------------------------------------------------------------

    async def read_bytes(self, path: str, *, limit: int | None = None) -> bytes:
        """The bytes of a regular file under `root`."""
        last = f'exec head -c {limit} -- "$file"' if limit is not None else 'exec cat -- "$file"'
        return await self._file(_READ + last, path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file under `root`, making its folders."""
        await self._file(_WRITE, path, stdin=data)

    async def remove(self, path: str) -> None:
        """Remove a file or a folder under `root`."""
        if self._inside(path) == self._root:
            raise ToolRefusedError(f"{path!r} is the workspace itself, which can't be removed")
        await self._file(_REMOVE, path)

    async def list_files(self, path: str = ".", *, limit: int = 10_000) -> list[str]:
        """Files under `path`, relative to it, sorted."""
        found = await self._file(_LIST, path, str(limit))
        return sorted(found.decode("utf-8", "surrogateescape").splitlines())

    async def _file(self, script: str, path: str, *more: str, stdin: bytes | None = None) -> bytes:
        host = await self._ready()
        inside = self._inside(path)
        options = ["-i"] if stdin is not None else []
        code, said = await self._docker(
            host,
            *(
                "exec",
                *options,
                self._name,
                "sh",
                "-c",
                f"exec 2>/dev/null\n{script}",
                "sh",
                self._root,
                inside,
                *more,
            ),
            stdin=stdin,
        )
        if code == 0:
            return said
        if code == 43:
            raise ToolRefusedError(f"{path!r} is outside the workspace {self._root!r}")
        if code == 44:
            raise FileNotFoundError(2, "No such file or directory", path)
        if code == 45:
            raise IsADirectoryError(21, "Is a directory", path)
        if code == 46:
            raise ToolRefusedError(f"{path!r} is not a regular file")
        if code == 48:
            raise NotADirectoryError(20, "Not a directory", path)
        reason = said.decode("utf-8", "replace").strip()[:500] or f"exit code {code}"
        raise SandboxError(f"{path!r} in container {self._name!r}: {reason}")

    def _inside(self, path: str) -> str:
        if "\0" in path:
            raise ToolRefusedError(f"{path!r} can't be the name of a file")
        inside = posixpath.normpath(posixpath.join(self._root, path))
        if inside != self._root and not inside.startswith(self._root.rstrip("/") + "/"):
            raise ToolRefusedError(f"{path!r} is outside the workspace {self._root!r}")
        return inside

    # -- coming and going -------------------------------------------------------------------------------------

    async def _ready(self) -> ProcessHost:
        if not self._closed:
            await self._set_up.done()
        async with self._lock:
            if self._host is not None and not self._host.alive:
                await self._host.close()
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._failed is not None:
                raise self._failed
            if self._host is None or not self._host.alive:
                self._host = self._client()
            return self._host

    def _prepare(self) -> None:
        if shutil.which("docker") is None:
            raise SandboxError(
                f"image {self._image!r} needs docker, and there is no program 'docker' on PATH: install it, "
                "or leave the image out of the row"
            )
        try:
            below = posixpath.relpath(self._start, WORKSPACE) if self._root == WORKSPACE else "."
            (self._place.workspace / below).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(
                f"the workspace {str(self._place.workspace)!r} could not be made: {error}"
            ) from error

    async def _make(self) -> None:
        """Whatever it fails of (no such image, no rights, no daemon), the row meets it again: never retried."""
        self._prepare()
        host = self._host = self._client()
        code, said = await self._docker(host, *self._run_line(), timeout=START_TIMEOUT)
        if code == 0:
            check = ("exec", self._name, "sh", "-c", '[ -d "$1" ]', "sh", self._start)
            code, said = await self._docker(host, *check)
            if code == 1 and not said:
                said = f"there is no directory {self._start!r} in it".encode()
        if code != 0:
            reason = said.decode("utf-8", "replace").strip()[-1000:] or f"docker ended with code {code}"
            raise SandboxError(f"no container could be made of image {self._image!r}: {reason}")

    def _client(self) -> ProcessHost:
        """Runs docker's command line, with the user's own environment: contexts and log-ins are named there."""
        return ProcessHost(
            [],
            namespace=False,
            environment=dict(os.environ),
            limits=SandboxLimits(memory=None, file_size=None, processes=None),
            mark=self._mark,
        )

    def _run_line(self) -> list[str]:
        limits = self._limits
        line = ["run", "-d", "--init", "--name", self._name, "--label", f"{LABEL}={self._tag}"]
        line += ["--network", "bridge" if limits.network else "none"]
        line += ["--security-opt", "no-new-privileges", "--ulimit", "core=0"]
        if limits.memory is not None:
            line += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory)]
        if limits.processes is not None:
            line += ["--pids-limit", str(limits.processes)]
        if limits.file_size is not None:
            line += ["--ulimit", f"fsize={limits.file_size}"]
        line += ["-v", f"{self._place.workspace}:{WORKSPACE}"]
        return [*line, "--entrypoint", "sleep", self._image, "infinity"]

    async def _docker(
        self, host: ProcessHost, *arguments: str, timeout: float = COMMAND_TIMEOUT, stdin: bytes | None = None
    ) -> tuple[int, bytes]:
        """One of docker's commands: its exit code and what it said. Raises `SandboxError` when it hangs."""
        output = Output(1 << 30)
        ended, timed_out = await host.run(
            ["docker", *arguments], cwd=str(self._place.base), timeout=timeout, output=output, stdin=stdin
        )
        if timed_out:
            raise SandboxError(f"'docker {arguments[0]}' did not end within {timeout:g} seconds")
        return ended.exit_code, output.take()

    async def close(self) -> None:
        """Remove the container and the workspace. May be called twice."""
        if self._closed and self._host is None:
            return
        self._closed = True
        try:
            await self._set_up.stop()
            host, self._host = self._host, None
            if host is not None:
                if not host.alive:
                    await host.close()
                    host = self._client()
                try:
                    with suppress(SandboxError):
                        if os.getuid() != 0:
                            # What the container's root made in the workspace, only it can delete.
                            await self._docker(host, "exec", self._name, "sh", "-c", _EMPTY, "sh", WORKSPACE)
                    with suppress(SandboxError):
                        await self._docker(host, "rm", "-f", "-v", self._name)
                finally:
                    await host.close()
                    for process in self._background:
                        process.closed()
        finally:
            if self._set_up.begun:
                await in_thread(clear, self._place)


def remove_containers(tag: str) -> int:
    """Remove the containers of a killed run, and give their number. Nothing where there is no docker."""
    docker = shutil.which("docker")
    if docker is None:
        return 0
    try:
        found = subprocess.run(
            [docker, "ps", "-aq", "--filter", f"label={LABEL}={tag}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT,
            check=True,
        ).stdout.split()
        if found:
            command = [docker, "rm", "-f", "-v", *map(os.fsdecode, found)]
            subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return 0  # no daemon: then nothing of ours runs either
    return len(found)


__all__ = ["DockerSandbox", "remove_containers"]
