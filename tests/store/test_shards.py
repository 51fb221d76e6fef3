"""Logs of batches, made ahead by a thread: there when the first row comes, gone where none came."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskmill.errors import StorageFullError
from taskmill.store.ahead import WriteAhead
from taskmill.store.commit import GroupCommit
from taskmill.store.shards import Shards


@pytest.fixture
async def shards(tmp_path: Path) -> AsyncIterator[Shards]:
    async with GroupCommit() as commit:
        ahead = WriteAhead(tmp_path / "journal", commit)
        opened = Shards(lambda number: tmp_path / "run" / f"batch_{number}.jsonl", commit, ahead)
        (tmp_path / "run").mkdir()
        yield opened
        opened.close_all()


async def test_a_log_that_was_opened_ahead_takes_rows_like_one_that_was_not(
    shards: Shards, tmp_path: Path
) -> None:
    shards.open_soon(1)
    shards.open_soon(1)
    for number in (1, 2):
        shards.get(number).write(b"row\n")
        assert shards.get(number) is shards.get(number)
        shards.close(number)
    assert [path.read_bytes() for path in sorted((tmp_path / "run").iterdir())] == [b"row\n"] * 2


async def test_a_log_without_a_row_is_gone_and_one_that_had_rows_stays(
    shards: Shards, tmp_path: Path
) -> None:
    earlier = tmp_path / "run" / "batch_7.jsonl"
    earlier.write_bytes(b"row\n")
    for number in (6, 7, 8):
        shards.open_soon(number)
    shards.close(6)
    shards.close(7)
    shards.close_all()
    assert list((tmp_path / "run").iterdir()) == [earlier]
    assert earlier.read_bytes() == b"row\n"


async def test_what_stops_a_log_from_being_made_is_said_when_a_row_comes(
    shards: Shards, tmp_path: Path
) -> None:
    (tmp_path / "run").rmdir()
    shards.open_soon(1)
    shards.open_soon(2)
    with pytest.raises(StorageFullError, match=r"batch_1\.jsonl"):
        shards.get(1)
    shards.close(2)  # no row came, so nothing is lost
