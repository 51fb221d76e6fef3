"""A run on disk: ids, acknowledgement, syncs, and disks that are full, read-only or gone."""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import taskmill
from taskmill.errors import StorageFullError, StoreError
from taskmill.models.base import Request
from taskmill.store import files
from tests.batch.mill import Mill, answering, prompt_of, prompts_of, read_lines, says
from tests.batch.test_files import patched


async def test_the_id_of_a_rollout_depends_on_its_content_and_repeat_and_not_on_its_place(mill: Mill) -> None:
    mill.prompts("a", "b", {"prompt": "a", "id": 1}, "a")
    first = {row["rollout_id"]: prompts_of([row])[0] for row in (await mill.run(run_name="run")).rows}
    shutil.rmtree(mill.stored.path)
    mill.prompts("new", "a", "a", {"id": 1, "prompt": "a"}, "b")
    second = {row["rollout_id"]: prompts_of([row])[0] for row in (await mill.run()).rows}

    assert len(first) == 4
    assert first.items() <= second.items()


async def test_a_row_is_shown_as_done_only_after_it_is_on_disk(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts(*[str(number) for number in range(40)])
    on_disk: set[int] = set()
    real = files.AppendFile.datasync

    def datasync(self: Any) -> None:
        size = self.path.stat().st_size
        real(self)
        if self.path.name.startswith("batch_"):
            for line in self.path.read_bytes()[:size].splitlines():
                on_disk.add(json.loads(line)["prompt_index"])

    early: list[int] = []

    def listen(event: Any) -> None:
        if event["event"] == "recorded" and event["prompt_index"] not in on_disk:
            early.append(event["prompt_index"])

    monkeypatch.setattr(files.AppendFile, "datasync", datasync)
    await mill.run(on_event=listen, batch_size=4, num_workers=10)

    assert early == []
    assert len(on_disk) == 40


def count_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shards that were synced, one for each time."""
    synced: list[str] = []
    real = files.AppendFile.datasync

    def datasync(self: Any) -> None:
        if self.path.name.startswith("batch_"):
            synced.append(self.path.name)
        real(self)

    monkeypatch.setattr(files.AppendFile, "datasync", datasync)
    return synced


async def test_with_sync_each_no_row_waits_for_another(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model answers a row once the one before it is acknowledged; with groups that would take seconds."""
    synced = count_syncs(monkeypatch)
    mill.prompts(*[str(number) for number in range(20)])
    acknowledged = asyncio.Event()
    acknowledged.set()

    async def script(request: Request) -> Any:
        await acknowledged.wait()
        acknowledged.clear()
        return says()

    def listen(event: Any) -> None:
        if event["event"] == "recorded":
            acknowledged.set()

    await mill.run(answering(script), sync="each", batch_size=20, on_event=listen)

    assert len(synced) == 20


@pytest.mark.parametrize(("sync", "most"), [("group", 4), ("none", 0)])
async def test_rows_are_synced_in_groups_or_not_at_all(
    mill: Mill, sync: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = count_syncs(monkeypatch)
    mill.prompts(*[str(number) for number in range(100)])

    stored = await mill.run(sync=sync, batch_size=100)

    assert len(synced) <= most
    assert len(mill.told("recorded")) == len(stored.rows) == 100


async def test_when_the_disk_is_full_the_run_stops_and_what_was_acknowledged_is_intact(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for some bytes of the twelfth row."""
    mill.prompts(*[f"{number:02}" for number in range(40)])
    written = 0

    def write(fd: int, data: Any) -> int:
        nonlocal written
        if bytes(data[:20]).startswith(b'{"prompt_index"') or written < 0:
            written += 1
            if written > 11 or written < 0:
                written = -1000
                os.write(fd, bytes(data)[:100])
                raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)

    monkeypatch.setattr(files, "os", patched(os, write=write))
    model = answering()
    with pytest.raises(StorageFullError) as full:
        await mill.run(model, batch_size=10, num_workers=2, sync="each")
    monkeypatch.undo()

    assert str(mill.stored.path / "batch_") in str(full.value)
    assert "bytes" in str(full.value) or "free" in str(full.value)
    assert model.calls < 16
    acknowledged = {event["prompt_index"] for event in mill.told("recorded")}
    stored = [row for path in mill.stored.path.glob("batch_*.jsonl") for row in read_lines(path)]
    assert acknowledged <= {row["prompt_index"] for row in stored}
    assert len(stored) == 11

    again = answering()
    finished = await mill.run(again, resume=True, batch_size=10)
    assert finished.outcome_counts() == {"completed": 40}
    assert len(finished.rows) == 40


async def test_when_the_journal_cannot_be_written_the_run_stops_as_well(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts("a", "b", "c")
    real = files.AppendFile.write

    def write(self: Any, data: bytes) -> int:
        if self.path.parent.name == "journal":
            raise StorageFullError(f"{self.path}: no room")
        return real(self, data)

    monkeypatch.setattr(files.AppendFile, "write", write)
    with pytest.raises(StorageFullError, match="journal"):
        await mill.run()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root on Linux")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_real_full_disk_costs_nothing_that_was_acknowledged(mill: Mill, small_disk: Path) -> None:
    mill.prompts(*[f"{number:03}" for number in range(200)])

    def script(request: Request) -> Any:
        return says(prompt_of(request) * 10_000)

    with pytest.raises(StorageFullError) as full:
        await mill.run(answering(script), output_dir=small_disk, batch_size=25)

    assert str(small_disk) in str(full.value)
    acknowledged = {event["prompt_index"] for event in mill.told("recorded")}
    run = small_disk / "run"
    stored = {row["prompt_index"] for path in run.glob("batch_*.jsonl") for row in read_lines(path)}
    assert acknowledged
    assert acknowledged <= stored
    assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]


async def test_a_read_only_disk_is_refused_before_the_first_call(mill: Mill, small_disk: Path) -> None:
    mill.prompts("a")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    model = answering()

    with pytest.raises(StorageFullError, match=str(small_disk)):
        await mill.run(model, output_dir=small_disk)

    assert model.calls == 0


async def test_a_folder_that_vanishes_stops_the_run(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(1000)])

    async def script(request: Request) -> Any:
        await asyncio.sleep(0.001)
        if prompt_of(request) == "5":
            shutil.rmtree(mill.stored.path)
        return says()

    model = answering(script)
    with pytest.raises(StoreError, match=str(mill.stored.path)):
        await mill.run(model, sync="each", batch_size=1000)
    assert model.calls < 1000


async def test_a_checkpoint_that_cannot_be_written_stops_the_run(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.prompts(*[str(number) for number in range(500)])

    def replace(path: Path, data: Any) -> None:
        if path.name == "checkpoint.json":
            raise StorageFullError(f"{path}: no room")
        files.replace(path, data)

    monkeypatch.setattr("taskmill.store.run.replace", replace)
    model = answering()
    with pytest.raises(StorageFullError, match=r"checkpoint\.json"):
        await mill.run(model, batch_size=10, num_workers=2, sync="none")
    assert model.calls < 250


async def test_what_a_killed_session_left_running_is_removed_before_anything_is_done(mill: Mill) -> None:
    """A workspace of a session that was killed is gone after the next start, and nothing of it is seen."""
    mill.prompts("a")
    left = mill.stored.path / "workspaces" / "row-0123" / "workspace"
    left.mkdir(parents=True)
    (left / "file").write_text("left")
    seen: list[bool] = []

    def script(request: Request) -> Any:
        seen.append(left.exists())
        return says()

    await mill.run(answering(script), resume=True)

    assert seen == [False]
    assert not (mill.stored.path / "workspaces").exists()
    assert any("killed session" in event["message"] for event in mill.told("note"))


PATH_WRITERS = {"write_text", "touch", "symlink_to", "hardlink_to"}


def test_the_store_writes_files_and_nobody_else_opens_one_for_writing() -> None:
    source = Path(taskmill.__file__).parent
    found = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        # The sandbox's first process runs on the task's side, on the task's files.
        if name in ("store/files.py", "store/beneath.py", "sandbox/init.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in PATH_WRITERS:
        return True
    if name == "write_bytes":
        return len(call.args) == 1  # a Path's; a sandbox's takes the path as well
    if name not in ("open", "fdopen", "NamedTemporaryFile") or "'devnull'" in ast.dump(call):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    flags = [
        node.attr for argument in given for node in ast.walk(argument) if isinstance(node, ast.Attribute)
    ]
    modes = [text for text in texts if len(text) <= 3 and set(text) <= set("rwaxbt+")]
    return any(set(mode) & set("wax+") for mode in modes) or bool(
        {"O_WRONLY", "O_RDWR", "O_CREAT"} & set(flags)
    )
