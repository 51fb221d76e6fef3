"""Where the sandboxes of a server stand: a temporary folder of its own, removed even when the server was killed."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskmill.errors import StoreError
from taskmill.sandbox.leftovers import sweep_leftovers
from taskmill.store import files
from taskmill.store.lock import RunLock

logger = logging.getLogger(__name__)

PREFIX = "taskmill-serve-"

NEW = 60.0
"""Seconds for which a folder without a lock may be that of a server which is just starting."""


@contextmanager
def workspaces() -> Iterator[Path]:
    """A folder for this server, gone with the block; what killed servers left is removed first."""
    with suppress(OSError, StoreError):
        sweep_dead_servers(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    lock = RunLock(path / "lock")
    lock.acquire()
    try:
        yield path
    finally:
        lock.release()
        with suppress(OSError):
            files.remove_tree(path)


def sweep_worker(path: Path, pid: int) -> None:
    """Remove what a dead worker left in the server's folder: containers and workspaces."""
    place = worker_place(path, pid)
    if place.exists():
        sweep_leftovers(place)
        with suppress(OSError):
            files.remove_tree(place)


def worker_place(path: Path, pid: int) -> Path:
    """Where the sandboxes of the worker with that pid stand."""
    return path / f"worker-{pid}"


def sweep_dead_servers(parent: Path) -> None:
    """Remove the folders of this user's servers that are not there any more, and what is left of their sandboxes."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            seen = path.lstat()
            if seen.st_uid != os.getuid() or path.is_symlink() or time.time() - seen.st_mtime < NEW:
                continue
            if RunLock(path / "lock").holder() is not None:
                continue
            for place in path.glob("worker-*"):
                sweep_leftovers(place)
            files.remove_tree(path)
        except Exception as error:  # a new server does not depend on it
            logger.warning("what a killed server left in %r could not be removed: %s", str(path), error)
