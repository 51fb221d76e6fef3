"""What bubblewrap keeps from a rollout, and what paths may not do in any kind of sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

import taskmill
from taskmill.errors import ConfigurationError, SandboxError, ToolRefusedError
from taskmill.sandbox import bubblewrap, choose, host
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import describe, open_sandboxes
from taskmill.sandbox.host import ProcessHost
from tests.sandbox.conftest import BUBBLEWRAP

confined = pytest.mark.parametrize("kind", [BUBBLEWRAP])


@confined
async def test_the_system_is_read_only(sandbox):
    for target in (
        "/usr/x",
        "/usr/bin/env",
        "/etc/x",
        "/etc/passwd",
        "/x",
        "/dev/x",
        "/run/x",
        "/proc/sys/kernel/core_pattern",
    ):
        result = await sandbox.run(f"echo x >> {target}", timeout=30)
        assert result.exit_code != 0, target


@confined
async def test_the_users_files_are_not_there(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sk-very-secret")
    hidden = [secret, Path.home() / ".ssh", Path("/etc/shadow"), Path("/etc/ssl/private"), Path(__file__)]
    for path in hidden:
        result = await sandbox.run(["ls", str(path)], timeout=30)
        assert "No such file" in result.output, path
    result = await sandbox.run(
        "ls -A /tmp; ls -A /var/tmp; ls /home /var /opt /srv /mnt /sys 2>/dev/null", timeout=30
    )
    assert result.output.split() == ["/var:", "tmp"]


@confined
async def test_other_processes_are_not_there(sandbox):
    result = await sandbox.run(f"ls -d /proc/[0-9]*; kill -0 {os.getpid()}", timeout=30)
    assert len([line for line in result.output.splitlines() if line.startswith("/proc/")]) <= 3
    assert "No such process" in result.output


@confined
async def test_the_first_process_can_not_be_killed_from_inside(sandbox):
    result = await sandbox.run("kill -KILL 1; kill -TERM 1; kill -STOP 1; echo on", timeout=30)
    assert result.output.endswith("on\n")
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


INTRUDES = """
import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long] * 4
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    assert libc.ptrace(request, 1, 0, 0) == -1
    assert ctypes.get_errno() == 1, os.strerror(ctypes.get_errno())
for name, mode in (("mem", os.O_RDWR), ("mem", os.O_RDONLY), ("environ", os.O_RDONLY), ("fd/0", os.O_RDONLY)):
    try:
        os.open(f"/proc/1/{name}", mode)
    except OSError:
        continue
    raise SystemExit(f"/proc/1/{name} was opened")
first = os.pidfd_open(1)
for number in range(64):
    assert libc.syscall(438, first, number, 0) == -1, "pidfd_getfd gave a descriptor"
own = os.fork()
if not own:
    os.read(0, 1)
    os._exit(0)
assert libc.ptrace(16, own, 0, 0) == 0, "its own processes a command may trace"
os.waitpid(own, 0)
os.kill(own, 9)
print("kept out")
"""


@confined
async def test_the_first_process_can_not_be_traced_read_or_robbed_of_its_descriptors(sandbox):
    result = await sandbox.run([host.interpreter(), "-c", INTRUDES], timeout=30)
    assert result.output == "kept out\n"
    assert (await sandbox.run("exit 3", timeout=30)).exit_code == 3


@confined
async def test_no_capability_and_no_way_to_gain_one(sandbox):
    status = (await sandbox.run(["cat", "/proc/self/status"], timeout=30)).output
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert (await sandbox.run("mount -t tmpfs none /tmp", timeout=30)).exit_code != 0
    if bubblewrap._hardened():
        assert (await sandbox.run(["unshare", "-Ur", "true"], timeout=30)).exit_code != 0


IMPORTS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, "{}/lib")
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import open_sandboxes
"""

FORK = """
import os, time
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except BlockingIOError:
    print("refused by the kernel:", count < 30)
"""

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print('reached')"


@confined
async def test_the_network_is_refused_unless_asked_for(sandboxes):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        closed = await sandboxes().run(["python3", "-c", CONNECT, "127.0.0.1", port], timeout=30)
        assert "ConnectionRefused" in closed.output
        away = await sandboxes().run(["python3", "-c", CONNECT, "192.0.2.1", "80"], timeout=30)
        assert "unreachable" in away.output
        opened = sandboxes(limits=SandboxLimits(network=True))
        assert (
            await opened.run(["python3", "-c", CONNECT, "127.0.0.1", port], timeout=30)
        ).output == "reached\n"


@confined
async def test_temporary_files_are_kept_between_commands_and_go_with_the_rollout(sandbox, tmp_path):
    await sandbox.run("echo x > /tmp/a; echo y > /var/tmp/b; echo z > /dev/shm/c", timeout=30)
    assert (await sandbox.run("cat /tmp/a /var/tmp/b /dev/shm/c", timeout=30)).output == "x\ny\nz\n"
    assert sandbox.root == "/workspace"
    await sandbox.close()
    assert list((tmp_path / "sandboxes").iterdir()) == []


@confined
async def test_programs_find_what_they_need(sandbox):
    result = await sandbox.run(
        "id -un; date +%Z; python3 -c 'import ssl, json, ctypes, multiprocessing; "
        'print(ssl.create_default_context().cert_store_stats()["x509_ca"] > 0 or "no certificates", '
        "multiprocessing.Queue() is not None)'; hostname; locale charmap; awk 'BEGIN { print 1 + 1 }'",
        timeout=60,
    )
    lines = result.output.split("\n")
    assert lines[0] == subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    assert lines[3:6] == ["taskmill", "UTF-8", "2"]
    assert "Error" not in result.output


@confined
async def test_an_absolute_link_made_inside_leads_nowhere_outside(sandbox, tmp_path):
    (tmp_path / "outside").write_text("secret")
    await sandbox.run(f"ln -s {tmp_path}/outside link; ln -s / all", timeout=30)
    for path in ("link", f"all{tmp_path}/outside"):
        with pytest.raises(ToolRefusedError):
            await sandbox.read_bytes(path)


@pytest.fixture
def open_folder():
    """A folder every user may enter; pytest's own are for one."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@confined
def test_it_works_for_a_user_who_is_not_root(kind, open_folder):
    if os.getuid() != 0:
        pytest.skip("the other tests already run as an ordinary user")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None or shutil.which("setpriv") is None:
        pytest.skip("needs a python3 that any user can run, and setpriv")
    for package in (taskmill, msgspec):
        shutil.copytree(Path(package.__file__).parent, open_folder / "lib" / package.__name__)
    probe = subprocess.run([python, "-I", "-c", IMPORTS.format(open_folder)], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"{python} can't run taskmill: {probe.stderr[-200:]}")
    script = f"""{IMPORTS.format(open_folder)}
async def main():
    factory = open_sandboxes("bubblewrap", directory=Path({str(open_folder)!r}), limits=SandboxLimits(processes=30))
    sandbox = factory.create("r")
    await sandbox.write_bytes("in", b"from outside")
    result = await sandbox.run("id -u; cat in; echo; echo more >> in", timeout=30)
    bomb = await sandbox.run(["python3", "-c", {FORK!r}], timeout=30)
    text = await sandbox.read_bytes("in")
    await sandbox.close()
    print([result.output, text, bomb.output])
asyncio.run(main())
"""
    run = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-I", "-c", script]
    environment = {"PATH": os.environ["PATH"], "HOME": str(open_folder)}
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=60)
    expected = ["65534\nfrom outside\n", b"from outsidemore\n", "refused by the kernel: True\n"]
    assert done.stdout.strip() == str(expected), done.stderr


# -- paths, in every kind -------------------------------------------------------------------------------------


async def test_files_are_read_written_listed_and_removed(sandbox):
    await sandbox.write_bytes("a/b.txt", b"1")
    await sandbox.write_bytes(f"{sandbox.root}/c", b"\0\xff")
    await sandbox.run("mkdir -p d; echo hi > d/e; ln -s e d/link", timeout=30)
    assert await sandbox.list_files() == ["a/b.txt", "c", "d/e", "d/link"]
    assert await sandbox.list_files(f"{sandbox.root}/d") == ["e", "link"]
    assert await sandbox.list_files(limit=2) == ["a/b.txt", "c"]
    assert await sandbox.read_bytes("d/link") == b"hi\n"
    assert await sandbox.read_bytes("d/e", limit=1) == b"h"
    await sandbox.remove("d")
    await sandbox.remove(f"{sandbox.root}/c")
    assert await sandbox.list_files(sandbox.root) == ["a/b.txt"]
    with pytest.raises(FileNotFoundError, match="d/e"):
        await sandbox.read_bytes("d/e")
    assert (await sandbox.run("cat a/b.txt", timeout=30)).output == "1"


@pytest.mark.parametrize(
    "path",
    [
        "../x", "a/../../x", "/etc/passwd", "{root}/../x", "{root}x/y", "up/x", "etc/passwd", "loop/x", "a\0b",
        "up/../../etc/passwd", "file/../../x",
    ],
)  # fmt: skip
async def test_a_path_that_leaves_the_workspace_is_refused(sandbox, path):
    await sandbox.write_bytes("file", b"")
    await sandbox.run("mkdir a; ln -s .. up; ln -s /etc etc; ln -s loop loop", timeout=30)
    path = path.format(root=sandbox.root)
    for use in (
        sandbox.read_bytes(path),
        sandbox.write_bytes(path, b"x"),
        sandbox.remove(path),
        sandbox.list_files(path),
    ):
        with pytest.raises((ToolRefusedError, NotADirectoryError)):
            await use


async def test_what_is_no_regular_file_does_not_hang_a_reader(sandbox):
    await sandbox.run("mkfifo fifo; mkdir dir; ln -s /dev/zero zero", timeout=30)
    for name in ("fifo", "zero"):
        with pytest.raises(ToolRefusedError):
            await sandbox.read_bytes(name)
        with pytest.raises(ToolRefusedError):
            await sandbox.write_bytes(name, b"x")
    with pytest.raises(IsADirectoryError):
        await sandbox.read_bytes("dir")


async def test_an_absolute_link_within_the_workspace_is_followed(sandbox):
    await sandbox.run("mkdir d; echo hi > d/e; ln -s $PWD/d/e link; ln -s $PWD/d folder", timeout=30)
    assert await sandbox.read_bytes("link") == b"hi\n"
    await sandbox.write_bytes("folder/new", b"x")
    assert await sandbox.list_files("folder") == ["e", "new"]


# -- the row's working directory ------------------------------------------------------------------------------


async def test_a_relative_working_directory_is_made_in_the_workspace(sandboxes):
    sandbox = sandboxes(cwd="src/app")
    assert sandbox.cwd == f"{sandbox.root}/src/app"
    assert (await sandbox.run("pwd", timeout=30)).output == f"{sandbox.cwd}\n"


async def test_a_directory_of_the_machine_is_copied_so_that_rows_never_share_it(sandboxes, tmp_path):
    source = tmp_path / "project"
    (source / "sub").mkdir(parents=True)
    (source / "sub/run.sh").write_text("echo ran")
    (source / "sub/run.sh").chmod(0o755)
    sandbox = sandboxes(cwd=str(source))
    assert sandbox.cwd == sandbox.root
    assert (await sandbox.run("bash sub/run.sh; rm -r sub", timeout=30)).output == "ran\n"
    assert (source / "sub/run.sh").exists()
    assert (await sandboxes(cwd=str(source)).run("ls", timeout=30)).output == "sub\n"


async def test_a_directory_too_large_to_copy_is_refused(sandboxes, tmp_path, monkeypatch):
    monkeypatch.setattr("taskmill.sandbox.local.COPY_BYTES", 10)
    (tmp_path / "big").mkdir()
    (tmp_path / "big/file").write_bytes(b"x" * 11)
    with pytest.raises(SandboxError, match="10 bytes"):
        await sandboxes(cwd=str(tmp_path / "big")).run("true", timeout=30)


async def test_a_working_directory_that_can_not_be_is_refused(sandboxes):
    with pytest.raises(SandboxError, match=r"\.\./up"):
        sandboxes(cwd="../up")
    with pytest.raises(SandboxError, match="/no/such"):
        await sandboxes(cwd="/no/such").run("true", timeout=30)


# -- choosing -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """What was found out about bubblewrap is forgotten, before and after."""
    caches = (bubblewrap.problem, bubblewrap._try, bubblewrap._hardened, bubblewrap._arguments)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def fake_bwrap(folder: Path, text: str) -> None:
    (folder / "bwrap").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bwrap").chmod(0o755)


async def test_auto_without_bubblewrap_is_plain_and_says_so(fresh, tmp_path):
    fresh.setenv("PATH", str(tmp_path))
    assert "not installed" in describe("auto")
    assert describe("auto").startswith("plain: ")
    assert open_sandboxes("auto", directory=tmp_path).create("r").kind == "plain"
    with pytest.raises(SandboxError, match="not installed"):
        open_sandboxes("bubblewrap", directory=tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is there on Linux only")
def test_auto_with_a_bubblewrap_that_does_not_work_says_why(fresh, tmp_path):
    fake_bwrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    fresh.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert describe("auto").endswith(
        "bwrap does not work here: bwrap: No permissions to create new namespace"
    )


@confined
async def test_an_older_bubblewrap_without_all_options_is_used(fresh, kind, tmp_path):
    real = shutil.which("bwrap")
    fake_bwrap(
        tmp_path, f'case "$*" in *--disable-userns*) echo unknown >&2; exit 1;; esac; exec {real} "$@"'
    )
    fresh.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert describe("auto").startswith("bubblewrap: ")
    sandbox = open_sandboxes(directory=tmp_path / "sandboxes").create("r")
    assert (await sandbox.run("echo works", timeout=30)).output == "works\n"
    await sandbox.close()


@pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap is there on Linux only")
@pytest.mark.parametrize("at", ["any time", "before it is spoken to"])
async def test_a_bubblewrap_that_fails_later_is_an_error_with_its_reason(fresh, tmp_path, at):
    if at == "before it is spoken to":
        send = ProcessHost._send

        def late(host, message, descriptors):
            host._process.wait(30)
            send(host, message, descriptors)

        fresh.setattr(ProcessHost, "_send", late)
    fake_bwrap(tmp_path, "case \"$*\" in *listdir*) exit 0;; esac; echo 'bwrap: no space' >&2; exit 1")
    fresh.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = open_sandboxes("bubblewrap", directory=tmp_path / "sandboxes").create("r")
    with pytest.raises(SandboxError, match="no space"):
        await sandbox.run("true", timeout=30)
    await sandbox.close()


def test_the_probe_runs_once(fresh, tmp_path):
    log = tmp_path / "log"
    fake_bwrap(tmp_path, f"echo ran >> {log}; exit 0")
    fresh.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if sys.platform == "linux":
        for _ in range(3):
            open_sandboxes("auto", directory=tmp_path)
            describe("auto")
        assert log.read_text() == "ran\n"


def test_a_kind_there_is_not(tmp_path):
    with pytest.raises(ConfigurationError, match="'bubblewrap', 'plain', 'docker'"):
        open_sandboxes("jail", directory=tmp_path)


def test_docker_by_name_needs_an_image(tmp_path):
    with pytest.raises(SandboxError, match="image"):
        open_sandboxes("docker", directory=tmp_path).create("r")
    assert describe("docker").startswith("docker: ")
    assert choose.describe("plain").startswith("plain: ")
