"""A trace as the row of a shard, and which stored rows may go into a merged file.

All rows have the same keys in the same order, and a value has the same type in every row, so that readers
which infer a schema (Arrow, `datasets`) find one. Two things follow: tool counts name every known tool, called
or not; and whatever has no fixed shape (the input's other fields, invented tool names) is a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from taskmill.programs.sharegpt import from_sharegpt, to_sharegpt
from taskmill.records import ToolEvent, Trace, Usage

NOT_JSON = "not_json"
UNKNOWN_TOOL = "unknown_tool"

_NONE = "[]"


def trajectory_row(
    trace: Trace,
    *,
    prompt_index: int,
    batch_num: int,
    known_tools: Collection[str],
    timestamp: str,
    task_key: str = "",
    task_detail: str = "",
    row: str = "{}",
    **also: Any,
) -> dict[str, Any]:
    """The row that stands for `trace` in a shard.

    `timestamp` is the moment of recording. `task_key` and `task_detail` are hashes of the task as hex. `row` is
    what else the input row held, as the text of a JSON object. `also` is added at the end: give it the same keys
    and types in every row.
    """
    events = trace.tool_events
    stats = tool_stats(events, known_tools)
    failed = {event.name for event in events if not event.success and event.name in stats}
    invented = unknown_tools(events, known_tools)
    cost = trace.cost
    return {
        "prompt_index": prompt_index,
        "conversations": to_sharegpt(trace.messages, trace.tools),
        "metadata": {"batch_num": batch_num, "timestamp": timestamp, "model": trace.model},
        "completed": trace.state == "completed",
        "partial": trace.state == "partial",
        "api_calls": len(trace.calls),
        "toolsets_used": list(trace.toolsets),
        "tool_stats": stats,
        "tool_error_counts": dict.fromkeys(stats, 0) | {name: stats[name]["failure"] for name in failed},
        "unknown_tools": json.dumps(invented, ensure_ascii=False) if invented else _NONE,
        "rollout_id": trace.id,
        "task_key": task_key,
        "task_detail": task_detail,
        "stop_reason": trace.stop_reason,
        "truncated": trace.truncated,
        "reasoning": reasoning_counts(trace),
        "usage": usage_fields(trace.usage),
        "cost": None if cost is None else float(cost),
        "timing": timing_fields(trace),
        "started_at": trace.started_at,
        "notes": "\n".join(trace.notes),
        "row": row,
        **also,
    }


def tool_stats(events: Iterable[ToolEvent], known_tools: Collection[str]) -> dict[str, dict[str, int]]:
    """Calls, successes and failures of every known tool, sorted by name; invented names are not among them.

    The counts of tools that were not called are shared by all callers, so none of them is to be changed.
    """
    stats = dict(_no_calls(tuple(known_tools)))
    for event in events:
        counts = stats.get(event.name)
        if counts is not None:
            ended = "success" if event.success else "failure"
            stats[event.name] = {**counts, "count": counts["count"] + 1, ended: counts[ended] + 1}
    return stats


@lru_cache(maxsize=64)
def _no_calls(known_tools: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {name: {"count": 0, "success": 0, "failure": 0} for name in sorted(known_tools)}


def unknown_tools(events: Iterable[ToolEvent], known_tools: Collection[str]) -> list[str]:
    """The names that were called and that no tool of the product has, each once, sorted."""
    invented = {event.name for event in events if event.name not in known_tools}
    return sorted(invented) if invented else []


def reasoning_counts(trace: Trace) -> dict[str, int]:
    """Assistant turns, with and without reasoning that is not blank."""
    turns = thought = 0
    for message in trace.messages:
        if message.role == "assistant":
            turns += 1
            if message.reasoning and message.reasoning.strip():
                thought += 1
    return {"assistant_turns": turns, "with_reasoning": thought, "without_reasoning": turns - thought}


def usage_fields(usage: Usage) -> dict[str, int]:
    """Tokens with every field there, zero or not."""
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


def timing_fields(trace: Trace) -> dict[str, float]:
    """Seconds, to the microsecond, every field there."""
    timing = trace.timing
    return {
        "total": round(float(timing.total), 6),
        "model": round(float(timing.model), 6),
        "tools": round(float(timing.tools), 6),
        "waiting": round(float(timing.waiting), 6),
    }


class Turn(Struct):
    """One entry of a stored conversation."""

    said_by: str = msgspec.field(name="from")
    value: str


class RowHead(Struct):
    """What decides whether a stored row is usable, and whose it is. One made elsewhere may have nothing but the turns.

    Other fields are checked for syntax and passed over.
    """

    conversations: list[Turn]
    unknown_tools: str | None = None
    rollout_id: str = ""
    task_key: str = ""
    task_detail: str = ""
    completed: bool = False
    partial: bool = False


_read_head = msgspec.json.Decoder(RowHead).decode
_read_names = msgspec.json.Decoder(list[str]).decode
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)


def row_head(line: bytes) -> RowHead | None:
    """The head of a stored row; `None` for what is no row, be it JSON or not.

    A resume goes by it as the merge does, so that what is left out as no row is run again, and nothing else is.
    """
    try:
        head = _read_head(line)
        _names_in(head)
    except _UNREADABLE:
        return None
    return head


def row_fault(line: bytes, known_tools: Collection[str]) -> str | None:
    """Why a stored row may not stand in a merged or exported file: `not_json`, `unknown_tool`, or `None`.

    `not_json` covers what is JSON but no row. Which names are unknown stands in the row; for a row without
    that field the calls of the conversation are looked at.
    """
    try:
        head = _read_head(line)
    except _UNREADABLE:
        return NOT_JSON
    return head_fault(head, known_tools)


class _Said(Protocol):
    conversations: list[Turn]
    unknown_tools: str | None


def head_fault(head: _Said, known_tools: Collection[str]) -> str | None:
    """The `row_fault` of a row that was read as a `RowHead`, or with the fields of one."""
    try:
        names = _names_in(head)
    except _UNREADABLE:
        return NOT_JSON
    unknown = names if head.unknown_tools is not None else names - set(known_tools)
    return UNKNOWN_TOOL if unknown else None


def _names_in(head: _Said) -> set[str]:
    """The names a row says are unknown, or, where it doesn't say, all that are called."""
    if head.unknown_tools == _NONE:
        return set()
    if head.unknown_tools is not None:
        return set(_read_names(head.unknown_tools))
    said = from_sharegpt([{"from": turn.said_by, "value": turn.value} for turn in head.conversations])
    return {call.name for message in said.messages for call in message.tool_calls}
