"""Crashes at any byte: nothing acknowledged is ever missing, and every row ends up stored exactly once."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from taskmill.errors import RunLockedError
from taskmill.records import DONE_STATES
from taskmill.store import ahead
from taskmill.store.files import AppendFile, sync_file
from taskmill.store.jsonl import encode_row
from taskmill.store.ledger import Ledger, PlannedRow
from taskmill.store.run import RunDirectory

T = TypeVar("T")
BATCH = 3
CONFIG = {"seed": 7}


def h(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


class Call(NamedTuple):
    """A recorded call: the one it followed, and the file and byte where its entry ends."""

    digest: str
    follows: str | None
    name: str
    end: int


class Places(NamedTuple):
    """Where a row stands: file and end in its log, and of its copy that is synced instead, while there is one."""

    log: tuple[str, int]
    copy: tuple[str, int] | None = None


def conversation(calls: list[Call]) -> list[str]:
    """Digests of the calls that count: the latest whose predecessors are all there, and those predecessors."""
    there: dict[str, list[str]] = {}
    latest: list[str] = []
    for call in calls:
        if call.follows is None or call.follows in there:
            latest = there[call.digest] = [*there.get(call.follows or "", []), call.digest]
    return latest


def stored_line(row: PlannedRow, state: str, text: str) -> bytes:
    return encode_row(
        {"id": row.rollout_id, "key": row.key.hex(), "detail": row.detail.hex(), "state": state, "text": text}
    )


def recall(run: RunDirectory, ledger: Ledger) -> Counter[str]:
    """Tell the ledger what is stored, as a resume does; gives how often each done rollout is stored."""
    stored: Counter[str] = Counter()
    for rows in [*map(run.read_shard, run.shard_numbers()), run.read_outcomes()]:
        for _, line in rows:
            row = json.loads(line)
            ledger.store(bytes.fromhex(row["key"]), bytes.fromhex(row["detail"]), row["id"], row["state"])
            if row["state"] in DONE_STATES:
                stored[row["id"]] += 1
    ledger.settle()
    return stored


class CrashingRun(RuleBasedStateMachine):
    """A run that records rows and calls, is flushed, closed, killed, and cut off anywhere; and started again."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.generation = 0
        self.run_directory: RunDirectory | None = None
        self.old: list[RunDirectory] = []
        self.planned: list[str] = []
        self.safe: dict[str, int] = {}
        """Bytes of each file that are known to be on disk."""
        self.done: dict[str, Places] = {}
        """Where the row of each done rollout is."""
        self.calls: dict[str, list[Call]] = {}
        self.given_up: set[str] = set()
        """Rollouts that a start found done: their calls may be gone, and stay so if damage undoes the row."""
        self.acknowledged: list[tuple[str, asyncio.Future[None]]] = []
        self.perhaps: set[str] = set()
        """Rollouts whose row was not acknowledged and may be put back from its copy, or not."""
        self.serial = 0
        self.boots = 0
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ahead, "boot_id", lambda: f"boot {self.boots}")
        self.watch_syncs()

    def watch_syncs(self) -> None:
        """Note what is on disk for good, as it gets there."""
        datasync = AppendFile.datasync

        def datasync_noted(file: AppendFile) -> None:
            datasync(file)
            self.note_synced(file.path, file.size)

        def sync_noted(path: Path) -> None:
            sync_file(path)
            if path.exists():
                self.note_synced(path, path.stat().st_size)

        self.patch.setattr(AppendFile, "datasync", datasync_noted)
        self.patch.setattr(ahead, "sync_file", sync_noted)

    def note_synced(self, path: Path, size: int) -> None:
        if path.is_relative_to(self.path):
            self.safe[str(path.relative_to(self.path))] = size

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what needs a running loop, and write what it holds back until the end of the turn."""

        async def turn() -> T:
            result = function(*arguments)
            self.run_now.commit.write_now()
            return result

        return self.wait(turn())

    @property
    def path(self) -> Path:
        return self.folder / str(self.generation)

    @initialize(prompts=st.lists(st.sampled_from("ABC"), min_size=1, max_size=20))
    def plan(self, prompts: list[str]) -> None:
        self.planned = prompts
        self.start()

    # -- a process --------------------------------------------------------------------------------------------

    def start(self) -> None:
        run = RunDirectory(self.path)
        run.commit._max_delay = 3600.0  # rows are synced when a rule says so
        run._ahead._segment_bytes = 1500
        run.open_for_writing(CONFIG, resume=True)
        self.acknowledged = []
        self.safe = {
            name: min(size, self.end_of(name)) for name, size in self.safe.items() if self.exists(name)
        }
        self.ledger = Ledger()
        self.ledger.plan(PlannedRow(n, 0, h(text), h(text)) for n, text in enumerate(self.planned))
        stored = recall(run, self.ledger)
        self.wait(run.journal.open(self.ledger.is_pending))
        self.run_directory = run
        must = set(self.done) - self.perhaps
        assert must <= set(stored) <= set(self.done), (
            "what was acknowledged is there, and nothing that was not"
        )
        self.done = {key: Places(places.log) for key, places in self.done.items() if key in stored}
        self.perhaps = set()
        assert set(stored.values()) <= {1}, "no rollout is stored twice"
        assert self.ledger.done_count == len(self.done)
        self.given_up |= set(self.done)
        for rollout_id, calls in self.calls.items():
            recalled = [entry.digest for entry in self.call(run.journal.recall, rollout_id)]
            if rollout_id in self.done:
                assert recalled == []
            elif rollout_id not in self.given_up:
                assert recalled == conversation(calls)

    @property
    def run_now(self) -> RunDirectory:
        assert self.run_directory is not None
        return self.run_directory

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def end_of(self, name: str) -> int:
        return (self.path / name).stat().st_size

    @rule(data=st.data(), text=st.sampled_from(["", "é😀", "x" * 300, '"\\\0\u2028']))
    def finish_a_row(self, data: st.DataObject, text: str) -> None:
        pending = list(self.ledger.pending())
        if not pending:
            return
        row = data.draw(st.sampled_from(pending))
        state = data.draw(st.sampled_from(["completed", "partial", "discarded", "failed", "cancelled"]))
        line = stored_line(row, state, text)
        if state in ("completed", "partial"):
            name = f"batch_{row.index // BATCH}.jsonl"
            future = self.call(self.run_now.append_row, row.index // BATCH, line)
            segment = self.newest("rows")
            places = Places((name, self.end_of(name)), (segment, self.end_of(segment)))
        else:
            name = "outcomes.jsonl"
            future = self.call(self.run_now.append_outcome, line)
            places = Places((name, self.end_of(name)))
        self.ledger.mark(row.index, state)
        if state in DONE_STATES:
            self.done[row.rollout_id] = places
            self.acknowledged.append((row.rollout_id, asyncio.ensure_future(future, loop=self.loop)))

    @rule(data=st.data(), again=st.integers(0, 2))
    def record_a_call(self, data: st.DataObject, again: int) -> None:
        wanted = [row.rollout_id for row in self.ledger.pending() if row.rollout_id not in self.given_up]
        if not wanted:
            return
        rollout_id = data.draw(st.sampled_from(wanted))
        calls = self.calls.setdefault(rollout_id, [])
        before = conversation(calls)
        number = max(0, len(before) - again)  # the rollout may go another way from an earlier call on
        self.serial += 1
        digest = f"d{self.serial}"
        self.call(self.run_now.journal.record, rollout_id, number, digest, b'{"text":"\xc3\xa9"}')
        name = self.newest("calls")
        calls.append(Call(digest, before[number - 1] if number else None, name, self.end_of(name)))

    def newest(self, kind: str) -> str:
        return max(str(path.relative_to(self.path)) for path in (self.path / "journal").glob(f"{kind}_*"))

    @rule(close=st.booleans())
    def sync(self, close: bool) -> None:
        if close:
            self.call(self.run_now.close_shard, 0)
        self.wait(self.run_now.commit.flush())

    @rule()
    def stop(self) -> None:
        self.wait(self.run_now.close())
        self.run_directory = None
        assert not list(self.path.rglob("rows_*")), "what is synced needs no copy"
        self.start()

    # -- crashes ----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """What a crash leaves behind is a copy of the files; the process that was has no say any more."""
        shutil.copytree(self.path, self.folder / str(self.generation + 1))
        if self.run_directory is not None:
            self.old.append(self.run_directory)
            self.run_directory = None
        self.generation += 1

    @rule()
    def kill(self) -> None:
        self.leave()
        self.start()

    @rule(data=st.data(), rows=st.integers(0, 3), synced=st.booleans())
    def lose_power(self, data: st.DataObject, rows: int, synced: bool) -> None:
        """Of what was not synced, any part may be gone, in each file another."""
        for _ in range(rows):
            self.finish_a_row(data, "last")
        if synced:
            self.wait(self.run_now.commit.flush())
        self.leave()
        self.boots += 1
        for path in sorted(self.path.rglob("*.jsonl")):
            name = str(path.relative_to(self.path))
            self.cut(name, data.draw(st.integers(self.safe.get(name, 0), path.stat().st_size), label=name))
        self.forget_lost_rows(copies=True)
        acknowledged = {rollout_id for rollout_id, future in self.acknowledged if future.done()}
        assert acknowledged <= set(self.done)
        self.perhaps = {
            key
            for key, places in self.done.items()
            if key not in acknowledged and not self.is_there(*places.log)
        }
        self.start()

    @precondition(lambda self: any(self.path.rglob("*.jsonl")))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """One file is cut off anywhere at all."""
        self.leave()
        names = sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*.jsonl"))
        name = data.draw(st.sampled_from(names))
        self.cut(name, data.draw(st.integers(0, self.end_of(name)), label=name))
        self.forget_lost_rows(copies=False)
        self.start()

    def cut(self, name: str, size: int) -> None:
        with (self.path / name).open("r+b") as file:
            file.truncate(size)
        self.safe[name] = min(self.safe.get(name, 0), size)
        self.calls = {
            rollout_id: [call for call in calls if call.name != name or self.is_there(name, call.end)]
            for rollout_id, calls in self.calls.items()
        }

    def is_there(self, name: str, end: int) -> bool:
        # A row that lacks nothing but its newline is still whole.
        return self.exists(name) and end - 1 <= self.end_of(name)

    def forget_lost_rows(self, copies: bool) -> None:
        """Take rows that are not there any more for not done; `copies` says whether a copy of a row is as good."""
        self.done = {
            key: places
            for key, places in self.done.items()
            if self.is_there(*places.log) or (copies and places.copy and self.is_there(*places.copy))
        }

    def teardown(self) -> None:
        try:
            if self.run_directory is not None:
                self.complete()
        finally:
            if self.run_directory is not None:
                self.old.append(self.run_directory)
            for run in self.old:
                self.wait(run.close())
            self.loop.close()
            self.patch.undo()
            shutil.rmtree(self.folder)

    def complete(self) -> None:
        """However it went: one more start finishes the run, and each planned row is stored exactly once."""
        for row in self.ledger.pending():
            self.call(self.run_now.append_row, row.index // BATCH, stored_line(row, "completed", ""))
            self.run_now.journal.forget(row.rollout_id)
        self.wait(self.run_now.close())
        self.run_directory = None
        ledger = Ledger()
        ledger.plan(PlannedRow(n, 0, h(text), h(text)) for n, text in enumerate(self.planned))
        stored = recall(RunDirectory(self.path), ledger)
        assert sorted(stored.elements()) == sorted(
            f"{h(text).hex()}-{copy}"
            for text, count in Counter(self.planned).items()
            for copy in range(count)
        )
        assert list(ledger.pending()) == []


TestCrashingRun = CrashingRun.TestCase
TestCrashingRun.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


# -- real processes ---------------------------------------------------------------------------------------------

WRITER = """
    import asyncio, sys
    from pathlib import Path
    from taskmill.store.jsonl import encode_row
    from taskmill.store.run import RunDirectory

    async def main():
        run = RunDirectory(Path(sys.argv[1]))
        run.open_for_writing({"seed": 7}, resume=True)
        done = {line for k in run.shard_numbers() for _, line in run.read_shard(k)}
        n = len(done)

        async def save(n):
            await run.append_row(n % 5, encode_row({"n": n, "text": "x" * (n % 700)}))
            print(n, flush=True)

        while True:
            await asyncio.gather(*(save(k) for k in range(n, n + 8)))
            n += 8

    asyncio.run(main())
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
    )


def test_killed_again_and_again_a_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    acknowledged: set[int] = set()
    for _ in range(3):
        writer = start_writer(tmp_path)
        assert writer.stdout is not None
        for _ in range(20):
            acknowledged.add(int(writer.stdout.readline()))
        writer.send_signal(signal.SIGKILL)
        acknowledged.update(int(line) for line in writer.stdout.read().split("\n")[:-1])
        writer.wait()
        run = RunDirectory(tmp_path)
        run.open_for_writing(CONFIG, resume=True)
        run._lock.release()
        stored = Counter(json.loads(line)["n"] for k in run.shard_numbers() for _, line in run.read_shard(k))
        assert acknowledged <= set(stored)
        assert set(stored.values()) == {1}


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        with pytest.raises(RunLockedError, match=f"process {writer.pid} on host"):
            RunDirectory(tmp_path).open_for_writing(CONFIG, resume=True)
        second = start_writer(tmp_path)
        assert second.wait(60) == 1
        assert second.stdout is not None
        assert second.stdout.read() == ""
        writer.stdout.readline()
    finally:
        writer.kill()
        writer.communicate()
    for path in tmp_path.glob("batch_*.jsonl"):
        *rows, _ = path.read_bytes().split(b"\n")
        assert all(json.loads(row)["n"] >= 0 for row in rows)
