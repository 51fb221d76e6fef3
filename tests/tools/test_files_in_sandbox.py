"""The file tools over a real workspace, with the traps a program in it may have laid."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from taskmill.records import ToolCall
from taskmill.sandbox.choose import open_sandboxes
from taskmill.store.jsonl import encode_row
from taskmill.tools import TOOLSETS, ToolBox, ToolContext


@pytest.fixture
async def workspace(tmp_path):
    sandbox = open_sandboxes("plain", directory=tmp_path / "sandboxes").create("rollout")
    await sandbox.write_bytes("src/main.py", b"x = 1\n")
    yield sandbox
    await sandbox.close()


@pytest.fixture
def do(workspace):
    box = ToolBox(TOOLSETS["file"].tools(), ToolContext("rollout", workspace))

    async def do(name: str, **arguments) -> tuple[bool, str]:
        [(message, event)] = await box.run([ToolCall("c", name, encode_row(arguments).decode())])
        return event.success, message.content

    return do


async def test_files_are_written_changed_read_and_found(do, workspace):
    assert (await do("write_file", path="docs/a.md", content="# A\n"))[0]
    patch = "*** Begin Patch\n*** Update File: src/main.py\n-x = 1\n+x = 2\n*** Delete File: docs/a.md\n*** End Patch"
    assert await do("patch", mode="patch", patch=patch) == (
        True,
        "Patch applied: updated src/main.py (+1 -1), deleted docs/a.md.",
    )
    assert await do("read_file", path=f"{workspace.root}/src/main.py") == (True, "1|x = 2")
    assert await do("search_files", pattern="x") == (True, "src/main.py:1|x = 2")
    assert await do("search_files", pattern="x", path="src/main.py") == (True, "src/main.py:1|x = 2")
    assert (await do("search_files", target="files", pattern="*"))[1] == "src/main.py"
    assert await do("read_file", path="docs/a.md") == (False, "Error: There is no file 'docs/a.md'.")


async def test_links_out_of_the_workspace_and_special_files_are_refused_at_once(do, workspace, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("not for the task")
    root = Path(workspace.root)
    (root / "link").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    async with asyncio.timeout(20):
        for path in ("link", "folder/secret", "pipe", str(secret), "../../secret"):
            success, text = await do("read_file", path=path)
            assert (success, "not for the task" in text) == (False, False), (path, text)
            success, _ = await do("write_file", path=path, content="changed")
            assert not success, path
        success, text = await do("search_files", pattern="task|x")
        assert (success, "src/main.py:1|x = 1" in text, "not for" in text) == (True, True, False)
    assert secret.read_text() == "not for the task"


async def test_file_names_that_are_no_text_are_shown(do, workspace):
    (Path(os.fsdecode(os.fsencode(workspace.root) + b"/caf\xe9.txt"))).write_bytes(b"found\n")
    success, text = await do("search_files", pattern="found")
    assert (success, text) == (True, "caf\\udce9.txt:1|found")
