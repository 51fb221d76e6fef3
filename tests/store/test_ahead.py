"""Rows that are safe by a copy: one sync for a group in many logs, and nothing lost when the power goes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import StorageFullError
from taskmill.store import ahead, commit
from taskmill.store.files import AppendFile, remove, storage_error, sync_file
from taskmill.store.jsonl import encode_row
from taskmill.store.run import RunDirectory


class Machine:
    """A machine whose power can go: then of each log only what was synced is left, or zeros in its place."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.boots = 0
        self.synced: dict[Path, int] = {}
        self.syncs = 0
        datasync = AppendFile.datasync

        def noted(file: AppendFile) -> None:
            datasync(file)
            self.syncs += 1
            self.synced[file.path] = file.size

        def file_noted(path: Path) -> None:
            sync_file(path)
            if path.exists():
                self.synced[path] = path.stat().st_size

        def remove_noted(path: Path) -> None:
            remove(path)
            self.synced.pop(path, None)

        patch.setattr(ahead, "remove", remove_noted)
        patch.setattr(AppendFile, "datasync", noted)
        patch.setattr(ahead, "sync_file", file_noted)
        patch.setattr(ahead, "boot_id", lambda: f"boot {self.boots}")

    def lose_power(self, *, zeros: bool = False, kept: int = 0, reboot: bool = True) -> None:
        """`kept` bytes of what was not synced are still written, and `zeros` are what is left of the rest."""
        self.boots += reboot
        for path in self.path.rglob("*.jsonl"):
            size, safe = path.stat().st_size, self.synced.get(path, 0)
            with path.open("r+b") as file:
                file.truncate(min(size, safe + kept))
                if zeros:
                    file.truncate(size)

    def open(self, sync: commit.Sync = "group") -> tuple[RunDirectory, list[str]]:
        run = RunDirectory(self.path, sync=sync)
        opened = run.open_for_writing({}, resume=True)
        return run, [str(repair) for repair in opened.repairs]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "run", monkeypatch)


def row(n: int) -> bytes:
    return encode_row({"n": n, "text": "x" * 50})


def stored(run: RunDirectory) -> list[int]:
    return [json.loads(line)["n"] for number in run.shard_numbers() for _, line in run.read_shard(number)]


def kill(run: RunDirectory) -> None:
    """What a dead process does: nothing more, and its lock is free."""
    if run.commit._timer is not None:
        run.commit._timer.cancel()
    run.commit._jobs.put(None)  # its thread ends
    run._lock.release()


async def test_rows_in_many_logs_are_acknowledged_by_one_sync(machine: Machine) -> None:
    run, _ = machine.open()
    for group in range(3):
        await asyncio.gather(*(run.append_row(number, row(20 * group + number)) for number in range(20)))
        assert machine.syncs == group + 1
    await run.close()
    assert machine.syncs <= 3 + 20 + 1
    assert sorted(stored(run)) == list(range(60))
    assert list((machine.path / "journal").iterdir()) == []


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 90, 300])
async def test_acknowledged_rows_that_the_power_took_are_put_back(
    machine: Machine, zeros: bool, kept: int
) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(n % 3, row(n)) for n in range(12)))
    kill(run)
    machine.lose_power(zeros=zeros, kept=kept)
    again, said = machine.open()
    assert sorted(stored(again)) == list(range(12))
    if kept < 300:
        assert all("that a loss of power had taken" in line for line in said)
        assert len(said) == 3
    else:
        assert said == []
    await again.append_row(0, row(12))
    await again.close()
    assert sorted(stored(again)) == list(range(13))


async def test_what_was_put_back_survives_the_next_loss_of_power(machine: Machine) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(n % 3, row(n)) for n in range(12)))
    for kill_only in (False, True, False):
        kill(run)
        if not kill_only:
            machine.lose_power()
        run, _ = machine.open()
        assert sorted(stored(run)) == list(range(12))
    await run.close()


async def test_rows_that_a_kill_left_are_on_disk_before_their_copies_go(machine: Machine) -> None:
    run, _ = machine.open()
    await run.append_row(0, row(0))
    kill(run)
    run, said = machine.open()
    assert said == []
    assert list((machine.path / "journal").iterdir()) == []
    kill(run)
    machine.lose_power()
    run, _ = machine.open()
    assert stored(run) == [0]
    await run.close()


async def test_a_segment_that_is_full_goes_when_the_logs_are_synced_and_not_before(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = machine.open()
    run._ahead._segment_bytes = 500
    for n in range(40):
        await run.append_row(n % 4, row(n))
    segments = sorted((machine.path / "journal").iterdir())
    assert len(segments) <= 2
    kill(run)
    machine.lose_power()
    run, _ = machine.open()
    assert sorted(stored(run)) == list(range(40))
    await run.close()


async def test_a_batch_that_ends_is_synced_by_itself(machine: Machine) -> None:
    run, _ = machine.open()
    run._ahead._segment_bytes = 500
    await run.append_row(0, row(0))
    run.close_shard(0)
    for n in range(1, 12):
        await run.append_row(1, row(n))
    kill(run)
    machine.lose_power()
    run, _ = machine.open()
    assert sorted(stored(run)) == list(range(12))
    await run.close()


async def test_rows_that_somebody_removed_or_changed_stay_so(machine: Machine) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(n, row(n)) for n in range(4)))
    kill(run)
    changed = encode_row({"n": 100})
    (machine.path / "batch_0.jsonl").unlink()
    (machine.path / "batch_1.jsonl").write_bytes(changed)
    run, said = machine.open()
    assert (stored(run), said) == ([100, 2, 3], [])
    await run.append_row(2, row(4))
    kill(run)
    machine.lose_power(kept=500)
    (machine.path / "batch_2.jsonl").write_bytes(changed)
    run, said = machine.open()
    assert (stored(run), said) == ([100, 100, 3], [])
    await run.close()


async def test_a_run_whose_rows_are_all_in_copies_is_no_fresh_one(machine: Machine) -> None:
    run, _ = machine.open()
    await run.append_row(0, row(0))
    kill(run)
    machine.lose_power()
    (machine.path / "batch_0.jsonl").unlink()
    with pytest.raises(Exception, match="already has rows"):
        RunDirectory(machine.path).open_for_writing({}, resume=False)
    run, said = machine.open()
    assert stored(run) == [0]
    assert said[0].endswith("a row that a loss of power had taken was put back from the journal")
    await run.close()


async def test_copies_that_cannot_be_read_cost_only_what_was_not_acknowledged(machine: Machine) -> None:
    run, _ = machine.open()
    await run.append_row(0, row(0))
    kill(run)
    journal = machine.path / "journal"
    for name, data in {
        "rows_000007.jsonl": b"",
        "rows_000008.jsonl": b'{"boot":"',
        "rows_9.txt": b"no",
    }.items():
        (journal / name).write_bytes(data)
    with (journal / "rows_000001.jsonl").open("ab") as file:
        file.write(b'{"log":0,"offset":70,"row":{"n":1')
    machine.boots += 1
    run, said = machine.open()
    assert (stored(run), said) == ([0], [])
    assert [path.name for path in journal.iterdir()] == ["rows_9.txt"]
    await run.close()


@pytest.mark.parametrize("sync", ["each", "none"])
async def test_without_groups_there_are_no_copies(tmp_path: Path, sync: commit.Sync) -> None:
    run = RunDirectory(tmp_path, sync=sync)
    run.open_for_writing({}, resume=False)
    await run.append_row(0, row(0))
    assert not (tmp_path / "journal").exists()
    await run.close()


async def test_copies_stay_when_a_log_cannot_be_synced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(n, row(n)) for n in range(3)))
    datasync = AppendFile.datasync

    def fails(file: AppendFile) -> None:
        if file.path.name == "batch_1.jsonl":
            raise StorageFullError("the disk is broken")
        datasync(file)

    monkeypatch.setattr(AppendFile, "datasync", fails)
    run.close_shard(1)
    with pytest.raises(StorageFullError, match="broken"):
        await run.close()
    monkeypatch.setattr(AppendFile, "datasync", datasync)
    machine.lose_power()
    again, _ = machine.open()
    assert sorted(stored(again)) == [0, 1, 2]
    await again.close()


@pytest.mark.parametrize("before", ["none", "each"])
async def test_rows_without_copies_that_an_earlier_process_left_are_safe_before_the_next_is(
    machine: Machine, before: commit.Sync
) -> None:
    run, _ = machine.open(before)
    run.append_row(0, row(0))
    kill(run)
    run, _ = machine.open()
    await run.append_row(0, row(1))
    kill(run)
    machine.synced = {path: size for path, size in machine.synced.items() if size}
    machine.lose_power()
    run, _ = machine.open()
    assert stored(run) == [0, 1]
    await run.close()


@pytest.mark.parametrize("zeros", [False, True])
async def test_what_a_failed_sync_dropped_is_put_back_though_the_machine_ran_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, zeros: bool
) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(n % 3, row(n)) for n in range(6)))
    datasync = AppendFile.datasync

    def fails(file: AppendFile) -> None:
        if file.path.name == "batch_1.jsonl":
            raise storage_error(file.path, OSError(5, "Input/output error"), "synced to disk")
        datasync(file)

    monkeypatch.setattr(AppendFile, "datasync", fails)
    run.close_shard(1)
    with pytest.raises(StorageFullError, match="Input/output error"):
        await run.close()
    monkeypatch.setattr(AppendFile, "datasync", datasync)
    machine.lose_power(zeros=zeros, reboot=False)
    run, said = machine.open()
    assert sorted(stored(run)) == list(range(6))
    assert len(said) == 1
    assert "2 rows" in said[0]
    await run.close()
    assert list((machine.path / "journal").iterdir()) == []


async def test_no_row_is_put_back_behind_zeros(machine: Machine) -> None:
    run, _ = machine.open()
    run.commit._max_delay = 3600.0
    run._ahead._segment_bytes = 250
    run.append_row(0, row(0))
    await run.commit.flush()
    for n in (1, 2, 3):
        run.append_row(0, row(n))
    kill(run)
    *_, newest = sorted((machine.path / "journal").iterdir())
    machine.synced[newest] = newest.stat().st_size  # the system wrote it of its own accord
    machine.lose_power(zeros=True)
    run, said = machine.open()
    assert stored(run) == [0]
    assert b"\0" not in (machine.path / "batch_0.jsonl").read_bytes()
    assert ["put back" in said[0], "torn" in said[1]] == [True, True]
    await run.close()


async def test_what_follows_a_change_is_not_put_back(machine: Machine) -> None:
    run, _ = machine.open()
    await asyncio.gather(*(run.append_row(0, row(n)) for n in range(4)))
    kill(run)
    log = machine.path / "batch_0.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
    machine.boots += 1
    run, said = machine.open()
    assert (stored(run), said) == ([1, 2, 3], [])
    await run.close()


async def test_where_no_copy_can_be_made_there_is_no_row(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = machine.open()

    def refuse(path: Path) -> None:
        raise storage_error(path, OSError(13, "Permission denied"), "made")

    monkeypatch.setattr(ahead, "make_directory", refuse)
    with pytest.raises(StorageFullError, match="journal' could not be made: Permission denied"):
        run.append_row(0, row(0))
    monkeypatch.undo()
    assert stored(run) == []
    await run.append_row(0, row(0))
    await run.close()
    assert stored(run) == [0]


async def test_a_copy_that_cannot_be_removed_harms_nobody(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = machine.open()
    run.journal.record("r", 0, "d", b"{}")
    await run.append_row(0, row(0))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(ahead, "remove", refuse)
    await run.close()
    with pytest.raises(StorageFullError, match="journal' could not be put in order: Permission denied"):
        machine.open()
    monkeypatch.undo()
    run = RunDirectory(machine.path)
    run.open_for_writing({}, resume=True)
    assert stored(run) == [0]
    await run.close()


def test_each_start_of_the_machine_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ahead.boot_id() == ahead.boot_id() != ""

    def no_such_file(path: Path) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_such_file)
    assert ahead.boot_id() == ahead.boot_id() != ""
