"""Requests and answers byte for byte: what endpoints were seen to send, and what they must be sent."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from taskmill.errors import (
    AuthenticationError,
    ContextWindowError,
    MalformedAnswerError,
    ModelError,
    RateLimitedError,
    TransientModelError,
)
from taskmill.models import Reasoning, Request, Sampling
from taskmill.models.base import Effort
from taskmill.models.families import family_of
from taskmill.models.wire import decode_answer, encode_request
from taskmill.records import Message, ToolCall, ToolSpec, Usage

OPENROUTER = "https://openrouter.ai/api/v1"
OPENAI = "https://api.openai.com/v1"
DEEPSEEK = "https://api.deepseek.com"
ANTHROPIC = "https://api.anthropic.com/v1"
GROQ = "https://api.groq.com/openai/v1"
OWN = "http://localhost:8000/v1"

LIST = ToolSpec("ls", "List files.", Raw(b'{"type":"object","properties":{}}'))


def sent(
    base_url: str, model: str = "m", without: frozenset[str] = frozenset(), **fields: Any
) -> dict[str, Any]:
    fields.setdefault("messages", (Message("user", "hello"),))
    encoded = encode_request(Request(**fields), model, family_of(base_url), without)
    body: dict[str, Any] = json.loads(encoded)
    return body


def answered(message: Any = None, **choice: Any) -> bytes:
    body = {"choices": [{"message": message or {"role": "assistant", "content": "hi"}, **choice}]}
    return json.dumps(body).encode()


def with_usage(usage: Any) -> Usage:
    body = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    return decode_answer(json.dumps(body).encode()).usage


# -- requests -------------------------------------------------------------------------------------------------


def test_a_whole_conversation_with_tools() -> None:
    messages = (
        Message("system", "Be good."),
        Message("user", "List."),
        Message("assistant", "", tool_calls=(ToolCall("c1", "ls", '{"a": 1}'),)),
        Message("tool", "none", tool_call_id="c1", name="ls", success=True),
        Message("assistant", "Nothing there."),
    )
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop=("END",))
    assert sent(OWN, messages=messages, tools=(LIST,), sampling=sampling) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be good."},
            {"role": "user", "content": "List."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "content": "none", "tool_call_id": "c1", "name": "ls"},
            {"role": "assistant", "content": "Nothing there."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "ls",
                    "description": "List files.",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 3,
        "stop": ["END"],
    }


def test_what_is_not_set_is_not_sent() -> None:
    assert sent(OWN) == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_tools_are_still_declared_when_none_may_be_called() -> None:
    body = sent(OWN, tools=(LIST,), tool_choice="none")
    assert body["tool_choice"] == "none"
    assert len(body["tools"]) == 1
    assert "tool_choice" not in sent(OWN, tool_choice="none")


@pytest.mark.parametrize(
    ("base_url", "model", "reasoning", "fields"),
    [
        (OPENROUTER, "x/y", Reasoning(), {"reasoning": {"enabled": True}}),
        (OPENROUTER, "x/y", Reasoning(effort="low"), {"reasoning": {"enabled": True, "effort": "low"}}),
        (OPENROUTER, "x/y", Reasoning(effort="max"), {"reasoning": {"enabled": True, "effort": "xhigh"}}),
        (OPENROUTER, "x/y", Reasoning(effort="none"), {"reasoning": {"enabled": False}}),
        (OPENROUTER, "x/y", Reasoning(enabled=False, effort="high"), {"reasoning": {"enabled": False}}),
        (OPENAI, "gpt-5.1", Reasoning(effort="high"), {"reasoning_effort": "high"}),
        (OPENAI, "gpt-5.1", Reasoning(enabled=False), {"reasoning_effort": "none"}),
        (OPENAI, "gpt-5.1", Reasoning(), {}),
        (OPENAI, "gpt-4o", Reasoning(enabled=False), {}),
        (
            DEEPSEEK,
            "d",
            Reasoning(effort="max"),
            {"thinking": {"type": "enabled"}, "reasoning_effort": "max"},
        ),
        (DEEPSEEK, "d", Reasoning(enabled=False), {"thinking": {"type": "disabled"}}),
        (ANTHROPIC, "c", Reasoning(effort="low"), {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
        (ANTHROPIC, "c", Reasoning(enabled=False), {}),
        (GROQ, "q", Reasoning(effort="max"), {"reasoning_effort": "high"}),
        (GROQ, "q", Reasoning(enabled=False), {"reasoning_effort": "none"}),
        (
            OWN,
            "qwen3",
            Reasoning(enabled=False),
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (
            OWN,
            "gpt-oss-20b",
            Reasoning(effort="minimal"),
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}, "reasoning_effort": "low"},
        ),
    ],
)
def test_a_wish_for_reasoning_becomes_the_field_that_family_takes(
    base_url: str, model: str, reasoning: Reasoning, fields: dict[str, Any]
) -> None:
    body = sent(base_url, model, reasoning=reasoning)
    del body["model"], body["messages"]
    assert body == fields


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", None])
@pytest.mark.parametrize(
    "base_url", [OPENROUTER, OPENAI, DEEPSEEK, ANTHROPIC, GROQ, OWN, "https://api.z.ai/v4"]
)
def test_every_effort_can_be_asked_of_every_family(base_url: str, effort: Effort | None) -> None:
    sent(base_url, "gpt-5", reasoning=Reasoning(effort=effort), sampling=Sampling(max_tokens=4000))


@pytest.mark.parametrize(
    ("base_url", "routed"),
    [
        (OPENROUTER, True),
        ("https://eu.openrouter.ai/api/v1", True),
        (OPENAI, False),
        (OWN, False),
        ("https://openrouter.ai.example.org/v1", False),
        ("https://notopenrouter.ai/v1", False),
        ("http://localhost:1/openrouter.ai/v1", False),
    ],
)
def test_provider_options_go_to_routers_and_nowhere_else(base_url: str, routed: bool) -> None:
    body = sent(base_url, provider={"only": ["a", "b"], "sort": "price"})
    assert body.get("provider") == ({"only": ["a", "b"], "sort": "price"} if routed else None)


def test_the_length_limit_is_called_what_the_family_calls_it() -> None:
    sampling = Sampling(max_tokens=9)
    assert sent(OPENAI, sampling=sampling)["max_completion_tokens"] == 9
    assert sent(OWN, sampling=sampling)["max_tokens"] == 9
    assert sent(OWN, sampling=sampling, without=frozenset({"max_tokens"}))["max_completion_tokens"] == 9


THOUGHT = Message("assistant", "ok", reasoning="hm")
THOUGHT_CALL = Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c", "ls"),))
SILENT_CALL = Message("assistant", "", tool_calls=(ToolCall("c", "ls"),))
DETAILS = [{"type": "reasoning.encrypted", "data": "abc", "index": 0}]


@pytest.mark.parametrize(
    ("base_url", "message", "echoed"),
    [
        (OPENROUTER, THOUGHT, {"reasoning": "hm"}),
        (OPENROUTER, Message("assistant", "ok", "hm", DETAILS), {"reasoning_details": DETAILS}),
        (OWN, THOUGHT, {"reasoning_content": "hm"}),
        (OWN, Message("assistant", "ok"), {}),
        (DEEPSEEK, THOUGHT, {}),
        (DEEPSEEK, THOUGHT_CALL, {"reasoning_content": "hm"}),
        (DEEPSEEK, SILENT_CALL, {"reasoning_content": ""}),
        ("https://api.moonshot.ai/v1", THOUGHT_CALL, {"reasoning_content": "hm"}),
        (OPENAI, THOUGHT_CALL, {}),
        (GROQ, THOUGHT, {}),
    ],
)
def test_reasoning_goes_back_where_the_family_wants_it(
    base_url: str, message: Message, echoed: dict[str, Any]
) -> None:
    wire = sent(base_url, messages=(Message("user", "x"), message))["messages"][1]
    assert {k: v for k, v in wire.items() if "reasoning" in k} == echoed


def test_an_unpaired_surrogate_is_sent_spelled_out_as_it_is_stored() -> None:
    body = encode_request(
        Request((Message("tool", "a\ud83d", tool_call_id="c"),), tools=(LIST,), provider={"a": 1}),
        "m",
        family_of(OPENROUTER),
    )
    assert json.loads(body)["messages"][0]["content"] == "a\\ud83d"
    assert json.loads(body)["tools"][0]["function"]["parameters"]["type"] == "object"


# -- answers --------------------------------------------------------------------------------------------------


def test_a_plain_answer() -> None:
    completion = decode_answer(
        json.dumps(
            {
                "id": "a",
                "model": "served",
                "choices": [
                    {"message": {"content": "hi", "reasoning_content": "hm"}, "finish_reason": "stop"}
                ],
                "usage": {
                    "prompt_tokens": 1000,
                    "completion_tokens": 20,
                    "prompt_tokens_details": {"cached_tokens": 900},
                    "completion_tokens_details": {"reasoning_tokens": 7},
                    "cost": 0.5,
                },
            }
        ).encode()
    )
    assert completion.message == Message("assistant", "hi", reasoning="hm")
    assert completion.usage == Usage(1000, 20, 900, 7)
    assert (completion.model, completion.finish_reason, completion.cost) == ("served", "stop", 0.5)


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"content": "a", "reasoning_content": "hm"}, "hm"),
        ({"content": "a", "reasoning": "hm"}, "hm"),
        ({"content": "a", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, "hm"),
        ({"content": "a", "reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]}, "hm"),
        ({"content": "a", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, None),
        ({"content": "<think>hm</think>a"}, "hm"),
        ({"content": "<think>hm</think>a", "reasoning_content": "hm"}, "hm"),
        ({"content": "<think>two</think>a", "reasoning_content": "one"}, "one\n\ntwo"),
        ({"content": "a", "reasoning_content": "", "reasoning": "hm"}, "hm"),
        ({"content": "a", "reasoning": {"text": "hm"}}, "hm"),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": "a"}]},
            "hm",
        ),
        ({"content": "a"}, None),
    ],
)
def test_reasoning_is_found_wherever_it_stands(message: dict[str, Any], reasoning: str | None) -> None:
    said = decode_answer(answered(message)).message
    assert (said.reasoning, said.content) == (reasoning, "a")


def test_structured_reasoning_is_kept_to_be_sent_back() -> None:
    said = decode_answer(answered({"content": "a", "reasoning": "hm", "reasoning_details": DETAILS})).message
    assert said.reasoning_details == DETAILS


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "a[image_url: not text]",
        ),
        ([], ""),
        ({"text": "a"}, "a"),
    ],
)
def test_content_of_any_shape(content: Any, text: str) -> None:
    assert decode_answer(answered({"content": content})).message.content == text


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}} | fields


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (call(), ToolCall("c1", "ls", "{}")),
        (call(function={"name": "ls", "arguments": {"a": [1]}}), ToolCall("c1", "ls", '{"a": [1]}')),
        (call(function={"name": "ls", "arguments": None}), ToolCall("c1", "ls", "{}")),
        (call(function={"name": "ls"}), ToolCall("c1", "ls", "{}")),
        (call(function={"name": "ls", "arguments": ""}), ToolCall("c1", "ls", "")),
        (call(function={"name": "ls", "arguments": '{"cmd": "ls"'}), ToolCall("c1", "ls", '{"cmd": "ls"')),
        (call(function={"name": "ls", "arguments": '{"a": 1}"'}), ToolCall("c1", "ls", '{"a": 1}"')),
        (call(function={"name": None, "arguments": "{}"}), ToolCall("c1", "", "{}")),
        (call(id=7), ToolCall("7", "ls", "{}")),
        ({"id": "c1", "name": "ls", "arguments": {"a": 1}}, ToolCall("c1", "ls", '{"a": 1}')),
    ],
)
def test_a_tool_call_is_kept_as_the_model_wrote_it(entry: Any, expected: ToolCall) -> None:
    completion = decode_answer(answered({"content": None, "tool_calls": [entry]}, finish_reason="tool_calls"))
    assert completion.message.tool_calls == (expected,)
    assert completion.finish_reason == "tool_calls"


def test_three_calls_keep_their_order_and_a_null_among_them_is_noted() -> None:
    entries = [call(id="a"), None, call(id="b"), {"id": "x", "function": None}, call(id="c")]
    completion = decode_answer(answered({"content": "", "tool_calls": entries}))
    assert [c.id for c in completion.message.tool_calls] == ["a", "b", "c"]
    assert len(completion.notes) == 2
    assert "null" in completion.notes[0]


def test_ids_that_are_missing_or_used_twice_are_made_and_noted() -> None:
    entries = [call(id=None), call(id=""), call(id="a"), call(id="a")]
    raw = answered({"content": "", "tool_calls": entries})
    completion = decode_answer(raw)
    ids = [c.id for c in completion.message.tool_calls]
    assert len(set(ids)) == 4
    assert all(ids)
    assert len(completion.notes) == 3
    assert decode_answer(raw) == completion


def test_the_older_function_call_is_read() -> None:
    completion = decode_answer(
        answered({"content": None, "function_call": {"name": "ls", "arguments": "{}"}})
    )
    assert completion.message.tool_calls[0].name == "ls"
    assert completion.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("said", "calls", "meant"),
    [
        ("stop", [], "stop"),
        (None, [], "stop"),
        ("eos", [], "stop"),
        ("end_turn", [], "stop"),
        ("length", [], "length"),
        ("max_tokens", [], "length"),
        ("content_filter", [], "content_filter"),
        ("stop", [call()], "tool_calls"),
        ("tool_calls", [], "stop"),
        ("tool_use", [call()], "tool_calls"),
        ("length", [call(function={"name": "ls", "arguments": '{"a'})], "length"),
    ],
)
def test_the_reason_it_stopped(said: str | None, calls: list[Any], meant: str) -> None:
    completion = decode_answer(answered({"content": "a", "tool_calls": calls}, finish_reason=said))
    assert completion.finish_reason == meant


def test_a_block_cut_by_the_length_limit_is_reasoning() -> None:
    completion = decode_answer(answered({"content": "<think>I was going"}, finish_reason="length"))
    assert completion.message == Message("assistant", "", reasoning="I was going")
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5}, Usage(10, 5)),
        (
            {"prompt_tokens": 1000, "prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100},
            Usage(1000, 0, 900),
        ),
        ({"input_tokens": 100, "output_tokens": 5, "cache_read_input_tokens": 900}, Usage(1000, 5, 900)),
        ({"input_tokens": 100, "cache_creation_input_tokens": 50, "output_tokens": 1}, Usage(150, 1)),
        (
            {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 40}, "output_tokens": 1},
            Usage(100, 1, 40),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 5, "reasoning_tokens": 3}, Usage(10, 5, 0, 3)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 999}}, Usage(10, 0, 10)),
        ({"prompt_tokens": "10", "completion_tokens": 5.0, "prompt_tokens_details": []}, Usage(10, 5)),
        ({"prompt_tokens": None, "completion_tokens": float("nan")}, Usage()),
        ({"prompt_tokens": -3, "completion_tokens": True}, Usage()),
        (None, Usage()),
        ([], Usage()),
    ],
)
def test_usage_under_every_name(usage: Any, expected: Usage) -> None:
    assert with_usage(usage) == expected


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 5}, True),
        ({"input_tokens": 10, "output_tokens": 0}, True),
        ({"prompt_tokens": 0, "completion_tokens": 0}, True),
        ({"prompt_tokens": 10}, False),
        ({"output_tokens": 5}, False),
        ({"prompt_tokens": None, "completion_tokens": None, "cost": 0.5}, False),
        ({}, False),
        (None, False),
    ],
)
def test_tokens_count_as_counted_where_both_numbers_are_there(usage: Any, counted: bool) -> None:
    body = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    completion = decode_answer(json.dumps(body).encode())
    assert completion.counted is counted
    assert completion.cost == (usage or {}).get("cost")


def test_token_ids_and_logprobs_are_kept() -> None:
    raw = answered(
        None, token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": -0.5}, {"token": "b"}]}
    )
    completion = decode_answer(raw)
    assert completion.token_ids == (1, 2)
    assert completion.logprobs == (-0.5, 0.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"  ",
        b"<html>Bad gateway</html>",
        b'{"choices": [{"mess',
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": "none"}',
        b'{"choices": [null]}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": "hi"}]}',
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": "error"}]}',
        b'{"error": {"message": "no code"}}',
        b'{"error": "in words"}',
        b'{"object": "error", "message": "x"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_worth_another_try(raw: bytes) -> None:
    with pytest.raises(MalformedAnswerError) as caught:
        decode_answer(raw)
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "slow", "code": 429}, RateLimitedError),
        ({"message": "Rate limit exceeded", "type": "requests"}, RateLimitedError),
        ({"message": "away", "code": 502}, TransientModelError),
        ({"message": "bad key", "code": "401"}, AuthenticationError),
        (
            {"message": "maximum context length is 8192 tokens", "code": "context_length_exceeded"},
            ContextWindowError,
        ),
    ],
)
def test_an_error_under_status_200_is_that_error(error: Any, kind: type[ModelError]) -> None:
    with pytest.raises(kind):
        decode_answer(json.dumps({"error": error}).encode())
    with pytest.raises(kind):
        decode_answer(json.dumps({"choices": [{"message": {"content": ""}, "error": error}]}).encode())


def test_an_answer_beside_a_null_error_is_an_answer() -> None:
    body = {"error": None, "choices": [{"message": {"content": "hi"}, "error": None}]}
    assert decode_answer(json.dumps(body).encode()).message.content == "hi"


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        (rb'{"choices": [{"message": {"content": "a\ud83d"}}]}', "a\\ud83d"),
        (rb'{"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"logprob": NaN}]}}]}', "a"),
        (b'\xef\xbb\xbf{"choices": [{"message": {"content": "a"}}]}', "a"),
        (b'{"choices": [{"message": {"content": "a\xff"}}]}', "a\ufffd"),
        (rb'{"choices": [{"message": {"content": "a\u0000b"}}]}', "a\0b"),
        ('{"choices": [{"message": {"content": "\u2028\u0085😀"}}]}'.encode(), "\u2028\u0085😀"),
    ],
)
def test_odd_bytes_are_read_and_can_be_stored(raw: bytes, content: str) -> None:
    said = decode_answer(raw).message
    assert said.content == content
    said.content.encode()


FIELDS = [
    *("choices", "message", "content", "tool_calls", "function", "name", "arguments", "id", "type", "text"),
    *("usage", "prompt_tokens", "prompt_tokens_details", "error", "code", "finish_reason", "logprobs"),
    *("reasoning", "reasoning_details", "token_ids"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, JSON)
def test_any_json_is_an_answer_that_can_be_stored_or_a_model_error(whole: Any, message: Any) -> None:
    for body in (
        whole,
        {"choices": [{"message": message}]},
        {"choices": [{"message": {"tool_calls": message}}]},
    ):
        with contextlib.suppress(ModelError):
            msgspec.json.encode(decode_answer(json.dumps(body).encode()))
