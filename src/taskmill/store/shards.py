"""The logs of the batches that are under way, each open from its batch's start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from taskmill.errors import StoreError
from taskmill.store.ahead import WriteAhead
from taskmill.store.commit import GroupCommit
from taskmill.store.files import AppendFile, remove


class Shards:
    """Open logs by number of batch, at the paths that `path_of` names.

    Where rows are synced in groups, the copies in `ahead` are, and a log itself when its batch ends.

    Making a file may take a millisecond, for which all rows under way would wait. So a thread makes it while the first
    row of the batch is under way, and it goes again if the batch comes to no row.
    """

    def __init__(self, path_of: Callable[[int], Path], commit: GroupCommit, ahead: WriteAhead) -> None:
        self._path_of = path_of
        self._commit = commit
        self._ahead = ahead
        self._open: dict[int, AppendFile] = {}
        self._opening: dict[int, Future[AppendFile]] = {}
        self._opener: ThreadPoolExecutor | None = None

    def open_soon(self, number: int) -> None:
        """Begin to open the log of a batch; `get` then waits for it, if it has to."""
        if number in self._open or number in self._opening:
            return
        if self._opener is None:
            self._opener = ThreadPoolExecutor(1, thread_name_prefix="taskmill-shards")
        self._opening[number] = self._opener.submit(AppendFile, self._path_of(number))

    def append(self, number: int, row: bytes) -> asyncio.Future[None]:
        """Append an encoded row to the log of a batch; the future resolves when it is safe. Raises `StoreError`."""
        log = self.get(number)
        if self._commit.sync == "group":
            return self._ahead.append(number, log, row)
        return self._commit.append(log, row)

    def get(self, number: int) -> AppendFile:
        """The log of a batch, open. Raises `StorageFullError`."""
        file = self._open.get(number)
        if file is None:
            opening = self._opening.pop(number, None)
            file = AppendFile(self._path_of(number)) if opening is None else opening.result()
            self._open[number] = file
            if file.size and self._commit.sync == "group":
                # Rows that an earlier process left may not be on disk, and none is safe that follows them.
                self._commit.sync_soon([file])
        return file

    def close(self, number: int) -> None:
        """Close a batch's log as soon as its rows are synced."""
        file = self._open.pop(number, None)
        if file is not None:
            self._ahead.close_log(file)
        opening = self._opening.pop(number, None)
        if opening is not None and not opening.cancel():
            # Nobody was waiting for it: what went wrong, if anything, is met by whoever writes next.
            with suppress(StoreError, OSError):
                unused = opening.result()
                unused.close()
                if not unused.size:
                    remove(unused.path)

    def close_all(self) -> None:
        """Close what is open, and end the thread."""
        for number in [*self._open, *self._opening]:
            self.close(number)
        if self._opener is not None:
            self._opener.shutdown()
            self._opener = None
