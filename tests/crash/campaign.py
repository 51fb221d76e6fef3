"""Kills real runs, batches and tasksets, at random moments until enough kills are done, and checks what is left.

What must hold after the last resume: every row (or rollout) is stored exactly once; nothing that was acknowledged
before a kill is missing; no model call whose answer the journal had acknowledged was made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taskmill.testing.endpoint import FakeEndpoint, Step, answer, call, refusal

ROWS = 30
COPIES = 3
TURNS = 3
ROLLOUTS = 3
PATIENCE = 12
LONGEST = 60.0
"""Seconds one child may take: far more than it needs, so that a hang is an error and not a wait."""


@dataclass
class Result:
    """What a campaign came to."""

    runs: int = 0
    kills: int = 0
    torn: int = 0
    calls: int = 0
    acknowledged_calls: int = 0
    acknowledged_rows: int = 0
    faults: list[str] = field(default_factory=list)


class Endpoint:
    """So many turns for each prompt, every answer with a mark of its own; some prompts fail for a while.

    `kill`, where there is one, is called at the `kill_at`-th request of a child.
    """

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.kill: Callable[[], None] | None = None
        self.kill_at = 0
        self.asked: Counter[str] = Counter()
        self.forbidden: set[str] = set()
        self.faults: list[str] = []
        self.refusing = True

    def __call__(self, body: dict[str, Any]) -> Step:
        messages = body["messages"]
        prompt = next(m["content"] for m in messages if m["role"] == "user")
        turn = sum(m["role"] == "assistant" for m in messages)
        # Rollouts of one task ask the same, and are told apart by the seed each samples with.
        name = prompt.replace(" ", "-") + (f"-{body['seed']}" if "seed" in body else "")
        mark = f"{name}-turn{turn}"
        self.asked[mark] += 1
        self.kill_at -= 1
        if self.kill_at == 0 and self.kill is not None:
            self.kill()
        if mark in self.forbidden and not prompt.startswith("copy"):
            self.faults.append(f"{mark} was asked for again after its answer was acknowledged")
        if prompt.startswith("flaky") and turn == 1 and self.refusing:
            return refusal(400, "not today")
        latency = self.dice.uniform(0, 0.012)
        reasoning = None if prompt.startswith("plain") else "thinking"
        if turn < TURNS - 1:
            return answer(
                "", calls=[call("add", {"a": 1, "b": 2}, id=mark)], reasoning=reasoning, latency=latency
            )
        return answer(mark, reasoning=reasoning, latency=latency)


def prompts() -> list[str]:
    kinds = ["row", "row", "plain", "flaky"]
    return [f"{kinds[i % len(kinds)]} {i}" for i in range(ROWS)] + ["copy"] * COPIES


class Batches:
    """Batches of prompts: what is asked, what should be stored, and what is."""

    prompts: Sequence[str] = prompts()

    def job(self, dice: random.Random) -> dict[str, Any]:
        """What changes from run to run."""
        return {"kind": "batch", "distribution": "none"}

    def expected(self) -> dict[str, int]:
        """How the rows end, by state."""
        plain = sum(prompt.startswith("plain") for prompt in self.prompts)
        return {"completed": len(self.prompts) - plain, "discarded": plain}

    def stored(self, directory: Path) -> list[int]:
        """Numbers of the rows that are recorded as done."""
        found = [row for path in sorted((directory / "crash").glob("batch_*.jsonl")) for row in _rows(path)]
        found += [row for row in _rows(directory / "crash" / "outcomes.jsonl") if row["state"] == "discarded"]
        return [row["prompt_index"] for row in found]

    def sums(self, directory: Path) -> tuple[dict[str, int], int, int]:
        """Outcomes and calls as the run itself adds them up, and the rows of its result."""
        statistics = json.loads((directory / "crash" / "statistics.json").read_text())
        merged = (directory / "crash" / "trajectories.jsonl").read_bytes().splitlines()
        return statistics["outcomes"], statistics["api_calls"], len(merged)


class Tasksets:
    """Runs of tasksets: endless ones, shuffled ones, and ones whose rollouts are scored as groups."""

    prompts: Sequence[str] = [
        prompt
        for prompt in (*(f"{('row', 'flaky')[i % 5 == 3]} {i}" for i in range(10)), "copy", "copy")
        for _ in range(ROLLOUTS)
    ]

    def job(self, dice: random.Random) -> dict[str, Any]:
        """See `Batches`."""
        return {"kind": dice.choice(["endless", "shuffled", "grouped"]), "rollouts": ROLLOUTS}

    def expected(self) -> dict[str, int]:
        """See `Batches`."""
        return {"completed": len(self.prompts)}

    def stored(self, directory: Path) -> list[int]:
        """See `Batches`."""
        return [
            row["task"]["idx"] * ROLLOUTS + row.get("number", 0)
            for path in directory.glob("crash--*/traces.jsonl")
            for row in _rows(path)
            if row["state"] == "completed"
        ]

    def sums(self, directory: Path) -> tuple[dict[str, int], int, int]:
        """See `Batches`."""
        (path,) = directory.glob("crash--*/summary.json")
        summary = json.loads(path.read_text())
        return summary["outcomes"], summary["calls"], len(_rows(path.with_name("traces.jsonl")))


Kind = Batches | Tasksets


async def campaign(directory: Path, *, kills: int, seed: int, kind: Kind | None = None) -> Result:
    """Run after run under `directory`, each killed until it gets through, until `kills` kills are done."""
    kind = kind or Batches()
    result = Result()
    dice = random.Random(seed)
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    zygote = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("zygote.py")),
        str(writing),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=[writing],
    )
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        while result.kills < kills and not result.faults:
            result.runs += 1
            await _one_run(kind, zygote, reading, directory / f"run{result.runs}", dice, result, kills)
    finally:
        os.close(reading)
        assert zygote.stdin is not None
        zygote.stdin.close()
        await asyncio.wait_for(zygote.wait(), LONGEST)
    return result


async def _one_run(
    kind: Kind,
    zygote: asyncio.subprocess.Process,
    report: int,
    directory: Path,
    dice: random.Random,
    result: Result,
    kills: int,
) -> None:
    directory.mkdir(parents=True)
    dataset = directory / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in kind.prompts))
    script = Endpoint(dice)
    rows: set[int] = set()
    acknowledged = 0
    fixed = kind.job(dice)
    # A run that is always killed would never end: after so many children one may run through.
    patience = PATIENCE
    async with FakeEndpoint(script) as endpoint:
        while True:
            killing = patience > 0 and result.kills < kills
            script.refusing = killing and patience > PATIENCE // 2
            job = {
                **fixed,
                "dataset": str(dataset),
                "directory": str(directory),
                "base_url": endpoint.url,
                "batch_size": dice.choice([1, 4, 7]),
                "workers": dice.choice([1, 3, 8]),
                "sync": dice.choice(["each", "group"]),
                "die_at": dice.randint(1, 90) if killing and dice.random() < 0.5 else 0,
                "torn": dice.random(),
            }
            left = max(1, TURNS * len(kind.prompts) - len(script.asked))
            script.kill_at = dice.randint(1, min(left, 40)) if killing and not job["die_at"] else 0
            status = await _one_child(zygote, job, script, dice.choice([0.0, dice.uniform(0, 0.02)]))
            said = _drain(report)
            finished = ["finished"] in said
            for line in said:
                if line[0] == "call":
                    script.forbidden.add(line[1])
                    acknowledged += 1
                elif line[0] == "row" and line[2] != "failed":
                    rows.add(line[1])
                    result.acknowledged_rows += 1
                elif line[0] == "error":
                    result.faults.append(f"a child ended with {line[1]}")
            patience -= 1
            if os.WIFSIGNALED(status):
                result.kills += 1
                result.torn += bool(job["die_at"])
                result.faults += _missing(kind, directory, rows)
            if result.faults or (finished and not killing):
                break
        result.calls += sum(script.asked.values())
        result.acknowledged_calls += acknowledged
        result.faults += script.faults
    if not result.faults:
        result.faults += _check(kind, directory, script, rows, acknowledged)


async def _one_child(
    zygote: asyncio.subprocess.Process, job: dict[str, Any], script: Endpoint, delay: float
) -> int:
    """One child to its end, which it meets `delay` seconds after the request it is to be killed at."""
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write((json.dumps(job) + "\n").encode())
    pid = json.loads(await zygote.stdout.readline())["pid"]

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    loop = asyncio.get_running_loop()
    script.kill = kill if not delay else lambda: loop.call_later(delay, kill)
    try:
        ended = json.loads(await asyncio.wait_for(zygote.stdout.readline(), LONGEST))
    finally:
        script.kill = None
    return int(ended["status"])


def _drain(report: int) -> list[list[Any]]:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(report, 1 << 16):
            data += chunk
    return [json.loads(line) for line in data.splitlines() if line.endswith(b"]")]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a log, which may not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if _is_json(line)]


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _missing(kind: Kind, directory: Path, rows: set[int]) -> list[str]:
    return [
        f"row {index} was acknowledged and is missing" for index in sorted(rows - {*kind.stored(directory)})
    ]


def _check(kind: Kind, directory: Path, script: Endpoint, rows: set[int], acknowledged: int) -> list[str]:
    stored = Counter(kind.stored(directory))
    faults = [f"row {index} is stored {count} times" for index, count in stored.items() if count != 1]
    faults += [f"row {index} is missing" for index in range(len(kind.prompts)) if index not in stored]
    faults += _missing(kind, directory, rows)
    outcomes, billed, results = kind.sums(directory)
    expected = kind.expected()
    if {state: count for state, count in outcomes.items() if count} != expected:
        faults.append(f"outcomes are {outcomes}, not {expected}")
    if results != expected["completed"]:
        faults.append(f"the result has {results} rows, not {expected['completed']}")
    # Each call whose answer was acknowledged is in the bill, and none that was not asked for. (Between them are
    # calls that a kill took before their answer was written.)
    if not acknowledged <= billed <= sum(script.asked.values()):
        faults.append(
            f"the bill has {billed} calls; {acknowledged} were acknowledged, "
            f"{sum(script.asked.values())} asked for"
        )
    return faults
