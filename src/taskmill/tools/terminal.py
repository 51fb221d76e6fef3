"""A shell in the rollout's sandbox, and what it leaves running in the background."""

from __future__ import annotations

import posixpath
from typing import Any, Literal

import msgspec

from taskmill.errors import ToolArgumentsError, ToolError, ToolRefusedError
from taskmill.sandbox.base import BackgroundProcess
from taskmill.tools.base import ToolContext
from taskmill.tools.function import tool

LONGEST_COMMAND = 600.0
"""Seconds a command in the foreground may take at most."""

SHOWN = 45_000
"""Characters of an answer, its JSON included; kept under what the tool box would cut to pieces."""

MOST_PROCESSES = 32
LOG = 64 * 1024


class Background:
    """A background process and what was already read of it."""

    def __init__(self, process: BackgroundProcess, command: str) -> None:
        self.process = process
        self.command = command
        self.log = ""

    def read(self) -> str:
        """What it said since the last read."""
        text = self.process.read()
        self.log = (self.log + text)[-LOG:]
        return text

    def summary(self) -> dict[str, Any]:
        """What it is and how it is doing."""
        code = self.process.exit_code
        return {
            "process_id": self.process.id,
            "command": self.command if len(self.command) <= 200 else self.command[:200] + "…",
            "status": "running" if code is None else "ended",
            "exit_code": code,
        }


class Shell:
    """What a rollout's terminal remembers from one call to the next."""

    def __init__(self) -> None:
        self.cwd: str | None = None
        self.processes: dict[str, Background] = {}


def shell_of(context: ToolContext) -> Shell:
    """The terminal of this rollout."""
    shell: Shell = context.state.setdefault("terminal", Shell())
    return shell


@tool(exclusive=True, timeout=LONGEST_COMMAND + 60)
async def terminal(
    command: str,
    timeout: float = 180,
    background: bool = False,
    workdir: str | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Run a shell command in the workspace and get its output and exit code.

    The working directory is kept between calls; variables are not. Standard input is empty. What a command
    leaves running with `&` is killed when the command ends: use `background` for a server or a long build, and
    the `process` tool to look after it.

    Args:
        command: The command line, or several lines.
        timeout: Seconds after which the command is killed, at most 600.
        background: Start it and return at once with a process_id.
        workdir: Directory for this command alone; a relative one starts at the working directory.
    """
    if not command.strip():
        raise ToolArgumentsError("command is blank")
    if not 0 < timeout <= LONGEST_COMMAND:
        raise ToolArgumentsError(
            f"timeout must be over 0 and at most {LONGEST_COMMAND:g} seconds, not {timeout!r}; "
            "start what takes longer with background=true"
        )
    shell = shell_of(context)
    sandbox = context.sandbox
    cwd = shell.cwd or sandbox.cwd
    if workdir is not None:
        cwd = posixpath.join(cwd, workdir)
    if background:
        if len(shell.processes) >= MOST_PROCESSES:
            _forget_ended(shell)
        if len(shell.processes) >= MOST_PROCESSES:
            raise ToolRefusedError(f"{MOST_PROCESSES} background processes run already; kill one first")
        started = Background(await sandbox.start(command, cwd=cwd), command)
        shell.processes[started.process.id] = started
        return {"output": "", "exit_code": None, "process_id": started.process.id, "error": None}
    try:
        result = await sandbox.run(command, timeout=timeout, cwd=cwd)
    except ToolError as error:
        if workdir is None and shell.cwd is not None:
            shell.cwd = None  # it was removed; without this no call would work any more
            raise ToolError(f"{error}; the working directory is {sandbox.cwd!r} again") from error
        raise
    if result.cwd is not None and workdir is None:
        shell.cwd = result.cwd
    return fitting(
        result.output,
        {
            "exit_code": result.exit_code,
            "error": f"timed out after {timeout:g} s and was killed" if result.timed_out else None,
        },
    )


@tool(exclusive=True, timeout=LONGEST_COMMAND + 60)
async def process(
    action: Literal["list", "poll", "log", "wait", "write", "kill"],
    process_id: str | None = None,
    data: str = "",
    timeout: float = 60,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Look after processes started by `terminal` with background=true.

    list: all of them. poll: status and new output. log: the last output, read before or not. wait: until it ends
    or the timeout passes, then as poll. write: send data to its standard input. kill: end it and all it started.

    Args:
        action: What to do.
        process_id: Which process; not needed for list.
        data: Text to write; end it with a newline where the process reads lines.
        timeout: Seconds to wait at most, up to 600.
    """
    shell = shell_of(context)
    if action == "list":
        return {"processes": [entry.summary() for entry in shell.processes.values()], "error": None}
    if process_id not in shell.processes:
        known = ", ".join(shell.processes) or "none was started"
        raise ToolRefusedError(f"there is no process {process_id!r}; there is: {known}")
    entry = shell.processes[process_id]
    if action == "write":
        await entry.process.write(data)
        return {**entry.summary(), "error": None}
    if action == "wait":
        if not 0 <= timeout <= LONGEST_COMMAND:
            raise ToolArgumentsError(
                f"timeout must be at least 0 and at most {LONGEST_COMMAND:g} s, not {timeout!r}"
            )
        await entry.process.wait(timeout)
    elif action == "kill":
        await entry.process.kill()
    output = entry.read()
    if action == "log":
        output = entry.log
    return fitting(output, {**entry.summary(), "error": None})


def _forget_ended(shell: Shell) -> None:
    shell.processes = {id: entry for id, entry in shell.processes.items() if entry.process.exit_code is None}


def fitting(output: str, rest: dict[str, Any]) -> dict[str, Any]:
    """An answer with as much of `output` as fits, its head and its tail, so that what a model reads is whole JSON."""
    room = SHOWN - len(msgspec.json.encode(rest))
    text, kept = output, min(len(output), room)
    # What JSON escapes takes more room than it has characters: take less until it fits.
    while len(msgspec.json.encode(text).decode()) > room:
        head, tail = output[: kept // 2], output[len(output) - kept // 2 :]
        text = f"{head}\n[... {len(output) - len(head) - len(tail):,} characters left out ...]\n{tail}"
        kept = int(kept * 0.8)
    return {"output": text, **rest}
