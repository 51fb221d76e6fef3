"""Rows of many logs, made safe by the sync of one file.

A group of rows goes to as many logs as batches are under way, and where a sync is slow, so many of them make each row
wait long until it counts. So each row is also written to one file, which is synced instead; the logs themselves are
synced when their batch ends, or when that file has become large.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from taskmill.errors import StoreError
from taskmill.store.commit import GroupCommit
from taskmill.store.files import (
    AppendFile,
    create,
    make_directory,
    remove,
    restore_row,
    storage_error,
    sync_directory,
    sync_file,
)
from taskmill.store.jsonl import lines

_NAME = re.compile(r"rows_(\d+)\.jsonl")
_FAILED = "rows_failed"
"""A file of this name says that a log could not be synced: then what can be read there may not be on the disk."""


class _Copy(Struct, frozen=True):
    """A row, the number of its log, and the byte at which it stands there."""

    log: int
    offset: int
    row: Raw


class _Start(Struct, frozen=True):
    """First line of a segment: which start of the machine it was written in."""

    boot: str


class Restored(NamedTuple):
    """Rows of a log that a loss of power had taken, and that are there again."""

    path: Path
    rows: int

    def __str__(self) -> str:
        return (
            f"{str(self.path)!r}: {self.rows} rows that a loss of power had taken were put back from the journal"
            if self.rows != 1
            else f"{str(self.path)!r}: a row that a loss of power had taken was put back from the journal"
        )


class WriteAhead:
    """Copies of the rows whose logs are not synced yet, in segments that go once the logs are.

    Each start writes to new segments. `restore` comes first: it makes the logs whole and removes what was left.
    """

    def __init__(self, directory: Path, commit: GroupCommit, *, segment_bytes: int = 8 << 20) -> None:
        self._directory = directory
        self._commit = commit
        self._segment_bytes = segment_bytes
        self._number = 0
        self._active: AppendFile | None = None
        self._unsynced: dict[AppendFile, None] = {}
        self._retired: dict[AppendFile, asyncio.Future[None]] = {}

    # -- writing ----------------------------------------------------------------------------------------------

    def append(self, number: int, log: AppendFile, row: bytes) -> asyncio.Future[None]:
        """Append an encoded row to the log of that number; the future resolves when it is safe.

        Raises `StoreError` when a write fails, or anything failed before.
        """
        self._commit.check()
        segment = self._segment()  # first: where there can be no copy, there is to be no row
        offset = self._commit.write(log, row)
        self._unsynced[log] = None
        acknowledged = self._commit.append(
            segment, b'{"log":%d,"offset":%d,"row":%b}\n' % (number, offset, row[:-1])
        )
        if segment.size >= self._segment_bytes:
            self.retire()
        return acknowledged

    def close_log(self, log: AppendFile) -> None:
        """Close a log as soon as its own rows are synced."""
        if log in self._unsynced:
            del self._unsynced[log]
            self._commit.sync_soon([log])
        self._commit.close_file(log)

    def retire(self) -> None:
        """Have all logs synced, and the segment removed after that."""
        segment, self._active = self._active, None
        if segment is not None:
            logs, self._unsynced = self._unsynced, {}
            synced = self._retired[segment] = self._commit.sync_soon([segment, *logs])
            self._commit.close_file(segment)
            synced.add_done_callback(partial(self._drop, segment))

    def close(self) -> None:
        """Remove the segments that are not needed any more; `retire`, and let the commit flush, before."""
        for segment, synced in list(self._retired.items()):
            self._drop(segment, synced)
        if self._retired and self._commit.failed is not None:
            with suppress(StoreError, FileExistsError):
                create(self._directory / _FAILED, b"")

    def _drop(self, segment: AppendFile, synced: asyncio.Future[None]) -> None:
        # A log that could not be synced may have been in an earlier group than this one's last.
        if self._commit.failed is None and synced.done() and self._retired.pop(segment, None) is not None:
            with suppress(OSError):  # it harms nobody, and the next start removes it
                remove(segment.path)

    def _segment(self) -> AppendFile:
        if self._active is None:
            make_directory(self._directory)
            self._number += 1
            self._active = AppendFile(self._directory / f"rows_{self._number:06}.jsonl")
            self._commit.write(self._active, msgspec.json.encode(_Start(boot_id())) + b"\n")
        return self._active

    # -- after a crash ----------------------------------------------------------------------------------------

    def lacking(self) -> bool:
        """Whether there are rows that only these segments surely hold. Changes nothing."""
        with self._told("read"):
            return any(next(copies, None) is not None for lost, copies in self._stored() if lost)

    def restore(self, path_of: Callable[[int], Path]) -> list[Restored]:
        """Put back what a loss of power took from the logs at `path_of`, sync them, and remove all segments.

        As long as the machine has not been started anew, and no sync has failed, the logs hold all that was written to
        them, and are only synced: a log that somebody removed or shortened since is meant to be so. Raises
        `StorageFullError`.
        """
        with self._told("put in order"):
            restored = self._restore(path_of)
            segments = self._segments()
            self._number = max(map(_number_of, segments), default=0)
            for path in (self._directory / _FAILED, *segments):
                remove(path)
            if self._directory.is_dir():
                sync_directory(self._directory)  # or they would be back after the next loss of power
        return [Restored(path, rows) for path, rows in restored.items()]

    def _restore(self, path_of: Callable[[int], Path]) -> dict[Path, int]:
        failed = self._sync_failed
        restored: dict[Path, int] = {}
        touched: set[Path] = set()
        changed: set[Path] = set()
        for lost, copies in self._stored():
            for copy in copies:
                path = path_of(copy.log)
                touched.add(path)
                if path in changed:
                    continue
                row = bytes(copy.row) + b"\n"
                match restore_row(path, copy.offset, row, lost=lost, rewrite=failed):
                    case "restored":
                        restored[path] = restored.get(path, 0) + 1
                    case "changed":  # what comes after it would not stand where it stood
                        changed.add(path)
        for path in touched:
            sync_file(path)
        return restored

    @contextmanager
    def _told(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(self._directory, error, action) from error

    def _stored(self) -> Iterator[tuple[bool, Iterator[_Copy]]]:
        """Each stored segment: whether what was written then may be lost, and the copies that can be read."""
        failed = self._sync_failed
        for path in self._segments():
            stored = (line for _, line in lines(path))
            try:
                start = _start_decoder.decode(next(stored, b""))
            except (msgspec.DecodeError, FileNotFoundError):
                # Its first sync never came, so nothing in it was acknowledged; or the run that lives has removed it.
                continue
            yield failed or start.boot != boot_id(), _copies(stored)

    @property
    def _sync_failed(self) -> bool:
        return (self._directory / _FAILED).exists()

    def _segments(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return sorted(
            (path for path in self._directory.iterdir() if _NAME.fullmatch(path.name)), key=_number_of
        )


def boot_id() -> str:
    """A name for this start of the machine: another after each one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(round(psutil.boot_time()))


def _copies(stored: Iterable[bytes]) -> Iterator[_Copy]:
    for line in stored:
        try:
            yield _copy_decoder.decode(line)
        except msgspec.DecodeError:  # a torn end: its row was not acknowledged
            return


def _number_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


_copy_decoder = msgspec.json.Decoder(_Copy)
_start_decoder = msgspec.json.Decoder(_Start)
