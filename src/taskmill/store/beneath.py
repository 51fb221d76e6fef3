"""Files inside a folder that others may fill with traps: no path, and no link on its way, leads out of it.

A path is walked one component at a time from the folder's own descriptor, so that nothing that is swapped in
meanwhile is ever followed. Only regular files are opened: a pipe or a device would hold up its reader for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from taskmill.errors import ToolRefusedError
from taskmill.store.files import FOLDER, remove_folder, write_all

_MAX_LINKS = 40
_MAX_DEPTH = 128  # folders of a path that are held open on the way
_MAX_FOLDERS = 100_000


def read_beneath(root: Path, relative: str, limit: int | None = None, *, alias: str | None = None) -> bytes:
    """The bytes of a regular file under `root`, at most the first `limit`.

    Links are followed as long as they stay inside; `alias` is where those who make links see `root`. Raises
    `ToolRefusedError` for whatever leads out and for what is no regular file, `FileNotFoundError` (and its like)
    with the path as it was given.
    """
    with _beneath(root, relative, alias=alias) as (folder, name), _named(relative):
        fd = _open_regular(folder, name, os.O_RDONLY, relative)
        with open(fd, "rb") as file:
            return file.read() if limit is None else file.read(limit)


def write_beneath(root: Path, relative: str, data: bytes, *, alias: str | None = None) -> None:
    """Write a regular file under `root`, making the folders on the way. Links and errors as in `read_beneath`."""
    with _beneath(root, relative, make=True, alias=alias) as (folder, name), _named(relative):
        fd = _open_regular(folder, name, os.O_WRONLY | os.O_CREAT, relative)
        try:
            os.ftruncate(fd, 0)
            write_all(fd, data)
        finally:
            os.close(fd)


def remove_beneath(root: Path, relative: str, *, alias: str | None = None) -> None:
    """Remove a file, a link (not what it points to), or a folder with all in it. Raises like `read_beneath`."""
    with _beneath(root, relative, follow_last=False, alias=alias) as (folder, name), _named(relative):
        if name == ".":
            raise ToolRefusedError(f"{relative!r} is the workspace itself, which can't be removed")
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            remove_folder(name, folder)
        else:
            os.unlink(name, dir_fd=folder)


def list_beneath(
    root: Path, relative: str = ".", limit: int = 10_000, *, alias: str | None = None
) -> list[str]:
    """Files under a folder (links by their own name, not followed), relative to it, sorted; the first `limit`.

    What lies more than `_MAX_DEPTH` folders deep is left out, and so is what follows the first `_MAX_FOLDERS`
    folders, so that a listing ends whatever a task has made.
    """
    found: list[str] = []
    with _beneath(root, relative, alias=alias) as (folder, name), _named(relative):
        top = os.open(name, FOLDER, dir_fd=folder)
        try:
            waiting: list[tuple[str, ...]] = [()]
            for _ in range(_MAX_FOLDERS):
                if not waiting or len(found) >= limit:
                    break
                way = waiting.pop()
                files, folders = _entries(top, way)
                found.extend("/".join((*way, entry)) for entry in files)
                if len(way) < _MAX_DEPTH:
                    waiting.extend((*way, entry) for entry in reversed(folders))
        finally:
            os.close(top)
    return sorted(found[:limit])


def _entries(top: int, way: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of the files and of the folders in one folder below `top`; none where it is gone or can't be read."""
    files: list[str] = []
    folders: list[str] = []
    here = os.dup(top)
    try:
        for name in way:
            below = os.open(name, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        with os.scandir(here) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
    except OSError:
        if not way:
            raise
    finally:
        os.close(here)
    return sorted(files), sorted(folders)


def _open_regular(folder: int, name: str, flags: int, relative: str) -> int:
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise ToolRefusedError(f"{relative!r} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        if name == "." or stat.S_ISDIR(os.stat(name, dir_fd=folder).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), relative)
        raise ToolRefusedError(f"{relative!r} is not a regular file")
    return fd


@contextmanager
def _named(relative: str) -> Iterator[None]:
    """Errors name the path as it was asked for, not the component that a descriptor was opened by."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, relative) from None


@contextmanager
def _beneath(
    root: Path, relative: str, *, make: bool = False, follow_last: bool = True, alias: str | None = None
) -> Iterator[tuple[int, str]]:
    """Walk to `relative` one component at a time; gives the folder's descriptor and the last name in it.

    No component is opened through a link, so a link swapped in meanwhile is an error and never a way out.
    """
    if "\0" in relative or not _encodable(relative):
        raise ToolRefusedError(f"{relative!r} can't be the name of a file")
    outside = f"{relative!r} is outside the workspace"
    if relative.startswith("/"):
        raise ToolRefusedError(outside)
    with _named(relative):
        stack = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        seen_as = (str(root), os.path.realpath(root) if alias is None else alias)
        with _named(relative):
            name = _walk(stack, deque(relative.split("/")), seen_as, outside, make, follow_last)
        yield stack[-1], name
    finally:
        for fd in stack:
            os.close(fd)


def _walk(
    stack: list[int], parts: deque[str], roots: Sequence[str], outside: str, make: bool, follow_last: bool
) -> str:
    links = 0
    while parts:
        part = parts.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            if len(stack) == 1:
                raise ToolRefusedError(outside)
            os.close(stack.pop())
            continue
        is_last = not any(rest not in ("", ".") for rest in parts)
        try:
            mode = os.stat(part, dir_fd=stack[-1], follow_symlinks=False).st_mode
        except FileNotFoundError:
            if is_last:
                return part
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=stack[-1])
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode) and (follow_last or not is_last):
            links += 1
            if links > _MAX_LINKS:
                raise ToolRefusedError(f"{outside}: too many links on the way")
            target = os.readlink(part, dir_fd=stack[-1])
            if target.startswith("/"):
                target = _inside(target, roots, outside)
                while len(stack) > 1:
                    os.close(stack.pop())
            parts.extendleft(reversed(target.split("/")))
        elif is_last:
            return part
        elif len(stack) > _MAX_DEPTH:
            raise ToolRefusedError(
                f"a path goes through at most {_MAX_DEPTH} folders, not so many as this one"
            )
        else:
            stack.append(os.open(part, FOLDER, dir_fd=stack[-1]))
    return "."


def _inside(target: str, roots: Sequence[str], outside: str) -> str:
    for known in roots:
        if target == known or target.startswith(f"{known}/"):
            return target[len(known) + 1 :]
    raise ToolRefusedError(outside)


def _encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True
