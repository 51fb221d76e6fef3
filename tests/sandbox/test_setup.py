"""What is done before the first use of a sandbox: once, whoever waits, and undone by closing it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskmill.errors import SandboxError
from taskmill.records import ToolCall
from taskmill.sandbox.setup import SetUp
from taskmill.store import files
from taskmill.tools import ToolBox, ToolContext, tool


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(b"x" * 6)
    return folder


class HeldCopy:
    """The copy of a row's directory, which waits after it began until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.copies = 0

    def __call__(self, source, root, limit_bytes, limit_files, given_up) -> None:
        self.copies += 1
        self.begun.set()
        while not self.go_on.wait(0.005) and not given_up():
            pass
        copy(source, root, limit_bytes, limit_files, given_up)


copy = files.copy_tree_into


@pytest.fixture
def held(monkeypatch):
    held = HeldCopy()
    monkeypatch.setattr("taskmill.store.files.copy_tree_into", held)
    yield held
    held.go_on.set()


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.005)


async def test_a_copy_that_met_its_limit_is_deleted_and_not_tried_again(
    sandboxes, source, tmp_path, monkeypatch
):
    monkeypatch.setattr("taskmill.sandbox.local.COPY_BYTES", 10)
    sandbox = sandboxes(cwd=str(source))
    for _ in range(2):
        with pytest.raises(SandboxError, match="10 bytes"):
            await sandbox.run("true", timeout=30)
    assert len(list(tmp_path.glob("sandboxes/*/workspace/*"))) == 1
    await sandbox.close()
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_who_gives_up_waiting_neither_stops_nor_repeats_it(sandboxes, source, held):
    sandbox = sandboxes(cwd=str(source))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await sandbox.run("true", timeout=30)
    later = asyncio.ensure_future(sandbox.list_files())
    await until(held.begun)
    assert sandbox.setting_up
    held.go_on.set()
    assert await later == ["a", "b", "c"]
    assert (await sandbox.run("ls", timeout=30)).output == "a\nb\nc\n"
    assert (held.copies, sandbox.setting_up) == (1, False)


async def test_a_tools_clock_does_not_run_out_while_the_sandbox_is_set_up(sandboxes, source, held):
    @tool(timeout=0.05)
    async def look(*, context: ToolContext) -> str:
        """Look around."""
        return str(await context.sandbox.list_files())

    @tool(timeout=0.05)
    async def hang(*, context: ToolContext) -> str:
        """Never end."""
        await asyncio.Event().wait()
        return ""

    context = ToolContext("r", sandboxes(cwd=str(source)))
    box = ToolBox([look, hang], context)
    first = asyncio.ensure_future(box.run([ToolCall("1", "look")]))
    await until(held.begun)
    await asyncio.wait([first], timeout=0.2)  # the clock of the tool rings a few times
    assert not first.done()
    held.go_on.set()
    ((message, event),) = await first
    assert (message.content, event.success) == ("['a', 'b', 'c']", True)
    ((_, event),) = await box.run([ToolCall("2", "hang")])
    assert event.error_type == "ToolTimeoutError"


async def test_closing_ends_it_and_leaves_nothing(sandboxes, source, held, tmp_path):
    sandbox = sandboxes(cwd=str(source))
    waiting = asyncio.ensure_future(sandbox.run("true", timeout=30))
    await until(held.begun)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_more_copies_that_hang_than_a_pool_has_threads_hold_no_other_rollout_up(
    sandboxes, source, held, tmp_path
):
    stuck = [sandboxes(cwd=str(source)) for _ in range(40)]
    waiting = [asyncio.ensure_future(sandbox.list_files()) for sandbox in stuck]
    while held.copies < len(stuck):
        await asyncio.sleep(0.005)
    other = sandboxes()
    await other.write_bytes("x", b"")
    assert await other.list_files() == ["x"]
    held.go_on.set()
    assert await asyncio.gather(*waiting) == [["a", "b", "c"]] * len(stuck)


async def test_it_has_a_deadline_and_fails_for_everybody_alike():
    attempts = 0

    async def make() -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.Event().wait()

    set_up = SetUp(make, 0.02)
    assert (set_up.begun, set_up.going_on) == (False, False)
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"within 0\.02 seconds"):
            await set_up.done()
    assert (attempts, set_up.begun, set_up.going_on) == (1, True, False)
    await set_up.stop()


async def test_a_time_limit_met_inside_is_not_taken_for_its_own_deadline():
    async def make() -> None:
        raise TimeoutError("the daemon's own")

    with pytest.raises(TimeoutError, match="the daemon's own"):
        await SetUp(make, 30).done()
