"""Framing and reading back: whatever was said comes back as it was said."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmill.programs.sharegpt import from_sharegpt, to_sharegpt
from taskmill.records import Message, ToolCall, ToolSpec
from taskmill.store.jsonl import MAX_DEPTH

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PIECES = st.one_of(
    st.sampled_from(
        [*TAGS, "<", "\\", "<\\think>", "<\\\\/tool_call>", "\n", "\u2028", "\u0085", "\r\n", "{", "}", '"']
    ),
    st.sampled_from(["\\u003c", "\\u003cthink>", "</tools>", "\n</tool_call>\n", "\x00", " ", "\ud83d"]),
    st.text(max_size=8),
)
TEXT = st.lists(PIECES, max_size=8).map("".join)

JSON_VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**40), 10**40),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXT.filter(lambda text: "\ud83d" not in text),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECT_TEXT = st.builds(
    lambda value, indent, before, after: before + json.dumps(value, indent=indent) + after,
    st.dictionaries(st.text(max_size=4), JSON_VALUE, max_size=3),
    st.sampled_from([None, 1]),
    st.sampled_from(["", " ", "\n"]),
    st.sampled_from(["", " ", "\n"]),
)
ARGUMENTS = st.one_of(
    OBJECT_TEXT, TEXT, st.sampled_from(["", "null", "[1]", '"x"', '{"a": NaN}', '{"a": 1', "7"])
)
OBSERVATION = st.one_of(OBJECT_TEXT, TEXT, st.builds(json.dumps, st.lists(JSON_VALUE, max_size=3)))
NAMES = st.one_of(st.sampled_from(["terminal", "read_file"]), TEXT.filter(bool))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    said = [Message("system", draw(TEXT))] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            said.append(Message("user", draw(TEXT)))
            continue
        calls = []
        for _ in range(draw(st.integers(0, 3))):
            number += 1
            calls.append(ToolCall(f"{draw(TEXT)}{number}", draw(NAMES), draw(ARGUMENTS)))
        reasoning = draw(st.one_of(st.none(), TEXT.filter(bool)))
        said.append(Message("assistant", draw(TEXT), reasoning=reasoning, tool_calls=tuple(calls)))
        answered = [call for call in calls if draw(st.integers(0, 5))]
        said.extend(
            Message("tool", draw(OBSERVATION), tool_call_id=call.id, name=call.name) for call in answered
        )
    return said


def plainly(messages: list[Message] | tuple[Message, ...]) -> list[Message]:
    """Messages whose JSON texts are compared as JSON: `\\u003c` and `<` are one letter there."""
    return [
        msgspec.structs.replace(
            message,
            content=same_json(message.content) if message.role == "tool" else message.content,
            tool_calls=tuple(
                ToolCall(call.id, call.name, same_json(call.arguments)) for call in message.tool_calls
            ),
        )
        for message in messages
    ]


def same_json(text: str) -> str:
    if text.strip()[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(text), sort_keys=False)
        except ValueError:
            pass
    return text


@settings(max_examples=120, deadline=None)
@given(conversations())
def test_what_was_said_comes_back(said: list[Message]) -> None:
    read = from_sharegpt(to_sharegpt(said, []))
    assert plainly(read.messages) == plainly(said)


@settings(max_examples=120, deadline=None)
@given(conversations())
def test_texts_come_back_to_the_letter_unless_they_spell_a_tag_in_escapes(said: list[Message]) -> None:
    texts = [m.content for m in said] + [call.arguments for m in said for call in m.tool_calls]
    if not any("\\u003c" in text for text in texts):
        assert list(from_sharegpt(to_sharegpt(said, [])).messages) == said


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_frame_tags_are_never_the_speakers(said: list[Message]) -> None:
    """A reader that knows only the tags finds as many blocks as there were, and JSON in each."""
    for entry, message in zip(
        [e for e in to_sharegpt(said, []) if e["from"] == "gpt"],
        [m for m in said if m.role == "assistant"],
        strict=True,
    ):
        assert entry["value"].startswith("<think>\n")
        assert entry["value"].count("<think>") == entry["value"].count("</think>") == 1
        blocks = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", entry["value"], re.DOTALL)
        assert [json.loads(block)["name"] for block in blocks] == [call.name for call in message.tool_calls]


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_observations_stand_in_the_order_of_the_calls_under_their_ids(said: list[Message]) -> None:
    shuffled: list[Message] = []
    held: list[Message] = []
    for message in [*said, Message("user")]:
        if message.role == "tool":
            held.insert(0, message)
        else:
            shuffled += [*held, message]
            held = []
    assert to_sharegpt(shuffled[:-1], []) == to_sharegpt(said, [])


def test_every_frame_as_the_contract_prints_it() -> None:
    entries = to_sharegpt(
        [
            Message("user", "Which files?"),
            Message(
                "assistant",
                "Looking.",
                reasoning="I list them.",
                tool_calls=(ToolCall("a", "terminal", '{"command": "ls"}'), ToolCall("b", "todo", "{}")),
            ),
            Message("tool", "not JSON", tool_call_id="b", name="todo"),
            Message(
                "tool", '{"output": "x", "big": 12345678901234567890123}', tool_call_id="a", name="terminal"
            ),
            Message("assistant", "One: x"),
        ],
        [],
    )
    assert [entry["from"] for entry in entries] == ["system", "human", "gpt", "tool", "gpt"]
    assert entries[1]["value"] == "Which files?"
    assert entries[2]["value"] == (
        "<think>\nI list them.\n</think>\nLooking.\n"
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "todo", "arguments": {}}\n</tool_call>'
    )
    assert entries[3]["value"] == (
        '<tool_response>\n{"tool_call_id": "a", "name": "terminal", "content": '
        '{"output": "x", "big": 12345678901234567890123}}\n</tool_response>\n'
        '<tool_response>\n{"tool_call_id": "b", "name": "todo", "content": "not JSON"}\n</tool_response>'
    )
    assert entries[4]["value"] == "<think>\n</think>\nOne: x"


@pytest.mark.parametrize("text", ["1e400", "123456789012345678901234567890", "-0.0", "1.10"])
def test_numbers_survive_as_they_were_written(text: str) -> None:
    said = [Message("assistant", tool_calls=(ToolCall("a", "f", f'{{"x": {text}}}'),))]
    said.append(Message("tool", f"[{text}]", tool_call_id="a", name="f"))
    assert list(from_sharegpt(to_sharegpt(said, [])).messages) == said


def test_a_call_without_an_answer_keeps_its_id_and_gets_a_null() -> None:
    said = [Message("assistant", tool_calls=(ToolCall("a", "f"), ToolCall("b", "f")))]
    said.append(Message("tool", "only b", tool_call_id="b", name="f"))
    entries = to_sharegpt(said, [])
    assert '{"tool_call_id": "a", "name": "f", "content": null}' in entries[-1]["value"]
    assert list(from_sharegpt(entries).messages) == said


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_nesting_is_kept_as_text(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    said = [
        Message("assistant", tool_calls=(ToolCall("a", "f"),)),
        Message("tool", deep, tool_call_id="a", name="f"),
    ]
    entries = to_sharegpt(said, [])
    assert f'"content": "{deep}"' in entries[-1]["value"]
    assert list(from_sharegpt(entries).messages) == said


def test_wide_json_is_not_deep_json() -> None:
    wide = json.dumps({"a": [{}] * 1000})
    said = [Message("assistant", tool_calls=(ToolCall("a", "f", wide),))]
    assert f'"arguments": {wide}' in to_sharegpt(said, [])[1]["value"]


def test_an_escape_sequence_that_is_itself_escaped_stays() -> None:
    spelled = '{"a": "\\\\u003cthink>", "b": "\\\\<think>"}'
    assert json.loads(spelled) == {"a": "\\u003cthink>", "b": "\\<think>"}
    said = [Message("assistant", tool_calls=(ToolCall("turn0call0", "f", spelled),))]
    assert from_sharegpt(to_sharegpt(said, [])[:2]).messages == tuple(said)


TOOLS = [
    ToolSpec(
        "f", 'Says "</tools>" and <think>.\nTwo lines.', msgspec.Raw(b'{"type":"object","properties":{}}')
    ),
    ToolSpec("g", "", msgspec.Raw(b"{}")),
]


def test_the_system_entry_offers_the_tools_as_json_between_tags() -> None:
    value = to_sharegpt([Message("user", "hi")], TOOLS)[0]["value"]
    assert value.count("<tools>") == value.count("</tools>") == 1
    listed = json.loads(value.split("<tools>")[1].split("</tools>")[0])
    assert [entry["function"]["name"] for entry in listed] == ["f", "g"]
    assert listed[0]["function"]["description"] == TOOLS[0].description
    assert "<tool_call>" in value
    assert list(from_sharegpt(to_sharegpt([], TOOLS)).tools) == TOOLS


def test_without_tools_the_system_entry_says_so() -> None:
    entries = to_sharegpt([Message("user", "hi")], [])
    assert entries[0]["from"] == "system"
    assert "No function is offered" in entries[0]["value"]
    assert from_sharegpt(entries) == ((Message("user", "hi"),), ())


@given(TEXT, st.booleans())
def test_the_users_own_system_message_comes_back(own: str, with_tools: bool) -> None:
    said = [Message("system", own), Message("user", "hi")]
    read = from_sharegpt(to_sharegpt(said, TOOLS if with_tools else []))
    assert list(read.messages) == said
    assert list(read.tools) == (TOOLS if with_tools else [])


def test_entries_made_by_others_are_read() -> None:
    read = from_sharegpt(
        [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Files?"},
            {
                "from": "gpt",
                "value": "<think>look</think>\nI look.\n<tool_call>\n"
                '{"arguments": {"x": 1}, "name": "f"}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}'
                "</tool_call> <tool_call>\nnot a call\n</tool_call>",
            },
            {
                "from": "tool",
                "value": '<tool_response>\n{"name": "g", "content": [1, 2.50]}\n</tool_response>',
            },
            {"from": "tool", "value": "<tool_response>\nplain words\n</tool_response>"},
        ]
    )
    system, human, answer, first, second = read.messages
    assert (system, human) == (Message("system", "Be brief."), Message("user", "Files?"))
    assert answer.reasoning == "look"
    assert answer.content.startswith("I look.")
    assert "not a call" in answer.content
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"x": 1}'), ("g", "{}")]
    assert json.loads(first.content) == [1, 2.5]
    assert second.content == "plain words"
