"""From the text a model wrote as arguments to an object, mending only what leaves no doubt.

Models wrap arguments in a second layer of JSON, close them with a quote too many, or write Python instead of
JSON. Such text is mended and the mending is noted. Text that stops half-way is never completed: nobody knows
what the model would have said, and half a command may do harm.
"""

from __future__ import annotations

import json
import re
from typing import Any

from taskmill.errors import ToolArgumentsError

_JUNK = re.compile(r"(?:[\s\"'`}\])>;,.]|</?\w+>)*\Z")
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_SYNTAX = re.compile(r"[\s\"'`,:{}\[\]]+")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MENDABLE_LENGTH = 1_000_000


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def parse_arguments(text: str) -> tuple[dict[str, Any], str | None]:
    """The object `text` stands for, and what was mended to get it (`None`: nothing).

    Nothing at all, blank text and null are the empty object. Raises `ToolArgumentsError` with a reason that a
    model can act on.
    """
    text = text.strip()
    if not text:
        return {}, None
    value, note = _decode(text)
    if isinstance(value, str):
        inner = value.strip()
        value, inner_note = _decode(inner) if inner else (None, None)
        note = "; ".join(part for part in ("JSON inside a JSON string", note, inner_note) if part)
    if value is None:
        return {}, note
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", bool: "a boolean"}.get(type(value), "a number")
        raise ToolArgumentsError(
            f"The arguments must be one JSON object with the tool's arguments by name, not {kind}."
        )
    return value, note


def _decode(text: str) -> tuple[Any, str | None]:
    try:
        value, end = _STRICT.raw_decode(text)
    except (ValueError, RecursionError) as error:
        return _mend(text, error)
    if end == len(text):
        return value, None
    return value, _note_junk(text, end)


def _note_junk(text: str, end: int) -> str:
    junk = text[end:]
    if not _JUNK.match(junk):
        raise ToolArgumentsError(
            f"The arguments are not valid JSON: there is more text after the end of the first value, at "
            f"character {end}: {_shown(junk)}. Give exactly one JSON object."
        )
    return f"dropped {_shown(junk)} after the end"


def _mend(text: str, error: Exception) -> tuple[Any, str]:
    if isinstance(error, RecursionError):
        raise ToolArgumentsError("The arguments are nested too deeply.") from None
    if not isinstance(error, json.JSONDecodeError):
        # A constant or a number that JSON can't hold: there is nothing to mend it into.
        raise ToolArgumentsError(_reason(text, error)) from None
    fenced = _FENCE.match(text)
    if fenced:
        value, note = _decode(fenced[1].strip())
        return value, "code fence taken off" + (f"; {note}" if note else "")
    try:
        value, end = _LENIENT.raw_decode(text)
    except ValueError:
        pass
    else:
        note = "control characters in a text"
        return value, note if end == len(text) else f"{note}; {_note_junk(text, end)}"
    if text[0] == "{" and len(text) <= _MENDABLE_LENGTH and _is_closed(text):
        from json_repair import repair_json

        mended = repair_json(text, return_objects=True)
        if isinstance(mended, dict) and _words(text) == _words(json.dumps(mended, ensure_ascii=False)):
            return mended, "syntax mended"
    raise ToolArgumentsError(_reason(text, error)) from None


def _reason(text: str, error: Exception) -> str:
    if text[0] == "{" and not _is_closed(text):
        return (
            f"The arguments are not valid JSON: they stop before the object is closed, after "
            f"{len(text)} characters ({_shown(text[-40:])}). Give the whole object again."
        )
    where = ""
    if isinstance(error, json.JSONDecodeError):
        near = text[max(0, error.pos - 20) : error.pos + 20]
        where = f" at character {error.pos}, near {_shown(near)}"
    message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return f"The arguments are not valid JSON: {message}{where}. Give exactly one JSON object."


def _is_closed(text: str) -> bool:
    """Whether the text ends where its first bracket is closed, outside of any string."""
    stack: list[str] = []
    quote = ""
    skip = False
    for position, character in enumerate(text):
        if skip:
            skip = False
        elif quote:
            if character == "\\":
                skip = True
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "{[":
            stack.append("}" if character == "{" else "]")
        elif character in "}]":
            if not stack or stack.pop() != character:
                return False
            if not stack:
                return not text[position + 1 :].strip("\"'`;,. \n")
    return False


def _words(text: str) -> str:
    """What a text says without its punctuation: mending may change the one and never the other."""
    return "".join(_PYTHON_WORDS.get(word, word) for word in _SYNTAX.split(text) if word)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
