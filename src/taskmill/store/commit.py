"""Group commit: rows are written at once and acknowledged together, after one sync for all that came in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Literal, NamedTuple

from taskmill.errors import StoreError
from taskmill.store.files import AppendFile

Sync = Literal["each", "group", "none"]


class _Batch(NamedTuple):
    files: list[AppendFile]
    futures: list[asyncio.Future[None]]


class _Piece(NamedTuple):
    data: list[bytes]
    future: asyncio.Future[None]


class GroupCommit:
    """Appends rows to the files of one run and says when they are on disk.

    `append` writes before it returns: a killed process loses nothing that was appended, and a cancelled caller
    leaves no half row. The future it gives resolves when the row has been synced, so that a loss of power can't
    take it: with `group` at most `max_delay` seconds or `max_rows` rows later, with `each` as soon as the disk is
    free for it, with `none` at once and without a sync.

    After a write or a sync has failed nothing more is accepted: `failed` holds the error, and every later
    `append` raises it. Rows written before a failed write are still synced and acknowledged.

    To be used from one event loop; leaving the context syncs what is outstanding.
    """

    def __init__(self, sync: Sync = "group", *, max_delay: float = 0.25, max_rows: int = 64) -> None:
        self.failed: StoreError | None = None
        self.sync = sync
        self._max_delay = 0.0 if sync == "each" else max_delay
        self._max_rows = 1 if sync == "each" else max_rows
        self._dirty: dict[AppendFile, None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._rows = 0
        self._soon: dict[AppendFile, _Piece] = {}
        self._syncing: _Batch | None = None
        self._to_close: set[AppendFile] = set()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def append(self, file: AppendFile, data: bytes) -> asyncio.Future[None]:
        """Write `data` at the end of `file` now; the future resolves when it is on disk.

        Raises `StoreError` when the write fails, or anything failed before. The future carries the error of a
        failed sync; not awaiting it is fine.
        """
        self.write(file, data)
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._rows += 1
        self._await_sync(loop, [file], future)
        return future

    def write(self, file: AppendFile, data: bytes) -> int:
        """Write `data` at the end of `file` now, and give its offset; when it is synced is for others to say.

        Raises `StoreError` when the write fails, or anything failed before.
        """
        self.check()
        try:
            return file.write(data)
        except StoreError as error:
            # What was accepted in this turn may still fit where a row did not.
            self._write_soon(asyncio.get_running_loop())
            self.failed = error
            raise

    def check(self) -> None:
        """Raise what failed before, if anything did."""
        if self.failed is not None:
            raise self.failed.with_traceback(None)

    def sync_soon(self, files: list[AppendFile]) -> asyncio.Future[None]:
        """Have `files` synced with the next group; the future resolves after that. It hastens no sync."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._await_sync(loop, files, future)
        return future

    def append_soon(self, file: AppendFile, data: bytes) -> asyncio.Future[None]:
        """Like `append`, but written by the end of this turn of the event loop, in one piece with what else comes in.

        For records that are many and small: what a kill takes within that turn was not acknowledged. All that goes
        to one file in one turn shares its future: shield it where a wait may be cancelled. It is no row, and hastens
        no sync.
        """
        self.check()
        piece = self._soon.get(file)
        if piece is None:
            loop = asyncio.get_running_loop()
            if not self._soon:
                loop.call_soon(self._write_soon, loop)
            piece = self._soon[file] = _Piece([], loop.create_future())
        piece.data.append(data)
        return piece.future

    def write_now(self) -> None:
        """Write what `append_soon` still holds back."""
        if self._soon:
            self._write_soon(asyncio.get_running_loop())

    def _write_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        soon, self._soon = self._soon, {}
        for file, piece in soon.items():
            try:
                self.check()
                file.write(b"".join(piece.data))
            except StoreError as error:
                self.failed = self.failed or error
                _fail([piece.future], error)
            else:
                self._await_sync(loop, [file], piece.future)

    def _await_sync(
        self, loop: asyncio.AbstractEventLoop, files: list[AppendFile], future: asyncio.Future[None]
    ) -> None:
        """Acknowledge `future` with the next sync of `files`, which now hold what it stands for."""
        if self.sync == "none":
            if not future.done():
                future.set_result(None)
            return
        for file in files:
            self._dirty[file] = None
        self._waiting.append(future)
        if self._syncing is None and (self._rows >= self._max_rows or not self._max_delay):
            self._start(loop)
        elif self._timer is None and self._max_delay > 0:
            self._timer = loop.call_later(self._max_delay, self._start, loop)

    def close_file(self, file: AppendFile) -> None:
        """Close `file` as soon as all that was appended to it is synced."""
        if file in self._soon:
            self._write_soon(asyncio.get_running_loop())
        if file in self._dirty or (self._syncing is not None and file in self._syncing.files):
            self._to_close.add(file)
        else:
            file.close()

    async def flush(self) -> None:
        """Sync all that was appended so far. Raises `StoreError` if that or anything before failed."""
        loop = asyncio.get_running_loop()
        self._write_soon(loop)
        while self._waiting or self._syncing is not None:
            if self._syncing is None:
                self._start(loop)
            if self._idle is None:
                self._idle = loop.create_future()
            await asyncio.shield(self._idle)
        self.check()

    async def close(self) -> None:
        """Sync what is outstanding and end the thread; under cancellation it still syncs.

        Raises `StoreError` if that or anything before failed, since nobody may have been told. May be called twice;
        the second time says nothing.
        """
        if self._closed and not self._waiting and not self._soon:
            return
        self._closed = True
        try:
            await self.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None
            self._finish_blocking()

    async def __aenter__(self) -> GroupCommit:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except StoreError:
            if error is None:
                raise

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand all that is dirty to the thread, unless it is at work: then `_finish` starts the next batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._syncing is not None or not self._waiting:
            return
        batch = self._take()
        self._syncing = batch
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="taskmill-sync", daemon=True)
            self._thread.start()

        def job() -> None:
            error = _sync_all(batch.files)
            with suppress(RuntimeError):  # the loop is gone: nobody is left to be told
                loop.call_soon_threadsafe(self._finish, loop, batch, error)

        self._jobs.put(job)

    def _take(self) -> _Batch:
        batch = _Batch(list(self._dirty), self._waiting)
        self._dirty = {}
        self._waiting = []
        self._rows = 0
        return batch

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _finish(self, loop: asyncio.AbstractEventLoop, batch: _Batch, error: StoreError | None) -> None:
        if self._syncing is not batch:
            return  # settled by a close that could not wait for this call
        self._syncing = None
        self._settle(batch, error)
        if self._waiting and (self._timer is None or self._rows >= self._max_rows):
            self._start(loop)
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def _settle(self, batch: _Batch, error: StoreError | None) -> None:
        if error is not None and self.failed is None:
            self.failed = error
        if error is not None:
            _fail(batch.futures, error)
        for future in batch.futures:
            if not future.done():
                future.set_result(None)
        if self._to_close:
            for file in batch.files:
                if file in self._to_close and file not in self._dirty:
                    self._to_close.discard(file)
                    file.close()

    def _finish_blocking(self) -> None:
        """What a cancelled close leaves to do: the thread has ended, so sync here."""
        if self._syncing is not None:
            batch, self._syncing = self._syncing, None
            self._settle(batch, _sync_all(batch.files))
        if self._waiting:
            batch = self._take()
            self._settle(batch, _sync_all(batch.files))
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None


def _fail(futures: list[asyncio.Future[None]], error: StoreError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()  # marks it as seen: a row nobody waits for needs no second complaint


def _sync_all(files: list[AppendFile]) -> StoreError | None:
    """Sync each file even where another fails, so that one bad file costs no more than its own rows' promise."""
    failed: StoreError | None = None
    AppendFile.sync_names(files)
    for file in files:
        try:
            file.datasync()
        except StoreError as error:
            failed = failed or error
    return failed
