from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from taskmill.errors import RunLockedError
from taskmill.store.lock import RunLock

HOLDER = """
    import sys
    from pathlib import Path
    from taskmill.store.lock import RunLock
    lock = RunLock(Path(sys.argv[1]))
    lock.acquire()
    print("locked", flush=True)
    sys.stdin.read()
    lock.release()
    print("released", flush=True)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_refused_by_name_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = start_holder(path)
    lock = RunLock(path)
    with pytest.raises(RunLockedError) as refused:
        lock.acquire()
    assert f"process {other.pid} on host {os.uname().nodename!r}, since 20" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    holder = lock.holder()
    assert holder is not None
    assert holder.pid == other.pid
    assert other.communicate("")[0] == "released\n"
    assert lock.holder() is None
    lock.acquire()
    lock.release()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = start_holder(path)
    other.kill()
    other.communicate()
    assert json.loads(path.read_text())["pid"] == other.pid
    lock = RunLock(path)
    assert lock.holder() is None
    lock.acquire()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()


def test_of_many_threads_one_gets_the_lock(tmp_path: Path) -> None:
    locks = [RunLock(tmp_path / "lock") for _ in range(8)]
    got: list[RunLock] = []
    start = threading.Barrier(len(locks))

    def take(lock: RunLock) -> None:
        start.wait()
        try:
            lock.acquire()
        except RunLockedError:
            return
        got.append(lock)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


@pytest.mark.parametrize(
    "text", ["", "{", '{"pid": 1}', "\0" * 100, '{"pid":4194999,"host":"elsewhere","since":"x"}']
)
def test_what_stands_in_an_unheld_lock_does_not_matter(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    lock = RunLock(path)
    lock.acquire()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


def test_a_pid_given_to_another_process_is_not_taken_for_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = RunLock(path)
    lock.acquire()
    text = json.loads(path.read_text())
    assert lock.holder() is not None
    path.write_text(json.dumps({**text, "started": "1"}))
    assert lock.holder() is None
    lock.release()


def test_where_the_file_system_has_no_locks_the_text_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    first, second = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_reader_finds_no_holder_where_there_was_never_a_lock(tmp_path: Path) -> None:
    assert RunLock(tmp_path / "none" / "lock").holder() is None
    assert not (tmp_path / "none").exists()


def test_a_refusal_because_of_another_host_names_the_file_to_remove_if_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text('{"pid": 1, "host": "elsewhere", "since": "2026-01-31T12:00:00+00:00"}')
    with pytest.raises(RunLockedError) as refused:
        RunLock(path).check()
    assert f"If that host is gone for good, remove the file {str(path)!r}." in str(refused.value)


def test_a_refusal_because_of_a_process_here_names_no_file_to_remove(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = RunLock(path)
    lock.acquire()
    with pytest.raises(RunLockedError) as refused:
        RunLock(path).check()
    assert "remove" not in str(refused.value)
    lock.release()
