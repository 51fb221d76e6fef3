"""Finding what an earlier run left behind: processes by their mark, folders by their place."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from taskmill.sandbox.host import MARK
from taskmill.store import files

logger = logging.getLogger(__name__)


def tag(directory: Path) -> str:
    """The beginning of the mark of every process whose workspace stands in `directory`."""
    return hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()


def kill_marked(prefix: str) -> int:
    """Kill every process of this user whose mark begins with `prefix`, and give their number.

    They are looked for again until none is found, as a process may have made another meanwhile.
    """
    import psutil

    killed: set[int] = set()
    for _ in range(20):
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if (
                    process.environ().get(MARK, "").startswith(prefix)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        if not found:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        killed.update(found)
    return len(killed)


def sweep_leftovers(directory: Path) -> int:
    """Kill processes and containers, and delete workspaces, that a killed run left in `directory`.

    To be called before the first sandbox is made there, by whoever holds the run's lock: what a living run uses
    looks the same. Gives the number of processes, containers and workspaces that were removed; a workspace that
    can't be deleted is said and left.
    """
    directory = directory.resolve()
    count = kill_marked(tag(directory) + ".")
    from taskmill.sandbox.docker import remove_containers

    count += remove_containers(tag(directory))
    if directory.is_dir():
        for entry in sorted(directory.iterdir()):
            try:
                if entry.is_dir() and (entry / "workspace").is_dir():
                    files.remove_tree(entry)
                    count += 1
            except Exception as error:  # a run that is to go on does not depend on it
                logger.warning("the leftover workspace %r could not be deleted: %s", str(entry), error)
    return count


__all__ = ["kill_marked", "sweep_leftovers", "tag"]
