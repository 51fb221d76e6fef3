"""Tools and thinking for models whose chat template knows neither: told in plain text, read back from text.

Out goes a conversation of system, user and assistant turns only: the tools stand in the system turn, a call in
the text of its assistant turn, observations in a user turn between `<tool_response>` tags. Back comes the text
of one turn, which `read_turn` takes apart again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taskmill.models.base import Request
from taskmill.models.grammar import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, offered_schema
from taskmill.models.reasoning import split_reasoning
from taskmill.records import Message, ToolCall, ToolSpec

PLAIN_SYSTEM = "You are a helpful assistant."

_JSON = json.JSONDecoder()
_ARGUMENTS = '"arguments": '


class Turn(NamedTuple):
    """One assistant turn, taken apart."""

    reasoning: str | None
    content: str
    calls: tuple[ToolCall, ...] = ()


class Room(NamedTuple):
    """How much of the observations is shown: characters of the latest turn's, and of those before it."""

    latest: int
    earlier: int


def tool_instructions(tools: Sequence[ToolSpec], *, thinking: bool, optional: bool = False) -> str:
    """What the system turn says about the tools, in as few tokens as will do.

    Each tool is shown as a call of it with its arguments left open. A filled-in example would be clearer to a
    reader, but a tiny model then makes the example's call, whatever it is asked.
    """
    think = " First think in one or two sentences between <think> and </think>." if thinking else ""
    lines = [f"You use a computer.{think} Then call one tool, or answer in plain words.", "", "Tools:"]
    for tool in tools:
        properties = offered_schema(tool, optional=optional).get("properties") or {}
        open_call = json.dumps({name: _left_open(schema) for name, schema in properties.items()})
        lines.append(f"{_first_sentence(tool.description)}:")
        lines.append(_call_body(tool.name, open_call))
    return "\n".join(lines)


def as_plain_messages(
    request: Request, *, thinking: bool, room: Room, optional: bool = False
) -> list[Message]:
    """The conversation of `request` as a template without tools can show it.

    `optional` is whether optional arguments of tools are told.
    Tools are told even where none may be called: the turns of a conversation then begin alike, and what the
    server has computed of one serves the next.
    """
    system = "\n\n".join(m.content for m in request.messages if m.role == "system") or PLAIN_SYSTEM
    if request.tools:
        system += "\n\n" + tool_instructions(request.tools, thinking=thinking, optional=optional)
    turns = [m for m in request.messages if m.role != "system"]
    last_answer = max((n for n, m in enumerate(turns) if m.role == "assistant"), default=-1)
    plain = [Message("system", _defused(system))]
    observations: list[str] = []

    def put_observations() -> None:
        if observations:
            plain.append(Message("user", "\n".join(observations)))
            observations.clear()

    for number, turn in enumerate(turns):
        if turn.role == "tool":
            limit = room.latest if number > last_answer else room.earlier
            text = shortened(_defused(turn.content), limit)
            observations.append(f"<tool_response>\n{text}\n</tool_response>")
            continue
        put_observations()
        text = written_turn(turn) if turn.role == "assistant" else turn.content
        plain.append(Message(turn.role, _defused(text)))
    put_observations()
    return plain


def read_turn(text: str, *, call_id: str) -> Turn:
    """Take the text of one turn apart. A call that was cut off before its arguments ended stays text."""
    reasoning, rest = split_reasoning(text)
    content, opened, call = rest.partition(CALL_OPEN.strip())
    if not opened:
        return Turn(reasoning, content.strip())
    call = call.lstrip()
    try:
        # A closing tag inside an argument is part of the argument, so the JSON decides where the call ends.
        written, _ = _JSON.raw_decode(call)
        name = written["name"]
        start = call.index(_ARGUMENTS, len(json.dumps(name, ensure_ascii=False))) + len(_ARGUMENTS)
        _, end = _JSON.raw_decode(call, start)
    except (ValueError, KeyError, TypeError):
        return Turn(reasoning, rest.strip())
    return Turn(reasoning, content.strip(), (ToolCall(call_id, name, call[start:end]),))


def written_turn(turn: Message) -> str:
    """An assistant turn as the model wrote it, or would have."""
    parts = [THINK_OPEN + turn.reasoning.strip() + THINK_CLOSE] if turn.reasoning else []
    said = [turn.content.strip()] if turn.content.strip() else []
    said += [written_call(call.name, call.arguments) for call in turn.tool_calls]
    return "".join(parts) + "\n".join(said)


def written_call(name: str, arguments: str) -> str:
    """A tool call as text; `arguments` is JSON already."""
    return f"{CALL_OPEN}{_call_body(name, arguments)}{CALL_CLOSE}"


def _call_body(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}'


def shortened(text: str, limit: int) -> str:
    """`text` in at most about `limit` characters: its beginning and its end, and how much is missing between."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[{len(text) - head - tail} characters left out]\n{text[len(text) - tail :]}"


def _defused(text: str) -> str:
    # The server reads control tokens (<|im_end|>) out of text too; what a tool printed must not end its own turn.
    # And it refuses a request with an unpaired surrogate in it.
    text = text.replace("<|", "< |") if "<|" in text else text
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _first_sentence(text: str) -> str:
    line = text.strip().split("\n", 1)[0]
    return line.split(". ", 1)[0].rstrip(".")


def _left_open(schema: Any) -> Any:
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    return choices[0] if choices else "..."
