"""Files as the store writes them. Outside this room nobody opens a file for writing.

Two ways to write, each with a promise: `AppendFile` (a row is whole or not there) and `replace` (old or new, never
a mixture). Besides, whole trees: copied within limits, removed whatever is in them. Folders that others may fill
with traps are `taskmill.store.beneath`'s.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TextIO

from taskmill.errors import SandboxError, StorageFullError, StoreError
from taskmill.store.jsonl import is_whole

_BLOCK = 1 << 20
_datasync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
_serial = itertools.count()
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened by its name: never through a link."""


class Repair(NamedTuple):
    """What was wrong with the end of a log. `offset` and `dropped_bytes` say where and how much was set aside.

    `torn`: the last line was cut in mid-write; it is now in `<path>.torn`. `unterminated`: the last line was whole
    and lacked its newline; it has one now.
    """

    path: Path
    offset: int
    dropped_bytes: int
    kind: Literal["torn", "unterminated"]

    def __str__(self) -> str:
        if self.kind == "torn":
            return (
                f"{str(self.path)!r}: the last line, at byte {self.offset}, was torn; its {self.dropped_bytes} bytes "
                f"were moved to {self.path.name + '.torn'!r}"
            )
        return (
            f"{str(self.path)!r}: the last line, at byte {self.offset}, lacked its newline and was given one"
        )


def storage_error(path: Path, error: OSError, action: str = "written") -> StorageFullError:
    """The error for people when a file of a run can't be written: which path, why, and how much is free there."""
    where = path
    while not where.exists() and where != where.parent:
        where = where.parent
    try:
        free = f"{shutil.disk_usage(where).free:,} bytes are free there"
    except OSError:
        free = "free space there is unknown"
    reason = error.strerror or str(error)
    return StorageFullError(
        f"{str(path)!r} could not be {action}: {reason} ({free}). "
        "What was acknowledged is intact; make room or access, then resume."
    )


# -- the append log -------------------------------------------------------------------------------------------


class AppendFile:
    """A log of rows, open for appending by one writer.

    Opening makes the file where it is missing, and with `repair` puts its end in order first (`self.repair` says
    what was done). A row is written by one call, at once; it is safe from a kill of the process when `write`
    returns, and from a loss of power after the next `datasync`. Raises `StorageFullError`.
    """

    __slots__ = ("_broken", "_fd", "_name_synced", "path", "repair", "size")

    def __init__(self, path: Path, *, repair: bool = True) -> None:
        self.path = path
        self.repair: Repair | None = None
        self._broken: StorageFullError | None = None
        # Of a file that was there before, nobody knows whether its maker lived to sync its name.
        self._name_synced = False
        self.size = 0
        # Not blocking: a pipe that somebody put there is an error, and not waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            try:
                self._fd = os.open(path, flags | os.O_EXCL, 0o666)
            except FileExistsError:
                if repair:
                    self.repair = repair_end(path)
                self._fd = os.open(path, flags, 0o666)
                self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise storage_error(path, error, "opened for appending") from error

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._fd < 0

    def write(self, data: bytes) -> int:
        """Append `data` and return the byte offset where it starts. All of it is written, or none."""
        if self._broken is not None:
            raise self._broken
        start = self.size
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
            self.size = start + written
        except BaseException as error:
            # A torn end that can't be cut off now would swallow the next row; opening the file anew repairs it.
            failure = storage_error(self.path, error) if isinstance(error, OSError) else None
            try:
                os.ftruncate(self._fd, start)
            except OSError as second:
                self._broken = failure or storage_error(self.path, second)
            if failure is not None:
                raise failure from error
            raise
        return start

    def datasync(self) -> None:
        """Wait until all that was written is on disk, and so is the file's name."""
        try:
            _datasync(self._fd)
            if os.fstat(self._fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written")
            if not self._name_synced:
                sync_directory(self.path.parent)
                self._name_synced = True
        except OSError as error:
            raise storage_error(self.path, error, "synced to disk") from error

    def close(self) -> None:
        """Close without syncing. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def sync_names(files: Iterable[AppendFile]) -> None:
        """Wait until the names of these files are on disk, with one sync for each folder that needs one.

        What fails here fails again in the `datasync` of the file it concerns, and is raised there.
        """
        folders: dict[Path, list[AppendFile]] = {}
        for file in files:
            if not file._name_synced:
                folders.setdefault(file.path.parent, []).append(file)
        for folder, new in folders.items():
            with suppress(OSError):
                sync_directory(folder)
                for file in new:
                    file._name_synced = True


def repair_end(path: Path) -> Repair | None:
    """Put the last line of a log in order: see `Repair`. A missing file is in order."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
            return None
        start, end = _last_line(fd, size)
        if is_whole(end):
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, b"\n")
            os.fsync(fd)
            return Repair(path, start, 0, "unterminated")
        # Set aside first, cut off second: a crash in between leaves a copy too many, never one too few.
        aside = path.with_name(path.name + ".torn")
        aside_fd = os.open(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            write_all(aside_fd, end + b"\n")
            os.fsync(aside_fd)
        finally:
            os.close(aside_fd)
        sync_directory(path.parent)
        os.ftruncate(fd, start)
        os.fsync(fd)
        return Repair(path, start, len(end), "torn")
    finally:
        os.close(fd)


def restore_row(
    path: Path, offset: int, row: bytes, *, lost: bool, rewrite: bool = False
) -> Literal["there", "restored", "changed"]:
    """See to it that a row stands at its place in a log, and say what was found there.

    Zeros in its place are what a page leaves that never reached the disk; no row holds any. With `lost`, which says
    that what was written may be gone, a row is also put back where the file ends too early. Anything else was `changed`
    by somebody since, and stays. `rewrite` writes the row even where it can be read. Raises `StorageFullError`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if lost and not offset else 0), 0o666)
        try:
            there = os.pread(fd, len(row), offset)
            follows = not offset or os.pread(fd, 1, offset - 1) == b"\n"
            cut_short = lost and len(there) < len(row) and row.startswith(there)
            if not follows or not (there == row or cut_short or b"\0" in there):
                return "changed"
            if there != row or rewrite:
                os.lseek(fd, offset, os.SEEK_SET)
                write_all(fd, row)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return "changed"
    except OSError as error:
        raise storage_error(path, error, "put in order") from error
    return "there" if there == row else "restored"


def sync_file(path: Path) -> None:
    """Wait until a file and its name are on disk, if it is there. Raises `StorageFullError`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _datasync(fd)
        finally:
            os.close(fd)
        sync_directory(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error, "synced to disk") from error


def _last_line(fd: int, size: int) -> tuple[int, bytes]:
    """Offset and bytes of what stands after the last newline."""
    blocks: list[bytes] = []
    position = size
    while position > 0:
        length = min(_BLOCK, position)
        block = os.pread(fd, length, position - length)
        newline = block.rfind(b"\n")
        if newline >= 0:
            blocks.append(block[newline + 1 :])
            position -= length - newline - 1
            break
        blocks.append(block)
        position -= length
    return position, b"".join(reversed(blocks))


# -- whole files and folders ----------------------------------------------------------------------------------


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a whole file so that a reader, or a crash, meets the old one or the new one and nothing else.

    Mode and owner of the old file are kept; a link stays a link, and what it points to is replaced. Data that
    comes in pieces is written as it comes. Raises `StorageFullError`; then the old file is as it was.
    """
    with replacing(path) as file:
        for block in (data,) if isinstance(data, bytes) else data:
            file.write(block)


def create(path: Path, data: bytes) -> None:
    """Write a file that was not there before; one that can't be written to its end is removed.

    Raises `FileExistsError` where there is something of that name, `StorageFullError` where it can't be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        raise
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise storage_error(path, error) from error
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write what `path` is to hold: it takes the old one's place when the block ends well.

    For writers that want a file (Parquet, say). Promises and errors are those of `replace`.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise StoreError(
            f"{str(path)!r} is not a regular file and can't be replaced by one: give another name"
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{next(_serial)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(fd, "wb", buffering=_BLOCK) as file:
            _keep_owner(fd, target)
            yield file
            file.flush()
            os.fsync(fd)
        os.replace(temporary, target)
        sync_directory(target.parent)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise storage_error(path, error, "replaced") from error
        raise


def append_shared(path: Path, line: bytes) -> None:
    """Append one row, newline included, to a file that other processes may append to at any time.

    No lock: the system puts one write to the end as a whole. What an earlier writer tore stays as a line of its
    own, since cutting it off could cut off what another has just written. Raises `StorageFullError`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(fd).st_size
            unended = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            write_all(fd, b"\n" + line if unended else line)
            _datasync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error(path, error) from error


def is_temporary(name: str) -> bool:
    """Whether a file name is one that `replace` uses on the way; a killed process may leave such a file."""
    return name.startswith(".") and name.endswith(".tmp")


def _keep_owner(fd: int, target: Path) -> None:
    with suppress(FileNotFoundError):
        old = os.stat(target)
        os.fchmod(fd, stat.S_IMODE(old.st_mode))
        with suppress(PermissionError):
            os.fchown(fd, old.st_uid, old.st_gid)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in as many writes as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def check_lock_file(path: Path) -> None:
    """Raise `StoreError` for something in the lock's place that can't be one."""
    if path.exists() and not path.is_file():
        raise StoreError(
            f"{str(path)!r} is not a regular file and can't be a lock: remove it, or choose another run name"
        )


def open_lock_file(path: Path) -> int:
    """A descriptor to lock, and to write the holder's name through. The caller closes it."""
    check_lock_file(path)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error(path, error, "opened for locking") from error


def open_to_read(path: Path) -> int:
    """A descriptor to read a regular file through. The caller closes it.

    Raises `OSError` for anything else, so that no pipe is waited for and no device read without end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _refuse_special(fd, path)
    return fd


def read_whole(path: Path) -> bytes:
    """What a regular file holds. Raises `OSError` as `open_to_read` does."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def text_stream(fd: int) -> TextIO:
    """A text stream to write to an open descriptor, which is not the stream's to close."""
    return open(fd, "w", encoding="utf-8", closefd=False)


def _refuse_special(fd: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def make_directory(path: Path) -> None:
    """Make a folder and those above it, on disk for good. Raises `StorageFullError`."""
    if path.is_dir():
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync_directory(folder.parent)
    except OSError as error:
        raise storage_error(path, error, "made") from error


def sync_directory(path: Path) -> None:
    """Wait until the names in a folder are on disk, where the file system can do that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder with all in it, if it is there, whatever modes a task gave to what is inside.

    However deep it is: a task may have made more levels than the stack, a path or the descriptors of a process
    go down. No link is followed. Raises `OSError` at the first thing that can't be removed.
    """
    if path.is_symlink() or not path.is_dir():
        remove(path)
        return
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_folder(path.name, parent)
    finally:
        os.close(parent)


def remove_folder(name: str, parent: int) -> None:
    """Remove a folder step by step, with one descriptor at a time: what is below, then the way back up."""
    here = _open_to_empty(name, parent)
    above: list[tuple[tuple[int, int], list[str]]] = []  # which folder it is, and what it still holds
    try:
        inside = _remove_files(here)
        while inside or above:
            going_down = bool(inside)
            if going_down:
                next_one = _open_to_empty(inside[-1], here)
                above.append((_identity(here), inside))
            else:
                next_one = os.open("..", FOLDER, dir_fd=here)
            os.close(here)
            here = next_one
            if going_down:
                inside = _remove_files(here)
            else:
                known, inside = above.pop()
                if _identity(here) != known:  # it was moved meanwhile, and this is not ours to remove from
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), inside[-1])
                os.rmdir(inside.pop(), dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(name, dir_fd=parent)


def _remove_files(folder: int) -> list[str]:
    """Remove what is no folder, links among it, and give the names of the folders."""
    folders = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            os.unlink(entry.name, dir_fd=folder)
    return folders


def _open_to_empty(name: str, parent: int) -> int:
    """A folder's descriptor; its mode lets the owner remove what is in it from then on."""
    try:
        fd = os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        # A mode is changed through a descriptor, never by name, which could have become a link.
        if sys.platform == "linux":
            handle = os.open(name, FOLDER | os.O_PATH, dir_fd=parent)
            try:
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
            finally:
                os.close(handle)
        else:
            os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        fd = os.open(name, FOLDER, dir_fd=parent)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        with suppress(OSError):  # another's folder, or a file system without modes: removing will tell
            os.fchmod(fd, 0o700)
    return fd


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def copy_tree_into(
    source: Path,
    root: Path,
    limit_bytes: int,
    limit_files: int,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Copy the folder `source` into the folder `root`: files with their modes, folders, links as links.

    Sockets, pipes and devices are left out, and so is `root` itself should it stand inside `source`. Raises
    `SandboxError` when there is more than the limits allow; what was copied until then is left to the caller.
    Returns in the middle, after the file it is at, once `given_up` says so.
    """
    own = os.stat(root)
    count = size = 0
    for base, folders, files in os.walk(source):
        here = root / os.path.relpath(base, source)
        here.mkdir(exist_ok=True)
        folders[:] = [name for name in folders if not _same_file(Path(base, name), own)]
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        for name in [*files, *links]:
            if given_up():
                return
            origin = Path(base, name)
            info = os.lstat(origin)
            if not stat.S_ISREG(info.st_mode) and not stat.S_ISLNK(info.st_mode):
                continue
            count += 1
            size += info.st_size
            if count > limit_files or size > limit_bytes:
                raise SandboxError(
                    f"{str(source)!r} holds more than a workspace may be given ({limit_files:,} files, "
                    f"{limit_bytes:,} bytes): name a smaller folder as 'cwd', or raise the limit"
                )
            shutil.copy2(origin, here / name, follow_symlinks=False)


def _same_file(path: Path, info: os.stat_result) -> bool:
    other = os.lstat(path)
    return (other.st_dev, other.st_ino) == (info.st_dev, info.st_ino)
