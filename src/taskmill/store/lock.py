"""One writer a run: an advisory lock that says who holds it and dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from taskmill.errors import RunLockedError
from taskmill.store.files import check_lock_file, open_lock_file, open_to_read, storage_error

_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_PATIENCE = 20
"""Tries, 10 ms apart, for a holder that has the lock but has not written its name yet."""


class Holder(Struct, frozen=True):
    """Who holds a lock. `started` tells a process from a later one that was given the same pid."""

    pid: int
    host: str
    since: str
    started: str = ""

    def is_alive(self) -> bool:
        """Whether the process lives, as far as it can be known: one on another host is taken to."""
        if self.host != socket.gethostname():
            return True
        return bool(self.started) and _start_of(self.pid) == self.started


class RunLock:
    """The lock of a run directory.

    The kernel's `flock` decides, so the lock ends with its holder, however that died, and holds between threads
    and processes alike. The text in the file is for people; it decides only where a file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._folder = -1

    def acquire(self) -> None:
        """Take the lock, from a dead holder if need be. Raises `RunLockedError` naming the living one."""
        fd = open_lock_file(self.path)
        try:
            for _ in range(_PATIENCE):
                if self._try(fd):
                    break
                holder = _read(fd)
                if holder is not None and holder.is_alive():
                    raise RunLockedError(_refusal(self.path, holder))
                time.sleep(0.01)
            else:
                raise RunLockedError(_refusal(self.path, None))
            self._folder = self._lock_folder(fd)
            _write(fd, self.path)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _lock_folder(self, fd: int) -> int:
        """Lock the folder too: its lock stays where it is when somebody removes the file. -1 where that can't be."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise RunLockedError(_refusal(self.path, _read(fd))) from None
        except OSError:
            os.close(folder)
            return -1
        return folder

    def release(self) -> None:
        """Let go. May be called twice. The file stays, empty: removing it would let two holders in at once."""
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, 0)
        except OSError:
            pass  # a full or vanished disk must not keep a run from ending; the text names a dead process then
        os.close(self._fd)
        self._fd = -1
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def holder(self) -> Holder | None:
        """Who holds the lock now, without touching it; `None` if nobody alive does."""
        try:
            fd = open_to_read(self.path)
        except OSError:
            return None
        try:
            holder = _read(fd)
        finally:
            os.close(fd)
        return holder if holder is not None and holder.is_alive() else None

    def check(self) -> None:
        """Raise what `acquire` would because of somebody alive who holds the lock, or of its place; touches nothing."""
        check_lock_file(self.path)
        holder = self.holder()
        if holder is not None:
            raise RunLockedError(_refusal(self.path, holder))

    def _try(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise storage_error(self.path, error, "locked") from error
            holder = _read(fd)
            return holder is None or not holder.is_alive()
        return True


def _read(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except msgspec.DecodeError:
        return None


def _write(fd: int, path: Path) -> None:
    pid = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = Holder(pid, socket.gethostname(), since, _start_of(pid))
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(holder), 0)
    except OSError as error:
        raise storage_error(path, error, "locked") from error


def _refusal(path: Path, holder: Holder | None) -> str:
    who = (
        f"process {holder.pid} on host {holder.host!r}, since {holder.since}"
        if holder is not None
        else "another process, which has not written its name"
    )
    elsewhere = holder is not None and holder.host != socket.gethostname()
    gone = f" If that host is gone for good, remove the file {str(path)!r}." if elsewhere else ""
    return f"the run in {str(path.parent)!r} is being written by {who}. Wait for it, or stop it.{gone}"


def _start_of(pid: int) -> str:
    """When a process started, in a form that only compares: empty if there is none. Not moved by clock changes."""
    if Path("/proc/self/stat").exists():
        try:
            # The name in parentheses may hold anything; the 20th field after it is the start in clock ticks.
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        except (OSError, IndexError):
            return ""
    import psutil

    try:
        return str(round(psutil.Process(pid).create_time()))
    except psutil.Error:
        return ""
