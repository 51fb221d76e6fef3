"""The store against the plain thing it stands in for, in the same run: appending, resuming, and memory of a plan."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from taskmill.engine.recall import recall
from taskmill.store.commit import GroupCommit
from taskmill.store.files import AppendFile
from taskmill.store.jsonl import content_hash, encode_row
from taskmill.store.ledger import Ledger, PlannedRow
from taskmill.store.run import RunDirectory

ROWS = 8_000
IN_FLIGHT = 256
STORED = 8_000
TURNS = 8
SMALL, LARGE = 10_000, 1_000_000
ROUNDS = 5

APPEND_GOAL, RESUME_GOAL, MEMORY_GOAL, PLAN_GOAL = 0.7, 2.0, 1.3, 2.0


def sample_row(n: int) -> dict[str, Any]:
    """A row as a batch stores it, of a rollout with some turns: about 8 kB."""
    prompt = f"Question {n}: which of the files changed last?"
    key, detail = content_hash([prompt, None, None]), content_hash({"prompt": prompt})
    turn = [
        {"from": "gpt", "value": f"<think>\nLet me look.\n</think>\nI list them.\n{'word ' * 80}"},
        {"from": "tool", "value": "<tool_response>\n" + "a.txt 12 kB\n" * 40 + "</tool_response>"},
    ]
    return {
        "prompt_index": n,
        "conversations": [{"from": "human", "value": prompt}, *turn * TURNS],
        "metadata": {"batch_num": n // 100, "timestamp": "2026-01-01T00:00:00+00:00", "model": "m"},
        "completed": True,
        "partial": False,
        "api_calls": TURNS,
        "toolsets_used": ["terminal"],
        "tool_stats": {f"tool_{k}": {"count": 1, "success": 1, "failure": 0} for k in range(12)},
        "tool_error_counts": {f"tool_{k}": 0 for k in range(12)},
        "unknown_tools": "[]",
        "rollout_id": f"{detail.hex()}-0",
        "task_key": key.hex(),
        "task_detail": detail.hex(),
    }


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- appending --------------------------------------------------------------------------------------------------


def append_ratio(folder: Path) -> float:
    """Rows a second of many writers on a group commit, against a loop with the same writes and as many syncs."""
    row = encode_row(sample_row(1))
    syncs = 0
    datasync = AppendFile.datasync

    def counted(file: AppendFile) -> None:
        nonlocal syncs
        syncs += 1
        datasync(file)

    async def ours(path: Path) -> None:
        file = AppendFile(path)
        async with GroupCommit() as commit:

            async def writer() -> None:
                for _ in range(ROWS // IN_FLIGHT):
                    await commit.append(file, row)

            await asyncio.gather(*(writer() for _ in range(IN_FLIGHT)))
        file.close()

    def bare(path: Path, every: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        sync = getattr(os, "fdatasync", os.fsync)
        for n in range(ROWS // IN_FLIGHT * IN_FLIGHT):
            os.write(fd, row)
            if n % every == every - 1:
                sync(fd)
        os.close(fd)

    mine, plain = [], []
    AppendFile.datasync = counted  # type: ignore[method-assign]
    try:
        for n in range(ROUNDS):
            syncs = 0
            mine.append(seconds(partial(asyncio.run, ours(folder / f"ours_{n}"))))
            plain.append(seconds(partial(bare, folder / f"bare_{n}", max(1, ROWS // syncs))))
    finally:
        AppendFile.datasync = datasync  # type: ignore[method-assign]
    return min(plain) / min(mine)


# -- resuming ---------------------------------------------------------------------------------------------------


def resume_ratio(folder: Path) -> float:
    """Finding out what is done (scan, match, settle), against reading the same file and parsing each line."""
    path = folder / "resumed"
    rows = [sample_row(n) for n in range(STORED)]
    path.mkdir()
    with (path / "batch_0.jsonl").open("wb") as file:
        file.writelines(map(encode_row, rows))
    planned = [
        PlannedRow(n, 0, bytes.fromhex(row["task_key"]), bytes.fromhex(row["task_detail"]))
        for n, row in enumerate(rows)
    ]
    del rows

    def bare() -> None:
        with (path / "batch_0.jsonl").open("rb") as file:
            for line in file:
                orjson.loads(line)

    mine, plain = [], []
    for _ in range(ROUNDS):
        ledger = Ledger()
        ledger.plan(planned)
        mine.append(seconds(partial(asyncio.run, recall(RunDirectory(path), ledger))))
        plain.append(seconds(bare))
        assert ledger.counts()["completed"] == STORED
        ledger.close()
    return min(mine) / min(plain)


# -- memory -----------------------------------------------------------------------------------------------------


def peak_kib() -> int:
    """Peak memory of this process. Where the system says it, without what the process that started it had."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plan(rows: int) -> None:
    """Plan, settle and walk `rows` rows; prints peak memory in KiB and CPU seconds."""

    def planned() -> Any:
        for n in range(rows):
            text = str(n).encode().rjust(16)
            yield PlannedRow(n, n * 50, text, text)

    started = time.process_time()
    ledger = Ledger()
    ledger.plan(planned())
    ledger.settle()
    assert sum(1 for _ in ledger.pending()) == rows
    print(peak_kib(), time.process_time() - started)


def plan_ratios() -> tuple[float, float]:
    """Peak memory, and CPU time a row, of a plan of a million rows against one of ten thousand."""
    measured = []
    for rows in (SMALL, LARGE):
        command = [sys.executable, "-m", "benchmarks.store", str(rows)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peak, took = map(float, out.split())
        measured.append((peak, took / rows))
    (small_peak, small_time), (large_peak, large_time) = measured
    return large_peak / small_peak, large_time / small_time


def run() -> list[tuple[str, float, float | None]]:
    """Rows of the benchmark table: name, ratio, goal."""
    with tempfile.TemporaryDirectory() as folder:
        append, resume = append_ratio(Path(folder)), resume_ratio(Path(folder))
    memory, per_row = plan_ratios()
    return [
        ("appended rows a second / bare loop, same syncs (at least)", append, APPEND_GOAL),
        ("resume of stored rows / read and parse with orjson", resume, RESUME_GOAL),
        ("peak memory of a plan, of 1,000,000 rows / of 10,000", memory, MEMORY_GOAL),
        ("CPU time a planned row, at 1,000,000 / at 10,000", per_row, PLAN_GOAL),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan(int(sys.argv[1]))
    else:
        for name, value, goal in run():
            print(f"{name:<62}{value:>9.2f}  {goal:>7.2f}")
