"""The temporary folders of servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from taskmill.serve.places import NEW, PREFIX, sweep_dead_servers, sweep_worker, worker_place, workspaces
from taskmill.store.lock import RunLock
from tests.serve.waiting import all_gone


def left_behind(parent: Path, name: str) -> Path:
    path = parent / f"{PREFIX}{name}"
    (path / "worker-7" / "rollout-1" / "workspace").mkdir(parents=True)
    (path / "worker-7" / "rollout-1" / "workspace" / "file").write_text("x")
    long_ago = path.stat().st_mtime - NEW - 1
    os.utime(path, (long_ago, long_ago))
    return path


def test_a_server_has_a_folder_that_goes_with_it() -> None:
    with workspaces() as path:
        worker_place(path, 3).mkdir()
        assert path.stat().st_mode & 0o077 == 0, "nobody else looks in"
    assert not path.exists()


def test_folders_of_killed_servers_are_removed_and_those_of_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = left_behind(tmp_path, "dead")
    living = left_behind(tmp_path, "living")
    lock = RunLock(living / "lock")
    lock.acquire()
    os.utime(living, (0, 0))
    starting = tmp_path / f"{PREFIX}starting"
    starting.mkdir()
    others = tmp_path / "something-else"
    others.mkdir()
    sweep_dead_servers(tmp_path)
    assert not dead.exists()
    assert (living / "worker-7" / "rollout-1" / "workspace" / "file").exists()
    assert starting.exists()
    assert others.exists()
    lock.release()


def test_a_link_to_elsewhere_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    sweep_dead_servers(tmp_path)
    assert target.exists()


async def test_what_a_dead_worker_left_is_removed(tmp_path: Path) -> None:
    from taskmill.sandbox.host import MARK
    from taskmill.sandbox.leftovers import tag

    path = left_behind(tmp_path, "mine")
    other = worker_place(path, 8)
    other.mkdir()
    mark = f"{tag(worker_place(path, 7).resolve())}.rollout-1"
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    sweep_worker(path, 7)
    await all_gone({process.pid})
    process.wait()
    process.stdout.close()
    assert not worker_place(path, 7).exists()
    assert other.exists()
