"""The process between a supervisor and one worker: whatever dies, nothing of the worker is left.

It forks the worker, tells the supervisor at once how it ended, and ends what the worker left behind. When the
supervisor is gone, however it died, it ends the worker. It imports next to nothing and runs no code of others, so
that no tight loop or lost lock in a worker can keep it from that.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

PATIENCE = 5.0
"""Seconds for sandboxes that lost their worker to end what runs in them, before they are killed."""

LOOK = 1.0
"""Seconds between two looks at whether the supervisor is there."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(channel: int, life: int, supervisor: int) -> None:
    """Fork; returns in the worker alone. `life` is the socket by which the supervisor's death is known."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (life, wake, waker):
            os.close(fd)
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        return
    os.close(channel)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _kill_group(worker))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _watch(worker, life, wake, supervisor)


def _watch(worker: int, life: int, wake: int, supervisor: int) -> None:
    """Wait for the end of the worker or of the supervisor, clean up, and exit as the worker did."""
    status = None
    forsaken = False
    while status is None:
        ready, _, _ = select.select([life, wake], [], [], None if not forsaken else PATIENCE)
        if wake in ready:
            os.read(wake, 4096)
        if (life in ready and not forsaken) or os.getppid() != supervisor:
            forsaken = True
            _kill_group(worker)
        status = _reap(worker)
    code = os.waitstatus_to_exitcode(status)
    try:
        os.write(life, f"{code}\n".encode())
    except OSError:
        pass
    _kill_group(worker)
    _bury_rest()
    os._exit(code if code >= 0 else 128 - code)


def _reap(worker: int) -> int | None:
    """Bury what is dead; the worker's status if it was among it."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == worker:
            status = ended


def _bury_rest() -> None:
    """Wait for what the worker left to this process, and kill what is still there after a while."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline + PATIENCE:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline:
                for child in _children():
                    _kill(child)
            time.sleep(0.02)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(pid) for pid in listed.read().split()]
    except OSError:
        return []


def _kill_group(worker: int) -> None:
    try:
        os.killpg(worker, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _kill(worker)  # it has not yet become a group of its own


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _prctl(option: int, value: int) -> None:
    """Linux's `prctl`; elsewhere nothing, and what it is for is done by watching."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
