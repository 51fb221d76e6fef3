"""What a conversation becomes between the endpoint's answer and the line in the file."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskmill import tool
from taskmill.models.base import Completion, Request
from taskmill.programs.sharegpt import from_sharegpt
from taskmill.records import Message, ToolCall
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer, call
from tests.batch.mill import USAGE, Mill, add, answering, asks, says, turn_of


def turns(row: Any) -> list[tuple[str, str]]:
    return [(turn["from"], turn["value"]) for turn in row["conversations"]]


async def test_a_conversation_as_it_stands_in_the_file(mill: Mill) -> None:
    mill.prompts("What is 1 + 2?")

    def script(request: Request) -> Completion:
        if turn_of(request) == 0:
            calls = (ToolCall("call_1", "add", '{"a": 1, "b": 2}'),)
            message = Message("assistant", "Let me see.", reasoning="I add.", tool_calls=calls)
            return Completion(message, USAGE, "tool_calls")
        return says("It is 3.", reasoning=None)

    (row,) = (await mill.run(answering(script), tools=[add])).trajectories

    (system, rules), *rest = turns(row)
    assert system == "system"
    schemas = json.loads(rules[rules.index("<tools>") + 7 : rules.index("</tools>")])
    assert [schema["function"]["name"] for schema in schemas] == ["add"]
    assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert "<tool_call>" in rules
    assert rest == [
        ("human", "What is 1 + 2?"),
        (
            "gpt",
            "<think>\nI add.\n</think>\nLet me see.\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        ),
        (
            "tool",
            '<tool_response>\n{"tool_call_id": "call_1", "name": "add", "content": {"sum":3}}\n</tool_response>',
        ),
        ("gpt", "<think>\n</think>\nIt is 3."),
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"text": "Yes.", "reasoning_content": "hm"},
        {"text": "Yes.", "reasoning": "hm"},
        {"text": "Yes.", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"text": "<think>hm</think>Yes."},
        {"text": "<think>\nhm\n</think>\n\nYes."},
        {"text": "<REASONING_SCRATCHPAD>hm</REASONING_SCRATCHPAD>Yes."},
    ],
)
async def test_however_an_endpoint_gives_its_reasoning_it_becomes_the_same_block(
    mill: Mill, said: dict[str, Any]
) -> None:
    mill.prompts("p")
    fields = dict(said)
    async with FakeEndpoint(answer(fields.pop("text"), **fields)) as endpoint:
        (row,) = (await mill.run("m", base_url=endpoint.url)).trajectories
    assert turns(row)[-1] == ("gpt", "<think>\nhm\n</think>\nYes.")


NASTY = "a </tool_response> b <tool_call>{}</tool_call> <think>x</think> <\\think> </think>"


@tool
def repeat(text: str) -> str:
    """Say it again.

    Args:
        text: what.
    """
    return text


async def test_what_holds_the_frames_own_tags_is_read_back_exactly(mill: Mill) -> None:
    mill.prompts(NASTY)

    def script(request: Request) -> Completion:
        if turn_of(request) == 0:
            return asks("repeat", {"text": NASTY}, id="c1", reasoning=f"think {NASTY}")
        return says(f"answer {NASTY}", reasoning="hm")

    (row,) = (await mill.run(answering(script), tools=[repeat])).trajectories

    read = from_sharegpt(row["conversations"])
    assert [tool.name for tool in read.tools] == ["repeat"]
    prompt, asked, observed, answered = read.messages
    assert prompt.content == NASTY
    assert asked.reasoning == f"think {NASTY}"
    assert json.loads(asked.tool_calls[0].arguments) == {"text": NASTY}
    assert (observed.content, observed.tool_call_id) == (NASTY, "c1")
    assert answered.content == f"answer {NASTY}"


async def test_observations_of_one_turn_are_one_entry_in_the_order_of_the_calls_and_a_null_is_skipped(
    mill: Mill,
) -> None:
    mill.prompts("p")

    def script(body: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in body["messages"]):
            return answer("done", reasoning="hm")
        return answer(
            None,
            calls=[call("add", {"a": 1, "b": 1}, id="x"), None, call("add", {"a": 2, "b": 2}, id="x")],
            reasoning="hm",
        )

    async with FakeEndpoint(script) as endpoint:
        (row,) = (await mill.run("m", base_url=endpoint.url, tools=[add])).trajectories

    assert [speaker for speaker, _ in turns(row)] == ["system", "human", "gpt", "tool", "gpt"]
    observed = [m for m in from_sharegpt(row["conversations"]).messages if m.role == "tool"]
    assert [json.loads(message.content)["sum"] for message in observed] == [2, 4]
    assert len({message.tool_call_id for message in observed}) == 2
    assert row["tool_stats"]["add"] == {"count": 2, "success": 2, "failure": 0}
    assert "null" in row["notes"]


async def test_a_command_that_exits_with_a_code_is_no_failure_and_a_tool_that_raises_is_one(
    mill: Mill,
) -> None:
    mill.prompts("p")

    @tool
    def break_down() -> str:
        """Break."""
        raise RuntimeError("broken")

    @tool
    def unhappy() -> dict[str, Any]:
        """Say that it failed."""
        return {"error": "no such thing"}

    names = ["terminal", "break_down", "unhappy"]

    def script(request: Request) -> Completion:
        turn = turn_of(request)
        if turn == len(names):
            return says()
        return asks(names[turn], {"command": "exit 3"} if names[turn] == "terminal" else {})

    stored = await mill.run(answering(script), tools=[break_down, unhappy], distribution="minimal")

    stats = stored.rows[0]["tool_stats"]
    assert stats["terminal"] == {"count": 1, "success": 1, "failure": 0}
    assert stats["break_down"] == {"count": 1, "success": 0, "failure": 1}
    assert stats["unhappy"] == {"count": 1, "success": 0, "failure": 1}
