"""Answers of unusual shape, brought into the usual one: what servers in use were seen to send.

Only what the usual decoding does not take comes here, so none of this has to be fast.
"""

from __future__ import annotations

import json
from typing import Any

from taskmill.store.jsonl import without_surrogates


def storable(value: Any) -> Any:
    """`value` with unpaired surrogates spelled out as the store spells them: no strict reader takes them."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def fitting(loose: dict[str, Any]) -> dict[str, Any]:
    """An answer of unusual shape, brought into the usual one; what can't be made sense of is left out."""
    choices = loose.get("choices")
    return {
        "choices": [_fit_choice(c) for c in choices if isinstance(c, dict)]
        if isinstance(choices, list)
        else None,
        "usage": _fit_usage(loose.get("usage")),
        "model": _text(loose.get("model")),
        "error": loose.get("error"),
    }


def _fit_choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    token_ids = choice.get("token_ids")
    whole = isinstance(token_ids, list) and all(type(i) is int for i in token_ids)
    return {
        "message": _fit_message(message) if isinstance(message, dict) else None,
        "finish_reason": _text(choice.get("finish_reason")),
        "token_ids": token_ids if whole else None,
        "error": choice.get("error"),
    }


def _fit_message(message: dict[str, Any]) -> dict[str, Any]:
    spoken, thought = _parts(message.get("content"))
    calls = message.get("tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls
    details = message.get("reasoning_details")
    function_call = message.get("function_call")
    return {
        "content": spoken,
        "reasoning_content": _parts(message.get("reasoning_content"))[0] or thought,
        "reasoning": _parts(message.get("reasoning"))[0],
        "reasoning_details": details if isinstance(details, list) else None,
        "tool_calls": [_fit_call(c) for c in calls] if isinstance(calls, list) else None,
        "function_call": _fit_function(function_call) if isinstance(function_call, dict) else None,
        "refusal": _text(message.get("refusal")),
    }


def _parts(content: Any) -> tuple[str | None, str | None]:
    """Text and thinking of a content that may be a list of parts. A part that is not text leaves a word behind."""
    if content is None or isinstance(content, str):
        return content, None
    spoken: list[str] = []
    thought: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            spoken.append(part)
        elif not isinstance(part, dict):
            continue
        elif isinstance(thinking := part.get("thinking") or part.get("reasoning"), (str, list)):
            thought.append(_parts(thinking)[0] or "")
        elif isinstance(text := part.get("text") or part.get("content") or part.get("refusal"), str):
            spoken.append(text)
        elif "text" not in part:
            spoken.append(f"[{part.get('type') or 'part'}: not text]")
    return "".join(spoken) or None, "".join(thought) or None


def _fit_call(entry: Any) -> dict[str, Any] | None:
    if not isinstance(entry, dict):
        return None
    function = entry.get("function")
    if not isinstance(function, dict):
        function = entry if "name" in entry else None
    return {
        "id": _text(entry.get("id")),
        "function": None if function is None else _fit_function(function),
    }


def _fit_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": _text(function.get("name")), "arguments": arguments}


def _fit_usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    fitted: dict[str, Any] = {}
    for name, value in usage.items():
        if name == "cost":
            fitted[name] = value if _is_number(value) else None
        elif not name.endswith("_details"):
            fitted[name] = _count(value)
        elif isinstance(value, dict):
            fitted[name] = {detail: _count(count) for detail, count in value.items()}
    return fitted


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0


def _count(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return max(0, int(value)) if _is_number(value) else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)
