"""The chat-completions format, as pure functions: a request to bytes, an answer's bytes to a `Completion`.

Answers are read for what they mean. What servers in use were seen to do is taken: content that is null or a
list of parts, tool calls with null entries, without ids, with arguments as an object, usage under three
vendors' names. What isn't an answer raises `MalformedAnswerError`, or the error an endpoint put under status 200.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw, Struct

from taskmill.errors import MalformedAnswerError
from taskmill.models.base import Completion, Request
from taskmill.models.families import Echo, Family
from taskmill.models.mending import fitting, storable
from taskmill.models.reasoning import split_reasoning
from taskmill.models.refusals import refused
from taskmill.records import Message, ToolCall, ToolSpec, Usage

REASONING_ECHO = "reasoning of earlier turns"
"""Stands in `without` for the fields in which earlier reasoning goes back, whatever they are called."""

TOKEN_IDS = "return_token_ids"
"""The field by which servers that one runs oneself (vLLM) are asked for the ids of the answer's tokens."""

_encoder = msgspec.json.Encoder()

# -- requests -------------------------------------------------------------------------------------------------


def encode_request(
    request: Request,
    model: str,
    family: Family,
    without: frozenset[str] = frozenset(),
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The body that asks `model` for `request`, leaving out the optional fields named in `without`.

    With `tool_choice` "none" the tools are still sent: a conversation that holds tool calls is refused by some
    endpoints when no tools are declared, while all that know tools know this choice.
    """
    sampling = request.sampling
    echo = "no" if REASONING_ECHO in without else family.echo
    body: dict[str, Any] = {"model": model, "messages": [_message(m, echo) for m in request.messages]}
    if request.tools:
        body["tools"] = [_tool(spec) for spec in request.tools]
        if request.tool_choice == "none":
            body["tool_choice"] = "none"
    if sampling.temperature is not None:
        body["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        body["top_p"] = sampling.top_p
    if sampling.max_tokens is not None:
        field = family.limit_field
        if field in without:
            field = "max_tokens" if field == "max_completion_tokens" else "max_completion_tokens"
        body[field] = sampling.max_tokens
    if sampling.seed is not None and "seed" not in without:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = sampling.stop
    if sampling.logprobs:
        if "logprobs" not in without:
            body["logprobs"] = True
        if family.gives_token_ids and TOKEN_IDS not in without:
            body[TOKEN_IDS] = True
    if request.reasoning is not None:
        body.update(family.asks(request.reasoning, model, sampling.max_tokens))
    if request.provider and family.routes:
        body["provider"] = request.provider
    if extra:
        body.update(extra)
    return _encoded(body)


def _encoded(value: dict[str, Any]) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        # An unpaired surrogate has no bytes of its own, and servers refuse its escape. It goes out as it is stored.
        encoded: bytes = _encoder.encode(storable(value))
        return encoded


def _message(message: Message, echo: Echo) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id or ""
    if message.name is not None:
        wire["name"] = message.name
    if message.role == "assistant":
        if message.tool_calls:
            if not message.content:
                wire["content"] = None
            wire["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if echo == "details" and message.reasoning_details:
            wire["reasoning_details"] = message.reasoning_details
        elif echo == "details" and message.reasoning:
            wire["reasoning"] = message.reasoning
        elif echo == "content" and message.reasoning:
            wire["reasoning_content"] = message.reasoning
        elif echo == "calls" and message.tool_calls:
            wire["reasoning_content"] = message.reasoning or ""
    return wire


_KEPT_TOOLS = 1024
_tools: dict[int, tuple[ToolSpec, Raw]] = {}


def _tool(spec: ToolSpec) -> Raw:
    """The tool as it is sent, encoded once: every request of a run that offers it has the same object."""
    kept = _tools.get(id(spec))
    if kept is None or kept[0] is not spec:
        if len(_tools) >= _KEPT_TOOLS:
            _tools.clear()
        function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
        kept = _tools[id(spec)] = (spec, Raw(_encoded({"type": "function", "function": function})))
    return kept[1]


# -- answers --------------------------------------------------------------------------------------------------
# The usual shape is decoded straight into these; anything else is decoded freely and made to fit first.


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    id: str | None = None
    function: _Function | None = None
    # A few servers leave the nesting out.
    name: str | None = None
    arguments: str | None = None


class _Said(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None
    tool_calls: list[_Call | None] | None = None
    function_call: _Function | None = None
    refusal: str | None = None


class _TokenLogprob(Struct):
    logprob: float | None = None


class _Logprobs(Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(Struct):
    message: _Said | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    error: Any = None


class _InputDetails(Struct):
    cached_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None


class _Answer(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    model: str | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


def decode_answer(raw: bytes, *, model: str = "", seconds: float = 0.0) -> Completion:
    """Read a body that came with a good status. What had to be mended on the way stands in `notes`.

    Every tool call has an id that is its own within the answer. `model` is who was asked, for answers that don't
    say who gave them, and `seconds` how long they took.
    """
    answer = _read(raw)
    choices = answer.choices
    if answer.error and not choices:
        raise refused(200, answer.error)
    if not choices:
        raise MalformedAnswerError("the endpoint answered without any choice: no message to read")
    choice = choices[0]
    if choice.error:
        raise refused(200, choice.error)
    if choice.finish_reason == "error":
        raise MalformedAnswerError("the endpoint broke off the answer with finish_reason 'error'")
    said = choice.message
    if said is None:
        raise MalformedAnswerError("the endpoint answered with a choice that holds no message")
    text = said.content or said.refusal or ""
    thought, text = split_reasoning(text)
    details = said.reasoning_details or None
    given = said.reasoning_content or said.reasoning or (_details_text(details) if details else None)
    reasoning = (
        given if thought is None or given == thought else f"{given}\n\n{thought}" if given else thought
    )
    notes: list[str] = []
    calls = _calls(said, raw, notes) if said.tool_calls or said.function_call else ()
    usage, counted = _usage(answer.usage) if answer.usage is not None else (Usage(), False)
    logprobs = choice.logprobs.content if choice.logprobs is not None else None
    return Completion(
        Message("assistant", text, reasoning=reasoning, reasoning_details=details, tool_calls=calls),
        usage=usage,
        finish_reason=_finish_reason(choice.finish_reason, bool(calls)),
        model=answer.model or model,
        cost=answer.usage.cost if answer.usage is not None else None,
        seconds=seconds,
        token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
        logprobs=None if logprobs is None else tuple(entry.logprob or 0.0 for entry in logprobs),
        notes=tuple(notes),
        counted=counted,
    )


def _read(raw: bytes) -> _Answer:
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_freely(raw)


def _read_freely(raw: bytes) -> _Answer:
    try:
        # The standard library takes what strict decoders refuse: unpaired surrogates, NaN, a byte-order mark.
        loose = json.loads(raw.decode("utf-8-sig", errors="replace"))
        if isinstance(loose, dict):
            return msgspec.convert(storable(fitting(loose)), _Answer)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        what = "an empty body" if not raw.strip() else "something that is not JSON (cut off, or no JSON API)"
    else:
        what = f"a JSON {type(loose).__name__}, not an object"
    raise MalformedAnswerError(f"the endpoint answered with {what}")


def read_error(text: str) -> Any:
    """The body of a refusal: its JSON, or its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_FINISHES = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "content_filter": "content_filter",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "refusal": "content_filter",
    "safety": "content_filter",
}


def _finish_reason(said: str | None, calls: bool) -> str:
    reason = _FINISHES.get((said or "stop").lower(), "stop")
    if reason in ("stop", "tool_calls"):
        # Some servers say "stop" beside tool calls, or "tool_calls" beside none; the calls decide.
        return "tool_calls" if calls else "stop"
    return reason


def _calls(said: _Said, raw: bytes, notes: list[str]) -> tuple[ToolCall, ...]:
    entries = list(said.tool_calls or ())
    if said.function_call is not None and not entries:
        entries.append(_Call(None, said.function_call))
    taken: set[str] = set()
    calls: list[ToolCall] = []
    for number, entry in enumerate(entries):
        function = entry and (
            entry.function or (_Function(entry.name, entry.arguments) if entry.name else None)
        )
        if entry is None or function is None:
            notes.append(f"entry {number} of tool_calls is null or names no function: skipped")
            continue
        call_id = entry.id
        if not call_id or call_id in taken:
            # Made from the answer, not drawn at random: the same answer read twice has the same ids.
            call_id = f"call_{blake2b(raw, digest_size=6).hexdigest()}_{number}"
            notes.append(
                f"entry {number} of tool_calls had {'no id' if not entry.id else 'an id used before'}"
            )
        taken.add(call_id)
        arguments = "{}" if function.arguments is None else function.arguments
        calls.append(ToolCall(call_id, function.name or "", arguments))
    return tuple(calls)


MOST_TOKENS = 10**9
"""More than any call has: a larger number is a mistake of the endpoint."""


def _usage(wire: _Usage) -> tuple[Usage, bool]:
    """The tokens, and whether they are a count of both what was sent and what was received."""
    sent = wire.prompt_tokens
    cached = wire.prompt_tokens_details.cached_tokens if wire.prompt_tokens_details is not None else None
    if sent is None and wire.input_tokens is not None:
        sent = wire.input_tokens
        if wire.input_tokens_details is not None:
            cached = wire.input_tokens_details.cached_tokens
        elif wire.cache_read_input_tokens is not None or wire.cache_creation_input_tokens is not None:
            # Anthropic's names: input_tokens there leaves out what came from, or went into, the cache.
            cached = wire.cache_read_input_tokens or 0
            sent += cached + (wire.cache_creation_input_tokens or 0)
    if cached is None:
        cached = wire.prompt_cache_hit_tokens or wire.cache_read_input_tokens
    received = wire.completion_tokens if wire.completion_tokens is not None else wire.output_tokens
    details = wire.completion_tokens_details or wire.output_tokens_details
    thought = details.reasoning_tokens if details is not None else wire.reasoning_tokens
    counted = sent is not None and received is not None
    sent, received, cached, thought = sent or 0, received or 0, cached or 0, thought or 0
    if min(sent, received, cached, thought) < 0 or max(sent, received, cached, thought) > MOST_TOKENS:
        return Usage(), False  # no count of anything that was said
    return Usage(sent, received, min(cached, sent), thought), counted


def _details_text(details: list[Any]) -> str | None:
    """What can be read in `reasoning_details`: texts and summaries; encrypted entries have none."""
    texts = [
        text
        for entry in details
        if isinstance(entry, dict) and isinstance(text := entry.get("text") or entry.get("summary"), str)
    ]
    return "\n".join(texts) or None
