"""`AIAgent`: conversations, their files, and the care of what it opens."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from taskmill import AIAgent
from taskmill.aiagent import WORKSPACES_KEPT
from taskmill.errors import AuthenticationError, ConfigurationError, RunAbortedError
from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.programs.context import LONGEST_FILE
from taskmill.programs.sharegpt import from_sharegpt
from taskmill.records import Message, ToolCall
from taskmill.tools import ToolContext, tool


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("TASKMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return here


def agent_of(script: Any, **options: Any) -> AIAgent:
    model = script if isinstance(script, ScriptedModel) else ScriptedModel(script)
    return AIAgent(model=model, enabled_toolsets=options.pop("enabled_toolsets", []), **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


DOUBLING = Message("assistant", tool_calls=(ToolCall("c", "double", '{"number": 21}'),))


async def test_a_conversation_tells_what_it_came_to() -> None:
    async with agent_of([DOUBLING, "<think>sure</think>42"], tools=[double]) as agent:
        result = await agent.run_conversation("Double 21.", system_message="Be brief.")
    assert result["final_response"] == "42"
    assert (result["completed"], result["partial"], result["api_calls"]) == (True, False, 2)
    assert result["error"] is None
    assert result["usage"] == {
        "input_tokens": 0,
        "output_tokens": 0,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
    }
    assert result["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Double 21."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "double", "arguments": '{"number": 21}'},
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "double"},
        {"role": "assistant", "content": "42", "reasoning_content": "sure"},
    ]


async def test_the_messages_of_a_result_are_the_history_of_the_next() -> None:
    model = ScriptedModel([DOUBLING, "42", "84"])
    async with agent_of(model, tools=[double]) as agent:
        first = await agent.run_conversation("Double 21.", system_message="Be brief.")
        second = await agent.run_conversation("Again.", conversation_history=first["messages"])
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert [m["content"] for m in second["messages"][-2:]] == ["Again.", "84"]
    assert model.requests[-1].messages[0] == Message("system", "Be brief.")
    assert [event.name for event in second["trace"].tool_events] == []


async def test_content_in_parts_is_joined_and_what_is_no_text_is_noted() -> None:
    model = ScriptedModel(["fine"])
    parts = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "data:"}}, "this"]
    async with agent_of(model) as agent:
        await agent.run_conversation("Well?", conversation_history=[{"role": "user", "content": parts}])
    assert model.requests[0].messages[0].content == "See [image_url: not text]this"


async def test_chat_gives_the_text() -> None:
    async with agent_of(["Hello."]) as agent:
        assert await agent.chat("Hi.") == "Hello."


async def test_chat_raises_what_ended_the_conversation() -> None:
    async with agent_of([AuthenticationError("wrong key", status=401)]) as agent:
        with pytest.raises(AuthenticationError):
            await agent.chat("Hi.")


async def test_a_failed_conversation_is_neither_completed_nor_partial() -> None:
    async with agent_of([AuthenticationError("wrong key", status=401)]) as agent:
        result = await agent.run_conversation("Hi.")
    assert (result["completed"], result["partial"], result["final_response"]) == (False, False, "")
    assert result["error"] == "AuthenticationError: wrong key"


async def test_the_iteration_limit_makes_it_partial() -> None:
    async with agent_of([DOUBLING, "so far 42"], tools=[double], max_iterations=1) as agent:
        result = await agent.run_conversation("Double 21.")
    assert (result["partial"], result["stop_reason"]) == (True, "max_iterations")
    assert result["final_response"] == "so far 42"


async def test_two_callers_wait_for_each_other() -> None:
    at_once = most = 0

    async def script(request: Request) -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        for _ in range(5):
            await asyncio.sleep(0)
        at_once -= 1
        return request.messages[-1].content.upper()

    async with agent_of(script) as agent:
        assert await asyncio.gather(agent.chat("a"), agent.chat("b"), agent.chat("c")) == ["A", "B", "C"]
    assert most == 1


# -- the system prompt ----------------------------------------------------------------------------------------


async def system_of(**options: Any) -> str:
    model = ScriptedModel(["ok"])
    async with agent_of(model, **options) as agent:
        result = await agent.run_conversation("Hi.", system_message="GIVEN")
    assert [m["role"] for m in result["messages"]] == ["system", "user", "assistant"]
    assert result["messages"][0]["content"] == "GIVEN"
    first = model.requests[0].messages[0]
    assert first.role == "system"
    return first.content


async def test_context_files_and_memory_are_sent_and_not_recorded(place: Path, tmp_path: Path) -> None:
    (place / "AGENTS.md").write_text("Use tabs.")
    (place / ".cursorrules").write_text("Use tabs.")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "memory.md").write_text("# Notes\n- likes tea\n")
    system = await system_of(ephemeral_system_prompt="EPHEMERAL")
    assert system.count("Use tabs.") == 1
    assert "likes tea" in system
    assert system.endswith("EPHEMERAL\n\nGIVEN")


async def test_both_may_be_skipped(place: Path, tmp_path: Path) -> None:
    (place / "AGENTS.md").write_text("Use tabs.")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "memory.md").write_text("# Notes\n- likes tea\n")
    assert await system_of(skip_context_files=True, skip_memory=True) == "GIVEN"


async def test_a_long_context_file_is_cut_and_said_so(place: Path) -> None:
    (place / "AGENTS.md").write_text("x" * (LONGEST_FILE * 9))
    system = await system_of()
    assert len(system) < LONGEST_FILE + 500
    assert "left out" in system


async def test_context_files_are_those_of_the_directory_that_was_named(place: Path, tmp_path: Path) -> None:
    (place / "AGENTS.md").write_text("of the current")
    (tmp_path / "AGENTS.md").write_text("of the named")
    system = await system_of(cwd=str(tmp_path))
    assert "of the named" in system
    assert "of the current" not in system


async def test_notes_made_in_one_conversation_are_known_in_the_next(tmp_path: Path) -> None:
    noting = Message(
        "assistant", tool_calls=(ToolCall("n", "memory", '{"action": "add", "content": "likes tea"}'),)
    )
    model = ScriptedModel([noting, "noted", "tea"])
    async with agent_of(model, enabled_toolsets=["memory"]) as agent:
        first = await agent.run_conversation("I like tea.")
        await agent.run_conversation("What do I like?")
    assert first["trace"].tool_events[0].success
    assert "likes tea" in model.requests[-1].messages[0].content
    assert (tmp_path / "home" / "memory.md").is_file()


async def test_prefilled_messages_are_sent_and_not_recorded() -> None:
    model = ScriptedModel(["ok"])
    prefill = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    async with agent_of(model, prefill_messages=prefill) as agent:
        result = await agent.run_conversation("3+3?")
    assert [m.content for m in model.requests[0].messages] == ["2+2?", "4", "3+3?"]
    assert [m["content"] for m in result["messages"]] == ["3+3?", "ok"]


# -- tools ----------------------------------------------------------------------------------------------------


async def offered(**options: Any) -> list[str]:
    model = ScriptedModel(["ok"])
    async with AIAgent(model=model, **options) as agent:
        await agent.chat("Hi.")
    return [spec.name for spec in model.requests[0].tools]


async def test_toolsets_are_offered_as_asked() -> None:
    assert await offered(enabled_toolsets=["todo"]) == ["todo"]
    assert await offered(enabled_toolsets=["todo", "memory"], skip_memory=True) == ["todo"]
    assert await offered(enabled_toolsets=["coding", "todo"], disabled_toolsets=["coding"]) == ["todo"]
    assert await offered(enabled_toolsets=[], tools=[double]) == ["double"]
    everything = await offered()
    assert {"terminal", "read_file", "todo", "memory"} <= set(everything)
    assert "terminal" not in await offered(disabled_toolsets=["terminal"])


async def test_state_of_tools_lasts_as_long_as_the_task() -> None:
    @tool
    def count(context: ToolContext) -> int:
        """Count."""
        context.state["n"] = context.state.get("n", 0) + 1
        return int(context.state["n"])

    counting = Message("assistant", tool_calls=(ToolCall("c", "count"),))

    def script(request: Request) -> Message | str:
        last = request.messages[-1]
        return f"n={last.content}" if last.role == "tool" else counting

    async with agent_of(script, tools=[count]) as agent:
        said = [
            (await agent.run_conversation("Count.", task_id=task))["final_response"]
            for task in ("one", "one", "two", None, None)
        ]
    assert said == ["n=1", "n=2", "n=1", "n=1", "n=2"]


async def test_the_workspaces_of_the_tasks_used_last_are_kept(tmp_path: Path) -> None:
    def script(request: Request) -> Any:
        if request.messages[-1].role == "tool":
            return "ok"
        path = request.messages[-1].content
        return Message(
            "assistant", tool_calls=(ToolCall("w", "write_file", json.dumps({"path": path, "content": ""})),)
        )

    def left() -> set[str]:
        return {file.name for file in tmp_path.glob("taskmill-*/*/workspace/*")}

    tasks = [f"task{number}" for number in range(WORKSPACES_KEPT)]
    async with agent_of(script, enabled_toolsets=["file"], sandbox="plain") as agent:
        for task in (None, *tasks, tasks[0], "another"):
            await agent.run_conversation(task or "no task", task_id=task)
        assert left() == {"no task", *tasks, "another"} - {tasks[1]}
    assert left() == set()


async def test_the_workspace_is_gone_after_close(tmp_path: Path) -> None:
    writing = Message(
        "assistant", tool_calls=(ToolCall("w", "write_file", '{"path": "x.txt", "content": "hi"}'),)
    )
    async with agent_of([writing, "written"], enabled_toolsets=["file"], sandbox="plain") as agent:
        result = await agent.run_conversation("Write.")
        assert result["trace"].tool_events[0].success
        assert list(tmp_path.glob("taskmill-*"))
    assert not list(tmp_path.glob("taskmill-*"))


# -- files ----------------------------------------------------------------------------------------------------


async def test_nothing_is_written_unless_asked_for(place: Path) -> None:
    async with agent_of(["ok"]) as agent:
        await agent.chat("Hi.")
    assert list(place.iterdir()) == []


async def test_trajectories_are_appended_by_how_they_ended(place: Path) -> None:
    moment = datetime(2024, 1, 2, tzinfo=UTC)
    script = ["one", AuthenticationError("wrong key"), "two"]
    async with agent_of(script, save_trajectories=True, now=lambda: moment) as agent:
        for prompt in ("a", "b", "c"):
            await agent.run_conversation(prompt)
    good, bad = rows_of(place / "trajectory_samples.jsonl"), rows_of(place / "failed_trajectories.jsonl")
    assert [from_sharegpt(row["conversations"]).messages[0].content for row in good] == ["a", "c"]
    assert [from_sharegpt(row["conversations"]).messages[0].content for row in bad] == ["b"]
    assert {(row["model"], row["timestamp"], row["completed"]) for row in good} == {
        ("scripted", "2024-01-02T00:00:00.000+00:00", True)
    }
    assert bad[0].keys() == {"conversations", "timestamp", "model", "completed"}


async def test_what_a_cancelled_conversation_said_is_appended_whole(place: Path) -> None:
    reached = asyncio.Event()

    async def script(request: Request) -> Message:
        if request.messages[-1].role == "tool":
            reached.set()
            await asyncio.Event().wait()
        return DOUBLING

    async with agent_of(script, tools=[double], save_trajectories=True) as agent:
        talking = asyncio.create_task(agent.run_conversation("Double 21."))
        await reached.wait()
        talking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await talking
    (row,) = rows_of(place / "failed_trajectories.jsonl")
    assert [m.role for m in from_sharegpt(row["conversations"]).messages] == ["user", "assistant", "tool"]


async def test_a_line_torn_by_an_earlier_kill_does_not_swallow_the_next(place: Path) -> None:
    (place / "trajectory_samples.jsonl").write_bytes(b'{"conversations": [{"fro')
    async with agent_of(["ok"], save_trajectories=True) as agent:
        await agent.chat("Hi.")
    torn, row = (place / "trajectory_samples.jsonl").read_bytes().splitlines()
    assert torn == b'{"conversations": [{"fro'
    assert json.loads(row)["completed"] is True


# -- arguments and the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enabled_toolsets": ["termnal"]}, "did you mean 'terminal'"),
        ({"disabled_toolsets": ["wbe"]}, "disabled_toolsets"),
        ({"enabled_toolsets": "file"}, "must be a list"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"reasoning_config": {"effort": "enormous"}}, "reasoning_config"),
        ({"reasoning_config": {"effrt": "low"}}, "reasoning_config"),
        ({"prefill_messages": [{"role": "robot", "content": "x"}]}, "prefill_messages[0]"),
        ({"prefill_messages": {"role": "user"}}, "prefill_messages must be a list"),
        ({"sandbox": "jail"}, "sandbox='jail'"),
    ],
)
def test_arguments_that_cant_be_meant_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match="(?s)" + said.replace("[", r"\[").replace("]", r"\]")):
        AIAgent(**options)


def test_the_constructor_opens_nothing(place: Path, tmp_path: Path) -> None:
    AIAgent("http://127.0.0.1:9", "key", "some-model", save_trajectories=True)
    assert list(place.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


@pytest.mark.parametrize("message", ["", "  ", None])
async def test_a_blank_message_is_refused(message: Any) -> None:
    async with agent_of([]) as agent:
        with pytest.raises(ConfigurationError, match="user_message"):
            await agent.run_conversation(message)


async def test_closing_twice_is_fine_and_final() -> None:
    model = ScriptedModel(["ok"])
    agent = agent_of(model)
    await agent.chat("Hi.")
    await agent.close()
    await agent.close()
    assert not model.closed  # it was handed in, so it is its owner's to close
    with pytest.raises(RunAbortedError):
        await agent.chat("Hi.")


async def test_reasoning_and_routing_reach_the_request() -> None:
    model = ScriptedModel(["ok"])
    async with agent_of(
        model,
        reasoning_config={"enabled": True, "effort": "high"},
        providers_allowed=["a", "b"],
        provider_sort="price",
        max_tokens=9,
        seed=3,
    ) as agent:
        await agent.chat("Hi.")
    (request,) = model.requests
    assert request.reasoning is not None
    assert request.reasoning.effort == "high"
    assert request.provider == {"only": ["a", "b"], "sort": "price"}
    assert (request.sampling.max_tokens, request.sampling.seed) == (9, 3)
