"""A trace as the row of a shard, and which stored rows may go into a merged file.

All rows have the same keys in the same order, and a value has the same type in every row, so that readers
which infer a schema (Arrow, `datasets`) find one. Two things follow: tool counts name every known tool, called
or not; and whatever has no fixed shape (the input's other fields, invented tool names) is a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from taskmill.programs.sharegpt import from_sharegpt, to_sharegpt
from taskmill.records import ToolEvent, Trace, Usage

NOT_JSON = "not_json"
UNKNOWN_TOOL = "unknown_tool"


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
    stats = tool_stats(trace.tool_events, known_tools)
    invented = unknown_tools(trace.tool_events, known_tools)
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
        "tool_error_counts": {name: counts["failure"] for name, counts in stats.items()},
        "unknown_tools": json.dumps(invented, ensure_ascii=False) if invented else "[]",
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
    """Calls, successes and failures of every known tool, sorted by name; invented names are not among them."""
    stats = {name: {"count": 0, "success": 0, "failure": 0} for name in sorted(known_tools)}
    for event in events:
        counts = stats.get(event.name)
        if counts is not None:
            counts["count"] += 1
            counts["success" if event.success else "failure"] += 1
    return stats


def unknown_tools(events: Iterable[ToolEvent], known_tools: Collection[str]) -> list[str]:
    """The names that were called and that no tool of the product has, each once, sorted."""
    return sorted({event.name for event in events if event.name not in known_tools})


def reasoning_counts(trace: Trace) -> dict[str, int]:
    """Assistant turns, with and without reasoning that is not blank."""
    turns = [message for message in trace.messages if message.role == "assistant"]
    thought = sum(1 for turn in turns if turn.reasoning and turn.reasoning.strip())
    return {
        "assistant_turns": len(turns),
        "with_reasoning": thought,
        "without_reasoning": len(turns) - thought,
    }


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


class _RowHead(Struct):
    """What decides whether a row is usable. Other fields are checked for syntax and passed over."""

    conversations: list[dict[str, Any]]
    unknown_tools: str | None = None


_read_head = msgspec.json.Decoder(_RowHead).decode


def row_fault(line: bytes, known_tools: Collection[str]) -> str | None:
    """Why a stored row may not stand in a merged or exported file: `not_json`, `unknown_tool`, or `None`.

    `not_json` covers what is JSON but no row. Which names are unknown stands in the row; for a row without
    that field the calls of the conversation are looked at.
    """
    try:
        head = _read_head(line)
        if head.unknown_tools is not None:
            return UNKNOWN_TOOL if msgspec.json.decode(head.unknown_tools, type=list[str]) else None
        said = from_sharegpt(head.conversations).messages
    except (ValueError, TypeError, KeyError, RecursionError):
        return NOT_JSON
    called = {call.name for message in said for call in message.tool_calls}
    return None if called <= set(known_tools) else UNKNOWN_TOOL
