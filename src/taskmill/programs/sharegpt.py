"""ShareGPT framing, both ways: messages to `{"from", "value"}` entries, and back to what was said.

The frame is made of tags (`<think>`, `<tool_call>`, `<tool_response>`), and what stands inside may hold any of
them. In the text of a `gpt` entry such a tag gets a backslash after its `<`, and backslashes already there one
more; inside a block of JSON its `<` is written `\\u003c`, which is the same JSON. So a frame tag is always a
frame tag, and reading undoes writing exactly.

Arguments and observations that are JSON objects (observations: arrays too) are embedded as the text they were,
not parsed and printed anew: 1e400, 40-digit integers and the order of keys survive. Anything else is a JSON
string. Only `Message.success` and `reasoning_details` have no place in this format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from taskmill.records import Message, ToolCall, ToolSpec
from taskmill.store.jsonl import MAX_DEPTH

TAG = r"/?(?:think|tool_call|tool_response)>"
_LITERAL = re.compile(rf"<(\\*)({TAG})")
_ESCAPED = re.compile(rf"<\\(\\*)({TAG})")
_IN_JSON = re.compile(rf"<({TAG})")
# An even number of backslashes before it: `\\u003c` is a backslash and the letters u003c.
_FROM_JSON = re.compile(rf"((?<!\\)(?:\\\\)*)\\u003c({TAG})")
_OUR_CALL = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (.*)\}\Z', re.DOTALL)
_OUR_RESPONSE = re.compile(
    r'\{"tool_call_id": ("(?:[^"\\]|\\.)*"), "name": ("(?:[^"\\]|\\.)*"), "content": (.*)\}\Z', re.DOTALL
)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_CALL_BLOCK = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
_RESPONSE_BLOCK = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_THINK_BLOCK = re.compile(r"\s*<think>\n?(.*?)\n?</think>\n?", re.DOTALL)

_SPACE = " \t\r\n"
_check_json = msgspec.json.Decoder(Raw).decode

_BEFORE_TOOLS = (
    "You answer by writing text, and you can call functions while you work. "
    "The functions offered to you follow as JSON, each with the schema of its arguments.\n"
    "<tools>\n"
)
_AFTER_TOOLS = (
    "\n</tools>\n"
    "Think first, between <think> and </think>. To call a function, write a JSON object with its name and its "
    "arguments, framed like this, and as many of them as you need at once:\n"
    "<tool_call>\n"
    '{"name": "<name of the function>", "arguments": {"<argument>": "<value>"}}\n'
    "</tool_call>\n"
    "What each call gave comes back between <tool_response> and </tool_response>, under the id of the call."
)
_WITHOUT_TOOLS = (
    "You answer by writing text. No function is offered to you in this conversation.\n"
    "<tools>\n[]\n</tools>\n"
    "Think first, between <think> and </think>."
)
_GAP = "\n\n"

_KEPT_SCHEMAS = 1024
_schemas: dict[int, tuple[ToolSpec, str]] = {}


class Parsed(NamedTuple):
    """A conversation read back: what was said, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


# -- writing --------------------------------------------------------------------------------------------------


def to_sharegpt(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, str]]:
    """The conversation as ShareGPT entries, a system entry with the tools first.

    A system message at the head of `messages` becomes the end of that entry. Observations stand in one `tool`
    entry for each assistant turn, in the order of its calls and paired by id; a call that got none has an
    observation whose content is null.
    """
    own = messages[0].content if messages and messages[0].role == "system" else None
    entries = [{"from": "system", "value": system_value(tools, own)}]
    position = 0 if own is None else 1
    while position < len(messages):
        message = messages[position]
        if message.role == "user" or message.role == "system":
            speaker = "human" if message.role == "user" else "system"
            entries.append({"from": speaker, "value": message.content})
            position += 1
            continue
        calls: tuple[ToolCall, ...] = ()
        if message.role == "assistant":
            entries.append({"from": "gpt", "value": _gpt_value(message)})
            calls = message.tool_calls
            position += 1
        observations = []
        while position < len(messages) and messages[position].role == "tool":
            observations.append(messages[position])
            position += 1
        if calls or observations:
            entries.append({"from": "tool", "value": _tool_value(calls, observations)})
    return entries


def system_value(tools: Sequence[ToolSpec], own: str | None = None) -> str:
    """The system entry: how to call functions, which are offered, and then the user's own system message."""
    if tools:
        listed = ",\n".join(map(_tool_schema, tools))
        value = f"{_BEFORE_TOOLS}[\n{listed}\n]{_AFTER_TOOLS}"
    else:
        value = _WITHOUT_TOOLS
    return value if own is None else value + _GAP + own


def _tool_schema(spec: ToolSpec) -> str:
    """The schema's text, made once for each tool: every rollout that is offered it has the same object."""
    made = _schemas.get(id(spec))
    if made is None or made[0] is not spec:
        if len(_schemas) >= _KEPT_SCHEMAS:
            _schemas.clear()
        made = _schemas[id(spec)] = (spec, _schema_text(spec))
    return made[1]


def _schema_text(spec: ToolSpec) -> str:
    parameters = bytes(spec.parameters).decode() or "{}"
    name, description = _json_text(spec.name), _json_text(spec.description)
    schema = f'{{"name": {name}, "description": {description}, "parameters": {parameters}}}'
    return '{"type": "function", "function": ' + schema.replace("</tools>", "\\u003c/tools>") + "}"


def _gpt_value(message: Message) -> str:
    thought = (
        f"<think>\n{_escape(message.reasoning)}\n</think>\n" if message.reasoning else "<think>\n</think>\n"
    )
    calls = "\n".join(
        f'<tool_call>\n{{"name": {_json_text(call.name)}, "arguments": {_embed(call.arguments, "{")}}}\n</tool_call>'
        for call in message.tool_calls
    )
    text = _escape(message.content)
    return thought + text + ("\n" if text and calls else "") + calls


def _tool_value(calls: Sequence[ToolCall], observations: Sequence[Message]) -> str:
    unclaimed = list(observations)
    blocks = []
    for call in calls:
        found = next((o for o in unclaimed if o.tool_call_id == call.id), None)
        if found is None:
            blocks.append(_response(call.id, call.name, "null"))
        else:
            unclaimed.remove(found)
            blocks.append(_response(call.id, call.name, _embed(found.content, "{[")))
    blocks.extend(_response(o.tool_call_id or "", o.name or "", _embed(o.content, "{[")) for o in unclaimed)
    return "\n".join(blocks)


def _response(call_id: str, name: str, content: str) -> str:
    head = f'{{"tool_call_id": {_json_text(call_id)}, "name": {_json_text(name)}, "content": '
    return f"<tool_response>\n{head}{content}}}\n</tool_response>"


def _escape(text: str) -> str:
    return _LITERAL.sub(r"<\1\\\2", text) if "<" in text else text


def _json_text(text: str) -> str:
    encoded = encode_basestring(text)
    return _IN_JSON.sub(r"\\u003c\1", encoded) if "<" in encoded else encoded


def _embed(text: str, openers: str) -> str:
    """`text` itself where it is a JSON value that starts with one of `openers`, else `text` as a JSON string."""
    start = text[:1] if text[:1] not in _SPACE else text.lstrip(_SPACE)[:1]
    if start and start in openers and _is_json(text):
        return _IN_JSON.sub(r"\\u003c\1", text) if "<" in text else text
    return _json_text(text)


def _is_json(text: str) -> bool:
    try:
        _check_json(text.encode())
    except (ValueError, RecursionError):
        return False
    # Nested deeper than what is stored may be, it is kept as a string.
    return text.count("[") + text.count("{") <= MAX_DEPTH or _depth(text) <= MAX_DEPTH


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _JSON_TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in "]}":
            depth -= 1
    return deepest


# -- reading --------------------------------------------------------------------------------------------------


def from_sharegpt(conversations: Iterable[Mapping[str, str]]) -> Parsed:
    """What was said, from the entries `to_sharegpt` makes; entries by others are read as far as they can be.

    Arguments come back as the text the model wrote, observations under the ids of their calls. A call without
    an observation block of its own gets an id made from its place.
    """
    messages: list[Message] = []
    tools: tuple[ToolSpec, ...] = ()
    turn: int | None = None
    responses: list[_Response] = []
    for place, entry in enumerate(conversations):
        speaker, value = entry["from"], entry["value"]
        if speaker == "tool":
            responses.extend(_read_responses(value))
            continue
        _add_observations(messages, turn, responses)
        turn, responses = None, []
        if speaker == "gpt":
            turn = len(messages)
            messages.append(_read_gpt(value, turn))
        elif speaker == "system" and place == 0:
            tools, own = _read_system(value)
            messages.extend(() if own is None else (Message("system", own),))
        else:
            messages.append(Message("system" if speaker == "system" else "user", value))
    _add_observations(messages, turn, responses)
    return Parsed(tuple(messages), tools)


class _Response(NamedTuple):
    call_id: str
    name: str
    content: str | None


def _add_observations(messages: list[Message], turn: int | None, responses: Sequence[_Response]) -> None:
    """Append the observations after assistant turn number `turn`, giving its calls their ids.

    Our entries have one response for each call, in order; where others left some out, names decide.
    """
    if turn is not None and responses:
        asked = messages[turn]
        waiting = list(responses)
        calls = []
        for number, call in enumerate(asked.tool_calls):
            candidates = [*responses[number : number + 1], *waiting]
            found = next((r for r in candidates if r.name == call.name and r in waiting), None)
            if found is not None:
                waiting.remove(found)
                call = replace(call, id=found.call_id or call.id)
            calls.append(call)
        messages[turn] = replace(asked, tool_calls=tuple(calls))
    messages.extend(
        Message("tool", response.content, tool_call_id=response.call_id or None, name=response.name or None)
        for response in responses
        if response.content is not None
    )


def _read_system(value: str) -> tuple[tuple[ToolSpec, ...], str | None]:
    end = value.find(_AFTER_TOOLS)
    if value.startswith(_WITHOUT_TOOLS):
        listed, rest = "[]", value[len(_WITHOUT_TOOLS) :]
    elif value.startswith(_BEFORE_TOOLS) and end >= 0:
        listed, rest = value[len(_BEFORE_TOOLS) : end], value[end + len(_AFTER_TOOLS) :]
    else:
        return (), value
    try:
        entries = msgspec.json.decode(listed.encode("utf-8", "replace"), type=list[_ListedTool])
    except msgspec.MsgspecError:
        return (), value
    return tuple(entry.function for entry in entries), rest.removeprefix(_GAP) if rest else None


class _ListedTool(Struct):
    function: ToolSpec


def _read_gpt(value: str, turn: int) -> Message:
    reasoning = None
    thought = _THINK_BLOCK.match(value)
    if thought is not None:
        reasoning = _unescape(thought[1]) or None
        value = value[thought.end() :]
    calls: list[ToolCall] = []
    text: list[str] = []
    position = 0
    for block in _CALL_BLOCK.finditer(value):
        call = _read_call(block[1], f"turn{turn}call{len(calls)}")
        if call is not None:
            calls.append(call)
            text.append(value[position : block.start()])
            position = block.end()
    text.append(value[position:])
    return Message("assistant", _unescape("".join(text)), reasoning=reasoning, tool_calls=tuple(calls))


def _read_call(block: str, call_id: str) -> ToolCall | None:
    fields = _object(block)
    if fields is None or not isinstance(fields.get("name"), str):
        return None
    ours = _OUR_CALL.match(block) if fields.keys() == {"name", "arguments"} else None
    if ours is not None:
        return ToolCall(call_id, fields["name"], _taken_out(ours[2], fields["arguments"]))
    return ToolCall(call_id, fields["name"], json.dumps(fields.get("arguments", {}), ensure_ascii=False))


def _read_responses(value: str) -> list[_Response]:
    responses = []
    for block in _RESPONSE_BLOCK.findall(value):
        fields = _object(block)
        if fields is None:
            responses.append(_Response("", "", block))
            continue
        content = fields.get("content", "")
        ours = _OUR_RESPONSE.match(block) if fields.keys() == {"tool_call_id", "name", "content"} else None
        if content is not None:
            if ours is not None:
                content = _taken_out(ours[3], content)
            elif not isinstance(content, str):
                content = json.dumps(content, ensure_ascii=False)
        responses.append(
            _Response(str(fields.get("tool_call_id") or ""), str(fields.get("name") or ""), content)
        )
    return responses


def _taken_out(raw: str, value: Any) -> str:
    return value if isinstance(value, str) else _FROM_JSON.sub(r"\1<\2", raw)


def _object(block: str) -> dict[str, Any] | None:
    try:
        value = json.loads(block, parse_int=_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) < 4000 else float(digits)


def _unescape(text: str) -> str:
    return _ESCAPED.sub(r"<\1\2", text) if "<\\" in text else text
