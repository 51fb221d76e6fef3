"""Rows with an image, against a stand-in for docker's command line (see `fake_docker.py`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from taskmill.errors import SandboxError, ToolRefusedError
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import open_sandboxes
from taskmill.sandbox.leftovers import sweep_leftovers

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the stand-in runs commands as a Linux container does"
)


class FakeDocker:
    def __init__(self, folder: Path) -> None:
        self.home = folder / "docker"
        self.home.mkdir()
        program = folder / "bin/docker"
        program.parent.mkdir()
        script = Path(__file__).with_name("fake_docker.py")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} "$@"\n')
        program.chmod(0o755)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        if not (self.home / "log").exists():
            return []
        calls = [json.loads(line) for line in (self.home / "log").read_text().splitlines()]
        return [call for call in calls if verb in (None, call[0])]

    def containers(self) -> list[str]:
        return sorted(path.name for path in self.home.glob("taskmill-*"))


@pytest.fixture
def docker(tmp_path, monkeypatch) -> FakeDocker:
    fake = FakeDocker(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(fake.home))
    return fake


@pytest.fixture
def kind() -> str:
    return "auto"


@pytest.fixture
def testbed(tmp_path) -> Path:
    """A directory of the container's own file system."""
    folder = tmp_path / "testbed"
    folder.mkdir()
    return folder


@pytest.fixture
def sandbox(docker, sandboxes, testbed):
    return sandboxes(image="good:1", cwd=str(testbed))


async def test_nothing_is_asked_of_docker_before_the_first_use(docker, sandboxes):
    sandboxes(image="good:1")
    assert docker.calls() == []


async def test_the_container_is_confined_labelled_and_limited(docker, sandboxes):
    limits = SandboxLimits(memory=1000, processes=7, file_size=500)
    await sandboxes("row 1", image="good:1", limits=limits).run("true", timeout=30)
    (line,) = docker.calls("run")
    assert line[:3] == ["run", "-d", "--init"]
    assert line[-4:] == ["--entrypoint", "sleep", "good:1", "infinity"]
    values = dict(itertools.pairwise(line))
    assert values["--network"] == "none"
    assert (values["--memory"], values["--memory-swap"], values["--pids-limit"]) == ("1000", "1000", "7")
    assert values["-v"].endswith(":/workspace")
    assert values["--label"].startswith("taskmill=")
    assert values["--name"].startswith("taskmill-")
    assert "row-1" in values["--name"]


async def test_a_network_is_given_when_asked_for(docker, sandboxes):
    await sandboxes(image="good:1", limits=SandboxLimits(network=True)).run("true", timeout=30)
    line = docker.calls("run")[0]
    assert line[line.index("--network") + 1] == "bridge"


async def test_a_command_gives_its_output_its_exit_code_and_where_it_stood(sandbox, testbed):
    assert (sandbox.kind, sandbox.root, sandbox.cwd) == ("docker", str(testbed), str(testbed))
    result = await sandbox.run("echo out; echo err >&2; mkdir d; cd d; exit 3", timeout=30)
    assert result.exit_code == 3
    assert sorted(result.output.split()) == ["err", "out"]
    assert result.cwd == f"{testbed}/d"
    assert (await sandbox.run("pwd", timeout=30, cwd=result.cwd)).output == f"{testbed}/d\n"
    assert (await sandbox.run(["printf", "%s", "a b"], timeout=30)).output == "a b"
    assert (await sandbox.run("exec 1>file; echo x", timeout=30)).output == ""
    assert (testbed / "file").read_text() == "x\n"
    assert (await sandbox.run("cat", timeout=30, stdin=b"given")).output == "given"
    assert (await sandbox.run("echo $GIVEN", timeout=30, env={"GIVEN": "v"})).output == "v\n"


async def test_keys_in_the_environment_are_invisible(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-very-secret")
    assert "sk-very-secret" not in (await sandbox.run("env", timeout=30)).output


async def test_long_output_is_cut_and_where_it_stood_is_still_known(docker, sandboxes, testbed):
    sandbox = sandboxes(image="good:1", cwd=str(testbed), limits=SandboxLimits(output=2000))
    result = await sandbox.run("seq 100000; cd /usr", timeout=30)
    assert result.output.endswith("\n100000\n")
    assert result.dropped > 500_000
    assert result.cwd == "/usr"
    assert len(result.output) < 2100


async def test_an_image_there_is_not_is_asked_for_once(docker, sandboxes):
    sandbox = sandboxes(image="none:9")
    for _ in range(3):
        with pytest.raises(SandboxError, match=r"(?s)none:9.*pull access denied"):
            await sandbox.run("true", timeout=30)
    with pytest.raises(SandboxError, match="none:9"):
        await sandbox.read_bytes("x")
    assert len(docker.calls("run")) == 1


async def test_who_gives_up_waiting_for_an_image_neither_stops_nor_repeats_the_pull(docker, sandboxes):
    (docker.home / "pulling").touch()
    sandbox = sandboxes(image="good:1")
    first = asyncio.ensure_future(sandbox.run("true", timeout=30))
    while not docker.calls("run"):
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    later = asyncio.ensure_future(sandbox.run("echo later", timeout=30))
    await asyncio.sleep(0)
    assert sandbox.setting_up
    (docker.home / "pulling").unlink()
    assert (await later).output == "later\n"
    assert len(docker.calls("run")) == 1


async def test_closing_while_an_image_is_pulled_ends_the_pull(docker, sandboxes, tmp_path):
    (docker.home / "pulling").touch()
    sandbox = sandboxes(image="good:1")
    waiting = asyncio.ensure_future(sandbox.run("true", timeout=30))
    while not docker.calls("run"):
        await asyncio.sleep(0.01)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    assert docker.containers() == []
    assert list((tmp_path / "sandboxes").iterdir()) == []


@pytest.mark.parametrize("image", ["--privileged", "-v/:/host", "", "a b", "x\n"])
def test_an_image_is_never_taken_for_an_option(docker, sandboxes, image):
    with pytest.raises(SandboxError, match="image"):
        sandboxes(image=image)


async def test_a_directory_the_image_does_not_have_is_an_error(docker, sandboxes, tmp_path):
    with pytest.raises(SandboxError, match="there is no directory"):
        await sandboxes(image="good:1", cwd=f"{tmp_path}/nowhere").run("true", timeout=30)


async def test_a_relative_directory_is_made_in_the_workspace(docker, sandboxes, tmp_path):
    sandbox = sandboxes(image="good:1", cwd="a/b")
    assert (sandbox.root, sandbox.cwd) == ("/workspace", "/workspace/a/b")
    assert (await sandbox.run("pwd", timeout=30)).output.endswith("/workspace/a/b\n")


async def test_without_docker_the_row_is_refused_with_a_word_on_what_to_do(sandboxes, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="install it"):
        await sandboxes(image="good:1").run("true", timeout=30)


async def test_a_timeout_kills_inside_the_container(sandbox, leftovers):
    result = await sandbox.run(
        f"echo before; setsid sleep {leftovers.text} & sleep {leftovers.text}", timeout=1.5
    )
    assert result.timed_out
    assert result.output == "before\n"
    assert leftovers.gone()
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_cancelling_kills_inside_the_container(sandbox, leftovers):
    task = asyncio.ensure_future(sandbox.run(f"setsid sleep {leftovers.text} & wait", timeout=60))
    while not any("setsid" not in " ".join(process.cmdline()) for process in leftovers.alive()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers.gone()


async def test_a_container_that_is_gone_is_an_error_of_the_sandbox(docker, sandbox):
    await sandbox.run("true", timeout=30)
    for name in docker.containers():
        (docker.home / name).unlink()
    with pytest.raises(SandboxError, match="No such container"):
        await sandbox.run("true", timeout=30)


async def test_a_background_process(sandbox, leftovers):
    process = await sandbox.start(f"read line; echo got $line; exec sleep {leftovers.text}")
    await process.write("it\n")
    text = ""
    while "got it" not in text:
        text += process.read()
        await asyncio.sleep(0.01)
    await process.kill()
    assert process.exit_code is not None
    assert leftovers.gone()


async def test_files_of_the_container_are_read_and_written_under_its_directory(sandbox, testbed):
    data = bytes(range(256)) * 1000
    await sandbox.write_bytes("new/folder/file", data)
    assert await sandbox.read_bytes(f"{testbed}/new/folder/file") == data
    assert await sandbox.read_bytes("new/folder/file", limit=3) == b"\0\1\2"
    await sandbox.write_bytes("new/folder/file", b"shorter")
    assert (testbed / "new/folder/file").read_bytes() == b"shorter"
    (testbed / "link").symlink_to("new/folder/file")
    assert await sandbox.list_files() == ["link", "new/folder/file"]
    assert await sandbox.list_files("new", limit=1) == ["folder/file"]
    await sandbox.remove("new")
    assert await sandbox.list_files() == ["link"]
    for missing in (sandbox.read_bytes("no"), sandbox.remove("no"), sandbox.list_files("no")):
        with pytest.raises(FileNotFoundError, match="no"):
            await missing
    with pytest.raises(IsADirectoryError):
        await sandbox.read_bytes(".")
    with pytest.raises(ToolRefusedError, match="itself"):
        await sandbox.remove(".")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "up/x", "a/../../x", "a\0b", "etc/passwd"])
async def test_a_path_that_leaves_the_directory_is_refused(sandbox, testbed, path):
    (testbed / "up").symlink_to("..")
    (testbed / "etc").symlink_to("/etc")
    (testbed.parent / "x").write_text("outside")
    for use in (sandbox.read_bytes(path), sandbox.write_bytes(path, b"y"), sandbox.remove(path)):
        with pytest.raises(ToolRefusedError):
            await use
    assert (testbed.parent / "x").read_text() == "outside"


async def test_what_is_no_regular_file_does_not_hang_a_reader(sandbox, testbed):
    os.mkfifo(testbed / "fifo")
    with pytest.raises(ToolRefusedError, match="regular"):
        await sandbox.read_bytes("fifo")
    with pytest.raises(ToolRefusedError, match="regular"):
        await sandbox.write_bytes("fifo", b"x")


async def test_closing_removes_the_container_and_the_workspace(docker, sandbox, tmp_path):
    await sandbox.run("true", timeout=30)
    assert len(docker.containers()) == 1
    await sandbox.close()
    assert docker.containers() == []
    assert list((tmp_path / "sandboxes").iterdir()) == []
    await sandbox.close()
    assert len(docker.calls("rm")) == 1
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true", timeout=30)


async def test_what_the_containers_root_made_is_deleted_by_it(docker, sandboxes, monkeypatch, tmp_path):
    sandbox = sandboxes(image="good:1")
    await sandbox.run("mkdir -p a/b; touch .hidden ..odd a/b/c", timeout=30)
    (workspace,) = tmp_path.glob("sandboxes/*/workspace")
    monkeypatch.setattr("taskmill.sandbox.docker.clear", lambda place: None)
    monkeypatch.setattr("taskmill.sandbox.docker.os.getuid", lambda: 1000)
    await sandbox.close()
    assert list(workspace.iterdir()) == []


async def test_containers_of_a_killed_run_are_swept_and_no_others(docker, tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    left = open_sandboxes(directory=mine).create("a", image="good:1")
    lives = open_sandboxes(directory=other).create("b", image="good:1")
    await left.run("true", timeout=30)
    await lives.run("true", timeout=30)
    await left._host.close()  # as when the process that made it was killed
    assert sweep_leftovers(mine) == 2
    assert len(docker.containers()) == 1
    assert list(mine.iterdir()) == []
    assert (await lives.run("echo lives", timeout=30)).output == "lives\n"
    await lives.close()
