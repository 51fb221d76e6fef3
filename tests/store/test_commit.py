from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskmill.errors import StorageFullError
from taskmill.store.commit import GroupCommit
from taskmill.store.files import AppendFile

NEVER = 3600.0


class Disk:
    """Stands in for the sync call of the system: counts, holds, fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs: list[int] = []
        self.error: OSError | None = None
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        monkeypatch.setattr("taskmill.store.files._datasync", self._sync)

    def _sync(self, fd: int) -> None:
        self.entered.set()
        assert self.open.wait(30)
        self.syncs.append(fd)
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.open.set()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AppendFile]:
    file = AppendFile(tmp_path / "log.jsonl")
    yield file
    file.close()


async def test_a_row_is_in_the_file_before_append_returns(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit(max_delay=NEVER) as commit:
        future = commit.append(log, b"1\n")
        assert log.path.read_bytes() == b"1\n"
        assert not future.done()
        assert disk.syncs == []
    assert future.done()
    assert len(disk.syncs) == 1


async def test_rows_that_come_together_share_one_sync(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit(max_delay=0.01) as commit:
        await asyncio.gather(*(commit.append(log, b"%d\n" % n) for n in range(20)))
        assert len(disk.syncs) == 1


async def test_a_full_group_does_not_wait_for_the_clock(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit(max_delay=NEVER, max_rows=4) as commit:
        await asyncio.gather(*(commit.append(log, b"x\n") for _ in range(4)))
        assert len(disk.syncs) == 1
        await asyncio.gather(*(commit.append(log, b"x\n") for _ in range(9)))
        assert len(disk.syncs) <= 4


async def test_rows_written_while_a_sync_runs_are_not_acknowledged_by_it(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit("each") as commit:
        disk.open.clear()
        first = commit.append(log, b"1\n")
        await asyncio.to_thread(disk.entered.wait, 30)
        second = commit.append(log, b"2\n")
        disk.open.set()
        await first
        assert not second.done()
        await second
        assert len(disk.syncs) == 2


async def test_without_syncs_rows_are_acknowledged_when_written(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit("none") as commit:
        future = commit.append(log, b"1\n")
        assert future.done()
    assert disk.syncs == []
    assert log.path.read_bytes() == b"1\n"


async def test_small_records_fill_no_group_and_are_synced_with_the_next_row(
    log: AppendFile, disk: Disk
) -> None:
    async with GroupCommit(max_delay=NEVER, max_rows=2) as commit:
        small = [commit.append_soon(log, b"small\n") for _ in range(5)]
        commit.append(log, b"row\n")
        commit.write_now()
        assert not any(future.done() for future in small)
        await commit.append(log, b"row\n")
        assert all(future.done() for future in small)
    assert len(disk.syncs) == 1


async def test_one_sync_of_the_folder_serves_all_new_files(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    monkeypatch.setattr("taskmill.store.files.sync_directory", folders.append)
    async with GroupCommit(max_delay=NEVER) as commit:
        files = [AppendFile(tmp_path / str(n)) for n in range(3)]
        for file in files:
            commit.append(file, b"x\n")
        await commit.flush()
        assert folders == [tmp_path]
        commit.append(files[0], b"x\n")
        await commit.flush()
        assert folders == [tmp_path]
    for file in files:
        file.close()


async def test_a_folder_that_cannot_be_synced_acknowledges_nothing(
    log: AppendFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("taskmill.store.files.sync_directory", broken)
    commit = GroupCommit(max_delay=NEVER)
    future = commit.append(log, b"x\n")
    with pytest.raises(StorageFullError, match="Input/output error"):
        await commit.flush()
    assert isinstance(future.exception(), StorageFullError)
    with pytest.raises(StorageFullError):
        await commit.close()


async def test_all_dirty_files_are_synced_once(tmp_path: Path, disk: Disk) -> None:
    files = [AppendFile(tmp_path / str(n)) for n in range(3)]
    async with GroupCommit(max_delay=NEVER) as commit:
        for file in files * 5:
            commit.append(file, b"x\n")
        await commit.flush()
        assert len(disk.syncs) == 3
        await commit.flush()
        assert len(disk.syncs) == 3
    for file in files:
        file.close()


async def test_small_records_are_written_in_one_piece_by_the_end_of_the_turn(
    log: AppendFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    write = AppendFile.write
    monkeypatch.setattr(AppendFile, "write", lambda file, data: (writes.append(data), write(file, data))[1])
    async with GroupCommit(max_delay=NEVER) as commit:
        futures = [commit.append_soon(log, b"%d\n" % n) for n in range(3)]
        assert writes == []
        await asyncio.sleep(0)
        assert writes == [b"0\n1\n2\n"]
        futures.append(commit.append_soon(log, b"3\n"))
        commit.write_now()
        assert log.path.read_bytes() == b"0\n1\n2\n3\n"
        assert not any(future.done() for future in futures)
        futures.append(commit.append_soon(log, b"4\n"))
        commit.close_file(log)
        await commit.flush()
        assert log.path.read_bytes() == b"0\n1\n2\n3\n4\n"
        assert all(future.done() for future in futures)


async def test_a_small_record_that_cannot_be_written_says_so(
    log: AppendFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = GroupCommit(max_delay=NEVER)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        future = commit.append_soon(log, b"1\n")
        with pytest.raises(StorageFullError, match="No space left"):
            await future
    with pytest.raises(StorageFullError):
        commit.append_soon(log, b"2\n")
    with pytest.raises(StorageFullError):
        await commit.close()


async def test_a_cancelled_waiter_leaves_a_whole_row_and_disturbs_nobody(log: AppendFile, disk: Disk) -> None:
    async def save(row: bytes) -> None:
        await commit.append(log, row)

    async with GroupCommit(max_delay=NEVER) as commit:
        tasks = [asyncio.ensure_future(save(b"%d\n" % n)) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        await commit.flush()
        await asyncio.gather(tasks[0], tasks[2])
    assert tasks[1].cancelled()
    assert log.path.read_bytes() == b"0\n1\n2\n"


async def test_a_file_closed_while_dirty_is_synced_first(log: AppendFile, disk: Disk) -> None:
    async with GroupCommit(max_delay=NEVER) as commit:
        future = commit.append(log, b"1\n")
        commit.close_file(log)
        assert not log.closed
        await commit.flush()
        assert future.done()
        assert log.closed
        other = AppendFile(log.path)
        commit.close_file(other)
        assert other.closed


async def test_a_failed_sync_fails_its_rows_and_stops_the_run(log: AppendFile, disk: Disk) -> None:
    commit = GroupCommit(max_delay=NEVER)
    await commit.flush()
    future = commit.append(log, b"1\n")
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(StorageFullError, match=r"log\.jsonl.*synced to disk: Input/output error"):
        await commit.flush()
    with pytest.raises(StorageFullError):
        await future
    disk.error = None
    with pytest.raises(StorageFullError, match="Input/output"):
        commit.append(log, b"2\n")
    assert commit.failed is not None
    with pytest.raises(StorageFullError):
        await commit.flush()
    with pytest.raises(StorageFullError):
        await commit.close()
    await commit.close()


async def test_a_failed_write_leaves_the_rows_before_it_acknowledged(
    log: AppendFile, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = GroupCommit(max_delay=NEVER)
    future = commit.append(log, b"1\n")

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(StorageFullError, match="No space left"):
            commit.append(log, b"2\n")
    with pytest.raises(StorageFullError):
        commit.append(log, b"3\n")
    with pytest.raises(StorageFullError):
        await commit.close()
    assert future.done()
    assert future.exception() is None
    assert log.path.read_bytes() == b"1\n"


async def test_small_records_of_the_turn_in_which_a_row_finds_the_disk_full_are_written_where_they_fit(
    log: AppendFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = GroupCommit(max_delay=NEVER)
    calls = AppendFile(tmp_path / "calls.jsonl")
    write = os.write

    def nearly_full(fd: int, data: bytes) -> int:
        if len(data) > 100:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("os.write", nearly_full)
    small = commit.append_soon(calls, b"1\n")
    with pytest.raises(StorageFullError, match="No space left"):
        commit.append(log, b"x" * 200 + b"\n")
    with pytest.raises(StorageFullError):
        commit.append_soon(calls, b"2\n")
    with pytest.raises(StorageFullError):
        await commit.close()
    assert (small.done(), small.exception()) == (True, None)
    assert (log.path.read_bytes(), calls.path.read_bytes()) == (b"", b"1\n")
    calls.close()


async def test_nobody_is_told_of_an_error_that_nobody_waited_for(log: AppendFile, disk: Disk) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    commit = GroupCommit(max_delay=NEVER)
    disk.error = OSError(5, "Input/output error")
    commit.append(log, b"1\n")
    with pytest.raises(StorageFullError):
        await commit.close()
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


async def test_closing_under_cancellation_still_syncs(log: AppendFile, disk: Disk) -> None:
    commit = GroupCommit(max_delay=NEVER)
    future = commit.append(log, b"1\n")
    disk.open.clear()
    closing = asyncio.ensure_future(commit.close())
    await asyncio.to_thread(disk.entered.wait, 30)
    late = commit.append(log, b"2\n")
    closing.cancel()
    disk.open.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert future.done()
    assert late.done()
    assert len(disk.syncs) >= 2
    await commit.close()


async def test_an_error_of_the_body_is_not_hidden_by_one_of_the_end(log: AppendFile, disk: Disk) -> None:
    disk.error = OSError(5, "Input/output error")

    async def body() -> None:
        async with GroupCommit(max_delay=NEVER) as commit:
            commit.append(log, b"1\n")
            raise KeyError

    with pytest.raises(KeyError):
        await body()


async def test_no_thread_is_left(log: AppendFile) -> None:
    async with GroupCommit("each") as commit:
        await commit.append(log, b"1\n")
        assert any(thread.name == "taskmill-sync" for thread in threading.enumerate())
    await commit.close()
    assert not any(thread.name == "taskmill-sync" for thread in threading.enumerate())
