"""A disk that is full, broken, read-only or gone: said with path and room, and what was acknowledged is intact."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from taskmill.errors import StorageFullError
from taskmill.store.files import AppendFile
from taskmill.store.jsonl import encode_row
from taskmill.store.run import RunDirectory

LIMITED = """
    import asyncio, json, resource, sys
    from pathlib import Path
    from taskmill.errors import StorageFullError
    from taskmill.store.jsonl import encode_row
    from taskmill.store.run import RunDirectory

    async def main():
        run = RunDirectory(Path(sys.argv[1]))
        run.open_for_writing({}, resume=False)
        await run.append_row(0, encode_row({"n": "before the limit"}))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        acknowledged = 1
        try:
            while True:
                await run.append_row(0, encode_row({"n": acknowledged, "text": "x" * 700}))
                acknowledged += 1
        except StorageFullError as error:
            print(json.dumps({"acknowledged": acknowledged, "said": str(error)}))
        for again in (run.append_row, lambda k, row: run.append_outcome(row)):
            try:
                again(0, b"{}\\n")
            except StorageFullError:
                print("refused")
        await run.close()

    try:
        asyncio.run(main())
    except StorageFullError:
        sys.exit(3)
"""


def test_a_disk_that_fills_up_in_mid_row_costs_that_row_alone(tmp_path: Path) -> None:
    """The limit on the file's size makes the system write half a row, as a full disk does."""
    path = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    told, *refused = done.stdout.splitlines()
    assert refused == ["refused", "refused"]
    said = json.loads(told)
    assert "batch_0.jsonl' could not be written: File too large" in said["said"]
    assert "bytes are free" in said["said"]
    data = (path / "batch_0.jsonl").read_bytes()
    assert data.endswith(b"}\n")
    assert len(data.splitlines()) == said["acknowledged"]
    run = RunDirectory(path)
    assert run.open_for_writing({}, resume=True).repairs == []
    run._lock.release()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_no_space_left(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "log.jsonl")
    file = AppendFile(tmp_path / "log.jsonl", repair=False)
    for _ in range(2):  # such a file can't be cut back either, and then takes no more
        with pytest.raises(
            StorageFullError, match=r"log\.jsonl' could not be written: No space left on device"
        ):
            file.write(b"{}\n")
    file.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_row_half_written_is_taken_back_and_writing_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    file = AppendFile(tmp_path / "log.jsonl")
    file.write(b'{"n":1}\n')
    write = os.write
    calls = iter([3, None])

    def half(fd: int, data: bytes) -> int:
        length = next(calls)
        if length is None:
            raise OSError(code, os.strerror(code))
        return write(fd, bytes(data[:length]))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(StorageFullError, match=os.strerror(code)):
            file.write(b'{"n":2}\n')
    assert file.path.read_bytes() == b'{"n":1}\n'
    assert file.write(b'{"n":3}\n') == 8
    file.close()
    assert file.path.read_bytes() == b'{"n":1}\n{"n":3}\n'


def test_an_interrupt_in_mid_row_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "log.jsonl")
    write = os.write
    calls = iter([3, None])

    def half(fd: int, data: bytes) -> int:
        length = next(calls)
        if length is None:
            raise KeyboardInterrupt
        return write(fd, bytes(data[:length]))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(KeyboardInterrupt):
        file.write(b'{"n":2}\n')
    file.close()
    assert file.path.read_bytes() == b""


def test_a_row_that_cannot_be_taken_back_is_repaired_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    file = AppendFile(path)
    file.write(b'{"n":1}\n')
    write = os.write
    calls = iter([3, None])

    def half(fd: int, data: bytes) -> int:
        length = next(calls)
        if length is None:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, bytes(data[:length]))

    def broken(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(StorageFullError):
            file.write(b'{"n":2}\n')
    with pytest.raises(StorageFullError):
        file.write(b'{"n":3}\n')
    file.close()
    again = AppendFile(path)
    again.write(b'{"n":4}\n')
    again.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":4}\n'


def test_a_read_only_disk_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.open

    def read_only(path: object, flags: int, *rest: object, **options: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return look(path, flags, *rest, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageFullError, match=r"lock' could not be opened.*: Read-only file system"):
        RunDirectory(tmp_path / "run").open_for_writing({}, resume=False)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFullError, match="run' could not be made"):
        RunDirectory(tmp_path / "file" / "run").open_for_writing({}, resume=False)


async def test_a_folder_that_vanishes_stops_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", sync="each")
    run.open_for_writing({}, resume=False)
    await run.append_row(0, encode_row({"n": 0}))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageFullError, match=r"batch_0\.jsonl.*removed"):
        await run.append_row(0, encode_row({"n": 1}))
    with pytest.raises(StorageFullError, match=r"outcomes\.jsonl.*No such file"):
        run.append_outcome(b"{}\n")
    with pytest.raises(StorageFullError):
        await run.close()


async def test_a_new_shard_in_a_vanished_folder_stops_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.open_for_writing({}, resume=False)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(StorageFullError, match=r"batch_0\.jsonl.*No such file"):
        run.append_row(0, b"{}\n")
    with pytest.raises(StorageFullError, match=r"checkpoint\.json.*could not be replaced: No such file"):
        run.write_checkpoint([b"{}"])
    await run.close()
