"""Messages in the chat format of the OpenAI API, as people hand them in and as trainers read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from taskmill.errors import ConfigurationError
from taskmill.records import Message, Role, ToolCall, ToolSpec

ROLES: tuple[Role, ...] = get_args(Role)


def to_chat(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as dicts; arguments stay the text the model wrote, reasoning stands under `reasoning_content`."""
    return [_to_dict(message) for message in messages]


def _to_dict(message: Message) -> dict[str, Any]:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    if message.reasoning_details:
        chat["reasoning_details"] = message.reasoning_details
    if message.tool_calls:
        chat["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        chat["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        chat["name"] = message.name
    return chat


def tools_to_chat(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Tools as the `tools` field of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": spec.name,
                "description": spec.description,
                "parameters": json.loads(bytes(spec.parameters) or b"{}"),
            },
        }
        for spec in tools
    ]


def from_chat(messages: Sequence[Mapping[str, Any] | Message], *, field: str) -> tuple[Message, ...]:
    """Messages from dicts of the chat format; a list of parts as content is joined, what is no text noted.

    Raises:
        ConfigurationError: naming `field`, the place in the list, and what would do.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ConfigurationError(f"{field} must be a list of messages, not {messages!r:.80}")
    return tuple(
        message if isinstance(message, Message) else _from_dict(message, f"{field}[{place}]")
        for place, message in enumerate(messages)
    )


def _from_dict(chat: Mapping[str, Any], where: str) -> Message:
    if not isinstance(chat, Mapping):
        raise ConfigurationError(f"{where} must be an object with 'role' and 'content', not {chat!r:.80}")
    said_by = "system" if chat.get("role") == "developer" else chat.get("role")
    role = next((known for known in ROLES if known == said_by), None)
    if role is None:
        raise ConfigurationError(f"{where}: role={said_by!r} must be one of {', '.join(ROLES)}")
    calls = [call for call in chat.get("tool_calls") or () if call is not None]
    name, answers = chat.get("name"), chat.get("tool_call_id")
    return Message(
        role,
        _content(chat.get("content"), where),
        reasoning=_text(chat.get("reasoning_content") or chat.get("reasoning"), f"{where}.reasoning_content"),
        reasoning_details=chat.get("reasoning_details") or None,
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)),
        tool_call_id=_text(answers, f"{where}.tool_call_id"),
        name=_text(name, f"{where}.name"),
    )


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(f"{where} must hold a 'function' with its 'name' and 'arguments'")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_text(call.get("id"), f"{where}.id") or "", function["name"], arguments)


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise ConfigurationError(f"{where}: content must be a text or a list of parts, not {content!r:.80}")
    return "".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"{where} must be a text or an object with a 'type', not {part!r:.80}")
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type') or 'part'}: not text]"


def _text(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ConfigurationError(f"{where} must be a text, not {value!r:.80}")
