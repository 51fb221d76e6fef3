from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from taskmill.errors import StoreError
from taskmill.store.commit import GroupCommit, Sync
from taskmill.store.files import AppendFile
from taskmill.store.journal import CallJournal, JournalEntry


def everything(rollout_id: str) -> bool:
    return True


@asynccontextmanager
async def journal_in(
    folder: Path, live: Callable[[str], bool] = everything, sync: Sync = "group", **options: int
) -> AsyncIterator[CallJournal]:
    async with GroupCommit(sync) as commit:
        journal = CallJournal(folder, commit, **options)
        await journal.open(live)
        yield journal
    journal.close()


def completion(rollout_id: str, number: int, size: int = 10) -> bytes:
    return json.dumps({"of": f"{rollout_id}:{number}", "pad": "x" * size}).encode()


def record(journal: CallJournal, rollout_id: str, *numbers: int, size: int = 10, digest: str = "d") -> None:
    for number in numbers:
        journal.record(rollout_id, number, f"{digest}{number}", completion(rollout_id, number, size))


def calls(journal: CallJournal, rollout_id: str) -> list[str]:
    return [entry.digest for entry in journal.recall(rollout_id)]


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_calls_are_recalled_as_they_were_by_the_next_process(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        record(journal, "a", 0)
        record(journal, "b", 0, 1)
        record(journal, "a", 1)
        assert calls(journal, "a") == ["d0", "d1"]
    async with journal_in(tmp_path) as journal:
        assert journal.recall("a") == [JournalEntry(n, f"d{n}", completion("a", n)) for n in (0, 1)]
        assert calls(journal, "b") == ["d0", "d1"]
        assert calls(journal, "c") == []


async def test_recording_goes_on_after_reopening_across_segments(tmp_path: Path) -> None:
    for session in range(3):
        async with journal_in(tmp_path) as journal:
            assert calls(journal, "a") == [f"d{n}" for n in range(session * 2)]
            record(journal, "a", session * 2, session * 2 + 1)
    assert segments(tmp_path) == ["calls_000001.jsonl", "calls_000002.jsonl", "calls_000003.jsonl"]


async def test_calls_made_anew_replace_the_old_ones_and_what_followed_them(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        record(journal, "a", 0, 1, 2, 3)
        record(journal, "a", 1, digest="new")
        assert calls(journal, "a") == ["d0", "new1"]
    async with journal_in(tmp_path) as journal:
        assert calls(journal, "a") == ["d0", "new1"]
        record(journal, "a", 2, digest="new")
        assert calls(journal, "a") == ["d0", "new1", "new2"]


async def test_a_call_is_safe_from_a_kill_after_one_turn_of_the_loop(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        record(journal, "a", 0)
        await asyncio.sleep(0)
        async with journal_in(tmp_path) as other:  # what a process would find after a kill now
            assert calls(other, "a") == ["d0"]


async def test_segments_go_when_no_rollout_needs_them(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=2000) as journal:
        for n in range(20):
            record(journal, f"r{n}", 0, 1, size=500)
            if n != 3:
                journal.forget(f"r{n}")
        await journal._commit.flush()
        record(journal, "last", 0)
        journal.forget("last")
        # One segment for the rollout that is still wanted, one to write to, and one that ended meanwhile.
        assert len(segments(tmp_path)) <= 3
        assert calls(journal, "r3") == ["d0", "d1"]
        journal.forget("r3")
    assert segments(tmp_path) == []


async def test_rollouts_that_are_done_are_not_loaded_and_their_segments_dropped(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=100) as journal:
        record(journal, "done", 0, 1)
        record(journal, "wanted", 0)
    assert len(segments(tmp_path)) == 3
    async with journal_in(tmp_path, lambda rollout_id: rollout_id == "wanted") as journal:
        assert calls(journal, "done") == []
        assert calls(journal, "wanted") == ["d0"]
        assert segments(tmp_path) == ["calls_000003.jsonl"]
        record(journal, "wanted", 1)
    assert segments(tmp_path) == ["calls_000003.jsonl", "calls_000004.jsonl"]


async def test_a_torn_end_loses_the_torn_call_only(tmp_path: Path) -> None:
    async with journal_in(tmp_path, sync="none") as journal:
        record(journal, "a", 0, 1, 2)
    path = tmp_path / "calls_000001.jsonl"
    data = path.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(len(data) - 1):
        path.write_bytes(data[:cut])
        async with journal_in(tmp_path, sync="none") as journal:
            whole = sum(1 for line in data[:cut].splitlines(keepends=True) if line.endswith((b"}\n", b'"}}')))
            assert calls(journal, "a") == [f"d{n}" for n in range(whole)]
            if cut >= last:
                assert calls(journal, "a") == ["d0", "d1"]
            record(journal, "a", 9)
        async with journal_in(tmp_path, sync="none") as journal:
            assert calls(journal, "a") == [*(f"d{n}" for n in range(whole)), "d9"]
        (tmp_path / "calls_000002.jsonl").unlink()


async def test_a_gap_ends_what_is_recalled(tmp_path: Path) -> None:
    async with journal_in(tmp_path, segment_bytes=1) as journal:
        record(journal, "a", 0, 1, 2, 3)
    (tmp_path / "calls_000003.jsonl").write_bytes(b"\0" * 100 + b"\n{}\nnot json\n")
    async with journal_in(tmp_path) as journal:
        assert calls(journal, "a") == ["d0", "d1"]
        record(journal, "a", 2, digest="new")
    async with journal_in(tmp_path) as journal:
        assert calls(journal, "a") == ["d0", "d1", "new2"]


async def test_an_entry_that_vanished_meanwhile_is_an_error_that_says_where(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        record(journal, "a", 0)
        await asyncio.sleep(0)
        path = tmp_path / "calls_000001.jsonl"
        path.write_bytes(b"garbage\n")
        with pytest.raises(StoreError, match=r"calls_000001\.jsonl.*at byte 0"):
            journal.recall("a")
        journal.forget("a")


async def test_a_completion_must_be_one_line(tmp_path: Path) -> None:
    async with journal_in(tmp_path) as journal:
        with pytest.raises(ValueError, match="line breaks"):
            journal.record("a", 0, "d", b'{\n"a":1}')


async def test_memory_is_per_live_rollout_not_per_call(tmp_path: Path) -> None:
    async with GroupCommit("none") as commit:
        journal = CallJournal(tmp_path, commit)
        await journal.open(everything)
        record(journal, "long", *range(10))
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for n in range(2000):
            record(journal, "long", 10 + n, size=100)
            record(journal, f"short{n}", 0)
            await asyncio.sleep(0)
            journal.forget(f"short{n}")
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 20_000
        assert len(journal.recall("long")) == 2010
    journal.close()


async def test_the_journal_of_a_run_that_records_no_call_leaves_nothing(tmp_path: Path) -> None:
    async with journal_in(tmp_path / "journal"):
        pass
    assert not (tmp_path / "journal").exists()


async def test_a_segment_is_not_removed_under_a_pending_sync(tmp_path: Path) -> None:
    async with GroupCommit(max_delay=3600) as commit:
        journal = CallJournal(tmp_path, commit, segment_bytes=1)
        await journal.open(everything)
        first = journal.record("a", 0, "d", b"{}")
        journal.forget("a")
        second = journal.record("b", 0, "d", b"{}")
        journal.forget("b")
        await commit.flush()
        await first
        await second
    journal.close()
    assert segments(tmp_path) == []


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    AppendFile(tmp_path / "calls_x.jsonl").close()
    assert CallJournal(tmp_path, GroupCommit())._stored_segments() == []
