from __future__ import annotations

import asyncio
import json

import pytest

from taskmill.records import ToolCall
from taskmill.tools import TOOLSETS, ToolBox, ToolContext
from taskmill.tools.memory import notes_text, read_notes


async def ask(context, name, **arguments):
    [(message, event)] = await ToolBox(TOOLSETS[name].tools(), context).run(
        [ToolCall("c", name, json.dumps(arguments))]
    )
    return (json.loads(message.content) if event.success else message.content), event.success


# -- todo -----------------------------------------------------------------------------------------------------


async def test_the_list_is_written_merged_and_read(context):
    a, b = {"id": "1", "content": "look"}, {"id": "2", "content": "write", "status": "in_progress"}
    written, _ = await ask(context, "todo", todos=[a, b])
    assert written == {
        "todos": [{**a, "status": "pending"}, b],
        "summary": {"total": 2, "pending": 1, "in_progress": 1, "completed": 0, "cancelled": 0},
    }
    done = {**b, "status": "completed"}
    new = {"id": "3", "content": "test", "status": "pending"}
    merged, _ = await ask(context, "todo", todos=[new, done], merge=True)
    assert merged["todos"] == [{**a, "status": "pending"}, done, new]
    assert (await ask(context, "todo"))[0] == merged
    assert (await ask(context, "todo", todos=[]))[0]["todos"] == []


async def test_the_list_is_of_one_rollout(context, sandbox):
    await ask(context, "todo", todos=[{"id": "1", "content": "look"}])
    assert (await ask(ToolContext("other", sandbox), "todo"))[0]["todos"] == []


@pytest.mark.parametrize(
    ("todos", "said"),
    [
        ([{"id": "1", "content": "a"}, {"id": "1", "content": "b"}], "same id"),
        ([{"id": "1", "content": " "}], "task '1': content"),
        ([{"id": "1", "content": "a", "status": "done"}], "'todos.0.status'"),
        ([{"id": str(n), "content": "a"} for n in range(201)], "at most 200"),
    ],
)
async def test_a_list_in_doubt_is_refused_and_the_old_one_stays(context, todos, said):
    before, _ = await ask(context, "todo", todos=[{"id": "0", "content": "stay"}])
    text, success = await ask(context, "todo", todos=todos)
    assert (success, said in text) == (False, True), text
    assert (await ask(context, "todo"))[0] == before


# -- memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def keeper(sandbox, tmp_path):
    return ToolContext("r", sandbox, memory_path=str(tmp_path / "deep" / "memory.md"))


async def test_notes_are_kept_in_a_file_for_people(keeper):
    await ask(keeper, "memory", action="add", content="the tests need a database\n\nstart it first")
    await ask(keeper, "memory", action="add", target="user", content="likes short answers")
    text = "# Notes\n- the tests need a database\n  start it first\n\n# User\n- likes short answers"
    assert notes_text(keeper.memory_path) == text
    assert (await ask(keeper, "memory", action="read"))[0] == {
        "target": "memory",
        "notes": ["the tests need a database\nstart it first"],
        "characters": 40,
        "limit": 8000,
    }
    await ask(keeper, "memory", action="replace", old_text="database", content="the tests need nothing")
    assert read_notes(keeper.memory_path)["memory"] == ["the tests need nothing"]
    await ask(keeper, "memory", action="remove", old_text="nothing")
    assert read_notes(keeper.memory_path) == {"memory": [], "user": ["likes short answers"]}


async def test_what_people_write_into_the_file_is_read(keeper, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "memory.md").write_text("just a line\n\n## Something else\n- a\n  b\n# user\n- c\n")
    assert read_notes(keeper.memory_path) == {"memory": ["just a line", "a\nb"], "user": ["c"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"action": "replace", "old_text": "tea", "content": "x"}, "2 notes of 'memory' contain 'tea'"),
        ({"action": "remove", "old_text": "milk"}, "no notes of 'memory' contain 'milk'"),
        ({"action": "remove"}, "'old_text' is missing"),
        ({"action": "add"}, "'content' is missing"),
        ({"action": "add", "content": "x" * 8000}, "may have 8,000"),
        ({"action": "forget"}, "argument 'action'"),
    ],
)
async def test_a_change_in_doubt_is_refused(keeper, arguments, said):
    await ask(keeper, "memory", action="add", content="green tea")
    await ask(keeper, "memory", action="add", content="black tea")
    text, success = await ask(keeper, "memory", **arguments)
    assert (success, said in text) == (False, True), text
    assert read_notes(keeper.memory_path)["memory"] == ["green tea", "black tea"]


async def test_two_agents_of_one_process_lose_no_note(keeper, sandbox):
    other = ToolContext("o", sandbox, memory_path=keeper.memory_path)
    calls = [ask((keeper, other)[n % 2], "memory", action="add", content=f"note {n}") for n in range(12)]
    await asyncio.gather(*calls)
    assert sorted(read_notes(keeper.memory_path)["memory"]) == sorted(f"note {n}" for n in range(12))


async def test_without_a_memory_nothing_is_kept(context):
    text, success = await ask(context, "memory", action="add", content="x")
    assert (success, "no memory in this conversation" in text) == (False, True)
    assert notes_text("/nowhere/at/all.md") == ""
