"""Time of one `terminal` call, against a bare `asyncio.create_subprocess_exec` of the same command.

The bare process is started by the same bubblewrap arguments, one for each command, as a tool without a process of
its own inside would do it. Both are measured in turn, in one process, and medians are compared. A rollout of one
call pays for its workspace, the first process and the clearing away; a longer one pays for that once.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from taskmill.sandbox import bubblewrap, plain
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import open_sandboxes
from taskmill.sandbox.local import Confinement, place_for
from taskmill.tools import ToolContext
from taskmill.tools.terminal import terminal

COMMAND = "echo hello"
ROUNDS = 60
GOAL = 1.5


def bare(confinement: Confinement, directory: Path) -> Callable[[], Awaitable[None]]:
    """One process of the operating system's for each command."""
    place = place_for(directory, "bare")
    for folder in place:
        folder.mkdir(parents=True)
    command = [*confinement.argv(place), "/bin/bash", "-c", COMMAND]
    environment = confinement.environment(place)

    async def call() -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            cwd=place.workspace,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert output == b"hello\n", output

    return call


async def ask(context: ToolContext, calls: int) -> None:
    for _ in range(calls):
        result = await terminal.call({"command": COMMAND}, context)
        assert result.success
        assert '"hello\\n"' in result.content, result.content


async def in_turn(rounds: int, *subjects: Callable[[], Awaitable[None]]) -> list[float]:
    """Median seconds of each, taken in turn so that a busy machine slows them alike."""
    taken: list[list[float]] = [[] for _ in subjects]
    for _ in range(rounds):
        for subject, times in zip(subjects, taken, strict=True):
            started = time.perf_counter()
            await subject()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in taken]


async def compare(kind: str, directory: Path) -> list[tuple[str, float, float | None]]:
    confinement = bubblewrap.confinement(SandboxLimits()) if kind == "bubblewrap" else plain.confinement()
    factory = open_sandboxes(kind, directory=directory)
    context = ToolContext("warm", factory.create("warm"))
    await ask(context, 3)

    async def whole(calls: int) -> None:
        fresh = ToolContext("fresh", factory.create("fresh"))
        await ask(fresh, calls)
        await fresh.sandbox.close()

    once = bare(confinement, directory)
    plain_time, warm = await in_turn(ROUNDS, once, lambda: ask(context, 1))
    again, one, ten = await in_turn(ROUNDS // 4, once, lambda: whole(1), lambda: whole(10))
    await context.sandbox.close()
    return [
        (f"terminal call / bare process, {kind}", warm / plain_time, GOAL),
        (f"a rollout of 1 call, its set-up and end included, {kind}", one / again, None),
        (
            f"a rollout of 10 calls, per call, {kind}",
            ten / 10 / again,
            GOAL if kind == "bubblewrap" else None,
        ),
    ]


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    kinds = ["plain"] if bubblewrap.problem() else ["bubblewrap", "plain"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            rows += asyncio.run(compare(kind, Path(folder).resolve()))
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
