"""A run of conversations that is killed at any moment: each is there once, and no call is paid for twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer

KILLS = 50
JOBS, CALLS_EACH = 12, 2
LONGEST = 60.0


class Script:
    """Counts what it is asked, and can kill whoever asks."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.kept: set[str] = set()
        """Answers that are on disk: nobody may ask for them again."""
        self.faults: list[str] = []
        self.kill_at = 0
        self.kill: Any = None

    def __call__(self, body: Any) -> Any:
        self.asked[json.dumps([body["messages"], body["seed"]])] += 1
        if self.kill_at:
            self.kill_at -= 1
            if not self.kill_at and self.kill is not None:
                self.kill()
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        text = f"{body['seed']} of {len(body['messages'])}"
        if text in self.kept:
            self.faults.append(f"asked again for {text!r}")
        return answer(text, usage=usage)


def kept_answers(directory: Path) -> set[str]:
    """What the journal and the rows hold."""
    found = {message["content"] for row in rows_of(directory) for message in row["transcript"]}
    for path in (directory / "journal").glob("*.jsonl"):
        for line in path.read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError):
                found.add(json.loads(line)["completion"]["message"]["content"])
    return found


def rows_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "conversations.jsonl"
    found = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [row for row in found if row["state"] == "completed"]


async def one_child(zygote: asyncio.subprocess.Process, job: Any, script: Script) -> int:
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write((json.dumps(job) + "\n").encode())
    pid = json.loads(await asyncio.wait_for(zygote.stdout.readline(), LONGEST))["pid"]

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    script.kill = kill
    ended = json.loads(await asyncio.wait_for(zygote.stdout.readline(), LONGEST))
    script.kill = None
    return int(ended["status"])


async def test_a_run_killed_at_any_moment_loses_nothing_and_has_each_conversation_once(
    tmp_path: Path,
) -> None:
    dice = random.Random(77)
    kills = torn = 0
    wanted: dict[str, Any] | None = None
    zygote = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.conversations.zygote",
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        number = 0
        while kills < KILLS:
            number += 1
            script, directory, patience = Script(), tmp_path / f"run{number}", 8
            recorded: dict[str, Any] = {}
            async with FakeEndpoint(script) as endpoint:
                while True:
                    killing = kills < KILLS and patience > 0 and wanted is not None
                    patience -= 1
                    by_write = killing and dice.random() < 0.5
                    left = max(1, JOBS * CALLS_EACH - len(script.asked))
                    script.kill_at = dice.randint(1, left) if killing and not by_write else 0
                    job = {
                        "directory": str(directory),
                        "base_url": endpoint.url,
                        "batched": dice.random() < 0.7,
                        "sync": dice.choice(["each", "group"]),
                        "die_at": dice.randint(1, 60) if by_write else 0,
                        "torn": dice.random(),
                    }
                    status = await one_child(zygote, job, script)
                    there = {row["job_id"]: row["transcript"] for row in rows_of(directory)}
                    assert recorded.keys() <= there.keys(), "a recorded conversation is gone"
                    recorded = there
                    script.kept = kept_answers(directory)
                    assert script.faults == []
                    if os.WIFSIGNALED(status):
                        kills += 1
                        torn += by_write
                    else:
                        assert status == 0
                        break
            jobs = [row["job_id"] for row in rows_of(directory)]
            assert sorted(jobs) == sorted(set(jobs))
            assert len(jobs) == JOBS
            said = {
                row["job_id"]: [message["content"] for message in row["transcript"]]
                for row in rows_of(directory)
            }
            wanted = wanted or said
            assert said == wanted, "a kill changed what was said"
            assert len(script.asked) == JOBS * CALLS_EACH
            billed = sum(row.get("billed_calls", 0) for row in rows_of(directory))
            assert billed >= JOBS * CALLS_EACH * 2
    finally:
        assert zygote.stdin is not None
        zygote.stdin.close()
        await asyncio.wait_for(zygote.wait(), LONGEST)
    assert kills >= KILLS
    assert torn > KILLS // 10
