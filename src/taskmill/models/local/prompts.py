"""From a conversation to a prompt, and from the text of a turn back: what the families' chat templates take.

A template is code that came with the model, and says what it can do only by doing it. So it is tried on a few small
conversations when the model is loaded: whether it shows a system turn, takes two turns of one role in a row, begins
with the assistant, shows tools. What it does not take is brought into a form that it does, with nothing left out: a
system turn goes to the beginning of the first user turn, turns of one role are merged, tools are told and called in
plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taskmill.errors import BadRequestError, ModelError
from taskmill.models.base import Reasoning, Request
from taskmill.models.plainchat import Room, Turn, as_plain_messages, read_turn
from taskmill.models.reasoning import split_reasoning
from taskmill.records import Message, ToolCall, ToolSpec

BEGINNING = "(The conversation begins.)"
"""Said as the user where a family demands one, and the conversation begins with the assistant's own turn."""

WHOLE = Room(1 << 30, 1 << 30)
"""Observations are shown as they are: what does not fit is an error of its own."""

_PROBE = "Zebra7"
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Prompt(NamedTuple):
    """`tokens` for the model. `opened`: the prompt ends inside a think block."""

    tokens: tuple[int, ...]
    opened: bool


class Template:
    """The chat template of `tokenizer`, and what it was found to take."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"the model {path!r} has no chat template, so nobody knows how to talk to it: take its "
                "instruction-tuned version, or put a `chat_template.jinja` into its folder"
            )
        self.system = _PROBE in (self._tried([{"role": "system", "content": _PROBE}, user]) or "")
        self.only_system = bool(self._tried([{"role": "system", "content": "a"}]))
        self.repeats = bool(self._tried([user, user])) and bool(self._tried([user, answer, answer]))
        self.begins_with_answer = bool(self._tried([answer, user]))
        self.tools = self._shows_tools(user)
        source = tokenizer.chat_template
        self._echoes_reasoning = "reasoning_content" in (source if isinstance(source, str) else str(source))
        self.turn_ends = self._turn_ends(user)
        self._specials = sorted(
            {text for text in tokenizer.all_special_tokens if len(text) > 1}, key=len, reverse=True
        )

    def prompt(self, request: Request) -> Prompt:
        """The tokens that ask for the next turn of `request`.

        Raises:
            BadRequestError: when there is nothing to answer, or the template refuses the conversation.
        """
        messages, tools = self._fitting(request)
        given: dict[str, Any] = {"tools": tools} if tools else {}
        if request.reasoning is not None:
            given["enable_thinking"] = thinks(request.reasoning)
        try:
            text = self._shown(messages, **given)
        except Exception as problem:
            raise BadRequestError(
                f"the chat template of {self._path!r} refuses this conversation: {problem}"
            ) from problem
        opened = text.rstrip().endswith("<think>")
        return Prompt(tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]), opened)

    def turn(self, text: str, request: Request, *, opened: bool, call_id: str) -> Turn:
        """Take the text of an answer apart: thinking, words, tool calls."""
        reasoning, rest = split_reasoning("<think>" + text if opened else text)
        if not request.tools or request.tool_choice == "none":
            return Turn(reasoning, rest)
        if not self.tools:
            turn = read_turn(rest, call_id=f"{call_id}_0")
            return Turn(reasoning, turn.content if turn.calls else rest, turn.calls)
        content, calls = read_calls(rest, call_id=call_id)
        return Turn(reasoning, content, calls)

    # -- making it fit ----------------------------------------------------------------------------------------

    def _fitting(self, request: Request) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        told = bool(request.tools) or any(m.role == "tool" or m.tool_calls for m in request.messages)
        if not request.messages:
            raise BadRequestError("a request without messages: there is nothing to answer")
        if told and not self.tools:
            thinking = request.reasoning is not None and thinks(request.reasoning)
            plain = as_plain_messages(request, thinking=thinking, room=WHOLE, optional=True)
            return self._ordered([self._plain(message) for message in plain]), []
        tools = [_tool(spec) for spec in request.tools] if request.tool_choice != "none" else []
        return self._ordered([self._plain(message) for message in request.messages]), tools

    def _plain(self, message: Message) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": message.role, "content": self._defused(message.content)}
        if message.role == "assistant":
            if message.reasoning and self._echoes_reasoning:
                shown["reasoning_content"] = self._defused(message.reasoning)
            elif message.reasoning:
                thought = self._defused(message.reasoning.strip())
                shown["content"] = f"<think>\n{thought}\n</think>\n\n{shown['content']}"
            if message.tool_calls:
                shown["tool_calls"] = [
                    {
                        "type": "function",
                        "id": call.id,
                        "function": {"name": call.name, "arguments": _arguments(call)},
                    }
                    for call in message.tool_calls
                ]
        if message.role == "tool":
            shown["tool_call_id"] = message.tool_call_id or ""
            shown["name"] = message.name or ""
        return shown

    def _ordered(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in an order, and of roles, that this template takes."""
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        turns = [m for m in messages if m["role"] != "system"]
        as_user = bool(system) and (not self.system or (not turns and not self.only_system))
        if as_user:
            if turns and turns[0]["role"] == "user":
                turns[0] = {**turns[0], "content": _joined(system, turns[0]["content"])}
            else:
                turns.insert(0, {"role": "user", "content": system})
        if turns and turns[0]["role"] == "assistant" and not self.begins_with_answer:
            turns.insert(0, {"role": "user", "content": BEGINNING})
        if not self.repeats:
            turns = _merged(turns)
        return [{"role": "system", "content": system}, *turns] if system and not as_user else turns

    def _defused(self, text: str) -> str:
        # What somebody said must not end his turn and begin another's, so control tokens in it become plain text.
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text if text.isascii() else text.encode("utf-8", "replace").decode()

    # -- finding out ------------------------------------------------------------------------------------------

    def _shown(self, messages: Sequence[Mapping[str, Any]], *, asking: bool = True, **given: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=asking, **given
        )
        return text

    def _tried(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str | None:
        try:
            return self._shown(messages, **given)
        except Exception:  # a template may fail in any way that code can
            return None

    def _shows_tools(self, user: Mapping[str, Any]) -> bool:
        if _PROBE not in (self._tried([user], tools=[_TOOL]) or ""):
            return False
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
        turns = [
            user,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "call00000"},
        ]
        return _PROBE in (self._tried(turns) or "")

    def _turn_ends(self, user: Mapping[str, Any]) -> frozenset[int]:
        """The control token that this template puts after an assistant's turn, if there is one."""
        try:
            text = self._shown([user, {"role": "assistant", "content": _PROBE}], asking=False)
        except Exception:  # as above
            return frozenset()
        after = text.rpartition(_PROBE)[2].lstrip()
        following = self._tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        return frozenset(set(following) & set(self._tokenizer.all_special_ids))


def thinks(reasoning: Reasoning) -> bool:
    """Whether the model is to think before it answers."""
    return reasoning.enabled and reasoning.effort != "none"


def _merged(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for turn in turns:
        last = merged[-1] if merged else None
        mergeable = (
            last is not None and last["role"] == turn["role"] and turn["role"] in ("user", "assistant")
        )
        if last is None or not mergeable or "tool_calls" in last:
            merged.append(turn)
        else:
            merged[-1] = {**last, **turn, "content": _joined(last["content"], turn["content"])}
    return merged


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _tool(spec: ToolSpec) -> dict[str, Any]:
    parameters = json.loads(bytes(spec.parameters))
    return {
        "type": "function",
        "function": {"name": spec.name, "description": spec.description, "parameters": parameters},
    }


def _arguments(call: ToolCall) -> Any:
    # Templates walk through an object's entries, and what a model once wrote may be none.
    try:
        written = json.loads(call.arguments)
    except ValueError:
        written = None
    return written if isinstance(written, dict) else {"arguments": call.arguments}


# -- calls in the formats of the families ----------------------------------------------------------------------

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_CONTROL = re.compile(r"<\|(?:eom_id|eot_id|im_end|end|endoftext)\|>\s*\Z")


def read_calls(text: str, *, call_id: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Tool calls in `text`, and the words around them.

    Known are the `<tool_call>` tags of Hermes, Qwen and others, the list after Mistral's `[TOOL_CALLS]`, and Llama's
    bare JSON. What looks like a call and can't be read stays text.
    """
    stripped = _CONTROL.sub("", text).strip()
    if "<tool_call>" in text:
        found = [(match, _objects(match[1])) for match in _TAGGED.finditer(text)]
        if found and all(entries for _, entries in found):
            words = _TAGGED.sub("", text).strip()
            return words, _calls([entry for _, entries in found for entry in entries], call_id)
    if _MISTRAL in text:
        words, _, listed = text.partition(_MISTRAL)
        if entries := _objects(listed.strip()):
            return words.strip(), _calls(entries, call_id)
    if stripped.startswith((_PYTHON_TAG, "{")) and (entries := _objects(stripped.removeprefix(_PYTHON_TAG))):
        return "", _calls(entries, call_id)
    return text, ()


def _objects(text: str) -> list[dict[str, Any]]:
    """The calls that all of `text` consists of: an object, a list of them, or several after each other."""
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            return []
        found += value if isinstance(value, list) else [value]
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
    named = all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in found)
    return found if named else []


def _calls(entries: Sequence[Mapping[str, Any]], call_id: str) -> tuple[ToolCall, ...]:
    calls = []
    for number, entry in enumerate(entries):
        arguments = entry.get("arguments", entry.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(f"{call_id}_{number}", entry["name"], written))
    return tuple(calls)
